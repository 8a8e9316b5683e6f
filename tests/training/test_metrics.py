"""Every metric against a loop that sorts the whole catalogue, or a case worked out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training import metrics

SCORES = st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=12)


def sorted_places(scores: list[float], target: int) -> list[int]:
    """All places, from 1, that the target can take when the catalogue is sorted and ties fall by chance."""
    best_first = sorted(scores, reverse=True)
    return [place for place, score in enumerate(best_first, 1) if score == scores[target]]


@given(SCORES, st.data())
def test_a_rank_is_the_middle_of_the_places_that_sorting_can_give(scores: list[float], data: st.DataObject) -> None:
    target = data.draw(st.integers(0, len(scores) - 1))

    rank = metrics.target_ranks(np.array([scores]), np.array([target]))[0]

    if scores[target] == -math.inf:
        assert rank == math.inf
    else:
        assert rank == np.mean(sorted_places(scores, target))


def test_ranks_of_many_users_are_those_of_each_alone() -> None:
    generator = np.random.default_rng(0)
    scores, targets = generator.integers(0, 5, (30, 20)).astype(float), generator.integers(0, 20, 30)

    ranks = metrics.target_ranks(scores, targets)

    alone = [metrics.target_ranks(scores[[user]], targets[[user]])[0] for user in range(30)]
    assert ranks.tolist() == alone


def test_a_score_that_is_not_a_number_is_an_error_and_not_a_first_place() -> None:
    with pytest.raises(ValueError, match="NaN"):
        metrics.target_ranks(np.array([[math.nan, math.nan]]), np.array([0]))


@pytest.mark.parametrize("k", [5, 10, 20])
def test_hit_rate_and_ndcg_are_those_of_the_sorted_catalogue(k: int) -> None:
    generator = np.random.default_rng(1)
    scores, targets = generator.normal(size=(200, 40)), generator.integers(0, 40, 200)
    hits, gains = [], []
    for user in range(200):
        top = sorted(range(40), key=lambda item: -scores[user, item])[:k]
        hits.append(targets[user] in top)
        # One relevant item, so the ideal list has a discounted gain of 1/log2(2) = 1.
        gains.append(sum(1 / math.log2(place + 2) for place, item in enumerate(top) if item == targets[user]))

    summary = metrics.ranking_metrics(metrics.target_ranks(scores, targets))

    assert summary[f"hr@{k}"] == pytest.approx(np.mean(hits), abs=1e-12)
    assert summary[f"ndcg@{k}"] == pytest.approx(np.mean(gains), abs=1e-12)


def test_ndcg_by_hand() -> None:
    ranks = np.array([1, 2, 3, 10, 10.5, 11, math.inf])

    assert metrics.ndcg(ranks, 10) == pytest.approx([1, 0.6309298, 0.5, 0.2890648, 0, 0, 0])
    assert metrics.hit_rate(ranks, 10).tolist() == [1, 1, 1, 1, 0, 0, 0]


def test_ece_by_hand() -> None:
    # Two bins of two: (.1, .3) with hits (1, 0), gap |.2 - .5|; (.6, .9) with hits (0, 1), gap |.75 - .5|.
    confidence, hit = np.array([0.9, 0.1, 0.6, 0.3]), np.array([1, 1, 0, 0])

    assert metrics.expected_calibration_error(confidence, hit, num_bins=2) == pytest.approx(0.275)


def test_ece_bins_of_unequal_size_count_by_their_size() -> None:
    # Three values in two bins: (0.0, 0.2) without a hit, gap 0.1 twice; (0.4,) with one, gap 0.6 once.
    error = metrics.expected_calibration_error(np.array([0.0, 0.2, 0.4]), np.array([0, 0, 1]), num_bins=2)

    assert error == pytest.approx((2 * 0.1 + 0.6) / 3)


def test_ece_has_bins_of_equal_mass() -> None:
    # Confidences 1 … 99 at 0.01 and one at 0.5 share no bin by width, but the last ten share one by mass.
    confidence = np.repeat([0.01, 0.5], [99, 1])
    hit = np.repeat([0, 1], [99, 1])

    assert metrics.expected_calibration_error(confidence, hit) == pytest.approx(
        0.9 * 0.01 + 0.1 * abs((9 * 0.01 + 0.5) / 10 - 0.1)
    )


def one_hit_a_list(confidence_UK: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Hits of users whose next item is each listed one with exactly the stated probability."""
    hit = np.zeros(confidence_UK.shape)
    for user, row in enumerate(confidence_UK):
        place = generator.choice(len(row) + 1, p=[*row, 1 - row.sum()])
        if place < len(row):
            hit[user, place] = 1
    return hit


def test_ece_null_interval_covers_about_95_percent_of_calibrated_draws() -> None:
    generator = np.random.default_rng(2)
    confidence = np.sort(generator.dirichlet([0.3] * 11, size=200)[:, :10], axis=1)[:, ::-1]
    low, high = metrics.ece_null_interval(confidence)

    errors = [
        metrics.expected_calibration_error(confidence.ravel(), one_hit_a_list(confidence, generator).ravel())
        for _ in range(300)
    ]

    # Of 300 draws 285 ± 3.8 are expected, and the ends themselves come from 500 draws (± 1 % of coverage).
    assert 0.95 - 0.06 <= np.mean([low <= error <= high for error in errors]) <= 0.95 + 0.045


def test_an_over_confident_model_falls_above_its_null_interval() -> None:
    generator = np.random.default_rng(3)
    true = generator.dirichlet([0.3] * 21, size=400)[:, :10]
    stated = true * 1.8

    hit = one_hit_a_list(true, generator)

    assert metrics.expected_calibration_error(stated.ravel(), hit.ravel()) > metrics.ece_null_interval(stated)[1]


def test_brier_skill_by_hand() -> None:
    # Base rate 1/4: Brier 3/16. Stated (.5, 0, 0, .1) against (1, 0, 0, 0): (.25 + .01)/4 = 0.065.
    skill = metrics.brier_skill(np.array([0.5, 0.0, 0.0, 0.1]), np.array([1.0, 0, 0, 0]))

    assert skill == pytest.approx(1 - 0.065 / 0.1875)


def test_brier_skill_of_the_base_rate_is_zero() -> None:
    hit = np.array([1.0, 0, 0, 0, 1])

    assert metrics.brier_skill(np.full(5, 0.4), hit) == pytest.approx(0)


@pytest.mark.parametrize("hit", [np.zeros(4), np.ones(4)])
def test_brier_skill_is_zero_where_all_hits_are_alike(hit: np.ndarray) -> None:
    assert metrics.brier_skill(np.full(4, 0.3), hit) == 0


def test_bootstrap_interval_is_the_normal_one_for_many_users() -> None:
    values = np.random.default_rng(4).binomial(1, 0.3, size=4000).astype(float)
    half = 1.959964 * values.std() / math.sqrt(4000)

    low, high = metrics.bootstrap_interval(values)

    # The 2.5 % quantile of 2,000 resamples has a standard error of 3 % of `half`: four of them.
    assert low == pytest.approx(values.mean() - half, abs=0.12 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.12 * half)


def test_resamples_are_the_same_users_however_many_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(4).random(70)
    generator = np.random.default_rng(0)
    means = [generator.choice(values, 70).mean() for _ in range(metrics.RESAMPLES)]

    for at_once in (1, 1000, 10**7):
        monkeypatch.setattr(metrics, "DRAWN_AT_ONCE", at_once)
        assert metrics.bootstrap_interval(values) == pytest.approx(np.quantile(means, [0.025, 0.975]), rel=1e-12)


def test_bootstrap_interval_follows_seed_and_level() -> None:
    values = np.random.default_rng(5).normal(size=50)
    wide, narrow = (
        metrics.bootstrap_interval(values, level=0.99),
        metrics.bootstrap_interval(values, level=0.5),
    )

    assert metrics.bootstrap_interval(values, seed=1) == metrics.bootstrap_interval(values, seed=1)
    assert metrics.bootstrap_interval(values, seed=1) != metrics.bootstrap_interval(values, seed=2)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_bootstrap_interval_of_equal_values_is_that_value() -> None:
    assert metrics.bootstrap_interval(np.full(10, 0.25)) == (0.25, 0.25)
