"""What a run of the job leaves for people and programs: a Markdown page, its figure, and the same as JSON.

A run that publishes is told of twice: before, in a folder for what is announced, and when it has ended, among the
reports. Killed in between it leaves the first, which the next run keeps if it came true.
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from model import registry as registries
from training.config import PATHS
from training.files import write_whole
from training.retrain.run import EXIT_STATUS, Run
from training.study.layout import Row, Table

REPORTS = "reports"
SHOWN_NIGHTS = 60
ANNOUNCED = "announced"
"""Of a run that is about to publish, and names the bundle."""


def to_json(run: Run) -> dict[str, Any]:
    """The run's record."""
    record = asdict(run) | {"exit_status": EXIT_STATUS[run.outcome]}
    record["config"] = run.config.model_dump(mode="json", exclude=PATHS)
    record["window"] = run.window.to_json() if run.window else None
    record["judged"] = {key: value for key, value in run.judged.items() if key != "report"}
    return record


def to_markdown(run: Run, figure: str | None = None) -> str:
    """The run's report, with a figure if it is told of one's file."""
    tables = [_ingests(run), _window(run), _checks(run), _judged(run), _questions(run), _seconds(run)]
    parts = [f"## {table.title}\n\n{table.to_markdown()}" for table in tables if table.rows]
    remarks = "".join(f"\n\nNote: {note}." for note in run.notes)
    if any(not one.is_met for one in run.checks):
        remarks += (
            "\n\nWhat was taken in stays in the log, and is part of the next night's window. `bft-train log show --work"
            " WORK` lists the ingests, and `bft-train log forget INGEST --work WORK` takes one out."
        )
    if run.repeated_files:
        remarks += f"\n\nFiles whose content was read before: {', '.join(run.repeated_files)}."
    if run.unusable_entries:
        remarks += f"\n\n{run.unusable_entries:,} entries of the outbox say nothing that can be used; see rejects/."
    head = f"# Retraining, {run.begun}: {run.outcome}\n\n{run.reason or _success(run)}{remarks}"
    if figure is not None:
        head += f"\n\n![What the gate asked, how the candidate learned, and the nights]({figure})"
    return "\n\n".join([head, *parts]) + "\n"


def path_of(run: Run, work: Path) -> Path:
    """Where the report of a run that has ended lies, in the job's folder; the JSON lies beside it."""
    return work / REPORTS / f"{_stem(run)}.md"


def announce(run: Run, work: Path) -> None:
    """Tell of a run that is about to publish, as if it had."""
    _write(run, work, ANNOUNCED)


def keep(run: Run, work: Path) -> None:
    """Write report and record of a run that has ended into the job's folder."""
    _write(run, work, REPORTS)
    shutil.rmtree(work / ANNOUNCED, ignore_errors=True)


def keep_announced(work: Path, registry: Path) -> None:
    """Keep what a killed run announced, if it did publish, and remove what it had begun to write."""
    index = registries.read_index(registry)
    published = () if index is None else index.history
    for record in sorted((work / ANNOUNCED).glob("*.json")):
        # One that lies there already was killed when the others had begun to be removed.
        if json.loads(record.read_bytes())["bundle"] in published and not (work / REPORTS / record.name).exists():
            for path in filter(Path.exists, (record.with_suffix(".png"), record.with_suffix(".md"), record)):
                write_whole(work / REPORTS / path.name, path.read_bytes())
    for unfinished in (work / REPORTS).glob(".*"):
        unfinished.unlink()
    shutil.rmtree(work / ANNOUNCED, ignore_errors=True)


def _records(work: Path) -> list[dict[str, Any]]:
    """Of the runs that have ended, oldest first."""
    return [json.loads(path.read_bytes()) for path in sorted((work / REPORTS).glob("*.json"))]


def _stem(run: Run) -> str:
    return run.begun.replace(":", "-").replace("+00-00", "Z")


def _write(run: Run, work: Path, place: str) -> None:
    folder = work / place
    figure = _draw(run, work, folder / f"{_stem(run)}.png") if run.questions else None
    # The record last: where it lies, the rest does too.
    write_whole(folder / f"{_stem(run)}.md", to_markdown(run, figure).encode())
    write_whole(folder / f"{_stem(run)}.json", (json.dumps(to_json(run), indent=2) + "\n").encode())


def _draw(run: Run, work: Path, path: Path) -> str | None:
    """Draw a run that has judged; returns the figure's name, None where it cannot be drawn: no model waits for it."""
    # A moment to import, for nights that judge.
    from training.figures import save
    from training.retrain.figures import night

    try:
        save(night(run, _records(work)[-SHOWN_NIGHTS:]), path)
    except OSError:
        raise  # the disk is full, for one
    except Exception as error:
        note = f"the figure could not be drawn ({type(error).__name__}: {error})"
        run.notes += [] if note in run.notes else [note]
        return None
    return path.name


def _success(run: Run) -> str:
    return f"Bundle `{run.bundle}` is current; before it was {f'`{run.current}`' if run.current else 'none'}."


def _ingests(run: Run) -> Table:
    columns = dict.fromkeys(("ingest", "read", "new", "duplicates", "of erased users", "erased"), "count")
    rows = [
        Row(dict(zip(columns, (one.number, one.read, one.new, one.duplicates, one.of_erased, one.erased), strict=True)))
        for one in run.ingests
    ]
    return Table("ingests", "Taken in", columns, tuple(rows))


def _window(run: Run) -> Table:
    found = run.window.to_json() if run.window else {}
    rows = [
        Row({"of the new events": name.replace("_", " "), "value": value})
        for name, value in found.items()
        if isinstance(value, int | float)
    ]
    return Table("window", "What is new", {"of the new events": "text", "value": "number"}, tuple(rows))


def _checks(run: Run) -> Table:
    columns = {"check": "text", "found": "number", "accepted": "text", "": "text"}
    rows = [
        Row({"check": one.name, "found": one.found, "accepted": one.accepted, "": "" if one.is_met else "**refused**"})
        for one in run.checks
    ]
    return Table("checks", "Whether it can be learned from", columns, tuple(rows))


def _judged(run: Run) -> Table:
    names = [name for name in ("candidate", "current", "popularity") if name in run.judged]
    columns = {"model": "text", "NDCG@10": "metric", "HR@10": "metric", "list confidence": "metric"}
    rows = []
    for name in names:
        figures = run.judged[name]
        values = (name, figures["ndcg@10"], figures["hr@10"], figures["list_confidence"])
        rows.append(Row(dict(zip(columns, values, strict=True))))
    notes: tuple[str, ...] = ()
    if rows:
        notes = (f"{run.judged['targets']:,} events of {run.judged['users']:,} users, which neither model learned.",)
    return Table("judged", "On the newest events", columns, tuple(rows), notes)


def _questions(run: Run) -> Table:
    columns = {"asked": "text", "found": "number", "accepted": "text", "": "text"}
    rows = [
        Row({"asked": one.name, "found": one.found, "accepted": one.accepted, "": one.verdict}) for one in run.questions
    ]
    return Table("gate", "The gate", columns, tuple(rows))


def _seconds(run: Run) -> Table:
    rows = [Row({"stage": stage, "seconds": seconds}) for stage, seconds in run.seconds.items()]
    return Table("seconds", "Time", {"stage": "text", "seconds": "number"}, tuple(rows))
