"""The filtering steps' derivatives by hand, and how a step is worked so that it keeps none of its large tensors.

Attention weights are (B,H,T,S) and hidden units (R,K): larger than all else, and cheap to compute again. `recomputed`
keeps a step's inputs for backward, and of its results the few small ones that are named, and works slice by slice of
the batch, so that a large tensor lives for one slice. What backward then computes is written out below, a function a
step; tests/model/test_recompute.py holds each to what autograd makes of the plain formula in `model.filtering`.

`x_grad` is the loss's derivative by x. The comment above some lines is the equation that they differentiate.
Shape letters as in `model.filtering`, and R rows: positions of all sequences. By head, a field is (B,H,T,C) and a
number of each position (B,H,T,1).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

SLICE_ELEMENTS = 2**19
"""Of the largest tensor, a slice and processor thread: 2 MiB in float32."""

Formula = Callable[..., tuple[Tensor, ...]]
"""(batched inputs, shared inputs) → results, the batch first."""
Adjoint = Callable[..., tuple[Tensor | None, ...]]
"""(batched inputs, shared inputs, kept results, gradients of the outputs) → gradients of the inputs, or None."""


def recomputed(
    formula: Formula,
    adjoint: Adjoint,
    batched: Sequence[Tensor | None],
    shared: Sequence[Tensor] = (),
    *,
    num_outputs: int,
    num_kept: int,
    row_elements: int = 0,
) -> tuple[Tensor, ...]:
    """A formula's outputs, differentiated by its adjoint; second derivatives are not offered.

    Args:
        formula, adjoint: pure functions of a slice of the batch.
        batched: inputs with the batch first; None for an absent one.
        shared: inputs that every row of the batch reads: parameters.
        num_outputs: how many of the formula's results, from the first, are returned.
        num_kept: how many of them, from the last, the adjoint reads beside the inputs.
        row_elements: elements of the largest tensor in between, for each row of the batch; 0: work without slices.
    """
    if not torch.is_grad_enabled():
        return formula(*batched, *shared)[:num_outputs]
    settings = (formula, adjoint, len(batched), num_outputs, num_kept, row_elements)
    return _Recomputed.apply(*settings, *batched, *shared)  # type: ignore[no-untyped-call]


class _Recomputed(torch.autograd.Function):
    """See `recomputed`."""

    @staticmethod
    def forward(
        ctx: Any,
        formula: Formula,
        adjoint: Adjoint,
        num_batched: int,
        num_outputs: int,
        num_kept: int,
        row_elements: int,
        *inputs: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        batched, shared = inputs[:num_batched], inputs[num_batched:]
        results = _Whole(batched, row_elements)
        for rows in results.slices:
            results.put(rows, formula(*_cut(batched, rows), *shared))
        ctx.adjoint, ctx.row_elements, ctx.num_batched, ctx.num_inputs = adjoint, row_elements, num_batched, len(inputs)
        ctx.save_for_backward(*inputs, *results.tensors[len(results.tensors) - num_kept :])
        return tuple(results.tensors[:num_outputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, kept = ctx.saved_tensors[: ctx.num_inputs], ctx.saved_tensors[ctx.num_inputs :]
        batched, shared = inputs[: ctx.num_batched], inputs[ctx.num_batched :]
        batched_grads = _Whole(batched, ctx.row_elements)
        shared_grads = [torch.zeros_like(tensor) for tensor in shared]
        for rows in batched_grads.slices:
            grads = ctx.adjoint(*_cut(batched, rows), *shared, *_cut(kept, rows), *_cut(output_grads, rows))
            batched_grads.put(rows, grads[: len(batched)])
            for total, grad in zip(shared_grads, grads[len(batched) :], strict=True):
                total += grad
        return *[None] * 6, *batched_grads.tensors, *shared_grads


class _Whole:
    """Tensors of the whole batch, put together from its slices.

    Slices are for a CPU, whose caches and memory gain by them. Another device works the batch as one.
    """

    def __init__(self, batched: Sequence[Tensor | None], row_elements: int) -> None:
        first = next(tensor for tensor in batched if tensor is not None)
        self.size = step = max(1, len(first))
        if row_elements and first.device.type == "cpu":
            step = max(1, SLICE_ELEMENTS * torch.get_num_threads() // row_elements)
        self.slices = [slice(begin, begin + step) for begin in range(0, self.size, step)]
        self.tensors: list[Tensor | None] = []

    def put(self, rows: slice, parts: Sequence[Tensor | None]) -> None:
        """Fill in the rows of every tensor."""
        if len(self.slices) == 1:
            self.tensors = list(parts)
            return
        if not self.tensors:
            self.tensors = [None if part is None else part.new_empty(self.size, *part.shape[1:]) for part in parts]
        for tensor, part in zip(self.tensors, parts, strict=True):
            if tensor is not None and part is not None:
                tensor[rows] = part


def _cut(tensors: Sequence[Tensor | None], rows: slice) -> list[Tensor | None]:
    return [None if tensor is None else tensor[rows] for tensor in tensors]


# --- observe ------------------------------------------------------------------------------------------------


def krige(
    shrinkage_dof: float,
    weights: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    neighbour_precision: Tensor,
    dropout_mask: Tensor | None,
    centre: Tensor,
    residual_variance: Tensor,
    prior_variance: Tensor,
    n: Tensor,
    mean_grad: Tensor,
    variance_grad: Tensor,
    sample_size_grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and λ̄, from those of a `KrigedField`."""
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    mean_grad, variance_grad = split_heads(mean_grad, query.shape[1]), split_heads(variance_grad, query.shape[1])
    residual_grad, prior_grad, n_grad = _shrinkage(shrinkage_dof, variance_grad, residual_variance, prior_variance, n)
    # n = 1/Σ α̃²,   s = Σ α̃ v² − e²
    concentration_grad = -n.square() * (n_grad + sample_size_grad[..., None])
    centre_grad = (centre * residual_grad).mul_(-2)
    if dropout_mask is None:
        centre_grad += mean_grad

    weights_grad = _sum_of_products((centre_grad, value.mT), (residual_grad, value.square().mT))
    weights_grad.addcmul_(weights, concentration_grad, value=2)
    weights_grad.addcmul_(prior_grad, neighbour_precision.reciprocal()[:, None, None])
    value_grad = torch.addcmul(weights.mT @ centre_grad, weights.mT @ residual_grad, value, value=2)
    if dropout_mask is not None:
        weights_grad.addcmul_(mean_grad @ value.mT, dropout_mask)
        value_grad += (weights * dropout_mask).mT @ mean_grad
    # α̃ = softmax(q·k/√C + log λ̄),   σ0² = Σ α̃/λ̄
    logits_grad = torch.ops.aten._softmax_backward_data(weights_grad, weights, -1, weights.dtype)
    precision_grad = _over_positions(logits_grad) / neighbour_precision
    precision_grad -= _over_positions(weights, prior_grad) / neighbour_precision.square()
    scale = 1 / math.sqrt(query.shape[-1])
    return (logits_grad @ key).mul_(scale), (logits_grad.mT @ query).mul_(scale), value_grad, precision_grad


def sandwich(
    shrinkage_dof: float,
    logits: Tensor,
    relative_precision: Tensor,
    visible: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    neighbour_precision: Tensor,
    dropout_mask: Tensor | None,
    seen: Tensor,
    total: Tensor,
    energy: Tensor,
    centre: Tensor,
    skew: Tensor,
    sandwich_variance: Tensor,
    prior_variance: Tensor,
    mean_grad: Tensor,
    variance_grad: Tensor,
    sample_size_grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, bias and λ̄, from those of a `KrigedField`; `visible` (B,T,S) is 1 or 0."""
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    mean_grad, variance_grad = split_heads(mean_grad, query.shape[1]), split_heads(variance_grad, query.shape[1])
    n = total.square() / energy
    spread_grad, prior_grad, n_grad = _shrinkage(
        shrinkage_dof, variance_grad * seen, sandwich_variance, prior_variance, n
    )
    n_grad = n_grad + sample_size_grad[..., None] * seen
    # S = Σ w²v²/Σw² − 2μ Σ w²v/Σw² + μ²,   n = (Σ|w|)²/Σw²
    centre_grad = (centre - skew).mul_(spread_grad).mul_(2)
    by_spread = (centre.square() - sandwich_variance).mul_(spread_grad).sum(-1, keepdim=True)
    energy_grad = (by_spread - n_grad * n) / energy
    squares_grad = spread_grad / energy
    skew_grad = (centre * squares_grad).mul_(-2)
    # μ = Σ|w|v/Σ|w|,   σ0² = (Σ|w|/λ̄)/Σ|w|
    by_total = (centre_grad * centre).sum(-1, keepdim=True) + prior_grad * prior_variance
    total_grad = (2 * n_grad * n - by_total) / total
    centre_grad, prior_grad = centre_grad.div_(total), prior_grad / total

    weights = F.silu(logits).mul_(relative_precision)
    by_square = _sum_of_products((skew_grad, value.mT), (squares_grad, value.square().mT)).add_(energy_grad)
    by_magnitude = (centre_grad @ value.mT).add_(total_grad)
    by_magnitude.addcmul_(prior_grad, neighbour_precision.reciprocal()[:, None, None])
    weights_grad = mean_grad @ value.mT
    if dropout_mask is not None:
        weights_grad *= dropout_mask
    weights_grad.addcmul_(by_square, weights, value=2).addcmul_(by_magnitude, weights.sign())
    dropped = weights if dropout_mask is None else weights * dropout_mask
    magnitudes, squares = weights.abs(), weights.square()
    value_grad = _sum_of_products((dropped.mT, mean_grad), (magnitudes.mT, centre_grad), (squares.mT, skew_grad))
    value_grad.addcmul_(squares.mT @ squares_grad, value, value=2)
    # w = SiLU(l)·λ̄/m/norm,   m the mean λ̄ of the visible
    by_precision = weights_grad * weights
    mean_share = by_precision.sum(-1).sum(1)[..., None] / (visible @ neighbour_precision[..., None]).clamp_min(1e-30)
    precision_grad = _over_positions(by_precision) / neighbour_precision - (visible.mT @ mean_share).squeeze(-1)
    precision_grad -= _over_positions(magnitudes, prior_grad) / neighbour_precision.square()
    logits_grad = torch.ops.aten.silu_backward(weights_grad.mul_(relative_precision), logits)
    return logits_grad @ key, logits_grad.mT @ query, value_grad, logits_grad.sum(1), precision_grad


def _shrinkage(
    shrinkage_dof: float, variance_grad: Tensor, spread: Tensor, prior_variance: Tensor, n: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of spread (clamped at 0), σ0² and n, from that of (ν0 σ0² + n·spread)/(ν0 + n − 1)."""
    dof = shrinkage_dof + n - 1
    summed_grad = variance_grad.sum(-1, keepdim=True)
    by_spread = (variance_grad * spread).sum(-1, keepdim=True) * (shrinkage_dof - 1)
    n_grad = (by_spread - shrinkage_dof * prior_variance * summed_grad) / dof.square()
    return (variance_grad * (n / dof)).mul_(spread.sign()), summed_grad * (shrinkage_dof / dof), n_grad


def _sum_of_products(first: tuple[Tensor, Tensor], *others: tuple[Tensor, Tensor]) -> Tensor:
    """Σ left·right of matrices (B,H,·,·)."""
    total = first[0] @ first[1]
    flat = total.flatten(0, 1)
    for left, right in others:
        flat.baddbmm_(left.flatten(0, 1), right.flatten(0, 1))
    return total


def _over_positions(matrix_BHTS: Tensor, weight_BHT1: Tensor | None = None) -> Tensor:
    """Σ over heads and positions of a matrix, weighted: (B,S)."""
    if weight_BHT1 is None:
        return matrix_BHTS.flatten(1, 2).sum(1)
    return (weight_BHT1.flatten(1)[:, None] @ matrix_BHTS.flatten(1, 2)).squeeze(1)


def split_heads(field_BTD: Tensor, num_heads: int) -> Tensor:
    """(B,H,T,C), in memory of its own."""
    return field_BTD.view(*field_BTD.shape[:2], num_heads, -1).transpose(1, 2).contiguous()


# --- update -------------------------------------------------------------------------------------------------


def update(
    innovation: Tensor,
    posterior_precision: Tensor,
    gain: Tensor,
    mean_grad: Tensor,
    precision_grad: Tensor,
    gain_grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the prior's mean and precision, of the innovation and of λ^obs, from those of a `Posterior`."""
    # mean = h + K·innovation,   K = λ^obs/λ',   λ' = λ + λ^obs
    gain_grad = torch.addcmul(gain_grad, mean_grad, innovation).div_(posterior_precision)
    prior_grad = torch.addcmul(precision_grad, gain_grad, gain, value=-1)
    return mean_grad, prior_grad, mean_grad * gain, prior_grad + gain_grad


# --- predict ------------------------------------------------------------------------------------------------


def predict(
    normalised: Tensor,
    scale: Tensor,
    precision: Tensor,
    w1_gamma: Tensor,
    shift: Tensor,
    w2: Tensor,
    direct_map: Tensor,
    predicted_precision: Tensor,
    jacobian_diag: Tensor,
    pushed: Tensor,
    drift_grad: Tensor,
    predicted_grad: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of mean, λ, W1γ, hidden shift, W2, b2, direct map and Q, from those of drift and λ''."""
    width = normalised.shape[-1]
    jacobian_grad, precision_grad, noise_grad = _fading(jacobian_diag, precision, predicted_precision, predicted_grad)
    # J = (slope·direct_map − x̂/D·pushed)/s,   pushed = (slope∘sensitivity)·W2ᵀ
    direct_grad = jacobian_grad.div_(scale)
    scale_grad = (direct_grad * jacobian_diag).sum(-1, keepdim=True).neg_()
    pushed_grad = (normalised * direct_grad).div_(-width)
    normalised_grad = (pushed * direct_grad).div_(-width)

    sensitivity = normalised @ w1_gamma.T
    hidden = sensitivity + shift
    slope = gelu_slope(hidden)
    # drift = GELU(hidden)·W2ᵀ + b2
    w2_grad = drift_grad.T @ F.gelu(hidden)
    w2_grad.addmm_(pushed_grad.T, slope * sensitivity)
    stretched_grad = pushed_grad @ w2
    slope_grad = (direct_grad @ direct_map.T).addcmul_(stretched_grad, sensitivity)
    hidden_grad = _through_gelu(hidden, slope, slope_grad, drift_grad @ w2)
    shift_grad = hidden_grad.sum(0)
    # hidden = sensitivity + shift,   sensitivity = x̂·W1γᵀ
    sensitivity_grad = hidden_grad.addcmul_(stretched_grad, slope)
    normalised_grad.addmm_(sensitivity_grad, w1_gamma)
    # x̂ = (h − m)/s
    scale_grad -= (normalised_grad * normalised).sum(-1, keepdim=True).div_(scale)
    centred_grad = (normalised_grad / scale).addcmul_(normalised, scale_grad, value=1 / width)
    return (
        centred_grad.sub_(centred_grad.mean(-1, keepdim=True)),
        precision_grad,
        sensitivity_grad.T @ normalised,
        shift_grad,
        w2_grad,
        drift_grad.sum(0),
        slope.T @ direct_grad,
        noise_grad,
    )


def predict_post_norm(
    mean: Tensor,
    precision: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    direct_map: Tensor,
    moved_precision: Tensor,
    jacobian_diag: Tensor,
    drift_grad: Tensor,
    moved_grad: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of mean, λ, W1, b1, W2, b2, direct map and Q, from those of drift and the moved precision."""
    jacobian_grad, precision_grad, noise_grad = _fading(jacobian_diag, precision, moved_precision, moved_grad)
    hidden = torch.addmm(b1, mean, w1.T)
    slope = gelu_slope(hidden)
    # drift = GELU(hidden)·W2ᵀ + b2,   J = slope·direct_map
    hidden_grad = _through_gelu(hidden, slope, jacobian_grad @ direct_map.T, drift_grad @ w2)
    return (
        hidden_grad @ w1,
        precision_grad,
        hidden_grad.T @ mean,
        hidden_grad.sum(0),
        drift_grad.T @ F.gelu(hidden),
        drift_grad.sum(0),
        slope.T @ jacobian_grad,
        noise_grad,
    )


def _fading(
    jacobian_diag: Tensor, precision: Tensor, predicted_precision: Tensor, predicted_grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of J, λ and Q, from that of 1/((1+J)²/λ + Q)."""
    variance_grad = (predicted_grad * predicted_precision).mul_(predicted_precision).neg_()
    stretch = (1 + jacobian_diag).div_(precision)
    half_grad = stretch * variance_grad
    return half_grad * 2, half_grad.mul_(stretch).neg_(), variance_grad.sum(0)


def gelu_slope(x: Tensor) -> Tensor:
    """Derivative of the exact GELU: Φ(x) + x·φ(x)."""
    return torch.ops.aten.gelu_backward(torch.ones_like(x), x)


def _through_gelu(hidden: Tensor, slope: Tensor, slope_grad: Tensor, value_grad: Tensor) -> Tensor:
    """The gradient of GELU's argument, from those of its slope, which is overwritten, and of its value."""
    density = torch.addcmul(hidden.new_tensor(-0.5 * math.log(2 * math.pi)), hidden, hidden, value=-0.5).exp_()
    # GELU'' = (2 − x²)·φ
    slope_grad.mul_(density).mul_(torch.addcmul(hidden.new_tensor(2.0), hidden, hidden, value=-1))
    return slope_grad.addcmul_(value_grad, slope)
