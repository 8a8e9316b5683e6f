"""Next-item losses on the predictive logits (math.md, "Scoring": uncertainty is part of the loss).

R states and their targets · N catalogue items · M shared negatives
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from model.config import FIRST_ITEM
from model.filtering import Gaussian
from model.sasrec import SASRec

CHUNK_ROWS = 1024
"""Rows scored at a time by the full loss, so that the (R,N) matrices stay small and in cache."""


def full_cross_entropy(model: SASRec, state: Gaussian, targets_R: Tensor) -> Tensor:
    """Mean cross-entropy over the whole catalogue, a chunk of rows at a time, each recomputed in backward.

    Args:
        state: mean and precision (R,D).
        targets_R: item numbers.
    """
    total = state.mean.new_zeros(())
    for mean, precision, targets in zip(
        state.mean.split(CHUNK_ROWS), state.precision.split(CHUNK_ROWS), targets_R.split(CHUNK_ROWS), strict=True
    ):
        total = total + checkpoint(_chunk_loss, model, mean, precision, targets, use_reentrant=False)
    return total / len(targets_R)


def sampled_softmax(
    model: SASRec, state: Gaussian, targets_R: Tensor, num_negatives: int, generator: torch.Generator
) -> Tensor:
    """Mean cross-entropy of each target against M uniform negatives that all rows share.

    A negative that happens to be a row's own target is left out of that row.
    """
    rows = targets_R - FIRST_ITEM
    negatives = torch.randint(model.num_items, (num_negatives,), generator=generator)
    own = model.score_pairs(state, rows).logit
    others = model.score(state, negatives).logit.masked_fill(negatives == rows[:, None], -torch.inf)
    return (torch.cat([own[:, None], others], 1).logsumexp(1) - own).mean()


def _chunk_loss(model: SASRec, mean: Tensor, precision: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model.score(Gaussian(mean, precision)).logit, targets - FIRST_ITEM, reduction="sum")
