"""The service's one main act: from a subject to a ranked list with confidences."""

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from model.bundle import STEP, Bundle
from model.config import UNK, UNKNOWN_BASE
from service import ranking
from service.context import RequestContext
from service.engine import EncoderRow, Numbers, RankerRow, Ranking, StepRow
from service.filtered import State
from service.ranking import NO_HISTORY, Entry, History
from service.schemas import (
    CalibrationInfo,
    DegradedReason,
    HistoryEvent,
    ModelName,
    RecommendationRequest,
    RecommendationResponse,
    RecommendedItem,
)
from service.states.interface import (
    CatalogMismatch,
    EncodedState,
    StateError,
    StateUnavailable,
    Store,
    Subject,
    UserRecord,
)
from service.states.packing import stored_weight
from service.telemetry import IdHasher, Metrics

logger = logging.getLogger(__name__)

MAX_CACHED_IDS = 65_536
MAX_SAVES = 256
MAX_SAVE_BYTES = 2**24
"""States on their way to the store at a time, and what they take together; beyond it they are not kept, only computed
again."""

How = Literal["current", "folded", "encoded", "nobody"]
"""How the state behind an answer came about: it was kept and is of every event; it was kept and the missing events were
folded in; the history was encoded; it is that of a subject without events."""


class Inference(Protocol):
    """What the recommender asks of the engine."""

    async def encode(self, row: EncoderRow, request: RequestContext) -> State:
        """The state after a history."""
        ...

    async def step(self, row: StepRow, request: RequestContext) -> State:
        """The state after further events; of a causal model."""
        ...

    async def rank(self, row: RankerRow, request: RequestContext) -> Ranking:
        """The best items for a state."""
        ...


class Subjects:
    """Stored subjects, read in the served catalogue's numbers.

    Args:
        bundle: the served one.
        store: where the subjects are.
    """

    def __init__(self, bundle: Bundle, store: Store) -> None:
        self._bundle = bundle
        self._store = store
        # A number never changes its id, so what was read once holds for ever.
        self._ids: OrderedDict[int, str] = OrderedDict()
        self._saves: dict[asyncio.Task[None], int] = {}
        """Each with the bytes of its state."""

    async def load(self, subject: Subject) -> tuple[UserRecord | None, EncodedState | None]:
        """The record, and the served model's state of it or of its beginning; see `Loaded`."""
        loaded = await self._store.load(subject, self._bundle.manifest.version)
        if loaded.encoded is None or not self._fits(loaded.encoded.state):
            return loaded.record, None
        return loaded.record, loaded.encoded

    def _fits(self, state: State) -> bool:
        """Whether the served model's graphs can read a state. One that cannot be read would fail a whole batch."""
        model, cache = self._bundle.manifest.model, state.cache
        if cache is not None:
            num_layers, num_heads, _, head_width = cache.key.shape
            per_position = (model.num_layers, model.num_heads, model.width // model.num_heads)
            if STEP not in self._bundle.manifest.graphs or (num_layers, num_heads, head_width) != per_position:
                return False
        return state.mean.shape == (model.width,)

    async def history(self, record: UserRecord) -> History:
        """The record in this catalogue's numbers; asks the store once for ids it has not met before."""
        ids = await self.unknown_ids(np.concatenate([record.items, record.seen]))
        catalogue = self._bundle.items
        seen = ranking.translated(record.seen, len(catalogue), ids, catalogue)
        return History(
            count=record.count,
            items=ranking.translated(record.items, len(catalogue), ids, catalogue),
            weights=record.weights,
            timestamps=record.timestamps_ms / 1000,
            seen=np.unique(seen[seen != UNK]),
        )

    async def unknown_ids(self, numbers: Numbers) -> dict[int, str]:
        """The ids behind the numbers from UNKNOWN_BASE on."""
        wanted = np.unique(numbers[numbers >= UNKNOWN_BASE]).tolist()
        missing = [number for number in wanted if number not in self._ids]
        if missing:
            self._ids.update(await self._store.ids_for_unknown(missing))
        found = {number: self._ids[number] for number in wanted if number in self._ids}
        while len(self._ids) > MAX_CACHED_IDS:
            self._ids.popitem(last=False)
        return found

    def save(self, subject: Subject, record: UserRecord, state: State) -> None:
        """Keep a computed state, in the background: it neither delays nor fails the answer."""
        # Without any save under way one of any size may go, so that no user's state is never kept.
        if len(self._saves) >= MAX_SAVES or (self._saves and sum(self._saves.values()) + state.nbytes > MAX_SAVE_BYTES):
            return
        task = asyncio.create_task(self._save(subject, EncodedState(record.count, record.epoch, state)))
        self._saves[task] = state.nbytes
        task.add_done_callback(self._saves.pop)

    async def finish_saves(self) -> None:
        """Return when no save is under way."""
        await asyncio.gather(*self._saves)

    async def _save(self, subject: Subject, encoded: EncodedState) -> None:
        try:
            await self._store.save_state(subject, self._bundle.manifest.version, encoded)
        except StateError as error:
            logger.info("a state was not kept: %s", error)
        except Exception:
            logger.exception("a state was not kept")


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """What there is to recommend from."""

    history: History
    told: Sequence[HistoryEvent] = ()
    """The events of the request that were used."""
    record: UserRecord | None = None
    encoded: EncodedState | None = None
    """Of `record`, or of its beginning."""
    degraded: tuple[DegradedReason, ...] = ()


class Recommender:
    """Ties store, engine and bundle together.

    Args:
        bundle: the served model.
        subjects: the stored histories.
        engine: the graphs.
        nobody: the state of BOS alone, of a subject without events.
        metrics: counts where states come from, cold starts and degraded answers.
        hasher: turns ids into what logs may show.
    """

    def __init__(
        self,
        bundle: Bundle,
        subjects: Subjects,
        engine: Inference,
        nobody: State,
        metrics: Metrics,
        hasher: IdHasher,
    ) -> None:
        self._bundle = bundle
        self._subjects = subjects
        self._engine = engine
        self._metrics = metrics
        self._hasher = hasher
        self._nobody = nobody
        self._model = ModelName(name=bundle.manifest.name, version=bundle.manifest.version)
        self._calibration = _calibration_info(bundle)

    async def recommend(self, asked: RecommendationRequest, request: RequestContext) -> RecommendationResponse:
        """The list for one request. Raises what `Batcher.submit` does; never on account of the store."""
        with request.timed("state"):
            found = await self._find(asked, request)
        state = await self._state(asked, found, request)
        excluded = self._numbers(asked.exclude_item_ids)
        allowed = None if asked.allow_item_ids is None else self._numbers(asked.allow_item_ids)
        chosen = ranking.filters(found.history, self._bundle, asked.exclude_seen, excluded, allowed)
        ranked = await self._engine.rank(RankerRow(state, chosen.seen, chosen.blocked, asked.num_results), request)
        with request.timed("rank"):
            num_events, least = found.history.count, asked.min_confidence or 0.0
            listed = ranking.entries(ranked, self._bundle, chosen.seen, num_events, least)
            return self._answer(asked, found, listed)

    async def _find(self, asked: RecommendationRequest, request: RequestContext) -> _Found:
        subject = _subject(asked)
        if subject is None:
            told = asked.history or ()
            return _Found(told_history(told, self._bundle), told)
        request.subject = self._hasher(*subject)
        try:
            record, encoded = await self._subjects.load(subject)
            history = NO_HISTORY if record is None else await self._subjects.history(record)
            return _Found(history, (), record, encoded)
        except StateUnavailable:
            told = asked.fallback_history or ()
            return _Found(told_history(told, self._bundle), told, degraded=(DegradedReason.state_unavailable,))
        except CatalogMismatch as error:
            logger.warning("a stored history cannot be read: %s", error, extra={"subject": request.subject})
            return _Found(NO_HISTORY, degraded=(DegradedReason.catalog_mismatch,))

    async def _state(self, asked: RecommendationRequest, found: _Found, request: RequestContext) -> State:
        how, state = await self._how_and_state(found.history, found.encoded, request)
        self._metrics.states.labels(how).inc()
        subject = _subject(asked)
        if how in ("folded", "encoded") and subject is not None and found.record is not None:
            self._subjects.save(subject, found.record, state)
        return state

    async def _how_and_state(
        self, history: History, encoded: EncodedState | None, request: RequestContext
    ) -> tuple[How, State]:
        if history.count == 0:
            return "nobody", self._nobody
        if encoded is not None and encoded.count == history.count:
            return "current", encoded.state
        row = ranking.encoder_row(history, self._bundle.manifest.model.max_len)
        step = None
        if encoded is not None:
            step = ranking.step_row(row, history.count - encoded.count, encoded.state.cache)
        if step is not None:
            return "folded", await self._engine.step(step, request)
        return "encoded", await self._engine.encode(row, request)

    def _numbers(self, item_ids: Iterable[str]) -> list[int]:
        numbers = (self._bundle.items.number(item_id) for item_id in item_ids)
        return [number for number in numbers if number is not None]

    def _answer(self, asked: RecommendationRequest, found: _Found, listed: Sequence[Entry]) -> RecommendationResponse:
        for reason in found.degraded:
            self._metrics.degraded.labels(reason).inc()
        is_cold = found.history.count == 0
        if is_cold:
            self._metrics.cold_starts.inc()
        named = (
            *(event.item_id for event in found.told),
            *asked.exclude_item_ids,
            *(asked.allow_item_ids or ()),
        )
        items = self._bundle.items
        return RecommendationResponse(
            recommendation_id=secrets.token_hex(16),
            model=self._model,
            items=[
                RecommendedItem(
                    item_id=items.item_id(entry.number),
                    rank=rank,
                    score=entry.score,
                    std=entry.std,
                    confidence=entry.confidence,
                    reliability=entry.reliability,
                )
                for rank, entry in enumerate(listed, start=1)
            ],
            list_confidence=ranking.list_confidence(listed),
            calibration=self._calibration,
            cold_start=is_cold,
            num_events=found.history.count,
            missing_item_ids=[item_id for item_id in dict.fromkeys(named) if items.number(item_id) is None],
            degraded=list(found.degraded),
        )


def told_history(events: Sequence[HistoryEvent], bundle: Bundle) -> History:
    """A history that the caller tells: as if it had been stored.

    Events count in the order given or, when every one has a timestamp, in the order of time (stable).
    """
    if all(event.timestamp is not None for event in events):
        events = sorted(events, key=lambda event: event.timestamp or 0)
    numbers = [bundle.items.number(event.item_id) for event in events]
    counted = [(number, event) for number, event in zip(numbers, events, strict=True) if event.weight > 0]
    kept = counted[-bundle.manifest.model.max_len :]
    return History(
        count=len(counted),
        items=np.array([UNK if number is None else number for number, _ in kept], np.int64),
        weights=np.array([stored_weight(event.weight) for _, event in kept], np.float32),
        timestamps=np.array(
            [np.nan if event.timestamp is None else event.timestamp / 1000 for _, event in kept], np.float64
        ),
        seen=np.unique(np.array([number for number in numbers if number is not None], np.int64)),
    )


def _subject(asked: RecommendationRequest) -> Subject | None:
    if asked.user_id is not None:
        return Subject("user", asked.user_id)
    if asked.session_id is not None:
        return Subject("session", asked.session_id)
    return None


def _calibration_info(bundle: Bundle) -> CalibrationInfo:
    calibration, report = bundle.calibration, bundle.calibration.report
    return CalibrationInfo(
        event=calibration.event,
        method=calibration.method,
        ece=None if report is None else report.ece_at_10,
        n=None if report is None else report.num_users,
    )
