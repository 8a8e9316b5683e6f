"""BERT4Rec (Sun et al. 2019) with filtering layers in Post-LN form, or plain when filtering is off.

B batch · T positions (BOS first, then events, right padding) · D width
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model import filtering
from model.backbone import EMBEDDING_STD, Backbone, Reasons, times, without_padding
from model.config import MASK, PAD, ModelConfig
from model.filtering import Gaussian
from model.layers import FilteringLayer, Neighbours, PlainLayer, Steps, neighbour_precision


class BERT4Rec(Backbone):
    """A bidirectional encoder: every real position sees every real position, itself and MASKs among them.

    It reads the next event at a MASK behind the last one; trained, it fills in masked events. Timestamps order
    the events and are not read. See `Backbone`.
    """

    causal: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, training_counts: Tensor) -> None:
        super().__init__(config, training_counts)
        self.position_embedding = nn.Embedding(config.max_len + 2, config.width)
        nn.init.normal_(self.position_embedding.weight, std=EMBEDDING_STD)
        self.embedding_norm = nn.LayerNorm(config.width)
        layer = PostNormFilteringLayer if config.filtering else PostNormPlainLayer
        self.layers = nn.ModuleList(layer(config) for _ in range(config.num_layers))

    def enter(self, items_BT: Tensor, weights_BT: Tensor, timestamps_BT: Tensor) -> tuple[Gaussian, Tensor]:
        """See `Backbone.enter`; the sight is `visible_BTS`."""
        positions = torch.arange(items_BT.shape[1], device=items_BT.device)
        embedded = self.embedding_norm(self.embed(items_BT) + self.position_embedding(positions))
        visible_BTS = (items_BT != PAD)[:, None, :].expand(-1, items_BT.shape[1], -1)
        return self.prior(embedded, items_BT, weights_BT), visible_BTS

    def encode(
        self, items_BT: Tensor, weights_BT: Tensor, timestamps_BT: Tensor | None = None, steps: Steps = filtering
    ) -> Gaussian:
        """See `Backbone.encode`; MASK stands for an event to be told, with weight 1; T ≤ max_len + 2."""
        state, visible_BTS = self.enter(items_BT, weights_BT, times(timestamps_BT, items_BT))
        for layer in self.layers:
            state, _ = layer(state, visible_BTS, steps=steps)
        return without_padding(state, items_BT != PAD)

    def final_state(
        self, items_BT: Tensor, weights_BT: Tensor, timestamps_BT: Tensor | None = None, steps: Steps = filtering
    ) -> Gaussian:
        """The state (B,D) at a MASK behind the last event; T ≤ max_len + 1. A row of padding stays one."""
        return super().final_state(*_with_query(items_BT, weights_BT), None, steps)

    def reasons(
        self, items_BT: Tensor, weights_BT: Tensor, timestamps_BT: Tensor | None = None, steps: Steps = filtering
    ) -> Reasons:
        """See `Backbone.reasons`; T ≤ max_len + 1. The share that the MASK hears of itself is not among them."""
        real_BT = items_BT != PAD
        with_query = super().reasons(*_with_query(items_BT, weights_BT), None, steps)
        return Reasons(*(torch.where(real_BT, part[:, : items_BT.shape[1]], 0) for part in with_query))


def _with_query(items_BT: Tensor, weights_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Items and weights (B,T+1) with a MASK behind each row's last event; a row of padding stays one."""
    after_last_B1 = (items_BT != PAD).sum(1, keepdim=True)
    query_B1 = torch.where(after_last_B1 > 0, MASK, PAD)
    items = F.pad(items_BT, (0, 1), value=PAD).scatter(1, after_last_B1, query_B1)
    weights = F.pad(weights_BT, (0, 1), value=1.0).scatter(1, after_last_B1, 1.0)
    return items, weights


class PostNormFilteringLayer(FilteringLayer):
    """Observe, update, LayerNorm; predict with its LayerNorm (math.md §1–3)."""

    def forward(
        self, prior: Gaussian, visible_BTS: Tensor, past: Neighbours | None = None, steps: Steps = filtering
    ) -> tuple[Gaussian, Neighbours]:
        """As `FilteringLayer.forward`."""
        norm, dropout = self.attention.norm, self.config.dropout if self.training else 0.0
        posterior, shown = self.observe(prior, prior.mean, visible_BTS, past, steps)
        normalised = filtering.normalise(posterior, norm.weight, norm.bias, norm.eps)
        return steps.predict_post_norm(normalised, self.dynamics(), dropout), shown

    def shares(self, prior: Gaussian, visible_BTS: Tensor) -> Tensor:
        """As `FilteringLayer.shares`."""
        return self.attention.shares(prior.mean, neighbour_precision(prior, self.config), visible_BTS)


class PostNormPlainLayer(PlainLayer):
    """The layer with filtering off: an ordinary Post-LN Transformer layer, which carries no precision."""

    def forward(
        self, prior: Gaussian, visible_BTS: Tensor, past: Neighbours | None = None, steps: Steps = filtering
    ) -> tuple[Gaussian, Neighbours]:
        """As `FilteringLayer.forward`; the precision is the input's, untouched."""
        innovation, shown = self.attend(prior, prior.mean, visible_BTS, past)
        hidden = self.attention.norm(prior.mean + innovation)
        return Gaussian(self.feed_forward.norm(hidden + self.drift(hidden)), prior.precision), shown

    def shares(self, prior: Gaussian, visible_BTS: Tensor) -> Tensor:
        """As `PlainLayer.shares`."""
        return self.equal_shares(prior.mean, visible_BTS)
