"""Judging: a planted confidence is found true, a planted lie is found out, and precision is credited only when it tells
something."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from model.bundle import Calibration
from model.config import FIRST_ITEM
from tests.training.histories import SMALL, fresh_model, leave_one_out, successor_walks, targets_of
from training import metrics
from training.calibration import fit_confidence
from training.catalog import Catalog
from training.confidence import measures
from training.confidence.judge import (
    FREE_FITTED,
    FULL,
    LEAST_USERS,
    PLAIN,
    PLAIN_FITTED,
    SERVED,
    UNAWARE,
    Said,
    Scoring,
    System,
    Word,
    best_free,
    comparisons,
    item_confidence,
    judge,
    list_confidence,
    nats,
    of_served_list,
    precision_adds,
    words,
)
from training.confidence.paid import mc_dropout
from training.evaluate import LIST_LENGTH, Predictions, score_users, score_users_by, stated
from training.pipeline import Prepared, calibrate
from training.splits import Histories, Split, training_counts

NUM_ITEMS = 40
COUNTS = np.arange(NUM_ITEMS)
CONSTANT = Calibration(
    event="next_item", temperature=1.0, variance_scale=0.0, features=(), mean=(), std=(), weights=(), bias=-4.0
)
"""Every place has the confidence σ(−4)."""


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for what is told apart here."""
    monkeypatch.setattr(measures, "RESAMPLES", 200)


def planted(num_users: int, by_precision: float, seed: int, precise: bool = True) -> Predictions:
    """Users whose list is hit by σ(−2 + a free signal + `by_precision` times the logarithm of the precision)."""
    generator = np.random.default_rng(seed)
    free, log_precision = generator.normal(size=num_users), generator.normal(size=num_users)
    hit = generator.random(num_users) < 1 / (1 + np.exp(2 - free - by_precision * log_precision))
    place = generator.integers(0, LIST_LENGTH, num_users)
    top = np.log(0.1) + 0.3 * free
    listed = top[:, None] - 0.2 * np.arange(LIST_LENGTH)
    return Predictions(
        rank=np.where(hit, place + 1.0, 30.0),
        log_probability=listed[np.arange(num_users), place],
        entropy=generator.normal(size=num_users),
        mean_precision=np.exp(log_precision) if precise else np.full(num_users, np.inf),
        num_events=generator.integers(3, 20, num_users),
        items=np.tile(np.arange(LIST_LENGTH) + FIRST_ITEM, (num_users, 1)),
        list_log_probability=listed,
        list_variance=np.full((num_users, LIST_LENGTH), float(precise)),
        hit=hit[:, None] & (np.arange(LIST_LENGTH) == place[:, None]),
    )


def said(by_precision: float, num_users: int = 3000, seed: int = 1, precise: bool = True) -> Said:
    return Said(
        temperature=1.0,
        validation=planted(num_users, by_precision, seed, precise),
        test=planted(num_users, by_precision, seed + 100, precise),
        seconds=2.0,
    )


def told(served: Said, others: dict[str, Said] | None = None, calibration: Calibration = CONSTANT) -> dict[str, Word]:
    return words(served, calibration, others or {}, COUNTS, COUNTS)


@pytest.mark.parametrize(("by_precision", "adds"), [(1.0, True), (0.0, False)])
def test_precision_is_credited_with_what_it_tells_and_with_nothing_else(by_precision: float, adds: bool) -> None:
    served = said(by_precision)
    fitted = fit_confidence(served.validation, COUNTS, 1.0, 0.0, "next_item")

    found = {one.to: one for one in precision_adds(told(served, calibration=fitted))}

    assert set(found) == {"the served confidence", "a fitted combination"}
    for one in found.values():
        assert (one.log_loss.low > 0) == adds
        assert (one.aurc.low > 0) == adds


def test_each_word_stands_beside_the_served_one() -> None:
    found = {one.name: one for one in comparisons(told(said(1.0)))}

    assert found[SERVED].log_loss_difference is None
    # A confidence that says the same of all has the risk itself as its area.
    assert found[SERVED].aurc.value == pytest.approx(1 - found[FULL].hit_rate)
    assert found["entropy"].aurc.value == pytest.approx(1 - found[FULL].hit_rate, abs=0.04), "a signal of nothing"
    for name in (FREE_FITTED, FULL):
        difference = found[name].log_loss_difference
        assert difference is not None
        assert difference.value == pytest.approx(found[name].log_loss.value - found[SERVED].log_loss.value)
        assert difference.high < 0, "a constant is worse than either"


def test_a_model_without_precision_has_no_combination_with_it() -> None:
    found = told(said(0.0, 400, precise=False))

    assert {FULL, UNAWARE, "precision"}.isdisjoint(found)
    assert precision_adds(found) == ()
    assert best_free(found) == FREE_FITTED


def beside(served: Said, seed: int, precise: bool = False) -> Said:
    """Another system: its own lists, and behind them what it says of the served ones."""
    own = said(0.0, len(served.test.rank), seed, precise)

    def both(one: Predictions, of_served: Predictions) -> Predictions:
        names = ("items", "list_log_probability", "list_variance", "hit")
        joined = {name: np.concatenate([getattr(one, name), getattr(of_served, name)], 1) for name in names}
        return replace(one, **joined, mean_precision=np.full(len(one.rank), np.inf))

    return Said(1.0, both(own.validation, served.validation), both(own.test, served.test), 40.0)


def test_a_system_is_asked_about_the_served_list_and_judged_by_its_own_and_told_what_it_costs() -> None:
    served = said(1.0)
    other = beside(served, seed=7)
    found = {one.name: one for one in comparisons(told(served, {"twenty passes": other}))}

    own, asked = found["twenty passes"], found["twenty passes, asked"]
    assert (own.kind, own.cost, own.log_loss_difference) == ("system", 20, None)
    assert own.hit_rate == (other.test.rank <= 10).mean()
    assert (asked.kind, asked.cost, asked.hit_rate) == ("asked", 20, found[SERVED].hit_rate)
    assert asked.log_loss_difference is not None


def test_the_plain_models_signals_of_the_served_list_are_the_free_ones() -> None:
    served = said(1.0)
    found = told(served, {PLAIN: beside(served, seed=8)})

    assert best_free(found) == PLAIN_FITTED
    # It says of the served list what the served model says: its own list, and what is in it, do not matter.
    assert found[f"{PLAIN}: sum of ten"].stated == pytest.approx(found["sum of ten"].stated)
    assert found[f"{PLAIN}: margin"].stated == pytest.approx(found["margin"].stated)
    assert found[f"{PLAIN}: sum of ten"].rank is served.test.rank


def test_what_the_plain_model_knows_of_its_own_list_is_free_too() -> None:
    served = said(1.0)
    other = beside(served, seed=8)

    def swapped(one: Predictions, of_served: Predictions) -> Predictions:
        """Its own list tells what the served one's signal tells; of the served list it says nothing."""
        silent = np.tile(np.log(0.01) - 0.1 * np.arange(LIST_LENGTH), (len(one.rank), 1))
        listed = np.concatenate([of_served.list_log_probability[:, :LIST_LENGTH], silent], 1)
        return replace(one, list_log_probability=listed)

    parts = (swapped(getattr(other, part), getattr(served, part)) for part in ("validation", "test"))
    found = {one.name: one for one in comparisons(told(served, {PLAIN: Said(1.0, *parts, 40.0)}))}

    assert found[PLAIN_FITTED].log_loss.value < found[f"{PLAIN}: sum of ten"].log_loss.value - 0.02
    own = found[f"{PLAIN}: sum of ten of its own list"]
    assert own.log_loss.value == pytest.approx(found["sum of ten"].log_loss.value)


def test_what_is_said_of_the_served_list_comes_by_the_others_order() -> None:
    served = said(0.0, 5)
    other = beside(served, seed=9)
    other.test.list_log_probability[:, LIST_LENGTH:] = np.arange(LIST_LENGTH) - 20.0

    found = of_served_list(other.test)

    assert (found.items == served.test.items[:, ::-1]).all()
    assert (found.hit == served.test.hit[:, ::-1]).all()
    assert (np.diff(found.list_log_probability) < 0).all()


def hits(confidence_UK: np.ndarray, seed: int) -> np.ndarray:
    """At most one hit a list, drawn by the confidences."""
    draws = np.random.default_rng(seed).random((len(confidence_UK), 1))
    place: np.ndarray = (draws >= confidence_UK.cumsum(1)).sum(1)
    hit: np.ndarray = np.arange(confidence_UK.shape[1]) == place[:, None]
    return hit


def test_a_calibrated_confidence_lies_inside_its_null_interval_and_has_skill() -> None:
    confidence = np.random.default_rng(1).beta(0.5, 20, (8000, 10))
    hit = hits(confidence, 2)
    found = item_confidence(confidence, hit)

    assert found.ece.value == pytest.approx(metrics.expected_calibration_error(confidence.ravel(), hit.ravel()))
    assert found.ece_null[0] <= found.ece.value <= found.ece_null[1]
    assert found.brier_skill is not None
    assert found.brier_skill.value == pytest.approx(metrics.brier_skill(confidence.ravel(), hit.ravel()))
    assert found.brier_skill.low > 0
    assert found.ece.low <= found.ece.value <= found.ece.high
    doubled = item_confidence(np.minimum(2 * confidence, 1), hit)
    assert doubled.ece.low > doubled.ece_null[1]


def test_the_interval_of_the_ece_holds_the_gap_that_was_planted() -> None:
    gap, held = 0.02, 0
    for seed in range(40):
        confidence = np.random.default_rng(seed).uniform(0.01, 0.06, (2000, 10))
        found = item_confidence(confidence, hits(confidence + gap, seed + 1000)).ece
        held += found.low <= gap <= found.high

    assert held >= 34  # of 40 where 38 are meant, and chance takes 3 of them 19 times in 20


def test_few_hits_have_no_brier_skill_and_no_chi_square() -> None:
    confidence = np.random.default_rng(1).uniform(0.0005, 0.0015, (150, 10))
    hit = np.zeros((150, 10), bool)
    hit[0, 0] = True

    assert item_confidence(confidence, hit).brier_skill is None
    found = list_confidence(stated(confidence), np.where(hit.any(1), 1.0, 99.0))
    assert (found.chi_square, found.p_value, found.top_over_bottom) == (None, None, None)


def test_places_of_some_items_are_judged_by_their_own_confidences() -> None:
    confidence = np.random.default_rng(3).beta(0.5, 20, (6000, 10))
    hit = hits(confidence, 4)
    chosen = np.random.default_rng(5).random((6000, 10)) < 0.3
    found = item_confidence(confidence, hit, chosen)

    assert found.places == chosen.sum()
    assert found.mean_confidence == pytest.approx(confidence[chosen].mean())
    assert found.hit_rate == pytest.approx(hit[chosen].mean())
    assert found.ece.value == pytest.approx(
        metrics.expected_calibration_error(confidence[chosen], hit[chosen]), rel=1e-9
    )
    assert found.ece_null[0] <= found.ece.value <= found.ece_null[1]


def test_a_list_is_stated_as_the_sum_of_its_places_and_judged_at_each_coverage() -> None:
    confidence = np.random.default_rng(6).beta(0.5, 20, (9000, 10))
    place = hits(confidence, 7)
    rank = np.where(place.any(1), place.argmax(1) + 1.0, 99.0)
    found = list_confidence(stated(confidence), rank)

    surest = np.argsort(-stated(confidence))[:1800]
    assert found.stated == pytest.approx(np.minimum(confidence.sum(1), 1).mean())
    assert found.hit_rate_at["20%"] == pytest.approx((rank[surest] <= 10).mean())
    assert found.ndcg_at["20%"] == pytest.approx(np.where(rank[surest] <= 10, 1 / np.log2(1 + rank[surest]), 0).mean())
    assert found.p_value is not None
    assert found.p_value > 1e-3
    assert found.top_over_bottom is not None
    by_confidence = np.argsort(stated(confidence))
    rates = [(rank[part] <= 10).mean() for part in (by_confidence[:900], by_confidence[-900:])]
    assert found.top_over_bottom.value == pytest.approx(rates[1] / rates[0])
    assert found.top_over_bottom.low < found.top_over_bottom.value < found.top_over_bottom.high
    assert found.slope is not None
    assert found.slope.low < 1 < found.slope.high


def test_the_likelihood_stands_beside_popularitys() -> None:
    walks = [[4, 5, 6], [7, 8, 9]]
    split = leave_one_out([[item + 1 for item in walk] for walk in walks])
    prepared = small_prepared(split, 8)
    predictions = planted(2, 0.0, 1)

    found = nats(predictions, prepared).likelihood(np.array([True, True]))

    counts = prepared.catalog.training_counts + 1
    target = split.test.target - FIRST_ITEM
    left = [counts.sum() - counts[[item - FIRST_ITEM for item in walk[:-1]]].sum() for walk in [[5, 6, 7], [8, 9, 10]]]
    assert found.popularity.value == pytest.approx(-np.log(counts[target] / np.array(left)).mean())
    assert found.model.value == pytest.approx(-predictions.log_probability.mean())
    assert found.uniform.value == pytest.approx(stats.uniform(0, 8 - 2).entropy())  # two of the eight were had
    assert found.uniform_minus_model.value == pytest.approx(found.uniform.value - found.model.value)


def small_prepared(split: Split[Histories], num_items: int) -> Prepared:
    catalog = Catalog.from_ids([f"i{row}" for row in range(num_items)])
    counted = catalog.with_training_counts(training_counts(split.train, num_items))
    return Prepared(log=None, catalog=counted, split=split, event="next_new_item")  # type: ignore[arg-type]


def test_a_whole_judgement_of_a_small_model() -> None:
    split = leave_one_out(successor_walks(num_users=3 * LEAST_USERS, num_items=NUM_ITEMS, length=7))
    prepared = small_prepared(split, NUM_ITEMS)
    model = fresh_model(split, NUM_ITEMS)
    plain = fresh_model(split, NUM_ITEMS, SMALL.model_copy(update={"filtering": False, "dropout": 0.2}))

    def never_refitted(scoring: Scoring) -> System:
        return System(scoring, scoring)

    found = judge(
        never_refitted(lambda histories: score_users(model, histories, "next_new_item")),
        calibrate(model, prepared),
        prepared,
        prepared,
        {
            PLAIN: never_refitted(lambda histories: score_users(plain, histories, "next_new_item")),
            "dropout": never_refitted(
                lambda histories: score_users_by(mc_dropout(plain, 2), histories, "next_new_item", SMALL.max_len)
            ),
        },
    )

    names = [one.name for one in found["comparisons"]]
    assert names[:2] == [SERVED, UNAWARE]
    assert names[-4:] == [PLAIN_FITTED, PLAIN, "dropout, asked", "dropout"]
    assert found["best_free"] == PLAIN_FITTED
    assert len(found["precision_adds"]) == 2
    assert found["lists"].users == 3 * LEAST_USERS
    # All have as many events: the one stratum says what all say.
    assert list(found["by_user"]) == list(found["likelihood_by_user"]) == list(found["comparisons_by_user"]) == ["4–5"]
    assert found["likelihood_by_user"]["4–5"] == found["likelihood"]
    of_all = {one.name: one.model_copy(update={"cost": None}) for one in found["comparisons"]}
    of_stratum = [one.model_copy(update={"cost": None}) for one in found["comparisons_by_user"]["4–5"]]
    assert of_stratum == [of_all[name] for name in (SERVED, PLAIN_FITTED, UNAWARE)]
    by_target = found["likelihood_by_target"]
    assert sum(one.users for one in by_target.values()) == found["likelihood"].users
    mean = sum(one.users * one.model.value for one in by_target.values()) / found["likelihood"].users
    assert mean == pytest.approx(found["likelihood"].model.value)
    assert set(found["risk_curve"]) == {"coverage", "served", PLAIN}
    assert found["risk_curve"]["served"][-1] == pytest.approx(1 - found["lists"].realised)


def test_one_user_has_a_target_that_the_event_rules_out_and_counts_not() -> None:
    targets = targets_of([[5, 6], [7, 8]], [5, 9])
    split = Split(name="leave_one_out", train=targets.history, validation=targets, test=targets)
    predictions = planted(2, 0.0, 1)
    predictions.log_probability[0] = -np.inf

    found = nats(predictions, small_prepared(split, 6))

    assert found.likelihood(np.array([True, True])).users == 1
    assert found.likelihood(np.array([False, True])).model.value == pytest.approx(-predictions.log_probability[1])
