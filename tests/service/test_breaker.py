"""The breaker, with a clock of its own."""

import asyncio
from dataclasses import dataclass

import pytest

from service.breaker import REST_S, TRIP_AFTER, Breaker, Breakers
from service.states.interface import OutboxFull, StateUnavailable
from service.states.scripts import all_outbox_keys
from service.telemetry import Metrics

pytestmark = pytest.mark.anyio


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class Redis:
    """Counts what reaches it."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = StateUnavailable("away")

    async def __call__(self) -> str:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return "answer"


async def fail(breaker: Breaker, redis: Redis, times: int) -> None:
    for _ in range(times):
        with pytest.raises(StateUnavailable):
            await breaker.call("load", redis)


async def test_after_failures_in_a_row_nothing_is_sent_until_the_rest_is_over() -> None:
    clock, redis = Clock(), Redis()
    breaker = Breaker(Metrics(), clock)

    await fail(breaker, redis, TRIP_AFTER + 5)
    assert redis.calls == TRIP_AFTER
    clock.now += REST_S
    await fail(breaker, redis, 5)
    assert redis.calls == TRIP_AFTER + 1  # one trial, then another rest


async def test_calls_that_fail_together_count_as_one_failure() -> None:
    clock, redis = Clock(), Redis()
    breaker = Breaker(Metrics(), clock)
    all_sent = asyncio.Barrier(11)

    async def time_out() -> str:
        await all_sent.wait()
        clock.now += 0.001
        raise StateUnavailable("no answer in time")

    together = [asyncio.create_task(breaker.call("load", time_out)) for _ in range(10)]
    await all_sent.wait()
    await asyncio.gather(*together, return_exceptions=True)
    await fail(breaker, redis, TRIP_AFTER)
    # The ten counted once, so the server rests before the last of these.
    assert redis.calls == TRIP_AFTER - 1


async def test_one_success_closes_it_again() -> None:
    clock, redis = Clock(), Redis()
    breaker = Breaker(Metrics(), clock)
    await fail(breaker, redis, TRIP_AFTER)
    clock.now += REST_S
    redis.error = None

    assert [await breaker.call("load", redis) for _ in range(3)] == ["answer"] * 3


async def test_only_one_call_tries_while_the_others_are_refused() -> None:
    clock, redis = Clock(), Redis()
    breaker = Breaker(Metrics(), clock)
    await fail(breaker, redis, TRIP_AFTER)
    clock.now += REST_S
    gate = asyncio.Event()

    async def slow() -> str:
        await gate.wait()
        return "answer"

    trial = asyncio.create_task(breaker.call("load", slow))
    await asyncio.sleep(0)
    with pytest.raises(StateUnavailable, match="not asked"):
        await breaker.call("load", redis)
    gate.set()
    assert await trial == "answer"


async def test_a_cancelled_trial_leaves_room_for_another() -> None:
    clock, redis = Clock(), Redis()
    breaker = Breaker(Metrics(), clock)
    await fail(breaker, redis, TRIP_AFTER)
    clock.now += REST_S
    trial = asyncio.create_task(breaker.call("load", asyncio.Event().wait))
    await asyncio.sleep(0)
    trial.cancel()
    await asyncio.wait([trial])
    redis.error = None

    assert await breaker.call("load", redis) == "answer"


async def test_failures_between_successes_do_not_open_it() -> None:
    redis = Redis()
    breaker = Breaker(Metrics(), Clock())
    for _ in range(5):
        redis.error = StateUnavailable("away")
        await fail(breaker, redis, TRIP_AFTER - 1)
        redis.error = None
        await breaker.call("load", redis)

    assert redis.calls == 5 * TRIP_AFTER


async def test_a_refusal_is_an_answer_and_no_failure() -> None:
    metrics, redis = Metrics(), Redis()
    breaker = Breaker(metrics, Clock())
    redis.error = OutboxFull(10)

    for _ in range(TRIP_AFTER + 3):
        with pytest.raises(OutboxFull):
            await breaker.call("append", redis)

    assert redis.calls == TRIP_AFTER + 3
    sample = {"operation": "append", "error": "OutboxFull"}
    assert metrics.registry.get_sample_value("bft_state_errors_total", sample) == TRIP_AFTER + 3


class Servers:
    """Two share the keys; a failover changes it."""

    def __init__(self) -> None:
        self.names = ["one", "two"]

    def __call__(self, key: str) -> str:
        return self.names[all_outbox_keys().index(key) % 2 if key in all_outbox_keys() else 0]


ANNS, BOBS = all_outbox_keys()[:2]


def num_open(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("bft_state_breaker_open")


async def test_a_dead_server_does_not_rest_the_others() -> None:
    metrics, dead, alive = Metrics(), Redis(), Redis()
    alive.error = None
    breakers = Breakers(Servers(), metrics, Clock())

    await fail(breakers.of(ANNS), dead, TRIP_AFTER + 2)

    assert dead.calls == TRIP_AFTER
    assert await breakers.of(BOBS).call("load", alive) == "answer"
    assert num_open(metrics) == 1


async def test_the_server_that_takes_over_is_asked_at_once_and_the_dead_one_forgotten() -> None:
    metrics, redis, servers = Metrics(), Redis(), Servers()
    breakers = Breakers(servers, metrics, Clock())
    await fail(breakers.of(ANNS), redis, TRIP_AFTER)
    await fail(breakers.of(BOBS), redis, TRIP_AFTER)
    assert num_open(metrics) == 2

    servers.names = ["heir", "two"]
    redis.error = None

    assert await breakers.of(ANNS).call("load", redis) == "answer"
    assert num_open(metrics) == 1
    with pytest.raises(StateUnavailable, match="not asked"):
        await breakers.of(BOBS).call("load", redis)
