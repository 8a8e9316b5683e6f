"""The ONNX domain `bft`: each filtering step as a node with a body in standard operators (architecture.md).

A plain ONNX Runtime runs the bodies; where a native kernel for a node is registered, it runs that instead,
from the same file. `EmittedSteps` is what an export passes to the model in place of `model.filtering`.

Shape letters as in `model.filtering`; V = FIRST_ITEM + N rows of the item table.
"""

import onnx
import torch
from onnxscript import script
from onnxscript.onnx_opset import opset21 as op
from onnxscript.values import Opset
from torch import Tensor

from model.filtering import Dynamics, Gaussian, KrigedField, Posterior

DOMAIN = "bft"
VERSION = 1
BFT = Opset(DOMAIN, VERSION)


@script(BFT, default_opset=op)
def KrigingAttention(query, key, value, neighbour_precision, visible, shrinkage_dof: float):
    """`filtering.krige` → mean (B,T,D), variance (B,T,D), effective_sample_size (B,H,T).

    The (B,H,T,S) weights are read as few times as can be: all three sums over neighbours are one product.
    """
    num_channels = op.Shape(query, start=3, end=4)
    mask = op.CastLike(visible, query)
    hidden = op.ReduceMax(mask, [1], keepdims=0) == 0.0
    finite_precision = op.Where(hidden, 1.0, neighbour_precision)
    bias = op.Where(visible, op.Unsqueeze(op.Log(finite_precision), [1]), -1e30)
    scaled_query = query / op.Sqrt(op.CastLike(num_channels, query))
    logits = op.MatMul(scaled_query, op.Transpose(key, perm=[0, 1, 3, 2])) + op.Unsqueeze(bias, [1])
    # Uniform where nothing is visible: `seen` replaces what comes of it.
    weights = op.Softmax(logits, axis=-1)
    seen = op.Unsqueeze(op.ReduceMax(mask, [2], keepdims=1), [1]) > 0.0

    neighbour_variance = op.Unsqueeze(1.0 / finite_precision, [1, 3]) + 0.0 * op.Slice(value, [0], [1], [3])
    sums = op.MatMul(weights, op.Concat(value, value * value, neighbour_variance, axis=3))
    sizes = op.Concat(num_channels, num_channels, op.Constant(value_ints=[1]), axis=0)
    kriged_mean, mean_square, kriging_prior_variance = op.Split(sums, sizes, axis=3)
    residual_variance = op.Max(mean_square - kriged_mean * kriged_mean, 0.0)
    n = 1.0 / op.ReduceSumSquare(weights, [3], keepdims=1)
    dof = op.CastLike(op.Constant(value_float=shrinkage_dof), query)
    reml = (dof * kriging_prior_variance + n * residual_variance) / (dof + n - 1.0)

    mean = op.Reshape(op.Transpose(op.Where(seen, kriged_mean, 0.0), perm=[0, 2, 1, 3]), [0, 0, -1])
    variance = op.Reshape(op.Transpose(op.Where(seen, reml, 1.0), perm=[0, 2, 1, 3]), [0, 0, -1])
    effective_sample_size = op.Squeeze(op.Where(seen, n, 0.0), [3])
    return mean, variance, effective_sample_size


@script(BFT, default_opset=op)
def SandwichAttention(
    query, key, value, bias, neighbour_precision, visible, attention_norm: float, shrinkage_dof: float
):
    """`filtering.sandwich` → mean (B,T,D), variance (B,T,D), effective_sample_size (B,H,T).

    As few passes over (B,H,T,S) as can be: the sums of |w| are one product, those of w² another.
    """
    num_channels = op.Shape(query, start=3, end=4)
    mask = op.CastLike(visible, query)
    hidden = op.ReduceMax(mask, [1], keepdims=0) == 0.0
    finite_precision = op.Where(hidden, 1.0, neighbour_precision)
    count = op.ReduceSum(mask, [2], keepdims=1)
    total_precision = op.MatMul(mask, op.Unsqueeze(finite_precision, [2]))
    norm = op.CastLike(op.Constant(value_float=attention_norm), query)
    relative = op.Unsqueeze(finite_precision, [1]) * (count / (norm * op.Where(count > 0.0, total_precision, 1.0)))
    # SiLU(l) = −m/(1 + eᵐ) of m = −l. Not l·Sigmoid(l): a runtime's Sigmoid may be exact to 1e-8 only, which far
    # below 0 is all there is.
    negative_logits = op.MatMul(-query, op.Transpose(key, perm=[0, 1, 3, 2])) - op.Unsqueeze(bias, [1])
    weights = negative_logits / (1.0 + op.Exp(negative_logits)) * op.Unsqueeze(op.Where(visible, -relative, 0.0), [1])

    one = 1.0 + 0.0 * op.Slice(value, [0], [1], [3])
    neighbour_variance = op.Unsqueeze(1.0 / finite_precision, [1, 3]) * one
    last = op.Constant(value_ints=[1])
    magnitude_sums = op.MatMul(op.Abs(weights), op.Concat(value, neighbour_variance, one, axis=3))
    centre_sum, prior_sum, magnitude = op.Split(magnitude_sums, op.Concat(num_channels, last, last, axis=0), axis=3)
    square_sums = op.MatMul(weights * weights, op.Concat(value, value * value, one, axis=3))
    skew, spread, energy = op.Split(square_sums, op.Concat(num_channels, num_channels, last, axis=0), axis=3)
    seen = energy >= 1e-20
    finite_energy = op.Where(seen, energy, 1.0)
    total = op.Where(seen, magnitude, 1.0)
    n = total * total / finite_energy
    centre = centre_sum / total
    sandwich_variance = op.Max((spread - 2.0 * centre * skew) / finite_energy + centre * centre, 0.0)
    dof = op.CastLike(op.Constant(value_float=shrinkage_dof), query)
    shrunk = (dof * (prior_sum / total) + n * sandwich_variance) / (dof + n - 1.0)

    mean = op.Reshape(op.Transpose(op.MatMul(weights, value), perm=[0, 2, 1, 3]), [0, 0, -1])
    variance = op.Reshape(op.Transpose(op.Where(seen, shrunk, 1.0), perm=[0, 2, 1, 3]), [0, 0, -1])
    effective_sample_size = op.Squeeze(op.Where(seen, n, 0.0), [3])
    return mean, variance, effective_sample_size


@script(BFT, default_opset=op)
def KalmanUpdate(prior_mean, prior_precision, innovation, observation_precision):
    """`filtering.update` → mean, precision, gain, each (B,T,D)."""
    precision = prior_precision + observation_precision
    gain = observation_precision / precision
    mean = prior_mean + gain * innovation
    return mean, precision, gain


@script(BFT, default_opset=op)
def DynamicsPredict(mean, precision, ln_weight, ln_bias, w1, b1, w2, b2, process_noise_variance, ln_eps: float):
    """`filtering.predict` → mean, precision, each (B,T,D).

    As few passes over the (B,T,K) hidden units as can be. With u = hidden/√2 and g = (2/√π)·u·exp(−u²):

        GELU(hidden) = (u + u·erf u)/√2      2·GELU′(hidden) = 1 + erf u + g

    What is linear in x̂ leaves the hidden units: both products with W2 share x̂·(W2·W1γ)ᵀ/2. The parameters' own
    products are constants, which a runtime folds when it loads the graph.
    """
    centred = mean - op.ReduceMean(mean, [-1], keepdims=1)
    eps = op.CastLike(op.Constant(value_float=ln_eps), mean)
    scale = op.Sqrt(op.ReduceMean(centred * centred, [-1], keepdims=1) + eps)
    normalised = centred / scale

    w1_gamma = w1 * ln_weight * 0.7071067811865476
    w2_transposed = op.Transpose(w2, perm=[1, 0]) * 0.7071067811865476
    shift = (op.MatMul(w1, ln_bias) + b1) * 0.7071067811865476
    direct_map = w2_transposed * (w1_gamma - op.ReduceMean(w1_gamma, [-1], keepdims=1))
    linear = op.MatMul(normalised, op.MatMul(op.Transpose(w1_gamma, perm=[1, 0]), w2_transposed))

    sensitivity = op.MatMul(normalised, op.Transpose(w1_gamma, perm=[1, 0]))
    u = sensitivity + shift
    erf = op.Erf(u)
    drift = op.MatMul(u * erf, w2_transposed) + linear + (op.MatMul(shift, w2_transposed) + b2)
    slope = erf + u * op.Exp(0.1207822376352452 - u * u)
    direct = op.MatMul(slope, direct_map) + op.ReduceSum(direct_map, [0], keepdims=0)
    width = op.CastLike(op.Shape(mean, start=2, end=3), mean)
    through_scale = normalised / width * (op.MatMul(slope * sensitivity, w2_transposed) + linear)
    stretch = 1.0 + (direct - through_scale) / scale

    predicted_mean = mean + drift
    predicted_precision = 1.0 / (stretch * stretch / precision + process_noise_variance)
    return predicted_mean, predicted_precision


@script(BFT, default_opset=op)
def PostNormPredict(mean, precision, ln_weight, ln_bias, w1, b1, w2, b2, process_noise_variance, ln_eps: float):
    """`filtering.predict_post_norm` → mean, precision, each (B,T,D); the hidden units as in `DynamicsPredict`."""
    half_w1 = w1 * 0.7071067811865476
    w2_transposed = op.Transpose(w2, perm=[1, 0]) * 0.7071067811865476
    shift = b1 * 0.7071067811865476
    direct_map = w2_transposed * half_w1
    u = op.MatMul(mean, op.Transpose(half_w1, perm=[1, 0])) + shift
    erf = op.Erf(u)
    linear = op.MatMul(mean, op.MatMul(op.Transpose(half_w1, perm=[1, 0]), w2_transposed))
    moved = mean + (op.MatMul(u * erf, w2_transposed) + linear + (op.MatMul(shift, w2_transposed) + b2))

    slope = erf + u * op.Exp(0.1207822376352452 - u * u)
    stretch = 1.0 + (op.MatMul(slope, direct_map) + op.ReduceSum(direct_map, [0], keepdims=0))
    moved_variance = stretch * stretch / precision + process_noise_variance

    centred = moved - op.ReduceMean(moved, [-1], keepdims=1)
    eps = op.CastLike(op.Constant(value_float=ln_eps), mean)
    scale_squared = op.ReduceMean(centred * centred, [-1], keepdims=1) + eps
    predicted_mean = centred / op.Sqrt(scale_squared) * ln_weight + ln_bias
    predicted_precision = scale_squared / (moved_variance * (ln_weight * ln_weight + 1e-6))
    return predicted_mean, predicted_precision


@script(BFT, default_opset=op)
def GaussianTopK(
    mean, variance, items, candidate_variance, catalogue_mean, seen, blocked, k, temperature, variance_scale
):
    """Score every item, normalise over the unseen ones, list the k best (math.md, "Scoring").

    Inputs: readout `mean`, `variance` (B,D); `items` (V,D); `candidate_variance` (V,); `catalogue_mean` (D,);
    `seen` (B,S), item numbers outside the normaliser; `blocked` (B,X), item numbers outside the list;
    `k` (1,); `temperature` and `variance_scale` scalars.

    Outputs: per listed item (B,k) `numbers`, `logit` (−inf where fewer than k are left), `score_mean`,
    `score_variance`; per user (B,) `log_partition` of logit/T, `entropy` in nats; −inf and 0 for one who
    has seen everything.
    """
    all_mean = op.MatMul(mean, op.Transpose(items, perm=[1, 0]))
    energy = op.ReduceMean(mean * mean + variance, [-1], keepdims=1)
    state_variance = op.MatMul(variance, op.Transpose(items * items, perm=[1, 0]))
    all_variance = state_variance + energy * op.Unsqueeze(candidate_variance, [0])
    centre = op.Unsqueeze(op.MatMul(mean, catalogue_mean), [1])
    all_logit = (all_mean - centre) / op.Sqrt(1.0 + variance_scale * all_variance)

    never = op.CastLike(op.Constant(value_float=float("-inf")), mean)
    possible = op.ScatterElements(all_logit, seen, op.Expand(never, op.Shape(seen)), axis=1)
    scaled = possible / temperature
    highest = op.ReduceMax(scaled, [-1], keepdims=1)
    # A user who has seen everything has no finite logit: −inf − −inf would be NaN.
    highest = op.Where(op.IsInf(highest), 0.0, highest)
    # A floor: −inf times a weight of 0 would be NaN. exp(−1e4) is 0.
    shifted = op.Max(scaled - highest, -1e4)
    weight = op.Exp(shifted)
    total = op.ReduceSum(weight, [-1], keepdims=1)
    log_total = op.Log(total)
    mean_shift = op.ReduceSum(weight * shifted, [-1], keepdims=1) / total
    entropy = op.Squeeze(op.Where(total > 0.0, log_total - mean_shift, 0.0), [1])
    log_partition = op.Squeeze(log_total + highest, [1])

    listable = op.ScatterElements(all_logit, blocked, op.Expand(never, op.Shape(blocked)), axis=1)
    logit, numbers = op.TopK(listable, k, axis=-1)
    score_mean = op.GatherElements(all_mean, numbers, axis=1)
    score_variance = op.GatherElements(all_variance, numbers, axis=1)
    return numbers, logit, score_mean, score_variance, log_partition, entropy


FUNCTIONS = (KrigingAttention, SandwichAttention, KalmanUpdate, DynamicsPredict, PostNormPredict, GaussianTopK)


class EmittedSteps:
    """The steps of `model.filtering` as nodes of the domain `bft`, for use while a graph is exported."""

    @staticmethod
    def krige(
        query_BHTC: Tensor,
        key_BHSC: Tensor,
        value_BHSC: Tensor,
        neighbour_precision_BS: Tensor,
        visible_BTS: Tensor,
        shrinkage_dof: float = 1.0,
        dropout: float = 0.0,
    ) -> KrigedField:
        """See `filtering.krige`; an exported graph has no dropout."""
        inputs = (query_BHTC, key_BHSC, value_BHSC, neighbour_precision_BS, visible_BTS)
        attributes = {"shrinkage_dof": shrinkage_dof}
        return KrigedField(*_emit("KrigingAttention", inputs, _field_shapes(query_BHTC), attributes))

    @staticmethod
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
        """See `filtering.sandwich`; an exported graph has no dropout."""
        inputs = (query_BHTC, key_BHSC, value_BHSC, bias_BTS, neighbour_precision_BS, visible_BTS)
        attributes = {"attention_norm": attention_norm, "shrinkage_dof": shrinkage_dof}
        return KrigedField(*_emit("SandwichAttention", inputs, _field_shapes(query_BHTC), attributes))

    @staticmethod
    def update(prior: Gaussian, innovation_BTD: Tensor, observation_precision_BTD: Tensor) -> Posterior:
        """See `filtering.update`."""
        inputs = (prior.mean, prior.precision, innovation_BTD, observation_precision_BTD)
        return Posterior(*_emit("KalmanUpdate", inputs, (prior.mean.shape,) * 3))

    @staticmethod
    def predict(posterior: Gaussian, dynamics: Dynamics, dropout: float = 0.0) -> Gaussian:
        """See `filtering.predict`; an exported graph has no dropout."""
        return _emit_prediction("DynamicsPredict", posterior, dynamics)

    @staticmethod
    def predict_post_norm(posterior: Gaussian, dynamics: Dynamics, dropout: float = 0.0) -> Gaussian:
        """See `filtering.predict_post_norm`; an exported graph has no dropout."""
        return _emit_prediction("PostNormPredict", posterior, dynamics)


def emit_gaussian_top_k(inputs: tuple[Tensor, ...], num_listed: int) -> tuple[Tensor, ...]:
    """A `GaussianTopK` node; see there for inputs and outputs."""
    batch = inputs[0].shape[0]
    listed, per_user = (batch, num_listed), (batch,)
    float_, int_ = torch.float32, torch.int64
    return _emit("GaussianTopK", inputs, (listed,) * 4 + (per_user,) * 2, dtypes=(int_,) + (float_,) * 5)


def attach_bodies(model: onnx.ModelProto) -> tuple[str, ...]:
    """Add the body of every `bft` node the model uses; returns their names, sorted."""
    used = sorted({node.op_type for node in model.graph.node if node.domain == DOMAIN})
    bodies = {function.name: function for function in FUNCTIONS}
    model.functions.extend(bodies[name].to_function_proto() for name in used)
    if not any(entry.domain == DOMAIN for entry in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, VERSION))
    return tuple(used)


def _field_shapes(query_BHTC: Tensor) -> tuple[tuple[int, ...], ...]:
    """Of a `KrigedField`'s parts."""
    batch, heads, length, channels = query_BHTC.shape
    state = (batch, length, heads * channels)
    return state, state, (batch, heads, length)


def _emit_prediction(name: str, posterior: Gaussian, dynamics: Dynamics) -> Gaussian:
    *parameters, ln_eps = dynamics
    shape = posterior.mean.shape
    return Gaussian(*_emit(name, (*posterior, *parameters), (shape, shape), {"ln_eps": ln_eps}))


def _emit(
    name: str,
    inputs: tuple[Tensor, ...],
    shapes: tuple[tuple[int, ...], ...],
    attributes: dict[str, float] | None = None,
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> tuple[Tensor, ...]:
    return tuple(
        torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::{name}",
            inputs,
            attributes or {},
            dtypes=dtypes or (torch.float32,) * len(shapes),
            shapes=shapes,
            version=VERSION,
        )
    )
