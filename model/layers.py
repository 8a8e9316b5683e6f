"""One layer of a Pre-LN backbone: the filtering layer, and the plain layer it becomes when switched off.

`model.bert4rec` has the Post-LN forms of both.
"""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model import filtering
from model.config import ModelConfig
from model.dropout import apply_dropout
from model.filtering import Dynamics, Gaussian, KrigedField, Posterior

NO_PROCESS_NOISE = 1e-6
"""Q where the process noise is left out: a precision stays finite where J = −1."""


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

    def sandwich(
        self,
        query_BHTC: Tensor,
        key_BHSC: Tensor,
        value_BHSC: Tensor,
        bias_BTS: Tensor,
        neighbour_precision_BS: Tensor,
        visible_BTS: Tensor,
        attention_norm: float,
        shrinkage_dof: float,
        dropout: float,
    ) -> KrigedField: ...

    def update(self, prior: Gaussian, innovation_BTD: Tensor, observation_precision_BTD: Tensor) -> Posterior: ...

    def predict(self, posterior: Gaussian, dynamics: Dynamics, dropout: float) -> Gaussian: ...

    def predict_post_norm(self, posterior: Gaussian, dynamics: Dynamics, dropout: float) -> Gaussian: ...


class Neighbours(NamedTuple):
    """What positions show to those that attend to them, in one layer.

    `key`, `value` (B,H,S,C); `precision` (B,S), λ̄, the mean over dimensions; infinite in a plain layer.
    """

    key: Tensor
    value: Tensor
    precision: Tensor

    def after(self, past: "Neighbours | None") -> "Neighbours":
        """These behind earlier ones, if there are any."""
        if past is None:
            return self
        return Neighbours(
            torch.cat([past.key, self.key], 2),
            torch.cat([past.value, self.value], 2),
            torch.cat([past.precision, self.precision], 1),
        )


class Attention(nn.Module):
    """The projections query, key, value and output, and their LayerNorm, which the layer applies where it has it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm = nn.LayerNorm(config.width)
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)

    def project(self, normalised_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """query, key, value, each (B,H,T,C)."""
        return tuple(
            linear(normalised_BTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )

    def show(self, normalised_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """key and value alone, each (B,H,T,C)."""
        return tuple(
            linear(normalised_BTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear in (self.key, self.value)
        )

    def shares(self, normalised_BTD: Tensor, neighbour_precision_BS: Tensor, visible_BTS: Tensor) -> Tensor:
        """How much each position hears of each neighbour, (B,H,T,S): the kriging weights."""
        query, key, _ = self.project(normalised_BTD)
        return filtering.kriging_weights(query, key, neighbour_precision_BS, visible_BTS)


class FeedForward(nn.Module):
    """Linear, GELU, linear, and their LayerNorm, which the layer applies where it has it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.inner = nn.Linear(config.width, config.ffn_width)
        self.outer = nn.Linear(config.ffn_width, config.width)

    def forward(self, normalised_BTD: Tensor) -> Tensor:
        return self.outer(F.gelu(self.inner(normalised_BTD)))


def neighbour_precision(prior: Gaussian, config: ModelConfig) -> Tensor:
    """λ̄ (B,T), the mean over dimensions, by which others weigh these positions (math.md §1 [P])."""
    mean_BT = prior.precision.mean(-1)
    return mean_BT if config.parts.kriging_bias else torch.ones_like(mean_BT)


def updated(
    prior: Gaussian, innovation_BTD: Tensor, observation_precision_BTD: Tensor, config: ModelConfig, steps: Steps
) -> Gaussian:
    """The posterior of `filtering.update`."""
    posterior = steps.update(prior, innovation_BTD, observation_precision_BTD)
    mean = posterior.mean if config.parts.gain else prior.mean + innovation_BTD
    return Gaussian(mean, posterior.precision)


def process_noise_variance(raw_D: Tensor, config: ModelConfig) -> Tensor:
    """Q = softplus(q) (D,) of a layer (math.md §3)."""
    return F.softplus(raw_D) if config.parts.process_noise else torch.full_like(raw_D, NO_PROCESS_NOISE)


class FilteringLayer(nn.Module):
    """Observe, update, predict (math.md §1–3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        raw_noise = math.log(math.expm1(config.process_noise_init))
        self.raw_process_noise = nn.Parameter(torch.full((config.width,), raw_noise))

    def forward(
        self, prior: Gaussian, visible_BTS: Tensor, past: Neighbours | None = None, steps: Steps = filtering
    ) -> tuple[Gaussian, Neighbours]:
        """The predicted state after this layer, the next layer's prior; and what these positions show.

        Args:
            prior: of the T positions.
            visible_BTS: which neighbours each sees; S counts the earlier ones first, then the T positions.
            past: what earlier positions showed.
            steps: the filtering steps.
        """
        posterior, shown = self.observe(prior, self.attention.norm(prior.mean), visible_BTS, past, steps)
        dynamics = self.dynamics()
        predicted = steps.predict(posterior, dynamics, self.config.dropout if self.training else 0.0)
        if not self.config.parts.jacobian:
            predicted = Gaussian(
                predicted.mean, filtering.diffuse(posterior, dynamics.process_noise_variance).precision
            )
        return predicted, shown

    def shown(self, prior: Gaussian) -> Neighbours:
        """What positions show to others, without their being asked."""
        return Neighbours(
            *self.attention.show(self.attention.norm(prior.mean)), neighbour_precision(prior, self.config)
        )

    def observe(
        self, prior: Gaussian, normalised_BTD: Tensor, visible_BTS: Tensor, past: Neighbours | None, steps: Steps
    ) -> tuple[Gaussian, Neighbours]:
        """The posterior, the prior updated by what kriging finds at the neighbours; and what these positions show."""
        attention_dropout = self.config.attention_dropout if self.training else 0.0
        query, key, value = self.attention.project(normalised_BTD)
        shown = Neighbours(key, value, neighbour_precision(prior, self.config))
        field = steps.krige(query, *shown.after(past), visible_BTS, self.config.shrinkage_dof, attention_dropout)
        innovation = apply_dropout(self.attention.output(field.mean), self.config.dropout, self.training)
        observed = filtering.observation_precision(field, self.attention.output.weight)
        return updated(prior, innovation, observed, self.config, steps), shown

    def shares(self, prior: Gaussian, visible_BTS: Tensor) -> Tensor:
        """How much each position hears of each neighbour in this layer, (B,H,T,S); see `forward`."""
        precision_BS = neighbour_precision(prior, self.config)
        return self.attention.shares(self.attention.norm(prior.mean), precision_BS, visible_BTS)

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
            process_noise_variance=process_noise_variance(self.raw_process_noise, self.config),
            ln_eps=block.norm.eps,
        )


class PlainLayer(nn.Module):
    """The layer with filtering off: an ordinary Pre-LN Transformer layer, which carries no precision."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)

    def forward(
        self, prior: Gaussian, visible_BTS: Tensor, past: Neighbours | None = None, steps: Steps = filtering
    ) -> tuple[Gaussian, Neighbours]:
        """As `FilteringLayer.forward`; the precision is the input's, untouched."""
        innovation, shown = self.attend(prior, self.attention.norm(prior.mean), visible_BTS, past)
        hidden = prior.mean + innovation
        return Gaussian(hidden + self.drift(self.feed_forward.norm(hidden)), prior.precision), shown

    def shown(self, prior: Gaussian) -> Neighbours:
        """As `FilteringLayer.shown`."""
        return Neighbours(*self.attention.show(self.attention.norm(prior.mean)), prior.precision.mean(-1))

    def attend(
        self, prior: Gaussian, normalised_BTD: Tensor, visible_BTS: Tensor, past: Neighbours | None
    ) -> tuple[Tensor, Neighbours]:
        """Softmax attention and its output projection, what the residual adds; and what these positions show."""
        query, key, value = self.attention.project(normalised_BTD)
        shown = Neighbours(key, value, prior.precision.mean(-1))
        seen = shown.after(past)
        attended = F.scaled_dot_product_attention(
            query, seen.key, seen.value, visible_BTS[:, None], self.config.attention_dropout if self.training else 0.0
        )
        innovation = self.attention.output(attended.transpose(1, 2).flatten(2))
        return apply_dropout(innovation, self.config.dropout, self.training), shown

    def shares(self, prior: Gaussian, visible_BTS: Tensor) -> Tensor:
        """As `FilteringLayer.shares`: the attention."""
        return self.equal_shares(self.attention.norm(prior.mean), visible_BTS)

    def equal_shares(self, normalised_BTD: Tensor, visible_BTS: Tensor) -> Tensor:
        """The kriging weights of neighbours of equal precision: softmax attention."""
        return self.attention.shares(normalised_BTD, torch.ones_like(normalised_BTD[..., 0]), visible_BTS)

    def drift(self, normalised_BTD: Tensor) -> Tensor:
        """The feed-forward, what the residual adds."""
        return apply_dropout(self.feed_forward(normalised_BTD), self.config.dropout, self.training)
