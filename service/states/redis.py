"""The store in Redis ≥ 7.0 or Valkey, on a single node or a cluster.

Deadlines are socket time-outs. There are no retries: the caller decides.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from model.config import UNKNOWN_BASE
from service.states import scripts
from service.states.cluster import PatientCluster
from service.states.commands import Client, Commands
from service.states.confirming import run_confirmed
from service.states.interface import (
    AddedItems,
    AppendStatus,
    CacheForm,
    CatalogMismatch,
    Claim,
    Clock,
    EncodedState,
    Event,
    Loaded,
    OutboxFull,
    PutStatus,
    SlateRef,
    StateUnavailable,
    StoreLimits,
    Subject,
    UnknownItemsFull,
    UserRecord,
    check_batch,
    wall_clock_ms,
)
from service.states.packing import (
    claim_hash,
    is_record_of,
    lineage_hash,
    lineage_of_record,
    pack_entry,
    pack_numbers,
    pack_state,
    subject_hash,
    unpack_record,
    unpack_seen,
    unpack_state,
    unreadable_layout,
)

T = TypeVar("T")

MAX_CONNECTIONS = 64
ERASE_PAGE = 500
"""Outbox entries that one script looks through during an erasure."""
REGISTRATION_MS = 60_000
"""A model version in use is registered again this often, in case the server lost its data."""

_FAILURES = (redis.exceptions.RedisError, redis.exceptions.RedisClusterException, OSError)
_STATUSES = {
    "0": AppendStatus.accepted,
    "1": AppendStatus.duplicate,
    "2": AppendStatus.erased,
    "3": AppendStatus.repeated,
}


class RedisStore:
    """`Store` over one Redis or Valkey.

    Args:
        url: `redis://`, `rediss://` or `unix://`; on a cluster, any of its nodes.
        lineage: of the catalogue whose item numbers are stored.
        limits: bounds and life times.
        timeout_ms: for each of: a free connection, connecting, writing, reading.
        cluster: the server is a Redis Cluster; scripts then go to the node that has the slot.
        replicas: that must have a write before it counts as done, within `timeout_ms`. States, lists when they are
            first kept, and what followed a list are not waited for: nobody's data is lost with them.
        cache_form: of the caches of kept states.
        clock: milliseconds since 1970, for erasures and new epochs; keys expire by the server's clock.
    """

    def __init__(
        self,
        url: str,
        *,
        lineage: str,
        limits: StoreLimits,
        timeout_ms: int = 50,
        cluster: bool = False,
        replicas: int = 0,
        cache_form: CacheForm = "float32",
        clock: Clock = wall_clock_ms,
    ) -> None:
        self._lineage = lineage
        self._limits = limits
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._replicas = replicas
        self._cache_form = cache_form
        self._client = connect(url, timeout_ms / 1000, cluster)
        self._commands = Commands(self._client)
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._registered_ms: dict[str, int] = {}

    def server_of(self, key: str) -> str:
        """As in `Store`."""
        return self._client.primary_of(key) if isinstance(self._client, PatientCluster) else ""

    async def load(self, subject: Subject, model_version: str) -> Loaded:
        """As in `Store`."""
        keys = scripts.SubjectKeys.of(subject)
        owner = subject_hash(subject)
        value, seen, state_value = await self._ask(
            scripts.LOAD, [keys.record, keys.seen, keys.state(model_version)], []
        )
        record = self._record(value, seen, owner)
        return Loaded(record, None if record is None else unpack_state(state_value, owner))

    def _record(self, value: bytes | None, seen: bytes | None, owner: bytes) -> UserRecord | None:
        if value is None or not is_record_of(value, owner):
            return None
        if lineage_of_record(value) != lineage_hash(self._lineage):
            raise CatalogMismatch(self._lineage)
        return unpack_record(value, unpack_seen(seen, owner), self._lineage)

    async def append(self, subject: Subject, events: Sequence[Event]) -> list[AppendStatus]:
        """As in `Store`."""
        return await self._append(subject, events, merged_from="", seen=())

    async def absorb(
        self, user_id: str, session_id: str, events: Sequence[Event], seen: Sequence[int]
    ) -> list[AppendStatus]:
        """As in `Store`."""
        return await self._append(Subject("user", user_id), events, session_id, seen)

    async def _append(
        self, subject: Subject, events: Sequence[Event], merged_from: str, seen: Sequence[int]
    ) -> list[AppendStatus]:
        check_batch(events)
        if not events and not seen:
            return []
        keys = scripts.SubjectKeys.of(subject)
        limits = self._limits
        arguments: list[Any] = [
            self._clock(),
            subject_hash(subject),
            lineage_hash(self._lineage),
            limits.ttl_s(subject),
            limits.ttl_of_identities_s(subject),
            limits.max_len,
            limits.outbox_limit,
            limits.seen_limit // 2,
            limits.identity_limit,
            limits.undated_refusal_s * 1000,
            f"{subject.kind}_id",
            subject.id,
            merged_from,
            pack_numbers(seen),
        ]
        for event in events:
            arguments += [
                pack_entry(event),
                int(event.undated),
                event.identity or b"",
                event.item_id,
                event.type or "",
                repr(event.weight),
                event.event_id or "",
                event.recommendation_id or "",
            ]
        outcome, *details = await self._write(
            scripts.APPEND, [keys.record, keys.seen, keys.identities, keys.tombstone, keys.outbox], arguments
        )
        if outcome == b"outbox_full":
            raise OutboxFull(limits.outbox_limit)
        if outcome == b"lineage":
            raise CatalogMismatch(self._lineage)
        if outcome == b"layout":
            raise StateUnavailable(unreadable_layout(details[0]))
        return [_STATUSES[digit] for digit in details[0].decode()]

    async def claim_session(self, session_id: str, user_id: str) -> Claim:
        """As in `Store`."""
        subject = Subject("session", session_id)
        keys, owner = scripts.SubjectKeys.of(subject), subject_hash(subject)
        reply = await self._write(
            scripts.CLAIM_SESSION,
            [keys.record, keys.seen, keys.tombstone],
            [owner, claim_hash(session_id, user_id), self._limits.session_ttl_s],
        )
        if reply == b"taken":
            return Claim(is_granted=False, record=None)
        value, seen = reply
        return Claim(is_granted=True, record=self._record(value, seen, owner))

    async def close_session(self, session_id: str, read: UserRecord | None) -> bool:
        """As in `Store`."""
        return await self._to_the_end(self._close_session(Subject("session", session_id), read))

    async def _close_session(self, subject: Subject, read: UserRecord | None) -> bool:
        keys = scripts.SubjectKeys.of(subject)
        as_read = (-1, -1, -1) if read is None else (read.count, read.epoch, len(read.seen))
        is_empty: int = await self._write(
            scripts.CLOSE_SESSION,
            [keys.record, keys.seen, keys.tombstone],
            [self._clock(), subject_hash(subject), self._limits.session_ttl_s, *as_read],
        )
        if is_empty:
            await self._forget_served(subject)
        return bool(is_empty)

    async def save_slate(
        self, recommendation_id: str, subject: Subject | None, made_ms: int, asked: bytes, page: bytes
    ) -> bool:
        """As in `Store`."""
        slate, limits = scripts.slate_key(recommendation_id), self._limits
        arguments: list[Any] = [asked, page, limits.ttl_of_slates_s(subject)]
        if subject is None:
            return bool(await self._ask(scripts.SAVE_SLATE, [slate], arguments))
        keys = scripts.SubjectKeys.of(subject)
        arguments += [
            subject_hash(subject),
            made_ms,
            limits.slate_limit,
            limits.slates_forgotten,
            recommendation_id,
        ]
        forgotten: list[str] = []
        while True:
            outcome: int | list[bytes] = await self._ask(
                scripts.SAVE_SLATE,
                [slate, keys.recommendations, keys.tombstone, *map(scripts.slate_key, forgotten)],
                [*arguments, *forgotten],
            )
            if isinstance(outcome, int):
                return bool(outcome)
            forgotten = [each.decode() for each in outcome]

    async def load_slate(self, recommendation_id: str) -> list[bytes] | None:
        """As in `Store`."""
        key = scripts.slate_key(recommendation_id)
        reply: list[bytes] = await self._ask(scripts.LOAD_SLATE, [key], [])
        return reply or None

    async def append_page(self, recommendation_id: str, num_pages: int, page: bytes) -> bool:
        """As in `Store`."""
        key = scripts.slate_key(recommendation_id)
        return bool(await self._write(scripts.APPEND_PAGE, [key], [num_pages, page]))

    async def settle_slate(self, recommendation_id: str, outcome: bytes) -> bool:
        """As in `Store`."""
        key = scripts.slate_key(recommendation_id)
        return bool(await self._ask(scripts.SETTLE_SLATE, [key], [outcome]))

    async def slates(self, subject: Subject) -> list[SlateRef]:
        """As in `Store`."""
        return await self._to_the_end(self._slates(subject))

    async def _slates(self, subject: Subject) -> list[SlateRef]:
        ids = await self._slate_ids(subject)
        if not ids:
            return []
        pipeline = self._client.pipeline(transaction=False)
        for recommendation_id in ids:
            pipeline.execute_command("PTTL", scripts.slate_key(recommendation_id))
        now_ms, lives_ms = self._clock(), await pipeline.execute()
        # Negative: it has expired, and is still in the list.
        return [SlateRef(each, now_ms + life) for each, life in zip(ids, lives_ms, strict=True) if life >= 0]

    async def _slate_ids(self, subject: Subject) -> list[str]:
        key = scripts.SubjectKeys.of(subject).recommendations
        return [each.decode() for each in await self._client.execute_command("LRANGE", key, 0, -1)]

    async def _forget_served(self, subject: Subject) -> int:
        """Remove a subject's states and slates; how many there were."""
        keys = scripts.SubjectKeys.of(subject)
        num_removed = 0
        if versions := await self._client.execute_command("ZRANGE", scripts.MODELS_KEY, 0, -1):
            states = (keys.state(version.decode()) for version in versions)
            num_removed += await self._client.execute_command("UNLINK", *states)
        listed: list[bytes] = await self._write(
            scripts.SEAL_SLATES, [keys.recommendations, keys.tombstone], [self._clock(), subject_hash(subject)]
        )
        if ids := [each.decode() for each in listed]:
            slates = map(scripts.slate_key, ids)
            num_removed += await self._write(scripts.FORGET_SLATES, [keys.recommendations, *slates], ids)
        return num_removed

    async def save_state(self, subject: Subject, model_version: str, encoded: EncodedState) -> bool:
        """As in `Store`."""
        if self._clock() - self._registered_ms.get(model_version, 0) >= REGISTRATION_MS:
            await self.register_model(model_version)
        keys = scripts.SubjectKeys.of(subject)
        owner = subject_hash(subject)
        ttl_s = self._limits.ttl_of_state_s(subject)
        written = await self._ask(
            scripts.SAVE_STATE,
            [keys.record, keys.state(model_version)],
            [owner, encoded.count, encoded.epoch, pack_state(encoded, owner, self._cache_form), ttl_s],
        )
        return bool(written)

    async def erase(self, user_id: str) -> bool:
        """As in `Store`. Interrupted anywhere, a repetition completes it."""
        return await self._to_the_end(self._erase(user_id))

    async def _erase(self, user_id: str) -> bool:
        subject = Subject("user", user_id)
        keys = scripts.SubjectKeys.of(subject)
        # First the record: without it no state can be saved any more, so those found after it are all.
        num_removed: int
        num_removed, last_id = await self._write(
            scripts.ERASE,
            [keys.record, keys.seen, keys.identities, keys.tombstone, keys.outbox],
            [self._clock(), subject_hash(subject), self._limits.tombstone_ttl_s, user_id],
        )
        num_removed += await self._forget_served(subject)
        if last_id:
            num_removed += await self._erase_outbox(keys.outbox, user_id, last_id)
        return num_removed > 0

    async def _erase_outbox(self, outbox: str, user_id: str, last_id: bytes) -> int:
        """Remove the user's events up to `last_id`, in pages, so that no script holds the server long."""
        num_removed = 0
        start = b"-"
        while True:
            removed, reached = await self._write(
                scripts.ERASE_OUTBOX_PAGE, [outbox], [user_id, start, last_id, ERASE_PAGE]
            )
            num_removed += int(removed)
            if not reached:
                return num_removed
            start = b"(" + reached

    async def numbers_for_unknown(self, item_ids: Sequence[str]) -> dict[str, int]:
        """As in `Store`."""
        distinct = list(dict.fromkeys(item_ids))
        if not distinct:
            return {}
        limit = self._limits.unknown_limit
        numbers = await self._write(scripts.NUMBER_UNKNOWN, [scripts.UNKNOWN_KEY], [UNKNOWN_BASE, limit, *distinct])
        if numbers == b"full":
            raise UnknownItemsFull(limit)
        return dict(zip(distinct, numbers, strict=True))

    async def ids_for_unknown(self, numbers: Sequence[int]) -> dict[int, str]:
        """As in `Store`."""
        if not numbers:
            return {}
        fields = [f"n{number}" for number in numbers]
        with failures_as_unavailable():
            item_ids = await self._commands.execute("HMGET", scripts.UNKNOWN_KEY, *fields)
        return {
            number: item_id.decode() for number, item_id in zip(numbers, item_ids, strict=True) if item_id is not None
        }

    async def put_item(self, item_id: str, metadata: str) -> PutStatus:
        """As in `Store`."""
        arguments = [self._clock(), self._limits.added_limit, item_id, metadata]
        status: bytes = await self._write(scripts.PUT_ITEM, [scripts.ITEMS_KEY], arguments)
        return PutStatus(status.decode())

    async def remove_item(self, item_id: str) -> bool:
        """As in `Store`."""
        return bool(await self._write(scripts.REMOVE_ITEM, [scripts.ITEMS_KEY], [self._clock(), item_id]))

    async def added_items(self, known_version: int) -> AddedItems | None:
        """As in `Store`."""
        reply: list[bytes] | None = await self._ask(scripts.LOAD_ITEMS, [scripts.ITEMS_KEY], [known_version])
        if reply is None:
            return None
        fields = dict(zip(reply[::2], reply[1::2], strict=True))
        version = int(fields.pop(b"v", 0))
        return AddedItems(version, {field[1:].decode(): text.decode() for field, text in fields.items()})

    async def register_model(self, model_version: str) -> None:
        """As in `Store`."""
        scripts.check_model_version(model_version)
        now_ms = self._clock()
        pipeline = self._client.pipeline(transaction=False)
        pipeline.execute_command("ZADD", scripts.MODELS_KEY, now_ms, model_version)
        pipeline.execute_command("ZREMRANGEBYRANK", scripts.MODELS_KEY, 0, -scripts.MAX_MODELS - 1)
        await self._to_the_end(pipeline.execute())
        self._registered_ms[model_version] = now_ms

    def keep_at_least(self, max_len: int) -> None:
        """As in `Store`."""
        self._limits = replace(self._limits, max_len=max(max_len, self._limits.max_len))

    async def outbox_fill(self) -> float:
        """As in `Store`."""
        pipeline = self._client.pipeline(transaction=False)
        for key in scripts.all_outbox_keys():
            pipeline.execute_command("XLEN", key)
        lengths: list[int] = await self._to_the_end(pipeline.execute())
        return max(lengths) / self._limits.outbox_limit

    async def ping(self) -> None:
        """As in `Store`."""
        with failures_as_unavailable():
            await self._commands.execute("PING")

    async def close(self) -> None:
        """As in `Store`."""
        await asyncio.gather(*self._in_flight, return_exceptions=True)
        await self._commands.finish()
        await self._client.aclose()

    async def _ask(self, script: scripts.Script, keys: list[str], arguments: list[Any]) -> Any:
        """A script's reply. Raises StateUnavailable on any failure of redis-py or of the connection."""
        with failures_as_unavailable():
            return await self._commands.run(script, keys, arguments)

    async def _write(self, script: scripts.Script, keys: list[str], arguments: list[Any]) -> Any:
        """The reply of a script that writes what must not be lost. Raises as `_ask`, and NotReplicated."""
        if self._replicas == 0:
            return await self._ask(script, keys, arguments)
        confirmed = run_confirmed(self._client, script, keys, arguments, self._replicas, self._timeout_ms)
        return await self._to_the_end(confirmed)

    async def _to_the_end(self, commands: Coroutine[Any, Any, T]) -> T:
        """Run several commands in a task of their own, to their end even when the caller is cancelled.

        Raises:
            StateUnavailable: any failure of redis-py or of the connection.
        """
        task = asyncio.create_task(commands)
        self._in_flight.add(task)
        task.add_done_callback(self._landed)
        with failures_as_unavailable():
            return await asyncio.shield(task)

    def _landed(self, task: asyncio.Task[Any]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled():
            # Read it, or asyncio reports as lost the failure of a task whose caller was cancelled.
            task.exception()


@contextmanager
def failures_as_unavailable() -> Iterator[None]:
    """Raises StateUnavailable on any failure of redis-py or of the connection."""
    try:
        yield
    except _FAILURES as error:
        raise StateUnavailable(f"the state store did not answer: {type(error).__name__}") from error
    except RuntimeError as error:
        if not is_closed_connection(error):
            raise
        raise StateUnavailable("the state store did not answer: its connection was closed") from error


def is_closed_connection(error: RuntimeError) -> bool:
    """Whether uvloop refused to write to a connection that the server, or another task, closed a moment ago.

    asyncio lets such a write pass, and redis-py (8.1) translates what comes of that; this it does not translate.
    """
    return "the handler is closed" in str(error)


def connect(url: str, timeout_s: float, cluster: bool) -> Client:
    """A client, not connected yet. RESP2 without client information: connecting adds no round trip."""
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "driver_info": None,
    }
    if cluster:
        return PatientCluster.from_url(url, max_commands=MAX_CONNECTIONS, turn_timeout_s=timeout_s, **options)
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url, timeout=timeout_s, max_connections=MAX_CONNECTIONS, **options
    )
    return redis.asyncio.Redis.from_pool(pool)
