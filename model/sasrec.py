"""SASRec (Kang & McAuley 2018, Pre-LN form) with filtering layers, or plain when filtering is off.

B batch · T positions (BOS first, then events, right padding) · D width · N catalogue items
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model import filtering
from model.config import FIRST_ITEM, PAD, UNK, ModelConfig
from model.filtering import Gaussian
from model.layers import FilteringLayer, PlainLayer, Steps
from model.precision import InitialPrecision
from model.scoring import GaussianHead, Scores

EMBEDDING_STD = 0.02


class SASRec(nn.Module):
    """A causal encoder of event sequences and a Gaussian scoring head over the catalogue.

    Args:
        config: hyper-parameters.
        training_counts: (N,) uses of each catalogue item in training.
    """

    log_count: Tensor
    input_number: Tensor

    def __init__(self, config: ModelConfig, training_counts: Tensor) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("log_count", training_counts.float().log1p(), persistent=False)
        self.register_buffer("input_number", _input_numbers(training_counts, config), persistent=False)
        self.item_embedding = nn.Embedding(FIRST_ITEM + len(training_counts), config.width)
        self.position_embedding = nn.Embedding(config.max_len + 1, config.width)
        layer = FilteringLayer if config.filtering else PlainLayer
        self.layers = nn.ModuleList(layer(config) for _ in range(config.num_layers))
        if config.filtering:
            self.initial_precision = InitialPrecision(training_counts)
        self.head = GaussianHead(config.width, config.filtering)
        for embedding in (self.item_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=EMBEDDING_STD)

    @property
    def num_items(self) -> int:
        """N, catalogue items without the special tokens."""
        return len(self.log_count)

    def encode(self, items_BT: Tensor, weights_BT: Tensor, steps: Steps = filtering) -> Gaussian:
        """The filtered state at every position.

        Args:
            items_BT: int64 item numbers: BOS at position 0, events in time order, PAD on the right;
                T ≤ max_len + 1.
            weights_BT: event weights > 0, 1 on BOS.
            steps: the filtering steps; an export passes its own.

        Returns:
            mean and precision (B,T,D); padding has mean 0 and precision 0. The plain backbone claims to know
            its state exactly: its precision is infinite.
        """
        real_BT = items_BT != PAD
        items_BT = self.input_number[items_BT]
        positions = torch.arange(items_BT.shape[1], device=items_BT.device)
        embedded = self.item_embedding(items_BT) * math.sqrt(self.config.width)
        embedded = embedded + self.position_embedding(positions)
        mean = F.dropout(embedded, self.config.dropout, self.training)
        state = Gaussian(mean, self._initial_precision(items_BT, weights_BT, mean))

        visible_BTS = (positions[None, :] <= positions[:, None])[None] & real_BT[:, None, :]
        for layer in self.layers:
            state = layer(state, visible_BTS, steps)

        real_BT1 = real_BT[..., None]
        return Gaussian(torch.where(real_BT1, state.mean, 0), torch.where(real_BT1, state.precision, 0))

    def score(self, state: Gaussian, items_M: Tensor | None = None) -> Scores:
        """Scores (R,M) of candidates for states (R,D); all N catalogue items, in order, when none are named.

        Args:
            state: mean and precision (R,D).
            items_M: catalogue rows (item number − FIRST_ITEM), or None.
        """
        catalogue = self.item_embedding.weight[FIRST_ITEM:]
        mean = catalogue.mean(0)
        if items_M is None:
            return self.head(state, catalogue, self.log_count, mean)
        return self.head(state, catalogue[items_M], self.log_count[items_M], mean)

    def score_pairs(self, state: Gaussian, items_R: Tensor) -> Scores:
        """Scores (R,) of one catalogue row for each state (R,D)."""
        catalogue = self.item_embedding.weight[FIRST_ITEM:]
        return self.head.pairs(state, catalogue[items_R], self.log_count[items_R], catalogue.mean(0))

    def _initial_precision(self, items_BT: Tensor, weights_BT: Tensor, like: Tensor) -> Tensor:
        if not self.config.filtering:
            return torch.full_like(like, math.inf)
        return self.initial_precision(items_BT, weights_BT)[..., None].expand_as(like)


def _input_numbers(training_counts: Tensor, config: ModelConfig) -> Tensor:
    """The number under which each item enters the encoder: its own, or UNK below `min_input_count` uses."""
    numbers = torch.arange(FIRST_ITEM + len(training_counts))
    numbers[FIRST_ITEM:][training_counts < config.min_input_count] = UNK
    return numbers
