"""Looking inside an encoder while it reads: who is heard, how much, and what that does to the precision.

B batch · T positions (BOS first, then events, a MASK last where the model is asked by one, right padding)
S = T neighbours · D width · H heads
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from model import filtering
from model.backbone import Backbone
from model.config import MASK, PAD
from model.filtering import Dynamics, Gaussian, KrigedField, Posterior
from training.batches import Batch


class Heard(NamedTuple):
    """Whom a layer's positions listened to.

    `weights` (B,T,S), each neighbour's share, mean over heads: the kriging weights; HSTU's, of either sign, as
    |w|/Σ|w|; in a plain layer the attention, its shares likewise. A row sums to 1, or to 0 without a neighbour.
    `effective_sample_size` (B,T), Kish's, mean over heads.
    """

    weights: Tensor
    effective_sample_size: Tensor


@dataclass(frozen=True)
class Trace:
    """What happened while some histories were encoded.

    `items`, `weights` (B,T): the positions read. `last` (B,): the one that answers. Per layer: `heard`, and `gain`
    (B,T), the Kalman gain, mean over dimensions; no gain without filtering. `initial_precision`, `final_precision`
    (B,T): before the first layer and after the last, mean over dimensions, 0 on padding, infinite without filtering.
    `final`: the state (B,D) of the position that answers.
    """

    items: Tensor
    weights: Tensor
    last: Tensor
    heard: tuple[Heard, ...]
    gain: tuple[Tensor, ...]
    initial_precision: Tensor
    final_precision: Tensor
    final: Gaussian


class Recorder:
    """The filtering steps, unchanged, of which it keeps what a `Trace` shows; see `model.layers.Steps`."""

    def __init__(self) -> None:
        self.heard: list[Heard] = []
        self.gain: list[Tensor] = []
        self.neighbour_precision: list[Tensor] = []
        """λ̄ (B,S) of each layer."""

    def krige(
        self,
        query_BHTC: Tensor,
        key_BHSC: Tensor,
        value_BHSC: Tensor,
        neighbour_precision_BS: Tensor,
        visible_BTS: Tensor,
        shrinkage_dof: float,
        dropout: float,
    ) -> KrigedField:
        """`filtering.krige`."""
        weights = filtering.kriging_weights(query_BHTC, key_BHSC, neighbour_precision_BS, visible_BTS)
        field = filtering.krige(
            query_BHTC, key_BHSC, value_BHSC, neighbour_precision_BS, visible_BTS, shrinkage_dof, dropout
        )
        self._keep(weights, field, neighbour_precision_BS)
        return field

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
    ) -> KrigedField:
        """`filtering.sandwich`."""
        weights = filtering.sandwich_weights(
            query_BHTC, key_BHSC, bias_BTS, neighbour_precision_BS, visible_BTS, attention_norm
        )
        field = filtering.sandwich(
            query_BHTC,
            key_BHSC,
            value_BHSC,
            bias_BTS,
            neighbour_precision_BS,
            visible_BTS,
            attention_norm,
            shrinkage_dof,
            dropout,
        )
        self._keep(filtering.shares(weights), field, neighbour_precision_BS)
        return field

    def update(self, prior: Gaussian, innovation_BTD: Tensor, observation_precision_BTD: Tensor) -> Posterior:
        """`filtering.update`."""
        posterior = filtering.update(prior, innovation_BTD, observation_precision_BTD)
        self.gain.append(posterior.gain.mean(-1))
        return posterior

    def predict(self, posterior: Gaussian, dynamics: Dynamics, dropout: float) -> Gaussian:
        """`filtering.predict`."""
        return filtering.predict(posterior, dynamics, dropout)

    def predict_post_norm(self, posterior: Gaussian, dynamics: Dynamics, dropout: float) -> Gaussian:
        """`filtering.predict_post_norm`."""
        return filtering.predict_post_norm(posterior, dynamics, dropout)

    def _keep(self, weights_BHTS: Tensor, field: KrigedField, neighbour_precision_BS: Tensor) -> None:
        self.heard.append(Heard(weights_BHTS.mean(1), field.effective_sample_size.mean(1)))
        self.neighbour_precision.append(neighbour_precision_BS)


@torch.no_grad()
def trace(model: Backbone, batch: Batch) -> Trace:
    """Encode histories exactly as `Backbone.final_state` does, and keep what happens inside.

    Args:
        model: is put into eval mode.
        batch: windows as `collate` pads them; their targets are not read.
    """
    model.eval()
    items, weights, timestamps = with_query(model, batch)
    real_BT = items != PAD
    last = real_BT.sum(1) - 1
    recorder = Recorder()
    with _plain_layers_heard(model) as heard_plain:
        state = model.encode(items, weights, timestamps, recorder)
    final_precision = state.precision.mean(-1)
    rows = torch.arange(len(items))
    return Trace(
        items=items,
        weights=weights,
        last=last,
        heard=tuple(recorder.heard or heard_plain),
        gain=tuple(recorder.gain),
        initial_precision=torch.where(real_BT, recorder.neighbour_precision[0], 0)
        if model.config.filtering
        else final_precision,
        final_precision=final_precision,
        final=Gaussian(state.mean[rows, last], state.precision[rows, last]),
    )


def with_query(model: Backbone, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Items, weights and timestamps (B,T) as `final_state` has them encoded: a MASK last, if the model asks by one."""
    if model.causal:
        return batch.items, batch.weights, batch.timestamps
    mask_B1 = (batch.items != PAD).sum(1, keepdim=True)
    return (
        F.pad(batch.items, (0, 1), value=PAD).scatter(1, mask_B1, MASK),
        F.pad(batch.weights, (0, 1), value=1.0).scatter(1, mask_B1, 1.0),
        F.pad(batch.timestamps, (0, 1), value=torch.nan).scatter(1, mask_B1, torch.nan),
    )


@contextmanager
def _plain_layers_heard(model: Backbone) -> Iterator[list[Heard]]:
    """What the plain layers' attention hears while the context lasts: they call no steps, so their inputs are read."""
    heard: list[Heard] = []

    def listen(layer: Any, inputs: tuple[Any, ...]) -> None:
        weights_BHTS = layer.shares(*inputs[:2])
        squares = weights_BHTS.square().sum(-1)
        sample_size = torch.where(squares > 0, 1 / squares, 0)
        heard.append(Heard(weights_BHTS.mean(1), sample_size.mean(1)))

    layers = [] if model.config.filtering else list(model.layers)
    hooks = [layer.register_forward_pre_hook(listen) for layer in layers]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()
