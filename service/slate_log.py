"""Kept slates, with what followed them, taken to files before they expire (service.md, "Slates for replay").

A file has the slates of a span of time, by when they were made, and says which in its name. The next run begins where
the newest file ends: each slate is in one file, a run that was interrupted is made up for by the next one, and nothing
is marked in the store.
"""

import fcntl
import gzip
import json
import os
import re
import tempfile
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from model.bundle import fsync
from service.slates import outcome_of, slate_of
from service.states.interface import StoreLimits, Subject
from service.states.scanning import KeptSlate

AFTER_S = 900
"""How long a slate is left to be settled, unless asked for otherwise."""
SESSION_SLATES_S = StoreLimits(max_len=1).ttl_of_slates_s(Subject("session", ""))
"""The shortest life of a slate."""
_FILE = re.compile(r"slates-(\d{15})-(\d{15})\.jsonl\.gz")


class ExportError(Exception):
    """The slates cannot be written; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Export:
    """What one run wrote."""

    file: Path
    begin_ms: int
    """Slates made from then on are in the file; since 1970."""
    end_ms: int
    """Those made from then on are left for the next run."""
    slates: int
    settled: int
    """Of them."""
    unreadable: int
    """Slates that another version of the service kept; they are in no file."""
    perhaps_missed_s: int
    """Of the file's span, from its beginning: how much had been left so long that slates of sessions have expired."""


async def export(slates: AsyncIterator[KeptSlate], folder: Path, now_ms: int, after_s: int) -> Export:
    """Write the slates that were made since the newest file, and at least `after_s` ago, to a file of their own.

    One JSON object a line: `asked` and `pages` as they are kept, `outcome` or null, and `watched_ms`, how long an event
    could settle the slate. Memory holds a few hundred slates, and 16 bytes of the name of each.

    Args:
        slates: of the store.
        folder: of the files; made when it is missing.
        now_ms: since 1970.
        after_s: how long a slate is left to be settled.

    Raises:
        ExportError: the folder cannot be written, or another run is writing there.
        StateUnavailable: the store did not answer. No file is left.
    """
    with _locked(folder):
        begin_ms, end_ms = end_of_newest(folder), max(0, now_ms - after_s * 1000)
        if end_ms < begin_ms:
            raise ExportError(f"{folder}: the newest file ends in the future; set the clock, or take the file away")
        counts = {"slates": 0, "settled": 0, "unreadable": 0}
        file = folder / f"slates-{begin_ms:015d}-{end_ms:015d}.jsonl.gz"
        with _whole(file) as lines:
            async for kept in slates:
                try:
                    slate, outcome = slate_of(kept.parts), kept.outcome and outcome_of(kept.outcome)
                except (ValidationError, zlib.error):
                    counts["unreadable"] += 1
                    continue
                made_ms = slate.pages[0].made_ms
                if begin_ms <= made_ms < end_ms:
                    line = {
                        "asked": slate.asked.model_dump(mode="json"),
                        "pages": [page.model_dump(mode="json") for page in slate.pages],
                        "outcome": outcome and outcome.model_dump(mode="json"),
                        "watched_ms": now_ms - made_ms,
                    }
                    lines.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
                    counts["slates"] += 1
                    counts["settled"] += outcome is not None
        unread_s = (now_ms - begin_ms) // 1000 if begin_ms else 0
        return Export(file, begin_ms, end_ms, **counts, perhaps_missed_s=max(0, unread_s - SESSION_SLATES_S))


def end_of_newest(folder: Path) -> int:
    """Where the newest file of a folder ends, in ms since 1970; 0 without one."""
    return max((int(found[2]) for path in folder.iterdir() if (found := _FILE.fullmatch(path.name))), default=0)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder for one run alone. The kernel lets go of it when a run dies."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    except BlockingIOError as error:
        raise ExportError(f"{folder}: another run is writing there; let it end, or run this less often") from error
    except OSError as error:
        raise ExportError(f"{folder}: cannot be written ({error.strerror}); free space, or choose another") from error


@contextmanager
def _whole(path: Path) -> Iterator[gzip.GzipFile]:
    """A file that is there whole, on the disk, or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".slates-")
    try:
        with os.fdopen(handle, "wb") as file:
            with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as lines:
                yield lines
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    fsync(path.parent)
