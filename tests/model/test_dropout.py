"""Dropout with cheap masks, against what dropout is: independent draws at a probability, the mean kept."""

import math

import pytest
import torch
from scipy import stats

from model.dropout import apply_dropout

NUM = 1_000_003
"""No multiple of four: the last draws come from a number of which a part is left over."""


@pytest.mark.parametrize("probability", [0.001, 0.1, 0.3, 0.5, 0.9])
def test_as_many_are_dropped_as_the_probability_says(probability: float) -> None:
    torch.manual_seed(1)
    dropped = int((apply_dropout(torch.ones(NUM), probability, True) == 0).sum())

    # The resolution of the probability is far below what a million draws can tell.
    assert stats.binomtest(dropped, NUM, probability).pvalue > 1e-4


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.5])
def test_what_is_kept_is_scaled_so_that_the_mean_stays(probability: float) -> None:
    torch.manual_seed(2)
    x = torch.randn(7, 5, 3, dtype=torch.float64)
    found = apply_dropout(x, probability, True)
    kept = found != 0

    assert found.shape == x.shape
    assert torch.allclose(found[kept], x[kept] / (1 - probability), rtol=2**-15)


def test_neighbours_are_dropped_independently() -> None:
    """Four draws come from one number: none of its bits tells of another."""
    torch.manual_seed(3)
    dropped = apply_dropout(torch.ones(NUM), 0.5, True) == 0
    for lag in (1, 2, 3, 4):
        both = int((dropped[lag:] & dropped[:-lag]).sum())
        assert abs(both - NUM / 4) < 5 * math.sqrt(NUM * 3 / 16)  # by chance once in two million


def test_each_place_within_a_number_is_dropped_alike() -> None:
    torch.manual_seed(4)
    kept = (apply_dropout(torch.ones(1_000_000), 0.3, True) != 0).view(-1, 4).sum(0)

    assert stats.chisquare(kept.numpy()).pvalue > 1e-4


def test_the_seed_decides_what_is_dropped() -> None:
    def drop(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return apply_dropout(torch.ones(100), 0.5, True)

    assert torch.equal(drop(5), drop(5))
    assert not torch.equal(drop(5), drop(6))


def test_the_gradient_is_the_mask() -> None:
    torch.manual_seed(7)
    x = torch.randn(1000, requires_grad=True)
    found = apply_dropout(x, 0.4, True)
    found.sum().backward()

    assert x.grad is not None
    assert torch.allclose(x.grad * x.detach(), found.detach())


@pytest.mark.parametrize(("probability", "training"), [(0.0, True), (0.5, False)])
def test_nothing_is_dropped_without_need(probability: float, training: bool) -> None:
    x = torch.randn(3)

    assert apply_dropout(x, probability, training) is x
