"""From histories to padded batches: windows by the window rule, trimmed and bucketed by length.

W windows · B rows of a batch · T positions (BOS first) · R real target positions of a batch
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from model.config import BOS, FIRST_ITEM, MASK, PAD, UNK, window_start
from training.splits import Histories, TrainingHistories

POOL_BATCHES = 32
"""Batches are cut from pools of this many, each sorted by length: little padding, still random."""


@dataclass(frozen=True)
class Windows:
    """Windows over one flat list of events: what each shows, and which of its positions predict.

    `items`, `weights`, `timestamps` (E+1,): all events with weight > 0, user after user, and one PAD behind them.
    Per window (W,): `start`, its first event in the flat list; `num_inputs` events shown; `first_target` and
    `num_targets`, the positions that predict the event right after them (position p has seen BOS and p events).
    """

    items: Tensor
    weights: Tensor
    timestamps: Tensor
    start: Tensor
    num_inputs: Tensor
    first_target: Tensor
    num_targets: Tensor

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Batch:
    """Padded rows: `items`, `weights`, `timestamps` (B,T), the last NaN where there is no time; `last` (B,) each
    row's last real position; `positions` (R,) indices into the flattened (B·T) grid that predict, and their
    `targets` (R,) item numbers."""

    items: Tensor
    weights: Tensor
    timestamps: Tensor
    last: Tensor
    positions: Tensor
    targets: Tensor

    def part(self, number: int, parts: int) -> "Batch":
        """Every `parts`-th row, from `number` on. Rows come sorted by length, so that the parts are alike."""
        rows = slice(number, None, parts)
        row, column = self.positions // self.items.shape[1], self.positions % self.items.shape[1]
        mine = row % parts == number
        return Batch(
            items=self.items[rows],
            weights=self.weights[rows],
            timestamps=self.timestamps[rows],
            last=self.last[rows],
            positions=((row // parts) * self.items.shape[1] + column)[mine],
            targets=self.targets[mine],
        )

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device."""
        return Batch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def training_windows(histories: Histories, max_len: int, prefixes: bool = False) -> Windows:
    """Every window that the rule visits: each event is a target once, in the context it is served in.

    A user's first window predicts from BOS on; a later one predicts from where the earlier one had to stop. With
    `prefixes` each of these predictions is a window of its own, which ends with what it predicts from.
    """
    events, bounds = _weighted_events(histories)
    rows = []
    for begin, end in pairwise(bounds):
        num_events = end - begin
        if num_events == 0:
            continue
        for offset in range(0, window_start(num_events - 1, max_len) + 1, max_len // 2):
            first_target = 0 if offset == 0 else max_len // 2 + 1
            last_target = min(max_len, num_events - 1 - offset)
            rows.append((begin + offset, last_target, first_target, last_target - first_target + 1))
    windows = Windows(*events, *torch.tensor(rows, dtype=torch.int64).reshape(-1, 4).unbind(1))
    return _one_target_each(windows) if prefixes else windows


def _one_target_each(windows: Windows) -> Windows:
    """A window for every target of these, cut off behind the position that predicts it."""
    window = torch.arange(len(windows)).repeat_interleave(windows.num_targets)
    before = (windows.num_targets.cumsum(0) - windows.num_targets)[window]
    position = windows.first_target[window] + torch.arange(len(window)) - before
    return replace(
        windows,
        start=windows.start[window],
        num_inputs=position,
        first_target=position,
        num_targets=torch.ones_like(position),
    )


class TrainingWindows:
    """The windows of all training histories, those of one piece in memory at a time.

    Args:
        train: the histories. Each piece is read once at the start, to count its windows.
        max_len: L, in events.
        prefixes: see `training_windows`.
    """

    def __init__(self, train: TrainingHistories, max_len: int, prefixes: bool = False) -> None:
        self._train, self._max_len, self._prefixes = train, max_len, prefixes
        self._piece, self._windows = 0, training_windows(train.piece(0), max_len, prefixes)
        self._sizes = [len(self._of_piece(number)) for number in range(train.num_pieces)]

    def num_batches(self, batch_size: int) -> int:
        """Batches of an epoch; none mixes pieces."""
        return sum(-(-size // batch_size) for size in self._sizes)

    def epoch(self, batch_size: int, generator: torch.Generator) -> Iterator[tuple[Windows, Tensor]]:
        """Every window once: the pieces in random order, the windows of each shuffled.

        Yields:
            windows, and which of them (B,) are the batch.
        """
        for number in torch.randperm(len(self._sizes), generator=generator).tolist():
            windows = self._of_piece(number)
            for rows in shuffled_batches(windows, batch_size, generator):
                yield windows, rows

    def _of_piece(self, number: int) -> Windows:
        if number != self._piece:
            windows = training_windows(self._train.piece(number), self._max_len, self._prefixes)
            self._piece, self._windows = number, windows
        return self._windows


def serving_windows(histories: Histories, max_len: int) -> Windows:
    """The one window per user that a request would encode; no targets."""
    events, bounds = _weighted_events(histories)
    counts = np.diff(bounds)
    starts = np.array([window_start(int(count), max_len) for count in counts], dtype=np.int64)
    start, num_inputs = torch.from_numpy(bounds[:-1] + starts), torch.from_numpy(counts - starts)
    none = torch.zeros_like(start)
    return Windows(*events, start, num_inputs, none, none)


def collate(windows: Windows, rows: Tensor) -> Batch:
    """The batch of the named windows, padded to the longest of them."""
    num_inputs = windows.num_inputs[rows]
    steps = torch.arange(int(num_inputs.max()) + 1)
    events = (windows.start[rows, None] + steps).clamp_max(len(windows.items) - 1)  # the PAD at the end

    shown = steps < num_inputs[:, None]
    items = torch.full(events.shape, PAD)
    weights = torch.ones(events.shape)
    items[:, 0] = BOS
    items[:, 1:][shown[:, :-1]] = windows.items[events][shown]
    weights[:, 1:][shown[:, :-1]] = windows.weights[events][shown]
    timestamps = torch.full(events.shape, torch.nan, dtype=torch.float64)
    timestamps[:, 1:][shown[:, :-1]] = windows.timestamps[events][shown]

    offset = steps - windows.first_target[rows, None]
    predicts = (offset >= 0) & (offset < windows.num_targets[rows, None])
    predicts &= windows.items[events] >= FIRST_ITEM  # an unknown item is never a target
    positions = predicts.flatten().nonzero().squeeze(1)
    targets = windows.items[events].flatten()[positions]
    return Batch(items, weights, timestamps, num_inputs, positions, targets)


def collate_masked(
    windows: Windows, rows: Tensor, mask_share: float, last_item_share: float, generator: torch.Generator
) -> Batch:
    """The batch of the named training windows with events masked, for a model that sees what follows a position.

    A row is drawn to be one of two kinds:
    - *served*: one of the window's targets, all equally likely, alone is masked, and the row ends there. It is the
      row of a request at that moment, so that over the epochs each event is a target in the context it is served in;
    - *cloze*: the whole window, its last target too, with events masked at random, at least one of them.

    Args:
        windows: of `training_windows`.
        mask_share: probability in (0, 1) that a cloze row's event is masked.
        last_item_share: probability in [0, 1] that a row is a served one.

    Returns:
        rows whose masked events are MASK of weight 1 without a time, and are the batch's positions; an unknown
        item is never masked.
    """
    served = torch.rand(len(rows), generator=generator) < last_item_share
    choice = torch.randint(2**31, (len(rows),), generator=generator) % windows.num_targets[rows]
    last_target = torch.where(served, windows.first_target[rows] + choice, windows.num_inputs[rows])
    none = torch.zeros_like(last_target)
    shown = replace(windows, start=windows.start[rows], num_inputs=last_target + 1, first_target=none, num_targets=none)
    batch = collate(shown, torch.arange(len(rows)))

    known = batch.items >= FIRST_ITEM
    draws = torch.rand(known.shape, generator=generator).masked_fill(~known, 2.0)
    cloze = (draws < mask_share) | (draws == draws.amin(1, keepdim=True))
    ends = torch.arange(known.shape[1]) == batch.last[:, None]
    masked = torch.where(served[:, None], ends, cloze) & known
    return replace(
        batch,
        items=batch.items.masked_fill(masked, MASK),
        weights=batch.weights.masked_fill(masked, 1.0),
        timestamps=batch.timestamps.masked_fill(masked, torch.nan),
        positions=masked.flatten().nonzero().squeeze(1),
        targets=batch.items[masked],
    )


def shuffled_batches(windows: Windows, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Rows of each batch of one epoch: random, of similar length within a batch."""
    order = torch.randperm(len(windows), generator=generator)
    batches = []
    for pool in order.split(batch_size * POOL_BATCHES):
        batches += pool[windows.num_inputs[pool].argsort(stable=True)].split(batch_size)
    for index in torch.randperm(len(batches), generator=generator).tolist():
        yield batches[index]


def with_unknowns(batch: Batch, rate: float, generator: torch.Generator) -> Batch:
    """The batch with a share of its input events read as UNK, so that UNK is trained (math.md)."""
    replaced = (torch.rand(batch.items.shape, generator=generator) < rate) & (batch.items >= FIRST_ITEM)
    return replace(batch, items=batch.items.masked_fill(replaced, UNK))


def _weighted_events(histories: Histories) -> tuple[tuple[Tensor, Tensor, Tensor], np.ndarray]:
    """Items, weights and timestamps of the events with weight > 0, flat, and the users' bounds in them.

    An event of weight 0 stays out of the history.
    """
    kept = histories.weights > 0
    bounds = np.concatenate([[0], np.cumsum(kept)])[histories.offsets]
    items = np.append(histories.items[kept], PAD).astype(np.int64)
    weights = np.append(histories.weights[kept], 1).astype(np.float32)
    timestamps = np.append(histories.timestamps[kept], np.nan).astype(np.float64)
    return (torch.from_numpy(items), torch.from_numpy(weights), torch.from_numpy(timestamps)), bounds
