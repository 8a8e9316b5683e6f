"""Baselines that only count, judged exactly as a model is: popularity, and the item-to-item Markov chain.

U users · N catalogue items
"""

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array

from model.bundle import Event
from model.config import FIRST_ITEM
from training import metrics
from training.config import RunConfig
from training.pipeline import Prepared, prepare
from training.splits import Histories, Targets
from training.study.records import RunRecord, run_path, write
from training.study.runs import LIST_LENGTH, Run, describe_run, keep_dataset, list_figures, ranked

Scorer = Callable[[Histories], csr_array]
"""Histories → what each (U,N) adds to the items' training uses; the sums are the scores, all of them whole numbers:
equal scores are ties, and no rounding makes or breaks one."""


def popularity(prepared: Prepared) -> Scorer:
    """The same for every user: an item's uses in training, to which nothing is added."""
    return lambda histories: csr_array((len(histories), len(prepared.catalog)))


def markov(prepared: Prepared) -> Scorer:
    """First-order Markov chain over items, from each user's last event.

    The more often an item directly followed the user's last one in the training histories, the higher it stands; among
    items that followed equally often, the never of most items included, the more popular one stands higher. So a user
    whose last item was never followed by anything, or who has no event, gets popularity. Events of weight 0 and unknown
    items neither follow nor are followed; what stands between two others is no longer between them.
    """
    counts = prepared.catalog.training_counts
    # One transition outweighs any popularity: the order is lexicographic.
    added = transition_counts(prepared.split.train, len(counts)) * (counts.max() + 1.0)
    return lambda histories: added[last_rows(histories)]


SCORERS: dict[str, Callable[[Prepared], Scorer]] = {"popularity": popularity, "markov": markov}
"""By the names of `records.BASELINES`."""


def carry_out(run: Run, config: RunConfig, records: Path) -> RunRecord:
    """Count, judge on test, and write the record, and the data set's if there is none yet.

    Args:
        run: of a baseline.
        config: the data; nothing else of it is read.
        records: folder of the records.
    """
    begun = time.monotonic()
    prepared = prepare(config)
    keep_dataset(run.dataset, prepared, records)
    read = time.monotonic()
    score = SCORERS[run.backbone](prepared)
    counted = time.monotonic()
    validation_ranks, _ = rank(score, prepared.catalog.training_counts, prepared.split.validation, prepared.event)
    test_ranks, lists = rank(score, prepared.catalog.training_counts, prepared.split.test, prepared.event)
    hr, ndcg = (float(measure(validation_ranks, 10).mean()) for measure in (metrics.hit_rate, metrics.ndcg))
    record = RunRecord(
        **describe_run(run, config, prepared),
        seconds={"training": round(counted - read, 1), "total": round(time.monotonic() - begun, 1)},
        validation={"hr@10": hr, "ndcg@10": ndcg},
        **ranked(test_ranks),
        lists=list_figures(lists, prepared),
    )
    write(run_path(records, run.name), record)
    return record


def rank(score: Scorer, training_counts: np.ndarray, targets: Targets, event: Event) -> tuple[np.ndarray, np.ndarray]:
    """Rank (U,) of each user's target in the whole catalogue, and the lists (U,10) of item numbers, best first.

    What the event cannot be is ruled out, and a tie counts as half a place, as for a model. In a list, items that tie
    stand in the order of their numbers. All items are counted, but only those are looked at that stand elsewhere than
    by popularity.

    Args:
        score: of `SCORERS`.
        training_counts: (N,) uses of each item, to which `score` adds.
        targets: what to rank, and the histories before.
        event: what counts as the next event.
    """
    counts = training_counts.astype(np.float64)
    moved = score(targets.history)
    if event == "next_new_item":
        moved = moved + seen_items(targets.history, len(counts)) * -np.inf
    # Every item that stands elsewhere, user after user: `user`, its row, and its score before and after.
    user, row = np.repeat(np.arange(len(targets)), np.diff(moved.indptr)), moved.indices
    before, after = counts[row], counts[row] + moved.data

    target = targets.target - FIRST_ITEM
    own = counts[target]
    own[user[row == target[user]]] = after[row == target[user]]
    ascending = np.sort(counts)
    not_above, below = (np.searchsorted(ascending, own, side) for side in ("right", "left"))
    others = own[user]

    def change(is_after: np.ndarray, was_before: np.ndarray) -> np.ndarray:
        return np.bincount(user, is_after.astype(float) - was_before, len(targets))

    better = len(counts) - not_above + change(after > others, before > others)
    tied = not_above - below + change(after == others, before == others) - 1
    ranks = np.where(np.isneginf(own), np.inf, 1 + better + tied / 2)
    return ranks, np.stack(list(_lists(counts, moved.indptr, row, after))) + FIRST_ITEM


def _lists(counts: np.ndarray, bounds: np.ndarray, row: np.ndarray, score: np.ndarray) -> Iterator[np.ndarray]:
    """Rows of each user's best ten: of the items that stand elsewhere than by popularity, and of the most popular."""
    by_popularity = np.argsort(-counts, kind="stable")
    for begin, end in pairwise(bounds):
        popular = by_popularity[: LIST_LENGTH + end - begin]
        popular = popular[~np.isin(popular, row[begin:end])]
        candidates = np.concatenate([row[begin:end], popular])
        best_first = np.lexsort((candidates, -np.concatenate([score[begin:end], counts[popular]])))
        yield candidates[best_first[:LIST_LENGTH]]


def seen_items(histories: Histories, num_items: int) -> csr_array:
    """(U,N) how often the user had the item, events of weight 0 included."""
    known = histories.items >= FIRST_ITEM
    users = np.repeat(np.arange(len(histories)), np.diff(histories.offsets))[known]
    return csr_array((np.ones(len(users)), (users, histories.items[known] - FIRST_ITEM)), (len(histories), num_items))


def transition_counts(train: Histories, num_items: int) -> csr_array:
    """(N+1,N) how often the column's item directly follows the row's in a user's history; the last row, of nothing, is
    empty."""
    kept = (train.weights > 0) & (train.items >= FIRST_ITEM)
    rows = train.items[kept] - FIRST_ITEM
    users = np.repeat(np.arange(len(train)), np.diff(train.offsets))[kept]
    same_user = users[1:] == users[:-1]
    before, after = rows[:-1][same_user], rows[1:][same_user]
    return csr_array((np.ones(len(before)), (before, after)), shape=(num_items + 1, num_items))


def last_rows(histories: Histories) -> np.ndarray:
    """(U,) catalogue row of each user's last known event of positive weight; −1 without one."""
    kept = np.flatnonzero((histories.weights > 0) & (histories.items >= FIRST_ITEM))
    kept_until = np.searchsorted(kept, histories.offsets)
    has_any = kept_until[1:] > kept_until[:-1]
    rows = np.full(len(histories), -1)
    rows[has_any] = histories.items[kept[kept_until[1:][has_any] - 1]] - FIRST_ITEM
    return rows
