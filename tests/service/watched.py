"""A recommender over a real engine and a store, watched: how each state came about, and which it ranked with."""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from model.bundle import ENCODER, Bundle, open_bundle
from model.config import BOS
from model.registry import resolve
from service.candidates import Catalogue
from service.context import RequestContext, unhurried
from service.engine import EncoderRow, Engine, Heard, RankerRow, Ranking, StepRow
from service.filtered import State
from service.recommender import Recommender, Subjects
from service.schemas import RecommendationRequest
from service.settings import Settings
from service.slates import Slates
from service.states import Store, Subject
from service.telemetry import IdHasher, Metrics

WAYS = ("current", "folded", "encoded", "nobody")


@dataclass
class WatchedEngine:
    """A real engine that notes what it is asked."""

    engine: Engine
    graphs: list[str] = field(default_factory=list)
    """Those that ran, in order."""
    states: dict[str, State] = field(default_factory=dict)
    """With which state each request ranked."""
    during_step: Callable[[], Awaitable[object]] | None = None
    """Happens while a step is computed."""

    async def encode(self, row: EncoderRow, request: RequestContext) -> State:
        self.graphs.append("encoder")
        return await self.engine.encode(row, request)

    async def step(self, row: StepRow, request: RequestContext) -> State:
        self.graphs.append("step")
        if self.during_step is not None:
            await self.during_step()
        return await self.engine.step(row, request)

    async def rank(self, row: RankerRow, request: RequestContext) -> Ranking:
        self.graphs.append("ranker")
        self.states[request.request_id] = row.state
        return await self.engine.rank(row, request)

    async def explain(self, row: EncoderRow, request: RequestContext) -> Heard:
        self.graphs.append("explainer")
        return await self.engine.explain(row, request)


class Asked(NamedTuple):
    """What came of one request."""

    how: str
    graphs: list[str]
    state: State


@dataclass
class Served:
    """A bundle served over a store, without HTTP."""

    bundle: Bundle
    store: Store
    engine: WatchedEngine
    subjects: Subjects
    recommender: Recommender
    slates: Slates
    metrics: Metrics
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def ask(self, subject: Subject) -> Asked:
        """One list, and wait until its state is kept."""
        before, self.engine.graphs = self.ways(), []
        state = await self.state_behind_a_list(subject)
        await self.subjects.finish_saves()
        (how,) = (way for way, times in self.ways().items() if times > before[way])
        return Asked(how, self.engine.graphs, state)

    async def state_behind_a_list(self, subject: Subject) -> State:
        request = unhurried(f"request-{next(self._numbers)}", 60)
        asked = RecommendationRequest.model_validate({f"{subject.kind}_id": subject.id, "num_results": 1})
        await self.recommender.recommend(asked, request)
        return self.engine.states[request.request_id]

    def ways(self) -> dict[str, float]:
        """How often states came about in each way so far."""
        value = self.metrics.registry.get_sample_value
        return {way: value("bft_states_total", {"how": way}) or 0.0 for way in WAYS}


@asynccontextmanager
async def served(registry: Path, open_store: Callable[[Bundle], Store]) -> AsyncIterator[Served]:
    """Serve a registry's bundle for a `with` block.

    Args:
        registry: with a published bundle.
        open_store: makes the store; closed at the end.
    """
    bundle, metrics = open_bundle(resolve(registry)), Metrics()
    store, real = open_store(bundle), Engine(bundle, Settings(bundle=registry, threads=1), metrics)
    nobody = real.run_rows(ENCODER, [EncoderRow(np.array([BOS]), np.ones(1, np.float32), np.full(1, np.nan))])[0]
    real.start()
    try:
        engine, subjects = WatchedEngine(real), Subjects(bundle, store, metrics)
        slates = Slates(store, metrics)
        recommender = Recommender(bundle, Catalogue(bundle), subjects, engine, nobody, metrics, IdHasher(), slates)
        yield Served(bundle, store, engine, subjects, recommender, slates, metrics)
        await subjects.finish_saves()
        await slates.finish_saves()
    finally:
        await real.close()
        await store.close()
