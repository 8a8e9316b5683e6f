"""The rows that a model which sees both directions is trained on, against loops over plain lists."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings

from model.config import BOS, FIRST_ITEM, MASK, PAD, UNK, window_start
from tests.training.histories import SMALL, fresh_model, histories_of, leave_one_out, successor_walks
from tests.training.test_batches import kept_events, users_and_max_len
from training.batches import Batch, Windows, collate, collate_masked, serving_windows, training_windows
from training.config import OptimizerConfig
from training.evaluate import ranks, score_users
from training.loop import fit, training_batch

NUM_USERS, NUM_EVENTS = 500, 40
Row = tuple[list[int], int]
"""What a row shows behind BOS, and the item behind its only mask."""


def long_windows() -> Windows:
    """One window of forty different items for each of five hundred users."""
    users = [[FIRST_ITEM + event for event in range(NUM_EVENTS)] for _ in range(NUM_USERS)]
    return training_windows(histories_of(users), max_len=NUM_EVENTS)


def draw(windows: Windows, *, mask_share: float = 0.2, last_item_share: float, seed: int = 0, times: int = 1) -> Batch:
    """Every window once, or as many times as told."""
    rows = torch.arange(len(windows)).repeat(times)
    return collate_masked(windows, rows, mask_share, last_item_share, torch.Generator().manual_seed(seed))


def restored(batch: Batch) -> torch.Tensor:
    """The items with the targets put back where they were masked."""
    items = batch.items.flatten().clone()
    items[batch.positions] = batch.targets
    return items.view_as(batch.items)


def served_rows(batch: Batch) -> list[Row]:
    """Context and target of each row that has a target; its only MASK is its last real position."""
    rows, last = batch.items.tolist(), batch.last.tolist()
    found = []
    for place, target in zip(batch.positions.tolist(), batch.targets.tolist(), strict=True):
        row, position = divmod(place, batch.items.shape[1])
        assert position == last[row]
        assert rows[row][position:] == [MASK] + [PAD] * (len(rows[row]) - position - 1)
        assert MASK not in rows[row][:position]
        found.append((rows[row][1:position], target))
    return found


# --- rows masked at random ----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.2, 0.6])
def test_the_given_share_of_a_window_s_events_is_masked(share: float) -> None:
    masked = (draw(long_windows(), mask_share=share, last_item_share=0.0).items == MASK)[:, 1:]

    assert masked.shape == (NUM_USERS, NUM_EVENTS)
    # 20,000 independent draws: five standard deviations, and the share of rows that would have had no mask.
    none = (1 - share) ** NUM_EVENTS / NUM_EVENTS
    assert masked.float().mean().item() == pytest.approx(share + none, abs=5 * (share * (1 - share) / 20_000) ** 0.5)
    # No place is favoured: 500 draws each.
    assert masked.float().mean(0).sub(share).abs().max() < 5 * (share * (1 - share) / 500) ** 0.5


@given(users_and_max_len())
def test_the_targets_are_the_masked_events_of_the_whole_window(
    case: tuple[list[list[int]], list[list[float]], int],
) -> None:
    users, weights, max_len = case
    windows = training_windows(histories_of(users, weights), max_len)
    if len(windows) == 0:
        return
    batch = draw(windows, last_item_share=0.0)

    flat = {item for events in kept_events(users, weights) for item, _ in events}
    assert set(batch.targets.tolist()) <= flat
    assert batch.items.shape[1] <= max_len + 2
    assert (batch.items.flatten()[batch.positions] == MASK).all()
    assert (batch.items == MASK).sum() == len(batch.positions) == len(batch.targets)
    for row in range(len(windows)):
        start, shown = int(windows.start[row]), int(windows.num_inputs[row]) + 1
        expected = [BOS, *windows.items[start : start + shown].tolist()]
        assert restored(batch)[row, : shown + 1].tolist() == expected
        assert (batch.items[row, shown + 1 :] == PAD).all()
        assert (batch.items[row] == MASK).any()


def test_a_share_close_to_none_masks_one_event_of_a_row_at_any_place() -> None:
    masked = draw(long_windows(), mask_share=1e-9, last_item_share=0.0).items == MASK

    assert (masked.sum(1) == 1).all()
    # 500 rows over 40 places: each is hit 12.5 times on average, and missed with a chance of 40·e^-12.5 at all.
    assert masked.any(0)[1:].all()


def test_a_masked_event_has_no_weight_and_no_time_of_its_own_and_the_others_keep_theirs() -> None:
    histories = histories_of([[4, 5, 6, 7]], [[0.5, 2.0, 3.0, 4.0]])
    histories.timestamps[:] = [10.0, 20.0, 30.0, 40.0]
    batch = draw(training_windows(histories, max_len=8), mask_share=0.5, last_item_share=0.0, seed=1)

    masked = batch.items[0] == MASK
    assert 0 < masked.sum() < 4
    weights, times = torch.tensor([1.0, 0.5, 2.0, 3.0, 4.0]), torch.tensor([torch.nan, 10.0, 20.0, 30.0, 40.0])
    assert batch.weights[0].tolist() == torch.where(masked, 1.0, weights).tolist()
    assert torch.allclose(batch.timestamps[0].float(), times.masked_fill(masked, torch.nan), equal_nan=True)


# --- rows that end in the masked event, as served -----------------------------------------------------------


@settings(max_examples=25)
@given(users_and_max_len())
def test_served_rows_are_over_the_epochs_exactly_the_requests_of_every_moment(
    case: tuple[list[list[int]], list[list[float]], int],
) -> None:
    users, weights, max_len = case
    requests = {
        (tuple(item for item, _ in events[window_start(count, max_len) : count]), events[count][0])
        for events in kept_events(users, weights)
        for count in range(len(events))
    }
    windows = training_windows(histories_of(users, weights), max_len)
    if len(windows) == 0:
        assert not requests
        return

    # A window serves at most L + 1 = 11 moments; one of five users' thirty windows misses one of them in 200 epochs
    # with a chance below 30·11·(10/11)^200, 2e-6.
    found = served_rows(draw(windows, last_item_share=1.0, times=200))

    assert {(tuple(context), target) for context, target in found} == requests


def test_each_moment_that_a_window_serves_is_as_likely_as_any_other() -> None:
    windows = training_windows(histories_of([[4, 5, 6, 7]] * 4000), max_len=8)

    lengths = Counter(len(context) for context, _ in served_rows(draw(windows, last_item_share=1.0)))

    assert sorted(lengths) == [0, 1, 2, 3]
    # 4,000 draws of four: five standard deviations.
    assert all(abs(times - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5 for times in lengths.values())


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_given_share_of_the_rows_are_served_ones(share: float) -> None:
    # A tiny mask share leaves one mask a row; it stands at the end of all served rows and of a fortieth of others.
    batch = draw(long_windows(), mask_share=1e-9, last_item_share=share)

    at_the_end = batch.items[torch.arange(NUM_USERS), batch.last] == MASK

    expected = share + (1 - share) / NUM_EVENTS
    spread = (expected * (1 - expected) / NUM_USERS) ** 0.5
    assert at_the_end.float().mean().item() == pytest.approx(expected, abs=5 * spread)


@pytest.mark.parametrize("filtering", [True, False], ids=["filtering", "plain"])
def test_a_served_row_is_encoded_as_the_request_is(filtering: bool) -> None:
    split = leave_one_out(successor_walks(num_users=20, num_items=25, length=10))
    model = fresh_model(split, 25, SMALL.model_copy(update={"backbone": "bert4rec", "filtering": filtering})).eval()
    batch = draw(training_windows(split.train, SMALL.max_len), last_item_share=1.0)
    trained = model.encode(batch.items, batch.weights, batch.timestamps).mean.flatten(0, 1)[batch.positions]

    contexts = [context for context, _ in served_rows(batch)]
    request = collate(serving_windows(histories_of(contexts), SMALL.max_len), torch.arange(len(contexts)))
    asked = model.final_state(request.items, request.weights, request.timestamps).mean

    assert torch.allclose(trained, asked, atol=1e-5)


# --- special tokens, seeds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("last_item_share", [0.0, 0.5, 1.0])
def test_special_tokens_are_never_masked_and_never_targets(last_item_share: float) -> None:
    windows = training_windows(histories_of([[4, UNK, 5], [UNK, UNK], [6, UNK]]), max_len=4)

    for seed in range(50):
        batch = draw(windows, mask_share=0.9, last_item_share=last_item_share, seed=seed)
        assert (batch.targets >= FIRST_ITEM).all()
        assert (batch.items[:, 0] == BOS).all()
        shown = restored(batch)
        assert (shown[1][batch.items[1] != PAD][1:] == UNK).all()
        for row, events in enumerate(([4, UNK, 5], [UNK, UNK], [6, UNK])):
            length = int(batch.last[row])
            assert shown[row, 1 : length + 1].tolist() == events[:length]


def test_the_generator_decides_the_masks() -> None:
    windows = long_windows()
    first, again, other = (draw(windows, last_item_share=0.5, seed=seed) for seed in (1, 1, 2))

    assert torch.equal(first.items, again.items)
    assert torch.equal(first.targets, again.targets)
    assert not torch.equal(first.items, other.items)


@pytest.mark.parametrize("backbone", ["sasrec", "bert4rec"])
def test_only_a_model_that_sees_both_directions_gets_masked_batches(backbone: str) -> None:
    split = leave_one_out(successor_walks(num_users=20, num_items=25, length=10))
    model = fresh_model(split, 25, SMALL.model_copy(update={"backbone": backbone}))
    windows = training_windows(split.train, SMALL.max_len)

    batch = training_batch(model, windows, torch.arange(20), OptimizerConfig(), torch.Generator().manual_seed(0))

    assert bool((batch.items == MASK).any()) is not model.causal


# --- learning -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filtering", [True, False], ids=["filtering", "plain"])
def test_a_deterministic_successor_is_learned_within_300_steps(filtering: bool) -> None:
    # Walks longer than the window, so that every position is trained that a test user's query stands at.
    split = leave_one_out(successor_walks(num_users=1000, num_items=25, length=14))
    config = SMALL.model_copy(update={"backbone": "bert4rec", "filtering": filtering, "dropout": 0.1})
    model = fresh_model(split, 25, config)
    steps: list[int] = []
    optimizer = OptimizerConfig(batch_size=128, learning_rate=1e-2, epochs=18, patience=18)

    fit(model, split, "next_item", optimizer, on_step=lambda done, total, mean: steps.append(done))

    test_ranks = ranks(score_users(model, split.test.history, "next_item"), split.test)
    assert len(steps) <= 300
    assert (test_ranks == 1).mean() > 0.9
