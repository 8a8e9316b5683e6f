"""A judgement of confidences as Markdown and figures, from its record alone."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from training.confidence.criteria import LEAST_AGREEMENT, LEAST_P, MAX_ECE_SHARE, criteria
from training.confidence.measures import COVERAGES
from training.confidence.records import (
    Comparison,
    ConfidenceRecord,
    Interval,
    ItemConfidence,
    Likelihood,
    ListConfidence,
)
from training.figures import GREY, LAYER_COLOURS, save
from training.files import write_whole
from training.metrics import wilson_interval
from training.study.layout import Cell, Estimate, Row, Style, Table

REPORT = "confidence.md"
RELIABILITY, RISK = "reliability.png", "risk-coverage.png"
"""Files in the report's folder."""
TITLES = {
    "served list confidence": "served list confidence (Σ of the items')",
    "served, without precision": "the same, its map fitted without precision",
    "free, fitted": "all free signals, fitted",
    "free and precision, fitted": "all free signals and precision, fitted",
    "plain, fitted": "plain: all free signals, fitted",
}
COMPARED: dict[str, Style] = {
    "HR@10": "metric",
    "AURC": "metric",
    "AURC − served": "signed",
    "log-loss": "metric",
    "log-loss − served": "signed",
}
"""Columns of comparisons."""


def write_report(record: ConfidenceRecord, out: Path) -> list[Path]:
    """Write the report and its figures; returns their paths, the report first."""
    out.mkdir(parents=True, exist_ok=True)
    figures = [out / RELIABILITY, out / RISK]
    save(reliability_figure(record), figures[0])
    save(risk_figure(record), figures[1])
    write_whole(out / REPORT, markdown(record).encode())
    return [out / REPORT, *figures]


def markdown(record: ConfidenceRecord) -> str:
    """The whole report."""
    sections = [
        f"# Confidence on {record.dataset}",
        f"Model `{record.model}`, test users {record.lists.users:,}, event `{record.event}`. Temperature"
        f" {record.temperature:.3f} and the confidence map are fitted on validation users, everything here is of test"
        " users. Brackets are 95 % intervals, users resampled.",
        *answers(record),
        f"![Reliability]({RELIABILITY})",
        f"![Risk and coverage]({RISK})",
    ]
    for table in (one for one in tables(record) if one.rows):
        sections += [f"## {table.title}", table.to_markdown()]
    return "\n\n".join(sections) + "\n"


def answers(record: ConfidenceRecord) -> list[str]:
    """What the figures say, in sentences."""
    items, lists = record.items, record.lists
    inside = items.ece.value <= items.ece_null[1]
    small = items.ece.value <= MAX_ECE_SHARE * items.mean_confidence
    said = [
        f"The confidence of an item among the ten is off by {items.ece.value:.4f} on average (ECE), of a mean of"
        f" {items.mean_confidence:.4f}; a perfectly calibrated one would show {items.ece_null[0]:.4f} …"
        f" {items.ece_null[1]:.4f}: {'not more than that' if inside else 'more than that'}"
        f" and {'at most' if small else 'more than'} a tenth of the mean.",
        f"Lists state {lists.stated:.3f} and are hit {lists.realised:.3f} of the time{_by_tenths(lists)}.",
    ]
    if items.brier_skill is not None:
        proved = "more than" if items.brier_skill.low > 0 else "not shown to be more than"
        said.append(f"Brier skill {_shown(items.brier_skill)}: {proved} the base rate.")
    free = next(one for one in record.comparisons if one.name == record.best_free)
    if free.log_loss_difference is not None:
        said.append(
            f"Against the best of what comes for free ({TITLES[free.name]}) the served list confidence is"
            f" {_better(free.log_loss_difference)}: its log-loss less the served one's is"
            f" {_shown(free.log_loss_difference, 5)} nats a user."
        )
    for one in record.precision_adds:
        verb = {"better": "adds to", "worse": "takes from"}.get(_better(one.log_loss), "is not shown to add to")
        said.append(
            f"Precision {verb} {one.to}: log-loss without it less that with it is {_shown(one.log_loss, 5)} nats a"
            " user."
        )
    said += _behaves(record)
    return said


def _by_tenths(lists: ListConfidence) -> str:
    parts = []
    if lists.p_value is not None:
        agree = "agree" if lists.p_value > LEAST_P else "do not agree"
        parts.append(f"over tenths of the users the two {agree} (χ² {lists.chi_square:.1f}, p {lists.p_value:.2g})")
    if lists.slope is not None:
        parts.append(f"slope {_shown(lists.slope)}")
    if lists.top_over_bottom is not None:
        ratio = lists.top_over_bottom
        parts.append(
            f"the surest tenth is hit {ratio.value:.1f} ({ratio.low:.1f} … {ratio.high:.1f}) times as often as the"
            " least sure"
        )
    return "".join(f"; {part}" for part in parts)


def _behaves(record: ConfidenceRecord) -> list[str]:
    """Whether confidence moves as its meaning asks."""
    told = [one for one in record.altered if one.difference is not None]
    lower = [one.history for one in told if one.difference is not None and one.difference.high < 0]
    others = [one.history for one in told if one.history not in lower]
    said = [f"Histories for which lists state less than for the users' own: {'; '.join(lower)}."] if lower else []
    if others:
        said.append(f"**Histories for which they do not: {'; '.join(others)}.**")
    if record.reliability:
        medians = [one.median_of_longest for one in record.reliability if one.median_of_longest is not None]
        falls = [after for after, before in zip(medians[1:], medians, strict=False) if after < before]
        grows = "grows with every row" if not falls else "does not grow with every row"
        said.append(f"Of the same users, reliability {grows} of events below.")
    if record.seed_agreement is not None:
        enough = "as many as" if record.seed_agreement >= LEAST_AGREEMENT else "fewer than"
        said.append(
            f"A model of another seed puts {100 * record.seed_agreement:.0f} % of the users in the same tenth by list"
            f" confidence, or in one beside it: {enough} the {100 * LEAST_AGREEMENT:.0f} % that were asked for."
        )
    return said


def _better(less: Interval) -> str:
    """Of what another lacks to the one in question."""
    if less.low > 0:
        return "better"
    return "worse" if less.high < 0 else "not told apart"


def tables(record: ConfidenceRecord) -> list[Table]:
    """Every table of the report."""
    return [
        Table(
            "criteria",
            "What is asked of it",
            {"asked": "text", "found": "text", "met": "text"},
            tuple(
                Row({"asked": one.asked, "found": one.found, "met": "yes" if one.is_met else "**no**"})
                for one in criteria(record)
            ),
        ),
        Table(
            "likelihood",
            "Likelihood of the true next item",
            {"of": "text", "nats": "number"},
            (
                Row({"of": "the model", "nats": _estimate(record.likelihood.model)}),
                Row({"of": "popularity", "nats": _estimate(record.likelihood.popularity)}),
                Row({"of": "uniform", "nats": _estimate(record.likelihood.uniform)}),
                Row({"of": "popularity less the model", "nats": _estimate(record.likelihood.popularity_minus_model)}),
                Row({"of": "uniform less the model", "nats": _estimate(record.likelihood.uniform_minus_model)}),
            ),
            (f"Over the {record.likelihood.users:,} users whose next item the event allows.",),
        ),
        _likelihoods("by_user", "the user's training events", record.likelihood_by_user),
        _likelihoods("by_target", "the item's training uses", record.likelihood_by_target),
        Table(
            "comparisons",
            "Who tells a hit from a miss",
            {"confidence": "text", **COMPARED, "cost": "number"},
            tuple(Row({**_compared(one), "cost": one.cost}) for one in record.comparisons),
            (
                "Less the served list confidence's: above 0, that one is better. Signals, combinations and what is"
                " `asked` speak of the served lists; a system under its own name speaks of its own lists, so its AURC"
                " holds their quality too. The signals without a name before them are of the served model, whose"
                " probabilities its variance has shrunk already. `cost`: time to score, in multiples of the served"
                " model's.",
            ),
        ),
        Table(
            "comparisons_by_user",
            "The same, by training events of the user",
            {"users": "text", "confidence": "text", **COMPARED},
            tuple(
                Row({"users": stratum, **_compared(one)})
                for stratum, compared in record.comparisons_by_user.items()
                for one in compared
            ),
        ),
        _tenths(record.lists),
        _lists("lists", "Lists, by training events of the user", {"all": record.lists, **record.by_user}),
        _coverage({"all": record.lists, **record.by_user}),
        _items("items_by_user", "Items, by training events of the user", {"all": record.items, **record.by_user_items}),
        _items("items", "Items, by training uses of the item", record.by_item),
        *_sanity(record),
    ]


def _likelihoods(key: str, by: str, found: dict[str, Likelihood]) -> Table:
    """Nats of the model beside popularity's, by stratum."""
    columns = {by: "text", "users": "count", "model": "number", "popularity": "number", "popularity − model": "number"}
    rows = [
        Row(
            dict(
                zip(
                    columns,
                    (
                        stratum,
                        one.users,
                        _estimate(one.model),
                        _estimate(one.popularity),
                        _estimate(one.popularity_minus_model),
                    ),
                    strict=True,
                )
            )
        )
        for stratum, one in found.items()
    ]
    return Table(f"likelihood_{key}", f"Likelihood of the true next item, by {by}", columns, tuple(rows))


def _compared(one: Comparison) -> dict[str, Cell]:
    """A row of `COMPARED`."""
    return {
        "confidence": TITLES.get(one.name, one.name),
        "HR@10": one.hit_rate,
        "AURC": _estimate(one.aurc),
        "AURC − served": _estimate(one.aurc_difference),
        "log-loss": _estimate(one.log_loss),
        "log-loss − served": _estimate(one.log_loss_difference),
    }


def _sanity(record: ConfidenceRecord) -> list[Table]:
    """Whether confidence behaves as its meaning asks."""
    found = [
        Table(
            "altered",
            "Histories that are nobody's",
            {"history": "text", "users": "count", "list confidence": "metric", "− their own": "signed"},
            tuple(
                Row(
                    {
                        "history": one.history,
                        "users": one.users,
                        "list confidence": one.stated,
                        "− their own": _estimate(one.difference),
                    }
                )
                for one in record.altered
            ),
            ("Users of two events or more, and the same number of events each.",),
        ),
        Table(
            "catalogue",
            "Every item of the catalogue, by its training uses",
            {"training uses": "text", "mean confidence, millionths": "number"},
            tuple(
                Row({"training uses": name, "mean confidence, millionths": 1e6 * mean})
                for name, mean in record.by_catalogue_item.items()
            ),
        ),
    ]
    if record.reliability:
        found.append(
            Table(
                "reliability",
                "Reliability, by number of events",
                {
                    "events": "count",
                    "users": "count",
                    "median": "metric",
                    "of the same users": "metric",
                    "share clipped at 0": "metric",
                },
                tuple(
                    Row(
                        {
                            "events": one.events,
                            "users": one.users,
                            "median": one.median,
                            "of the same users": one.median_of_longest,
                            "share clipped at 0": one.share_clipped,
                        }
                    )
                    for one in record.reliability
                ),
                (
                    "Of the users who have so many events, after that many of theirs; then of those who have as many as"
                    " the last of these rows says, in all of them.",
                ),
            )
        )
    return found


def reliability_figure(record: ConfidenceRecord) -> Figure:
    """Stated against realised, of items and of lists."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    shown = (
        ("an item of the list", record.reliability_curve["stated"], record.reliability_curve["realised"]),
        ("the list of ten", record.lists.decile_stated, record.lists.decile_realised),
    )
    for panel, (title, stated, realised) in zip(panels, shown, strict=True):
        top = 1.05 * max(*stated, *realised)
        panel.plot([0, top], [0, top], color=GREY, linewidth=1)
        panel.plot(stated, realised, marker="o", color=LAYER_COLOURS[0])
        panel.set(title=title, xlabel="stated", ylabel="realised", xlim=(0, top), ylim=(0, top))
    return figure


def risk_figure(record: ConfidenceRecord) -> Figure:
    """The share of missed lists among the surest users."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    panel = figure.subplots()
    systems = {name: risk for name, risk in record.risk_curve.items() if name != "coverage"}
    for (name, risk), colour in zip(systems.items(), (LAYER_COLOURS[0], GREY), strict=False):
        panel.plot(record.risk_curve["coverage"], risk, color=colour, label=name)
    panel.set(xlabel="share of the users, surest first", ylabel="1 − HR@10", xlim=(0, 1))
    panel.legend()
    return figure


def _lists(key: str, title: str, found: dict[str, ListConfidence]) -> Table:
    columns = {
        "users": "text",
        "number": "count",
        "stated": "metric",
        "realised": "metric",
        "slope": "number",
        "χ² p": "number",
        "AURC": "metric",
    }
    rows = tuple(
        Row(
            {
                "users": name,
                "number": one.users,
                "stated": one.stated,
                "realised": one.realised,
                "slope": _estimate(one.slope),
                "χ² p": one.p_value,
                "AURC": _estimate(one.aurc),
            }
        )
        for name, one in found.items()
    )
    return Table(key, title, columns, rows)


def _tenths(lists: ListConfidence) -> Table:
    """Stated and realised of each tenth of the users."""
    rows = []
    sizes = [len(part) for part in np.array_split(np.arange(lists.users), len(lists.decile_stated))]
    for number, (size, stated, realised) in enumerate(
        zip(sizes, lists.decile_stated, lists.decile_realised, strict=True), 1
    ):
        low, high = wilson_interval(round(realised * size), size)
        hit = Estimate(realised, float(low), float(high))
        rows.append(Row({"tenth": number, "users": size, "stated": stated, "realised": hit}))
    columns = {"tenth": "count", "users": "count", "stated": "metric", "realised": "metric"}
    note = "By rising list confidence; 95 % intervals by Wilson's score."
    return Table("tenths", "Lists, by tenths of the users", columns, tuple(rows), (note,))


def _coverage(found: dict[str, ListConfidence]) -> Table:
    shares = [f"{coverage:.0%}" for coverage in COVERAGES]
    qualities = {"HR@10": "hit_rate_at", "NDCG@10": "ndcg_at"}
    columns = {"users": "text"} | {
        f"{name} of {share}".replace("%", " %"): "metric" for name in qualities for share in shares
    }
    rows = []
    for stratum, one in found.items():
        values = [getattr(one, key)[share] for key in qualities.values() for share in shares]
        rows.append(Row(dict(zip(columns, [stratum, *values], strict=True))))
    note = "Lists of the surest share of the users, by the stated list confidence; HR@10 of all is `realised` above."
    return Table("coverage", "Quality by coverage", columns, tuple(rows), (note,))


def _items(key: str, title: str, found: dict[str, ItemConfidence]) -> Table:
    columns = {
        "stratum": "text",
        "places": "count",
        "confidence": "metric",
        "hit rate": "metric",
        "ECE": "metric",
        "if calibrated": "text",
        "Brier skill": "number",
    }
    rows = tuple(
        Row(
            {
                "stratum": name,
                "places": one.places,
                "confidence": one.mean_confidence,
                "hit rate": one.hit_rate,
                "ECE": _estimate(one.ece),
                "if calibrated": f"{one.ece_null[0]:.4f} … {one.ece_null[1]:.4f}",
                "Brier skill": _estimate(one.brier_skill),
            }
        )
        for name, one in found.items()
    )
    return Table(key, title, columns, rows)


def _estimate(interval: Interval | None) -> Cell:
    return None if interval is None else interval.estimate


def _shown(interval: Interval, digits: int = 3) -> str:
    value, low, high = (f"{each:.{digits}f}" for each in (interval.value, interval.low, interval.high))
    return f"{value} ({low} … {high})"
