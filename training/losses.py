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

CHUNK_ROWS = 256
"""Rows that the full loss scores at a time: what it keeps of them, (N,rows), stays in the cache that cores share."""
HALF_CHUNK_ROWS = 512
"""The same in bfloat16: a product of few rows wastes the matrix unit."""
BLOCK_ITEMS = 512
"""Items scored at a time on a CPU: a block of them by a chunk of rows stays in a core's own cache from logit to
gradient."""
HALF_ROWS_MULTIPLE = 64
"""In bfloat16 rows are filled up to a multiple: a kernel is compiled, and kept, for every number of rows met."""
SAFE_LOGIT = 80.0
"""exp of it, summed over any catalogue, is finite in float32 and bfloat16, and exp of its negative is not 0."""


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

    A softmax's gradient is known as soon as its value is, so no (R,N) matrix outlives its chunk of rows and nothing
    is computed twice (benchmarks/full_loss.py compares it with the same formula under autograd).

        logit = x/√y      x = ⟨left, right⟩      y = ⟨spread_left, spread_right⟩ ≥ 1, or 1 without the two
        G = softmax(logit) − onehot(target)      ∂x = G/√y      ∂y = −½·G·logit/y

    A chunk is worked a block of items at a time, with exp(logit) in place of the softmax: what a row's sum divides are
    the chunk's small factors, once the sum is known. Since |logit| ≤ |x| ≤ |left|·|right|, exp mostly cannot leave its
    range, and the row's largest logit is found beforehand only where it could. The one-hot part of G never enters a
    matrix: it is taken, exactly, from the targets' rows alone. Under autocast x, exp(logit) and the gradients' products
    are bfloat16; y is not, and sums are not.
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
        num_rows, num_items = len(left_RD), len(right_ND)
        # Rows that fill up repeat the last one, and count for nothing.
        filled_R = torch.arange(-(-num_rows // multiple) * multiple, device=left_RD.device).clamp_max(num_rows - 1)
        counts_R = torch.arange(len(filled_R), device=left_RD.device) < num_rows
        # A GPU waits for nothing but the number of its calls.
        block = min(num_items, BLOCK_ITEMS) if device == "cpu" else num_items
        with torch.autocast(device, enabled=False):
            x_side = _Side(left_RD[filled_R], right_ND, dtype)
            y_side = None
            if spread_left_RE is not None and spread_right_NE is not None:
                y_side = _Side(spread_left_RE[filled_R], spread_right_NE, dtype)
            targets_R = target_rows_R[filled_R]
            reach = left_RD.norm(dim=1).max() * right_ND.norm(dim=1).max()
            total = left_RD.new_zeros(())
            # Written again for every chunk and block: fresh memory would cost more than what is computed in it.
            chunk_rows = min(chunk_rows, len(filled_R))
            kept = left_RD.new_empty((1 if y_side is None else 2, num_items, chunk_rows), dtype=dtype)
            scratch = left_RD.new_empty((2, block, chunk_rows), dtype=dtype)
            spread = left_RD.new_empty((block, chunk_rows))
            for begin in range(0, len(filled_R), chunk_rows):
                rows = slice(begin, begin + chunk_rows)
                counts = counts_R[rows]
                # A GPU would have to be waited for to know.
                safe = device == "cpu" and reach <= SAFE_LOGIT
                shift = None if safe else _largest_logit(x_side, y_side, rows, block)
                x_weight, *y_weights = kept[..., : len(counts)]
                sums = left_RD.new_zeros(len(counts))
                for first in range(0, num_items, block):
                    items = slice(first, min(first + block, num_items))
                    here = slice(items.stop - first), slice(len(counts))
                    logit, root, weight = scratch[0][here], scratch[1][here], x_weight[items]
                    torch.mm(x_side.right[items], x_side.left_ER[:, rows], out=logit)
                    if y_side is not None:
                        torch.mm(y_side.exact_right[items], y_side.exact_left_ER[:, rows], out=spread[here])
                        torch.rsqrt(spread[here], out=root)
                        logit.mul_(root)
                    if shift is None:
                        torch.exp(logit, out=weight)
                    else:
                        torch.sub(logit, shift, out=weight).exp_()
                    sums += weight.sum(0, dtype=sums.dtype)
                    if y_side is not None:
                        weight.mul_(root)
                        y_side.add_to_left(rows, items, torch.mul(logit.mul_(root), weight, out=y_weights[0][items]))
                    x_side.add_to_left(rows, items, weight)
                logit, one, spread_one = _at_targets(x_side, y_side, rows, targets_R[rows])
                log_sums = sums.log() if shift is None else sums.log() + shift
                total += ((log_sums - logit) * counts).sum()
                share = counts / sums
                x_side.finish(rows, x_weight, share, one * counts, targets_R[rows])
                if y_side is not None:
                    y_side.finish(rows, y_weights[0], share, spread_one * counts, targets_R[rows])
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
    """The factors of a product ⟨left, right⟩ (R,N), in the type they are multiplied in, and their gradients so far.

    Products are (items,rows): a block of items is contiguous.
    """

    def __init__(self, left_RE: Tensor, right_NE: Tensor, dtype: torch.dtype) -> None:
        self.exact_left, self.exact_right = left_RE, right_NE
        self.exact_left_ER = left_RE.T.contiguous()
        self.left_ER, self.right = self.exact_left_ER.to(dtype), right_NE.to(dtype)
        self.left_grad, self.right_grad = torch.zeros_like(left_RE), torch.zeros_like(right_NE)

    def at(self, rows: slice, targets: Tensor) -> Tensor:
        """The products of rows and their own targets."""
        return (self.exact_left[rows] * self.exact_right[targets]).sum(1)

    def add_to_left(self, rows: slice, items: slice, weight: Tensor) -> None:
        """A block's part of ∂left, before it is divided by the rows' sums."""
        _add_product(self.left_grad[rows], weight.T, self.right[items])

    def finish(self, rows: slice, weight: Tensor, share: Tensor, one: Tensor, targets: Tensor) -> None:
        """The chunk's ∂ under ∂⟨left, right⟩ = weight·share, less `one` at each row's target."""
        share, one = share[:, None], one[:, None]
        self.left_grad[rows] *= share
        self.left_grad[rows] -= one * self.exact_right[targets]
        _add_product(self.right_grad, weight, (self.exact_left[rows] * share).to(self.right.dtype))
        self.right_grad.index_add_(0, targets, one * self.exact_left[rows], alpha=-1)


def _add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    if first.dtype == total.dtype:
        total.addmm_(first, second)
    else:
        total += first @ second


def _largest_logit(x_side: _Side, y_side: _Side | None, rows: slice, block: int) -> Tensor:
    """Each row's largest logit, in one product more."""
    largest = []
    for first in range(0, len(x_side.right), block):
        items = slice(first, first + block)
        logit = x_side.exact_right[items] @ x_side.exact_left_ER[:, rows]
        if y_side is not None:
            logit.mul_((y_side.exact_right[items] @ y_side.exact_left_ER[:, rows]).rsqrt_())
        largest.append(logit.amax(0))
    return torch.stack(largest).amax(0)


def _at_targets(x_side: _Side, y_side: _Side | None, rows: slice, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's logit at its target, and the derivatives there: of the logit to x, and −2 times that to y."""
    x = x_side.at(rows, targets)
    root = torch.ones_like(x) if y_side is None else y_side.at(rows, targets).rsqrt()
    logit = x * root
    return logit, root, logit * root.square()


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
