"""Confidences that cost several passes: dropout at serving time, and an ensemble.

B users of a batch · N catalogue items
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from model.backbone import Backbone
from training.batches import Batch
from training.evaluate import Scorer

MC_DROPOUT_PASSES = 20


def mc_dropout(model: Backbone, passes: int = MC_DROPOUT_PASSES, seed: int = 0) -> Scorer:
    """The mean probability over passes with dropout at work (Gal & Ghahramani 2016).

    Args:
        model: is put into training mode when it scores, which nothing but dropout depends on.
        passes: how many.
        seed: of the first batch's masks; the batches after it go on from there.
    """
    state = torch.Generator().manual_seed(seed).get_state()

    def score(batch: Batch) -> tuple[Tensor, Tensor, np.ndarray]:
        nonlocal state
        model.train()
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            scored = _averaged(_probability(model, batch) for _ in range(passes))
            state = torch.get_rng_state()
        return scored

    return score


def ensemble(models: Sequence[Backbone]) -> Scorer:
    """The mean probability of several models (Lakshminarayanan, Pritzel & Blundell 2017).

    Args:
        models: of one catalogue, trained from different seeds; are put into eval mode.
    """

    def score(batch: Batch) -> tuple[Tensor, Tensor, np.ndarray]:
        return _averaged(_probability(model.eval(), batch) for model in models)

    return score


def _probability(model: Backbone, batch: Batch) -> Tensor:
    return model.score(model.final_state(batch.items, batch.weights, batch.timestamps)).logit.softmax(-1)


def _averaged(probabilities: Iterable[Tensor]) -> tuple[Tensor, Tensor, np.ndarray]:
    """The logarithm of the mean, which is a logit; no variance, no precision."""
    total, count = torch.zeros(()), 0
    for probability in probabilities:
        total, count = total + probability, count + 1
    logit = (total / count).clamp_min(torch.finfo(torch.float32).tiny).log()
    return logit, torch.zeros_like(logit), np.full(len(logit), np.inf)
