"""Blends of model and popularity, against plain numpy and planted weights."""

import numpy as np
import pytest
import torch
from scipy import special, stats

from model.config import FIRST_ITEM
from tests.training.histories import histories_of
from training.cold.blend import WEIGHTS, Blend, Curves, Signal, pooled, popular, popularity
from training.evaluate import ScoredUsers
from training.splits import Targets

NUM_ITEMS = 30
TEMPERATURE = 1.5
COUNTS = np.random.default_rng(0).integers(0, 60, NUM_ITEMS)


def scored_by_noise(num_users: int, seed: int, ruled_out: bool = False) -> ScoredUsers:
    """Users whose logits are random; with `ruled_out`, each lacks an item of their own."""
    generator = np.random.default_rng(seed)
    logit = generator.normal(0, 2, (num_users, NUM_ITEMS)).astype(np.float32)
    if ruled_out:
        logit[np.arange(num_users), np.arange(num_users) % NUM_ITEMS] = -np.inf
    precision = np.exp(generator.normal(size=num_users))
    return ScoredUsers(np.arange(num_users), torch.from_numpy(logit), torch.ones(num_users, NUM_ITEMS), precision)


def pool(scored: ScoredUsers, weight_U: np.ndarray) -> np.ndarray:
    """log-probabilities of the pool, (U,N), in float64."""
    logit = scored.logit.numpy().astype(np.float64)
    shares = np.log((COUNTS + 1) / (COUNTS + 1).sum())
    model = special.log_softmax(logit / TEMPERATURE, axis=1)
    # Not 0·(−inf) where a user's weight is 1.
    mixed = (1 - weight_U)[:, None] * np.where(np.isfinite(model), model, -1e300) + weight_U[:, None] * shares
    return np.asarray(special.log_softmax(np.where(np.isfinite(logit), mixed, -np.inf), axis=1))


def asked(num_events: np.ndarray, target: np.ndarray) -> Targets:
    return Targets(histories_of([[FIRST_ITEM] * count for count in num_events]), target + FIRST_ITEM)


def test_a_pools_order_is_that_of_the_mixed_log_probabilities_and_what_is_believed_stays() -> None:
    scored = scored_by_noise(40, 1, ruled_out=True)
    weight = np.linspace(0, 1, 40)

    (found,) = pooled([scored], popularity(COUNTS), TEMPERATURE, weight)

    expected = pool(scored, weight)
    assert found.order_key is not None
    key = special.log_softmax(found.order_key.numpy().astype(np.float64), axis=1)
    assert key == pytest.approx(expected, abs=1e-5)
    assert found.logit is scored.logit
    assert found.variance is scored.variance


def test_the_ends_of_the_weight_are_the_model_and_the_popular_list() -> None:
    scored = scored_by_noise(20, 2, ruled_out=True)
    (model,) = pooled([scored], popularity(COUNTS), TEMPERATURE, np.zeros(20))
    (counted,) = pooled([scored], popularity(COUNTS), TEMPERATURE, np.ones(20))
    (alone,) = popular([scored], popularity(COUNTS))

    assert torch.equal(model.key.argsort(stable=True), scored.logit.argsort(stable=True))
    assert torch.equal(counted.key, alone.key)
    for user in range(20):
        counts = [-1 if row == user % NUM_ITEMS else int(COUNTS[row]) for row in range(NUM_ITEMS)]
        assert (alone.key[user].numpy().argsort(kind="stable") == np.argsort(counts, kind="stable")).all()


def test_popularity_is_the_share_of_the_uses_with_one_added_to_each() -> None:
    assert popularity(np.array([3, 0, 5])).exp().numpy() == pytest.approx([4 / 11, 1 / 11, 6 / 11])


def test_curves_are_the_ranks_and_likelihoods_of_the_pool_at_every_weight() -> None:
    scored, generator = scored_by_noise(25, 3, ruled_out=True), np.random.default_rng(4)
    target = generator.integers(0, NUM_ITEMS, 25)
    counts = generator.integers(0, 4, 25)

    found = Curves.by([scored], asked(counts, target), popularity(COUNTS), TEMPERATURE)

    assert (found.num_events == counts).all()
    assert found.mean_precision == pytest.approx(scored.mean_precision)
    for column in (0, 7, 15, len(WEIGHTS) - 1):
        expected = pool(scored, np.full(25, WEIGHTS[column]))
        own = expected[np.arange(25), target]
        assert found.log_likelihood[:, column] == pytest.approx(own, abs=1e-5)
        middle = stats.rankdata(-expected, axis=1)[np.arange(25), target]
        assert found.rank[:, column] == pytest.approx(np.where(np.isfinite(own), middle, np.inf))


def planted(signal: Signal, intercept: float, slope: float, num_users: int = 6000) -> tuple[Curves, np.ndarray]:
    """Users whose next item is drawn from the pool by a weight that follows a signal; and the weights."""
    scored, generator = scored_by_noise(num_users, 5), np.random.default_rng(6)
    counts = generator.integers(0, 6, num_users)
    x = {"constant": 0 * counts, "events": np.log1p(counts), "precision": np.log(scored.mean_precision)}[signal]
    weight = special.expit(intercept + slope * x)
    # The largest of log-probabilities with Gumbel noise is a draw from them.
    target = (pool(scored, weight) + generator.gumbel(size=(num_users, NUM_ITEMS))).argmax(1)
    return Curves.by([scored], asked(counts, target), popularity(COUNTS), TEMPERATURE), weight


@pytest.mark.parametrize(
    ("signal", "intercept", "slope"), [("constant", -0.6, 0.0), ("events", 1.0, -1.5), ("precision", 0.5, -1.2)]
)
def test_a_fit_finds_the_weight_that_the_next_items_were_drawn_by(
    signal: Signal, intercept: float, slope: float
) -> None:
    curves, weight = planted(signal, intercept, slope)

    blend = Blend.fit(signal, curves)

    found = blend.weight(curves.num_events, curves.mean_precision)
    # Of 6,000 draws; the weights themselves spread over some tenths.
    assert np.abs(found - weight).mean() < 0.04
    assert blend.slope == pytest.approx(slope, abs=0.3)


def test_questions_whose_target_is_ruled_out_say_nothing_to_a_fit() -> None:
    curves, _ = planted("events", 1.0, -1.5, 400)
    spoiled = Curves(*(np.concatenate([part, part[:50]]) for part in vars(curves).values()))
    spoiled.log_likelihood[400:] = -np.inf

    assert Blend.fit("events", spoiled) == Blend.fit("events", curves)


def test_between_two_weights_the_rank_is_the_nearest_ones_and_the_likelihood_on_the_line() -> None:
    curves, _ = planted("constant", 0.0, 0.0, 50)
    step = WEIGHTS[1]

    assert (curves.rank_at(np.full(50, 3.4 * step)) == curves.rank[:, 3]).all()
    line = 0.6 * curves.log_likelihood[:, 3] + 0.4 * curves.log_likelihood[:, 4]
    assert curves.log_likelihood_at(np.full(50, 3.4 * step)) == pytest.approx(line)
    assert curves.log_likelihood_at(np.ones(50)) == pytest.approx(curves.log_likelihood[:, -1])
