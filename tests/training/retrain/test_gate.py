"""The gate: what is better passes, what is worse fails, and too few to tell is said to be so."""

import numpy as np
import pytest

from training import metrics
from training.confidence import measures
from training.retrain.gate import (
    Answered,
    GateConfig,
    Question,
    calibration,
    latency,
    quality,
    strata,
    surprise,
    verdict_of,
)
from training.study.layout import Estimate

CONFIG = GateConfig()


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "RESAMPLES", 300)


def answered(num: int, hit_rate: float, seed: int, stated: float | None = None) -> Answered:
    """Targets at the first place or nowhere."""
    hits = np.random.default_rng(seed).random(num) < hit_rate
    return Answered(np.where(hits, 1.0, np.inf), np.full(num, hit_rate if stated is None else stated))


def users(num: int, targets_each: int = 2) -> np.ndarray:
    return np.arange(num) // targets_each


@pytest.mark.parametrize(
    ("num", "candidate", "current", "verdict"),
    [
        (4000, 0.5, 0.3, "passed"),
        (4000, 0.3, 0.5, "failed"),
        (40, 0.3, 0.3, "undecided"),
    ],
)
def test_quality_passes_fails_or_cannot_be_told(num: int, candidate: float, current: float, verdict: str) -> None:
    asked = quality(answered(num, candidate, 1), answered(num, current, 2), users(num), CONFIG)

    assert asked.verdict == verdict


def test_the_same_answers_are_within_every_margin() -> None:
    same = answered(100, 0.4, 3)

    asked = quality(same, same, users(100), GateConfig(margin=0.0))

    assert (asked.verdict, asked.found) == ("passed", Estimate(0.0, 0.0, 0.0))


def test_the_difference_is_the_mean_over_targets_with_an_interval_over_users() -> None:
    # One user with a hundred targets, all won; a hundred with one each, all lost.
    ours = Answered(np.r_[np.ones(100), np.full(100, np.inf)], np.zeros(200))
    theirs = Answered(np.r_[np.full(100, np.inf), np.ones(100)], np.zeros(200))

    asked = quality(ours, theirs, np.r_[np.zeros(100), np.arange(1, 101)], CONFIG)

    assert asked.found.value == pytest.approx((metrics.ndcg(ours.rank, 10) - metrics.ndcg(theirs.rank, 10)).mean())
    # Without the one user the candidate wins nothing: over targets alone the interval would be ±0.14.
    assert asked.found.low == pytest.approx(-1)
    assert asked.found.high > 0.2


def test_a_stratum_may_be_shown_to_lose_but_need_not_be_told() -> None:
    num = 2000
    part = np.arange(num) < 1000
    ours = Answered(np.where(part, np.inf, answered(num, 0.5, 1).rank), np.zeros(num))
    theirs = answered(num, 0.5, 2)
    few = np.arange(num) < 50

    asked = strata(ours, theirs, users(num), {"lost": part, "kept": ~part, "few": few}, CONFIG)

    assert [(one.name, one.verdict) for one in asked] == [("NDCG@10, lost", "failed"), ("NDCG@10, kept", "passed")]


@pytest.mark.parametrize(
    ("stated", "theirs", "verdict"),
    [(0.3, 0.3, "passed"), (0.6, 0.3, "failed"), (0.1, 0.3, "failed"), (0.6, 0.7, "passed")],
)
def test_a_candidate_states_what_comes_true_or_errs_no_more_than_the_current_model(
    stated: float, theirs: float, verdict: str
) -> None:
    ours, current = answered(4000, 0.3, 1, stated), answered(4000, 0.3, 1, theirs)

    assert calibration(ours, current, users(4000), CONFIG).verdict == verdict


@pytest.mark.parametrize(("expected", "verdicts"), [(0.3, ["passed"]), (0.9, ["failed"]), (None, [])])
def test_events_that_the_current_model_cannot_predict_any_more_are_doubted(
    expected: float | None, verdicts: list[str]
) -> None:
    asked = surprise(answered(2000, 0.3, 1), users(2000), expected, CONFIG)

    assert [one.verdict for one in asked] == verdicts


def test_latency_is_a_ratio_measured_in_turns() -> None:
    rounds = iter([(1.0, 1.0), (9.0, 1.0), (1.2, 1.0)])

    asked = latency(lambda: next(rounds), CONFIG, rounds=3)

    assert (asked.verdict, asked.found.value) == ("passed", 1.2)
    assert latency(lambda: (2.0, 1.0), CONFIG, rounds=3).verdict == "failed"


def test_one_failure_outweighs_what_is_undecided() -> None:
    def asked(verdict: str) -> Question:
        return Question("x", verdict, Estimate(0.0, 0.0, 0.0), "", ())  # type: ignore[arg-type]

    assert verdict_of([asked("passed")]) == "passed"
    assert verdict_of([asked("passed"), asked("undecided")]) == "undecided"
    assert verdict_of([asked("undecided"), asked("failed")]) == "failed"
