"""What the recommender hands to the encoder, and to the store."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from model.bundle import open_bundle
from model.config import BOS, FIRST_ITEM
from model.registry import resolve
from service import recommender as recommender_module
from service.candidates import Catalogue
from service.context import RequestContext, unhurried
from service.engine import EncoderRow, Heard, RankerRow, Ranking, StepRow
from service.filtered import State
from service.recommender import Recommender, Subjects
from service.schemas import RecommendationRequest
from service.slates import Slates
from service.states import EncodedState, Event, MemoryStore, StoreLimits, Subject, UserRecord
from service.telemetry import IdHasher, Metrics
from tests.service.bundles import ITEM_IDS, MAX_LEN

pytestmark = pytest.mark.anyio

T0 = 1_764_424_800
"""A moment in 2025, in Unix seconds."""


class RecordingEngine:
    """Remembers the rows it is asked to encode, and ranks nothing."""

    def __init__(self) -> None:
        self.rows: list[EncoderRow] = []

    async def encode(self, row: EncoderRow, request: RequestContext) -> State:
        self.rows.append(row)
        return State(np.zeros(16, np.float32), np.ones(16, np.float32))

    async def step(self, row: StepRow, request: RequestContext) -> State:
        raise AssertionError("there is no cache to step from")

    async def rank(self, row: RankerRow, request: RequestContext) -> Ranking:
        nothing = np.empty(0)
        return Ranking(nothing.astype(np.int64), nothing, nothing, nothing, nothing, nothing, 0.0, 1.0)

    async def explain(self, row: EncoderRow, request: RequestContext) -> Heard:
        raise AssertionError("nobody asked for reasons")


async def encoded(tiny: Path, asked: dict[str, object], events: list[Event]) -> EncoderRow:
    """The row that a request makes of Ann's stored events, or of the history that it tells."""
    bundle = open_bundle(resolve(tiny))
    store = MemoryStore(lineage=bundle.manifest.lineage, limits=StoreLimits(max_len=MAX_LEN))
    await store.append(Subject("user", "ann"), events)
    engine, subjects = RecordingEngine(), Subjects(bundle, store, Metrics())
    nobody = State(np.zeros(16, np.float32), np.ones(16, np.float32))

    slates = Slates(store, Metrics())
    recommender = Recommender(bundle, Catalogue(bundle), subjects, engine, nobody, Metrics(), IdHasher(), slates)
    await recommender.recommend(RecommendationRequest.model_validate(asked), unhurried("test", 60))
    await subjects.finish_saves()

    (row,) = engine.rows
    return row


def stored(row: int, timestamp_ms: int) -> Event:
    return Event(
        item_number=FIRST_ITEM + row,
        item_id=ITEM_IDS[row],
        timestamp_ms=timestamp_ms,
        weight=1.0,
        identity=None,
        undated=False,
    )


async def test_stored_events_reach_the_encoder_with_their_seconds(tiny: Path) -> None:
    # In the order of arrival, which is not that of time.
    events = [stored(7, T0 * 1000 + 250), stored(9, T0 * 1000 + 86_400_125), stored(8, T0 * 1000 + 1250)]

    row = await encoded(tiny, {"user_id": "ann"}, events)

    assert row.items.tolist() == [BOS, *(FIRST_ITEM + number for number in (7, 8, 9))]
    np.testing.assert_array_equal(row.timestamps, [np.nan, T0 + 0.25, T0 + 1.25, T0 + 86_400.125])
    assert row.timestamps.dtype == np.float64


async def test_the_window_cuts_items_weights_and_times_alike(tiny: Path) -> None:
    count = MAX_LEN + 3

    row = await encoded(tiny, {"user_id": "ann"}, [stored(number, (T0 + number) * 1000) for number in range(count)])

    # One stride of MAX_LEN/2 leaves at most MAX_LEN events.
    shown = range(MAX_LEN // 2, count)
    assert row.items.tolist() == [BOS, *(FIRST_ITEM + number for number in shown)]
    assert len(row.weights) == len(row.items)
    np.testing.assert_array_equal(row.timestamps, [np.nan, *(T0 + number for number in shown)])


async def test_told_events_reach_the_encoder_with_their_seconds_or_none(tiny: Path) -> None:
    told = [{"item_id": ITEM_IDS[5], "timestamp": T0 + 0.5}, {"item_id": ITEM_IDS[6]}]

    row = await encoded(tiny, {"history": told}, [])

    assert row.items.tolist() == [BOS, FIRST_ITEM + 5, FIRST_ITEM + 6]
    np.testing.assert_array_equal(row.timestamps, [np.nan, T0 + 0.5, np.nan])


class SlowStore(MemoryStore):
    """Counts the states on their way to it, and lets none arrive before it is told to."""

    def __init__(self) -> None:
        super().__init__(lineage="any", limits=StoreLimits(max_len=MAX_LEN))
        self.begun = 0
        self.open = asyncio.Event()

    async def save_state(self, subject: Subject, model_version: str, encoded: EncodedState) -> bool:
        self.begun += 1
        await self.open.wait()
        return True


@pytest.mark.parametrize(
    ("max_saves", "max_bytes", "begun"),
    [
        pytest.param(3, 2**24, 3, id="in number"),
        pytest.param(256, 5 * 128, 5, id="in bytes"),
        pytest.param(256, 1, 1, id="in bytes, though a state alone always goes"),
    ],
)
async def test_states_on_their_way_to_the_store_are_bounded(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, max_saves: int, max_bytes: int, begun: int
) -> None:
    monkeypatch.setattr(recommender_module, "MAX_SAVES", max_saves)
    monkeypatch.setattr(recommender_module, "MAX_SAVE_BYTES", max_bytes)
    store = SlowStore()
    subjects = Subjects(open_bundle(resolve(tiny)), store, Metrics())
    nothing = np.empty(0)
    record = UserRecord(1, 1, "any", nothing, nothing, nothing, nothing)
    state = State(np.zeros(16, np.float32), np.ones(16, np.float32))  # 128 bytes

    for _ in range(10):
        subjects.save(Subject("user", "ann"), record, state)
    await asyncio.sleep(0)
    begun_at_first = store.begun
    store.open.set()
    await subjects.finish_saves()
    await asyncio.sleep(0)
    subjects.save(Subject("user", "ann"), record, state)
    await subjects.finish_saves()

    assert begun_at_first == begun
    assert store.begun == begun + 1
