"""The job as a whole: a first model, a better one the next night, and nothing published that should not be."""

import fcntl
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from PIL import Image
from typer.testing import CliRunner

from model import registry as registries
from model.bundle import open_bundle
from model.onnx.export import ExportError
from tests.training.test_pipeline import Recorder
from training import pipeline
from training.cli import app
from training.config import load_config
from training.retrain import figures
from training.retrain import report as reports
from training.retrain.config import JobConfig
from training.retrain.current import going_on, is_current
from training.retrain.job import retrain
from training.retrain.learn import _retired_by
from training.retrain.lock import JobLocked, locked
from training.retrain.report import to_json, to_markdown
from training.retrain.run import EXIT_STATUS, Run
from training.retrain.store import INDEX, Incoming, Store
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
    # Without the files the retired stay, and somebody is told of what will be missing.
    assert _retired_by(bundle) == {"item 3"}
    unaware = Run("", config(tmp_path / "in"))
    going_on(unaware.config, bundle, unaware)
    assert [note.endswith("give the job metadata.path") for note in unaware.notes] == [True]


def test_the_job_goes_on_with_the_current_model_unless_it_is_told_of_another(two_nights: tuple[Path, Run, Run]) -> None:
    folder, first, _ = two_nights
    current = open_bundle(folder / "registry" / str(first.bundle))

    def told(*overrides: str) -> tuple[JobConfig, list[str]]:
        asked = load_config(None, [f"data.path={folder / 'in'}", *overrides], JobConfig)
        told = Run("", asked)
        return going_on(asked, current, told), told.notes

    assert told()[1] == told(*SMALL[:1])[1] == []
    assert told()[0].model == current.manifest.model
    assert told(*SMALL[:1], "model.dropout=0.5")[1] == []
    other, notes = told("model=hstu")
    assert (other.model.backbone, other.model_name) == ("hstu", "bft-hstu")
    # What a confidence is the probability of does not change with a night's share of repeats.
    assert [told(*asked)[0].event for asked in ([], ["event=next_item"], ["event=next_new_item"])] == [
        current.manifest.event,
        "next_item",
        "next_new_item",
    ]
    named = replace(current, manifest=current.manifest.model_copy(update={"name": "shop"}))
    assert [going_on(one, named, Run("", one)).model_name for one in (told()[0], told("name=ours")[0])] == [
        "shop",
        "ours",
    ]
    assert "its model differs from the current one's in backbone, max_len, width, num_layers, ffn_width" in notes[0]


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


@pytest.mark.parametrize("command", ["evaluate", "explain", "calibrate"])
def test_commands_that_judge_test_users_say_that_a_night_s_bundle_has_none(
    command: str, two_nights: tuple[Path, Run, Run]
) -> None:
    folder = two_nights[0]
    log = ["--bundle", str(folder / "registry"), "--data", str(folder / "in" / "monday.csv")]

    refused = CliRunner().invoke(app, [command, *log])

    assert (refused.exit_code, "made by the retraining job" in refused.stderr) == (2, True), refused.stderr


def test_a_source_of_another_scheme_is_an_error_that_keeps_its_password(tmp_path: Path) -> None:
    folders = ["--work", str(tmp_path / "work"), "--registry", str(tmp_path / "models")]

    refused = CliRunner().invoke(app, ["retrain", *folders], env={"BFT_REDIS_URL": "foo://:secret@127.0.0.1/0"})

    assert (refused.exit_code, "redis://" in refused.stderr, "secret" in refused.stderr) == (2, True, False)


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
    shutil.copytree(copy / "work", copy / "newest")
    index = (copy / "work" / "log" / INDEX).read_text()
    (copy / "work" / "log" / INDEX).write_text(index.replace('"ingests": 2', '"ingests": 1'))
    with pytest.raises(DataError, match=r"learned 2 ingests of the log (\w+); .* has 1 of them\. Nothing was taken in"):
        run(copy)
    shutil.rmtree(copy / "work")
    # However many nights it goes on: what is acknowledged would be in this log alone.
    for _ in range(4):
        with pytest.raises(DataError, match=r"has another log, empty\. Nothing was taken in"):
            run(copy)
        assert not (copy / "work" / "log").exists()
    shutil.rmtree(copy / "work")
    (copy / "newest").rename(copy / "work")
    shutil.rmtree(copy / "work" / "reports")
    assert run(copy).outcome == "nothing new"
    (copy / "registry").rename(copy / "elsewhere")
    with pytest.raises(DataError, match="nothing was published here"):
        run(copy)  # though no report tells of a publication any more


def test_the_first_night_goes_on_from_a_model_that_was_fitted(tmp_path: Path) -> None:
    walks(tmp_path / "in", "old.csv", 0, 400, NUM_ITEMS, seed=1)
    fitting = [f"data.path={tmp_path / 'in' / 'old.csv'}", *SMALL[:2], "training.epochs=2"]
    fitted = pipeline.train(load_config(None, fitting), tmp_path / "fit", Recorder(), ["bft-train"]).bundle
    registry = fitted.parent
    until = open_bundle(fitted).manifest.data["last_timestamp"]
    rows = [row.split(",") for row in (tmp_path / "in" / "old.csv").read_text().splitlines()[1:]]
    assert until == max(float(time) for _, _, time in rows)
    walks(tmp_path / "in", "tuesday.csv", 20, 250, NUM_ITEMS + 5, seed=2)

    def night() -> Run:
        settings = config(tmp_path / "in")
        return retrain(settings, tmp_path / "work", registry, None, Recorder(), ["bft-train"], now=NOW)

    # What it learned is missing in the log: the users' histories would be lost.
    (tmp_path / "in" / "old.csv").rename(tmp_path / "old.csv")
    refused = night()
    assert (refused.outcome, refused.window.earlier_events) == ("refused", 0)  # type: ignore[union-attr]
    assert "known is 0, at least 0.9: the log lacks users whom the current model learned" in refused.reason

    (tmp_path / "old.csv").rename(tmp_path / "in" / "old.csv")
    ended = night()

    assert ended.window is not None
    assert (ended.window.events, ended.window.earlier_events) == (250 * 12, 400 * 12), "whatever their ingests"
    assert (ended.outcome, ended.current, ended.training["start"]) == ("published", fitted.name, "warm"), ended.reason
    assert open_bundle(registry / str(ended.bundle)).items.training_counts.sum() == 650 * 12


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


def test_shuffled_events_are_refused_and_named(copy: Path) -> None:
    walks(copy / "in", "wednesday.csv", 40, 250, NUM_ITEMS + 5, seed=3, shuffled=True)
    index = registries.read_index(copy / "registry")

    refused = run(copy)

    assert (refused.outcome, EXIT_STATUS[refused.outcome]) == ("refused", 3)
    assert "NDCG@10 of the current model" in refused.reason
    assert registries.read_index(copy / "registry") == index


@pytest.mark.parametrize(
    ("log", "overrides", "reason"),
    [
        ("one day", [], "every event is in the slice of the newest"),
        ("repeats", ["event=next_new_item"], "every event to choose an epoch and calibrate by is on an item that"),
        ("late repeats", ["event=next_new_item"], "none of the newest events can be asked about"),
        ("visitors", [], "no user has two events before the slice"),
    ],
)
def test_too_few_events_of_a_kind_leave_the_night_undecided(
    log: str, overrides: list[str], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    rows = ["user_id,item_id,timestamp"]
    for number in range(800):
        user = number if log == "visitors" else number % 40
        visit = number // 40
        item = {"repeats": visit % 4, "late repeats": visit % 10}.get(log, number % 17)
        rows.append(f"u{user},i{item},{1 if log == 'one day' else number}")
    (tmp_path / "in" / "monday.csv").write_text("\n".join(rows) + "\n")

    ended = run(tmp_path, "retrain.limits.max_user_share=1.0", *overrides)

    assert (ended.outcome, EXIT_STATUS[ended.outcome]) == ("undecided", 3)
    assert reason in ended.reason
    assert (tmp_path / "work" / "reports").exists()
    assert registries.read_index(tmp_path / "registry") is None


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    with (tmp_path / "work" / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(JobLocked, match="another run of the job is under way"):
            run(tmp_path)


def test_a_dry_run_asks_everything_publishes_nothing_and_keeps_the_events(copy: Path) -> None:
    walks(copy / "in", "wednesday.csv", 40, 250, NUM_ITEMS + 5, seed=3)
    index, before = registries.read_index(copy / "registry"), sorted((copy / "registry").iterdir())

    tried = run(copy, dry_run=True)

    assert (tried.outcome, tried.bundle) == ("would publish", None)
    assert tried.questions[-1].name == "time for a list, quartiles"
    assert registries.read_index(copy / "registry") == index
    assert sorted((copy / "registry").iterdir()) == before
    assert Store(copy / "work" / "log").index.rows == 900 * 12


def test_a_graph_that_says_something_else_than_torch_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walks(copy / "in", "wednesday.csv", 40, 250, NUM_ITEMS + 5, seed=3)
    index = registries.read_index(copy / "registry")

    def differ(*_: Any) -> None:
        raise ExportError("ranker.onnx: logit differs by 3 from torch's")

    monkeypatch.setattr(pipeline, "export_graphs", differ)
    refused = run(copy)

    assert (refused.outcome, refused.bundle, EXIT_STATUS[refused.outcome]) == ("refused", None, 3)
    assert refused.reason == "ranker.onnx: logit differs by 3 from torch's"
    assert registries.read_index(copy / "registry") == index


def test_a_run_that_an_error_ends_leaves_a_report(copy: Path) -> None:
    (copy / "in" / "torn.csv").write_text("user_id,item_id,timestamp\nu,a\n")

    with pytest.raises(DataError):
        run(copy)

    (record,) = (
        one
        for path in (copy / "work" / "reports").glob("*.json")
        if (one := json.loads(path.read_text()))["outcome"] == "failed"
    )
    assert (record["exit_status"], record["bundle"]) == (2, None)
    assert "torn.csv" in record["reason"]


def test_an_erasure_clears_what_an_unfinished_run_had_cut_from_the_log(copy: Path) -> None:
    unfinished = copy / "work" / "runs" / "000002" / "0123456789abcdef" / "600" / "shards"
    unfinished.mkdir(parents=True)
    assert run(copy).outcome == "nothing new"
    assert unfinished.exists(), "a run over the same log goes on from it"

    # By a run that was killed before it could clear them; and the next one ends with an error.
    Store(copy / "work" / "log").ingest(Incoming(erasures={"user 3": 30 * DAY_S}))
    (copy / "in" / "torn.csv").write_text("user_id,item_id,timestamp\nu,a\n")
    with pytest.raises(DataError):
        run(copy)

    assert not unfinished.exists()


def test_what_fails_after_a_publication_is_left_to_the_next_run(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walks(copy / "in", "wednesday.csv", 40, 250, NUM_ITEMS + 5, seed=3)
    reports = copy / "work" / "reports"
    before = set(reports.iterdir())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(registries, "prune", full)
        published = run(copy)
    assert published.outcome == "published", published.reason
    assert is_current(copy / "registry", str(published.bundle))
    assert set(reports.iterdir()) == before

    assert run(copy).outcome == "nothing new"
    told = [json.loads(path.read_text()) for path in set(reports.glob("*.json")) - before]
    assert {one["bundle"] for one in told if one["outcome"] == "published"} == {published.bundle}


def test_an_announcement_of_which_a_killed_run_had_begun_to_remove_the_files_is_no_obstacle(copy: Path) -> None:
    reports, announced = copy / "work" / "reports", copy / "work" / "announced"
    record = max(reports.glob("*.json"))
    announced.mkdir()
    shutil.copy(record, announced)

    assert run(copy).outcome == "nothing new"
    assert not announced.exists()


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


def test_the_command_shows_the_log_and_forgets_an_ingest(tmp_path: Path) -> None:
    log, work = Store(tmp_path / "work" / "log"), ["--work", str(tmp_path / "work")]
    rows = {"user_id": ["u", "v"], "item_id": ["a", "b"], "timestamp": [0.0, 86_399.0], "weight": [1.0, 1.0]}
    log.ingest(Incoming([pl.DataFrame(rows | {"event_id": [None, None], "source": ["x.csv", "y.csv"]})]))

    shown = CliRunner().invoke(app, ["log", "show", *work])
    assert shown.stdout.splitlines()[1].split() == (
        ["1", "2", "1970-01-01", "00:00:00", "1970-01-01", "23:59:59", "x.csv,", "y.csv"]
    )
    with locked(tmp_path / "work"):
        assert CliRunner().invoke(app, ["log", "forget", "1", *work]).exit_code == 5
    forgotten = CliRunner().invoke(app, ["log", "forget", "1", *work, "--json"])
    assert json.loads(forgotten.stdout) == {"ingest": 1, "removed": 2}
    assert json.loads(CliRunner().invoke(app, ["log", "show", *work, "--json"]).stdout) == {"ingests": []}
    missing = CliRunner().invoke(app, ["log", "forget", "7", *work])
    assert (missing.exit_code, "there is no ingest 7; there were 2" in missing.stderr) == (2, True)


def test_a_user_of_a_log_of_files_is_erased_by_a_command(tmp_path: Path) -> None:
    log, work = Store(tmp_path / "work" / "log"), ["--work", str(tmp_path / "work")]
    rows = {"user_id": ["u", "v"], "item_id": ["a", "b"], "timestamp": [0.0, 1.0], "weight": [1.0, 1.0]}
    events = pl.DataFrame(rows | {"event_id": [None, None], "source": ["x.csv", "x.csv"]})
    log.ingest(Incoming([events]))
    (tmp_path / "work" / "runs" / "000001" / "shards").mkdir(parents=True)

    erased = CliRunner().invoke(app, ["log", "erase", "u", *work, "--json"])

    assert (erased.exit_code, json.loads(erased.stdout)) == (0, {"removed": 1})
    assert not any((tmp_path / "work" / "runs").iterdir()), "what a killed night had cut from the log"
    again = Store(tmp_path / "work" / "log").ingest(Incoming([events]))
    assert (again.new, again.duplicates, again.of_erased) == (0, 1, 1)
    elsewhere = CliRunner().invoke(app, ["log", "erase", "u", "--work", str(tmp_path / "wrok")])
    assert (elsewhere.exit_code, "no log of `bft-train retrain` here" in elsewhere.stderr) == (2, True)
    assert not (tmp_path / "wrok").exists()


def test_the_command_wants_a_source(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["retrain", "--work", str(tmp_path)])

    assert result.exit_code == 2
    assert "no source of events: give --data FOLDER" in result.stderr


def test_a_figure_that_cannot_be_drawn_keeps_no_model_from_being_published(
    two_nights: tuple[Path, Run, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no such colour")

    monkeypatch.setattr(figures, "night", fail)
    ended = replace(two_nights[1], notes=[])

    reports.keep(ended, tmp_path)

    (page,) = (tmp_path / "reports").glob("*.md")
    assert "the figure could not be drawn (ValueError: no such colour)" in page.read_text()
    assert ".png" not in page.read_text()
    assert json.loads(page.with_suffix(".json").read_text())["outcome"] == "published"


def test_a_report_tells_what_was_found_judged_and_done(two_nights: tuple[Path, Run, Run]) -> None:
    folder, first, second = two_nights

    (kept,) = (folder / "work" / "reports").glob(f"{second.begun[:19].replace(':', '-')}*.md")
    page = kept.read_text()

    assert f"Bundle `{second.bundle}` is current; before it was `{first.bundle}`." in page
    assert "| NDCG@10 of the current model |" in page
    assert f"| candidate | {second.judged['candidate']['ndcg@10']:.4f} |" in page
    record = json.loads(json.dumps(to_json(second)))
    assert (record["bundle"], record["config"]["model"]["width"]) == (second.bundle, 16)
    assert str(folder) not in kept.with_suffix(".json").read_text()
    assert page == to_markdown(second, f"{kept.stem}.png")
    assert f"]({kept.stem}.png)" in page
    with Image.open(kept.with_suffix(".png")) as figure:
        assert figure.format == "PNG"


def test_the_nightly_configuration_of_the_repository_is_one(tmp_path: Path) -> None:
    path = Path(__file__).parents[3] / "configs" / "night.yaml"

    assert load_config(path, [f"data.path={tmp_path}"], JobConfig).retrain.start == "warm"
