"""The service's main act: from a subject to a ranked list with confidences, to its next page, to ranked candidates."""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from model.bundle import STEP, Bundle
from model.config import FIRST_ITEM, UNK, UNKNOWN_BASE
from service import ranking, reasons
from service.background import Saves
from service.candidates import Candidates, Catalogue
from service.context import RequestContext
from service.engine import EncoderRow, Heard, Numbers, RankerRow, Ranking, StepRow
from service.errors import Overloaded
from service.filtered import State
from service.ranking import NO_HISTORY, Entry, Filters, History
from service.schemas import (
    AbGroup,
    CalibrationInfo,
    DegradedReason,
    Explanation,
    HistoryEvent,
    ModelName,
    RankedItem,
    RankingRequest,
    RankingResponse,
    RecommendationRequest,
    RecommendationResponse,
    RecommendedItem,
    SubjectRequest,
)
from service.slates import (
    MAX_GIVEN,
    MAX_PAGES,
    Asked,
    Basis,
    Page,
    Slate,
    Slates,
    Told,
    ToldEvent,
    new_recommendation_id,
)
from service.states.interface import (
    CatalogMismatch,
    EncodedState,
    StateUnavailable,
    Store,
    Subject,
    UserRecord,
    wall_clock_ms,
)
from service.states.packing import stored_weight
from service.telemetry import IdHasher, Metrics

logger = logging.getLogger(__name__)

MAX_CACHED_IDS = 65_536
MAX_SAVES = 256
MAX_SAVE_BYTES = 2**24
"""States on their way to the store at a time, and what they take together; beyond it they are not kept, only computed
again."""

MAX_CLAIMS = 16
"""Times that a page is made anew because another call was faster."""

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

    async def explain(self, row: EncoderRow, request: RequestContext) -> Heard:
        """Whom the state after a history heard."""
        ...


class Subjects:
    """Stored subjects, read in the served catalogue's numbers.

    Args:
        bundle: the served one.
        store: where the subjects are.
        metrics: counts the states that are kept.
    """

    def __init__(self, bundle: Bundle, store: Store, metrics: Metrics) -> None:
        self._bundle = bundle
        self._store = store
        # A number never changes its id, so what was read once holds for ever.
        self._ids: OrderedDict[int, str] = OrderedDict()
        self._saves = Saves("state", MAX_SAVES, MAX_SAVE_BYTES, metrics)

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

    async def history(self, record: UserRecord, candidates: Candidates) -> History:
        """The record in the candidates' numbers; asks the store once for ids it has not met before.

        An item that was added at run time counts as seen. As an event it is UNK: nothing was learnt about it as an
        input.
        """
        ids = await self.unknown_ids(np.concatenate([record.items, record.seen]))
        catalogue = self._bundle.items
        seen = ranking.translated(record.seen, len(catalogue), ids, candidates)
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

    def item_ids(self, record: UserRecord) -> list[str | None]:
        """The ids of the record's events; None where nobody knows one. `history` was asked for before."""
        items = self._bundle.items
        last = FIRST_ITEM + len(items)
        return [items.item_id(number) if number < last else self._ids.get(number) for number in record.items.tolist()]

    def save(self, subject: Subject, record: UserRecord, state: State) -> None:
        """Keep a computed state, in the background: it neither delays nor fails the answer."""
        version, encoded = self._bundle.manifest.version, EncodedState(record.count, record.epoch, state)
        self._saves.start(lambda: self._store.save_state(subject, version, encoded), state.nbytes)

    async def finish_saves(self) -> None:
        """Return when no save is under way."""
        await self._saves.finish()


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """What there is to recommend, and to recommend from."""

    candidates: Candidates
    history: History
    told: Sequence[HistoryEvent] = ()
    """The events of the request that were used."""
    window: Told | None = None
    """Of a history that was told instead of a subject."""
    record: UserRecord | None = None
    encoded: EncodedState | None = None
    """Of `record`, or of its beginning."""
    degraded: tuple[DegradedReason, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _List:
    """The entries of one list, and what was not listed for want of confidence; both best first."""

    listed: Sequence[Entry]
    left_out: Sequence[Entry]
    basis: Basis | None = None
    """What they were ranked from; None of a list that was not asked for."""


class Recommender:
    """Ties store, engine and bundle together.

    Args:
        bundle: the served model.
        catalogue: what it can list.
        subjects: the stored histories.
        engine: the graphs.
        nobody: the state of BOS alone, of a subject without events.
        metrics: counts where states come from, cold starts and degraded answers.
        hasher: turns ids into what logs may show.
        slates: keeps what was shown; shared with other models.
    """

    def __init__(
        self,
        bundle: Bundle,
        catalogue: Catalogue,
        subjects: Subjects,
        engine: Inference,
        nobody: State,
        metrics: Metrics,
        hasher: IdHasher,
        slates: Slates,
    ) -> None:
        self._bundle = bundle
        self._catalogue = catalogue
        self._subjects = subjects
        self._engine = engine
        self._metrics = metrics
        self._hasher = hasher
        self._slates = slates
        self._nobody = nobody
        self._model = ModelName(name=bundle.manifest.name, version=bundle.manifest.version)
        self._calibration = _calibration_info(bundle)

    # ---- what callers ask --------------------------------------------------------------------------------

    async def recommend(
        self, asked: RecommendationRequest, request: RequestContext, ab_group: AbGroup = None
    ) -> RecommendationResponse:
        """The list for one request. Raises what `Batcher.submit` does; never on account of the store.

        Args:
            asked: for whom, how many, and what may be in the list.
            request: its deadline.
            ab_group: why this model answers.
        """
        made_ms = wall_clock_ms()
        found = await self._find(asked, request)
        slate = _asked(asked, found.window)
        made = await self._list(found, slate, asked.num_results, (), request)
        explanation = await self._explanation(found, request) if asked.explain else None
        with request.timed("rank"):
            self._slates.save(slate, self._page(found.candidates, made, made_ms))
            return self._answer(slate, found, made.listed, 0, ab_group, explanation)

    async def next_page(
        self,
        slate: Slate,
        num_results: int,
        request: RequestContext,
        ab_group: AbGroup = None,
        explain: bool = False,
    ) -> RecommendationResponse:
        """The next items of a slate, for what is known of its subject now. Each item is given out once.

        Args:
            slate: as it was loaded.
            num_results: of the page; it is shorter, or empty, at the end of the catalogue or of what a slate may have.
            request: its deadline.
            ab_group: why this model answers.
            explain: whether to say what the page rests on.

        Raises:
            RecommendationNotFound: the slate expired meanwhile.
            Overloaded: other calls turned the pages faster.
            StateError: the store cannot say whether the page was given out.
            ServiceError: what else `Batcher.submit` raises.
        """
        for _ in range(MAX_CLAIMS):
            made_ms, asked = wall_clock_ms(), slate.asked
            if asked.subject is None:
                candidates = self._catalogue.current
                found = _Found(candidates, retold_history(asked.told, candidates), window=asked.told)
            else:
                found = await self._find_stored(asked.subject, (), request)
            passed = slate.passed
            size = min(num_results, MAX_GIVEN - len(passed)) if len(slate.pages) < MAX_PAGES else 0
            made = _List((), ())
            if size > 0:
                made = await self._list(found, asked, size, passed, request)
            explanation = await self._explanation(found, request) if explain else None
            with request.timed("state"):
                is_ours = not (made.listed or made.left_out) or await self._slates.claim(
                    slate, self._page(found.candidates, made, made_ms)
                )
                if is_ours:
                    return self._answer(asked, found, made.listed, slate.num_shown, ab_group, explanation)
                request.check_deadline()
                slate = await self._slates.load(asked.recommendation_id)
        raise Overloaded("other requests are turning the pages of this recommendation", retry_after_s=1)

    async def rank(self, asked: RankingRequest, request: RequestContext, ab_group: AbGroup = None) -> RankingResponse:
        """Every candidate once, as the policy orders them; unknown ones last. Raises as `recommend`.

        Args:
            asked: for whom, and the candidates.
            request: its deadline.
            ab_group: why this model answers.
        """
        found = await self._find(asked, request)
        candidates = found.candidates
        asked_ids = list(dict.fromkeys(asked.candidate_item_ids))
        numbers, policy = _numbers(candidates, asked_ids), ranking.policy_of(asked)
        ranked: Sequence[Entry] = ()
        if numbers:
            state = await self._state(asked.subject, found, request)
            # Candidates are not filtered: a seen one is ranked, and its confidence says what it is worth.
            chosen = self._filters(found, False, (), numbers)
            order = ranking.order(policy, state)
            row = RankerRow(state, chosen.seen, chosen.blocked, len(numbers), order, candidates.added_rows)
            ranked = self._entries(await self._engine.rank(row, request), found, chosen)
        explanation = await self._explanation(found, request) if asked.explain else None
        with request.timed("rank"):
            self._count(found)
            unknown = [item_id for item_id in asked_ids if candidates.number(item_id) is None]
            known = [
                _ranked(entry, candidates.item_id(entry.number), rank) for rank, entry in enumerate(ranked, start=1)
            ]
            return RankingResponse(
                model=self._model,
                policy=policy,
                items=[*known, *map(_unknown, unknown, range(len(known) + 1, len(asked_ids) + 1))],
                list_confidence=ranking.list_confidence(ranked),
                calibration=self._calibration,
                cold_start=found.history.count == 0,
                num_events=found.history.count,
                missing_item_ids=_missing(candidates, [*(event.item_id for event in found.told), *unknown]),
                degraded=list(found.degraded),
                ab_group=ab_group,
                explanation=explanation,
            )

    # ---- from a subject to a list ------------------------------------------------------------------------

    async def _find(self, asked: SubjectRequest, request: RequestContext) -> _Found:
        if asked.subject is not None:
            return await self._find_stored(asked.subject, asked.fallback_history or (), request)
        with request.timed("state"):
            told, candidates = asked.history or (), self._catalogue.current
            window = told_window(told, self._bundle.manifest.model.max_len)
            return _Found(candidates, retold_history(window, candidates), told, window)

    async def _find_stored(self, subject: Subject, fallback: Sequence[HistoryEvent], request: RequestContext) -> _Found:
        request.subject, candidates = self._hasher(*subject), self._catalogue.current
        with request.timed("state"):
            try:
                record, encoded = await self._subjects.load(subject)
                history = NO_HISTORY if record is None else await self._subjects.history(record, candidates)
                return _Found(candidates, history, record=record, encoded=encoded)
            except StateUnavailable:
                told = told_history(fallback, self._bundle.manifest.model.max_len, candidates)
                return _Found(candidates, told, fallback, degraded=(DegradedReason.state_unavailable,))
            except CatalogMismatch as error:
                logger.warning("a stored history cannot be read: %s", error, extra={"subject": request.subject})
                return _Found(candidates, NO_HISTORY, degraded=(DegradedReason.catalog_mismatch,))

    async def _state(self, subject: Subject | None, found: _Found, request: RequestContext) -> State:
        how, state = await self._how_and_state(found.history, found.encoded, request)
        self._metrics.states.labels(how).inc()
        request.model_version = self._model.version
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

    async def _list(
        self, found: _Found, asked: Asked, size: int, passed: Iterable[str], request: RequestContext
    ) -> _List:
        """The best items that the filters let through and no earlier page passed."""
        state, candidates = await self._state(asked.subject, found, request), found.candidates
        excluded = [*_numbers(candidates, [*asked.exclude_item_ids, *passed]), *candidates.items.retired.tolist()]
        allowed = None if asked.allow_item_ids is None else _numbers(candidates, asked.allow_item_ids)
        chosen = self._filters(found, asked.exclude_seen, excluded, allowed)
        order = ranking.order(asked.policy, state)
        row = RankerRow(state, chosen.seen, chosen.blocked, size, order, candidates.added_rows)
        ranked = await self._engine.rank(row, request)
        with request.timed("rank"):
            entries = self._entries(ranked, found, chosen)
            least = asked.min_confidence or 0.0
            listed = [entry for entry in entries if entry.confidence >= least]
            left_out = [entry for entry in entries if entry.confidence < least]
            kept_out = found.history.seen if asked.exclude_seen else NO_HISTORY.seen
            return _List(listed, left_out, Basis.of(state, found.history, kept_out, candidates))

    def _filters(
        self, found: _Found, exclude_seen: bool, exclude: Iterable[int], allow: Iterable[int] | None
    ) -> Filters:
        event, size = self._bundle.calibration.event, len(found.candidates)
        return ranking.filters(found.history, event, size, exclude_seen, exclude, allow)

    def _entries(self, ranked: Ranking, found: _Found, chosen: Filters) -> list[Entry]:
        calibration, count = self._bundle.calibration, found.history.count
        return ranking.entries(ranked, calibration, found.candidates, chosen.seen, count)

    async def _explanation(self, found: _Found, request: RequestContext) -> Explanation:
        """What the state behind the answer heard, however the state came about."""
        if found.history.count == 0:
            return reasons.COLD_START
        max_len = self._bundle.manifest.model.max_len
        row = ranking.encoder_row(found.history, max_len)
        heard = await self._engine.explain(row, request)
        if found.record is not None:
            return reasons.explanation(row, heard, self._subjects.item_ids(found.record))
        window = found.window or told_window(found.told, max_len)
        return reasons.explanation(row, heard, [event.item_id for event in window.events])

    # ---- answers and slates ------------------------------------------------------------------------------

    def _answer(
        self,
        asked: Asked,
        found: _Found,
        listed: Sequence[Entry],
        num_before: int,
        ab_group: AbGroup,
        explanation: Explanation | None,
    ) -> RecommendationResponse:
        self._count(found)
        named = (
            *(event.item_id for event in found.told),
            *asked.exclude_item_ids,
            *(asked.allow_item_ids or ()),
        )
        return RecommendationResponse(
            recommendation_id=asked.recommendation_id,
            model=self._model,
            policy=asked.policy,
            items=[
                RecommendedItem(
                    item_id=found.candidates.item_id(entry.number),
                    rank=rank,
                    score=entry.score,
                    std=entry.std,
                    confidence=entry.confidence,
                    reliability=entry.reliability,
                )
                for rank, entry in enumerate(listed, start=num_before + 1)
            ],
            list_confidence=ranking.list_confidence(listed),
            calibration=self._calibration,
            cold_start=found.history.count == 0,
            num_events=found.history.count,
            missing_item_ids=_missing(found.candidates, named),
            degraded=list(found.degraded),
            ab_group=ab_group,
            explanation=explanation,
        )

    def _count(self, found: _Found) -> None:
        for reason in found.degraded:
            self._metrics.degraded.labels(reason).inc()
        if found.history.count == 0:
            self._metrics.cold_starts.inc()

    def _page(self, candidates: Candidates, made: _List, made_ms: int) -> Page:
        return Page(
            made_ms=made_ms,
            model_name=self._model.name,
            model_version=self._model.version,
            basis=made.basis,
            event=self._calibration.event,
            item_ids=_ids(candidates, made.listed),
            scores=tuple(entry.score for entry in made.listed),
            stds=tuple(entry.std for entry in made.listed),
            confidences=tuple(entry.confidence for entry in made.listed),
            left_out=_ids(candidates, made.left_out),
        )


def _numbers(candidates: Candidates, item_ids: Iterable[str]) -> list[int]:
    numbers = map(candidates.number, item_ids)
    return [number for number in numbers if number is not None]


def _ids(candidates: Candidates, entries: Iterable[Entry]) -> tuple[str, ...]:
    return tuple(candidates.item_id(entry.number) for entry in entries)


def _missing(candidates: Candidates, item_ids: Iterable[str]) -> list[str]:
    return [item_id for item_id in dict.fromkeys(item_ids) if candidates.number(item_id) is None]


def told_history(events: Sequence[HistoryEvent], max_len: int, candidates: Candidates) -> History:
    """A history that the caller tells: as if it had been stored.

    Events count in the order given or, when every one has a timestamp, in the order of time (stable).
    """
    return retold_history(told_window(events, max_len), candidates)


def told_window(events: Sequence[HistoryEvent], max_len: int) -> Told:
    """A told history in the order in which it counts, cut to the last `max_len` events."""
    if all(event.timestamp is not None for event in events):
        events = sorted(events, key=lambda event: event.timestamp or 0)
    counted = [event for event in events if event.weight > 0]
    kept = counted[-max_len:]
    kept_ids = {event.item_id for event in kept}
    others = dict.fromkeys(event.item_id for event in events if event.item_id not in kept_ids)
    return Told(
        events=tuple(
            ToldEvent(item_id=event.item_id, timestamp_ms=event.timestamp, weight=event.weight) for event in kept
        ),
        count=len(counted),
        other_seen=tuple(others),
    )


def retold_history(told: Told | None, candidates: Candidates) -> History:
    """A told history in the candidates' numbers; what was added at run time is seen, and as an event UNK."""
    if told is None:
        return NO_HISTORY
    numbers = [candidates.items.number(event.item_id) for event in told.events]
    seen = {candidates.number(item_id) for item_id in (*(event.item_id for event in told.events), *told.other_seen)}
    return History(
        count=told.count,
        items=np.array([UNK if number is None else number for number in numbers], np.int64),
        weights=np.array([stored_weight(event.weight) for event in told.events], np.float32),
        timestamps=np.array(
            [np.nan if event.timestamp_ms is None else event.timestamp_ms / 1000 for event in told.events], np.float64
        ),
        seen=np.array(sorted(number for number in seen if number is not None), np.int64),
    )


def _asked(asked: RecommendationRequest, told: Told | None) -> Asked:
    return Asked(
        recommendation_id=new_recommendation_id(asked.subject),
        subject=asked.subject,
        told=told,
        policy=ranking.policy_of(asked),
        exclude_seen=asked.exclude_seen,
        exclude_item_ids=asked.exclude_item_ids,
        allow_item_ids=asked.allow_item_ids,
        min_confidence=asked.min_confidence,
    )


def _ranked(entry: Entry, item_id: str, rank: int) -> RankedItem:
    return RankedItem(
        item_id=item_id,
        rank=rank,
        known=True,
        score=entry.score,
        std=entry.std,
        confidence=entry.confidence,
        reliability=entry.reliability,
    )


def _unknown(item_id: str, rank: int) -> RankedItem:
    return RankedItem(item_id=item_id, rank=rank, known=False, score=None, std=None, confidence=None, reliability=None)


def _calibration_info(bundle: Bundle) -> CalibrationInfo:
    calibration, report = bundle.calibration, bundle.calibration.report
    return CalibrationInfo(
        event=calibration.event,
        method=calibration.method,
        ece=None if report is None else report.ece_at_10,
        n=None if report is None else report.num_users,
    )
