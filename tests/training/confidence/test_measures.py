"""Measures of a confidence against plain loops, scipy and cases whose answer is known."""

import math

import numpy as np
import pytest
from scipy import stats

from training.confidence import measures
from training.confidence.measures import Ranked, deciles, log_loss, mean_estimate, resampled, slope


def calibrated(num_users: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities, and hits drawn by them."""
    generator = np.random.default_rng(seed)
    stated = generator.beta(1, 6, num_users)
    return stated, (generator.random(num_users) < stated).astype(np.float64)


def test_log_loss_is_that_of_scipys_bernoulli() -> None:
    stated, hit = calibrated(500, 1)

    assert log_loss(stated, hit) == pytest.approx(-stats.bernoulli.logpmf(hit, stated))
    assert log_loss(np.array([0.0, 1.0]), np.array([1.0, 0.0])) == pytest.approx(-np.log([1e-6, 1e-6]), rel=1e-4)


def test_the_area_under_risk_and_coverage_is_the_mean_of_the_risks_of_the_k_surest() -> None:
    stated, hit = calibrated(200, 2)
    order = np.argsort(-stated)
    risks = [1 - hit[order[:k]].mean() for k in range(1, 201)]

    assert Ranked.by(stated).aurc(1 - hit) == pytest.approx(np.mean(risks))


def test_equal_confidences_come_in_random_order_on_average() -> None:
    generator = np.random.default_rng(3)
    confidence = generator.integers(0, 4, 30).astype(np.float64)
    loss = generator.random(30)
    areas = []
    for _ in range(4000):
        order = np.lexsort((generator.random(30), -confidence))
        areas.append(np.mean(np.cumsum(loss[order]) / np.arange(1, 31)))

    error = np.std(areas) / math.sqrt(len(areas))
    assert abs(Ranked.by(confidence).aurc(loss) - np.mean(areas)) < 4.5 * error


def test_a_resample_is_the_same_as_its_users_written_out() -> None:
    stated, hit = calibrated(60, 4)
    counts = np.bincount(np.random.default_rng(5).integers(60, size=60), minlength=60)
    drawn = np.repeat(np.arange(60), counts)

    area = Ranked.by(stated).aurc(1 - hit, counts)

    assert area == pytest.approx(Ranked.by(stated[drawn]).aurc(1 - hit[drawn]))


def test_a_confidence_that_says_nothing_has_the_area_of_the_risk_itself() -> None:
    _, hit = calibrated(300, 6)

    assert Ranked.by(np.zeros(300)).aurc(1 - hit) == pytest.approx(1 - hit.mean())


def test_a_confidence_that_knows_has_the_least_area_of_all_orders() -> None:
    _, hit = calibrated(300, 7)
    least = Ranked.by(hit).aurc(1 - hit)

    # k hits without a risk, then misses one by one: Σ_j j/(k+j) over all users.
    k = int(hit.sum())
    assert least == pytest.approx(sum(j / (k + j) for j in range(1, 301 - k)) / 300)


@pytest.mark.parametrize("coverage", [0.1, 0.25, 0.5, 1.0])
def test_the_surest_share_is_the_head_of_the_sorted_users(coverage: float) -> None:
    stated, hit = calibrated(200, 8)
    head = np.argsort(-stated)[: int(coverage * 200)]

    assert Ranked.by(stated).surest(hit, coverage) == pytest.approx(hit[head].mean())
    assert Ranked.by(stated).curve(1 - hit, np.array([coverage])) == pytest.approx([1 - hit[head].mean()])


def test_of_a_group_at_the_border_its_share_counts() -> None:
    ranked = Ranked.by(np.array([3.0, 1.0, 1.0, 1.0]))

    assert ranked.surest(np.array([1.0, 0.0, 0.0, 1.0]), 0.5) == pytest.approx((1 + 1 / 3) / 2)


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution() -> None:
    values = np.random.default_rng(9).normal(2, 3, 4000)
    found = mean_estimate(values)

    half = 1.96 * values.std() / math.sqrt(4000)
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * half, rel=0.1)
    assert found.low < values.mean() < found.high


def test_equal_seeds_draw_equal_users() -> None:
    values = np.random.default_rng(10).random(100)
    found = resampled(lambda counts: float(counts @ values) - float(counts @ values), 100)

    assert (found.low, found.high) == (0, 0)
    assert mean_estimate(values) == mean_estimate(values)


def test_the_slope_is_that_of_scipys_regression_and_one_for_a_calibrated_confidence() -> None:
    stated, hit = calibrated(20_000, 11)
    found = slope(stated, hit)

    assert found.value == pytest.approx(stats.linregress(stated, hit).slope)
    assert found.low < 1 < found.high
    exaggerated = slope(np.minimum(2 * stated, 1), hit)
    assert exaggerated.high < 0.7


def test_deciles_of_a_calibrated_confidence_deviate_by_chance_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "RESAMPLES", 2)  # of what is not looked at here
    p_values = [deciles(*calibrated(8_000, seed)).p_value for seed in range(200)]

    # Uniform p-values; by chance below this once in ten thousand such tests.
    assert stats.kstest(p_values, "uniform").pvalue > 1e-4


def test_deciles_are_means_of_equal_groups_by_rising_confidence() -> None:
    stated, hit = calibrated(1005, 12)
    found = deciles(stated, hit)

    order = np.argsort(stated)
    assert found.stated[0] == pytest.approx(stated[order[:101]].mean())
    assert found.realised[-1] == pytest.approx(hit[order[-100:]].mean())


def test_a_confidence_that_overstates_is_found_out() -> None:
    stated, hit = calibrated(20_000, 13)

    p_value = deciles(np.minimum(1.2 * stated, 1), hit).p_value
    assert p_value is not None
    assert p_value < 1e-6


def test_popularity_gives_each_item_its_share_of_the_uses_that_are_left() -> None:
    counts = np.array([9, 4, 0, 2])
    found = measures.popularity_log_probability(counts, np.array([0, 2, 1]), {1: np.array([0, 3]), 2: np.array([1])})

    assert np.exp(found) == pytest.approx([10 / 19, 1 / 6, 0])
