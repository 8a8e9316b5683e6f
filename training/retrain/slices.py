"""The log cut at a moment: what a candidate learns, whom it is validated by, and the newest events it is judged on.

    ──────── earlier events ──────────┃─── slice: new events from the cut on ───
     learned, but for the last event    each one a target, from all that its user did before it
     of some users: validation

An event validates that the current model has not learned, since a candidate may begin with that model's weights; where
too few are like that, any. Neither the candidate nor the current model has learned an event of the slice. What came
since the current model learned and is dated before the cut is learned by the candidate.

U users
"""

import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from model.config import UNK
from training.catalog import Catalog
from training.retrain.store import NUM_BUCKETS, Learned, Store
from training.splits import Histories, Split, Targets, place_of, to_histories, training_counts
from training.streaming import Shards, write_shard

SHARD_EVENTS = 2**20
"""Buckets are put together to shards of about so many events: what is in memory at a time."""
MAX_VALIDATION_USERS = 2_000
MAX_VALIDATION_SHARE = 0.5
"""Of the users, at most so many give their last earlier event to validation."""
LEAST_VALIDATION_USERS = 100
"""With a new event before the cut; of fewer there would be too little to choose an epoch and to calibrate by."""
MAX_JUDGED_USERS = 20_000
MAX_TARGETS = 10
"""Of a user, the first ones in the slice."""


@dataclass(frozen=True)
class Cut:
    """Where the log is cut.

    Args:
        learned: what the current model has learned; the slice is of the others.
        begin: the slice's first moment, seconds since 1970; infinite: nobody is asked anything, all is learned.
        without_users: whose events are left out everywhere.
    """

    learned: Learned
    begin: float = math.inf
    without_users: tuple[str, ...] = ()


def grown_catalog(store: Store, known: Catalog | None, without_users: Sequence[str] = ()) -> Catalog:
    """The catalogue of a log: the known one with the ids that it lacks appended, those first that were used first."""
    first = pl.DataFrame(schema={"item_id": pl.String(), "timestamp": pl.Float64()})
    for number in range(NUM_BUCKETS):
        of_bucket = bucket_without(store, number, without_users).group_by("item_id").agg(pl.col("timestamp").min())
        first = pl.concat([first, of_bucket]).group_by("item_id").agg(pl.col("timestamp").min())
    ids = first.sort("timestamp", "item_id")["item_id"]
    return Catalog.from_ids(ids) if known is None else known.grow(ids)


def slice_begin(store: Store, learned: Learned, num_events: int, without_users: Sequence[str] = ()) -> float:
    """The moment from which on there are at least so many new events, or all: seconds since 1970."""
    newest = np.empty(0)
    for number in range(NUM_BUCKETS):
        events = bucket_without(store, number, without_users)
        new = events.filter(learned.is_new() & (pl.col("weight") > 0))["timestamp"]
        newest = np.sort(np.concatenate([newest, new.to_numpy()]))[-num_events:]
    return float(newest[0]) if len(newest) else math.inf


def split_at(store: Store, catalog: Catalog, cut: Cut, folder: Path) -> tuple[Catalog, Split[Shards]]:
    """Cut the log.

    Args:
        store: the log. A shard's buckets are in memory at a time, and the users to validate with and to judge by.
        catalog: whose items are known; others are UNK.
        cut: where.
        folder: receives the shards of what is learned. What lies there is deleted.

    Returns:
        the catalogue with the counts of what is learned, and the split. Of its test targets one user may have several.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shares = _Shares.of(store, cut)
    counts = np.zeros(len(catalog), np.int64)
    validation, test = [], []
    pieces = users = events = 0
    for shard in _shards(store, cut):
        histories = to_histories(shard, catalog)
        may_validate = np.ones(len(shard), bool) if shares.by_any else _is_new(shard, cut)
        learned, of_validation, of_slice = _divide(histories, _in_slice(shard, cut), may_validate, shares)
        validation.append(of_validation)
        test.append(of_slice)
        counts += training_counts(learned, len(catalog))
        if learned.weights.any():
            write_shard(folder, pieces, learned)
            pieces, users, events = pieces + 1, users + len(learned), events + learned.num_events
    split = Split(
        name="time",
        train=Shards(folder, pieces, users, events),
        validation=Targets.concat(validation),
        test=Targets.concat(test),
    )
    return catalog.with_training_counts(counts), split


@dataclass(frozen=True)
class _Shares:
    """Which users are asked: those whose place, a hash of the id, is below a share.

    `by_any`: an event that the current model has learned may validate too.
    """

    validation: float
    judged: float
    by_any: bool

    @classmethod
    def of(cls, store: Store, cut: Cut) -> "_Shares":
        users = users_in_slice = users_with_new = 0
        for number in range(NUM_BUCKETS):
            events = bucket_without(store, number, cut.without_users)
            in_slice = _in_slice(events, cut)
            users_in_slice += events.filter(in_slice)["user_id"].n_unique()
            # As in `_divide`: who has an event to be asked about, and another before it to be asked from.
            earlier = events.with_columns(new=_is_new(events, cut)).filter(~in_slice).filter(pl.col("weight") > 0)
            last = earlier.group_by("user_id").agg(pl.len(), pl.col("new").last()).filter(pl.col("len") >= 2)
            users, users_with_new = users + len(last), users_with_new + int(last["new"].sum())
        by_any = users_with_new < LEAST_VALIDATION_USERS
        share = min(MAX_VALIDATION_SHARE, MAX_VALIDATION_USERS / max(users if by_any else users_with_new, 1))
        return cls(
            validation=share if math.isfinite(cut.begin) else 0.0,
            judged=min(1.0, MAX_JUDGED_USERS / max(users_in_slice, 1)),
            by_any=by_any,
        )


def bucket_without(store: Store, number: int, without_users: Sequence[str]) -> pl.DataFrame:
    """The events of a bucket but for those of users to leave out."""
    return store.bucket(number).filter(~pl.col("user_id").is_in(without_users))


def _is_new(events: pl.DataFrame, cut: Cut) -> np.ndarray:
    return events.select(cut.learned.is_new()).to_series().to_numpy()


def _in_slice(events: pl.DataFrame, cut: Cut) -> np.ndarray:
    return events.select(cut.learned.is_new() & (pl.col("timestamp") >= cut.begin)).to_series().to_numpy()


def _shards(store: Store, cut: Cut) -> Iterator[pl.DataFrame]:
    """The events of as many buckets at a time as make a shard, without the users to leave out."""
    gathered: list[pl.DataFrame] = []
    for number in range(NUM_BUCKETS):
        gathered.append(bucket_without(store, number, cut.without_users))
        if sum(map(len, gathered)) >= SHARD_EVENTS or number == NUM_BUCKETS - 1:
            yield pl.concat(gathered)
            gathered = []


def _divide(
    histories: Histories, in_slice_E: np.ndarray, may_validate_E: np.ndarray, shares: _Shares
) -> tuple[Histories, Targets, Targets]:
    """What is learned of some users, the validation targets, and the targets of the slice.

    Events of a user in the slice come last, but for late ones, which the user's later history holds and nobody is asked
    about: the slice is what comes after the last earlier event.
    """
    starts, ends = histories.offsets[:-1], histories.offsets[1:]
    places = np.array([place_of(user_id) for user_id in histories.user_ids])
    # Of each user the first event from which on all are of the slice.
    outside = np.where(in_slice_E, -1, np.arange(len(in_slice_E)))
    last_outside = np.maximum.reduceat(np.append(outside, -1), starts) if len(starts) else starts
    slice_begins = np.maximum(last_outside + 1, starts)

    possible = (histories.weights > 0) & (histories.items != UNK)
    learned_ends = slice_begins.copy()
    validation: list[tuple[int, int]] = []
    judged: list[tuple[int, int]] = []
    for user, (start, begin, end) in enumerate(zip(starts, slice_begins, ends, strict=True)):
        if places[user] < shares.judged:
            judged += [(user, begin + event) for event in np.flatnonzero(possible[begin:end])[:MAX_TARGETS]]
        earlier = np.flatnonzero(possible[start:begin])
        is_asked = places[user] < shares.validation and len(earlier) >= 2
        if is_asked and may_validate_E[start + earlier[-1]]:
            learned_ends[user] = start + earlier[-1]
            validation.append((user, start + earlier[-1]))
    learned = histories.prefixes(np.arange(len(histories)), learned_ends)
    return learned, _targets(histories, validation), _targets(histories, judged)


def _targets(histories: Histories, chosen: Sequence[tuple[int, int]]) -> Targets:
    """Users and events of theirs, as targets."""
    users, events = np.array(chosen, np.int64).reshape(-1, 2).T
    return Targets(histories.prefixes(users, events), histories.items[events])
