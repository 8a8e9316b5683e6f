"""Controls and noise: what is changed, what is not, and how replaced events are heard, against loops over users."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch

from model.config import BOS, FIRST_ITEM, MASK, UNK
from tests.behaviour.heard import expected_row
from tests.behaviour.instances import COUNTS, EVERY_CASE, NUM_ITEMS, Case
from tests.tolerance import FLOAT32_TOL, assert_close
from tests.training.histories import histories_of, leave_one_out, successor_walks
from training.catalog import Catalog
from training.pipeline import Prepared
from training.splits import Histories, training_counts
from training.study.controls import (
    heard_events,
    shuffled_precision,
    with_noise,
    with_training_noise,
)

LAST = FIRST_ITEM + NUM_ITEMS


def random_histories(num_users: int, seed: int = 0) -> Histories:
    """Users of one to eleven events, some of them of weight 0 or on unknown items."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 12, size=num_users)
    items = [generator.choice([UNK, *range(FIRST_ITEM, LAST)], length).tolist() for length in lengths]
    weights = [generator.choice([0.0, 0.5, 2.0], length, p=[0.2, 0.3, 0.5]).tolist() for length in lengths]
    return histories_of(items, weights, [list(range(length)) for length in lengths])


# --- τ shuffled ---------------------------------------------------------------------------------------------


def test_shuffling_deals_the_same_precisions_to_other_items_and_changes_nothing_else() -> None:
    model = Case("sasrec", True).perturbed()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tau = model.initial_precision.item_precision()

    shuffled = shuffled_precision(model, seed=3)

    dealt = shuffled.initial_precision.item_precision()
    assert not torch.equal(dealt, tau)
    assert dealt[FIRST_ITEM:].sort().values.tolist() == tau[FIRST_ITEM:].sort().values.tolist()
    assert torch.equal(dealt[:FIRST_ITEM], tau[:FIRST_ITEM])
    # Item 0 has no use in training: it is read as UNK, and its τ is nobody's.
    assert dealt[FIRST_ITEM] == tau[FIRST_ITEM]
    for name, value in shuffled.state_dict().items():
        assert torch.equal(value, before[name]) or name == "initial_precision.deviation"
    assert torch.equal(shuffled.log_count, model.log_count)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(shuffled_precision(model, seed=3).initial_precision.item_precision(), dealt)
    assert not torch.equal(shuffled_precision(model, seed=4).initial_precision.item_precision(), dealt)


def test_a_model_in_which_all_items_have_one_precision_says_the_same_when_shuffled() -> None:
    model = Case("hstu", True).fresh(COUNTS).eval()
    items = torch.tensor([[1, 5, 9, 7]])

    shuffled = shuffled_precision(model, seed=0)

    weights = torch.ones(items.shape)
    for part, other in zip(model.final_state(items, weights), shuffled.final_state(items, weights), strict=True):
        assert torch.equal(part, other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Case("sasrec", False).fresh(COUNTS),
        lambda: Case("sasrec", True).fresh(COUNTS, initial_precision="mlp"),
    ],
    ids=["plain", "network"],
)
def test_a_model_without_a_precision_for_each_item_is_refused(make: Callable) -> None:
    with pytest.raises(ValueError, match="initial_precision=table"):
        shuffled_precision(make(), seed=0)


# --- replaced events ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.05, 0.4])
def test_so_many_events_are_replaced_each_by_another_item_and_the_others_stay(share: float) -> None:
    histories = random_histories(300)

    noisy, replaced = with_noise(histories, share, seed=1, num_items=NUM_ITEMS)

    can_be = (histories.weights > 0) & (histories.items != UNK)
    assert replaced.sum() == round(share * can_be.sum())
    assert not (replaced & ~can_be).any()
    assert ((noisy.items != histories.items) == replaced).all()
    assert set(noisy.items[replaced].tolist()) <= set(range(FIRST_ITEM, LAST))
    for field in ("offsets", "weights", "timestamps"):
        assert np.array_equal(getattr(noisy, field), getattr(histories, field))


def test_every_other_item_is_equally_likely() -> None:
    histories = histories_of([[FIRST_ITEM + 2] * 6000])

    noisy, replaced = with_noise(histories, 0.5, seed=0, num_items=4)

    counts = np.bincount(noisy.items[replaced] - FIRST_ITEM, minlength=4)
    assert counts[2] == 0
    # 1,000 expected each; five standard deviations of a binomial count of 3,000 draws at 1/3.
    assert np.abs(counts[[0, 1, 3]] - 1000).max() < 5 * np.sqrt(3000 * 2 / 9)


def test_more_noise_of_one_seed_has_the_replaced_events_of_less_noise_and_another_seed_has_others() -> None:
    histories = random_histories(300)

    little, few = with_noise(histories, 0.1, seed=1, num_items=NUM_ITEMS)
    much, many = with_noise(histories, 0.4, seed=1, num_items=NUM_ITEMS)
    _, elsewhere = with_noise(histories, 0.1, seed=2, num_items=NUM_ITEMS)

    assert many[few].all()
    assert np.array_equal(little.items[few], much.items[few])
    assert not np.array_equal(few, elsewhere)


def test_training_noise_changes_training_and_its_counts_alone() -> None:
    split = leave_one_out(successor_walks(num_users=50, num_items=20, length=8))
    catalog = Catalog.from_ids(f"i{row}" for row in range(20)).with_training_counts(training_counts(split.train, 20))
    prepared = Prepared(None, catalog, split, "next_new_item")  # type: ignore[arg-type]

    noisy, num_replaced = with_training_noise(prepared, 0.2, seed=1)

    changed = noisy.split.train.items != split.train.items
    assert num_replaced == changed.sum() == 60  # of 50 users' six events
    assert noisy.split.validation is split.validation
    assert noisy.split.test is split.test
    counted = [int((noisy.split.train.items == FIRST_ITEM + row).sum()) for row in range(20)]
    assert noisy.catalog.training_counts.tolist() == counted
    assert catalog.training_counts.tolist() != counted


# --- how they are heard -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", EVERY_CASE)
def test_weights_and_precisions_of_replaced_and_other_events_are_those_of_the_reference_user_by_user(
    case: Case,
) -> None:
    model = case.perturbed()
    histories, replaced = with_noise(random_histories(40, seed=2), 0.3, seed=1, num_items=NUM_ITEMS)

    figures = heard_events(model, histories, replaced)

    weight: dict[bool, list[float]] = {True: [], False: []}
    log_precision: dict[bool, list[float]] = {True: [], False: []}
    for begin, end in pairwise(histories.offsets):
        shown = [event for event in range(begin, end) if histories.weights[event] > 0]
        # Windows of eight: at nine to eleven events the first four are out of sight.
        shown = shown[4:] if len(shown) > 8 else shown
        asked_by = [] if case.causal else [MASK]
        items = model.input_number.numpy()[[BOS, *histories.items[shown], *asked_by]]
        weights = np.array([1.0, *histories.weights[shown], *(1.0 for _ in asked_by)])
        timestamps = np.array([np.nan, *histories.timestamps[shown], *(np.nan for _ in asked_by)])
        expected = expected_row(model, items, weights, timestamps)
        for place, event in enumerate(shown, 1):
            weight[bool(replaced[event])].append(np.mean([layer[-1, place] for layer in expected.weights]))
            log_precision[bool(replaced[event])].append(np.log(expected.initial_precision[place]))
    for kind, is_replaced in (("replaced", True), ("other", False)):
        assert_close(figures[f"kriging_weight_{kind}"], np.mean(weight[is_replaced]), FLOAT32_TOL)
        if case.filtering:
            assert_close(np.log(figures[f"precision_{kind}"]), np.mean(log_precision[is_replaced]), FLOAT32_TOL)
    assert len(figures) == (4 if case.filtering else 2)
