"""Paired differences between two models over the same users and seeds, with bootstrap intervals.

S seeds · U test users · V users for whom something differs · M metrics · R resamples
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from training import metrics

RESAMPLES = 2000
LEVEL = 0.95
CHUNK_COUNTS = 2**22
"""Counts of drawn users held at a time."""


@dataclass(frozen=True)
class Change:
    """What one model has over another, and its 95 % interval."""

    difference: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return self.low > 0 or self.high < 0

    @property
    def verdict(self) -> str:
        """What the interval says of the first model, in words."""
        if not self.excludes_zero:
            return "no difference shown"
        return "better" if self.low > 0 else "worse"


@dataclass(frozen=True)
class Difference(Change):
    """Mean of a metric under two models, and what the first has over the second."""

    first: float
    second: float
    users: int
    seeds: int

    @property
    def relative(self) -> float | None:
        """The difference as a share of the second's; None where that is 0."""
        return self.difference / self.second if self.second else None


def paired_differences(
    first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray], seed: int = 0
) -> dict[str, Difference]:
    """Differences of two models' means with 95 % intervals over users and seeds; one draw serves all metrics.

    Each resample draws users with replacement and, independently, seeds: an answer that holds for these users but
    changes with the seed gets the wide interval it deserves. With one seed only users are drawn, and the interval
    says nothing about another seed.

    Args:
        first, second: metric → (S,U), of each user under each seed, paired by row and by column; S and U at least 1.
        seed: of the resampling.
    """
    gain_SUM = _gains(first, second)
    num_seeds, num_users, _ = gain_SUM.shape
    low_M, high_M = _bounds(_resampled_means(gain_SUM, np.random.default_rng(seed)))
    return {
        name: Difference(
            first=float(first[name].mean()),
            second=float(second[name].mean()),
            difference=float(gain_SUM[:, :, metric].mean()),
            low=float(low_M[metric]),
            high=float(high_M[metric]),
            users=num_users,
            seeds=num_seeds,
        )
        for metric, name in enumerate(first)
    }


def mean_relative_change(
    pairs: Sequence[tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]], seed: int = 0
) -> dict[str, Change]:
    """Mean over data sets of the change from the second model to the first, as a share of the second's mean.

    Each data set counts the same, whatever its size, and is resampled by itself, as in `paired_differences`. The
    interval is about these data sets: another one may have another change.

    Args:
        pairs: the first and the second model on each data set, as `paired_differences` takes them; with the same
            metrics on all.
        seed: of the resampling.

    Raises:
        ZeroDivisionError: the second model's mean is 0 on a data set.
    """
    changes, draws = [], []
    for place, (first, second) in enumerate(pairs):
        gain_SUM = _gains(first, second)
        mean_M = np.array([float(second[name].mean()) for name in first])
        if not mean_M.all():
            raise ZeroDivisionError("a change relative to 0")
        changes.append(gain_SUM.mean((0, 1)) / mean_M)
        draws.append(_resampled_means(gain_SUM, np.random.default_rng([seed, place])) / mean_M)
    low_M, high_M = _bounds(np.mean(draws, axis=0))
    change_M = np.mean(changes, axis=0)
    return {
        name: Change(float(change_M[metric]), float(low_M[metric]), float(high_M[metric]))
        for metric, name in enumerate(pairs[0][0])
    }


def _gains(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> np.ndarray:
    """(S,U,M)"""
    return np.stack([first[name] - second[name] for name in first], axis=-1)


def _bounds(draws_RM: np.ndarray) -> np.ndarray:
    """(2,M) ends of the percentile interval."""
    return np.quantile(draws_RM, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)


def _resampled_means(gain_SUM: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """(R,M) means of the gains over drawn users and drawn seeds."""
    num_seeds, num_users, num_metrics = gain_SUM.shape
    # Most users gain nothing, and which of those are drawn does not matter: how often the others are, does.
    gain_SVM = gain_SUM[:, gain_SUM.any((0, 2))]
    num_moved = gain_SVM.shape[1]
    means_RM = np.zeros((RESAMPLES, num_metrics))
    if num_moved == 0:
        return means_RM
    step = max(1, CHUNK_COUNTS // num_moved)
    for begin in range(0, RESAMPLES, step):
        size = min(step, RESAMPLES - begin)
        times_RV = _times_drawn(num_users, num_moved, size, generator)
        share_RS = (generator.integers(num_seeds, size=(size, num_seeds))[..., None] == np.arange(num_seeds)).mean(1)
        sum_RSM = np.tensordot(times_RV, gain_SVM, axes=(1, 1))
        means_RM[begin : begin + size] = np.einsum("rsm,rs->rm", sum_RSM, share_RS) / num_users
    return means_RM


def _times_drawn(num_users: int, num_moved: int, size: int, generator: np.random.Generator) -> np.ndarray:
    """(R,V) how often each of the first `num_moved` users is drawn when `num_users` are drawn with replacement."""
    drawn_R = generator.binomial(num_users, num_moved / num_users, size=size)
    user = generator.integers(num_moved, size=drawn_R.sum())
    cell = np.repeat(np.arange(size), drawn_R) * num_moved + user
    return np.bincount(cell, minlength=size * num_moved).reshape(size, num_moved).astype(float)


METRICS = {"HR@10": lambda ranks: metrics.hit_rate(ranks, 10), "NDCG@10": lambda ranks: metrics.ndcg(ranks, 10)}
"""What the study compares: ranks (…,) → the metric of each."""
