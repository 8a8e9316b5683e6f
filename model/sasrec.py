"""SASRec (Kang & McAuley 2018, Pre-LN form) with filtering layers, or plain when filtering is off.

B batch · T positions (BOS first, then events, right padding) · D width
"""

from torch import Tensor, nn

from model.backbone import EMBEDDING_STD, Cache, CausalBackbone
from model.config import PAD, ModelConfig
from model.filtering import Gaussian
from model.layers import FilteringLayer, PlainLayer


class SASRec(CausalBackbone):
    """A causal encoder of event sequences; see `Backbone`. Timestamps order the events and are not read."""

    def __init__(self, config: ModelConfig, training_counts: Tensor) -> None:
        super().__init__(config, training_counts)
        self.position_embedding = nn.Embedding(config.max_len + 1, config.width)
        nn.init.normal_(self.position_embedding.weight, std=EMBEDDING_STD)
        layer = FilteringLayer if config.filtering else PlainLayer
        self.layers = nn.ModuleList(layer(config) for _ in range(config.num_layers))

    def enter(
        self, items_BT: Tensor, weights_BT: Tensor, timestamps_BT: Tensor, cache: Cache | None = None
    ) -> tuple[Gaussian, Tensor]:
        """See `CausalBackbone.enter`; the sight is `visible_BTS`."""
        sight = self.sight(cache, items_BT != PAD)
        embedded = self.embed(items_BT) + self.position_embedding(sight.position)
        return self.prior(embedded, items_BT, weights_BT), sight.visible
