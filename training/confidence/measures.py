"""How true a stated probability is, and how well it tells the users who are served well from those who are not.

U users, each with a stated probability that the next event is in their list, and whether it was · R resamples
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import chi2

from training import metrics
from training.study.layout import Estimate

RESAMPLES = 1000
LEVEL = 0.95
LEAST_PROBABILITY = 1e-6
"""A stated probability is kept so far from 0 and 1: one wrong certainty would be an infinite loss."""
LEAST_EXPECTED = 5
"""Hits of a group from which a statistic of it means something."""
COVERAGES = (0.2, 0.5, 0.8)
"""Shares of the users, the surest first, at which a list's quality is told."""


def log_loss(stated_U: np.ndarray, hit_U: np.ndarray) -> np.ndarray:
    """−log of the probability that was given to what happened, (U,) in nats."""
    stated = np.clip(stated_U, LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    return -np.where(hit_U > 0, np.log(stated), np.log1p(-stated))


@dataclass(frozen=True)
class Ranked:
    """Users by falling confidence, those of equal confidence as one group; made once, used for every resample.

    `order` (U,) the users; `begins` where each group begins in it.
    """

    order: np.ndarray
    begins: np.ndarray

    @classmethod
    def by(cls, confidence_U: np.ndarray) -> "Ranked":
        """The surest first."""
        order = np.argsort(-confidence_U, kind="stable")
        falls = np.diff(confidence_U[order]) != 0
        return cls(order, np.concatenate([[0], np.flatnonzero(falls) + 1]))

    def aurc(self, loss_U: np.ndarray, counts_U: np.ndarray | None = None) -> float:
        """Area under the risk–coverage curve (Geifman, Uziel & El-Yaniv 2019): lower is better.

        The mean, over k = 1 … U, of the loss of the k surest users. Users of equal confidence come in random order, of
        which this is the expectation: within a group the mean loss m is met at each step, and
        Σ_j (L + jm)/(N + j) = mW + (L − mN)(H_{N+W} − H_N) for N users of loss L before its W, H the harmonic numbers.

        Args:
            loss_U: of each user, 1 − hit for a hit rate.
            counts_U: how often each user is in the resample; None: once.
        """
        counts = np.ones(len(loss_U)) if counts_U is None else counts_U.astype(np.float64)
        users = np.add.reduceat(counts[self.order], self.begins)
        losses = np.add.reduceat((loss_U * counts)[self.order], self.begins)
        users, losses = users[users > 0], losses[users > 0]
        users_before, losses_before = np.cumsum(users) - users, np.cumsum(losses) - losses
        harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, counts.sum() + 1))])
        mean = losses / users
        steps = harmonic[(users_before + users).astype(np.int64)] - harmonic[users_before.astype(np.int64)]
        return float((mean * users + (losses_before - mean * users_before) * steps).sum() / users.sum())

    def surest(self, values_U: np.ndarray, coverage: float) -> float:
        """Mean of a value over the surest share of the users; of the group at the border, over its share."""
        users = np.diff(np.append(self.begins, len(self.order)))
        sums = np.add.reduceat(values_U[self.order], self.begins)
        wanted = coverage * len(self.order)
        taken = np.clip(wanted - (np.cumsum(users) - users), 0, users)
        return float((sums / users * taken).sum() / wanted)

    def curve(self, loss_U: np.ndarray, coverages: np.ndarray) -> np.ndarray:
        """The risk at each coverage in (0, 1]."""
        return np.array([self.surest(loss_U, coverage) for coverage in coverages])


def resampled(statistic: Callable[[np.ndarray], float], num_users: int, seed: int = 0) -> Estimate:
    """A statistic of all users with its 95 % percentile interval, users resampled.

    Args:
        statistic: of how often each user counts, (U,).
        num_users: U.
        seed: of the resampling; equal seeds draw equal users, so that differences are paired.
    """
    generator = np.random.default_rng(seed)
    draws = [
        statistic(np.bincount(generator.integers(num_users, size=num_users), minlength=num_users))
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(statistic(np.ones(num_users, np.int64)), float(low), float(high))


def turned_round(estimate: Estimate) -> Estimate:
    """The interval of a sum of absolute gaps, turned round its value (the basic bootstrap), from 0 on.

    Resampling adds its own noise to gaps that hold chance already, so that the draws lie above the value as much as the
    value lies above the truth.
    """
    value = estimate.value
    low, high = 2 * value - estimate.high, 2 * value - estimate.low
    return Estimate(value, min(max(low, 0.0), value), max(high, value))


def mean_estimate(values_U: np.ndarray, seed: int = 0) -> Estimate:
    """A mean with its interval."""
    return Estimate(float(values_U.mean()), *metrics.bootstrap_interval(values_U, seed))


def slope(stated_U: np.ndarray, hit_U: np.ndarray, seed: int = 0) -> Estimate:
    """Of the straight line of hits over stated probabilities, by least squares: 1 for a calibrated confidence, below 1
    for one that tells users apart more than they differ."""

    def of(counts: np.ndarray) -> float:
        weight = counts / counts.sum()
        centred = stated_U - weight @ stated_U
        return float((weight * centred) @ hit_U / ((weight * centred) @ centred))

    return resampled(of, len(stated_U), seed)


@dataclass(frozen=True)
class Deciles:
    """Users in ten groups of equal size by rising confidence: `stated` and `realised` are means of each.

    `chi_square` Σ (hits − stated)²/Σ p(1−p) over the groups, and its `p_value` on as many degrees of freedom as there
    are groups: nothing was fitted on these users (Hosmer & Lemeshow 1980). None where a group expects fewer than
    `LEAST_EXPECTED` hits, of which χ² knows nothing. `top_over_bottom` the surest group's rate of hits as a multiple of
    the least sure one's; None where that has fewer hits than so many.
    """

    stated: tuple[float, ...]
    realised: tuple[float, ...]
    chi_square: float | None
    p_value: float | None
    top_over_bottom: Estimate | None


def deciles(stated_U: np.ndarray, hit_U: np.ndarray, num_groups: int = 10) -> Deciles:
    """See `Deciles`."""
    groups = np.array_split(np.argsort(stated_U, kind="stable"), num_groups)
    excess = np.array([hit_U[group].sum() - stated_U[group].sum() for group in groups])
    spread = np.array([(stated_U[group] * (1 - stated_U[group])).sum() for group in groups])
    statistic = float((excess**2 / np.maximum(spread, LEAST_PROBABILITY)).sum())
    is_told = min(stated_U[group].sum() for group in groups) >= LEAST_EXPECTED
    bottom, top = groups[0], groups[-1]

    def ratio(counts: np.ndarray) -> float:
        rates = [counts[group] @ hit_U[group] / max(counts[group].sum(), 1) for group in (bottom, top)]
        return float(rates[1] / max(rates[0], 1 / len(bottom)))  # as of one hit, where a resample has none

    return Deciles(
        stated=tuple(float(stated_U[group].mean()) for group in groups),
        realised=tuple(float(hit_U[group].mean()) for group in groups),
        chi_square=statistic if is_told else None,
        p_value=float(chi2.sf(statistic, num_groups)) if is_told else None,
        top_over_bottom=resampled(ratio, len(hit_U)) if hit_U[bottom].sum() >= LEAST_EXPECTED else None,
    )


def popularity_log_probability(
    training_counts_N: np.ndarray, rows_U: np.ndarray, seen: Mapping[int, np.ndarray]
) -> np.ndarray:
    """log P(target) when items are drawn by their training uses, one added to each so that none is impossible.

    Args:
        training_counts_N: n_i.
        rows_U: catalogue row of each user's target.
        seen: user → rows that the event rules out; the rest is normalised anew.

    Returns:
        (U,) nats; −inf where the target itself is ruled out.
    """
    mass = training_counts_N + 1.0
    ruled_out = np.array([mass[seen[user]].sum() if user in seen else 0.0 for user in range(len(rows_U))])
    impossible = np.array([user in seen and row in seen[user] for user, row in enumerate(rows_U.tolist())])
    return np.where(impossible, -np.inf, np.log(mass[rows_U]) - np.log(mass.sum() - ruled_out))
