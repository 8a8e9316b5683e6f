"""Writes that no answer waits for: bounded, and their failure is told to the log alone."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Literal

from service.states.interface import StateError
from service.telemetry import Metrics

logger = logging.getLogger(__name__)


class Saves:
    """Values on their way to the store.

    Args:
        what: is saved.
        max_number: under way at a time.
        max_bytes: that they take together. One alone may take more, so that no value is refused for ever.
        metrics: counts what becomes of them.
    """

    def __init__(
        self, what: Literal["state", "slate", "settlement"], max_number: int, max_bytes: int, metrics: Metrics
    ) -> None:
        self._what = what
        self._counter = metrics.saves
        self._max_number = max_number
        self._max_bytes = max_bytes
        self._under_way: dict[asyncio.Task[None], int] = {}
        """Each with its bytes."""

    def start(self, write: Callable[[], Awaitable[object]], num_bytes: int) -> "asyncio.Task[None] | None":
        """Write in the background; None when too much is under way already."""
        is_over = sum(self._under_way.values()) + num_bytes > self._max_bytes
        if len(self._under_way) >= self._max_number or (self._under_way and is_over):
            self._counter.labels(self._what, "dropped").inc()
            return None
        task = asyncio.create_task(self._write(write))
        self._under_way[task] = num_bytes
        task.add_done_callback(self._under_way.pop)
        return task

    async def finish(self) -> None:
        """Return when nothing is under way."""
        await asyncio.gather(*self._under_way)

    async def _write(self, write: Callable[[], Awaitable[object]]) -> None:
        try:
            await write()
        except StateError as error:
            logger.info("a %s was not kept: %s", self._what, error)
        except Exception:
            logger.exception("a %s was not kept", self._what)
        else:
            self._counter.labels(self._what, "kept").inc()
            return
        self._counter.labels(self._what, "failed").inc()
