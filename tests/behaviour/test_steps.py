"""Folding events into a cached state equals encoding the whole history (math.md, "What must hold", 4).

One suite for every causal backbone, with filtering and without; what is folded is compared with `encode`, which
tests/model holds against the float64 reference.
"""

import pytest
import torch
from torch import Tensor

from model.backbone import Cache, CausalBackbone
from model.config import FIRST_ITEM, PAD, window_start
from model.filtering import Gaussian
from tests.behaviour.instances import EVERY_CASE, MAX_LEN, NUM_ITEMS, Case, Rows, at, random_rows, user, window
from tests.tolerance import FLOAT32_TOL, FLOAT64_TOL, assert_close, assert_precision_close

CAUSAL = [param for param in EVERY_CASE if param.values[0].causal]
every_case = pytest.mark.parametrize("case", CAUSAL)


def causal(case: Case, dtype: torch.dtype = torch.float64) -> CausalBackbone:
    model = case.perturbed(dtype)
    assert isinstance(model, CausalBackbone)
    return model


def assert_same(found: Gaussian, expected: Gaussian, tol: float) -> None:
    """Means and precisions agree; a precision may be infinite on both sides."""
    assert_close(found.mean, expected.mean, tol, "mean")
    known = torch.isfinite(expected.precision)
    assert torch.equal(torch.isfinite(found.precision), known)
    assert_precision_close(found.precision[known], expected.precision[known], tol)


def last(state: Gaussian) -> Gaussian:
    return Gaussian(state.mean[:, -1], state.precision[:, -1])


@every_case
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, FLOAT64_TOL), (torch.float32, FLOAT32_TOL)])
@torch.no_grad()
def test_folding_one_event_at_a_time_equals_encoding_the_history_for_every_count(
    case: Case, dtype: torch.dtype, tol: float
) -> None:
    model, events = causal(case, dtype), user(1, dtype)
    _, cache = model.step(None, *window(events, 0))
    moves = 0

    for count in range(1, 3 * MAX_LEN + 1):
        rows = window(events, count)
        if window_start(count, MAX_LEN) == window_start(count - 1, MAX_LEN):
            state, added = model.step(cache, *at(rows, slice(-1, None)))
            cache = cache.extended(added)
        else:
            # The window moved, and with it every position: the cache is of no use any more.
            state, cache = model.step(None, *rows)
            moves += 1

        assert_same(last(state), model.final_state(*rows), tol)
        assert cache.length.tolist() == [rows.items.shape[1]]
    assert moves == 4


@every_case
@pytest.mark.parametrize("count", [1, MAX_LEN, MAX_LEN + 1, 3 * MAX_LEN])
@torch.no_grad()
def test_a_cache_that_was_lost_and_made_anew_goes_on_like_one_that_was_kept(case: Case, count: int) -> None:
    model, events = causal(case), user(2, torch.float64)
    rows = window(events, count)
    _, kept = model.step(None, *at(rows, slice(0, 1)))
    for place in range(1, rows.items.shape[1]):
        kept = kept.extended(model.step(kept, *at(rows, slice(place, place + 1)))[1])

    _, made_anew = model.step(None, *rows)

    for name in ("key", "value", "log_precision"):
        found, expected = (getattr(cache, name) for cache in (kept, made_anew))
        known = torch.isfinite(expected)
        assert_close(found[known], expected[known], FLOAT64_TOL, name)
    assert torch.equal(kept.timestamps.nan_to_num(-1), made_anew.timestamps.nan_to_num(-1))


@every_case
@pytest.mark.parametrize("num_past", [0, 1, 3, MAX_LEN])
@torch.no_grad()
def test_several_events_at_once_equal_one_after_the_other(case: Case, num_past: int) -> None:
    model = causal(case)
    rows = random_rows(3, batch=1, length=MAX_LEN + 1, dtype=torch.float64)
    cache = model.step(None, *at(rows, slice(0, num_past)))[1]

    state, _ = model.step(cache, *at(rows, slice(num_past, None)))

    everywhere = model.encode(*rows)
    assert_same(state, Gaussian(*(part[:, num_past:] for part in everywhere)), FLOAT64_TOL)


@every_case
@torch.no_grad()
def test_batch_mates_of_other_lengths_and_their_padding_change_no_step(case: Case) -> None:
    model = causal(case)
    rows = random_rows(4, batch=6, length=MAX_LEN - 1, dtype=torch.float64)
    length = torch.tensor(rows.lengths())
    num_past = length // 2
    past, new = cut(rows, torch.zeros_like(length), num_past), cut(rows, num_past, length - num_past)
    cache = model.step(None, *past)[1]
    # What lies behind a row's cached positions must mean nothing.
    beyond = torch.arange(cache.timestamps.shape[1]) >= cache.length[:, None]
    assert beyond.any()
    spoiled = Cache(
        cache.key.masked_fill(beyond[:, None, None, :, None], 1e3),
        cache.value.masked_fill(beyond[:, None, None, :, None], -1e3),
        cache.log_precision.masked_fill(beyond[:, None], 9.0),
        cache.timestamps.masked_fill(beyond, 1.7e9),
        cache.length,
    )

    state, _ = model.step(spoiled, *new)

    everywhere = model.encode(*rows)
    for index in range(len(length)):
        real = slice(int(num_past[index]), int(length[index]))
        found = Gaussian(*(part[index, : real.stop - real.start] for part in state))
        assert_same(found, Gaussian(*(part[index, real] for part in everywhere)), FLOAT64_TOL)
    assert (state.precision[new.items == PAD] == 0).all()


@every_case
@torch.no_grad()
def test_users_whose_events_end_sooner_wait_in_the_batch_unchanged(case: Case) -> None:
    model = causal(case)
    rows = random_rows(7, batch=6, length=MAX_LEN, dtype=torch.float64)
    everywhere = model.encode(*rows)

    state, cache = model.step(None, *at(rows, slice(0, 1)))
    for place in range(1, MAX_LEN):
        state, added = model.step(cache, *at(rows, slice(place, place + 1)))
        cache = cache.extended(added)
        assert_same(state, Gaussian(*(part[:, place : place + 1] for part in everywhere)), FLOAT64_TOL)

    assert cache.length.tolist() == rows.lengths()


def cut(rows: Rows, start: Tensor, length: Tensor) -> Rows:
    """From each row `length` positions from `start` on, padded on the right."""
    parts = [
        [part[i, s : s + n] for i, (s, n) in enumerate(zip(start.tolist(), length.tolist(), strict=True))]
        for part in rows
    ]
    fills = (PAD, 1.0, torch.nan)
    return Rows(
        *(
            torch.nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=fill)
            for part, fill in zip(parts, fills, strict=True)
        )
    )


@every_case
@torch.no_grad()
def test_a_cached_event_reaches_the_next_state(case: Case) -> None:
    model = causal(case)
    rows = random_rows(5, batch=1, length=MAX_LEN, dtype=torch.float64)
    before = model.step(model.step(None, *at(rows, slice(0, -1)))[1], *at(rows, slice(-1, None)))[0]

    for place in range(1, MAX_LEN - 1):
        items = rows.items.clone()
        items[:, place] = FIRST_ITEM + (items[:, place] + 5) % NUM_ITEMS
        other = rows._replace(items=items)
        after = model.step(model.step(None, *at(other, slice(0, -1)))[1], *at(other, slice(-1, None)))[0]
        assert (after.mean - before.mean).abs().max() > 1e-6
