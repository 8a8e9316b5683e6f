"""The store in this process's memory: for a laptop and for tests. Nothing survives the process."""

from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from model.config import UNKNOWN_BASE
from service.states.interface import (
    AddedItems,
    AppendStatus,
    Claim,
    Clock,
    EncodedState,
    Event,
    Loaded,
    OutboxFull,
    PutStatus,
    SlateRef,
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
MAX_SLATES = 1024
"""Slates kept for users, as many for sessions and as many for told histories, those served last."""


@dataclass(slots=True)
class _History:
    """One subject. Events are (timestamp in ms, item number, weight)."""

    epoch: int
    count: int = 0
    events: list[tuple[int, int, float]] = field(default_factory=list)
    old_seen: set[int] = field(default_factory=set)
    young_seen: set[int] = field(default_factory=set)
    claimed_by: str | None = None
    """Of a session: the user who takes it over."""
    expires_ms: int = 0


@dataclass(slots=True)
class _Identities:
    """Of a subject's last events, oldest first."""

    hashes: deque[bytes] = field(default_factory=deque)
    expires_ms: int = 0


@dataclass(frozen=True, slots=True)
class _Tombstone:
    """Of a user's erasure, or of a session's merge."""

    at_ms: int
    next_epoch: int
    expires_ms: int


@dataclass(slots=True)
class _KeptSlate:
    """What was asked, and the pages."""

    subject: Subject | None
    parts: list[bytes]
    expires_ms: int
    outcome: bytes | None = None


@dataclass(frozen=True, slots=True)
class _KeptState:
    encoded: EncodedState
    expires_ms: int


Key = TypeVar("Key")
Expiring = TypeVar("Expiring", _History, _Identities, _Tombstone, _KeptState, _KeptSlate)


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
        self._slates: dict[str, OrderedDict[str, _KeptSlate]] = {
            "user": OrderedDict(),
            "session": OrderedDict(),
            "nobody": OrderedDict(),
        }
        self._tombstones: dict[str, OrderedDict[str, _Tombstone]] = {
            "user": OrderedDict(),
            "session": OrderedDict(),
        }
        self._identities: dict[str, OrderedDict[str, _Identities]] = {
            "user": OrderedDict(),
            "session": OrderedDict(),
        }
        self._outbox: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
        self._numbers: dict[str, int] = {}
        self._item_ids: dict[int, str] = {}
        self._added = AddedItems(0, {})

    def server_of(self, key: str) -> str:
        """As in `Store`."""
        return ""

    async def load(self, subject: Subject, model_version: str) -> Loaded:
        """As in `Store`; every record here is of this store's lineage."""
        self._forget_expired()
        history = self._histories[subject.kind].get(subject.id)
        if history is None:
            return Loaded(record=None, encoded=None)
        return Loaded(self._record(history), self._encoded(subject, model_version, history))

    def _record(self, history: _History) -> UserRecord:
        timestamps, items, weights = zip(*history.events, strict=True) if history.events else ((), (), ())
        return UserRecord(
            count=history.count,
            epoch=history.epoch,
            lineage=self._lineage,
            items=np.array(items, dtype=np.int64),
            timestamps_ms=np.array(timestamps, dtype=np.int64),
            weights=np.array(weights, dtype=np.float32),
            seen=np.array(sorted(history.old_seen | history.young_seen), dtype=np.int64),
        )

    def _encoded(self, subject: Subject, model_version: str, history: _History) -> EncodedState | None:
        kept = self._states[subject.kind].get((subject.id, model_version))
        if kept is None or kept.encoded.epoch != history.epoch:
            return None
        if kept.encoded.count == history.count:
            return replace(kept.encoded, state=replace(kept.encoded.state, cache=None))
        return kept.encoded

    async def append(self, subject: Subject, events: Sequence[Event]) -> list[AppendStatus]:
        """As in `Store`."""
        return self._append(subject, events, merged_from=None, seen=())

    async def absorb(
        self, user_id: str, session_id: str, events: Sequence[Event], seen: Sequence[int]
    ) -> list[AppendStatus]:
        """As in `Store`."""
        return self._append(Subject("user", user_id), events, session_id, seen)

    def _append(
        self, subject: Subject, events: Sequence[Event], merged_from: str | None, seen: Sequence[int]
    ) -> list[AppendStatus]:
        check_batch(events)
        self._forget_expired()
        now_ms = self._clock()
        tombstone = self._tombstones[subject.kind].get(subject.id)
        erased_ms = tombstone.at_ms if tombstone and subject.kind == "user" else None
        history = self._histories[subject.kind].get(subject.id)
        identities = self._identities[subject.kind].get(subject.id, _Identities())
        known = set(identities.hashes)
        # As in the script: what the user has already, before a merge, by item and time.
        held: Counter[tuple[int, int]] = Counter()
        if merged_from is not None and history is not None:
            held.update((item, timestamp_ms) for timestamp_ms, item, _ in history.events)
        statuses: list[AppendStatus] = []
        accepted: list[Event] = []
        places: list[int] = []
        for place, event in enumerate(events):
            if erased_ms is not None and self._is_refused(event, erased_ms, now_ms):
                statuses.append(AppendStatus.erased)
            elif held[moment := (event.item_number, event.timestamp_ms)] > 0 or event.identity in known:
                statuses.append(AppendStatus.duplicate)
                held[moment] -= 1
            else:
                statuses.append(AppendStatus.accepted)
                accepted.append(event)
                places.append(place)
                if event.identity is not None:
                    known.add(event.identity)
        numbers = [*(seen if erased_ms is None else ()), *(event.item_number for event in accepted)]
        if not numbers:
            return statuses
        outbox = self._outbox[bucket(subject.id)]
        num_entries = len(accepted) if merged_from is None else 1
        if len(outbox) + num_entries > self._limits.outbox_limit:
            raise OutboxFull(self._limits.outbox_limit)
        if history is None:
            history = _History(epoch=max(now_ms // 1000, tombstone.next_epoch if tombstone else 0))
            self._histories[subject.kind][subject.id] = history
        self._add_to_history(history, accepted)
        is_first = self._add_to_seen(history, numbers)
        for place, is_new in zip(places, is_first[len(numbers) - len(accepted) :], strict=True):
            if not is_new:
                statuses[place] = AppendStatus.repeated
        self._add_identities(subject, identities, accepted, now_ms)
        history.expires_ms = now_ms + self._limits.ttl_s(subject) * 1000
        self._histories[subject.kind].move_to_end(subject.id)
        if merged_from is None:
            outbox.extend(_outbox_entry(subject, event) for event in accepted)
        elif accepted or any(is_first):
            outbox.append(
                {"kind": "merge", "user_id": subject.id, "session_id": merged_from, "timestamp_ms": str(now_ms)}
            )
        return statuses

    def _is_refused(self, event: Event, erased_ms: int, now_ms: int) -> bool:
        if event.undated:
            return now_ms < erased_ms + self._limits.undated_refusal_s * 1000
        return event.timestamp_ms <= erased_ms

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

    def _add_to_seen(self, history: _History, numbers: list[int]) -> list[bool]:
        """At which places a new number stands for the first time."""
        held, is_first = history.old_seen | history.young_seen, []
        for number in numbers:
            is_first.append(number not in held)
            if number in held:
                continue
            held.add(number)
            if len(history.young_seen) == self._limits.seen_limit // 2:
                history.old_seen, history.young_seen = history.young_seen, set()
            history.young_seen.add(number)
        return is_first

    def _add_identities(self, subject: Subject, identities: _Identities, events: list[Event], now_ms: int) -> None:
        identities.hashes.extend(event.identity for event in events if event.identity is not None)
        while len(identities.hashes) > self._limits.identity_limit:
            identities.hashes.popleft()
        if identities.hashes:
            identities.expires_ms = now_ms + self._limits.ttl_of_identities_s(subject) * 1000
            self._identities[subject.kind][subject.id] = identities
            self._identities[subject.kind].move_to_end(subject.id)

    async def claim_session(self, session_id: str, user_id: str) -> Claim:
        """As in `Store`."""
        self._forget_expired()
        history = self._histories["session"].get(session_id)
        if history is None:
            return Claim(is_granted=True, record=None)
        if history.claimed_by not in (None, user_id):
            return Claim(is_granted=False, record=None)
        history.claimed_by = user_id
        return Claim(is_granted=True, record=self._record(history))

    async def close_session(self, session_id: str, read: UserRecord | None) -> bool:
        """As in `Store`."""
        self._forget_expired()
        history = self._histories["session"].get(session_id)
        if history is not None:
            num_seen = len(history.old_seen) + len(history.young_seen)
            if read is None or (read.count, read.epoch, len(read.seen)) != (history.count, history.epoch, num_seen):
                return False
            self._bury(Subject("session", session_id), history.epoch + 1, self._limits.session_ttl_s)
            del self._histories["session"][session_id]
        self._forget_served(Subject("session", session_id))
        return True

    def _bury(self, subject: Subject, next_epoch: int, ttl_s: int) -> None:
        now_ms, tombstones = self._clock(), self._tombstones[subject.kind]
        tombstones[subject.id] = _Tombstone(now_ms, next_epoch, now_ms + ttl_s * 1000)
        tombstones.move_to_end(subject.id)

    def _forget_served(self, subject: Subject) -> int:
        """Remove a subject's states and slates; how many there were."""
        states, slates = self._states[subject.kind], self._slates[subject.kind]
        old_states = [key for key in states if key[0] == subject.id]
        old_slates = self._slate_ids(subject)
        for key in old_states:
            del states[key]
        for slate_id in old_slates:
            del slates[slate_id]
        return len(old_states) + len(old_slates)

    def _slate_ids(self, subject: Subject) -> list[str]:
        return [slate_id for slate_id, kept in self._slates[subject.kind].items() if kept.subject == subject]

    async def save_slate(
        self, recommendation_id: str, subject: Subject | None, made_ms: int, asked: bytes, page: bytes
    ) -> bool:
        """As in `Store`."""
        self._forget_expired()
        slates = self._slates["nobody" if subject is None else subject.kind]
        if subject is not None:
            tombstone = self._tombstones[subject.kind].get(subject.id)
            if tombstone is not None and made_ms <= tombstone.at_ms:
                return False
            kept = self._slate_ids(subject)
            if len(kept) >= self._limits.slate_limit:
                for slate_id in kept[: self._limits.slates_forgotten]:
                    del slates[slate_id]
        expires_ms = self._clock() + self._limits.ttl_of_slates_s(subject) * 1000
        slates[recommendation_id] = _KeptSlate(subject, [asked, page], expires_ms)
        if len(slates) > MAX_SLATES:
            slates.popitem(last=False)
        return True

    async def load_slate(self, recommendation_id: str) -> list[bytes] | None:
        """As in `Store`."""
        slate = self._slate(recommendation_id)
        return None if slate is None else list(slate.parts)

    async def append_page(self, recommendation_id: str, num_pages: int, page: bytes) -> bool:
        """As in `Store`."""
        slate = self._slate(recommendation_id)
        if slate is None or len(slate.parts) != num_pages + 1:
            return False
        slate.parts.append(page)
        return True

    def _slate(self, recommendation_id: str) -> _KeptSlate | None:
        self._forget_expired()
        found = (slates.get(recommendation_id) for slates in self._slates.values())
        return next((slate for slate in found if slate is not None), None)

    async def settle_slate(self, recommendation_id: str, outcome: bytes) -> bool:
        """As in `Store`."""
        slate = self._slate(recommendation_id)
        if slate is None or slate.outcome is not None:
            return False
        slate.outcome = outcome
        return True

    async def slates(self, subject: Subject) -> list[SlateRef]:
        """As in `Store`."""
        self._forget_expired()
        slates = self._slates[subject.kind]
        return [SlateRef(slate_id, slates[slate_id].expires_ms) for slate_id in self._slate_ids(subject)]

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
        subject, now_ms = Subject("user", user_id), self._clock()
        history = self._histories["user"].pop(user_id, None)
        num_removed = self._forget_served(subject) + (history is not None)
        num_removed += self._identities["user"].pop(user_id, None) is not None
        earlier = self._tombstones["user"].get(user_id)
        next_epochs = (
            now_ms // 1000 + 1,
            history.epoch + 1 if history else 0,
            earlier.next_epoch if earlier else 0,
        )
        self._bury(subject, max(next_epochs), self._limits.tombstone_ttl_s)
        outbox = self._outbox[bucket(user_id)]
        own: list[dict[str, str]] = []
        others: list[dict[str, str]] = []
        for entry in outbox:
            (own if entry["kind"] != "erase" and entry.get("user_id") == user_id else others).append(entry)
        num_removed += len(own)
        if history is not None or earlier is None:
            others.append({"kind": "erase", "user_id": user_id, "timestamp_ms": str(now_ms)})
        # A merged session's events are the user's; with the merge gone nothing else would tell retraining so.
        for merge in (entry for entry in own if entry["kind"] == "merge"):
            others.append({"kind": "erase"} | {name: merge[name] for name in ("session_id", "timestamp_ms")})
        outbox[:] = others
        return num_removed > 0

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

    async def put_item(self, item_id: str, metadata: str) -> PutStatus:
        """As in `Store`."""
        held = self._added.metadata.get(item_id)
        if held == metadata:
            return PutStatus.unchanged
        if held is None and len(self._added.metadata) >= self._limits.added_limit:
            return PutStatus.full
        self._change_items({**self._added.metadata, item_id: metadata})
        return PutStatus.added if held is None else PutStatus.replaced

    async def remove_item(self, item_id: str) -> bool:
        """As in `Store`."""
        if item_id not in self._added.metadata:
            return False
        self._change_items({each: text for each, text in self._added.metadata.items() if each != item_id})
        return True

    def _change_items(self, metadata: dict[str, str]) -> None:
        self._added = AddedItems(max(self._added.version + 1, self._clock()), metadata)

    async def added_items(self, known_version: int) -> AddedItems | None:
        """As in `Store`."""
        return None if known_version == self._added.version else self._added

    async def register_model(self, model_version: str) -> None:
        """As in `Store`; here an erasure looks through all states, so nothing needs to be remembered."""
        check_model_version(model_version)

    def keep_at_least(self, max_len: int) -> None:
        """As in `Store`."""
        self._limits = replace(self._limits, max_len=max(max_len, self._limits.max_len))

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
            _pop_expired(self._identities[kind], now_ms)
            _pop_expired(self._states[kind], now_ms)
            _pop_expired(self._tombstones[kind], now_ms)
        for slates in self._slates.values():
            _pop_expired(slates, now_ms)


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
