"""SASRec (Kang & McAuley 2018, Pre-LN form) with filtering layers, or plain when filtering is off.

B batch · T positions (BOS first, then events, right padding) · D width
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from model import filtering
from model.backbone import EMBEDDING_STD, Backbone, without_padding
from model.config import PAD, ModelConfig
from model.filtering import Gaussian
from model.layers import FilteringLayer, PlainLayer, Steps


class SASRec(Backbone):
    """A causal encoder of event sequences; see `Backbone`. Timestamps order the events and are not read."""

    causal: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, training_counts: Tensor) -> None:
        super().__init__(config, training_counts)
        self.position_embedding = nn.Embedding(config.max_len + 1, config.width)
        nn.init.normal_(self.position_embedding.weight, std=EMBEDDING_STD)
        layer = FilteringLayer if config.filtering else PlainLayer
        self.layers = nn.ModuleList(layer(config) for _ in range(config.num_layers))

    def encode(
        self, items_BT: Tensor, weights_BT: Tensor, timestamps_BT: Tensor | None = None, steps: Steps = filtering
    ) -> Gaussian:
        """See `Backbone.encode`; T ≤ max_len + 1."""
        real_BT = items_BT != PAD
        positions = torch.arange(items_BT.shape[1], device=items_BT.device)
        state = self.prior(self.embed(items_BT) + self.position_embedding(positions), items_BT, weights_BT)

        visible_BTS = (positions[None, :] <= positions[:, None])[None] & real_BT[:, None, :]
        for layer in self.layers:
            state = layer(state, visible_BTS, steps)
        return without_padding(state, real_BT)
