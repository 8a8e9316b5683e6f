"""A server that is left alone for a while after failing several times in a row: a dead one costs little."""

import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from service.states import scripts
from service.states.interface import (
    AddedItems,
    AppendStatus,
    Claim,
    EncodedState,
    Event,
    Loaded,
    PutStatus,
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
        metrics: counts failures, and the breakers that are open.
        clock: seconds, never going back.
        name: of the server, for the log; empty when there is one alone.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic, name: str = "") -> None:
        self._metrics = metrics
        self._clock = clock
        self._called = f"the state store at {name}" if name else "the state store"
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
            logger.warning("%s does not answer; reads are degraded, writes refused: %s", self._called, error)
            self._metrics.breaker_open.inc()

    def _on_answer(self) -> None:
        if self._failures >= TRIP_AFTER:
            logger.warning("%s answers again", self._called)
        self.reset()

    def reset(self) -> None:
        """Forget all failures."""
        if self._failures >= TRIP_AFTER:
            self._metrics.breaker_open.dec()
        self._failures = 0


class Breakers:
    """A breaker for each server of a store, so that a dead primary of a cluster does not rest the others.

    Args:
        server_of: the server that has a key.
        metrics: as of `Breaker`.
        clock: as of `Breaker`.
    """

    def __init__(
        self, server_of: Callable[[str], str], metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._server_of = server_of
        self._metrics = metrics
        self._clock = clock
        self.everywhere = Breaker(metrics, clock)
        """For calls to all servers."""
        self._of_server: dict[str, Breaker] = {}

    def of(self, key: str) -> Breaker:
        """The breaker of the server that has a key."""
        server = self._server_of(key)
        if server not in self._of_server:
            self._forget_servers_without_keys()
            self._of_server[server] = Breaker(self._metrics, self._clock, server)
        return self._of_server[server]

    def _forget_servers_without_keys(self) -> None:
        # After a failover nobody asks the dead one any more: its breaker would be shown as open for ever.
        keys = (*scripts.all_outbox_keys(), scripts.UNKNOWN_KEY, scripts.ITEMS_KEY)
        present = {self._server_of(key) for key in keys}
        for server in self._of_server.keys() - present:
            self._of_server.pop(server).reset()


class GuardedStore:
    """A `Store` behind breakers.

    Args:
        store: the real one.
        metrics: as of `Breaker`.
    """

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._breakers = Breakers(store.server_of, metrics)

    def server_of(self, key: str) -> str:
        """As in `Store`."""
        return self._store.server_of(key)

    def _of_subject(self, subject: Subject) -> Breaker:
        return self._breakers.of(scripts.outbox_key(scripts.bucket(subject.id)))

    def _of_slate(self, recommendation_id: str) -> Breaker:
        return self._breakers.of(scripts.slate_key(recommendation_id))

    def _of_unknown(self) -> Breaker:
        return self._breakers.of(scripts.UNKNOWN_KEY)

    def _of_items(self) -> Breaker:
        return self._breakers.of(scripts.ITEMS_KEY)

    async def load(self, subject: Subject, model_version: str) -> Loaded:
        """As in `Store`."""
        return await self._of_subject(subject).call("load", lambda: self._store.load(subject, model_version))

    async def append(self, subject: Subject, events: Sequence[Event]) -> list[AppendStatus]:
        """As in `Store`."""
        return await self._of_subject(subject).call("append", lambda: self._store.append(subject, events))

    async def save_state(self, subject: Subject, model_version: str, encoded: EncodedState) -> bool:
        """As in `Store`."""
        return await self._of_subject(subject).call(
            "save_state", lambda: self._store.save_state(subject, model_version, encoded)
        )

    async def absorb(
        self, user_id: str, session_id: str, events: Sequence[Event], seen: Sequence[int]
    ) -> list[AppendStatus]:
        """As in `Store`."""
        return await self._of_subject(Subject("user", user_id)).call(
            "absorb", lambda: self._store.absorb(user_id, session_id, events, seen)
        )

    async def claim_session(self, session_id: str, user_id: str) -> Claim:
        """As in `Store`."""
        return await self._of_subject(Subject("session", session_id)).call(
            "claim_session", lambda: self._store.claim_session(session_id, user_id)
        )

    async def close_session(self, session_id: str, read: UserRecord | None) -> bool:
        """As in `Store`."""
        return await self._of_subject(Subject("session", session_id)).call(
            "close_session", lambda: self._store.close_session(session_id, read)
        )

    async def save_slate(
        self, recommendation_id: str, subject: Subject | None, made_ms: int, asked: bytes, page: bytes
    ) -> bool:
        """As in `Store`."""
        return await self._of_slate(recommendation_id).call(
            "save_slate", lambda: self._store.save_slate(recommendation_id, subject, made_ms, asked, page)
        )

    async def load_slate(self, recommendation_id: str) -> list[bytes] | None:
        """As in `Store`."""
        return await self._of_slate(recommendation_id).call(
            "load_slate", lambda: self._store.load_slate(recommendation_id)
        )

    async def append_page(self, recommendation_id: str, num_pages: int, page: bytes) -> bool:
        """As in `Store`."""
        return await self._of_slate(recommendation_id).call(
            "append_page", lambda: self._store.append_page(recommendation_id, num_pages, page)
        )

    async def settle_slate(self, recommendation_id: str, outcome: bytes) -> bool:
        """As in `Store`."""
        return await self._of_slate(recommendation_id).call(
            "settle_slate", lambda: self._store.settle_slate(recommendation_id, outcome)
        )

    async def slates(self, subject: Subject) -> list[SlateRef]:
        """As in `Store`."""
        return await self._of_subject(subject).call("slates", lambda: self._store.slates(subject))

    async def erase(self, user_id: str) -> bool:
        """As in `Store`."""
        return await self._of_subject(Subject("user", user_id)).call("erase", lambda: self._store.erase(user_id))

    async def numbers_for_unknown(self, item_ids: Sequence[str]) -> dict[str, int]:
        """As in `Store`."""
        return await self._of_unknown().call("numbers_for_unknown", lambda: self._store.numbers_for_unknown(item_ids))

    async def ids_for_unknown(self, numbers: Sequence[int]) -> dict[int, str]:
        """As in `Store`."""
        return await self._of_unknown().call("ids_for_unknown", lambda: self._store.ids_for_unknown(numbers))

    async def put_item(self, item_id: str, metadata: str) -> PutStatus:
        """As in `Store`."""
        return await self._of_items().call("put_item", lambda: self._store.put_item(item_id, metadata))

    async def remove_item(self, item_id: str) -> bool:
        """As in `Store`."""
        return await self._of_items().call("remove_item", lambda: self._store.remove_item(item_id))

    async def added_items(self, known_version: int) -> AddedItems | None:
        """As in `Store`."""
        return await self._of_items().call("added_items", lambda: self._store.added_items(known_version))

    async def register_model(self, model_version: str) -> None:
        """As in `Store`."""
        await self._breakers.everywhere.call("register_model", lambda: self._store.register_model(model_version))

    def keep_at_least(self, max_len: int) -> None:
        """As in `Store`; asks no server."""
        self._store.keep_at_least(max_len)

    async def outbox_fill(self) -> float:
        """As in `Store`."""
        return await self._breakers.everywhere.call("outbox_fill", self._store.outbox_fill)

    async def ping(self) -> None:
        """As in `Store`."""
        await self._breakers.everywhere.call("ping", self._store.ping)

    async def close(self) -> None:
        """As in `Store`."""
        await self._store.close()
