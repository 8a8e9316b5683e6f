"""What a confidence has to show on test users before anybody relies on it, and whether a record shows it."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from training.confidence.records import ConfidenceRecord, Interval

MAX_ECE_SHARE = 0.1
"""Of the mean confidence of the ten."""
LEAST_P = 0.01
SLOPES = (0.9, 1.1)
LEAST_RATIO = 5.0
"""Hits of the surest tenth of the users to those of the least sure."""
LEAST_AGREEMENT = 0.8
"""Share of the users of whom two seeds should be sure alike."""


@dataclass(frozen=True)
class Criterion:
    """One thing that is asked, what was found, and whether that is it."""

    asked: str
    found: str
    is_met: bool


def criteria(record: ConfidenceRecord) -> list[Criterion]:
    """All that a record can answer: what takes a second model is left out where there was none."""
    return list(_criteria(record))


def _criteria(record: ConfidenceRecord) -> Iterator[Criterion]:
    items, lists = record.items, record.lists
    yield Criterion(
        f"ECE of the ten at most {MAX_ECE_SHARE:.0%} of their mean confidence, or as of a calibrated one",
        f"{items.ece.value:.5f} of {items.mean_confidence:.4f}; calibrated up to {items.ece_null[1]:.5f}",
        items.ece.value <= max(MAX_ECE_SHARE * items.mean_confidence, items.ece_null[1]),
    )
    if items.brier_skill is not None:
        skill = items.brier_skill
        yield Criterion("Brier skill of the ten above 0", _shown(skill, 4), skill.low > 0)
    if lists.p_value is not None:
        told = f"{lists.p_value:.2g} (χ² {lists.chi_square:.1f})"
        yield Criterion(f"lists by tenths of the users: p above {LEAST_P:g}", told, lists.p_value > LEAST_P)
    if lists.slope is not None:
        low, high = SLOPES
        found = low <= lists.slope.value <= high
        yield Criterion(f"slope of hits over list confidence {low:g} to {high:g}", _shown(lists.slope), found)
    if lists.top_over_bottom is not None:
        ratio = lists.top_over_bottom
        asked = f"the surest tenth is hit {LEAST_RATIO:g} times as often as the least sure"
        yield Criterion(asked, _shown(ratio, 1), ratio.value >= LEAST_RATIO)
    free = next(one.log_loss_difference for one in record.comparisons if one.name == record.best_free)
    if free is not None:
        asked = "log-loss below that of the best free combination without precision, nats"
        yield Criterion(asked, _shown(free, 5), free.low > 0)
    yield Criterion(
        "lists state less for altered histories",
        "; ".join(one.history for one in record.altered if one.difference and one.difference.high >= 0) or "all do",
        all(one.difference is None or one.difference.high < 0 for one in record.altered),
    )
    means = list(record.by_catalogue_item.values())
    yield Criterion(
        "rarer items state less",
        " → ".join(f"{mean:.1e}" for mean in means),
        all(rarer < commoner for rarer, commoner in pairwise(means)),
    )
    medians = [one.median_of_longest for one in record.reliability if one.median_of_longest is not None]
    if medians:
        yield Criterion(
            "reliability grows with the events of a user",
            " → ".join(f"{median:.3f}" for median in medians),
            all(before < after for before, after in pairwise(medians)),
        )
    if record.seed_agreement is not None:
        share = record.seed_agreement
        asked = f"two seeds are sure of the same users: {LEAST_AGREEMENT:.0%} in the same tenth, or one beside it"
        yield Criterion(asked, f"{share:.0%}", share >= LEAST_AGREEMENT)


def _shown(interval: Interval, digits: int = 2) -> str:
    value, low, high = (f"{each:.{digits}f}" for each in (interval.value, interval.low, interval.high))
    return f"{value} ({low} … {high})"
