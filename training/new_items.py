"""What a bundle will say of items that it was not trained on, fitted on those that it was (math.md, "Items that were
never trained").

n items with metadata · F features · D width
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from model.backbone import Backbone
from model.new_items import Column, Kind, Metadata, NewItems, Regression, raw_features, texts
from training.metadata import MetadataTable
from training.tables import DataError

MIN_ITEMS = 20
"""Trained items with metadata that a regression needs."""
MIN_USES = 2
"""Items that must have a text before it is a feature."""
MAX_TEXTS = 1000
"""Features of one column: its most frequent texts."""
PENALTIES = np.append(np.geomspace(1e-2, 1e5, 29), np.inf)
"""Tried by cross-validation; an infinite one leaves the mean alone."""


class FittedNewItems(NamedTuple):
    """The fit, and what a record says of it."""

    new_items: NewItems
    summary: dict[str, Any]


@torch.no_grad()
def fit_new_items(
    model: Backbone, item_ids: Sequence[str] = (), metadata: MetadataTable | None = None
) -> FittedNewItems:
    """The catalogue's mean and spread, and where there are metadata the regression on them.

    Each trained item counts once, however often it was used: a new item is one more of the catalogue's items, not one
    more of its events.

    Args:
        model: trained.
        item_ids: the catalogue's, by row. Unused without metadata.
        metadata: of its items; None: there are none.

    Raises:
        DataError: too few trained items have metadata.
    """
    catalogue = model.catalogue().double().cpu().numpy()
    mean = catalogue.mean(0)
    regression: Regression | None = None
    summary: dict[str, Any] = {}
    if metadata is not None:
        is_trained = (model.log_count > 0).tolist()
        rows = [row for row, item_id in enumerate(item_ids) if is_trained[row] and item_id in metadata.rows]
        if len(rows) < MIN_ITEMS:
            raise DataError(
                f"the metadata have rows for {len(rows)} of the {sum(is_trained)} trained items, {MIN_ITEMS} are"
                " needed: check that item_id means the same as in the log"
            )
        regression, summary = fit_regression(
            [metadata.rows[item_ids[row]] for row in rows], metadata.kinds, catalogue[rows]
        )
    untrained = model.head.candidate_variance(torch.zeros(1, device=model.log_count.device)).item()
    return FittedNewItems(NewItems(mean, float(((catalogue - mean) ** 2).mean()), untrained, regression), summary)


def fit_regression(
    rows: Sequence[Metadata], kinds: dict[str, Kind], embedding: np.ndarray
) -> tuple[Regression, dict[str, Any]]:
    """Ridge regressions of embedding and log precision, each with the penalty that leave-one-out favours.

    The precision is that of an item about its prediction by the others, mean over dimensions.

    Args:
        rows: metadata of n items.
        kinds: column → what it holds.
        embedding: (n,D) of the same items.

    Raises:
        DataError: the columns say nothing that two items share.
    """
    columns = tuple(each for name, kind in kinds.items() if (each := _column(name, kind, rows)).num_features > 0)
    if not columns:
        raise DataError(
            f"the metadata of {len(rows)} trained items have no text that {MIN_USES} of them share, and no number:"
            " nothing can be learnt from them"
        )
    raw = np.stack([raw_features(columns, row) for row in rows])
    met = ~np.isnan(raw)
    offset = np.where(met, raw, 0).sum(0) / np.maximum(met.sum(0), 1)
    # Indicators keep their unit; a number has none of its own.
    is_number = np.repeat([each.kind == "number" for each in columns], [each.num_features for each in columns])
    deviation = np.sqrt((np.where(met, raw - offset, 0) ** 2).sum(0) / np.maximum(met.sum(0), 1))
    scale = np.where(is_number & (deviation > 0), deviation, 1.0)
    design = np.where(met, (raw - offset) / scale, 0.0)

    mean = _ridge(design, embedding)
    squares = (mean.left_out_residual**2).mean(1)
    # An item that is predicted exactly has no logarithm.
    log_squares = np.log(np.maximum(squares, 1e-6 * squares.mean() + np.finfo(float).tiny))
    precision = _ridge(design, -log_squares[:, None])
    # The mean of a logarithm is not the logarithm of the mean: over all items, residual² times precision is 1.
    left_out_log_precision = -log_squares - precision.left_out_residual[:, 0]
    correction = np.log((squares * np.exp(left_out_log_precision)).mean())

    ends = np.cumsum([each.num_features for each in columns])
    parts = [design[:, end - each.num_features : end] for each, end in zip(columns, ends, strict=True)]
    weights = np.split(mean.weights, ends[:-1])
    regression = Regression(
        columns=columns,
        offset=offset,
        scale=scale,
        low=np.nanmin(raw, 0),
        high=np.nanmax(raw, 0),
        weights=mean.weights,
        intercept=mean.intercept,
        precision_weights=precision.weights[:, 0],
        precision_intercept=float(precision.intercept[0] - correction),
        explained=np.array([((part @ own) ** 2).mean() for part, own in zip(parts, weights, strict=True)]),
    )
    about_others = (embedding - embedding.mean(0)) * len(rows) / (len(rows) - 1)
    summary = {
        "items": len(rows),
        "columns": {each.name: {"kind": each.kind, "features": each.num_features} for each in columns},
        "penalty": mean.penalty,
        "precision_penalty": precision.penalty,
        "explained_share": float(1 - squares.mean() / (about_others**2).mean()),
    }
    return regression, summary


def _column(name: str, kind: Kind, rows: Sequence[Metadata]) -> Column:
    """A column with the texts that get a feature; with none where nothing was met."""
    values = [value for row in rows if (value := row.get(name)) is not None]
    if kind == "number":
        # One that no item has would have no range.
        return Column(name, kind) if values else Column(name, "category")
    uses = Counter(text for value in values for text in set(texts(value)))
    frequent = sorted(uses, key=lambda text: (-uses[text], text))[:MAX_TEXTS]
    return Column(name, kind, tuple(sorted(text for text in frequent if uses[text] >= MIN_USES)))


class _Ridge(NamedTuple):
    """A fitted ridge regression: prediction = intercept + design·weights."""

    weights: np.ndarray
    """(F,K)"""
    intercept: np.ndarray
    """(K,)"""
    penalty: float | None
    """None: infinite."""
    left_out_residual: np.ndarray
    """(n,K) of each row about its prediction by the others."""


def _ridge(design: np.ndarray, target: np.ndarray) -> _Ridge:
    """Ridge regression of (n,K) targets on (n,F) features of mean 0, the intercept not penalised, with the penalty of
    least squared leave-one-out residual; the residuals follow from the leverages (Allen's PRESS)."""
    intercept = target.mean(0)
    centred = target - intercept
    left, singular, right = np.linalg.svd(design, full_matrices=False)
    projected = left.T @ centred

    def left_out(penalty: float) -> np.ndarray:
        shrunk = singular**2 / (singular**2 + penalty)
        leverage = 1 / len(design) + left**2 @ shrunk
        # A row that nothing but itself can predict has a leverage of 1.
        return (centred - left @ (shrunk[:, None] * projected)) / np.maximum(1 - leverage, 1e-9)[:, None]

    best = min(PENALTIES, key=lambda penalty: float((left_out(penalty) ** 2).sum()))
    weights = right.T @ ((singular / (singular**2 + best))[:, None] * projected)
    return _Ridge(weights, intercept, float(best) if np.isfinite(best) else None, left_out(best))
