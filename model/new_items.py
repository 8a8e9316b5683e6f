"""What is believed of an item that was never trained: a Gaussian over its embedding (math.md, "Items that were never
trained").

From the item's metadata by a ridge regression over the items that were trained, if the bundle has one; else the
catalogue's mean, as wide as the catalogue is. numpy alone: training fits, the service predicts.

D width · F features · C columns of the metadata
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from zipfile import BadZipFile

import numpy as np

Kind = Literal["category", "tags", "number"]
"""Of a column: one text, several texts, or a number."""

Value = str | float | Sequence[str]
Metadata = Mapping[str, Value | None]
"""Column → value. What is null or left out is not known."""

ACCEPTED: Mapping[Kind, str] = {
    "category": "a text",
    "tags": "a list of texts",
    "number": "a number",
}
"""The accepted form of each kind of column."""


@dataclass(frozen=True)
class Column:
    """One column of the metadata, and the features it becomes."""

    name: str
    kind: Kind
    values: tuple[str, ...] = ()
    """The texts that have a feature each; of a number there are none, and it is a feature itself."""

    @property
    def num_features(self) -> int:
        """How many of the F are this column's."""
        return 1 if self.kind == "number" else len(self.values)

    def accepts(self, value: Value | None) -> bool:
        """Whether a value is of the column's kind, or null."""
        if value is None:
            return True
        if self.kind == "number":
            return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
        if self.kind == "category":
            return isinstance(value, str)
        return not isinstance(value, str | float | int) and all(isinstance(text, str) for text in value)

    def features(self, value: Value | None) -> np.ndarray | None:
        """(num_features,) of a value; None when it says nothing: null, of another kind, or nothing but unmet texts."""
        if value is None or not self.accepts(value):
            return None
        if self.kind == "number":
            return np.array([value], np.float64)
        own = texts(value)
        met = [text in own for text in self.values]
        # An empty list is known to hold nothing.
        return np.array(met, np.float64) if any(met) or not own else None


def texts(value: Value) -> list[str]:
    """The texts of a category or of tags."""
    return [str(value)] if isinstance(value, str | float | int) else list(value)


def raw_features(columns: Sequence[Column], metadata: Metadata) -> np.ndarray:
    """(F,) of an item, column after column; NaN where it does not have one."""
    found = [(column, column.features(metadata.get(column.name))) for column in columns]
    return np.concatenate(
        [np.full(column.num_features, np.nan) if values is None else values for column, values in found]
    )


class NewItem(NamedTuple):
    """What is believed of one item's embedding, as the head reads it."""

    mean: np.ndarray
    """(D,) float32."""
    variance: float
    """r > 0, the candidate's own variance: D times that of one dimension."""
    is_regressed: bool
    """Whether any of its metadata was used; else it is the catalogue's mean."""


@dataclass(frozen=True)
class Regression:
    """Embedding and log precision by metadata, each linear in the features x̂ = (clip(x, low, high) − offset)/scale:

        embedding = intercept + x̂ W            log precision = precision_intercept + x̂ w

    A column that an item does not have adds nothing to either, and what it explains of the trained items to the
    variance.
    """

    columns: tuple[Column, ...]
    offset: np.ndarray
    """(F,) the features' means."""
    scale: np.ndarray
    """(F,) > 0."""
    low: np.ndarray
    """(F,) least and …"""
    high: np.ndarray
    """(F,) … largest of the trained items: there is no extrapolation."""
    weights: np.ndarray
    """(F,D) W"""
    intercept: np.ndarray
    """(D,)"""
    precision_weights: np.ndarray
    """(F,) w"""
    precision_intercept: float
    """log precision of one dimension's residual."""
    explained: np.ndarray
    """(C,) ≥ 0: variance, mean over dimensions, that each column explains."""

    def design(self, metadata: Metadata) -> tuple[np.ndarray, np.ndarray]:
        """x̂ (F,), 0 where the item does not have the column, and which columns it has, (C,) bool."""
        standard = (np.clip(raw_features(self.columns, metadata), self.low, self.high) - self.offset) / self.scale
        has = np.array([column.features(metadata.get(column.name)) is not None for column in self.columns])
        return np.nan_to_num(standard, nan=0.0), has


@dataclass(frozen=True)
class NewItems:
    """What a bundle says of items that it was not trained on.

    Raises:
        ValueError: shapes do not belong together, or a number is not finite.
    """

    mean: np.ndarray
    """(D,) the catalogue's mean ē."""
    spread: float
    """Variance of the catalogue's embeddings about it, mean over dimensions."""
    untrained_variance: float
    """r of an item with 0 training uses; 0 for a plain model."""
    regression: Regression | None = None
    """None: the model was trained without metadata."""

    def __post_init__(self) -> None:
        width = len(self.mean)
        shapes: dict[str, tuple[int, ...]] = {"mean": (width,)}
        arrays: dict[str, Any] = {name: getattr(self, name) for name in ("mean", "spread", "untrained_variance")}
        if (found := self.regression) is not None:
            num_features = sum(column.num_features for column in found.columns)
            arrays |= {field.name: getattr(found, field.name) for field in fields(found) if field.name != "columns"}
            shapes |= dict.fromkeys(("offset", "scale", "low", "high", "precision_weights"), (num_features,))
            shapes |= {
                "weights": (num_features, width),
                "intercept": (width,),
                "explained": (len(found.columns),),
            }
        for name, values in arrays.items():
            if np.shape(values) != shapes.get(name, ()):
                raise ValueError(f"{name} has shape {np.shape(values)}, expected {shapes.get(name, ())}")
            if not np.isfinite(values).all():
                raise ValueError(f"{name} holds a number that is not finite")

    def predict(self, metadata: Metadata) -> NewItem:
        """The Gaussian of an item with this metadata.

        Its variance contains that of the regression's residual and all that the model gives an item without training
        uses, so it is wider than any trained item.
        """
        if self.regression is not None:
            design, has = self.regression.design(metadata)
            if has.any():
                log_precision = self.regression.precision_intercept + design @ self.regression.precision_weights
                residual = math.exp(-log_precision) + self.regression.explained[~has].sum()
                return self._item(self.regression.intercept + design @ self.regression.weights, residual, True)
        return self._item(self.mean, self.spread, False)

    def _item(self, mean: np.ndarray, residual: float, is_regressed: bool) -> NewItem:
        variance = self.untrained_variance + len(self.mean) * residual
        return NewItem(mean.astype(np.float32), float(variance), is_regressed)

    def misfits(self, metadata: Metadata) -> list[Column]:
        """The known columns to which the metadata give a value of another kind."""
        columns = () if self.regression is None else self.regression.columns
        return [column for column in columns if not column.accepts(metadata.get(column.name))]

    def unused(self, metadata: Metadata) -> list[str]:
        """Names in the metadata that say nothing here: no such column, or no value that trained items had."""
        known = {column.name: column for column in (self.regression.columns if self.regression else ())}
        return [
            name
            for name, value in metadata.items()
            if value is not None and (name not in known or known[name].features(value) is None)
        ]


def write_new_items(new_items: NewItems, path: Path) -> None:
    """Write `new_items.npz`."""
    arrays: dict[str, Any] = {
        "mean": new_items.mean,
        "spread": new_items.spread,
        "untrained_variance": new_items.untrained_variance,
    }
    if (found := new_items.regression) is not None:
        arrays |= {field.name: getattr(found, field.name) for field in fields(found) if field.name != "columns"}
        columns = [{"name": each.name, "kind": each.kind, "values": each.values} for each in found.columns]
        arrays["columns"] = json.dumps(columns)
    np.savez_compressed(path, **arrays)


def read_new_items(path: Path) -> NewItems:
    """Read `new_items.npz`; pickled objects are never read.

    Raises:
        ValueError: it is not what `write_new_items` writes.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        regression = None
        if (columns := arrays.pop("columns", None)) is not None:
            kept = {field.name for field in fields(Regression)} & arrays.keys()
            parts: dict[str, Any] = {name: arrays.pop(name) for name in kept}
            parts["precision_intercept"] = float(parts["precision_intercept"])
            regression = Regression(columns=tuple(map(_column, json.loads(str(columns)))), **parts)
        mean, spread, untrained = (arrays.pop(name) for name in ("mean", "spread", "untrained_variance"))
        if arrays:
            raise ValueError(f"unknown arrays {', '.join(sorted(arrays))}")
        return NewItems(mean, float(spread), float(untrained), regression)
    except (OSError, EOFError, BadZipFile, KeyError, TypeError) as error:
        raise ValueError(str(error)) from error


def _column(document: Mapping[str, Any]) -> Column:
    column = Column(str(document["name"]), document["kind"], tuple(map(str, document["values"])))
    if column.kind not in get_args(Kind):
        raise ValueError(f"column {column.name!r} is of the unknown kind {column.kind!r}")
    return column
