"""Paired differences against other people's bootstrap and a plain loop."""

import numpy as np
import pytest
from scipy import stats

from training.study.compare import METRICS, Change, Difference, mean_relative_change, paired_differences


def two_models(num_seeds: int, num_users: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Hits of two models that agree on most users."""
    generator = np.random.default_rng(seed)
    likely = generator.beta(0.5, 2, num_users)
    second = generator.random((num_seeds, num_users)) < likely
    flipped = generator.random((num_seeds, num_users)) < 0.1
    return np.where(flipped, ~second, second).astype(float), second.astype(float)


def test_with_one_seed_the_interval_is_scipys_percentile_bootstrap_of_the_paired_gains():
    first, second = two_models(1, 500)
    expected = stats.bootstrap(
        ((first - second)[0],), np.mean, n_resamples=20000, method="percentile", rng=np.random.default_rng(5)
    ).confidence_interval

    found = paired_differences({"hit": first}, {"hit": second})["hit"]

    # Of quantiles of 2,000 draws: a twentieth of the interval's width.
    tolerance = 0.05 * (expected.high - expected.low)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=tolerance)


def test_with_seeds_the_interval_is_that_of_a_loop_that_draws_users_and_seeds():
    first, second = two_models(3, 200)
    first[0] += 0.05  # a seed that differs from the others
    gain = first - second
    generator = np.random.default_rng(7)
    draws = []
    for _ in range(8000):
        users, seeds = generator.integers(200, size=200), generator.integers(3, size=3)
        draws.append(gain[seeds][:, users].mean())
    low, high = np.quantile(draws, [0.025, 0.975])

    found = paired_differences({"hit": first}, {"hit": second})["hit"]

    assert (found.low, found.high) == pytest.approx((low, high), abs=0.05 * (high - low))


def test_means_and_difference_are_those_over_users_and_seeds():
    first, second = np.array([[1.0, 0, 1, 0], [1, 1, 1, 0]]), np.array([[0.0, 0, 1, 0], [0, 0, 1, 1]])

    found = paired_differences({"hit": first}, {"hit": second})["hit"]

    assert (found.first, found.second, found.difference) == (5 / 8, 3 / 8, 2 / 8)
    assert found.relative == pytest.approx(2 / 3)
    assert (found.users, found.seeds) == (4, 2)


def test_several_metrics_are_each_given_their_own_interval():
    first, second = two_models(2, 300)

    found = paired_differences({"hit": first, "ten hits": 10 * first}, {"hit": second, "ten hits": 10 * second})

    assert found["ten hits"].low == pytest.approx(10 * found["hit"].low)
    assert found["ten hits"].high == pytest.approx(10 * found["hit"].high)


def test_models_that_agree_on_everybody_differ_by_nothing_for_certain():
    first, _ = two_models(2, 50)

    found = paired_differences({"hit": first}, {"hit": first})["hit"]

    assert (found.difference, found.low, found.high) == (0, 0, 0)
    assert found.verdict == "no difference shown"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.01, 0.02, "better"),
        (-0.02, -0.01, "worse"),
        (-0.01, 0.02, "no difference shown"),
        (0.0, 0.1, "no difference shown"),
    ],
)
def test_the_verdict_is_what_the_interval_says_of_zero(low: float, high: float, verdict: str):
    assert Change(0.0, low, high).verdict == verdict


def test_there_is_no_relative_difference_to_nothing():
    assert Difference(0.1, 0.0, 0.2, first=0.1, second=0.0, users=10, seeds=1).relative is None


def test_metrics_of_ranks_by_hand():
    ranks = np.array([1.0, 3.0, 10.0, 10.5, np.inf])

    assert METRICS["HR@10"](ranks).tolist() == [1, 1, 1, 0, 0]
    assert METRICS["NDCG@10"](ranks) == pytest.approx([1, 0.5, 1 / np.log2(11), 0, 0])


def test_together_each_data_set_counts_the_same_and_is_resampled_by_itself():
    pairs = [two_models(3, 200, seed=1), two_models(2, 800, seed=2)]
    pairs[0][0][0] += 0.05  # a seed that differs from the others
    expected = np.mean([(first - second).mean() / second.mean() for first, second in pairs])
    generator = np.random.default_rng(7)
    draws = []
    for _ in range(8000):
        changes = []
        for first, second in pairs:
            num_seeds, num_users = first.shape
            users, seeds = generator.integers(num_users, size=num_users), generator.integers(num_seeds, size=num_seeds)
            changes.append((first - second)[seeds][:, users].mean() / second.mean())
        draws.append(np.mean(changes))
    low, high = np.quantile(draws, [0.025, 0.975])

    found = mean_relative_change([({"hit": first}, {"hit": second}) for first, second in pairs])["hit"]

    assert found.difference == pytest.approx(expected)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.05 * (high - low))


def test_together_a_change_relative_to_nothing_is_refused():
    first, second = two_models(2, 50)

    with pytest.raises(ZeroDivisionError, match="relative to 0"):
        mean_relative_change([({"hit": first}, {"hit": second}), ({"hit": first}, {"hit": 0 * second})])
