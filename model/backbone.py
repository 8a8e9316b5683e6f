"""What every backbone is: embeddings, an initial precision, a scoring head, and an encoder of its own.

B batch · T positions (BOS first, then events, right padding) · D width · N catalogue items · R states · M candidates
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model import filtering
from model.config import FIRST_ITEM, PAD, UNK, ModelConfig
from model.filtering import Gaussian
from model.layers import Steps
from model.precision import initial_precision
from model.scoring import GaussianHead, Scores

EMBEDDING_STD = 0.02


class Backbone(nn.Module, ABC):
    """The interface of the three backbones, and what they share.

    Args:
        config: hyper-parameters.
        training_counts: (N,) uses of each catalogue item in training.
    """

    causal: ClassVar[bool]
    """Whether a later event never changes an earlier position's state; such a model is trained on every position."""

    log_count: Tensor
    input_number: Tensor

    def __init__(self, config: ModelConfig, training_counts: Tensor) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("log_count", training_counts.float().log1p(), persistent=False)
        self.register_buffer("input_number", _input_numbers(training_counts, config), persistent=False)
        self.item_embedding = nn.Embedding(FIRST_ITEM + len(training_counts), config.width)
        nn.init.normal_(self.item_embedding.weight, std=EMBEDDING_STD)
        if config.filtering:
            self.initial_precision = initial_precision(config, training_counts)
        self.head = GaussianHead(config)

    @abstractmethod
    def encode(
        self, items_BT: Tensor, weights_BT: Tensor, timestamps_BT: Tensor | None = None, steps: Steps = filtering
    ) -> Gaussian:
        """The filtered state at every position.

        Args:
            items_BT: int64 item numbers: BOS at position 0, events in time order, PAD on the right.
            weights_BT: event weights > 0, 1 on BOS.
            timestamps_BT: seconds, float64, NaN where an event has none; None: no event has one.
            steps: the filtering steps; an export passes its own.

        Returns:
            mean and precision (B,T,D); padding has mean 0 and precision 0. A plain backbone claims to know its
            state exactly: its precision is infinite.
        """

    def final_state(
        self, items_BT: Tensor, weights_BT: Tensor, timestamps_BT: Tensor | None = None, steps: Steps = filtering
    ) -> Gaussian:
        """The state (B,D) from which the next event is predicted: the last real position's."""
        state = self.encode(items_BT, weights_BT, timestamps_BT, steps)
        last = ((items_BT != PAD).sum(1) - 1).clamp_min(0)[:, None, None].expand(-1, 1, state.mean.shape[-1])
        return Gaussian(state.mean.gather(1, last)[:, 0], state.precision.gather(1, last)[:, 0])

    @property
    def num_items(self) -> int:
        """N, catalogue items without the special tokens."""
        return len(self.log_count)

    def catalogue(self) -> Tensor:
        """The N items (N,D) as the head reads them."""
        return self.head.items(self.item_embedding.weight[FIRST_ITEM:])

    def score(self, state: Gaussian, items_M: Tensor | None = None) -> Scores:
        """Scores (R,M) of candidates for states (R,D); all N catalogue items, in order, when none are named.

        Args:
            state: mean and precision (R,D).
            items_M: catalogue rows (item number − FIRST_ITEM), or None.
        """
        catalogue = self.catalogue()
        mean = catalogue.mean(0)
        if items_M is None:
            return self.head(state, catalogue, self.log_count, mean)
        return self.head(state, catalogue[items_M], self.log_count[items_M], mean)

    def score_pairs(self, state: Gaussian, items_R: Tensor) -> Scores:
        """Scores (R,) of one catalogue row for each state (R,D)."""
        catalogue = self.catalogue()
        return self.head.pairs(state, catalogue[items_R], self.log_count[items_R], catalogue.mean(0))

    def embed(self, items_BT: Tensor) -> Tensor:
        """Item embeddings (B,T,D), scaled by √D; what the model has not learned as an input is read as UNK."""
        return self.item_embedding(self.input_number[items_BT]) * math.sqrt(self.config.width)

    def prior(self, mean_BTD: Tensor, items_BT: Tensor, weights_BT: Tensor) -> Gaussian:
        """The embedded positions with their initial precision; dropout acts on the mean."""
        dropped = F.dropout(mean_BTD, self.config.dropout, self.training)
        if not self.config.filtering:
            return Gaussian(dropped, torch.full_like(dropped, math.inf))
        embedding = self.item_embedding.weight
        precision = self.initial_precision(self.input_number[items_BT], weights_BT, embedding)
        return Gaussian(dropped, precision[..., None].expand_as(dropped))


def without_padding(state: Gaussian, real_BT: Tensor) -> Gaussian:
    """The state with mean 0 and precision 0 on padding."""
    real_BT1 = real_BT[..., None]
    return Gaussian(torch.where(real_BT1, state.mean, 0), torch.where(real_BT1, state.precision, 0))


def _input_numbers(training_counts: Tensor, config: ModelConfig) -> Tensor:
    """The number under which each item enters the encoder: its own, or UNK below `min_input_count` uses."""
    numbers = torch.arange(FIRST_ITEM + len(training_counts))
    numbers[FIRST_ITEM:][training_counts < config.min_input_count] = UNK
    return numbers
