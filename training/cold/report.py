"""A judgement of cold users as Markdown and a figure, from its record alone."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from training.cold.judge import MODEL, PLAIN, POPULARITY
from training.cold.records import ColdRecord, Figures, Question
from training.confidence.records import Interval
from training.figures import GREY, LAYER_COLOURS, MARKERS, save
from training.files import write_whole
from training.study.layout import Row, Table, shown

REPORT, CURVE = "cold.md", "cold.png"
"""Files in the report's folder."""


def write_report(record: ColdRecord, out: Path) -> list[Path]:
    """Write the report and its figure; returns their paths, the report first."""
    out.mkdir(parents=True, exist_ok=True)
    save(curve_figure(record), out / CURVE)
    write_whole(out / REPORT, markdown(record).encode())
    return [out / REPORT, out / CURVE]


def markdown(record: ColdRecord) -> str:
    """The whole report."""
    sections = [
        f"# Cold users of {record.dataset}",
        f"Model `{record.model}`, event `{record.event}`. Held out of training were {record.validation_users:,} users"
        f" for validation, by whom the blends are fitted and the default is chosen, and {record.test_users:,} for test,"
        " of whom all figures are but the last table's. Each is asked several times: which event follows the first n?"
        " Brackets and bands are 95 % intervals, users resampled.",
        *answers(record),
        f"![HR@10 and list confidence by number of events]({CURVE})",
    ]
    for table in tables(record):
        sections += [f"## {table.title}", table.to_markdown()]
    return "\n\n".join(sections) + "\n"


def answers(record: ColdRecord) -> list[str]:
    """What the figures say, in sentences."""
    before_any = _by_system(record.questions[0])
    gain = before_any[POPULARITY].hr_gain
    verdict = "better than" if gain.low > 0 else "worse than" if gain.high < 0 else "not told apart from"
    chosen = (
        "no blend with popularity was better on the validation half, or not with certainty"
        if record.default == MODEL
        else "on the validation half it was better than the model, with both intervals above 0"
    )
    off = [
        f"too {'high' if overstated.low > 0 else 'low'} for n = {question.num_events}"
        for question in record.questions
        if (overstated := _by_system(question)[MODEL].overstated).low > 0 or overstated.high < 0
    ]
    return [
        f"Before any event the model's list is {verdict} the popular one: HR@10 {_shown(before_any[MODEL].hr)} against"
        f" {_shown(before_any[POPULARITY].hr)}, a difference of {_shown(gain, 'signed')}.",
        f"Default for cold users: {record.default}; {chosen}.",
        f"The model's list confidence, against the rate of hits, is {', '.join(off) or 'not shown to be off'}.",
    ]


def tables(record: ColdRecord) -> list[Table]:
    """Every table of the report."""
    return [
        _curve("questions", "By number of events", record.questions, "All users who can be asked."),
        _curve(
            "same_users",
            "By number of events, the same users throughout",
            record.same_users,
            "The users who can be asked every question, so that rows of different n compare.",
        ),
        Table(
            "blends",
            "Blends with popularity",
            {
                "blend": "text",
                "intercept": "number",
                "slope": "number",
                "HR@10 − model": "signed",
                "NDCG@10 − model": "signed",
            },
            tuple(
                Row(
                    {
                        "blend": blend.name,
                        "intercept": blend.intercept,
                        "slope": blend.slope,
                        "HR@10 − model": blend.hr_gain.estimate,
                        "NDCG@10 − model": blend.ndcg_gain.estimate,
                    }
                )
                for blend in record.blends
            ),
            (
                "Order by (1 − w)·log p + w·log q: p the model's probability, q the share of the training uses, w ="
                " σ(intercept + slope·x), x the logarithm of 1 + events or of the mean precision. The gains are of"
                " validation users, each part of them answered by a blend that was fitted on the other; a user counts"
                " once, by the mean over the questions. A blend becomes the default if both its intervals lie above 0;"
                " of several, the one of the largest gain in NDCG@10.",
            ),
        ),
    ]


def curve_figure(record: ColdRecord) -> Figure:
    """HR@10 and list confidence by number of events, of the model, the plain one, popularity and the best blend."""
    best = max(record.blends, key=lambda blend: blend.ndcg_gain.value).name
    names = [name for name in (MODEL, PLAIN, POPULARITY, best) if name in _by_system(record.questions[0])]
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    events = [question.num_events for question in record.questions]
    for index, name in enumerate(names):
        colour = GREY if name == POPULARITY else LAYER_COLOURS[index % len(LAYER_COLOURS)]
        of_system = [_by_system(question)[name] for question in record.questions]
        for panel, intervals in zip(
            panels, ([one.hr for one in of_system], [one.list_confidence for one in of_system]), strict=True
        ):
            panel.plot(events, [one.value for one in intervals], color=colour, marker=MARKERS[index], label=name)
            panel.fill_between(
                events, [one.low for one in intervals], [one.high for one in intervals], color=colour, alpha=0.15
            )
    for panel, title in zip(panels, ("HR@10", "list confidence"), strict=True):
        panel.set(title=title, xlabel="events of the user so far", xticks=events, ylim=(0, None))
        panel.grid(color="0.92")
        panel.set_axisbelow(True)
    panels[0].legend(fontsize=8)
    return figure


def _curve(key: str, title: str, questions: Sequence[Question], who: str) -> Table:
    columns = {
        "n": "text",
        "users": "count",
        "system": "text",
        "HR@10": "metric",
        "NDCG@10": "metric",
        "list confidence": "metric",
        "− hits": "signed",
        "model's HR@10 − this": "signed",
        "model's NDCG@10 − this": "signed",
        "weight of popularity": "number",
    }
    rows = tuple(
        Row(
            {
                "n": str(question.num_events),
                "users": question.users,
                "system": one.system,
                "HR@10": one.hr.estimate,
                "NDCG@10": one.ndcg.estimate,
                "list confidence": one.list_confidence.estimate,
                "− hits": one.overstated.estimate,
                "model's HR@10 − this": None if one.system == MODEL else one.hr_gain.estimate,
                "model's NDCG@10 − this": None if one.system == MODEL else one.ndcg_gain.estimate,
                "weight of popularity": one.popularity_weight,
            }
        )
        for question in questions
        for one in question.systems
    )
    without = ", ".join(f"{question.without:,} for n = {question.num_events}" for question in questions)
    impossible = ", ".join(f"{question.impossible:,}" for question in questions)
    return Table(
        key,
        title,
        columns,
        rows,
        (
            f"{who} Not asked, for want of a next event: {without}. Asked for an item they had had, a miss of every"
            f" system: {impossible}. `− hits`: list confidence less the rate of hits, above 0 it promises too much. A"
            " blend's confidences are the model's, of the items in the blend's list.",
        ),
    )


def _by_system(question: Question) -> dict[str, Figures]:
    return {one.system: one for one in question.systems}


def _shown(interval: Interval, style: str = "metric") -> str:
    return shown(interval.estimate, style)
