"""Judging the confidences of a model on its test users: how true they are, and beside free ones and paid ones.

U test users · K = 10 list length · N catalogue items
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from model.bundle import FEATURES, Calibration
from model.config import FIRST_ITEM
from training import calibration as calibrating
from training import evaluate, metrics
from training.confidence import measures
from training.confidence.measures import COVERAGES, Ranked, log_loss, mean_estimate, resampled, turned_round
from training.confidence.records import Comparison, Interval, ItemConfidence, Likelihood, ListConfidence, PrecisionAdds
from training.confidence.signals import OF_PRECISION, Combination, signals
from training.evaluate import LIST_LENGTH, Predictions, ScoredUsers, stated
from training.pipeline import Prepared
from training.splits import Histories
from training.study import strata
from training.study.layout import Estimate
from training.study.runs import training_events

NUM_BINS = 10
CURVE_COVERAGES = np.linspace(0.05, 1.0, 20)
LEAST_USERS = 100
"""A stratum of fewer says nothing."""
LEAST_HITS = 20
"""A Brier skill of fewer is that of one or two."""
SERVED = "served list confidence"
"""What all else is compared with."""
UNAWARE = "served, without precision"
FULL = "free and precision, fitted"
FREE_FITTED = "free, fitted"
PLAIN = "plain"
"""The system without filtering."""
PLAIN_FITTED = "plain, fitted"
OF_OWN_LIST = ("sum of ten", "largest probability", "margin")
"""Signals that the plain model also has of its own list: how sure it is of the user, whatever the served list holds."""
UNAWARE_FEATURES = tuple(name for name in FEATURES if name not in ("log_variance", "log_mean_precision"))

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
    def by_judged(cls, system: System, prepared: Prepared, temperature: float) -> "Said":
        """By the model that is judged, at its bundle's temperature.

        Args:
            system: to ask.
            prepared: whose split to ask about.
            temperature: of the bundle.
        """
        validation, test = prepared.split.validation, prepared.split.test
        said = evaluate.predict(system.fitted(validation.history), validation, temperature, calibrating.FIT_LIST_LENGTH)
        begun = time.monotonic()
        told = evaluate.predict(system.served(test.history), test, temperature, LIST_LENGTH)
        return cls(temperature, said, told, time.monotonic() - begun)

    @classmethod
    def by_other(cls, system: System, prepared: Prepared, judged: "Said") -> "Said":
        """By another system, of its own lists and then of the judged one's; the temperature is fitted on validation.

        Args:
            system: to ask.
            prepared: whose split to ask about.
            judged: whose lists to ask about.
        """
        validation, test = prepared.split.validation, prepared.split.test
        temperature = calibrating.fit_temperature(system.fitted(validation.history), validation)
        lists = [said.items[:, :LIST_LENGTH] for said in (judged.validation, judged.test)]
        asked = system.fitted(validation.history)
        said = evaluate.predict(asked, validation, temperature, LIST_LENGTH, beside=lists[0])
        begun = time.monotonic()
        told = evaluate.predict(system.served(test.history), test, temperature, LIST_LENGTH, beside=lists[1])
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
    own = Said.by_judged(judged, prepared, calibration.temperature)
    others = {name: Said.by_other(system, prepared, own) for name, system in systems.items()}
    confidence_UK = evaluate.confidences(own.test, calibration, counts)
    hit_UK = own.test.hit[:, :LIST_LENGTH]
    told = words(own, calibration, others, prepared.catalog.training_counts, counts)
    target = nats(own.test, learned)
    length_U, uses_U = events_of_users(learned), counts[prepared.split.test.target - FIRST_ITEM]
    users = strata.members(length_U, strata.USER_STRATA)
    curves = {"served": (stated(confidence_UK), own.test.rank)}
    if PLAIN in others:
        plain = others[PLAIN]
        curves[PLAIN] = (signals(of_own_list(plain.test), counts)["sum of ten"], plain.test.rank)
    return {
        "event": prepared.event,
        "temperature": own.temperature,
        "likelihood": target.likelihood(np.ones(len(uses_U), bool)),
        "likelihood_by_user": target.by(users),
        "likelihood_by_target": target.by(strata.members(uses_U, strata.ITEM_STRATA)),
        "items": item_confidence(confidence_UK, hit_UK),
        "lists": list_confidence(stated(confidence_UK), own.test.rank),
        "risk_curve": risk_curve(curves),
        "reliability_curve": reliability_curve(confidence_UK, hit_UK),
        "comparisons": comparisons(told),
        "comparisons_by_user": comparisons_by_user(told, users),
        "best_free": best_free(told),
        "precision_adds": precision_adds(told),
        **by_stratum(confidence_UK, own.test, users, counts),
    }


@dataclass(frozen=True)
class Nats:
    """Of the true next item of each test user (U,): −log probability under the model and what it stands beside.

    `is_possible` (U,): whether the event allows it; elsewhere the numbers mean nothing.
    """

    model: np.ndarray
    popularity: np.ndarray
    uniform: np.ndarray
    is_possible: np.ndarray

    def likelihood(self, member_U: np.ndarray) -> Likelihood:
        """Over the members (U,), bool, whose next item is possible."""
        chosen = member_U & self.is_possible
        model, popularity, uniform = self.model[chosen], self.popularity[chosen], self.uniform[chosen]
        return Likelihood(
            users=len(model),
            model=Interval.of(mean_estimate(model)),
            popularity=Interval.of(mean_estimate(popularity)),
            uniform=Interval.of(mean_estimate(uniform)),
            popularity_minus_model=Interval.of(mean_estimate(popularity - model)),
            uniform_minus_model=Interval.of(mean_estimate(uniform - model)),
        )

    def by(self, members: Mapping[str, np.ndarray]) -> dict[str, Likelihood]:
        """Of each stratum that says something."""
        return {
            name: self.likelihood(member_U)
            for name, member_U in members.items()
            if (member_U & self.is_possible).sum() >= LEAST_USERS
        }


def nats(predictions: Predictions, prepared: Prepared) -> Nats:
    """What the model says of the true next items, beside popularity and the uniform distribution."""
    test, counts = prepared.split.test, prepared.catalog.training_counts
    seen: Mapping[int, np.ndarray] = {}
    if prepared.event == "next_new_item":
        seen = {user: np.unique(evaluate.seen_rows(test.history, user)) for user in range(len(test))}
    popularity = -measures.popularity_log_probability(counts, test.target - FIRST_ITEM, seen)
    uniform = np.log([len(counts) - len(seen.get(user, ())) for user in range(len(test))])
    model = -predictions.log_probability.astype(np.float64)
    possible = np.isfinite(model) & np.isfinite(popularity)
    return Nats(model, popularity, uniform, possible)


def events_of_users(prepared: Prepared) -> np.ndarray:
    """Events by which the test users are told apart, (U,): those in training, or all that a held-out user had."""
    if prepared.split.name == "users":
        return evaluate.num_events(prepared.split.test.history)
    return training_events(prepared.split)


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
        ece=Interval.of(turned_round(resampled(ece, num_users))),
        ece_null=metrics.ece_null_interval(np.where(chosen, confidence_UK, 0.0), NUM_BINS)
        if chosen_UK is None
        else _null_of_places(confidence, bins),
        brier_skill=Interval.of(resampled(skill, num_users)) if hit.sum() >= LEAST_HITS else None,
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
        top_over_bottom=None if groups.top_over_bottom is None else Interval.of(groups.top_over_bottom),
        aurc=Interval.of(resampled(lambda counts: ranked.aurc(1 - hit, counts), len(hit))),
        **{
            name: {f"{coverage:.0%}": ranked.surest(values, coverage) for coverage in COVERAGES}
            for name, values in quality.items()
        },
    )


def by_stratum(
    confidence_UK: np.ndarray, predictions: Predictions, users: Mapping[str, np.ndarray], training_counts: np.ndarray
) -> dict[str, Any]:
    """The same by strata of users, and by training uses of the listed item.

    Args:
        confidence_UK, predictions: of the test users.
        users: stratum → its members (U,), bool.
        training_counts: (N,).
    """
    hit_UK, stated_U = predictions.hit[:, :LIST_LENGTH], stated(confidence_UK)
    counts_UK = training_counts[predictions.items[:, :LIST_LENGTH] - FIRST_ITEM]
    users = {name: member for name, member in users.items() if member.sum() >= LEAST_USERS}
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


@dataclass(frozen=True)
class Word:
    """A confidence for the hit of each test user's list: what a `Comparison` is made of.

    `stated` (U,) the probability of a hit, `rank` (U,) of the target in the list that it speaks of; `kind` and `cost`
    as a `Comparison` has them.
    """

    kind: Literal["served", "signal", "combination", "asked", "system"]
    stated: np.ndarray
    rank: np.ndarray
    cost: float | None = None

    @property
    def hit(self) -> np.ndarray:
        """1 for a hit, else 0, (U,)."""
        return (self.rank <= LIST_LENGTH).astype(np.float64)

    def of(self, member_U: np.ndarray) -> "Word":
        """The same of some users alone."""
        return replace(self, stated=self.stated[member_U], rank=self.rank[member_U])


def words(
    served: Said,
    calibration: Calibration,
    others: Mapping[str, Said],
    fitted_counts: np.ndarray,
    training_counts: np.ndarray,
) -> dict[str, Word]:
    """The served list confidence, each signal alone, combinations, and other systems, for the hit of a list.

    All speak of the served model's list, so that what they know is all that differs: the other systems too, by the best
    fitted combination of what they say of that list; beside it each of them speaks of its own. The signals of the model
    without filtering stand one by one, of the served list and of its own: no precision went into them, while the served
    model's probabilities are shrunk by it. All that is fitted is fitted on validation users.

    Args:
        served: of the model that is judged.
        calibration: of its bundle.
        others: name → another system, told of its own lists and then of the served ones.
        fitted_counts: (N,) of what the models had learned that speak of the validation users.
        training_counts: (N,) of what those had that speak of the test users.
    """
    hit_U, rank_U = served.validation.rank <= LIST_LENGTH, served.test.rank
    told: dict[str, Word] = {}

    def signals_of(said: Sequence[Predictions]) -> list[dict[str, np.ndarray]]:
        return [signals(said[0], fitted_counts), signals(said[1], training_counts)]

    def add_signals(of: Sequence[dict[str, np.ndarray]], prefix: str, combined_as: str, full_as: str | None) -> None:
        fitting, tested = of

        def combined(kind: Any, names: list[str]) -> Word:
            return Word(kind, Combination.fit(fitting, names, hit_U).stated(tested), rank_U)

        for name in tested:
            told[f"{prefix}{name}"] = combined("signal", [name])
        told[combined_as] = combined("combination", [name for name in tested if name not in OF_PRECISION])
        if full_as is not None and any(name in OF_PRECISION for name in tested):
            told[full_as] = combined("combination", list(tested))

    told[SERVED] = Word(
        "served", stated(evaluate.confidences(served.test, calibration, training_counts)), rank_U, cost=1.0
    )
    if np.isfinite(served.test.mean_precision).all():
        unaware = calibrating.fit_confidence(
            served.validation,
            fitted_counts,
            served.temperature,
            calibration.variance_scale,
            calibration.event,
            among=UNAWARE_FEATURES,
        )
        told[UNAWARE] = Word("served", stated(evaluate.confidences(served.test, unaware, training_counts)), rank_U)
    add_signals(signals_of((served.validation, served.test)), "", FREE_FITTED, FULL)
    for name, other in others.items():
        own, asked = ([part(said) for said in (other.validation, other.test)] for part in (of_own_list, of_served_list))
        cost = other.seconds / served.seconds
        if name == PLAIN:
            of_own = [
                {f"{signal} of its own list": values[signal] for signal in OF_OWN_LIST} for values in signals_of(own)
            ]
            of_both = [values | extra for values, extra in zip(signals_of(asked), of_own, strict=True)]
            add_signals(of_both, f"{PLAIN}: ", PLAIN_FITTED, None)
        else:
            told[f"{name}, asked"] = Word("asked", _fitted(asked, hit_U, fitted_counts, training_counts), rank_U, cost)
        own_hit_U = own[0].rank <= LIST_LENGTH
        told[name] = Word("system", _fitted(own, own_hit_U, fitted_counts, training_counts), own[1].rank, cost)
    return told


def _fitted(
    said: Sequence[Predictions], hit_U: np.ndarray, fitted_counts: np.ndarray, training_counts: np.ndarray
) -> np.ndarray:
    """The best combination of all signals of what is said of validation and of test users."""
    fitting, tested = signals(said[0], fitted_counts), signals(said[1], training_counts)
    return Combination.fit(fitting, list(tested), hit_U).stated(tested)


def of_own_list(said: Predictions) -> Predictions:
    """What another system says of its own list."""
    return _places(said, np.tile(np.arange(LIST_LENGTH), (len(said.items), 1)))


def of_served_list(said: Predictions) -> Predictions:
    """What another system says of the served list, the item first that it finds likeliest."""
    beside = said.list_log_probability[:, LIST_LENGTH:]
    return _places(said, LIST_LENGTH + np.argsort(-beside, axis=1, kind="stable"))


def _places(said: Predictions, places_UK: np.ndarray) -> Predictions:
    names = ("items", "list_log_probability", "list_variance", "hit")
    return replace(said, **{name: np.take_along_axis(getattr(said, name), places_UK, 1) for name in names})


def comparisons(told: Mapping[str, Word]) -> tuple[Comparison, ...]:
    """Each word, and what it lacks to the served one."""
    served = told[SERVED]
    rows = []
    for name, word in told.items():
        area_difference = loss_difference = None
        if word is not served:
            area_difference = Interval.of(_area_between(word, served))
            # The log-losses of two events do not compare: a list that is never hit is easily told.
            if word.kind != "system":
                loss_difference = Interval.of(_loss_between(word, served))
        rows.append(
            Comparison(
                name=name,
                kind=word.kind,
                hit_rate=float(word.hit.mean()),
                aurc=Interval.of(_area(word)),
                log_loss=Interval.of(mean_estimate(log_loss(word.stated, word.hit))),
                aurc_difference=area_difference,
                log_loss_difference=loss_difference,
                cost=word.cost,
            )
        )
    return tuple(rows)


def comparisons_by_user(told: Mapping[str, Word], users: Mapping[str, np.ndarray]) -> dict[str, tuple[Comparison, ...]]:
    """The served confidence, the best free one, and the served without precision, by strata of users."""
    names = [name for name in (SERVED, best_free(told), UNAWARE) if name in told]
    return {
        stratum: comparisons({name: told[name].of(member_U) for name in names})
        for stratum, member_U in users.items()
        if member_U.sum() >= LEAST_USERS
    }


def best_free(told: Mapping[str, Word]) -> str:
    """The fitted combination into which no precision went: the plain model's where there is one."""
    return PLAIN_FITTED if PLAIN_FITTED in told else FREE_FITTED


def precision_adds(told: Mapping[str, Word]) -> tuple[PrecisionAdds, ...]:
    """What precision adds to the served confidence, and to what comes for free; none where the model has none."""
    pairs: tuple[tuple[Literal["the served confidence", "a fitted combination"], str, str], ...]
    pairs = (("the served confidence", UNAWARE, SERVED), ("a fitted combination", FREE_FITTED, FULL))
    return tuple(
        PrecisionAdds(
            to=to,
            aurc=Interval.of(_area_between(told[without], told[aware])),
            log_loss=Interval.of(_loss_between(told[without], told[aware])),
        )
        for to, without, aware in pairs
        if without in told and aware in told
    )


def _area(word: Word) -> Estimate:
    ranked, miss_U = Ranked.by(word.stated), 1 - word.hit
    return resampled(lambda counts: ranked.aurc(miss_U, counts), len(miss_U))


def _area_between(word: Word, other: Word) -> Estimate:
    (one, one_miss_U), (two, two_miss_U) = ((Ranked.by(each.stated), 1 - each.hit) for each in (word, other))
    return resampled(lambda counts: one.aurc(one_miss_U, counts) - two.aurc(two_miss_U, counts), len(one_miss_U))


def _loss_between(word: Word, other: Word) -> Estimate:
    return mean_estimate(log_loss(word.stated, word.hit) - log_loss(other.stated, other.hit))


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
