"""The whole model in numpy float64, written from math.md alone: the answer that every fast path is held to.

Clarity before speed: positions are visited in loops, Jacobians are whole matrices, and where math.md gives an
equation and a cheaper form of it, this file uses the equation (αλ̄/Σαλ̄, Σα̃(v−e)²), so that the cheaper form
is tested against something else.

Shapes: B batch, T positions asked for, S neighbours, D width, H heads, C = D/H, K feed-forward width,
N items, V = N + 4 tokens (the special ones first), L window length in events. A state is a Gaussian: `mean`
and diagonal `precision` (inverse variance, ≥ 0; 0 means "nothing known").

Parameters of the full model are a dict of float64 arrays (a weight acts as out = W x + b):

| key | shape | math.md |
|---|---|---|
| token_embedding | (V,D) | input and output embedding; item i is row FIRST_ITEM + i |
| position_embedding | (≥ T,D) | position 0 is BOS |
| embedding_norm_weight, _bias | (D,) | BERT4Rec: LayerNorm of the embeddings |
| precision_intercept, precision_slope | () | a, b of θ, "Layer 0" |
| precision_offset | (V,) | δ of θ |
| training_count | (V,) | n_i; 0 for special tokens |
| layers.{l}.attention_norm_weight, _bias | (D,) | LayerNorm before attention; BERT4Rec: LN1, after the update |
| layers.{l}.query_weight, key_weight, value_weight, output_weight | (D,D) | W_q, W_k, W_v, W_o |
| layers.{l}.query_bias, key_bias, value_bias, output_bias | (D,) | |
| layers.{l}.ffn_norm_weight, _bias | (D,) | LayerNorm before the feed-forward; BERT4Rec: LN2, after it |
| layers.{l}.w1, b1, w2, b2 | (K,D), (K,), (D,K), (D,) | feed-forward |
| layers.{l}.process_noise_raw | (D,) | q, Q = softplus(q) |
| final_norm_weight, _bias | (D,) | LN_f |
| candidate_intercept, candidate_slope_raw | () | a', b' of r_i |
| score_shrinkage_raw | () | c = softplus of it |

The plain backbone (filtering off) reads the same dict and ignores what concerns precision.

HSTU has no position_embedding, no LN_f and no feed-forward; its LayerNorms have neither weight nor bias. Its layers:

| key | shape | math.md, "HSTU" |
|---|---|---|
| layers.{l}.gate_weight, value_weight, query_weight, key_weight | (D,D) | U, V, Q, K |
| layers.{l}.output_weight, output_bias | (D,D), (D,) | W_o, b_o |
| layers.{l}.position_bias | (≥ T,) | by t − j |
| layers.{l}.time_bias | (buckets + 1,) | by bucket; the last for no time |
| layers.{l}.process_noise_raw | (D,) | q |
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = Mapping[str, Array]

PAD = 0
MASK = 3
FIRST_ITEM = 4
LN_EPS = 1e-5
HSTU_LN_EPS = 1e-6


class Kriged(NamedTuple):
    """What the neighbours say about every position (math.md §1)."""

    kriging_weights: Array
    """(B,H,T,S), rows sum to 1; a row with no visible neighbour is 0."""
    kriged_mean: Array
    """(B,T,D), heads concatenated; 0 with no visible neighbour."""
    reml_variance: Array
    """(B,T,D), σ̂² > 0; 0 with no visible neighbour, where it means nothing."""
    effective_sample_size: Array
    """(B,H,T), in [1, S]; 0 with no visible neighbour."""


class SandwichField(NamedTuple):
    """What the neighbours say about every position through unnormalised attention (math.md, "HSTU")."""

    weights: Array
    """(B,H,T,S), of either sign."""
    mean: Array
    """(B,T,D), Σ_j w_tj v_j, heads concatenated."""
    variance: Array
    """(B,T,D), σ̂² > 0; 0 with no visible neighbour, where it means nothing."""
    effective_sample_size: Array
    """(B,H,T), in [1, S]; 0 with no visible neighbour."""


class Posterior(NamedTuple):
    """A state after its observation (math.md §2)."""

    gain: Array
    mean: Array
    precision: Array


class Gaussian(NamedTuple):
    """Mean and diagonal precision, same shape."""

    mean: Array
    precision: Array


class FinalState(NamedTuple):
    """The user after the last LayerNorm: z and ρ, each (…,D) ("Scoring and its uncertainty")."""

    user: Array
    user_variance: Array


class CatalogueScores(NamedTuple):
    """All N items for one user ("Scoring and its uncertainty"); every array is (N,) but entropy, in nats."""

    score_mean: Array
    score_variance: Array
    logit: Array
    probability: Array
    entropy: float


# --- elementary functions -----------------------------------------------------------------------------------


def softplus(x: Array | float) -> Array:
    """log(1 + eˣ), without overflow."""
    return np.logaddexp(0.0, np.asarray(x, dtype=np.float64))


def normal_cdf(x: Array) -> Array:
    """Φ(x) by the error function."""
    erf = np.vectorize(math.erf, otypes=[np.float64])
    return 0.5 * (1.0 + erf(x / math.sqrt(2.0)))


def silu(x: Array) -> Array:
    """x·σ(x), with σ(x) = exp(−log(1 + e⁻ˣ)) to its last digit far below 0."""
    return x * np.exp(-np.logaddexp(0.0, -x))


def gelu(x: Array) -> Array:
    """x·Φ(x): the exact GELU, not its tanh approximation."""
    return x * normal_cdf(x)


def gelu_derivative(x: Array) -> Array:
    """Φ(x) + x·φ(x)."""
    return normal_cdf(x) + x * np.exp(-0.5 * x**2) / math.sqrt(2.0 * math.pi)


def layer_norm(x: Array, weight: Array, bias: Array, eps: float = LN_EPS) -> Array:
    """LayerNorm over the last dimension; its s is sqrt(variance + eps), variance over D (not D − 1)."""
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    return weight * centred / deviation + bias


# --- math.md, "The sequence" --------------------------------------------------------------------------------


def window_start(count: int, max_len: int) -> int:
    """First event of the window after `count` events: it moves on by L/2 until at most L events are left."""
    start = 0
    while count - start > max_len:
        start += max_len // 2
    return start


# --- math.md, "Layer 0: initial precision" ------------------------------------------------------------------


def item_precision(intercept: float, slope: float, training_count: Array, offset: Array) -> Array:
    """τ_i = exp(a + b·log(1 + n_i) + δ_i), one per token ("Layer 0")."""
    return np.exp(intercept + slope * np.log1p(training_count) + offset)


def initial_precision(item_precision_V: Array, items_BT: NDArray[np.int64], weights_BT: Array, width: int) -> Array:
    """λ_{t,d} = τ_{item(t)}·w_t, the same for every d; 0 at padding ("Layer 0"). Returns (B,T,D)."""
    batch, length = items_BT.shape
    precision_BTD = np.zeros((batch, length, width))
    for b in range(batch):
        for t in range(length):
            if items_BT[b, t] != PAD:
                precision_BTD[b, t, :] = item_precision_V[items_BT[b, t]] * weights_BT[b, t]
    return precision_BTD


# --- math.md §1, "Observe" ----------------------------------------------------------------------------------


def krige(
    query: Array,
    key: Array,
    value: Array,
    neighbour_precision: Array,
    visible: NDArray[np.bool_],
    shrinkage_dof: float = 1.0,
) -> Kriged:
    """Attention as precision-weighted kriging, with the shrunken REML variance (math.md §1).

    Args:
        query: (B,H,T,C). key, value: (B,H,S,C).
        neighbour_precision: (B,S), λ̄_j > 0 where visible.
        visible: (B,T,S), true where position t may look at neighbour j.
        shrinkage_dof: ν0 > 0.
    """
    batch, heads, length, channels = query.shape
    weights_BHTS = np.zeros((batch, heads, length, key.shape[2]))
    mean_BTD = np.zeros((batch, length, heads * channels))
    variance_BTD = np.zeros((batch, length, heads * channels))
    sample_size_BHT = np.zeros((batch, heads, length))
    for b in range(batch):
        for h in range(heads):
            head = slice(h * channels, (h + 1) * channels)
            for t in range(length):
                seen = visible[b, t]
                if not seen.any():
                    continue
                logits = key[b, h, seen] @ query[b, h, t] / math.sqrt(channels)
                attention = np.exp(logits - logits.max())
                attention /= attention.sum()
                precision = neighbour_precision[b, seen]
                # α̃_tj = α_tj λ̄_j / Σ_j' α_tj' λ̄_j'
                weights = attention * precision / (attention * precision).sum()
                kriged_mean = weights @ value[b, h, seen]
                residual_variance = weights @ (value[b, h, seen] - kriged_mean) ** 2
                sample_size = 1.0 / (weights**2).sum()
                kriging_prior_variance = (weights / precision).sum()
                weights_BHTS[b, h, t, seen] = weights
                mean_BTD[b, t, head] = kriged_mean
                sample_size_BHT[b, h, t] = sample_size
                # σ̂²_t = (ν0 σ0²_t + n_t s_t) / (ν0 + n_t − 1)
                variance_BTD[b, t, head] = (
                    shrinkage_dof * kriging_prior_variance + sample_size * residual_variance
                ) / (shrinkage_dof + sample_size - 1.0)
    return Kriged(weights_BHTS, mean_BTD, variance_BTD, sample_size_BHT)


def sandwich(
    query: Array,
    key: Array,
    value: Array,
    bias: Array,
    neighbour_precision: Array,
    visible: NDArray[np.bool_],
    attention_norm: float,
    shrinkage_dof: float = 1.0,
    least_weight: float = 1e-20,
) -> SandwichField:
    """Unnormalised attention and the sandwich estimator of its variance (math.md, "HSTU").

    Args:
        query: (B,H,T,C). key, value: (B,H,S,C).
        bias: (B,T,S), added to the logits of every head.
        neighbour_precision: (B,S), λ̄_j > 0 where visible.
        visible: (B,T,S), true where position t may look at neighbour j.
        attention_norm: > 0.
        shrinkage_dof: ν0 > 0.
        least_weight: a head whose Σw² is below it has no visible neighbour.
    """
    batch, heads, length, channels = query.shape
    weights_BHTS = np.zeros((batch, heads, length, key.shape[2]))
    mean_BTD = np.zeros((batch, length, heads * channels))
    variance_BTD = np.zeros((batch, length, heads * channels))
    sample_size_BHT = np.zeros((batch, heads, length))
    for b in range(batch):
        for h in range(heads):
            head = slice(h * channels, (h + 1) * channels)
            for t in range(length):
                seen = visible[b, t]
                if not seen.any():
                    continue
                attention = silu(key[b, h, seen] @ query[b, h, t] + bias[b, t, seen]) / attention_norm
                precision = neighbour_precision[b, seen]
                # w_tj = a_tj λ̄_j / m_t
                weights = attention * precision / precision.mean()
                weights_BHTS[b, h, t, seen] = weights
                mean_BTD[b, t, head] = weights @ value[b, h, seen]
                if (weights**2).sum() < least_weight:
                    continue
                share = np.abs(weights) / np.abs(weights).sum()
                centre = share @ value[b, h, seen]
                sample_size = np.abs(weights).sum() ** 2 / (weights**2).sum()
                kriging_prior_variance = (share / precision).sum()
                sandwich_variance = weights**2 @ (value[b, h, seen] - centre) ** 2 / (weights**2).sum()
                sample_size_BHT[b, h, t] = sample_size
                # σ̂²_t = (ν0 σ0²_t + n_t S_t) / (ν0 + n_t − 1)
                variance_BTD[b, t, head] = (
                    shrinkage_dof * kriging_prior_variance + sample_size * sandwich_variance
                ) / (shrinkage_dof + sample_size - 1.0)
    return SandwichField(weights_BHTS, mean_BTD, variance_BTD, sample_size_BHT)


def observation_precision(reml_variance: Array, effective_sample_size: Array, output_weight: Array) -> Array:
    """λ^obs = 1/σ̂²_out, σ̂²_out,d = Σ_k W²_dk σ̂²_k / Σ_k W²_dk (math.md §1); 0 with no visible neighbour.

    Args:
        reml_variance: (B,T,D). effective_sample_size: (B,H,T). output_weight: (D,D), out = W x.
    """
    batch, length, width = reml_variance.shape
    precision_BTD = np.zeros((batch, length, width))
    for b in range(batch):
        for t in range(length):
            if (effective_sample_size[b, :, t] == 0.0).any():
                continue
            for d in range(width):
                share = output_weight[d] ** 2 / (output_weight[d] ** 2).sum()
                precision_BTD[b, t, d] = 1.0 / (share @ reml_variance[b, t])
    return precision_BTD


# --- math.md §2, "Update" -----------------------------------------------------------------------------------


def update(prior_mean: Array, prior_precision: Array, innovation: Array, observation_precision: Array) -> Posterior:
    """K = λ^obs/(λ + λ^obs); h' = h + K∘innovation; λ' = λ + λ^obs (math.md §2). All of one shape."""
    total = prior_precision + observation_precision
    gain = np.divide(observation_precision, total, out=np.zeros_like(total), where=total > 0)
    return Posterior(gain, prior_mean + gain * innovation, total)


# --- math.md §3, "Predict" ----------------------------------------------------------------------------------


def feed_forward(x: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> Array:
    """W2·GELU(W1 x + b1) + b2 over the last dimension."""
    return gelu(x @ w1.T + b1) @ w2.T + b2


def dynamics_jacobian(
    x: Array, ln_weight: Array, ln_bias: Array, ln_eps: float, w1: Array, b1: Array, w2: Array
) -> Array:
    """∂FFN(LN(x))/∂x at one state x (D,), the whole (D,D) matrix W2·diag(GELU')·W1·∂LN/∂x (math.md §3)."""
    width = x.shape[0]
    centring = np.eye(width) - np.ones((width, width)) / width
    centred = centring @ x
    deviation = math.sqrt(centred @ centred / width + ln_eps)
    # Quotient rule on centred/deviation, with ∂deviation/∂x = centredᵀ·centring/(D·deviation).
    norm_jacobian = centring / deviation - np.outer(centred, centred @ centring) / (width * deviation**3)
    pre_activation = w1 @ layer_norm(x, ln_weight, ln_bias, ln_eps) + b1
    return w2 @ np.diag(gelu_derivative(pre_activation)) @ w1 @ np.diag(ln_weight) @ norm_jacobian


def predict(
    mean: Array,
    precision: Array,
    ln_weight: Array,
    ln_bias: Array,
    ln_eps: float,
    w1: Array,
    b1: Array,
    w2: Array,
    b2: Array,
    process_noise_variance: Array,
) -> Gaussian:
    """h'' = h' + FFN(LN(h')); λ'' = ((1+J)²/λ' + Q)⁻¹ with J = diag ∂FFN(LN(h'))/∂h' (math.md §3).

    Args:
        mean, precision: (B,T,D); a precision of 0 stays 0.
        w1: (K,D). w2: (D,K). process_noise_variance: Q (D,), ≥ 0.
    """
    batch, length, _ = mean.shape
    predicted_mean = np.zeros_like(mean)
    predicted_precision = np.zeros_like(precision)
    for b in range(batch):
        for t in range(length):
            state = mean[b, t]
            normed = layer_norm(state, ln_weight, ln_bias, ln_eps)
            predicted_mean[b, t] = state + feed_forward(normed, w1, b1, w2, b2)
            jacobian_diag = np.diag(dynamics_jacobian(state, ln_weight, ln_bias, ln_eps, w1, b1, w2))
            for d in range(state.shape[0]):
                if precision[b, t, d] > 0:
                    spread = (1.0 + jacobian_diag[d]) ** 2 / precision[b, t, d]
                    predicted_precision[b, t, d] = 1.0 / (spread + process_noise_variance[d])
    return Gaussian(predicted_mean, predicted_precision)


# --- math.md, "BERT4Rec": the steps with a LayerNorm behind each ----------------------------------------------


def normalise(state: Gaussian, ln_weight: Array, ln_bias: Array, ln_eps: float = LN_EPS) -> Gaussian:
    """LN as an affine map with m and s held fixed: λ ← λ·s²/(γ² + 1e-6) ("BERT4Rec"). Of (…,D)."""
    deviation_squared = ((state.mean - state.mean.mean(axis=-1, keepdims=True)) ** 2).mean(axis=-1, keepdims=True)
    precision = state.precision * (deviation_squared + ln_eps) / (ln_weight**2 + 1e-6)
    return Gaussian(layer_norm(state.mean, ln_weight, ln_bias, ln_eps), precision)


def predict_post_norm(
    mean: Array,
    precision: Array,
    ln_weight: Array,
    ln_bias: Array,
    ln_eps: float,
    w1: Array,
    b1: Array,
    w2: Array,
    b2: Array,
    process_noise_variance: Array,
) -> Gaussian:
    """h'' = LN(h' + FFN(h')); λ'' = LN of ((1+J)²/λ' + Q)⁻¹ with J = diag ∂FFN(h')/∂h' ("BERT4Rec").

    Arguments as in `predict`, but the precision is > 0.
    """
    batch, length, _ = mean.shape
    moved_precision = np.zeros_like(precision)
    for b in range(batch):
        for t in range(length):
            slope = np.diag(gelu_derivative(w1 @ mean[b, t] + b1))
            jacobian_diag = np.diag(w2 @ slope @ w1)
            moved_precision[b, t] = 1.0 / ((1.0 + jacobian_diag) ** 2 / precision[b, t] + process_noise_variance)
    moved = Gaussian(mean + feed_forward(mean, w1, b1, w2, b2), moved_precision)
    return normalise(moved, ln_weight, ln_bias, ln_eps)


# --- the network: embed, then (observe, update, predict) per layer ------------------------------------------


def layer_params(params: Params, layer: int) -> dict[str, Array]:
    """The parameters of one layer, without their prefix."""
    prefix = f"layers.{layer}."
    return {name.removeprefix(prefix): array for name, array in params.items() if name.startswith(prefix)}


def num_layers(params: Params) -> int:
    """How many layers the dict holds."""
    return len({name.split(".")[1] for name in params if name.startswith("layers.")})


def row_length(items: NDArray[np.int64]) -> int:
    """Number of real positions of one right-padded row (T,)."""
    length = int((items != PAD).sum())
    if (items[:length] == PAD).any():
        raise ValueError(f"padding must lie at the right end of a row, got {items.tolist()}")
    return length


def embed(params: Params, items: NDArray[np.int64]) -> Array:
    """Token embedding·√D + position embedding for one unpadded row (T,). Returns (1,T,D)."""
    width = params["token_embedding"].shape[1]
    tokens_TD = params["token_embedding"][items] * math.sqrt(width)
    return (tokens_TD + params["position_embedding"][: len(items)])[None]


def split_heads(x_BTD: Array, num_heads: int) -> Array:
    """(B,T,D) → (B,H,T,C): head h owns the dimensions hC … (h+1)C − 1."""
    batch, length, width = x_BTD.shape
    return x_BTD.reshape(batch, length, num_heads, width // num_heads).transpose(0, 2, 1, 3)


def attention_inputs(layer: Params, mean_BTD: Array, num_heads: int, ln_eps: float) -> tuple[Array, Array, Array]:
    """query, key, value (B,H,T,C) from the normalised state (Pre-LN)."""
    normed = layer_norm(mean_BTD, layer["attention_norm_weight"], layer["attention_norm_bias"], ln_eps)
    query, key, value = (
        split_heads(normed @ layer[f"{name}_weight"].T + layer[f"{name}_bias"], num_heads)
        for name in ("query", "key", "value")
    )
    return query, key, value


def filtering_block(
    layer: Params,
    prior: Gaussian,
    visible: NDArray[np.bool_],
    num_heads: int,
    ln_eps: float,
    shrinkage_dof: float,
) -> Gaussian:
    """Observe, update, predict: one layer with filtering on (math.md §1–3)."""
    query, key, value = attention_inputs(layer, prior.mean, num_heads, ln_eps)
    neighbour_precision = prior.precision.mean(axis=-1)
    field = krige(query, key, value, neighbour_precision, visible, shrinkage_dof)
    innovation = field.kriged_mean @ layer["output_weight"].T + layer["output_bias"]
    observed = observation_precision(field.reml_variance, field.effective_sample_size, layer["output_weight"])
    posterior = update(prior.mean, prior.precision, innovation, observed)
    return predict(
        posterior.mean,
        posterior.precision,
        layer["ffn_norm_weight"],
        layer["ffn_norm_bias"],
        ln_eps,
        layer["w1"],
        layer["b1"],
        layer["w2"],
        layer["b2"],
        softplus(layer["process_noise_raw"]),
    )


def plain_block(layer: Params, mean_BTD: Array, num_heads: int, ln_eps: float) -> Array:
    """One ordinary causal Pre-LN transformer block: softmax attention, residual, feed-forward, residual."""
    query, key, value = attention_inputs(layer, mean_BTD, num_heads, ln_eps)
    batch, heads, length, channels = query.shape
    attended = np.zeros_like(mean_BTD)
    for b in range(batch):
        for h in range(heads):
            for t in range(length):
                logits = key[b, h, : t + 1] @ query[b, h, t] / math.sqrt(channels)
                attention = np.exp(logits - logits.max())
                attention /= attention.sum()
                attended[b, t, h * channels : (h + 1) * channels] = attention @ value[b, h, : t + 1]
    hidden = mean_BTD + attended @ layer["output_weight"].T + layer["output_bias"]
    normed = layer_norm(hidden, layer["ffn_norm_weight"], layer["ffn_norm_bias"], ln_eps)
    return hidden + feed_forward(normed, layer["w1"], layer["b1"], layer["w2"], layer["b2"])


def forward_positions(
    params: Params,
    items: NDArray[np.int64],
    weights: Array,
    num_heads: int,
    ln_eps: float = LN_EPS,
    shrinkage_dof: float = 1.0,
) -> Gaussian:
    """BFT-SASRec before LN_f, at every position: (B,T,D) mean and precision, both 0 at padding.

    Each row is run alone and without its padding, which is what "padding takes no attention mass" means.

    Args:
        items: (B,T) token numbers, BOS first, right-padded with 0.
        weights: (B,T) event weights w > 0; ignored at padding; 1 at BOS.
    """
    width = params["token_embedding"].shape[1]
    tau_V = item_precision(
        float(params["precision_intercept"]),
        float(params["precision_slope"]),
        params["training_count"],
        params["precision_offset"],
    )
    mean_BTD = np.zeros((*items.shape, width))
    precision_BTD = np.zeros((*items.shape, width))
    for b in range(items.shape[0]):
        length = row_length(items[b])
        if length == 0:
            continue
        row = items[b : b + 1, :length]
        state = Gaussian(embed(params, row[0]), initial_precision(tau_V, row, weights[b : b + 1, :length], width))
        causal = np.tril(np.ones((1, length, length), dtype=bool))
        for layer in range(num_layers(params)):
            state = filtering_block(layer_params(params, layer), state, causal, num_heads, ln_eps, shrinkage_dof)
        mean_BTD[b, :length], precision_BTD[b, :length] = state.mean[0], state.precision[0]
    return Gaussian(mean_BTD, precision_BTD)


def forward(
    params: Params,
    items: NDArray[np.int64],
    weights: Array,
    num_heads: int,
    ln_eps: float = LN_EPS,
    shrinkage_dof: float = 1.0,
) -> Gaussian:
    """`forward_positions` at the last real position: h_T and λ_T, (B,D) each; 0 for a row of padding only."""
    states = forward_positions(params, items, weights, num_heads, ln_eps, shrinkage_dof)
    return Gaussian(last_real(states.mean, items), last_real(states.precision, items))


def plain_forward_positions(params: Params, items: NDArray[np.int64], num_heads: int, ln_eps: float = LN_EPS) -> Array:
    """Plain Pre-LN SASRec ("The switch": off) before LN_f, at every position: (B,T,D), 0 at padding."""
    hidden_BTD = np.zeros((*items.shape, params["token_embedding"].shape[1]))
    for b in range(items.shape[0]):
        length = row_length(items[b])
        if length == 0:
            continue
        hidden = embed(params, items[b, :length])
        for layer in range(num_layers(params)):
            hidden = plain_block(layer_params(params, layer), hidden, num_heads, ln_eps)
        hidden_BTD[b, :length] = hidden[0]
    return hidden_BTD


def plain_forward(params: Params, items: NDArray[np.int64], num_heads: int, ln_eps: float = LN_EPS) -> Array:
    """`plain_forward_positions` at the last real position, (B,D)."""
    return last_real(plain_forward_positions(params, items, num_heads, ln_eps), items)


# --- BERT4Rec: embed, LN, then (observe, update, LN, predict, LN) per layer ------------------------------------


def embed_normalised(params: Params, items: NDArray[np.int64], ln_eps: float) -> Array:
    """LN(token embedding·√D + position embedding) for one unpadded row (T,). Returns (1,T,D)."""
    return layer_norm(embed(params, items), params["embedding_norm_weight"], params["embedding_norm_bias"], ln_eps)


def project_heads(layer: Params, mean_BTD: Array, num_heads: int) -> tuple[Array, Array, Array]:
    """query, key, value (B,H,T,C) of the state itself (Post-LN)."""
    query, key, value = (
        split_heads(mean_BTD @ layer[f"{name}_weight"].T + layer[f"{name}_bias"], num_heads)
        for name in ("query", "key", "value")
    )
    return query, key, value


def post_norm_filtering_block(
    layer: Params, prior: Gaussian, num_heads: int, ln_eps: float, shrinkage_dof: float
) -> Gaussian:
    """One layer of BERT4Rec with filtering on, on one row without padding, where every position sees every one."""
    query, key, value = project_heads(layer, prior.mean, num_heads)
    length = prior.mean.shape[1]
    field = krige(query, key, value, prior.precision.mean(-1), np.ones((1, length, length), bool), shrinkage_dof)
    innovation = field.kriged_mean @ layer["output_weight"].T + layer["output_bias"]
    observed = observation_precision(field.reml_variance, field.effective_sample_size, layer["output_weight"])
    posterior = update(prior.mean, prior.precision, innovation, observed)
    normalised = normalise(
        Gaussian(posterior.mean, posterior.precision),
        layer["attention_norm_weight"],
        layer["attention_norm_bias"],
        ln_eps,
    )
    return predict_post_norm(
        normalised.mean,
        normalised.precision,
        layer["ffn_norm_weight"],
        layer["ffn_norm_bias"],
        ln_eps,
        layer["w1"],
        layer["b1"],
        layer["w2"],
        layer["b2"],
        softplus(layer["process_noise_raw"]),
    )


def post_norm_plain_block(layer: Params, mean_BTD: Array, num_heads: int, ln_eps: float) -> Array:
    """One ordinary bidirectional Post-LN transformer block on rows without padding."""
    query, key, value = project_heads(layer, mean_BTD, num_heads)
    batch, heads, length, channels = query.shape
    attended = np.zeros_like(mean_BTD)
    for b in range(batch):
        for h in range(heads):
            for t in range(length):
                logits = key[b, h] @ query[b, h, t] / math.sqrt(channels)
                attention = np.exp(logits - logits.max())
                attended[b, t, h * channels : (h + 1) * channels] = attention @ value[b, h] / attention.sum()
    hidden = layer_norm(
        mean_BTD + attended @ layer["output_weight"].T + layer["output_bias"],
        layer["attention_norm_weight"],
        layer["attention_norm_bias"],
        ln_eps,
    )
    moved = hidden + feed_forward(hidden, layer["w1"], layer["b1"], layer["w2"], layer["b2"])
    return layer_norm(moved, layer["ffn_norm_weight"], layer["ffn_norm_bias"], ln_eps)


def bert4rec_positions(
    params: Params,
    items: NDArray[np.int64],
    weights: Array,
    num_heads: int,
    ln_eps: float = LN_EPS,
    shrinkage_dof: float = 1.0,
) -> Gaussian:
    """BFT-BERT4Rec before LN_f, at every position; arguments and result as in `forward_positions`."""
    width = params["token_embedding"].shape[1]
    tau_V = item_precision(
        float(params["precision_intercept"]),
        float(params["precision_slope"]),
        params["training_count"],
        params["precision_offset"],
    )
    mean_BTD = np.zeros((*items.shape, width))
    precision_BTD = np.zeros((*items.shape, width))
    for b in range(items.shape[0]):
        length = row_length(items[b])
        if length == 0:
            continue
        row = items[b : b + 1, :length]
        mean = embed_normalised(params, row[0], ln_eps)
        state = Gaussian(mean, initial_precision(tau_V, row, weights[b : b + 1, :length], width))
        for layer in range(num_layers(params)):
            state = post_norm_filtering_block(layer_params(params, layer), state, num_heads, ln_eps, shrinkage_dof)
        mean_BTD[b, :length], precision_BTD[b, :length] = state.mean[0], state.precision[0]
    return Gaussian(mean_BTD, precision_BTD)


def plain_bert4rec_positions(params: Params, items: NDArray[np.int64], num_heads: int, ln_eps: float = LN_EPS) -> Array:
    """Plain BERT4Rec ("The switch": off) before LN_f, at every position: (B,T,D), 0 at padding."""
    hidden_BTD = np.zeros((*items.shape, params["token_embedding"].shape[1]))
    for b in range(items.shape[0]):
        length = row_length(items[b])
        if length == 0:
            continue
        hidden = embed_normalised(params, items[b, :length], ln_eps)
        for layer in range(num_layers(params)):
            hidden = post_norm_plain_block(layer_params(params, layer), hidden, num_heads, ln_eps)
        hidden_BTD[b, :length] = hidden[0]
    return hidden_BTD


def with_query(items: NDArray[np.int64], weights: Array) -> tuple[NDArray[np.int64], Array]:
    """Each row (T,) with a MASK of weight 1 behind its last event, (T+1,); a row of padding only stays one."""
    batch, length = items.shape
    items_with, weights_with = np.zeros((batch, length + 1), dtype=np.int64), np.ones((batch, length + 1))
    for b in range(batch):
        events = row_length(items[b])
        items_with[b, :events], weights_with[b, :events] = items[b, :events], weights[b, :events]
        if events > 0:
            items_with[b, events] = MASK
    return items_with, weights_with


def last_real(values_BTD: Array, items: NDArray[np.int64]) -> Array:
    """The last position that is not padding, (B,D); 0 for a row of padding only."""
    last_BD = np.zeros((values_BTD.shape[0], values_BTD.shape[2]))
    for b in range(values_BTD.shape[0]):
        length = row_length(items[b])
        if length > 0:
            last_BD[b] = values_BTD[b, length - 1]
    return last_BD


# --- HSTU: embed, then (observe, update, process noise) per layer --------------------------------------------


def time_bucket(gap_s: float, num_buckets: int) -> int:
    """How often a difference of at least one second can be divided by 1.35, at most num_buckets − 1."""
    bucket = 0
    while bucket < num_buckets - 1 and abs(gap_s) >= 1.35 ** (bucket + 1):
        bucket += 1
    return bucket


def hstu_bias(layer: Params, timestamps: Array) -> Array:
    """Relative position and relative time of one unpadded row (T,), NaN for no time; later positions get 0. (1,T,T)."""
    length, num_buckets = len(timestamps), len(layer["time_bias"]) - 1
    bias = np.zeros((1, length, length))
    for t in range(length):
        for j in range(t + 1):
            gap_s = timestamps[t] - timestamps[j]
            bucket = num_buckets if math.isnan(gap_s) else time_bucket(gap_s, num_buckets)
            bias[0, t, j] = layer["position_bias"][t - j] + layer["time_bias"][bucket]
    return bias


def hstu_projections(layer: Params, mean_BTD: Array) -> dict[str, Array]:
    """SiLU of linear maps of the normalised state: gate, value, query, key, each (B,T,D)."""
    width = mean_BTD.shape[2]
    normed = layer_norm(mean_BTD, np.ones(width), np.zeros(width), HSTU_LN_EPS)
    return {name: silu(normed @ layer[f"{name}_weight"].T) for name in ("gate", "value", "query", "key")}


def hstu_innovation(layer: Params, gate_BTD: Array, attended_BTD: Array) -> Array:
    """W_o (U∘LN(AV)) + b_o."""
    width = gate_BTD.shape[2]
    normed = layer_norm(attended_BTD, np.ones(width), np.zeros(width), HSTU_LN_EPS)
    return (gate_BTD * normed) @ layer["output_weight"].T + layer["output_bias"]


def hstu_filtering_block(
    layer: Params, prior: Gaussian, bias: Array, num_heads: int, attention_norm: float, shrinkage_dof: float
) -> Gaussian:
    """One causal HSTU layer with filtering on; there is no feed-forward: J = 0."""
    parts = hstu_projections(layer, prior.mean)
    query, key, value = (split_heads(parts[name], num_heads) for name in ("query", "key", "value"))
    visible = np.tril(np.ones(bias.shape, dtype=bool))
    neighbour_precision = prior.precision.mean(axis=-1)
    field = sandwich(query, key, value, bias, neighbour_precision, visible, attention_norm, shrinkage_dof)
    observed = observation_precision(field.variance, field.effective_sample_size, layer["output_weight"])
    innovation = hstu_innovation(layer, parts["gate"], field.mean)
    posterior = update(prior.mean, prior.precision, innovation, observed)
    return Gaussian(posterior.mean, 1.0 / (1.0 / posterior.precision + softplus(layer["process_noise_raw"])))


def hstu_plain_block(layer: Params, mean_BTD: Array, bias: Array, num_heads: int, attention_norm: float) -> Array:
    """One ordinary causal HSTU layer (Zhai et al. 2024): pointwise attention, norm, gate, residual."""
    parts = hstu_projections(layer, mean_BTD)
    query, key, value = (split_heads(parts[name], num_heads) for name in ("query", "key", "value"))
    batch, heads, length, channels = query.shape
    attended = np.zeros_like(mean_BTD)
    for b in range(batch):
        for h in range(heads):
            for t in range(length):
                for j in range(t + 1):
                    attention = silu(query[b, h, t] @ key[b, h, j] + bias[b, t, j]) / attention_norm
                    attended[b, t, h * channels : (h + 1) * channels] += attention * value[b, h, j]
    return mean_BTD + hstu_innovation(layer, parts["gate"], attended)


def hstu_forward_positions(
    params: Params,
    items: NDArray[np.int64],
    weights: Array,
    timestamps: Array,
    num_heads: int,
    attention_norm: float,
    shrinkage_dof: float = 1.0,
) -> Gaussian:
    """BFT-HSTU at every position: (B,T,D) mean and precision, both 0 at padding.

    Args:
        items, weights: as in `forward_positions`.
        timestamps: (B,T) seconds, NaN for no time; ignored at padding.
        attention_norm: > 0.
    """
    width = params["token_embedding"].shape[1]
    tau_V = item_precision(
        float(params["precision_intercept"]),
        float(params["precision_slope"]),
        params["training_count"],
        params["precision_offset"],
    )
    mean_BTD = np.zeros((*items.shape, width))
    precision_BTD = np.zeros((*items.shape, width))
    for b in range(items.shape[0]):
        length = row_length(items[b])
        if length == 0:
            continue
        row = items[b : b + 1, :length]
        embedded = params["token_embedding"][row] * math.sqrt(width)
        state = Gaussian(embedded, initial_precision(tau_V, row, weights[b : b + 1, :length], width))
        for number in range(num_layers(params)):
            layer = layer_params(params, number)
            bias = hstu_bias(layer, timestamps[b, :length])
            state = hstu_filtering_block(layer, state, bias, num_heads, attention_norm, shrinkage_dof)
        mean_BTD[b, :length], precision_BTD[b, :length] = state.mean[0], state.precision[0]
    return Gaussian(mean_BTD, precision_BTD)


def hstu_plain_forward_positions(
    params: Params, items: NDArray[np.int64], timestamps: Array, num_heads: int, attention_norm: float
) -> Array:
    """Plain HSTU ("The switch": off) at every position: (B,T,D), 0 at padding."""
    width = params["token_embedding"].shape[1]
    hidden_BTD = np.zeros((*items.shape, width))
    for b in range(items.shape[0]):
        length = row_length(items[b])
        if length == 0:
            continue
        hidden = params["token_embedding"][items[b : b + 1, :length]] * math.sqrt(width)
        for number in range(num_layers(params)):
            layer = layer_params(params, number)
            bias = hstu_bias(layer, timestamps[b, :length])
            hidden = hstu_plain_block(layer, hidden, bias, num_heads, attention_norm)
        hidden_BTD[b, :length] = hidden[0]
    return hidden_BTD


# --- math.md, "Scoring and its uncertainty" -----------------------------------------------------------------


def cosine_final_state(mean: Array, precision: Array, temperature: float) -> FinalState:
    """HSTU: z = h/(κ‖h‖), ρ_d = 1/(κ²‖h‖²λ_d), for one user (D,) or many (…,D)."""
    length = np.sqrt((mean**2).sum(axis=-1, keepdims=True))
    return FinalState(mean / (temperature * length), 1.0 / (temperature**2 * length**2 * precision))


def final_state(mean: Array, precision: Array, ln_weight: Array, ln_bias: Array, ln_eps: float = LN_EPS) -> FinalState:
    """z = LN_f(h), ρ_d = γ_d²/(s²·λ_d), for one user (D,) or many (…,D); s as in `layer_norm`."""
    deviation_squared = mean.var(axis=-1, keepdims=True) + ln_eps
    return FinalState(layer_norm(mean, ln_weight, ln_bias, ln_eps), ln_weight**2 / (deviation_squared * precision))


def candidate_variance(training_count: Array, intercept: float, slope_raw: float) -> Array:
    """r_i = exp(a' − softplus(b')·log(1 + n_i)): the fewer the uses, the wider."""
    return np.exp(intercept - softplus(slope_raw) * np.log1p(training_count))


def score_mean(user: Array, item_embedding: Array) -> Array:
    """μ_i = ⟨z, e_i⟩ for one user (D,) and items (N,D)."""
    return item_embedding @ user


def score_variance(user: Array, user_variance: Array, item_embedding: Array, item_variance: Array) -> Array:
    """v_i = Σ_d e_{i,d}² ρ_d + (r_i/D)·Σ_d (z_d² + ρ_d), (N,)."""
    from_user = item_embedding**2 @ user_variance
    from_candidate = item_variance * (user**2 + user_variance).sum() / user.shape[0]
    return from_user + from_candidate


def predictive_logit(means: Array, catalogue_mean: float, variances: Array, shrinkage: float) -> Array:
    """(μ_i − m)/sqrt(1 + c·v_i): uncertainty pulls a score towards m = ⟨z, ē⟩."""
    return (means - catalogue_mean) / np.sqrt(1.0 + shrinkage * variances)


def catalogue_probability(logit: Array, temperature: float, seen: NDArray[np.bool_]) -> Array:
    """softmax(logit/T) over the items that are not seen; a seen item gets 0. At least one must be unseen."""
    if seen.all():
        raise ValueError("every item of the catalogue is seen: no probability can be given")
    scaled = logit / temperature
    mass = np.where(seen, 0.0, np.exp(scaled - scaled[~seen].max(), where=~seen, out=np.zeros_like(scaled)))
    return mass / mass.sum()


def entropy(probability: Array) -> float:
    """−Σ p log p in nats; an item of probability 0 adds nothing."""
    positive = probability[probability > 0]
    return float(-(positive * np.log(positive)).sum())


def reliability(item_embedding: Array, norm_weight: Array, precision: Array, bos_precision: Array) -> Array:
    """clip(1 − Σ_d e²γ²/λ / Σ_d e²γ²/λ_BOS, 0, 1) per item: share of prior user variance that history resolved."""
    weight = (item_embedding * norm_weight) ** 2
    remaining = (weight @ (1 / precision)) / (weight @ (1 / bos_precision))
    return np.clip(1.0 - remaining, 0.0, 1.0)


def score_catalogue(
    params: Params,
    mean: Array,
    precision: Array,
    seen: NDArray[np.bool_],
    temperature: float = 1.0,
    ln_eps: float = LN_EPS,
) -> CatalogueScores:
    """Every item for one user whose last state is `mean`, `precision` (D,); `seen` is (N,)."""
    user = final_state(mean, precision, params["final_norm_weight"], params["final_norm_bias"], ln_eps)
    return score_items(params, user, params["token_embedding"][FIRST_ITEM:], seen, temperature)


def cosine_score_catalogue(
    params: Params,
    mean: Array,
    precision: Array,
    cosine_temperature: float,
    seen: NDArray[np.bool_],
    temperature: float = 1.0,
) -> CatalogueScores:
    """`score_catalogue` for HSTU: unit vectors on both sides, κ = `cosine_temperature`."""
    items = params["token_embedding"][FIRST_ITEM:]
    unit_items = items / np.sqrt((items**2).sum(axis=1, keepdims=True))
    return score_items(params, cosine_final_state(mean, precision, cosine_temperature), unit_items, seen, temperature)


def score_items(
    params: Params, state: FinalState, item_embedding: Array, seen: NDArray[np.bool_], temperature: float
) -> CatalogueScores:
    """All items (N,D), as the head reads them, for one user."""
    user, user_variance = state
    item_variance = candidate_variance(
        params["training_count"][FIRST_ITEM:],
        float(params["candidate_intercept"]),
        float(params["candidate_slope_raw"]),
    )
    means = score_mean(user, item_embedding)
    variances = score_variance(user, user_variance, item_embedding, item_variance)
    catalogue_mean = float(user @ item_embedding.mean(axis=0))
    logit = predictive_logit(means, catalogue_mean, variances, float(softplus(params["score_shrinkage_raw"])))
    probability = catalogue_probability(logit, temperature, seen)
    return CatalogueScores(means, variances, logit, probability, entropy(probability))
