"""Whether a candidate may take the current model's place: both judged on the same newest events, which neither learned.

Everything is a ratio of sums over a user's targets, and users are resampled: the targets of one user hang together.

R targets, one row each · U users
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from training import metrics
from training.confidence.measures import resampled
from training.study.layout import Estimate

Verdict = Literal["passed", "failed", "undecided"]


class GateConfig(BaseModel):
    """What a candidate has to hold. Strict and frozen; part of the job's configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    margin: float = Field(default=0.05, ge=0, lt=1)
    """Of the current model's NDCG@10: how much less the lower 95 % bound of the candidate's may be."""
    stratum_margin: float = Field(default=0.2, ge=0, lt=1)
    """The same for each stratum, which may be refused but need not be decided."""
    min_stratum_users: int = Field(default=100, ge=1)
    calibration_tolerance: float = Field(default=0.25, ge=0)
    """How far the ratio of stated to realised hits may be from 1, unless the current one's is as far from it."""
    max_latency_ratio: float = Field(default=1.5, gt=0)
    """Of the candidate's median time of a list to the current model's, measured in turns."""
    max_fall: float = Field(default=0.5, gt=0, le=1)
    """Largest fall of the current model's NDCG@10 below what it had when it was judged: beyond it the events themselves
    are doubted."""


@dataclass(frozen=True)
class Answered:
    """What a model answered to the targets of the slice."""

    rank: np.ndarray
    """(R,) of the target, from 1; infinite where the model does not know the item."""
    stated: np.ndarray
    """(R,) list confidence: the probability that the target is in the list of ten."""

    @property
    def ndcg(self) -> np.ndarray:
        """(R,) NDCG@10."""
        return metrics.ndcg(self.rank, 10)

    @property
    def hit(self) -> np.ndarray:
        """(R,) HR@10."""
        return metrics.hit_rate(self.rank, 10)


@dataclass(frozen=True)
class Question:
    """One thing that the gate asks, and the answer."""

    name: str
    verdict: Verdict
    found: Estimate
    accepted: str
    bounds: tuple[float, ...]
    """The numbers in `accepted`."""

    def to_json(self) -> dict[str, Any]:
        """Every field."""
        return asdict(self)


def verdict_of(questions: Sequence[Question]) -> Verdict:
    """Of all questions: failed if one failed, else undecided if one is."""
    verdicts = {question.verdict for question in questions}
    return "failed" if "failed" in verdicts else "undecided" if "undecided" in verdicts else "passed"


def quality(candidate: Answered, current: Answered, users_R: np.ndarray, config: GateConfig) -> Question:
    """The candidate's NDCG@10 less the current model's: the lower bound has to reach the margin.

    Args:
        candidate, current: of the same targets.
        users_R: a number for the user of each target.
        config: the margins.
    """
    found = _difference(candidate, current, users_R)
    least = -config.margin * float(current.ndcg.mean())
    return Question("NDCG@10", _at_least(found, least), found, f"lower bound at least {least:.4f}", (least,))


def strata(
    candidate: Answered,
    current: Answered,
    users_R: np.ndarray,
    members: Mapping[str, np.ndarray],
    config: GateConfig,
) -> list[Question]:
    """The same of each stratum with enough users; one that is too small to tell passes.

    Args:
        members: stratum → (R,) bool.
    """
    questions = []
    for name, member_R in members.items():
        if len(np.unique(users_R[member_R])) < config.min_stratum_users:
            continue
        some = (Answered(model.rank[member_R], model.stated[member_R]) for model in (candidate, current))
        ours, theirs = some
        found = _difference(ours, theirs, users_R[member_R])
        least = -config.stratum_margin * float(theirs.ndcg.mean())
        verdict: Verdict = "failed" if found.high < least else "passed"
        questions.append(Question(f"NDCG@10, {name}", verdict, found, f"upper bound at least {least:.4f}", (least,)))
    return questions


def calibration(candidate: Answered, current: Answered, users_R: np.ndarray, config: GateConfig) -> Question:
    """Stated over realised hits of the candidate: within the tolerance of 1, or as near as the current model's."""

    def ratio(model: Answered) -> Estimate:
        stated, hit = _by_user(users_R, model.stated, model.hit)
        return resampled(lambda counts: float(counts @ stated / max(counts @ hit, 1.0)), len(stated))

    found, theirs = ratio(candidate), ratio(current)
    tolerance = max(config.calibration_tolerance, abs(theirs.value - 1))
    low, high = 1 - tolerance, 1 + tolerance
    verdict: Verdict = "failed" if found.high < low or found.low > high else "passed"
    return Question("stated over realised hits", verdict, found, f"interval meets {low:.2f} … {high:.2f}", (low, high))


def surprise(current: Answered, users_R: np.ndarray, expected: float | None, config: GateConfig) -> list[Question]:
    """Whether the current model still knows what comes: its NDCG@10 against what it had when it was judged.

    Shuffled or foreign events look ordinary one by one; no model can predict them.

    Args:
        expected: NDCG@10 when the current model was judged; None: it never was, and nothing is asked.
    """
    if expected is None:
        return []
    total, number = _by_user(users_R, current.ndcg, np.ones(len(users_R)))
    found = resampled(lambda counts: float(counts @ total / max(counts @ number, 1.0)), len(total))
    least = (1 - config.max_fall) * expected
    verdict: Verdict = "failed" if found.high < least else "passed"
    return [Question("NDCG@10 of the current model", verdict, found, f"upper bound at least {least:.4f}", (least,))]


def latency(seconds: Callable[[], tuple[float, float]], config: GateConfig, rounds: int = 30) -> Question:
    """The candidate's time for a list over the current model's, median of rounds in which each is timed.

    Args:
        seconds: times one list of each, candidate first.
        config: the largest ratio.
        rounds: how often.
    """
    ratios = np.array([ours / theirs for ours, theirs in (seconds() for _ in range(rounds))])
    low, value, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    most = config.max_latency_ratio
    verdict: Verdict = "failed" if value > most else "passed"
    found = Estimate(float(value), float(low), float(high))
    return Question("time for a list, quartiles", verdict, found, f"median at most {most:g}", (most,))


def _difference(candidate: Answered, current: Answered, users_R: np.ndarray) -> Estimate:
    gain, number = _by_user(users_R, candidate.ndcg - current.ndcg, np.ones(len(users_R)))
    return resampled(lambda counts: float(counts @ gain / max(counts @ number, 1.0)), len(gain))


def _by_user(users_R: np.ndarray, *values_R: np.ndarray) -> list[np.ndarray]:
    """Sums (U,) over each user's targets."""
    user_R = np.unique(users_R, return_inverse=True)[1]
    return [np.bincount(user_R, values) for values in values_R]


def _at_least(found: Estimate, least: float) -> Verdict:
    if found.low >= least:
        return "passed"
    return "failed" if found.high < least else "undecided"
