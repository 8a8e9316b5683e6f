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
    neighbour_precision_BS = _finite_where_hidden(neighbour_precision_BS, visible_BTS)
    logits = query_BHTC @ key_BHSC.transpose(-1, -2) / math.sqrt(query_BHTC.shape[-1])
    logits = logits + neighbour_precision_BS.log()[:, None, None, :]
    visible = visible_BTS[:, None]
    # A finite floor instead of -inf: a row without neighbours stays finite forward and backward.
    return logits.masked_fill(~visible, -1e30).softmax(-1) * visible


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
    neighbour_precision_BS = _finite_where_hidden(neighbour_precision_BS, visible_BTS)
    weights = kriging_weights(query_BHTC, key_BHSC, neighbour_precision_BS, visible_BTS)
    seen_BHT = visible_BTS.any(-1)[:, None].expand(weights.shape[:-1])

    kriged_mean = weights @ value_BHSC
    # The expanded square keeps memory at (T,S) + (T,C): no (T,S,C) tensor exists.
    residual_variance = (weights @ value_BHSC.square() - kriged_mean.square()).clamp_min(0)
    concentration = torch.where(seen_BHT, weights.square().sum(-1), 1)
    effective_sample_size = concentration.reciprocal()
    kriging_prior_variance = weights @ neighbour_precision_BS.reciprocal()[:, None, :, None]

    n = effective_sample_size[..., None]
    reml_variance = (shrinkage_dof * kriging_prior_variance + n * residual_variance) / (shrinkage_dof + n - 1)
    reml_variance = torch.where(seen_BHT[..., None], reml_variance, 1)

    if dropout > 0:
        kriged_mean = F.dropout(weights, dropout) @ value_BHSC
    return KrigedField(
        mean=_merge_heads(kriged_mean),
        variance=_merge_heads(reml_variance),
        effective_sample_size=torch.where(seen_BHT, effective_sample_size, 0),
    )


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
    logits = query_BHTC @ key_BHSC.transpose(-1, -2) + bias_BTS[:, None]
    return (F.silu(logits) / attention_norm).masked_fill(~visible_BTS[:, None], 0)


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
    neighbour_precision_BS = _finite_where_hidden(neighbour_precision_BS, visible_BTS)
    attention = pointwise_attention(query_BHTC, key_BHSC, bias_BTS, visible_BTS, attention_norm)
    weights = attention * _relative_precision(neighbour_precision_BS, visible_BTS)[:, None]
    seen_BHT1 = weights.square().sum(-1, keepdim=True) >= NO_WEIGHT

    mass = weights.abs()
    mass = mass / torch.where(seen_BHT1, mass.sum(-1, keepdim=True), 1)
    squares = mass.square()
    n = torch.where(seen_BHT1, squares.sum(-1, keepdim=True), 1).reciprocal()
    centre = mass @ value_BHSC
    # Σ p²(v−μ)² by the expanded square, as in `krige`; n = 1/Σp² makes w²/Σw² of it.
    spread = squares @ value_BHSC.square() - 2 * centre * (squares @ value_BHSC)
    sandwich_variance = (n * spread + centre.square()).clamp_min(0)
    kriging_prior_variance = mass @ neighbour_precision_BS.reciprocal()[:, None, :, None]
    shrunk_variance = (shrinkage_dof * kriging_prior_variance + n * sandwich_variance) / (shrinkage_dof + n - 1)

    return KrigedField(
        mean=_merge_heads((F.dropout(weights, dropout) if dropout > 0 else weights) @ value_BHSC),
        variance=_merge_heads(torch.where(seen_BHT1, shrunk_variance, 1)),
        effective_sample_size=torch.where(seen_BHT1, n, 0).squeeze(-1),
    )


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
    observed_BT1 = field.effective_sample_size.amin(1)[..., None] > 0
    return torch.where(observed_BT1, (field.variance @ mixing.T).reciprocal(), 0)


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
    posterior_precision = prior.precision + observation_precision_BTD
    gain = observation_precision_BTD / posterior_precision
    return Posterior(prior.mean + gain * innovation_BTD, posterior_precision, gain)


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
    centred = posterior.mean - posterior.mean.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + dynamics.ln_eps).sqrt()
    normalised = centred / scale

    w1_gamma = dynamics.w1 * dynamics.ln_weight
    sensitivity = normalised @ w1_gamma.T
    hidden = sensitivity + (dynamics.w1 @ dynamics.ln_bias + dynamics.b1)
    drift = F.linear(F.gelu(hidden), dynamics.w2, dynamics.b2)

    slope = gelu_slope(hidden)
    # Both sums over k of math.md §3 that do not carry x̂ share one product: W1γ[k,d] − m_k.
    direct = slope @ (dynamics.w2.T * (w1_gamma - w1_gamma.mean(-1, keepdim=True)))
    through_scale = normalised / normalised.shape[-1] * ((slope * sensitivity) @ dynamics.w2.T)
    jacobian_diag = (direct - through_scale) / scale

    predicted_variance = (1 + jacobian_diag).square() / posterior.precision + dynamics.process_noise_variance
    return Gaussian(posterior.mean + F.dropout(drift, dropout, dropout > 0), predicted_variance.reciprocal())


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
    hidden = F.linear(posterior.mean, dynamics.w1, dynamics.b1)
    drift = F.linear(F.gelu(hidden), dynamics.w2, dynamics.b2)
    jacobian_diag = gelu_slope(hidden) @ (dynamics.w2.T * dynamics.w1)

    moved = posterior.mean + F.dropout(drift, dropout, dropout > 0)
    moved_variance = (1 + jacobian_diag).square() / posterior.precision + dynamics.process_noise_variance
    moved_state = Gaussian(moved, moved_variance.reciprocal())
    return normalise(moved_state, dynamics.ln_weight, dynamics.ln_bias, dynamics.ln_eps)


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
    centred = state.mean - state.mean.mean(-1, keepdim=True)
    scale_squared = centred.square().mean(-1, keepdim=True) + ln_eps
    return Gaussian(
        centred * scale_squared.rsqrt() * ln_weight_D + ln_bias_D,
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


def gelu_slope(x: Tensor) -> Tensor:
    """Derivative of the exact GELU: Φ(x) + x·φ(x)."""
    cumulative = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    return cumulative + x * torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)


def _finite_where_hidden(neighbour_precision_BS: Tensor, visible_BTS: Tensor) -> Tensor:
    """λ̄ with 1 in place of what no position sees: padding's 0 would give NaN under the mask."""
    return torch.where(visible_BTS.any(1), neighbour_precision_BS, 1)


def _relative_precision(neighbour_precision_BS: Tensor, visible_BTS: Tensor) -> Tensor:
    """λ̄_j/m_t (B,T,S): each neighbour's precision over the mean of those that the position sees."""
    count_BT1 = visible_BTS.sum(-1, keepdim=True)
    total_BT1 = visible_BTS.to(neighbour_precision_BS.dtype) @ neighbour_precision_BS[..., None]
    return neighbour_precision_BS[:, None] * (count_BT1 / torch.where(count_BT1 > 0, total_BT1, 1))


def _at_least_float32(value: Any) -> Any:
    """A tensor, or a tuple of them, with half precision widened; anything else as it is."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, tuple):
        return type(value)(*map(_at_least_float32, value))
    return value


def _merge_heads(field_BHTC: Tensor) -> Tensor:
    return field_BHTC.transpose(1, 2).flatten(2)
