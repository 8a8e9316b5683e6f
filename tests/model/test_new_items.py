"""What a bundle says of items that were never trained, against numbers worked out by hand."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.bundle import FEATURES, NEW_ITEMS, BundleError, confidence_features, open_bundle
from model.new_items import Column, NewItems, Regression, read_new_items, write_new_items
from tests.model.stand_ins import CALIBRATION, write

REGRESSION = Regression(
    columns=(
        Column("studio", "category", ("Aardman", "Pixar")),
        Column("genres", "tags", ("Comedy", "Drama")),
        Column("year", "number"),
    ),
    offset=np.array([0.25, 0.75, 0.5, 0.5, 1990.0]),
    scale=np.array([1.0, 1.0, 1.0, 1.0, 10.0]),
    low=np.array([0.0, 0.0, 0.0, 0.0, 1950.0]),
    high=np.array([1.0, 1.0, 1.0, 1.0, 2000.0]),
    weights=np.array([[4.0, 0.0], [0.0, 4.0], [1.0, 0.0], [0.0, 2.0], [0.5, -0.5]]),
    intercept=np.array([1.0, -1.0]),
    precision_weights=np.array([0.0, 0.0, 0.0, 1.0, 0.0]),
    precision_intercept=math.log(4.0),
    explained=np.array([0.1, 0.2, 0.4]),
)
KNOWING = NewItems(mean=np.array([0.5, -0.5]), spread=0.9, untrained_variance=0.05, regression=REGRESSION)


def test_embedding_and_variance_follow_from_the_metadata() -> None:
    found = KNOWING.predict({"studio": "Pixar", "genres": ["Drama"], "year": 1980})

    # x̂ = (−0.25, 0.25, −0.5, 0.5, −1)
    np.testing.assert_allclose(found.mean, [1 - 1 - 0.5 - 0.5, -1 + 1 + 1 + 0.5])
    assert found.variance == pytest.approx(0.05 + 2 / (4 * math.exp(0.5)))
    assert found.is_regressed
    assert found.mean.dtype == np.float32


def test_a_column_that_is_not_known_adds_nothing_to_the_mean_and_what_it_explains_to_the_variance() -> None:
    for metadata in ({"year": 2000}, {"year": 2000, "studio": None}, {"year": 2000, "genres": ["Western"]}):
        found = KNOWING.predict(metadata)

        np.testing.assert_allclose(found.mean, [1.5, -1.5])
        assert found.variance == pytest.approx(0.05 + 2 * (1 / 4 + 0.1 + 0.2))


def test_an_empty_list_is_known_to_hold_nothing() -> None:
    assert KNOWING.predict({"genres": []}).mean.tolist() == [0.5, -2.0]


@pytest.mark.parametrize("metadata", [{}, {"colour": "red"}, {"studio": "Unheard"}, {"year": None}])
def test_an_item_of_which_nothing_is_known_is_the_catalogue_s_mean_as_wide_as_the_catalogue(metadata: Any) -> None:
    for new_items in (KNOWING, replace(KNOWING, regression=None)):
        found = new_items.predict(metadata)

        assert found.mean.tolist() == [0.5, -0.5]
        assert found.variance == pytest.approx(0.05 + 2 * 0.9)
        assert not found.is_regressed


def test_a_number_beyond_those_of_the_trained_items_is_taken_for_the_last_of_them() -> None:
    assert KNOWING.predict({"year": 1e300}).mean.tolist() == KNOWING.predict({"year": 2000}).mean.tolist()
    assert KNOWING.predict({"year": -5.0}).mean.tolist() == KNOWING.predict({"year": 1950}).mean.tolist()


def test_an_untrained_item_is_wider_than_what_the_model_gives_one_without_uses() -> None:
    for metadata in ({}, {"year": 1999}, {"studio": "Pixar", "genres": ["Comedy", "Drama"], "year": 1999}):
        assert KNOWING.predict(metadata).variance > KNOWING.untrained_variance


def test_names_that_say_nothing_and_values_of_another_kind_are_told() -> None:
    metadata = {"studio": ["Pixar"], "genres": "Drama", "year": "1999", "colour": "red", "note": None}

    assert [column.name for column in KNOWING.misfits(metadata)] == ["studio", "genres", "year"]
    assert KNOWING.unused(metadata) == ["studio", "genres", "year", "colour"]
    assert KNOWING.misfits({"studio": "Unheard", "genres": ["Western"], "year": None}) == []
    assert KNOWING.unused({"studio": "Unheard", "genres": ["Western", "Drama"]}) == ["studio"]
    assert KNOWING.misfits({"year": True}) != []


@pytest.mark.parametrize("new_items", [KNOWING, replace(KNOWING, regression=None)], ids=["metadata", "none"])
def test_what_is_written_is_read_again(new_items: NewItems, tmp_path: Path) -> None:
    write_new_items(new_items, tmp_path / NEW_ITEMS)

    found = read_new_items(tmp_path / NEW_ITEMS)

    for metadata in ({}, {"studio": "Pixar", "genres": ["Drama"], "year": 1980}):
        one, other = found.predict(metadata), new_items.predict(metadata)
        np.testing.assert_array_equal(one.mean, other.mean)
        assert one.variance == other.variance
    assert (found.regression is None) == (new_items.regression is None)
    if found.regression is not None:
        assert found.regression.columns == REGRESSION.columns


def test_shapes_that_do_not_belong_together_are_named() -> None:
    with pytest.raises(ValueError, match=r"weights has shape \(2, 2\), expected \(5, 2\)"):
        replace(KNOWING, regression=replace(REGRESSION, weights=np.zeros((2, 2))))
    with pytest.raises(ValueError, match="spread holds a number that is not finite"):
        replace(KNOWING, spread=math.nan)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: path.write_bytes(b"no archive"), f"{NEW_ITEMS} cannot be read"),
        (lambda path: np.savez(path, mean=np.array([object()])), f"{NEW_ITEMS} cannot be read"),
        (lambda path: np.savez(path, mean=np.zeros(2)), f"{NEW_ITEMS} cannot be read"),
        (lambda path: write_new_items(NewItems(np.zeros(3), 1.0, 0.0), path), f"{NEW_ITEMS} has width 3"),
    ],
    ids=["no archive", "pickled", "arrays missing", "another width"],
)
def test_a_bundle_with_a_damaged_file_is_refused_by_name(tmp_path: Path, change: Any, says: str) -> None:
    bundle = write(tmp_path, change=lambda staging: change(staging / NEW_ITEMS))

    with pytest.raises(BundleError, match=says):
        open_bundle(bundle)


# ---- confidence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [-0.5, 0.0, 0.5])
def test_no_item_gains_confidence_by_never_having_been_trained(weight: float) -> None:
    place = [FEATURES.index(name) for name in ("log_variance", "log_training_count")]
    weights = tuple(weight if index in place else each for index, each in enumerate(CALIBRATION.weights))
    calibration = CALIBRATION.model_copy(update={"weights": weights})
    log_probability = np.full((1, 1), -4.0)
    user = {"entropy": np.array([5.0]), "mean_precision": np.array([3.0]), "num_events": np.array([9])}

    def confidence(variance: float, count: int, untrained: bool) -> float:
        features = confidence_features(log_probability, np.full((1, 1), variance), np.full((1, 1), count), **user)
        return float(calibration.confidence(features, np.array([[untrained]]))[0, 0])

    # The fit's mean and deviation: log v 0.5 ± 1, log(1+n) 2 ± 1.5. Three deviations hold all trained items.
    trained = [confidence(math.exp(0.5 + z), round(math.expm1(max(0.0, 2 + 1.5 * y))), False)
               for z in (-2.9, 0, 2.9) for y in (-1.3, 0, 2.9)]  # fmt: skip
    new = confidence(math.exp(2.0), 0, True)

    assert new <= min(trained) * (1 + 1e-9)
