"""Text tables read in blocks: every record with the line it begins on, every bad record with its reason.

Three dialects: CSV (RFC 4180: commas, fields may be quoted and may then hold line breaks), RecBole files
(tabs, header `name:type`, no quoting: a quote is part of the value) and plain lines. All are UTF-8; a byte
order mark and `\\r\\n` line ends are accepted. Nothing is guessed about types: every field comes back as
text.

A block is one `read` of the file, so memory beyond the result stays bounded however long the file is.
"""

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import polars as pl

BLOCK_BYTES = 32 * 2**20
MAX_LINE_BYTES = 64 * 2**20
_BOM = b"\xef\xbb\xbf"

VALUE_CHARS = 80
"""Longest piece of a bad value that is shown or stored."""

BAD_ROW_SCHEMA = pl.Schema(
    {
        "line": pl.Int64(),
        "field": pl.String(),
        "value": pl.String(),
        "reason": pl.String(),
        "accepted": pl.String(),
    }
)


class DataError(ValueError):
    """Input data that cannot be used; the message names file, line, field, value and the accepted form."""


class Digest(Protocol):
    """What a `hashlib` object offers here: it is fed every byte of the file, in order."""

    def update(self, data: bytes, /) -> None: ...


@dataclass(frozen=True)
class Dialect:
    """How a text table separates its fields."""

    separator: str
    quoting: bool
    """Whether `"…"` encloses a field; otherwise a quote is an ordinary character."""
    typed_header: bool
    """Whether header fields read `name:type`; the type is dropped."""


CSV = Dialect(separator=",", quoting=True, typed_header=False)
RECBOLE = Dialect(separator="\t", quoting=False, typed_header=True)


class Block(NamedTuple):
    """A stretch of one file."""

    rows: pl.DataFrame
    """`line` (Int64, 1 is the file's first line) and the wanted columns as text."""
    bad: pl.DataFrame
    """Records that could not be split, in `BAD_ROW_SCHEMA`."""
    blank_lines: int


class _Parsed(NamedTuple):
    block: Block
    lines_used: int


def read_header(path: Path, dialect: Dialect) -> list[str]:
    """Column names from the first line of `path`.

    Raises:
        DataError: no header, a broken one, or a name that occurs twice.
    """
    with path.open("rb") as file:
        first = file.readline(MAX_LINE_BYTES).removeprefix(_BOM)
    try:
        line = first.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        raise DataError(f"{path} line 1: the header is not UTF-8; save the file as UTF-8") from None
    if not line:
        raise DataError(f"{path} line 1: no header; the first line must name the columns")
    names = line.split(dialect.separator)
    if dialect.quoting:
        try:
            names = next(csv.reader([line], delimiter=dialect.separator, strict=True))
        except csv.Error as error:
            raise DataError(f"{path} line 1: the header is not valid CSV ({error})") from None
    if dialect.typed_header:
        untyped = [name for name in names if ":" not in name]
        if untyped:
            raise DataError(f"{path} line 1, field {untyped[0]!r}: header fields must read name:type, tab separated")
        names = [name.rpartition(":")[0] for name in names]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise DataError(f"{path} line 1: column {doubled[0]!r} occurs more than once; names must differ")
    return names


def read_table(
    path: Path, dialect: Dialect, header: list[str], columns: dict[str, str], digest: Digest
) -> Iterator[Block]:
    """Records below the header, in file order.

    Args:
        header: what `read_header` gave for this file.
        columns: new name → name in the header, for each column that is wanted.
        digest: fed every byte of the file.
    """
    layout = _Layout(dialect, len(header), {new: header.index(old) for new, old in columns.items()})

    def parse(lines: "_Lines") -> _Parsed:
        if dialect.quoting and any('"' in line for line in lines.texts):
            return _parse_quoted(lines, layout)
        return _Parsed(_parse_plain(lines, layout), len(lines.texts))

    return _read_blocks(path, parse, digest, has_header=True)


def read_lines(path: Path, digest: Digest) -> Iterator[Block]:
    """Whole lines of a text file without a header, as the one column `text`."""

    def parse(lines: "_Lines") -> _Parsed:
        frame = lines.frame().with_columns(reason=pl.when("invalid").then(pl.lit(_NOT_UTF8)))
        return _Parsed(_split_faults(frame, ["text"], "text in UTF-8"), len(lines.texts))

    return _read_blocks(path, parse, digest, has_header=False)


_NOT_UTF8 = "not UTF-8"


@dataclass(frozen=True)
class _Layout:
    dialect: Dialect
    num_fields: int
    positions: dict[str, int]
    """Wanted column → its place among the fields."""

    @property
    def accepted(self) -> str:
        separator = {",": "commas", "\t": "tabs"}[self.dialect.separator]
        return f"{self.num_fields} fields, separated by {separator}, in UTF-8"

    def wrong_count(self, count: int | str) -> str:
        return f"{count} fields where the header has {self.num_fields}"


@dataclass(frozen=True)
class _Lines:
    """Consecutive lines of a file, without line ends; bytes that are not UTF-8 shown as U+FFFD."""

    first: int
    texts: list[str]
    invalid: list[int]
    """Indices of the lines that were not UTF-8, ascending."""
    at_end: bool
    """Nothing follows in the file."""

    def frame(self) -> pl.DataFrame:
        """`line`, `text` and `invalid` of each line."""
        index = pl.int_range(pl.len(), dtype=pl.Int64())
        frame = pl.DataFrame({"text": self.texts}, schema={"text": pl.String()})
        return frame.select(line=index + self.first, text="text", invalid=index.is_in(self.invalid))


def _read_blocks(
    path: Path, parse: Callable[[_Lines], _Parsed], digest: Digest, *, has_header: bool
) -> Iterator[Block]:
    # `pending` is what the last block left over: half a line, or a quoted record that has not ended yet.
    pending = b""
    line = 1
    with path.open("rb") as file:
        if has_header:
            digest.update(file.readline(MAX_LINE_BYTES))
            line += 1
        at_end = False
        while not at_end:
            at_start = file.tell() == 0
            data = file.read(BLOCK_BYTES)
            digest.update(data)
            at_end = not data
            pending += data.removeprefix(_BOM) if at_start else data
            cut = len(pending) if at_end else pending.rfind(b"\n") + 1
            if len(pending) - cut > MAX_LINE_BYTES:
                raise DataError(f"{path} line {line}: longer than {MAX_LINE_BYTES} bytes; is this a text file?")
            if cut == 0:
                continue
            lines = _decode(pending[:cut], first=line, at_end=at_end)
            parsed = parse(lines)
            line += parsed.lines_used
            if parsed.lines_used < len(lines.texts):
                pending = b"\n".join(pending.split(b"\n")[parsed.lines_used :])
            else:
                pending = pending[cut:]
            yield parsed.block


def _decode(data: bytes, *, first: int, at_end: bool) -> _Lines:
    data = data.removesuffix(b"\n")
    invalid: list[int] = []
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("utf-8", errors="replace")
        invalid = [index for index, line in enumerate(data.split(b"\n")) if not _is_utf8(line)]
    if "\r" in text:
        text = text.replace("\r\n", "\n").removesuffix("\r")
    return _Lines(first, text.split("\n"), invalid, at_end)


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _parse_plain(lines: _Lines, layout: _Layout) -> Block:
    fields = pl.col("text").str.split(layout.dialect.separator)
    frame = (
        lines.frame()
        .with_columns(fields=fields)
        .with_columns(
            count=pl.col("fields").list.len(),
            **{name: pl.col("fields").list.get(at, null_on_oob=True) for name, at in layout.positions.items()},
        )
        .with_columns(
            reason=pl.when("invalid")
            .then(pl.lit(_NOT_UTF8))
            .when(pl.col("count") != layout.num_fields)
            .then(pl.format(layout.wrong_count("{}"), "count"))
        )
    )
    return _split_faults(frame, list(layout.positions), layout.accepted)


def _parse_quoted(lines: _Lines, layout: _Layout) -> _Parsed:
    """Records of a stretch that holds quotes, by Python's csv reader (C, about a million rows a second).

    A record that spoils the reader, or spans lines without having the right number of fields, is set aside by
    its first line alone and reading goes on at the next line: one stray quote must not swallow the rows after
    it. A record still open where the block ends, but not the file, is left for the next block.
    """
    # One flat list: a list per record would keep the garbage collector busy with millions of containers.
    values: list[str] = []
    starts: list[int] = []
    ends: list[int] = []
    faults: dict[int, str] = {}
    blank_lines = 0
    start = 0
    while start < len(lines.texts):
        first = start
        ahead = iter(range(first, len(lines.texts)))
        reader = csv.reader((lines.texts[i] + "\n" for i in ahead), delimiter=layout.dialect.separator, strict=True)
        try:
            for fields in reader:
                end = first + reader.line_num
                if len(fields) == layout.num_fields:
                    values += fields
                    starts.append(start)
                    ends.append(end)
                elif not fields:
                    blank_lines += 1
                else:
                    faults[start] = layout.wrong_count(len(fields))
                    if end > start + 1:
                        start += 1
                        break
                start = end
        except csv.Error as error:
            if next(ahead, None) is None and not lines.at_end:
                break
            faults[start] = f"quotes do not match ({error})"
            start += 1

    rows = pl.DataFrame(
        {"line": starts} | {name: values[at :: layout.num_fields] for name, at in layout.positions.items()},
        schema={"line": pl.Int64()} | dict.fromkeys(layout.positions, pl.String()),
    ).with_columns(pl.col("line") + lines.first)
    if lines.invalid:
        damaged = np.searchsorted(lines.invalid, starts) < np.searchsorted(lines.invalid, ends)
        faults |= {starts[i]: _NOT_UTF8 for i in np.flatnonzero(damaged)}
        rows = rows.filter(~damaged)
    bad = pl.DataFrame(
        {
            "line": [lines.first + start for start in faults],
            "value": [lines.texts[start] for start in faults],
            "reason": list(faults.values()),
        },
        schema={"line": pl.Int64(), "value": pl.String(), "reason": pl.String()},
    )
    accepted = f'{layout.accepted}; a quote inside a quoted field is written ""'
    return _Parsed(Block(rows, _whole_rows(bad, accepted), blank_lines), lines_used=start)


def _split_faults(frame: pl.DataFrame, columns: list[str], accepted: str) -> Block:
    """A block out of rows with `line`, their whole `text`, `reason` (null: a good row) and the columns."""
    full = frame.filter(pl.col("text") != "")
    bad = full.filter(pl.col("reason").is_not_null()).select("line", "reason", value="text")
    rows = full.filter(pl.col("reason").is_null()).select("line", *columns)
    return Block(rows, _whole_rows(bad, accepted), len(frame) - len(full))


def _whole_rows(bad: pl.DataFrame, accepted: str) -> pl.DataFrame:
    """`BAD_ROW_SCHEMA` for rows that are bad as a whole."""
    value = shorten(pl.col("value"))
    return bad.select("line", field=pl.lit("(row)"), value=value, reason="reason", accepted=pl.lit(accepted))


def shorten(text: pl.Expr) -> pl.Expr:
    """`text` cut to `VALUE_CHARS` characters, with an ellipsis where something is missing."""
    cut = text.str.slice(0, VALUE_CHARS)
    return pl.when(cut == text).then(text).otherwise(cut + "…")


def describe_bad_rows(bad: pl.DataFrame, most: int = 10) -> str:
    """The first `most` rows of `bad` (`file` and `BAD_ROW_SCHEMA`), one a line, for an error message."""
    return "\n".join(
        f"  {row['file']} line {row['line']}, field {row['field']}, value {row['value']!r}: {row['reason']};"
        f" accepted: {row['accepted']}"
        for row in bad.head(most).iter_rows(named=True)
    )
