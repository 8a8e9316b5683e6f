"""One layer of a Pre-LN backbone: the filtering layer, and the plain layer it becomes when switched off."""

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model import filtering
from model.config import ModelConfig
from model.filtering import Dynamics, Gaussian, KrigedField, Posterior


class Steps(Protocol):
    """The steps a filtering layer calls: `model.filtering` itself, or the nodes that an export emits."""

    def krige(
        self,
        query_BHTC: Tensor,
        key_BHSC: Tensor,
        value_BHSC: Tensor,
        neighbour_precision_BS: Tensor,
        visible_BTS: Tensor,
        shrinkage_dof: float,
        dropout: float,
    ) -> KrigedField: ...

    def update(self, prior: Gaussian, innovation_BTD: Tensor, observation_precision_BTD: Tensor) -> Posterior: ...

    def predict(self, posterior: Gaussian, dynamics: Dynamics, dropout: float) -> Gaussian: ...


class Attention(nn.Module):
    """Pre-LN projections shared by both layers: LN, then query, key, value, and the output projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm = nn.LayerNorm(config.width)
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)

    def project(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """query, key, value, each (B,H,T,C), of the normalised input."""
        normalised = self.norm(hidden_BTD)
        return tuple(
            linear(normalised).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )


class FeedForward(nn.Module):
    """Pre-LN feed-forward: LN, linear, GELU, linear."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.inner = nn.Linear(config.width, config.ffn_width)
        self.outer = nn.Linear(config.ffn_width, config.width)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return self.outer(F.gelu(self.inner(self.norm(hidden_BTD))))


class FilteringLayer(nn.Module):
    """Observe, update, predict (math.md §1–3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        raw_noise = math.log(math.expm1(config.process_noise_init))
        self.raw_process_noise = nn.Parameter(torch.full((config.width,), raw_noise))

    def forward(self, prior: Gaussian, visible_BTS: Tensor, steps: Steps = filtering) -> Gaussian:
        """The predicted state after this layer, the next layer's prior."""
        dropout = self.config.dropout if self.training else 0.0
        attention_dropout = self.config.attention_dropout if self.training else 0.0

        query, key, value = self.attention.project(prior.mean)
        neighbour_precision = prior.precision.mean(-1)
        field = steps.krige(
            query, key, value, neighbour_precision, visible_BTS, self.config.shrinkage_dof, attention_dropout
        )
        innovation = F.dropout(self.attention.output(field.mean), dropout, self.training)
        observed = filtering.observation_precision(field, self.attention.output.weight)
        posterior = steps.update(prior, innovation, observed)
        return steps.predict(Gaussian(posterior.mean, posterior.precision), self.dynamics(), dropout)

    def dynamics(self) -> Dynamics:
        """The feed-forward's parameters and Q = softplus(q), as `filtering.predict` takes them."""
        block = self.feed_forward
        return Dynamics(
            ln_weight=block.norm.weight,
            ln_bias=block.norm.bias,
            w1=block.inner.weight,
            b1=block.inner.bias,
            w2=block.outer.weight,
            b2=block.outer.bias,
            process_noise_variance=F.softplus(self.raw_process_noise),
            ln_eps=block.norm.eps,
        )


class PlainLayer(nn.Module):
    """The layer with filtering off: an ordinary Pre-LN Transformer layer, which carries no precision."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)

    def forward(self, prior: Gaussian, visible_BTS: Tensor, steps: Steps = filtering) -> Gaussian:
        """The state after this layer; its precision is the input's, untouched."""
        dropout = self.config.dropout if self.training else 0.0
        query, key, value = self.attention.project(prior.mean)
        attended = F.scaled_dot_product_attention(
            query, key, value, visible_BTS[:, None], self.config.attention_dropout if self.training else 0.0
        )
        innovation = self.attention.output(attended.transpose(1, 2).flatten(2))
        hidden = prior.mean + F.dropout(innovation, dropout, self.training)
        drift = self.feed_forward(hidden)
        return Gaussian(hidden + F.dropout(drift, dropout, self.training), prior.precision)
