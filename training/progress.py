"""How long work shows its progress: a bar on a terminal, JSON lines elsewhere. Always on standard error."""

import json
import sys
import time
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Reporter(Protocol):
    """Receives what a run is doing. A context manager: leaving it ends the display."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def stage(self, message: str) -> None:
        """A new stage began, or a fact became known."""

    def step(self, done: int, total: int, loss: float) -> None:
        """`done` of an epoch's `total` steps are taken; mean loss so far."""

    def epoch(self, row: dict[str, float]) -> None:
        """An epoch ended with this row of the learning curve; of a refit without validation figures."""


class TerminalReporter:
    """A bar for the epoch under way, a line for everything that ended."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stage(self, message: str) -> None:
        self._progress.console.print(message, highlight=False, markup=False)

    def step(self, done: int, total: int, loss: float) -> None:
        if not self._progress.tasks:
            self._progress.add_task("this epoch", total=total, loss=loss)
        self._progress.update(self._progress.task_ids[0], completed=done, total=total, loss=loss)

    def epoch(self, row: dict[str, float]) -> None:
        if self._progress.tasks:
            self._progress.remove_task(self._progress.task_ids[0])
        judged = ""
        if "val_hr@10" in row:
            judged = f"   validation HR@10 {row['val_hr@10']:.4f}   NDCG@10 {row['val_ndcg@10']:.4f}"
        self.stage(f"epoch {int(row['epoch']):3d}   loss {row['loss']:.4f}{judged}   {row['seconds']:.0f} s")


class JsonReporter:
    """One JSON object a line: {"time", "kind": "stage" | "epoch", …}. Steps are not printed one by one.

    Args:
        **always: further fields of every line, which tell several reporters on one screen apart.
    """

    def __init__(self, **always: Any) -> None:
        self.always = always

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def stage(self, message: str) -> None:
        self._print(kind="stage", message=message)

    def step(self, done: int, total: int, loss: float) -> None:
        pass

    def epoch(self, row: dict[str, float]) -> None:
        self._print(kind="epoch", **row)

    def _print(self, **fields: Any) -> None:
        print(json.dumps({"time": round(time.time(), 3), **self.always, **fields}), file=sys.stderr, flush=True)


class SilentReporter(JsonReporter):
    """Says nothing: of several processes one reports."""

    def _print(self, **fields: Any) -> None:
        pass


def reporter(silent: bool = False) -> Reporter:
    """A bar where standard error is a terminal, JSON lines otherwise; or nothing."""
    if silent:
        return SilentReporter()
    console = Console(stderr=True)
    return TerminalReporter(console) if console.is_terminal else JsonReporter()
