"""Simulated users with known preferences, who are served by a real bundle and click.

U users · N catalogue items, by row · K listed items · R rounds · D width
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from model.bundle import ENCODER, RANKER, Bundle
from model.config import FIRST_ITEM
from service import ranking
from service.engine import Engine, RankerRow
from service.filtered import State
from service.ranking import History
from service.schemas import Policy

MAX_ROWS = 64
"""Users whose histories go through a graph together."""


@dataclass(frozen=True)
class Preferences:
    """What users like, which nobody who serves them knows.

    Of the items of a list a user clicks i with probability w_i/(w_0 + Σ_j w_j), the sum over the list, and none with
    w_0/(w_0 + Σ_j w_j): a multinomial logit.
    """

    weight: np.ndarray
    """(U,N) w ≥ 0"""
    nothing: np.ndarray
    """(U,) w_0 > 0"""

    @classmethod
    def of(cls, logit_UN: np.ndarray, had_UN: np.ndarray, size: int, best_rate: float) -> "Preferences":
        """w = exp(logit), and w_0 such that each user's best list at the beginning is clicked at the same rate.

        Args:
            logit_UN: of choosing each item from the catalogue.
            had_UN: bool, items that no list of the user may have.
            size: K.
            best_rate: in (0, 1).
        """
        weight = np.exp(logit_UN - logit_UN.max(1, keepdims=True))
        best = np.where(had_UN, 0.0, weight)
        total = np.sort(best, axis=1)[:, -size:].sum(1)
        return cls(weight, total * (1 - best_rate) / best_rate)

    def click_rates(self, lists_UK: np.ndarray) -> np.ndarray:
        """Probability (U,K) that each listed item is clicked.

        Args:
            lists_UK: catalogue rows.
        """
        listed = np.take_along_axis(self.weight, lists_UK, 1)
        return listed / (listed.sum(1, keepdims=True) + self.nothing[:, None])

    def best_lists(self, had_UN: np.ndarray, size: int) -> np.ndarray:
        """The K items (U,K) most likely to be clicked, of those that a user has not had."""
        return np.argpartition(np.where(had_UN, -1.0, self.weight), -size, axis=1)[:, -size:]


@dataclass(frozen=True)
class Course:
    """How users fared under a policy."""

    first_lists: np.ndarray
    """(U,K) catalogue rows of what each was shown first."""
    regret: np.ndarray
    """(R,U) click rate of the best list less that of the list shown."""
    is_click: np.ndarray
    """(R,U)"""


class Server:
    """A bundle that lists as the service does, by its engine and its ranking, many users at a time.

    Args:
        bundle: the served one.
        engine: its graphs.
    """

    def __init__(self, bundle: Bundle, engine: Engine) -> None:
        self.bundle = bundle
        self._engine = engine

    def states(self, histories: Sequence[History]) -> list[State]:
        """The state after each history."""
        rows = [ranking.encoder_row(history, self.bundle.manifest.model.max_len) for history in histories]
        parts = (rows[begin : begin + MAX_ROWS] for begin in range(0, len(rows), MAX_ROWS))
        return [replace(state, cache=None) for part in parts for state in self._engine.run_rows(ENCODER, part)]

    def lists(
        self,
        histories: Sequence[History],
        states: Sequence[State],
        hidden: np.ndarray,
        policies: Sequence[Policy],
        size: int,
    ) -> np.ndarray:
        """The list (U,K) of each user as catalogue rows, without hidden items and those that the user has had."""
        rows = []
        for history, state, policy in zip(histories, states, policies, strict=True):
            event, num_items = self.bundle.calibration.event, len(self.bundle.items)
            chosen = ranking.filters(history, event, num_items, True, hidden + FIRST_ITEM, None)
            rows.append(RankerRow(state, chosen.seen, chosen.blocked, size, ranking.order(policy, state)))
        parts = (rows[begin : begin + MAX_ROWS] for begin in range(0, len(rows), MAX_ROWS))
        return np.array([made.items - FIRST_ITEM for part in parts for made in self._engine.run_rows(RANKER, part)])


def with_event(history: History, row: int, max_len: int) -> History:
    """The history and one event more, on an item that it does not have.

    Args:
        row: of the catalogue.
        max_len: events that are kept.
    """
    number = row + FIRST_ITEM
    return History(
        count=history.count + 1,
        items=np.append(history.items, number)[-max_len:],
        weights=np.append(history.weights, np.float32(1))[-max_len:],
        timestamps=np.append(history.timestamps, np.nan)[-max_len:],
        seen=np.union1d(history.seen, [number]),
    )


def simulate(
    server: Server,
    histories: Sequence[History],
    hidden: np.ndarray,
    preferences: Preferences,
    policy: Policy,
    *,
    rounds: int,
    size: int,
    seed: int,
) -> Course:
    """Show every user a list a round; what is clicked joins the history.

    Args:
        server: what lists.
        histories: where each user begins.
        hidden: rows of the items that nobody is shown.
        preferences: of the users, items by the server's catalogue.
        policy: of the lists; `thompson` gets a seed of its own for each list.
        rounds: R.
        size: K.
        seed: of the clicks, which are the same luck under every policy, and of Thompson's draws.
    """
    generator = np.random.default_rng(seed)
    histories = list(histories)
    states, max_len = server.states(histories), server.bundle.manifest.model.max_len
    had = had_rows(histories, hidden, len(server.bundle.items))
    users = np.arange(len(histories))
    regret, is_click = np.zeros((2, rounds, len(histories)))
    first_lists = np.empty((len(histories), size), np.int64)
    for round_ in range(rounds):
        luck, seeds = generator.random(len(histories)), generator.integers(2**32, size=len(histories))
        policies = [
            policy.model_copy(update={"seed": int(each)}) if policy.name == "thompson" else policy for each in seeds
        ]
        lists = server.lists(histories, states, hidden, policies, size)
        if round_ == 0:
            first_lists = lists
        rates = preferences.click_rates(lists)
        regret[round_] = preferences.click_rates(preferences.best_lists(had, size)).sum(1) - rates.sum(1)
        place = (luck[:, None] >= rates.cumsum(1)).sum(1)
        clicking = users[place < size]
        is_click[round_, clicking] = 1
        for user in clicking:
            row = int(lists[user, place[user]])
            histories[user] = with_event(histories[user], row, max_len)
            had[user, row] = True
        for user, state in zip(clicking, server.states([histories[user] for user in clicking]), strict=True):
            states[user] = state
    return Course(first_lists, regret, is_click)


def had_rows(histories: Sequence[History], hidden: np.ndarray, num_items: int) -> np.ndarray:
    """Which items each user cannot be shown, (U,N) bool: those had, and the hidden ones."""
    had = np.zeros((len(histories), num_items), bool)
    had[:, hidden] = True
    for user, history in enumerate(histories):
        had[user, history.seen - FIRST_ITEM] = True
    return had
