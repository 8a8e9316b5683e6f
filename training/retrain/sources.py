"""Where the job's events come from: files in a folder, and the service's outbox.

A file counts as read when the log's index has its digest. An entry of the outbox stays with the consumer group until it
is acknowledged, which `Outbox.acknowledge` does once the log has it for good: a job that is killed in between gets it
again, and the log keeps it once.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import polars as pl
import redis
from redis.exceptions import OutOfMemoryError, RedisClusterException, RedisError, ResponseError

from training.events import MAX_WEIGHT, MIN_WEIGHT, DataConfig, Reading, read_blocks, source_files
from training.retrain.store import EVENT_SCHEMA, NOBODY, SESSION, Incoming, Merge
from training.tables import DataError

GROUP = "retrain"
"""Of the consumers of the outbox; the one consumer in it has the same name, since one job runs at a time."""
NUM_STREAMS = 256
READ_ENTRIES = 10_000
"""Asked for at a time."""
ACKNOWLEDGED = 1_000
"""Entries acknowledged at a time."""
TIMEOUT_S = 30.0
_FAILURES = (RedisError, RedisClusterException)
"""Of the client. The second is raised when no node of a cluster answers, and is not one of the first."""


# Files


@dataclass(frozen=True)
class NewFiles:
    """The files of a folder, or the one file, that the log has not read yet."""

    incoming: Incoming
    repeated: tuple[str, ...]
    """Names of files whose content was read before, under this or another name."""


def new_files(config: DataConfig, files_read: Mapping[str, str], rejects: Path) -> NewFiles:
    """What is new in a folder of event files.

    Args:
        config: where the files lie and how to read them. A folder without files has nothing new.
        files_read: sha256 → name, of the log's index.
        rejects: folder that receives `<file>-<digest>.jsonl` with the rows of a file that cannot be used.

    Raises:
        DataError: no such folder, files of mixed formats, or a file has no column of timestamps; when the blocks are
            read, as `events.read_blocks`, or a file changes meanwhile.
    """
    if config.path.is_dir() and not any(path.name[0] not in "._" for path in config.path.iterdir()):
        return NewFiles(Incoming(), ())
    fresh: dict[str, Path] = {}
    repeated = []
    for file in source_files(config)[1]:
        digest = _sha256(file)
        if digest in files_read or digest in fresh:
            repeated.append(file.name)
        else:
            fresh[digest] = file
    names = {digest: file.name for digest, file in fresh.items()}
    return NewFiles(Incoming(_blocks_of_files(config, fresh, rejects), names), tuple(repeated))


def _blocks_of_files(config: DataConfig, files: Mapping[str, Path], rejects: Path) -> Iterator[pl.DataFrame]:
    for digest, file in files.items():
        reading = Reading()
        of_file = config.model_copy(update={"path": file, "rejects": rejects / f"{file.name}-{digest[:8]}.jsonl"})
        for events in read_blocks(of_file, reading, may_be_empty=True):
            if events["timestamp"].is_nan().any():
                raise DataError(
                    f"{file} has no timestamps, without which nobody can tell what is new; name the column with"
                    " data.columns.timestamp"
                )
            extra = {"event_id": pl.lit(None, pl.String()), "source": pl.lit(file.name)}
            yield events.with_columns(**extra).select(EVENT_SCHEMA.names())
        if reading.sha256 != digest:
            raise DataError(f"{file} changed while it was read; write files elsewhere and move them in when complete")


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


# The outbox


class Entry(NamedTuple):
    """Which entry of which stream."""

    stream: str
    id: bytes


@dataclass(frozen=True)
class Received:
    """Entries of the outbox: what they say, which they are, and those that say nothing that can be used."""

    incoming: Incoming
    entries: tuple[Entry, ...]
    unusable: tuple[dict[str, str], ...]
    """Of each: stream, id, what is wrong, and its fields."""


class Outbox:
    """The streams that the service writes its events to (service.md, "State in Redis"). A context manager.

    Args:
        url: as the service's BFT_REDIS_URL.
        cluster: whether that is a node of a Redis Cluster.

    Raises:
        DataError: of every method: the server does not answer, or not with what was asked for.
    """

    def __init__(self, url: str, cluster: bool = False) -> None:
        client: Any = redis.RedisCluster if cluster else redis.Redis
        self._place = urlsplit(url)._replace(netloc=urlsplit(url).netloc.rpartition("@")[2]).geturl()
        try:
            self._client = client.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        except _FAILURES as error:
            raise self._unreachable(error) from error
        except ValueError as error:
            # Its message names the accepted schemes and not the URL, which may hold a password.
            raise DataError(f"BFT_REDIS_URL: {error}") from error

    def __enter__(self) -> "Outbox":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def receive(self, most: int) -> Received | None:
        """The next entries, those first that were received and never acknowledged; None: there are none.

        Args:
            most: entries, about.
        """
        try:
            received = _understood(self._read(most))
        except _FAILURES as error:
            raise self._unreachable(error) from error
        return received if received.entries else None

    def acknowledge(self, received: Received) -> None:
        """Take entries off the outbox: the log has what they say."""
        by_stream: dict[str, list[bytes]] = {}
        for entry in received.entries:
            by_stream.setdefault(entry.stream, []).append(entry.id)
        try:
            for stream, ids in by_stream.items():
                for begin in range(0, len(ids), ACKNOWLEDGED):
                    some = ids[begin : begin + ACKNOWLEDGED]
                    # Deleted first: what is deleted and still pending comes back empty, and is acknowledged then.
                    self._client.xdel(stream, *some)
                    self._client.xack(stream, GROUP, *some)
        except _FAILURES as error:
            raise self._unreachable(error) from error

    def _read(self, most: int) -> Iterator[tuple[str, bytes, dict[bytes, bytes]]]:
        """Stream, id and fields of entries."""
        left = most
        for number in range(NUM_STREAMS):
            stream = outbox_stream(number)
            if left <= 0 or not self._client.exists(stream):
                continue
            # From the start on what is pending, then what nobody has received.
            begin = b"0"
            while left > 0:
                entries = self._read_group(stream, begin, min(left, READ_ENTRIES))
                if entries:
                    left -= len(entries)
                    yield from ((stream, id, fields) for id, fields in entries)
                    begin = b">" if begin == b">" else entries[-1][0]
                elif begin == b">":
                    break
                else:
                    begin = b">"

    def _read_group(self, stream: str, begin: bytes, most: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Entries of one stream, by the group, which is made where it is not there yet.

        A server whose memory is full refuses to make one, and this job is who empties it: then they are read without,
        which is as good for a consumer that is alone.
        """
        try:
            reply = self._client.xreadgroup(GROUP, GROUP, {stream: begin}, count=most)
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            try:
                self._client.xgroup_create(stream, GROUP, id="0")
            except OutOfMemoryError:
                found = [] if begin == b">" else self._client.xrange(stream, min=b"(" + begin, count=most)
                return [(id, fields) for id, fields in found]
            reply = self._client.xreadgroup(GROUP, GROUP, {stream: begin}, count=most)
        return _of_one_stream(reply)

    def _unreachable(self, error: Exception) -> DataError:
        return DataError(
            f"{self._place}: the outbox cannot be read ({type(error).__name__}: {error}); nothing of it was lost, run"
            " the job again when the server answers"
        )


def outbox_stream(number: int) -> str:
    """The key of a bucket's stream."""
    return f"bft:1:{{b{number:03d}}}:ev"


def _of_one_stream(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of XREADGROUP's reply for one stream, in the form of either protocol version."""
    if not reply:
        return []
    found = next(iter(reply.values()))[0] if isinstance(reply, dict) else reply[0][1]
    return [(id, fields or {}) for id, fields in found]


def _understood(read: Iterable[tuple[str, bytes, dict[bytes, bytes]]]) -> Received:
    """Entries as they are read: of a million their fields alone would take more than a gigabyte."""
    entries: list[Entry] = []
    rows: list[tuple[str, str, float, float, str | None, str]] = []
    erasures: dict[str, float] = {}
    merges: list[Merge] = []
    unusable = []
    erased: dict[str, tuple[int, float]] = {}
    """User → how many rows stand before the last entry that erases the user, and its time."""
    for stream, id, raw in read:
        entries.append(Entry(stream, id))
        if not raw:
            continue  # deleted by an acknowledgement that was interrupted, or by an erasure
        fields = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in raw.items()}
        try:
            match fields.get("kind"):
                case "event":
                    rows.append(_event(fields))
                case "erase" if "user_id" in fields:
                    time = float(fields["timestamp_ms"]) / 1000
                    erasures[fields["user_id"]] = max(time, erasures.get(fields["user_id"], time))
                    erased[fields["user_id"]] = (len(rows), time)
                case "merge" | "erase":
                    # Of a session that was merged into a user who is erased: what it had until then is nobody's.
                    into = fields["user_id"] if fields["kind"] == "merge" else NOBODY
                    time = float(fields["timestamp_ms"]) / 1000
                    merges.append(Merge(session_id=fields["session_id"], user_id=into, timestamp=time))
                case other:
                    raise ValueError(f"kind is {other!r}; known: event, merge, erase")
        except (ValueError, KeyError) as error:
            problem = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            unusable.append({"stream": stream, "id": id.decode(), "problem": problem, "fields": json.dumps(fields)})
    for place, (user_id, item_id, timestamp, weight, event_id, source) in enumerate(rows):
        until, erased_at = erased.get(user_id, (0, math.inf))
        if place < until and timestamp > erased_at:
            # It came before the erasure, however a clock dated it: a user's entries are in one stream, in their order.
            rows[place] = (user_id, item_id, erased_at, weight, event_id, source)
    frame = pl.DataFrame(rows, schema=EVENT_SCHEMA, orient="row")
    return Received(
        incoming=Incoming(blocks=[frame], erasures=erasures, merges=merges),
        entries=tuple(entries),
        unusable=tuple(unusable),
    )


def _event(fields: Mapping[str, str]) -> tuple[str, str, float, float, str | None, str]:
    """A row of `EVENT_SCHEMA`."""
    subject = fields["user_id"] if "user_id" in fields else SESSION + fields["session_id"]
    weight = float(fields["weight"])
    if weight != 0 and not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight is {weight}; accepted: 0, or {MIN_WEIGHT} to {MAX_WEIGHT}")
    timestamp = float(fields["timestamp_ms"]) / 1000
    return subject, fields["item_id"], timestamp, weight, fields.get("event_id") or None, "outbox"
