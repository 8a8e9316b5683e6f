"""`bft-train`, the real command: what it prints, what it leaves on disk, and how it fails."""

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from model import registry
from model.bundle import open_bundle
from tests.model import stand_ins
from tests.training.conftest import BAD_ROWS, TrainedRun, bft_train
from training.cli import app
from training.config import RunConfig
from training.events import DataConfig
from training.pipeline import TrainedModel

RANKING = [f"{name}@{k}" for name in ("hr", "ndcg") for k in (5, 10, 20)]


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# train


def test_training_publishes_a_bundle_that_opens_as_the_registrys_current_one(trained: TrainedRun) -> None:
    bundle = open_bundle(registry.resolve(trained.registry))

    assert (trained.registry / "current").resolve() == bundle.folder == Path(trained.figures["bundle"])
    assert registry.read_index(trained.registry).history == (bundle.folder.name,)
    assert bundle.manifest.name == "tiny"
    assert bundle.manifest.event == bundle.calibration.event == "next_new_item"
    assert [path.name for path in trained.registry.iterdir() if path.name.startswith(".staging")] == []


def test_the_bundle_knows_every_item_its_uses_and_its_title(trained: TrainedRun) -> None:
    items = open_bundle(registry.resolve(trained.registry)).items

    assert sorted(items.ids) == [f"item {row:02}" for row in range(40)]
    assert {id_: title for id_, title in zip(items.ids, items.titles, strict=True) if title} == {
        "item 07": "Seventh Heaven"
    }
    record = json.loads((trained.out / "record.json").read_text())
    # Every user's first event weighs 0: it is in the history, but no use.
    assert items.training_counts.sum() == record["data"]["train_events"] - record["data"]["train_users"]


def test_json_on_standard_output_has_every_test_figure(trained: TrainedRun) -> None:
    figures = trained.figures

    assert {*RANKING, "nll", "ece@10", "brier_skill@10", "users", "ece_null_interval"} <= set(figures)
    assert set(figures["popularity"]) == set(RANKING)
    cutoffs = [f"{name}@{k}" for name in ("hr", "ndcg") for k in (5, 10, 20)]
    assert set(figures["intervals"]) == {*cutoffs, *(f"{name} minus popularity" for name in cutoffs)}
    assert all(math.isfinite(figures[name]) for name in (*RANKING, "nll", "ece@10", "brier_skill@10"))
    # The next item is one of the two after the last; popularity knows nothing of that.
    assert figures["hr@10"] > 0.9 > figures["popularity"]["hr@10"]
    assert figures["nll"] < figures["uniform_nll"] == pytest.approx(math.log(40))
    assert figures["brier_skill@10"] > 0


def test_progress_goes_to_standard_error_as_json_lines(trained: TrainedRun) -> None:
    lines = json_lines(trained.stderr)

    assert {line["kind"] for line in lines} == {"stage", "epoch"}
    assert [line["epoch"] for line in lines if line["kind"] == "epoch"] == [1, 2, 3, 4, 5, 6]
    assert all(line["time"] > 0 for line in lines)
    messages = [line["message"] for line in lines if line["kind"] == "stage"]
    assert f"({BAD_ROWS} rejected) of 200 users on 40 items" in messages[1]
    assert messages[-1] == f"published tiny {Path(trained.figures['bundle']).name}"


def test_the_record_traces_the_figures_to_data_configuration_and_versions(trained: TrainedRun) -> None:
    record = json.loads((trained.out / "record.json").read_text())
    manifest = open_bundle(registry.resolve(trained.registry)).manifest

    assert record["bundle"] == manifest.version
    assert record["test"] == {name: value for name, value in trained.figures.items() if name != "bundle"}
    assert manifest.metrics["ndcg@10"] == record["test"]["ndcg@10"]
    assert record["data"]["source"] == "log.csv"
    assert record["data"]["rows_rejected"] == BAD_ROWS
    assert record["data"]["split"] == "leave_one_out"
    assert len(record["curve"]) == 6
    assert record["config"]["training"]["learning_rate"] == 0.02
    assert record["config"]["model"] == manifest.model.model_dump()
    assert set(record["versions"]) >= {"python", "torch", "onnxruntime"}
    assert record["command"][:2] == ["cli.py", "fit"]
    assert "path" not in record["config"]["data"]


def test_bad_rows_are_set_aside_in_the_runs_folder(trained: TrainedRun) -> None:
    rejects = json_lines((trained.out / "rejects.jsonl").read_text())

    assert [(row["field"], row["value"]) for row in rejects] == [("when", "tomorrow"), ("stars", "4")]


@pytest.mark.parametrize("name", ["log #1.csv", "2024", "a: b.csv", "[x].csv", "null", "ein ñ 😀.csv"])
def test_a_path_is_taken_as_it_stands(
    name: str, monkeypatch: pytest.MonkeyPatch, trained: TrainedRun, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).touch()
    configs: list[RunConfig] = []

    def remember(config: RunConfig, *_: object) -> TrainedModel:
        configs.append(config)
        return TrainedModel(Path("b"), {"test": trained.figures})

    monkeypatch.setattr("training.pipeline.train", remember)

    result = invoke("fit", "--data", name, "--titles", name, "data.format=csv", "--json")

    assert result.exit_code == 0, result.output
    assert (configs[0].data.path, configs[0].titles) == (Path(name), Path(name))


# evaluate


@pytest.mark.parametrize("where", ["registry", "bundle"])
def test_evaluating_the_bundle_gives_the_figures_that_training_reported(where: str, trained: TrainedRun) -> None:
    location = trained.registry if where == "registry" else trained.figures["bundle"]

    result = invoke("evaluate", "--bundle", location, "--data", trained.log, "--json")

    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    # Torch and ONNX Runtime differ by 1e-5 at most in a score, which reorders no two items here.
    for name in RANKING:
        assert figures[name] == pytest.approx(trained.figures[name], abs=1e-6), name
    assert figures["popularity"] == pytest.approx(trained.figures["popularity"])
    assert figures["nll"] == pytest.approx(trained.figures["nll"], abs=1e-3)
    assert figures["ece@10"] == pytest.approx(trained.figures["ece@10"], abs=1e-3)
    assert figures["brier_skill@10"] == pytest.approx(trained.figures["brier_skill@10"], abs=1e-3)
    assert figures["users"] == trained.figures["users"]


def test_figures_for_people_show_the_model_beside_popularity(trained: TrainedRun) -> None:
    result = invoke("evaluate", "--bundle", trained.registry, "--data", trained.log)

    text = result.stdout
    assert "test, 200 users, full ranking" in text
    for name in ("hr@10", "ndcg@10"):
        line = next(line for line in text.splitlines() if name.upper() in line)
        assert f"{trained.figures[name]:.4f}" in line
        assert f"{trained.figures['popularity'][name]:.4f}" in line
    assert "NLL of the next item" in text


def test_a_log_may_be_read_in_another_way_than_the_one_trained_on(trained: TrainedRun, tmp_path: Path) -> None:
    lines = [line.split(",") for line in trained.log.read_text().splitlines()[1:]]
    other = tmp_path / "other.csv"
    other.write_text("user_id,item_id,timestamp\n" + "".join(f"{u},{i},{t}\n" for u, i, t, _ in lines))

    how = ["weight_map=null", "columns={}"]
    result = invoke("evaluate", "--bundle", trained.registry, "--data", other, *how, "--json")

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["users"] == 200


def test_items_that_the_bundle_does_not_know_are_read_but_are_no_targets(trained: TrainedRun, tmp_path: Path) -> None:
    rows = trained.log.read_text().splitlines()
    grown = tmp_path / "grown.csv"
    # Later than anything else of user 1.
    grown.write_text("\n".join([*rows, "user 1,brand new,9999,5"]) + "\n")

    result = invoke("evaluate", "--bundle", trained.registry, "--data", grown, "--json")

    figures = json.loads(result.stdout)
    assert figures["users"] == trained.figures["users"]
    assert figures["hr@20"] == trained.figures["hr@20"]


# Data sets by name


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "bft"


CLICKS = "uid,item_id,ts\nada,x,1\nada,y,2\nbob,x,1\nbob,y,later\n"


def add_clicks(tmp_path: Path, *options: str | Path) -> Result:
    log, titles = tmp_path / "clicks.csv", tmp_path / "titles.csv"
    log.write_text(CLICKS)
    titles.write_text("item_id,title\nx,The X\n")
    how = ["columns.user_id=uid", "columns.timestamp=ts", "max_bad_share=0.5"]
    return invoke("data", "add", "clicks", log, *how, "--titles", titles, *options)


def test_adding_a_log_prints_what_it_holds_and_where_it_lies(tmp_path: Path, cache: Path) -> None:
    result = add_clicks(tmp_path, "--json")

    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    assert Path(fields.pop("path")).read_text() == CLICKS
    assert Path(fields.pop("titles")).is_relative_to(cache)
    assert fields == {
        "name": "clicks",
        "users": 2,
        "items": 2,
        "events": 3,
        "density": 0.75,
        "sha256": hashlib.sha256(CLICKS.encode()).hexdigest(),
        "bytes": len(CLICKS),
        "rows_rejected": 1,
        "rejects": str(tmp_path / "clicks.csv.rejects.jsonl"),
        "added": True,
    }
    again = add_clicks(tmp_path).stdout
    assert "clicks: 2 users, 2 items, 3 events, density 75.000%" in again
    assert "was there already, nothing was written" in again


def test_the_list_has_what_is_there_and_how_to_get_what_is_not(tmp_path: Path, cache: Path) -> None:
    add_clicks(tmp_path)

    fields = json.loads(invoke("data", "list", "--json").stdout)
    text = invoke("data", "list").stdout

    assert [(one["name"], one["events"]) for one in fields["present"]] == [("clicks", 3)]
    how = {one["name"]: one["how"] for one in fields["missing"]}
    assert set(how) == {"beauty", "sports", "toys", "instruments", "lastfm", "ml-100k"}
    assert "data add beauty FILE" in how["beauty"]
    assert "data fetch ml-100k" in how["ml-100k"]
    assert "clicks: 2 users" in text
    assert "toys is not there: run `bft-train data add toys FILE`" in text


def test_the_list_of_another_cache_is_its_own(tmp_path: Path, cache: Path) -> None:
    add_clicks(tmp_path, "--cache", tmp_path / "other")

    present = {
        where: json.loads(invoke("data", "list", "--json", "--cache", where).stdout)["present"]
        for where in (tmp_path / "other", cache)
    }
    assert [one["name"] for one in present[tmp_path / "other"]] == ["clicks"]
    assert present[cache] == []


@pytest.mark.usefixtures("cache")
def test_fit_takes_log_reading_and_titles_from_a_name(
    monkeypatch: pytest.MonkeyPatch, trained: TrainedRun, tmp_path: Path
) -> None:
    path = json.loads(add_clicks(tmp_path, "--json").stdout)["path"]
    configs: list[RunConfig] = []

    def remember(config: RunConfig, *_: object) -> TrainedModel:
        configs.append(config)
        return TrainedModel(Path("b"), {"test": trained.figures})

    monkeypatch.setattr("training.pipeline.train", remember)

    for options in ([], ["--titles", "mine.csv", "data.max_bad_share=0.25"]):
        result = invoke("fit", "--data", "clicks", *options, "--json")
        assert result.exit_code == 0, result.output

    assert [str(config.data.path) for config in configs] == [path, path]
    assert [config.data.columns.user_id for config in configs] == ["uid", "uid"]
    assert [config.data.max_bad_share for config in configs] == [0.5, 0.25]
    assert [config.titles.name for config in configs] == ["clicks.titles.csv", "mine.csv"]


@pytest.mark.usefixtures("cache")
def test_a_named_data_set_is_read_as_it_says_and_not_as_the_bundles_log_was(
    trained: TrainedRun, tmp_path: Path
) -> None:
    lines = [line.split(",") for line in trained.log.read_text().splitlines()[1:]]
    other = tmp_path / "other.csv"
    other.write_text("user_id,product,timestamp\n" + "".join(f"{u},{i},{t}\n" for u, i, t, _ in lines))
    invoke("data", "add", "other", other, "columns.item_id=product")

    result = invoke("evaluate", "--bundle", trained.registry, "--data", "other", "--json")

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["users"] == 200
    refused = failed(invoke("evaluate", "--bundle", trained.registry, "--data", "other", "columns.item_id=what"))
    assert "no column 'what' for item_id" in refused


@pytest.mark.usefixtures("cache")
def test_the_data_set_that_a_bundle_was_trained_on_is_read_as_in_training(trained: TrainedRun, tmp_path: Path) -> None:
    columns = ["columns.user_id=who", "columns.item_id=what", "columns.timestamp=when"]
    added = invoke("data", "add", "log", trained.log, *columns, "max_bad_share=1", f"rejects={tmp_path / 'r.jsonl'}")
    assert added.exit_code == 0, added.output

    result = invoke("evaluate", "--bundle", trained.registry, "--data", "log", "--json")

    # Its weights, too, of which the data set knows nothing.
    assert json.loads(result.stdout)["users"] == trained.figures["users"]
    assert json.loads(result.stdout)["ndcg@10"] == pytest.approx(trained.figures["ndcg@10"], abs=1e-6)


# Errors


def failed(result: Result) -> str:
    """The message of a command that failed as it should: status 2, no traceback, nothing on standard output."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    progress, name, message = result.stderr.partition("bft-train: ")
    assert name
    assert all(line["kind"] == "stage" for line in json_lines(progress))
    return message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "--data", "nowhere.csv"], "nowhere.csv does not exist"),
        (["fit", "--config", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["fit", "--data", "{log}", "model.widht=3"], "unknown key model.widht; the nearest is model.width"),
        (["fit", "--data", "{log}", "model.width"], "dotted.key=value"),
        (["fit", "--data", "{log}"], "has no column 'user_id'"),
        (["fit", "--config", "{config}", "--data", "{log}", "data.max_bad_share=0"], "max_bad_share"),
        (["fit", "--config", "{config}", "--data", "{log}", "titles=nowhere.csv"], "nowhere.csv is not a titles"),
        (["fit"], "no interaction log is named; give it with --data FILE"),
        (["evaluate", "--bundle", "{tmp}", "--data", "{log}"], "neither a bundle"),
        (["evaluate", "--bundle", "{registry}", "--data", "nowhere.csv"], "nowhere.csv does not exist"),
        (["evaluate", "--bundle", "{registry}", "--data", "{strange}"], "leaves nothing for test"),
        (["registry", "show", "--registry", "{tmp}"], "nothing is published here yet"),
        (["registry", "rollback", "--registry", "{tmp}"], "no earlier bundle"),
        (["registry", "rollback", "--registry", "{registry}"], "no earlier bundle"),
        (["data", "fetch", "ml-100"], "nearest: 'ml-100k'"),
        (["data", "fetch", "toys"], "toys cannot be fetched: run `bft-train data add toys FILE`"),
        (["fit", "--data", "beuty"], "beuty does not exist; no data set is called 'beuty'; nearest: 'beauty'"),
        (["fit", "data.path=beauty"], "beauty does not exist; the data set beauty is not in the cache: run"),
        (["evaluate", "--bundle", "{registry}", "--data", "tois"], "nearest: 'toys'"),
        (["explain", "--bundle", "{registry}", "--data", "tois"], "nearest: 'toys'"),
        (["data", "add"], "takes NAME and FILE, or --known FOLDER"),
        (["data", "add", "x", "toys"], "toys does not exist; FILE is the log"),
        (["data", "add", "x", "{log}", "path=y.csv"], "leave out path"),
        (["data", "add", "X", "{strange}", "columns.user_id=who", "columns.item_id=what"], "'X' cannot name"),
        (["data", "add", "x", "--known", "{tmp}"], "goes without NAME"),
        (["data", "add", "--known", "{tmp}"], "looked for: Beauty.txt, "),
    ],
)  # fmt: skip
def test_what_a_user_can_mend_is_a_message_and_status_2(
    arguments: list[str], message: str, trained: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    strange = tmp_path / "strange.csv"
    strange.write_text("who,what,when,stars\n" + "".join(f"a,x{row},{row},5\n" for row in range(5)))
    places = {
        "log": trained.log,
        "config": trained.config,
        "registry": trained.registry,
        "strange": strange,
        "tmp": tmp_path,
    }

    text = failed(invoke(*(argument.format(**places) for argument in arguments)))

    assert message in text
    assert "Traceback" not in text


def test_a_process_that_fails_prints_no_traceback_and_writes_no_registry(trained: TrainedRun, tmp_path: Path) -> None:
    done = bft_train(
        "fit", "--config", trained.config, "--data", trained.log, "--out", tmp_path / "out", "model.width=15"
    )

    assert done.returncode == 2
    assert done.stdout == ""
    assert "width 15 is not a multiple of num_heads 2" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_damaged_bundle_is_refused_by_name(trained: TrainedRun, tmp_path: Path) -> None:
    copy = tmp_path / "registry"
    shutil.copytree(trained.registry, copy, symlinks=True)
    weights = copy / "current" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")

    text = failed(invoke("evaluate", "--bundle", copy, "--data", trained.log))

    assert "model.safetensors does not match its checksum" in text


# The registry


@pytest.fixture
def two_bundles(trained: TrainedRun, tmp_path: Path) -> tuple[Path, str, str]:
    """A registry with two bundles, the older and the current one."""
    copy = tmp_path / "registry"
    shutil.copytree(trained.registry, copy, symlinks=True)
    older = Path(trained.figures["bundle"]).name
    newer = stand_ins.write(copy).name
    registry.publish(copy, newer)
    return copy, older, newer


def test_show_names_the_current_the_previous_and_all_bundles(two_bundles: tuple[Path, str, str]) -> None:
    folder, older, newer = two_bundles

    as_json = json.loads(invoke("registry", "show", "--registry", folder, "--json").stdout)
    as_text = invoke("registry", "show", "--registry", folder).stdout

    assert as_json == {"current": newer, "previous": older, "history": [older, newer]}
    assert [line.split() for line in as_text.splitlines()] == [
        ["current", newer],
        ["previous", older],
        ["history", f"{older},", newer],
    ]


def test_rollback_makes_the_previous_bundle_current_and_a_second_one_undoes_it(
    two_bundles: tuple[Path, str, str],
) -> None:
    folder, older, newer = two_bundles

    once = json.loads(invoke("registry", "rollback", "--registry", folder, "--json").stdout)
    after_once = (folder / "current").resolve().name
    twice = json.loads(invoke("registry", "rollback", "--registry", folder, "--json").stdout)

    assert (once["current"], once["previous"]) == (older, newer)
    assert after_once == older
    assert (twice["current"], twice["previous"]) == (newer, older)


def test_the_data_configuration_of_a_bundle_reads_its_log_again(trained: TrainedRun) -> None:
    stored = open_bundle(registry.resolve(trained.registry)).manifest.training["config"]["data"]

    again = DataConfig.model_validate({**stored, "path": trained.log})

    assert again.columns.user_id == "who"
    assert again.weight_map.values == {"1": 0.0, "3": 0.5, "5": 1.0}
