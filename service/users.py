"""What is held of a user: shown, and erased."""

import numpy as np

from model.bundle import Items
from model.config import FIRST_ITEM, UNKNOWN_BASE
from service.context import RequestContext
from service.errors import UserNotFound
from service.recommender import Subjects
from service.schemas import ErasureResponse, StoredEvent, UserResponse
from service.states.interface import Store, Subject
from service.telemetry import IdHasher


class Users:
    """Export and erasure.

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
        with request.timed("state"):
            record, _ = await self._subjects.load(Subject("user", user_id))
            if record is None:
                raise UserNotFound("nothing is stored of this user")
            unknown = await self._subjects.unknown_ids(np.concatenate([record.items, record.seen]))
        events = [
            StoredEvent(item_id=self._item_id(number, unknown), timestamp=timestamp_ms / 1000, weight=weight)
            for number, timestamp_ms, weight in zip(
                record.items.tolist(), record.timestamps_ms.tolist(), record.weights.tolist(), strict=True
            )
        ]
        seen = [self._item_id(number, unknown) for number in record.seen.tolist()]
        return UserResponse(
            user_id=user_id,
            num_events=record.count,
            events=events,
            seen_item_ids=[item_id for item_id in seen if item_id is not None],
        )

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
