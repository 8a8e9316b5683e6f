"""Judging the first answers that a model gives to users whom training never saw.

A held-out user is asked about several times: before the first event, and after one, two, three and five, which is the
next? The validation half fits the blends and chooses the default, the test half is looked at once.

U users of a half · V those who can be asked a question · N catalogue items
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from model.bundle import Calibration
from training import evaluate, metrics
from training.cold.blend import SIGNALS, Blend, Curves, Signal, pooled, popular, popularity
from training.cold.records import Figures, FittedBlend, Question
from training.confidence.measures import mean_estimate
from training.confidence.records import Interval
from training.evaluate import LIST_LENGTH, Predictions, ScoredUsers, stated
from training.pipeline import Prepared
from training.splits import HELD_OUT_SHARE, Histories, Targets, place_of
from training.tables import DataError

NUM_EVENTS = (0, 1, 2, 3, 5)
MODEL, PLAIN, POPULARITY = "model", "plain", "popularity"
"""Names of systems; a blend's says what its weight follows."""

QUALITY: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "hr": partial(metrics.hit_rate, k=LIST_LENGTH),
    "ndcg": partial(metrics.ndcg, k=LIST_LENGTH),
}
"""Of each rank: HR@10 and NDCG@10."""

Scoring = Callable[[Histories], Iterator[ScoredUsers]]


@dataclass(frozen=True)
class Judged:
    """A model to ask, and its bundle's calibration."""

    scoring: Scoring
    calibration: Calibration


@dataclass(frozen=True)
class Asked:
    """Which event follows the first `num_events` ones? Put to those users of a half who have such an event."""

    num_events: int
    users: np.ndarray
    """(V,) rows of the half's users, rising."""
    targets: Targets


def questions_to(half: Targets) -> list[Asked]:
    """Those of `NUM_EVENTS` that anybody of the half can be asked."""
    asked = [Asked(num_events, *half.after(num_events)) for num_events in NUM_EVENTS]
    return [one for one in asked if len(one.users) > 0]


@dataclass(frozen=True)
class Answer:
    """What a system answered: `rank` (V,) of the true next event; `stated` (V,) probability that the list has it;
    `popularity_weight` (V,), of a blend."""

    rank: np.ndarray
    stated: np.ndarray
    popularity_weight: np.ndarray | None = None

    def of_users(self, chosen: np.ndarray) -> "Answer":
        """Those of some of the users, (V,) bool."""
        weight = self.popularity_weight
        return Answer(self.rank[chosen], self.stated[chosen], None if weight is None else weight[chosen])


def blend_name(blend: Blend) -> str:
    """What a blend is called among the systems."""
    return "blend, constant" if blend.signal == "constant" else f"blend by {blend.signal}"


def judge(model: Judged, plain: Judged | None, prepared: Prepared) -> dict[str, Any]:
    """What a `ColdRecord` says of the held-out users.

    Args:
        model: whose answers are judged.
        plain: a model without filtering.
        prepared: the log, split by `users` as the models were trained on it.
    """
    counts, half = prepared.catalog.training_counts, prepared.split.test
    fitted = fit_blends(model, counts, prepared.split.validation)
    asked = questions_to(half)
    answers = [answers_to(one, model, plain, [blend for blend, _ in fitted], counts) for one in asked]
    asked_all = np.bincount(np.concatenate([one.users for one in asked]), minlength=len(half)) == len(asked)
    same_users = [
        {name: answer.of_users(asked_all[one.users]) for name, answer in given.items()}
        for one, given in zip(asked, answers, strict=True)
    ]
    return {
        "event": prepared.event,
        "temperature": model.calibration.temperature,
        "validation_users": len(prepared.split.validation),
        "test_users": len(half),
        "blends": tuple(found for _, found in fitted),
        "default": chosen_default([found for _, found in fitted]),
        "questions": _questions(asked, len(half), answers),
        "same_users": _questions(asked, len(half), same_users) if asked_all.any() else (),
    }


def fit_blends(model: Judged, training_counts: np.ndarray, half: Targets) -> list[tuple[Blend, FittedBlend]]:
    """Every blend, fitted on a half of the held-out users, and what it has over the model there.

    Args:
        model: what popularity is blended with. Without precisions no blend follows them.
        training_counts: (N,).
        half: the validation users.

    Raises:
        DataError: there are too few of them to judge one part by what was fitted on the other.
    """
    log_popularity, temperature = popularity(training_counts), model.calibration.temperature
    asked = questions_to(half)
    curves = Curves.concat(
        [Curves.by(model.scoring(one.targets.history), one.targets, log_popularity, temperature) for one in asked]
    )
    user_Q = np.concatenate([one.users for one in asked])
    in_first_U = np.array([place_of(user_id) < HELD_OUT_SHARE / 4 for user_id in half.history.user_ids])
    if in_first_U.all() or not in_first_U.any():
        raise DataError(f"{len(half)} validation users are too few to choose a default by; take a larger log")
    has_precision = bool(np.isfinite(curves.mean_precision).all())
    fitted = []
    for signal in SIGNALS if has_precision else [name for name in SIGNALS if name != "precision"]:
        blend, rank_Q = Blend.fit(signal, curves), _rank_unseen(signal, curves, in_first_U[user_Q])
        gains = {
            f"{name}_gain": Interval.of(
                mean_estimate(_mean_by_user(quality(rank_Q) - quality(curves.rank[:, 0]), user_Q))
            )
            for name, quality in QUALITY.items()
        }
        found = FittedBlend(
            name=blend_name(blend), signal=signal, intercept=blend.intercept, slope=blend.slope, **gains
        )
        fitted.append((blend, found))
    return fitted


def _rank_unseen(signal: Signal, curves: Curves, is_first_Q: np.ndarray) -> np.ndarray:
    """Ranks by blends that have not seen the user: each part's by the one that was fitted on the other."""
    by_first, by_second = (
        Blend.fit(signal, curves.chosen(part)).weight(curves.num_events, curves.mean_precision)
        for part in (is_first_Q, ~is_first_Q)
    )
    return curves.rank_at(np.where(is_first_Q, by_second, by_first))


def chosen_default(blends: Sequence[FittedBlend]) -> str:
    """The blend of the largest gain in NDCG@10 among those that gain in it and in HR@10, with both intervals above 0;
    else the model alone. A certain gain in NDCG@10 may be two places that changed in the one list of all newcomers."""
    better = [blend for blend in blends if blend.ndcg_gain.low > 0 and blend.hr_gain.low > 0]
    return max(better, key=lambda blend: blend.ndcg_gain.value).name if better else MODEL


def answers_to(
    asked: Asked, model: Judged, plain: Judged | None, blends: Sequence[Blend], training_counts: np.ndarray
) -> dict[str, Answer]:
    """What each system answers to one question, the model first.

    Args:
        asked: the question and its users.
        model: as a blend's confidences are its own, they are the model's of the blend's list.
        plain: answers with its own calibration.
        blends: of model and popularity.
        training_counts: (N,).
    """
    targets, log_popularity = asked.targets, popularity(training_counts)

    def said(scored_users: Any, temperature: float) -> Predictions:
        return evaluate.predict(scored_users, targets, temperature, LIST_LENGTH)

    def answer(predictions: Predictions, calibration: Calibration, weight: np.ndarray | None = None) -> Answer:
        return Answer(predictions.rank, stated(evaluate.confidences(predictions, calibration, training_counts)), weight)

    scored, temperature = list(model.scoring(targets.history)), model.calibration.temperature
    alone = said(scored, temperature)
    found = {MODEL: answer(alone, model.calibration)}
    if plain is not None:
        told = said(plain.scoring(targets.history), plain.calibration.temperature)
        found[PLAIN] = answer(told, plain.calibration)
    counted = said(popular(scored, log_popularity), 1.0)
    found[POPULARITY] = Answer(counted.rank, stated(np.exp(counted.list_log_probability)))
    for blend in blends:
        weight = blend.weight(alone.num_events, alone.mean_precision)
        lists = said(pooled(scored, log_popularity, temperature, weight), temperature)
        found[blend_name(blend)] = answer(lists, model.calibration, weight)
    return found


def question(num_events: int, num_users: int, answers: Mapping[str, Answer]) -> Question:
    """The figures of all systems.

    Args:
        num_events: what was asked.
        num_users: U, of the half.
        answers: name → answer, of the same users; the model's among them.
    """
    model = answers[MODEL]
    figures = []
    for name, answer in answers.items():
        quality = {key: of(answer.rank) for key, of in QUALITY.items()}
        weight = answer.popularity_weight
        figures.append(
            Figures(
                system=name,
                **{key: Interval.of(mean_estimate(values)) for key, values in quality.items()},
                list_confidence=Interval.of(mean_estimate(answer.stated)),
                overstated=Interval.of(mean_estimate(answer.stated - quality["hr"])),
                **{
                    f"{key}_gain": Interval.of(mean_estimate(QUALITY[key](model.rank) - values))
                    for key, values in quality.items()
                },
                popularity_weight=None if weight is None else float(weight.mean()),
            )
        )
    return Question(
        num_events=num_events,
        users=len(model.rank),
        without=num_users - len(model.rank),
        impossible=int(np.isinf(model.rank).sum()),
        systems=tuple(figures),
    )


def _questions(asked: Sequence[Asked], num_users: int, answers: Sequence[Mapping[str, Answer]]) -> tuple[Question, ...]:
    return tuple(question(one.num_events, num_users, given) for one, given in zip(asked, answers, strict=True))


def _mean_by_user(values_Q: np.ndarray, user_Q: np.ndarray) -> np.ndarray:
    """The mean of each user who was asked anything."""
    _, who = np.unique(user_Q, return_inverse=True)
    return np.asarray(np.bincount(who, values_Q) / np.bincount(who))
