"""The regression on metadata: against least squares that leaves each item out, and on data whose answer is known."""

import numpy as np
import pytest
import torch

from model.build import build_model
from model.config import ModelConfig
from model.new_items import NewItems
from training.metadata import MetadataTable
from training.new_items import PENALTIES, _ridge, fit_new_items, fit_regression
from training.tables import DataError


def ridge_by_least_squares(design: np.ndarray, target: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """Weights and intercept: the penalty as further rows, the intercept as a column that has none."""
    num_features = design.shape[1]
    rows = np.vstack(
        [np.c_[np.ones(len(design)), design], np.c_[np.zeros(num_features), np.eye(num_features) * penalty**0.5]]
    )
    found = np.linalg.lstsq(rows, np.vstack([target, np.zeros((num_features, target.shape[1]))]), rcond=None)[0]
    return found[1:], found[0]


def test_residuals_are_those_of_a_fit_without_the_item_and_the_penalty_is_the_one_they_favour() -> None:
    rng = np.random.default_rng(0)
    design = rng.normal(size=(30, 4))
    design -= design.mean(0)
    target = design @ rng.normal(size=(4, 3)) + 2 * rng.normal(size=(30, 3)) + 5

    found = _ridge(design, target)

    def left_out(penalty: float) -> np.ndarray:
        residuals = []
        for place in range(30):
            others = np.arange(30) != place
            weights, intercept = ridge_by_least_squares(design[others], target[others], penalty)
            residuals.append(target[place] - intercept - design[place] @ weights)
        return np.array(residuals)

    sums = [(left_out(penalty) ** 2).sum() for penalty in PENALTIES[:-1]]
    assert found.penalty == PENALTIES[int(np.argmin(sums))]
    np.testing.assert_allclose(found.left_out_residual, left_out(found.penalty), rtol=1e-6)
    weights, intercept = ridge_by_least_squares(design, target, found.penalty)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.intercept, intercept, rtol=1e-9)


GENRES = ("Action", "Comedy", "Drama")


def planted(size: int, noise: np.ndarray, seed: int = 0) -> tuple[list[dict[str, object]], np.ndarray]:
    """Items whose embedding is their genre's and their year's, with noise of a deviation that their genre has."""
    rng = np.random.default_rng(seed)
    genre, year = rng.integers(0, 3, size), rng.integers(1950, 2000, size)
    of_genre = np.random.default_rng(99).normal(size=(3, 8))
    embedding = of_genre[genre] + np.outer((year - 1975) / 50, np.ones(8))
    embedding += noise[genre][:, None] * rng.normal(size=(size, 8))
    rows = [{"genre": GENRES[g], "year": float(y)} for g, y in zip(genre, year, strict=True)]
    return rows, embedding


KINDS = {"genre": "category", "year": "number"}


def test_embeddings_that_follow_from_metadata_are_found_for_items_that_were_not_there() -> None:
    noise = np.full(3, 0.1)
    regression, summary = fit_regression(*with_kinds(planted(300, noise)))
    new_items = NewItems(np.zeros(8), 1.0, 0.0, regression)
    rows, embedding = planted(200, noise, seed=1)

    found = [new_items.predict(row) for row in rows]

    squares = np.array([(item.mean - true) ** 2 for item, true in zip(found, embedding, strict=True)])
    # The noise is all that is left, and the variance says how much that is.
    assert squares.mean() == pytest.approx(0.01, rel=0.1)
    assert np.mean([item.variance for item in found]) / 8 == pytest.approx(0.01, rel=0.1)
    assert summary["explained_share"] > 0.97
    assert summary["columns"] == {
        "genre": {"kind": "category", "features": 3},
        "year": {"kind": "number", "features": 1},
    }


def with_kinds(made: tuple[list[dict[str, object]], np.ndarray]) -> tuple[list, dict, np.ndarray]:
    rows, embedding = made
    return rows, KINDS, embedding


def test_the_precision_follows_from_metadata_too() -> None:
    noise = np.array([0.2, 0.4, 0.8])
    regression, _ = fit_regression(*with_kinds(planted(600, noise)))
    new_items = NewItems(np.zeros(8), 1.0, 0.0, regression)

    variances = [new_items.predict({"genre": genre, "year": 1975.0}).variance / 8 for genre in GENRES]

    np.testing.assert_allclose(variances, noise**2, rtol=0.25)


def test_what_a_missing_column_leaves_open_is_in_the_variance() -> None:
    noise = np.full(3, 0.1)
    regression, _ = fit_regression(*with_kinds(planted(600, noise)))
    new_items = NewItems(np.zeros(8), 1.0, 0.0, regression)
    rows, embedding = planted(400, noise, seed=1)

    for name in KINDS:
        found = [new_items.predict({name: row[name]}) for row in rows]
        squares = np.mean([(item.mean - true) ** 2 for item, true in zip(found, embedding, strict=True)])
        assert np.mean([item.variance for item in found]) / 8 == pytest.approx(squares, rel=0.25)


def test_metadata_that_say_nothing_lead_back_to_the_mean_as_wide_as_the_items_are() -> None:
    rows, _ = planted(300, np.zeros(3))
    embedding = np.random.default_rng(5).normal(size=(300, 8)) + 3

    regression, summary = fit_regression(rows, KINDS, embedding)

    found = NewItems(np.zeros(8), 1.0, 0.0, regression).predict(rows[0])
    assert summary["explained_share"] == pytest.approx(0, abs=0.01)
    np.testing.assert_allclose(found.mean, embedding.mean(0), atol=0.15)
    assert found.variance / 8 == pytest.approx(1.0, rel=0.1)


def test_texts_that_one_item_has_are_no_features_and_values_that_are_missing_are_passed_over() -> None:
    rows, embedding = planted(60, np.full(3, 0.1))
    rows[0] = {"genre": "Western", "year": None}
    rows[1] = {}

    regression, _ = fit_regression(rows, KINDS, embedding)

    assert regression.columns[0].values == GENRES
    assert np.isfinite(regression.weights).all()


# ---- of a model ------------------------------------------------------------------------------------------

NUM_ITEMS = 40


def some_model(backbone: str, filtering: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    config = ModelConfig(backbone=backbone, filtering=filtering, max_len=4, width=8, num_heads=2, ffn_width=8)
    counts = torch.arange(NUM_ITEMS)  # the first item was never trained
    return build_model(config, counts).eval()


@pytest.mark.parametrize("backbone", ["sasrec", "hstu"])
def test_without_metadata_there_are_the_mean_and_the_spread_of_what_the_head_reads(backbone: str) -> None:
    model = some_model(backbone)

    new_items, summary = fit_new_items(model)

    catalogue = model.catalogue().detach().double().numpy()
    np.testing.assert_allclose(new_items.mean, catalogue.mean(0), rtol=1e-6, atol=1e-9)
    assert new_items.spread == pytest.approx(np.mean([np.var(column) for column in catalogue.T]), rel=1e-6)
    assert new_items.untrained_variance == pytest.approx(model.head.candidate_level.exp().item())
    assert new_items.regression is None
    assert summary == {}


def test_the_regression_is_on_trained_items_that_have_metadata() -> None:
    ids = [f"i{row}" for row in range(NUM_ITEMS)]
    rows = {item_id: {"genre": GENRES[row % 3]} for row, item_id in enumerate(ids) if row != 7}

    _, summary = fit_new_items(some_model("sasrec"), ids, MetadataTable({"genre": "category"}, rows))

    assert summary["items"] == NUM_ITEMS - 2


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"elsewhere": {"genre": "Drama"}}, "rows for 0 of the 39 trained items, 20 are needed"),
        ({f"i{row}": {"genre": f"only {row}"} for row in range(NUM_ITEMS)}, "no text that 2 of them share"),
    ],
)
def test_metadata_from_which_nothing_can_be_learnt_are_refused(rows: dict, says: str) -> None:
    ids = [f"i{row}" for row in range(NUM_ITEMS)]

    with pytest.raises(DataError, match=says):
        fit_new_items(some_model("sasrec"), ids, MetadataTable({"genre": "category"}, rows))
