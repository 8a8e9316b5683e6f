"""Slates: what was asked and what was shown, kept so that a further page repeats nothing (service.md, `…:r:…`).

A slate is what was asked, which never changes, and the pages in the order they were given out. A page is added only to
the slate that it was made from: of two calls at the same time one makes its page anew.
"""

import asyncio
import logging
import re
import secrets
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from model.bundle import Event
from service.background import Saves
from service.candidates import Candidates
from service.errors import RecommendationNotFound
from service.filtered import State
from service.ranking import History
from service.schemas import Policy
from service.states.interface import Store, Subject
from service.states.scripts import NUM_BUCKETS, bucket
from service.telemetry import Metrics

logger = logging.getLogger(__name__)

MAX_GIVEN = 5_000
"""Items in all the pages of a slate; then it is at its end, as if the catalogue were."""
MAX_PAGES = 500
"""Of a slate; then it is at its end too. Each may hold a state and a seen set of its own."""
MAX_SLATE_BYTES = 2**18
"""Of what was asked and the first page; a larger slate is not kept."""
MAX_SAVES = 256
MAX_SAVE_BYTES = 2**22
"""Slates on their way to the store at a time, and what they take together."""

_BUCKET = "b(?:[01][0-9]{2}|2[0-4][0-9]|25[0-5])"
RECOMMENDATION_ID = re.compile(_BUCKET + "-[0-9a-f]{32}")


class _Document(BaseModel):
    """Base of what is stored, as JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_bytes="base64", val_json_bytes="base64")


class ToldEvent(_Document):
    """One event of a history that was told."""

    item_id: str
    timestamp_ms: int | None
    weight: float


class Told(_Document):
    """A history that was told, cut to the window."""

    events: tuple[ToldEvent, ...]
    """The last ones with positive weight, oldest first."""
    count: int
    """Of all events with positive weight."""
    other_seen: tuple[str, ...]
    """Ids of the items that only the events before these had, or such of weight 0."""


class Asked(_Document):
    """What every page of a slate is made from. Exactly one of `subject` and `told` is given."""

    layout: Literal[4] = 4
    recommendation_id: str
    subject: Subject | None
    told: Told | None
    policy: Policy
    """With its seed, of which all pages have the same draw."""
    exclude_seen: bool
    exclude_item_ids: tuple[str, ...]
    allow_item_ids: tuple[str, ...] | None
    min_confidence: float | None


class Events(_Document):
    """The events K that a page's state is of, oldest first: those that the subject's record, or the request, had."""

    count: int
    """Of all events of the subject, those that were not there any more included."""
    items: tuple[int, ...]
    """(K,) numbers in the catalogue of the page's model."""
    weights: bytes
    """float32, little-endian, (K,)."""
    timestamps: bytes
    """float64, little-endian, (K,) seconds since 1970; NaN where an event has none."""


class Basis(_Document):
    """What a page was ranked from. With the slate's policy and filters and the pages before, this makes the page again,
    or what another seed, policy or model would have made of it (service.md, "Policies")."""

    mean: bytes
    """float32, little-endian, (D,)."""
    precision: bytes
    """float32, little-endian, (D,)."""
    events: Events
    seen: tuple[int, ...]
    """Numbers, in the catalogue of the page's model, of the items that `exclude_seen` kept out."""
    seen_added: tuple[str, ...]
    """Ids of the items added at run time that it kept out: these have no lasting number."""
    num_added: int
    """Items added at run time that could be listed."""
    items_version: int
    """Of the items added at run time that could be listed."""

    @classmethod
    def of(cls, state: State, history: History, seen: npt.NDArray[np.int64], candidates: Candidates) -> "Basis":
        """The basis of a state and the history that it is of, to the bit, and of the candidates that were kept out."""
        mean, precision, weights = (
            values.astype("<f4").tobytes() for values in (state.mean, state.precision, history.weights)
        )
        events = Events(
            count=history.count,
            items=tuple(history.items.tolist()),
            weights=weights,
            timestamps=history.timestamps.astype("<f8").tobytes(),
        )
        is_added = candidates.is_added(seen)
        return cls(
            mean=mean,
            precision=precision,
            events=events,
            seen=tuple(seen[~is_added].tolist()),
            seen_added=tuple(map(candidates.item_id, seen[is_added].tolist())),
            num_added=len(candidates.placed),
            items_version=candidates.source.version,
        )

    @property
    def state(self) -> State:
        """The state that was ranked from, without its cache."""
        mean, precision = (np.frombuffer(values, "<f4").astype(np.float32) for values in (self.mean, self.precision))
        return State(mean, precision)


class Page(_Document):
    """One page as it was given out: `item_ids`, `scores`, `stds` and `confidences` are columns, best item first."""

    made_ms: int
    """When the subject was read for it, since 1970."""
    model_name: str
    model_version: str
    basis: Basis | None
    """None: that of the page before."""
    event: Event
    """What the confidences are probabilities of."""
    item_ids: tuple[str, ...]
    scores: tuple[float, ...]
    stds: tuple[float, ...]
    confidences: tuple[float, ...]
    left_out: tuple[str, ...]
    """Ids of the items that `min_confidence` kept out; later pages go on after them."""


class Outcome(_Document):
    """The event that settled a slate (service.md, "Drift")."""

    item_id: str
    rank: int | None
    """The item's place in the pages that had been given out, from 1; None: it was in none."""
    arrived_ms: int
    """Since 1970."""


@dataclass(frozen=True, slots=True)
class Slate:
    """What was asked, and the pages so far."""

    asked: Asked
    pages: tuple[Page, ...]

    @property
    def num_shown(self) -> int:
        """Items of all pages."""
        return sum(len(page.item_ids) for page in self.pages)

    @property
    def basis(self) -> Basis | None:
        """Of the last page."""
        return next((page.basis for page in reversed(self.pages) if page.basis is not None), None)

    @property
    def passed(self) -> list[str]:
        """Ids of all items that no later page has."""
        return [item_id for page in self.pages for item_id in (*page.item_ids, *page.left_out)]

    def was_told(self, item_id: str) -> bool:
        """Whether an item is in the history that was told instead of a subject."""
        told = self.asked.told
        return told is not None and (
            item_id in told.other_seen or any(item_id == event.item_id for event in told.events)
        )

    def pages_at(self, now_ms: int) -> tuple[Page, ...]:
        """The pages given out by a time since 1970; always the first, since the clocks of replicas differ."""
        return self.pages[:1] + tuple(page for page in self.pages[1:] if page.made_ms <= now_ms)


def new_recommendation_id(subject: Subject | None) -> str:
    """An id that nobody can guess. It begins with its bucket, so that the slate lies beside the subject's keys."""
    name = f"b{secrets.randbelow(NUM_BUCKETS):03d}" if subject is None else bucket(subject.id)
    return f"{name}-{secrets.token_hex(16)}"


def check_recommendation_id(value: str) -> str:
    """An id of a recommendation, or ValueError with the accepted form."""
    if not RECOMMENDATION_ID.fullmatch(value):
        raise ValueError("must be a recommendation_id of an answer: b000 to b255, a hyphen, 32 hexadecimal digits")
    return value


class Slates:
    """The kept slates. Shared by all models: a slate of one is continued by another.

    Args:
        store: where they are.
        metrics: counts what is kept.
    """

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._saves = Saves("slate", MAX_SAVES, MAX_SAVE_BYTES, metrics)
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def save(self, asked: Asked, first: Page) -> None:
        """Keep a slate, in the background: it neither delays nor fails the answer."""
        slate_id, subject = asked.recommendation_id, asked.subject
        packed, page = _pack(asked), _pack(first)
        size = len(packed) + len(page)
        if size > MAX_SLATE_BYTES:
            logger.info("a slate of %d bytes was not kept; the bound is %d", size, MAX_SLATE_BYTES)
            return
        task = self._saves.start(lambda: self._store.save_slate(slate_id, subject, first.made_ms, packed, page), size)
        if task is not None:
            self._under_way[slate_id] = task
            task.add_done_callback(lambda _: self._under_way.pop(slate_id))

    async def load(self, recommendation_id: str) -> Slate:
        """A slate as it is now.

        Raises:
            RecommendationNotFound: it expired, was never kept, or its subject was erased.
            StateError: the store cannot say.
        """
        if (task := self._under_way.get(recommendation_id)) is not None:
            await asyncio.wait([task])
        parts = await self._store.load_slate(recommendation_id)
        if parts is None:
            raise RecommendationNotFound("nothing is kept of this recommendation")
        try:
            slate = slate_of(parts)
        except (ValidationError, zlib.error) as error:
            # Not pydantic's message: it quotes the value.
            logger.warning("a stored slate cannot be read: %s", type(error).__name__)
            raise RecommendationNotFound("this recommendation was kept by another version of the service") from error
        if slate.asked.recommendation_id != recommendation_id:
            raise RecommendationNotFound("nothing is kept of this recommendation")
        return slate

    async def claim(self, slate: Slate, page: Page) -> bool:
        """Give out a page that was made from this slate; False when the slate has changed since.

        Raises:
            StateError: the store cannot say. The page may have been given out, and then nobody gets its items.
        """
        if page.basis == slate.basis:
            page = page.model_copy(update={"basis": None})
        return await self._store.append_page(slate.asked.recommendation_id, len(slate.pages), _pack(page))

    async def settle(self, slate: Slate, outcome: Outcome) -> bool:
        """Note what followed a slate; False when it was known before, or the slate is gone.

        Raises:
            StateError: the store cannot say. It may be noted.
        """
        return await self._store.settle_slate(slate.asked.recommendation_id, _pack(outcome))

    async def finish_saves(self) -> None:
        """Return when no save is under way."""
        await self._saves.finish()


def _pack(document: _Document) -> bytes:
    # The fastest level: item ids and numbers shrink to a third, and stronger ones gain little more.
    return zlib.compress(document.model_dump_json().encode(), 1)


def _unpack(packed: bytes) -> bytes:
    return zlib.decompress(packed)


def slate_of(parts: Sequence[bytes]) -> Slate:
    """A slate as the store has it: what was asked, then the pages.

    Raises:
        ValidationError, zlib.error: another version of the service kept it.
    """
    asked, *pages = map(_unpack, parts)
    return Slate(Asked.model_validate_json(asked), tuple(map(Page.model_validate_json, pages)))


def outcome_of(packed: bytes) -> Outcome:
    """What followed a slate, as the store has it. Raises as `slate_of`."""
    return Outcome.model_validate_json(_unpack(packed))
