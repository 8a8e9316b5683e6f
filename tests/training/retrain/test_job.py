"""The job as a whole: a first model, a better one the next night, and nothing published that should not be."""

import fcntl
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from model import registry as registries
from model.bundle import open_bundle
from tests.training.test_pipeline import Recorder
from training.cli import app
from training.config import load_config
from training.retrain.config import JobConfig
from training.retrain.job import JobLocked, retrain
from training.retrain.report import to_json, to_markdown
from training.retrain.run import EXIT_STATUS, Run
from training.retrain.store import Store
from training.tables import DataError

NUM_ITEMS = 30
DAY_S = 86_400.0
NOW = 400 * DAY_S
SMALL = [
    "model={width: 16, num_layers: 1, ffn_width: 32, max_len: 8, dropout: 0.1}",
    "training={epochs: 8, batch_size: 64, learning_rate: 1e-2, schedule: linear, patience: 8}",
    "retrain={judged_events: 600, limits: {min_events: 200}}",
]


def walks(folder: Path, name: str, begin_day: float, num_users: int, num_items: int, seed: int, shuffled: bool = False):
    """A file of users who go from each item to its successor, mostly, in a ring."""
    generator = np.random.default_rng(seed)
    rows = ["user_id,item_id,timestamp"]
    for user in range(num_users):
        item = int(generator.integers(num_items))
        for step in range(12):
            shown = int(generator.integers(num_items)) if shuffled else item
            rows.append(f"user {user},item {shown},{(begin_day + 10 * generator.random()) * DAY_S + step}")
            jump = generator.random() < 0.1
            item = int(generator.integers(num_items)) if jump else (item + 1) % num_items
    folder.mkdir(exist_ok=True)
    # Steps of a user a second apart, in order.
    starts = {}
    for number, row in enumerate(rows[1:], 1):
        user, item_id, time = row.split(",")
        start = starts.setdefault(user, float(time))
        rows[number] = f"{user},{item_id},{start + number % 12}"
    (folder / name).write_text("\n".join(rows) + "\n")


def config(source: Path, *overrides: str) -> JobConfig:
    return load_config(None, [f"data.path={source}", *SMALL, *overrides], JobConfig)


def run(folder: Path, *overrides: str, **rest: Any) -> Run:
    settings = config(folder / "in", *overrides)
    return retrain(settings, folder / "work", folder / "registry", None, Recorder(), ["bft-train"], now=NOW, **rest)


@pytest.fixture(scope="module")
def two_nights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run, Run]:
    folder = tmp_path_factory.mktemp("nights")
    walks(folder / "in", "monday.csv", 0, 400, NUM_ITEMS, seed=1)
    first = run(folder)
    walks(folder / "in", "tuesday.csv", 20, 250, NUM_ITEMS + 5, seed=2)
    return folder, first, run(folder)


def test_the_first_night_publishes_a_model_that_beats_popularity(two_nights: tuple[Path, Run, Run]) -> None:
    _, first, _ = two_nights

    assert (first.outcome, first.current) == ("published", None)
    assert [question.name for question in first.questions] == ["NDCG@10"]
    assert first.judged["candidate"]["ndcg@10"] > first.judged["popularity"]["ndcg@10"]
    assert first.training["start"] == "scratch"


def test_retired_items_and_metadata_go_into_the_bundle(tmp_path: Path) -> None:
    walks(tmp_path / "in", "monday.csv", 0, 200, NUM_ITEMS, seed=1)
    (tmp_path / "retired.txt").write_text("item 3\nno such item\n")
    rows = "".join(f"item {item},{item / NUM_ITEMS}\n" for item in range(NUM_ITEMS))
    (tmp_path / "items.csv").write_text("item_id,place\n" + rows)

    ended = run(tmp_path, f"retired={tmp_path / 'retired.txt'}", f"metadata.path={tmp_path / 'items.csv'}")

    assert ended.outcome == "published", ended.reason
    bundle = open_bundle(tmp_path / "registry" / str(ended.bundle))
    assert bundle.items.retired.tolist() == [bundle.items.number("item 3")]
    assert bundle.new_items.predict({"place": 0.5}).is_regressed
    assert str(tmp_path) not in (bundle.folder / "manifest.json").read_text()


def test_the_next_night_publishes_a_model_that_learned_everything(two_nights: tuple[Path, Run, Run]) -> None:
    folder, first, second = two_nights

    assert (second.outcome, second.current) == ("published", first.bundle), second.reason
    assert second.training["start"] == "warm"
    bundle = open_bundle(folder / "registry" / str(second.bundle))
    assert bundle.items.training_counts.sum() == Store(folder / "work" / "log").index.rows == 650 * 12
    assert bundle.manifest.num_items == NUM_ITEMS + 5
    earlier = open_bundle(folder / "registry" / str(first.bundle))
    assert bundle.items.ids[:NUM_ITEMS] == earlier.items.ids
    assert bundle.manifest.lineage == earlier.manifest.lineage
    assert bundle.manifest.training["ingest"] == 2
    names = {question.name for question in second.questions}
    assert {"NDCG@10", "NDCG@10 of the current model", "stated over realised hits"} <= names


def test_a_night_without_events_publishes_nothing(two_nights: tuple[Path, Run, Run]) -> None:
    folder, _, second = two_nights

    third = run(folder)

    assert (third.outcome, EXIT_STATUS[third.outcome]) == ("nothing new", 4)
    assert sorted(third.repeated_files) == ["monday.csv", "tuesday.csv"]
    assert registries.read_index(folder / "registry").current == second.bundle  # type: ignore[union-attr]


@pytest.fixture
def copy(two_nights: tuple[Path, Run, Run], tmp_path: Path) -> Path:
    """The two nights, to go on from otherwise."""
    for name in ("in", "work", "registry"):
        shutil.copytree(two_nights[0] / name, tmp_path / name, symlinks=True)
    return tmp_path


def test_what_was_rolled_back_is_not_learned_again_the_next_night(copy: Path) -> None:
    first = registries.roll_back(copy / "registry").current

    held = run(copy)

    assert held.outcome == "nothing new"
    assert "was rolled back; at least 200 newer ones are waited for" in held.reason
    assert registries.read_index(copy / "registry").current == first  # type: ignore[union-attr]
    walks(copy / "in", "wednesday.csv", 40, 250, NUM_ITEMS + 5, seed=3)
    again = run(copy)
    assert (again.outcome, again.current) == ("published", first), again.reason
    assert registries.read_index(copy / "registry").rolled_back is None  # type: ignore[union-attr]


def test_a_log_and_a_registry_that_do_not_belong_together_are_refused(copy: Path) -> None:
    (copy / "registry").rename(copy / "elsewhere")
    with pytest.raises(DataError, match=r"nothing was published here, though the job of .* has published"):
        run(copy)

    (copy / "elsewhere").rename(copy / "registry")
    shutil.rmtree(copy / "work")
    (copy / "in" / "tuesday.csv").unlink()
    with pytest.raises(DataError, match=r"learned from 2 ingests, the log in .* has 1"):
        run(copy)


def test_a_rollback_while_the_job_runs_stays(copy: Path) -> None:
    walks(copy / "in", "wednesday.csv", 40, 250, NUM_ITEMS + 5, seed=3)

    class RollsBack(Recorder):
        def stage(self, message: str) -> None:
            super().stage(message)
            if message.startswith("exporting to ONNX"):
                registries.roll_back(copy / "registry")

    settings = config(copy / "in")
    ended = retrain(settings, copy / "work", copy / "registry", None, RollsBack(), ["bft-train"], now=NOW)

    assert (ended.outcome, ended.bundle) == ("refused", None)
    assert "run the job again" in ended.reason
    index = registries.read_index(copy / "registry")
    assert index is not None
    assert (index.current, index.previous) == (index.history[0], ended.current)
    assert {path.name for path in (copy / "registry").iterdir() if path.is_dir()} >= {index.current, ended.current}
    assert len(list((copy / "registry").glob("*/manifest.json"))) == 2 + 1, "the two and the link"


def test_shuffled_events_are_refused_and_named(two_nights: tuple[Path, Run, Run]) -> None:
    folder, _, second = two_nights
    walks(folder / "in", "wednesday.csv", 40, 250, NUM_ITEMS + 5, seed=3, shuffled=True)

    refused = run(folder)

    assert (refused.outcome, EXIT_STATUS[refused.outcome]) == ("refused", 3)
    assert "NDCG@10 of the current model" in refused.reason
    assert registries.read_index(folder / "registry").current == second.bundle  # type: ignore[union-attr]


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    with (tmp_path / "work" / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(JobLocked, match="another run of the job is under way"):
            run(tmp_path)


def test_a_dry_run_publishes_nothing_and_keeps_the_events(tmp_path: Path) -> None:
    walks(tmp_path / "in", "monday.csv", 0, 100, NUM_ITEMS, seed=1)

    tried = run(tmp_path, dry_run=True)

    assert tried.outcome == "would publish"
    assert registries.read_index(tmp_path / "registry") is None
    assert Store(tmp_path / "work" / "log").index.rows == 1200


def test_the_command_ends_with_the_status_of_the_outcome_and_a_report(tmp_path: Path) -> None:
    walks(tmp_path / "in", "monday.csv", 0, 10, NUM_ITEMS, seed=1)
    folders = ["--data", str(tmp_path / "in"), "--work", str(tmp_path / "work"), "--registry", str(tmp_path / "models")]

    result = CliRunner().invoke(app, ["retrain", *folders, "--json"])

    told = json.loads(result.stdout)
    assert (result.exit_code, told["outcome"], told["exit_status"]) == (4, "nothing new", 4)
    assert told["window"]["events"] == 120
    page = Path(told["report"]).read_text()
    assert page.startswith("# Retraining, ")
    assert "120 new events; at least 500 are waited for" in page
    assert "| 1 | 120 | 120 | 0 | 0 | 0 |" in page


def test_the_command_wants_a_source(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["retrain", "--work", str(tmp_path)])

    assert result.exit_code == 2
    assert "no source of events: give --data FOLDER" in result.stderr


def test_a_report_tells_what_was_found_judged_and_done(two_nights: tuple[Path, Run, Run]) -> None:
    _, first, second = two_nights

    page = to_markdown(second)

    assert f"Bundle `{second.bundle}` is current; before it was `{first.bundle}`." in page
    assert "| NDCG@10 of the current model |" in page
    assert f"| candidate | {second.judged['candidate']['ndcg@10']:.4f} |" in page
    assert json.loads(json.dumps(to_json(second)))["bundle"] == second.bundle


def test_the_nightly_configuration_of_the_repository_is_one(tmp_path: Path) -> None:
    path = Path(__file__).parents[3] / "configs" / "night.yaml"

    assert load_config(path, [f"data.path={tmp_path}"], JobConfig).retrain.start == "warm"
