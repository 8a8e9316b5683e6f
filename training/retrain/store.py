"""The job's own log: every event that ever came, once, by user; in files of which one index names those that count.

    index.json            what the log is made of; replaced by a rename, so that an ingest is there whole or not at all
    17-000012.parquet     the events of bucket 17 as of the twelfth ingest, sorted by user, time and arrival

A bucket holds whole users, by a hash that no library version changes. An ingest writes the buckets that it touches anew
under new names, and then the index. Files that the index does not name are a killed ingest's, for the next to remove.

An event that has an `event_id` is known by user and that, any other by user, item and time; where one of two is of the
latter kind, or was told for a session, item and time make them alike. Of two that are alike the first to come is kept:
a file that is sent twice, a queue's entry that is delivered twice, add nothing.

An erased user's events that are there when the erasure comes, whatever their date, and those dated up to it are
dropped, now and whenever they come again; of the user only a hash is remembered. The events that an anonymous session
had up to its merge into a user are the user's, by their dates, those too that come up to `MERGE_MEMORY_S` later; of an
erased user they are nobody's, and dropped.
"""

import hashlib
import math
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import polars as pl
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from model.bundle import fsync
from training.files import write_parquet, write_whole
from training.tables import DataError

INDEX = "index.json"
NUM_BUCKETS = 64
"""Of 50 million events a bucket holds 800,000: one of them at a time is in memory."""
SCATTER_ROWS = 2**21
"""Events gathered in memory before they are scattered over the buckets."""
SESSION = "\x1f"
"""Begins the `user_id` of an anonymous session's events; no user's id can hold it."""
MERGE_MEMORY_S = 2 * 86_400
MERGED = "session"
"""Source of a user's events that were told for a session."""

EVENT_SCHEMA = pl.Schema(
    {
        "user_id": pl.String(),
        "item_id": pl.String(),
        "timestamp": pl.Float64(),  # seconds since 1970
        "weight": pl.Float32(),
        "event_id": pl.String(),  # null where it has none
        "source": pl.String(),  # what brought it: a file's name, `outbox`, or `session`
    }
)
"""Of what comes in."""
STORED_SCHEMA = pl.Schema({**EVENT_SCHEMA, "ingest": pl.UInt32()})
"""Of a bucket: with the number of the ingest that brought the event."""


NOBODY = ""
"""In place of a user whose events are dropped; no user's id is empty."""


class Merge(BaseModel):
    """A session whose events are a user's, or nobody's any more."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    session_id: str
    user_id: str
    timestamp: float
    """Of the merge, seconds since 1970: later events of the session are none of the user's."""


class Index(BaseModel):
    """The content of index.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    log: str = ""
    """Drawn by the first ingest, so that a model can tell which log it learned."""
    has_published: bool = False
    """Whether a model that learned it was published."""
    ingests: int = 0
    """How many there were."""
    buckets: tuple[str | None, ...] = (None,) * NUM_BUCKETS
    """File of each bucket, None for an empty one."""
    rows: int = 0
    files_read: dict[str, str] = Field(default_factory=dict)
    """sha256 of each source file that was read → its name."""
    erased: dict[str, float] = Field(default_factory=dict)
    """Hash of each erased user → the time of the erasure, seconds since 1970."""
    merges: tuple[Merge, ...] = ()
    """The recent ones."""


@dataclass(frozen=True)
class Incoming:
    """What a source brings. The blocks are read once; the rest is looked at when they have been."""

    blocks: Iterable[pl.DataFrame] = ()
    """Events in `EVENT_SCHEMA`, as they come."""
    files_read: Mapping[str, str] = field(default_factory=dict)
    """sha256 → name of the files that the blocks are of."""
    erasures: Mapping[str, float] = field(default_factory=dict)
    """User id → time of the erasure, seconds since 1970."""
    merges: Sequence[Merge] = ()


@dataclass(frozen=True)
class Ingest:
    """What became of the events that came in: `read = new + duplicates + of_erased`."""

    number: int
    read: int
    new: int
    duplicates: int
    """Were there already, or came twice."""
    of_erased: int
    """Dated up to their user's erasure."""
    erased: int
    """Events of earlier ingests that an erasure removed."""


@dataclass(frozen=True)
class Learned:
    """How far a model has learned the log: up to an ingest, or, where the job did not make it, up to a moment."""

    ingest: int = 0
    """Number of the last ingest that it learned; 0: it knows of none."""
    until: float = -math.inf
    """It learned what is dated up to here, seconds since 1970, whenever that came into the log."""

    def is_new(self) -> pl.Expr:
        """Of events of the log, those that it has not learned."""
        return (pl.col("ingest") > self.ingest) & (pl.col("timestamp") > self.until)


class Store:
    """The log in a folder.

    Args:
        folder: made by the first ingest if it is not there.

    Raises:
        DataError: the index cannot be read, or a file that it names is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = _read_index(folder / INDEX)
        missing = [name for name in self.index.buckets if name and not (folder / name).is_file()]
        if missing:
            raise DataError(f"{folder}: {INDEX} names {missing[0]}, which is missing; restore the folder from a backup")

    def bucket(self, number: int) -> pl.DataFrame:
        """The events of a bucket in `STORED_SCHEMA`, sorted by user, time and arrival."""
        name = self.index.buckets[number]
        return pl.read_parquet(self.folder / name) if name else pl.DataFrame(schema=STORED_SCHEMA)

    def ingest(self, incoming: Incoming) -> Ingest:
        """Put what came in into the log. Once this has returned it is durable, and its source may forget it.

        Raises:
            DataError: the source cannot be read. The log is as it was.
            OSError: the log cannot be written, the disk is full for one. It is as it was.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_strays()
        try:
            ingest = self._ingest(incoming)
        except BaseException:
            # Where the index was renamed and that alone could not be made durable, the disk may come back with either.
            # The files of both stay until the next ingest.
            if _read_index(self.folder / INDEX) == self.index:
                self._remove_strays()
            raise
        self._remove_strays()
        return ingest

    def _ingest(self, incoming: Incoming) -> Ingest:
        before, number = self.index, self.index.ingests + 1
        arrivals = _Arrivals(self.folder / f"{number:06}-arrived", number)
        read = arrivals.scatter(incoming.blocks)
        erased = before.erased | {
            user_hash(user_id): max(at, before.erased.get(user_hash(user_id), at))
            for user_id, at in incoming.erasures.items()
        }
        # One that came before, after a kill for one, is over: what came since is the new user's.
        forgotten = [
            user_id
            for user_id, at in incoming.erasures.items()
            if at > before.erased.get(user_hash(user_id), -math.inf)
        ]
        # What came earlier came before the erasure, however a clock dated it.
        merges = [
            *(_forgetting(merge, merge.user_id in forgotten) for merge in before.merges),
            *(
                _forgetting(merge, merge.timestamp <= incoming.erasures.get(merge.user_id, -math.inf))
                for merge in incoming.merges
            ),
        ]
        left = arrivals.move_sessions(merges, self.bucket)

        touched = left | arrivals.buckets() | {bucket_of(user_id) for user_id in incoming.erasures}
        names, rows, new, of_erased, removed = list(before.buckets), before.rows, 0, 0, 0
        for bucket in sorted(touched):
            stored, arrived = self.bucket(bucket), arrivals.of_bucket(bucket)
            both = pl.concat([stored, arrived])
            both = both.with_columns(into=_merged_into(both, merges)).filter(pl.col("into").fill_null(NOBODY) == NOBODY)
            gone = (
                both["into"].is_not_null()
                | _is_erased(both, erased)
                | (both["user_id"].is_in(forgotten) & (both["ingest"] < number))
            )
            arrived_gone = int((gone & (both["ingest"] == number)).sum())
            of_erased, removed = of_erased + arrived_gone, removed + int(gone.sum()) - arrived_gone
            merged = _each_once(both.drop("into").filter(~gone)).sort("user_id", "timestamp", maintain_order=True)
            new += int((merged["ingest"] == number).sum())
            rows += len(merged) - len(stored)
            names[bucket] = self._write_bucket(bucket, number, merged)
        changed = {
            "log": before.log or secrets.token_hex(8),
            "ingests": number,
            "buckets": tuple(names),
            "rows": rows,
            "files_read": {**before.files_read, **incoming.files_read},
            "erased": erased,
            "merges": _recent(merges),
        }
        self._replace_index(before.model_copy(update=changed))
        return Ingest(number, read, new, read - new - of_erased, of_erased, removed)

    def ingests(self) -> pl.DataFrame:
        """Of each ingest of which there are events: `ingest`, `events`, `first`, `last`, `sources`, in their order.

        Times are seconds since 1970; sources as in `EVENT_SCHEMA`.
        """
        time, source = pl.col("timestamp"), pl.col("source").unique()
        parts = [
            self.bucket(bucket)
            .group_by("ingest")
            .agg(events=pl.len(), first=time.min(), last=time.max(), sources=source)
            for bucket in range(NUM_BUCKETS)
        ]
        sources = pl.col("sources").explode().unique().sort()
        summed = [pl.col("events").sum(), pl.col("first").min(), pl.col("last").max(), sources]
        return pl.concat(parts).group_by("ingest").agg(summed).sort("ingest")

    def forget(self, ingest: int) -> int:
        """Remove the events of an ingest; returns how many.

        Its files stay read, its erasures and merges done. What was dropped for being like one of its events does not
        come back.

        Raises:
            DataError: there was no such ingest.
            OSError: the log cannot be written. It is as it was.
        """
        before, number = self.index, self.index.ingests + 1
        if not 1 <= ingest < number:
            raise DataError(f"{self.folder}: there is no ingest {ingest}; there were {before.ingests}, from 1")
        names, removed = list(before.buckets), 0
        for bucket in range(NUM_BUCKETS):
            stored = self.bucket(bucket)
            left = stored.filter(pl.col("ingest") != ingest)
            if len(left) < len(stored):
                removed += len(stored) - len(left)
                names[bucket] = self._write_bucket(bucket, number, left)
        # It counts as an ingest, of nothing: files have its number in their names.
        changed = {"ingests": number, "buckets": tuple(names), "rows": before.rows - removed}
        self._replace_index(before.model_copy(update=changed))
        self._remove_strays()
        return removed

    def note_publication(self) -> None:
        """Remember that a model that learned this log was published."""
        if not self.index.has_published:
            self._replace_index(self.index.model_copy(update={"has_published": True}))

    def _write_bucket(self, bucket: int, number: int, events: pl.DataFrame) -> str | None:
        """Write a bucket anew in the course of an ingest; returns the file's name."""
        if events.is_empty():
            return None
        name = f"{bucket:02}-{number:06}.parquet"
        _write_durably(events, self.folder / name)
        return name

    def _replace_index(self, index: Index) -> None:
        write_whole(self.folder / INDEX, index.model_dump_json(indent=1).encode() + b"\n")
        self.index = index

    def _remove_strays(self) -> None:
        """Remove what a killed or failed ingest left, and buckets that were written anew."""
        named = {INDEX, *filter(None, self.index.buckets)}
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in named:
                path.unlink()


class _Arrivals:
    """Events of one ingest, scattered over files by bucket: `BUCKET-ROUND.parquet`."""

    def __init__(self, folder: Path, ingest: int) -> None:
        self._folder, self._ingest = folder, ingest
        self._round = 0
        folder.mkdir()

    def scatter(self, blocks: Iterable[pl.DataFrame]) -> int:
        """Write the events of blocks to their buckets; returns how many there were."""
        read = 0
        for events in _in_rounds(blocks):
            read += len(events)
            self._write(events.with_columns(ingest=pl.lit(self._ingest, pl.UInt32())))
        return read

    def move_sessions(self, merges: Sequence[Merge], stored: Callable[[int], pl.DataFrame]) -> set[int]:
        """Write the events of merged sessions, arrived or stored, once more, to the buckets of their users.

        Returns:
            the buckets that they have to leave, nobody's too.
        """
        left = set()
        for bucket in {bucket_of(SESSION + merge.session_id) for merge in merges}:
            events = pl.concat([stored(bucket), self.of_bucket(bucket)])
            moved = events.with_columns(user_id=_merged_into(events, merges)).drop_nulls("user_id")
            if len(moved):
                moved = moved.with_columns(source=pl.lit(MERGED))
                self._write(moved.filter(pl.col("user_id") != NOBODY))
                left.add(bucket)
        return left

    def of_bucket(self, bucket: int) -> pl.DataFrame:
        """The events of a bucket, as they came."""
        files = sorted(self._folder.glob(f"{bucket:02}-*.parquet"))
        return pl.concat([pl.DataFrame(schema=STORED_SCHEMA), *map(pl.read_parquet, files)])

    def buckets(self) -> set[int]:
        """The buckets that have some."""
        return {int(path.name[:2]) for path in self._folder.iterdir()}

    def _write(self, events: pl.DataFrame) -> None:
        self._round += 1
        for (bucket,), part in (
            events.with_columns(bucket=_buckets(events["user_id"]))
            .partition_by("bucket", maintain_order=True, as_dict=True)
            .items()
        ):
            write_parquet(part.drop("bucket"), self._folder / f"{bucket:02}-{self._round:06}.parquet")


def bucket_of(user_id: str) -> int:
    """Where the events of a user lie."""
    return zlib.crc32(user_id.encode()) % NUM_BUCKETS


def user_hash(user_id: str) -> str:
    """What is remembered of an erased user."""
    return hashlib.blake2b(user_id.encode(), digest_size=16).hexdigest()


def _forgetting(merge: Merge, is_erased: bool) -> Merge:
    """A merge, into nobody where the user is erased."""
    return merge.model_copy(update={"user_id": NOBODY}) if is_erased else merge


def _in_rounds(blocks: Iterable[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """The blocks, put together to some `SCATTER_ROWS` rows."""
    gathered: list[pl.DataFrame] = []
    for block in blocks:
        gathered.append(block.select(EVENT_SCHEMA.names()).cast(EVENT_SCHEMA))
        if sum(map(len, gathered)) >= SCATTER_ROWS:
            yield pl.concat(gathered)
            gathered = []
    if gathered:
        yield pl.concat(gathered)


def _buckets(user_ids: pl.Series) -> pl.Series:
    distinct = user_ids.unique()
    buckets = pl.Series([bucket_of(user_id) for user_id in distinct], dtype=pl.UInt8())
    return user_ids.replace_strict(distinct, buckets, return_dtype=pl.UInt8())


def _merged_into(events: pl.DataFrame, merges: Sequence[Merge]) -> pl.Series:
    """Whose each event is by the first merge of its session since, a user's or `NOBODY`'s; null: whose it says."""
    table = pl.DataFrame(
        {
            "user_id": [SESSION + merge.session_id for merge in merges],
            "merged_into": [merge.user_id for merge in merges],
            "merged_at": [merge.timestamp for merge in merges],
        },
        schema={"user_id": pl.String(), "merged_into": pl.String(), "merged_at": pl.Float64()},
    ).sort("merged_at")
    found = (
        events.select("user_id", "timestamp")
        .with_row_index()
        .sort("timestamp")
        .join_asof(
            table,
            left_on="timestamp",
            right_on="merged_at",
            by="user_id",
            strategy="forward",
            check_sortedness=False,  # it warns that it cannot check
        )
    )
    return found.sort("index")["merged_into"]


def _is_erased(events: pl.DataFrame, erased: Mapping[str, float]) -> pl.Series:
    """Of each event whether it is dated up to its user's erasure."""
    if not erased:
        return pl.repeat(False, len(events), eager=True, dtype=pl.Boolean())
    users = events.select(pl.col("user_id").unique())
    times = [erased.get(user_hash(user_id)) for user_id in users["user_id"]]
    known = users.with_columns(erased_at=pl.Series(times, dtype=pl.Float64()))
    dated = events.select("user_id", "timestamp").join(known, on="user_id", how="left", maintain_order="left")
    return (dated["timestamp"] <= dated["erased_at"]).fill_null(False)


def _recent(merges: Sequence[Merge]) -> tuple[Merge, ...]:
    """The merges whose sessions may still have events on their way. All are carried out once, however old they are."""
    newest = max((merge.timestamp for merge in merges), default=0.0)
    # A clock that is ahead would make all others old.
    oldest = min(newest, time.time()) - MERGE_MEMORY_S
    return tuple(merge for merge in merges if merge.timestamp > oldest)


def _each_once(events: pl.DataFrame) -> pl.DataFrame:
    """The first to come of events that are alike."""
    has_id = pl.col("event_id").is_not_null()
    events = events.filter(~has_id | pl.struct("user_id", "event_id").is_first_distinct())
    place = ["user_id", "item_id", "timestamp"]
    by_place = ~has_id | pl.col("source").eq_missing(MERGED)
    is_first = pl.struct(place).is_first_distinct()
    return events.filter(is_first | ~(by_place | by_place.first().over(place)))


def _write_durably(events: pl.DataFrame, path: Path) -> None:
    write_parquet(events, path)
    fsync(path)


def _read_index(path: Path) -> Index:
    if not path.exists():
        return Index()
    try:
        return Index.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise DataError(f"{path}: not the index of a job's log ({error}); restore the folder from a backup") from error
