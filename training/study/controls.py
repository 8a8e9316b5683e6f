"""Controls and noise: what must destroy an effect that is real, and what a history of wrong events does.

U users · E events of all users · B batch · T positions · N catalogue items
"""

import copy
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from model.backbone import Backbone
from model.config import FIRST_ITEM, UNK
from model.precision import PrecisionTable
from training.batches import collate, serving_windows
from training.pipeline import Prepared
from training.splits import Histories, training_counts
from training.survey import traces

SHUFFLED = "shuffled-precision"
"""The variant whose items have one another's τ."""
PERCENTS = (5, 10, 20, 40)
TEST_NOISE: Mapping[str, float] = {f"test-noise-{percent:02}": percent / 100 for percent in PERCENTS}
"""Variants that read, at test time, so large a share of replaced events."""
TRAINING_NOISE: Mapping[str, float] = {f"training-noise-{percent:02}": percent / 100 for percent in PERCENTS}
"""Variants that learn from so large a share of replaced events."""


def shuffled_precision(model: Backbone, seed: int) -> Backbone:
    """A copy of the model in which τ is dealt out anew among the items that it reads under their own number.

    What the model knows of its items otherwise, and the values that τ takes, stay: an advantage that comes from *which*
    item has which τ is gone. Items read as UNK and the special tokens keep theirs.

    Raises:
        ValueError: the model has no table of τ.
    """
    shuffled = copy.deepcopy(model)
    table = shuffled.initial_precision if model.config.filtering else None
    if not isinstance(table, PrecisionTable):
        raise ValueError("only a model with filtering and model.initial_precision=table has a τ for each item")
    own = torch.arange(FIRST_ITEM, len(model.input_number))
    own = own[model.input_number[own] == own]
    dealt = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(seed))]
    with torch.no_grad():
        # θ_i = a + b·log(1+n_i) + δ_i: an item gets both of the other's terms, and with them its τ.
        for values in (table.deviation, table.log_count):
            values[own] = values[dealt]
    return shuffled


def with_noise(histories: Histories, share: float, seed: int, num_items: int) -> tuple[Histories, np.ndarray]:
    """The histories with a share of their events on random items, and which events those are, (E,) bool.

    Drawn are events of positive weight on catalogue items, at least one; each gets another item of the catalogue, all
    N − 1 equally likely, and keeps its weight and its time. One seed gives nested noise: the events replaced at 5 % are
    among those at 10 %, and by the same items.

    Args:
        share: of the events, in (0, 1).
        num_items: N ≥ 2.
    """
    generator = np.random.default_rng(seed)
    order = generator.permutation(np.flatnonzero((histories.weights > 0) & (histories.items >= FIRST_ITEM)))
    steps = generator.integers(1, num_items, size=len(histories.items))
    replaced = np.zeros(len(histories.items), bool)
    replaced[order[: max(1, round(share * len(order)))]] = True
    others = FIRST_ITEM + (histories.items - FIRST_ITEM + steps) % num_items
    return replace(histories, items=np.where(replaced, others, histories.items)), replaced


def with_training_noise(prepared: Prepared, share: float, seed: int) -> tuple[Prepared, int]:
    """The log with replaced events in its training histories, and how many; see `with_noise`.

    The catalogue's training counts are those of the replaced events. Validation and test, histories and targets, are
    the true ones. Nothing of a model comes in: with one seed filtering on and off learn from the same events.
    """
    train, replaced = with_noise(prepared.split.train, share, seed, len(prepared.catalog))
    catalog = prepared.catalog.with_training_counts(training_counts(train, len(prepared.catalog)))
    split = replace(prepared.split, train=train)
    return replace(prepared, catalog=catalog, split=split), int(replaced.sum())


def heard_events(model: Backbone, histories: Histories, replaced: np.ndarray) -> dict[str, float]:
    """How a model hears replaced events beside the others, by the names of `RunRecord.noise`.

    The events of every user's window are pooled. They were drawn without regard to user and place, so that both kinds
    have the same mixture of history lengths and places, the last one's large share included.

    Args:
        histories, replaced: of `with_noise`; at least one replaced event lies in a window.
    """
    told = serving_windows(replace(histories, items=np.where(replaced, FIRST_ITEM, UNK)), model.config.max_len)
    shares: dict[str, list[Tensor]] = {"replaced": [], "other": []}
    precisions: dict[str, list[Tensor]] = {"replaced": [], "other": []}
    for rows, seen in traces(model, histories):
        event_BT = (seen.items >= FIRST_ITEM) | (seen.items == UNK)
        replaced_BT = collate(told, rows).items == FIRST_ITEM
        # The row of a model that is asked by a MASK is longer by that.
        replaced_BT = F.pad(replaced_BT, (0, event_BT.shape[1] - replaced_BT.shape[1]))
        answers = torch.arange(len(rows)), seen.last
        share_BT = torch.stack([layer.weights[answers] for layer in seen.heard]).mean(0)
        for kind, members_BT in (("replaced", event_BT & replaced_BT), ("other", event_BT & ~replaced_BT)):
            shares[kind].append(share_BT[members_BT])
            precisions[kind].append(seen.initial_precision[members_BT])
    figures = {f"kriging_weight_{kind}": torch.cat(parts).double().mean().item() for kind, parts in shares.items()}
    if model.config.filtering:
        for kind, parts in precisions.items():
            figures[f"precision_{kind}"] = torch.cat(parts).double().log().mean().exp().item()
    return figures
