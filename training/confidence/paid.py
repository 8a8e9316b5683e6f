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
    """The mean probability over passes with dropout at work, and how far they differ (Gal & Ghahramani 2016).

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
    """The mean probability of several models, and how far they differ (Lakshminarayanan, Pritzel & Blundell 2017).

    Args:
        models: of one catalogue, trained from different seeds; are put into eval mode.
    """

    def score(batch: Batch) -> tuple[Tensor, Tensor, np.ndarray]:
        return _averaged(_probability(model.eval(), batch) for model in models)

    return score


def _probability(model: Backbone, batch: Batch) -> Tensor:
    return model.score(model.final_state(batch.items, batch.weights, batch.timestamps)).logit.softmax(-1)


def _averaged(probabilities: Iterable[Tensor]) -> tuple[Tensor, Tensor, np.ndarray]:
    """The logarithm of the mean, which is a logit; the variance of log p between the passes; no precision."""
    total, mean, spread, count = torch.zeros(()), torch.zeros(()), torch.zeros(()), 0
    for probability in probabilities:
        count += 1
        total = total + probability
        # By Welford: squares of log p less their mean's would leave rounding alone where the passes agree.
        log = _log(probability)
        step = log - mean
        mean = mean + step / count
        spread = spread + step * (log - mean)
    logit = _log(total / count)
    return logit, spread / count, np.full(len(logit), np.inf)


def _log(probability: Tensor) -> Tensor:
    return probability.clamp_min(torch.finfo(torch.float32).tiny).log()
