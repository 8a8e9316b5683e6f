"""The steps as they are differentiated: by hand, slice by slice, from little that was kept.

The answers come from autograd, which differentiates the plain formula of each step.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import adjoints, filtering
from model.build import build_model
from model.config import BOS, FIRST_ITEM, ModelConfig
from model.filtering import Dynamics, Gaussian
from tests.model.test_filtering import (
    EXTREME,
    MODERATE,
    Shape,
    draw_dynamics,
    draw_field,
    draw_state,
    normal,
    positive,
)
from tests.tolerance import FLOAT64_TOL, assert_close

SHAPE = Shape(seed=41, batch=4, heads=2, channels=3, length=7)
FFN_WIDTH = 10
MASKS = ["causal", "causal padded", "bidirectional", "ragged", "nothing visible"]
LIMITS = pytest.mark.parametrize("limit", [MODERATE, EXTREME], ids=["moderate", "extreme"])
SLICES = pytest.mark.parametrize("slice_elements", [1, 2**19], ids=["slices of one row", "one slice"])


class Call(NamedTuple):
    """A step, and the tensors that it differentiates by."""

    step: Callable[..., tuple[Tensor, ...]]
    leaves: list[Tensor]

    def outputs_and_gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Of a random combination of all outputs."""
        leaves = [leaf.detach().requires_grad_() for leaf in self.leaves]
        outputs = list(self.step(*leaves))
        generator = torch.Generator().manual_seed(7)
        weights = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in outputs]
        return outputs, list(torch.autograd.grad(outputs, leaves, weights))


def observation(name: str, mask: str, limit: float, dropout: float = 0.0) -> Call:
    inputs = draw_field(SHAPE, mask, torch.float64, limit)
    bias = normal(np.random.default_rng(42), torch.float64, *inputs.visible.shape)

    def krige(query: Tensor, key: Tensor, value: Tensor, precision: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        return filtering.krige(query, key, value, precision, inputs.visible, 2.5, dropout)

    def sandwich(query: Tensor, key: Tensor, value: Tensor, precision: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        return filtering.sandwich(query, key, value, bias, precision, inputs.visible, 7.0, 2.5, dropout)

    return Call(krige, list(inputs[:4])) if name == "krige" else Call(sandwich, [*inputs[:4], bias])


def update(limit: float) -> Call:
    rng = np.random.default_rng(43)
    prior = draw_state(rng, torch.float64, SHAPE, limit)
    leaves = [
        *prior,
        normal(rng, torch.float64, *prior.mean.shape),
        positive(rng, torch.float64, limit, *prior.mean.shape),
    ]
    return Call(lambda m, p, i, o: filtering.update(Gaussian(m, p), i, o), leaves)


def prediction(name: str, limit: float, dropout: float = 0.0) -> Call:
    rng = np.random.default_rng(44)
    state = draw_state(rng, torch.float64, SHAPE, limit)
    dynamics = draw_dynamics(rng, torch.float64, SHAPE.width, FFN_WIDTH)
    step = getattr(filtering, name)

    def predict(mean: Tensor, precision: Tensor, *parameters: Tensor) -> Gaussian:
        torch.manual_seed(5)
        return step(Gaussian(mean, precision), Dynamics(*parameters), dropout)

    return Call(predict, [*state, *dynamics[:7]])


def plainly(
    formula: adjoints.Formula,
    adjoint: adjoints.Adjoint,
    batched: Sequence[Tensor | None],
    shared: Sequence[Tensor] = (),
    *,
    num_outputs: int,
    **_: int,
) -> tuple[Tensor, ...]:
    """In place of `recomputed`: the formula, for autograd to differentiate."""
    return formula(*batched, *shared)[:num_outputs]


def assert_as_autograd_has_it(call: Call, slice_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(filtering, "recomputed", plainly)
        expected_outputs, expected_gradients = call.outputs_and_gradients()
    monkeypatch.setattr(adjoints, "SLICE_ELEMENTS", slice_elements)
    outputs, gradients = call.outputs_and_gradients()
    for found, expected in zip(outputs, expected_outputs, strict=True):
        assert_close(found, expected, FLOAT64_TOL, "output")
    for found, expected in zip(gradients, expected_gradients, strict=True):
        # Against the largest: a small number among large ones is the difference of two of them.
        scale = 1 + expected.abs().max()
        assert_close(found / scale, expected / scale, FLOAT64_TOL, "gradient")


@SLICES
@LIMITS
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["krige", "sandwich"])
def test_observing_has_the_gradient_of_its_formula(
    name: str, mask: str, dropout: float, limit: float, slice_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_as_autograd_has_it(observation(name, mask, limit, dropout), slice_elements, monkeypatch)


@SLICES
@LIMITS
def test_updating_has_the_gradient_of_its_formula(
    limit: float, slice_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_as_autograd_has_it(update(limit), slice_elements, monkeypatch)


@SLICES
@LIMITS
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("name", ["predict", "predict_post_norm"])
def test_predicting_has_the_gradient_of_its_formula(
    name: str, dropout: float, limit: float, slice_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_as_autograd_has_it(prediction(name, limit, dropout), slice_elements, monkeypatch)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(observation("krige", "causal", MODERATE), id="krige"),
        pytest.param(observation("sandwich", "causal", MODERATE), id="sandwich"),
        pytest.param(update(MODERATE), id="update"),
        pytest.param(prediction("predict", MODERATE), id="predict"),
        pytest.param(prediction("predict_post_norm", MODERATE), id="predict_post_norm"),
    ],
)
def test_a_step_says_the_same_with_and_without_gradients_and_in_slices(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        without = call.step(*call.leaves)
    whole, _ = call.outputs_and_gradients()
    monkeypatch.setattr(adjoints, "SLICE_ELEMENTS", 1)
    sliced, _ = call.outputs_and_gradients()
    for expected, found, in_slices in zip(without, whole, sliced, strict=True):
        assert torch.equal(found, expected)
        assert_close(in_slices, expected, FLOAT64_TOL)


def test_a_second_derivative_is_refused() -> None:
    call = update(MODERATE)
    leaves = [leaf.detach().requires_grad_() for leaf in call.leaves]
    (gradient,) = torch.autograd.grad(call.step(*leaves)[0].square().sum(), leaves[1:2], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# --- what is kept for backward ------------------------------------------------------------------------------


def kept_for_backward(run: Callable[[], Any], left_out: Sequence[Tensor]) -> dict[int, Tensor]:
    """The tensors that autograd keeps, one for each piece of memory, by its address."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    ignored = {tensor.untyped_storage().data_ptr() for tensor in left_out}
    by_address = {tensor.untyped_storage().data_ptr(): tensor for tensor in kept}
    return {address: tensor for address, tensor in by_address.items() if address not in ignored}


@pytest.mark.parametrize("name", ["krige", "sandwich"])
def test_no_attention_weights_are_kept(name: str) -> None:
    shape = Shape(seed=51, batch=2, heads=2, channels=4, length=40)
    inputs = draw_field(shape, "causal", torch.float32)
    leaves = [x.requires_grad_() for x in inputs[:4]]
    bias = torch.zeros(inputs.visible.shape)
    steps = {
        "krige": lambda: filtering.krige(*leaves, inputs.visible),
        "sandwich": lambda: filtering.sandwich(*leaves[:3], bias, leaves[3], inputs.visible, 50.0),
    }
    kept = kept_for_backward(steps[name], [*inputs[:5], bias])
    assert 0 < max(tensor.numel() for tensor in kept.values()) <= shape.batch * shape.length * shape.width


@pytest.mark.parametrize("name", ["predict", "predict_post_norm"])
def test_no_hidden_units_are_kept(name: str) -> None:
    rng = np.random.default_rng(52)
    state = draw_state(rng, torch.float32, SHAPE, MODERATE)
    dynamics = draw_dynamics(rng, torch.float32, SHAPE.width, 4 * SHAPE.width)
    leaves = [x.requires_grad_() for x in (*state, *dynamics[:7])]
    kept = kept_for_backward(lambda: getattr(filtering, name)(Gaussian(*leaves[:2]), Dynamics(*leaves[2:])), leaves)
    assert 0 < max(tensor.numel() for tensor in kept.values()) <= state.mean.numel()


@pytest.mark.parametrize("length", [50, 200])
@pytest.mark.parametrize("backbone", ["sasrec", "bert4rec", "hstu"])
def test_an_encoder_keeps_at_most_1_6_times_what_explicit_attention_keeps(backbone: str, length: int) -> None:
    """benchmarks/overhead.py reports the same figure at its batch size."""
    torch.manual_seed(53)
    items = torch.randint(FIRST_ITEM, FIRST_ITEM + 30, (4, length + 1))
    items[:, 0] = BOS
    weights = torch.ones(items.shape)
    timestamps = 1.7e9 + torch.rand(items.shape, dtype=torch.float64).mul(1e5).cumsum(1)

    def kept_bytes(is_filtering: bool) -> int:
        config = ModelConfig(backbone=backbone, filtering=is_filtering, max_len=length)
        model = build_model(config, torch.arange(30)).train()
        given = [*model.parameters(), *model.buffers(), items, weights, timestamps]
        kept = kept_for_backward(lambda: model.encode(items, weights, timestamps), given)
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())

    with sdpa_kernel(SDPBackend.MATH):
        explicit = kept_bytes(is_filtering=False)
    assert kept_bytes(is_filtering=True) <= 1.6 * explicit
