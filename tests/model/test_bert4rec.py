"""BERT4Rec against the numpy reference, its LayerNorms' effect on precision, and what its query is (math.md).

The models are small and every parameter is moved off its starting value; the reference reads the same numbers
in float64. The Post-LN prediction itself is tested beside the Pre-LN one, in test_filtering.py and test_onnx.py.
"""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from model.backbone import Backbone
from model.bert4rec import BERT4Rec
from model.config import BOS, FIRST_ITEM, MASK, PAD, UNK, ModelConfig
from model.filtering import Dynamics, Gaussian, normalise, predict_post_norm
from model.onnx.export import export_graphs
from model.onnx.functions import DOMAIN
from tests import reference
from tests.model.adapter import perturbed_model, random_rows, read_as, reference_params, small_config
from tests.tolerance import FLOAT32_TOL, FLOAT64_TOL, assert_close, assert_precision_close

COUNTS = torch.tensor([0, 1, 2, 3, 5, 8, 40, 300, 1, 2000])
MAX_LEN = 6
DTYPES = [
    pytest.param(torch.float64, FLOAT64_TOL, id="float64"),
    pytest.param(torch.float32, FLOAT32_TOL, id="float32"),
]
ON_AND_OFF = pytest.mark.parametrize("is_filtering", [True, False], ids=["on", "off"])
few_cases = settings(max_examples=20, deadline=None, derandomize=True)


def bert4rec(seed: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Backbone:
    return perturbed_model(small_config(backbone="bert4rec", **changes), COUNTS, seed, dtype)


def masked_rows(seed: int, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows as in training: a third of the real positions behind BOS are MASK, of weight 1."""
    rng = np.random.default_rng(seed)
    items, weights = random_rows(rng, batch, length, len(COUNTS))
    masked = (items >= UNK) & (rng.random(items.shape) < 1 / 3)
    items[masked], weights[masked] = MASK, 1.0
    return items, weights


def tensors(items: np.ndarray, weights: np.ndarray, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(items), torch.from_numpy(weights).to(dtype)


def reference_positions(model: Backbone, items: np.ndarray, weights: np.ndarray) -> reference.Gaussian:
    config = model.config
    return reference.bert4rec_positions(
        reference_params(model, COUNTS),
        read_as(items, COUNTS, config.min_input_count),
        weights.astype(np.float64),
        config.num_heads,
        shrinkage_dof=config.shrinkage_dof,
    )


# --- the forward pass ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tol"), DTYPES)
@pytest.mark.parametrize("length", range(1, MAX_LEN + 3))
def test_every_position_equals_the_reference_at_every_length(length: int, dtype: torch.dtype, tol: float) -> None:
    model = bert4rec(seed=length, dtype=dtype, min_input_count=2)
    items, weights = masked_rows(100 + length, 4, length)
    with torch.no_grad():
        state = model.encode(*tensors(items, weights, dtype))
    expected = reference_positions(model, items, weights)
    assert_close(state.mean, expected.mean, tol, "mean")
    assert_precision_close(state.precision, expected.precision, tol)


@pytest.mark.parametrize(("dtype", "tol"), DTYPES)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"num_layers": 1, "num_heads": 1}, id="one layer, one head"),
        pytest.param({"num_layers": 3, "num_heads": 4}, id="three layers, four heads"),
        pytest.param({"shrinkage_dof": 3.0}, id="shrinkage dof 3"),
        pytest.param({"ffn_width": 1}, id="feed-forward of one unit"),
        pytest.param({"min_input_count": 10_000}, id="every event is unknown"),
    ],
)
def test_every_configuration_equals_the_reference(changes: dict[str, Any], dtype: torch.dtype, tol: float) -> None:
    model = bert4rec(seed=7, dtype=dtype, **changes)
    items, weights = masked_rows(8, 3, MAX_LEN + 2)
    with torch.no_grad():
        state = model.encode(*tensors(items, weights, dtype))
    expected = reference_positions(model, items, weights)
    assert_close(state.mean, expected.mean, tol, "mean")
    assert_precision_close(state.precision, expected.precision, tol)


# math.md asks for 1e-6; in float64 the two agree far better, in float32 rounding alone comes near it.
@pytest.mark.parametrize(("dtype", "tol"), DTYPES)
@pytest.mark.parametrize("length", [1, 4, MAX_LEN + 2])
def test_filtering_off_equals_the_reference_s_plain_bert4rec(length: int, dtype: torch.dtype, tol: float) -> None:
    model = bert4rec(seed=20 + length, dtype=dtype, filtering=False)
    items, weights = masked_rows(21, 4, length)
    with torch.no_grad():
        state = model.encode(*tensors(items, weights, dtype))
    read = read_as(items, COUNTS, model.config.min_input_count)
    expected = reference.plain_bert4rec_positions(reference_params(model, COUNTS), read, model.config.num_heads)
    assert_close(state.mean, expected, tol)
    assert (state.precision[torch.from_numpy(items != PAD)] == math.inf).all()


def test_filtering_on_adds_less_than_a_thousandth_of_the_parameters_besides_theta() -> None:
    num_items = 1682  # ML-100K

    def size(is_filtering: bool) -> int:
        model = BERT4Rec(ModelConfig(filtering=is_filtering), torch.ones(num_items))
        return sum(parameter.numel() for parameter in model.parameters())

    besides_theta = size(True) - size(False) - num_items
    # δ of the special tokens; a and b; Q of two layers; three scalars of the head.
    assert besides_theta == FIRST_ITEM + 2 + 2 * 64 + 3
    assert besides_theta < 0.001 * size(False)


# --- the query ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tol"), DTYPES)
@pytest.mark.parametrize("length", [1, 4, MAX_LEN + 1])
def test_the_final_state_is_the_reference_s_at_a_mask_behind_the_last_event(
    length: int, dtype: torch.dtype, tol: float
) -> None:
    model = bert4rec(seed=30 + length, dtype=dtype)
    items, weights = random_rows(np.random.default_rng(31), 5, length, len(COUNTS))
    with torch.no_grad():
        final = model.final_state(*tensors(items, weights, dtype))
    asked, asked_weights = reference.with_query(items, weights)
    expected = reference_positions(model, asked, asked_weights)
    assert_close(final.mean, reference.last_real(expected.mean, asked), tol, "mean")
    assert_precision_close(final.precision, reference.last_real(expected.precision, asked), tol)


@ON_AND_OFF
def test_a_user_without_history_is_asked_with_bos_and_mask(is_filtering: bool) -> None:
    model = bert4rec(seed=33, filtering=is_filtering)
    nobody = model.final_state(torch.tensor([[BOS, PAD, PAD]]), torch.ones(1, 3))
    asked = model.encode(torch.tensor([[BOS, MASK]]), torch.ones(1, 2))
    assert_close(nobody.mean, asked.mean[:, 1], FLOAT32_TOL)
    assert_close(1 / nobody.precision, 1 / asked.precision[:, 1], FLOAT32_TOL)


def test_the_mask_has_a_precision_of_its_own() -> None:
    model = bert4rec(seed=34)
    items, weights = torch.tensor([[BOS, FIRST_ITEM + 5]]), torch.ones(1, 2)
    asked, without_mask = model.final_state(items, weights), model.encode(items, weights)
    with torch.no_grad():
        model.initial_precision.deviation[MASK] += 1.0
    assert (model.final_state(items, weights).precision != asked.precision).all()
    assert torch.equal(model.encode(items, weights).precision, without_mask.precision)


@ON_AND_OFF
def test_every_real_position_sees_every_other_and_no_padding(is_filtering: bool) -> None:
    model = bert4rec(seed=35, dtype=torch.float64, filtering=is_filtering)
    assert not model.causal
    items = torch.tensor([[BOS, FIRST_ITEM + 5, MASK, FIRST_ITEM + 7, MASK, PAD]])
    weights = torch.ones(items.shape, dtype=torch.float64)
    before = model.encode(items, weights).mean
    for changed in range(items.shape[1]):
        other = items.clone()
        other[0, changed] = FIRST_ITEM + 6
        if items[0, changed] == PAD:
            other, heavier = items, weights.clone()
            heavier[0, changed] = 1e6
            assert torch.equal(model.encode(items, heavier).mean, before)
            continue
        moved = (model.encode(other, weights).mean != before).any(-1)[0]
        assert moved[:5].all()
        assert not moved[5]


def test_a_heavier_event_counts_for_more_at_the_query() -> None:
    model = bert4rec(seed=36, num_layers=1)
    items = torch.tensor([[BOS, FIRST_ITEM + 5, FIRST_ITEM + 3]])
    precisions = [model.final_state(items, torch.tensor([[1.0, weight, 1.0]])).precision for weight in (0.5, 1.0, 2.0)]
    assert not torch.equal(precisions[0], precisions[1])
    assert not torch.equal(precisions[1], precisions[2])
    plain = bert4rec(seed=36, num_layers=1, filtering=False)
    assert torch.equal(
        plain.final_state(items, torch.ones(1, 3)).mean, plain.final_state(items, torch.full((1, 3), 2.0)).mean
    )


# --- finite -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_spread", [0.0, 13.8], ids=["equal precisions", "precisions 1e-6 to 1e6"])
@pytest.mark.parametrize("num_layers", [1, 6])
def test_rows_of_padding_and_extreme_precisions_are_finite_forward_and_backward(
    num_layers: int, log_spread: float
) -> None:
    model = bert4rec(seed=40, num_layers=num_layers)
    with torch.no_grad():
        theta = model.initial_precision.deviation
        theta.copy_(torch.linspace(-log_spread, log_spread, len(theta)))
        model.initial_precision.frequency_slope.zero_()
    items, weights = tensors(*random_rows(np.random.default_rng(41), 4, MAX_LEN + 1, len(COUNTS)), torch.float32)
    final = model.final_state(items, weights)
    real = items[:, 0] != PAD
    loss = model.score(Gaussian(final.mean[real], final.precision[real])).logit.logsumexp(-1).sum()
    loss.backward()

    assert (final.mean[~real] == 0).all()
    assert (final.precision[~real] == 0).all()
    assert torch.isfinite(final.mean).all()
    assert (torch.isfinite(final.precision) & (final.precision > 0))[real].all()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert (model.item_embedding.weight.grad[PAD] == 0).all()


def test_rows_of_padding_are_finite_forward_and_backward_without_filtering() -> None:
    model = bert4rec(seed=42, filtering=False)
    items, weights = tensors(*random_rows(np.random.default_rng(43), 4, MAX_LEN + 1, len(COUNTS)), torch.float32)
    final = model.final_state(items, weights)
    final.mean.square().sum().backward()

    assert (items[-1] == PAD).all()
    assert (final.mean[-1] == 0).all()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


# --- a LayerNorm's effect on precision ------------------------------------------------------------------------


def test_a_layer_norm_scales_precision_by_hand() -> None:
    # Mean 1, var(h) = (4 + 0 + 4)/3, so s² is 3 with this ε; γ is 1, 2 and 0.
    state = Gaussian(torch.tensor([[3.0, 1.0, -1.0]], dtype=torch.float64), torch.tensor([[2.0, 8.0, 5.0]]).double())
    gain, bias = torch.tensor([1.0, 2.0, 0.0]).double(), torch.tensor([0.0, 0.5, 7.0]).double()
    normalised = normalise(state, gain, bias, ln_eps=1 / 3)
    assert_close(normalised.mean, [[2 / math.sqrt(3), 0.5, 7.0]], FLOAT64_TOL)
    expected = [[2 * 3 / (1 + 1e-6), 8 * 3 / (4 + 1e-6), 5 * 3 / 1e-6]]
    assert_precision_close(normalised.precision, expected, FLOAT64_TOL)


def test_the_precision_behind_a_layer_norm_is_that_of_samples_put_through_the_affine_map() -> None:
    rng = np.random.default_rng(50)
    mean, precision = rng.normal(size=7), np.exp(rng.normal(size=7))
    gain, bias = rng.uniform(0.5, 2.0, size=7), rng.normal(size=7)
    samples = mean + rng.normal(size=(200_000, 7)) / np.sqrt(precision)
    mapped = gain * (samples - mean.mean()) / np.sqrt(mean.var() + 1e-5) + bias

    state = Gaussian(torch.from_numpy(mean), torch.from_numpy(precision))
    normalised = normalise(state, torch.from_numpy(gain), torch.from_numpy(bias), 1e-5)

    # A sample variance has the relative standard error √(2/n), 0.0032; five of them.
    np.testing.assert_allclose(1 / normalised.precision, mapped.var(axis=0), rtol=0.016)
    np.testing.assert_allclose(normalised.mean, mapped.mean(axis=0), atol=5 * mapped.std(axis=0).max() / 447)


def test_gradcheck_of_normalise() -> None:
    generator = torch.Generator().manual_seed(51)
    mean, gain, bias = (torch.randn(size, generator=generator).double() for size in ((2, 3, 4), (4,), (4,)))
    precision = torch.rand((2, 3, 4), generator=generator).double() + 0.5
    leaves = [leaf.requires_grad_() for leaf in (mean, precision, gain, bias)]
    assert torch.autograd.gradcheck(lambda m, p, g, b: tuple(normalise(Gaussian(m, p), g, b, 1e-5)), leaves)


# --- the feed-forward's Jacobian ----------------------------------------------------------------------------


@few_cases
@given(seed=st.integers(0, 2**32 - 1), width=st.integers(2, 10), ffn_width=st.integers(1, 12))
def test_without_process_noise_precision_falls_by_autograd_s_squared_derivative_of_the_feed_forward(
    seed: int, width: int, ffn_width: int
) -> None:
    rng = np.random.default_rng(seed)

    def draw(*size: int, scale: float = 1.0) -> Tensor:
        return torch.from_numpy(rng.normal(size=size) * scale)

    w1, b1, w2, b2 = draw(ffn_width, width), draw(ffn_width), draw(width, ffn_width), draw(width)
    ln_weight = 1 + draw(width, scale=0.2)
    dynamics = Dynamics(ln_weight, draw(width), w1, b1, w2, b2, torch.zeros(width).double())
    mean, precision = draw(1, 1, width), draw(1, 1, width).exp()

    def moved(h: Tensor) -> Tensor:
        return h + F.gelu(h @ w1.T + b1) @ w2.T + b2

    derivative = torch.autograd.functional.jacobian(moved, mean).reshape(width, width).diagonal()
    spread = moved(mean).var(correction=0) + dynamics.ln_eps
    predicted = predict_post_norm(Gaussian(mean, precision), dynamics)

    growth = precision[0, 0] / predicted.precision[0, 0] * spread / (ln_weight.square() + 1e-6)
    assert_close(growth, derivative**2, FLOAT64_TOL)


# --- the exported encoder -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[True, False], ids=["on", "off"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Backbone, Path]:
    folder = tmp_path_factory.mktemp("exported")
    model = bert4rec(seed=60, filtering=request.param, shrinkage_dof=2.5)
    export_graphs(model, folder, 1.3)
    return model, folder


def test_each_step_of_the_exported_encoder_is_one_node_with_one_body(exported: tuple[Backbone, Path]) -> None:
    model, folder = exported
    proto = onnx.load(folder / "encoder.onnx", load_external_data=False)
    steps = ("KalmanUpdate", "KrigingAttention", "PostNormPredict") if model.config.filtering else ()
    nodes = Counter(node.op_type for node in proto.graph.node if node.domain == DOMAIN)
    assert nodes == dict.fromkeys(steps, model.config.num_layers)
    assert [body.name for body in proto.functions] == list(steps)


@pytest.mark.parametrize("length", [1, 4, MAX_LEN + 1])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_the_exported_encoder_equals_the_reference_at_the_query(
    exported: tuple[Backbone, Path], length: int, batch: int
) -> None:
    model, folder = exported
    items, weights = random_rows(np.random.default_rng(10 * length + batch), batch, length, len(COUNTS))
    session = onnxruntime.InferenceSession(folder / "encoder.onnx", providers=["CPUExecutionProvider"])
    timestamps = np.full(items.shape, np.nan)
    mean, precision = session.run(["mean", "precision"], {"items": items, "weights": weights, "timestamps": timestamps})

    asked, asked_weights = reference.with_query(items, weights)
    if not model.config.filtering:
        read = read_as(asked, COUNTS, model.config.min_input_count)
        expected = reference.plain_bert4rec_positions(reference_params(model, COUNTS), read, model.config.num_heads)
        assert_close(mean, reference.last_real(expected, asked), FLOAT32_TOL, "mean")
        assert (precision == np.where(items[:, :1] == PAD, 0, np.inf)).all()
        return
    states = reference_positions(model, asked, asked_weights)
    assert_close(mean, reference.last_real(states.mean, asked), FLOAT32_TOL, "mean")
    assert_precision_close(precision, reference.last_real(states.precision, asked), FLOAT32_TOL)
