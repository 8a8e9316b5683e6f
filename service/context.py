"""What travels with one request: its id, its deadline, whether somebody waits, where the time went."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from service.errors import DeadlinePassed

Stage = Literal["limit", "state", "queue", "infer_encoder", "infer_step", "infer_ranker", "infer_explainer", "rank"]
"""Where a request spends its time: its key's quota, the state store, the queue, a graph, making the list."""

STAGES: tuple[Stage, ...] = get_args(Stage)


def infer_stage(graph: str) -> Stage:
    """The stage of a bundle's graph, also where it runs on a caller's own inputs, as `raw:<graph>`."""
    return cast("Stage", f"infer_{graph.removeprefix('raw:')}")


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
    key_name: str | None = None
    """Of the caller's API key."""
    model_version: str | None = None
    """Of the model that answered."""
    traceparent: str | None = None
    """Of the caller's span, as W3C Trace Context has it; None when there is none, or it is not valid."""
    timings_s: dict[Stage, float] = field(default_factory=dict)
    """Stage → seconds."""
    failed_stage: Stage | None = None
    """Where the first error came up."""
    problem: str | None = None
    """The type of the problem that was answered."""

    def remaining_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.deadline - time.monotonic()

    def check_deadline(self) -> None:
        """Raises DeadlinePassed after the deadline."""
        if self.remaining_s() <= 0:
            raise DeadlinePassed("the request's deadline passed while it was worked on")

    @contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        """Add the time of the block to a stage; an error that leaves the block belongs to it."""
        start = time.monotonic()
        try:
            yield
        except BaseException:  # a cancelled wait too: the deadline passed here
            self.failed_in(stage)
            raise
        finally:
            self.add_time(stage, time.monotonic() - start)

    def add_time(self, stage: Stage, seconds: float) -> None:
        """Add to a stage's time."""
        self.timings_s[stage] = self.timings_s.get(stage, 0.0) + seconds

    def failed_in(self, stage: Stage) -> None:
        """Note the stage of an error; the first one stays."""
        if self.failed_stage is None:
            self.failed_stage = stage

    def server_timing(self, total_s: float) -> str:
        """The header Server-Timing, in milliseconds: limit, state, queue, infer, rank as far as met, and total."""
        shown: dict[str, float] = {}
        for stage, seconds in self.timings_s.items():
            name = "infer" if stage.startswith("infer_") else stage
            shown[name] = shown.get(name, 0.0) + seconds
        shown["total"] = total_s
        return ", ".join(f"{name};dur={seconds * 1000:.2f}" for name, seconds in shown.items())


def unhurried(request_id: str, seconds: float) -> RequestContext:
    """The context of work that no caller asked for, such as a readiness probe."""
    return RequestContext(request_id, time.monotonic() + seconds)
