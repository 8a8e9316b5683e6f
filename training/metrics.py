"""Ranking and calibration metrics, with bootstrap intervals. All pure numpy, one row a user.

U users · K list length
"""

import numpy as np

CUTOFFS = (5, 10, 20)
RESAMPLES = 2000
DRAWN_AT_ONCE = 20_000
"""Values that one call draws: a call for each resample is slow for few users, one call for all of them for many."""


def target_ranks(scores_UN: np.ndarray, target_rows_U: np.ndarray) -> np.ndarray:
    """Rank of each user's target among all scores, from 1; a tie counts as half a place.

    Args:
        scores_UN: higher is better; −inf for items that cannot be recommended.
        target_rows_U: column of the target.

    Returns:
        (U,) floats; infinite where the target itself cannot be recommended.

    Raises:
        ValueError: a score is NaN, which no comparison would count as better than the target.
    """
    if np.isnan(scores_UN).any():
        raise ValueError("scores hold NaN: the model's weights are not finite")
    own = np.take_along_axis(scores_UN, target_rows_U[:, None], 1)
    better = (scores_UN > own).sum(1)
    tied = (scores_UN == own).sum(1) - 1
    return np.where(np.isneginf(own[:, 0]), np.inf, 1 + better + tied / 2)


def hit_rate(ranks_U: np.ndarray, k: int) -> np.ndarray:
    """HR@k of each user: 1 where the target is among the first k."""
    return (ranks_U <= k).astype(np.float64)


def ndcg(ranks_U: np.ndarray, k: int) -> np.ndarray:
    """NDCG@k of each user with one relevant item: 1/log2(1 + rank) within the first k."""
    return np.where(ranks_U <= k, 1 / np.log2(1 + ranks_U), 0.0)


def per_user_metrics(ranks_U: np.ndarray) -> dict[str, np.ndarray]:
    """HR and NDCG at 5, 10, 20 of each user: `hr@5` → (U,), and so on."""
    measures = {"hr": hit_rate, "ndcg": ndcg}
    return {f"{name}@{k}": per_user(ranks_U, k) for name, per_user in measures.items() for k in CUTOFFS}


def ranking_metrics(ranks_U: np.ndarray) -> dict[str, float]:
    """Mean HR and NDCG at 5, 10, 20."""
    return {name: float(values.mean()) for name, values in per_user_metrics(ranks_U).items()}


def bootstrap_interval(values_U: np.ndarray, seed: int = 0, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of the mean, users resampled; for a paired comparison pass the differences."""
    generator, size = np.random.default_rng(seed), len(values_U)
    at_once = max(1, DRAWN_AT_ONCE // size)
    means = np.concatenate(
        [
            values_U[generator.integers(size, size=(min(at_once, RESAMPLES - begin), size))].mean(1)
            for begin in range(0, RESAMPLES, at_once)
        ]
    )
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def expected_calibration_error(confidence: np.ndarray, hit: np.ndarray, num_bins: int = 10) -> float:
    """ECE with equal-mass bins: the bins' |mean confidence − hit rate|, weighted by their size.

    Args:
        confidence, hit: flat arrays of equal length; hit is 0 or 1.
    """
    bins = equal_mass_bins(confidence, num_bins)
    gaps = np.bincount(bins, confidence) - np.bincount(bins, hit)
    return float(np.abs(gaps).sum() / len(confidence))


def ece_null_interval(
    confidence_UK: np.ndarray, num_bins: int = 10, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """The interval in which a *perfectly calibrated* model's ECE would fall: hits drawn from the confidences.

    At most one item of a list is the next one, so each list's hit is one draw: position k with probability
    confidence_k, none with the rest (a list whose confidences exceed 1 is scaled down to 1).
    """
    generator = np.random.default_rng(seed)
    edges = np.cumsum(confidence_UK / np.maximum(confidence_UK.sum(1, keepdims=True), 1), axis=1)
    bins_UK = equal_mass_bins(confidence_UK.ravel(), num_bins).reshape(confidence_UK.shape)
    stated = np.bincount(bins_UK.ravel(), confidence_UK.ravel(), minlength=num_bins)
    draws = []
    for _ in range(RESAMPLES):
        position = (generator.random((len(edges), 1)) >= edges).sum(1)
        users = np.flatnonzero(position < edges.shape[1])
        hits = np.bincount(bins_UK[users, position[users]], minlength=num_bins)
        draws.append(np.abs(stated - hits).sum() / confidence_UK.size)
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def brier_skill(confidence: np.ndarray, hit: np.ndarray) -> float:
    """1 − Brier/Brier of the constant base rate of these very hits: above 0 means more than the base rate.

    0 where all hits are alike: that base rate is never wrong, and no ratio to it exists.
    """
    base = np.mean((hit.mean() - hit) ** 2)
    return float(1 - np.mean((confidence - hit) ** 2) / base) if base > 0 else 0.0


def equal_mass_bins(confidence: np.ndarray, num_bins: int) -> np.ndarray:
    """The bin of each entry: as many entries in each, by rising confidence."""
    bins = np.empty(len(confidence), np.int64)
    for index, part in enumerate(np.array_split(np.argsort(confidence, kind="stable"), num_bins)):
        bins[part] = index
    return bins


def wilson_interval(successes: np.ndarray | int, trials: int) -> tuple[np.ndarray, np.ndarray]:
    """The ends of a rate's 95 % interval by Wilson's score, which keeps its level where the rate is near 0 or 1.

    Args:
        successes: of so many `trials`, 0 to `trials`.
    """
    rate, z = np.asarray(successes) / trials, 1.959963984540054
    centre = (rate + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z * np.sqrt(rate * (1 - rate) / trials + z**2 / (4 * trials**2)) / (1 + z**2 / trials)
    # At 0 and 1 an end is the rate itself, but for rounding.
    return np.minimum(centre - half, rate), np.maximum(centre + half, rate)
