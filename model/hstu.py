"""HSTU (Zhai et al. 2024, arXiv 2402.17152, research form) with filtering layers, or plain when filtering is off.

Attention is pointwise, SiLU in place of the softmax, so that its sum says how much of something a history holds.
Its logits carry a relative position and a relative time; there is no absolute position. Two things differ from the
published code: a position's time differences start at its own event and not at the next, which is the one to be
told, and the attention's divisor is a constant of the model and not the padded length.

B batch · T positions (BOS first, then events, right padding) · S = T neighbours · D width · H heads · C = D/H
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model import filtering
from model.backbone import Cache, CausalBackbone
from model.config import PAD, ModelConfig
from model.dropout import apply_dropout
from model.filtering import Gaussian
from model.layers import Neighbours, Steps, neighbour_precision, process_noise_variance, updated

WEIGHT_STD = 0.02
LN_EPS = 1e-6
"""Small: the attended values whose scale the LayerNorm takes away are small themselves."""
BUCKET_RATIO = 1.35
"""Each bucket of time differences begins at this many times where the one before it does."""


class Relations(NamedTuple):
    """What a position t is to a neighbour j.

    `visible` (B,T,S), bool; `distance` (B,T,S) or (1,T,S), t − j in positions, 0 for what comes later; `time_bucket`
    (B,T,S).
    """

    visible: Tensor
    distance: Tensor
    time_bucket: Tensor


class HSTU(CausalBackbone):
    """A causal encoder that reads when events happened; see `Backbone`. `ffn_width` means nothing to it."""

    def __init__(self, config: ModelConfig, training_counts: Tensor) -> None:
        super().__init__(config, training_counts)
        layer = FilteringHSTULayer if config.filtering else PlainHSTULayer
        self.layers = nn.ModuleList(layer(config) for _ in range(config.num_layers))

    def enter(
        self, items_BT: Tensor, weights_BT: Tensor, timestamps_BT: Tensor, cache: Cache | None = None
    ) -> tuple[Gaussian, Relations]:
        """See `CausalBackbone.enter`; the sight is `Relations`."""
        sight = self.sight(cache, items_BT != PAD)
        neighbour_times = timestamps_BT if cache is None else torch.cat([cache.timestamps, timestamps_BT], 1)
        relations = Relations(
            visible=sight.visible,
            distance=(sight.position[:, :, None] - sight.neighbour_position[:, None, :]).clamp_min(0),
            time_bucket=time_buckets(timestamps_BT, neighbour_times, self.config.time_buckets),
        )
        return self.prior(self.embed(items_BT), items_BT, weights_BT), relations


def time_buckets(timestamps_BT: Tensor, neighbour_timestamps_BS: Tensor, num_buckets: int) -> Tensor:
    """Bucket of the time between a position and a neighbour: ⌊log(max(|Δt|, 1 s))/log 1.35⌋, the last one open.

    Args:
        timestamps_BT, neighbour_timestamps_BS: seconds, float64 (float32 tells today's seconds apart by minutes only),
            NaN for no time.
        num_buckets: how many; ≥ 1.

    Returns:
        (B,T,S) int64, 0 … num_buckets − 1, and num_buckets where either has no time.
    """
    gap_s_BTS = (timestamps_BT[:, :, None] - neighbour_timestamps_BS[:, None, :]).abs()
    # A tensor: as a plain number it would be exported in float32, which moves the buckets' edges.
    log_ratio = gap_s_BTS.new_tensor(math.log(BUCKET_RATIO))
    bucket_BTS = (gap_s_BTS.clamp_min(1).log() / log_ratio).floor().clamp_max(num_buckets - 1)
    return torch.where(gap_s_BTS.isnan(), num_buckets, bucket_BTS).long()


class HSTULayer(nn.Module):
    """What the filtering layer and the plain one share: projections, relative bias, and the gated output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = nn.LayerNorm(config.width, eps=LN_EPS, elementwise_affine=False)
        self.inner = nn.Linear(config.width, 4 * config.width, bias=False)
        self.attended_norm = nn.LayerNorm(config.width, eps=LN_EPS, elementwise_affine=False)
        self.output = nn.Linear(config.width, config.width)
        self.position_bias = nn.Parameter(torch.empty(config.max_len + 1))
        self.time_bias = nn.Parameter(torch.empty(config.time_buckets + 1))
        for weight in (self.inner.weight, self.position_bias, self.time_bias):
            nn.init.normal_(weight, std=WEIGHT_STD)
        nn.init.xavier_uniform_(self.output.weight)

    def project(self, mean_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gate U (B,T,D); value, query and key, each (B,H,T,C): SiLU of a linear map of LN(h)."""
        gate, *parts = F.silu(self.inner(self.norm(mean_BTD))).chunk(4, -1)
        heads = (*mean_BTD.shape[:2], self.config.num_heads, self.config.width // self.config.num_heads)
        value, query, key = (part.reshape(heads).transpose(1, 2) for part in parts)
        return gate, value, query, key

    def shown(self, prior: Gaussian) -> Neighbours:
        """As `layers.FilteringLayer.shown`."""
        _, value, _, key = self.project(prior.mean)
        return Neighbours(key, value, neighbour_precision(prior, self.config))

    def bias(self, relations: Relations) -> Tensor:
        """Relative position plus relative time, (B,T,S), one for all heads."""
        return self.position_bias[relations.distance] + self.time_bias[relations.time_bucket]

    def innovation(self, gate_BTD: Tensor, attended_BTD: Tensor) -> Tensor:
        """W_o (U∘LN(AV)) + b_o (B,T,D); dropout acts before W_o."""
        gated = gate_BTD * self.attended_norm(attended_BTD)
        return self.output(apply_dropout(gated, self.config.dropout, self.training))


class FilteringHSTULayer(HSTULayer):
    """Observe, update, and process noise: there is no feed-forward to predict by (math.md §1–3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        raw_noise = math.log(math.expm1(config.process_noise_init))
        self.raw_process_noise = nn.Parameter(torch.full((config.width,), raw_noise))

    def forward(
        self, prior: Gaussian, relations: Relations, past: Neighbours | None = None, steps: Steps = filtering
    ) -> tuple[Gaussian, Neighbours]:
        """As `layers.FilteringLayer.forward`, with `relations` for who is visible."""
        config = self.config
        gate, value, query, key = self.project(prior.mean)
        shown = Neighbours(key, value, neighbour_precision(prior, config))
        seen = shown.after(past)
        field = steps.sandwich(
            query,
            seen.key,
            seen.value,
            self.bias(relations),
            seen.precision,
            relations.visible,
            config.attention_norm,
            config.shrinkage_dof,
            config.attention_dropout if self.training else 0.0,
        )
        # The field's variance is read here: the LayerNorm takes its scale away, and the gate acts on the mean alone.
        observed = filtering.observation_precision(field, self.output.weight)
        posterior = updated(prior, self.innovation(gate, field.mean), observed, config, steps)
        noise_variance = process_noise_variance(self.raw_process_noise, config)
        return filtering.diffuse(posterior, noise_variance), shown

    def shares(self, prior: Gaussian, relations: Relations) -> Tensor:
        """As `layers.FilteringLayer.shares`: the sandwich's weights as |w|/Σ|w|."""
        _, _, query, key = self.project(prior.mean)
        weights = filtering.sandwich_weights(
            query,
            key,
            self.bias(relations),
            neighbour_precision(prior, self.config),
            relations.visible,
            self.config.attention_norm,
        )
        return filtering.shares(weights)


class PlainHSTULayer(HSTULayer):
    """The layer with filtering off: an ordinary HSTU layer, which carries no precision."""

    def forward(
        self, prior: Gaussian, relations: Relations, past: Neighbours | None = None, steps: Steps = filtering
    ) -> tuple[Gaussian, Neighbours]:
        """As the filtering layer's; the precision is the input's, untouched."""
        gate, value, query, key = self.project(prior.mean)
        shown = Neighbours(key, value, prior.precision.mean(-1))
        seen = shown.after(past)
        attention = filtering.pointwise_attention(
            query, seen.key, self.bias(relations), relations.visible, self.config.attention_norm
        )
        attention = apply_dropout(attention, self.config.attention_dropout, self.training)
        attended = (attention @ seen.value).transpose(1, 2).flatten(2)
        return Gaussian(prior.mean + self.innovation(gate, attended), prior.precision), shown

    def shares(self, prior: Gaussian, relations: Relations) -> Tensor:
        """As the filtering layer's, of the attention."""
        _, _, query, key = self.project(prior.mean)
        attention = filtering.pointwise_attention(
            query, key, self.bias(relations), relations.visible, self.config.attention_norm
        )
        return filtering.shares(attention)
