"""What every backbone must learn, and must not: logs whose right answer is known, through the real training loop."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from model.backbone import Backbone
from model.config import FIRST_ITEM
from tests.behaviour.instances import BY_HEART, EVERY_CASE, Case, settings
from tests.training.histories import histories_of, successor_walks
from training.config import OptimizerConfig
from training.evaluate import ranks, score_users
from training.loop import fit
from training.metrics import target_ranks
from training.splits import Histories, Split, Targets, training_counts

every_case = pytest.mark.parametrize("case", EVERY_CASE)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Models this small are slowed down by threads that wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def dated(users: Sequence[Sequence[int]], seed: int) -> Histories:
    """Histories with times that say nothing: from a minute to a week between two events."""
    rng = np.random.default_rng(seed)
    gaps_s = [np.exp(rng.uniform(np.log(60), np.log(604_800), size=len(user))) for user in users]
    return histories_of(users, timestamps=[(1.7e9 + gaps.cumsum().round()).tolist() for gaps in gaps_s])


def every_prefix(histories: Histories) -> Targets:
    """Each event of a user, but the first, to be told from those before it."""
    users = [user for user, size in enumerate(np.diff(histories.offsets)) for _ in range(1, size)]
    ends = [end for first, last in pairwise(histories.offsets) for end in range(first + 1, last)]
    return Targets(histories.prefixes(np.array(users), np.array(ends)), histories.items[ends])


def fitted(
    case: Case, train: Histories, validation: Targets, num_items: int, config: OptimizerConfig
) -> tuple[Backbone, int]:
    """A fresh instance after `fit`, and the number of steps that it took."""
    steps: list[int] = []
    model = case.fresh(torch.from_numpy(training_counts(train, num_items)))
    split = Split("leave_one_out", train, validation, test=validation)
    fit(model, split, "next_item", config, on_step=lambda done, total, loss: steps.append(done))
    return model, len(steps)


@every_case
def test_planted_users_are_learned_by_heart_within_300_steps(case: Case) -> None:
    num_items = 25
    log = dated(successor_walks(num_users=100, num_items=num_items, length=8), seed=1)
    told = every_prefix(log)

    model, steps = fitted(case, log, told, num_items, BY_HEART[case.backbone])

    assert steps <= 300
    assert (ranks(score_users(model, told.history, "next_item"), told) == 1).mean() > 0.9


@every_case
def test_shuffled_events_leave_popularity_to_learn_and_nothing_else(case: Case) -> None:
    # Planted walks of items of very different popularity, every event then dealt out anew.
    num_users, num_items, length = 600, 60, 8
    rng = np.random.default_rng(2)
    starts = rng.geometric(0.08, size=num_users)
    walks = FIRST_ITEM + (starts[:, None] + np.arange(length)) % num_items
    dealt = rng.permutation(walks.ravel()).reshape(walks.shape).tolist()
    train = dated([user[:-2] for user in dealt], seed=3)
    validation = Targets(train, np.array([user[-2] for user in dealt]))
    test = Targets(dated([user[:-1] for user in dealt], seed=3), np.array([user[-1] for user in dealt]))

    model, _ = fitted(case, train, validation, num_items, settings(epochs=6, batch_size=50))

    hit = ranks(score_users(model, test.history, "next_item"), test) <= 10
    counts = np.tile(training_counts(train, num_items).astype(float), (num_users, 1))
    popular = target_ranks(counts, test.target - FIRST_ITEM) <= 10
    gained, lost = int((hit & ~popular).sum()), int((popular & ~hit).sum())
    assert hit.mean() > 2 * 10 / num_items
    # Whom only one of the two serves is at best a fair coin: three standard deviations.
    assert gained - lost <= 3 * (gained + lost) ** 0.5, f"{gained} users served by the model alone, {lost} not by it"
