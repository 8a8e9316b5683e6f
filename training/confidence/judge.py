"""Judging the confidences of a model on its test users: how true they are, and beside free ones and paid ones.

U test users · K = 10 list length · N catalogue items
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from model.bundle import Calibration
from model.config import FIRST_ITEM
from training import calibration as calibrating
from training import evaluate, metrics
from training.confidence import measures
from training.confidence.measures import COVERAGES, Ranked, log_loss, mean_estimate, resampled
from training.confidence.records import Comparison, Interval, ItemConfidence, Likelihood, ListConfidence
from training.confidence.signals import FREE, OF_PRECISION, Combination, signals
from training.evaluate import LIST_LENGTH, Predictions, ScoredUsers, stated
from training.pipeline import Prepared
from training.splits import Histories
from training.study import strata
from training.study.runs import training_events

NUM_BINS = 10
CURVE_COVERAGES = np.linspace(0.05, 1.0, 20)
LEAST_USERS = 100
"""A stratum of fewer says nothing."""
FULL = "free and precision, fitted"
"""The combination that all else is compared with."""
FREE_FITTED = "free, fitted"
PLAIN = "plain"
"""The system without filtering."""

Scoring = Callable[[Histories], Iterator[ScoredUsers]]


@dataclass(frozen=True)
class System:
    """What can be asked: a model or several. Where it was refitted, validation is asked of what it was before."""

    fitted: Scoring
    """Has not learned the validation events."""
    served: Scoring


@dataclass(frozen=True)
class Said:
    """What a model says of the validation users and of the test users, at its own temperature."""

    temperature: float
    validation: Predictions
    test: Predictions
    seconds: float
    """Of scoring the test users."""

    @classmethod
    def by(cls, system: System, prepared: Prepared) -> "Said":
        """By a system; the temperature is fitted on validation.

        Args:
            system: to ask.
            prepared: whose split to ask about.
        """
        validation, test = prepared.split.validation, prepared.split.test
        temperature = calibrating.fit_temperature(system.fitted(validation.history), validation)
        said = evaluate.predict(system.fitted(validation.history), validation, temperature, calibrating.FIT_LIST_LENGTH)
        begun = time.monotonic()
        told = evaluate.predict(system.served(test.history), test, temperature, LIST_LENGTH)
        return cls(temperature, said, told, time.monotonic() - begun)


def judge(
    judged: System, calibration: Calibration, prepared: Prepared, learned: Prepared, systems: Mapping[str, System]
) -> dict[str, Any]:
    """What a `ConfidenceRecord` says of the test users.

    Args:
        judged: the model that is judged.
        calibration: of its bundle, fitted on validation.
        prepared: the log, split as the models were trained on it when the calibration was fitted.
        learned: the same, as the models have learned it that are served: `prepared`, or with its validation events.
        systems: name → another system, each of which ranks its own list; `plain` is drawn beside the judged one.
    """
    counts = learned.catalog.training_counts
    own = Said.by(judged, prepared)
    others = {name: Said.by(system, prepared) for name, system in systems.items()}
    confidence_UK = evaluate.confidences(own.test, calibration, counts)
    hit_UK = own.test.hit[:, :LIST_LENGTH]
    compared = comparisons(own, calibration, others, prepared.catalog.training_counts, counts)
    curves = {"served": (stated(confidence_UK), own.test.rank)}
    if PLAIN in others:
        plain = others[PLAIN]
        curves[PLAIN] = (signals(plain.test, counts)["sum of ten"], plain.test.rank)
    return {
        "event": prepared.event,
        "temperature": own.temperature,
        "likelihood": likelihood(own.test, learned),
        "items": item_confidence(confidence_UK, hit_UK),
        "lists": list_confidence(stated(confidence_UK), own.test.rank),
        "risk_curve": risk_curve(curves),
        "reliability_curve": reliability_curve(confidence_UK, hit_UK),
        "comparisons": compared,
        **by_stratum(confidence_UK, own.test, training_events(learned.split), counts),
    }


def likelihood(predictions: Predictions, prepared: Prepared) -> Likelihood:
    """Of the true next item, beside popularity and the uniform distribution; over users whose target is possible."""
    test, counts = prepared.split.test, prepared.catalog.training_counts
    seen: Mapping[int, np.ndarray] = {}
    if prepared.event == "next_new_item":
        seen = {user: np.unique(evaluate.seen_rows(test.history, user)) for user in range(len(test))}
    popularity = -measures.popularity_log_probability(counts, test.target - FIRST_ITEM, seen)
    model = -predictions.log_probability.astype(np.float64)
    possible = np.isfinite(model) & np.isfinite(popularity)
    return Likelihood(
        users=int(possible.sum()),
        model=Interval.of(mean_estimate(model[possible])),
        popularity=Interval.of(mean_estimate(popularity[possible])),
        uniform=float(np.log(len(counts))),
        popularity_minus_model=Interval.of(mean_estimate(popularity[possible] - model[possible])),
    )


def item_confidence(
    confidence_UK: np.ndarray, hit_UK: np.ndarray, chosen_UK: np.ndarray | None = None
) -> ItemConfidence:
    """Whether the confidence of places of lists is their rate of hits.

    Args:
        confidence_UK, hit_UK: of each place.
        chosen_UK: which places to judge, bool; None: all.
    """
    chosen = np.ones(confidence_UK.shape, bool) if chosen_UK is None else chosen_UK
    users, _ = np.nonzero(chosen)
    confidence, hit = confidence_UK[chosen].astype(np.float64), hit_UK[chosen].astype(np.float64)
    bins = metrics.equal_mass_bins(confidence, NUM_BINS)
    num_users = len(confidence_UK)

    def ece(counts_U: np.ndarray) -> float:
        weight = counts_U[users]
        gaps = np.bincount(bins, weight * (confidence - hit), minlength=NUM_BINS)
        return float(np.abs(gaps).sum() / weight.sum())

    def skill(counts_U: np.ndarray) -> float:
        weight = counts_U[users] / counts_U[users].sum()
        base = weight @ hit
        return float(1 - weight @ (confidence - hit) ** 2 / max(base * (1 - base), measures.LEAST_PROBABILITY))

    return ItemConfidence(
        places=len(confidence),
        mean_confidence=float(confidence.mean()),
        hit_rate=float(hit.mean()),
        ece=Interval.of(resampled(ece, num_users)),
        ece_null=metrics.ece_null_interval(np.where(chosen, confidence_UK, 0.0), NUM_BINS)
        if chosen_UK is None
        else _null_of_places(confidence, bins),
        brier_skill=Interval.of(resampled(skill, num_users)) if hit.any() else None,
    )


def _null_of_places(confidence: np.ndarray, bins: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """As `metrics.ece_null_interval`, for places that are no whole lists: hits are drawn place by place."""
    generator = np.random.default_rng(seed)
    draws = []
    for _ in range(measures.RESAMPLES):
        gaps = np.bincount(bins, confidence - (generator.random(len(confidence)) < confidence), minlength=NUM_BINS)
        draws.append(np.abs(gaps).sum() / len(confidence))
    low, high = np.quantile(draws, [(1 - measures.LEVEL) / 2, (1 + measures.LEVEL) / 2])
    return float(low), float(high)


def list_confidence(stated_U: np.ndarray, rank_U: np.ndarray) -> ListConfidence:
    """Whether a list's stated probability is its rate of hits, and whom it picks out."""
    hit = (rank_U <= LIST_LENGTH).astype(np.float64)
    ranked, groups = Ranked.by(stated_U), measures.deciles(stated_U, hit)
    quality = {"hit_rate_at": hit, "ndcg_at": metrics.ndcg(rank_U, LIST_LENGTH)}
    return ListConfidence(
        users=len(hit),
        stated=float(stated_U.mean()),
        realised=float(hit.mean()),
        slope=Interval.of(measures.slope(stated_U, hit)) if stated_U.std() > 0 else None,
        decile_stated=groups.stated,
        decile_realised=groups.realised,
        chi_square=groups.chi_square,
        p_value=groups.p_value,
        aurc=Interval.of(resampled(lambda counts: ranked.aurc(1 - hit, counts), len(hit))),
        **{
            name: {f"{coverage:.0%}": ranked.surest(values, coverage) for coverage in COVERAGES}
            for name, values in quality.items()
        },
    )


def by_stratum(
    confidence_UK: np.ndarray, predictions: Predictions, history_length_U: np.ndarray, training_counts: np.ndarray
) -> dict[str, Any]:
    """The same by training events of the user, and by training uses of the listed item."""
    hit_UK, stated_U = predictions.hit[:, :LIST_LENGTH], stated(confidence_UK)
    counts_UK = training_counts[predictions.items[:, :LIST_LENGTH] - FIRST_ITEM]
    users = {
        name: member
        for name, member in strata.members(history_length_U, strata.USER_STRATA).items()
        if member.sum() >= LEAST_USERS
    }
    places = {
        name: member
        for name, member in strata.members(counts_UK, strata.ITEM_STRATA).items()
        if member.sum() >= LEAST_USERS
    }
    return {
        "by_user": {
            name: list_confidence(stated_U[member], predictions.rank[member]) for name, member in users.items()
        },
        "by_user_items": {
            name: item_confidence(confidence_UK[member], hit_UK[member]) for name, member in users.items()
        },
        "by_item": {name: item_confidence(confidence_UK, hit_UK, member) for name, member in places.items()},
    }


def comparisons(
    served: Said,
    calibration: Calibration,
    others: Mapping[str, Said],
    fitted_counts: np.ndarray,
    training_counts: np.ndarray,
) -> tuple[Comparison, ...]:
    """The served list confidence, each signal alone, combinations, and other systems, for the hit of a list.

    Signals and combinations speak of the served model's list, so that what they know is all that differs. A system
    speaks of its own list, by the best fitted combination of its own signals. All are fitted on validation users.

    Args:
        served: of the model that is judged.
        calibration: of its bundle.
        others: name → another system.
        fitted_counts: (N,) of what the models had learned that speak of the validation users.
        training_counts: (N,) of what those had that speak of the test users.
    """
    fitted_on = served.validation.rank <= LIST_LENGTH
    fitting, tested = signals(served.validation, fitted_counts), signals(served.test, training_counts)
    names = list(tested)
    free, precise = [name for name in names if name in FREE], [name for name in names if name in OF_PRECISION]

    def combined(chosen: list[str]) -> np.ndarray:
        return Combination.fit(fitting, chosen, fitted_on).stated(tested)

    told: list[tuple[str, str, np.ndarray, np.ndarray, float | None]] = []
    full = combined(names)
    served_list = stated(evaluate.confidences(served.test, calibration, training_counts))
    told.append(("served list confidence", "served", served_list, served.test.rank, 1.0))
    told += [(name, "signal", combined([name]), served.test.rank, None) for name in names]
    told.append((FREE_FITTED, "combination", combined(free), served.test.rank, None))
    if precise:
        told.append((FULL, "combination", full, served.test.rank, None))
    for name, other in others.items():
        own = signals(other.validation, fitted_counts)
        fitted = Combination.fit(own, list(own), other.validation.rank <= LIST_LENGTH)
        own_stated = fitted.stated(signals(other.test, training_counts))
        told.append((name, "system", own_stated, other.test.rank, other.seconds / served.seconds))

    hit = (served.test.rank <= LIST_LENGTH).astype(np.float64)
    best, best_loss = Ranked.by(full), log_loss(full, hit)
    return tuple(
        _comparison(name, kind, probability, rank, cost, None if probability is full else (best, best_loss, hit))
        for name, kind, probability, rank, cost in told
    )


def _comparison(
    name: str,
    kind: Any,
    stated_U: np.ndarray,
    rank_U: np.ndarray,
    cost: float | None,
    against: tuple[Ranked, np.ndarray, np.ndarray] | None,
) -> Comparison:
    hit = (rank_U <= LIST_LENGTH).astype(np.float64)
    ranked, loss = Ranked.by(stated_U), log_loss(stated_U, hit)
    area_difference = loss_difference = None
    if against is not None:
        best, best_loss, best_hit = against

        def area(counts: np.ndarray) -> float:
            return ranked.aurc(1 - hit, counts) - best.aurc(1 - best_hit, counts)

        area_difference = Interval.of(resampled(area, len(hit)))
        # The log-losses of two events do not compare: a list that is never hit is easily told.
        if kind != "system":
            loss_difference = Interval.of(mean_estimate(loss - best_loss))
    return Comparison(
        name=name,
        kind=kind,
        hit_rate=float(hit.mean()),
        aurc=Interval.of(resampled(lambda counts: ranked.aurc(1 - hit, counts), len(hit))),
        log_loss=Interval.of(mean_estimate(loss)),
        aurc_difference=area_difference,
        log_loss_difference=loss_difference,
        cost=cost,
    )


def risk_curve(stated_by_system: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, list[float]]:
    """The risk 1 − HR@10 of the surest share, by system: name → (stated (U,), rank (U,))."""
    curves = {"coverage": CURVE_COVERAGES.tolist()}
    for name, (stated_U, rank_U) in stated_by_system.items():
        miss = (rank_U > LIST_LENGTH).astype(np.float64)
        curves[name] = Ranked.by(stated_U).curve(miss, CURVE_COVERAGES).tolist()
    return curves


def reliability_curve(confidence_UK: np.ndarray, hit_UK: np.ndarray, num_bins: int = 20) -> dict[str, list[float]]:
    """Stated confidence and rate of hits of the places of lists, in bins of equal mass."""
    confidence, hit = confidence_UK.ravel(), hit_UK.ravel().astype(np.float64)
    bins = metrics.equal_mass_bins(confidence, num_bins)
    sizes = np.bincount(bins, minlength=num_bins)
    return {
        "stated": (np.bincount(bins, confidence, minlength=num_bins) / sizes).tolist(),
        "realised": (np.bincount(bins, hit, minlength=num_bins) / sizes).tolist(),
    }
