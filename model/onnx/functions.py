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
    """`filtering.krige` → mean (B,T,D), variance (B,T,D), effective_sample_size (B,H,T)."""
    channels = op.CastLike(op.Shape(query, start=3, end=4), query)
    mask = op.CastLike(visible, query)
    hidden = op.ReduceMax(mask, [1], keepdims=0) == 0.0
    finite_precision = op.Where(hidden, 1.0, neighbour_precision)
    # Mask and log λ̄ are one bias: a pass over (B,H,T,S) costs as much as a product.
    bias = op.Unsqueeze(op.Where(visible, op.Unsqueeze(op.Log(finite_precision), [1]), -1e30), [1])
    scaled_query = query * (1.0 / op.Sqrt(channels))
    weights = op.Softmax(op.MatMul(scaled_query, op.Transpose(key, perm=[0, 1, 3, 2])) + bias, axis=-1)
    # A row without neighbours has weights all the same, and nothing below reads them. Factors of 1 and 0 choose:
    # a runtime's Where takes its elements one at a time.
    seen = op.Unsqueeze(op.ReduceMax(mask, [2], keepdims=1), [1])

    kriged_mean = op.MatMul(weights, value)
    residual_variance = op.Max(op.MatMul(weights, value * value) - kriged_mean * kriged_mean, 0.0)
    n = 1.0 / op.ReduceSumSquare(weights, [3], keepdims=1)
    kriging_prior_variance = op.MatMul(weights, op.Unsqueeze(1.0 / finite_precision, [1, 3]))
    prior_dof = op.CastLike(op.Constant(value_float=shrinkage_dof), query)
    dof = prior_dof + n - 1.0
    by_prior = prior_dof * kriging_prior_variance / dof * seen + (1.0 - seen)
    reml_variance = by_prior + n / dof * seen * residual_variance

    mean = op.Reshape(op.Transpose(kriged_mean * seen, perm=[0, 2, 1, 3]), [0, 0, -1])
    variance = op.Reshape(op.Transpose(reml_variance, perm=[0, 2, 1, 3]), [0, 0, -1])
    effective_sample_size = op.Squeeze(n * seen, [3])
    return mean, variance, effective_sample_size


@script(BFT, default_opset=op)
def SandwichAttention(
    query, key, value, bias, neighbour_precision, visible, attention_norm: float, shrinkage_dof: float
):
    """`filtering.sandwich` → mean (B,T,D), variance (B,T,D), effective_sample_size (B,H,T)."""
    mask = op.CastLike(visible, query)
    hidden = op.ReduceMax(mask, [1], keepdims=0) == 0.0
    finite_precision = op.Where(hidden, 1.0, neighbour_precision)
    logits = op.MatMul(query, op.Transpose(key, perm=[0, 1, 3, 2])) + op.Unsqueeze(bias, [1])
    # Not x·Sigmoid(x): a runtime's Sigmoid may be exact to 1e-8 only, which far below 0 is all there is.
    activation = logits / (1.0 + op.Exp(-logits))

    # Mask, divisor and relative precision are one factor: a pass over (B,H,T,S) costs as much as a product.
    count = op.ReduceSum(mask, [2], keepdims=1)
    total = op.MatMul(mask, op.Unsqueeze(finite_precision, [2]))
    norm = op.CastLike(op.Constant(value_float=attention_norm), query)
    share = count / (norm * op.Where(count > 0.0, total, 1.0))
    relative = mask * op.Unsqueeze(finite_precision, [1]) * share
    weights = activation * op.Unsqueeze(relative, [1])

    magnitudes = op.Abs(weights)
    squares = weights * weights
    sum_of_squares = op.ReduceSum(squares, [3], keepdims=1)
    # Factors of 1 and 0 choose, as in `KrigingAttention`: a head that sees nobody gets sums of 1.
    seen = op.CastLike(sum_of_squares >= 1e-20, query)
    energy = sum_of_squares * seen + (1.0 - seen)
    mass = op.ReduceSum(magnitudes, [3], keepdims=1) * seen + (1.0 - seen)
    n = mass * mass / energy
    centre = op.MatMul(magnitudes, value) / mass
    skew = op.MatMul(squares, value) * (2.0 / energy)
    spread = op.MatMul(squares, value * value) / energy
    sandwich_variance = op.Max(spread + centre * (centre - skew), 0.0)
    kriging_prior_variance = op.MatMul(magnitudes, op.Unsqueeze(1.0 / finite_precision, [1, 3])) / mass
    prior_dof = op.CastLike(op.Constant(value_float=shrinkage_dof), query)
    dof = prior_dof + n - 1.0
    by_prior = prior_dof * kriging_prior_variance / dof * seen + (1.0 - seen)
    shrunk_variance = by_prior + n / dof * seen * sandwich_variance

    mean = op.Reshape(op.Transpose(op.MatMul(weights, value), perm=[0, 2, 1, 3]), [0, 0, -1])
    variance = op.Reshape(op.Transpose(shrunk_variance, perm=[0, 2, 1, 3]), [0, 0, -1])
    effective_sample_size = op.Squeeze(n * seen, [3])
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

    Hidden units are scaled by √½, as Erf wants them, and what follows is doubled: the weights, which a runtime folds,
    take the factors, because every pass over (B·T,K) costs half a product.
    """
    width = op.CastLike(op.Shape(w2, start=0, end=1), w2)
    ones = op.CastLike(op.ConstantOfShape(op.Shape(ln_weight)), ln_weight) + 1.0
    rows = op.Flatten(mean, axis=2)
    normalised, _centre, inverse_scale = op.LayerNormalization(rows, ones, axis=-1, epsilon=ln_eps)

    w1_gamma = w1 * ln_weight
    w2_transposed = op.Transpose(w2, perm=[1, 0])
    sensitivity = op.MatMul(normalised, op.Transpose(w1_gamma, perm=[1, 0]) * 0.7071067811865476)
    hidden = sensitivity + (op.MatMul(w1, ln_bias) + b1) * 0.7071067811865476
    cumulative = 1.0 + op.Erf(hidden)
    drift = op.Gemm(hidden * cumulative, w2_transposed * 0.7071067811865476, b2)

    # 0.12078… = log(2/√π)
    slope = cumulative + hidden * op.Exp(0.12078223763524522 - hidden * hidden)
    direct_map = w2_transposed * (w1_gamma - op.ReduceMean(w1_gamma, [-1], keepdims=1))
    direct = op.MatMul(slope, direct_map * 0.5)
    pushed = op.MatMul(slope * sensitivity, w2_transposed * (0.7071067811865476 / width))
    stretch = 1.0 + (direct - normalised * pushed) * inverse_scale

    shape = op.Shape(mean)
    predicted_mean = mean + op.Reshape(drift, shape)
    predicted_precision = 1.0 / (op.Reshape(stretch * stretch, shape) / precision + process_noise_variance)
    return predicted_mean, predicted_precision


@script(BFT, default_opset=op)
def PostNormPredict(mean, precision, ln_weight, ln_bias, w1, b1, w2, b2, process_noise_variance, ln_eps: float):
    """`filtering.predict_post_norm` → mean, precision, each (B,T,D); scaled as in `DynamicsPredict`."""
    w1_transposed = op.Transpose(w1, perm=[1, 0])
    w2_transposed = op.Transpose(w2, perm=[1, 0])
    rows = op.Flatten(mean, axis=2)
    hidden = op.Gemm(rows, w1_transposed * 0.7071067811865476, b1 * 0.7071067811865476)
    cumulative = 1.0 + op.Erf(hidden)
    drift = op.Gemm(hidden * cumulative, w2_transposed * 0.7071067811865476, b2)
    slope = cumulative + hidden * op.Exp(0.12078223763524522 - hidden * hidden)
    stretch = 1.0 + op.MatMul(slope, w2_transposed * w1 * 0.5)

    shape = op.Shape(mean)
    moved = mean + op.Reshape(drift, shape)
    moved_variance = op.Reshape(stretch * stretch, shape) / precision + process_noise_variance
    predicted_mean, _centre, inverse_scale = op.LayerNormalization(moved, ln_weight, ln_bias, axis=-1, epsilon=ln_eps)
    scale_squared = op.Reciprocal(op.Mul(inverse_scale, inverse_scale))
    predicted_precision = scale_squared / (moved_variance * (ln_weight * ln_weight + 1e-6))
    return predicted_mean, predicted_precision


@script(BFT, default_opset=op)
def GaussianTopK(
    mean,
    variance,
    own_variance,
    items,
    candidate_variance,
    catalogue_mean,
    prior_variance,
    added_items,
    added_variance,
    seen,
    blocked,
    k,
    temperature,
    variance_scale,
    order_rows,
    order_mean,
    order_variance,
    order_shrinkage,
    order_kappa,
):
    """Score every item, normalise over the unseen ones, list the k best (math.md, "Scoring", "Policies").

    The A items that were added since the model was trained stand behind the catalogue, with the numbers V … V+A−1, and
    are treated as its own (math.md, "Items that were never trained"); W = V + A.

    A list is ordered by the row's own logit, and in the P rows that `order_rows` names by

        (μ_i − ⟨z,ē⟩)/√(1 + s·c·v_i) + κ·√v_i

    of another readout; nothing else changes with it. A batch without such rows (P = 0) pays nothing for them.

    Inputs: readout `mean`, `variance` (B,D); `own_variance` (B,D), the state's before its length divides it; `items`
    (V,D); `candidate_variance` (V,); `catalogue_mean` (D,); `prior_variance` (D,), the own one of a user nobody has
    seen; `added_items` (A,D), `added_variance` (A,); `seen` (B,S), item numbers outside the normaliser; `blocked`
    (B,X), item numbers outside the list; `k` (1,); `temperature` and `variance_scale` c scalars; `order_rows` (P,),
    each of the B at most once; the readout to order by, `order_mean`, `order_variance` (P,D); `order_shrinkage` s and
    `order_kappa` κ (P,).

    Outputs: per listed item (B,k) `numbers`, `order_key` (what the list is ordered by), `logit` (both −inf where fewer
    than k are left), `score_mean`, `score_variance`, `reliability` (NaN without variance); per user (B,)
    `log_partition` of logit/T, `entropy` in nats; −inf and 0 for one who has seen everything.
    """
    # Each step over all items is a pass over B·W numbers, so as much as possible happens before, to the small inputs
    # and to the constant tables, which are worked out once when the graph is loaded. So the added items are not rows of
    # those tables: their scores are put behind the catalogue's.
    from_average = op.Transpose(items - op.Unsqueeze(catalogue_mean, [0]), perm=[1, 0])
    added_from_average = op.Transpose(added_items - op.Unsqueeze(catalogue_mean, [0]), perm=[1, 0])
    one = op.CastLike(op.Constant(value_floats=[1.0]), mean)
    ones_V1 = op.Expand(one, op.Concat(op.Shape(items, start=0, end=1), op.Constant(value_ints=[1]), axis=0))
    ones_A1 = op.Expand(one, op.Concat(op.Shape(added_items, start=0, end=1), op.Constant(value_ints=[1]), axis=0))
    spread = op.Concat(items * items, op.Unsqueeze(candidate_variance, [1]), ones_V1, axis=1)
    added_spread = op.Concat(added_items * added_items, op.Unsqueeze(added_variance, [1]), ones_A1, axis=1)
    energy = op.ReduceMean(mean * mean + variance, [-1], keepdims=1)
    ones_B1 = op.Expand(one, op.Shape(energy))
    uncertainty = op.Concat(variance_scale * variance, variance_scale * energy, ones_B1, axis=1)
    # 1 + c·v of every item in one product.
    spread_by_item = op.Transpose(spread, perm=[1, 0])
    added_spread_by_item = op.Transpose(added_spread, perm=[1, 0])
    known_tempered = op.MatMul(mean / temperature, from_average) / op.Sqrt(op.MatMul(uncertainty, spread_by_item))
    added_inflation = op.MatMul(uncertainty, added_spread_by_item)
    added_tempered = op.MatMul(mean / temperature, added_from_average) / op.Sqrt(added_inflation)
    tempered = op.Concat(known_tempered, added_tempered, axis=1)

    # Finite: −inf times a weight of 0 would be NaN.
    far_below = op.CastLike(op.Constant(value_float=-1e30), mean)
    possible = op.ScatterElements(tempered, seen, op.Expand(far_below, op.Shape(seen)), axis=1)
    highest = op.ReduceMax(possible, [-1], keepdims=1)
    is_nothing_left = highest <= far_below
    shifted = possible - highest
    weight = op.Exp(shifted)
    total = op.ReduceSum(weight, [-1], keepdims=1)
    mean_shift = op.ReduceSum(weight * shifted, [-1], keepdims=1) / total
    log_total = op.Log(total)
    never = op.CastLike(op.Constant(value_float=float("-inf")), mean)
    entropy = op.Squeeze(op.Where(is_nothing_left, 0.0, log_total - mean_shift), [1])
    log_partition = op.Squeeze(op.Where(is_nothing_left, never, log_total + highest), [1])

    order_energy = op.ReduceMean(order_mean * order_mean + order_variance, [-1], keepdims=1)
    zeros_P1 = op.Expand(op.CastLike(op.Constant(value_floats=[0.0]), mean), op.Shape(order_energy))
    order_uncertainty = op.Concat(order_variance, order_energy, zeros_P1, axis=1)
    order_centred = op.Concat(
        op.MatMul(order_mean / temperature, from_average),
        op.MatMul(order_mean / temperature, added_from_average),
        axis=1,
    )
    order_score_variance = op.Concat(
        op.MatMul(order_uncertainty, spread_by_item), op.MatMul(order_uncertainty, added_spread_by_item), axis=1
    )
    order_inflation = 1.0 + op.Unsqueeze(variance_scale * order_shrinkage, [1]) * order_score_variance
    order_bonus = op.Unsqueeze(order_kappa / temperature, [1]) * op.Sqrt(order_score_variance)
    order_tempered = order_centred / op.Sqrt(order_inflation) + order_bonus
    ordered = op.ScatterND(tempered, op.Unsqueeze(order_rows, [1]), order_tempered)

    listable = op.ScatterElements(ordered, blocked, op.Expand(never, op.Shape(blocked)), axis=1)
    tempered_key, numbers = op.TopK(listable, k, axis=-1)
    order_key = tempered_key * temperature
    # Each from its own table; a row of zeros, so that there is one to read where nothing was added.
    num_known = op.Shape(items, start=0, end=1)
    is_known = op.Less(numbers, num_known)
    known_row = op.Min(numbers, op.Sub(num_known, op.Constant(value_ints=[1])))
    added_row = op.Max(op.Sub(numbers, num_known), op.Constant(value_ints=[0]))
    zero_row = op.Expand(op.CastLike(op.Constant(value_floats=[0.0]), mean), op.Shape(added_items, start=1, end=2))
    added_or_zero = op.Concat(added_items, op.Unsqueeze(zero_row, [0]), axis=0)
    added_variance_or_zero = op.Concat(added_variance, op.CastLike(op.Constant(value_floats=[0.0]), mean), axis=0)
    listed_items = op.Where(
        op.Unsqueeze(is_known, [2]), op.Gather(items, known_row, axis=0), op.Gather(added_or_zero, added_row, axis=0)
    )
    listed_variance = op.Where(
        is_known,
        op.Gather(candidate_variance, known_row, axis=0),
        op.Gather(added_variance_or_zero, added_row, axis=0),
    )
    score_mean = op.ReduceSum(listed_items * op.Unsqueeze(mean, [1]), [-1], keepdims=0)
    squares = listed_items * listed_items
    score_variance = op.ReduceSum(squares * op.Unsqueeze(variance, [1]), [-1], keepdims=0) + energy * listed_variance
    left = op.ReduceSum(squares * op.Unsqueeze(own_variance, [1]), [-1], keepdims=0)
    unresolved = left / op.ReduceSum(squares * prior_variance, [-1], keepdims=0)
    reliability = op.Clip(1.0 - unresolved, 0.0, 1.0)
    # From what is listed, whatever it was ordered by: reading `tempered` again would keep it, at a copy of B·V numbers.
    average = op.MatMul(mean, op.Unsqueeze(catalogue_mean, [1]))
    listed_logit = (score_mean - average) / op.Sqrt(1.0 + variance_scale * score_variance)
    logit = op.Where(op.IsInf(tempered_key), never, listed_logit)
    return numbers, order_key, logit, score_mean, score_variance, reliability, log_partition, entropy


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
    return _emit("GaussianTopK", inputs, (listed,) * 6 + (per_user,) * 2, dtypes=(int_,) + (float_,) * 7)


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
