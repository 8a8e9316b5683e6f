"""Signals of a list by hand, and their combination against planted weights."""

import numpy as np
import pytest

from model.config import FIRST_ITEM
from training.confidence.signals import FREE, OF_PRECISION, Combination, signals
from training.evaluate import Predictions


def predictions(probability_UK: np.ndarray, precision: float, variance: float = 0.5) -> Predictions:
    """Lists of items 0, 1, … with these probabilities."""
    users, length = probability_UK.shape
    return Predictions(
        rank=np.ones(users),
        log_probability=np.log(probability_UK[:, 0]),
        entropy=np.arange(users, dtype=np.float32),
        mean_precision=np.full(users, precision),
        num_events=np.arange(users),
        items=np.tile(np.arange(length) + FIRST_ITEM, (users, 1)),
        list_log_probability=np.log(probability_UK),
        list_variance=np.full((users, length), variance),
        hit=np.zeros((users, length), bool),
    )


LISTS = np.array([[0.2, *[0.03] * 11], [0.05, *[0.01] * 11]])
"""Twelve items each, of which ten count."""


def test_each_signal_by_hand() -> None:
    found = signals(predictions(LISTS, 4.0), np.arange(12))

    total = np.array([0.2 + 9 * 0.03, 0.05 + 9 * 0.01])
    assert found["sum of ten"] == pytest.approx(np.log(total / (1 - total)))
    assert found["largest probability"] == pytest.approx(np.log([0.2, 0.05]))
    assert found["entropy"].tolist() == [0, -1]
    assert found["margin"] == pytest.approx(np.log([0.2 / 0.03, 0.05 / 0.01]))
    assert found["history length"] == pytest.approx([0, np.log(2)])
    assert found["popularity"] == pytest.approx([np.log(np.arange(1, 11)).mean()] * 2)
    assert found["precision"] == pytest.approx([np.log(4)] * 2)
    assert found["score variance"] == pytest.approx([np.log(2)] * 2)


def test_a_plain_model_has_the_free_signals_alone() -> None:
    assert tuple(signals(predictions(LISTS, np.inf, 0.0), np.arange(12))) == FREE
    assert tuple(signals(predictions(LISTS, 1.0), np.arange(12))) == (*FREE, *OF_PRECISION)


def test_passes_that_differ_have_a_variance_and_no_precision() -> None:
    assert tuple(signals(predictions(LISTS, np.inf, 0.5), np.arange(12))) == (*FREE, "score variance")


def test_a_combination_finds_planted_weights() -> None:
    generator = np.random.default_rng(1)
    values = {"a": generator.normal(3, 2, 40_000), "b": generator.normal(-1, 0.5, 40_000)}
    probability = 1 / (1 + np.exp(2 - 0.5 * (values["a"] - 3) - 1.0 * (values["b"] + 1)))
    hit = generator.random(40_000) < probability

    fitted = Combination.fit(values, ["a", "b"], hit)

    assert fitted.weights / fitted.std == pytest.approx([0.5, 1.0], abs=0.1)
    assert np.abs(fitted.stated(values) - probability).mean() < 0.01
