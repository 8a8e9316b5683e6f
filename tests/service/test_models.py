"""Models beside each other, in one process without HTTP: taken, replaced, refused, closed."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from model import registry
from model.bundle import MANIFEST, open_bundle
from model.config import UNK
from model.registry import resolve
from service import models as models_module
from service.context import unhurried
from service.errors import BundleRefused, ChangeUnderWay, DeadlinePassed, InvalidRequest, NoRegistry, PreconditionFailed
from service.lifecycle import Life
from service.models import Active, Models, place
from service.schemas import EventIn, RecommendationRequest
from service.settings import Settings
from service.states.interface import Subject
from service.telemetry import Metrics
from tests.service.bundles import ITEM_IDS, NUM_ITEMS, variant
from tests.service.registries import add_smaller, add_version, copied, publish_version, republish

pytestmark = pytest.mark.anyio

T0 = 1_764_424_800
PATIENT_S = 60.0


@asynccontextmanager
async def alive(bundle: Path, **settings: Any) -> AsyncIterator[Life]:
    life = Life(Settings(bundle=bundle, threads=1, registry_poll_s=0, max_batch_rows=2, **settings), Metrics())
    async with life.open():
        yield life


async def put(models: Models, default: str, canary: str | None = None, percent: float = 0.0) -> None:
    await models.put(default, canary, percent, models.active.etag, unhurried("put", PATIENT_S))


async def recommended(life: Life, **asked: Any) -> Any:
    request = RecommendationRequest.model_validate(asked)
    with life.models.taken(request.subject) as (model, ab_group):
        return await model.recommender.recommend(request, unhurried("ask", PATIENT_S), ab_group)


async def append(life: Life, *events: dict[str, Any]) -> None:
    with life.models.taken() as (model, _):
        sent = [EventIn.model_validate(event) for event in events]
        results = await model.ingest.append(sent, None, unhurried("append", PATIENT_S))
    assert [result.status for result in results] == ["accepted"] * len(events)


def value(life: Life, metric: str, **labels: str) -> float | None:
    return life.metrics.registry.get_sample_value(metric, labels)


# ---- taking and letting go -------------------------------------------------------------------------------


async def test_a_replaced_model_is_kept_to_the_end_of_its_last_request_and_then_its_memory_is_free(
    tiny: Path, tmp_path: Path
) -> None:
    folder = copied(tiny, tmp_path / "registry")
    second = add_version(tiny, folder, "second")
    async with alive(folder) as life:
        first = life.models.active.default.version
        with life.models.taken() as (model, _):
            await put(life.models, second)
            await asyncio.sleep(0)
            answer = await model.recommender.recommend(
                RecommendationRequest(user_id="u"), unhurried("ask", PATIENT_S), "default"
            )
            assert [retired.version for retired in life.models.retired] == [first]
            dies = [weakref.ref(model), weakref.ref(model.engine), weakref.ref(model.bundle.items)]
        del model
        gc.disable()  # nothing but the last reference is to free it
        try:
            async with asyncio.timeout(PATIENT_S):
                while any(dead() is not None for dead in dies):
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()

        assert answer.model.version == first
        assert life.models.retired == ()
        assert (await recommended(life, user_id="u")).model.version == second
        assert value(life, "bft_model_info", name="second", version=second) == 1
        assert value(life, "bft_model_info", name="tiny", version=first) is None


async def test_readiness_stays_green_and_proves_each_model_that_answers(tiny: Path, tmp_path: Path) -> None:
    folder = copied(tiny, tmp_path / "registry")
    second = add_version(tiny, folder, "second")
    async with alive(folder, ready_max_age_s=600) as life:
        await life.check_ready()
        await put(life.models, "current", second, 50)
        await life.check_ready()
        assert all(model.engine.last_success is not None for model in life.models.active.models)


async def test_a_bundle_that_is_no_registry_knows_no_other_version(tiny: Path) -> None:
    async with alive(resolve(tiny)) as life:
        assert not life.models.has_registry
        with pytest.raises(NoRegistry, match="one bundle"):
            await put(life.models, "previous")


# ---- the draw for a canary -------------------------------------------------------------------------------


class Named:
    """A model as far as the draw looks at it."""

    def __init__(self, version: str) -> None:
        self.version = version


def active(percent: float, canary: str = "b" * 16) -> Active:
    return Active(Named("a" * 16), Named(canary), percent)  # type: ignore[arg-type]


@pytest.mark.parametrize("percent", [0, 1, 10, 50, 100])
async def test_a_canary_gets_its_share_of_subjects(percent: float) -> None:
    number = 20_000
    subjects = [Subject("user", f"user-{index}") for index in range(number)]

    groups = [active(percent).choose(subject).ab_group for subject in subjects]

    share = percent / 100
    # Five standard deviations of a binomial share.
    assert abs(groups.count("canary") / number - share) <= 5 * np.sqrt(share * (1 - share) / number)


async def test_a_subject_stays_with_its_model_and_a_larger_canary_keeps_those_of_a_smaller() -> None:
    subjects = [Subject(kind, f"u-{index}") for index in range(2000) for kind in ("user", "session")]  # type: ignore[arg-type]

    def chosen(percent: float, canary: str = "b" * 16) -> set[Subject]:
        return {subject for subject in subjects if active(percent, canary).choose(subject).ab_group == "canary"}

    assert chosen(10) == chosen(10)
    assert chosen(10) < chosen(30)
    # Another canary is tried on others: two independent draws of 10 % share about 1 % of 4000.
    assert len(chosen(10) & chosen(10, "c" * 16)) < 100
    assert active(100).choose(None).ab_group == "default"


async def test_requests_go_to_the_group_of_their_subject_and_say_so(tiny: Path, tmp_path: Path) -> None:
    folder = copied(tiny, tmp_path / "registry")
    second = add_version(tiny, folder, "second")
    async with alive(folder) as life:
        first = life.models.active.default.version
        await put(life.models, "current", second, 40)
        answers = [await recommended(life, user_id=f"u{index}", num_results=1) for index in range(40)]
        told = await recommended(life, history=[{"item_id": ITEM_IDS[0]}], num_results=1)

        versions = {"default": first, "canary": second}
        assert {answer.ab_group for answer in answers} == {"default", "canary"}
        assert all(answer.model.version == versions[answer.ab_group] for answer in answers)
        assert (told.ab_group, told.model.version) == ("default", first)
        expected = [place(Subject("user", f"u{index}"), second) < 0.4 for index in range(40)]
        assert [answer.ab_group == "canary" for answer in answers] == expected


# ---- changes ---------------------------------------------------------------------------------------------


async def test_only_one_change_at_a_time_and_a_late_one_changes_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(tiny, tmp_path / "registry")
    second = add_version(tiny, folder, "second")
    go_on = threading.Event()
    load = models_module.load

    def slow(*arguments: Any, **options: Any) -> Any:
        assert go_on.wait(PATIENT_S)
        return load(*arguments, **options)

    async with alive(folder) as life:
        monkeypatch.setattr(models_module, "load", slow)
        first = life.models.active.default.version
        etag = life.models.active.etag
        with pytest.raises(DeadlinePassed, match="nothing has changed"):
            await life.models.put(second, None, 0, etag, unhurried("put", 0.05))
        assert life.models.loading == (second,)
        with pytest.raises(ChangeUnderWay):
            await put(life.models, second)
        republish(folder, second)
        await life.models.follow()  # waits for its turn
        assert (await recommended(life, user_id="u")).model.version == first
        go_on.set()
        while life.models.loading:
            await asyncio.sleep(0.01)
        assert life.models.active.etag == etag
        await life.models.follow()
        assert life.models.active.default.version == second


async def test_a_change_that_cannot_load_its_canary_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    folder = copied(tiny, tmp_path / "registry")
    second, broken = add_version(tiny, folder, "second"), add_version(tiny, folder, "broken")
    (folder / broken / "items.parquet").unlink()
    async with alive(folder) as life:
        etag = life.models.active.etag
        with pytest.raises(BundleRefused, match=rf"{broken}: items\.parquet is missing"):
            await put(life.models, second, broken, 10)

        assert life.models.active.etag == etag
        assert [refusal.version for refusal in life.models.refused] == [broken]


@pytest.mark.parametrize(
    ("default", "canary", "message"),
    [
        ("previous", None, "no previous bundle"),
        ("0" * 16, None, "default: there is no bundle 0000000000000000 in the registry"),
        ("current", "0" * 16, "canary: there is no bundle"),
    ],
)
async def test_a_version_that_is_not_there_is_named(tiny: Path, default: str, canary: str, message: str) -> None:
    async with alive(tiny) as life:
        with pytest.raises(InvalidRequest, match=message):
            await put(life.models, default, canary, 10)
        with pytest.raises(InvalidRequest, match="is the default too"):
            await put(life.models, "current", life.models.active.default.version, 10)
        with pytest.raises(PreconditionFailed):
            await life.models.put(default, None, 0, '"other"', unhurried("put", PATIENT_S))


async def test_a_canary_becomes_the_default_without_being_loaded_again(tiny: Path, tmp_path: Path) -> None:
    folder = copied(tiny, tmp_path / "registry")
    second = add_version(tiny, folder, "second")
    async with alive(folder) as life:
        await put(life.models, "current", second, 10)
        canary = life.models.active.canary
        registry.publish(folder, second)
        await life.models.follow()

        assert life.models.active.default is canary
        assert life.models.active.canary is None
        assert value(life, "bft_model_loads_total", result="loaded") == 1


# ---- the registry ----------------------------------------------------------------------------------------


async def test_a_call_holds_until_the_registry_changes_or_current_is_asked_for(tiny: Path, tmp_path: Path) -> None:
    folder = copied(tiny, tmp_path / "registry")
    async with alive(folder) as life:
        first = life.models.active.default.version
        second = publish_version(tiny, folder, "second")
        await life.models.follow()
        assert (life.models.active.default.version, life.models.active.pinned) == (second, False)

        await put(life.models, "previous")
        await life.models.follow()
        assert (life.models.active.default.version, life.models.active.pinned) == (first, True)

        await put(life.models, "current")
        assert (life.models.active.default.version, life.models.active.pinned) == (second, False)

        await put(life.models, first)
        third = publish_version(tiny, folder, "third")
        await life.models.follow()
        assert (life.models.active.default.version, life.models.active.pinned) == (third, False)


async def test_a_canary_outlives_a_new_current_bundle(tiny: Path, tmp_path: Path) -> None:
    folder = copied(tiny, tmp_path / "registry")
    second = add_version(tiny, folder, "second")
    async with alive(folder) as life:
        await put(life.models, "current", second, 25)
        third = publish_version(tiny, folder, "third")
        await life.models.follow()

        found = life.models.active
        assert (found.default.version, found.canary and found.canary.version, found.percent) == (third, second, 25)


async def test_a_refused_bundle_is_told_once_and_not_tried_again_until_the_registry_changes(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied(tiny, tmp_path / "registry")
    broken = add_version(tiny, folder, "broken")
    (folder / broken / "golden.npz").write_bytes(b"no golden cases")
    async with alive(folder) as life:
        first = life.models.active.default.version
        republish(folder, broken)
        for _ in range(3):
            await life.models.follow()

        assert life.models.active.default.version == first
        assert value(life, "bft_model_loads_total", result="refused") == 1
        assert [record.levelname for record in caplog.records if "was refused" in record.getMessage()] == ["ERROR"]
        (refusal,) = life.models.refused
        assert f"{folder / broken}: golden.npz does not match its checksum" in refusal.reason

        second = publish_version(tiny, folder, "second")
        await life.models.follow()
        assert life.models.active.default.version == second


async def test_an_unreadable_registry_is_told_once_and_the_models_stay(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied(tiny, tmp_path / "registry")
    async with alive(folder) as life:
        before = life.models.active
        whole = (folder / registry.REGISTRY).read_bytes()
        (folder / registry.REGISTRY).write_bytes(whole[:10])
        for _ in range(3):
            await life.models.follow()
        assert (await life.models.look()).problem is not None
        (folder / registry.REGISTRY).write_bytes(whole)
        await life.models.follow()

        assert life.models.active is before
        assert value(life, "bft_registry_poll_failures_total") == 3
        assert sum("cannot be read" in record.getMessage() for record in caplog.records) == 1


# ---- what fits -------------------------------------------------------------------------------------------


async def test_a_bundle_of_another_catalogue_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = copied(tiny, tmp_path / "registry")
    other = add_version(tiny, folder, "other", lineage="another-catalogue")
    async with alive(folder) as life:
        with pytest.raises(
            BundleRefused, match=rf"{other}: {MANIFEST} is of the catalogue lineage 'another-catalogue'"
        ):
            await put(life.models, other)


async def test_a_click_on_an_item_that_joins_the_catalogue_later_counts_from_then_on(
    tiny: Path, tmp_path: Path, valkey_url: str
) -> None:
    folder = copied(tiny, tmp_path / "registry")
    grown = life_version(folder)
    republish(folder, add_smaller(tiny, folder, "smaller", NUM_ITEMS - 3))
    newcomer = ITEM_IDS[-1]
    clicks = [
        {"user_id": "u", "item_id": item_id, "timestamp": T0 + place}
        for place, item_id in enumerate([ITEM_IDS[5], newcomer])
    ]
    async with alive(folder, redis_url=valkey_url, state_timeout_ms=5000) as life:
        await append(life, *clicks)
        before = await recommended(life, user_id="u")
        with life.models.taken() as (model, _):
            record, _ = await model.subjects.load(Subject("user", "u"))
            as_it_was = await model.subjects.history(record, model.catalogue.current)
        await put(life.models, grown)
        after = await recommended(life, user_id="u")
        told = await recommended(
            life, history=[{"item_id": click["item_id"], "timestamp": click["timestamp"]} for click in clicks]
        )
        await append(life, {"user_id": "u", "item_id": ITEM_IDS[-2], "timestamp": T0 + 9})
        # Back on the smaller catalogue, whose numbers end before the newcomers'.
        await put(life.models, "current")
        back = await recommended(life, user_id="u")

    assert as_it_was.items.tolist()[1] == UNK
    assert before.model.version != after.model.version == grown
    assert [item.item_id for item in after.items] == [item.item_id for item in told.items]
    assert newcomer not in [item.item_id for item in after.items]
    assert [item.item_id for item in after.items] != [item.item_id for item in before.items]
    assert (back.num_events, back.cold_start) == (3, False)


def life_version(folder: Path) -> str:
    index = registry.read_index(folder)
    assert index is not None
    return index.current


@pytest.mark.parametrize("in_redis", [True, False])
async def test_a_longer_window_is_kept_from_the_change_on_and_never_cut_again(
    tiny: Path, tmp_path: Path, valkey_url: str, in_redis: bool
) -> None:
    folder = copied(tiny, tmp_path / "registry")
    long = life_version(folder)  # of 8 events
    config = open_bundle(folder / long).manifest.model
    short = add_version(tiny, folder, "short", model=config.model_copy(update={"max_len": 4}))
    republish(folder, short)
    store: dict[str, Any] = {"redis_url": valkey_url, "state_timeout_ms": 5000} if in_redis else {}

    def views(start: int, end: int) -> list[dict[str, Any]]:
        return [{"user_id": "u", "item_id": ITEM_IDS[row], "timestamp": T0 + row} for row in range(start, end)]

    async def kept(life: Life) -> list[str | None]:
        with life.models.taken() as (model, _):
            user = await model.users.export("u", unhurried("export", PATIENT_S))
        return [event.item_id for event in user.events]

    async with alive(folder, **store) as life:
        await append(life, *views(0, 6))
        assert await kept(life) == ITEM_IDS[2:6]
        await put(life.models, long)
        await append(life, *views(6, 12))
        assert await kept(life) == ITEM_IDS[4:12]
        found = await recommended(life, user_id="u")
        told = await recommended(life, history=[{"item_id": it["item_id"]} for it in views(0, 12)])
        await put(life.models, "current")
        await append(life, *views(12, 13))
        assert await kept(life) == ITEM_IDS[5:13]
        shorter = await recommended(life, user_id="u")
        shorter_told = await recommended(life, history=[{"item_id": it["item_id"]} for it in views(0, 13)])

    assert [item.item_id for item in found.items] == [item.item_id for item in told.items]
    assert [item.item_id for item in shorter.items] == [item.item_id for item in shorter_told.items]


# ---- damage ----------------------------------------------------------------------------------------------

FILES = [
    "encoder.onnx",
    "step.onnx",
    "ranker.onnx",
    "explainer.onnx",
    "model.safetensors",
    "items.parquet",
    "new_items.npz",
    "calibration.json",
    "golden.npz",
    MANIFEST,
]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b"") and None,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-7]) and None,
    "a bit flipped": flip_a_bit,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0") and None,
    "of other bytes": lambda path: path.write_bytes(b"\x89garbage") and None,
}


async def test_each_damage_of_each_file_is_refused_by_name_while_the_old_model_answers(
    tiny: Path, tmp_path: Path
) -> None:
    folder = copied(tiny, tmp_path / "registry")
    async with alive(folder) as life:
        first = life.models.active.default.version
        expected = (await recommended(life, user_id="u")).items
        for file in FILES:
            for kind, damage in DAMAGES.items():
                version = add_version(tiny, folder, f"{file} {kind}")
                damage(folder / version / file)
                with pytest.raises((BundleRefused, InvalidRequest)) as refused:
                    await put(life.models, version)
                message = str(refused.value)
                assert str(folder) in message, message
                assert version in message, message
                # Without its manifest a folder is no bundle, and no version of the registry.
                assert file in message or (file, kind) == (MANIFEST, "missing"), message
                answer = await recommended(life, user_id="u")
                assert (answer.model.version, answer.items) == (first, expected)


def without_confidence(staging: Path) -> None:
    (staging / "calibration.json").write_text("{}")


def other_answers(staging: Path) -> None:
    with np.load(staging / "golden.npz") as arrays:
        changed = {name: array + 0.5 if name.endswith("out/score_mean") else array for name, array in arrays.items()}
    np.savez(staging / "golden.npz", **changed)


def other_weights(staging: Path) -> None:
    path = staging / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4096:] = bytes(4096)
    path.write_bytes(content)


def items_in_disorder(staging: Path) -> None:
    path = staging / "items.parquet"
    pl.read_parquet(path).reverse().write_parquet(path)


def no_graph(staging: Path) -> None:
    (staging / "encoder.onnx").write_bytes(b"no graph")


def another_graph(staging: Path) -> None:
    (staging / "step.onnx").write_bytes((staging / "ranker.onnx").read_bytes())


def short_weights(staging: Path) -> None:
    (staging / "model.safetensors").write_bytes(bytes(64))


@pytest.mark.parametrize(
    ("change", "file"),
    [
        (no_graph, "encoder.onnx"),
        (another_graph, "step.onnx"),
        (short_weights, "encoder.onnx"),
        (without_confidence, "calibration.json"),
        (other_answers, "golden.npz"),
        (other_weights, "golden.npz"),
        (items_in_disorder, "items.parquet"),
    ],
)
async def test_a_bundle_that_was_exported_wrong_is_refused_by_name(
    tiny: Path, tmp_path: Path, change: Callable[[Path], None], file: str
) -> None:
    folder = copied(tiny, tmp_path / "registry")
    version = variant(tiny, folder, change, name="wrong").name
    async with alive(folder) as life:
        before = life.models.active
        with pytest.raises(BundleRefused, match=f"{version}.*{file}"):
            await put(life.models, version)

        assert life.models.active is before
