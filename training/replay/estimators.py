"""Inverse propensity scoring of lists (docs/math.md, "Off-policy evaluation").

S lists · K items of a list · M redraws · C subjects
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from training.confidence.measures import resampled
from training.study.layout import Estimate


@dataclass(frozen=True, eq=False)
class Weighted:
    """One logged list under a target policy.

    Its `size` K items have the weights w_i, the target's propensity over the logging policy's: `mass` Σ_i w_i,
    `squares` Σ_i w_i², `largest` max_i w_i. `is_hit`, whether an item that was shown was the next event, and
    `hit_weight`, w of that item, 0 without a hit. `subject`, whose list it is.
    """

    subject: str
    size: int
    mass: float
    squares: float
    largest: float
    is_hit: bool
    hit_weight: float

    @classmethod
    def of(cls, subject: str, weights_K: np.ndarray, hit_place: int | None) -> "Weighted":
        """A list by the weights of its items.

        Args:
            subject: whose.
            weights_K: w_i ≥ 0.
            hit_place: which of them was the next event; None: none.
        """
        return cls(
            subject=subject,
            size=len(weights_K),
            mass=float(weights_K.sum()),
            squares=float((weights_K**2).sum()),
            largest=float(weights_K.max()),
            is_hit=hit_place is not None,
            hit_weight=0.0 if hit_place is None else float(weights_K[hit_place]),
        )


@dataclass(frozen=True)
class Estimates:
    """Hits for each list that was served, with 95 % intervals, subjects resampled.

    `logged` what the logging policy had; `ips` and `snips` what the target would have had; `difference` is SNIPS less
    `logged`. `effective_lists`: of so many lists of the target itself the estimates are worth about as much (Kish).
    `largest_weight` of an item. `mean_weight`, of all listed items, is in expectation the share of the target's places
    that have support.
    """

    lists: int
    subjects: int
    logged: Estimate
    ips: Estimate
    snips: Estimate
    difference: Estimate
    effective_lists: float
    largest_weight: float
    mean_weight: Estimate


def weights(target_counts: np.ndarray, logging_counts: np.ndarray, redraws: int) -> np.ndarray:
    """w_i = π_i/p_i of items that were listed, with π_i = target_counts/M and p_i = (logging_counts + 1)/(M + 1).

    The list that was served counts as one draw more. An item of it was drawn apart from the redraws, so that the mean
    of 1/p_i over lists that have the item, and their redraws, is (1 − (1 − p)^{M+1})/p for a true rate p: the estimates
    are unbiased but for items that are next to never listed. Without the ones 1/p_i is too large, or infinite.

    Args:
        target_counts: in how many of M draws of the target each item was listed; M times what a policy without chance
            lists.
        logging_counts: in how many of M redraws of the logging policy.
        redraws: M.
    """
    return (target_counts / redraws) * (redraws + 1) / (logging_counts + 1)


def estimate(lists: list[Weighted]) -> Estimates:
    """The hit rate of a target policy, from lists with support.

    IPS is the mean of `hit_weight`. SNIPS divides it by the mean weight of all listed items, which is 1 in expectation:
    a little biased, and less scattered where weights vary (Swaminathan & Joachims 2015).

    Args:
        lists: at least one.
    """
    subjects = {name: row for row, name in enumerate(dict.fromkeys(one.subject for one in lists))}
    row_S = np.array([subjects[one.subject] for one in lists])

    def by_subject(value: Callable[[Weighted], float]) -> np.ndarray:
        return np.bincount(row_S, [value(one) for one in lists])

    number_C = by_subject(lambda one: 1.0)
    hits_C, weighted_C = by_subject(lambda one: one.is_hit), by_subject(lambda one: one.hit_weight)
    weight_C = by_subject(lambda one: one.mass / one.size)

    def ratio(above_C: np.ndarray, below_C: np.ndarray) -> Callable[[np.ndarray], float]:
        return lambda counts_C: float(counts_C @ above_C / np.maximum(counts_C @ below_C, np.finfo(float).tiny))

    logged, ips, snips = ratio(hits_C, number_C), ratio(weighted_C, number_C), ratio(weighted_C, weight_C)
    mass, squares = sum(one.mass for one in lists), sum(one.squares for one in lists)
    mean_size = sum(one.size for one in lists) / len(lists)
    return Estimates(
        lists=len(lists),
        subjects=len(subjects),
        logged=resampled(logged, len(subjects)),
        ips=resampled(ips, len(subjects)),
        snips=resampled(snips, len(subjects)),
        difference=resampled(lambda counts_C: snips(counts_C) - logged(counts_C), len(subjects)),
        effective_lists=mass**2 / squares / mean_size if squares else 0.0,
        largest_weight=max(one.largest for one in lists),
        mean_weight=resampled(ratio(weight_C, number_C), len(subjects)),
    )
