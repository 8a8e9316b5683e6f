"""What a state store promises: its verbs, its values and its errors (service.md, "State in Redis").

A store keeps, per user or anonymous session, the last `max_len` events, the set of items ever seen, the
identities of recent events, the encoded states of models and the slates that were served, and it hands every
event to retraining through an outbox. It also keeps the items that were added at run time, once for all. It
promises: every call is atomic per subject, events with an identity are stored once, and no value of another
subject is ever returned.

    StateError              base
    ├── StateUnavailable    the world: time-out, connection, server error. A write may have happened
    ├── NotReplicated       the world: too few replicas have the write yet. It has happened, and may be lost again
    ├── OutboxFull          the world: retraining does not keep up. Nothing was written
    ├── UnknownItemsFull    the world: too many ids outside the catalogue. Nothing was written
    └── CatalogMismatch     the operator: the record is of another catalogue lineage. Nothing was written
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from model.config import FIRST_ITEM, UNKNOWN_BASE
from service.filtered import State

MAX_EVENTS_PER_CALL = 1000
"""Bound on one `append`: a script holds the server for its whole run."""
MAX_SLATE_TTL_S = 86_400
MAX_ADDED_ITEMS = 10_000
MAX_TIMESTAMP_MS = 2**47
MAX_ITEM_NUMBER = 2**32
MAX_WEIGHT = 2.0**127
"""Below the largest bfloat16, so that rounding never gives infinity."""

Clock = Callable[[], int]
"""Milliseconds since 1970."""


def wall_clock_ms() -> int:
    """Milliseconds since 1970, from this machine's clock."""
    return time.time_ns() // 1_000_000


class StateError(Exception):
    """Base of what a store raises about the world; mistakes of the caller are ValueError."""


class StateUnavailable(StateError):
    """The store did not answer in time, or not with an answer. A write may or may not have happened."""


class NotReplicated(StateError):
    """The write has happened, but fewer replicas than asked for have it; it is lost if one of the others takes over."""

    def __init__(self, found: int, wanted: int) -> None:
        super().__init__(
            f"{found} of the {wanted} replicas that must have a write have it: send the request again; "
            "the operator sees to the replicas, or lowers BFT_STATE_REPLICAS"
        )


class OutboxFull(StateError):
    """The outbox of this subject's bucket is at its limit; nothing of the call was written."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"an outbox stream holds its limit of {limit} entries: let retraining read and acknowledge them, "
            "or raise BFT_OUTBOX_LIMIT"
        )


class UnknownItemsFull(StateError):
    """No number is left for another id outside the catalogue; nothing of the call was written."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the limit of {limit} item ids outside the catalogue is reached: see where they come from, "
            "or raise BFT_UNKNOWN_LIMIT"
        )


class CatalogMismatch(StateError):
    """The subject's record holds item numbers of another catalogue lineage; nothing was read or written."""

    def __init__(self, lineage: str) -> None:
        super().__init__(
            f"a user record was written under another catalogue lineage than {lineage!r}: serve a bundle of "
            "its lineage, or translate the records by item id first"
        )


class Subject(NamedTuple):
    """Whose state: a user or an anonymous session; the two never share a key, whatever their ids."""

    kind: Literal["user", "session"]
    id: str


CacheForm = Literal["float32", "float16", "none"]
"""How the cache of a kept state is stored."""


@dataclass(frozen=True, slots=True)
class Event:
    """One validated event, ready to be stored.

    Raises:
        ValueError: a field is outside the range that the layout can hold.
    """

    item_number: int
    """FIRST_ITEM … 2³²-1; from UNKNOWN_BASE on, an id outside the catalogue."""
    item_id: str
    """External id; goes to the outbox only."""
    timestamp_ms: int
    """0 … 2⁴⁷-1, since 1970."""
    weight: float
    """≥ 0; 0 puts the item into the seen set and keeps it out of the history."""
    identity: bytes | None
    """8-byte hash for de-duplication; None: cannot be de-duplicated."""
    undated: bool
    """The request carried no timestamp; `timestamp_ms` is then this server's clock."""
    type: str | None = None
    recommendation_id: str | None = None
    event_id: str | None = None

    def __post_init__(self) -> None:
        if not FIRST_ITEM <= self.item_number < MAX_ITEM_NUMBER:
            raise ValueError(f"item_number is {self.item_number}; accepted: {FIRST_ITEM} … 2**32 - 1")
        if not 0 <= self.timestamp_ms < MAX_TIMESTAMP_MS:
            raise ValueError(f"timestamp_ms is {self.timestamp_ms}; accepted: 0 … 2**47 - 1")
        if not (math.isfinite(self.weight) and 0.0 <= self.weight <= MAX_WEIGHT):
            raise ValueError(f"weight is {self.weight}; accepted: 0 … 2**127, finite")
        if self.identity is not None and len(self.identity) != 8:
            raise ValueError(f"identity has {len(self.identity)} bytes; accepted: None or exactly 8 bytes")


@dataclass(frozen=True, slots=True, eq=False)
class UserRecord:
    """What is known of one subject. K = min(count, max_len) events, in (timestamp, arrival) order."""

    count: int
    """Events with positive weight, the ones no longer kept included."""
    epoch: int
    """Rises whenever the history changed other than by an append at its end."""
    lineage: str
    items: npt.NDArray[np.int64]
    """(K,) item numbers."""
    timestamps_ms: npt.NDArray[np.int64]
    """(K,)"""
    weights: npt.NDArray[np.float32]
    """(K,) positive, rounded to bfloat16."""
    seen: npt.NDArray[np.int64]
    """Sorted item numbers ever seen, at most `seen_limit`; beyond that the oldest half is forgotten."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedState:
    """A model's filtered state after the first `count` events of one epoch."""

    count: int
    epoch: int
    state: State


@dataclass(frozen=True, slots=True)
class Loaded:
    """One read."""

    record: UserRecord | None
    encoded: EncodedState | None
    """Of the record's epoch, and of no more events than it has. Of fewer: with the cache it was saved with, into which
    the missing ones can be folded. Of as many: without it, since nothing is missing."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What came of asking for a session."""

    is_granted: bool
    """False: it is being merged into another user, and was not read."""
    record: UserRecord | None
    """As it was when it was claimed; None when there was none, and then nothing is claimed."""


@dataclass(frozen=True, slots=True)
class SlateRef:
    """One kept slate of a subject."""

    recommendation_id: str
    expires_ms: int
    """Since 1970."""


@dataclass(frozen=True, slots=True)
class AddedItems:
    """The items that were added at run time, at one moment."""

    version: int
    """Another one after every change; 0: nothing was ever added."""
    metadata: Mapping[str, str]
    """Item id → JSON object."""


class PutStatus(StrEnum):
    """What became of an item that was put."""

    added = "added"
    replaced = "replaced"
    """It was there with other metadata."""
    unchanged = "unchanged"
    """It was there with these."""
    full = "full"
    """It was not there, and there are as many as there may be. Nothing was written."""


class AppendStatus(StrEnum):
    """What became of one event of an `append`."""

    accepted = "accepted"
    """Stored; its item is new to the subject."""
    repeated = "repeated"
    """Stored; the subject had had its item before, or earlier in the same call."""
    duplicate = "duplicate"
    """Its identity is among the subject's recent ones, or earlier in the same call."""
    erased = "erased"
    """Refused: dated at or before the user's erasure, or undated soon after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Bounds and life times, shared by every implementation.

    Raises:
        ValueError: a limit that cannot be kept.
    """

    max_len: int
    """Kept events per subject: the model's window length."""
    user_ttl_s: int = 90 * 86_400
    """From the last stored event; reading does not extend it."""
    session_ttl_s: int = 30 * 60
    """Likewise, for anonymous sessions."""
    state_ttl_s: int = 6 * 3_600
    """Of an encoded state; never above the subject's own."""
    slate_ttl_s: int = 3_600
    """Of a served slate, from its first page; at most a day, and never above the subject's own."""
    identity_ttl_s: int = 86_400
    """Of a subject's event identities, from the last stored event; never above the subject's own."""
    tombstone_ttl_s: int = 90 * 86_400
    """How long an erasure refuses older events; at least 30 d and at least `user_ttl_s`."""
    undated_refusal_s: int = 600
    """How long an erasure refuses undated events."""
    seen_limit: int = 4096
    """Item numbers in the seen set; even, because it forgets by halves."""
    identity_limit: int = 1024
    """Event identities per subject."""
    slate_limit: int = 32
    """Slates kept of a subject; beyond it the oldest are forgotten."""
    outbox_limit: int = 10_000
    """Entries in each of the 256 outbox streams; at the limit writes are refused."""
    unknown_limit: int = 100_000
    """Ids outside the catalogue that get a number."""
    added_limit: int = MAX_ADDED_ITEMS
    """Items added at run time."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.seen_limit % 2 or self.seen_limit > 4096:
            raise ValueError(f"seen_limit is {self.seen_limit}; it must be even and at most 4096")
        if self.tombstone_ttl_s < max(30 * 86_400, self.user_ttl_s):
            raise ValueError(
                f"tombstone_ttl_s is {self.tombstone_ttl_s}; it must be at least 30 d "
                f"and at least user_ttl_s ({self.user_ttl_s})"
            )
        if self.slate_ttl_s > MAX_SLATE_TTL_S:
            raise ValueError(f"slate_ttl_s is {self.slate_ttl_s}; it must be at most a day ({MAX_SLATE_TTL_S})")
        if self.unknown_limit > MAX_ITEM_NUMBER - UNKNOWN_BASE:
            raise ValueError(f"unknown_limit is {self.unknown_limit}; numbers end at 2**32, so at most 2**31")

    def ttl_s(self, subject: Subject) -> int:
        """Life time of a subject's record and seen set."""
        return self.user_ttl_s if subject.kind == "user" else self.session_ttl_s

    def ttl_of_state_s(self, subject: Subject) -> int:
        """Life time of a subject's encoded states."""
        return min(self.state_ttl_s, self.ttl_s(subject))

    def ttl_of_slates_s(self, subject: Subject | None) -> int:
        """Life time of the slates served to a subject, or for a history that nobody stores."""
        return self.slate_ttl_s if subject is None else min(self.slate_ttl_s, self.ttl_s(subject))

    @property
    def slates_forgotten(self) -> int:
        """How many of the oldest slates make room together: a full list costs a further round trip once in a while."""
        return max(1, self.slate_limit // 4)

    def ttl_of_identities_s(self, subject: Subject) -> int:
        """Life time of a subject's event identities."""
        return min(self.identity_ttl_s, self.ttl_s(subject))


def check_batch(events: Sequence[Event]) -> None:
    """Bound one `append`.

    Raises:
        ValueError: more than MAX_EVENTS_PER_CALL events.
    """
    if len(events) > MAX_EVENTS_PER_CALL:
        raise ValueError(f"{len(events)} events in one call; accepted: at most {MAX_EVENTS_PER_CALL}")


class Store(Protocol):
    """The verbs. Every method may raise StateUnavailable, and those that append, absorb, close, turn pages, erase,
    number, put and remove may raise NotReplicated; further errors are named per method."""

    def server_of(self, key: str) -> str:
        """The server that has a key, as far as it is known; empty when there is one alone. Asks nobody."""
        ...

    async def load(self, subject: Subject, model_version: str) -> Loaded:
        """One subject's record and the model's encoded state, in one round trip.

        Raises:
            CatalogMismatch: the record was written under another catalogue lineage.
        """
        ...

    async def append(self, subject: Subject, events: Sequence[Event]) -> list[AppendStatus]:
        """Store the events in this order, all that are acceptable or none; a status for each.

        An event later than, or as late as, the last kept one is an append. An earlier one is inserted where
        its timestamp belongs, after equals, and raises the epoch once per call, also when it falls before
        the kept events and is only counted.

        Raises:
            OutboxFull: the accepted events do not fit into the outbox.
            CatalogMismatch: the record was written under another catalogue lineage.
            ValueError: more than MAX_EVENTS_PER_CALL events.
        """
        ...

    async def save_state(self, subject: Subject, model_version: str, encoded: EncodedState) -> bool:
        """Keep a model's state; False, and nothing written, when the record has moved on or is gone.

        The version is registered on the way, if that was not done.

        Raises:
            ValueError: `model_version` is malformed; see `register_model`.
        """
        ...

    async def absorb(
        self, user_id: str, session_id: str, events: Sequence[Event], seen: Sequence[int]
    ) -> list[AppendStatus]:
        """Store a session's events as the user's, as `append` does; a status for each.

        The outbox already tells of them under the session: it gets one `merge` entry instead, when anything was new. An
        event on an item and a time that a kept event of the user has is a duplicate too, as often as the user has it.

        Args:
            user_id: who takes them.
            session_id: whose they are.
            events: with identities, so that a repetition finds duplicates.
            seen: numbers that only go into the seen set, before those of the events. A user with a tombstone does not
                take them: they have no date that could be compared with the erasure's.

        Raises:
            OutboxFull: the `merge` entry does not fit into the outbox.
            CatalogMismatch: the user's record was written under another catalogue lineage.
            ValueError: more than MAX_EVENTS_PER_CALL events.
        """
        ...

    async def claim_session(self, session_id: str, user_id: str) -> Claim:
        """Read a session that this user is to take over, and keep all others from it, in one step: nobody else gets
        what was read. The claim ends when the session is closed or expires; the same user may claim it again.

        Raises:
            CatalogMismatch: the record was written under another catalogue lineage.
        """
        ...

    async def close_session(self, session_id: str, read: UserRecord | None) -> bool:
        """Empty a session that is as it was claimed; False, and nothing removed, when it has had events since.

        Its identities stay for their time, so that an event which is delivered once more is a duplicate still. A later
        event begins the session anew, in a higher epoch. Harmless to repeat, and a repetition completes an interrupted
        call.

        Args:
            session_id: which one.
            read: the record that the claim gave; None when there was none.
        """
        ...

    async def save_slate(
        self, recommendation_id: str, subject: Subject | None, made_ms: int, asked: bytes, page: bytes
    ) -> bool:
        """Keep a served slate; False, and nothing written, when its subject was erased, or its session merged, since.

        Args:
            recommendation_id: begins with its bucket, which is the subject's if there is one.
            subject: whom it was made for; None for a history that was told.
            made_ms: when the subject was read for it, since 1970.
            asked: what the further pages are made from.
            page: the first one.
        """
        ...

    async def load_slate(self, recommendation_id: str) -> list[bytes] | None:
        """What was asked, then the pages in order; None when there is no such slate any more."""
        ...

    async def append_page(self, recommendation_id: str, num_pages: int, page: bytes) -> bool:
        """Add a page to a slate of `num_pages`; False, and nothing written, when it has others or is gone.

        Of callers who add to one slate at the same time exactly one is told True.
        """
        ...

    async def settle_slate(self, recommendation_id: str, outcome: bytes) -> bool:
        """Note what followed a slate; False, and nothing written, when that was noted before, or the slate is gone.

        Of callers who settle one slate at the same time exactly one is told True.
        """
        ...

    async def slates(self, subject: Subject) -> list[SlateRef]:
        """The subject's kept slates, oldest first."""
        ...

    async def erase(self, user_id: str) -> bool:
        """Remove every trace of a user; True when there was one here. Harmless to repeat.

        A tombstone stays, and an `erase` entry goes to the outbox, also for a user of whom nothing is held:
        the record may have expired while the training log still has the events, and events on their way
        here may be older than the request. A repetition that finds nothing adds no second entry.
        """
        ...

    async def numbers_for_unknown(self, item_ids: Sequence[str]) -> dict[str, int]:
        """A lasting number ≥ UNKNOWN_BASE for each id outside the catalogue; equal ids, equal numbers.

        Raises:
            UnknownItemsFull: `unknown_limit` ids have numbers and one of these has none.
        """
        ...

    async def ids_for_unknown(self, numbers: Sequence[int]) -> dict[int, str]:
        """The ids behind such numbers; a number never handed out is left out of the answer."""
        ...

    async def put_item(self, item_id: str, metadata: str) -> PutStatus:
        """Add an item, or give it other metadata.

        Args:
            item_id: which one.
            metadata: a JSON object. Equal metadata are equal texts: the caller sees to the order of names.
        """
        ...

    async def remove_item(self, item_id: str) -> bool:
        """Take an item that was added away again; False when it was not there."""
        ...

    async def added_items(self, known_version: int) -> AddedItems | None:
        """The items that were added; None when they are still those of a version that the caller has."""
        ...

    async def register_model(self, model_version: str) -> None:
        """Announce a model version, so that `erase` finds its states.

        Raises:
            ValueError: not 1–128 letters, digits, dots, hyphens and underscores.
        """
        ...

    def keep_at_least(self, max_len: int) -> None:
        """Keep so many events per subject from now on, if fewer were kept; a smaller number changes nothing."""
        ...

    async def outbox_fill(self) -> float:
        """Fill of the fullest outbox stream: 0 is empty, at 1 writes to it are refused."""
        ...

    async def ping(self) -> None:
        """Return when the store answers."""
        ...

    async def close(self) -> None:
        """Let commands in flight end, then release the connections."""
        ...
