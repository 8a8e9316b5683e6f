"""What the runners of benchmarks/rivals.py share: a job, a clock, a result. It needs the standard library alone.

The job, one JSON object in a file:
    `split`: a JSON file with, for each user, `users`, the id; `train`, the item ids in time order; `validation` and
        `test`, the item ids of the two events that follow;
    `data`: the log that the split was made of, for our own runner;
    `result`: the file to write;
    `width`, `layers`, `heads`, `max_len`, `dropout`, `learning_rate`, `seed`, `threads`; the feed-forward part is as
        wide as the model, and the loss is the full softmax, in every library;
    `batch_size`: users, or rows where the library makes several of a user;
    `epochs`; `patience`, epochs without a better validation before training stops, or null: no choice by validation;
    `list_length`: of the recommendations, or null: none are asked for.

The result:
    `epoch_seconds`, `epoch_cpu_seconds`: of each epoch's training, validation not counted;
    `peak_mib`: the process's largest resident set by the end of the first epoch's training;
    `targets`: of one epoch, as the library makes them;
    `best_epoch`: from 1, or null;
    `lists`: user id → item ids, best first, or null.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any


class Clock:
    """Seconds of each epoch's training, and the memory that the first of them took."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._cpu_seconds: list[float] = []
        self._peak_mib = 0.0

    def begin(self) -> None:
        self._begun, self._cpu_begun = time.perf_counter(), time.process_time()

    def end(self) -> None:
        self._seconds.append(time.perf_counter() - self._begun)
        self._cpu_seconds.append(time.process_time() - self._cpu_begun)
        if len(self._seconds) == 1:
            self._peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def result(self) -> dict[str, Any]:
        """Its part of the runner's result."""
        return {
            "epoch_seconds": self._seconds,
            "epoch_cpu_seconds": self._cpu_seconds,
            "peak_mib": self._peak_mib,
        }


def read_job() -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The job that the command line names, and its split."""
    job = json.loads(Path(sys.argv[1]).read_text())
    return job, json.loads(Path(job["split"]).read_text())


def write_result(job: dict[str, Any], result: dict[str, Any]) -> None:
    Path(job["result"]).write_text(json.dumps(result))
