"""Windows, filters and confidences, against answers worked out by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model.bundle import Bundle, open_bundle
from model.config import BOS, FIRST_ITEM, UNK, UNKNOWN_BASE
from model.registry import resolve
from service.candidates import NOTHING_ADDED, Candidates
from service.engine import Ranking
from service.errors import InferenceFailed
from service.filtered import State
from service.ranking import (
    History,
    drawn,
    encoder_row,
    entries,
    filters,
    list_confidence,
    order,
    policy_of,
    translated,
)
from service.recommender import told_history
from service.schemas import HistoryEvent, Policy, RecommendationRequest
from tests.service.bundles import COUNTS, ITEM_IDS, MAX_LEN, NUM_ITEMS

NOTHING = np.empty(0, np.int64)


@pytest.fixture(scope="module")
def bundle(tiny: Path) -> Bundle:
    return open_bundle(resolve(tiny))


def history(count: int, max_len: int, seen: np.ndarray = NOTHING) -> History:
    """A user whose event number e was on item 100 + e, at second 1,000 + e."""
    kept = np.arange(max(0, count - max_len), count) + 100
    return History(count, kept, np.ones(len(kept), np.float32), kept + 900.0, seen)


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, range(0)),
        (1, range(1)),
        (4, range(4)),
        (5, range(2, 5)),  # one too many: the window moves by half its length
        (6, range(2, 6)),
        (7, range(4, 7)),
        (103, range(100, 103)),
    ],
)
def test_the_row_shows_bos_and_the_window_of_the_total_count(count: int, shown: range) -> None:
    row = encoder_row(history(count, 4), max_len=4)

    assert row.items.tolist() == [BOS, *(event + 100 for event in shown)]
    assert row.weights.tolist() == [1.0] * (len(shown) + 1)
    np.testing.assert_array_equal(row.timestamps, [np.nan, *(event + 1000.0 for event in shown)])
    assert row.timestamps.dtype == np.float64


def test_numbers_of_other_catalogues_are_unknown_unless_this_one_learned_the_id(bundle: Bundle) -> None:
    numbers = np.array([FIRST_ITEM, FIRST_ITEM + NUM_ITEMS, UNKNOWN_BASE, UNKNOWN_BASE + 1, UNKNOWN_BASE + 2])
    ids = {UNKNOWN_BASE: ITEM_IDS[9], UNKNOWN_BASE + 1: "still-new"}

    found = translated(numbers, NUM_ITEMS, ids, bundle.items)

    assert found.tolist() == [FIRST_ITEM, UNK, FIRST_ITEM + 9, UNK, UNK]


def test_seen_items_leave_normaliser_and_list_when_the_event_is_a_new_item() -> None:
    user = history(2, 4, seen=np.array([5, 6]))

    plain = filters(user, "next_new_item", NUM_ITEMS, exclude_seen=True, exclude=[9, 5], allow=None)
    with_seen = filters(user, "next_new_item", NUM_ITEMS, exclude_seen=False, exclude=[9], allow=None)

    assert (plain.seen.tolist(), plain.blocked.tolist()) == ([5, 6], [5, 6, 9])
    assert (with_seen.seen.tolist(), with_seen.blocked.tolist()) == ([5, 6], [9])


def test_seen_items_stay_in_the_normaliser_when_the_event_is_any_item() -> None:
    user = history(2, 4, seen=np.array([5, 6]))

    chosen = filters(user, "next_item", NUM_ITEMS, exclude_seen=True, exclude=[], allow=None)

    assert (chosen.seen.tolist(), chosen.blocked.tolist()) == ([], [5, 6])


def test_an_allow_list_blocks_everything_else_items_added_at_run_time_too() -> None:
    num_candidates = NUM_ITEMS + 2

    chosen = filters(history(0, 4), "next_new_item", num_candidates, exclude_seen=True, exclude=[7], allow=[4, 7])

    assert chosen.blocked.tolist() == list(range(5, FIRST_ITEM + num_candidates))


def ranking_of(probability: list[float], items: list[int], reliability: float = 0.5) -> Ranking:
    size = len(items)
    return Ranking(
        items=np.array(items),
        order_key=np.arange(size, 0, -1).astype(np.float32),
        log_probability=np.log(probability),
        score_mean=np.arange(size, 0, -1).astype(np.float32),
        score_variance=np.full(size, 4.0, np.float32),
        reliability=np.full(size, reliability, np.float32),
        entropy=1.0,
        mean_precision=2.0,
    )


def test_an_entry_carries_deviation_and_calibrated_confidence(bundle: Bundle) -> None:
    # The tiny bundle's map says σ(logit p) = p.
    listed = entries(
        ranking_of([0.5, 0.25, 0.125], [8, 6, 7]), bundle.calibration, Candidates.of(bundle, NOTHING_ADDED), NOTHING, 3
    )

    assert [(entry.number, entry.score, entry.std, entry.reliability) for entry in listed] == [
        (8, 3.0, 2.0, 0.5),
        (6, 2.0, 2.0, 0.5),
        (7, 1.0, 2.0, 0.5),
    ]
    assert [entry.confidence for entry in listed] == pytest.approx([0.5, 0.25, 0.125])


def test_every_feature_reaches_the_confidence_map(bundle: Bundle) -> None:
    calibration = bundle.calibration.model_copy(update={"weights": (1.0, 0.1, 0.2, 0.3, 0.4, 0.5), "bias": -1.0})

    (entry,) = entries(ranking_of([0.2], [10]), calibration, Candidates.of(bundle, NOTHING_ADDED), NOTHING, 7)

    uses = COUNTS[10 - FIRST_ITEM].item()
    logit = (
        -1.0
        + np.log(0.2 / 0.8)
        + 0.1 * np.log(4.0)
        + 0.2 * np.log(1 + uses)
        + 0.3 * 1.0
        + 0.4 * np.log(2.0)
        + 0.5 * np.log(8)
    )
    assert entry.confidence == pytest.approx(1 / (1 + np.exp(-logit)))


def test_what_cannot_be_the_event_has_confidence_zero(bundle: Bundle) -> None:
    listed = entries(
        ranking_of([0.5, 0.25], [8, 6]), bundle.calibration, Candidates.of(bundle, NOTHING_ADDED), np.array([8]), 3
    )

    assert [entry.confidence for entry in listed] == pytest.approx([0.0, 0.25])


def test_a_plain_model_has_no_reliability(bundle: Bundle) -> None:
    (entry,) = entries(
        ranking_of([0.5], [8], reliability=np.nan), bundle.calibration, Candidates.of(bundle, NOTHING_ADDED), NOTHING, 3
    )

    assert entry.reliability is None


def test_a_confidence_that_is_no_number_is_an_error_and_no_shorter_list(bundle: Bundle) -> None:
    plain = ranking_of([0.5, 0.25], [8, 6])
    endless = replace(plain, mean_precision=np.inf)

    with pytest.raises(InferenceFailed, match=r"calibration\.json"):
        entries(endless, bundle.calibration, Candidates.of(bundle, NOTHING_ADDED), NOTHING, 3)


def test_the_confidence_of_a_list_is_the_sum_and_at_most_one(bundle: Bundle) -> None:
    listed = entries(
        ranking_of([0.5, 0.25], [8, 6]), bundle.calibration, Candidates.of(bundle, NOTHING_ADDED), NOTHING, 3
    )

    assert list_confidence(listed) == pytest.approx(0.75)
    assert list_confidence(listed * 2) == 1.0
    assert list_confidence([]) == 0


def told(row: int, **fields: object) -> HistoryEvent:
    return HistoryEvent.model_validate({"item_id": ITEM_IDS[row], **fields})


def test_a_told_history_keeps_the_last_events_and_every_seen_item(bundle: Bundle) -> None:
    events = [told(row) for row in range(12)] + [told(20, weight=0)]

    found = told_history(events, MAX_LEN, Candidates.of(bundle, NOTHING_ADDED))

    assert found.count == 12
    assert found.items.tolist() == [row + FIRST_ITEM for row in range(4, 12)]
    assert found.seen.tolist() == [row + FIRST_ITEM for row in [*range(12), 20]]


def test_a_told_history_with_one_undated_event_stays_in_its_order(bundle: Bundle) -> None:
    dated = [told(2, timestamp=30), told(1, timestamp=20), told(0, timestamp=20)]

    assert told_history(dated, MAX_LEN, Candidates.of(bundle, NOTHING_ADDED)).items.tolist() == [5, 4, 6]
    assert told_history([*dated, told(3)], MAX_LEN, Candidates.of(bundle, NOTHING_ADDED)).items.tolist() == [6, 5, 4, 7]


def test_a_told_history_carries_seconds_and_no_number_where_an_event_has_no_time(bundle: Bundle) -> None:
    events = [
        told(0, timestamp=1_764_424_800.25),
        told(1, timestamp=7, weight=0),
        told(2),
        told(3, timestamp="2025-11-29T14:00:00.5Z"),
    ]

    found = told_history(events, MAX_LEN, Candidates.of(bundle, NOTHING_ADDED))

    # `date -u -d 2025-11-29T14:00:00.5Z +%s.%N`
    np.testing.assert_array_equal(found.timestamps, [1_764_424_800.25, np.nan, 1_764_424_800.5])
    assert found.timestamps.dtype == np.float64


# ---- policies --------------------------------------------------------------------------------------------


def some_state(width: int = 3) -> State:
    return State(np.arange(width, dtype=np.float32), np.array([4.0, 0.25, 1e6], np.float32)[:width])


def policy(name: str, kappa: float | None = None, seed: int | None = None) -> Policy:
    return Policy.model_validate({"name": name, "kappa": kappa, "seed": seed})


def test_a_policy_is_asked_for_with_what_it_has_and_the_rest_is_filled_in() -> None:
    def of(**fields: object) -> Policy:
        return policy_of(RecommendationRequest.model_validate({"user_id": "a", **fields}))

    assert of() == policy("mean")
    assert of(policy="lcb") == policy("lcb", kappa=1.0)
    assert of(policy="ucb", kappa=0) == policy("ucb", kappa=0.0)
    assert of(policy="thompson", seed=3.0) == policy("thompson", seed=3)
    seeds = {of(policy="thompson").seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(seed is not None and 0 <= seed < 2**32 for seed in seeds)


def test_the_mean_is_ordered_by_the_state_s_own_logit_and_a_bound_by_its_score() -> None:
    state = some_state()

    assert order(policy("mean"), state) is None
    for name, kappa in (("lcb", -1.5), ("ucb", 1.5)):
        made = order(policy(name, kappa=1.5), state)
        assert made is not None
        assert (made.shrinkage, made.kappa) == (0.0, kappa)
        np.testing.assert_array_equal([made.mean, made.precision], [state.mean, state.precision])


def test_thompson_is_ordered_by_the_logit_of_a_drawn_state_that_is_certain() -> None:
    made = order(policy("thompson", seed=0), some_state())

    assert made is not None
    assert (made.shrinkage, made.kappa) == (1.0, 0.0)
    assert np.isinf(made.precision).all()
    # The first three standard normal numbers of NumPy's frozen stream of seed 0.
    noise = np.array([1.764052345967664, 0.4001572083672233, 0.9787379841057392])
    np.testing.assert_allclose(made.mean, [0 + noise[0] / 2, 1 + noise[1] * 2, 2 + noise[2] / 1000], rtol=1e-6)
    assert made.mean.dtype == np.float32


def test_draws_are_those_of_the_posterior() -> None:
    state = some_state()

    draws = np.array([drawn(state, seed) for seed in range(4000)], np.float64)

    std = np.array([0.5, 2.0, 0.001])
    # Five standard errors of a mean, and of a variance, which is normal at this size.
    assert (np.abs(draws.mean(0) - state.mean) < 5 * std / np.sqrt(4000)).all()
    assert (np.abs(draws.var(0) / std**2 - 1) < 5 * np.sqrt(2 / 4000)).all()
    assert (np.abs(np.corrcoef(draws.T) - np.eye(3)) < 5 / np.sqrt(4000)).all()


def test_a_state_that_is_certain_is_drawn_as_it_is() -> None:
    state = State(np.arange(3, dtype=np.float32), np.full(3, np.inf, np.float32))

    np.testing.assert_array_equal(drawn(state, 5), state.mean)
