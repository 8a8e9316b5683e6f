"""Progress: a bar on a terminal, JSON lines elsewhere, always on standard error."""

import io
import json

import pytest
from rich.console import Console

from training.progress import JsonReporter, TerminalReporter, reporter

ROW = {"epoch": 3, "loss": 2.5, "val_ndcg@10": 0.125, "val_hr@10": 0.25, "seconds": 7.4}


def test_json_lines_carry_every_stage_and_epoch_and_no_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with JsonReporter() as report:
        report.stage("reading")
        report.step(1, 10, 2.0)
        report.epoch(ROW)

    printed = capsys.readouterr()
    lines = [json.loads(line) for line in printed.err.splitlines()]
    assert printed.out == ""
    assert [line.pop("time") > 0 for line in lines] == [True, True]
    assert lines == [{"kind": "stage", "message": "reading"}, {"kind": "epoch", **ROW}]


def test_a_terminal_shows_the_step_of_the_epoch_and_a_line_for_each_that_ended() -> None:
    text = io.StringIO()

    with TerminalReporter(Console(file=text, force_terminal=True, width=120)) as report:
        report.stage("reading [a log].csv")
        report.step(4, 10, 2.625)
        report.epoch(ROW)
        report.step(1, 10, 2.0)

    shown = text.getvalue()
    assert "reading [a log].csv" in shown
    assert "epoch   3   loss 2.5000   validation HR@10 0.2500   NDCG@10 0.1250   7 s" in shown
    assert "this epoch" in shown


def test_an_epoch_that_nobody_validated_shows_its_loss() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with TerminalReporter(console) as report:
        report.epoch({"epoch": 3, "loss": 2.5, "seconds": 7.4})

    assert "epoch   3   loss 2.5000   7 s" in console.file.getvalue()


def test_without_a_terminal_the_reporter_writes_json(capsys: pytest.CaptureFixture[str]) -> None:
    with reporter() as report:
        report.stage("reading")

    assert json.loads(capsys.readouterr().err)["message"] == "reading"
