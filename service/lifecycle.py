"""The service's life: load, verify, warm, serve, drain (service.md, "Life")."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from model.bundle import MANIFEST, Bundle
from model.registry import resolve
from service.batches import Batches
from service.breaker import GuardedStore
from service.context import unhurried
from service.drift import DriftWatch
from service.errors import NotReady, StartError
from service.models import Model, Models, Shared, load
from service.run_time_items import RunTimeItems
from service.settings import Settings
from service.slates import Slates
from service.states import MemoryStore, RedisStore
from service.states.interface import StateError, Store, StoreLimits
from service.telemetry import IdHasher, Metrics

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 2.0


class Phase(StrEnum):
    """Where in its life the process is."""

    starting = "starting"
    ready = "ready"
    draining = "draining"


class Life:
    """One process's models and the phase it is in; shared by its listeners.

    Args:
        settings: of the process.
        metrics: of the process.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self.phase = Phase.starting
        self._models: Models | None = None
        self._store: Store | None = None
        self._slates: Slates | None = None
        self._drift: DriftWatch | None = None
        self._run_time_items: RunTimeItems | None = None
        self.batches = Batches(settings.max_in_flight, settings.max_batch_rows)

    @property
    def models(self) -> Models:
        """Raises NotReady outside `open`."""
        if self._models is None:
            raise NotReady(f"the service is {self.phase.value}", retry_after_s=1)
        return self._models

    @property
    def slates(self) -> Slates:
        """Raises NotReady outside `open`."""
        if self._slates is None:
            raise NotReady(f"the service is {self.phase.value}", retry_after_s=1)
        return self._slates

    @property
    def drift(self) -> DriftWatch:
        """Raises NotReady outside `open`."""
        if self._drift is None:
            raise NotReady(f"the service is {self.phase.value}", retry_after_s=1)
        return self._drift

    @property
    def run_time_items(self) -> RunTimeItems:
        """Raises NotReady outside `open`."""
        if self._run_time_items is None:
            raise NotReady(f"the service is {self.phase.value}", retry_after_s=1)
        return self._run_time_items

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Models]:
        """Build everything, and take it down again in the reverse order.

        Raises:
            BundleError: the bundle is missing, damaged, or does not compute what it computed in training.
            StartError: a setting cannot be met.
        """
        async with AsyncExitStack() as stack:
            # A call of its own: what this frame holds lives as long as the process, and the first model need not.
            self._models = await self._build(stack)
            self.phase = Phase.ready
            manifest = self._models.active.default.bundle.manifest
            logger.info("ready", extra={"model": manifest.name, "version": manifest.version})
            try:
                yield self._models
            finally:
                # The admin listener answers longer than there are models.
                self._models = self._run_time_items = None

    async def _build(self, stack: AsyncExitStack) -> Models:
        """Everything that answers; what is pushed on the stack takes it down."""
        settings, metrics = self.settings, self.metrics
        # In a thread: the operations listener answers while a large bundle loads.
        first = await asyncio.to_thread(lambda: load(resolve(settings.bundle), settings, metrics))
        self._store = store = GuardedStore(_open_store(settings, first.bundle), metrics)
        stack.push_async_callback(store.close)
        self._slates = slates = Slates(store, self.metrics)
        stack.push_async_callback(slates.finish_saves)
        self._drift = drift = DriftWatch(slates, metrics)
        stack.push_async_callback(drift.finish)
        registry = registry_of(settings.bundle)
        models = Models(first, registry, Shared(settings, metrics, store, slates, drift, IdHasher()))
        stack.push_async_callback(models.close)
        await models.start()
        self._run_time_items = items = RunTimeItems(store, models)
        # Before the first answer; a store that is down is no reason not to serve.
        await items.try_refresh()
        await stack.enter_async_context(_running(items.watch(settings.items_poll_s), "watch the added items"))
        if registry is not None and settings.registry_poll_s > 0:
            await stack.enter_async_context(_running(models.watch(settings.registry_poll_s), "watch the registry"))
        return models

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
            raise NotReady(f"the service is {self.phase.value}", retry_after_s=1)
        for model in self.models.active.models:
            with self.models.held(model):
                await self._check_model(model)

    async def _check_model(self, model: Model) -> None:
        # Under load the traffic is the proof: a probe that had to queue would turn an overloaded replica red.
        last = model.engine.last_success
        if model.engine.alive and last is not None and time.monotonic() - last < self.settings.ready_max_age_s:
            return
        await model.probe(unhurried("readyz", PROBE_TIMEOUT_S))

    async def refresh_gauges(self) -> None:
        """Ask the store for what only it knows; a store that does not answer leaves the last value."""
        if self._store is None:
            return
        try:
            self.metrics.outbox_fill.set(await self._store.outbox_fill())
        except StateError as error:
            logger.info("the outbox gauge was not refreshed: %s", error)


def registry_of(location: Path) -> Path | None:
    """The registry that `--bundle` names, or None when it names one bundle."""
    return None if (location / MANIFEST).is_file() else location


@asynccontextmanager
async def _running(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Endless work, for the length of a `with` block."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _open_store(settings: Settings, bundle: Bundle) -> Store:
    limits = StoreLimits(
        max_len=bundle.manifest.model.max_len,
        outbox_limit=settings.outbox_limit,
        unknown_limit=settings.unknown_limit,
    )
    if settings.redis_url is None:
        if settings.state_replicas > 0:
            raise StartError("BFT_STATE_REPLICAS needs a store with replicas: give BFT_REDIS_URL, or unset it")
        logger.warning("no BFT_REDIS_URL: users live in this process's memory and are lost when it ends")
        return MemoryStore(lineage=bundle.manifest.lineage, limits=limits)
    try:
        return RedisStore(
            settings.redis_url.get_secret_value(),
            lineage=bundle.manifest.lineage,
            limits=limits,
            timeout_ms=settings.state_timeout_ms,
            cluster=settings.redis_cluster,
            replicas=settings.state_replicas,
            cache_form=settings.state_cache,
        )
    except ValueError as error:
        # The message of redis-py names the accepted schemes and not the URL, which may hold a password.
        raise StartError(f"BFT_REDIS_URL: {error}") from error
