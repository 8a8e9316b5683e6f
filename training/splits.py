"""Splits of a log into training histories and targets to predict.

Two of them. `leave_one_out`: each user's last event is the test target, the one before it the validation
target. `users`: a tenth of the users is held out whole, chosen by a hash of the id that no library version
changes, so a user stays on the same side when the log grows; nothing of theirs reaches training, item counts
or popularity.

Under both, the catalogue holds every item of the log: an item that training never sees keeps count 0. An
event of weight 0 is never a target, but stays in the histories (here, not in the window), because it makes
its item seen.

U users · E events of all users
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, Protocol, TypeVar, get_args

import numpy as np
import polars as pl

from model.config import FIRST_ITEM, UNK
from training.catalog import Catalog
from training.events import EventLog

SplitName = Literal["leave_one_out", "users"]

MIN_EVENTS_LEAVE_ONE_OUT = 3
"""Events of positive weight a user needs to give up two of them."""
HELD_OUT_SHARE = 0.1
"""Share of users that `users` keeps out of training; half of them validation, half test."""


class TrainingHistories(Protocol):
    """What a model is trained on: the histories of users, in pieces of which one at a time fits into memory."""

    def __len__(self) -> int:
        """U, over all pieces."""

    @property
    def num_events(self) -> int:
        """E, events of weight 0 included."""

    @property
    def num_pieces(self) -> int:
        """How many pieces there are; a user is in one of them."""

    def piece(self, number: int) -> "Histories":
        """One of the pieces, from 0."""


@dataclass(frozen=True, eq=False)
class Histories:
    """Events of users, one user after the other, each in time order (compressed rows)."""

    user_ids: list[str]
    """(U,)"""
    offsets: np.ndarray
    """(U+1,) int64: user u has the events offsets[u] … offsets[u+1] - 1."""
    items: np.ndarray
    """(E,) int64 item numbers, UNK for an id the catalogue does not hold."""
    weights: np.ndarray
    """(E,) float32 ≥ 0; 0 = seen, but not part of the history."""
    timestamps: np.ndarray
    """(E,) float64 seconds since 1970, NaN where the log has none."""

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.user_ids) + 1 or self.offsets[0] != 0:
            raise ValueError(f"{len(self.user_ids)} users need offsets 0 … E, one more than users")
        if not self.offsets[-1] == len(self.items) == len(self.weights) == len(self.timestamps):
            raise ValueError("items, weights and timestamps must all have the length that the last offset says")

    def __len__(self) -> int:
        return len(self.user_ids)

    @property
    def num_events(self) -> int:
        """E, events of weight 0 included."""
        return len(self.items)

    @property
    def num_pieces(self) -> int:
        """They are in memory, whole."""
        return 1

    def piece(self, number: int) -> "Histories":
        """All of them."""
        return self

    @classmethod
    def concat(cls, parts: Sequence["Histories"]) -> "Histories":
        """The users of one after those of the other."""
        begins = np.cumsum([0, *(part.num_events for part in parts)])[:-1]
        return cls(
            user_ids=[user_id for part in parts for user_id in part.user_ids],
            offsets=np.concatenate(
                [[0], *(part.offsets[1:] + begin for part, begin in zip(parts, begins, strict=True))]
            ),
            items=np.concatenate([np.empty(0, np.int64), *(part.items for part in parts)]),
            weights=np.concatenate([np.empty(0, np.float32), *(part.weights for part in parts)]),
            timestamps=np.concatenate([np.empty(0, np.float64), *(part.timestamps for part in parts)]),
        )

    def of_users(self, users: np.ndarray) -> "Histories":
        """The whole histories of some users, (V,) rows, in the order wanted."""
        return self.prefixes(users, self.offsets[1:][users])

    def prefixes(self, users: np.ndarray, ends: np.ndarray) -> "Histories":
        """The events of some users before a point each.

        Args:
            users: (V,) rows of the users to keep, in the order wanted.
            ends: (V,) index of the first event to leave out, among that user's events or right after them.
        """
        starts = self.offsets[:-1][users]
        offsets = np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int64)
        events = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], ends - starts)
        return Histories(
            user_ids=[self.user_ids[user] for user in users],
            offsets=offsets,
            items=self.items[events],
            weights=self.weights[events],
            timestamps=self.timestamps[events],
        )


@dataclass(frozen=True, eq=False)
class Targets:
    """For some users, the event to predict and everything before it."""

    history: Histories
    """May be empty for a user. Holds the events of weight 0 too, so that the seen set is whole."""
    target: np.ndarray
    """(U,) int64 item numbers, never UNK."""

    def __post_init__(self) -> None:
        if len(self.target) != len(self.history):
            raise ValueError(f"{len(self.history)} histories but {len(self.target)} targets")

    def __len__(self) -> int:
        return len(self.target)

    @classmethod
    def concat(cls, parts: Sequence["Targets"]) -> "Targets":
        """The users of one after those of the other."""
        target = np.concatenate([np.empty(0, np.int64), *(part.target for part in parts)])
        return cls(Histories.concat([part.history for part in parts]), target)

    def of_users(self, users: np.ndarray) -> "Targets":
        """Those of some users, (V,) rows, in the order wanted."""
        return Targets(self.history.of_users(users), self.target[users])

    def after(self, num_events: int) -> tuple[np.ndarray, "Targets"]:
        """What was to be told when these users had had so few events: which one is the next?

        Events of weight 0 are not counted, but stay in the histories, those right before the target too.

        Args:
            num_events: ≥ 0, events of positive weight in each history.

        Returns:
            rows (V,) of the users who have a next event on a known item, up to their target; and theirs.
        """
        counted = np.append(np.flatnonzero(self.history.weights > 0), self.history.num_events)
        bounds = np.searchsorted(counted, self.history.offsets)
        longer = np.diff(bounds) > num_events
        place = np.where(longer, counted[np.where(longer, bounds[:-1] + num_events, 0)], self.history.offsets[1:])
        target = np.where(longer, np.append(self.history.items, UNK)[place], self.target)
        users = np.flatnonzero((np.diff(bounds) >= num_events) & (target != UNK))
        return users, Targets(self.history.prefixes(users, place[users]), target[users])


Train = TypeVar("Train", bound=TrainingHistories)


@dataclass(frozen=True, eq=False)
class Split(Generic[Train]):
    """What to train on, choose by, and report."""

    name: SplitName | Literal["time"]
    """`time`: the retraining job's, by a moment (training/retrain/slices.py)."""
    train: Train
    validation: Targets
    test: Targets
    held_out_without_target: int = 0
    """Users kept out of training who have no event that could be a target (`users` only)."""

    def summary(self) -> dict[str, int | str]:
        """Sizes for a manifest or report; every value fits into JSON."""
        return {
            "split": self.name,
            "train_users": len(self.train),
            "train_events": self.train.num_events,
            "validation_users": len(self.validation),
            "test_users": len(self.test),
            "held_out_without_target": self.held_out_without_target,
        }


def make_split(log: EventLog, catalog: Catalog, name: SplitName) -> Split[Histories]:
    """Split `log` by `leave_one_out` or `users`; the same log always gives the same split.

    Raises:
        ValueError: an unknown name.
    """
    return split_histories(to_histories(log.events, catalog), name)


def split_histories(histories: Histories, name: SplitName) -> Split[Histories]:
    """The same of histories: each user's part depends on that user alone."""
    if name not in get_args(SplitName):
        raise ValueError(f"no split is called {name!r}; known: {', '.join(get_args(SplitName))}")
    return _leave_one_out(histories) if name == "leave_one_out" else _held_out_users(histories)


def with_validation_learned(split: Split[Histories]) -> Split[Histories]:
    """A `leave_one_out` split whose training histories end with the validation targets; test stays as it was.

    Raises:
        ValueError: of another split. The users that `users` holds out are new to a model in any case.
    """
    if split.name != "leave_one_out":
        raise ValueError(f"the split {split.name} has no validation events of users it trains on")
    asked = set(split.test.history.user_ids)
    others = np.array([row for row, user_id in enumerate(split.train.user_ids) if user_id not in asked], np.int64)
    return replace(split, train=Histories.concat([split.test.history, split.train.of_users(others)]))


def to_histories(events: pl.DataFrame, catalog: Catalog) -> Histories:
    """Sorted events by user, users in the order of their ids."""
    users = events.select(pl.col("user_id").rle().struct.unnest())
    return Histories(
        user_ids=users["value"].to_list(),
        offsets=np.concatenate([[0], np.cumsum(users["len"].to_numpy(), dtype=np.int64)]),
        items=catalog.numbers(events["item_id"]),
        weights=events["weight"].to_numpy(),
        timestamps=events["timestamp"].to_numpy(),
    )


def training_counts(histories: Histories, num_items: int) -> np.ndarray:
    """(num_items,) int64: events of positive weight on each catalogue item; UNK is not counted."""
    counted = histories.items[(histories.weights > 0) & (histories.items >= FIRST_ITEM)]
    return np.bincount(counted - FIRST_ITEM, minlength=num_items)


def place_of(user_id: str) -> float:
    """An 8-byte BLAKE2b of the id, read as a number in [0, 1): a draw that no library version changes."""
    digest = hashlib.blake2b(user_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def held_out_part(user_id: str) -> Literal["train", "validation", "test"]:
    """Where `users` puts a user."""
    place = place_of(user_id)
    if place >= HELD_OUT_SHARE:
        return "train"
    return "validation" if place < HELD_OUT_SHARE / 2 else "test"


def _leave_one_out(histories: Histories) -> Split[Histories]:
    possible, end_of_possible = _possible_targets(histories)
    num_possible = np.diff(end_of_possible, prepend=0)
    users = np.flatnonzero(num_possible >= MIN_EVENTS_LEAVE_ONE_OUT)
    test = possible[end_of_possible[users] - 1]
    validation = possible[end_of_possible[users] - 2]

    training_ends = histories.offsets[1:].copy()
    training_ends[users] = validation
    return Split(
        name="leave_one_out",
        train=histories.prefixes(np.arange(len(histories)), training_ends),
        validation=_targets(histories, users, validation),
        test=_targets(histories, users, test),
    )


def _held_out_users(histories: Histories) -> Split[Histories]:
    possible, end_of_possible = _possible_targets(histories)
    has_target = np.diff(end_of_possible, prepend=0) > 0
    parts = np.array([held_out_part(user_id) for user_id in histories.user_ids], dtype=object)

    def part(name: str) -> Targets:
        users = np.flatnonzero((parts == name) & has_target)
        return _targets(histories, users, possible[end_of_possible[users] - 1])

    training = np.flatnonzero(parts == "train")
    return Split(
        name="users",
        train=histories.prefixes(training, histories.offsets[1:][training]),
        validation=part("validation"),
        test=part("test"),
        held_out_without_target=int(((parts != "train") & ~has_target).sum()),
    )


def _possible_targets(histories: Histories) -> tuple[np.ndarray, np.ndarray]:
    """Indices of all events that may be targets, and for each user (U,) where theirs end in that list."""
    possible = (histories.weights > 0) & (histories.items != UNK)
    counted = np.concatenate([[0], np.cumsum(possible)])
    return np.flatnonzero(possible), counted[histories.offsets[1:]]


def _targets(histories: Histories, users: np.ndarray, events: np.ndarray) -> Targets:
    return Targets(histories.prefixes(users, events), histories.items[events])
