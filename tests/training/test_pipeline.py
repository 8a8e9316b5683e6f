"""A whole run: which event is predicted, what happens when a part is missing or fails, and resuming."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from model import registry
from model.bundle import RANKER, WEIGHTS, Bundle, BundleError, open_bundle
from model.config import FIRST_ITEM
from model.onnx.export import ExportError
from tests.training.conftest import write_log
from tests.training.histories import targets_of
from training import pipeline
from training.confidence.bundles import judge_bundle
from training.config import ConfigError, RunConfig, load_config
from training.pipeline import TrainedModel
from training.tables import DataError

SMALL = [
    "model={width: 16, num_layers: 1, ffn_width: 32, max_len: 8, dropout: 0.1}",
    "training={epochs: 2, batch_size: 64, learning_rate: 2e-2}",
]

COLUMNS = ["data.columns={user_id: who, item_id: what, timestamp: when}"]
"""Of `write_log`."""


class Recorder:
    """A reporter that remembers what it was told."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.epochs: list[int] = []
        self.steps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""

    def stage(self, message: str) -> None:
        self.stages.append(message)

    def step(self, done: int, total: int, loss: float) -> None:
        self.steps += 1

    def epoch(self, row: dict[str, float]) -> None:
        self.epochs.append(int(row["epoch"]))


def circling_log(path: Path, num_users: int = 400, cycle: int = 6) -> Path:
    """Users who go round and round a few items of their own kind: every target was had before."""
    generator = np.random.default_rng(0)
    rows = ["user_id,item_id,timestamp"]
    for user in range(num_users):
        kind, place = generator.integers(4), int(generator.integers(cycle))
        length = int(generator.integers(2 * cycle, 3 * cycle))
        rows += [f"user {user},{kind}-{(place + step) % cycle},{step}" for step in range(length)]
    path.write_text("\n".join(rows) + "\n")
    return path


def run_config(path: Path, *overrides: str) -> RunConfig:
    return load_config(None, [f"data.path={path}", *SMALL, *overrides])


# The event


def test_users_who_repeat_items_make_the_event_the_next_item_of_any_kind(tmp_path: Path) -> None:
    prepared = pipeline.prepare(run_config(circling_log(tmp_path / "log.csv")))

    assert prepared.event == "next_item"


def test_users_who_do_not_make_it_the_next_new_item(tmp_path: Path) -> None:
    write_log(tmp_path / "log.csv")

    prepared = pipeline.prepare(run_config(tmp_path / "log.csv", *COLUMNS))

    assert prepared.event == "next_new_item"


@pytest.mark.parametrize(("repeats", "event"), [(0, "next_new_item"), (2, "next_new_item"), (3, "next_item")])
def test_one_target_in_a_hundred_may_be_a_repeat(repeats: int, event: str) -> None:
    # Of 200 targets; the items had before are 4 and 5.
    own = [FIRST_ITEM + 1] * repeats + [FIRST_ITEM + 2] * (200 - repeats)
    validation = targets_of([[FIRST_ITEM, FIRST_ITEM + 1]] * 200, own)

    assert pipeline.resolve_event("auto", validation) == event


@pytest.mark.parametrize("asked", ["next_item", "next_new_item"])
def test_an_event_that_is_asked_for_is_taken(asked: Any, tmp_path: Path) -> None:
    config = run_config(circling_log(tmp_path / "log.csv", num_users=10), f"event={asked}")

    assert pipeline.prepare(config).event == asked


def test_a_new_item_asked_of_users_who_only_repeat_is_an_error_before_anything_is_published(tmp_path: Path) -> None:
    config = run_config(circling_log(tmp_path / "log.csv", num_users=30), "event=next_new_item")

    with pytest.raises(DataError, match=r"no validation target is possible.*next_item"):
        pipeline.train(config, tmp_path / "out", Recorder(), ["bft-train"])

    assert registry.read_index(tmp_path / "out" / "registry") is None


# Splits


@dataclass(frozen=True)
class HeldOutRun:
    """A plain model trained on most users and judged on others."""

    config: RunConfig
    trained: TrainedModel


@pytest.fixture(scope="module")
def held_out_run(tmp_path_factory: pytest.TempPathFactory) -> HeldOutRun:
    folder = tmp_path_factory.mktemp("held_out")
    log = circling_log(folder / "log.csv")
    config = run_config(log, "split=users", "model.filtering=false", "training.epochs=4")
    return HeldOutRun(config, pipeline.train(config, folder / "out", Recorder(), ["bft-train", "fit"]))


def test_users_held_out_are_judged_and_no_others(held_out_run: HeldOutRun) -> None:
    record = held_out_run.trained.record

    assert record["data"]["split"] == "users"
    parts = [record["data"][f"{part}_users"] for part in ("train", "validation", "test")]
    assert sum(parts) == 400
    assert record["test"]["users"] == parts[2] > 0
    # The next item follows from the last one; and with repeats none is ruled out.
    assert record["test"]["hr@5"] > 0.9
    assert record["test"]["impossible_targets"] == 0


def test_a_plain_models_bundle_leaves_variance_and_precision_out_of_its_confidence(held_out_run: HeldOutRun) -> None:
    bundle = open_bundle(held_out_run.trained.bundle)

    assert bundle.manifest.event == bundle.calibration.event == "next_item"
    assert "logit_probability" in bundle.calibration.features
    assert not {"log_variance", "log_mean_precision"} & set(bundle.calibration.features)


def test_the_bundle_of_a_plain_model_judges_the_same_held_out_users_alike(held_out_run: HeldOutRun) -> None:
    expected = held_out_run.trained.record["test"]

    figures = pipeline.evaluate_bundle(open_bundle(held_out_run.trained.bundle), held_out_run.config.data)

    assert figures["users"] == expected["users"]
    assert figures["ndcg@10"] == pytest.approx(expected["ndcg@10"], abs=1e-6)
    assert figures["nll"] == pytest.approx(expected["nll"], abs=1e-3)
    assert figures["ece@10"] == pytest.approx(expected["ece@10"], abs=1e-3)


@pytest.mark.parametrize(("split", "events", "part"), [("leave_one_out", 2, "validation"), ("users", 5, "validation")])
def test_a_log_too_small_for_its_split_is_an_error_that_says_what_is_needed(
    split: str, events: int, part: str, tmp_path: Path
) -> None:
    path = tmp_path / "log.csv"
    rows = [f"u{user},i{event},{event}" for user in range(3) for event in range(events)]
    path.write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")

    with pytest.raises(DataError, match=rf"split {split} leaves nothing for {part}.*needs"):
        pipeline.prepare(run_config(path, f"split={split}"))


def test_a_log_of_nothing_but_weight_zero_leaves_nothing_to_train_on(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("user_id,item_id,timestamp,w\n" + "".join(f"u,i{row},{row},0\n" for row in range(5)))

    with pytest.raises(DataError, match="leaves nothing for training"):
        pipeline.prepare(run_config(path, "data.columns.weight=w"))


# Refitting


@dataclass(frozen=True)
class Refitted:
    """A run that learned the validation events in the end: its bundle, and the one it was calibrated by."""

    config: RunConfig
    epochs: list[int]
    record: dict[str, Any]
    again: Bundle
    fitted: Bundle


@pytest.fixture(scope="module")
def refitted(tmp_path_factory: pytest.TempPathFactory) -> Refitted:
    folder = tmp_path_factory.mktemp("refitted")
    write_log(folder / "log.csv")
    config, report = run_config(folder / "log.csv", *COLUMNS, "training.refit_epochs=3"), Recorder()
    trained = pipeline.train(config, folder / "out", report, ["bft-train", "fit"])
    again = open_bundle(trained.bundle)
    fitted = open_bundle(again.folder.parent / str(again.manifest.calibrated_by))
    return Refitted(config, report.epochs, trained.record, again, fitted)


def test_a_refit_goes_on_with_everything_but_the_test_events(refitted: Refitted) -> None:
    learned = [bundle.items.training_counts.sum() for bundle in (refitted.again, refitted.fitted)]

    assert learned[0] - learned[1] == refitted.record["data"]["validation_users"] > 0
    assert refitted.epochs == [1, 2, 1, 2, 3]
    weights = [bundle.manifest.files[WEIGHTS].sha256 for bundle in (refitted.again, refitted.fitted)]
    assert weights[0] != weights[1]


def test_a_refit_carries_the_calibration_over_and_is_published_alone(refitted: Refitted) -> None:
    again, fitted = refitted.again, refitted.fitted
    of_model = {"report": None, "variance_scale": 1.0}
    calibrations = [bundle.calibration.model_copy(update=of_model) for bundle in (again, fitted)]

    assert calibrations[0] == calibrations[1]
    # c is the model's that is served, as torch has recorded it: the lists are that model's.
    assert again.calibration.variance_scale != fitted.calibration.variance_scale
    for bundle in (again, fitted):
        ranked = [case for case in bundle.golden_cases() if case.graph == RANKER]
        assert {float(case.inputs["variance_scale"]) for case in ranked} == {
            float(np.float32(bundle.calibration.variance_scale))
        }
    assert again.calibration.report != fitted.calibration.report
    assert fitted.manifest.calibrated_by is None
    assert registry.read_index(again.folder.parent) == registry.RegistryIndex(
        current=again.manifest.version, history=(again.manifest.version,)
    )


@pytest.mark.parametrize("override", ["split=users", "data.streaming=on"])
def test_a_refit_is_refused_where_there_are_no_validation_events_to_learn(override: str, tmp_path: Path) -> None:
    config = run_config(tmp_path / "log.csv", "training.refit_epochs=2", override)

    with pytest.raises(ConfigError, match=r"training\.refit_epochs learns the validation events.*leave it out"):
        pipeline.train(config, tmp_path / "out", Recorder(), ["bft-train"])


def test_confidences_of_a_refitted_bundle_are_judged_with_what_was_fitted_before(refitted: Refitted) -> None:
    again = refitted.again

    record = judge_bundle(again, refitted.config.data, "log", None, [again], None, 2, Recorder())

    assert record.lists.realised == pytest.approx(refitted.record["test"]["hr@10"])
    assert record.items.mean_confidence == pytest.approx(refitted.record["test"]["mean_confidence"], rel=1e-5)
    # By the model that had not learned the validation events.
    assert record.temperature == pytest.approx(refitted.fitted.calibration.temperature, rel=1e-6)


def test_a_refitted_bundle_without_what_it_was_fitted_by_is_refused(refitted: Refitted, tmp_path: Path) -> None:
    alone = tmp_path / refitted.again.folder.name
    shutil.copytree(refitted.again.folder, alone)

    with pytest.raises(BundleError, match="does not lie beside it any more"):
        judge_bundle(open_bundle(alone), refitted.config.data, "log", None, [], None, 0, Recorder())


def test_a_refitted_bundle_is_not_compared_with_one_that_is_not(refitted: Refitted) -> None:
    with pytest.raises(BundleError, match="one of them has learned the validation events, the other has not"):
        judge_bundle(refitted.again, refitted.config.data, "log", None, [refitted.fitted], None, 0, Recorder())


# Failing and resuming


def test_the_next_fit_into_a_registry_keeps_the_numbers_of_its_items(tmp_path: Path) -> None:
    def fitted(log: Path) -> Bundle:
        return open_bundle(pipeline.train(run_config(log), tmp_path / "out", Recorder(), ["bft-train"]).bundle)

    first = fitted(circling_log(tmp_path / "log.csv", num_users=60))
    # Later the log begins with an item that is new, and one is used no more.
    dropped = first.items.ids[3]
    header, *rows = (tmp_path / "log.csv").read_text().splitlines()
    kept = [header, "user 0,the new one,0", *(row for row in rows if dropped not in row.split(","))]
    (tmp_path / "later.csv").write_text("\n".join(kept) + "\n")

    again = fitted(tmp_path / "later.csv")

    assert again.manifest.lineage == first.manifest.lineage
    assert again.items.ids == [*first.items.ids, "the new one"]
    assert again.items.training_counts[3] == 0
    write_log(tmp_path / "another.csv")
    with pytest.raises(DataError, match=r"know 25 items, of which the log has 0: .* Give another --out"):
        pipeline.train(run_config(tmp_path / "another.csv", *COLUMNS), tmp_path / "out", Recorder(), ["bft-train"])


def test_a_failed_export_leaves_the_registry_as_it_was(
    held_out_run: HeldOutRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = held_out_run.trained.bundle.parent
    out = tmp_path / "out"
    shutil.copytree(published, out / "registry", symlinks=True)

    def disagree(model: object, folder: Path, temperature: float) -> None:
        (folder / "encoder.onnx").write_bytes(b"half a graph")
        raise ExportError("encoder.onnx: output mean differs from torch by 1")

    monkeypatch.setattr(pipeline, "export_graphs", disagree)

    with pytest.raises(ExportError, match="differs from torch"):
        pipeline.train(held_out_run.config, out, Recorder(), ["bft-train"])

    assert registry.read_index(out / "registry") == registry.read_index(published)
    assert {path.name for path in (out / "registry").iterdir()} == {path.name for path in published.iterdir()}
    assert not (out / "record.json").exists()


class Interrupted(Exception):
    """Stands for a run that dies after its training and before it publishes."""


def test_resume_goes_on_from_the_checkpoint_of_the_same_data_and_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise Interrupted

    monkeypatch.setattr(pipeline, "write", die)
    log, moved = tmp_path / "log.csv", tmp_path / "moved.csv"
    write_log(log)
    shutil.copy(log, moved)

    def epochs_trained(log: Path, resume: bool, *overrides: str) -> list[int]:
        report = Recorder()
        config = run_config(log, *COLUMNS, *overrides)
        with pytest.raises(Interrupted):
            pipeline.train(config, tmp_path / "out", report, ["bft-train"], resume)
        return report.epochs

    assert epochs_trained(log, True) == [1, 2]
    assert epochs_trained(log, True) == []
    assert epochs_trained(moved, True) == [], "where the log lies does not matter"
    assert epochs_trained(log, True, "training.epochs=3") == [3], "a finished run goes on for longer"
    assert epochs_trained(log, True, "training.seed=1") == [1, 2], "another run"
    falling = "training.schedule=linear"
    assert epochs_trained(log, True, falling) == [1, 2], "another run"
    assert epochs_trained(log, True, falling, "training.epochs=3") == [1, 2, 3], "the rate would fall otherwise"
    assert epochs_trained(log, False) == [1, 2], "unless asked, a run begins anew"
    moved.write_text(moved.read_text() + "user 0,item 00,5000,5\n")
    assert epochs_trained(moved, True) == [1, 2], "another log"
