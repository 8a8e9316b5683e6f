"""The whole encoder against the numpy reference, the switch, and what holds of every position (math.md).

The models are small and every parameter is moved off its starting value; the reference reads the same numbers
in float64.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model import filtering
from model.config import BOS, FIRST_ITEM, PAD, UNK, ModelConfig
from model.filtering import Dynamics, Gaussian, KrigedField, Posterior
from model.sasrec import SASRec
from tests import reference
from tests.model.adapter import (
    perturbed_model,
    random_rows,
    reference_params,
    reference_states,
    small_config,
)
from tests.tolerance import FLOAT32_TOL, FLOAT64_TOL, assert_close, assert_precision_close

SAME = 1e-12
"""Between two float64 runs of the same equations on other shapes: a leak would be far larger."""
COUNTS = torch.tensor([0, 1, 2, 3, 5, 8, 40, 300, 1, 2000])
MAX_LEN = 6
DTYPES = [
    pytest.param(torch.float64, FLOAT64_TOL, id="float64"),
    pytest.param(torch.float32, FLOAT32_TOL, id="float32"),
]


def tensors(items: np.ndarray, weights: np.ndarray, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(items), torch.from_numpy(weights).to(dtype)


def rows(seed: int, batch: int, length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return tensors(*random_rows(np.random.default_rng(seed), batch, length, len(COUNTS)), dtype)


# --- the forward pass ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tol"), DTYPES)
@pytest.mark.parametrize("length", range(1, MAX_LEN + 2))
def test_every_position_equals_the_reference_at_every_length(length: int, dtype: torch.dtype, tol: float) -> None:
    model = perturbed_model(small_config(min_input_count=2), COUNTS, seed=length, dtype=dtype)
    items, weights = random_rows(np.random.default_rng(100 + length), 4, length, len(COUNTS))
    with torch.no_grad():
        state = model.encode(*tensors(items, weights, dtype))
    expected = reference_states(model, COUNTS, items, weights)
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
        pytest.param({"min_input_count": 0}, id="every item is an input"),
        pytest.param({"min_input_count": 10_000}, id="every event is unknown"),
    ],
)
def test_every_configuration_equals_the_reference(changes: dict[str, Any], dtype: torch.dtype, tol: float) -> None:
    model = perturbed_model(small_config(**changes), COUNTS, seed=7, dtype=dtype)
    items, weights = random_rows(np.random.default_rng(8), 3, MAX_LEN + 1, len(COUNTS))
    with torch.no_grad():
        state = model.encode(*tensors(items, weights, dtype))
    expected = reference_states(model, COUNTS, items, weights)
    assert_close(state.mean, expected.mean, tol, "mean")
    assert_precision_close(state.precision, expected.precision, tol)


@pytest.mark.parametrize("is_filtering", [True, False], ids=["on", "off"])
def test_an_item_below_the_minimum_count_is_read_as_unknown(is_filtering: bool) -> None:
    model = perturbed_model(small_config(min_input_count=3, filtering=is_filtering), COUNTS, seed=9)
    rare = [FIRST_ITEM + row for row, count in enumerate(COUNTS.tolist()) if count < 3]
    frequent = FIRST_ITEM + COUNTS.tolist().index(3)
    ones = torch.ones(1, 3)
    unknown = model.encode(torch.tensor([[BOS, UNK, frequent]]), ones)
    for number in rare:
        state = model.encode(torch.tensor([[BOS, number, frequent]]), ones)
        assert torch.equal(state.mean, unknown.mean)
        assert torch.equal(state.precision, unknown.precision)
    known = model.encode(torch.tensor([[BOS, frequent, frequent]]), ones)
    assert (known.mean[:, 1] != unknown.mean[:, 1]).any()


@pytest.mark.parametrize("is_filtering", [True, False], ids=["on", "off"])
def test_rows_of_padding_are_finite_forward_and_backward(is_filtering: bool) -> None:
    model = perturbed_model(small_config(filtering=is_filtering), COUNTS, seed=10)
    items, weights = rows(11, 3, 5)
    items[1] = PAD
    state = model.encode(items, weights)
    known = torch.isfinite(state.precision) & (state.precision > 0)
    loss = state.mean.square().sum() + state.precision[known].log().sum()
    loss.backward()

    padding = items == PAD
    assert (state.mean[padding] == 0).all()
    assert (state.precision[padding] == 0).all()
    assert torch.isfinite(state.mean).all()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert (model.item_embedding.weight.grad[PAD] == 0).all()


# A shift of every key is a shift of every logit of a row, which the softmax does not see.
WITHOUT_EFFECT = "attention.key.bias"


@pytest.mark.parametrize("is_filtering", [True, False], ids=["on", "off"])
def test_the_catalogue_s_scores_depend_on_every_parameter(is_filtering: bool) -> None:
    model = perturbed_model(small_config(filtering=is_filtering), COUNTS, seed=12)
    items, weights = rows(13, 2, MAX_LEN + 1)
    state = model.encode(items, weights)
    logit = model.score(Gaussian(state.mean[:, 0], state.precision[:, 0])).logit
    logit = logit + model.score(Gaussian(state.mean[:1, -1], state.precision[:1, -1])).logit
    logit.square().sum().backward()
    without = [name for name, value in model.named_parameters() if value.grad is None or not value.grad.any()]
    assert [name for name in without if not name.endswith(WITHOUT_EFFECT)] == []


# --- the switch ---------------------------------------------------------------------------------------------


# math.md asks for 1e-6; in float64 the two agree far better, in float32 rounding alone comes near it.
@pytest.mark.parametrize(("dtype", "tol"), DTYPES)
@pytest.mark.parametrize("length", [1, 4, MAX_LEN + 1])
def test_filtering_off_equals_the_reference_s_plain_sasrec(length: int, dtype: torch.dtype, tol: float) -> None:
    model = perturbed_model(small_config(filtering=False), COUNTS, seed=20 + length, dtype=dtype)
    items, weights = random_rows(np.random.default_rng(21), 4, length, len(COUNTS))
    with torch.no_grad():
        state = model.encode(*tensors(items, weights, dtype))
    read = np.where(items == FIRST_ITEM, UNK, items)  # COUNTS[0] is 0, below the default minimum of 1
    expected = reference.plain_forward_positions(reference_params(model, COUNTS), read, model.config.num_heads)
    assert_close(state.mean, expected, tol)


def test_filtering_off_knows_its_state_exactly_and_ignores_event_weights() -> None:
    model = perturbed_model(small_config(filtering=False), COUNTS, seed=22)
    items, weights = rows(23, 2, 5)
    state = model.encode(items, weights)
    assert (state.precision[items != PAD] == math.inf).all()
    assert torch.equal(state.mean, model.encode(items, torch.ones_like(weights)).mean)


def test_filtering_on_adds_less_than_a_thousandth_of_the_parameters_besides_theta() -> None:
    num_items = 1682  # ML-100K
    counts = torch.ones(num_items)

    def size(is_filtering: bool) -> int:
        model = SASRec(ModelConfig(filtering=is_filtering), counts)
        return sum(parameter.numel() for parameter in model.parameters())

    besides_theta = size(True) - size(False) - num_items
    # δ of the special tokens; a and b; Q of two layers; three scalars of the head.
    assert besides_theta == FIRST_ITEM + 2 + 2 * 64 + 3
    assert besides_theta < 0.001 * size(False)


# --- what a position depends on -----------------------------------------------------------------------------


def assert_same_state(found: Gaussian, expected: Gaussian, positions: slice) -> None:
    """Equal at these positions; a plain model's infinite precision is no number to compare, so 1/λ is."""
    assert_close(found.mean[:, positions], expected.mean[:, positions], SAME, "mean")
    assert_close(1 / found.precision[:, positions], 1 / expected.precision[:, positions], SAME, "variance")


@pytest.mark.parametrize("is_filtering", [True, False], ids=["on", "off"])
def test_a_later_event_never_changes_an_earlier_position(is_filtering: bool) -> None:
    model = perturbed_model(small_config(filtering=is_filtering), COUNTS, seed=30, dtype=torch.float64)
    items, weights = rows(31, 1, MAX_LEN + 1, torch.float64)
    before = model.encode(items, weights)
    for cut in range(1, items.shape[1]):
        other, heavier = items.clone(), weights.clone()
        other[:, cut:] = FIRST_ITEM + (other[:, cut:] + 3) % len(COUNTS)
        heavier[:, cut:] *= 50.0
        ended = items.clone()
        ended[:, cut:] = PAD
        for changed in (model.encode(other, heavier), model.encode(ended, heavier)):
            assert_same_state(changed, before, slice(cut))
        assert (model.encode(other, heavier).mean[:, cut] != before.mean[:, cut]).any()


@pytest.mark.parametrize("is_filtering", [True, False], ids=["on", "off"])
def test_batch_mates_and_more_padding_change_nothing(is_filtering: bool) -> None:
    model = perturbed_model(small_config(filtering=is_filtering), COUNTS, seed=32, dtype=torch.float64)
    items, weights = rows(33, 5, MAX_LEN + 1, torch.float64)
    together = model.encode(items, weights)
    lengths = (items != PAD).sum(1).tolist()
    assert len(set(lengths)) >= 3
    for row, length in enumerate(lengths):
        alone = model.encode(items[row : row + 1, :length], weights[row : row + 1, :length])
        mine = Gaussian(together.mean[row : row + 1], together.precision[row : row + 1])
        assert_same_state(mine, alone, slice(length))


def test_the_weight_of_padding_changes_nothing() -> None:
    model = perturbed_model(small_config(), COUNTS, seed=34)
    items, weights = rows(35, 4, 5)
    padding = items == PAD
    assert padding.any()
    expected = model.encode(items, weights)
    for weight in (0.0, -1.0, 1e30):
        found = model.encode(items, weights.masked_fill(padding, weight))
        assert torch.equal(found.mean, expected.mean)
        assert torch.equal(found.precision, expected.precision)


def test_dropout_is_off_in_eval_mode_and_on_in_training() -> None:
    config = small_config(dropout=0.5, attention_dropout=0.5)
    model = perturbed_model(config, COUNTS, seed=36)
    undropped = perturbed_model(config.model_copy(update={"dropout": 0.0, "attention_dropout": 0.0}), COUNTS, 36)
    items, weights = rows(37, 2, 5)
    assert torch.equal(model.encode(items, weights).mean, undropped.encode(items, weights).mean)
    assert torch.equal(model.encode(items, weights).precision, undropped.encode(items, weights).precision)
    model.train()
    torch.manual_seed(36)
    assert (model.encode(items, weights).mean != model.encode(items, weights).mean).any()


# --- the steps in place -------------------------------------------------------------------------------------


class RecordingSteps:
    """The steps of `model.filtering`, remembering what each layer's `krige` was given."""

    def __init__(self, hidden_neighbour: int | None = None) -> None:
        self.krige_inputs: list[tuple[Tensor, ...]] = []
        self.hidden_neighbour = hidden_neighbour

    def krige(self, *args: Any) -> KrigedField:
        *tensors, visible, shrinkage_dof, dropout = args
        if self.hidden_neighbour is not None:
            visible = visible.clone()
            visible[:, :, self.hidden_neighbour] = False
        self.krige_inputs.append((*tensors, visible))
        return filtering.krige(*tensors, visible, shrinkage_dof, dropout)

    def update(self, prior: Gaussian, innovation: Tensor, observed: Tensor) -> Posterior:
        return filtering.update(prior, innovation, observed)

    def predict(self, posterior: Gaussian, dynamics: Dynamics, dropout: float) -> Gaussian:
        return filtering.predict(posterior, dynamics, dropout)


def test_with_equal_item_precision_the_first_layer_s_kriging_weights_are_softmax_attention() -> None:
    model = perturbed_model(small_config(), COUNTS, seed=40, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.initial_precision.parameters():
            parameter.zero_()
    items, weights = rows(41, 2, MAX_LEN + 1, torch.float64)
    steps = RecordingSteps()
    model.encode(items, torch.ones_like(weights), steps=steps)
    query, key, _, neighbour_precision, visible = steps.krige_inputs[0]

    found = filtering.kriging_weights(query, key, neighbour_precision, visible)
    logits = (query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])).detach().numpy()
    attention = np.where(visible.numpy()[:, None], np.exp(logits), 0.0)
    assert_close(found, attention / attention.sum(-1, keepdims=True), 1e-12)


class PlainSteps(RecordingSteps):
    """Uniform precision in the weights, a gain of 1, no process noise: math.md, test 2."""

    def krige(self, *args: Any) -> KrigedField:
        query, key, value, neighbour_precision, *rest = args
        return super().krige(query, key, value, torch.full_like(neighbour_precision, 0.3), *rest)

    def update(self, prior: Gaussian, innovation: Tensor, observed: Tensor) -> Posterior:
        # So precise an observation that the gain rounds to 1.
        return filtering.update(prior, innovation, torch.full_like(observed, 1e300))

    def predict(self, posterior: Gaussian, dynamics: Dynamics, dropout: float) -> Gaussian:
        no_noise = torch.zeros_like(dynamics.process_noise_variance)
        predicted = filtering.predict(posterior, dynamics._replace(process_noise_variance=no_noise), dropout)
        return Gaussian(predicted.mean, torch.ones_like(predicted.precision))


def test_uniform_precision_gain_1_and_no_process_noise_make_the_plain_backbone() -> None:
    model = perturbed_model(small_config(), COUNTS, seed=42, dtype=torch.float64)
    items, weights = random_rows(np.random.default_rng(43), 3, MAX_LEN + 1, len(COUNTS))
    state = model.encode(*tensors(items, weights, torch.float64), steps=PlainSteps())
    read = np.where(items == FIRST_ITEM, UNK, items)
    expected = reference.plain_forward_positions(reference_params(model, COUNTS), read, model.config.num_heads)
    assert_close(state.mean, expected, FLOAT64_TOL)


def test_a_lighter_event_moves_what_is_observed_towards_its_absence() -> None:
    # Weights, mean, spread and sample size; σ0² keeps the attention that the event drew (math.md §1).
    model = perturbed_model(small_config(num_layers=1), COUNTS, seed=44, dtype=torch.float64)
    light = 2
    items = torch.tensor([[BOS, FIRST_ITEM + 5, FIRST_ITEM + 3, FIRST_ITEM + 7, FIRST_ITEM + 6]])

    def observe(weight: float, hidden_neighbour: int | None = None) -> list[Tensor]:
        weights = torch.ones(items.shape, dtype=torch.float64)
        weights[0, light] = weight
        steps = RecordingSteps(hidden_neighbour)
        model.encode(items, weights, steps=steps)
        query, key, value, neighbour_precision, visible = steps.krige_inputs[0]
        kriging = filtering.kriging_weights(query, key, neighbour_precision, visible)
        field = filtering.krige(query, key, value, neighbour_precision, visible)
        spread = kriging @ value.square() - (kriging @ value).square()
        return [kriging[:, :, -1], field.mean[:, -1], spread[:, :, -1], field.effective_sample_size[:, :, -1]]

    absent = observe(1.0, hidden_neighbour=light)
    distances = np.array(
        [
            [float((found - limit).detach().norm()) for found, limit in zip(observe(w), absent, strict=True)]
            for w in (1.0, 0.1, 0.01, 1e-3, 1e-9)
        ]
    )
    assert (distances[1:-1] < distances[:-2]).all()
    assert (distances[-1] < 1e-7).all()


# --- scores through the model -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_filtering", [True, False], ids=["on", "off"])
def test_named_candidates_score_as_they_do_in_the_whole_catalogue(is_filtering: bool) -> None:
    model = perturbed_model(small_config(filtering=is_filtering), COUNTS, seed=50, dtype=torch.float64)
    states = model.encode(*rows(51, 2, 5, torch.float64))
    state = Gaussian(states.mean[:, 0], states.precision[:, 0])
    everything = model.score(state)
    chosen = torch.tensor([7, 0, 3, 3])
    for found, whole in zip(model.score(state, chosen), everything, strict=True):
        assert found.shape == (2, 4)
        assert whole.shape == (2, model.num_items) == (2, len(COUNTS))
        assert_close(found, whole[:, chosen], SAME)
    for found, whole in zip(model.score_pairs(state, torch.tensor([9, 4])), everything, strict=True):
        assert_close(found, whole[[0, 1], [9, 4]], SAME)
