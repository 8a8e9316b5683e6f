"""A session becomes the user's: its events as the store takes them over (service.md, "Merge").

The merge has three steps, each of which can be repeated: claim the session for the user and read it, at once; append
to the user what it does not have yet; empty the session, unless it has had events since it was read, which begins the
steps anew. Session and user lie in different slots of a cluster, so the steps are not one script; the identities of the
events make them safe to repeat, and the claim keeps every other user from the session until it is empty.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.ingest import content_identity
from service.states.interface import AppendStatus, Event, UserRecord
from service.values import identity_hash


@dataclass(frozen=True, slots=True)
class Moving:
    """What a session hands over."""

    events: Sequence[Event]
    """The kept ones, oldest first, each with an identity."""
    seen: Sequence[int]
    """Numbers of the items that no kept event has, sorted."""


def moving(session_id: str, record: UserRecord, item_id: Callable[[int], str | None]) -> Moving:
    """A session's record as what a user takes over.

    The identity of an event is what it would be had the event been sent with item and timestamp alone. Of several
    events on one item in one millisecond the later ones are told apart by their order.

    Args:
        session_id: whose record it is.
        record: as it was loaded.
        item_id: the id behind an item number, if it is known here.
    """
    met: Counter[tuple[int, int]] = Counter()
    events = []
    for number, timestamp_ms, weight in zip(
        record.items.tolist(), record.timestamps_ms.tolist(), record.weights.tolist(), strict=True
    ):
        place, id_ = met[number, timestamp_ms], item_id(number)
        met[number, timestamp_ms] += 1
        identity = identity_hash("merge", session_id, str(number), str(timestamp_ms), str(place))
        if place == 0 and id_ is not None:
            identity = content_identity(id_, timestamp_ms, None)
        events.append(
            Event(
                item_number=number,
                item_id=id_ or "",
                timestamp_ms=timestamp_ms,
                weight=weight,
                identity=identity,
                undated=False,
            )
        )
    return Moving(events, sorted(set(record.seen.tolist()) - set(record.items.tolist())))


@dataclass(slots=True)
class Tally:
    """What became of each event of a merge, whose steps may be repeated."""

    statuses: dict[bytes, AppendStatus]

    def note(self, events: Sequence[Event], statuses: Sequence[AppendStatus]) -> None:
        """The first status of an event stays: a step that is repeated finds it a duplicate of itself."""
        for event, status in zip(events, statuses, strict=True):
            self.statuses.setdefault(event.identity or b"", status)

    def number(self, *statuses: AppendStatus) -> int:
        """Events of one of these statuses."""
        return sum(status in statuses for status in self.statuses.values())
