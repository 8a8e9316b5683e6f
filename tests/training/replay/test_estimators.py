"""Estimators against answers worked out by hand and by enumeration."""

import itertools

import numpy as np
import pytest
from scipy.stats import binom, binomtest

from training.metrics import wilson_interval
from training.replay.estimators import Weighted, estimate, weights

CHOICE = np.array([0.05, 0.3, 0.1, 0.2, 0.15])
"""Probability that the next event is on each of five items; with the rest it is on none of them."""
UTILITY = np.array([1.0, 0.4, 2.0, 0.7, 0.2])


def list_probabilities() -> dict[tuple[int, int], float]:
    """Lists of two of five items, drawn one after the other by utility (Plackett–Luce): list → probability."""
    return {
        (first, second): UTILITY[first] / UTILITY.sum() * UTILITY[second] / (UTILITY.sum() - UTILITY[first])
        for first, second in itertools.permutations(range(5), 2)
    }


def with_propensities(target: np.ndarray, logging: np.ndarray) -> np.ndarray:
    """Weights by exact propensities: the counts that `weights` takes for them."""
    redraws = 500
    return weights(target * redraws, logging * (redraws + 1) - 1, redraws)


def test_over_all_lists_and_events_the_expectation_is_the_target_s_hit_rate() -> None:
    logging = np.zeros(5)
    for listed, probability in list_probabilities().items():
        logging[list(listed)] += probability
    for target in (np.array([0, 1, 0, 1, 0]), np.array([0.5, 0.25, 0.5, 0.5, 0.25])):
        expected_hits = expected_mass = 0.0
        for listed, probability in list_probabilities().items():
            rows = list(listed)
            weight = with_propensities(target[rows], logging[rows])
            for place, row in enumerate(rows):
                expected_hits += probability * CHOICE[row] * Weighted.of("", weight, place).hit_weight
            expected_mass += probability * Weighted.of("", weight, None).mass

        # The event is on one item whatever is listed, so the target's hit rate is a plain sum.
        assert expected_hits == pytest.approx(target @ CHOICE)
        assert expected_mass == pytest.approx(2)


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5, 0.99])
def test_counting_the_served_list_as_a_draw_makes_the_weight_unbiased(rate: float) -> None:
    redraws, counts = 500, np.arange(501)
    chance = binom.pmf(counts, redraws, rate)

    expected = chance @ weights(np.full(501, redraws), counts, redraws)
    naive = chance[1:] @ (redraws / counts[1:])

    assert expected == pytest.approx(1 / rate, rel=1e-4)
    assert abs(naive * rate - 1) > abs(expected * rate - 1)


def test_lists_of_one_item_have_the_textbook_s_ips_and_snips() -> None:
    weight, reward = np.array([2.0, 0.5, 0.0, 1.5]), np.array([1, 0, 1, 1])
    lists = [
        Weighted.of(f"user {number}", np.array([each]), 0 if hit else None)
        for number, (each, hit) in enumerate(zip(weight, reward, strict=True))
    ]

    found = estimate(lists)

    # (w·r)/n and (w·r)/Σw, as in Open Bandit Pipeline's InverseProbabilityWeighting and its self-normalized form.
    assert found.ips.value == pytest.approx((2.0 + 0.0 + 1.5) / 4)
    assert found.snips.value == pytest.approx((2.0 + 0.0 + 1.5) / 4.0)
    assert found.logged.value == pytest.approx(3 / 4)
    assert found.effective_lists == pytest.approx(4.0**2 / (4 + 0.25 + 2.25))
    assert (found.largest_weight, found.mean_weight.value) == (2.0, 1.0)
    assert found.difference.value == pytest.approx(found.snips.value - 3 / 4)


def test_the_logging_policy_itself_as_the_target_changes_nothing() -> None:
    lists = [Weighted.of(f"user {number}", np.ones(3), 1 if number % 4 == 0 else None) for number in range(40)]

    found = estimate(lists)

    assert found.ips == found.snips == found.logged
    assert (found.logged.value, found.effective_lists) == (0.25, pytest.approx(40))
    assert (found.difference.low, found.difference.high) == (0, 0)


def test_lists_of_one_subject_are_one_draw() -> None:
    hits = [0 if number % 2 else None for number in range(60)]
    apart = estimate([Weighted.of(f"user {number}", np.ones(2), hit) for number, hit in enumerate(hits)])
    together = estimate([Weighted.of("one", np.ones(2), hit) for hit in hits])

    # The standard error of 60 fair draws is 0.0645.
    assert apart.ips.high - apart.ips.low == pytest.approx(2 * 1.96 * 0.0645, rel=0.15)
    assert together.ips.high == together.ips.low == 0.5
    assert (apart.subjects, together.subjects) == (60, 1)


@pytest.mark.parametrize("listed", [0, 1, 37, 499, 500])
def test_the_interval_of_a_rate_is_wilsons(listed: int) -> None:
    expected = binomtest(listed, 500).proportion_ci(0.95, method="wilson")

    low, high = wilson_interval(listed, 500)

    assert (float(low), float(high)) == (pytest.approx(expected.low, abs=1e-12), pytest.approx(expected.high))
