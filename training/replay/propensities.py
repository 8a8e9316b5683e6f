"""Propensities: how often a list's policy, drawn again, lists an item.

K listed items · M redraws
"""

import json
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from model.bundle import Bundle
from model.config import FIRST_ITEM
from training.files import write_whole
from training.metrics import wilson_interval
from training.progress import Reporter
from training.replay.ranker import Ranker, State, orders, seed_noise
from training.replay.slates import LoggedSlate, Policy

REDRAWS = 500
MAX_EXCHANGED = 1
"""Items by which a list that is made again may differ: two whose keys tie within float32 at the list's end."""


class Unusable(StrEnum):
    """Why a logged list has no propensities."""

    other_model = "other_model"
    """Another bundle than the one given made one of its pages."""
    added_items = "added_items"
    """Items added at run time could be listed, which are not the bundle's."""
    empty = "empty"
    """Nothing was listed."""
    not_reproduced = "not_reproduced"
    """The bundle does not make it again."""


@dataclass(frozen=True, eq=False)
class Remade:
    """A logged list, made again, with all that its policy could have listed in its place."""

    slate: LoggedSlate
    state: State
    blocked: np.ndarray
    """Numbers of the items that could not be listed."""
    listed: np.ndarray
    """(K,) numbers of the items that the policy put into the list; `min_confidence` may have taken some out again."""
    counts: np.ndarray
    """(N,) in how many of the M redraws each item of the catalogue was listed; of a policy without chance M or 0."""
    redraws: int
    """M"""

    def redrawn(self, purpose: str, ranker: Ranker) -> np.ndarray:
        """`counts` of M other redraws.

        Args:
            purpose: which ones.
            ranker: of the bundle that made the list.
        """
        noise = noise_of(self.slate, purpose, (self.redraws, len(self.state.mean)))
        return inclusions(ranker, self.state, self.blocked, len(self.listed), self.slate.policy, noise)


def remade(slate: LoggedSlate, ranker: Ranker, redraws: int) -> Remade | Unusable:
    """Make a logged list again, and redraw it.

    Args:
        slate: as it was logged.
        ranker: of the bundle that made it.
        redraws: M.
    """
    if slate.model_versions != {ranker.bundle.manifest.version}:
        return Unusable.other_model
    if slate.num_added:
        return Unusable.added_items
    listed = np.array([ranker.bundle.items.number(item_id) for item_id in (*slate.item_ids, *slate.left_out)], np.int64)
    if not len(listed):
        return Unusable.empty
    state, blocked, policy = State(slate.mean, slate.precision), ranker.blocked(slate), slate.policy
    noise = seed_noise(policy.seed or 0, len(slate.mean))
    again = ranker.lists(state, blocked, len(listed), orders(policy, state, noise))[0]
    if len(np.setdiff1d(listed, again)) > MAX_EXCHANGED:
        return Unusable.not_reproduced
    noise = noise_of(slate, "propensity", (redraws, len(state.mean)))
    counts = inclusions(ranker, state, blocked, len(listed), policy, noise)
    return Remade(slate, state, blocked, listed, counts, redraws)


def inclusions(
    ranker: Ranker, state: State, blocked: np.ndarray, size: int, policy: Policy, noise: np.ndarray
) -> np.ndarray:
    """In how many of M draws (N,) a policy lists each item of the catalogue.

    Args:
        ranker: what lists.
        state: of the user.
        blocked: item numbers.
        size: K.
        policy: any; without chance its one list counts as all of them.
        noise: (M,D) standard normal.
    """
    lists = ranker.lists(state, blocked, size, orders(policy, state, noise))
    counts = np.bincount(lists.ravel() - FIRST_ITEM, minlength=len(ranker.bundle.items))
    return counts if policy.name == "thompson" else counts * len(noise)


def noise_of(slate: LoggedSlate, purpose: str, shape: tuple[int, int]) -> np.ndarray:
    """Standard normal numbers (M,D) that are a list's own for a purpose, and the same whenever they are asked for."""
    seed = [zlib.crc32(slate.recommendation_id.encode()), zlib.crc32(purpose.encode())]
    return np.random.default_rng(seed).standard_normal(shape)


def write_propensities(
    slates: Iterable[LoggedSlate], bundle: Bundle, redraws: int, path: Path, report: Reporter
) -> dict[str, int]:
    """Write the propensities of lists to a JSON-lines file, whole or not at all.

    Args:
        slates: as they were logged.
        bundle: that made them.
        redraws: M.
        path: of the file.
        report: receives the progress.

    Returns:
        how many `lists` are in the file, and how many are not, by the reason.
    """
    ranker, counts = Ranker(bundle), Counter({"lists": 0})
    with tempfile.TemporaryFile() as file:
        for number, slate in enumerate(slates, 1):
            made = remade(slate, ranker, redraws)
            if isinstance(made, Unusable):
                counts[made] += 1
            else:
                counts["lists"] += 1
                file.writelines(json.dumps(row).encode() + b"\n" for row in propensities(made))
            if number % 1000 == 0:
                report.stage(f"{number:,} lists read")
        file.seek(0)
        write_whole(path, file)
    return dict(counts)


def propensities(made: Remade) -> Iterator[dict[str, str | int | float | None]]:
    """For each item that was shown: `rank`, `redraws`, in how many of them it was `listed`, the rate `propensity`, and
    the ends of the rate's 95 % interval, `low` and `high` (Wilson); None of a policy without chance, which is certain.
    """
    slate, redraws = made.slate, made.redraws
    counts = made.counts[made.listed[: len(slate.item_ids)] - FIRST_ITEM].tolist()
    for rank, (item_id, count) in enumerate(zip(slate.item_ids, counts, strict=True), 1):
        low = high = None
        if slate.policy.name == "thompson":
            low, high = map(float, wilson_interval(count, redraws))
        yield {
            "recommendation_id": slate.recommendation_id,
            "policy": slate.policy.name,
            "item_id": item_id,
            "rank": rank,
            "redraws": redraws,
            "listed": count,
            "propensity": count / redraws,
            "low": low,
            "high": high,
        }
