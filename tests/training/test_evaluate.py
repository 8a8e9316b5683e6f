"""Full ranking: what `score_users`, `predict` and `report` say, against one user at a time in numpy."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from model.bundle import FEATURES, Calibration
from model.config import BOS, FIRST_ITEM, UNK, window_start
from model.filtering import Gaussian
from model.sasrec import SASRec
from tests.tolerance import FLOAT32_TOL, assert_close
from tests.training.histories import SMALL, histories_of, small_model, targets_of
from training import evaluate
from training.evaluate import ScoredUsers
from training.splits import Histories, Targets

NUM_ITEMS = 15
FILTERING = pytest.mark.parametrize("filtering", [True, False], ids=["filtering", "plain"])
USERS = [
    [4, 5, 6],
    [],
    [7],
    [8, 9, 10, 8, 9, 10, 8, 9, 10, 8, 9, 10],
    [UNK, 11],
    [12, 13, 14, 15, 16, 17, 18, 4, 5],
    [18, 17],
]
WEIGHTS = [
    [1.0, 0.0, 2.0],
    [],
    [0.0],
    [1.0] * 12,
    [1.0, 0.5],
    [1.0] * 9,
    [3.0, 1.0],
]
TARGETS = [7, 4, 7, 11, 4, 6, 18]
"""The third and the last user's target was had before."""


def targets() -> Targets:
    return Targets(histories_of(USERS, WEIGHTS), np.array(TARGETS, dtype=np.int64))


def alone(model: SASRec, items: Sequence[int], weights: Sequence[float]) -> tuple[np.ndarray, np.ndarray, float]:
    """Logits, variances and mean precision for one user, by a row without padding."""
    kept = [(item, weight) for item, weight in zip(items, weights, strict=True) if weight > 0]
    shown = kept[window_start(len(kept), SMALL.max_len) :]
    row = torch.tensor([[BOS, *(item for item, _ in shown)]])
    with torch.no_grad():
        state = model.encode(row, torch.tensor([[1.0, *(weight for _, weight in shown)]]))
        last = Gaussian(state.mean[:, -1], state.precision[:, -1])
        scores = model.score(last)
    return scores.logit[0].numpy(), scores.variance[0].numpy(), float(last.precision.mean())


def in_user_order(scored: Sequence[ScoredUsers]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    users = np.concatenate([part.users for part in scored])
    assert sorted(users.tolist()) == list(range(len(users)))
    order = np.argsort(users)
    return (
        np.concatenate([part.logit.numpy() for part in scored])[order],
        np.concatenate([part.variance.numpy() for part in scored])[order],
        np.concatenate([part.mean_precision for part in scored])[order],
    )


@FILTERING
@pytest.mark.parametrize("chunk_users", [1, 3, 256])
def test_scores_are_those_of_each_user_alone_whatever_the_chunks(
    filtering: bool, chunk_users: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "CHUNK_USERS", chunk_users)
    model = small_model(NUM_ITEMS, filtering)

    scored = list(evaluate.score_users(model, targets().history, "next_item"))

    logits, variances, mean_precisions = in_user_order(scored)
    for user in range(len(USERS)):
        logit, variance, mean_precision = alone(model, USERS[user], WEIGHTS[user])
        assert_close(logits[user], logit, FLOAT32_TOL, f"logit of user {user}")
        assert_close(variances[user], variance, FLOAT32_TOL, f"variance of user {user}")
        if filtering:
            assert_close(np.log(mean_precisions[user]), np.log(mean_precision), FLOAT32_TOL)
        else:
            assert mean_precisions[user] == np.inf


def test_only_catalogue_items_are_scored_and_the_model_is_put_into_eval_mode() -> None:
    model = small_model(NUM_ITEMS).train()

    scored = list(evaluate.score_users(model, targets().history, "next_item"))

    assert all(part.logit.shape[1] == part.variance.shape[1] == NUM_ITEMS for part in scored)
    assert all(torch.isfinite(part.logit).all() and not part.logit.requires_grad for part in scored)
    assert not model.training


def test_for_the_next_new_item_all_seen_items_and_nothing_else_are_ruled_out() -> None:
    scored = list(evaluate.score_users(small_model(NUM_ITEMS), targets().history, "next_new_item"))

    logits, _, _ = in_user_order(scored)
    for user, items in enumerate(USERS):
        # Events of weight 0 are seen too.
        seen = {item - FIRST_ITEM for item in items if item >= FIRST_ITEM}
        assert set(np.flatnonzero(np.isneginf(logits[user]))) == seen


def brute_force(logit: np.ndarray, target: int, temperature: float) -> dict[str, object]:
    """What `predict` says of one user, by sorting the whole catalogue in float64."""
    scaled = logit.astype(np.float64) / temperature
    weight = np.exp(scaled - scaled.max())
    probability = weight / weight.sum()
    possible = probability[probability > 0]
    order = sorted(range(len(logit)), key=lambda item: -logit[item])
    own = target - FIRST_ITEM
    return {
        "rank": np.inf if np.isneginf(logit[own]) else 1.0 + order.index(own),
        "log_probability": -np.inf if np.isneginf(logit[own]) else np.log(probability[own]),
        "entropy": -(possible * np.log(possible)).sum(),
        "items": [FIRST_ITEM + item for item in order],
        "list_log_probability": [np.log(probability[item]) if probability[item] else -np.inf for item in order],
    }


@pytest.mark.parametrize("event", ["next_item", "next_new_item"])
@pytest.mark.parametrize("k", [3, 10, 100])
def test_predictions_are_those_of_a_sorted_catalogue_in_the_order_of_the_users(
    event: evaluate.Event, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "CHUNK_USERS", 2)
    model, temperature = small_model(NUM_ITEMS), 1.7
    logits, variances, _ = in_user_order(list(evaluate.score_users(model, targets().history, event)))

    predicted = evaluate.predict(evaluate.score_users(model, targets().history, event), targets(), temperature, k)

    length = min(k, NUM_ITEMS)
    assert predicted.items.shape == predicted.hit.shape == (len(USERS), length)
    for user, target in enumerate(TARGETS):
        expected = brute_force(logits[user], target, temperature)
        listed = np.isfinite(expected["list_log_probability"][:length])
        assert predicted.rank[user] == expected["rank"]
        assert_close(predicted.entropy[user], expected["entropy"], FLOAT32_TOL, "entropy")
        assert np.isneginf(predicted.log_probability[user]) == np.isneginf(expected["log_probability"])
        if np.isfinite(expected["log_probability"]):
            assert_close(predicted.log_probability[user], expected["log_probability"], FLOAT32_TOL)
        # Where only ruled-out items are left their order means nothing.
        assert predicted.items[user][listed].tolist() == np.array(expected["items"][:length])[listed].tolist()
        assert_close(
            predicted.list_log_probability[user][listed],
            np.array(expected["list_log_probability"][:length])[listed],
            FLOAT32_TOL,
        )
        assert np.isneginf(predicted.list_log_probability[user][~listed]).all()
        assert predicted.list_variance[user].tolist() == [
            variances[user][item - FIRST_ITEM] for item in predicted.items[user]
        ]
        assert predicted.hit[user].tolist() == [item == target for item in predicted.items[user]]
    assert predicted.num_events.tolist() == [2, 0, 0, 12, 2, 9, 2]


def test_ranks_are_those_of_the_predictions() -> None:
    model = small_model(NUM_ITEMS)

    ranks = evaluate.ranks(evaluate.score_users(model, targets().history, "next_new_item"), targets())

    predicted = evaluate.predict(evaluate.score_users(model, targets().history, "next_new_item"), targets(), 1.0, 5)
    assert ranks.tolist() == predicted.rank.tolist()


def test_rank_and_list_go_by_the_key_and_what_is_believed_by_the_logit() -> None:
    generator = torch.Generator().manual_seed(1)
    logit, key = torch.randn(3, NUM_ITEMS, generator=generator), torch.randn(3, NUM_ITEMS, generator=generator)
    scored = ScoredUsers(np.arange(3), logit, logit.square(), np.ones(3), order_key=key)
    wanted = targets_of([[4], [5], [6]], [7, 8, 9])

    predictions = evaluate.predict([scored], wanted, 2.0, 4)

    order = np.argsort(-key.numpy(), axis=1)
    probability = np.exp(logit.numpy() / 2) / np.exp(logit.numpy() / 2).sum(1, keepdims=True)
    ranks = [order[user].tolist().index(target - FIRST_ITEM) + 1 for user, target in enumerate(wanted.target)]
    assert predictions.rank.tolist() == evaluate.ranks([scored], wanted).tolist() == ranks
    assert (predictions.items == order[:, :4] + FIRST_ITEM).all()
    assert (predictions.hit == (predictions.items == wanted.target[:, None])).all()
    listed = np.take_along_axis(probability, order[:, :4], 1)
    assert_close(predictions.list_log_probability, np.log(listed), FLOAT32_TOL)
    assert_close(predictions.list_variance, np.take_along_axis(logit.square().numpy(), order[:, :4], 1), FLOAT32_TOL)
    assert_close(predictions.entropy, -(probability * np.log(probability)).sum(1), FLOAT32_TOL)
    own = probability[np.arange(3), wanted.target - FIRST_ITEM]
    assert_close(predictions.log_probability, np.log(own), FLOAT32_TOL)


def test_ties_share_the_middle_place() -> None:
    logit = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    scored = ScoredUsers(np.array([0]), logit, torch.ones(1, 5), np.ones(1))

    predicted = evaluate.predict([scored], targets_of([[]], [FIRST_ITEM + 3]), 1.0, 5)

    assert predicted.rank.tolist() == [3.0]


@pytest.mark.parametrize("event", ["next_item", "next_new_item"])
def test_popularity_ranks_are_those_of_sorted_counts_without_the_seen(event: evaluate.Event) -> None:
    counts = np.random.default_rng(0).integers(0, 4, NUM_ITEMS)
    expected = []
    for items, target in zip(USERS, TARGETS, strict=True):
        seen = set(items) if event == "next_new_item" else set()
        rivals = [item for item in range(FIRST_ITEM, FIRST_ITEM + NUM_ITEMS) if item not in seen]
        if target not in rivals:
            expected.append(np.inf)
            continue
        uses = sorted((counts[item - FIRST_ITEM] for item in rivals), reverse=True)
        expected.append(np.mean([place for place, n in enumerate(uses, 1) if n == counts[target - FIRST_ITEM]]))

    assert evaluate.popularity_ranks(counts, targets(), event).tolist() == expected


def calibration(weight: float = 1.0) -> Calibration:
    """Confidence = the raw probability when `weight` is 1."""
    return Calibration(
        event="next_new_item",
        temperature=1.0,
        variance_scale=1.0,
        features=FEATURES[:1],
        mean=(0.0,),
        std=(1.0,),
        weights=(weight,),
        bias=0.0,
    )


def reported(history: Histories, own: Sequence[int], weight: float = 1.0) -> tuple[dict, evaluate.Predictions]:
    model, counts = small_model(NUM_ITEMS), np.arange(NUM_ITEMS)
    judged = Targets(history, np.array(own, dtype=np.int64))
    predicted = evaluate.predict(evaluate.score_users(model, history, "next_new_item"), judged, 1.0, 10)
    popularity = evaluate.popularity_ranks(counts, judged, "next_new_item")
    return evaluate.report(predicted, calibration(weight), popularity, counts), predicted


def test_a_target_had_before_is_a_miss_and_stays_out_of_the_likelihood() -> None:
    history = histories_of(USERS, WEIGHTS)
    figures, predicted = reported(history, TARGETS)
    possible = [user for user, target in enumerate(TARGETS) if target not in USERS[user]]

    assert figures["users"] == 7
    assert figures["impossible_targets"] == 2
    assert len(possible) == 5
    assert figures["hr@20"] == pytest.approx(5 / 7)
    assert not predicted.hit[[2, 6]].any()
    assert figures["nll"] == pytest.approx(-predicted.log_probability[possible].mean())
    assert figures["uniform_nll"] == pytest.approx(np.log(NUM_ITEMS))


def test_the_report_judges_the_stated_confidences_of_the_listed_items() -> None:
    figures, predicted = reported(histories_of(USERS[:3], WEIGHTS[:3]), TARGETS[:3])
    stated, hit = np.exp(predicted.list_log_probability.astype(float)), predicted.hit

    assert figures["mean_confidence"] == pytest.approx(stated.mean(), rel=1e-6)
    assert figures["hit_rate_per_item"] == pytest.approx(hit.mean())
    base = ((hit.mean() - hit) ** 2).mean()
    assert figures["brier_skill@10"] == pytest.approx(1 - ((stated - hit) ** 2).mean() / base, rel=1e-5)
    low, high = figures["intervals"]["hr@10"]
    assert low <= figures["hr@10"] <= high


def test_a_user_who_has_had_the_whole_catalogue_is_a_miss_and_leaves_every_figure_finite() -> None:
    everything = list(range(FIRST_ITEM, FIRST_ITEM + NUM_ITEMS))

    figures, predicted = reported(histories_of([everything, [4]]), [4, 7])

    assert predicted.rank[0] == np.inf
    assert not predicted.hit[0].any()
    assert figures["impossible_targets"] == 1
    numbers = [value for value in figures.values() if isinstance(value, float)]
    assert np.isfinite(numbers).all()
    assert figures["mean_confidence"] == pytest.approx(np.exp(predicted.list_log_probability[1]).sum() / 20)


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_items_that_the_event_rules_out_get_no_confidence_even_where_the_list_has_room(weight: float) -> None:
    # Nine of 15 items are seen, six can be listed, ten are asked for.
    figures, predicted = reported(histories_of([USERS[5]]), [6], weight)

    assert np.isneginf(predicted.list_log_probability).sum() == 4
    stated = 1.0 if weight else 6 * 0.5
    assert figures["mean_confidence"] == pytest.approx(stated / 10, rel=1e-5)
