"""Small histories, splits and models that the tests of training/ share."""

from collections.abc import Sequence

import numpy as np
import torch

from model.backbone import Backbone
from model.build import build_model
from model.config import FIRST_ITEM, ModelConfig
from training.splits import Histories, Split, Targets, training_counts

SMALL = ModelConfig(max_len=8, width=16, num_layers=1, num_heads=2, ffn_width=32, dropout=0.0)


def histories_of(
    users: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]] | None = None,
    timestamps: Sequence[Sequence[float]] | None = None,
) -> Histories:
    """Histories of users given as lists of item numbers; unless told, every weight is 1 and no event has a time."""
    items = [item for user in users for item in user]
    flat_weights = [1.0] * len(items) if weights is None else [weight for user in weights for weight in user]
    flat_timestamps = [np.nan] * len(items) if timestamps is None else [time for user in timestamps for time in user]
    return Histories(
        user_ids=[f"u{row}" for row in range(len(users))],
        offsets=np.cumsum([0, *map(len, users)]).astype(np.int64),
        items=np.array(items, dtype=np.int64),
        weights=np.array(flat_weights, dtype=np.float32),
        timestamps=np.array(flat_timestamps, dtype=np.float64),
    )


def targets_of(users: Sequence[Sequence[int]], targets: Sequence[int]) -> Targets:
    return Targets(histories_of(users), np.array(targets, dtype=np.int64))


def successor_walks(num_users: int, num_items: int, length: int, seed: int = 0) -> list[list[int]]:
    """Users who walk along one random cycle through all items: the last item alone decides the next."""
    generator = np.random.default_rng(seed)
    cycle = FIRST_ITEM + generator.permutation(num_items)
    starts = generator.integers(num_items, size=num_users)
    return [[int(cycle[(start + step) % num_items]) for step in range(length)] for start in starts]


def leave_one_out(walks: Sequence[Sequence[int]]) -> Split:
    """The last item of each walk to test on, the one before to validate with, the rest to train on."""
    return Split(
        name="leave_one_out",
        train=histories_of([walk[:-2] for walk in walks]),
        validation=targets_of([walk[:-2] for walk in walks], [walk[-2] for walk in walks]),
        test=targets_of([walk[:-1] for walk in walks], [walk[-1] for walk in walks]),
    )


def small_model(num_items: int, filtering: bool = True, seed: int = 0, spread: float = 1.0) -> Backbone:
    """An untrained model whose items differ by far more than they do at initialisation."""
    torch.manual_seed(seed)
    counts = torch.arange(num_items) % 7
    model = build_model(SMALL.model_copy(update={"filtering": filtering}), counts)
    with torch.no_grad():
        model.item_embedding.weight.normal_(std=spread)
    return model.eval()


def fresh_model(split: Split, num_items: int, config: ModelConfig = SMALL, seed: int = 0) -> Backbone:
    """A model as a training run would begin with."""
    torch.manual_seed(seed)
    return build_model(config, torch.from_numpy(training_counts(split.train, num_items)))
