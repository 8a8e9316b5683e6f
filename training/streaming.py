"""A log larger than memory: its events sorted into shards of whole users on the disk, and read shard by shard.

Two passes. The first reads the log block by block, notes every item, and scatters the events over files by a hash of
the user. The second takes one shard after the other: sorts it, splits it, and keeps the training histories as a Parquet
file; of the users to judge by it keeps a bounded number. Memory holds a block, a shard, the catalogue and those users.
"""

import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import polars as pl

from training.catalog import Catalog
from training.events import DataConfig, LogFacts, Reading, last_timestamp, read_blocks, sort_events, tie_counts
from training.files import write_parquet
from training.splits import (
    Histories,
    Split,
    SplitName,
    Targets,
    place_of,
    split_histories,
    to_histories,
    training_counts,
)

SHARD_BYTES = 2**23
"""Of the source, about, for each shard; compressed Parquet holds some hundred thousand events in it."""
MAX_SHARDS = 1024
SCATTER_ROWS = 2**22
"""Events gathered in memory before they are scattered: fewer make more and smaller files."""


@dataclass(frozen=True)
class Shards:
    """Training histories on the disk, a piece a shard; see `splits.TrainingHistories`."""

    folder: Path
    num_pieces: int
    num_users: int
    num_events: int

    def __len__(self) -> int:
        return self.num_users

    def piece(self, number: int) -> Histories:
        """The histories of one shard, read from its file."""
        return _read_shard(self.folder, number)


@dataclass(frozen=True)
class StreamedLog:
    """A log made ready to be streamed: what is known of it, its catalogue with training counts, and its split."""

    facts: LogFacts
    catalog: Catalog
    split: Split[Shards]


def stream_log(
    config: DataConfig,
    name: SplitName,
    folder: Path,
    catalogue: Callable[[Iterable[str]], Catalog] = Catalog.from_ids,
) -> StreamedLog:
    """Read a log of any size and split it.

    Args:
        config: where the log lies, how to read it, and how many users to judge by.
        name: of the split; every user's part is that of `splits.make_split`.
        folder: receives the shards. What lies there is deleted.
        catalogue: makes the catalogue of the log's item ids, in the order of reading; items that it leaves out are UNK.

    Raises:
        DataError: as in `events.read_blocks`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    scattered = folder / "scattered"
    scattered.mkdir(parents=True)
    reading = Reading()
    num_shards = min(MAX_SHARDS, -(-_bytes(config.path) // SHARD_BYTES))
    item_ids = _scatter(read_blocks(config, reading), scattered, num_shards)
    catalog = catalogue(item_ids)

    counts = np.zeros(len(catalog), dtype=np.int64)
    tally = _Tally()
    validation = test = Targets.concat([])
    for events in _sorted_shards(scattered, num_shards):
        split = split_histories(to_histories(events, catalog), name)
        counts += training_counts(split.train, len(catalog))
        tally.add(events, split)
        validation = _first_by_hash(Targets.concat([validation, split.validation]), config.max_evaluated_users)
        test = _first_by_hash(Targets.concat([test, split.test]), config.max_evaluated_users)
        if split.train.weights.any():
            write_shard(folder, tally.num_pieces, split.train)
            tally.num_pieces += 1
    shutil.rmtree(scattered)
    return StreamedLog(
        facts=tally.facts(reading, num_items=len(item_ids)),
        catalog=catalog.with_training_counts(counts),
        split=Split(
            name=name,
            train=Shards(folder, tally.num_pieces, tally.train_users, tally.train_events),
            validation=_by_id(validation),
            test=_by_id(test),
            held_out_without_target=tally.held_out_without_target,
        ),
    )


@dataclass
class _Tally:
    """Sums over the shards."""

    users: int = 0
    events: int = 0
    tied: int = 0
    tied_last: int = 0
    last_timestamp: float = -math.inf
    num_pieces: int = 0
    train_users: int = 0
    train_events: int = 0
    held_out_without_target: int = 0

    def add(self, events: pl.DataFrame, split: Split[Histories]) -> None:
        tied, tied_last = tie_counts(events)
        self.users += events["user_id"].n_unique()
        self.events += len(events)
        self.tied += tied
        self.tied_last += tied_last
        self.last_timestamp = max(self.last_timestamp, last_timestamp(events))
        self.train_users += len(split.train)
        self.train_events += split.train.num_events
        self.held_out_without_target += split.held_out_without_target

    def facts(self, reading: Reading, num_items: int) -> LogFacts:
        return LogFacts(
            **asdict(reading),
            rows_kept=self.events,
            users=self.users,
            items=num_items,
            tied_events_share=self.tied / self.events if reading.has_timestamps else None,
            tied_last_two_users_share=self.tied_last / self.users if reading.has_timestamps else None,
            last_timestamp=self.last_timestamp if reading.has_timestamps else None,
        )


# First pass


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file())


def _scatter(blocks: Iterator[pl.DataFrame], folder: Path, num_shards: int) -> pl.Series:
    """Write the events as they come to files `SHARD-ROUND.parquet`; returns the item ids in order of appearance."""
    item_ids = pl.Series("item_id", dtype=pl.String())
    for round, events in enumerate(_in_rounds(blocks)):
        new_ids = events["item_id"].unique(maintain_order=True)
        item_ids = pl.concat([item_ids, new_ids]).unique(maintain_order=True)
        by_shard = events.with_columns(shard=pl.col("user_id").hash(0) % num_shards)
        for part in by_shard.partition_by("shard", maintain_order=True):
            write_parquet(part.drop("shard"), folder / f"{part['shard'][0]:05}-{round:05}.parquet")
    return item_ids


def _in_rounds(blocks: Iterator[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """The blocks, put together to some `SCATTER_ROWS` rows."""
    gathered: list[pl.DataFrame] = []
    for block in blocks:
        gathered.append(block)
        if sum(map(len, gathered)) >= SCATTER_ROWS:
            yield pl.concat(gathered)
            gathered = []
    if gathered:
        yield pl.concat(gathered)


# Second pass


def _sorted_shards(scattered: Path, num_shards: int) -> Iterator[pl.DataFrame]:
    """The events of each shard that has some, as `sort_events` sorts them."""
    for number in range(num_shards):
        if files := sorted(scattered.glob(f"{number:05}-*.parquet")):
            yield sort_events(pl.concat([pl.read_parquet(file) for file in files]))


def _first_by_hash(targets: Targets, most: int) -> Targets:
    """The users whose ids have the smallest hashes: always the same ones, in whatever order the shards come."""
    if len(targets) <= most:
        return targets
    places = np.array([place_of(user_id) for user_id in targets.history.user_ids])
    return targets.of_users(np.argpartition(places, most)[:most])


def _by_id(targets: Targets) -> Targets:
    user_ids = targets.history.user_ids
    return targets.of_users(np.array(sorted(range(len(user_ids)), key=user_ids.__getitem__), dtype=np.int64))


# Shards


def _shard_file(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.parquet"


def write_shard(folder: Path, number: int, train: Histories) -> None:
    """Keep training histories as the piece `number` of a folder's `Shards`.

    Raises:
        OSError: the disk is full, for one.
    """
    lengths = np.diff(train.offsets)
    user_ids = pl.Series(train.user_ids, dtype=pl.String())
    columns = {
        "user_id": user_ids.gather(np.repeat(np.arange(len(train)), lengths)),
        "item": train.items,
        "weight": train.weights,
        "timestamp": train.timestamps,
    }
    write_parquet(pl.DataFrame(columns), _shard_file(folder, number))


def _read_shard(folder: Path, number: int) -> Histories:
    events = pl.read_parquet(_shard_file(folder, number))
    users = events.select(pl.col("user_id").rle().struct.unnest())
    return Histories(
        user_ids=users["value"].to_list(),
        offsets=np.concatenate([[0], np.cumsum(users["len"].to_numpy(), dtype=np.int64)]),
        items=events["item"].to_numpy(),
        weights=events["weight"].to_numpy(),
        timestamps=events["timestamp"].to_numpy(),
    )
