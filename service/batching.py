"""Micro-batching without a timer (service.md, "Engine").

One task owns the queue; everybody else calls `submit`. While the inference thread is busy, rows wait; when it is free,
what waits goes together, the earliest deadline first, as far as the bounds of a batch allow: a request that needs two
graphs does not queue up behind younger ones for its second. Rows whose client left or whose deadline passed are dropped
before they cost anything. Every submitted row ends in a result or an error: a failed batch answers all its waiters, and
when the task itself dies, everyone who waits or comes later is told.
"""

import asyncio
import heapq
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from service.context import RequestContext, Stage, infer_stage
from service.errors import ClientLeft, DeadlinePassed, EngineStopped, InferenceFailed, Overloaded
from service.telemetry import Metrics

logger = logging.getLogger(__name__)

RunBatch = Callable[[str, Sequence[Any]], Sequence[Any]]
"""(graph, rows) → a result for each row; runs in the inference thread."""

_STOPPED = "the inference worker has stopped"
_SMOOTHING = 0.2
"""Weight of the newest batch in the running mean of seconds per row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Bounds, in rows and in cells (rows × length)."""

    max_batch_rows: int
    max_batch_cells: int
    max_queue_cells: int


@dataclass(slots=True, eq=False)
class _Waiting:
    """A row in the queue."""

    graph: str
    row: Any
    length: int
    request: RequestContext
    answer: asyncio.Future[Any]
    since: float
    stage: Stage = "queue"
    """Where it is: waiting, or in a graph."""

    def __lt__(self, other: "_Waiting") -> bool:
        """Whether it is more urgent; of equals the older one."""
        return (self.request.deadline, self.since) < (other.request.deadline, other.since)


class Batcher:
    """The queue in front of one inference thread.

    Args:
        run: runs one batch; called in the thread, never twice at a time.
        limits: bounds of batch and queue.
        metrics: queue and batch sizes go here.
    """

    def __init__(self, run: RunBatch, limits: BatchLimits, metrics: Metrics) -> None:
        self._run = run
        self._limits = limits
        self._metrics = metrics
        self._queue: list[_Waiting] = []
        """A heap."""
        self._queued_cells = 0
        self._queued_rows: Counter[str] = Counter()
        self._seconds_per_row: dict[str, float] = {}
        self._busy_until = 0.0
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inference")
        self._task: asyncio.Task[None] | None = None
        self.last_success: float | None = None
        """When a batch last succeeded, on the clock of `time.monotonic`."""

    def start(self) -> None:
        """Begin to work; needs a running event loop."""
        self._task = asyncio.create_task(self._work(), name="batcher")
        self._task.add_done_callback(self._on_end)

    async def close(self) -> None:
        """Stop after the batch in the thread; whoever still waits gets EngineStopped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._thread.shutdown(wait=True)
        # The engine behind it holds this batcher: without the circle its memory is free as soon as it is let go.
        del self._run

    @property
    def alive(self) -> bool:
        """Whether submitted rows will be worked on."""
        return self._task is not None and not self._task.done()

    def estimated_wait_s(self) -> float:
        """Seconds until a row that is submitted now would start, from what waits and what runs."""
        queued = sum(rows * self._seconds_per_row.get(graph, 0.0) for graph, rows in self._queued_rows.items())
        return queued + max(0.0, self._busy_until - time.monotonic())

    async def submit(self, graph: str, row: Any, length: int, request: RequestContext) -> Any:
        """Wait for a row's result.

        Args:
            graph: which graph; a batch holds rows of one.
            row: what `run` takes.
            length: cells of this row: what it is counted with, before padding.
            request: whose row; its deadline and its client are checked before the row goes into a batch.

        Raises:
            Overloaded: the queue is full, or the wait would exceed the deadline.
            DeadlinePassed, ClientLeft: while it waited.
            InferenceFailed: its batch failed.
            EngineStopped: nobody works any more.
        """
        entry = _Waiting(graph, row, length, request, asyncio.get_running_loop().create_future(), time.monotonic())
        try:
            if not self.alive:
                raise EngineStopped(_STOPPED, retry_after_s=1)
            self._admit(length, request)
            self._enqueue(entry)
            async with asyncio.timeout(max(0.0, request.remaining_s())):
                return await entry.answer
        except TimeoutError as error:
            request.failed_in(entry.stage)
            raise DeadlinePassed("the deadline passed while the request waited for inference") from error
        except BaseException:
            request.failed_in(entry.stage)
            raise

    def _admit(self, length: int, request: RequestContext) -> None:
        # What came before, such as a slow state store, counts towards the deadline too.
        request.check_deadline()
        wait_s = self.estimated_wait_s()
        # An empty queue takes a row of any length, so that a long row is not refused for ever.
        is_full = self._queued_cells > 0 and self._queued_cells + length > self._limits.max_queue_cells
        if is_full or wait_s > request.remaining_s():
            raise Overloaded(
                f"{len(self._queue)} rows wait, about {wait_s * 1000:.0f} ms",
                retry_after_s=max(1, math.ceil(wait_s)),
            )

    def _enqueue(self, entry: _Waiting) -> None:
        heapq.heappush(self._queue, entry)
        self._count(entry, 1)
        self._wake.set()

    def _dequeue(self) -> _Waiting:
        entry = heapq.heappop(self._queue)
        self._count(entry, -1)
        return entry

    def _count(self, entry: _Waiting, sign: int) -> None:
        self._queued_cells += sign * entry.length
        self._queued_rows[entry.graph] += sign
        # Several models may be loaded, each with its queue: the gauges are sums.
        self._metrics.queue_cells.inc(sign * entry.length)
        self._metrics.queue_rows.inc(sign)

    def _take(self) -> list[_Waiting]:
        """The next batch: the most urgent row that somebody still waits for, and what may go with it."""
        batch: list[_Waiting] = []
        others: list[_Waiting] = []
        longest = 0
        while self._queue and len(batch) < self._limits.max_batch_rows:
            entry = self._dequeue()
            if entry.answer.done():
                continue
            if (error := _reason_to_drop(entry.request)) is not None:
                entry.answer.set_exception(error)
                continue
            longest_with = max(longest, entry.length)
            fits = not batch or (len(batch) + 1) * longest_with <= self._limits.max_batch_cells
            if fits and (not batch or entry.graph == batch[0].graph):
                batch.append(entry)
                longest = longest_with
            else:
                others.append(entry)
        for entry in others:
            heapq.heappush(self._queue, entry)
            self._count(entry, 1)
        return batch

    async def _work(self) -> None:
        while True:
            await self._wake.wait()
            batch = self._take()
            if not batch:
                self._wake.clear()
                continue
            try:
                await self._run_batch(batch)
            finally:
                # Cancelled half-way, or a mistake here: nobody may be left waiting.
                _fail(batch, EngineStopped, _STOPPED)

    async def _run_batch(self, batch: list[_Waiting]) -> None:
        graph, start = batch[0].graph, time.monotonic()
        self._busy_until = start + len(batch) * self._seconds_per_row.get(graph, 0.0)
        rows = [entry.row for entry in batch]
        stage = infer_stage(graph)
        for entry in batch:
            entry.stage = stage
        try:
            results = await asyncio.get_running_loop().run_in_executor(self._thread, self._run, graph, rows)
        except Exception:
            logger.exception("a batch failed", extra={"graph": graph, "rows": len(batch)})
            _fail(batch, InferenceFailed, f"the {graph} failed on a batch of {len(batch)}")
            return
        finally:
            self._busy_until = 0.0
        seconds = time.monotonic() - start
        self.last_success = time.monotonic()
        self._note(graph, len(batch), seconds)
        for entry, result in zip(batch, results, strict=True):
            entry.request.add_time("queue", start - entry.since)
            entry.request.add_time(stage, seconds)
            if not entry.answer.done():
                entry.answer.set_result(result)

    def _note(self, graph: str, num_rows: int, seconds: float) -> None:
        self._metrics.batch_rows.labels(graph).observe(num_rows)
        self._metrics.batch_seconds.labels(graph).observe(seconds)
        newest = seconds / num_rows
        before = self._seconds_per_row.get(graph, newest)
        self._seconds_per_row[graph] = before + _SMOOTHING * (newest - before)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            logger.critical("the inference worker died; /readyz is red", exc_info=task.exception())
        waiting = [self._dequeue() for _ in range(len(self._queue))]
        _fail(waiting, EngineStopped, _STOPPED)


def _reason_to_drop(request: RequestContext) -> ClientLeft | DeadlinePassed | None:
    if request.client_left:
        return ClientLeft("the client left while its request waited")
    if request.remaining_s() <= 0:
        return DeadlinePassed("the deadline passed while the request waited for inference")
    return None


def _fail(entries: Sequence[_Waiting], error: type[EngineStopped | InferenceFailed], detail: str) -> None:
    for entry in entries:
        if not entry.answer.done():
            entry.answer.set_exception(error(detail))
