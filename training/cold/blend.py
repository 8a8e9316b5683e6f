"""Lists between the model's and the popular one, by a weight that is each user's own.

Logarithmic pooling (Genest & Zidek 1986): the order of the items is that of

    (1 − w)·log p_i + w·log q_i          w = σ(intercept + slope·x)

p_i the model's probability, q_i the item's share of the training uses, x one signal of the user. An order alone: what
is believed of an item stays the model's. What is the same for all items of a user changes no order, so it is that of
logit_i/T + w/(1 − w)·log(1 + n_i), too.

B users of a batch · Q questions to users · G weights tried · N catalogue items
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import expit
from torch import Tensor

from model.config import FIRST_ITEM
from training import metrics
from training.evaluate import ScoredUsers, num_events
from training.splits import Targets

Signal = Literal["constant", "events", "precision"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)
"""What the weight follows: nothing, log(1 + events), the log of the state's mean precision."""
WEIGHTS = np.linspace(0, 1, 21)
"""At which the likelihood is worked out; between them it is taken for a straight line."""
LIMIT = 20.0
"""Of both parameters, of a signal scaled to mean 0 and deviation 1: σ(±20) is 0 or 1."""


@dataclass(frozen=True)
class Curves:
    """What became of each question to a user, (Q,) or (Q,G), had popularity each of `WEIGHTS`.

    `num_events` of positive weight and `mean_precision` of the final state are the user's; `rank` and `log_likelihood`,
    in nats, are the target's in the pool, infinite where the event rules it out. The first column is the model alone.
    """

    num_events: np.ndarray
    mean_precision: np.ndarray
    rank: np.ndarray
    log_likelihood: np.ndarray

    @classmethod
    def by(
        cls, scored_users: Iterable[ScoredUsers], targets: Targets, popularity_N: Tensor, temperature: float
    ) -> "Curves":
        """One question a user.

        Args:
            scored_users: by the model, of `targets.history`.
            targets: the true next events.
            popularity_N: log q.
            temperature: T of the model's probabilities.
        """
        shape = (len(targets), len(WEIGHTS))
        found = cls(num_events(targets.history), np.empty(len(targets)), np.empty(shape), np.empty(shape))
        for scored in scored_users:
            rows = targets.target[scored.users] - FIRST_ITEM
            found.mean_precision[scored.users] = scored.mean_precision
            pool = _Pool.of(scored, popularity_N, temperature)
            for column, weight in enumerate(WEIGHTS.tolist()):
                key_BN = pool.at(torch.tensor(weight))
                own_B = key_BN.gather(1, torch.from_numpy(rows)[:, None])[:, 0]
                found.rank[scored.users, column] = metrics.target_ranks(key_BN.numpy(), rows)
                found.log_likelihood[scored.users, column] = (own_B - key_BN.logsumexp(-1)).numpy()
        return found

    @classmethod
    def concat(cls, parts: Sequence["Curves"]) -> "Curves":
        """The questions of one after those of the other."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def chosen(self, which_Q: np.ndarray) -> "Curves":
        """Some of the questions, (Q,) bool."""
        return Curves(*(getattr(self, field.name)[which_Q] for field in fields(self)))

    def rank_at(self, weight_Q: np.ndarray) -> np.ndarray:
        """The target's rank, (Q,), at that of `WEIGHTS` which is nearest to each question's own."""
        nearest = np.rint(weight_Q * (len(WEIGHTS) - 1)).astype(np.int64)
        return np.asarray(self.rank[np.arange(len(self.rank)), nearest])

    def log_likelihood_at(self, weight_Q: np.ndarray) -> np.ndarray:
        """The target's log-likelihood, (Q,), on the straight line between the two nearest."""
        place = weight_Q * (len(WEIGHTS) - 1)
        left = np.minimum(place.astype(np.int64), len(WEIGHTS) - 2)
        question, share = np.arange(len(left)), place - left
        low, high = self.log_likelihood[question, left], self.log_likelihood[question, left + 1]
        return np.asarray((1 - share) * low + share * high)


@dataclass(frozen=True)
class Blend:
    """How much of popularity a user's list has."""

    signal: Signal
    intercept: float
    slope: float

    def weight(self, num_events: np.ndarray, mean_precision: np.ndarray) -> np.ndarray:
        """w in [0, 1] of each user; 1 is popularity.

        Args:
            num_events: events of positive weight.
            mean_precision: of the final state, > 0.
        """
        return np.asarray(expit(self.intercept + self.slope * _signal(self.signal, num_events, mean_precision)))

    @classmethod
    def fit(cls, signal: Signal, curves: Curves) -> "Blend":
        """By maximum likelihood of the true next items; those that the event rules out say nothing.

        Args:
            signal: what the weight follows.
            curves: at least one question.
        """
        possible = curves.chosen(np.isfinite(curves.log_likelihood[:, 0]))
        x = _signal(signal, possible.num_events, possible.mean_precision)
        mean, std = float(x.mean()), max(float(x.std()), 1e-9)

        def loss(parameters: np.ndarray) -> float:
            intercept, slope = parameters
            return -float(possible.log_likelihood_at(expit(intercept + slope * (x - mean) / std)).mean())

        free = (-LIMIT, LIMIT)
        bounds = [free, (0.0, 0.0) if signal == "constant" else free]
        options = {"initial_simplex": [[0, 0], [2, 0], [0, 2]], "xatol": 1e-3, "fatol": 1e-7}
        # The straight pieces have kinks, which stop methods that follow a gradient.
        found = minimize(loss, [0.0, 0.0], method="Nelder-Mead", bounds=bounds, options=options)
        intercept, slope = found.x
        return cls(signal, float(intercept - slope * mean / std), float(slope / std))


def popularity(training_counts_N: np.ndarray) -> Tensor:
    """log q (N,): each item's share of the training uses, one added to each so that none is impossible."""
    mass = training_counts_N + 1.0
    return torch.from_numpy(np.log(mass / mass.sum()).astype(np.float32))


def popular(scored_users: Iterable[ScoredUsers], popularity_N: Tensor) -> Iterator[ScoredUsers]:
    """Popularity in the place of the model's logits; what the event rules out stays so."""
    for scored in scored_users:
        logit = popularity_N.expand_as(scored.logit).masked_fill(scored.logit.isneginf(), -torch.inf)
        yield replace(scored, logit=logit, order_key=None)


def pooled(
    scored_users: Iterable[ScoredUsers], popularity_N: Tensor, temperature: float, weight_U: np.ndarray
) -> Iterator[ScoredUsers]:
    """The same users, their lists ordered by the pool of model and popularity.

    Args:
        scored_users: by the model.
        popularity_N: log q.
        temperature: T of the model's probabilities.
        weight_U: w of each user.
    """
    for scored in scored_users:
        weight_B1 = torch.from_numpy(weight_U[scored.users].astype(np.float32))[:, None]
        yield replace(scored, order_key=_Pool.of(scored, popularity_N, temperature).at(weight_B1))


@dataclass(frozen=True)
class _Pool:
    """What is mixed, (B,N), and what the event rules out."""

    model: Tensor
    popularity: Tensor
    ruled_out: Tensor

    @classmethod
    def of(cls, scored: ScoredUsers, popularity_N: Tensor, temperature: float) -> "_Pool":
        model_BN = (scored.logit / temperature).log_softmax(-1)
        return cls(model_BN, popularity_N.expand_as(model_BN), scored.logit.isneginf())

    def at(self, weight: Tensor) -> Tensor:
        """(1 − w)·log p + w·log q, for one weight or (B,1); −inf at what is ruled out."""
        return torch.lerp(self.model, self.popularity, weight).masked_fill_(self.ruled_out, -torch.inf)


def _signal(signal: Signal, num_events: np.ndarray, mean_precision: np.ndarray) -> np.ndarray:
    """x of each user."""
    match signal:
        case "constant":
            return np.zeros(len(num_events))
        case "events":
            return np.asarray(np.log1p(num_events))
        case "precision":
            return np.log(mean_precision.astype(np.float64))
