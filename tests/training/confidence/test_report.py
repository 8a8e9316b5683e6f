"""`bft-train calibrate` on the small bundle: its record, its report, and how it fails."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks._bundles import add_copy
from model import registry
from model.bundle import open_bundle
from tests.training.conftest import TrainedRun, bft_train
from tests.training.study.made_up import keep, whole_study
from training.cli import app
from training.confidence.criteria import criteria
from training.confidence.records import ConfidenceRecord, Interval
from training.confidence.report import REPORT, markdown, tables
from training.study.records import read


@pytest.fixture(scope="module")
def judged(trained: TrainedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report in which copies of the bundle stand for other systems."""
    out, others = tmp_path_factory.mktemp("confidence"), tmp_path_factory.mktemp("others")
    paid: list[str | Path] = ["--dropout-passes", "2", "--ensemble", trained.registry]
    for option in ("--ensemble", "--other-seed"):
        paid += [option, others / add_copy(trained.registry, others, name=option.strip("-"))]
    done = bft_train("calibrate", "--bundle", trained.registry, "--data", trained.log, "--report", out, *paid, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [Path(path).name for path in told["files"]] == [REPORT, "reliability.png", "risk-coverage.png"]
    return out


def record(judged: Path) -> ConfidenceRecord:
    return read(judged / "calibration-log.json", ConfidenceRecord)


def test_the_quality_of_the_surest_lists_stands_by_coverage(judged: Path) -> None:
    found = record(judged)

    table = next(table for table in tables(found) if table.key == "coverage")

    of_all = table.rows[0].cells
    assert list(table.columns)[1:4] == ["HR@10 of 20 %", "HR@10 of 50 %", "HR@10 of 80 %"]
    assert of_all["HR@10 of 20 %"] == found.lists.hit_rate_at["20%"]
    assert of_all["NDCG@10 of 80 %"] == found.lists.ndcg_at["80%"]


def test_the_record_has_the_figures_that_training_found(judged: Path, trained: TrainedRun) -> None:
    found = record(judged)
    figures = trained.figures

    assert found.items.ece.value == pytest.approx(figures["ece@10"], rel=1e-3)
    assert found.items.mean_confidence == pytest.approx(figures["mean_confidence"], rel=1e-4)
    assert found.likelihood.model.value == pytest.approx(figures["nll"], rel=1e-4)
    assert found.lists.realised == pytest.approx(figures["hr@10"])
    manifest = open_bundle(registry.resolve(trained.registry)).manifest
    served = found.models["served"]
    assert (served["version"], served["commit"]) == (manifest.version, manifest.training["commit"])
    assert served["config"]["training"]["seed"] == manifest.training["config"]["training"]["seed"]
    assert found.models["MC dropout"] == served


def test_an_ensemble_of_the_served_model_and_its_copy_says_what_that_says_for_free(judged: Path) -> None:
    found = {one.name: one for one in record(judged).comparisons}

    ensemble, asked = found["ensemble of 2"], found["ensemble of 2, asked"]
    assert ensemble.hit_rate == pytest.approx(found["served list confidence"].hit_rate, abs=0.01)
    # Neither variance nor precision is left of the mean of two that agree.
    assert asked.aurc.value == pytest.approx(found["free, fitted"].aurc.value, abs=0.01)


def test_the_report_tells_whether_confidence_behaves(judged: Path) -> None:
    found, text = record(judged), (judged / REPORT).read_text()

    assert found.seed_agreement == 1
    assert "A model of another seed puts 100 % of the users in the same tenth" in text
    assert found.altered[0].history == "their own"
    assert [one.events for one in found.reliability] == [0, 1, 2, 3, 5, 10]
    for title in ("Histories that are nobody's", "Every item of the catalogue", "Reliability, by number of events"):
        assert f"## {title}" in text


def test_the_report_is_made_of_the_record_alone(judged: Path) -> None:
    text = (judged / REPORT).read_text()

    assert text == markdown(record(judged))
    assert "MC dropout, 2 passes" in text
    assert all((judged / name).stat().st_size > 1000 for name in ("reliability.png", "risk-coverage.png"))


def test_what_is_asked_is_answered_by_the_figures_of_the_record(judged: Path) -> None:
    found = record(judged)
    lists, items = found.lists, found.items
    far, near = (Interval(value=value, low=value, high=value) for value in (-0.1, 0.1))

    def answered(**changes: Any) -> dict[str, bool]:
        changed = found.model_copy(update=changes)
        return {name: one.is_met for one in criteria(changed) for name in [" ".join(one.asked.split()[:2])]}

    def with_lists(**changes: Any) -> dict[str, bool]:
        return answered(lists=lists.model_copy(update=changes))

    for p_value, is_met in ((0.0099, False), (0.0101, True)):
        assert with_lists(p_value=p_value, chi_square=1.0)["lists by"] == is_met
    for slope, is_met in ((0.89, False), (0.9, True), (1.1, True), (1.11, False)):
        assert with_lists(slope=Interval(value=slope, low=0, high=2))["slope of"] == is_met
    for ratio, is_met in ((4.9, False), (5.0, True)):
        assert with_lists(top_over_bottom=Interval(value=ratio, low=0, high=9))["the surest"] == is_met
    for ece, null, is_met in ((0.011, 0.0, False), (0.009, 0.0, True), (0.02, 0.021, True)):
        changed = items.model_copy(
            update={"mean_confidence": 0.1, "ece": Interval(value=ece, low=0, high=1), "ece_null": (0.0, null)}
        )
        assert answered(items=changed)["ECE of"] == is_met
    for skill, is_met in ((far, False), (near, True)):
        assert answered(items=items.model_copy(update={"brier_skill": skill}))["Brier skill"] == is_met
    for difference, is_met in ((far, False), (near, True)):
        words = [
            one.model_copy(update={"log_loss_difference": difference}) if one.name == found.best_free else one
            for one in found.comparisons
        ]
        assert answered(comparisons=tuple(words))["log-loss below"] == is_met
    assert [answered(seed_agreement=share)["two seeds"] for share in (0.79, 0.8)] == [False, True]
    assert [answered(by_catalogue_item=dict(enumerate(means)))["rarer items"] for means in ([1, 2, 3], [1, 3, 2])] == [
        True,
        False,
    ]


def test_the_committed_pages_follow_from_the_records(judged: Path, tmp_path: Path) -> None:
    records, out = keep(tmp_path / "records", *whole_study(200)), tmp_path / "docs"
    shutil.copy(judged / "calibration-log.json", records)

    def report(*options: str) -> Result:
        return CliRunner().invoke(app, ["report", "--from", str(records), "--out", str(out), *options])

    assert report().exit_code == 0
    page = (out / "confidence.md").read_text()
    assert "[log](calibration-log/confidence.md)" in page
    assert (out / "calibration-log" / "confidence.md").read_text() == (judged / REPORT).read_text()
    assert report("--check").exit_code == 0

    text = (records / "calibration-log.json").read_text()
    (records / "calibration-log.json").write_text(re.sub(r'(?<="temperature": )[0-9.]+', "9.5", text))
    checked = report("--check")
    assert checked.exit_code == 1
    assert "calibration-log/confidence.md, line 3: holds" in checked.stderr


def refused(trained: TrainedRun, out: Path, *options: str | Path) -> str:
    """What is said of options with which nothing is judged."""
    done = bft_train(
        "calibrate", "--bundle", trained.registry, "--data", trained.log, "--report", out / "report", *options
    )
    assert done.returncode == 2
    assert not (out / "report").exists()
    return done.stderr


@pytest.mark.parametrize(
    ("option", "changed", "message"),
    [
        ("--ensemble", {"lineage": "0" * 16}, "knows other items"),
        ("--other-seed", {"data": {"split": "users"}}, "learned from another log, or another split of it"),
        ("--ensemble", {"data": {"sha256": "0" * 64}}, "learned from another log, or another split of it"),
        ("--other-seed", {"event": "next_item"}, "its confidences are of next_item"),
        ("--plain", {"name": "another"}, "filters; --plain is a model that was trained with model.filtering=off"),
    ],
)
def test_a_bundle_that_does_not_compare_is_refused_by_name(
    trained: TrainedRun, tmp_path: Path, option: str, changed: dict[str, Any], message: str
) -> None:
    data = open_bundle(registry.resolve(trained.registry)).manifest.data
    fields = {name: {**data, **value} if name == "data" else value for name, value in changed.items()}

    def change(folder: Path) -> None:
        calibration = folder / "calibration.json"
        document = json.loads(calibration.read_text())
        calibration.write_text(json.dumps(document | {"event": fields.get("event", document["event"])}))

    other = tmp_path / add_copy(trained.registry, tmp_path, change, **fields)

    assert f"{other}: {message}" in refused(trained, tmp_path, option, other)


def test_a_bundle_is_no_other_seed_of_itself_and_counts_once(trained: TrainedRun, tmp_path: Path) -> None:
    own = trained.registry

    assert "is the bundle that is judged" in refused(trained, tmp_path, "--other-seed", own)
    assert "stands twice in the ensemble" in refused(trained, tmp_path, "--ensemble", own, "--ensemble", own)


def test_a_log_that_the_bundle_was_not_trained_on_is_refused(trained: TrainedRun, tmp_path: Path) -> None:
    lines = trained.log.read_text().splitlines(keepends=True)
    longer = tmp_path / trained.log.name
    longer.write_text("".join([*lines, lines[-1].replace(lines[-1].split(",")[0], "somebody")]))

    assert "not the log that" in refused(trained, tmp_path, "--data", longer)
