"""Paid confidences against plain averages."""

import numpy as np
import pytest
import torch

from model.backbone import Backbone
from tests.training.histories import SMALL, fresh_model, leave_one_out, successor_walks
from training.batches import collate, serving_windows
from training.confidence.paid import ensemble, mc_dropout
from training.evaluate import score_users, score_users_by

NUM_ITEMS = 12
SPLIT = leave_one_out(successor_walks(num_users=20, num_items=NUM_ITEMS, length=6))
BATCH = collate(serving_windows(SPLIT.test.history, SMALL.max_len), torch.arange(20))


def test_an_ensemble_is_the_mean_of_its_models_probabilities() -> None:
    models = [fresh_model(SPLIT, NUM_ITEMS, seed=seed) for seed in (1, 2, 3)]

    def probability(model: Backbone) -> np.ndarray:
        (scored,) = score_users(model, SPLIT.test.history, "next_item")
        return scored.logit.double().softmax(-1)[np.argsort(scored.users)].numpy()

    with torch.no_grad():
        logit, variance, precision = ensemble(models)(BATCH)

    assert logit.exp().numpy() == pytest.approx(np.mean([probability(model) for model in models], 0), rel=1e-4)
    spread = np.log([probability(model) for model in models]).var(0)
    assert variance.numpy() == pytest.approx(spread, rel=1e-2, abs=1e-9)
    assert np.isinf(precision).all()


def test_an_ensemble_of_one_says_what_the_model_says() -> None:
    model = fresh_model(SPLIT, NUM_ITEMS, seed=4)
    (alone,) = score_users(model, SPLIT.test.history, "next_new_item")

    (scored,) = score_users_by(ensemble([model]), SPLIT.test.history, "next_new_item", SMALL.max_len)

    assert torch.allclose(scored.logit.softmax(-1), alone.logit.softmax(-1), rtol=1e-4)


def test_dropout_at_serving_time_differs_from_pass_to_pass_and_not_from_run_to_run() -> None:
    model = fresh_model(SPLIT, NUM_ITEMS, SMALL.model_copy(update={"dropout": 0.5}), seed=5)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with torch.no_grad():
        first, second = (mc_dropout(model, passes, seed=7)(BATCH)[0] for passes in (1, 2))
        again = mc_dropout(model, 2, seed=7)(BATCH)[0]
        scorer = mc_dropout(model, 1, seed=7)
        assert torch.equal(scorer(BATCH)[0], first)
        other = scorer(BATCH)[0]

    assert torch.equal(second, again)
    # Two passes are the mean of the first one's and the next one's probabilities.
    assert torch.allclose(second.exp(), (first.exp() + other.exp()) / 2, rtol=1e-4)
    assert not torch.allclose(first, other)
    assert torch.equal(torch.get_rng_state(), before), "others draw as if nothing had been drawn here"


def test_without_dropout_every_pass_is_the_models_own() -> None:
    model = fresh_model(SPLIT, NUM_ITEMS, seed=6)
    with torch.no_grad():
        logit = mc_dropout(model, 3)(BATCH)[0]
        alone = ensemble([model])(BATCH)[0]

    assert torch.allclose(logit, alone, atol=1e-5)
