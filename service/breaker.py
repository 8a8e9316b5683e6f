"""A store that is left alone for a while after failing several times in a row: a dead one costs little."""

import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from service.states.interface import (
    AppendStatus,
    Claim,
    EncodedState,
    Event,
    Loaded,
    SlateRef,
    StateError,
    StateUnavailable,
    Store,
    Subject,
    UserRecord,
)
from service.telemetry import Metrics

logger = logging.getLogger(__name__)

T = TypeVar("T")

TRIP_AFTER = 3
"""Failures in a row. Calls that were under way together fail together, and count once."""
REST_S = 1.0
"""How long nothing is sent before one call may try again."""


class Breaker:
    """Closed: calls pass. Open: calls fail at once. After the rest one call tries; it closes or opens again.

    Args:
        metrics: counts failures, shows whether the breaker is open.
        clock: seconds, never going back.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._failures = 0
        self._last_failure = -math.inf
        self._closed_until_trial = 0.0
        self._trying = False

    async def call(self, operation: str, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`.

        Raises:
            StateUnavailable: `work` raised it, or the breaker is open.
        """
        is_trial, begun = self._enter(), self._clock()
        try:
            result = await work()
        except StateUnavailable as error:
            self._metrics.state_errors.labels(operation, "StateUnavailable").inc()
            self._on_failure(error, begun)
            raise
        except StateError as error:
            self._metrics.state_errors.labels(operation, type(error).__name__).inc()
            self._on_answer()
            raise
        else:
            self._on_answer()
            return result
        finally:
            if is_trial:
                self._trying = False

    def _enter(self) -> bool:
        """Whether this call is the one that tries; raises while the store rests."""
        if self._failures < TRIP_AFTER:
            return False
        if self._trying or self._clock() < self._closed_until_trial:
            raise StateUnavailable("the state store failed a moment ago and is not asked")
        self._trying = True
        return True

    def _on_failure(self, error: StateUnavailable, begun: float) -> None:
        if begun < self._last_failure:
            return
        self._last_failure = self._clock()
        self._failures += 1
        if self._failures >= TRIP_AFTER:
            self._closed_until_trial = self._clock() + REST_S
        if self._failures == TRIP_AFTER:
            logger.warning("the state store does not answer; reads are degraded, writes refused: %s", error)
            self._metrics.breaker_open.set(1)

    def _on_answer(self) -> None:
        if self._failures >= TRIP_AFTER:
            logger.warning("the state store answers again")
        self._failures = 0
        self._metrics.breaker_open.set(0)


class GuardedStore:
    """A `Store` behind a breaker.

    Args:
        store: the real one.
        breaker: shared by all its calls.
    """

    def __init__(self, store: Store, breaker: Breaker) -> None:
        self._store = store
        self._breaker = breaker

    async def load(self, subject: Subject, model_version: str) -> Loaded:
        """As in `Store`."""
        return await self._breaker.call("load", lambda: self._store.load(subject, model_version))

    async def append(self, subject: Subject, events: Sequence[Event]) -> list[AppendStatus]:
        """As in `Store`."""
        return await self._breaker.call("append", lambda: self._store.append(subject, events))

    async def save_state(self, subject: Subject, model_version: str, encoded: EncodedState) -> bool:
        """As in `Store`."""
        return await self._breaker.call("save_state", lambda: self._store.save_state(subject, model_version, encoded))

    async def absorb(
        self, user_id: str, session_id: str, events: Sequence[Event], seen: Sequence[int]
    ) -> list[AppendStatus]:
        """As in `Store`."""
        return await self._breaker.call("absorb", lambda: self._store.absorb(user_id, session_id, events, seen))

    async def claim_session(self, session_id: str, user_id: str) -> Claim:
        """As in `Store`."""
        return await self._breaker.call("claim_session", lambda: self._store.claim_session(session_id, user_id))

    async def close_session(self, session_id: str, read: UserRecord | None) -> bool:
        """As in `Store`."""
        return await self._breaker.call("close_session", lambda: self._store.close_session(session_id, read))

    async def save_slate(
        self, recommendation_id: str, subject: Subject | None, made_ms: int, asked: bytes, page: bytes
    ) -> bool:
        """As in `Store`."""
        return await self._breaker.call(
            "save_slate", lambda: self._store.save_slate(recommendation_id, subject, made_ms, asked, page)
        )

    async def load_slate(self, recommendation_id: str) -> list[bytes] | None:
        """As in `Store`."""
        return await self._breaker.call("load_slate", lambda: self._store.load_slate(recommendation_id))

    async def append_page(self, recommendation_id: str, num_pages: int, page: bytes) -> bool:
        """As in `Store`."""
        return await self._breaker.call(
            "append_page", lambda: self._store.append_page(recommendation_id, num_pages, page)
        )

    async def slates(self, subject: Subject) -> list[SlateRef]:
        """As in `Store`."""
        return await self._breaker.call("slates", lambda: self._store.slates(subject))

    async def erase(self, user_id: str) -> bool:
        """As in `Store`."""
        return await self._breaker.call("erase", lambda: self._store.erase(user_id))

    async def numbers_for_unknown(self, item_ids: Sequence[str]) -> dict[str, int]:
        """As in `Store`."""
        return await self._breaker.call("numbers_for_unknown", lambda: self._store.numbers_for_unknown(item_ids))

    async def ids_for_unknown(self, numbers: Sequence[int]) -> dict[int, str]:
        """As in `Store`."""
        return await self._breaker.call("ids_for_unknown", lambda: self._store.ids_for_unknown(numbers))

    async def register_model(self, model_version: str) -> None:
        """As in `Store`."""
        await self._breaker.call("register_model", lambda: self._store.register_model(model_version))

    def keep_at_least(self, max_len: int) -> None:
        """As in `Store`; asks no server."""
        self._store.keep_at_least(max_len)

    async def outbox_fill(self) -> float:
        """As in `Store`."""
        return await self._breaker.call("outbox_fill", self._store.outbox_fill)

    async def ping(self) -> None:
        """As in `Store`."""
        await self._breaker.call("ping", self._store.ping)

    async def close(self) -> None:
        """As in `Store`."""
        await self._store.close()
