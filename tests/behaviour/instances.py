"""One small instance of every backbone, and the rows that the suite feeds to it.

A new backbone adds a row to `BY_HEART`; the suite asks nothing else of it.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from model.backbone import Backbone
from model.build import BACKBONES, build_model
from model.config import BOS, FIRST_ITEM, PAD, UNK, ModelConfig, window_start
from training.config import OptimizerConfig

MAX_LEN = 8
SIZES = {"max_len": MAX_LEN, "width": 16, "num_layers": 2, "num_heads": 2, "ffn_width": 32, "dropout": 0.0}
COUNTS = torch.tensor([0, 1, 2, 3, 5, 8, 40, 300, 1, 2000, 7, 9])
NUM_ITEMS = len(COUNTS)


def settings(epochs: int, batch_size: int, learning_rate: float = 1e-2, **others: Any) -> OptimizerConfig:
    """Of the optimiser, without early stopping."""
    return OptimizerConfig(epochs=epochs, patience=epochs, batch_size=batch_size, learning_rate=learning_rate, **others)


BY_HEART = {
    "sasrec": settings(epochs=15, batch_size=32),
    "hstu": settings(epochs=15, batch_size=32),
    # A masked row tells it of one or two events, where a causal one tells of eight.
    "bert4rec": settings(epochs=150, batch_size=50, last_item_share=0.7),
}
"""How each backbone learns 100 users of eight events by heart, in at most 300 steps."""


class Case(NamedTuple):
    """A backbone, with its filtering layers or plain."""

    backbone: str
    filtering: bool

    @property
    def causal(self) -> bool:
        return BACKBONES[self.backbone].causal

    def config(self, **changes: Any) -> ModelConfig:
        return ModelConfig(backbone=self.backbone, filtering=self.filtering, **(SIZES | changes))

    def fresh(self, counts: Tensor, seed: int = 0, **changes: Any) -> Backbone:
        """A model as a training run begins with."""
        torch.manual_seed(seed)
        return build_model(self.config(**changes), counts)

    def perturbed(self, dtype: torch.dtype = torch.float32, seed: int = 1, **changes: Any) -> Backbone:
        """A model in eval mode with every parameter off its starting value, so that none is without effect."""
        model = self.fresh(COUNTS, seed, **changes).to(dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape))
        return model


EVERY_CASE = [
    pytest.param(Case(backbone, filtering), id=f"{backbone}-{'on' if filtering else 'off'}")
    for backbone in BACKBONES
    for filtering in (True, False)
]


class Rows(NamedTuple):
    """What an encoder reads, (B,T) each."""

    items: Tensor
    weights: Tensor
    timestamps: Tensor

    def lengths(self) -> list[int]:
        return (self.items != PAD).sum(1).tolist()

    def row(self, index: int, length: int) -> "Rows":
        """One row alone, its first positions."""
        return Rows(*(part[index : index + 1, :length] for part in self))

    def padded(self, padding: int) -> "Rows":
        """The rows with more padding, of an odd weight and time, which must mean nothing."""
        fills = (PAD, 1e6, 12.0)
        return Rows(
            *(torch.nn.functional.pad(part, (0, padding), value=fill) for part, fill in zip(self, fills, strict=True))
        )


def random_rows(seed: int, batch: int, length: int, dtype: torch.dtype = torch.float32) -> Rows:
    """BOS, then random events; the first row is full and the others end at random.

    One event in six is UNK, one in six has no time; the time between two runs from seconds to a week.
    """
    rng = np.random.default_rng(seed)
    items = rng.integers(FIRST_ITEM, FIRST_ITEM + NUM_ITEMS, size=(batch, length))
    items[rng.random(items.shape) < 1 / 6] = UNK
    items[:, 0] = BOS
    weights = rng.uniform(0.25, 3.0, size=items.shape)
    weights[:, 0] = 1.0
    timestamps = 1.7e9 + np.exp(rng.uniform(0, np.log(604_800), size=items.shape)).cumsum(1)
    timestamps[rng.random(items.shape) < 1 / 6] = np.nan
    timestamps[:, 0] = np.nan
    lengths = rng.integers(1, length + 1, size=batch)
    lengths[0] = length
    padding = np.arange(length) >= lengths[:, None]
    items[padding], weights[padding], timestamps[padding] = PAD, 1.0, np.nan
    return Rows(torch.from_numpy(items), torch.from_numpy(weights).to(dtype), torch.from_numpy(timestamps))


def window(events: Rows, count: int) -> Rows:
    """What a request after `count` events would encode: BOS and the window's events."""
    start = window_start(count, MAX_LEN)
    bos = Rows(*(torch.full_like(part[:, :1], value) for part, value in zip(events, (BOS, 1, torch.nan), strict=True)))
    return Rows(*(torch.cat([first, part[:, start:count]], 1) for first, part in zip(bos, events, strict=True)))


def user(seed: int, dtype: torch.dtype) -> Rows:
    """3L events of one user."""
    return Rows(*(part[:, 1:] for part in random_rows(seed, batch=1, length=3 * MAX_LEN + 1, dtype=dtype)))


def at(rows: Rows, places: slice) -> Rows:
    """Some positions of every row."""
    return Rows(*(part[:, places] for part in rows))
