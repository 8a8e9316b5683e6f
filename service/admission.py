"""Who is let in: a request that could not be answered in time is refused before it costs anything."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.errors import Overloaded

PATIENCE, IMPATIENCE = 0.9, 0.25
"""Share of the time until the deadline that the estimate may fill: in a burst, and under overload. A burst is over
soon, and to refuse it would help nobody. Under overload a longer queue makes everybody wait and answers not one more;
one request of a hundred takes more than twice the estimate, so a short one keeps them all in time."""
OVERLOAD = 0.2
"""Share of the latest requests that find a queue beyond IMPATIENCE, from which on it is overload and no burst."""
CROWD = 4
"""Requests inside from which on they are what makes each other wait. Fewer wait for round trips and threads, which more
would share: their pace says nothing about how many could be answered."""
_PACE_SMOOTHING, _SHARE_SMOOTHING = 0.02, 0.01
"""Weights of the newest request in the running means."""


class Admission:
    """Estimates how long a request would take, from how many are worked on.

    By Little's law a process that finishes one request every s seconds, with n of them inside, answers a further one
    after (n + 1)·s. s is the running mean of the time between two finished requests, of which a crowd was inside. It
    covers whatever they wait for: the event loop, the graphs, the store.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_inside = 0
        self._last_finish = 0.0
        """When a request of the crowd inside was finished, or else it formed."""
        self._late_share = 0.0
        self._seconds_per_request: float | None = None

    def estimated_s(self) -> float:
        """Seconds until a request that comes now would be answered; 0 before anything is known."""
        return (self._num_inside + 1) * (self._seconds_per_request or 0.0)

    @contextmanager
    def let_in(self, remaining_s: float) -> Iterator[None]:
        """For the length of the block a request is inside.

        Args:
            remaining_s: until its deadline.

        Raises:
            Overloaded: it would not be answered in time. Without a crowd inside everybody is let in.
        """
        self._check(remaining_s)
        self._num_inside += 1
        if self._num_inside == CROWD:
            self._last_finish = self._clock()
        try:
            yield
        finally:
            if self._num_inside >= CROWD:
                self._on_finish()
            self._num_inside -= 1

    def _check(self, remaining_s: float) -> None:
        estimated_s = self.estimated_s() if self._num_inside >= CROWD else 0.0
        is_late = estimated_s > IMPATIENCE * remaining_s
        self._late_share += _SHARE_SMOOTHING * (is_late - self._late_share)
        headroom = IMPATIENCE if self._late_share > OVERLOAD else PATIENCE
        if estimated_s > headroom * remaining_s:
            raise Overloaded(
                f"{self._num_inside} requests are being worked on, an answer would take about "
                f"{1000 * estimated_s:.0f} ms",
                retry_after_s=max(1, math.ceil(estimated_s)),
            )

    def _on_finish(self) -> None:
        now = self._clock()
        newest, self._last_finish = now - self._last_finish, now
        before = newest if self._seconds_per_request is None else self._seconds_per_request
        self._seconds_per_request = before + _PACE_SMOOTHING * (newest - before)
