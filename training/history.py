"""One history as it is told, and what a model makes of it, position by position."""

import csv
import json
import os
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from rich.cells import cell_len, set_cell_size
from torch import Tensor

from model.backbone import Backbone
from model.bundle import Event, Items
from model.config import BOS, FIRST_ITEM, MASK, UNK, window_start
from training.batches import collate, serving_windows
from training.evaluate import seen_rows
from training.events import MAX_ID_BYTES, MAX_TIMESTAMP_S, MAX_WEIGHT, MIN_WEIGHT, EventLog
from training.splits import Histories
from training.tables import DataError
from training.trace import trace

HISTORY_SUFFIXES = (".csv", ".jsonl", ".ndjson", ".parquet", ".pq")
NUM_RECOMMENDATIONS = 5

# As it is told


def _check_id(item_id: str) -> str:
    if len(item_id.encode()) > MAX_ID_BYTES or any(unicodedata.category(sign) == "Cc" for sign in item_id):
        raise ValueError(f"an item id is text of 1 to {MAX_ID_BYTES} bytes without control characters")
    return item_id


def _in_seconds(value: float | datetime | None) -> float | None:
    if isinstance(value, datetime):
        value = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if value is not None and not 0 <= value < MAX_TIMESTAMP_S:
        raise ValueError("a timestamp is seconds since 1970, to the year 9999, or ISO-8601 like 1997-12-04T15:55:49Z")
    return value


def _check_weight(weight: float) -> float:
    if weight != 0 and not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError(f"a weight is 0, or a number from {MIN_WEIGHT} to {MAX_WEIGHT}")
    return weight


class ToldEvent(BaseModel):
    """One event of a history: an item, when it was used, how much it counts."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    item_id: Annotated[str, Field(min_length=1), AfterValidator(_check_id)]
    timestamp: Annotated[float | datetime | None, AfterValidator(_in_seconds)] = None
    """Seconds since 1970 or ISO-8601; without an offset that is UTC."""
    weight: Annotated[float, AfterValidator(_check_weight)] = 1.0


def read_history(text: str) -> list[ToldEvent]:
    """A history as `--history` tells it.

    Args:
        text: the name of an existing CSV, JSON-lines or Parquet file with the columns item_id and, optionally,
            timestamp and weight, which is then put into time order, rows without a time last; else item ids,
            separated by commas, oldest first. Empty: a user before any event.

    Raises:
        DataError: a bad row or id, or a file of another kind.
    """
    path = Path(text)
    if os.path.isfile(text):  # Path.is_file fails on a text too long for a name
        events = [_told(row, f"{path} row {number}") for number, row in enumerate(_rows(path), 1)]
        return sorted(events, key=lambda event: np.inf if event.timestamp is None else event.timestamp)
    if path.suffix.lower() in HISTORY_SUFFIXES:
        raise DataError(f"{text} does not exist; --history takes item ids separated by commas, or a file of events")
    ids = text.split(",") if text.strip() else []
    return [_told({"item_id": item_id.strip()}, f"--history, item {place}") for place, item_id in enumerate(ids, 1)]


def user_history(log: EventLog, user_id: str) -> list[ToldEvent]:
    """All events of one user of a log.

    Raises:
        DataError: the log has no such user.
    """
    events = log.events.filter(pl.col("user_id") == user_id)
    if events.is_empty():
        some = log.events["user_id"].unique(maintain_order=True).head(3).to_list()
        raise DataError(f"the log has no user {user_id!r}; its users are such as {', '.join(map(repr, some))}")
    # The log's reader has checked them.
    return [
        ToldEvent.model_construct(item_id=item_id, timestamp=None if np.isnan(timestamp) else timestamp, weight=weight)
        for item_id, timestamp, weight in events.select("item_id", "timestamp", "weight").iter_rows()
    ]


def _rows(path: Path) -> Iterable[dict[str, Any]]:
    """A file's rows by column name; an empty field is left out, so that its default holds."""
    suffix = path.suffix.lower()
    columns: Sequence[str] = ["item_id"]
    rows: list[Any]
    if suffix not in HISTORY_SUFFIXES:
        raise DataError(f"{path} is not a history; accepted: {', '.join(HISTORY_SUFFIXES)}")
    try:
        if suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(file, strict=True)
                columns, rows = reader.fieldnames or [], list(reader)
        elif suffix in (".jsonl", ".ndjson"):
            rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        else:
            frame = pl.read_parquet(path)
            columns, rows = frame.columns, frame.to_dicts()
    except (csv.Error, ValueError, pl.exceptions.PolarsError) as error:
        raise DataError(f"{path} cannot be read as {suffix[1:]} ({error})") from error
    if "item_id" not in columns:
        raise DataError(f"{path} has no column item_id; accepted: item_id, timestamp, weight")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or None in row:
            raise DataError(f"{path} row {number} is not item_id, timestamp and weight by name")
        yield {name: value for name, value in row.items() if value not in ("", None)}


def _told(row: dict[str, Any], where: str) -> ToldEvent:
    try:
        return ToldEvent.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        field = first["loc"][0]
        if first["type"] == "extra_forbidden":
            raise DataError(f"{where}: unknown column {field}; accepted: item_id, timestamp, weight") from error
        raise DataError(f"{where}, field {field}, value {str(first['input'])[:80]!r}: {first['msg']}") from error


# What the model makes of it


def named(item_id: str, title: str | None) -> str:
    """An item as a person reads it."""
    return f"{item_id} {title}" if title else item_id


@dataclass(frozen=True)
class Position:
    """One position of a history as the model read it.

    Per layer: `heard`, the share that the position which answers gives this one (see `trace.Heard`), `gain` and
    `effective_sample_size`. A plain model has no precision and no gain: they are None.
    """

    kind: str
    """BOS, MASK or event."""
    item_id: str | None
    title: str | None
    read_as_unknown: bool
    """The model knows too little of the item, or nothing."""
    weight: float
    initial_precision: float | None
    final_precision: float | None
    heard: list[float]
    gain: list[float] | None
    effective_sample_size: list[float]

    @property
    def label(self) -> str:
        """What a person calls it."""
        if self.item_id is None:
            return self.kind
        name = named(self.item_id, self.title)
        return f"UNK: {name}" if self.read_as_unknown else name


@dataclass(frozen=True)
class Recommendation:
    """One of the model's first items for a history, and how its score is spread."""

    item_id: str
    title: str | None
    score: float
    std: float

    @property
    def label(self) -> str:
        """What a person calls it."""
        return named(self.item_id, self.title)


@dataclass(frozen=True)
class Explanation:
    """One history, position by position, and what comes out of it."""

    filtering: bool
    num_events: int
    """Events of positive weight, those before the window too."""
    outside_window: int
    unknown_item_ids: list[str]
    """Ids that the catalogue does not know."""
    positions: list[Position]
    recommendations: list[Recommendation]

    @property
    def answered_by(self) -> str:
        """The position whose state the recommendations come from."""
        return "the MASK" if self.positions[-1].kind == "MASK" else "the last position"

    def to_json(self) -> dict[str, Any]:
        """Everything, by name."""
        return asdict(self)


def explain_history(model: Backbone, items: Items, event: Event, told: Sequence[ToldEvent]) -> Explanation:
    """Encode a history as a request for it would, and keep what happens inside.

    Args:
        model: with filtering or plain; is put into eval mode.
        items: its catalogue.
        event: what is predicted; items already had are not recommended when it is the next new one.
        told: the events, in order.
    """
    numbers = [items.number(one.item_id) or UNK for one in told]
    history = Histories(
        user_ids=[""],
        offsets=np.array([0, len(told)]),
        items=np.array(numbers, np.int64),
        weights=np.array([one.weight for one in told], np.float32),
        timestamps=np.array([np.nan if one.timestamp is None else one.timestamp for one in told], np.float64),
    )
    seen = trace(model, collate(serving_windows(history, model.config.max_len), torch.tensor([0])))

    counted = [one for one in told if one.weight > 0]
    outside = window_start(len(counted), model.config.max_len)
    shown: list[ToldEvent | None] = [None, *counted[outside:]]
    shown += [None] * (seen.items.shape[1] - len(shown))  # the MASK
    read_as = model.input_number[seen.items[0]].tolist()
    last = int(seen.last[0])

    def positions() -> Iterable[Position]:
        for place, (number, one) in enumerate(zip(seen.items[0].tolist(), shown, strict=True)):
            precisions = [float(values[0, place]) for values in (seen.initial_precision, seen.final_precision)]
            initial, final = precisions if model.config.filtering else (None, None)
            yield Position(
                kind={BOS: "BOS", MASK: "MASK"}.get(number, "event"),
                item_id=None if one is None else one.item_id,
                title=items.titles[number - FIRST_ITEM] if number >= FIRST_ITEM else None,
                read_as_unknown=read_as[place] == UNK,
                weight=float(seen.weights[0, place]),
                initial_precision=initial,
                final_precision=final,
                heard=[float(layer.weights[0, last, place]) for layer in seen.heard],
                gain=[float(gain[0, place]) for gain in seen.gain] or None,
                effective_sample_size=[float(layer.effective_sample_size[0, place]) for layer in seen.heard],
            )

    with torch.no_grad():
        scores = model.score(seen.final)
    ruled_out = seen_rows(history, 0) if event == "next_new_item" else np.array([], np.int64)
    return Explanation(
        filtering=model.config.filtering,
        num_events=len(counted),
        outside_window=outside,
        unknown_item_ids=list(dict.fromkeys(one.item_id for one in told if items.number(one.item_id) is None)),
        positions=list(positions()),
        recommendations=_recommendations(items, scores.logit[0], scores.mean[0], scores.variance[0], ruled_out),
    )


def _recommendations(
    items: Items, logit: Tensor, mean: Tensor, variance: Tensor, ruled_out: np.ndarray
) -> list[Recommendation]:
    """The first places of the list, in the order of the predictive logit."""
    possible = logit.clone()
    possible[torch.from_numpy(ruled_out)] = -torch.inf
    count = min(NUM_RECOMMENDATIONS, int(possible.isfinite().sum()))
    return [
        Recommendation(items.ids[row], items.titles[row], float(mean[row]), float(variance[row].sqrt()))
        for row in possible.topk(count).indices.tolist()
    ]


def shortened(text: str, cells: int) -> str:
    """The text, or its beginning and an ellipsis, in at most so many characters' room on a terminal."""
    return text if cell_len(text) <= cells else set_cell_size(text, cells - 1).rstrip() + "…"
