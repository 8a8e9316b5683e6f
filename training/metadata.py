"""Items' metadata: a table with a row an item, of columns that hold one text, several texts, or a number.

RecBole `.item` files declare what a column holds; of CSV and Parquet it is found by looking, or said by the
configuration. An empty field says that the value is not known.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import polars as pl
from pydantic import BaseModel, ConfigDict, Field

from model.new_items import ACCEPTED, Kind, Metadata, Value
from training.catalog import TITLE_COLUMNS
from training.tables import BAD_ROW_SCHEMA, CSV, RECBOLE, DataError, describe_bad_rows, read_header, read_table, shorten

TAG_SEPARATOR = "|"
"""Between the texts of one field, of a CSV or Parquet file."""
_DECLARED: dict[str, Kind] = {"token": "category", "token_seq": "tags", "float": "number"}
"""RecBole's types of columns; the texts of a `token_seq` are separated by blanks."""


class MetadataConfig(BaseModel):
    """Where the items' metadata are, and how they are read. Strict and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    path: Annotated[Path, Field(strict=False)]
    """A `.item`, `.csv` or `.parquet` file with `item_id` and further columns."""
    columns: dict[str, Kind] | None = None
    """The columns to use and what they hold; None: all but titles, by the file's own types or what is found in them."""


@dataclass(frozen=True)
class MetadataTable:
    """The metadata of items."""

    kinds: dict[str, Kind]
    """Column → what it holds."""
    rows: dict[str, Metadata]
    """Item id → its values."""


def read_metadata(config: MetadataConfig) -> MetadataTable:
    """Read a table of metadata.

    Raises:
        DataError: no such file or column, a bad row, a value of another kind, a row without an id, or two rows of one
            item.
    """
    path, suffix = config.path, config.path.suffix.lower()
    if suffix not in (".item", ".csv", ".parquet") or not path.is_file():
        raise DataError(f"{path} is not a metadata file; accepted: an existing .item, .csv or .parquet file")
    declared: dict[str, Kind] = {}
    if suffix == ".parquet":
        frame = _read_parquet(path)
    else:
        frame, declared = _read_text(path, recbole=suffix == ".item")
    offered = [name for name in frame.columns if name not in ("line", "item_id")]
    if config.columns is not None and (missing := [name for name in config.columns if name not in offered]):
        raise DataError(
            f"{path} has no column {missing[0]!r}, which metadata.columns names; its columns: {', '.join(offered)}"
        )
    kinds = config.columns or {
        name: declared.get(name) or _found_kind(frame[name], is_typed=suffix == ".parquet")
        for name in offered
        if name not in TITLE_COLUMNS
    }
    if not kinds:
        raise DataError(f"{path} has no column of metadata; needed: item_id and at least one that is not a title")
    separator = " " if suffix == ".item" else TAG_SEPARATOR
    _check_ids(path, frame)
    columns = {name: _values(path, frame, name, kind, separator) for name, kind in kinds.items()}
    rows = zip(*columns.values(), strict=True)
    return MetadataTable(
        kinds,
        {item_id: dict(zip(kinds, row, strict=True)) for item_id, row in zip(frame["item_id"], rows, strict=True)},
    )


def _read_text(path: Path, *, recbole: bool) -> tuple[pl.DataFrame, dict[str, Kind]]:
    """`line`, `item_id` and all other columns as text; what a RecBole header declares them to be."""
    dialect = RECBOLE if recbole else CSV
    header = read_header(path, dialect)
    _check_has_id(path, header)
    if "line" in header:
        raise DataError(f"{path} line 1: a column may not be called `line`; rename it")
    blocks = list(read_table(path, dialect, header, {name: name for name in header}, hashlib.sha256()))
    bad = [block.bad.insert_column(0, pl.lit(str(path)).alias("file")) for block in blocks if len(block.bad)]
    if bad:
        raise DataError(f"{path} has bad rows; correct them:\n{describe_bad_rows(pl.concat(bad))}")
    if not blocks:
        raise DataError(f"{path} has no rows below its header; needed: one an item")
    declared = _declared_kinds(path) if recbole else {}
    return pl.concat([block.rows for block in blocks]), declared


def _declared_kinds(path: Path) -> dict[str, Kind]:
    with path.open(encoding="utf-8-sig") as file:
        fields = file.readline().rstrip("\r\n").split(RECBOLE.separator)
    types = dict(field.rsplit(":", 1) for field in fields)
    for name, declared in types.items():
        if name != "item_id" and declared not in _DECLARED:
            raise DataError(
                f"{path} line 1, field {name}: type {declared!r} is not read as metadata; accepted:"
                f" {', '.join(_DECLARED)}"
            )
    return {name: _DECLARED[declared] for name, declared in types.items() if name != "item_id"}


def _read_parquet(path: Path) -> pl.DataFrame:
    try:
        frame = pl.read_parquet(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet ({error}); write it again") from error
    _check_has_id(path, frame.columns)
    line = pl.int_range(1, len(frame) + 1, dtype=pl.Int64(), eager=True).alias("line")
    return frame.drop("line", strict=False).insert_column(0, line).with_columns(pl.col("item_id").cast(pl.String))


def _check_has_id(path: Path, header: Sequence[str]) -> None:
    if "item_id" not in header:
        raise DataError(f"{path} needs the column item_id; its columns: {', '.join(header)}")


def _check_ids(path: Path, frame: pl.DataFrame) -> None:
    nameless = frame.filter(pl.col("item_id").is_null() | (pl.col("item_id") == ""))
    if len(nameless):
        raise DataError(f"{path} line {nameless['line'][0]}, field item_id: missing; accepted: the id of an item")
    doubled = frame.filter(pl.col("item_id").is_duplicated() & ~pl.col("item_id").is_first_distinct())
    if len(doubled):
        line, item_id = doubled.select("line", "item_id").row(0)
        raise DataError(f"{path} line {line}, field item_id, value {item_id!r}: has a row already; keep one an item")


def _found_kind(values: pl.Series, *, is_typed: bool) -> Kind:
    """What a column holds, by its type or, of text, by its values."""
    if values.dtype.is_numeric():
        return "number"
    if isinstance(values.dtype, pl.List):
        return "tags"
    texts = [text for text in values.cast(pl.String).to_list() if text]
    if any(TAG_SEPARATOR in text for text in texts):
        return "tags"
    # Text in a file that has numbers is no number; in one that has text alone it may be.
    return "category" if is_typed or not texts or any(_number(text) is None for text in texts) else "number"


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _values(path: Path, frame: pl.DataFrame, name: str, kind: Kind, separator: str) -> list[Value | None]:
    """A column's values in the form of its kind."""
    read: dict[Kind, Callable[[Any], Value | None]] = {
        "number": lambda value: _number(str(value)),
        "category": str,
        "tags": lambda value: tuple(
            map(str, value if isinstance(value, list) else filter(None, str(value).split(separator)))
        ),
    }
    given = [None if value == "" else value for value in frame[name].to_list()]
    values = [None if value is None else read[kind](value) for value in given]
    wrong = [place for place, value in enumerate(values) if value is None and given[place] is not None]
    if wrong:
        lines = frame["line"].gather(wrong)
        bad = pl.DataFrame(
            {
                "line": lines,
                "field": name,
                "value": [str(given[place]) for place in wrong],
                "reason": f"not a {kind}",
                "accepted": f"{ACCEPTED[kind]}, or nothing",
            },
            schema=BAD_ROW_SCHEMA,
        ).with_columns(shorten(pl.col("value")).alias("value"))
        bad.insert_column(0, pl.lit(str(path)).alias("file"))
        raise DataError(f"{path} has values that are not of their column's kind:\n{describe_bad_rows(bad)}")
    return values
