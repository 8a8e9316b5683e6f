"""`bft-train report`: what it writes, what `--check` finds, how it fails, and what is committed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.training.study.made_up import dataset, keep, run, whole_study
from training import datasets
from training.cli import app
from training.events import DataConfig
from training.study import report, suite
from training.study.records import read_all
from training.study.runs import Run

ROOT = Path(__file__).resolve().parents[3]


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of records and its report, by the command."""
    folder = tmp_path_factory.mktemp("study")
    records, out = keep(folder / "records", *whole_study(2000)), folder / "docs"
    done = invoke("--from", records, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    return records, out


@pytest.fixture
def copy(written: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """The same to spoil, as deep in its folder."""
    for source in written:
        shutil.copytree(source, tmp_path / source.name)
    return tmp_path / "records", tmp_path / "docs"


def check(folders: tuple[Path, Path]) -> Result:
    return invoke("--from", folders[0], "--out", folders[1], "--check")


# What is written


def test_the_first_screen_answers_for_which_data_users_and_items_and_how_certainly(written: tuple[Path, Path]):
    first = (written[1] / "report.md").read_text().split("\n## ")[0]

    assert first.startswith("# Does filtering help?")
    assert "over the 2 comparisons, backbone × data set, that may carry a claim" in first
    assert "- **The data sets together**, all test users: SASRec, 2 data sets, NDCG@10 " in first
    for line in ("- **All test users**: HR@10 ", "- **Rare target items**: HR@10 ", "- **Cold users**: HR@10 "):
        assert line in first
    rows = [line for line in first.splitlines() if line.startswith("| beauty | SASRec | NDCG@10 | 3 |")]
    assert len(rows) == 1
    assert rows[0].count("better") + rows[0].count("worse") + rows[0].count("no difference shown") == 3
    assert "1 more without a claim" in first


def test_every_figure_that_the_text_shows_is_a_small_png_beside_it(written: tuple[Path, Path]):
    text = (written[1] / "report.md").read_text()
    shown = {name for name in report.FIGURES if f"({name}.png)" in text}

    assert shown == set(report.FIGURES)
    for name in shown:
        content = (written[1] / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) < 150_000


def test_every_run_is_linked_to_its_record(written: tuple[Path, Path]):
    records, out = written
    text = (out / "report.md").read_text()

    for made in read_all(records)[1]:
        target = text.split(f"| [{made.name}](")[1].split(")")[0]
        assert (out / target).resolve() == (records / "runs" / f"{made.name}.json").resolve()


def test_the_same_records_give_the_same_bytes(written: tuple[Path, Path], tmp_path: Path):
    records, out = written
    again = tmp_path.parent / out.name  # links are relative: as deep as the first

    report.write_report(report.compose(records, out), again)

    for path in out.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name


# --check


def test_check_is_content_with_what_was_written_and_writes_nothing(copy: tuple[Path, Path]):
    before = {path: path.stat().st_mtime_ns for path in copy[1].iterdir()}

    done = check(copy)

    assert done.exit_code == 0, done.output
    assert "every table follows from" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in copy[1].iterdir()} == before


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_check_names_table_row_and_column_of_a_number_changed_in_the_tables(copy: tuple[Path, Path]):
    path = copy[1] / "tables.json"
    document = json.loads(path.read_text())
    (main,) = [table for table in document["tables"] if table["key"] == "main"]
    honest = main["rows"][1]["difference"]["low"]
    main["rows"][1]["difference"]["low"] = honest + 0.0001
    path.write_text(json.dumps(document))

    done = check(copy)

    assert done.exit_code == 1
    assert "tables.json: table main, row 2 (beauty, SASRec, NDCG@10), column 'difference': holds" in done.stderr
    assert str(honest) in done.stderr


def test_check_names_line_and_section_of_a_number_changed_in_the_text(copy: tuple[Path, Path]):
    replace(copy[1] / "report.md", "| beauty | SASRec | HR@10 | 0.0900 |", "| beauty | SASRec | HR@10 | 0.0800 |")

    done = check(copy)

    assert done.exit_code == 1
    assert "report.md, line " in done.stderr
    assert "section 'How strong the plain backbones are'" in done.stderr
    assert "HR@10 | 0.0800 |" in done.stderr


def test_check_names_what_changed_when_a_record_did(copy: tuple[Path, Path]):
    path = copy[0] / "runs" / "toys-sasrec-on-s2.json"
    document = json.loads(path.read_text())
    document["hit_users"], document["hit_ranks"] = document["hit_users"][1:], document["hit_ranks"][1:]
    path.write_text(json.dumps(document))

    done = check(copy)

    assert done.exit_code == 1
    assert "table answer, row 3 (toys, SASRec, HR@10)" in done.stderr


@pytest.mark.parametrize("kind", ["a record", "a row", "a table"])
def test_check_finds_what_is_missing(copy: tuple[Path, Path], kind: str):
    path = copy[1] / "tables.json"
    document = json.loads(path.read_text())
    if kind == "a record":
        (copy[0] / "runs" / "beauty-markov-off-s0.json").unlink()
        expected = "table main, row 1 (beauty, SASRec, HR@10), column 'Markov': holds 0.0"
    elif kind == "a row":
        del document["tables"][-1]["rows"][-1]
        expected = "table environments, row 1: holds nothing; the records give"
    else:
        del document["tables"][-1]
        expected = "runs; the records give answer, pooled, main"
    if kind != "a record":
        path.write_text(json.dumps(document))

    done = check(copy)

    assert done.exit_code == 1
    assert expected in done.stderr


def test_check_says_which_file_of_the_report_is_missing(copy: tuple[Path, Path]):
    (copy[1] / "tables.json").unlink()

    done = check(copy)

    assert done.exit_code == 1
    assert "tables.json is missing" in done.stderr


def test_check_as_json_tells_the_difference(copy: tuple[Path, Path]):
    replace(copy[1] / "report.md", "Does filtering help?", "Filtering helps!")

    done = invoke("--from", copy[0], "--out", copy[1], "--check", "--json")

    assert done.exit_code == 1
    assert "line 1" in json.loads(done.stdout)["difference"]


def test_the_committed_report_follows_from_the_committed_records(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)

    done = invoke("--from", "benchmarks/results", "--check")

    if list(Path("benchmarks/results/runs").glob("*.json")):
        assert done.exit_code == 0, done.stderr
    else:
        assert "no run records" in done.stderr
        assert not Path("docs/study").exists()


# Few records, and broken ones


def test_one_seed_of_few_users_and_a_run_without_partner_make_a_report_that_claims_nothing(tmp_path: Path):
    data, other = dataset("lastfm", 60), dataset("toys", 60)
    keep(tmp_path, [data, other], [run(data, False), run(data, True), run(other, True)])

    done = invoke("--from", tmp_path, "--out", tmp_path / "docs")

    assert done.exit_code == 0, done.output
    text = (tmp_path / "docs" / "report.md").read_text()
    assert "**No claim can be made yet**" in text
    assert "SASRec on lastfm: only 60 users, no claim." in text
    assert "`toys-sasrec-on-s1` has no partner" in text


def test_a_single_run_makes_a_report_without_comparisons(tmp_path: Path):
    data = dataset("toys", 60)
    keep(tmp_path, [data], [run(data, True)])

    done = invoke("--from", tmp_path, "--out", tmp_path / "docs")

    assert done.exit_code == 0, done.output
    text = (tmp_path / "docs" / "report.md").read_text()
    assert "No pair of runs" in text
    assert "None of these comparisons" not in text
    assert ".png" not in text


def test_no_records_and_a_broken_record_are_messages(written: tuple[Path, Path], tmp_path: Path):
    none = invoke("--from", tmp_path, "--out", tmp_path / "docs")
    shutil.copytree(written[0], tmp_path / "records")
    replace(tmp_path / "records" / "runs" / "toys-sasrec-on-s2.json", '"seed": 2', '"seed": null')
    broken = invoke("--from", tmp_path / "records", "--out", tmp_path / "docs")

    assert (none.exit_code, broken.exit_code) == (2, 2)
    assert "no run records" in none.stderr
    assert "toys-sasrec-on-s2.json: seed: " in broken.stderr
    assert not (tmp_path / "docs").exists()


# --suite


def test_check_and_a_pattern_that_no_run_has_are_refused_with_a_suite(tmp_path: Path):
    both = invoke("--suite", "quick", "--check")
    none = invoke("--suite", "quick", "--only", "sports-*", "--from", tmp_path)

    assert (both.exit_code, none.exit_code) == (2, 2)
    assert "leave out --suite" in both.stderr
    assert "matches no run of the suite quick; they are: beauty-sasrec-off-quick-s1" in none.stderr


@pytest.fixture
def walks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log of users who walk along a cycle of items, found under every data set's name; and a small recipe."""
    (tmp_path / "walks.txt").write_text(
        "\n".join(f"{user} " + " ".join(str((user + step) % 20) for step in range(5 + user % 5)) for user in range(60))
    )
    recipe = "model: {width: 8, num_layers: 1, ffn_width: 8, max_len: 8}\ntraining: {epochs: 1, batch_size: 32}\n"
    (tmp_path / "sasrec-beauty.yaml").write_text(recipe)

    class Found:
        config = DataConfig(path=tmp_path / "walks.txt", rejects=tmp_path / "rejects.jsonl")

    monkeypatch.setattr(datasets, "find", lambda name: Found)
    return tmp_path


@pytest.mark.timeout(300)  # two processes that import torch
def test_a_suite_trains_what_has_no_record_and_reports_although_a_run_failed(
    walks: Path, monkeypatch: pytest.MonkeyPatch
):
    possible, lost = (Run(name, "sasrec", True, 1, "quick") for name in ("beauty", "toys"))  # toys has no recipe
    monkeypatch.setitem(suite.SUITES, "quick", [possible, lost])
    monkeypatch.chdir(walks)
    options = ("--suite", "quick", "--recipes", walks)

    done = invoke(*options, "--json")

    assert done.exit_code == 1, done.output
    result = json.loads(done.stdout)
    assert [line.split(":")[0] for line in result["failed"]] == ["toys-sasrec-on-quick-s1"]
    assert "sasrec-toys.yaml" in done.stderr
    assert [path.name for path in walks.glob("runs/quick/runs/*")] == ["beauty-sasrec-on-quick-s1.json"]
    assert "`beauty-sasrec-on-quick-s1` has no partner" in (walks / "runs/quick/report/report.md").read_text()

    again = invoke(*options, "--only", "beauty-*")

    assert again.exit_code == 0, again.output
    assert "1 runs, 1 with" in again.stderr


def test_a_suite_of_which_every_run_failed_tells_why(walks: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*arguments: Any) -> list[str]:
        return ["beauty-sasrec-on-quick-s1: out of memory"]

    monkeypatch.setattr(suite, "work_through", fail)

    done = invoke("--suite", "quick", "--from", walks / "none", "--out", walks / "docs")

    assert done.exit_code == 1
    assert "beauty-sasrec-on-quick-s1: out of memory" in done.stderr
    assert not (walks / "docs").exists()
