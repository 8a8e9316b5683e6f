"""Paired differences between two models over the same users and seeds, with bootstrap intervals.

U test users · S seeds
"""

from dataclasses import dataclass

import numpy as np

from training import metrics

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """Mean of a metric under two models, and what the first has over the second."""

    first: float
    second: float
    difference: float
    low: float
    high: float
    users: int
    seeds: int

    @property
    def relative(self) -> float:
        """The difference as a share of the second's; NaN where that is 0."""
        return self.difference / self.second if self.second else float("nan")

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return self.low > 0 or self.high < 0


def paired_difference(first_SU: np.ndarray, second_SU: np.ndarray, seed: int = 0) -> Difference:
    """Difference of two models' means with a 95 % interval over users and seeds.

    Each resample draws users with replacement and, independently, seeds: an answer that holds for these users but
    changes with the seed gets the wide interval it deserves. With one seed only users are drawn, and the interval
    says nothing about another seed.

    Args:
        first_SU, second_SU: the metric of each user under each seed, paired by column and by row.
        seed: of the resampling.
    """
    gain_SU = first_SU - second_SU
    num_seeds, num_users = gain_SU.shape
    # Most users gain nothing, and which of those are drawn does not matter: how often the others are, does.
    moved = gain_SU.any(0)
    gain_SM = gain_SU[:, moved]
    generator = np.random.default_rng(seed)
    draws = np.zeros(RESAMPLES)
    for index in range(RESAMPLES if moved.any() else 0):
        drawn = generator.integers(gain_SM.shape[1], size=generator.binomial(num_users, moved.mean()))
        times_drawn = np.bincount(drawn, minlength=gain_SM.shape[1])
        seeds = generator.integers(num_seeds, size=num_seeds)
        draws[index] = (gain_SM[seeds] @ times_drawn).mean() / num_users
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    means = float(first_SU.mean()), float(second_SU.mean())
    return Difference(*means, float(gain_SU.mean()), float(low), float(high), num_users, num_seeds)


METRICS = {"hr@10": lambda ranks: metrics.hit_rate(ranks, 10), "ndcg@10": lambda ranks: metrics.ndcg(ranks, 10)}
"""What the study compares: ranks (…,) → the metric of each."""
