"""Who is let in: a request that could not be answered in time is refused before it costs anything."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.errors import Overloaded

HEADROOM = 0.7
"""Share of the time until the deadline that the estimate may fill: half of all requests take longer than estimated."""
_SMOOTHING = 0.02
"""Weight of the newest request in the running mean."""


class Admission:
    """Estimates how long a request would take, from how many are worked on.

    By Little's law a process that finishes one request every s seconds, with n of them inside, answers a further one
    after (n + 1)·s. s is the running mean of the time between two finished requests, counted only while there was
    something to do. It covers whatever they wait for: the event loop, the graphs, the store.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_inside = 0
        self._busy_since = 0.0
        """When the last request was finished, or the first of those inside came in."""
        self._seconds_per_request = 0.0

    def estimated_s(self) -> float:
        """Seconds until a request that comes now would be answered."""
        return (self._num_inside + 1) * self._seconds_per_request

    @contextmanager
    def let_in(self, remaining_s: float) -> Iterator[None]:
        """For the length of the block a request is inside.

        Args:
            remaining_s: until its deadline.

        Raises:
            Overloaded: it would not be answered in time. One that would be alone is always let in.
        """
        if self._num_inside == 0:
            self._busy_since = self._clock()
        elif (estimated_s := self.estimated_s()) > HEADROOM * remaining_s:
            raise Overloaded(
                f"{self._num_inside} requests are being worked on, an answer would take about "
                f"{1000 * estimated_s:.0f} ms",
                retry_after_s=max(1, math.ceil(estimated_s)),
            )
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            self._on_finish()

    def _on_finish(self) -> None:
        now = self._clock()
        newest, self._busy_since = now - self._busy_since, now
        before = self._seconds_per_request or newest
        self._seconds_per_request = before + _SMOOTHING * (newest - before)
