"""The drift watch: whether lists held what their confidence promised (docs/service.md, "Drift").

A slate is settled by the first event that names it and says something of it: a hit when the item had been shown, a
miss when not. All of this happens behind the answer to the event, which it neither delays nor fails.
"""

import asyncio
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from service.background import Saves
from service.errors import RecommendationNotFound
from service.slates import RECOMMENDATION_ID, Outcome, Slate, Slates
from service.states.interface import StateError, Subject
from service.telemetry import Metrics

MAX_SAVES = 64
MAX_SAVE_BYTES = 2**22
"""Requests whose events wait to settle slates, and what the ids in these take together."""
MAX_PARALLEL_SLATES = 16
"""Slates that are settled at a time."""
WINDOW = 10_000
"""Settled slates of a model that are remembered, the latest."""
MAX_MODELS = 8
"""Models that are remembered, those whose slates were settled last."""
MIN_SETTLED = 100
"""Settled slates from which on the drift is told."""
Z_95 = 1.959963984540054
"""97.5 % quantile of the standard normal distribution."""


class Unsettled(StrEnum):
    """Why an event that names a recommendation settled nothing."""

    malformed = "malformed"
    """No recommendation has such an id."""
    not_found = "not_found"
    """It expired, was never kept, or its subject was erased or merged."""
    foreign = "foreign"
    """It was made for another subject."""
    weightless = "weightless"
    """To the model an event of weight 0 is none."""
    repeated_item = "repeated_item"
    """The subject had had the item; the confidences are of the next one that it has not."""
    mixed_models = "mixed_models"
    """Several models made its pages: the list confidence is of none."""
    settled_before = "settled_before"
    """Another event came first."""
    unavailable = "unavailable"
    """The store could not say."""
    dropped = "dropped"
    """Too many waited."""


@dataclass(frozen=True, slots=True)
class Following:
    """A stored event that names a recommendation."""

    recommendation_id: str
    """As it was sent."""
    subject: Subject
    item_id: str
    weight: float
    is_repeated: bool
    """The subject had had the item before."""
    arrived_ms: int
    """Since 1970, by the clock of the process that took it: the event's own time is the caller's."""


class ModelKey(NamedTuple):
    """Whose confidences."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class Settlement:
    """What was promised of a slate, and what came."""

    model: ModelKey
    list_confidence: float
    outcome: Outcome

    @property
    def is_hit(self) -> bool:
        """Whether the item had been shown."""
        return self.outcome.rank is not None


def settlement(slate: Slate, event: Following) -> Settlement | Unsettled:
    """What an event says of the slate that it names, or why it says nothing."""
    asked, pages = slate.asked, slate.pages_at(event.arrived_ms)
    models = {ModelKey(page.model_name, page.model_version) for page in pages}
    if asked.subject not in (None, event.subject):
        return Unsettled.foreign
    if event.weight == 0:
        return Unsettled.weightless
    if pages[0].event == "next_new_item" and (event.is_repeated or slate.was_told(event.item_id)):
        return Unsettled.repeated_item
    if len(models) > 1:
        return Unsettled.mixed_models
    shown = [item_id for page in pages for item_id in page.item_ids]
    rank = shown.index(event.item_id) + 1 if event.item_id in shown else None
    return Settlement(
        model=models.pop(),
        list_confidence=min(1.0, sum(confidence for page in pages for confidence in page.confidences)),
        outcome=Outcome(item_id=event.item_id, rank=rank, arrived_ms=event.arrived_ms),
    )


@dataclass(frozen=True, slots=True)
class Drift:
    """Hits against promises, over settled slates. The figures are None when there are fewer than MIN_SETTLED."""

    settled: int
    mean_list_confidence: float | None = None
    hit_rate: float | None = None
    difference: float | None = None
    """`hit_rate` − `mean_list_confidence`."""
    interval: tuple[float, float] | None = None
    """95 %, of `difference`."""


def drift(settled: int, hits: int, promised: float) -> Drift:
    """The drift of settled slates.

    The mean list confidence is known exactly; what varies is the hits. Their rate has a Wilson interval, which keeps
    its level when hits are rare, where a normal one about the difference shrinks to nothing. It takes the slates for
    equally likely to be hit, which makes it a little wide, and for independent of each other.

    Args:
        settled: slates.
        hits: of them.
        promised: the sum of their list confidences.
    """
    if settled < MIN_SETTLED:
        return Drift(settled)
    rate, mean = hits / settled, promised / settled
    shrinkage = 1 + Z_95**2 / settled
    centre = (rate + Z_95**2 / (2 * settled)) / shrinkage
    half = Z_95 * math.sqrt(rate * (1 - rate) / settled + Z_95**2 / (4 * settled**2)) / shrinkage
    return Drift(settled, mean, rate, rate - mean, (centre - half - mean, centre + half - mean))


class _Window:
    """The slates of one model that were settled last."""

    def __init__(self) -> None:
        self._settled: deque[Settlement] = deque(maxlen=WINDOW)
        self._hits = 0
        self._promised = 0.0

    def add(self, settled: Settlement) -> None:
        if len(self._settled) == WINDOW:
            oldest = self._settled[0]
            self._hits -= oldest.is_hit
            self._promised -= oldest.list_confidence
        self._settled.append(settled)
        self._hits += settled.is_hit
        self._promised += settled.list_confidence

    def drift(self) -> Drift:
        return drift(len(self._settled), self._hits, self._promised)


class DriftWatch:
    """Settles slates. Shared by all models: an event of one may follow a list of another.

    Args:
        slates: the kept ones.
        metrics: counts settled slates, hits and promises, and the events that settled nothing.
    """

    def __init__(self, slates: Slates, metrics: Metrics) -> None:
        self._slates = slates
        self._metrics = metrics
        self._saves = Saves("settlement", MAX_SAVES, MAX_SAVE_BYTES, metrics)
        self._gate = asyncio.Semaphore(MAX_PARALLEL_SLATES)
        self._windows: OrderedDict[ModelKey, _Window] = OrderedDict()

    def expect(self, model: ModelKey) -> None:
        """Show a model's counters from now on, at 0: Prometheus sees no increase in a series that begins above."""
        self._window(model)

    def follow(self, events: Sequence[Following]) -> None:
        """Settle what these events of one request say something of, in the background.

        Args:
            events: in the order in which they were stored.
        """
        of_slate: defaultdict[str, list[Following]] = defaultdict(list)
        for event in events:
            if RECOMMENDATION_ID.fullmatch(event.recommendation_id):
                of_slate[event.recommendation_id].append(event)
            else:
                self._count(Unsettled.malformed)
        if not of_slate:
            return
        size = sum(len(event.recommendation_id) + len(event.subject.id) + len(event.item_id) for event in events)
        if self._saves.start(lambda: self._settle_all(of_slate), size) is None:
            self._count(Unsettled.dropped, sum(map(len, of_slate.values())))

    def drift(self, model: ModelKey) -> Drift:
        """Of the slates of a model that this process settled last."""
        window = self._windows.get(model)
        return Drift(0) if window is None else window.drift()

    async def finish(self) -> None:
        """Return when nothing is under way."""
        await self._saves.finish()

    async def _settle_all(self, of_slate: Mapping[str, Sequence[Following]]) -> None:
        await asyncio.gather(*(self._settle(slate_id, events) for slate_id, events in of_slate.items()))

    async def _settle(self, slate_id: str, events: Sequence[Following]) -> None:
        """Settle one slate by the first of its events that says something of it."""
        async with self._gate:
            left = len(events)
            try:
                slate = await self._slates.load(slate_id)
                found = [settlement(slate, event) for event in events]
                for reason in found:
                    if isinstance(reason, Unsettled):
                        self._count(reason)
                settling = [each for each in found if isinstance(each, Settlement)]
                left = len(settling)
                if settling and await self._slates.settle(slate, settling[0].outcome):
                    self._note(settling[0])
                    left -= 1
                self._count(Unsettled.settled_before, left)
            except RecommendationNotFound:
                self._count(Unsettled.not_found, left)
            except StateError:
                self._count(Unsettled.unavailable, left)

    def _note(self, settled: Settlement) -> None:
        window, metrics = self._window(settled.model), self._metrics
        window.add(settled)
        metrics.slates_settled.labels(*settled.model).inc()
        metrics.slates_hit.labels(*settled.model).inc(settled.is_hit)
        metrics.slates_confidence.labels(*settled.model).inc(settled.list_confidence)
        if (difference := window.drift().difference) is not None:
            metrics.drift.labels(*settled.model).set(difference)

    def _window(self, model: ModelKey) -> _Window:
        """A model's window; with too many, the one that was asked for longest ago goes, and its series with it."""
        counters = (self._metrics.slates_settled, self._metrics.slates_hit, self._metrics.slates_confidence)
        if model not in self._windows:
            self._windows[model] = _Window()
            for counter in counters:
                counter.labels(*model)
        self._windows.move_to_end(model)
        if len(self._windows) > MAX_MODELS:
            oldest, _ = self._windows.popitem(last=False)
            for series in (*counters, self._metrics.drift):
                with suppress(KeyError):
                    series.remove(*oldest)
        return self._windows[model]

    def _count(self, reason: Unsettled, times: int = 1) -> None:
        if times:
            self._metrics.slates_unsettled.labels(reason).inc(times)
