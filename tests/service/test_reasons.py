"""What an answer rests on, from the request to the graph. Expected weights come from the torch model."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.config import BOS, FIRST_ITEM, UNK, UNKNOWN_BASE, window_start
from service.context import unhurried
from service.engine import EncoderRow, Heard
from service.reasons import MAX_REASONS, explanation
from service.schemas import Explanation, RankingRequest, RecommendationRequest, RecommendationResponse
from service.states import Event, MemoryStore, StateUnavailable, StoreLimits, Subject
from tests.service.bundles import ITEM_IDS, MAX_LEN, NUM_ITEMS, tiny_model
from tests.service.watched import Served, served

pytestmark = pytest.mark.anyio

ANN = Subject("user", "ann")
T0 = 1_764_424_800
BEYOND = FIRST_ITEM + NUM_ITEMS
"""A number that only a later catalogue has."""


@pytest.fixture
async def service(tiny: Path) -> AsyncIterator[Served]:
    def open_store(bundle: Any) -> MemoryStore:
        return MemoryStore(lineage=bundle.manifest.lineage, limits=StoreLimits(max_len=MAX_LEN))

    async with served(tiny, open_store) as running:
        yield running


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def event(place: int, number: int, item_id: str, weight: float = 1.0) -> Event:
    return Event(number, item_id, (T0 + 60 * place) * 1000, weight, identity=None, undated=False)


def viewed(*rows: int, after: int = 0) -> list[Event]:
    """Events a minute apart on the catalogue's items of those rows."""
    return [event(after + place, FIRST_ITEM + row, ITEM_IDS[row]) for place, row in enumerate(rows)]


def told(*rows: int) -> list[dict[str, Any]]:
    return [{"item_id": ITEM_IDS[row], "timestamp": T0 + 60 * place} for place, row in enumerate(rows)]


async def recommended(service: Served, **asked: Any) -> RecommendationResponse:
    request = RecommendationRequest.model_validate({"num_results": 3, **asked})
    return await service.recommender.recommend(request, unhurried("test", 60))


@torch.no_grad()
def assert_explains(found: Explanation | None, model: Any, numbers: Sequence[int], ids: Sequence[str | None]) -> None:
    """The reasons of a history of these numbers, an event a minute, each of weight 1."""
    start = window_start(len(numbers), MAX_LEN)
    items = torch.tensor([[BOS, *numbers[start:]]])
    expected = model.reasons(items, torch.ones(items.shape))
    weights, precisions = expected.kriging_weight[0, 1:], expected.precision[0, 1:]
    order = weights.argsort(descending=True)[:MAX_REASONS].tolist()

    assert found is not None
    assert [reason.item_id for reason in found.reasons] == [ids[start + place] for place in order]
    assert [reason.timestamp for reason in found.reasons] == [T0 + 60 * (start + place) for place in order]
    np.testing.assert_allclose(
        [(reason.kriging_weight, reason.precision) for reason in found.reasons],
        [(weights[place].item(), precisions[place].item()) for place in order],
        rtol=1e-4,
        atol=1e-5,
    )
    assert found.prior_weight == pytest.approx(expected.kriging_weight[0, 0].item(), abs=1e-5)


# ---- through the recommender -----------------------------------------------------------------------------


async def test_nobody_asks_nothing_runs(service: Served) -> None:
    await service.store.append(ANN, viewed(5, 6, 7))

    answer = await recommended(service, user_id="ann")

    assert answer.explanation is None
    assert service.engine.graphs == ["encoder", "ranker"]


async def test_a_cold_start_rests_on_the_prior_alone_and_runs_no_explainer(service: Served) -> None:
    answer = await recommended(service, user_id="stranger", explain=True)

    assert answer.explanation == Explanation(reasons=[], prior_weight=1.0)
    assert service.engine.graphs == ["ranker"]


async def test_the_reasons_do_not_depend_on_how_the_state_came_about(service: Served, model: Any) -> None:
    await service.store.append(ANN, viewed(5, 6))
    ways = [await service.ask(ANN)]
    await service.store.append(ANN, viewed(7, after=2))
    service.engine.graphs.clear()

    folded = await recommended(service, user_id="ann", explain=True)
    await service.subjects.finish_saves()
    current = await recommended(service, user_id="ann", explain=True)
    encoded = await recommended(service, history=told(5, 6, 7), explain=True)

    assert ways[0].how == "encoded"
    assert service.engine.graphs == [
        *("step", "ranker", "explainer"),
        *("ranker", "explainer"),
        *("encoder", "ranker", "explainer"),
    ]
    numbers = [FIRST_ITEM + row for row in (5, 6, 7)]
    for answer in (folded, current, encoded):
        assert_explains(answer.explanation, model, numbers, [ITEM_IDS[row] for row in (5, 6, 7)])


@pytest.mark.parametrize("number", [MAX_LEN, MAX_LEN + 1, 3 * MAX_LEN])
async def test_of_a_long_history_the_window_is_told(service: Served, model: Any, number: int) -> None:
    rows = [11 * place % NUM_ITEMS for place in range(number)]
    await service.store.append(ANN, viewed(*rows))

    stored = await recommended(service, user_id="ann", explain=True)
    retold = await recommended(service, history=told(*rows), explain=True)

    for answer in (stored, retold):
        assert_explains(answer.explanation, model, [FIRST_ITEM + row for row in rows], [ITEM_IDS[row] for row in rows])


async def test_items_that_the_catalogue_lacks_have_their_ids_as_far_as_anybody_knows(
    service: Served, model: Any
) -> None:
    unknown = (await service.store.numbers_for_unknown(["brand-new"]))["brand-new"]
    assert unknown >= UNKNOWN_BASE
    await service.store.append(ANN, [event(0, unknown, "brand-new"), event(1, BEYOND, "later"), *viewed(3, after=2)])

    stored = await recommended(service, user_id="ann", explain=True)
    retold = await recommended(
        service, history=[{"item_id": name, "timestamp": T0} for name in ("brand-new", "later")], explain=True
    )

    numbers = [UNK, UNK, FIRST_ITEM + 3]
    assert_explains(stored.explanation, model, numbers, ["brand-new", None, ITEM_IDS[3]])
    assert retold.explanation is not None
    assert {reason.item_id for reason in retold.explanation.reasons} == {"brand-new", "later"}


async def test_events_of_weight_zero_are_no_reasons_and_told_events_need_no_time(service: Served) -> None:
    history = [{"item_id": ITEM_IDS[1], "weight": 0}, {"item_id": ITEM_IDS[2]}]

    answer = await recommended(service, history=history, explain=True)

    assert answer.explanation is not None
    (reason,) = answer.explanation.reasons
    assert (reason.item_id, reason.timestamp) == (ITEM_IDS[2], None)
    assert reason.kriging_weight + answer.explanation.prior_weight == pytest.approx(1)


async def test_without_the_store_the_fallback_history_is_the_reason(
    service: Served, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any) -> None:
        raise StateUnavailable("away")

    monkeypatch.setattr(service.store, "load", away)

    answer = await recommended(service, user_id="ann", fallback_history=told(8, 9), explain=True)

    assert answer.degraded == ["state_unavailable"]
    assert_explains(answer.explanation, model, [FIRST_ITEM + 8, FIRST_ITEM + 9], [ITEM_IDS[8], ITEM_IDS[9]])


@pytest.mark.parametrize("subject", [{"user_id": "ann"}, {"history": told(5, 6)}], ids=["stored", "told"])
async def test_rankings_and_further_pages_give_the_reasons_of_their_own_time(
    service: Served, model: Any, subject: dict[str, Any]
) -> None:
    await service.store.append(ANN, viewed(5, 6))
    first = await recommended(service, **subject)
    asked = RankingRequest.model_validate({**subject, "candidate_item_ids": [ITEM_IDS[0]], "explain": True})
    ranked = await service.recommender.rank(asked, unhurried("test", 60))
    await service.store.append(ANN, viewed(7, after=2))
    rows = (5, 6, 7) if "user_id" in subject else (5, 6)

    slate = await service.slates.load(first.recommendation_id)
    page = await service.recommender.next_page(slate, 3, unhurried("test", 60), explain=True)
    slate = await service.slates.load(first.recommendation_id)
    without = await service.recommender.next_page(slate, 3, unhurried("test", 60))

    assert_explains(ranked.explanation, model, [FIRST_ITEM + 5, FIRST_ITEM + 6], [ITEM_IDS[5], ITEM_IDS[6]])
    assert_explains(page.explanation, model, [FIRST_ITEM + row for row in rows], [ITEM_IDS[row] for row in rows])
    assert (first.explanation, without.explanation) == (None, None)


# ---- the reasons of what was heard -----------------------------------------------------------------------


def heard(*weights: float, precision: float = 2.0) -> tuple[EncoderRow, Heard]:
    """By BOS and events."""
    size = len(weights)
    row = EncoderRow(np.full(size, UNK), np.ones(size, np.float32), np.array([np.nan, *range(1, size)], np.float64))
    return row, Heard(np.array(weights, np.float32), np.full(size, precision, np.float32))


async def test_ten_at_most_are_told_the_heaviest_first_and_of_equal_ones_the_older() -> None:
    weights = [0.05, *[0.0625] * 4, 0.125, *[0.0625] * 4, 0.25, 0.03125]
    ids = [f"e{place}" for place in range(1, len(weights))]

    found = explanation(*heard(*weights), ids)

    assert [reason.item_id for reason in found.reasons] == ["e10", "e5", "e1", "e2", "e3", "e4", "e6", "e7", "e8", "e9"]
    assert len(found.reasons) == MAX_REASONS
    assert found.reasons[0].timestamp == 10
    # All events count, also those that are not told.
    assert found.prior_weight == pytest.approx(1 - sum(weights[1:]))


async def test_a_model_without_precisions_tells_weights_alone() -> None:
    found = explanation(*heard(0.5, 0.5, precision=np.inf), ["a"])

    assert [(reason.item_id, reason.kriging_weight, reason.precision) for reason in found.reasons] == [("a", 0.5, None)]


async def test_ids_are_those_of_the_last_events_and_no_share_is_negative() -> None:
    found = explanation(*heard(0.0, 0.6, 0.4000001), ["before the window", "a", "b"])

    assert [reason.item_id for reason in found.reasons] == ["a", "b"]
    assert found.prior_weight == 0
