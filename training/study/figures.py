"""The report's figures, drawn from the same tables that it prints."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from training.figures import GREY, LAYER_COLOURS, MARKERS, logarithmic
from training.study import tables
from training.study.compare import METRICS, Difference
from training.study.comparisons import ALL, COLD, MODELS, RARE, Comparison, Stratum, Study
from training.study.layout import Estimate, Row, Table

OFF, ON = GREY, LAYER_COLOURS[0]
"""Colours of filtering off and on, in every figure."""
PANELS_A_ROW = 4
PERCENT = "change by filtering, %"


def differences(study: Study) -> Figure:
    """The relative difference of every comparison with its interval: all users, rare target items, cold users."""
    compared = list(reversed(study.comparisons))
    figure = Figure(figsize=(12, 1.6 + 0.42 * len(compared)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    places = np.arange(len(compared))
    for panel, stratum in zip(panels, (ALL, RARE, COLD), strict=True):
        for index, metric in enumerate(METRICS):
            for place, comparison in zip(places, compared, strict=True):
                difference = comparison.differences.get(stratum, {}).get(metric)
                if difference is not None and difference.second:
                    _relative_bar(panel, difference, place + 0.12 - 0.24 * index, index, bool(comparison.caveat))
        panel.axvline(0, color="black", linewidth=0.8)
        panel.set(title=stratum[1], xlabel=PERCENT)
        panel.set_xlim(*_limits(compared, stratum))
    for index, metric in enumerate(METRICS):
        panels[0].plot([], [], color=LAYER_COLOURS[index], marker=MARKERS[index], linewidth=1, label=metric)
    panels[0].plot([], [], color=GREY, marker="o", markerfacecolor="white", linewidth=1, label="no claim")
    panels[0].set_yticks(places, [f"{one.label}\n{one.dataset.name}" for one in compared], fontsize=8)
    panels[0].set_ylim(-0.6, len(compared) - 0.4)
    return _finished(figure, "Filtering on against off, 95 % intervals over users and seeds", panels[0])


def by_stratum(study: Study) -> Figure:
    """NDCG@10 on − off in every stratum, a panel for each comparison that may carry a claim; for all if none may."""
    compared = [comparison for comparison in study.comparisons if not comparison.caveat] or study.comparisons
    figure, panels = _grid(len(compared), height=2.6)
    for panel, comparison in zip(panels, compared, strict=True):
        shown = [stratum for stratum in comparison.differences if stratum[0] not in ("all", "headline")]
        divisions = list(dict.fromkeys(division for division, _ in shown))
        gaps = np.array([divisions.index(division) for division, _ in shown])
        places = np.arange(len(shown)) + gaps
        for index, division in enumerate(divisions):
            mine = [number for number, stratum in enumerate(shown) if stratum[0] == division]
            found = [comparison.differences[shown[number]]["NDCG@10"] for number in mine]
            _bars(panel, places[mine], found, color=LAYER_COLOURS[index], marker=MARKERS[index], label=division)
        panel.axhline(0, color="black", linewidth=0.8)
        overall = comparison.overall["NDCG@10"]
        panel.axhspan(overall.low, overall.high, color="0.9", zorder=0, label="all users")
        panel.set_xticks(places, [name for _, name in shown], rotation=60)
        panel.set(title=f"{comparison.label} on {comparison.dataset.name}")
    return _finished(figure, "NDCG@10, filtering on − off, by stratum", panels[0])


def sparsity(study: Study) -> Figure:
    """The relative difference of NDCG@10 over events per item, by model."""
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    panel = figure.subplots()
    compared = study.of_recipe()
    for index, model in enumerate(dict.fromkeys(comparison.model for comparison in compared)):
        for comparison in (one for one in compared if one.model == model):
            difference, across = comparison.overall["NDCG@10"], tables.events_per_item(comparison.dataset)
            if difference.second:
                style = _style(index, bool(comparison.caveat))
                # Models on one data set stand side by side.
                across *= 1 + 0.03 * index
                panel.errorbar(across, *_relative(difference), linestyle="", **style)
        panel.plot(
            [], [], color=LAYER_COLOURS[index], marker=MARKERS[index], linewidth=1, label=MODELS.get(model, model)
        )
    for dataset in {one.dataset.name: one.dataset for one in compared}.values():
        across = tables.events_per_item(dataset) * 0.97
        panel.text(across, 0.02, dataset.name, rotation=90, fontsize=7, transform=panel.get_xaxis_transform())
    panel.axhline(0, color="black", linewidth=0.8)
    logarithmic(panel, "x")
    panel.set(xlabel="training events per item, log scale; hollow: no claim", ylabel=f"NDCG@10, {PERCENT}")
    panel.set_ylim(*_limits(compared, ALL))
    return _finished(figure, "Relative gain against sparsity", panel)


def learned(study: Study) -> Figure:
    """What the filter learned: the gain K by item frequency and history length, and τ by item frequency.

    Of the comparisons that may carry a claim; of all if none may.
    """
    claims = [comparison for comparison in study.comparisons if not comparison.caveat]
    study = replace(study, comparisons=claims or study.comparisons)
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    panels = figure.subplots(1, 3)
    for panel, (name, by) in zip(
        panels, (("gain", "item's training uses"), ("gain_by_history_length", "events before")), strict=False
    ):
        table = tables.gain(study, name, by)
        _series(panel, table, by, lambda row: _estimate(row, "gain"))
        panel.set(title="gain K", xlabel=by, ylim=(0, 1.03))
    table = tables.precision(study)
    _series(
        panels[2],
        table,
        "training uses",
        lambda row: (row.cells["median"], row.cells["first quartile"], row.cells["third quartile"]),
    )
    logarithmic(panels[2], "y")
    panels[2].set(title="initial precision τ: median and quartiles of items", xlabel="item's training uses")
    return _finished(figure, "What the filter learned, mean over seeds", panels[0])


def curves(study: Study) -> Figure:
    """Validation NDCG@10 by epoch, off and on, a line for each seed."""
    figure, panels = _grid(len(study.comparisons), height=1.9)
    for panel, comparison in zip(panels, study.comparisons, strict=True):
        for side, colour, label in ((comparison.off, OFF, "off"), (comparison.on, ON, "on")):
            for number, run in enumerate(side):
                epochs = [row["epoch"] for row in run.curve]
                values = [row["val_ndcg@10"] for row in run.curve]
                panel.plot(epochs, values, color=colour, linewidth=1, label=label if number == 0 else None)
                if run.curve:
                    panel.plot(run.best_epoch, values[run.best_epoch - 1], color=colour, marker="o", markersize=4)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.set(title=f"{comparison.label} on {comparison.dataset.name}", xlabel="epoch")
    return _finished(figure, "Validation NDCG@10 by epoch, a line for each seed; dots: the epoch kept", panels[0])


def noise(study: Study) -> Figure:
    """HR@10, stated confidence and weight of replaced events over the share of replaced events, off and on."""
    rows = tables.noise(study).rows
    kinds = list(dict.fromkeys(_noise_kind(row) for row in rows))
    figure = Figure(figsize=(11, 0.6 + 2.3 * len(kinds)), layout="constrained")
    grid = figure.subplots(len(kinds), 3, squeeze=False)
    quantities = {
        "HR@10": "",
        "confidence in the list": "confidence ",
        "weight of a replaced event / another's": "weight ",
    }
    for panels, kind in zip(grid, kinds, strict=True):
        mine = [row for row in rows if _noise_kind(row) == kind]
        for panel, (title, prefix) in zip(panels, quantities.items(), strict=True):
            for side, colour, marker in (("off", OFF, "o"), ("on", ON, "s")):
                points = [(100 * float(str(row.cells["share"])), row.cells.get(f"{prefix}{side}")) for row in mine]
                known = [(share, value) for share, value in points if value is not None]
                style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1}
                panel.plot([share for share, _ in known], [value for _, value in known], label=side, **style)
            panel.set(title=f"{kind[0]}: {title}", xlabel=f"events replaced in {kind[2]}, %", ylim=(0, None))
            if not any(len(line.get_xydata()) for line in panel.lines):
                panel.remove()  # of training noise there is no event to weigh
    return _finished(figure, "Histories with events replaced by random items", grid[0, 0])


DRAWN = {
    "differences": differences,
    "strata": by_stratum,
    "sparsity": sparsity,
    "learned": learned,
    "curves": curves,
    "noise": noise,
}
"""Every figure by the name of its file."""


def _noise_kind(row: Row) -> tuple[str, str, str]:
    return str(row.cells["data set"]), str(row.cells["model"]), str(row.cells["replaced in"])


def _relative(difference: Difference) -> tuple[float, Any]:
    """The change in percent, and its error bar as matplotlib takes it."""
    scale = 100 / difference.second
    mean = difference.difference * scale
    return mean, [[mean - difference.low * scale], [difference.high * scale - mean]]


def _limits(compared: Sequence[Comparison], stratum: Stratum) -> tuple[float, float]:
    """Limits that show the intervals of what may carry a claim whole; those of small data sets may be cut."""
    shown = [comparison for comparison in compared if not comparison.caveat] or compared
    found = [one.differences[stratum][metric] for one in shown for metric in METRICS if stratum in one.differences]
    edges = [100 * edge / one.second for one in found if one.second for edge in (one.low, one.high)]
    low, high = min([*edges, -1.0]), max([*edges, 1.0])
    margin = 0.15 * (high - low)
    return low - margin, high + margin


def _relative_bar(panel: Axes, difference: Difference, place: float, index: int, hollow: bool) -> None:
    mean, bar = _relative(difference)
    panel.errorbar(mean, place, xerr=bar, **_style(index, hollow))


def _style(index: int, hollow: bool) -> dict[str, Any]:
    style = {"color": LAYER_COLOURS[index], "marker": MARKERS[index], "markersize": 4, "elinewidth": 1, "capsize": 2}
    return style | ({"markerfacecolor": "white", "alpha": 0.6} if hollow else {})


def _bars(panel: Axes, places: np.ndarray, found: Sequence[Difference], **style: Any) -> None:
    mean = np.array([one.difference for one in found])
    low, high = np.array([one.low for one in found]), np.array([one.high for one in found])
    panel.errorbar(
        places, mean, [mean - low, high - mean], linestyle="", markersize=4, capsize=2, elinewidth=1, **style
    )


def _series(panel: Axes, table: Table, by: str, estimate: Any) -> None:
    """A line for each comparison of a table, over the values of the column `by`."""
    labels = list(dict.fromkeys(str(row.cells[by]) for row in table.rows))
    kinds = list(dict.fromkeys((str(row.cells["model"]), str(row.cells["data set"])) for row in table.rows))
    models, names = (list(dict.fromkeys(part)) for part in zip(*kinds, strict=True))
    for number, kind in enumerate(kinds):
        mine = [row for row in table.rows if (row.cells["model"], row.cells["data set"]) == kind]
        mean, low, high = np.array([estimate(row) for row in mine], float).T
        # A mean of equal numbers may lie an ulp beside them.
        bars = np.maximum([mean - low, high - mean], 0)
        places = [labels.index(str(row.cells[by])) + 0.04 * (number - len(kinds) / 2) for row in mine]
        model, name = models.index(kind[0]), names.index(kind[1])
        colour, marker = LAYER_COLOURS[name % len(LAYER_COLOURS)], MARKERS[model % len(MARKERS)]
        style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": ("-", "--", ":")[model % 3]}
        panel.errorbar(places, mean, bars, markersize=4, linewidth=1, capsize=2,
                       elinewidth=0.8, label=" on ".join(kind), **style)  # fmt: skip
    panel.set_xticks(range(len(labels)), labels, rotation=35)


def _estimate(row: Row, name: str) -> tuple[float, float, float]:
    cell = row.cells[name]
    assert isinstance(cell, Estimate)  # noqa: S101 - tables.gain makes no other
    return cell.value, cell.low, cell.high


def _grid(number: int, height: float) -> tuple[Figure, list[Axes]]:
    across = min(PANELS_A_ROW, number)
    down = -(-number // across)
    figure = Figure(figsize=(1 + 2.9 * across, 0.5 + height * down), layout="constrained")
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for spare in panels[number:]:
        spare.remove()
    return figure, panels[:number]


def _finished(figure: Figure, title: str, legend_of: Axes) -> Figure:
    figure.suptitle(title, fontsize=11)
    for panel in figure.axes:
        panel.grid(color="0.92")
        panel.set_axisbelow(True)
        panel.title.set_fontsize(10)
        panel.xaxis.label.set_fontsize(8)
        panel.yaxis.label.set_fontsize(8)
        panel.tick_params(labelsize=8)
    handles, labels = legend_of.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    return figure
