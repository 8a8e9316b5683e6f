"""What a run of the job leaves for people and programs: a Markdown page and the same as JSON."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from training.files import write_whole
from training.retrain.job import EXIT_STATUS, Run
from training.study.layout import Row, Table


def to_json(run: Run) -> dict[str, Any]:
    """The run's record."""
    record = asdict(run) | {"exit_status": EXIT_STATUS[run.outcome]}
    record["window"] = run.window.to_json() if run.window else None
    record["judged"] = {key: value for key, value in run.judged.items() if key != "report"}
    return record


def to_markdown(run: Run) -> str:
    """The run's report."""
    tables = [_ingests(run), _window(run), _checks(run), _judged(run), _questions(run), _seconds(run)]
    parts = [f"## {table.title}\n\n{table.to_markdown()}" for table in tables if table.rows]
    repeated = ""
    if run.repeated_files:
        repeated = f"\n\nFiles whose content was read before: {', '.join(run.repeated_files)}."
    if run.unusable_entries:
        repeated += f"\n\n{run.unusable_entries:,} entries of the outbox say nothing that can be used; see rejects/."
    head = f"# Retraining, {run.begun}: {run.outcome}\n\n{run.reason or _success(run)}{repeated}"
    return "\n\n".join([head, *parts]) + "\n"


def keep(run: Run, work: Path) -> Path:
    """Write report and record into the job's folder; returns the report's path."""
    stem = work / "reports" / run.begun.replace(":", "-").replace("+00-00", "Z")
    write_whole(stem.with_suffix(".json"), (json.dumps(to_json(run), indent=2) + "\n").encode())
    write_whole(stem.with_suffix(".md"), to_markdown(run).encode())
    return stem.with_suffix(".md")


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
