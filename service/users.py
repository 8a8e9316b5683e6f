"""What is held of a user: shown, erased, and joined with what a session holds."""

from datetime import UTC, datetime

import numpy as np

from model.bundle import Items
from model.config import FIRST_ITEM, UNKNOWN_BASE
from service.context import RequestContext
from service.errors import SessionBusy, SessionTaken, UserNotFound
from service.merge import Tally, moving
from service.recommender import Subjects
from service.schemas import ErasureResponse, HeldSlate, MergeResponse, StoredEvent, UserResponse
from service.states.interface import MAX_EVENTS_PER_CALL, AppendStatus, Store, Subject, UserRecord
from service.telemetry import IdHasher

MAX_MERGE_ROUNDS = 16
"""Times that a session is read anew because it had events meanwhile."""


class Users:
    """Export, erasure and merge.

    Args:
        items: the served catalogue.
        subjects: the stored histories.
        store: where they are erased.
        hasher: turns ids into what logs may show.
    """

    def __init__(self, items: Items, subjects: Subjects, store: Store, hasher: IdHasher) -> None:
        self._items = items
        self._subjects = subjects
        self._store = store
        self._hasher = hasher

    async def export(self, user_id: str, request: RequestContext) -> UserResponse:
        """Everything that is held of a user, in external ids.

        Raises:
            UserNotFound: nothing is held.
            StateError: the store cannot say.
        """
        request.subject = self._hasher("user", user_id)
        subject = Subject("user", user_id)
        with request.timed("state"):
            record, _ = await self._subjects.load(subject)
            slates = await self._store.slates(subject)
            if record is None and not slates:
                raise UserNotFound("nothing is stored of this user")
            unknown = {} if record is None else await self._unknown(record)
        return UserResponse(
            user_id=user_id,
            num_events=0 if record is None else record.count,
            events=[] if record is None else self._events(record, unknown),
            seen_item_ids=[] if record is None else self._seen(record, unknown),
            recommendations=[
                HeldSlate(
                    recommendation_id=slate.recommendation_id,
                    expires_at=datetime.fromtimestamp(slate.expires_ms / 1000, UTC),
                )
                for slate in slates
            ],
        )

    async def merge(self, user_id: str, session_id: str, request: RequestContext) -> MergeResponse:
        """Make a session's events the user's, and empty the session. A repetition changes nothing, and completes a
        merge that was interrupted.

        Raises:
            SessionTaken: it is being merged into another user.
            SessionBusy: the session had events each time that it was to be emptied.
            StateError: the store cannot do it now.
        """
        request.subject = self._hasher("user", user_id)
        tally = Tally({})
        with request.timed("state"):
            for _ in range(MAX_MERGE_ROUNDS):
                request.check_deadline()
                claim = await self._store.claim_session(session_id, user_id)
                if not claim.is_granted:
                    raise SessionTaken("the session is being merged into another user")
                if claim.record is not None:
                    await self._absorb(user_id, session_id, claim.record, tally)
                if await self._store.close_session(session_id, claim.record):
                    return MergeResponse(
                        user_id=user_id,
                        from_session_id=session_id,
                        num_merged=tally.number(AppendStatus.accepted, AppendStatus.repeated),
                        num_duplicates=tally.number(AppendStatus.duplicate),
                        num_refused=tally.number(AppendStatus.erased),
                    )
        raise SessionBusy("the session had events each time that it was to be emptied", retry_after_s=1)

    async def _absorb(self, user_id: str, session_id: str, record: UserRecord, tally: Tally) -> None:
        unknown = await self._unknown(record)
        handed = moving(session_id, record, lambda number: self._item_id(number, unknown))
        # At least one call, for the seen set.
        for first in range(0, max(1, len(handed.events)), MAX_EVENTS_PER_CALL):
            events = handed.events[first : first + MAX_EVENTS_PER_CALL]
            seen = handed.seen if first == 0 else ()
            tally.note(events, await self._store.absorb(user_id, session_id, events, seen))

    async def _unknown(self, record: UserRecord) -> dict[int, str]:
        return await self._subjects.unknown_ids(np.concatenate([record.items, record.seen]))

    def _events(self, record: UserRecord, unknown: dict[int, str]) -> list[StoredEvent]:
        return [
            StoredEvent(item_id=self._item_id(number, unknown), timestamp=timestamp_ms / 1000, weight=weight)
            for number, timestamp_ms, weight in zip(
                record.items.tolist(), record.timestamps_ms.tolist(), record.weights.tolist(), strict=True
            )
        ]

    def _seen(self, record: UserRecord, unknown: dict[int, str]) -> list[str]:
        seen = (self._item_id(number, unknown) for number in record.seen.tolist())
        return [item_id for item_id in seen if item_id is not None]

    async def erase(self, user_id: str, request: RequestContext) -> ErasureResponse:
        """Remove every trace of a user.

        Raises:
            StateError: the store cannot do it now.
        """
        request.subject = self._hasher("user", user_id)
        with request.timed("state"):
            erased = await self._store.erase(user_id)
        return ErasureResponse(user_id=user_id, erased=erased)

    def _item_id(self, number: int, unknown: dict[int, str]) -> str | None:
        if number >= UNKNOWN_BASE:
            return unknown.get(number)
        # A newer bundle of this lineage may have written numbers that this one does not reach.
        return self._items.item_id(number) if number < FIRST_ITEM + len(self._items) else None
