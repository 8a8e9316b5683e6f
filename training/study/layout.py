"""Tables as plain data, and what becomes of them: Markdown for people, JSON for programs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Style = str
"""How a column is shown: `text`; `count` 1,234; `metric` 0.0123 and `signed`, its difference; `number`, three digits;
`share` 12.3 % and `change`, the same with a sign."""
NONE = "–"
SIGNIFICANT_DIGITS = 6
"""Kept of a number in JSON: more than is shown, fewer than sums differ by between machines."""


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


Cell = str | int | float | Estimate | None


@dataclass(frozen=True)
class Row:
    """The cells of a row, by column, and the names of the run records that they come from."""

    cells: Mapping[str, Cell]
    records: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """A table: `key` names it in JSON, `columns` say how each is shown, `notes` stand below it."""

    key: str
    title: str
    columns: Mapping[str, Style]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Everything, numbers rounded to `SIGNIFICANT_DIGITS`."""
        return {
            "key": self.key,
            "title": self.title,
            "columns": list(self.columns),
            "rows": [
                {name: _plain(row.cells.get(name)) for name in self.columns} | {"records": list(row.records)}
                for row in self.rows
            ],
            "notes": list(self.notes),
        }

    def to_markdown(self) -> str:
        """The table and its notes, without the title."""
        if not self.rows:
            return "\n\n".join(["No record yet.", *self.notes])
        lines = [
            _line(self.columns),
            _line("---" if style == "text" else "---:" for style in self.columns.values()),
            *(_line(shown(row.cells.get(name), style) for name, style in self.columns.items()) for row in self.rows),
        ]
        return "\n\n".join(["\n".join(lines), *self.notes])


def shown(cell: Cell, style: Style) -> str:
    """A cell as a person reads it."""
    if cell is None:
        return NONE
    if isinstance(cell, Estimate):
        return f"{shown(cell.value, style)} ({shown(cell.low, style)} … {shown(cell.high, style)})"
    if isinstance(cell, str):
        return cell
    match style:
        case "count":
            return f"{cell:,.0f}"
        case "metric":
            return f"{cell:.4f}"
        case "signed":
            return _minus(f"{cell:+.4f}")
        case "share":
            return f"{cell:.1%}".replace("%", " %")
        case "change":
            return _minus(f"{cell:+.1%}".replace("%", " %"))
        case "number":
            return _minus(f"{cell:.3g}" if abs(cell) < 1000 else f"{cell:,.0f}")
        case _:
            raise ValueError(f"no column is shown as {style!r}: the cell is {cell!r}")


def _minus(text: str) -> str:
    return text.replace("-", "−")


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def _plain(cell: Cell) -> Any:
    if isinstance(cell, Estimate):
        return {"value": _rounded(cell.value), "low": _rounded(cell.low), "high": _rounded(cell.high)}
    return _rounded(cell) if isinstance(cell, float) else cell


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
