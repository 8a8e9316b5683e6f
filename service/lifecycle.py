"""The service's life: load, verify, warm, serve, drain (service.md, "Life")."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from model.bundle import ENCODER, PARITY_TOLERANCE, Bundle, BundleError, open_bundle
from model.config import BOS
from model.registry import resolve
from service.breaker import Breaker, GuardedStore
from service.context import unhurried
from service.engine import EncoderRow, Engine, RankerRow
from service.errors import NotReady, StartError
from service.filtered import State
from service.ingest import Ingest
from service.recommender import Recommender, Subjects
from service.settings import Settings
from service.states import MemoryStore, RedisStore
from service.states.interface import StateError, StateUnavailable, Store, StoreLimits
from service.telemetry import IdHasher, Metrics
from service.users import Users

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 2.0

_NOBODY_ROW = EncoderRow(np.array([BOS], np.int64), np.ones(1, np.float32), np.full(1, np.nan))
_NO_ITEMS = np.empty(0, np.int64)


class Phase(StrEnum):
    """Where in its life the process is."""

    starting = "starting"
    ready = "ready"
    draining = "draining"


@dataclass(frozen=True, slots=True)
class Service:
    """Everything that answers requests; lives from the end of the start-up to the end of the drain."""

    bundle: Bundle
    engine: Engine
    store: Store
    recommender: Recommender
    ingest: Ingest
    users: Users
    nobody: State


class Life:
    """One process's service and the phase it is in; shared by the public and the operations listener.

    Args:
        settings: of the process.
        metrics: of the process.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self.phase = Phase.starting
        self._service: Service | None = None

    @property
    def service(self) -> Service:
        """Raises RuntimeError outside `open`."""
        if self._service is None:
            raise RuntimeError("the service is not open")
        return self._service

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Service]:
        """Build everything, and take it down again in the reverse order.

        Raises:
            BundleError: the bundle is missing, damaged, or does not compute what it computed in training.
            StartError: a setting cannot be met.
        """
        async with AsyncExitStack() as stack:
            # In a thread: the operations listener answers while a large bundle loads.
            bundle, engine = await asyncio.to_thread(load_engine, self.settings, self.metrics)
            nobody: State = engine.run_rows(ENCODER, [_NOBODY_ROW])[0]
            store = GuardedStore(_open_store(self.settings, bundle), Breaker(self.metrics))
            stack.push_async_callback(store.close)
            await _announce(store, bundle)
            engine.start()
            stack.push_async_callback(engine.close)
            subjects, hasher = Subjects(bundle, store), IdHasher()
            stack.push_async_callback(subjects.finish_saves)
            self._service = Service(
                bundle=bundle,
                engine=engine,
                store=store,
                recommender=Recommender(bundle, subjects, engine, nobody, self.metrics, hasher),
                ingest=Ingest(bundle.items, store, self.metrics),
                users=Users(bundle.items, subjects, store, hasher),
                nobody=nobody,
            )
            self.metrics.model_info.labels(bundle.manifest.name, bundle.manifest.version).set(1)
            self.phase = Phase.ready
            logger.info("ready", extra={"model": bundle.manifest.name, "version": bundle.manifest.version})
            yield self._service

    def drain(self) -> None:
        """Turn /readyz red; requests are still answered."""
        self.phase = Phase.draining

    async def check_ready(self) -> None:
        """Return when a request would be answered: proven by a recent real inference, or by one made now.

        Raises:
            NotReady: says why.
            ServiceError: what the inference raised.
        """
        if self.phase is not Phase.ready:
            raise NotReady(f"the service is {self.phase.value}")
        engine = self.service.engine
        # Under load the traffic is the proof: a probe that had to queue would turn an overloaded replica red.
        last = engine.last_success
        if engine.alive and last is not None and time.monotonic() - last < self.settings.ready_max_age_s:
            return
        probe = unhurried("readyz", PROBE_TIMEOUT_S)
        state = await engine.encode(_NOBODY_ROW, probe)
        await engine.rank(RankerRow(state, _NO_ITEMS, _NO_ITEMS, 1), probe)

    async def refresh_gauges(self) -> None:
        """Ask the store for what only it knows; a store that does not answer leaves the last value."""
        if self._service is None:
            return
        try:
            self.metrics.outbox_fill.set(await self._service.store.outbox_fill())
        except StateError as error:
            logger.info("the outbox gauge was not refreshed: %s", error)


def load_engine(settings: Settings, metrics: Metrics) -> tuple[Bundle, Engine]:
    """Verify checksums, load, compare with the golden cases, warm.

    Raises:
        BundleError: names the folder and what is wrong with it.
        StartError: the provider cannot be had.
    """
    bundle = open_bundle(resolve(settings.bundle))
    engine = Engine(bundle, settings, metrics)
    error = engine.parity_error()
    if not error <= PARITY_TOLERANCE:
        raise BundleError(
            f"{bundle.folder}: golden.npz is missed by {error:.2g} on {engine.provider} "
            f"(allowed {PARITY_TOLERANCE:g}); use another provider, or export the bundle again"
        )
    engine.warm()
    return bundle, engine


def _open_store(settings: Settings, bundle: Bundle) -> Store:
    limits = StoreLimits(max_len=bundle.manifest.model.max_len)
    if settings.redis_url is None:
        logger.warning("no BFT_REDIS_URL: users live in this process's memory and are lost when it ends")
        return MemoryStore(lineage=bundle.manifest.lineage, limits=limits)
    try:
        return RedisStore(
            settings.redis_url.get_secret_value(),
            lineage=bundle.manifest.lineage,
            limits=limits,
            timeout_ms=settings.state_timeout_ms,
            cluster=settings.redis_cluster,
        )
    except ValueError as error:
        # The message of redis-py names the accepted schemes and not the URL, which may hold a password.
        raise StartError(f"BFT_REDIS_URL: {error}") from error


async def _announce(store: Store, bundle: Bundle) -> None:
    try:
        await store.register_model(bundle.manifest.version)
    except StateUnavailable as error:
        # A store that is down is no reason not to start: reads degrade, and a later save announces it.
        logger.warning("the state store does not answer: %s", error)
