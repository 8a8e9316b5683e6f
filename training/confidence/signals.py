"""Confidences for "the next event is in the list": those that every model gives away, those that a filter adds, and
their best fitted combination.

U users · K list length · S signals
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.config import FIRST_ITEM
from training.calibration import fit_logistic
from training.evaluate import LIST_LENGTH, Predictions

FREE = ("sum of ten", "largest probability", "entropy", "margin", "history length", "popularity")
"""Signals of any model: of its temperature-scaled probabilities, of the user's history, of the list's items."""
OF_PRECISION = ("precision", "score variance")
"""Signals of a model that filters. Of several passes or models the variance is that of log p between them."""
LEAST_VARIANCE = 1e-12
"""Passes that agree to the last digit have none."""


def signals(predictions: Predictions, training_counts: np.ndarray) -> dict[str, np.ndarray]:
    """Every signal of each user, (U,), higher for a surer list; those of precision only where the model has them.

    Args:
        predictions: lists of at least `LIST_LENGTH`.
        training_counts: (N,).
    """
    log_probability = predictions.list_log_probability[:, :LIST_LENGTH].astype(np.float64)
    probability = np.exp(log_probability)
    counts = training_counts[predictions.items[:, :LIST_LENGTH] - FIRST_ITEM]
    found = {
        "sum of ten": _log_odds(probability.sum(1)),
        "largest probability": log_probability[:, 0],
        "entropy": -predictions.entropy.astype(np.float64),
        "margin": log_probability[:, 0] - log_probability[:, 1],
        "history length": np.log1p(predictions.num_events),
        "popularity": np.log1p(counts).mean(1),
    }
    if np.isfinite(predictions.mean_precision).all():
        found["precision"] = np.log(predictions.mean_precision.astype(np.float64))
    if predictions.list_variance.any():
        variance = np.maximum(predictions.list_variance[:, :LIST_LENGTH].astype(np.float64), LEAST_VARIANCE)
        found["score variance"] = -np.log(variance).mean(1)
    return found


@dataclass(frozen=True)
class Combination:
    """A logistic combination of signals: P(hit) = σ(bias + weights·(x − mean)/std)."""

    names: tuple[str, ...]
    mean: np.ndarray
    std: np.ndarray
    weights: np.ndarray
    bias: float

    @classmethod
    def fit(cls, values: dict[str, np.ndarray], names: Sequence[str], hit_U: np.ndarray) -> "Combination":
        """By penalised maximum likelihood; fit it on validation users.

        Args:
            values: of `signals`.
            names: which of them to combine.
            hit_U: whether the next event was in the list.
        """
        design = np.stack([values[name] for name in names], 1)
        mean, std = design.mean(0), np.maximum(design.std(0), 1e-9)
        weights, bias = fit_logistic((design - mean) / std, hit_U.astype(np.float64))
        return cls(tuple(names), mean, std, weights, bias)

    def stated(self, values: dict[str, np.ndarray]) -> np.ndarray:
        """The probability of a hit, (U,) in (0, 1)."""
        design = np.stack([values[name] for name in self.names], 1)
        return np.exp(-np.logaddexp(0, -((design - self.mean) / self.std @ self.weights + self.bias)))


def _log_odds(probability: np.ndarray) -> np.ndarray:
    kept = np.clip(probability, 1e-9, 1 - 1e-9)
    return np.log(kept) - np.log1p(-kept)
