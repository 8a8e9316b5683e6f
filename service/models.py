"""Which models are loaded, which one answers whom, and how one takes another's place (service.md, "Life").

A model is loaded beside those that answer, in a thread, and takes over by one reference. A request takes a model at
its start and keeps it to its end; a model that nobody takes any more is closed when its last request has ended. Models
change one at a time: by a call of the admin API, or because the registry has another current bundle.
"""

import asyncio
import ctypes
import logging
import random
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from model.bundle import ENCODER, MANIFEST, Bundle, BundleError, open_bundle
from model.config import BOS
from model.registry import RegistryIndex, read_index
from service.candidates import Catalogue
from service.context import RequestContext
from service.drift import DriftWatch, ModelKey
from service.engine import EncoderRow, Engine, RankerRow
from service.errors import (
    BundleRefused,
    ChangeUnderWay,
    DeadlinePassed,
    InvalidRequest,
    ModelNotFound,
    NoRegistry,
    PreconditionFailed,
    ServiceError,
    StartError,
)
from service.filtered import State
from service.ingest import Ingest
from service.recommender import Recommender, Subjects
from service.settings import Settings
from service.similar import SimilarItems
from service.slates import Slates
from service.states.interface import StateError, Store, Subject
from service.telemetry import IdHasher, Metrics
from service.users import Users

logger = logging.getLogger(__name__)

MAX_REFUSED = 32
"""Refused versions that are remembered, the latest."""
POLL_JITTER = 0.2
"""Replicas that start together do not read the registry together."""

AbGroup = Literal["default", "canary"]

NOBODY_ROW = EncoderRow(np.array([BOS], np.int64), np.ones(1, np.float32), np.full(1, np.nan))
_NO_ITEMS = np.empty(0, np.int64)


class Abandoned(Exception):
    """Nobody waits for this load any more."""


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A bundle whose graphs run here and compute what they computed in training."""

    bundle: Bundle
    engine: Engine
    nobody: State
    """The state of BOS alone."""
    seconds: float
    """It took to load."""


def load(
    folder: Path,
    settings: Settings,
    metrics: Metrics,
    *,
    lineage: str | None = None,
    abandoned: threading.Event | None = None,
) -> Loaded:
    """Verify checksums, load, compare with the golden cases, warm; in the calling thread.

    Args:
        folder: the bundle's.
        settings, metrics: for its engine.
        lineage: the catalogue lineage that it must be of; None: any.
        abandoned: when it is set, loading stops at the next step.

    Raises:
        BundleError: names the folder, the file and what is wrong with it.
        StartError: the provider cannot be had.
        Abandoned: nobody waits any more.
    """
    start = time.monotonic()

    def go_on() -> None:
        if abandoned is not None and abandoned.is_set():
            raise Abandoned(f"{folder} is not wanted any more")

    bundle = open_bundle(folder)
    if lineage not in (None, bundle.manifest.lineage):
        raise BundleError(
            f"{bundle.folder}: {MANIFEST} is of the catalogue lineage {bundle.manifest.lineage!r}, the stored users "
            f"are of {lineage!r}, whose item numbers mean other items: serve it with a store of its own"
        )
    go_on()
    engine = Engine(bundle, settings, metrics)
    try:
        go_on()
        error, tolerance = engine.parity_error(), bundle.manifest.parity_tolerance
        if not error <= tolerance:
            raise BundleError(
                f"{bundle.folder}: golden.npz is missed by {error:.2g} on {engine.provider} "
                f"(allowed {tolerance:.2g}); use another provider, or export the bundle again"
            )
        go_on()
        engine.warm()
        nobody: State = engine.run_rows(ENCODER, [NOBODY_ROW])[0]
    except BaseException:
        engine.discard()
        raise
    return Loaded(bundle, engine, nobody, time.monotonic() - start)


@dataclass(frozen=True, slots=True)
class Shared:
    """What all models of a process work with."""

    settings: Settings
    metrics: Metrics
    store: Store
    slates: Slates
    drift: DriftWatch
    hasher: IdHasher


@dataclass(slots=True, eq=False, weakref_slot=True, kw_only=True)
class Model:
    """One loaded bundle, and everything that answers requests with it."""

    bundle: Bundle
    engine: Engine
    nobody: State
    catalogue: Catalogue
    subjects: Subjects
    recommender: Recommender
    similar: SimilarItems
    ingest: Ingest
    users: Users
    load_seconds: float
    loaded_at: datetime
    num_requests: int = 0
    """That hold it now."""

    @classmethod
    def over(cls, loaded: Loaded, shared: Shared) -> "Model":
        """Put everything that answers requests over a loaded bundle."""
        bundle, engine, nobody = loaded.bundle, loaded.engine, loaded.nobody
        subjects = Subjects(bundle, shared.store, shared.metrics)
        catalogue = Catalogue(bundle)
        return cls(
            bundle=bundle,
            engine=engine,
            nobody=nobody,
            catalogue=catalogue,
            subjects=subjects,
            recommender=Recommender(
                bundle, catalogue, subjects, engine, nobody, shared.metrics, shared.hasher, shared.slates
            ),
            similar=SimilarItems(bundle, catalogue),
            ingest=Ingest(bundle.items, shared.store, shared.metrics, shared.drift),
            users=Users(bundle.items, subjects, shared.store, shared.hasher),
            load_seconds=loaded.seconds,
            loaded_at=datetime.now(UTC),
        )

    @property
    def version(self) -> str:
        """Of its bundle."""
        return self.bundle.manifest.version

    async def probe(self, request: RequestContext) -> None:
        """One real inference: returns when the model works. Raises as `Engine.encode` and `Engine.rank`."""
        state = await self.engine.encode(NOBODY_ROW, request)
        await self.engine.rank(RankerRow(state, _NO_ITEMS, _NO_ITEMS, 1), request)

    async def close(self) -> None:
        """Keep what was computed, and stop."""
        await self.subjects.finish_saves()
        await self.engine.close()


@dataclass(frozen=True, slots=True, eq=False)
class Active:
    """Who answers. Replaced whole, so that no request sees half of a change."""

    default: Model
    canary: Model | None = None
    percent: float = 0.0
    """Of the subjects, for the canary."""
    pinned: bool = False
    """Chosen by a call; holds until the registry's current bundle changes."""

    @property
    def models(self) -> tuple[Model, ...]:
        """The default, and the canary if there is one."""
        return (self.default,) if self.canary is None else (self.default, self.canary)

    @property
    def etag(self) -> str:
        """Equal on all replicas that serve the same models in the same way."""
        parts = [model.version for model in self.models] + [repr(self.percent), str(self.pinned)]
        return f'"{blake2b(chr(0).join(parts).encode(), digest_size=8).hexdigest()}"'

    def choose(self, subject: Subject | None) -> "Taken":
        """The model of a subject. Whoever has no id, such as a history told in a request, gets the default."""
        if self.canary is not None and subject is not None and place(subject, self.canary.version) < self.percent / 100:
            return Taken(self.canary, "canary")
        return Taken(self.default, "default")


class Taken(NamedTuple):
    """A model that a request holds, and why this one."""

    model: Model
    ab_group: AbGroup


def place(subject: Subject, version: str) -> float:
    """A subject's place in [0, 1) in the draw for a canary: uniform, the same on every replica and at every time.

    The version is the key of the hash, so that the next canary is not tried on the same subjects again. A larger
    percentage keeps the subjects of a smaller one.
    """
    digest = blake2b(f"{subject.kind}\0{subject.id}".encode(), key=version.encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


@dataclass(frozen=True, slots=True)
class Refusal:
    """A version that failed a check."""

    version: str
    reason: str
    at: datetime


@dataclass(frozen=True, slots=True)
class RegistryView:
    """What a registry says of itself."""

    index: RegistryIndex | None
    versions: tuple[str, ...]
    """Of the bundles that lie in it, the oldest first."""
    problem: str | None
    """Why it could not be read."""


@dataclass(slots=True)
class _Change:
    """A change of models under way."""

    task: "asyncio.Task[None]"
    abandoned: threading.Event
    versions: tuple[str, ...] = ()
    """Being loaded."""


class Models:
    """The models of a process.

    Args:
        first: loaded at the start; its catalogue lineage is the store's.
        registry: watched and chosen from; None when the service was started with a bundle.
        shared: what every model works with.
    """

    def __init__(self, first: Loaded, registry: Path | None, shared: Shared) -> None:
        self._shared = shared
        self._registry = registry
        self._lineage = first.bundle.manifest.lineage
        self._active = Active(Model.over(first, shared))
        self._followed = self._active.default.version
        """The registry's current version when it was last dealt with: taken over, refused, or passed over."""
        self._is_readable = True
        self._refused: dict[str, Refusal] = {}
        self._change: _Change | None = None
        self._retired: set[Model] = set()
        self._closing: set[asyncio.Task[None]] = set()
        # Always the same thread: each thread has a part of the heap of its own, which keeps some of what it once had.
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="loader")

    @property
    def active(self) -> Active:
        """Who answers now."""
        return self._active

    @property
    def has_registry(self) -> bool:
        """Whether there are versions to choose from."""
        return self._registry is not None

    @property
    def refused(self) -> Sequence[Refusal]:
        """Versions that failed a check, the latest last; one that is served later is taken off."""
        return tuple(self._refused.values())

    @property
    def loading(self) -> Sequence[str]:
        """Versions that are being loaded."""
        return () if self._change is None else self._change.versions

    @property
    def retired(self) -> Sequence[Model]:
        """Models that only finish requests."""
        return tuple(self._retired)

    # ---- taking a model ----------------------------------------------------------------------------------

    @contextmanager
    def taken(self, subject: Subject | None = None) -> Iterator[Taken]:
        """Take the model of a subject, or the default, for a `with` block: a request, from its start to its end."""
        chosen = self._active.choose(subject)
        with self.held(chosen.model):
            yield chosen

    @contextmanager
    def taken_version(self, version: str | None) -> Iterator[Model]:
        """Take an active model by its version; None: the default.

        Raises:
            ModelNotFound: that version does not answer.
        """
        active = self._active
        found = active.default if version is None else _of_version(active.models, version)
        if found is None:
            known = ", ".join(model.version for model in active.models)
            raise ModelNotFound(f"no such version is loaded; loaded: {known}")
        with self.held(found):
            yield found

    @contextmanager
    def held(self, model: Model) -> Iterator[None]:
        """Keep a model for a `with` block: it is not closed before the end."""
        model.num_requests += 1
        try:
            yield
        finally:
            model.num_requests -= 1
            self._close_if_idle(model)

    # ---- changing models ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to answer with the first model."""
        await self._open(self._active.default)
        self._show(self._active)

    async def put(
        self, default: str, canary: str | None, percent: float, if_match: str, request: RequestContext
    ) -> None:
        """Choose who answers, and return when it is so. Until the registry's current bundle changes, unless the
        default is `current`.

        Args:
            default: a version in the registry, or `current` or `previous`, the registry's.
            canary: another version in the registry.
            percent: of the subjects, for the canary.
            if_match: the header; must name the present ETag.
            request: for its deadline.

        Raises:
            NoRegistry: there is none to choose from.
            PreconditionFailed: the models changed since the caller looked.
            ChangeUnderWay: another change has not ended.
            InvalidRequest: a version is not in the registry, or the two are one.
            BundleRefused: a bundle failed a check; nothing has changed.
            DeadlinePassed: it took too long; nothing will change.
        """
        if self._registry is None:
            raise NoRegistry("this service was started with one bundle")
        self._check_idle()
        if if_match.strip() != "*" and self._active.etag not in [tag.strip() for tag in if_match.split(",")]:
            raise PreconditionFailed(f"If-Match does not name the present state, whose ETag is {self._active.etag}")
        change = self._begin(self._choose(default, canary, percent))
        try:
            async with asyncio.timeout(max(0.0, request.remaining_s())):
                await asyncio.shield(change.task)
        except TimeoutError as error:
            raise DeadlinePassed("the models were not loaded by the deadline; nothing has changed") from error
        finally:
            if not change.task.done():
                change.abandoned.set()

    async def watch(self, poll_s: float) -> None:
        """Follow the registry, for ever: look every `poll_s` seconds, more or less."""
        while True:
            await asyncio.sleep(poll_s * random.uniform(1 - POLL_JITTER, 1 + POLL_JITTER))  # noqa: S311  (no secret)
            try:
                await self.follow()
            except Exception:
                logger.exception("the registry was not followed; it will be looked at again")

    async def follow(self) -> None:
        """Take over the registry's current bundle, if it is another than when it was last dealt with.

        A refused one is not tried again: only a version that is new to the registry's index, or a call, makes a try.
        """
        view = await self.look()
        if view.index is None:
            if self._is_readable:
                logger.error("the registry cannot be read: %s", view.problem or "it has no index any more")
            self._is_readable = False
            self._shared.metrics.registry_failures.inc()
            return
        self._is_readable = True
        if view.index.current == self._followed or self._is_changing():
            return
        change = self._begin(self._take_over(view.index.current))
        with suppress(ServiceError):
            # The change was told to the log when it was refused.
            await asyncio.shield(change.task)

    async def look(self) -> RegistryView:
        """The registry as it is now; empty when there is none."""
        if self._registry is None:
            return RegistryView(None, (), None)
        return await asyncio.to_thread(_look, self._registry)

    async def close(self) -> None:
        """End the change under way and close every model."""
        if self._change is not None:
            self._change.abandoned.set()
            with suppress(ServiceError):
                await self._change.task
        for model in (*self._active.models, *self._retired):
            await model.close()
        self._retired.clear()
        await asyncio.gather(*self._closing)
        self._loader.shutdown()

    async def _choose(self, default: str, canary: str | None, percent: float) -> None:
        view = await self.look()
        if view.index is None:
            raise InvalidRequest.of("default", f"the registry cannot be read: {view.problem or 'it has no index'}")
        named = {"current": view.index.current, "previous": view.index.previous}
        version = named.get(default, default)
        if version is None:
            raise InvalidRequest.of("default", "the registry has no previous bundle")
        if version == canary:
            raise InvalidRequest.of("canary", f"is the default too: {version}")
        for name, wanted in (("default", version), ("canary", canary)):
            if wanted is not None and wanted not in view.versions and _of_version(self._active.models, wanted) is None:
                raise InvalidRequest.of(name, f"there is no bundle {wanted} in the registry {self._registry}")
        await self._replace(version, canary, percent, pinned=default != "current")
        self._followed = view.index.current

    async def _take_over(self, version: str) -> None:
        """The registry's current bundle as the default; a canary stays, unless it is that bundle."""
        self._followed = version
        canary = self._active.canary
        if canary is None or canary.version == version:
            await self._replace(version, None, 0.0, pinned=False)
        else:
            await self._replace(version, canary.version, self._active.percent, pinned=False)

    async def _replace(self, default: str, canary: str | None, percent: float, pinned: bool) -> None:
        """Load what is missing, and then change who answers: both models or none."""
        before = self._active
        models = {model.version: model for model in before.models}
        wanted = [version for version in (default, canary) if version is not None]
        new: list[Model] = []
        try:
            for version in wanted:
                if version not in models:
                    models[version] = await self._load(version)
                    new.append(models[version])
                    await self._open(models[version])
            if self._change is not None and self._change.abandoned.is_set():
                raise DeadlinePassed("nobody waits for these models any more; nothing has changed")
        except BaseException:
            for model in new:
                await model.close()
            raise
        after = Active(models[default], None if canary is None else models[canary], percent, pinned)
        self._active = after
        self._show(after)
        logger.info(
            "models changed", extra={"default": default, "canary": canary, "percent": percent, "pinned": pinned}
        )
        for model in before.models:
            if model not in after.models:
                self._retire(model)

    async def _load(self, version: str) -> Model:
        """Load a version of the registry, in a thread.

        Raises:
            BundleRefused: it failed a check.
            DeadlinePassed: the change was abandoned.
        """
        if self._registry is None or self._change is None:
            raise RuntimeError("a version is loaded from a registry, by a change")
        self._change.versions = (version,)
        folder, abandoned = self._registry / version, self._change.abandoned
        shared = self._shared
        try:
            work = partial(load, folder, shared.settings, shared.metrics, lineage=self._lineage, abandoned=abandoned)
            loaded = await asyncio.get_running_loop().run_in_executor(self._loader, work)
        except Abandoned as error:
            raise DeadlinePassed("nobody waits for these models any more; nothing has changed") from error
        except (BundleError, StartError) as error:
            raise self._refuse(version, str(error)) from error
        except Exception as error:
            logger.exception("a bundle could not be loaded", extra={"version": version})
            raise self._refuse(version, f"{folder}: cannot be loaded ({type(error).__name__}: {error})") from error
        finally:
            self._change.versions = ()
        self._refused.pop(version, None)
        shared.metrics.model_loads.labels("loaded").inc()
        return Model.over(loaded, shared)

    def _refuse(self, version: str, reason: str) -> BundleRefused:
        self._refused.pop(version, None)
        self._refused[version] = Refusal(version, reason, datetime.now(UTC))
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._shared.metrics.model_loads.labels("refused").inc()
        logger.error("a bundle was refused; the models that answer have not changed: %s", reason)
        return BundleRefused(reason)

    async def _open(self, model: Model) -> None:
        """Make a model ready to be taken."""
        manifest = model.bundle.manifest
        self._shared.store.keep_at_least(manifest.model.max_len)
        # What the model before could list, this one can from its first answer on.
        await model.catalogue.follow(self._active.default.catalogue.current.source)
        model.engine.start()
        try:
            await self._shared.store.register_model(manifest.version)
        except StateError as error:
            # A store that is down is no reason not to serve: reads degrade, and a later save announces it.
            logger.warning("the state store does not answer: %s", error)

    def _show(self, active: Active) -> None:
        for model in active.models:
            self._shared.metrics.model_info.labels(model.bundle.manifest.name, model.version).set(1)
            self._shared.drift.expect(ModelKey(model.bundle.manifest.name, model.version))

    def _retire(self, model: Model) -> None:
        self._retired.add(model)
        self._close_if_idle(model)

    def _close_if_idle(self, model: Model) -> None:
        if model in self._retired and model.num_requests == 0:
            self._retired.discard(model)
            task = asyncio.create_task(self._close(model), name=f"close {model.version}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close(self, model: Model) -> None:
        manifest = model.bundle.manifest
        await model.close()
        if _of_version(self._active.models, manifest.version) is None:
            with suppress(KeyError):
                self._shared.metrics.model_info.remove(manifest.name, manifest.version)
        logger.info("a model was closed", extra={"version": manifest.version})
        del model
        # After this task has ended, and with it the last reference.
        asyncio.get_running_loop().call_later(1.0, _give_memory_back)

    def _is_changing(self) -> bool:
        return self._change is not None and not self._change.task.done()

    def _check_idle(self) -> None:
        if self._is_changing():
            raise ChangeUnderWay("models are being loaded", retry_after_s=5)

    def _begin(self, work: Coroutine[Any, Any, None]) -> _Change:
        """Start a change that ends whatever becomes of its caller."""
        change = _Change(asyncio.create_task(work, name="change models"), threading.Event())
        change.task.add_done_callback(self._ended)
        self._change = change
        return change

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            # Read it, or asyncio reports as lost the failure of a change whose caller gave up.
            task.exception()
        # A failed change would keep alive whatever its frames hold, the models of its time among them.
        if self._change is not None and self._change.task is task:
            self._change = None


def _of_version(models: Sequence[Model], version: str) -> Model | None:
    return next((model for model in models if model.version == version), None)


def _look(registry: Path) -> RegistryView:
    try:
        index = read_index(registry)
        manifests = [path for path in registry.glob(f"{'[0-9a-f]' * 16}/{MANIFEST}") if not path.parent.is_symlink()]
        oldest_first = sorted(manifests, key=lambda path: path.stat().st_mtime)
    except (BundleError, OSError) as error:
        return RegistryView(None, (), str(error))
    return RegistryView(index, tuple(path.parent.name for path in oldest_first), None)


def _give_memory_back() -> None:
    """Return freed memory to the system, where the C library (glibc) can: its arenas keep it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        asyncio.get_running_loop().run_in_executor(None, trim, 0)
