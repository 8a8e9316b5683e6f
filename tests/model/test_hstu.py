"""HSTU and its sandwich step against the numpy reference, and what holds of them (math.md, "HSTU").

Expected values come from tests/reference.py or by hand. Models are small, every parameter off its starting value.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx.numpy_helper import to_array
from torch import Tensor

from model.config import BOS, FIRST_ITEM, PAD, UNK, ModelConfig
from model.filtering import (
    Gaussian,
    KrigedField,
    diffuse,
    krige,
    observation_precision,
    pointwise_attention,
    sandwich,
    sandwich_weights,
    shares,
    update,
)
from model.hstu import HSTU, time_buckets
from model.onnx import export
from model.onnx.export import export_graphs
from model.onnx.functions import EmittedSteps, attach_bodies
from model.scoring import Scores
from tests import reference
from tests.model.adapter import hstu_params, hstu_states, perturbed_model, random_rows, small_config
from tests.model.test_filtering import (
    EXTREME,
    MODERATE,
    PRECISIONS,
    LargestTensor,
    Shape,
    draw_field,
    draw_state,
    few_cases,
    has_neighbour,
    many_cases,
    masks,
    normal,
    numpy64,
    positive,
    shapes,
)
from tests.tolerance import FLOAT32_TOL, FLOAT64_TOL, assert_close, assert_precision_close

SAME = 1e-12
"""Between two float64 runs of the same equations on other numbers: a leak would be far larger."""
DTYPES = [
    pytest.param(torch.float64, FLOAT64_TOL, id="float64"),
    pytest.param(torch.float32, FLOAT32_TOL, id="float32"),
]
ON_AND_OFF = pytest.mark.parametrize("is_filtering", [True, False], ids=["on", "off"])
COUNTS = torch.tensor([0, 1, 2, 3, 5, 8, 40, 300, 1, 2000])
MAX_LEN = 6
MINUTE, HOUR, DAY, YEAR = 60, 3600, 86_400, 31_556_952


class SandwichInputs(NamedTuple):
    """What `sandwich` takes, without its numbers, and the output weight of `observation_precision`."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor
    neighbour_precision: Tensor
    visible: Tensor
    output_weight: Tensor


def draw_inputs(shape: Shape, mask: str, dtype: torch.dtype, limit: float = MODERATE) -> SandwichInputs:
    """As `draw_field`, with a bias."""
    query, key, value, precision, visible, output_weight = draw_field(shape, mask, dtype, limit)
    bias = normal(np.random.default_rng(shape.seed + 1), dtype, *visible.shape)
    return SandwichInputs(query, key, value, bias, precision, visible, output_weight)


def all_see_all(shape: Shape) -> SandwichInputs:
    """Every position sees every neighbour."""
    inputs = draw_inputs(shape, "causal", torch.float64)
    return inputs._replace(visible=torch.ones_like(inputs.visible))


def reference_field(
    inputs: SandwichInputs, attention_norm: float, shrinkage_dof: float = 1.0
) -> reference.SandwichField:
    return reference.sandwich(*numpy64(*inputs[:6]), attention_norm=attention_norm, shrinkage_dof=shrinkage_dof)


# --- the sandwich step: every equation ----------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "limit", "tol"), PRECISIONS)
@many_cases
@given(
    shape=shapes,
    mask=masks,
    attention_norm=st.sampled_from([1.0, 50.0]),
    shrinkage_dof=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_the_sandwich_field_equals_the_reference(
    dtype: torch.dtype,
    limit: float,
    tol: float,
    shape: Shape,
    mask: str,
    attention_norm: float,
    shrinkage_dof: float,
) -> None:
    inputs = draw_inputs(shape, mask, dtype, limit)
    field = sandwich(*inputs[:6], attention_norm, shrinkage_dof)
    expected = reference_field(inputs, attention_norm, shrinkage_dof)
    seen = has_neighbour(inputs.visible)
    assert field.mean.dtype == dtype
    assert_close(field.mean, expected.mean, tol, "mean")
    assert_close(field.effective_sample_size, expected.effective_sample_size, tol, "effective sample size")
    assert_close(field.variance[seen], expected.variance[seen.numpy()], tol, "sandwich variance")
    assert torch.isfinite(field.variance).all()  # where nothing is seen it means nothing, but spreads no NaN


@pytest.mark.parametrize(("dtype", "tol"), DTYPES)
@many_cases
@given(shape=shapes, mask=masks)
def test_pointwise_attention_equals_the_reference(dtype: torch.dtype, tol: float, shape: Shape, mask: str) -> None:
    inputs = draw_inputs(shape, mask, dtype)
    found = pointwise_attention(inputs.query, inputs.key, inputs.bias, inputs.visible, 50.0)
    equal = inputs._replace(neighbour_precision=torch.full_like(inputs.neighbour_precision, 0.7))
    assert_close(found, reference_field(equal, 50.0).weights, tol)


@pytest.mark.parametrize(("dtype", "limit", "tol"), PRECISIONS)
@few_cases
@given(shape=shapes, mask=masks, depth=st.sampled_from([0.0, 20.0]))
def test_the_shares_of_the_sandwich_s_weights_equal_the_reference(
    dtype: torch.dtype, limit: float, tol: float, shape: Shape, mask: str, depth: float
) -> None:
    inputs = draw_inputs(shape, mask, dtype, limit)
    inputs = inputs._replace(bias=inputs.bias - depth)
    found = shares(
        sandwich_weights(inputs.query, inputs.key, inputs.bias, inputs.neighbour_precision, inputs.visible, 50.0)
    )
    weights = np.abs(reference_field(inputs, 50.0).weights)
    total = weights.sum(-1, keepdims=True)
    expected = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    heard = sandwich(*inputs[:6], 50.0).effective_sample_size > 0
    assert_close(found[heard], expected[heard.numpy()], tol)
    assert (found[~heard] == 0).all()


def test_weights_of_both_signs_by_hand() -> None:
    """SiLU(1) = σ(1) and SiLU(−1) = −σ(−1) add up to 1 in absolute value."""
    up, down = 1 / (1 + math.exp(-1)), 1 / (1 + math.e)
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    key = torch.tensor([1.0, -1.0], dtype=torch.float64).reshape(1, 1, 2, 1)
    value = torch.tensor([10.0, 30.0], dtype=torch.float64).reshape(1, 1, 2, 1)
    precision = torch.full((1, 2), 4.0, dtype=torch.float64)
    visible = torch.ones(1, 1, 2, dtype=torch.bool)
    field = sandwich(one, key, value, torch.zeros(1, 1, 2, dtype=torch.float64), precision, visible, 1.0, 2.0)

    centre = 10 * up + 30 * down
    n = 1 / (up**2 + down**2)
    spread = n * (up**2 * (10 - centre) ** 2 + down**2 * (30 - centre) ** 2)
    assert_close(field.mean, [[[10 * up - 30 * down]]], SAME, "mean")
    assert_close(field.effective_sample_size, [[[n]]], SAME, "effective sample size")
    assert_close(field.variance, [[[(2 * 0.25 + n * spread) / (2 + n - 1)]]], SAME, "variance")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@few_cases
@given(shape=shapes)
def test_observation_precision_is_zero_where_one_head_sees_nobody(dtype: torch.dtype, shape: Shape) -> None:
    rng = np.random.default_rng(shape.seed)
    sample_size = 1.0 + positive(rng, dtype, 5.0, shape.batch, shape.heads, shape.length)
    sample_size = sample_size * torch.from_numpy(rng.random(sample_size.shape) < 0.7)
    variance = positive(rng, dtype, MODERATE, shape.batch, shape.length, shape.width)
    output_weight = normal(rng, dtype, shape.width, shape.width)
    observed = observation_precision(KrigedField(torch.zeros_like(variance), variance, sample_size), output_weight)
    expected = reference.observation_precision(*numpy64(variance, sample_size, output_weight))
    assert_precision_close(observed, expected, FLOAT32_TOL if dtype == torch.float32 else FLOAT64_TOL)


@pytest.mark.parametrize(("dtype", "limit", "tol"), PRECISIONS)
@few_cases
@given(shape=shapes)
def test_diffusion_adds_the_process_noise_to_the_variance(
    dtype: torch.dtype, limit: float, tol: float, shape: Shape
) -> None:
    rng = np.random.default_rng(shape.seed)
    state = draw_state(rng, dtype, shape, limit)
    noise = positive(rng, dtype, 2.0, shape.width) * 0.02
    predicted = diffuse(state, noise)
    precision, added = numpy64(state.precision, noise)
    assert torch.equal(predicted.mean, state.mean)
    assert_precision_close(predicted.precision, 1 / (1 / precision + added), tol)
    assert (predicted.precision <= (1 / noise) * (1 + tol)).all()


# --- the sandwich step: finite, forward and backward --------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@many_cases
@given(shape=shapes, mask=masks)
def test_no_value_and_no_gradient_is_nan_or_infinite(dtype: torch.dtype, shape: Shape, mask: str) -> None:
    inputs = draw_inputs(shape, mask, dtype, EXTREME)
    prior = draw_state(np.random.default_rng(shape.seed), dtype, shape, EXTREME)
    leaves = [*inputs[:5], inputs.output_weight, *prior]
    for leaf in leaves:
        leaf.requires_grad_()

    field = sandwich(*inputs[:6], 50.0)
    observed = observation_precision(field, inputs.output_weight)
    posterior = update(prior, field.mean @ inputs.output_weight.T, observed)
    predicted = diffuse(Gaussian(posterior.mean, posterior.precision), torch.tensor(0.02, dtype=dtype))
    loss = predicted.mean.sum() + predicted.precision.log().sum()
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)

    assert all(torch.isfinite(output).all() for output in (*field, observed, *posterior, *predicted))
    assert all(gradient is None or torch.isfinite(gradient).all() for gradient in gradients)


# Nobody visible; somebody, of a weight that float32 cannot square; somebody, of exactly none.
@pytest.mark.parametrize("bias", [None, -60.0, -1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_position_without_weight_keeps_its_state(dtype: torch.dtype, bias: float | None) -> None:
    shape = Shape(seed=5, batch=2, heads=2, channels=3, length=4)
    inputs = draw_inputs(shape, "nothing visible" if bias is None else "causal", dtype)
    if bias is not None:
        inputs = inputs._replace(bias=torch.full_like(inputs.bias, bias))
    prior = draw_state(np.random.default_rng(6), dtype, shape, MODERATE)
    for leaf in inputs[:5]:
        leaf.requires_grad_()
    field = sandwich(*inputs[:6], 50.0)
    observed = observation_precision(field, inputs.output_weight)
    posterior = update(prior, field.mean @ inputs.output_weight.T, observed)
    gradients = torch.autograd.grad(posterior.mean.sum() + posterior.precision.sum(), inputs[:5], allow_unused=True)
    for zero in (field.effective_sample_size, observed, posterior.gain):
        assert (zero == 0).all()
    assert field.mean.abs().max() < 1e-20
    assert torch.equal(posterior.mean, prior.mean)
    assert torch.equal(posterior.precision, prior.precision)
    assert all(gradient is None or (gradient == 0).all() for gradient in gradients)


def test_an_invisible_neighbour_receives_no_gradient() -> None:
    inputs = draw_inputs(Shape(seed=7, batch=1, heads=2, channels=3, length=5), "bidirectional", torch.float64)
    inputs = inputs._replace(
        visible=(torch.arange(5) < 3).expand(1, 5, 5),
        neighbour_precision=torch.tensor([[1.0, 2.0, 0.5, 0.0, 0.0]], dtype=torch.float64),
    )
    leaves = [leaf.requires_grad_() for leaf in (inputs.key, inputs.value, inputs.bias, inputs.neighbour_precision)]
    field = sandwich(*inputs[:6], 50.0)
    key, value, bias, precision = torch.autograd.grad(field.mean.sum() + field.variance.sum(), leaves)
    assert (key[:, :, 3:] == 0).all()
    assert (value[:, :, 3:] == 0).all()
    assert (bias[:, :, 3:] == 0).all()
    assert (precision[:, 3:] == 0).all()
    assert (precision[:, :3] != 0).any()


@pytest.mark.parametrize("mask", ["causal", "causal padded", "ragged"])
def test_gradcheck_of_observe_by_sandwich(mask: str) -> None:
    inputs = draw_inputs(Shape(seed=11, batch=1, heads=2, channels=2, length=3), mask, torch.float64)
    # gradcheck steps on either side of a value, so an unseen neighbour is given a precision above 0 here.
    precision = inputs.neighbour_precision.clamp(min=0.5)
    leaves = [x.requires_grad_() for x in (*inputs[:4], precision, inputs.output_weight)]

    def observe(
        query: Tensor, key: Tensor, value: Tensor, bias: Tensor, precision: Tensor, weight: Tensor
    ) -> tuple[Tensor, ...]:
        field = sandwich(query, key, value, bias, precision, inputs.visible, 1.0)
        return field.mean, field.effective_sample_size, observation_precision(field, weight)

    assert torch.autograd.gradcheck(observe, leaves)


def test_gradcheck_of_diffuse() -> None:
    rng = np.random.default_rng(12)
    state = draw_state(rng, torch.float64, Shape(12, 2, 2, 2, 3), MODERATE)
    leaves = [x.requires_grad_() for x in (*state, positive(rng, torch.float64, 2.0, 4))]
    assert torch.autograd.gradcheck(lambda m, p, q: tuple(diffuse(Gaussian(m, p), q)), leaves)


# --- the sandwich step: what holds of it --------------------------------------------------------------------


@few_cases
@given(
    shape=shapes,
    mask=masks,
    logit=st.sampled_from([-3.0, -0.5, 1e-3, 2.0]),
    precision=st.floats(1e-6, 1e6),
    shrinkage_dof=st.sampled_from([1.0, 2.5]),
)
def test_at_uniform_softmax_weights_the_sandwich_is_the_reml_form(
    shape: Shape, mask: str, logit: float, precision: float, shrinkage_dof: float
) -> None:
    inputs = draw_inputs(shape, mask, torch.float64)
    inputs = inputs._replace(
        query=torch.zeros_like(inputs.query),
        bias=torch.full_like(inputs.bias, logit),
        neighbour_precision=torch.full_like(inputs.neighbour_precision, precision),
    )
    found = sandwich(*inputs[:6], 50.0, shrinkage_dof)
    reml = krige(*inputs[:3], inputs.neighbour_precision, inputs.visible, shrinkage_dof)
    assert_close(found.effective_sample_size, reml.effective_sample_size, SAME, "effective sample size")
    assert_close(found.variance, reml.variance, SAME, "variance")
    # The softmax mean times the sum of the weights, which all have the same value.
    total = inputs.visible.sum(-1, keepdim=True).double() * logit / (1 + math.exp(-logit)) / 50.0
    assert_close(found.mean, total * reml.mean, SAME, "mean")


@few_cases
@given(shape=shapes, mask=masks, precision=st.sampled_from([1e-6, 1.0, 1e6]))
def test_uniform_precision_leaves_the_plain_attention(shape: Shape, mask: str, precision: float) -> None:
    inputs = draw_inputs(shape, mask, torch.float64)
    equal = inputs._replace(neighbour_precision=torch.full_like(inputs.neighbour_precision, precision))
    attention = pointwise_attention(inputs.query, inputs.key, inputs.bias, inputs.visible, 50.0)
    plain = (attention @ inputs.value).transpose(1, 2).flatten(2)
    assert_close(sandwich(*equal[:6], 50.0).mean, plain, SAME)


@few_cases
@given(shape=shapes, mask=masks)
def test_the_attention_s_divisor_scales_the_mean_and_no_variance(shape: Shape, mask: str) -> None:
    inputs = draw_inputs(shape, mask, torch.float64)
    narrow, wide = sandwich(*inputs[:6], 10.0), sandwich(*inputs[:6], 1000.0)
    assert_close(wide.mean * 100, narrow.mean, SAME, "mean")
    assert_close(wide.variance, narrow.variance, SAME, "variance")
    assert_close(wide.effective_sample_size, narrow.effective_sample_size, SAME, "effective sample size")


@few_cases
@given(shape=shapes)
def test_duplicating_every_neighbour_doubles_mean_and_sample_size_and_does_not_lower_observation_precision(
    shape: Shape,
) -> None:
    once = draw_inputs(shape, "causal", torch.float64)
    twice = once._replace(
        key=once.key.repeat(1, 1, 2, 1),
        value=once.value.repeat(1, 1, 2, 1),
        bias=once.bias.repeat(1, 1, 2),
        neighbour_precision=once.neighbour_precision.repeat(1, 2),
        visible=once.visible.repeat(1, 1, 2),
    )
    field_once, field_twice = sandwich(*once[:6], 50.0), sandwich(*twice[:6], 50.0)
    observed_once = observation_precision(field_once, once.output_weight)
    observed_twice = observation_precision(field_twice, once.output_weight)
    assert_close(field_twice.mean, 2 * field_once.mean, FLOAT64_TOL, "mean")
    assert_close(field_twice.effective_sample_size, 2 * field_once.effective_sample_size, FLOAT64_TOL)
    assert (observed_twice >= observed_once * (1.0 - FLOAT64_TOL)).all()


@few_cases
@given(shape=shapes.filter(lambda shape: shape.length >= 2), stretch=st.floats(1.01, 100.0))
def test_observation_precision_falls_as_the_spread_of_the_neighbours_grows(shape: Shape, stretch: float) -> None:
    inputs = all_see_all(shape)
    centre = inputs.value.mean(dim=2, keepdim=True)
    wide = inputs._replace(value=centre + stretch * (inputs.value - centre))
    observed_narrow = observation_precision(sandwich(*inputs[:6], 50.0), inputs.output_weight)
    observed_wide = observation_precision(sandwich(*wide[:6], 50.0), inputs.output_weight)
    assert (observed_wide < observed_narrow).all()


def test_attention_dropout_moves_the_mean_only() -> None:
    inputs = draw_inputs(Shape(21, 2, 2, 4, 6), "causal", torch.float64)
    plain = sandwich(*inputs[:6], 50.0)
    torch.manual_seed(21)
    dropped = sandwich(*inputs[:6], 50.0, dropout=0.5)
    assert (dropped.mean != plain.mean).any()
    assert torch.equal(dropped.variance, plain.variance)
    assert torch.equal(dropped.effective_sample_size, plain.effective_sample_size)


def test_the_sandwich_stays_float32_under_autocast() -> None:
    inputs = draw_inputs(Shape(24, 2, 2, 8, 6), "causal", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = sandwich(*inputs[:6], 50.0)
    for found, expected in zip(mixed, sandwich(*inputs[:6], 50.0), strict=True):
        assert torch.equal(found, expected)


def test_no_tensor_of_length_by_length_by_channels_is_saved_for_backward_or_ever_made() -> None:
    shape = Shape(seed=31, batch=1, heads=2, channels=16, length=64)
    forbidden = shape.batch * shape.length**2 * shape.channels
    inputs = draw_inputs(shape, "causal", torch.float32)
    leaves = [x.requires_grad_() for x in (*inputs[:5], inputs.output_weight)]
    saved: list[int] = []

    def remember(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with LargestTensor() as made, torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        field = sandwich(*inputs[:6], 50.0, dropout=0.1)
        observed = observation_precision(field, inputs.output_weight)
        torch.autograd.grad(field.mean.sum() + observed.sum(), leaves)

    assert max(saved) < forbidden
    assert shape.heads * shape.length**2 <= made.numel < forbidden


# --- time differences ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gap_s", "bucket"),
    [
        (0, 0),
        (0.5, 0),
        (1, 0),
        (1.34, 0),
        (1.36, 1),
        (2, 2),
        (-2, 2),
        (MINUTE, 13),
        (HOUR, 27),
        (DAY, 37),
        (YEAR, 57),
        (56 * YEAR, 70),
        (57 * YEAR, 71),
        (5000 * YEAR, 71),
        (math.nan, 72),
    ],
)
def test_each_bucket_begins_at_1_35_times_the_one_before(gap_s: float, bucket: int) -> None:
    timestamps = torch.tensor([[1.7e9, 1.7e9 + gap_s]], dtype=torch.float64)
    if gap_s == 5000 * YEAR:
        assert ModelConfig().time_buckets == 72
    found = time_buckets(timestamps, timestamps, 72)
    assert found.dtype == torch.int64
    assert found[0, 0, 1] == found[0, 1, 0] == bucket
    assert found[0, 0, 0] == 0


@few_cases
@given(seed=st.integers(0, 2**32 - 1), num_buckets=st.integers(1, 80))
def test_buckets_equal_the_reference(seed: int, num_buckets: int) -> None:
    rng = np.random.default_rng(seed)
    timestamps = 1.7e9 + np.exp(rng.uniform(-2, 22, size=(1, 12))).round(3)
    expected = [[reference.time_bucket(t - s, num_buckets) for s in timestamps[0]] for t in timestamps[0]]
    found = time_buckets(torch.from_numpy(timestamps), torch.from_numpy(timestamps), num_buckets)
    assert found[0].tolist() == expected


# --- the forward pass ---------------------------------------------------------------------------------------

Rows = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float64]]


def hstu_config(**changes: Any) -> ModelConfig:
    return small_config(backbone="hstu", **({"time_buckets": 40} | changes))


def perturbed(seed: int, dtype: torch.dtype = torch.float32, **changes: Any) -> HSTU:
    """Attention of the size of a trained model's: a divisor near the number of events."""
    model = perturbed_model(hstu_config(**({"attention_norm": 5.0} | changes)), COUNTS, seed, dtype)
    assert isinstance(model, HSTU)
    return model


def draw_rows(seed: int, batch: int, length: int) -> Rows:
    """`random_rows` with times from a second to years apart; BOS, padding and one event in six have none."""
    rng = np.random.default_rng(seed)
    items, weights = random_rows(rng, batch, length, len(COUNTS))
    timestamps = 1.2e9 + np.exp(rng.uniform(0, 18, size=items.shape)).round().cumsum(1)
    timestamps[(rng.random(items.shape) < 1 / 6) | (items == BOS) | (items == PAD)] = np.nan
    return items, weights, timestamps


def tensors(rows: Rows, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    items, weights, timestamps = map(torch.from_numpy, rows)
    return items, weights.to(dtype), timestamps


def assert_equals_reference(model: HSTU, rows: Rows, dtype: torch.dtype, tol: float) -> None:
    with torch.no_grad():
        state = model.encode(*tensors(rows, dtype))
    expected = hstu_states(model, COUNTS, *rows)
    assert_close(state.mean, expected.mean, tol, "mean")
    assert_precision_close(state.precision, expected.precision, tol)


@pytest.mark.parametrize(("dtype", "tol"), DTYPES)
@pytest.mark.parametrize("length", range(1, MAX_LEN + 2))
def test_every_position_equals_the_reference_at_every_length(length: int, dtype: torch.dtype, tol: float) -> None:
    model = perturbed(length, dtype, min_input_count=2)
    assert_equals_reference(model, draw_rows(100 + length, 4, length), dtype, tol)


@pytest.mark.parametrize(("dtype", "tol"), DTYPES)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"num_layers": 1, "num_heads": 1}, id="one layer, one head"),
        pytest.param({"num_layers": 3, "num_heads": 4}, id="three layers, four heads"),
        pytest.param({"shrinkage_dof": 3.0}, id="shrinkage dof 3"),
        pytest.param({"attention_norm": 50.0}, id="attention norm 50"),
        pytest.param({"time_buckets": 1}, id="one bucket"),
        pytest.param({"min_input_count": 10_000}, id="every event is unknown"),
    ],
)
def test_every_configuration_equals_the_reference(changes: dict[str, Any], dtype: torch.dtype, tol: float) -> None:
    assert_equals_reference(perturbed(7, dtype, **changes), draw_rows(8, 3, MAX_LEN + 1), dtype, tol)


@pytest.mark.parametrize(("dtype", "tol"), DTYPES)
def test_without_timestamps_every_position_equals_the_reference(dtype: torch.dtype, tol: float) -> None:
    model = perturbed(9, dtype)
    items, weights, timestamps = draw_rows(10, 4, MAX_LEN + 1)
    assert_equals_reference(model, (items, weights, np.full_like(timestamps, np.nan)), dtype, tol)


# math.md asks for 1e-6; in float64 the two agree far better, in float32 rounding alone comes near it.
@pytest.mark.parametrize(("dtype", "tol"), DTYPES)
@pytest.mark.parametrize("length", [1, 4, MAX_LEN + 1])
def test_filtering_off_equals_the_reference_s_plain_hstu(length: int, dtype: torch.dtype, tol: float) -> None:
    model = perturbed(20 + length, dtype, filtering=False)
    items, weights, timestamps = draw_rows(21, 4, length)
    with torch.no_grad():
        state = model.encode(*tensors((items, weights, timestamps), dtype))
    read = np.where(items == FIRST_ITEM, UNK, items)  # COUNTS[0] is 0, below the default minimum of 1
    config = model.config
    expected = reference.hstu_plain_forward_positions(
        hstu_params(model, COUNTS), read, timestamps, config.num_heads, config.attention_norm
    )
    assert_close(state.mean, expected, tol)
    assert (state.precision[torch.from_numpy(items) != PAD] == math.inf).all()


def test_filtering_on_adds_less_than_a_thousandth_of_the_parameters_besides_theta() -> None:
    num_items = 1682  # ML-100K
    counts = torch.ones(num_items)

    def size(is_filtering: bool) -> int:
        model = HSTU(ModelConfig(backbone="hstu", filtering=is_filtering), counts)
        return sum(parameter.numel() for parameter in model.parameters())

    besides_theta = size(True) - size(False) - num_items
    # δ of the special tokens; a and b; Q of two layers; three scalars of the head.
    assert besides_theta == FIRST_ITEM + 2 + 2 * 64 + 3
    assert besides_theta < 0.001 * size(False)


@ON_AND_OFF
def test_the_catalogue_s_scores_depend_on_every_parameter(is_filtering: bool) -> None:
    model = perturbed(12, filtering=is_filtering)
    items, weights, timestamps = tensors(draw_rows(13, 2, MAX_LEN + 1), torch.float32)
    state = model.encode(items, weights, timestamps)
    logit = model.score(Gaussian(state.mean[:1, -1], state.precision[:1, -1])).logit
    logit.square().sum().backward()
    assert [name for name, value in model.named_parameters() if value.grad is None or not value.grad.any()] == []


@ON_AND_OFF
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_fresh_model_s_precisions_are_finite_whatever_its_item_precisions(
    dtype: torch.dtype, is_filtering: bool
) -> None:
    model = HSTU(hstu_config(filtering=is_filtering), COUNTS).to(dtype)
    if is_filtering:
        with torch.no_grad():
            model.initial_precision.deviation.uniform_(-math.log(EXTREME), math.log(EXTREME))
    items, weights, timestamps = tensors(draw_rows(14, 5, MAX_LEN + 1), dtype)
    items[1] = PAD
    state = model.encode(items, weights, timestamps)
    known = torch.isfinite(state.precision) & (state.precision > 0)
    (state.mean.square().sum() + state.precision[known].log().sum()).backward()
    assert torch.isfinite(state.mean).all()
    assert torch.isfinite(state.precision).all() or not is_filtering
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


# --- what a position depends on -----------------------------------------------------------------------------


@ON_AND_OFF
def test_a_later_event_its_weight_and_its_time_never_change_an_earlier_position(is_filtering: bool) -> None:
    model = perturbed(30, torch.float64, filtering=is_filtering)
    items, weights, timestamps = tensors(draw_rows(31, 1, MAX_LEN + 1), torch.float64)
    before = model.encode(items, weights, timestamps)
    for cut in range(1, items.shape[1]):
        other, heavier, later = items.clone(), weights.clone(), timestamps.clone()
        other[:, cut:] = FIRST_ITEM + (other[:, cut:] + 3) % len(COUNTS)
        heavier[:, cut:] *= 50.0
        later[:, cut:] += 3 * YEAR
        after = model.encode(other, heavier, later)
        assert_close(after.mean[:, :cut], before.mean[:, :cut], SAME, "mean")
        assert_close(1 / after.precision[:, :cut], 1 / before.precision[:, :cut], SAME, "variance")
        assert (after.mean[:, cut] != before.mean[:, cut]).any()


@ON_AND_OFF
def test_time_is_counted_from_the_position_s_own_event_and_not_from_the_next(is_filtering: bool) -> None:
    model = perturbed(32, torch.float64, filtering=is_filtering)
    items = torch.tensor([[BOS, FIRST_ITEM + 5, FIRST_ITEM + 3, FIRST_ITEM + 7]])
    weights = torch.ones(items.shape, dtype=torch.float64)

    def encode(*times: float) -> Tensor:
        return model.encode(items, weights, torch.tensor([[math.nan, *times]], dtype=torch.float64)).mean[0]

    before = encode(0, MINUTE, DAY)
    # The next event later: the position stays. Its own event later: it moves, and the one before it stays.
    assert torch.equal(encode(0, MINUTE, YEAR)[:3], before[:3])
    moved = encode(0, HOUR, DAY)
    assert (moved[2] != before[2]).any()
    assert torch.equal(moved[:2], before[:2])
    # Only differences count, and BOS has none.
    assert torch.equal(encode(YEAR, YEAR + MINUTE, YEAR + DAY), before)
    assert (encode(0, math.nan, DAY)[2] != before[2]).any()


@ON_AND_OFF
def test_batch_mates_and_more_padding_do_not_change_the_attention_s_divisor(is_filtering: bool) -> None:
    model = perturbed(33, torch.float64, filtering=is_filtering)
    items, weights, timestamps = tensors(draw_rows(34, 5, MAX_LEN + 1), torch.float64)
    together = model.encode(items, weights, timestamps)
    lengths = (items != PAD).sum(1).tolist()
    assert len(set(lengths)) >= 3
    for row, length in enumerate(lengths):
        part = slice(row, row + 1), slice(length)
        alone = model.encode(items[part], weights[part], timestamps[part])
        assert_close(together.mean[part], alone.mean, SAME, "mean")
        assert_close(1 / together.precision[part], 1 / alone.precision, SAME, "variance")


def test_dropout_is_off_in_eval_mode_and_spares_the_precision_in_training() -> None:
    changes = {"dropout": 0.5, "attention_dropout": 0.5, "num_layers": 1}
    model, undropped = perturbed(36, **changes), perturbed(36, num_layers=1)
    rows = tensors(draw_rows(37, 2, 5), torch.float32)
    expected = undropped.encode(*rows)
    assert torch.equal(model.encode(*rows).mean, expected.mean)
    # Embeddings are dropped before the first layer, so its input is held still here.
    model.train()
    torch.manual_seed(36)
    state = Gaussian(undropped.embed(rows[0]), torch.ones_like(expected.mean))
    seen: list[Gaussian] = []
    hook = model.layers[0].register_forward_pre_hook(lambda _, inputs: (state, *inputs[1:]))
    seen.extend(model.encode(*rows) for _ in range(2))
    hook.remove()
    assert (seen[0].mean != seen[1].mean).any()
    assert torch.equal(seen[0].precision, seen[1].precision)


# --- scores -------------------------------------------------------------------------------------------------


def final_states(seed: int, dtype: torch.dtype, limit: float, width: int = 8) -> Gaussian:
    rng = np.random.default_rng(seed)
    return Gaussian(normal(rng, dtype, 4, width), positive(rng, dtype, limit, 4, width))


def assert_scores_equal_reference(model: HSTU, state: Gaussian, scores: Scores, tol: float) -> None:
    params, nothing_seen = hstu_params(model, COUNTS), np.zeros(len(COUNTS), dtype=bool)
    for row, (mean, precision) in enumerate(zip(*numpy64(*state), strict=True)):
        expected = reference.cosine_score_catalogue(params, mean, precision, model.config.temperature, nothing_seen)
        assert_close(scores.mean[row], expected.score_mean, tol, "score mean")
        assert_close(scores.variance[row], expected.score_variance, tol, "score variance")
        assert_close(scores.logit[row], expected.logit, tol, "logit")


@pytest.mark.parametrize(("dtype", "limit", "tol"), PRECISIONS)
@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_scores_equal_the_reference(dtype: torch.dtype, limit: float, tol: float, temperature: float) -> None:
    model = perturbed(40, dtype, temperature=temperature)
    state = final_states(41, dtype, limit)
    scores = model.score(state)
    assert_scores_equal_reference(model, state, scores, tol)
    chosen = torch.tensor([7, 0, 3, 3])
    for found, named, whole in zip(model.score_pairs(state, chosen), model.score(state, chosen), scores, strict=True):
        assert_close(named, whole[:, chosen], tol)
        assert_close(found, whole[torch.arange(4), chosen], tol)


@ON_AND_OFF
def test_a_score_is_a_cosine_over_the_temperature(is_filtering: bool) -> None:
    model = perturbed(42, torch.float64, filtering=is_filtering, temperature=0.1)
    state = final_states(43, torch.float64, MODERATE)
    before = model.score(state)
    cosine = torch.nn.functional.cosine_similarity(state.mean[:, None], model.item_embedding.weight[FIRST_ITEM:], -1)
    assert_close(before.mean, cosine / 0.1, SAME)
    with torch.no_grad():
        model.item_embedding.weight *= torch.arange(1, 1 + len(model.item_embedding.weight))[:, None]
    for found, expected in zip(model.score(state), before, strict=True):
        assert_close(found, expected, SAME)


def test_a_state_twice_as_long_of_the_same_precision_scores_the_same_with_a_quarter_of_its_variance() -> None:
    model = perturbed(44, torch.float64)
    state = final_states(45, torch.float64, MODERATE)
    near, far = (model.head.readout(Gaussian(scale * state.mean, state.precision)) for scale in (1, 2))
    assert_close(far.mean, near.mean, SAME, "mean")
    assert_close(4 * far.variance, near.variance, SAME, "variance")


def test_a_plain_model_s_scores_have_no_variance() -> None:
    model = perturbed(46, filtering=False)
    state = final_states(47, torch.float32, MODERATE)
    scores = model.score(Gaussian(state.mean, torch.full_like(state.precision, math.inf)))
    assert (scores.variance == 0).all()
    assert torch.isfinite(scores.logit).all()


# --- export -------------------------------------------------------------------------------------------------


def test_the_exported_graphs_equal_torch_and_the_reference(tmp_path: Path) -> None:
    model = perturbed(50)
    said = export_graphs(model, tmp_path, 1.3)
    steps = ("KalmanUpdate", "SandwichAttention")
    expected_ops = {"encoder": steps, "step": steps, "ranker": ("GaussianTopK",), "explainer": steps}
    assert said.custom_ops == expected_ops

    session = onnxruntime.InferenceSession(tmp_path / "encoder.onnx", providers=["CPUExecutionProvider"])
    rows = draw_rows(51, 5, MAX_LEN + 1)
    mean, precision = session.run(
        ["mean", "precision"], dict(zip(("items", "weights", "timestamps"), rows, strict=True))
    )
    with torch.no_grad():
        state = model.final_state(*tensors(rows, torch.float32))
    assert_close(mean, state.mean, FLOAT32_TOL, "mean")
    expected = hstu_states(model, COUNTS, *rows)
    assert_close(mean, reference.last_real(expected.mean, rows[0]), FLOAT32_TOL, "mean")
    assert_precision_close(precision, reference.last_real(expected.precision, rows[0]), FLOAT32_TOL)

    # A gap on either side of a bucket's edge, 1e-9 away: in float32 the two would be one.
    for bucket in range(1, model.config.time_buckets):
        for factor in (1 - 1e-9, 1 + 1e-9):
            timestamps = rows[2].copy()
            timestamps[:, 1:3] = [0.0, 1.35**bucket * factor]
            edge = (rows[0], rows[1], timestamps)
            found = session.run(["mean"], dict(zip(("items", "weights", "timestamps"), edge, strict=True)))
            with torch.no_grad():
                assert_close(found[0], model.final_state(*tensors(edge, torch.float32)).mean, FLOAT32_TOL, "mean")

    # The ranker holds the items as unit vectors.
    ranker = onnx.load(tmp_path / "ranker.onnx")
    tables = [to_array(x) for x in ranker.graph.initializer if list(x.dims) == list(model.item_embedding.weight.shape)]
    assert len(tables) == 1
    assert_close(np.linalg.norm(tables[0], axis=1), np.ones(len(tables[0])), FLOAT32_TOL)


@torch.no_grad()
def test_onnx_runtime_tells_neighbours_apart_that_are_hardly_heard(tmp_path: Path) -> None:
    model = perturbed(52)
    for layer in model.layers:
        layer.position_bias -= 18  # type: ignore[operator]
    rows = tensors(draw_rows(53, 3, MAX_LEN + 1), torch.float32)
    graph = export._export(export.ExplainerGraph(model, EmittedSteps()), export._explainer_signature(), "explainer")
    attach_bodies(graph)
    onnx.save_model(graph, tmp_path / "explainer.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "explainer.onnx", providers=["CPUExecutionProvider"])

    feeds = dict(zip(("items", "weights", "timestamps"), (part.numpy() for part in rows), strict=True))
    (found,) = session.run(["kriging_weight"], feeds)

    assert_close(found, model.reasons(*rows).kriging_weight, FLOAT32_TOL)
