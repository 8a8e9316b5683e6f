"""A bundle's graphs in ONNX Runtime, asked as the service asks them: which items a policy lists for a state.

B rows of a batch · D width · K listed items · X blocked items · R draws
"""

from dataclasses import dataclass

import numpy as np
import onnxruntime

from model.bundle import ENCODER, RANKER, Bundle
from model.config import BOS, FIRST_ITEM, UNK, window_start
from training.replay.slates import Events, LoggedSlate, Policy

CELLS = 2**22
"""Rows times items that are ranked at a time."""


@dataclass(frozen=True, eq=False)
class State:
    """What is known of a user: `mean` (D,) and `precision` (D,) > 0, float32."""

    mean: np.ndarray
    precision: np.ndarray


@dataclass(frozen=True, eq=False)
class Orders:
    """What each of B lists is ordered by (docs/math.md, "Policies"): another state and two numbers for each, or, with
    B 1 and None, the row's own predictive logit."""

    mean: np.ndarray | None
    """(B,D)"""
    precision: np.ndarray | None
    """(B,D)"""
    shrinkage: float
    kappa: float


def orders(policy: Policy, state: State, noise: np.ndarray) -> Orders:
    """A policy's orders: one, or of `thompson` one for each draw.

    Args:
        policy: its seed counts for nothing.
        state: of the user.
        noise: (R,D) standard normal, what Thompson draws with.
    """
    if policy.name == "mean":
        return Orders(None, None, 1.0, 0.0)
    if policy.name == "thompson":
        drawn = (state.mean + noise / np.sqrt(state.precision.astype(np.float64))).astype(np.float32)
        return Orders(drawn, np.full_like(drawn, np.inf), 1.0, 0.0)
    kappa = policy.kappa or 0.0
    return Orders(state.mean[None], state.precision[None], 0.0, kappa if policy.name == "ucb" else -kappa)


def seed_noise(seed: int, width: int) -> np.ndarray:
    """The numbers (1,D) that the service draws with for a seed: a stream that NumPy never changes (NEP 19)."""
    return np.random.RandomState(seed).standard_normal((1, width))


class Ranker:
    """What a bundle lists.

    Args:
        bundle: opened.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self._encoder, self._ranker = (
            onnxruntime.InferenceSession(bundle.graph_path(graph), providers=["CPUExecutionProvider"])
            for graph in (ENCODER, RANKER)
        )

    def state(self, events: Events) -> State:
        """The state after a history: of the window that its count asks for, as the service takes it."""
        max_len, last = self.bundle.manifest.model.max_len, FIRST_ITEM + self.bundle.manifest.num_items
        start = max(0, window_start(events.count, max_len) - (events.count - len(events.items)))
        items = np.where(events.items < last, events.items, UNK)[start:]
        feeds = {
            "items": np.append(BOS, items)[None],
            "weights": np.append(np.float32(1), events.weights[start:])[None],
            "timestamps": np.append(np.nan, events.timestamps[start:])[None],
        }
        mean, precision = self._encoder.run(["mean", "precision"], feeds)
        return State(mean[0], precision[0])

    def blocked(self, slate: LoggedSlate) -> np.ndarray:
        """Numbers (X,) of the items that could not be in the list: those had, excluded, not allowed, retired."""
        items = self.bundle.items
        kept_out = [*slate.seen.tolist(), *items.retired.tolist(), *map(items.number, slate.exclude_item_ids)]
        is_blocked = np.zeros(len(items), bool)
        if slate.allow_item_ids is not None:
            is_blocked[:] = True
            allowed = [number for number in map(items.number, slate.allow_item_ids) if number is not None]
            is_blocked[np.array(allowed, np.int64) - FIRST_ITEM] = False
        rows = [number - FIRST_ITEM for number in kept_out if number is not None]
        is_blocked[[row for row in rows if row < len(items)]] = True
        return np.flatnonzero(is_blocked) + FIRST_ITEM

    def lists(self, state: State, blocked: np.ndarray, size: int, by: Orders) -> np.ndarray:
        """The lists (B,K) by each order, as item numbers, best first; K is less where the catalogue ends.

        Args:
            state: of the user.
            blocked: (X,) item numbers.
            size: items wanted.
            by: the orders.
        """
        num_rows = 1 if by.mean is None else len(by.mean)
        step = max(1, CELLS // self.bundle.manifest.num_items)
        parts = [slice(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step)]
        listed = np.concatenate([self._lists(state, blocked, size, by, part) for part in parts])
        free = self.bundle.manifest.num_items - len(blocked)
        return listed[:, : min(size, free)]

    def _lists(self, state: State, blocked: np.ndarray, size: int, by: Orders, part: slice) -> np.ndarray:
        num_rows = part.stop - part.start
        rows = np.arange(0 if by.mean is None else num_rows, dtype=np.int64)
        none = np.empty((0, len(state.mean)), np.float32)
        feeds = {
            "mean": np.tile(state.mean, (num_rows, 1)),
            "precision": np.tile(state.precision, (num_rows, 1)),
            # The normaliser's: it orders nothing.
            "seen": np.zeros((num_rows, 1), np.int64),
            "blocked": np.tile(blocked, (num_rows, 1)) if len(blocked) else np.zeros((num_rows, 1), np.int64),
            "k": np.array([min(size, self.bundle.manifest.num_items)], np.int64),
            "temperature": np.array(self.bundle.calibration.temperature, np.float32),
            "variance_scale": np.array(self.bundle.calibration.variance_scale, np.float32),
            "order_rows": rows,
            "order_mean": none if by.mean is None else by.mean[part],
            "order_precision": none if by.precision is None else by.precision[part],
            "order_shrinkage": np.full(len(rows), by.shrinkage, np.float32),
            "order_kappa": np.full(len(rows), by.kappa, np.float32),
            "added_items": none,
            "added_variance": np.empty(0, np.float32),
        }
        (items,) = self._ranker.run(["items"], feeds)
        return items
