"""Next-item losses on the predictive logits (math.md, "Scoring": uncertainty is part of the loss).

R states and their targets · N catalogue items · M shared negatives
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from model.backbone import Backbone
from model.config import FIRST_ITEM
from model.filtering import Gaussian

CHUNK_ROWS = 512
"""Rows scored at a time by the full loss, so that the (rows,N) matrices stay small and in cache."""


def full_cross_entropy(model: Backbone, state: Gaussian, targets_R: Tensor) -> Tensor:
    """Mean cross-entropy over the whole catalogue, a chunk of rows at a time.

    Args:
        state: mean and precision (R,D).
        targets_R: item numbers.
    """
    rows = targets_R - FIRST_ITEM
    if not model.config.filtering:
        chunks = zip(
            state.mean.split(CHUNK_ROWS),
            state.precision.split(CHUNK_ROWS),
            rows.split(CHUNK_ROWS),
            strict=True,
        )
        return sum(checkpoint(_plain_chunk, model, *chunk, use_reentrant=False) for chunk in chunks) / len(rows)
    head, catalogue = model.head, model.catalogue()
    readout = head.readout(state)
    candidate_variance = head.candidate_variance(model.log_count)
    total = GaussianCrossEntropy.apply(
        readout.mean,
        readout.variance,
        catalogue,
        candidate_variance,
        catalogue.mean(0),
        head.shrinkage(),
        rows,
    )
    return total / max(1, len(rows))


class GaussianCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of R Gaussian readouts over all N items, value and gradient in one pass.

    A softmax's gradient is known as soon as its value is, so no (R,N) matrix outlives its chunk and nothing
    is computed twice (benchmarks/full_loss.py compares it with the same formula under autograd).

        logit = (μ − m)·s      s = 1/√(1 + c·v)      G = softmax(logit) − onehot(target)
        ∂μ = G·s      ∂m = −Σ_N ∂μ      ∂v = −(c/2)·G·(μ − m)·s³      ∂c = −½ Σ G·(μ − m)·s³·v
    """

    @staticmethod
    def forward(
        ctx: Any,
        mean_RD: Tensor,
        variance_RD: Tensor,
        items_ND: Tensor,
        candidate_variance_N: Tensor,
        catalogue_mean_D: Tensor,
        shrinkage: Tensor,
        target_rows_R: Tensor,
    ) -> Tensor:
        """The sum, a scalar; arguments as in `GaussianHead.forward`, targets as catalogue rows."""
        width = mean_RD.shape[1]
        squares_ND = items_ND.square()
        total, shrinkage_grad = mean_RD.new_zeros(()), mean_RD.new_zeros(())
        mean_grads, variance_grads = [], []
        items_grad, squares_grad = torch.zeros_like(items_ND), torch.zeros_like(items_ND)
        candidate_grad, catalogue_mean_grad = (
            torch.zeros_like(candidate_variance_N),
            torch.zeros_like(catalogue_mean_D),
        )

        for mean, variance, target_rows in zip(
            mean_RD.split(CHUNK_ROWS),
            variance_RD.split(CHUNK_ROWS),
            target_rows_R[:, None].split(CHUNK_ROWS),
            strict=True,
        ):
            energy = (mean.square() + variance).mean(-1, keepdim=True)
            centred = torch.addmm(-(mean @ catalogue_mean_D)[:, None], mean, items_ND.T)
            score_variance = torch.addmm(energy * candidate_variance_N, variance, squares_ND.T)
            scale = (score_variance * shrinkage).add_(1).rsqrt_()
            logit = centred * scale
            partition = logit.logsumexp(1, keepdim=True)
            total += (partition - logit.gather(1, target_rows)).sum()

            logit_grad = logit.sub_(partition).exp_()
            logit_grad.scatter_add_(1, target_rows, logit_grad.new_full(target_rows.shape, -1.0))
            score_mean_grad = logit_grad.mul_(scale)
            score_variance_grad = scale.square_().mul_(centred).mul_(score_mean_grad)
            shrinkage_grad -= torch.dot(score_variance_grad.flatten(), score_variance.flatten()) / 2
            score_variance_grad.mul_(-shrinkage / 2)
            centre_grad = -score_mean_grad.sum(1)
            energy_grad = score_variance_grad @ candidate_variance_N

            outer = centre_grad[:, None] * catalogue_mean_D + (2 / width * energy_grad)[:, None] * mean
            mean_grads.append(torch.addmm(outer, score_mean_grad, items_ND))
            variance_grads.append(torch.addmm((energy_grad / width)[:, None], score_variance_grad, squares_ND))
            items_grad.addmm_(score_mean_grad.T, mean)
            squares_grad.addmm_(score_variance_grad.T, variance)
            candidate_grad += score_variance_grad.T @ energy[:, 0]
            catalogue_mean_grad += centre_grad @ mean

        items_grad.addcmul_(items_ND, squares_grad, value=2)
        ctx.save_for_backward(
            torch.cat(mean_grads),
            torch.cat(variance_grads),
            items_grad,
            candidate_grad,
            catalogue_mean_grad,
            shrinkage_grad,
        )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total_grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients found in forward, scaled."""
        return (*(total_grad * grad for grad in ctx.saved_tensors), None)


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


def _plain_chunk(model: Backbone, mean: Tensor, precision: Tensor, target_rows: Tensor) -> Tensor:
    return F.cross_entropy(model.score(Gaussian(mean, precision)).logit, target_rows, reduction="sum")
