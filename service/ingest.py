"""Storing events: check each, number its item, append per subject, say what became of it (service.md)."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from model.bundle import Items
from service.context import RequestContext
from service.drift import DriftWatch, Following
from service.errors import BeforeErasure, InvalidRequest, ServiceError, state_problem
from service.schemas import EventIn, EventResult, EventStatus
from service.states.interface import (
    AppendStatus,
    Event,
    StateError,
    Store,
    Subject,
    UnknownItemsFull,
    wall_clock_ms,
)
from service.telemetry import Metrics
from service.values import check_id, check_timestamp, check_weight, identity_hash

Sent = TypeVar("Sent")
Checked = TypeVar("Checked")

MAX_PARALLEL_APPENDS = 16
"""Subjects of one request that are written at a time."""


@dataclass(frozen=True, slots=True)
class CheckedEvent:
    """An event whose values are accepted; its item has no number yet."""

    subject: Subject
    item_id: str
    timestamp_ms: int
    undated: bool
    weight: float
    identity: bytes | None
    type: str | None
    recommendation_id: str | None
    event_id: str | None

    def numbered(self, item_number: int) -> Event:
        """The event as the store takes it."""
        return Event(
            item_number=item_number,
            item_id=self.item_id,
            timestamp_ms=self.timestamp_ms,
            weight=self.weight,
            identity=self.identity,
            undated=self.undated,
            type=self.type,
            recommendation_id=self.recommendation_id,
            event_id=self.event_id,
        )


Outcome = AppendStatus | ServiceError | StateError
"""What became of one event: stored or not, wrong, or not storable now."""


class Ingest:
    """Stores events.

    Args:
        items: the served catalogue.
        store: where the events go.
        metrics: counts events by status.
        drift: is told of the events that name a recommendation.
    """

    def __init__(self, items: Items, store: Store, metrics: Metrics, drift: DriftWatch) -> None:
        self._items = items
        self._store = store
        self._metrics = metrics
        self._drift = drift

    async def append(
        self, events: Sequence[EventIn], idempotency_key: str | None, request: RequestContext
    ) -> list[EventResult]:
        """Store events; a result for each, in order.

        Raises:
            InvalidRequest: the Idempotency-Key is no id.
            StateError: the store could take none of the events that are acceptable.
        """
        if idempotency_key is not None:
            checked_field("header Idempotency-Key", check_id, idempotency_key)
        checked: dict[int, CheckedEvent] = {}
        outcomes: dict[int, Outcome] = {}
        now_s = time.time()
        for place, event in enumerate(events):
            try:
                checked[place] = check_event(event, now_s, idempotency_key, place)
            except InvalidRequest as error:
                outcomes[place] = error
        with request.timed("state"):
            outcomes |= await self._store_all(checked)
        self._drift.follow(_following(checked, outcomes, wall_clock_ms()))
        results = [_result(outcomes[place], checked.get(place)) for place in range(len(events))]
        for result in results:
            self._metrics.events.labels(result.status).inc()
        return results

    async def _store_all(self, checked: Mapping[int, CheckedEvent]) -> dict[int, Outcome]:
        numbers = await self._numbers({event.item_id for event in checked.values()})
        outcomes: dict[int, Outcome] = {}
        of_subject: dict[Subject, dict[int, Event]] = {}
        for place, event in checked.items():
            number = numbers[event.item_id]
            if isinstance(number, StateError):
                outcomes[place] = number
            else:
                of_subject.setdefault(event.subject, {})[place] = event.numbered(number)
        gate = asyncio.Semaphore(MAX_PARALLEL_APPENDS)
        for stored in await asyncio.gather(*(self._store_one(*group, gate) for group in of_subject.items())):
            outcomes |= stored
        failures = [outcome for outcome in outcomes.values() if isinstance(outcome, StateError)]
        if failures and len(failures) == len(outcomes):
            raise failures[0]
        return outcomes

    async def _store_one(
        self, subject: Subject, events: Mapping[int, Event], gate: asyncio.Semaphore
    ) -> dict[int, Outcome]:
        async with gate:
            try:
                statuses = await self._store.append(subject, list(events.values()))
            except StateError as error:
                return dict.fromkeys(events, error)
        return dict(zip(events, statuses, strict=True))

    async def _numbers(self, item_ids: set[str]) -> dict[str, int | StateError]:
        """Each id's number; one outside the catalogue gets a lasting one, or the reason why it gets none."""
        known = {item_id: number for item_id in item_ids if (number := self._items.number(item_id)) is not None}
        unknown = sorted(item_ids - known.keys())
        if not unknown:
            return {**known}
        try:
            return {**known, **await self._store.numbers_for_unknown(unknown)}
        except UnknownItemsFull as error:
            return {**known, **dict.fromkeys(unknown, error)}


def check_event(event: EventIn, now_s: float, idempotency_key: str | None, place: int) -> CheckedEvent:
    """The event with its values accepted and its identity found.

    The identity is the event_id, else item, time and type together, else the request's key and the event's
    place in it; without all three a repetition cannot be told from a second event.

    Raises:
        InvalidRequest: names the field.
    """
    subject = _subject(event)
    item_id = checked_field("item_id", check_id, event.item_id)
    for field in ("event_id", "type", "recommendation_id"):
        if (value := getattr(event, field)) is not None:
            checked_field(field, check_id, value)
    weight = checked_field("weight", check_weight, event.weight)
    undated = event.timestamp is None
    sent = now_s if undated else event.timestamp
    timestamp_ms = checked_field("timestamp", partial(check_timestamp, now_s=now_s), sent)
    identity: bytes | None = None
    if event.event_id is not None:
        identity = identity_hash("event", event.event_id)
    elif not undated:
        identity = content_identity(item_id, timestamp_ms, event.type)
    elif idempotency_key is not None:
        identity = identity_hash("request", idempotency_key, str(place))
    return CheckedEvent(
        subject=subject,
        item_id=item_id,
        timestamp_ms=timestamp_ms,
        undated=undated,
        weight=weight,
        identity=identity,
        type=event.type,
        recommendation_id=event.recommendation_id,
        event_id=event.event_id,
    )


def content_identity(item_id: str, timestamp_ms: int, type: str | None) -> bytes:
    """Of an event without an event_id: the same item at the same time, of the same type, is the same event."""
    return identity_hash("content", item_id, str(timestamp_ms), type or "")


def checked_field(field: str, check: Callable[[Sent], Checked], value: Sent) -> Checked:
    """The checked value; a ValueError becomes InvalidRequest that names the field."""
    try:
        return check(value)
    except ValueError as error:
        raise InvalidRequest.of(field, str(error)) from error


def _subject(event: EventIn) -> Subject:
    if (event.user_id is None) == (event.session_id is None):
        raise InvalidRequest.of("user_id", "give exactly one of user_id and session_id")
    if event.user_id is not None:
        return Subject("user", checked_field("user_id", check_id, event.user_id))
    return Subject("session", checked_field("session_id", check_id, event.session_id or ""))


def _following(
    checked: Mapping[int, CheckedEvent], outcomes: Mapping[int, Outcome], arrived_ms: int
) -> list[Following]:
    """The stored events that name a recommendation, in order."""
    return [
        Following(
            recommendation_id=event.recommendation_id,
            subject=event.subject,
            item_id=event.item_id,
            weight=event.weight,
            is_repeated=outcomes[place] is AppendStatus.repeated,
            arrived_ms=arrived_ms,
        )
        for place, event in checked.items()
        if event.recommendation_id is not None and outcomes[place] in (AppendStatus.accepted, AppendStatus.repeated)
    ]


def _result(outcome: Outcome, event: CheckedEvent | None) -> EventResult:
    idempotent = event is not None and event.identity is not None
    match outcome:
        case AppendStatus.accepted | AppendStatus.repeated:
            return EventResult(status=EventStatus.accepted, idempotent=idempotent)
        case AppendStatus.duplicate:
            return EventResult(status=EventStatus.duplicate, idempotent=idempotent)
        case AppendStatus.erased:
            refusal: ServiceError = BeforeErasure("the event is dated before the user's erasure, or undated soon after")
        case StateError():
            refusal = state_problem(outcome)
        case ServiceError():
            refusal = outcome
    return EventResult(status=EventStatus.rejected, idempotent=idempotent, problem=refusal.problem())
