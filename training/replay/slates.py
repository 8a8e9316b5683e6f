"""Served lists with what followed them, as `bft-serve export-slates` writes them (service.md, "Slates for replay").

D width · K listed items · E events
"""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from training.tables import DataError

PATTERN = "slates-*.jsonl.gz"

PolicyName = Literal["mean", "lcb", "ucb", "thompson"]


class _Part(BaseModel):
    """A part of a line; what replay does not need is passed over."""

    model_config = ConfigDict(extra="ignore", frozen=True, val_json_bytes="base64")


class Policy(_Part):
    """What ordered a list."""

    name: PolicyName
    kappa: float | None
    """Of `lcb` and `ucb`."""
    seed: int | None
    """Of `thompson`."""


class _Asked(_Part):
    layout: Literal[4]
    recommendation_id: str
    subject: tuple[str, str] | None
    policy: Policy
    exclude_item_ids: list[str]
    allow_item_ids: list[str] | None


class _Events(_Part):
    count: int
    items: list[int]
    weights: bytes
    timestamps: bytes


class _Basis(_Part):
    mean: bytes
    precision: bytes
    events: _Events
    seen: list[int]
    num_added: int


class _Page(_Part):
    made_ms: int
    model_version: str
    basis: _Basis | None
    item_ids: list[str]
    left_out: list[str]


class Outcome(_Part):
    """The event that settled a list."""

    item_id: str
    rank: int | None
    """Of the item, over all pages, from 1; None: it was not shown."""
    arrived_ms: int


class _Line(_Part):
    asked: _Asked
    pages: list[_Page]
    outcome: Outcome | None
    watched_ms: int

    @property
    def basis(self) -> _Basis:
        """Of the first page."""
        basis = self.pages[0].basis if self.pages else None
        if basis is None:
            raise ValueError("pages.0.basis is missing")
        return basis


@dataclass(frozen=True, eq=False)
class Events:
    """What a state is of, oldest first: `items` (E,) numbers of the logging model's catalogue, `weights` (E,),
    `timestamps` (E,) seconds or NaN; `count` of all events, those that were no longer kept included."""

    count: int
    items: np.ndarray
    weights: np.ndarray
    timestamps: np.ndarray


@dataclass(frozen=True, eq=False)
class LoggedSlate:
    """The first page of a served list: how it was made, and what followed."""

    recommendation_id: str
    subject: str
    """Whose; of a history that was told, the list alone."""
    policy: Policy
    made_ms: int
    watched_ms: int
    """How long an event could settle the list."""
    model_versions: frozenset[str]
    """Of all pages."""
    mean: np.ndarray
    """(D,) float32"""
    precision: np.ndarray
    """(D,) float32, > 0"""
    events: Events
    seen: np.ndarray
    """Numbers of the items that were kept out because the subject had had them."""
    num_added: int
    """Items added at run time that could be listed: no bundle has them."""
    exclude_item_ids: list[str]
    allow_item_ids: list[str] | None
    """The only items that could be listed; None: all."""
    item_ids: list[str]
    """(K,) what was shown, best first."""
    left_out: list[str]
    """What `min_confidence` took out from among them."""
    outcome: Outcome | None
    """None: no event settled the list."""

    def hit(self, within_ms: int) -> str | None:
        """The item of this page by which an event of that time made the list a hit; None: it was none."""
        outcome = self.outcome
        if outcome is None or outcome.rank is None or outcome.rank > len(self.item_ids):
            return None
        return outcome.item_id if outcome.arrived_ms - self.made_ms <= within_ms else None


def read_slates(path: Path) -> Iterator[LoggedSlate]:
    """The lists of a file, or of all files of a folder, the oldest file first; one at a time in memory.

    Raises:
        DataError: there are none, or a line is not what the export writes; names file, line and field.
    """
    files = sorted(path.glob(PATTERN)) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise DataError(f"{path}: no {PATTERN} there; write some with `bft-serve export-slates --out FOLDER`")
    for file in files:
        try:
            with gzip.open(file, "rb") as lines:
                for number, line in enumerate(lines, 1):
                    yield _slate(line, f"{file} line {number}")
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{file} is not whole ({error}); take it away, or copy it again") from error


def _slate(line: bytes, where: str) -> LoggedSlate:
    try:
        read = _Line.model_validate_json(line)
        asked, basis, first = read.asked, read.basis, read.pages[0]
    except ValueError as error:
        problem = str(error)
        if isinstance(error, ValidationError):
            found = error.errors()[0]
            problem = f"field {'.'.join(map(str, found['loc']))}: {found['msg']}"
        raise DataError(
            f"{where}, {problem}; accepted is what `bft-serve export-slates` of this version writes"
        ) from error
    return LoggedSlate(
        recommendation_id=asked.recommendation_id,
        subject=asked.recommendation_id if asked.subject is None else " ".join(asked.subject),
        policy=asked.policy,
        made_ms=first.made_ms,
        watched_ms=read.watched_ms,
        model_versions=frozenset(page.model_version for page in read.pages),
        mean=np.frombuffer(basis.mean, "<f4"),
        precision=np.frombuffer(basis.precision, "<f4"),
        events=Events(
            basis.events.count,
            np.array(basis.events.items, np.int64),
            np.frombuffer(basis.events.weights, "<f4"),
            np.frombuffer(basis.events.timestamps, "<f8"),
        ),
        seen=np.array(basis.seen, np.int64),
        num_added=basis.num_added,
        exclude_item_ids=asked.exclude_item_ids,
        allow_item_ids=asked.allow_item_ids,
        item_ids=first.item_ids,
        left_out=first.left_out,
        outcome=read.outcome,
    )
