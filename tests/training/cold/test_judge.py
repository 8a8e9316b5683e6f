"""The first answers to held-out users, against loops, and with models that know everything or nothing."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from model.bundle import Calibration
from model.config import FIRST_ITEM
from tests.training.histories import histories_of
from training import metrics
from training.catalog import Catalog
from training.cold.blend import Blend
from training.cold.judge import MODEL, PLAIN, POPULARITY, Judged, answers_to, chosen_default, judge, questions_to
from training.cold.records import FittedBlend, Question
from training.confidence.records import Interval
from training.evaluate import ScoredUsers, seen_rows
from training.pipeline import Prepared
from training.splits import Histories, Split, Targets, held_out_part, training_counts
from training.tables import DataError

NUM_ITEMS = 25
CALIBRATION = Calibration(
    event="next_new_item",
    temperature=1.0,
    variance_scale=0.0,
    features=("logit_probability",),
    mean=(0.0,),
    std=(1.0,),
    weights=(0.8,),
    bias=-0.5,
)


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for what is told apart here."""
    monkeypatch.setattr(metrics, "RESAMPLES", 200)


def held_out(part: str, num_users: int, seed: int, longest: int = 9) -> Targets:
    """Users of one half, who draw new items with a taste for those of low rows."""
    generator = np.random.default_rng(seed)
    taste = 1 / np.arange(1, NUM_ITEMS + 1)
    ids = [user_id for row in range(60 * num_users) if held_out_part(user_id := f"user {row}") == part][:num_users]
    walks = [
        FIRST_ITEM + generator.choice(NUM_ITEMS, generator.integers(1, longest), replace=False, p=taste / taste.sum())
        for _ in ids
    ]
    history = replace(histories_of([walk[:-1].tolist() for walk in walks]), user_ids=ids)
    return Targets(history, np.array([walk[-1] for walk in walks]))


TRAIN = histories_of([[FIRST_ITEM + row] for row in range(NUM_ITEMS) for _ in range(60 // (row + 1))])


def prepared(validation: Targets, test: Targets) -> Prepared:
    catalog = Catalog.from_ids([f"i{row}" for row in range(NUM_ITEMS)])
    counted = catalog.with_training_counts(training_counts(TRAIN, NUM_ITEMS))
    split = Split(name="users", train=TRAIN, validation=validation, test=test)
    return Prepared(log=None, catalog=counted, split=split, event="next_new_item")  # type: ignore[arg-type]


def model_of(logits: Any, precise: bool = True) -> Judged:
    """A model whose logits (N,) are a function of user id and history length; seen items are ruled out."""

    def score(histories: Histories) -> Iterator[ScoredUsers]:
        lengths = np.diff(histories.offsets)
        rows = np.stack([logits(user_id, length) for user_id, length in zip(histories.user_ids, lengths, strict=True)])
        logit = torch.from_numpy(rows.astype(np.float32))
        for user in range(len(histories)):
            logit[user, seen_rows(histories, user)] = -torch.inf
        precision = 1.0 + lengths if precise else np.full(len(histories), np.inf)
        yield ScoredUsers(np.arange(len(histories)), logit, torch.ones_like(logit), precision)

    return Judged(score, CALIBRATION)


def noise(user_id: str, length: int) -> np.ndarray:
    seed = [length, *user_id.encode()]
    return np.random.default_rng(seed).normal(0, 1, NUM_ITEMS)


def taste(user_id: str, length: int) -> np.ndarray:
    """What the users really follow, known better than popularity tells."""
    return -np.log(np.arange(1, NUM_ITEMS + 1))


def by_system(question: Question) -> dict[str, Any]:
    return {one.system: one for one in question.systems}


def test_a_model_that_knows_nothing_is_blended_with_popularity() -> None:
    found = judge(model_of(noise), None, prepared(held_out("validation", 150, 1), held_out("test", 150, 2)))

    assert found["default"].startswith("blend")
    assert all(blend.ndcg_gain.low > 0 for blend in found["blends"])
    asked = by_system(found["questions"][0])
    assert asked[POPULARITY].hr_gain.high < 0
    assert asked["blend, constant"].hr_gain.high < 0
    assert asked["blend, constant"].popularity_weight > 0.5


def test_a_model_that_knows_what_popularity_does_not_is_left_alone() -> None:
    validation, test = held_out("validation", 60, 3), held_out("test", 60, 4)
    nexts = {}
    for half in (validation, test):
        for row, user_id in enumerate(half.history.user_ids):
            begin, end = half.history.offsets[row : row + 2]
            walk = [*half.history.items[begin:end].tolist(), int(half.target[row])]
            nexts |= {(user_id, count): item for count, item in enumerate(walk)}

    def knows(user_id: str, length: int) -> np.ndarray:
        return 8.0 * (np.arange(NUM_ITEMS) == nexts[user_id, length] - FIRST_ITEM)

    found = judge(model_of(knows), model_of(noise, precise=False), prepared(validation, test))

    assert found["default"] == MODEL
    for question in found["questions"]:
        systems = by_system(question)
        assert systems[MODEL].hr.value == 1
        assert systems[PLAIN].hr_gain.value == pytest.approx(1 - systems[PLAIN].hr.value)
        assert systems[MODEL].hr_gain.value == 0


def test_each_question_is_put_to_those_who_have_a_next_event_and_the_same_users_to_those_who_have_all() -> None:
    test = held_out("test", 80, 5)
    lengths = np.diff(test.history.offsets)

    found = judge(model_of(taste), None, prepared(held_out("validation", 80, 6), test))

    assert [question.num_events for question in found["questions"]] == [0, 1, 2, 3, 5]
    for question in found["questions"]:
        assert question.users == (lengths >= question.num_events).sum()
        assert question.without == 80 - question.users
        assert question.impossible == 0
    assert {question.users for question in found["same_users"]} == {(lengths >= 5).sum()}


def test_figures_are_those_of_a_loop_over_users() -> None:
    test = held_out("test", 50, 7)
    found = judge(model_of(noise), None, prepared(held_out("validation", 50, 8), test))

    counts = training_counts(TRAIN, NUM_ITEMS)
    hits: dict[str, list[bool]] = {MODEL: [], POPULARITY: []}
    confidences, shares = [], []
    for user, user_id in enumerate(test.history.user_ids):
        begin, end = test.history.offsets[user : user + 2]
        events = [*test.history.items[begin:end].tolist(), int(test.target[user])]
        if len(events) < 3:
            continue
        seen, target = [item - FIRST_ITEM for item in events[:2]], events[2] - FIRST_ITEM
        left = [row for row in range(NUM_ITEMS) if row not in seen]
        logit = noise(user_id, 2)
        listed = sorted(left, key=lambda row: -logit[row])[:10]
        hits[MODEL].append(target in listed)
        probability = {row: np.exp(logit[row]) / np.exp(logit[left]).sum() for row in left}
        odds = [np.log(probability[row] / (1 - probability[row])) for row in listed]
        confidences.append(min(1.0, sum(1 / (1 + np.exp(0.5 - 0.8 * value)) for value in odds)))
        places = sorted(left, key=lambda row: -counts[row])
        better = sum(counts[row] > counts[target] for row in left)
        tied = sum(counts[row] == counts[target] for row in left) - 1
        hits[POPULARITY].append(1 + better + tied / 2 <= 10)
        shares.append(sum(counts[row] + 1 for row in places[:10]) / sum(counts[row] + 1 for row in left))
    asked = by_system(next(question for question in found["questions"] if question.num_events == 2))
    for name in (MODEL, POPULARITY):
        assert asked[name].hr.value == pytest.approx(np.mean(hits[name]))
    gain = np.mean(hits[MODEL]) - np.mean(hits[POPULARITY])
    assert asked[POPULARITY].hr_gain.value == pytest.approx(gain)
    assert asked[MODEL].list_confidence.value == pytest.approx(np.mean(confidences), rel=1e-4)
    assert asked[MODEL].overstated.value == pytest.approx(np.mean(confidences) - np.mean(hits[MODEL]), rel=1e-3)
    assert asked[POPULARITY].list_confidence.value == pytest.approx(np.mean(shares), rel=1e-4)


def test_a_blends_confidences_are_the_models_of_the_popular_items() -> None:
    test, counts = held_out("test", 30, 9), training_counts(TRAIN, NUM_ITEMS)
    before_any = questions_to(test)[0]

    found = answers_to(before_any, model_of(noise), None, [Blend("constant", 40.0, 0.0)], counts)

    assert (found["blend, constant"].rank == found[POPULARITY].rank).all()
    # Its ties stand within the ten, none at their end.
    listed = np.argsort(-counts)[:10]
    for user, user_id in enumerate(test.history.user_ids):
        logit = noise(user_id, 0)
        probability = np.exp(logit[listed]) / np.exp(logit).sum()
        confidence = 1 / (1 + np.exp(0.5 - 0.8 * np.log(probability / (1 - probability))))
        assert found["blend, constant"].stated[user] == pytest.approx(min(1.0, confidence.sum()), rel=1e-4)


def test_without_precisions_no_blend_follows_them() -> None:
    halves = held_out("validation", 40, 10), held_out("test", 40, 11)

    names = [blend.name for blend in judge(model_of(noise, precise=False), None, prepared(*halves))["blends"]]

    assert names == ["blend, constant", "blend by events"]


def test_a_question_that_nobody_can_be_asked_is_left_out() -> None:
    halves = held_out("validation", 40, 12, longest=4), held_out("test", 40, 13, longest=3)

    found = judge(model_of(noise), None, prepared(*halves))

    assert [question.num_events for question in found["questions"]] == [0, 1]


def test_one_validation_user_is_too_few_to_choose_by() -> None:
    with pytest.raises(DataError, match="1 validation users are too few"):
        judge(model_of(noise), None, prepared(held_out("validation", 1, 14), held_out("test", 20, 15)))


def test_the_default_is_the_largest_certain_gain() -> None:
    def blend(name: str, gain: float, low: float, hr_low: float = 0.01) -> FittedBlend:
        ndcg, hr = Interval(value=gain, low=low, high=1.0), Interval(value=0.02, low=hr_low, high=1.0)
        return FittedBlend(name=name, signal="constant", intercept=0, slope=0, hr_gain=hr, ndcg_gain=ndcg)

    certain = [blend("a", 0.03, 0.01), blend("b", 0.04, 0.02)]
    doubtful = [blend("c", 0.09, -0.01), blend("d", 0.09, 0.05, hr_low=0.0)]
    assert chosen_default([*doubtful, *certain]) == "b"
    assert chosen_default(doubtful) == MODEL
