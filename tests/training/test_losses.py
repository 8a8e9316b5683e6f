"""Losses and their gradients, against numpy loops over what `model.score` says."""

import numpy as np
import pytest
import torch

from model.build import build_model
from model.config import FIRST_ITEM, ModelConfig
from model.filtering import Gaussian
from model.sasrec import SASRec
from tests.tolerance import FLOAT64_TOL, assert_close
from tests.training.histories import small_model
from training import losses

NUM_ITEMS = 23
NUM_STATES = 17
FILTERING = pytest.mark.parametrize("filtering", [True, False], ids=["filtering", "plain"])


def double_model(filtering: bool) -> SASRec:
    """float64, so that a wrong formula and a rounding error cannot be mistaken for one another."""
    model = small_model(NUM_ITEMS, filtering).double()
    if filtering:
        with torch.no_grad():
            model.head.candidate_level.fill_(0.3)
            model.head.candidate_slope.fill_(-0.2)
            model.head.variance_scale.fill_(0.7)
            model.head.norm.weight.uniform_(0.5, 1.5)
            model.head.norm.bias.uniform_(-0.5, 0.5)
    return model


def states(filtering: bool) -> Gaussian:
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_STATES, 16)
    mean = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    precision = torch.rand(shape, generator=generator, dtype=torch.float64) * 4 + 0.1
    if not filtering:
        return Gaussian(mean, torch.full(shape, torch.inf, dtype=torch.float64))
    return Gaussian(mean, precision.requires_grad_())


def targets() -> torch.Tensor:
    return FIRST_ITEM + torch.randint(NUM_ITEMS, (NUM_STATES,), generator=torch.Generator().manual_seed(2))


def numpy_cross_entropy(logits: np.ndarray, own: np.ndarray) -> float:
    """Mean −log softmax of each row's own column, one row at a time."""
    return float(
        np.mean(
            [np.log(np.exp(row - row.max()).sum()) + row.max() - row[at] for row, at in zip(logits, own, strict=True)]
        )
    )


def gradients(loss: torch.Tensor, model: SASRec, state: Gaussian) -> dict[str, torch.Tensor]:
    """Of everything that the loss reaches, by name."""
    leaves = dict(model.named_parameters()) | {"mean": state.mean}
    if state.precision.requires_grad:
        leaves["precision"] = state.precision
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {name: grad for name, grad in zip(leaves, found, strict=True) if grad is not None}


@FILTERING
@pytest.mark.parametrize(("chunk_rows", "block_items"), [(1, 1), (5, 4), (NUM_STATES, NUM_ITEMS), (512, 512)])
def test_full_cross_entropy_is_the_softmax_over_the_whole_catalogue(
    filtering: bool, chunk_rows: int, block_items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK_ROWS", chunk_rows)
    monkeypatch.setattr(losses, "BLOCK_ITEMS", block_items)
    model, state = double_model(filtering), states(filtering)
    logits = model.score(state).logit.detach().numpy()

    loss = losses.full_cross_entropy(model, state, targets())

    assert_close(loss, numpy_cross_entropy(logits, targets().numpy() - FIRST_ITEM), FLOAT64_TOL)


@FILTERING
@pytest.mark.parametrize(("chunk_rows", "block_items"), [(5, 4), (512, 512)])
@pytest.mark.parametrize("scale", [1, 100], ids=["usual", "logits beyond the range of exp"])
def test_full_cross_entropy_has_the_gradient_of_the_unchunked_formula(
    filtering: bool, chunk_rows: int, block_items: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK_ROWS", chunk_rows)
    monkeypatch.setattr(losses, "BLOCK_ITEMS", block_items)
    model, state = double_model(filtering), states(filtering)
    with torch.no_grad():
        model.head.norm.weight *= scale
        if filtering and scale > 1:
            # Else the variance grows with the mean, and no logit is large.
            model.head.variance_scale.fill_(-20)
    assert (model.score(state).logit.max() > 2 * losses.SAFE_LOGIT) == (scale > 1)
    plain = -model.score(state).logit.log_softmax(1)[torch.arange(NUM_STATES), targets() - FIRST_ITEM].mean()
    expected = gradients(plain, model, state)

    # A factor, so that a backward pass that ignores the incoming gradient is seen.
    found = gradients(3 * losses.full_cross_entropy(model, state, targets()), model, state)

    assert found.keys() == expected.keys()
    assert {"item_embedding.weight", "mean", "head.norm.weight"} <= found.keys()
    if filtering:
        assert {
            "precision",
            "head.candidate_level",
            "head.candidate_slope",
            "head.variance_scale",
        } <= found.keys()
    for name, gradient in found.items():
        assert_close(gradient, 3 * expected[name], FLOAT64_TOL, name)


@FILTERING
def test_full_cross_entropy_reads_the_items_as_the_head_does(filtering: bool) -> None:
    """HSTU's head reads unit vectors: a gradient across an item's length would show here."""
    torch.manual_seed(3)
    config = ModelConfig(backbone="hstu", filtering=filtering, width=16, temperature=0.2)
    model, state = build_model(config, torch.arange(NUM_ITEMS)).double(), states(filtering)
    plain = -model.score(state).logit.log_softmax(1)[torch.arange(NUM_STATES), targets() - FIRST_ITEM].mean()
    expected = gradients(plain, model, state)

    loss = losses.full_cross_entropy(model, state, targets())
    found = gradients(loss, model, state)

    assert_close(loss, plain, FLOAT64_TOL)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert_close(gradient, expected[name], FLOAT64_TOL, name)
    along = (found["item_embedding.weight"] * model.item_embedding.weight).sum(1)
    assert_close(along, torch.zeros_like(along), FLOAT64_TOL)


def test_special_tokens_get_no_gradient_from_the_output() -> None:
    model, state = double_model(filtering=True), states(filtering=True)

    gradient = gradients(losses.full_cross_entropy(model, state, targets()), model, state)

    assert (gradient["item_embedding.weight"][:FIRST_ITEM] == 0).all()
    assert (gradient["item_embedding.weight"][FIRST_ITEM:] != 0).any(1).all()


@FILTERING
@pytest.mark.parametrize("num_negatives", [1, 9, 200])
def test_sampled_softmax_is_the_loop_over_shared_negatives_without_the_own_target(
    filtering: bool, num_negatives: int
) -> None:
    model, state = double_model(filtering), states(filtering)
    logits = model.score(state).logit.detach().numpy()
    own = targets().numpy() - FIRST_ITEM
    # What a generator of that seed gives; 200 negatives of 23 items hold every target, repeats included.
    drawn = torch.randint(NUM_ITEMS, (num_negatives,), generator=torch.Generator().manual_seed(5)).tolist()
    each = []
    for row, target in enumerate(own):
        others = [np.exp(logits[row, item]) for item in drawn if item != target]
        each.append(np.log(np.exp(logits[row, target]) + sum(others)) - logits[row, target])

    loss = losses.sampled_softmax(model, state, targets(), num_negatives, torch.Generator().manual_seed(5))

    assert_close(loss, np.mean(each), FLOAT64_TOL)


def test_a_row_whose_negatives_are_all_its_own_target_costs_nothing_and_stays_finite() -> None:
    model = small_model(1)
    state = Gaussian(torch.randn(3, 16, requires_grad=True), torch.ones(3, 16))

    loss = losses.sampled_softmax(model, state, torch.full((3,), FIRST_ITEM), 4, torch.Generator())
    loss.backward()

    assert loss.item() == 0
    assert torch.equal(state.mean.grad, torch.zeros(3, 16))


@FILTERING
def test_full_cross_entropy_under_autocast_is_the_same_to_bfloat16_s_precision(filtering: bool) -> None:
    model = small_model(NUM_ITEMS, filtering)
    exact_state = states(filtering)
    state = Gaussian(exact_state.mean.detach().float().requires_grad_(), exact_state.precision.detach().float())
    exact = losses.full_cross_entropy(model, state, targets())
    expected = gradients(exact, model, state)

    with torch.autocast("cpu", torch.bfloat16):
        loss = losses.full_cross_entropy(model, state, targets())
    found = gradients(loss, model, state)

    eight_bits = 2**-8
    assert abs(loss.item() - exact.item()) < eight_bits * (1 + exact.item())
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        scale = expected[name].abs().max()
        assert (gradient - expected[name]).abs().max() < 4 * eight_bits * scale + 1e-6, name
    assert any((found[name] != expected[name]).any() for name in found), "autocast changed nothing"


def test_a_target_of_no_probability_has_a_finite_loss_and_its_gradient() -> None:
    left, right = torch.tensor([[300.0]], requires_grad=True), torch.tensor([[1.0], [0.0]])

    loss = losses.OnePassCrossEntropy.apply(left, right, None, None, torch.tensor([1]))
    loss.backward()

    # p(target) = exp(-300) is 0 in float32; the gradient is p(0)·1 − 0 = 1.
    assert loss.item() == 300.0
    assert left.grad.item() == 1.0
