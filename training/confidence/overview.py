"""The committed judgements of confidences and of cold users, from their records: a page each, and one over them all.

A record `calibration-NAME.json` or `cold-NAME.json` makes the page `calibration-NAME/confidence.md` or
`cold-NAME/cold.md`.
"""

from collections.abc import Mapping
from pathlib import Path

from training.cold.judge import MODEL, POPULARITY
from training.cold.records import ColdRecord
from training.confidence.criteria import criteria
from training.confidence.records import ConfidenceRecord
from training.files import write_whole
from training.study.layout import Row, Table
from training.study.records import read

OVERVIEW = "confidence.md"
"""The page over all of them, in the report's folder."""


def write_pages(records: Path, out: Path) -> list[Path]:
    """Write every page with its figures into the report's folder; returns the files, none where nothing was judged.

    Raises:
        DataError: a record is broken (names the file and the field).
    """
    judged, cold = _read(records)
    if not judged and not cold:
        return []
    from training.cold import report as of_cold  # matplotlib, which few need here
    from training.confidence import report as of_confidence

    write_whole(out / OVERVIEW, overview(judged, cold).encode())
    return [
        out / OVERVIEW,
        *(path for name, one in judged.items() for path in of_confidence.write_report(one, out / name)),
        *(path for name, one in cold.items() for path in of_cold.write_report(one, out / name)),
    ]


def first_difference(records: Path, out: Path) -> str | None:
    """Where a written page first says something else than its record does; None if nowhere. Figures are not compared.

    Raises:
        DataError: as `write_pages`.
    """
    for path, text in _pages(records, out).items():
        try:
            kept = path.read_text()
        except FileNotFoundError:
            return f"{path} is missing"
        for number, (old, new) in enumerate(zip(kept.splitlines(), text.splitlines(), strict=False), 1):
            if old != new:
                return f"{path}, line {number}: holds {old!r}; the record gives {new!r}"
        if kept != text:
            return f"{path}: it is longer or shorter than its record gives"
    return None


def _pages(records: Path, out: Path) -> dict[Path, str]:
    judged, cold = _read(records)
    if not judged and not cold:
        return {}
    from training.cold import report as of_cold
    from training.confidence import report as of_confidence

    return {
        out / OVERVIEW: overview(judged, cold),
        **{out / name / of_confidence.REPORT: of_confidence.markdown(one) for name, one in judged.items()},
        **{out / name / of_cold.REPORT: of_cold.markdown(one) for name, one in cold.items()},
    }


def _read(records: Path) -> tuple[dict[str, ConfidenceRecord], dict[str, ColdRecord]]:
    """By the names of their files."""
    return (
        {path.stem: read(path, ConfidenceRecord) for path in sorted(records.glob("calibration-*.json"))},
        {path.stem: read(path, ColdRecord) for path in sorted(records.glob("cold-*.json"))},
    )


def overview(judged: Mapping[str, ConfidenceRecord], cold: Mapping[str, ColdRecord]) -> str:
    """What is asked of a confidence, and who shows it; and what users get whom nobody has seen."""
    parts = [
        "# How sure is it, and is it right to be?",
        "By `bft-train report`, from the records of `bft-train calibrate` and `bft-train cold`; `bft-train report"
        " --check` fails when a line here does not follow from them.",
    ]
    if judged:
        links = ", ".join(f"[{_short(name)}]({name}/confidence.md)" for name in judged)
        parts += ["## What is asked of a confidence", _criteria(judged).to_markdown(), f"In full: {links}."]
    if cold:
        links = ", ".join(f"[{_short(name)}]({name}/cold.md)" for name in cold)
        parts += ["## Users nobody has seen, before any event", _cold(cold).to_markdown(), f"In full: {links}."]
    return "\n\n".join(parts) + "\n"


def _criteria(judged: Mapping[str, ConfidenceRecord]) -> Table:
    found = {_short(name): {one.asked: one for one in criteria(record)} for name, record in judged.items()}
    rows = []
    for asked in dict.fromkeys(asked for of_record in found.values() for asked in of_record):
        answers = {name: of_record.get(asked) for name, of_record in found.items()}
        told = {
            name: "" if one is None else one.found if one.is_met else f"**not met**: {one.found}"
            for name, one in answers.items()
        }
        met = sum(one is not None and one.is_met for one in answers.values())
        asked_of = sum(one is not None for one in answers.values())
        rows.append(Row({"asked": asked, **told, "met": f"{met} of {asked_of}"}))
    columns = ("asked", *found, "met")
    return Table("criteria", "What is asked of a confidence", dict.fromkeys(columns, "text"), tuple(rows))


def _cold(cold: Mapping[str, ColdRecord]) -> Table:
    rows = []
    for name, record in cold.items():
        systems = {one.system: one for one in record.questions[0].systems}
        popular = systems[POPULARITY]
        rows.append(
            Row(
                {
                    "data": _short(name),
                    "users": record.questions[0].users,
                    "HR@10": systems[MODEL].hr.estimate,
                    "of the popular list": popular.hr.estimate,
                    "difference": popular.hr_gain.estimate,
                    "default": record.default,
                }
            )
        )
    return Table(
        "cold",
        "Users nobody has seen, before any event",
        {
            "data": "text",
            "users": "count",
            "HR@10": "metric",
            "of the popular list": "metric",
            "difference": "signed",
            "default": "text",
        },
        tuple(rows),
    )


def _short(name: str) -> str:
    return name.partition("-")[2]
