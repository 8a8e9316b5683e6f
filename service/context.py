"""What travels with one request: its id, its deadline, whether somebody waits, where the time went."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from service.errors import DeadlinePassed


@dataclass(slots=True)
class RequestContext:
    """Born in the outermost middleware, handed down to whatever works for the request.

    Args:
        request_id: as echoed in X-Request-Id.
        deadline: on the clock of `time.monotonic`, in seconds.
    """

    request_id: str
    deadline: float
    client_left: bool = False
    subject: str | None = None
    """Keyed hash of the user's or session's id; the only form in which an id reaches a log."""
    timings_s: dict[str, float] = field(default_factory=dict)
    """Stage → seconds, for Server-Timing: state, queue, infer, rank."""

    def remaining_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.deadline - time.monotonic()

    def check_deadline(self) -> None:
        """Raises DeadlinePassed after the deadline."""
        if self.remaining_s() <= 0:
            raise DeadlinePassed("the request's deadline passed while it was worked on")

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add_time(stage, time.monotonic() - start)

    def add_time(self, stage: str, seconds: float) -> None:
        """Add to a stage's time."""
        self.timings_s[stage] = self.timings_s.get(stage, 0.0) + seconds


def unhurried(request_id: str, seconds: float) -> RequestContext:
    """The context of work that no caller asked for, such as a readiness probe."""
    return RequestContext(request_id, time.monotonic() + seconds)
