"""Interaction logs: CSV, Parquet, RecBole `.inter` and plain line files, read into one `EventLog`.

Nothing is dropped silently: `rows_read = rows_kept + rows_rejected` always. A row that cannot be used goes to
the rejects file with its reason; too many of them stop the run. Exact duplicates are kept: the same user may
have had the same item twice in one second, and the log alone cannot tell that from a double write.

Ids are strings of any kind, never numbers: "007" stays "007". Timestamps are seconds since 1970 (or
milliseconds, by `timestamp_unit`), whole or not, or ISO-8601 dates and times; an ISO time without an offset
is UTC.
"""

import difflib
import hashlib
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import polars as pl
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from training.files import write_whole
from training.tables import (
    BAD_ROW_SCHEMA,
    CSV,
    RECBOLE,
    Block,
    DataError,
    Digest,
    describe_bad_rows,
    read_header,
    read_lines,
    read_table,
    shorten,
)

MAX_ID_BYTES = 256
MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e6
"""Smallest and largest weight besides 0: a weight multiplies a float32 precision."""
PARQUET_BLOCK_ROWS = 2**20
"""Rows of a Parquet file read at a time."""
MAX_TIMESTAMP_S = 253_402_300_800
"""First second of the year 10000. It catches milliseconds and finer units given as seconds."""

Format = Literal["csv", "parquet", "inter", "lines"]
_FORMAT_OF_SUFFIX: dict[str, Format] = {
    ".csv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".inter": "inter",
    ".txt": "lines",
}

_ACCEPTED_ID = f"text of 1 to {MAX_ID_BYTES} bytes without control characters"
_ACCEPTED_WEIGHT = f"0, or a number from {MIN_WEIGHT} to {MAX_WEIGHT}"
_ACCEPTED_LINE = "a user id and at least one item id, separated by blanks, in UTF-8"

_EVENT_SCHEMA = {
    "user_id": pl.String(),
    "item_id": pl.String(),
    "timestamp": pl.Float64(),
    "weight": pl.Float32(),
}


def _check_weight(weight: float) -> float:
    if weight == 0 or MIN_WEIGHT <= weight <= MAX_WEIGHT:
        return weight
    raise ValueError(f"weight {weight} is not accepted: {_ACCEPTED_WEIGHT}")


class Columns(BaseModel):
    """Names of the columns in the source (in a `.inter` header: the part before the colon)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    user_id: str = "user_id"
    item_id: str = "item_id"
    timestamp: str | None = None
    """None: `timestamp` where the source has it, else events stand in time order as they come."""
    weight: str | None = None
    """A column that holds the weight itself; None: every event weighs 1, or what `weight_map` says."""


class WeightMap(BaseModel):
    """Weights by the value of one column: an event type, a rating, any text or number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    column: str
    values: dict[str, float] = Field(min_length=1)
    """Value → weight. Values that are numbers are compared as numbers: "5" also matches 5.0."""
    default: float | None = None
    """Weight of every other value, a missing one included; None: such a row is a bad row."""

    @field_validator("values")
    @classmethod
    def _values_are_weights(cls, values: dict[str, float]) -> dict[str, float]:
        seen: dict[float | str, str] = {}
        for value, weight in values.items():
            _check_weight(weight)
            first = seen.setdefault(_number_or_text(value), value)
            if first != value:
                raise ValueError(f"values {first!r} and {value!r} are the same number; give it one weight")
        return values

    @field_validator("default")
    @classmethod
    def _default_is_weight(cls, default: float | None) -> float | None:
        return default if default is None else _check_weight(default)


class DataConfig(BaseModel):
    """Where a log lies and how to read it. Strict and frozen; written whole into manifest and report."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    path: Annotated[Path, Field(strict=False)]
    """A file, or a folder of files of one format, read in the order of their names."""
    format: Literal["auto", "csv", "parquet", "inter", "lines"] = "auto"
    """`auto`: by extension (.csv, .parquet, .pq, .inter, .txt = lines of `user item item …`)."""
    columns: Columns = Columns()
    timestamp_unit: Literal["s", "ms"] = "s"
    """Unit of numeric timestamps; ISO-8601 text and Parquet date-times need none."""
    weight_map: WeightMap | None = None
    max_bad_share: float = Field(default=0.01, ge=0.0, le=1.0)
    """Largest share of bad rows with which a run goes on."""
    rejects: Annotated[Path | None, Field(strict=False)] = None
    """JSON lines file for the bad rows; None: `<path>.rejects.jsonl`, beside the source."""
    streaming: bool = False
    """Whether the log is sorted into shards on the disk and read from them, in bounded memory whatever its size."""
    max_evaluated_users: int = Field(default=20_000, ge=1)
    """Of a streamed log: users to validate with, and as many to test on, chosen by a hash of the id."""

    @model_validator(mode="after")
    def _one_source_of_weights(self) -> "DataConfig":
        if self.weight_map is not None and self.columns.weight is not None:
            raise ValueError("columns.weight and weight_map both give the weight; keep one of them")
        return self

    @model_validator(mode="after")
    def _rejects_spare_the_source(self) -> "DataConfig":
        source, rejects = self.path.resolve(), self.rejects_path.resolve()
        if source == rejects or source in rejects.parents:
            raise ValueError(f"rejects {rejects} is the source or lies in it; name a file elsewhere")
        return self

    @property
    def rejects_path(self) -> Path:
        """Where bad rows go."""
        source = self.path.absolute()
        return self.rejects or source.with_name(source.name + ".rejects.jsonl")


@dataclass(frozen=True)
class LogFacts:
    """What is known of a log, for a manifest or report; every value fits into JSON."""

    rows_read: int
    rows_kept: int
    rows_rejected: int
    blank_lines: int
    users: int
    items: int
    has_timestamps: bool
    tied_events_share: float | None
    """Share of events with the timestamp of their user's previous event: their order is the input's. None where
    there are no timestamps."""
    tied_last_two_users_share: float | None
    """Share of users whose last two events have the same timestamp."""
    last_timestamp: float | None
    """Of all events, seconds since 1970."""
    sha256: str

    def summary(self) -> dict[str, int | float | bool | str | None]:
        """The facts by name."""
        return asdict(self)


@dataclass
class Reading:
    """What is known about the reading of a log, complete when its last block was read."""

    sha256: str = ""
    """Of the source's bytes; for a folder, of what `sha256sum` prints for its files, in name order."""
    rows_read: int = 0
    rows_rejected: int = 0
    blank_lines: int = 0
    has_timestamps: bool = False


@dataclass(frozen=True, eq=False)
class EventLog:
    """Every usable event of a log, each user's in time order, and what is known about the reading."""

    events: pl.DataFrame
    """`user_id`, `item_id` (String), `timestamp` (Float64, seconds; NaN where the source has none), `weight`
    (Float32, 0 = seen but not part of the history); sorted by (user_id, timestamp, input order)."""
    sha256: str
    """As in `Reading`, the rest too."""
    rows_read: int
    rows_rejected: int
    blank_lines: int
    has_timestamps: bool

    @property
    def rows_kept(self) -> int:
        return len(self.events)

    def tie_shares(self) -> tuple[float, float] | None:
        """How much of the order comes from input order alone: the two shares of `LogFacts`, or None."""
        if not self.has_timestamps:
            return None
        tied, tied_last = tie_counts(self.events)
        return tied / len(self.events), tied_last / self.events["user_id"].n_unique()

    def facts(self) -> LogFacts:
        """What is known of the log, without its events."""
        ties = self.tie_shares()
        return LogFacts(
            rows_read=self.rows_read,
            rows_kept=self.rows_kept,
            rows_rejected=self.rows_rejected,
            blank_lines=self.blank_lines,
            users=self.events["user_id"].n_unique(),
            items=self.events["item_id"].n_unique(),
            has_timestamps=self.has_timestamps,
            tied_events_share=ties[0] if ties else None,
            tied_last_two_users_share=ties[1] if ties else None,
            last_timestamp=last_timestamp(self.events) if ties else None,
            sha256=self.sha256,
        )

    def summary(self) -> dict[str, int | float | bool | str | None]:
        """The facts by name."""
        return self.facts().summary()


def last_timestamp(events: pl.DataFrame) -> float:
    """Of some events with timestamps, the last one; −inf of none."""
    return float(events["timestamp"].max()) if len(events) else -math.inf  # type: ignore[arg-type]


def tie_counts(events: pl.DataFrame) -> tuple[int, int]:
    """How many sorted events have the timestamp of their user's previous event; how many of them are a user's last."""
    same_user = pl.col("user_id") == pl.col("user_id").shift(1)
    flags = events.select(
        tied=(same_user & (pl.col("timestamp") == pl.col("timestamp").shift(1))).fill_null(False),
        is_last=(pl.col("user_id") != pl.col("user_id").shift(-1)).fill_null(True),
    )
    return int(flags["tied"].sum()), int((flags["tied"] & flags["is_last"]).sum())


def read_events(config: DataConfig) -> EventLog:
    """Read a whole log; bad rows go to `config.rejects_path`. Arguments and errors as in `read_blocks`."""
    reading = Reading()
    events = pl.concat([pl.DataFrame(schema=_EVENT_SCHEMA), *read_blocks(config, reading)])
    return EventLog(sort_events(events), **asdict(reading))


def read_blocks(config: DataConfig, reading: Reading, may_be_empty: bool = False) -> Iterator[pl.DataFrame]:
    """The usable events of a log as they come, in blocks that fit into memory; bad rows go to `config.rejects_path`.

    A row is one event: one record of a table, one item of a line file (a line without items counts as one).
    The rejects file holds one JSON object a row: file, line (in Parquet the row, from 1), field, value
    (shortened), reason, accepted. It is written at the end, when there are bad rows, or when an older one lies there.

    Args:
        config: where the log lies and how to read it.
        reading: filled in.
        may_be_empty: a log without a row is no error: one file of many, of a day on which nothing happened.

    Raises:
        DataError: the source is missing, unreadable, empty, lacks a column, or has more bad rows than
            `max_bad_share` allows (the message then shows the first ten).
    """
    format, files = source_files(config)
    digests: dict[Path, str] = {}
    roles: set[str] = set()
    with _Rejects() as rejects:
        for file in files:
            source = _open_source(config, format, file)
            if roles and set(source.columns) != roles:
                raise DataError(
                    f"{file} has a timestamp column where {files[0]} has none, or the reverse; make them agree"
                )
            roles = set(source.columns)
            for block in source.blocks:
                good, bad = _check_rows(block.rows, source.columns, config)
                rejects.add(file, pl.concat([block.bad, bad]))
                reading.rows_read += len(good) + len(block.bad) + len(bad)
                reading.blank_lines += block.blank_lines
                yield good
            digests[file] = source.digest.hexdigest()
        reading.sha256 = source_sha256(config.path, digests)
        reading.rows_rejected = rejects.count
        reading.has_timestamps = "timestamp" in roles
        rejects.set_aside(config, reading.rows_read)
        if reading.rows_read == rejects.count and not (may_be_empty and reading.rows_read == 0):
            raise DataError(f"{config.path} holds no usable event\n{describe_bad_rows(rejects.first)}".rstrip())


def sort_events(events: pl.DataFrame) -> pl.DataFrame:
    """`events` by (user_id, timestamp); rows that tie keep the order they came in, as do NaN timestamps."""
    return events.sort("user_id", "timestamp", maintain_order=True)


# Finding and opening the source


class _Source(NamedTuple):
    columns: dict[str, str]
    """Role (user_id, item_id and, where given, timestamp and weight) → name of its column in the source."""
    blocks: Iterator[Block]
    """Rows with `line` and the roles as columns; not yet checked."""
    digest: Any
    """`hashlib` object, complete once `blocks` is read to its end."""


def source_files(config: DataConfig) -> tuple[Format, list[Path]]:
    """The files of a log in the order they are read, and their format.

    Raises:
        DataError: the source is missing, or holds what is no event file.
    """
    path = config.path
    if path.is_file():
        files = [path]
    elif path.is_dir():
        # Spark and Hive mark side files by a leading dot or underscore (_SUCCESS, .part.crc).
        files = sorted(file for file in path.iterdir() if not file.name.startswith((".", "_")))
        if not files:
            raise DataError(f"{path} is a folder without event files; accepted: {_known_suffixes()}")
    else:
        raise DataError(f"{path} does not exist; `path` must name an event file or a folder of them")
    if config.format != "auto":
        if folders := [file for file in files if not file.is_file()]:
            raise DataError(f"{folders[0]} is not a file; put all event files into one folder")
        return config.format, files
    formats = [_format_of(file) for file in files]
    for file, format in zip(files, formats, strict=True):
        if format != formats[0]:
            raise DataError(f"{path} mixes formats ({files[0].name}, {file.name}); use one folder for each")
    return formats[0], files


def _format_of(file: Path) -> Format:
    if not file.is_file() or file.suffix.lower() not in _FORMAT_OF_SUFFIX:
        raise DataError(f"{file} is not an event file; accepted: {_known_suffixes()}; or set `format`")
    return _FORMAT_OF_SUFFIX[file.suffix.lower()]


def _known_suffixes() -> str:
    return ", ".join(_FORMAT_OF_SUFFIX)


def _open_source(config: DataConfig, format: Format, file: Path) -> _Source:
    digest = hashlib.sha256()
    if format == "lines":
        if config.weight_map or config.columns.weight or config.columns.timestamp:
            raise DataError(f"{file}: files of plain lines have no weight or timestamp; remove these columns")
        columns = {"user_id": "user_id", "item_id": "item_id"}
        return _Source(columns, _read_line_events(file, digest), digest)
    if format == "parquet":
        schema = _parquet_schema(file)
        columns = _resolve_columns(config, list(schema), file)
        return _Source(columns, _read_parquet(file, schema, columns, config.timestamp_unit, digest), digest)
    dialect = CSV if format == "csv" else RECBOLE
    header = read_header(file, dialect)
    columns = _resolve_columns(config, header, file)
    return _Source(columns, read_table(file, dialect, header, columns, digest), digest)


def _resolve_columns(config: DataConfig, header: list[str], file: Path) -> dict[str, str]:
    """Role → column of this file."""
    named = config.columns
    columns = {"user_id": named.user_id, "item_id": named.item_id}
    if named.timestamp is not None or "timestamp" in header:
        columns["timestamp"] = named.timestamp or "timestamp"
    weight = config.weight_map.column if config.weight_map else named.weight
    if weight is not None:
        columns["weight"] = weight
    for role, column in columns.items():
        if column not in header:
            nearest = difflib.get_close_matches(column, header, n=1)
            hint = f" (nearest: {nearest[0]!r})" if nearest else ""
            raise DataError(f"{file} has no column {column!r} for {role}{hint}; its columns: {', '.join(header)}")
    return columns


def source_sha256(path: Path, digests: Mapping[Path, str]) -> str:
    """`EventLog.sha256` from the digests of the files, given in reading order."""
    if path.is_file():
        return digests[path]
    listing = "".join(f"{digest}  {file.name}\n" for file, digest in digests.items())
    return hashlib.sha256(listing.encode()).hexdigest()


# Readers of one file


def _read_line_events(file: Path, digest: Digest) -> Iterator[Block]:
    for block in read_lines(file, digest):
        tokens = block.rows.select("line", "text", tokens=pl.col("text").str.extract_all(r"[^ \t]+"))
        has_items = pl.col("tokens").list.len() >= 2
        bad = tokens.filter(~has_items).select(
            "line",
            field=pl.lit("(row)"),
            value=shorten(pl.col("text")),
            reason=pl.lit("no item"),
            accepted=pl.lit(_ACCEPTED_LINE),
        )
        rows = (
            tokens.filter(has_items)
            .select(
                "line",
                user_id=pl.col("tokens").list.first(),
                item_id=pl.col("tokens").list.slice(1),
            )
            .explode("item_id")
        )
        yield Block(rows, pl.concat([block.bad, bad]), block.blank_lines)


_INTEGERS = (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64)
_TEXTS = (pl.String, pl.Categorical, pl.Enum)
_PARQUET_TYPES = {
    "user_id": (*_TEXTS, *_INTEGERS),
    "item_id": (*_TEXTS, *_INTEGERS),
    "timestamp": (*_TEXTS, *_INTEGERS, pl.Float32, pl.Float64, pl.Datetime, pl.Date),
    "weight": (*_TEXTS, *_INTEGERS, pl.Float32, pl.Float64, pl.Boolean),
}


def _parquet_schema(file: Path) -> pl.Schema:
    try:
        return pl.Schema(pl.read_parquet_schema(file))
    except pl.exceptions.PolarsError as error:
        raise DataError(f"{file} is not a readable Parquet file ({error})") from error


def _read_parquet(
    file: Path, schema: pl.Schema, columns: dict[str, str], timestamp_unit: str, digest: Digest
) -> Iterator[Block]:
    for role, column in columns.items():
        if not isinstance(schema[column], _PARQUET_TYPES[role]):
            accepted = ", ".join(type.__name__ for type in _PARQUET_TYPES[role])
            raise DataError(f"{file}, column {column!r} for {role} has type {schema[column]}; accepted: {accepted}")
    with file.open("rb") as source:
        while data := source.read(2**20):
            digest.update(data)
    rows = pl.scan_parquet(file).select(
        **{role: _parquet_column(role, column, schema[column], timestamp_unit) for role, column in columns.items()}
    )
    try:
        num_rows = pl.scan_parquet(file).select(pl.len()).collect().item()
        for begin in range(0, num_rows, PARQUET_BLOCK_ROWS):
            block = rows.slice(begin, PARQUET_BLOCK_ROWS).collect()
            line = pl.int_range(begin + 1, begin + 1 + pl.len(), dtype=pl.Int64())
            none_bad = pl.DataFrame(schema=BAD_ROW_SCHEMA)
            yield Block(block.select(line.alias("line"), *block.columns), none_bad, blank_lines=0)
    except pl.exceptions.PolarsError as error:
        raise DataError(f"{file} is not a readable Parquet file ({error})") from error


def _parquet_column(role: str, column: str, type: pl.DataType, timestamp_unit: str) -> pl.Expr:
    values = pl.col(column)
    if isinstance(type, pl.Datetime | pl.Date):
        microseconds_per_unit = 1_000 if timestamp_unit == "ms" else 1_000_000
        return values.dt.epoch("us") / microseconds_per_unit
    if role in ("user_id", "item_id") or isinstance(type, pl.Categorical | pl.Enum):
        return values.cast(pl.String())
    return values


# Checking rows


class _Check(NamedTuple):
    """One way in which a row can be bad."""

    role: str
    fails: pl.Expr
    reason: str
    accepted: str


def _check_rows(
    rows: pl.DataFrame, columns: Mapping[str, str], config: DataConfig
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Usable events (`_EVENT_SCHEMA`) and bad rows (`BAD_ROW_SCHEMA`), each by its first failing check."""
    checks = [*_id_checks("user_id"), *_id_checks("item_id")]
    parsed = {"timestamp_s": pl.lit(math.nan), "weight_value": pl.lit(1.0)}
    if "timestamp" in rows.columns:
        parsed["timestamp_s"] = _timestamp_s(rows, config.timestamp_unit)
        checks += _timestamp_checks(config.timestamp_unit)
    if "weight" in rows.columns:
        parsed["weight_value"] = _weight(config.weight_map)
        checks += _weight_checks(config.weight_map)
    failing = pl.coalesce(
        *(pl.when(check.fails).then(pl.lit(number, dtype=pl.Int16())) for number, check in enumerate(checks))
    )
    checked = rows.with_columns(**parsed).with_columns(failing=failing)
    good = checked.filter(pl.col("failing").is_null()).select(
        "user_id",
        "item_id",
        timestamp=pl.col("timestamp_s").cast(pl.Float64()),
        weight=pl.col("weight_value").cast(pl.Float32()),
    )
    bad = checked.filter(pl.col("failing").is_not_null())
    described = [
        bad.filter(pl.col("failing") == number).select(
            "line",
            field=pl.lit(columns[check.role]),
            value=shorten(pl.col(check.role).cast(pl.String())),
            reason=pl.lit(check.reason),
            accepted=pl.lit(check.accepted),
        )
        for number, check in enumerate(checks)
    ]
    return good, pl.concat(described)


def _missing(column: str) -> pl.Expr:
    return pl.col(column).is_null() | (pl.col(column).cast(pl.String()) == "")


def _id_checks(column: str) -> list[_Check]:
    text = pl.col(column)
    return [
        _Check(column, _missing(column), "missing", _ACCEPTED_ID),
        _Check(column, text.str.len_bytes() > MAX_ID_BYTES, "too long", _ACCEPTED_ID),
        _Check(column, text.str.contains(r"\p{Cc}"), "holds a control character", _ACCEPTED_ID),
    ]


def _timestamp_s(rows: pl.DataFrame, unit: str) -> pl.Expr:
    """Seconds since 1970; null where the value is neither a number nor ISO-8601."""
    values = pl.col("timestamp")
    number = values.cast(pl.Float64(), strict=False)
    seconds = number / 1000 if unit == "ms" else number
    if rows.schema["timestamp"] != pl.String():
        return seconds
    if rows.select((number.is_null() & values.is_not_null()).any()).item() is False:
        return seconds
    text = values.str.replace(r"^(\d{4}-\d\d-\d\d) ", "${1}T")
    with_offset = text.str.to_datetime("%Y-%m-%dT%H:%M:%S%.f%#z", strict=False, time_unit="us")
    without = text.str.to_datetime("%Y-%m-%dT%H:%M:%S%.f", strict=False, time_unit="us")
    date = text.str.to_date("%Y-%m-%d", strict=False)
    return pl.coalesce(seconds, *(moment.dt.epoch("us") / 1e6 for moment in (with_offset, without, date)))


def _timestamp_checks(unit: str) -> list[_Check]:
    seconds = pl.col("timestamp_s")
    name = "milliseconds" if unit == "ms" else "seconds"
    accepted = f"{name} since 1970, from 0 to the year 9999, or ISO-8601 like 1997-12-04T15:55:49Z"
    hint = "" if unit == "ms" else "; for milliseconds set timestamp_unit to ms"
    return [
        _Check("timestamp", _missing("timestamp"), "missing", accepted),
        _Check("timestamp", seconds.is_null() | ~seconds.is_finite(), "not a time", accepted),
        _Check("timestamp", seconds < 0, "before 1970", accepted),
        _Check("timestamp", seconds >= MAX_TIMESTAMP_S, "after the year 9999", accepted + hint),
    ]


def _number_or_text(value: str) -> float | str:
    # Polars and Python read the same decimal forms, except that Python also takes 1_000 and blanks around.
    number = pl.Series([value]).cast(pl.Float64(), strict=False).item()
    return value if number is None or not math.isfinite(number) else float(number)


def _weight(weight_map: WeightMap | None) -> pl.Expr:
    """The weight as Float64; null where there is none."""
    number = pl.col("weight").cast(pl.Float64(), strict=False)
    if weight_map is None:
        return number
    keys = {_number_or_text(value): weight for value, weight in weight_map.values.items()}
    numbers = {key: weight for key, weight in keys.items() if isinstance(key, float)}
    texts = {key: weight for key, weight in keys.items() if isinstance(key, str)}
    text = pl.col("weight").cast(pl.String()).fill_null("")
    found = [
        column.replace_strict(list(table), list(table.values()), default=None, return_dtype=pl.Float64())
        for column, table in ((number, numbers), (text, texts))
        if table
    ]
    return pl.coalesce(*found, pl.lit(weight_map.default, dtype=pl.Float64()))


def _weight_checks(weight_map: WeightMap | None) -> list[_Check]:
    weight = pl.col("weight_value")
    if weight_map is not None:
        accepted = f"a value of weight_map: {', '.join(weight_map.values)}; or give weight_map a default"
        return [_Check("weight", weight.is_null(), "has no weight", accepted)]
    usable = (weight == 0) | weight.is_between(MIN_WEIGHT, MAX_WEIGHT)
    return [
        _Check("weight", _missing("weight"), "missing", _ACCEPTED_WEIGHT),
        _Check("weight", weight.is_null() | ~usable, "not a weight", _ACCEPTED_WEIGHT),
    ]


# Rejects


class _Rejects:
    """Bad rows on their way to the rejects file, as JSON lines in a temporary file; a log may have many."""

    def __init__(self) -> None:
        self.count = 0
        self.first = pl.DataFrame(schema={"file": pl.String(), **BAD_ROW_SCHEMA})
        """The first ten, for messages."""
        self._lines = tempfile.SpooledTemporaryFile(max_size=2**24)  # noqa: SIM115 - closed on exit

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()

    def add(self, file: Path, bad: pl.DataFrame) -> None:
        rows = bad.sort("line", maintain_order=True).insert_column(0, pl.lit(str(file)).alias("file"))
        self.count += len(rows)
        self.first = pl.concat([self.first, rows]).head(10)
        self._lines.write(rows.write_ndjson().encode())

    def set_aside(self, config: DataConfig, rows_read: int) -> None:
        """Write the rejects file; too many stop the run."""
        path = config.rejects_path
        if self.count or path.exists():
            self._lines.seek(0)
            try:
                write_whole(path, self._lines)
            except OSError as error:
                raise DataError(f"cannot write the rejects file {path} ({error.strerror}); set `rejects`") from error
        share = self.count / rows_read if rows_read else 0.0
        if share > config.max_bad_share:
            raise DataError(
                f"{config.path}: {self.count} of {rows_read} rows are bad ({share:.2%}), more than"
                f" max_bad_share {config.max_bad_share:.2%} allows. The first:\n{describe_bad_rows(self.first)}\n"
                f"All are in {path}. Correct them, or raise max_bad_share."
            )
