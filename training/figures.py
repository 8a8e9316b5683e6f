"""The figures of `bft-train explain`. The one module that imports matplotlib, and it takes a moment."""

import io
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from training.config import ConfigError
from training.files import write_whole
from training.history import Explanation, Position, shortened
from training.survey import ATTENTION, TOKENS, Survey, Table, compared

FORMATS = (".png", ".svg", ".pdf")
DPI = 150
LAYER_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
"""Okabe and Ito's, told apart by people who do not see red or green; deeper models take shades of one scale."""
MARKERS = "osD^vP"
GREY = "#6e6e6e"
ROW_INCHES, MOST_INCHES = 0.22, 24.0
LABEL_CHARACTERS = 38
USES, LENGTH = "item's training uses", "history length, events"


def check_writable(path: Path) -> None:
    """That a figure can be saved there, found out before the work and not after it.

    Raises:
        ConfigError: another kind of file, a folder, or no permission.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--figure {path}: the name must end in {', '.join(FORMATS)}")
    if path.is_dir():
        raise ConfigError(f"--figure {path} is a folder; name a file in it")
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--figure {path} cannot be written: {folder} is no folder one may write to; name another")


def save(figure: Figure, path: Path, dpi: int = DPI) -> None:
    """Write a figure, whole, in the format that the name ends in.

    Args:
        dpi: dots per inch, of a PNG.

    Raises:
        OSError: the file cannot be written.
    """
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A title in a script that the font lacks is drawn as boxes; its id stands beside it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format=path.suffix[1:].lower(), dpi=dpi)
    write_whole(path, buffer.getvalue())


# One history


def history_figure(explanation: Explanation, title: str) -> Figure:
    """Positions downwards, oldest first; beside each its precision, share of attention, gain and sample size."""
    positions = explanation.positions
    height = min(MOST_INCHES, 1.9 + ROW_INCHES * len(positions))
    figure = Figure(figsize=(13 if explanation.filtering else 9, height), layout="constrained")
    figure.suptitle(title, fontsize=11)
    panels = figure.subplots(1, 4 if explanation.filtering else 2, sharey=True)
    rows = np.arange(len(positions))

    if explanation.filtering:
        precision, heard, gain, sample_size = panels
        for which, colour, marker in (("initial", GREY, "o"), ("final", LAYER_COLOURS[0], "s")):
            values = [getattr(position, f"{which}_precision") for position in positions]
            precision.plot(values, rows, color=colour, marker=marker, markersize=4, linewidth=0.8, label=which)
        logarithmic(precision, "x")
        precision.set(title="precision", xlabel="mean over dimensions, log scale")
        _layers_downwards(gain, rows, [position.gain or [] for position in positions])
        gain.set(title="gain", xlabel="of the Kalman update", xlim=(0, 1.03))
    else:
        heard, sample_size = panels

    _layers_downwards(heard, rows, [position.heard for position in positions])
    heard.axvline(1 / len(positions), color=GREY, linestyle=":", linewidth=1, label="if all alike")
    name = "kriging weight" if explanation.filtering else "attention"
    heard.set(title=name, xlabel=f"given by {explanation.answered_by}", xlim=(0, None))
    _layers_downwards(sample_size, rows, [position.effective_sample_size for position in positions])
    sample_size.set(title="effective sample size", xlabel="neighbours", xlim=(0, None))

    step = -(-len(positions) * ROW_INCHES // MOST_INCHES)
    shown = rows[:: int(step)]
    # Titles hold any sign: none of them is mathematics.
    panels[0].set_yticks(shown, [_row_label(row, positions[row]) for row in shown], fontsize=8, parse_math=False)
    panels[0].set_ylim(len(positions) - 0.5, -0.5)
    for panel in panels:
        panel.grid(axis="both", color="0.92")
        panel.set_axisbelow(True)
        panel.title.set_fontsize(10)
        panel.xaxis.label.set_fontsize(8)
        panel.tick_params(axis="x", labelsize=8)
    if explanation.filtering:
        _legend(panels[0])
    _legend(heard)
    return figure


def _layers_downwards(panel: Axes, rows: np.ndarray, values: Sequence[Sequence[float]]) -> None:
    by_layer = np.array(values).T
    for layer, series in enumerate(by_layer):
        panel.plot(
            series, rows, markersize=4, linewidth=0.8, label=f"layer {layer + 1}", **_style(layer, len(by_layer))
        )


def _row_label(row: int, position: Position) -> str:
    return f"{shortened(position.label, LABEL_CHARACTERS)}  {row}"


# A data set


def survey_figure(survey: Survey, title: str, against: Survey | None = None) -> Figure:
    """Small panels: by item frequency and sample size, by history length, and the attention of one or two models."""
    both = compared(survey, against)
    if survey.by_item_frequency is None or survey.by_sample_size is None:
        figure = Figure(figsize=(12, 3.9), layout="constrained")
        panels = list(figure.subplots(1, 3))
    else:
        figure = Figure(figsize=(16, 7.6), layout="constrained")
        panels = list(figure.subplots(2, 4).flat)
        frequency, length, sizes = survey.by_item_frequency, survey.by_history_length, survey.by_sample_size
        _precisions(panels.pop(0), frequency, USES)
        _series(panels.pop(0), frequency, "gain", USES)
        _precisions(panels.pop(0), length, LENGTH)
        _series(panels.pop(0), length, "gain", LENGTH)
        _gain_by_sample_size(panels.pop(0), sizes)
    _series(panels.pop(0), survey.by_history_length, "effective_sample_size", LENGTH)
    for panel, (name, words) in zip(panels, ATTENTION.items(), strict=True):
        _attention(panel, both, name, f"attention on {words}")
    figure.suptitle(title, fontsize=11)
    for panel in figure.axes:
        panel.grid(color="0.92")
        panel.set_axisbelow(True)
        panel.title.set_fontsize(10)
        panel.xaxis.label.set_fontsize(8)
        panel.tick_params(labelsize=8)
        _legend(panel)
    return figure


def _precisions(panel: Axes, table: Table, xlabel: str) -> None:
    for name, colour, marker in (("initial", GREY, "o"), ("final", LAYER_COLOURS[0], "s")):
        _line(panel, table, f"{name}_precision", 0, label=name, color=colour, marker=marker)
    logarithmic(panel, "y")
    panel.set(title="precision, geometric mean", xlabel=xlabel)


def _series(panel: Axes, table: Table, name: str, xlabel: str) -> None:
    layers = len(table.columns[name].mean) - 1
    for layer in range(layers):
        _line(panel, table, name, layer + 1, label=f"layer {layer + 1}", **_style(layer, layers))
    panel.set(title=name.replace("_", " "), xlabel=xlabel)
    panel.set_ylim(0, 1.03) if name == "gain" else panel.set_ylim(0, None)


def _gain_by_sample_size(panel: Axes, tables: Sequence[Table]) -> None:
    sizes: list[float] = [1.0]
    for layer, table in enumerate(tables[1:]):
        bins = table.filled()
        x = table.columns["effective_sample_size"].mean[0, bins]
        sizes += [float(value) for value in x if value > 0]
        _error_bars(panel, x, table, "gain", 0, label=f"layer {layer + 1}", **_style(layer, len(tables) - 1))
    n = np.geomspace(1, max(sizes), 50)
    panel.plot(n, n / (n + 1), color=GREY, linestyle=":", linewidth=1, label="n/(n+1), bound at ν0 = 1, equal λ")
    logarithmic(panel, "x")
    panel.set(title="gain", xlabel="effective sample size n, log scale", ylim=(0, 1.03))


def _attention(panel: Axes, surveys: dict[str, Survey], name: str, title: str) -> None:
    for index, (whose, survey) in enumerate(surveys.items()):
        style = {"color": LAYER_COLOURS[index], "marker": MARKERS[index]}
        _line(panel, survey.attention_by_history_length, name, 0, label=whose, **style)
    table = next(iter(surveys.values())).attention_by_history_length
    alike = table.columns["if_all_alike"].mean[0, table.filled()]
    panel.plot(np.arange(len(alike)), alike, color=GREY, linestyle=":", linewidth=1, label="if all alike")
    logarithmic(panel, "y")
    panel.set(title=title, xlabel=LENGTH)


def _line(panel: Axes, table: Table, name: str, series: int, **style: Any) -> None:
    """A quantity over the bins that hold anything, each its own place on the axis; tokens are not joined to counts."""
    labels = [table.labels[bin] for bin in table.filled()]
    places = np.arange(len(labels))
    tokens = sum(label in TOKENS.values() for label in labels)
    _error_bars(panel, places, table, name, series, gap=tokens, **style)
    panel.set_xticks(places, labels, rotation=35 if len(labels) > 6 else 0)


def _error_bars(panel: Axes, x: np.ndarray, table: Table, name: str, series: int, gap: int = 0, **style: Any) -> None:
    """Means with their intervals; the line is broken before the place `gap`."""
    column, bins = table.columns[name], table.filled()
    mean, low, high = (values[series, bins] for values in (column.mean, column.low, column.high))
    bars = np.nan_to_num(np.stack([mean - low, high - mean]))
    x, mean, bars = (np.insert(values.astype(float), gap, np.nan, axis=-1) for values in (x, mean, bars))
    panel.errorbar(x, mean, yerr=bars, markersize=4, linewidth=1, capsize=2, elinewidth=0.8, **style)


def logarithmic(panel: Axes, which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic; it says 0.3 and not 3·10⁻¹, and says something even over less than a decade."""
    panel.set(**{f"{which}scale": "log"})
    axis = panel.xaxis if which == "x" else panel.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _style(layer: int, num_layers: int) -> dict[str, Any]:
    """Colour and marker of a layer."""
    deep = num_layers > len(LAYER_COLOURS)
    colour = colormaps["viridis"](layer / (num_layers - 1) * 0.9) if deep else LAYER_COLOURS[layer]
    return {"color": colour, "marker": MARKERS[layer % len(MARKERS)]}


def _legend(panel: Axes) -> None:
    handles, labels = panel.get_legend_handles_labels()
    most = 6
    step = -(-len(labels) // most)
    panel.legend(handles[::step], labels[::step], fontsize=7, framealpha=0.85)
