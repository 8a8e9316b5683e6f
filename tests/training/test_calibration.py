"""Temperature and confidence map: planted values come back, and confidences hold on users not fitted on."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from model.bundle import FEATURES
from model.config import FIRST_ITEM
from tests.training.histories import targets_of
from training import calibration, metrics
from training.evaluate import Predictions, ScoredUsers
from training.splits import Targets
from training.tables import DataError

NUM_USERS, NUM_ITEMS = 3000, 30


def scored_and_targets(temperature: float, seed: int = 0) -> tuple[np.ndarray, Targets]:
    """Logits (U,N), and targets drawn from softmax(logit/T)."""
    generator = np.random.default_rng(seed)
    logit = generator.normal(scale=2.0, size=(NUM_USERS, NUM_ITEMS)).astype(np.float32)
    noise = generator.gumbel(size=logit.shape)
    own = (logit / temperature + noise).argmax(1) + FIRST_ITEM
    return logit, targets_of([[]] * NUM_USERS, own.tolist())


def in_chunks(logit: np.ndarray, size: int = 700) -> Iterator[ScoredUsers]:
    """As `score_users` gives them: chunks, in an order that is not the users'."""
    for users in np.array_split(np.random.default_rng(9).permutation(len(logit)), len(logit) // size):
        scores = torch.from_numpy(logit[users])
        yield ScoredUsers(users, scores, torch.ones_like(scores), np.ones(len(users)))


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_the_temperature_that_made_the_targets_is_found(temperature: float) -> None:
    logit, targets = scored_and_targets(temperature)

    fitted = calibration.fit_temperature(in_chunks(logit), targets)

    # The standard error is 1.3 … 2.4 % (Fisher information of 3,000 users): four of them at most.
    assert fitted == pytest.approx(temperature, rel=0.08)


def test_the_temperature_is_the_likelihoods_maximum() -> None:
    logit, targets = scored_and_targets(1.37)
    rows = targets.target - FIRST_ITEM

    def loss(log_temperature: float) -> float:
        scaled = logit.astype(np.float64) / np.exp(log_temperature)
        return float((np.log(np.exp(scaled).sum(1)) - scaled[np.arange(NUM_USERS), rows]).mean())

    best = np.exp(minimize_scalar(loss, bounds=(-1, 1), method="bounded", options={"xatol": 1e-9}).x)

    # The grid's step is 5.9 %; a loss that is no parabola between its points shifts the minimum by about 0.1 %.
    assert calibration.fit_temperature(in_chunks(logit), targets) == pytest.approx(best, rel=2e-3)


@pytest.mark.parametrize("temperature", [0.1, 10.0])
def test_a_temperature_beyond_the_grid_is_cut_to_its_end(temperature: float) -> None:
    logit, targets = scored_and_targets(temperature)

    fitted = calibration.fit_temperature(in_chunks(logit), targets)

    assert fitted == pytest.approx(np.clip(temperature, 0.25, 4.0))


def test_impossible_targets_do_not_move_the_temperature() -> None:
    logit, targets = scored_and_targets(1.0)
    half = NUM_USERS // 2
    ruled_out = logit.copy()
    ruled_out[np.arange(half), targets.target[:half] - FIRST_ITEM] = -np.inf
    rest = targets_of([[]] * (NUM_USERS - half), targets.target[half:].tolist())

    fitted = calibration.fit_temperature(in_chunks(ruled_out), targets)

    assert fitted == pytest.approx(calibration.fit_temperature(in_chunks(logit[half:]), rest), rel=1e-5)


def test_only_impossible_targets_are_an_error_that_names_the_cure() -> None:
    logit, targets = scored_and_targets(1.0)

    with pytest.raises(DataError, match="next_item"):
        calibration.fit_temperature(in_chunks(np.full_like(logit, -np.inf)), targets)


PLANTED = {
    "logit_probability": 0.8,
    "log_variance": -0.5,
    "log_training_count": 0.3,
    "entropy": -0.4,
    "log_mean_precision": 0.25,
    "log_num_events": 0.2,
}
"""Weights per unit of the feature itself, not of its standard deviation."""
PLANTED_BIAS = 0.5
NUM_LISTED = 20


def raw_features(predictions: Predictions, counts: np.ndarray) -> dict[str, np.ndarray]:
    """The features by their definition (math.md, "Scoring and its uncertainty")."""
    probability = np.exp(predictions.list_log_probability.astype(np.float64))
    per_user = {
        "entropy": predictions.entropy,
        "log_mean_precision": np.log(predictions.mean_precision),
        "log_num_events": np.log(1 + predictions.num_events),
    }
    return {
        "logit_probability": np.log(probability / (1 - probability)),
        "log_variance": np.log(predictions.list_variance),
        "log_training_count": np.log(1 + counts[predictions.items - FIRST_ITEM]),
        **{name: np.repeat(column[:, None], probability.shape[1], 1) for name, column in per_user.items()},
    }


def planted(weights: dict[str, float], seed: int, num_users: int = 3000) -> tuple[Predictions, np.ndarray, np.ndarray]:
    """Lists whose items hit with probability σ(bias + w·x); training counts; those probabilities."""
    generator = np.random.default_rng(seed)
    counts = generator.geometric(0.1, size=200)
    shape = (num_users, NUM_LISTED)
    log_probability = np.log(generator.uniform(0.01, 0.6, shape))
    empty = Predictions(
        rank=np.ones(num_users),
        log_probability=np.zeros(num_users),
        entropy=generator.uniform(1, 4, num_users),
        mean_precision=generator.lognormal(sigma=1.0, size=num_users),
        num_events=generator.geometric(0.1, size=num_users),
        items=generator.integers(FIRST_ITEM, FIRST_ITEM + 200, shape),
        list_log_probability=-np.sort(-log_probability, axis=1),
        list_variance=generator.lognormal(sigma=0.8, size=shape),
        hit=np.zeros(shape, dtype=bool),
    )
    features = raw_features(empty, counts)
    logit = PLANTED_BIAS + sum(weights[name] * features[name] for name in FEATURES)
    true = 1 / (1 + np.exp(-logit))
    return replace(empty, hit=generator.random(shape) < true), counts, true


def test_the_planted_weights_of_the_confidence_map_are_found() -> None:
    predictions, counts, _ = planted(PLANTED, seed=1)

    fitted = calibration.fit_confidence(predictions, counts, 1.5, 0.7, "next_item")

    assert fitted.features == FEATURES
    assert (fitted.temperature, fitted.variance_scale, fitted.event) == (1.5, 0.7, "next_item")
    for name, weight, std in zip(fitted.features, fitted.weights, fitted.std, strict=True):
        # The standard errors of 60,000 draws are 0.01 … 0.02 per unit.
        assert weight / std == pytest.approx(PLANTED[name], abs=0.08), name
    at_zero = fitted.bias - sum(
        weight * mean / std for weight, mean, std in zip(fitted.weights, fitted.mean, fitted.std, strict=True)
    )
    assert at_zero == pytest.approx(PLANTED_BIAS, abs=0.3)


def test_the_map_is_the_maximum_of_the_likelihood_with_a_small_ridge() -> None:
    predictions, counts, _ = planted(PLANTED, seed=10, num_users=15)
    features, hit = raw_features(predictions, counts), predictions.hit.ravel()
    columns = np.stack([features[name].ravel() for name in FEATURES], 1)
    design = np.c_[(columns - columns.mean(0)) / columns.std(0), np.ones(len(columns))]
    ridge = np.diag([1.0] * len(FEATURES) + [0.0])
    expected = np.zeros(len(FEATURES) + 1)
    for _ in range(20):  # Newton's method, for a concave function of seven variables
        stated = 1 / (1 + np.exp(-design @ expected))
        curvature = design.T @ (design * (stated * (1 - stated))[:, None]) + ridge
        expected -= np.linalg.solve(curvature, design.T @ (stated - hit) + ridge @ expected)

    fitted = calibration.fit_confidence(predictions, counts, 1.0, 1.0, "next_item")

    # The features are float64, the optimiser stops at a relative change of 2e-9 in the loss.
    assert [*fitted.weights, fitted.bias] == pytest.approx(expected, abs=2e-3)


def test_confidences_are_near_the_hit_rates_of_users_not_fitted_on() -> None:
    predictions, counts, _ = planted(PLANTED, seed=2)
    fitted = calibration.fit_confidence(predictions, counts, 1.0, 1.0, "next_item")
    held_out, held_out_counts, _ = planted(PLANTED, seed=3)

    confidence = fitted.confidence(held_out.features(held_out_counts, NUM_LISTED)).ravel()

    hit = held_out.hit.ravel().astype(float)
    for part in np.array_split(np.argsort(confidence), 10):
        rate, stated = hit[part].mean(), confidence[part].mean()
        # Four standard errors of 6,000 draws, and a little for the error of the fit.
        assert stated == pytest.approx(rate, abs=4 * np.sqrt(stated / len(part)) + 0.005)
    assert metrics.brier_skill(confidence, hit) > 0.05


def test_the_map_may_not_turn_against_the_probability() -> None:
    predictions, counts, _ = planted({**PLANTED, "logit_probability": -0.5}, seed=4)

    fitted = calibration.fit_confidence(predictions, counts, 1.0, 1.0, "next_item")

    assert fitted.features[0] == "logit_probability"
    assert fitted.weights[0] == 0


def test_confidence_rises_with_the_probability_all_else_equal() -> None:
    predictions, counts, _ = planted(PLANTED, seed=5)
    fitted = calibration.fit_confidence(predictions, counts, 1.0, 1.0, "next_item")
    features = {name: np.full(50, column[0].flat[0]) for name, column in predictions.features(counts, 1).items()}
    features["logit_probability"] = np.linspace(-20, 10, 50)

    confidence = fitted.confidence(features)

    assert (np.diff(confidence) > 0).all()
    assert ((confidence > 0) & (confidence < 1)).all()


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"mean_precision": np.full(3000, np.inf)}, "log_mean_precision"),
        ({"list_variance": np.zeros((3000, NUM_LISTED))}, "log_variance"),
        ({"num_events": np.full(3000, 7)}, "log_num_events"),
    ],
)
def test_a_feature_that_is_constant_or_infinite_is_left_out(change: dict[str, np.ndarray], missing: str) -> None:
    predictions, counts, _ = planted(PLANTED, seed=6)

    fitted = calibration.fit_confidence(replace(predictions, **change), counts, 1.0, 0.0, "next_item")

    assert fitted.features == tuple(name for name in FEATURES if name != missing)
    assert np.isfinite(fitted.weights).all()
    assert all(std > 0 for std in fitted.std)


def test_listed_items_that_the_event_rules_out_do_not_move_the_map() -> None:
    predictions, counts, _ = planted(PLANTED, seed=7, num_users=300)

    def longer(column: np.ndarray, value: float) -> np.ndarray:
        return np.concatenate([column, np.full((300, 5), value, dtype=column.dtype)], axis=1)

    padded = replace(
        predictions,
        items=longer(predictions.items, FIRST_ITEM),
        list_log_probability=longer(predictions.list_log_probability, -np.inf),
        list_variance=longer(predictions.list_variance, 5.0),
        hit=longer(predictions.hit, False),
    )

    fitted = calibration.fit_confidence(padded, counts, 1.0, 1.0, "next_new_item")

    assert fitted == calibration.fit_confidence(predictions, counts, 1.0, 1.0, "next_new_item")


def test_only_the_first_hundred_items_of_a_list_are_fitted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    predictions, counts, _ = planted(PLANTED, seed=8, num_users=300)
    shorter = replace(
        predictions,
        **{
            name: getattr(predictions, name)[:, :5]
            for name in ("items", "list_log_probability", "list_variance", "hit")
        },
    )

    monkeypatch.setattr(calibration, "FIT_LIST_LENGTH", 5)

    assert calibration.fit_confidence(predictions, counts, 1.0, 1.0, "next_item") == calibration.fit_confidence(
        shorter, counts, 1.0, 1.0, "next_item"
    )
