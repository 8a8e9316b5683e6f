"""The batcher, with a graph that the test holds by a gate."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from service.batching import Batcher, BatchLimits
from service.context import RequestContext, unhurried
from service.errors import ClientLeft, DeadlinePassed, EngineStopped, InferenceFailed, Overloaded, ServiceError
from service.telemetry import Metrics

pytestmark = pytest.mark.anyio

LIMITS = BatchLimits(max_batch_rows=4, max_batch_cells=100, max_queue_cells=200)


class Gate:
    """A graph that doubles numbers, remembers its batches, and stands still while closed."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, list[Any]]] = []
        self.open = threading.Event()
        self.open.set()

    def __call__(self, graph: str, rows: Sequence[Any]) -> list[Any]:
        self.batches.append((graph, list(rows)))
        assert self.open.wait(60)
        if "poison" in rows:
            raise RuntimeError("no such number")
        return [row * 2 for row in rows]


@asynccontextmanager
async def batching(gate: Gate, limits: BatchLimits = LIMITS) -> AsyncIterator[Batcher]:
    batcher = Batcher(gate, limits, Metrics())
    batcher.start()
    try:
        yield batcher
    finally:
        gate.open.set()
        await batcher.close()


def patient() -> RequestContext:
    return unhurried("test", 60)


async def until_running(gate: Gate, num_batches: int = 1) -> None:
    while len(gate.batches) < num_batches:
        await asyncio.sleep(0.001)


def submit(
    batcher: Batcher, row: Any, *, graph: str = "g", length: int = 1, request: RequestContext | None = None
) -> "asyncio.Task[Any]":
    return asyncio.create_task(batcher.submit(graph, row, length, request or patient()))


async def test_each_row_gets_its_own_result() -> None:
    async with batching(Gate()) as batcher:
        assert await asyncio.gather(*(submit(batcher, row) for row in range(20))) == [2 * row for row in range(20)]


async def test_what_waits_while_the_thread_is_busy_goes_together_oldest_first() -> None:
    gate = Gate()
    gate.open.clear()
    async with batching(gate) as batcher:
        tasks = [submit(batcher, 0)]
        await until_running(gate)
        tasks += [submit(batcher, row) for row in range(1, 7)]
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(*tasks)

    assert [rows for _, rows in gate.batches] == [[0], [1, 2, 3, 4], [5, 6]]


async def test_the_earliest_deadline_goes_first_whenever_it_came() -> None:
    gate = Gate()
    gate.open.clear()
    async with batching(gate) as batcher:
        tasks = [submit(batcher, 0)]
        await until_running(gate)
        tasks += [submit(batcher, row) for row in range(1, 5)]
        await asyncio.sleep(0)
        tasks.append(submit(batcher, 9, request=unhurried("urgent", 30)))
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(*tasks)

    assert [rows for _, rows in gate.batches] == [[0], [9, 1, 2, 3], [4]]


async def test_a_batch_holds_rows_of_one_graph_and_no_row_waits_for_ever() -> None:
    gate = Gate()
    gate.open.clear()
    async with batching(gate) as batcher:
        tasks = [submit(batcher, 0)]
        await until_running(gate)
        tasks += [submit(batcher, row, graph="a" if row % 2 else "b") for row in range(1, 5)]
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(*tasks)

    assert gate.batches == [("g", [0]), ("a", [1, 3]), ("b", [2, 4])]


async def test_rows_times_the_longest_length_bound_a_batch_and_a_longer_row_goes_alone() -> None:
    gate = Gate()
    gate.open.clear()
    async with batching(gate) as batcher:
        tasks = [submit(batcher, 0)]
        await until_running(gate)
        lengths = {1: 40, 2: 50, 3: 60, 4: 5}
        tasks += [submit(batcher, row, length=length) for row, length in lengths.items()]
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(*tasks)
        await submit(batcher, 9, length=1_000)

    # Of 100 cells: 2·50 fit; 3·60 and 3·50 do not; nor do 2·60.
    assert [rows for _, rows in gate.batches[1:]] == [[1, 2], [3], [4], [9]]


async def test_a_failed_batch_answers_all_its_waiters_and_the_next_one_works() -> None:
    gate = Gate()
    gate.open.clear()
    async with batching(gate) as batcher:
        first = submit(batcher, 0)
        await until_running(gate)
        doomed = [submit(batcher, 1), submit(batcher, "poison"), submit(batcher, 2)]
        await asyncio.sleep(0)
        gate.open.set()
        results = await asyncio.gather(first, *doomed, return_exceptions=True)
        assert await submit(batcher, 5) == 10

    assert results[0] == 0
    assert all(isinstance(result, InferenceFailed) for result in results[1:])


@pytest.mark.parametrize("reason", [ClientLeft, DeadlinePassed])
async def test_a_row_nobody_waits_for_is_dropped_before_it_costs_anything(reason: type[ServiceError]) -> None:
    gate = Gate()
    gate.open.clear()
    async with batching(gate) as batcher:
        first = submit(batcher, 0)
        await until_running(gate)
        request = patient()
        dropped, kept = submit(batcher, 1, request=request), submit(batcher, 2)
        await asyncio.sleep(0)
        if reason is ClientLeft:
            request.client_left = True
        else:
            request.deadline = 0.0
        gate.open.set()
        with pytest.raises(reason):
            await dropped
        assert await asyncio.gather(first, kept) == [0, 4]

    assert [rows for _, rows in gate.batches] == [[0], [2]]


async def test_a_cancelled_waiter_leaves_the_queue() -> None:
    gate = Gate()
    gate.open.clear()
    async with batching(gate) as batcher:
        first = submit(batcher, 0)
        await until_running(gate)
        cancelled, kept = submit(batcher, 1), submit(batcher, 2)
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        gate.open.set()
        assert await asyncio.gather(first, kept) == [0, 4]

    assert [rows for _, rows in gate.batches] == [[0], [2]]


async def test_a_deadline_passes_even_while_the_thread_hangs() -> None:
    gate = Gate()
    gate.open.clear()
    async with batching(gate) as batcher:
        with pytest.raises(DeadlinePassed):
            await batcher.submit("g", 1, 1, unhurried("test", 0.05))


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    gate = Gate()
    gate.open.clear()
    async with batching(gate) as batcher:
        tasks = [submit(batcher, 0)]
        await until_running(gate)
        tasks += [submit(batcher, row, length=100) for row in (1, 2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 rows wait") as refusal:
            await batcher.submit("g", 3, 1, patient())
        gate.open.set()
        await asyncio.gather(*tasks)

    assert refusal.value.retry_after_s is not None
    assert refusal.value.retry_after_s >= 1


async def test_a_wait_beyond_the_deadline_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    async with batching(gate) as batcher:
        monkeypatch.setattr(batcher, "estimated_wait_s", lambda: 2.5)
        with pytest.raises(Overloaded, match="2500 ms") as refusal:
            await batcher.submit("g", 1, 1, unhurried("test", 2))

    assert refusal.value.retry_after_s == 3
    assert gate.batches == []


async def test_the_estimate_counts_what_waits() -> None:
    gate = Gate()
    async with batching(gate) as batcher:
        await batcher.submit("g", 0, 1, patient())
        gate.open.clear()
        tasks = [submit(batcher, 1)]
        await until_running(gate, 2)
        before = batcher.estimated_wait_s()
        tasks += [submit(batcher, row) for row in range(2, 12)]
        await asyncio.sleep(0)
        after = batcher.estimated_wait_s()
        gate.open.set()
        await asyncio.gather(*tasks)
        assert batcher.estimated_wait_s() == 0

    assert after > before >= 0


async def test_when_the_worker_dies_whoever_waits_or_comes_later_is_told() -> None:
    gate = Gate()
    gate.open.clear()
    async with batching(gate) as batcher:
        running = submit(batcher, 0)
        await until_running(gate)
        waiting = submit(batcher, 1)
        await asyncio.sleep(0)
        assert batcher._task is not None
        batcher._task.cancel()
        results = await asyncio.gather(running, waiting, return_exceptions=True)
        assert not batcher.alive
        with pytest.raises(EngineStopped):
            await batcher.submit("g", 2, 1, patient())

    assert [type(result) for result in results] == [EngineStopped, EngineStopped]


async def test_a_mistake_in_the_worker_itself_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(graph: str, rows: Sequence[Any]) -> list[Any]:
        return []  # a result for nobody

    batcher = Batcher(forgetful, LIMITS, Metrics())
    batcher.start()
    with pytest.raises(EngineStopped):
        await batcher.submit("g", 0, 1, patient())
    await asyncio.sleep(0)
    assert not batcher.alive
    await batcher.close()
