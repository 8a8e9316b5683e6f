"""`bft-train explain`: what is asked, answered in numbers, as text and as a figure."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.cells import cell_len, set_cell_size

from model.bundle import Bundle, BundleError
from model.weights import load_model
from training.catalog import Catalog
from training.events import DataConfig, read_events
from training.figures import history_figure, survey_figure
from training.history import Explanation, ToldEvent, explain_history, shortened, user_history
from training.progress import Reporter
from training.splits import Histories, make_split
from training.survey import ATTENTION, Survey, Table, compared, some_users, survey
from training.tables import DataError

LABEL_CELLS = 34
"""Widest item in a text table, in characters of a terminal."""
GROUP_GAP = 2
MOST_LAYER_COLUMNS = 4
"""A text table shows this many layers one by one; of a deeper model their mean."""
ROUNDING = 1e-6
"""Share of a mean below which half an interval is rounding: the users do not differ."""
PRECISIONS = ("initial_precision", "final_precision")
Groups = list[tuple[str, dict[str, list[str]]]]
"""Columns of a table: the title above some of them, then cells by name."""


class Answer(NamedTuple):
    """`fields` for JSON, `text` for a person, and the figure."""

    fields: dict[str, Any]
    text: str
    figure: Figure


def explain_told(bundle: Bundle, told: Sequence[ToldEvent]) -> Answer:
    """What a bundle's model makes of one history."""
    explanation = explain_history(load_model(bundle), bundle.items, bundle.manifest.event, told)
    name = bundle_text(bundle)
    events = f"{explanation.num_events:,} event{'' if explanation.num_events == 1 else 's'}"
    return Answer(
        {"bundle": bundle_fields(bundle), **explanation.to_json()},
        f"{name}\n{history_text(explanation)}",
        history_figure(explanation, f"{name}: one history of {events}"),
    )


def explain_user(bundle: Bundle, data: DataConfig, user_id: str) -> Answer:
    """What a bundle's model makes of the whole history of one user of a log.

    Raises:
        DataError: the log cannot be read or has no such user.
    """
    return explain_told(bundle, user_history(read_events(data), user_id))


def explain_log(
    bundle: Bundle, data: DataConfig, against: Bundle | None, most_users: int | None, report: Reporter
) -> Answer:
    """What a bundle's model, and perhaps another's beside it, does over the test users of a log.

    Args:
        bundle: which also says how the log is split.
        data: how to read the log.
        against: a bundle of the same catalogue, backbone and window.
        most_users: at most so many users; None for all.
        report: receives the progress.

    Raises:
        BundleError: the two bundles cannot be compared.
        DataError: the log cannot be read, or has no test user.
    """
    if against is not None:
        check_comparable(bundle, against)
    report.stage(f"reading {data.path}")
    histories = some_users(_test_histories(bundle, data), most_users)
    first = _surveyed(bundle, histories, report)
    second = None if against is None else _surveyed(against, histories, report)
    name = bundle_text(bundle) + (f" against {bundle_text(against)}" if against is not None else "")
    fields = {"bundle": bundle_fields(bundle), **first.to_json()}
    if against is not None and second is not None:
        fields["against"] = {"bundle": bundle_fields(against), **second.to_json()}
    return Answer(
        fields,
        f"{name}\n{survey_text(first, second)}",
        survey_figure(first, f"{name}: {first.num_users:,} users of {data.path.name}", second),
    )


def check_comparable(bundle: Bundle, against: Bundle) -> None:
    """That two bundles read the same histories in the same way, so that only their models differ.

    Raises:
        BundleError: names what differs.
    """
    ours, theirs = bundle.manifest, against.manifest
    aspects = {
        "catalogue lineage": (ours.lineage, theirs.lineage),
        "number of items": (ours.num_items, theirs.num_items),
        "backbone": (ours.model.backbone, theirs.model.backbone),
        "window": (ours.model.max_len, theirs.model.max_len),
    }
    for aspect, (here, there) in aspects.items():
        if here != there:
            raise BundleError(
                f"{against.folder}: its {aspect} is {there}, that of {bundle.folder} is {here}; --against takes a model"
                " trained on the same log with the same backbone and max_len, e.g. with model.filtering=off"
            )


def _test_histories(bundle: Bundle, data: DataConfig) -> Histories:
    """The test users of a log, as `bft-train evaluate` finds them."""
    if bundle.manifest.data["split"] == "time":
        raise DataError(
            f"{bundle.folder} was made by the retraining job, which holds no users out: nobody is a test user. Look at"
            " one user with --user ID, or at a history with --history"
        )
    catalog = Catalog.of_bundle(bundle)
    histories = make_split(read_events(data), catalog, bundle.manifest.data["split"]).test.history
    if len(histories) == 0:
        raise DataError(f"{data.path}: the split {bundle.manifest.data['split']} leaves no test user to look at")
    return histories


def _surveyed(bundle: Bundle, histories: Histories, report: Reporter) -> Survey:
    report.stage(f"looking into {bundle_text(bundle)} while it reads {len(histories):,} histories")
    tenths = 0

    def progress(done: int, total: int) -> None:
        nonlocal tenths
        if done * 10 // total > tenths and done < total:
            tenths = done * 10 // total
            report.stage(f"{done:,} of {total:,} histories")

    return survey(load_model(bundle), bundle.items.training_counts, histories, progress)


# As text


def bundle_fields(bundle: Bundle) -> dict[str, Any]:
    """Which model speaks."""
    manifest = bundle.manifest
    return {
        "name": manifest.name,
        "version": manifest.version,
        "backbone": manifest.model.backbone,
        "filtering": manifest.model.filtering,
    }


def bundle_text(bundle: Bundle) -> str:
    """Which model speaks, on one line."""
    manifest = bundle.manifest
    switch = "on" if manifest.model.filtering else "off"
    return f"{manifest.name} {manifest.version} ({manifest.model.backbone}, filtering {switch})"


def history_text(explanation: Explanation) -> str:
    """One history as a person reads it: a line a position, then the first recommendations."""
    told, outside = explanation.num_events, explanation.outside_window
    heading = f"{told} event{'' if told == 1 else 's'}"
    if outside:
        heading += f"; the window starts after the first {outside}"
    if explanation.unknown_item_ids:
        heading += f"; not in the catalogue, read as UNK: {', '.join(explanation.unknown_item_ids)}"

    positions = explanation.positions
    share = "kriging weight" if explanation.filtering else "attention"
    heard = (share, _by_layer([position.heard for position in positions], "{:.3f}"))
    sizes = ("sample size", _by_layer([position.effective_sample_size for position in positions], "{:.1f}"))
    groups: Groups = [("", {"weight": [f"{position.weight:g}" for position in positions]}), heard, sizes]
    if explanation.filtering:
        precision = {
            "initial": [f"{position.initial_precision:.3g}" for position in positions],
            "final": [f"{position.final_precision:.3g}" for position in positions],
        }
        gain = _by_layer([position.gain or [] for position in positions], "{:.3f}")
        groups = [groups[0], ("precision", precision), heard, ("gain", gain), sizes]

    note = f"{share}: what {explanation.answered_by}, which answers, gives each; it and sample sizes: mean over heads"
    if explanation.filtering:
        notes = [note, "precision and gain: mean over dimensions"]
    else:
        notes = [note, "a plain model has no precision and no gain"]
    best = [
        f"  {rank}  {one.score:6.2f} ± {one.std:.2f}  {one.label}"
        for rank, one in enumerate(explanation.recommendations, 1)
    ]
    labels = [f"{place}  {position.label}" for place, position in enumerate(positions)]
    table = aligned("position", labels, groups)
    return "\n".join([heading, "", *table, "", *notes, "", "next, score ± standard deviation:", *best])


def survey_text(survey: Survey, against: Survey | None = None) -> str:
    """Tables as a person reads them, the attention beside another model's if there is one."""
    lines: list[str] = []
    if survey.overall is not None and survey.by_item_frequency is not None and survey.by_sample_size is not None:
        gain = survey.overall.columns["gain"]
        layers = ", ".join(f"layer {layer} {gain.mean[layer, 0]:.3f}" for layer in range(1, len(gain.mean)))
        lines += [
            f"mean gain {_estimate_text(survey.overall, 'gain', 0)} ({layers}), over"
            f" {survey.overall.positions[0]:,} events of {survey.num_users:,} users",
            "",
            *_table_text("training uses", survey.by_item_frequency, "events", (*PRECISIONS, "gain")),
            "",
            *_table_text("sample size", survey.by_sample_size[0], "events × layers", ("gain",)),
            "",
        ]
    names = (*PRECISIONS, "gain", "effective_sample_size") if survey.filtering else ("effective_sample_size",)
    lines += [*_table_text("history length", survey.by_history_length, "positions", names), ""]
    lines += [*_attention_text(survey, against), ""]
    lines.append("± half of a 95 % interval, a user counting as one draw; precisions: geometric means")
    return "\n".join(lines)


def _attention_text(survey: Survey, against: Survey | None) -> list[str]:
    table = survey.attention_by_history_length
    bins = table.filled()
    groups: Groups = [("if all", {"alike": [f"{table.columns['if_all_alike'].mean[0, bin]:.3f}" for bin in bins]})]
    for whose, one in compared(survey, against).items():
        columns = {
            words: [_estimate_text(one.attention_by_history_length, name, bin) for bin in bins]
            for name, words in ATTENTION.items()
        }
        groups.append((whose, columns))
    labels = [table.labels[bin] for bin in bins]
    return ["attention of the position that answers", *aligned("history length", labels, groups)]


def _table_text(heading: str, table: Table, counted: str, names: Sequence[str]) -> list[str]:
    bins = table.filled()
    cells = {name: [_estimate_text(table, name, bin) for bin in bins] for name in names}
    groups: Groups = [("", {counted: [f"{table.positions[bin]:,}" for bin in bins]})]
    if precisions := {name.split("_")[0]: cells.pop(name) for name in PRECISIONS if name in cells}:
        groups.append(("precision", precisions))
    groups.append(("", {name.replace("_", " "): column for name, column in cells.items()}))
    return aligned(heading, [table.labels[bin] for bin in bins], groups)


def _estimate_text(table: Table, name: str, bin: int) -> str:
    column = table.columns[name]
    mean, low, high = (float(values[0, bin]) for values in (column.mean, column.low, column.high))
    if np.isnan(mean):
        return "–"
    # Precisions spread over decades, the rest lies between 0 and some neighbours.
    form, half_form = (".3g", ".2g") if name in PRECISIONS else (".3f", ".3f")
    if np.isnan(low):
        return f"{mean:{form}}"
    half = (high - low) / 2
    return f"{mean:{form}} ± {half if half > ROUNDING * mean else 0:{half_form}}"


def _by_layer(rows: Sequence[Sequence[float]], form: str) -> dict[str, list[str]]:
    """One column a layer, or their mean."""
    num_layers = len(rows[0])
    if num_layers > MOST_LAYER_COLUMNS:
        return {f"mean of {num_layers} layers": [form.format(np.mean(row)) for row in rows]}
    return {f"layer {layer + 1}": [form.format(row[layer]) for row in rows] for layer in range(num_layers)}


def aligned(heading: str, labels: Sequence[str], groups: Groups) -> list[str]:
    """Lines of a table: labels on the left, columns flush right, a title above each group of them.

    Args:
        heading: of the labels.
        labels: one a row; a long one is cut.
        groups: title, and name of a column → a cell a row.
    """
    width = min(max(map(cell_len, [heading, *labels])), LABEL_CELLS)
    lines = [" " * width, *(set_cell_size(shortened(label, width), width) for label in [heading, *labels])]
    for title, columns in groups:
        block = [""] * (len(labels) + 1)
        for name, cells in columns.items():
            column_width = max(map(len, [name, *cells]))
            block = [f"{line}  {cell.rjust(column_width)}" for line, cell in zip(block, [name, *cells], strict=True)]
        block_width = max(len(title), len(block[0])) + GROUP_GAP
        block = [line.rjust(block_width) for line in [title, *block]]
        lines = [line + cells for line, cells in zip(lines, block, strict=True)]
    return [line.rstrip() for line in lines if line.strip()]
