"""The figure of a night's report: what the gate asked, how the candidate learned, and how the nights before went."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from matplotlib.axes import Axes
from matplotlib.dates import date2num
from matplotlib.figure import Figure, SubFigure

from training.figures import GREY, LAYER_COLOURS, MARKERS
from training.retrain.gate import Question, Verdict
from training.retrain.run import Run

COLOURS: dict[Verdict, str] = {"passed": "#009E73", "undecided": "#E69F00", "failed": "#D55E00"}
ROW_INCHES = 0.34
MODELS = {"candidate": LAYER_COLOURS[0], "current": GREY, "popularity": "#CC79A7"}
"""Colours of the models that a slice judges."""


def night(run: Run, nights: Sequence[Mapping[str, Any]]) -> Figure:
    """Left the gate's questions, each on its own scale; right the candidate's curve and the nights.

    Args:
        run: which has judged.
        nights: records of earlier runs, oldest first; those that judged nothing are passed over.
    """
    figure = Figure(figsize=(12, max(4.6, 1.0 + ROW_INCHES * len(run.questions))), layout="constrained")
    parts: Any = figure.subfigures(1, 2, width_ratios=(3, 2))
    left, right = parts
    _gate(left, run.questions)
    curve, trend = right.subplots(2, 1)
    _curve(curve, run.training["curve"])
    _trend(trend, [*(one for one in nights if one["judged"]), {"begun": run.begun, "judged": run.judged}])
    return figure


def _gate(figure: SubFigure, questions: Sequence[Question]) -> None:
    """A row for each question: what was found, with its interval, and the bound that it had to keep."""
    panels = figure.subplots(len(questions), 1, squeeze=False)[:, 0]
    for panel, question in zip(panels, questions, strict=True):
        found, colour = question.found, COLOURS[question.verdict]
        panel.plot([found.low, found.high], [0, 0], color=colour, linewidth=2.5, solid_capstyle="butt")
        panel.plot([found.value], [0], color=colour, marker="o", markersize=5)
        for bound in question.bounds:
            panel.axvline(bound, color="black", linewidth=1, linestyle=":")
        # A share of nothing is no number.
        if places := [place for place in (found.low, found.high, *question.bounds) if math.isfinite(place)]:
            margin = 0.12 * (max(places) - min(places)) or 0.01
            panel.set_xlim(min(places) - margin, max(places) + margin)
        panel.set_ylim(-1, 1)
        panel.set_yticks([0], [question.name], fontsize=8, parse_math=False)
        panel.locator_params(axis="x", nbins=4)
        panel.tick_params(axis="x", labelsize=6, length=2, pad=1)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
        panel.tick_params(axis="y", length=0)
    figure.suptitle("Found, with its interval, against the accepted bound (dotted)", fontsize=9)


def _curve(panel: Axes, curve: Sequence[Mapping[str, float]]) -> None:
    epochs = [row["epoch"] for row in curve]
    panel.plot(epochs, [row["val_ndcg@10"] for row in curve], color=LAYER_COLOURS[0], marker="o", markersize=4)
    panel.set_title("The candidate's validation", fontsize=9)
    panel.set_xlabel("epoch", fontsize=8)
    _finish(panel)


def _trend(panel: Axes, nights: Sequence[Mapping[str, Any]]) -> None:
    times = [float(date2num(datetime.fromisoformat(one["begun"]))) for one in nights]
    for (name, colour), marker in zip(MODELS.items(), MARKERS, strict=False):
        told = [(time, one["judged"][name]) for time, one in zip(times, nights, strict=True) if name in one["judged"]]
        if told:
            values = [figures["ndcg@10"] for _, figures in told]
            panel.plot([time for time, _ in told], values, color=colour, marker=marker, markersize=4, label=name)
    panel.set_title("On the newest events, night by night", fontsize=9)
    panel.xaxis_date()
    panel.tick_params(axis="x", rotation=20)
    panel.legend(fontsize=7)
    _finish(panel)


def _finish(panel: Axes) -> None:
    panel.set_ylabel("NDCG@10", fontsize=8)
    panel.tick_params(labelsize=7)
    panel.grid(color="0.92")
    panel.set_axisbelow(True)
