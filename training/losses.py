"""Next-item losses on the predictive logits (math.md, "Scoring": uncertainty is part of the loss).

R states and their targets · N catalogue items · M shared negatives
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.backbone import Backbone
from model.config import FIRST_ITEM
from model.filtering import Gaussian

CHUNK_ROWS = 64
"""Rows scored at a time by the full loss: the (rows,N) matrices stay small and in cache."""
HALF_CHUNK_ROWS = 512
"""The same in bfloat16: a product of few rows wastes the matrix unit."""
SPREAD_ROWS = 128
"""Rows whose float32 denominators are held at a time, below the bfloat16 chunk: they take twice the memory."""
HALF_ROWS_MULTIPLE = 64
"""In bfloat16 rows are filled up to a multiple: a kernel is compiled, and kept, for every number of rows met."""
LEAST_PROBABILITY = 1e-38
"""A target's probability counts as no less: its logarithm stays finite. The gradient does not know of it."""


def full_cross_entropy(model: Backbone, state: Gaussian, targets_R: Tensor) -> Tensor:
    """Mean cross-entropy over the whole catalogue, a chunk of rows at a time.

    Args:
        state: mean and precision (R,D).
        targets_R: item numbers.
    """
    rows = targets_R - FIRST_ITEM
    head, catalogue = model.head, model.catalogue()
    z = head.readout(state)
    if not model.config.filtering:
        return OnePassCrossEntropy.apply(z.mean, catalogue, None, None, rows) / max(1, len(rows))
    # (μ − m)/√(1 + c·v), each a product over d:   μ − m = ⟨z, e − ē⟩,   1 + c·v = ⟨(c·ρ, c·Σ(z² + ρ)/D, 1), (e², r, 1)⟩
    shrinkage = head.shrinkage()
    energy = (z.mean.square() + z.variance).mean(-1, keepdim=True)
    candidate_variance = head.candidate_variance(model.log_count)[:, None]
    total = OnePassCrossEntropy.apply(
        z.mean,
        catalogue - catalogue.mean(0),
        torch.cat([shrinkage * z.variance, shrinkage * energy, torch.ones_like(energy)], 1),
        torch.cat([catalogue.square(), candidate_variance, torch.ones_like(candidate_variance)], 1),
        rows,
    )
    return total / max(1, len(rows))


class OnePassCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of R states over all N items, value and gradient in one pass.

    A softmax's gradient is known as soon as its value is, so no (R,N) matrix outlives its chunk and nothing
    is computed twice (benchmarks/full_loss.py compares it with the same formula under autograd).

        logit = x/√y      x = ⟨left, right⟩      y = ⟨spread_left, spread_right⟩ > 0, or 1 without the two
        G = softmax(logit) − onehot(target)      ∂x = G/√y      ∂y = −½·G·logit/y

    The one-hot part of G never enters a matrix: it is taken from the targets' rows alone. Under autocast x, the softmax
    and the gradients' products are bfloat16, y is not, and sums over chunks are not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        left_RD: Tensor,
        right_ND: Tensor,
        spread_left_RE: Tensor | None,
        spread_right_NE: Tensor | None,
        target_rows_R: Tensor,
    ) -> Tensor:
        """The sum, a scalar; targets are rows of `right_ND`."""
        device = left_RD.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else left_RD.dtype
        chunk_rows, multiple = (CHUNK_ROWS, 1) if dtype == left_RD.dtype else (HALF_CHUNK_ROWS, HALF_ROWS_MULTIPLE)
        num_rows = len(left_RD)
        # Rows that fill up repeat the last one, and count for nothing.
        filled_R = torch.arange(-(-num_rows // multiple) * multiple, device=left_RD.device).clamp_max(num_rows - 1)
        with torch.autocast(device, enabled=False):
            x_side = _Side(left_RD[filled_R], right_ND, dtype)
            y_side = None
            shape = min(chunk_rows, len(filled_R)), len(right_ND)
            if spread_left_RE is not None and spread_right_NE is not None:
                y_side = _Side(spread_left_RE[filled_R], spread_right_NE, dtype)
                spread_right_EN = spread_right_NE.T.contiguous()
                spread = left_RD.new_empty(min(SPREAD_ROWS, shape[0]), shape[1])
            right_DN = x_side.right.T.contiguous()
            total = left_RD.new_zeros(())
            # Written again in every chunk: fresh memory would cost more than what is computed in it.
            buffers = left_RD.new_empty((2 if y_side is None else 3, *shape), dtype=dtype)
            for begin in range(0, len(filled_R), chunk_rows):
                rows, real = slice(begin, begin + chunk_rows), slice(max(0, num_rows - begin))
                targets = target_rows_R[filled_R[rows], None]
                logit, weight, *others = buffers[:, : len(targets)]
                torch.mm(x_side.left[rows], right_DN, out=logit)
                one = torch.ones_like(targets, dtype=left_RD.dtype)
                if y_side is not None:
                    root = others[0]
                    for spread_left, part in zip(
                        y_side.exact_left[rows].split(SPREAD_ROWS), root.split(SPREAD_ROWS), strict=True
                    ):
                        part.copy_(torch.mm(spread_left, spread_right_EN, out=spread[: len(part)]).rsqrt_())
                    logit.mul_(root)
                    one = root.gather(1, targets).to(left_RD.dtype)
                    spread_one = logit.gather(1, targets) * one.square()
                torch.softmax(logit, 1, out=weight)
                probability = weight[real].gather(1, targets[real]).to(left_RD.dtype)
                total -= probability.clamp_min(LEAST_PROBABILITY).log().sum()
                filling = slice(real.stop, None)
                weight[filling], one[filling] = 0, 0
                if y_side is not None:
                    spread_one[filling] = 0
                    weight.mul_(root)
                    y_side.add(rows, logit.mul_(weight).mul_(root), spread_one, targets[:, 0])
                x_side.add(rows, weight, one, targets[:, 0])
            grads = [x_side.left_grad[:num_rows], x_side.right_grad]
            if y_side is not None:
                grads += [y_side.left_grad[:num_rows].mul_(-0.5), y_side.right_grad.mul_(-0.5)]
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total_grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients found in forward, scaled."""
        grads = [total_grad * grad for grad in ctx.saved_tensors]
        return (*grads, *[None] * (5 - len(grads)))


class _Side:
    """The factors of a product ⟨left, right⟩ (R,N), in the type they are multiplied in, and their gradients so far."""

    def __init__(self, left_RE: Tensor, right_NE: Tensor, dtype: torch.dtype) -> None:
        self.left, self.right = left_RE.to(dtype), right_NE.to(dtype)
        self.exact_left, self.exact_right = left_RE, right_NE
        self.left_grad, self.right_grad = torch.empty_like(left_RE), torch.zeros_like(right_NE)

    def add(self, rows: slice, weight_RN: Tensor, target_weight_R1: Tensor, targets_R: Tensor) -> None:
        """The gradients under ∂⟨left, right⟩ = weight, less target_weight at each row's target."""
        self.left_grad[rows] = weight_RN @ self.right
        self.left_grad[rows] -= target_weight_R1 * self.exact_right[targets_R]
        if self.left.dtype == self.right_grad.dtype:
            self.right_grad.addmm_(weight_RN.T, self.left[rows])
        else:
            self.right_grad += weight_RN.T @ self.left[rows]
        self.right_grad.index_add_(0, targets_R, target_weight_R1 * self.exact_left[rows], alpha=-1)


def sampled_softmax(
    model: Backbone, state: Gaussian, targets_R: Tensor, num_negatives: int, generator: torch.Generator
) -> Tensor:
    """Mean cross-entropy of each target against M uniform negatives that all rows share.

    A negative that happens to be a row's own target is left out of that row.
    """
    rows = targets_R - FIRST_ITEM
    negatives = torch.randint(model.num_items, (num_negatives,), generator=generator).to(rows.device)
    own = model.score_pairs(state, rows).logit
    others = model.score(state, negatives).logit.masked_fill(negatives == rows[:, None], -torch.inf)
    return (torch.cat([own[:, None], others], 1).logsumexp(1) - own).mean()
