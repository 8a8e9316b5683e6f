"""What filtering does over the users of a log: gain, precision, effective sample size and attention, in bins.

Every figure is a mean over positions with a 95 % interval in which a user, with all of their positions, counts as one
draw: positions of one history are alike. Precisions spread over decades; theirs are geometric means.

B batch · T positions · K series: the mean over layers first, then every layer · N bins
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.backbone import Backbone
from model.config import BOS, FIRST_ITEM, MASK, PAD, UNK, ModelConfig
from training.batches import collate, serving_windows
from training.splits import Histories
from training.tables import DataError
from training.trace import Trace, trace

CHUNK_USERS = 256
CHUNK_CELLS = 2**25
"""Attention weights of one layer held at a time, at most: users × heads × positions²."""
ATTENTION = {"bos": "BOS", "first_event": "first event"}
"""Columns of a survey's attention, and what a person calls them."""
Z_95 = 1.96
Array = NDArray[np.float64]

TOKENS = {BOS: "BOS", MASK: "MASK", UNK: "unknown"}
USES_FROM = (0, 1, 3, 6, 21, 101)
"""Lowest training count of each bin of items."""
SAMPLE_SIZES_FROM = (0.0, 0.5, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0)
"""Lowest effective sample size of each bin; the first is "no neighbour", the second one neighbour alone."""


@dataclass(frozen=True)
class Column:
    """Means (K,N) of one quantity and their 95 % intervals; NaN in an empty bin, and bounds with one user alone."""

    mean: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class Table:
    """Quantities by bin: `labels` (N), `positions` and `users` (N,) counted, and the columns by name."""

    labels: tuple[str, ...]
    positions: NDArray[np.int64]
    users: NDArray[np.int64]
    columns: dict[str, Column]

    def filled(self) -> NDArray[np.int64]:
        """The bins that hold anything."""
        return np.flatnonzero(self.positions)

    def to_json(self) -> list[dict[str, Any]]:
        """One object a bin that holds anything; a quantity of several layers has them under `layers`."""
        rows = []
        for bin in self.filled().tolist():
            row: dict[str, Any] = {
                "bin": self.labels[bin],
                "positions": int(self.positions[bin]),
                "users": int(self.users[bin]),
            }
            for name, column in self.columns.items():
                row[name], *layers = (_estimate(column, series, bin) for series in range(len(column.mean)))
                if layers:
                    row[name]["layers"] = layers
            rows.append(row)
        return rows


@dataclass(frozen=True)
class Survey:
    """One model on one set of users. A plain model has no gain and no precision: those tables are None.

    - `overall`: one bin with every event. `by_item_frequency`: events by their item's training count, special
      tokens apart. `by_sample_size`: events of every layer by effective sample size; gain. Columns: gain,
      effective_sample_size, initial_precision, final_precision, the last two with one series.
    - `by_history_length`: the same of the position that answers after so many events. A causal model answers at
      every position, so that a history of thirty events tells of all the shorter ones; another model at its MASK.
    - `attention_by_history_length`: the shares that BOS and the window's first event get from the position that
      answers (see `trace.Heard`), and the share that every neighbour would get if all were heard alike.
    """

    num_users: int
    by_history_length: Table
    attention_by_history_length: Table
    overall: Table | None
    by_item_frequency: Table | None
    by_sample_size: tuple[Table, ...] | None
    """Layers pooled, then each layer."""

    @property
    def filtering(self) -> bool:
        """Whether the model filters."""
        return self.overall is not None

    def to_json(self) -> dict[str, Any]:
        """Everything, by name."""
        result: dict[str, Any] = {"users": self.num_users}
        if self.overall is not None and self.by_item_frequency is not None and self.by_sample_size is not None:
            result["overall"] = next(iter(self.overall.to_json()), None)
            result["by_item_frequency"] = self.by_item_frequency.to_json()
            result["by_effective_sample_size"] = self.by_sample_size[0].to_json()
        result["by_history_length"] = self.by_history_length.to_json()
        result["attention_by_history_length"] = self.attention_by_history_length.to_json()
        return result


def survey(
    model: Backbone,
    training_counts: NDArray[np.int64],
    histories: Histories,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Survey:
    """Look into a model while it reads the window of each user.

    Args:
        model: with filtering or plain.
        training_counts: (N,) uses of each catalogue item in training.
        histories: of the users, as a request would bring them.
        report: told how many of how many users are done, after each chunk.

    Raises:
        DataError: there is no user.
    """
    if len(histories) == 0:
        raise DataError("there is no user to look at")
    tables = _Tables(model.config, model.causal, training_counts)
    done = 0
    for _, seen in traces(model, histories):
        tables.add(seen)
        done += len(seen.items)
        report(done, len(histories))
    return tables.survey(done)


def traces(model: Backbone, histories: Histories) -> Iterator[tuple[Tensor, Trace]]:
    """The trace of every user's window, and whose rows those are: users of similar length together, few at a time."""
    windows = serving_windows(histories, model.config.max_len)
    positions = int(windows.num_inputs.max()) + 2
    users = max(1, min(CHUNK_USERS, CHUNK_CELLS // (model.config.num_heads * positions**2)))
    for rows in windows.num_inputs.argsort(stable=True).split(users):
        yield rows, trace(model, collate(windows, rows))


def some_users(histories: Histories, most: int | None) -> Histories:
    """At most so many users, spread evenly over all; every user for None."""
    if most is None or most >= len(histories):
        return histories
    users = np.arange(most) * len(histories) // most
    return histories.prefixes(users, histories.offsets[1:][users])


def compared(survey: Survey, against: Survey | None) -> dict[str, Survey]:
    """One survey or two, by what tells them apart."""
    if against is None or survey.filtering != against.filtering:
        both = [survey] if against is None else [survey, against]
        return {f"filtering {'on' if one.filtering else 'off'}": one for one in both}
    return {"this": survey, "against": against}


def frequency_labels() -> tuple[str, ...]:
    """Names of the bins of `by_item_frequency`."""
    return (*TOKENS.values(), *_range_labels(USES_FROM, None))


def length_bounds(max_len: int) -> tuple[int, ...]:
    """Lowest history length of each bin: 0, 1, 2, 3, 5, 9, 17, … up to the window's."""
    bounds = [0, 1, 2]
    while bounds[-1] + (step := max(1, bounds[-1] - 1)) <= max_len:
        bounds.append(bounds[-1] + step)
    return tuple(bounds)


class BinnedMeans:
    """Running sums from which the mean of quantities in each bin follows, with what users' means spread.

    Args:
        labels: (N) of the bins.
        geometric: names of the quantities whose logarithm is averaged.
    """

    def __init__(self, labels: Sequence[str], geometric: Sequence[str] = ()) -> None:
        self.labels = tuple(labels)
        self.geometric = geometric
        self.count, self.count_squared, self.users = (np.zeros(len(labels)) for _ in range(3))
        self.total: dict[str, Array] = {}
        self.total_squared: dict[str, Array] = {}
        self.cross: dict[str, Array] = {}

    def add(self, bins_BT: Tensor, quantities: dict[str, Tensor]) -> None:
        """Add positions; each row is one user.

        Args:
            bins_BT: each position's bin, negative where it belongs to none.
            quantities: name → (K,B,T), read where the position has a bin.
        """
        counted = bins_BT >= 0
        member_BTN = (bins_BT[..., None] == torch.arange(len(self.labels))).double()
        count_BN = member_BTN.sum(1).numpy()
        self.count += count_BN.sum(0)
        self.count_squared += np.square(count_BN).sum(0)
        self.users += (count_BN > 0).sum(0)
        for name, values_KBT in quantities.items():
            values = torch.where(counted, values_KBT, 1).double()
            values = values.log() if name in self.geometric else values
            total_KBN = torch.einsum("kbt,btn->kbn", values, member_BTN).numpy()
            for sums, added in (
                (self.total, total_KBN),
                (self.total_squared, np.square(total_KBN)),
                (self.cross, total_KBN * count_BN),
            ):
                sums[name] = sums.get(name, 0.0) + added.sum(1)

    def table(self) -> Table:
        """The means so far."""
        columns = {name: self._column(name) for name in self.total}
        return Table(self.labels, self.count.astype(np.int64), self.users.astype(np.int64), columns)

    def _column(self, name: str) -> Column:
        """The mean is Σ_u s_u/Σ_u n_u, a ratio over users u; its variance U/(U−1)·Σ_u (s_u − n_u·mean)²/(Σ_u n_u)²."""
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = self.total[name] / self.count
            squares = self.total_squared[name] - 2 * mean * self.cross[name] + mean**2 * self.count_squared
            # Rounding leaves a little of either sign where users do not differ.
            spread = np.maximum(squares, 0) * self.users / (self.users - 1)
            half = Z_95 * np.sqrt(np.where(self.users > 1, spread, np.nan)) / self.count
        bounds = (mean, mean - half, mean + half)
        return Column(*(np.exp(bound) if name in self.geometric else bound for bound in bounds))


class _Tables:
    """The running sums of a survey."""

    def __init__(self, config: ModelConfig, causal: bool, training_counts: NDArray[np.int64]) -> None:
        self.causal = causal
        self.filtering = config.filtering
        self.frequency_bin = _frequency_bins(training_counts)
        self.length_from = torch.tensor(length_bounds(config.max_len))
        self.sample_size_from = torch.tensor(SAMPLE_SIZES_FROM)
        lengths = _range_labels(length_bounds(config.max_len), config.max_len)
        sample_sizes = _sample_size_labels()
        precisions = ("initial_precision", "final_precision")
        self.overall = BinnedMeans(["all events"], precisions)
        self.by_frequency = BinnedMeans(frequency_labels(), precisions)
        self.by_length = BinnedMeans(lengths, precisions)
        self.by_sample_size = [BinnedMeans(sample_sizes) for _ in range(1 + config.num_layers)]
        self.attention = BinnedMeans(lengths)

    def add(self, seen: Trace) -> None:
        """Add the positions of a chunk of users."""
        place = torch.arange(seen.items.shape[1]).expand_as(seen.items)
        real = seen.items != PAD
        events = (seen.items >= FIRST_ITEM) | (seen.items == UNK)
        answers = real if self.causal else place == seen.last[:, None]
        length = place if self.causal else place - 1
        quantities = {"effective_sample_size": _with_mean(layer.effective_sample_size for layer in seen.heard)}
        if self.filtering:
            quantities |= {
                "gain": _with_mean(seen.gain),
                "initial_precision": seen.initial_precision[None],
                "final_precision": seen.final_precision[None],
            }
            self.overall.add(torch.where(events, 0, -1), quantities)
            self.by_frequency.add(self.frequency_bin[seen.items], quantities)
            self._add_by_sample_size(events, quantities)

        length_bin = torch.where(answers, _bin(length, self.length_from), -1)
        self.by_length.add(length_bin, quantities)
        # Before any event BOS is all there is to hear.
        visible = place + 1 if self.causal else (seen.last[:, None] + 1).expand_as(place)
        self.attention.add(
            torch.where(length > 0, length_bin, -1),
            {
                "bos": _with_mean(layer.weights[:, :, 0] for layer in seen.heard),
                # A row of BOS alone has no second column.
                "first_event": _with_mean(layer.weights[:, :, min(1, place.shape[1] - 1)] for layer in seen.heard),
                "if_all_alike": (1 / visible)[None],
            },
        )

    def _add_by_sample_size(self, events: Tensor, quantities: dict[str, Tensor]) -> None:
        bins = torch.where(events, _bin(quantities["effective_sample_size"], self.sample_size_from), -1)
        names = ("gain", "effective_sample_size")
        # The layers of a user side by side, so that they count as one draw.
        pooled = {name: quantities[name][1:].transpose(0, 1).flatten(1)[None] for name in names}
        self.by_sample_size[0].add(bins[1:].transpose(0, 1).flatten(1), pooled)
        for layer in range(1, len(bins)):
            own = {name: quantities[name][layer][None] for name in names}
            self.by_sample_size[layer].add(bins[layer], own)

    def survey(self, num_users: int) -> Survey:
        """All tables."""
        return Survey(
            num_users=num_users,
            by_history_length=self.by_length.table(),
            attention_by_history_length=self.attention.table(),
            overall=self.overall.table() if self.filtering else None,
            by_item_frequency=self.by_frequency.table() if self.filtering else None,
            by_sample_size=tuple(sums.table() for sums in self.by_sample_size) if self.filtering else None,
        )


def _frequency_bins(training_counts: NDArray[np.int64]) -> Tensor:
    """The bin of `frequency_labels` of every item number; −1 for padding."""
    bins = torch.full((FIRST_ITEM + len(training_counts),), -1)
    bins[list(TOKENS)] = torch.arange(len(TOKENS))
    bins[FIRST_ITEM:] = len(TOKENS) + _bin(torch.from_numpy(training_counts), torch.tensor(USES_FROM))
    return bins


def _bin(values: Tensor, lowest: Tensor) -> Tensor:
    """The last bin whose lowest value is not above the value; −1 below the first."""
    return torch.bucketize(values.contiguous(), lowest, right=True) - 1


def _range_labels(lowest: Sequence[int], highest: int | None) -> list[str]:
    """Of bins of whole numbers; the last is open where there is no highest."""
    labels = []
    for low, following in zip(lowest, [*lowest[1:], None], strict=True):
        high = highest if following is None else following - 1
        if high is None:
            labels.append(f"{low}+")
        else:
            labels.append(f"{low}" if low == high else f"{low}–{high}")
    return labels


def _sample_size_labels() -> list[str]:
    """Of the bins of effective sample size."""
    bounds = [f"{bound:g}" for bound in (1, *SAMPLE_SIZES_FROM[2:])]
    ranges = [f"{low}–{high}" for low, high in pairwise(bounds)]
    return ["none", *ranges, f"{bounds[-1]}+"]


def _with_mean(layers: Iterator[Tensor] | Sequence[Tensor]) -> Tensor:
    """(K,B,T): the mean over layers, then the layers; one layer is its own mean."""
    stacked = torch.stack(list(layers))
    return torch.cat([stacked.mean(0, keepdim=True), stacked])


def _estimate(column: Column, series: int, bin: int) -> dict[str, Any]:
    low, high = float(column.low[series, bin]), float(column.high[series, bin])
    interval = None if np.isnan(low) else [low, high]
    return {"mean": float(column.mean[series, bin]), "interval": interval}
