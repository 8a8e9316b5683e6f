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
"""Rows scored at a time by the full loss, so that the (rows,N) matrices stay small and in cache."""


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
        total = left_RD.new_zeros(())
        left_grads, spread_left_grads = [], []
        right_grad, right_DN = torch.zeros_like(right_ND), right_ND.T.contiguous()
        if spread_right_NE is not None:
            spread_right_grad, spread_right_EN = torch.zeros_like(spread_right_NE), spread_right_NE.T.contiguous()
        # Written again in every chunk: fresh memory would cost more than what is computed in it.
        num_buffers = 2 if spread_left_RE is None else 3
        buffers = left_RD.new_empty(num_buffers, min(CHUNK_ROWS, len(left_RD)), len(right_ND))
        for begin in range(0, max(1, len(left_RD)), CHUNK_ROWS):
            rows = slice(begin, begin + CHUNK_ROWS)
            left, target_rows = left_RD[rows], target_rows_R[rows, None]
            logit, logit_grad, *others = buffers[:, : len(left)]
            torch.mm(left, right_DN, out=logit)
            if spread_left_RE is not None:
                (root,) = others
                torch.mm(spread_left_RE[rows], spread_right_EN, out=root).sqrt_()
                logit.div_(root)
            torch.softmax(logit, 1, out=logit_grad)
            # log Σ exp(logit), from the largest: softmax has the exponentials already.
            partition = logit.amax(1) - logit_grad.amax(1).log()
            total += partition.sum() - logit.gather(1, target_rows).sum()
            logit_grad.scatter_add_(1, target_rows, logit_grad.new_full(target_rows.shape, -1.0))
            if spread_left_RE is not None:
                logit_grad.div_(root)
                spread_grad = logit.mul_(logit_grad).div_(root)
                spread_left_grads.append(spread_grad @ spread_right_NE)
                spread_right_grad.addmm_(spread_grad.T, spread_left_RE[rows])
            left_grads.append(logit_grad @ right_ND)
            right_grad.addmm_(logit_grad.T, left)
        grads = [torch.cat(left_grads), right_grad]
        if spread_left_RE is not None:
            grads += [torch.cat(spread_left_grads).mul_(-0.5), spread_right_grad.mul_(-0.5)]
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total_grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients found in forward, scaled."""
        grads = [total_grad * grad for grad in ctx.saved_tensors]
        return (*grads, *[None] * (5 - len(grads)))


def sampled_softmax(
    model: Backbone, state: Gaussian, targets_R: Tensor, num_negatives: int, generator: torch.Generator
) -> Tensor:
    """Mean cross-entropy of each target against M uniform negatives that all rows share.

    A negative that happens to be a row's own target is left out of that row.
    """
    rows = targets_R - FIRST_ITEM
    negatives = torch.randint(model.num_items, (num_negatives,), generator=generator)
    own = model.score_pairs(state, rows).logit
    others = model.score(state, negatives).logit.masked_fill(negatives == rows[:, None], -torch.inf)
    return (torch.cat([own[:, None], others], 1).logsumexp(1) - own).mean()
