"""The report: records → Markdown, `tables.json` and figures; and whether what is committed still follows from them."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from training.files import write_whole
from training.study import tables
from training.study.compare import METRICS
from training.study.comparisons import (
    ALL,
    COLD,
    MIN_SEEDS,
    MIN_USERS,
    MODELS,
    RARE,
    Comparison,
    Stratum,
    Study,
    study_of,
)
from training.study.layout import Row, Table
from training.study.records import read_all, run_path
from training.tables import DataError

REPORT, TABLES = "report.md", "tables.json"
"""Files in the report's folder; figures lie beside them."""
FIGURE_DPI = 100
"""They are kept in the repository, each below 150 kB."""


@dataclass(frozen=True)
class Composed:
    """A report before it is written: its text, its tables as JSON, and what they were made of."""

    text: str
    tables: dict[str, Any]
    study: Study

    @property
    def json_text(self) -> str:
        """`tables.json`: a line for each row, so that a change is a change of few lines."""
        parts = []
        for table in self.tables["tables"]:
            head = ", ".join(f"{json.dumps(key)}: {_json(table[key])}" for key in ("key", "title", "columns", "notes"))
            rows = ",\n".join(f"    {_json(row)}" for row in table["rows"])
            parts.append(f'  {{{head}, "rows": [\n{rows}\n  ]}}')
        return '{"tables": [\n' + ",\n".join(parts) + "\n]}\n"


def compose(records: Path, out: Path) -> Composed:
    """Make a report of a folder of records; nothing is written.

    Args:
        records: with `datasets/` and `runs/`.
        out: where the report will lie, for its links.

    Raises:
        DataError: there are no records, or one is broken (names the file and the field).
    """
    datasets, runs = read_all(records)
    if not runs:
        raise DataError(
            f"{records}: no run records in {records / 'runs'}; name their folder with --from, or make some:"
            " bft-train report --suite quick"
        )
    study = study_of(datasets, runs)
    made = tables.all_tables(study)
    link = partial(_link, records=records, out=out)
    return Composed(
        _markdown(study, {table.key: table for table in made}, link),
        {"tables": [table.to_json() for table in made]},
        study,
    )


def write_report(composed: Composed, out: Path) -> list[Path]:
    """Write a report and its figures into a folder; returns the files, the report first."""
    from training.figures import save  # matplotlib, which `--check` does without
    from training.study.figures import DRAWN

    write_whole(out / REPORT, composed.text.encode())
    write_whole(out / TABLES, composed.json_text.encode())
    drawn = [out / f"{name}.png" for name in FIGURES if _has_data(name, composed.study)]
    for path in drawn:
        save(DRAWN[path.stem](composed.study), path, dpi=FIGURE_DPI)
    return [out / REPORT, out / TABLES, *drawn]


def first_difference(composed: Composed, out: Path) -> str | None:
    """Where a written report first says something else than its records do; None if nowhere. Figures are not compared.

    Returns:
        one line: the file, the table, the row and the column, or the line of the text, and what stands in both.
    """
    path = out / TABLES
    try:
        kept = json.loads(path.read_bytes())["tables"]
        text = (out / REPORT).read_text()
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (ValueError, KeyError, TypeError) as error:
        return f"{path} is no report's tables ({error})"
    difference = _tables_differ(kept, composed.tables["tables"])
    if difference:
        return f"{path}: {difference}"
    return _text_differs(out / REPORT, text, composed.text)


def _tables_differ(kept: list[dict[str, Any]], made: list[dict[str, Any]]) -> str | None:
    if [table["key"] for table in kept] != [table["key"] for table in made]:
        return f"holds the tables {_keys(kept)}; the records give {_keys(made)}"
    for old, new in zip(kept, made, strict=True):
        for key in ("title", "columns", "notes"):
            if old[key] != new[key]:
                return f"table {new['key']}, {key}: holds {_json(old[key])}; the records give {_json(new[key])}"
        for number, (old_row, new_row) in enumerate(zip_longest(old["rows"], new["rows"]), 1):
            if old_row != new_row:
                return f"table {new['key']}, row {number}{_row_differs(old_row, new_row)}"
    return None


def _row_differs(old: dict[str, Any] | None, new: dict[str, Any] | None) -> str:
    if old is None or new is None:
        held, given = ("nothing", _json(new)) if old is None else (_json(old), "nothing")
        return f": holds {held}; the records give {given}"
    named = ", ".join(str(value) for value in list(new.values())[:3] if isinstance(value, str))
    column = next(name for name in {**new, **old} if old.get(name) != new.get(name))
    return f" ({named}), column {column!r}: holds {_json(old.get(column))}; the records give {_json(new.get(column))}"


def _text_differs(path: Path, kept: str, made: str) -> str | None:
    section = ""
    for number, (old, new) in enumerate(zip_longest(kept.splitlines(), made.splitlines()), 1):
        if new is not None and new.startswith("#"):
            section = f", section {new.lstrip('# ')!r}"
        if old != new:
            return f"{path}, line {number}{section}: holds {old!r}; the records give {new!r}"
    return None if kept == made else f"{path}: its line ends differ from those of the report"


def _keys(found: Iterable[dict[str, Any]]) -> str:
    return ", ".join(table["key"] for table in found) or "none"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# The text

FIGURES = {
    "differences": "Change by filtering of all users, rare target items and cold users, with 95 % intervals",
    "strata": "NDCG@10 with filtering minus without, by stratum, with 95 % intervals",
    "sparsity": "Relative gain in NDCG@10 over training events per item",
    "learned": "Gain K by item frequency and history length, and initial precision by item frequency",
    "curves": "Validation NDCG@10 by epoch",
    "noise": "HR@10, stated confidence and weight of replaced events over their share",
}
"""Name of the file → what it shows."""


def _has_data(figure: str, study: Study) -> bool:
    match figure:
        case "noise":
            return bool(study.noise)
        case "sparsity":
            return bool(study.of_recipe())
        case "learned":
            return any(run.filter for one in study.comparisons for run in one.on)
        case _:
            return bool(study.comparisons)


def _markdown(study: Study, made: dict[str, Table], link: Callable[[str], str]) -> str:
    shown = {name: f"![{words}]({name}.png)" if _has_data(name, study) else "" for name, words in FIGURES.items()}
    strata = [
        part
        for key, table in made.items()
        if key.startswith("strata-")
        for part in (f"### {table.title}", table.to_markdown())
    ]
    parts = [
        "# Does filtering help?",
        f"From {len(study.runs)} run records, by `bft-train report`; `bft-train report --check` fails when a number"
        f" here does not follow from them. [`{TABLES}`]({TABLES}) holds every table as data, each row with the names of"
        " its records.",
        *answer_in_sentences(study),
        made["answer"].to_markdown(),
        shown["differences"],
        *(_section(made["pooled"]) if made["pooled"].rows else []),
        *_section(made["main"]),
        *_section(made["headline"]),
        "## Is it a shift of popularity?",
        made["shift"].to_markdown(),
        *_section(made["sparsity"], shown["sparsity"]),
        *_section(made["targets"]),
        *_section(made["controls"]),
        *_section(made["noise"], shown["noise"]),
        "## By stratum",
        "Strata are cut by training counts alone. One interval in twenty excludes zero by chance: read a single stratum"
        " with that in mind.",
        shown["strata"],
        *strata,
        *_section(made["lists"]),
        *_section(made["exposure"]),
        "## What the filter learned",
        shown["learned"],
        *(
            f"**{made[key].title}**\n\n{made[key].to_markdown()}"
            for key in ("gain", "gain_by_history_length", "item_precision")
        ),
        "## Learning curves",
        shown["curves"],
        *_section(made["datasets"]),
        *_section(_linked(made["runs"], link)),
        *_section(made["environments"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(table: Table, figure: str = "") -> list[str]:
    return [f"## {table.title}", figure, table.to_markdown()]


def answer_in_sentences(study: Study) -> list[str]:
    """The answer to "does filtering help?", as paragraphs and a list."""
    claims = [comparison for comparison in study.comparisons if not comparison.caveat]
    judged = claims or study.comparisons
    if not judged:
        return ["No pair of runs, filtering on and off, with the same data, model and seed is among the records."]
    may_claim = f"that may carry a claim (at least {MIN_SEEDS} seeds and {MIN_USERS:,} test users)"
    if claims:
        which = f"the {len(claims)} comparisons, backbone × data set, {may_claim}"
        head = f"**NDCG@10 of all test users with filtering: {_counted(judged, ALL, 'NDCG@10')}**, over {which}."
    else:
        head = (
            f"**No claim can be made yet**: of the {len(study.comparisons)} comparisons, backbone × data set, none is"
            f" one {may_claim}. What they show is no evidence:"
        )
    groups = (("All test users", ALL), ("Rare target items", RARE), ("Cold users", COLD))
    lines = [_together(study)] if claims else []
    lines += [
        f"- **{name}**: " + "; ".join(f"{metric} {_counted(judged, stratum, metric)}" for metric in METRICS) + "."
        for name, stratum in groups
    ]
    lines.append(f"- **Popularity**: {_shifts_in_words(judged)}.")
    if claims:
        models = {comparison.model for comparison in claims}
        trends = {model: words for model, words in tables.sparsity_in_words(study).items() if model in models}
        lines += [f"- **Sparsity**, {MODELS.get(model, model)}: {words}." for model, words in trends.items()]
    lines.append(f"- **Baselines**: {_targets_in_words(study)}. A gain over a weak baseline would count for nothing.")
    return [head, "\n".join(filter(None, lines))]


def _together(study: Study) -> str:
    """What the data sets of each backbone say together; empty if none has several."""
    said = [
        f"{MODELS.get(model, model)}, {len(over)} data sets, NDCG@10"
        f" {tables.in_percent(change.difference, change.low, change.high, change.verdict)}"
        for (model, stratum), (over, changes) in study.together.items()
        if stratum == ALL
        for change in [changes["NDCG@10"]]
    ]
    return f"- **The data sets together**, all test users: {'; '.join(said)}." if said else ""


def _counted(compared: list[Comparison], stratum: Stratum, metric: str) -> str:
    """`better in 1 of 6 (SASRec on toys), worse in 0, no difference shown in 5`."""
    found = [(one, one.differences[stratum][metric].verdict) for one in compared if stratum in one.differences]
    named = {
        verdict: [f"{one.label} on {one.dataset.name}" for one, said in found if said == verdict]
        for verdict in ("better", "worse")
    }
    neither = len(found) - sum(map(len, named.values()))
    if neither == len(found):
        return f"no difference shown in any of {len(found)}"
    parts = [
        f"{verdict} in {len(names)}" + (f" ({', '.join(names)})" if names else "") for verdict, names in named.items()
    ]
    return ", ".join([*parts, f"no difference shown in {neither}"]) + f", of {len(found)}"


def _shifts_in_words(compared: list[Comparison]) -> str:
    gained = [one for one in compared if RARE in one.differences and one.differences[RARE]["HR@10"].verdict == "better"]
    if not gained:
        return "no gain in HR@10 at rare items is shown that could be one of listing more of them"
    return "; ".join(f"{one.label} on {one.dataset.name}: {tables.shift_in_words(one)}" for one in gained)


def _targets_in_words(study: Study) -> str:
    rows = tables.targets(study).rows
    said = [str(row.cells["in words"]) for row in rows]
    reached, absent = said.count("reached"), said.count("no record")
    missed = len(rows) - reached - absent
    return (
        f"of {len(rows)} targets for the plain backbones {reached} are reached, {missed} not, {absent} have no record"
    )


def _linked(table: Table, link: Callable[[str], str]) -> Table:
    rows = [Row({**row.cells, "record": link(str(row.cells["record"]))}, row.records) for row in table.rows]
    return replace(table, rows=tuple(rows))


def _link(name: str, records: Path, out: Path) -> str:
    return f"[{name}]({Path(os.path.relpath(run_path(records, name), out)).as_posix()})"
