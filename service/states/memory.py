"""The store in this process's memory: for a laptop and for tests. Nothing survives the process."""

from bisect import bisect_right
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from model.config import UNKNOWN_BASE
from service.states.interface import (
    AppendStatus,
    Clock,
    EncodedState,
    Event,
    Loaded,
    OutboxFull,
    StoreLimits,
    Subject,
    UnknownItemsFull,
    UserRecord,
    check_batch,
    wall_clock_ms,
)
from service.states.packing import stored_weight
from service.states.scripts import bucket, check_model_version

MAX_STATES = 1024
"""Encoded states kept of users, and as many of sessions, those saved last: a cache takes about 1 KB an event, and a
state that is not kept is only computed again."""


@dataclass(slots=True)
class _History:
    """One subject. Events are (timestamp in ms, item number, weight)."""

    epoch: int
    count: int = 0
    events: list[tuple[int, int, float]] = field(default_factory=list)
    old_seen: set[int] = field(default_factory=set)
    young_seen: set[int] = field(default_factory=set)
    identities: deque[bytes] = field(default_factory=deque)
    expires_ms: int = 0
    identities_expire_ms: int = 0


@dataclass(frozen=True, slots=True)
class _Tombstone:
    erased_ms: int
    next_epoch: int
    expires_ms: int


@dataclass(frozen=True, slots=True)
class _KeptState:
    encoded: EncodedState
    expires_ms: int


Key = TypeVar("Key")
Expiring = TypeVar("Expiring", _History, _Tombstone, _KeptState)


class MemoryStore:
    """`Store` in plain dicts; atomic because no method waits between reading and writing."""

    def __init__(self, *, lineage: str, limits: StoreLimits, clock: Clock = wall_clock_ms) -> None:
        self._lineage = lineage
        self._limits = limits
        self._clock = clock
        # One order per kind: within a kind life times are equal, so the first entry is the first to expire.
        self._histories: dict[str, OrderedDict[str, _History]] = {
            "user": OrderedDict(),
            "session": OrderedDict(),
        }
        # By id and model version.
        self._states: dict[str, OrderedDict[tuple[str, str], _KeptState]] = {
            "user": OrderedDict(),
            "session": OrderedDict(),
        }
        self._tombstones: OrderedDict[str, _Tombstone] = OrderedDict()
        self._outbox: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
        self._numbers: dict[str, int] = {}
        self._item_ids: dict[int, str] = {}

    async def load(self, subject: Subject, model_version: str) -> Loaded:
        """As in `Store`; every record here is of this store's lineage."""
        self._forget_expired()
        history = self._histories[subject.kind].get(subject.id)
        if history is None:
            return Loaded(record=None, encoded=None)
        timestamps, items, weights = zip(*history.events, strict=True) if history.events else ((), (), ())
        record = UserRecord(
            count=history.count,
            epoch=history.epoch,
            lineage=self._lineage,
            items=np.array(items, dtype=np.int64),
            timestamps_ms=np.array(timestamps, dtype=np.int64),
            weights=np.array(weights, dtype=np.float32),
            seen=np.array(sorted(history.old_seen | history.young_seen), dtype=np.int64),
        )
        return Loaded(record=record, encoded=self._encoded(subject, model_version, history))

    def _encoded(self, subject: Subject, model_version: str, history: _History) -> EncodedState | None:
        kept = self._states[subject.kind].get((subject.id, model_version))
        if kept is None or kept.encoded.epoch != history.epoch:
            return None
        if kept.encoded.count == history.count:
            return replace(kept.encoded, state=replace(kept.encoded.state, cache=None))
        return kept.encoded

    async def append(self, subject: Subject, events: Sequence[Event]) -> list[AppendStatus]:
        """As in `Store`."""
        check_batch(events)
        self._forget_expired()
        now_ms = self._clock()
        tombstone = self._tombstones.get(subject.id) if subject.kind == "user" else None
        history = self._histories[subject.kind].get(subject.id)
        known = set(history.identities) if history and history.identities_expire_ms > now_ms else set()
        statuses: list[AppendStatus] = []
        accepted: list[Event] = []
        for event in events:
            if tombstone is not None and self._is_refused(event, tombstone, now_ms):
                statuses.append(AppendStatus.erased)
            elif event.identity in known:
                statuses.append(AppendStatus.duplicate)
            else:
                statuses.append(AppendStatus.accepted)
                accepted.append(event)
                if event.identity is not None:
                    known.add(event.identity)
        if not accepted:
            return statuses
        outbox = self._outbox[bucket(subject.id)]
        if len(outbox) + len(accepted) > self._limits.outbox_limit:
            raise OutboxFull(self._limits.outbox_limit)
        if history is None:
            history = _History(epoch=max(now_ms // 1000, tombstone.next_epoch if tombstone else 0))
            self._histories[subject.kind][subject.id] = history
        self._add_to_history(history, accepted)
        self._add_to_seen(history, [event.item_number for event in accepted])
        self._add_identities(history, accepted, now_ms)
        self._extend_life(subject, history, now_ms)
        outbox.extend(_outbox_entry(subject, event) for event in accepted)
        return statuses

    def _is_refused(self, event: Event, tombstone: _Tombstone, now_ms: int) -> bool:
        if event.undated:
            return now_ms < tombstone.erased_ms + self._limits.undated_refusal_s * 1000
        return event.timestamp_ms <= tombstone.erased_ms

    def _add_to_history(self, history: _History, events: list[Event]) -> None:
        is_late = False
        for event in events:
            if event.weight == 0:
                continue
            place = bisect_right(history.events, event.timestamp_ms, key=lambda kept: kept[0])
            is_late |= place < len(history.events)
            # before all kept ones, when others were kept once: its place is before the window
            if place > 0 or len(history.events) == history.count:
                kept = (event.timestamp_ms, event.item_number, stored_weight(event.weight))
                history.events.insert(place, kept)
                del history.events[: -self._limits.max_len]
            history.count += 1
        history.epoch += is_late

    def _add_to_seen(self, history: _History, numbers: list[int]) -> None:
        held = history.old_seen | history.young_seen
        for number in dict.fromkeys(numbers):
            if number in held:
                continue
            if len(history.young_seen) == self._limits.seen_limit // 2:
                history.old_seen, history.young_seen = history.young_seen, set()
            history.young_seen.add(number)

    def _add_identities(self, history: _History, events: list[Event], now_ms: int) -> None:
        if history.identities_expire_ms <= now_ms:
            history.identities.clear()
        history.identities.extend(event.identity for event in events if event.identity is not None)
        while len(history.identities) > self._limits.identity_limit:
            history.identities.popleft()

    def _extend_life(self, subject: Subject, history: _History, now_ms: int) -> None:
        history.expires_ms = now_ms + self._limits.ttl_s(subject) * 1000
        if history.identities:
            history.identities_expire_ms = now_ms + self._limits.ttl_of_identities_s(subject) * 1000
        self._histories[subject.kind].move_to_end(subject.id)

    async def save_state(self, subject: Subject, model_version: str, encoded: EncodedState) -> bool:
        """As in `Store`."""
        check_model_version(model_version)
        self._forget_expired()
        history = self._histories[subject.kind].get(subject.id)
        if history is None or history.epoch != encoded.epoch or history.count < encoded.count:
            return False
        states, key = self._states[subject.kind], (subject.id, model_version)
        states[key] = _KeptState(encoded, self._clock() + self._limits.ttl_of_state_s(subject) * 1000)
        states.move_to_end(key)
        if len(states) > MAX_STATES:
            states.popitem(last=False)
        return True

    async def erase(self, user_id: str) -> bool:
        """As in `Store`."""
        self._forget_expired()
        now_ms = self._clock()
        history = self._histories["user"].pop(user_id, None)
        for key in [key for key in self._states["user"] if key[0] == user_id]:
            del self._states["user"][key]
        earlier = self._tombstones.pop(user_id, None)
        self._tombstones[user_id] = _Tombstone(
            erased_ms=now_ms,
            next_epoch=max(
                now_ms // 1000 + 1,
                history.epoch + 1 if history else 0,
                earlier.next_epoch if earlier else 0,
            ),
            expires_ms=now_ms + self._limits.tombstone_ttl_s * 1000,
        )
        outbox = self._outbox[bucket(user_id)]
        others = [entry for entry in outbox if entry["kind"] == "erase" or entry.get("user_id") != user_id]
        num_removed = len(outbox) - len(others)
        if history is not None or earlier is None:
            others.append({"kind": "erase", "user_id": user_id, "timestamp_ms": str(now_ms)})
        outbox[:] = others
        return history is not None or num_removed > 0

    async def numbers_for_unknown(self, item_ids: Sequence[str]) -> dict[str, int]:
        """As in `Store`."""
        new = [item_id for item_id in dict.fromkeys(item_ids) if item_id not in self._numbers]
        if len(self._numbers) + len(new) > self._limits.unknown_limit:
            raise UnknownItemsFull(self._limits.unknown_limit)
        for item_id in new:
            number = UNKNOWN_BASE + len(self._numbers)
            self._numbers[item_id] = number
            self._item_ids[number] = item_id
        return {item_id: self._numbers[item_id] for item_id in item_ids}

    async def ids_for_unknown(self, numbers: Sequence[int]) -> dict[int, str]:
        """As in `Store`."""
        return {number: self._item_ids[number] for number in numbers if number in self._item_ids}

    async def register_model(self, model_version: str) -> None:
        """As in `Store`; here an erasure looks through all states, so nothing needs to be remembered."""
        check_model_version(model_version)

    async def outbox_fill(self) -> float:
        """As in `Store`."""
        return max(map(len, self._outbox.values()), default=0) / self._limits.outbox_limit

    async def ping(self) -> None:
        """Return at once: memory always answers."""

    async def close(self) -> None:
        """Nothing to release."""

    def outbox_entries(self, bucket_name: str) -> list[dict[str, str]]:
        """The entries of one bucket's outbox, oldest first, with the fields of the Redis stream."""
        return [dict(entry) for entry in self._outbox[bucket_name]]

    def _forget_expired(self) -> None:
        now_ms = self._clock()
        for kind in ("user", "session"):
            _pop_expired(self._histories[kind], now_ms)
            _pop_expired(self._states[kind], now_ms)
        _pop_expired(self._tombstones, now_ms)


def _pop_expired(expiring: OrderedDict[Key, Expiring], now_ms: int) -> None:
    while expiring and next(iter(expiring.values())).expires_ms <= now_ms:
        expiring.popitem(last=False)


def _outbox_entry(subject: Subject, event: Event) -> dict[str, str]:
    return {
        "kind": "event",
        f"{subject.kind}_id": subject.id,
        "item_id": event.item_id,
        "timestamp_ms": str(event.timestamp_ms),
        "type": event.type or "",
        "weight": repr(event.weight),
        "event_id": event.event_id or "",
        "recommendation_id": event.recommendation_id or "",
    }
