"""From a history to the encoder's row or the step's, from a policy to what orders a list, and from the ranker's answer
to the list. Pure functions, but for a seed that nobody gave.

Shapes: D width, K kept events, T positions, M list entries, S seen items, X blocked items.
"""

import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from model.bundle import Calibration, Event, Items, confidence_features
from model.config import BOS, FIRST_ITEM, UNK, UNKNOWN_BASE, window_start
from service.candidates import Candidates
from service.engine import EncoderRow, Numbers, Order, Ranking, StepRow
from service.errors import InferenceFailed
from service.filtered import Cache, Floats, State
from service.schemas import DEFAULT_KAPPA, MAX_SEED, Policy, PolicyRequest


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """What is known of a subject, in numbers of the served catalogue."""

    count: int
    """Events with positive weight, the ones no longer kept included."""
    items: Numbers
    """(K,) the last ones, oldest first; UNK for items that the catalogue does not know."""
    weights: npt.NDArray[np.float32]
    """(K,) > 0."""
    timestamps: npt.NDArray[np.float64]
    """(K,) seconds; NaN where an event was told without one."""
    seen: Numbers
    """(S,) sorted numbers of the candidates ever had, those added at run time among them."""


NO_HISTORY = History(0, np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0), np.empty(0, np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Filters:
    """What may not be in a list."""

    seen: Numbers
    """(S,) what the normaliser leaves out; empty when the event is any next item."""
    blocked: Numbers
    """(X,) what is kept out of the list."""


class Entry(NamedTuple):
    """One place of a list, best first."""

    number: int
    score: float
    std: float
    confidence: float
    reliability: float | None


def translated(numbers: Numbers, num_items: int, ids: Mapping[int, str], items: Items | Candidates) -> Numbers:
    """Stored item numbers as those of a catalogue, or of all candidates: UNK where it does not know the item.

    Args:
        numbers: from the store; from UNKNOWN_BASE on they stand for ids that no catalogue knew.
        num_items: N, of the served catalogue.
        ids: the ids behind those, as far as known; a catalogue that learned an id since counts its events.
        items: whose numbers are wanted.
    """
    known = (numbers >= FIRST_ITEM) & (numbers < FIRST_ITEM + num_items)
    result = np.where(known, numbers, UNK)
    for place in np.flatnonzero(numbers >= UNKNOWN_BASE):
        item_id = ids.get(int(numbers[place]))
        number = items.number(item_id) if item_id is not None else None
        result[place] = UNK if number is None else number
    return result


def encoder_row(history: History, max_len: int) -> EncoderRow:
    """BOS and the events of the window that the total count asks for (math.md, "The sequence")."""
    num_forgotten = history.count - len(history.items)
    start = max(0, window_start(history.count, max_len) - num_forgotten)
    return EncoderRow(
        items=np.concatenate([[BOS], history.items[start:]]).astype(np.int64),
        weights=np.concatenate([[1.0], history.weights[start:]]).astype(np.float32),
        timestamps=np.concatenate([[np.nan], history.timestamps[start:]]),
    )


def step_row(row: EncoderRow, num_missing: int, cache: Cache | None) -> StepRow | None:
    """The row's last events, to be folded into the cache of the positions before them.

    Args:
        row: BOS and the window.
        num_missing: events since the cached state, ≥ 1.
        cache: of that state.

    Returns:
        None when there is no cache, or the window has moved since: positions are counted from its start.
    """
    if cache is None or cache.num_positions != len(row.items) - num_missing:
        return None
    missing = slice(cache.num_positions, None)
    return StepRow(cache, row.items[missing], row.weights[missing], row.timestamps[missing])


def filters(
    history: History,
    event: Event,
    num_candidates: int,
    exclude_seen: bool,
    exclude: Iterable[int],
    allow: Iterable[int] | None,
) -> Filters:
    """What the normaliser leaves out, and what the list leaves out.

    Args:
        history: for its seen items.
        event: says whether a seen item can be the next event at all.
        num_candidates: N + A.
        exclude_seen: keep seen items out of the list.
        exclude: numbers to keep out.
        allow: the only numbers that may be in; None: all.
    """
    blocked = np.fromiter(exclude, np.int64)
    if exclude_seen:
        blocked = np.union1d(blocked, history.seen)
    if allow is not None:
        # A mask, not sets: nearly the whole catalogue is blocked.
        is_allowed = np.zeros(num_candidates, bool)
        is_allowed[np.fromiter(allow, np.int64) - FIRST_ITEM] = True
        is_allowed[blocked - FIRST_ITEM] = False
        blocked = np.flatnonzero(~is_allowed) + FIRST_ITEM
    return Filters(seen=history.seen if event == "next_new_item" else NO_HISTORY.seen, blocked=blocked)


def policy_of(asked: PolicyRequest) -> Policy:
    """The policy that is asked for, with what the request leaves out: a default κ, a new seed."""
    kappa = seed = None
    if asked.policy in ("lcb", "ucb"):
        kappa = DEFAULT_KAPPA if asked.kappa is None else asked.kappa
    elif asked.policy == "thompson":
        seed = secrets.randbelow(MAX_SEED + 1) if asked.seed is None else asked.seed
    return Policy(name=asked.policy, kappa=kappa, seed=seed)


def order(policy: Policy, state: State) -> Order | None:
    """What orders a list by a policy (math.md, "Policies"); None: the predictive logit of the state itself."""
    if policy.seed is not None:
        certain = np.full_like(state.precision, np.inf)
        return Order(drawn(state, policy.seed), certain, shrinkage=1.0, kappa=0.0)
    if policy.kappa is not None:
        kappa = policy.kappa if policy.name == "ucb" else -policy.kappa
        return Order(state.mean, state.precision, shrinkage=0.0, kappa=kappa)
    return None


def drawn(state: State, seed: int) -> Floats:
    """The mean (D,) of a state drawn from N(mean, 1/precision): the state's own mean where its precision is infinite.

    Args:
        state: of a subject.
        seed: 0 to 2³² − 1. The standard normal numbers follow from it alone, so a draw can be made again, anywhere.
    """
    # RandomState: NumPy promises that its streams never change (NEP 19), and of no other generator's.
    noise = np.random.RandomState(seed).standard_normal(len(state.mean))
    return (state.mean + noise / np.sqrt(state.precision.astype(np.float64))).astype(np.float32)


def entries(
    ranking: Ranking, calibration: Calibration, candidates: Candidates, seen: Numbers, num_events: int
) -> list[Entry]:
    """The ranking with its calibrated confidences (math.md, "Scoring and its uncertainty").

    Args:
        ranking: of the engine.
        calibration: of the model.
        candidates: that were ranked.
        seen: ascending, what the normaliser left out; such an item is not the event, so its confidence is 0.
        num_events: events of the subject.

    Raises:
        InferenceFailed: a confidence is no number.
    """
    features = confidence_features(
        log_probability=ranking.log_probability[None],
        score_variance=ranking.score_variance[None],
        training_count=candidates.training_counts[ranking.items - FIRST_ITEM][None],
        entropy=np.array([ranking.entropy]),
        mean_precision=np.array([ranking.mean_precision]),
        num_events=np.array([num_events]),
    )
    with np.errstate(invalid="ignore"):
        calibrated = calibration.confidence(features, candidates.is_added(ranking.items)[None])[0]
    confidence = np.where(_is_in(ranking.items, seen), 0.0, calibrated)
    # A NaN compares as below every threshold: the item would vanish from a list without a word.
    if np.isnan(confidence).any():
        raise InferenceFailed("calibration.json gives confidences that are no numbers for this model; export it again")
    columns = (ranking.items, ranking.score_mean, np.sqrt(ranking.score_variance), confidence)
    reliability = [None if math.isnan(value) else value for value in ranking.reliability.tolist()]
    return list(map(Entry, *(column.tolist() for column in columns), reliability))


def _is_in(numbers: Numbers, ascending: Numbers) -> npt.NDArray[np.bool_]:
    """Which of a few numbers are among many; `np.isin` would sort the many again."""
    if len(ascending) == 0:
        return np.zeros(len(numbers), bool)
    place = np.minimum(np.searchsorted(ascending, numbers), len(ascending) - 1)
    return np.equal(ascending[place], numbers)


def list_confidence(listed: Iterable[Entry]) -> float:
    """Probability that the next event is in the list; the events "it is item i" exclude each other."""
    return min(1.0, sum(entry.confidence for entry in listed))
