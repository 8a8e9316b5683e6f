"""The simulated users of `benchmarks/exploration.py`, served by a real bundle."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks._simulated import Preferences, Server, had_rows, simulate, with_event
from model.bundle import open_bundle
from model.config import FIRST_ITEM
from model.registry import resolve
from service.engine import Engine
from service.filtered import State
from service.ranking import NO_HISTORY, History
from service.schemas import Policy
from service.settings import Settings
from service.telemetry import Metrics
from tests.service.bundles import NUM_ITEMS
from tests.service.bundles import tiny as tiny

MEAN, THOMPSON = Policy(name="mean", kappa=None, seed=None), Policy(name="thompson", kappa=None, seed=0)
NOTHING = np.empty(0, np.int64)
USERS, SIZE = 3, 4


class Watched(Server):
    """Notes what it lists."""

    shown: list[np.ndarray]

    def lists(
        self,
        histories: Sequence[History],
        states: Sequence[State],
        hidden: np.ndarray,
        policies: Sequence[Policy],
        size: int,
    ) -> np.ndarray:
        listed = super().lists(histories, states, hidden, policies, size)
        self.shown.append(listed)
        return listed


@pytest.fixture
def server(tiny: Path) -> Watched:
    bundle = open_bundle(resolve(tiny))
    server = Watched(bundle, Engine(bundle, Settings(bundle=tiny, threads=1), Metrics()))
    server.shown = []
    return server


def preferences(best_rate: float = 0.5, hidden: np.ndarray = NOTHING) -> Preferences:
    logit = np.random.default_rng(1).normal(size=(USERS, NUM_ITEMS))
    return Preferences.of(logit, had_rows([NO_HISTORY] * USERS, hidden, NUM_ITEMS), SIZE, best_rate)


def test_a_user_clicks_by_the_weights_of_the_list_and_of_nothing() -> None:
    users = Preferences(np.array([[1.0, 2.0, 4.0], [3.0, 0.0, 1.0]]), np.array([1.0, 4.0]))

    rates = users.click_rates(np.array([[0, 1], [1, 2]]))

    np.testing.assert_allclose(rates, [[1 / 4, 2 / 4], [0, 1 / 5]])
    assert users.best_lists(np.array([[False, False, True], [False] * 3]), 1).tolist() == [[1], [0]]


def test_the_best_list_of_every_user_is_clicked_at_the_same_rate_at_the_beginning() -> None:
    hidden = np.arange(0, NUM_ITEMS, 2)
    users = preferences(0.3, hidden)

    best = users.best_lists(had_rows([NO_HISTORY] * USERS, hidden, NUM_ITEMS), SIZE)

    np.testing.assert_allclose(users.click_rates(best).sum(1), 0.3)
    assert not np.isin(best, hidden).any()


def test_an_event_joins_the_history_and_the_seen_items() -> None:
    history = with_event(with_event(with_event(NO_HISTORY, 7, 2), 3, 2), 5, 2)

    assert history.count == 3
    assert history.items.tolist() == [3 + FIRST_ITEM, 5 + FIRST_ITEM]
    assert history.seen.tolist() == [3 + FIRST_ITEM, 5 + FIRST_ITEM, 7 + FIRST_ITEM]
    assert len(history.weights) == len(history.timestamps) == 2


def test_without_a_click_the_mean_s_list_stays_and_thompson_s_changes(server: Watched) -> None:
    nobody_clicks = Preferences(preferences().weight, np.full(USERS, 1e30))
    for policy, num_lists in ((MEAN, 1), (THOMPSON, 3)):
        server.shown = []
        course = simulate(server, [NO_HISTORY] * USERS, NOTHING, nobody_clicks, policy, rounds=3, size=SIZE, seed=1)

        assert course.is_click.sum() == 0
        assert len({listed.tobytes() for listed in server.shown}) == num_lists


def test_a_clicked_item_is_not_listed_again_and_hidden_ones_never(server: Watched) -> None:
    hidden = np.arange(0, NUM_ITEMS, 2)
    # Whatever is listed is clicked.
    eager = Preferences(preferences().weight, np.full(USERS, 1e-30))

    course = simulate(server, [NO_HISTORY] * USERS, hidden, eager, MEAN, rounds=5, size=SIZE, seed=1)

    assert course.is_click.all()
    for user in range(USERS):
        lists = [set(listed[user].tolist()) for listed in server.shown]
        assert not set().union(*lists) & set(hidden.tolist())
        # One item of each list is gone from all later ones.
        gone = [listed - set().union(*lists[round_ + 1 :]) for round_, listed in enumerate(lists)]
        assert all(gone)


def test_a_server_that_knows_the_preferences_has_no_regret(server: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    users = preferences()

    def best(histories: Sequence[History], *_: object) -> np.ndarray:
        return users.best_lists(had_rows(histories, NOTHING, NUM_ITEMS), SIZE)

    for_real = simulate(server, [NO_HISTORY] * USERS, NOTHING, users, MEAN, rounds=6, size=SIZE, seed=1)
    monkeypatch.setattr(server, "lists", best)
    knowing = simulate(server, [NO_HISTORY] * USERS, NOTHING, users, MEAN, rounds=6, size=SIZE, seed=1)

    np.testing.assert_allclose(knowing.regret, 0, atol=1e-12)
    assert (for_real.regret > 0).all()
    assert knowing.is_click.sum() >= for_real.is_click.sum()
