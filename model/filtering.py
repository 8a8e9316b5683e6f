"""The filtering layer's three steps as pure functions: observe, update, predict (math.md §1–3).

A state at a position is a Gaussian with a mean and a diagonal precision (inverse variance). One layer
*observes* the neighbours of a position by kriging, *updates* the state by a Kalman gain, and *predicts* the
next layer's prior by the feed-forward dynamics with process noise.

Shape letters, bound at each public function's entry:
    B batch · T positions asked for · S neighbours (S = T in training, the cache's length in a step)
    D width · H heads · C = D/H width of a head · K hidden width of the feed-forward

All precision arithmetic is float32 or wider, also under autocast.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from model import adjoints
from model.adjoints import gelu_slope, recomputed
from model.dropout import apply_dropout

P = ParamSpec("P")
R = TypeVar("R")

GAIN_FLOOR = 1e-6
"""Added to a LayerNorm's squared gain where a precision is divided by it."""
NO_WEIGHT = 1e-20
"""Σw² of unnormalised attention below which a head counts as seeing nobody."""


class Gaussian(NamedTuple):
    """A state: `mean` (B,T,D) and diagonal `precision` (B,T,D) > 0, the inverse variance."""

    mean: Tensor
    precision: Tensor


class KrigedField(NamedTuple):
    """What the neighbours say about a position, before the output projection (math.md §1).

    `mean` (B,T,D), the heads' kriged means side by side; `variance` (B,T,D) ≥ 0, the REML variance about it;
    `effective_sample_size` (B,H,T), Kish's, in [1, S], and 0 where no neighbour is visible.
    """

    mean: Tensor
    variance: Tensor
    effective_sample_size: Tensor


class Posterior(NamedTuple):
    """A state after the Kalman update: `mean`, `precision`, and the `gain` in [0, 1], each (B,T,D)."""

    mean: Tensor
    precision: Tensor
    gain: Tensor


class Dynamics(NamedTuple):
    """The feed-forward, its LayerNorm (before it, or after it in Post-LN) and its process noise (math.md §3).

    `ln_weight`, `ln_bias` (D,); `w1` (K,D), `b1` (K,); `w2` (D,K), `b2` (D,); the noise variance Q (D,) > 0.
    """

    ln_weight: Tensor
    ln_bias: Tensor
    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor
    process_noise_variance: Tensor
    ln_eps: float = 1e-5


def bind_shapes(**named: tuple[Tensor, str]) -> dict[str, int]:
    """Bind each shape letter to a size at first sight.

    Args:
        **named: argument name → (tensor, its letters, one a dimension).

    Returns:
        letter → size.

    Raises:
        ValueError: a tensor's rank or a letter's size disagrees; names the argument, the letter, both sizes.
    """
    sizes: dict[str, int] = {}
    for name, (tensor, letters) in named.items():
        if tensor.dim() != len(letters):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {len(letters)} axes ({letters})")
        for letter, size in zip(letters, tensor.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(f"{name}: axis {letter} is {size}, but was {sizes[letter]} before")
    return sizes


def full_precision(step: Callable[P, R]) -> Callable[P, R]:
    """Run a step in float32 or wider, also where autocast would take half precision."""

    @functools.wraps(step)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
            return step(*args, **kwargs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return step(*map(_at_least_float32, args), **{k: _at_least_float32(v) for k, v in kwargs.items()})

    return run


@full_precision
def kriging_weights(
    query_BHTC: Tensor, key_BHSC: Tensor, neighbour_precision_BS: Tensor, visible_BTS: Tensor
) -> Tensor:
    """Precision-weighted attention: softmax_j(q·k/√C + log λ̄_j) over the visible neighbours (math.md §1 [P]).

    Args:
        query_BHTC, key_BHSC: projections.
        neighbour_precision_BS: λ̄, the mean over dimensions of each neighbour's precision, > 0 where visible.
        visible_BTS: bool, which neighbours a position may see.

    Returns:
        weights (B,H,T,S) ≥ 0; rows sum to one, or to zero where nothing is visible.
    """
    return _kriging_weights(
        query_BHTC, key_BHSC, _finite_where_hidden(neighbour_precision_BS, visible_BTS), visible_BTS
    )


def _kriging_weights(query: Tensor, key: Tensor, neighbour_precision: Tensor, visible: Tensor) -> Tensor:
    visible = _as_numbers(visible, query.dtype)
    # A finite floor instead of -inf: a row without neighbours stays finite forward and backward.
    bias_BTS = ((visible - 1) * 1e30).add_(neighbour_precision.log()[:, None])
    logits = ((query / math.sqrt(query.shape[-1])) @ key.mT).add_(bias_BTS[:, None])
    seen_BT1 = visible.sum(-1, keepdim=True).clamp_max(1)
    return logits.softmax(-1) * seen_BT1[:, None]


@full_precision
def krige(
    query_BHTC: Tensor,
    key_BHSC: Tensor,
    value_BHSC: Tensor,
    neighbour_precision_BS: Tensor,
    visible_BTS: Tensor,
    shrinkage_dof: float = 1.0,
    dropout: float = 0.0,
) -> KrigedField:
    """Observe: the kriged mean of the neighbours and its REML variance (math.md §1 [P], [O]).

        e = Σ α̃ v      s = Σ α̃ v² − e²      n = 1/Σ α̃²      σ0² = Σ α̃/λ̄
        σ̂² = (ν0 σ0² + n s)/(ν0 + n − 1)

    Args:
        query_BHTC, key_BHSC, value_BHSC, neighbour_precision_BS, visible_BTS: see `kriging_weights`.
        shrinkage_dof: ν0 > 0 of the scaled-inverse-χ²(ν0, σ0²) prior.
        dropout: probability in [0, 1) that a weight of the mean path is dropped.

    Returns:
        the field; a row without visible neighbours has mean 0, variance 1 and effective sample size 0.
    """
    bind_shapes(
        query=(query_BHTC, "BHTC"),
        key=(key_BHSC, "BHSC"),
        value=(value_BHSC, "BHSC"),
        neighbour_precision=(neighbour_precision_BS, "BS"),
        visible=(visible_BTS, "BTS"),
    )
    outputs = recomputed(
        functools.partial(_krige, shrinkage_dof),
        functools.partial(_krige_adjoint, shrinkage_dof),
        (
            query_BHTC,
            key_BHSC,
            value_BHSC,
            _finite_where_hidden(neighbour_precision_BS, visible_BTS),
            visible_BTS,
            _dropout_mask(query_BHTC, key_BHSC, dropout),
        ),
        num_outputs=3,
        num_kept=4,
        row_elements=query_BHTC.shape[1] * visible_BTS.shape[1] * visible_BTS.shape[2],
    )
    return KrigedField(*outputs)


def _krige(
    shrinkage_dof: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    neighbour_precision: Tensor,
    visible: Tensor,
    dropout_mask: Tensor | None,
) -> tuple[Tensor, ...]:
    """A field's three parts, and e, s, σ0² and n by head; a row without neighbours has α̃ = 0 and counts as n = 1."""
    weights = _kriging_weights(query, key, neighbour_precision, visible)
    kriged_mean = weights @ value
    # The expanded square keeps memory at (T,S) + (T,C): no (T,S,C) tensor exists.
    residual_variance = torch.addcmul(weights @ value.square(), kriged_mean, kriged_mean, value=-1).clamp_min(0)
    concentration = torch.linalg.vector_norm(weights, dim=-1, keepdim=True).square()
    seen = concentration > 0
    n = torch.where(seen, concentration, 1).reciprocal()
    prior_variance = _weighted(weights, neighbour_precision.reciprocal())
    reml_variance = _shrunk(shrinkage_dof, residual_variance, prior_variance, n, seen)

    mean = kriged_mean if dropout_mask is None else (weights * dropout_mask) @ value
    field = _merge_heads(mean), _merge_heads(reml_variance), torch.where(seen, n, 0).squeeze(-1)
    return *field, kriged_mean, residual_variance, prior_variance, n


def _krige_adjoint(
    shrinkage_dof: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    neighbour_precision: Tensor,
    visible: Tensor,
    dropout_mask: Tensor | None,
    *kept_and_grads: Tensor,
) -> tuple[Tensor | None, ...]:
    weights = _kriging_weights(query, key, neighbour_precision, visible)
    inputs = query, key, value, neighbour_precision
    return *adjoints.krige(shrinkage_dof, weights, *inputs, dropout_mask, *kept_and_grads), None, None


@full_precision
def pointwise_attention(
    query_BHTC: Tensor, key_BHSC: Tensor, bias_BTS: Tensor, visible_BTS: Tensor, attention_norm: float
) -> Tensor:
    """HSTU's attention a = SiLU(q·k + bias)/norm over the visible neighbours (math.md, "HSTU").

    Args:
        query_BHTC, key_BHSC: projections; the product is not divided by √C.
        bias_BTS: relative position and time, the same for every head.
        visible_BTS: bool, which neighbours a position may see.
        attention_norm: a constant > 0, so that padding changes nothing.

    Returns:
        weights (B,H,T,S) of either sign, 0 where hidden; rows sum to anything.
    """
    scale_BTS = visible_BTS.to(query_BHTC.dtype) / attention_norm
    return F.silu(query_BHTC @ key_BHSC.mT + bias_BTS[:, None]) * scale_BTS[:, None]


@full_precision
def sandwich_weights(
    query_BHTC: Tensor,
    key_BHSC: Tensor,
    bias_BTS: Tensor,
    neighbour_precision_BS: Tensor,
    visible_BTS: Tensor,
    attention_norm: float,
) -> Tensor:
    """The weights w = a·λ̄/m of `sandwich` (math.md, "HSTU" [P]).

    Args:
        query_BHTC, key_BHSC, bias_BTS, neighbour_precision_BS, visible_BTS, attention_norm: see `sandwich`.

    Returns:
        weights (B,H,T,S) of either sign, 0 where hidden, and throughout where a head sees nobody.
    """
    precision_BS = _finite_where_hidden(neighbour_precision_BS, visible_BTS)
    visible = _as_numbers(visible_BTS, query_BHTC.dtype)
    logits = query_BHTC @ key_BHSC.mT + bias_BTS[:, None]
    # Not F.silu: see `SandwichAttention`, whose weights an exported graph must tell.
    activation = logits / (1 + (-logits).exp())
    weights = activation * _relative_precision(precision_BS, visible, attention_norm)
    return weights * (weights.square().sum(-1, keepdim=True) >= NO_WEIGHT)


def shares(weights_BHTS: Tensor) -> Tensor:
    """|w|/Σ|w| over the neighbours; 0 throughout where every weight is 0."""
    mass = weights_BHTS.abs()
    total = mass.sum(-1, keepdim=True)
    return mass / torch.where(total > 0, total, 1)


@full_precision
def sandwich(
    query_BHTC: Tensor,
    key_BHSC: Tensor,
    value_BHSC: Tensor,
    bias_BTS: Tensor,
    neighbour_precision_BS: Tensor,
    visible_BTS: Tensor,
    attention_norm: float,
    shrinkage_dof: float = 1.0,
    dropout: float = 0.0,
) -> KrigedField:
    """Observe through unnormalised attention: weights of either sign, the sandwich variance (math.md, "HSTU" [P]).

        w = a·λ̄/m, m the mean λ̄ of the visible      p = |w|/Σ|w|      μ = Σ p v      n = (Σ|w|)²/Σw²
        S = Σ w²(v−μ)²/Σw²      σ0² = Σ p/λ̄      σ̂² = (ν0 σ0² + n S)/(ν0 + n − 1)      mean = Σ w v

    Args:
        query_BHTC, key_BHSC, bias_BTS, visible_BTS, attention_norm: see `pointwise_attention`.
        value_BHSC: projection.
        neighbour_precision_BS: λ̄, the mean over dimensions of each neighbour's precision, > 0 where visible.
        shrinkage_dof: ν0 > 0 of the scaled-inverse-χ²(ν0, σ0²) prior.
        dropout: probability in [0, 1) that a weight of the mean path is dropped.

    Returns:
        the field, its mean unnormalised; where a head's Σw² is below `NO_WEIGHT`, it has no neighbour: variance
        1 and effective sample size 0.
    """
    bind_shapes(
        query=(query_BHTC, "BHTC"),
        key=(key_BHSC, "BHSC"),
        value=(value_BHSC, "BHSC"),
        bias=(bias_BTS, "BTS"),
        neighbour_precision=(neighbour_precision_BS, "BS"),
        visible=(visible_BTS, "BTS"),
    )
    outputs = recomputed(
        functools.partial(_sandwich, attention_norm, shrinkage_dof),
        functools.partial(_sandwich_adjoint, attention_norm, shrinkage_dof),
        (
            query_BHTC,
            key_BHSC,
            value_BHSC,
            bias_BTS,
            _finite_where_hidden(neighbour_precision_BS, visible_BTS),
            visible_BTS,
            _dropout_mask(query_BHTC, key_BHSC, dropout),
        ),
        num_outputs=3,
        num_kept=7,
        row_elements=query_BHTC.shape[1] * visible_BTS.shape[1] * visible_BTS.shape[2],
    )
    return KrigedField(*outputs)


def _sandwich(
    attention_norm: float,
    shrinkage_dof: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    neighbour_precision: Tensor,
    visible: Tensor,
    dropout_mask: Tensor | None,
) -> tuple[Tensor, ...]:
    """A field's three parts, and by head whether anyone is seen, Σ|w|, Σw², μ, Σw²v/Σw², S and σ0²."""
    logits = (query @ key.mT).add_(bias[:, None])
    visible = _as_numbers(visible, query.dtype)
    weights = F.silu(logits) * _relative_precision(neighbour_precision, visible, attention_norm)
    magnitudes, squares = weights.abs(), weights.square()
    energy = squares.sum(-1, keepdim=True)
    seen = energy >= NO_WEIGHT
    energy = torch.where(seen, energy, 1)
    total = torch.where(seen, magnitudes.sum(-1, keepdim=True), 1)
    n = total.square() / energy

    centre = magnitudes @ value / total
    skew = squares @ value / energy
    # Σ w²(v−μ)² by the expanded square, as in `_krige`.
    sandwich_variance = torch.addcmul(squares @ value.square() / energy, centre, centre - 2 * skew).clamp_min(0)
    prior_variance = _weighted(magnitudes, neighbour_precision.reciprocal()) / total
    variance = _shrunk(shrinkage_dof, sandwich_variance, prior_variance, n, seen)

    mean = (weights if dropout_mask is None else weights * dropout_mask) @ value
    field = _merge_heads(mean), _merge_heads(variance), torch.where(seen, n, 0).squeeze(-1)
    return *field, seen, total, energy, centre, skew, sandwich_variance, prior_variance


def _sandwich_adjoint(
    attention_norm: float,
    shrinkage_dof: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    neighbour_precision: Tensor,
    visible: Tensor,
    dropout_mask: Tensor | None,
    *kept_and_grads: Tensor,
) -> tuple[Tensor | None, ...]:
    logits = (query @ key.mT).add_(bias[:, None])
    visible = _as_numbers(visible, query.dtype)
    relative_precision = _relative_precision(neighbour_precision, visible, attention_norm)
    again = logits, relative_precision, visible
    inputs = query, key, value, neighbour_precision
    return *adjoints.sandwich(shrinkage_dof, *again, *inputs, dropout_mask, *kept_and_grads), None, None


@full_precision
def observation_precision(field: KrigedField, output_weight_DD: Tensor) -> Tensor:
    """λ^obs = 1/σ̂² after the output projection's change of basis (math.md §1 [O]).

    The projection mixes the variances without rescaling them: σ̂²_out = (W∘W) σ̂² / rowsum(W∘W); with the scale
    every gain saturates.

    Args:
        field: of `krige`.
        output_weight_DD: W_o as in W_o·e, (out, in).

    Returns:
        (B,T,D) ≥ 0; 0 where no neighbour is visible to one of the heads: a variance without bound mixes into all.
    """
    mixing = output_weight_DD.square()
    mixing = mixing / mixing.sum(-1, keepdim=True)
    observed_BT1 = (field.effective_sample_size.amin(1)[..., None] > 0).to(field.variance.dtype)
    return observed_BT1 / (field.variance @ mixing.T)


@full_precision
def update(prior: Gaussian, innovation_BTD: Tensor, observation_precision_BTD: Tensor) -> Posterior:
    """The residual connection as a Kalman update (math.md §2 [P]).

        K = λ^obs/(λ + λ^obs)      mean = h + K·innovation      precision = λ + λ^obs

    Args:
        prior: the state before the observation; precision > 0.
        innovation_BTD: W_o e + b_o, what the gain multiplies.
        observation_precision_BTD: λ^obs ≥ 0.

    Returns:
        the posterior, its precision never below the prior's.
    """
    bind_shapes(
        mean=(prior.mean, "BTD"),
        precision=(prior.precision, "BTD"),
        innovation=(innovation_BTD, "BTD"),
        observation_precision=(observation_precision_BTD, "BTD"),
    )
    inputs = (*prior, innovation_BTD, observation_precision_BTD)
    return Posterior(*recomputed(_update, _update_adjoint, inputs, num_outputs=3, num_kept=2))


def _update(
    mean: Tensor, precision: Tensor, innovation: Tensor, observation_precision: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    posterior_precision = precision + observation_precision
    gain = observation_precision / posterior_precision
    return torch.addcmul(mean, gain, innovation), posterior_precision, gain


def _update_adjoint(
    mean: Tensor, precision: Tensor, innovation: Tensor, observation_precision: Tensor, *kept_and_grads: Tensor
) -> tuple[Tensor, ...]:
    return adjoints.update(innovation, *kept_and_grads)


@full_precision
def predict(posterior: Gaussian, dynamics: Dynamics, dropout: float = 0.0) -> Gaussian:
    """The feed-forward as dynamics: the mean moves, the precision fades by process noise (math.md §3 [P]).

        mean = h + FFN(LN(h))      precision = ((1+J)²/λ + Q)^{-1}      J = diag ∂FFN(LN(h))/∂h

    J is exact, LayerNorm included [O]; dropout acts on the mean alone and does not enter it.

    Args:
        posterior: the state after the update; precision > 0.
        dynamics: the feed-forward's parameters.
        dropout: probability in [0, 1) on the feed-forward's output.

    Returns:
        the predicted state, the next layer's prior; 0 < precision ≤ 1/Q.
    """
    bind_shapes(
        mean=(posterior.mean, "BTD"),
        precision=(posterior.precision, "BTD"),
        ln_weight=(dynamics.ln_weight, "D"),
        w1=(dynamics.w1, "KD"),
        w2=(dynamics.w2, "DK"),
        process_noise_variance=(dynamics.process_noise_variance, "D"),
    )
    w1_gamma = dynamics.w1 * dynamics.ln_weight
    drift, precision = recomputed(
        functools.partial(_predict, dynamics.ln_eps),
        functools.partial(_predict_adjoint, dynamics.ln_eps),
        (posterior.mean.flatten(0, 1), posterior.precision.flatten(0, 1)),
        (
            w1_gamma,
            dynamics.w1 @ dynamics.ln_bias + dynamics.b1,
            dynamics.w2,
            dynamics.b2,
            # Both sums over k of math.md §3 that do not carry x̂ share one product: W1γ[k,d] − m_k.
            dynamics.w2.T * (w1_gamma - w1_gamma.mean(-1, keepdim=True)),
            dynamics.process_noise_variance,
        ),
        num_outputs=2,
        num_kept=3,
        row_elements=len(w1_gamma),
    )
    shape = posterior.mean.shape
    return Gaussian(posterior.mean + apply_dropout(drift.view(shape), dropout, dropout > 0), precision.view(shape))


def _predict(
    ln_eps: float,
    mean: Tensor,
    precision: Tensor,
    w1_gamma: Tensor,
    shift: Tensor,
    w2: Tensor,
    b2: Tensor,
    direct_map: Tensor,
    noise_variance: Tensor,
) -> tuple[Tensor, ...]:
    """FFN(LN(h)) and the predicted precision, then what backward reads again: J, and its part through the scale."""
    normalised, scale = _standardised(mean, ln_eps)
    sensitivity = normalised @ w1_gamma.T
    hidden = sensitivity + shift
    drift = F.linear(F.gelu(hidden), w2, b2)

    slope = gelu_slope(hidden)
    through_scale = (slope * sensitivity) @ w2.T
    jacobian_diag = torch.addcmul(slope @ direct_map, normalised, through_scale, value=-1 / mean.shape[-1]) / scale
    predicted_variance = (1 + jacobian_diag).square() / precision + noise_variance
    return drift, predicted_variance.reciprocal(), jacobian_diag, through_scale


def _predict_adjoint(
    ln_eps: float,
    mean: Tensor,
    precision: Tensor,
    w1_gamma: Tensor,
    shift: Tensor,
    w2: Tensor,
    b2: Tensor,
    direct_map: Tensor,
    noise_variance: Tensor,
    *kept_and_grads: Tensor,
) -> tuple[Tensor, ...]:
    standardised = _standardised(mean, ln_eps)
    return adjoints.predict(*standardised, precision, w1_gamma, shift, w2, direct_map, *kept_and_grads)


@full_precision
def predict_post_norm(posterior: Gaussian, dynamics: Dynamics, dropout: float = 0.0) -> Gaussian:
    """The feed-forward as dynamics, with the LayerNorm behind it (math.md §3 [P]).

        mean = LN(h + FFN(h))      precision = normalise(((1+J)²/λ + Q)^{-1})      J = diag ∂FFN(h)/∂h

    J is the feed-forward's alone and exact [O]; process noise comes before the LayerNorm.

    Args:
        posterior: the state after the update and its LayerNorm; precision > 0.
        dynamics: the feed-forward's parameters.
        dropout: probability in [0, 1) on the feed-forward's output.

    Returns:
        the predicted state, the next layer's prior; 0 < precision ≤ s²/(Q·(γ² + 1e-6)).
    """
    bind_shapes(
        mean=(posterior.mean, "BTD"),
        precision=(posterior.precision, "BTD"),
        ln_weight=(dynamics.ln_weight, "D"),
        w1=(dynamics.w1, "KD"),
        w2=(dynamics.w2, "DK"),
        process_noise_variance=(dynamics.process_noise_variance, "D"),
    )
    drift, moved_precision = recomputed(
        _predict_post_norm,
        _predict_post_norm_adjoint,
        (posterior.mean.flatten(0, 1), posterior.precision.flatten(0, 1)),
        (
            dynamics.w1,
            dynamics.b1,
            dynamics.w2,
            dynamics.b2,
            dynamics.w2.T * dynamics.w1,
            dynamics.process_noise_variance,
        ),
        num_outputs=2,
        num_kept=2,
        row_elements=len(dynamics.w1),
    )
    shape = posterior.mean.shape
    moved = posterior.mean + apply_dropout(drift.view(shape), dropout, dropout > 0)
    moved_state = Gaussian(moved, moved_precision.view(shape))
    return normalise(moved_state, dynamics.ln_weight, dynamics.ln_bias, dynamics.ln_eps)


def _predict_post_norm(
    mean: Tensor,
    precision: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    direct_map: Tensor,
    noise_variance: Tensor,
) -> tuple[Tensor, ...]:
    """FFN(h) and the precision before the LayerNorm, then J, which backward reads again."""
    hidden = F.linear(mean, w1, b1)
    drift = F.linear(F.gelu(hidden), w2, b2)
    jacobian_diag = gelu_slope(hidden) @ direct_map
    moved_variance = (1 + jacobian_diag).square() / precision + noise_variance
    return drift, moved_variance.reciprocal(), jacobian_diag


def _predict_post_norm_adjoint(
    mean: Tensor,
    precision: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    direct_map: Tensor,
    noise_variance: Tensor,
    *kept_and_grads: Tensor,
) -> tuple[Tensor, ...]:
    return adjoints.predict_post_norm(mean, precision, w1, b1, w2, direct_map, *kept_and_grads)


@full_precision
def normalise(state: Gaussian, ln_weight_D: Tensor, ln_bias_D: Tensor, ln_eps: float) -> Gaussian:
    """A LayerNorm of a state, as the affine map that it is at the state's own mean (math.md §3 [O]).

        mean = γ∘(h − m)/s + β      precision = λ·s²/(γ² + 1e-6)      s² = var(h) + ε

    m and s count as fixed. The 1e-6 keeps the precision finite in a dimension whose gain is 0.

    Args:
        state: mean and precision, (…,D).
        ln_weight_D, ln_bias_D: γ and β.
        ln_eps: ε > 0.
    """
    # m moves no variance: its share of the derivative is 0, and left out. A norm is one pass, torch's `var` many.
    centred = state.mean - state.mean.mean(-1, keepdim=True).detach()
    scale_squared = torch.linalg.vector_norm(centred, dim=-1, keepdim=True).square() / centred.shape[-1] + ln_eps
    return Gaussian(
        F.layer_norm(state.mean, ln_weight_D.shape, ln_weight_D, ln_bias_D, ln_eps),
        state.precision * scale_squared / (ln_weight_D.square() + GAIN_FLOOR),
    )


@full_precision
def diffuse(posterior: Gaussian, process_noise_variance_D: Tensor) -> Gaussian:
    """Dynamics without a feed-forward: the mean stays, process noise fades the precision (math.md, "HSTU" [P]).

        precision = (1/λ + Q)^{-1}

    Args:
        posterior: the state after the update; precision > 0.
        process_noise_variance_D: Q > 0.
    """
    return Gaussian(posterior.mean, (posterior.precision.reciprocal() + process_noise_variance_D).reciprocal())


def _standardised(mean: Tensor, ln_eps: float) -> tuple[Tensor, Tensor]:
    """x̂ and s of a LayerNorm."""
    centred = mean - mean.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + ln_eps).sqrt()
    return centred / scale, scale


def _shrunk(shrinkage_dof: float, spread: Tensor, prior_variance: Tensor, n: Tensor, seen: Tensor) -> Tensor:
    """(ν0 σ0² + n·spread)/(ν0 + n − 1), and 1 where nobody is seen."""
    dof = shrinkage_dof + n - 1
    by_prior, share = torch.where(seen, shrinkage_dof * prior_variance / dof, 1), torch.where(seen, n / dof, 0)
    return torch.addcmul(by_prior, share, spread)


def _weighted(weights_BHTS: Tensor, values_BS: Tensor) -> Tensor:
    """Σ_j weight·value (B,H,T,1) of values that the heads share."""
    return (weights_BHTS.flatten(1, 2) @ values_BS[..., None]).view(*weights_BHTS.shape[:3], 1)


def _as_numbers(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """1 where visible, 0 where hidden; by way of bytes, because torch reads booleans one at a time."""
    return visible.view(torch.uint8).to(dtype)


def _finite_where_hidden(neighbour_precision_BS: Tensor, visible_BTS: Tensor) -> Tensor:
    """λ̄ with 1 in place of what no position sees: padding's 0 would give NaN under the mask."""
    seen_BS = _as_numbers(visible_BTS, neighbour_precision_BS.dtype).sum(1) > 0
    return torch.where(seen_BS, neighbour_precision_BS, 1)


def _relative_precision(neighbour_precision_BS: Tensor, visible_BTS: Tensor, attention_norm: float) -> Tensor:
    """λ̄_j/m_t/norm (B,1,T,S), m_t the mean over those that the position sees; 0 where hidden."""
    total_BT1 = visible_BTS @ neighbour_precision_BS[..., None]
    scale_BT1 = visible_BTS.sum(-1, keepdim=True) / (torch.where(total_BT1 > 0, total_BT1, 1) * attention_norm)
    return (visible_BTS * neighbour_precision_BS[:, None] * scale_BT1)[:, None]


def _dropout_mask(query_BHTC: Tensor, key_BHSC: Tensor, dropout: float) -> Tensor | None:
    """What dropout multiplies weights (B,H,T,S) by, drawn once so that backward sees the same; None without it."""
    if dropout == 0:
        return None
    return apply_dropout(query_BHTC.new_ones(*query_BHTC.shape[:3], key_BHSC.shape[2]), dropout, dropout > 0)


def _at_least_float32(value: Any) -> Any:
    """A tensor, or a tuple of them, with half precision widened; anything else as it is."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, tuple):
        return type(value)(*map(_at_least_float32, value))
    return value


def _merge_heads(field_BHTC: Tensor) -> Tensor:
    return field_BHTC.transpose(1, 2).flatten(2)
