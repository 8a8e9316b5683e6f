"""A judgement of confidences as Markdown and figures, from its record alone."""

from pathlib import Path

from matplotlib.figure import Figure

from training.confidence.measures import COVERAGES
from training.confidence.records import ConfidenceRecord, Interval, ItemConfidence, ListConfidence
from training.figures import GREY, LAYER_COLOURS, save
from training.files import write_whole
from training.study.layout import Cell, Row, Table

REPORT = "confidence.md"
RELIABILITY, RISK = "reliability.png", "risk-coverage.png"
"""Files in the report's folder."""
TITLES = {
    "served list confidence": "served list confidence (Σ of the items')",
    "free, fitted": "all free signals, fitted",
    "free and precision, fitted": "all free signals and precision, fitted",
}


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
    for table in tables(record):
        sections += [f"## {table.title}", table.to_markdown()]
    return "\n\n".join(sections) + "\n"


def answers(record: ConfidenceRecord) -> list[str]:
    """What the figures say, in sentences."""
    items, lists = record.items, record.lists
    inside = items.ece_null[0] <= items.ece.value <= items.ece_null[1]
    small = items.ece.value <= 0.1 * items.mean_confidence
    said = [
        f"The confidence of an item among the ten is off by {items.ece.value:.4f} on average (ECE), of a mean of"
        f" {items.mean_confidence:.4f}; a perfectly calibrated one would show {items.ece_null[0]:.4f} …"
        f" {items.ece_null[1]:.4f}: {'inside' if inside else 'outside'}"
        f" and {'at most' if small else 'more than'} a tenth of the mean.",
        f"Lists state {lists.stated:.3f} and are hit {lists.realised:.3f} of the time. Over tenths of the users the two"
        f" {'agree' if lists.p_value > 0.01 else 'do not agree'} (χ² {lists.chi_square:.1f}, p {lists.p_value:.2g})"
        + ("." if lists.slope is None else f"; slope {_shown(lists.slope)}.")
        + f" The surest tenth is hit {lists.decile_realised[-1]:.3f}, the least sure {lists.decile_realised[0]:.3f}.",
    ]
    if items.brier_skill is not None:
        proved = "more than" if items.brier_skill.low > 0 else "not shown to be more than"
        said.append(f"Brier skill {_shown(items.brier_skill)}: {proved} the base rate.")
    free = [one for one in record.comparisons if one.name == "free, fitted"]
    if free and free[0].log_loss_difference is not None:
        difference = free[0].log_loss_difference
        adds = "Precision adds to" if difference.low > 0 else "Precision is not shown to add to"
        said.append(f"{adds} what comes for free: log-loss {_shown(difference)} nats a user lower with it.")
    if record.seed_agreement is not None:
        said.append(
            f"A model of another seed puts {100 * record.seed_agreement:.0f} % of the users in the same tenth by list"
            " confidence, or in one beside it."
        )
    return said


def tables(record: ConfidenceRecord) -> list[Table]:
    """Every table of the report."""
    return [
        Table(
            "likelihood",
            "Likelihood of the true next item",
            {"of": "text", "nats": "number"},
            (
                Row({"of": "the model", "nats": _estimate(record.likelihood.model)}),
                Row({"of": "popularity", "nats": _estimate(record.likelihood.popularity)}),
                Row({"of": "uniform", "nats": record.likelihood.uniform}),
            ),
            (f"Over the {record.likelihood.users:,} users whose next item the event allows.",),
        ),
        Table(
            "comparisons",
            "Who tells a hit from a miss",
            {
                "confidence": "text",
                "HR@10": "metric",
                "AURC": "metric",
                "AURC − best": "signed",
                "log-loss": "metric",
                "log-loss − best": "signed",
                "cost": "number",
            },
            tuple(
                Row(
                    {
                        "confidence": TITLES.get(one.name, one.name),
                        "HR@10": one.hit_rate,
                        "AURC": _estimate(one.aurc),
                        "AURC − best": _estimate(one.aurc_difference),
                        "log-loss": _estimate(one.log_loss),
                        "log-loss − best": _estimate(one.log_loss_difference),
                        "cost": one.cost,
                    }
                )
                for one in record.comparisons
            ),
            (
                "`best` is the fitted combination of all signals, precision included; above 0, it is better. Signals"
                " and combinations speak of the served model's lists; another system speaks of its own lists, so its"
                " AURC holds their quality too. `cost`: time to score, in multiples of the served model's.",
            ),
        ),
        _lists("lists", "Lists, by training events of the user", {"all": record.lists, **record.by_user}),
        _coverage({"all": record.lists, **record.by_user}),
        _items("items_by_user", "Items, by training events of the user", {"all": record.items, **record.by_user_items}),
        _items("items", "Items, by training uses of the item", record.by_item),
        *_sanity(record),
    ]


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
                {"events": "count", "users": "count", "median": "metric", "share clipped at 0": "metric"},
                tuple(
                    Row(
                        {
                            "events": one.events,
                            "users": one.users,
                            "median": one.median,
                            "share clipped at 0": one.share_clipped,
                        }
                    )
                    for one in record.reliability
                ),
                ("Of the users who have so many events, after that many of theirs.",),
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


def _shown(interval: Interval) -> str:
    return f"{interval.value:.3f} ({interval.low:.3f} … {interval.high:.3f})"
