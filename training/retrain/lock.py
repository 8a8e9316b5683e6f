"""The right to run: one process at a time changes a job's folder."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class JobLocked(Exception):
    """Another run is under way."""


@contextmanager
def locked(work: Path) -> Iterator[None]:
    """The right to run. The kernel takes it from a run that dies, so that none holds it for ever.

    Args:
        work: the job's folder, made if it is not there.

    Raises:
        JobLocked: another run has it.
    """
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobLocked(f"{work}: another run of the job is under way; it holds {work / 'lock'}") from None
        yield
