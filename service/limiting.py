"""Quotas of API keys: GCRA by throttled-py, counted in Redis for all replicas together.

The generic cell rate algorithm lets a key spend its burst at once and then `requests_per_second` evenly; it keeps one
number a key. Asking is one round trip. While Redis does not answer, each replica counts by itself: callers get up to
their quota from each replica, and the limit neither fails a request nor waits for Redis more than once a second.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

from throttled.asyncio import (
    BaseStore,
    MemoryStore,
    RateLimiterType,
    RateLimitState,
    RedisStore,
    RedisStoreBackend,
    Throttled,
    exceptions,
    per_sec,
)

from service.errors import InvalidRequest, RateLimited, StartError
from service.security import MAX_KEYS, ApiKey, Quota
from service.settings import Settings
from service.states.commands import Client
from service.states.redis import connect
from service.telemetry import Metrics

logger = logging.getLogger(__name__)

KEY_PREFIX = "bft:1:limit"
REST_S = 1.0
"""How long Redis is not asked after a failure."""


class _Backend(RedisStoreBackend):
    """throttled-py over a client that exists: its own factory knows neither TLS nor time-outs on a cluster."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = cast("Any", client)

    # A socket may fail below redis-py's own errors; uvloop's is a RuntimeError, see `is_closed_connection`.
    base_exceptions = (*RedisStoreBackend.base_exceptions, OSError, RuntimeError)


class _RedisStore(RedisStore):
    def __init__(self, client: Client) -> None:
        super().__init__()
        self._backend = _Backend(client)


class RateLimits:
    """What each key has left.

    Args:
        keys: those with a quota are counted.
        client: of the Redis that all replicas share; None: each counts by itself.
        metrics: counts where quotas were counted, and refusals.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        keys: Iterable[ApiKey],
        client: Client | None,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limited = {key.name: key.quota for key in keys if key.quota is not None}
        local = MemoryStore(options={"MAX_SIZE": MAX_KEYS + 1})
        self._local = {name: _throttled(quota, local) for name, quota in limited.items()}
        self._client = client
        self._shared: dict[str, Throttled] = {}
        if client is not None:
            shared = _RedisStore(client)
            self._shared = {name: _throttled(quota, shared) for name, quota in limited.items()}
        self._metrics = metrics
        self._clock = clock
        self._rest_until = -math.inf
        self._in_flight: set[asyncio.Task[Any]] = set()

    async def take(self, key: ApiKey, cost: int = 1) -> dict[str, str]:
        """Take `cost` requests from a key's quota; the headers that say what is left, none without a quota.

        Raises:
            RateLimited: the key has to wait.
            InvalidRequest: the cost exceeds the burst, so that no wait would help.
        """
        if key.quota is None:
            return {}
        if cost > key.quota.burst:
            raise InvalidRequest.of(
                "requests", f"the quota of this API key lets {key.quota.burst} through at once; send fewer in a batch"
            )
        limited, state = await self._count(key.name, cost)
        headers = _headers(key.quota, state)
        if limited:
            self._metrics.rate_limited.inc()
            wait_s = max(1, math.ceil(state.retry_after))
            quota = f"{key.quota.requests_per_second} requests a second, {key.quota.burst} at once"
            raise RateLimited(f"the quota is {quota}", retry_after_s=wait_s, headers=headers)
        return headers

    async def _count(self, name: str, cost: int) -> tuple[bool, RateLimitState]:
        if name in self._shared and self._clock() >= self._rest_until:
            if self._rest_until != -math.inf:
                # One request tries, and the others do not wait for it.
                self._rest_until = self._clock() + REST_S
            try:
                result = await self._send(self._shared[name], name, cost)
            except exceptions.StoreUnavailableError as error:
                self._on_failure(error)
            else:
                self._on_answer()
                self._metrics.rate_limit_checks.labels("shared").inc()
                return result.limited, result.state
        self._metrics.rate_limit_checks.labels("local").inc()
        result = await self._local[name].limit(name, cost)
        return result.limited, result.state

    async def _send(self, throttled: Throttled, name: str, cost: int) -> Any:
        """Ask Redis in a task of its own: what was sent is never cancelled, see service/states/commands.py."""
        task = asyncio.create_task(throttled.limit(name, cost))
        self._in_flight.add(task)
        task.add_done_callback(self._landed)
        return await asyncio.shield(task)

    def _landed(self, task: asyncio.Task[Any]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled():
            task.exception()

    def _on_failure(self, error: Exception) -> None:
        if self._rest_until == -math.inf:
            logger.warning("quotas are counted by this replica alone: Redis does not answer")
        self._metrics.state_errors.labels("limit", type(error.__cause__ or error).__name__).inc()
        self._rest_until = self._clock() + REST_S

    def _on_answer(self) -> None:
        if self._rest_until != -math.inf:
            logger.warning("quotas are counted for all replicas again")
            self._rest_until = -math.inf

    async def aclose(self) -> None:
        """Let go of Redis."""
        await asyncio.gather(*self._in_flight, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()


def open_rate_limits(settings: Settings, keys: Iterable[ApiKey], metrics: Metrics) -> RateLimits:
    """The quotas, in the Redis of the state; nothing connects before the first request.

    Raises:
        StartError: BFT_REDIS_URL is no such URL.
    """
    keys = tuple(keys)
    client = None
    if settings.redis_url is not None and any(key.quota is not None for key in keys):
        try:
            client = connect(
                settings.redis_url.get_secret_value(), settings.state_timeout_ms / 1000, settings.redis_cluster
            )
        except ValueError as error:
            raise StartError(f"BFT_REDIS_URL: {error}") from error
    return RateLimits(keys, client, metrics)


def _throttled(quota: Quota, store: BaseStore) -> Throttled:
    return Throttled(
        using=RateLimiterType.GCRA.value,
        quota=per_sec(quota.requests_per_second, quota.burst),
        store=store,
        key_prefix=KEY_PREFIX,
    )


def _headers(quota: Quota, state: RateLimitState) -> dict[str, str]:
    """draft-ietf-httpapi-ratelimit-headers-10: q the quota, w its seconds; r what is left, t seconds until all is."""
    window_s = math.ceil(quota.burst / quota.requests_per_second)
    return {
        "RateLimit-Policy": f'"key";q={quota.burst};w={window_s}',
        "RateLimit": f'"key";r={max(0, state.remaining)};t={math.ceil(state.reset_after)}',
    }
