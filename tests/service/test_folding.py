"""Folding events into a kept state, from the store to the ranker. Expected states come from the torch model."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch

from model.config import BOS, FIRST_ITEM, UNK, UNKNOWN_BASE, window_start
from model.filtering import Gaussian
from service.engine import EncoderRow
from service.filtered import Cache, State
from service.ranking import step_row
from service.states import EncodedState, Event, RedisStore, StoreLimits, Subject
from service.states.interface import CacheForm
from service.states.packing import pack_state, subject_hash, unpack_state
from service.states.scripts import SubjectKeys
from tests.service.bundles import CONFIG, ITEM_IDS, MAX_LEN, NUM_ITEMS, tiny_model
from tests.service.watched import Asked, Served, served
from tests.tolerance import FLOAT32_TOL, assert_close, assert_precision_close

pytestmark = pytest.mark.anyio

ANN, BOB = Subject("user", "ann"), Subject("user", "bob")
T0_MS = 1_764_424_800_000
PATIENT_MS = 10_000
"""Time-out where none is expected: a busy machine is not a failure."""


@dataclass
class Clock:
    now_ms: int = T0_MS

    def __call__(self) -> int:
        return self.now_ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def service(tiny: Path, valkey_url: str, clock: Clock) -> AsyncIterator[Served]:
    def open_store(bundle: Any) -> RedisStore:
        limits = StoreLimits(max_len=MAX_LEN)
        return RedisStore(
            valkey_url, lineage=bundle.manifest.lineage, limits=limits, timeout_ms=PATIENT_MS, clock=clock
        )

    async with served(tiny, open_store) as running:
        yield running


HALF_TOL = 2e-3
"""Of a state that was folded from caches in float16: what the design allows."""


@pytest.mark.parametrize(("cache_form", "ways"), [("float16", {"encoded", "folded"}), ("none", {"encoded"})])
async def test_caches_in_float16_fold_nearly_as_well_and_without_caches_nothing_is_folded(
    tiny: Path, valkey_url: str, clock: Clock, model: Any, cache_form: CacheForm, ways: set[str]
) -> None:
    def open_store(bundle: Any) -> RedisStore:
        lineage, limits = bundle.manifest.lineage, StoreLimits(max_len=MAX_LEN)
        return RedisStore(
            valkey_url, lineage=lineage, limits=limits, timeout_ms=PATIENT_MS, clock=clock, cache_form=cache_form
        )

    events, seen_ways = random_events(7, 3 * MAX_LEN), set()
    async with served(tiny, open_store) as running:
        for count, event in enumerate(events, start=1):
            await running.store.append(ANN, [event])
            asked = await running.ask(ANN)
            expected = scratch(model, events[:count])
            assert_close(asked.state.mean, expected.mean[0], HALF_TOL, "mean")
            assert_precision_close(asked.state.precision, expected.precision[0], HALF_TOL)
            seen_ways.add(asked.how)

    assert seen_ways == ways


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def random_events(seed: int, number: int, start_ms: int = T0_MS) -> list[Event]:
    """Events on random items in order of time, one in six on an item outside the catalogue, of all weights."""
    rng = np.random.default_rng(seed)
    items = rng.integers(FIRST_ITEM, FIRST_ITEM + NUM_ITEMS, number)
    items[rng.random(number) < 1 / 6] = UNKNOWN_BASE
    # Bfloat16 has these weights exactly.
    weights = rng.choice([0.25, 0.5, 1.0, 1.5, 3.0], number)
    times_ms = start_ms + rng.integers(1, 10**8, number).cumsum()
    return [
        Event(
            item_number=int(item),
            item_id="new" if item == UNKNOWN_BASE else ITEM_IDS[item - FIRST_ITEM],
            timestamp_ms=int(time_ms),
            weight=float(weight),
            identity=None,
            undated=False,
        )
        for item, time_ms, weight in zip(items, times_ms, weights, strict=True)
    ]


@torch.no_grad()
def scratch(model: Any, events: Sequence[Event]) -> Gaussian:
    """The state after all events, by torch from the window alone."""
    window = events[window_start(len(events), MAX_LEN) :]
    items = torch.tensor([[BOS, *(UNK if e.item_number >= UNKNOWN_BASE else e.item_number for e in window)]])
    weights = torch.tensor([[1.0, *(e.weight for e in window)]])
    times = torch.tensor([[torch.nan, *(e.timestamp_ms / 1000 for e in window)]], dtype=torch.float64)
    return model.final_state(items, weights, times)


def assert_state(found: State, expected: Gaussian) -> None:
    assert_close(found.mean, expected.mean[0], FLOAT32_TOL, "mean")
    assert_precision_close(found.precision, expected.precision[0], FLOAT32_TOL)


def way(before: int, after: int) -> str:
    """How the state after so many events comes about when one of fewer is kept: positions count from the window."""
    moved = window_start(before, MAX_LEN) != window_start(after, MAX_LEN)
    return "encoded" if before == 0 or moved else "folded"


GRAPHS = {"encoded": ["encoder", "ranker"], "folded": ["step", "ranker"], "current": ["ranker"], "nobody": ["ranker"]}


def assert_asked(asked: Asked, how: str, expected: Gaussian) -> None:
    assert (asked.how, asked.graphs) == (how, GRAPHS[how])
    assert_state(asked.state, expected)


# ---- appends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
async def test_folding_ends_in_the_state_of_the_whole_history_at_every_count_while_the_window_moves(
    service: Served, model: Any, at_once: int
) -> None:
    events = random_events(at_once, 3 * MAX_LEN + at_once)
    ways = []

    for before in range(0, 3 * MAX_LEN, at_once):
        after = before + at_once
        await service.store.append(ANN, events[before:after])
        asked = await service.ask(ANN)
        assert_asked(asked, way(before, after), scratch(model, events[:after]))
        ways.append(asked.how)

    assert ways.count("encoded") >= 4  # at the first event, and whenever the window had moved
    assert "folded" in ways


async def test_a_state_that_is_current_runs_no_graph_but_the_ranker(service: Served, model: Any) -> None:
    events = random_events(0, 3)
    await service.store.append(ANN, events)
    assert (await service.ask(ANN)).how == "encoded"

    assert_asked(await service.ask(ANN), "current", scratch(model, events))

    # An event of weight 0 is seen and no part of the history.
    await service.store.append(ANN, [replace(events[-1], weight=0.0)])
    assert_asked(await service.ask(ANN), "current", scratch(model, events))


async def test_a_subject_without_events_takes_the_state_of_nobody(service: Served, model: Any) -> None:
    assert_asked(await service.ask(ANN), "nobody", scratch(model, []))
    await service.store.append(ANN, [replace(random_events(0, 1)[0], weight=0.0)])
    assert_asked(await service.ask(ANN), "nobody", scratch(model, []))


async def test_a_session_s_events_are_folded_like_a_user_s(service: Served, model: Any) -> None:
    events = random_events(0, 2)
    session = Subject("session", "ann")

    for count, how in ((1, "encoded"), (2, "folded")):
        await service.store.append(session, events[count - 1 : count])
        assert_asked(await service.ask(session), how, scratch(model, events[:count]))


async def test_many_requests_at_once_for_many_users_each_get_their_own_state(service: Served, model: Any) -> None:
    histories = {f"user-{number}": random_events(number, 1 + number) for number in range(2 * MAX_LEN)}
    for name, events in histories.items():
        await service.store.append(Subject("user", name), events[: 1 + len(events) // 2])
        await service.ask(Subject("user", name))
        await service.store.append(Subject("user", name), events[1 + len(events) // 2 :])

    names = [name for name in histories for _ in range(3)]
    states = await asyncio.gather(*(service.state_behind_a_list(Subject("user", name)) for name in names))
    await service.subjects.finish_saves()

    for name, state in zip(names, states, strict=True):
        assert_state(state, scratch(model, histories[name]))
    for name, events in histories.items():
        assert_asked(await service.ask(Subject("user", name)), "current", scratch(model, events))


# ---- what is no append -----------------------------------------------------------------------------------


async def test_after_a_late_event_the_history_is_encoded_anew_and_then_folded_on(service: Served, model: Any) -> None:
    first, late, second, third = random_events(0, 4)
    await service.store.append(ANN, [first, second])
    await service.ask(ANN)

    await service.store.append(ANN, [late])
    assert_asked(await service.ask(ANN), "encoded", scratch(model, [first, late, second]))

    await service.store.append(ANN, [third])
    assert_asked(await service.ask(ANN), "folded", scratch(model, [first, late, second, third]))


async def test_the_state_of_an_expired_record_is_not_folded_into_its_successor(
    service: Served, model: Any, clock: Clock, valkey_url: str
) -> None:
    old, new = random_events(0, 2), random_events(1, 3)
    await service.store.append(ANN, old)
    await service.ask(ANN)
    with redis.Redis.from_url(valkey_url) as client:
        client.delete(SubjectKeys.of(ANN).record)
        clock.now_ms += 90 * 86_400_000

        await service.store.append(ANN, new)

        assert client.exists(SubjectKeys.of(ANN).state(service.bundle.manifest.version))
    assert_asked(await service.ask(ANN), "encoded", scratch(model, new))


async def test_a_user_who_is_erased_while_events_are_folded_leaves_no_state(
    service: Served, model: Any, clock: Clock, valkey_url: str
) -> None:
    events = random_events(0, 3)
    await service.store.append(ANN, events[:2])
    await service.ask(ANN)
    await service.store.append(ANN, events[2:])

    service.engine.during_step = lambda: service.store.erase("ann")
    asked = await service.ask(ANN)
    service.engine.during_step = None

    # The request was read before the erasure, and answered as of then.
    assert_asked(asked, "folded", scratch(model, events))
    with redis.Redis.from_url(valkey_url) as client:
        assert client.exists(SubjectKeys.of(ANN).state(service.bundle.manifest.version)) == 0
    clock.now_ms += 1000
    later = random_events(1, 4, clock.now_ms)
    await service.store.append(ANN, later)
    assert_asked(await service.ask(ANN), "encoded", scratch(model, later))


async def test_events_that_arrive_while_others_are_folded_are_folded_next(service: Served, model: Any) -> None:
    events = random_events(0, 4)
    await service.store.append(ANN, events[:2])
    await service.ask(ANN)
    await service.store.append(ANN, events[2:3])

    service.engine.during_step = lambda: service.store.append(ANN, events[3:])
    asked = await service.ask(ANN)
    service.engine.during_step = None

    assert_asked(asked, "folded", scratch(model, events[:3]))
    assert_asked(await service.ask(ANN), "folded", scratch(model, events))


# ---- values that are not this user's, or not this model's ------------------------------------------------


async def test_another_user_s_state_under_the_key_is_never_used(service: Served, model: Any, valkey_url: str) -> None:
    of_ann, of_bob = random_events(0, 2), random_events(1, 2)
    await service.store.append(ANN, of_ann[:1])
    await service.store.append(BOB, of_bob[:1])
    await service.ask(ANN)
    version = service.bundle.manifest.version
    # Count and epoch fit: both users began in the same second.
    with redis.Redis.from_url(valkey_url) as client:
        client.copy(SubjectKeys.of(ANN).state(version), SubjectKeys.of(BOB).state(version))
        assert_asked(await service.ask(BOB), "encoded", scratch(model, of_bob[:1]))

        await service.store.append(BOB, of_bob[1:])
        client.copy(SubjectKeys.of(ANN).state(version), SubjectKeys.of(BOB).state(version), replace=True)
        assert_asked(await service.ask(BOB), "encoded", scratch(model, of_bob))


def layout_1(encoded: EncodedState) -> bytes:
    """As it was before states had caches."""
    state, vectors = encoded.state, 2 * len(encoded.state.mean)
    header = b"\x01" + subject_hash(ANN) + struct.pack("<II", encoded.count, encoded.epoch)
    return header + struct.pack(f"<{vectors}f", *state.mean, *state.precision)


def reshaped(encoded: EncodedState, *axes: int) -> bytes:
    """With half of the cache along these axes of its keys."""
    cache = encoded.state.cache
    assert cache is not None
    half = tuple(slice(0, size // 2 if axis in axes else size) for axis, size in enumerate(cache.key.shape))
    smaller = Cache(
        cache.key[half], cache.value[half], cache.log_precision[half[0], half[2]], cache.timestamps[half[2]]
    )
    return pack_state(replace(encoded, state=replace(encoded.state, cache=smaller)), subject_hash(ANN))


def narrower(encoded: EncodedState) -> bytes:
    """Of a model of half the width."""
    half = slice(CONFIG.width // 2)
    state = State(encoded.state.mean[half], encoded.state.precision[half], encoded.state.cache)
    return pack_state(replace(encoded, state=state), subject_hash(ANN))


STRANGE: dict[str, Callable[[EncodedState], bytes]] = {
    "an older layout": layout_1,
    "no cache": lambda encoded: pack_state(
        replace(encoded, state=replace(encoded.state, cache=None)), subject_hash(ANN)
    ),
    "half the width": narrower,
    "half the layers": lambda encoded: reshaped(encoded, 0),
    "half the heads": lambda encoded: reshaped(encoded, 1),
    "half the positions": lambda encoded: reshaped(encoded, 2),
    "half the width of a head": lambda encoded: reshaped(encoded, 3),
}


@pytest.mark.parametrize("kind", STRANGE)
async def test_a_state_value_that_this_model_cannot_have_written_is_encoded_over(
    service: Served, model: Any, valkey_url: str, kind: str
) -> None:
    events = random_events(0, 5)
    await service.store.append(ANN, events[:3])
    await service.ask(ANN)
    key = SubjectKeys.of(ANN).state(service.bundle.manifest.version)
    with redis.Redis.from_url(valkey_url) as client:
        encoded = unpack_state(client.get(key), subject_hash(ANN))
        assert encoded is not None
        client.set(key, STRANGE[kind](encoded))
        await service.store.append(ANN, events[3:4])

    assert_asked(await service.ask(ANN), "encoded", scratch(model, events[:4]))
    await service.store.append(ANN, events[4:])
    assert_asked(await service.ask(ANN), "folded", scratch(model, events))


async def test_a_current_state_of_another_width_is_encoded_over(service: Served, model: Any, valkey_url: str) -> None:
    events = random_events(0, 3)
    await service.store.append(ANN, events)
    await service.ask(ANN)
    key = SubjectKeys.of(ANN).state(service.bundle.manifest.version)
    with redis.Redis.from_url(valkey_url) as client:
        encoded = unpack_state(client.get(key), subject_hash(ANN))
        assert encoded is not None
        client.set(key, narrower(encoded))

    assert_asked(await service.ask(ANN), "encoded", scratch(model, events))


# ---- the step's row --------------------------------------------------------------------------------------


def cache_of(num_positions: int) -> Cache:
    per_head = np.zeros((1, 1, num_positions, 1), np.float32)
    return Cache(per_head, per_head, np.zeros((1, num_positions), np.float32), np.zeros(num_positions))


def test_the_step_takes_what_the_cache_has_not_read() -> None:
    row = EncoderRow(np.array([BOS, 10, 11, 12]), np.array([1.0, 2, 3, 4], np.float32), np.array([np.nan, 5, 6, 7]))

    step = step_row(row, 2, cache_of(2))

    assert step is not None
    assert (step.items.tolist(), step.weights.tolist(), step.timestamps.tolist()) == ([11, 12], [3, 4], [6, 7])


@pytest.mark.parametrize(
    ("num_missing", "cache"),
    [(2, None), (2, cache_of(3)), (2, cache_of(1)), (3, cache_of(5)), (7, cache_of(4))],
    ids=["no cache", "longer", "shorter", "the window moved", "all events are new"],
)
def test_there_is_no_step_when_the_cache_does_not_begin_where_the_row_does(
    num_missing: int, cache: Cache | None
) -> None:
    row = EncoderRow(np.array([BOS, 10, 11, 12]), np.ones(4, np.float32), np.zeros(4))

    assert step_row(row, num_missing, cache) is None
