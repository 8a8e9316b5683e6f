"""The baselines that count, against loops over users and the whole catalogue."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from model.bundle import Event
from model.config import FIRST_ITEM, UNK
from tests.training.histories import histories_of
from tests.training.study.planted import NUM_ITEMS, write_log
from training.catalog import Catalog
from training.pipeline import Prepared
from training.splits import Histories, Split, Targets, training_counts
from training.study import baselines
from training.study.records import BASELINES, DatasetRecord, RunRecord, dataset_path, read, run_path
from training.study.runs import Run

A, B, C, D = range(FIRST_ITEM, FIRST_ITEM + 4)


def prepared_of(train: Histories, targets: Targets, num_items: int, event: Event = "next_new_item") -> Prepared:
    """A log of which a baseline sees the training histories alone."""
    catalog = Catalog.from_ids(f"i{row}" for row in range(num_items))
    catalog = catalog.with_training_counts(training_counts(train, num_items))
    return Prepared(cast("object", None), catalog, Split("leave_one_out", train, targets, targets), event)  # type: ignore[arg-type]


def judged(name: str, prepared: Prepared) -> tuple[np.ndarray, np.ndarray]:
    score = baselines.SCORERS[name](prepared)
    return baselines.rank(score, prepared.catalog.training_counts, prepared.split.test, prepared.event)


def by_hand(name: str, prepared: Prepared) -> tuple[list[float], list[list[int]]]:
    """Ranks and lists by sorting the whole catalogue for every user."""
    train, test = prepared.split.train, prepared.split.test
    uses: Counter[int] = Counter()
    followed: Counter[tuple[int, int]] = Counter()
    for begin, end in pairwise(train.offsets):
        events = zip(train.items[begin:end].tolist(), train.weights[begin:end].tolist(), strict=True)
        known = [item for item, weight in events if weight > 0 and item != UNK]
        uses.update(known)
        followed.update(pairwise(known))
    ranks, lists = [], []
    for user, (begin, end) in enumerate(pairwise(test.history.offsets)):
        had = test.history.items[begin:end].tolist()
        known = [i for i, weight in zip(had, test.history.weights[begin:end], strict=True) if weight > 0 and i != UNK]
        last = known[-1] if known and name == "markov" else None
        score = {item: (followed[last, item], uses[item]) for item in range(FIRST_ITEM, FIRST_ITEM + NUM_ITEMS)}
        allowed = [item for item in score if prepared.event == "next_item" or item not in had]
        target = int(test.target[user])
        better = sum(score[item] > score[target] for item in allowed)
        tied = sum(score[item] == score[target] for item in allowed) - 1
        ranks.append(1 + better + tied / 2 if target in allowed else np.inf)
        lists.append(sorted(allowed, key=lambda item: (*(-part for part in score[item]), item))[:10])
    return ranks, lists


@pytest.mark.parametrize("event", ["next_new_item", "next_item"])
@pytest.mark.parametrize("name", BASELINES)
def test_ranks_and_lists_are_those_of_sorting_the_whole_catalogue_for_every_user(name: str, event: Event) -> None:
    generator = np.random.default_rng(5)

    def random_histories(num_users: int) -> Histories:
        # Repeats, unknown items, events of weight 0, and users without any event.
        lengths = [0, 1, *generator.integers(0, 12, size=num_users - 2)]
        items = [generator.choice([UNK, *range(FIRST_ITEM, FIRST_ITEM + NUM_ITEMS)], length) for length in lengths]
        weights = [generator.choice([0.0, 0.5, 1.0], length, p=[0.2, 0.2, 0.6]) for length in lengths]
        return histories_of([part.tolist() for part in items], [part.tolist() for part in weights])

    targets = Targets(random_histories(200), generator.integers(FIRST_ITEM, FIRST_ITEM + NUM_ITEMS, size=200))
    prepared = prepared_of(random_histories(60), targets, NUM_ITEMS, event)

    ranks, lists = judged(name, prepared)

    expected_ranks, expected_lists = by_hand(name, prepared)
    assert ranks.tolist() == expected_ranks
    assert lists.tolist() == expected_lists
    assert np.isinf(ranks).any() == (event == "next_new_item")


def test_one_transition_outweighs_any_popularity_and_popularity_decides_among_equal_ones() -> None:
    # C is used most, but only B and D ever followed A, once each; B is used more than D.
    train = histories_of([[A, B], [A, D], [B], [C], [C], [C], [C]])
    reads = histories_of([[A]])

    _, lists = judged("markov", prepared_of(train, Targets(reads, np.array([D])), 4))

    assert lists.tolist() == [[B, D, C, A]]  # A was had: the last, where the catalogue ends


def test_a_last_item_that_nothing_followed_and_no_history_at_all_get_popularity() -> None:
    train = histories_of([[A, B], [A, D], [B], [C], [C], [C], [C]])
    targets = Targets(histories_of([[A, C], []]), np.array([D, D]))
    prepared = prepared_of(train, targets, 4)

    for mine, popular in zip(judged("markov", prepared), judged("popularity", prepared), strict=True):
        assert mine.tolist() == popular.tolist()


def test_a_baseline_s_record_can_be_read_and_its_data_set_s_beside_it(tmp_path: Path) -> None:
    data = write_log(tmp_path / "log.txt")
    for name in BASELINES:
        run = Run("planted", name, filtering=False, seed=0)
        baselines.carry_out(run, run.config(tmp_path / "no recipes", data), tmp_path)

    dataset = read(dataset_path(tmp_path, "planted"), DatasetRecord)
    markov, popularity = (
        read(run_path(tmp_path, f"planted-{name}-off-s0"), RunRecord) for name in ("markov", "popularity")
    )

    # The last item alone decides the next, and every one of thirty transitions is seen in training.
    assert np.all(markov.ranks(len(dataset.history_length)) == 1)
    assert len(popularity.hit_users) < len(markov.hit_users)
    assert (markov.config, markov.curve, markov.nll, markov.validation["hr@10"]) == ({}, [], None, 1.0)
