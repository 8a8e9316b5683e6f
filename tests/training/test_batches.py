"""Windows, batches and UNK replacement, against loops over plain lists."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.config import BOS, FIRST_ITEM, PAD, UNK, window_start
from tests.training.histories import histories_of
from training.batches import (
    Windows,
    collate,
    serving_windows,
    shuffled_batches,
    training_windows,
    with_unknowns,
)

MAX_LENS = st.sampled_from([2, 4, 6, 10])


@st.composite
def users_and_max_len(draw: st.DrawFn) -> tuple[list[list[int]], list[list[float]], int]:
    """A few users with 0 … 3L+1 events each; item numbers tell the events apart, some weigh 0."""
    max_len = draw(MAX_LENS)
    counts = draw(st.lists(st.integers(0, 3 * max_len + 1), min_size=1, max_size=5))
    numbers = iter(range(FIRST_ITEM, FIRST_ITEM + sum(counts)))
    users = [[next(numbers) for _ in range(count)] for count in counts]
    weight = st.sampled_from([0.0, 0.5, 1.0, 2.0])
    weights = [draw(st.lists(weight, min_size=count, max_size=count)) for count in counts]
    return users, weights, max_len


def kept_events(users: list[list[int]], weights: list[list[float]]) -> list[list[tuple[int, float]]]:
    """Each user's (item, weight) without those of weight 0."""
    return [
        [(item, weight) for item, weight in zip(*user, strict=True) if weight > 0]
        for user in zip(users, weights, strict=True)
    ]


def predictions_in(windows: Windows) -> list[tuple[list[tuple[int, float]], int]]:
    """Every prediction that the windows ask for: what is visible before the target, and the target."""
    result = []
    for row in range(len(windows)):
        batch = collate(windows, torch.tensor([row]))
        for position, target in zip(batch.positions.tolist(), batch.targets.tolist(), strict=True):
            items = batch.items[0, 1 : position + 1].tolist()
            result.append((list(zip(items, batch.weights[0, 1 : position + 1].tolist(), strict=True)), target))
    return result


@given(users_and_max_len())
def test_every_event_is_a_target_once_after_what_the_window_rule_shows(
    case: tuple[list[list[int]], list[list[float]], int],
) -> None:
    users, weights, max_len = case
    expected = [
        (events[window_start(count, max_len) : count], events[count][0])
        for events in kept_events(users, weights)
        for count in range(len(events))
    ]

    windows = training_windows(histories_of(users, weights), max_len)
    found = predictions_in(windows)

    assert (windows.num_targets > 0).all()
    # Items are all different, so the target names the event.
    assert sorted(found, key=lambda pair: pair[1]) == sorted(expected, key=lambda pair: pair[1])


@given(users_and_max_len())
def test_as_prefixes_the_same_predictions_are_made_each_at_the_end_of_a_row_of_its_own(
    case: tuple[list[list[int]], list[list[float]], int],
) -> None:
    users, weights, max_len = case
    histories = histories_of(users, weights)

    windows = training_windows(histories, max_len, prefixes=True)

    found = predictions_in(windows)
    assert sorted(found, key=lambda pair: pair[1]) == sorted(
        predictions_in(training_windows(histories, max_len)), key=lambda pair: pair[1]
    )
    assert len(windows) == len(found)
    assert torch.equal(windows.first_target, windows.num_inputs)


@given(users_and_max_len())
def test_serving_windows_show_what_the_window_rule_shows(
    case: tuple[list[list[int]], list[list[float]], int],
) -> None:
    users, weights, max_len = case
    windows = serving_windows(histories_of(users, weights), max_len)

    batch = collate(windows, torch.arange(len(windows)))

    assert len(windows) == len(users)
    for row, events in enumerate(kept_events(users, weights)):
        shown = events[window_start(len(events), max_len) :]
        assert len(shown) <= max_len
        assert batch.last[row] == len(shown)
        assert batch.items[row, : len(shown) + 1].tolist() == [BOS, *(item for item, _ in shown)]
        assert batch.weights[row, 1 : len(shown) + 1].tolist() == [weight for _, weight in shown]
    assert len(batch.positions) == 0


@given(users_and_max_len())
def test_rows_begin_with_bos_and_end_in_padding_up_to_the_longest(
    case: tuple[list[list[int]], list[list[float]], int],
) -> None:
    users, weights, max_len = case
    windows = training_windows(histories_of(users, weights), max_len)
    if len(windows) == 0:
        assert not any(weight for user in weights for weight in user)
        return

    batch = collate(windows, torch.arange(len(windows)))

    assert batch.items.shape == batch.weights.shape == (len(windows), int(windows.num_inputs.max()) + 1)
    assert batch.items.shape[1] <= max_len + 1
    assert (batch.items[:, 0] == BOS).all()
    after_last = torch.arange(batch.items.shape[1]) > batch.last[:, None]
    assert torch.equal(batch.items == PAD, after_last)
    assert (batch.weights[:, 0] == 1).all()
    assert (batch.weights > 0).all()


def test_events_of_weight_zero_are_neither_inputs_nor_targets() -> None:
    histories = histories_of([[4, 5, 6, 7]], [[1.0, 0.0, 2.0, 0.0]])

    batch = collate(training_windows(histories, max_len=4), torch.tensor([0]))

    assert batch.items.tolist() == [[BOS, 4]]
    assert batch.targets.tolist() == [4, 6]


def test_an_unknown_item_is_an_input_but_never_a_target() -> None:
    histories = histories_of([[4, UNK, 5]])

    batch = collate(training_windows(histories, max_len=4), torch.tensor([0]))

    assert batch.items.tolist() == [[BOS, 4, UNK]]
    assert batch.targets.tolist() == [4, 5]
    assert batch.positions.tolist() == [0, 2]


def test_timestamps_stand_beside_their_events_and_bos_and_padding_have_none() -> None:
    moment = 1_764_424_800.125
    histories = histories_of([[4, 5, 6], [7]], [[1.0, 0.0, 2.0], [1.0]], [[moment, moment + 1, np.nan], [moment + 9]])

    batch = collate(serving_windows(histories, max_len=4), torch.tensor([0, 1]))

    assert batch.timestamps.dtype == torch.float64
    np.testing.assert_array_equal(batch.timestamps, [[np.nan, moment, np.nan], [np.nan, moment + 9, np.nan]])


def test_users_without_any_event_are_served_bos_alone() -> None:
    windows = serving_windows(histories_of([[], []]), max_len=4)

    batch = collate(windows, torch.tensor([0, 1]))

    assert batch.items.tolist() == [[BOS], [BOS]]
    assert batch.last.tolist() == [0, 0]


def many_windows(seed: int = 0) -> Windows:
    """Windows of 1,000 users with 1 … 40 events, most of them few."""
    lengths = np.random.default_rng(seed).geometric(0.1, size=1000).clip(1, 40)
    return training_windows(histories_of([[FIRST_ITEM] * int(length) for length in lengths]), max_len=50)


def test_an_epoch_covers_each_window_once_in_full_batches_but_few() -> None:
    windows = many_windows()

    batches = list(shuffled_batches(windows, 16, torch.Generator().manual_seed(1)))

    assert sorted(torch.cat(batches).tolist()) == list(range(len(windows)))
    assert len(batches) == -(-len(windows) // 16)
    assert sum(len(batch) < 16 for batch in batches) <= 1


def test_the_parts_of_a_batch_hold_each_row_and_each_target_once() -> None:
    numbers = iter(range(FIRST_ITEM, 1000))
    windows = training_windows(histories_of([[next(numbers) for _ in range(length)] for length in (1, 2, 4, 7)]), 10)
    batch = collate(windows, torch.arange(4))

    parts = [batch.part(number, 3) for number in range(3)]

    assert [len(part.items) for part in parts] == [2, 1, 1]
    for number, part in enumerate(parts):
        assert torch.equal(part.items, batch.items[number::3])
        assert part.last.tolist() == batch.last[number::3].tolist()
        # A target is the item right after its position; a row's last target is in no column.
        for position, target in zip(part.positions.tolist(), part.targets.tolist(), strict=True):
            row, column = divmod(position, part.items.shape[1])
            if column < int(part.last[row]):
                assert part.items[row, column + 1] == target
    assert sorted(torch.cat([part.targets for part in parts]).tolist()) == sorted(batch.targets.tolist())


def test_a_part_beyond_the_rows_is_empty() -> None:
    batch = collate(training_windows(histories_of([[FIRST_ITEM]]), 4), torch.tensor([0]))

    assert batch.part(1, 2).items.shape == (0, batch.items.shape[1])
    assert len(batch.part(1, 2).targets) == 0


def test_the_seed_decides_the_order_of_an_epoch() -> None:
    windows = many_windows()

    def epoch(seed: int) -> list[list[int]]:
        return [batch.tolist() for batch in shuffled_batches(windows, 16, torch.Generator().manual_seed(seed))]

    assert epoch(1) == epoch(1)
    assert epoch(1) != epoch(2)


def test_two_epochs_of_one_generator_differ_in_which_windows_meet() -> None:
    generator = torch.Generator().manual_seed(1)
    first, second = (
        {frozenset(batch.tolist()) for batch in shuffled_batches(many_windows(), 16, generator)} for _ in range(2)
    )

    assert not first & second


def test_bucketing_keeps_padding_far_below_that_of_random_batches() -> None:
    windows = many_windows()

    def padded_share(batches: list[torch.Tensor]) -> float:
        grids = [collate(windows, rows).items == PAD for rows in batches]
        return sum(int(grid.sum()) for grid in grids) / sum(grid.numel() for grid in grids)

    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(2))
    random_batches = list(order.split(16))
    bucketed = list(shuffled_batches(windows, 16, torch.Generator().manual_seed(2)))

    # Lengths are geometric with mean 10: a random batch of 16 is padded to the longest, about 33.
    assert padded_share(random_batches) > 0.5
    assert padded_share(bucketed) < 0.1


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.3])
def test_unknowns_replace_the_given_share_of_input_events(rate: float) -> None:
    histories = histories_of([[FIRST_ITEM + event for event in range(40)] for _ in range(500)])
    batch = collate(serving_windows(histories, max_len=40), torch.arange(500))

    replaced = (with_unknowns(batch, rate, torch.Generator().manual_seed(3)).items == UNK)[:, 1:]

    # 20,000 independent draws: five standard deviations.
    assert replaced.float().mean().item() == pytest.approx(rate, abs=5 * (rate * (1 - rate) / 20_000) ** 0.5)


def test_unknowns_leave_special_tokens_padding_weights_and_targets_alone() -> None:
    histories = histories_of([[4, UNK, 5, 6], [7]], [[0.5, 1.0, 2.0, 1.0], [3.0]], [[1.0, 2.0, 3.0, 4.0], [5.0]])
    batch = collate(training_windows(histories, max_len=8), torch.tensor([0, 1]))

    changed = with_unknowns(batch, 0.999, torch.Generator().manual_seed(4))

    assert changed.items.tolist() == [[BOS, UNK, UNK, UNK], [BOS, PAD, PAD, PAD]]
    for name in ("weights", "last", "positions", "targets"):
        assert torch.equal(getattr(changed, name), getattr(batch, name)), name
    assert torch.equal(changed.timestamps.nan_to_num(), batch.timestamps.nan_to_num())
    assert batch.items.tolist() == [[BOS, 4, UNK, 5], [BOS, PAD, PAD, PAD]]
