"""What another policy's lists would have done, from the lists that were served and what followed them.

Only lists with support are used: made by chance, and by one that had room for all that the target would have listed.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from model.bundle import Bundle, BundleError
from model.config import FIRST_ITEM
from training.progress import Reporter
from training.replay.estimators import Estimates, Weighted, estimate, weights
from training.replay.propensities import Remade, Unusable, inclusions, noise_of, remade
from training.replay.ranker import Ranker
from training.replay.slates import LoggedSlate, Policy
from training.tables import DataError

MAX_WEIGHT = 100
"""An item whose hits would carry a larger weight has no support: the logging policy lists it next to never."""
LEAST_SUPPORT = 0.99
"""Share of the target's places that items with support must have in a list."""
LEAST_MEAN_WEIGHT, LEAST_SUBJECTS = 0.95, 30
"""Below it, over so many subjects, the target has places without support that no single list shows: a target by chance
may list many items, each of them rarely."""
WITHIN_S = 900
"""How long after a list an event can make it a hit, unless asked for otherwise."""


class Refused(StrEnum):
    """Why a list has no part in the estimates; see `Unusable` for more."""

    deterministic = "deterministic"
    """Its policy leaves nothing to chance: what it did not list, it never would have."""
    not_watched = "not_watched"
    """It was exported before an event had had the time."""
    unsupported = "unsupported"
    """The target would list an item that the logging policy lists next to never."""


@dataclass(frozen=True)
class Replay:
    """The estimates, and how much of the traffic they are of."""

    estimates: Estimates
    lists: int
    """All that were read."""
    support: float
    """Share of them with support."""
    refused: dict[str, int]
    """By the reason."""


def replay(
    slates: Iterable[LoggedSlate],
    bundle: Bundle,
    target: Policy,
    target_bundle: Bundle | None,
    redraws: int,
    within_s: int,
    report: Reporter,
) -> Replay:
    """Estimate the hit rate that a target policy would have had.

    Args:
        slates: as they were logged.
        bundle: that made them; those of others are refused.
        target: what would have ordered the lists.
        target_bundle: what would have made them; None: the same bundle.
        redraws: of each list, to know its propensities; and of the target, if it is `thompson`.
        within_s: how long after a list an event can make it a hit.
        report: receives the progress.

    Raises:
        BundleError: the target's bundle numbers its items otherwise.
        DataError: no list has support, or the target has too little over all of them.
    """
    logging_ranker = Ranker(bundle)
    target_ranker = logging_ranker if target_bundle is None else Ranker(target_bundle)
    if target_ranker.bundle.manifest.lineage != bundle.manifest.lineage:
        raise BundleError(
            f"{target_ranker.bundle.folder}: is of another catalogue lineage than {bundle.folder}, so that its item"
            " numbers mean other items; train both on one log"
        )
    used: list[Weighted] = []
    refused: Counter[str] = Counter()
    for number, slate in enumerate(slates, 1):
        found = _weighted(slate, logging_ranker, target, target_ranker, redraws, within_s)
        if isinstance(found, Weighted):
            used.append(found)
        else:
            refused[found] += 1
        if number % 1000 == 0:
            report.stage(f"{number:,} lists read, {len(used):,} with support")
    total = len(used) + refused.total()
    if not used:
        raise DataError(_without_support(total, refused))
    estimates = estimate(used)
    if estimates.subjects >= LEAST_SUBJECTS and estimates.mean_weight.high < LEAST_MEAN_WEIGHT:
        raise DataError(
            f"the weights of the listed items have a mean of {estimates.mean_weight.value:.2f}: only that share of the"
            " target's places could have been served; take a target that is nearer to what was served"
        )
    return Replay(estimates, total, len(used) / total, dict(refused))


def _weighted(
    slate: LoggedSlate, ranker: Ranker, target: Policy, target_ranker: Ranker, redraws: int, within_s: int
) -> Weighted | Refused | Unusable:
    if slate.policy.name != "thompson":
        return Refused.deterministic
    if slate.watched_ms < within_s * 1000:
        return Refused.not_watched
    made = remade(slate, ranker, redraws)
    if isinstance(made, Unusable):
        return made
    target_counts = _target_counts(made, target, target_ranker, redraws)
    # Redraws of its own decide whether a list counts: by those of the weights, lists would be kept in which a rare item
    # happened to come often.
    again = made.redrawn("support", ranker)
    supported = weights(target_counts, again, redraws) <= MAX_WEIGHT
    # An item that only the target's bundle knows is not among these, and takes its place from them.
    if target_counts[supported].sum() < len(made.listed) * redraws * LEAST_SUPPORT:
        return Refused.unsupported
    rows = made.listed - FIRST_ITEM
    hit = slate.hit(within_s * 1000)
    return Weighted.of(
        slate.subject,
        weights(target_counts[rows], made.counts[rows], redraws),
        None if hit is None else slate.item_ids.index(hit),
    )


def _target_counts(made: Remade, target: Policy, ranker: Ranker, redraws: int) -> np.ndarray:
    """In how many of the redraws (N,) the target lists each item of the logging bundle's catalogue."""
    slate, state = made.slate, made.state
    if ranker.bundle.manifest.version not in slate.model_versions:
        state = ranker.state(slate.events)
    # Draws of its own: with those of the propensities, a rate and its divisor would err together.
    noise = noise_of(slate, "target", (redraws, len(state.mean)))
    counts = inclusions(ranker, state, ranker.blocked(slate), len(made.listed), target, noise)
    known = np.zeros_like(made.counts)
    shared = slice(min(len(counts), len(known)))
    known[shared] = counts[shared]
    return known


def _without_support(total: int, refused: Counter[str]) -> str:
    told = ", ".join(f"{number} {reason}" for reason, number in refused.most_common()) or "there were none"
    advice: dict[str, str] = {
        Refused.deterministic: "serve a share of the requests with policy thompson, and replay those",
        Refused.not_watched: "export lists later (`bft-serve export-slates --after-s`), or lower --within-s",
        Refused.unsupported: "the target is too far from what was served: lower --kappa, or serve it to a few",
        Unusable.other_model: "name the bundle that made the lists with --bundle; each list has its version",
        Unusable.added_items: "train a model with the items added at run time, and take them away there",
        Unusable.not_reproduced: "name the bundle that made the lists with --bundle, as it was exported",
        Unusable.empty: "let fewer items be excluded",
    }
    most = refused.most_common(1)
    what_to_do = advice[most[0][0]] if most else "wait for lists, and export them with `bft-serve export-slates`"
    return f"none of the {total} lists has support ({told}): {what_to_do}"
