"""Whether confidence behaves as its meaning asks: less of it for a history that is nobody's and for items seldom seen,
more certainty with every event, and another seed agrees about whom to be sure of.

U users · N catalogue items · K = 10 list length · D width
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from model.backbone import Backbone
from model.bundle import Calibration, Event
from model.config import FIRST_ITEM, UNK
from model.onnx.export import prior_variance
from training import evaluate
from training.batches import collate, serving_windows
from training.confidence.measures import mean_estimate
from training.confidence.records import AlteredHistory, Interval, ReliabilityAfter
from training.evaluate import LIST_LENGTH, stated
from training.metrics import equal_mass_bins
from training.splits import Histories, Targets
from training.study import strata

SAMPLED_USERS = 5_000
"""Test users that are asked again with another history."""
CATALOGUE_USERS = 200
"""Test users whose confidence in every item of the catalogue is taken."""
EVENT_COUNTS = (0, 1, 2, 3, 5, 10, 20, 50)
"""After how many events reliability is taken."""
LEAST_LONGEST = 100
"""Users who stay the same from row to row: as many events as so many have."""
NUM_DECILES = 10
ROUNDING = 1e-4
"""A reliability so far below 0 is 0 in float32."""


@dataclass(frozen=True)
class Asked:
    """A model, the map of its bundle, and the log that both know: what a confidence comes from.

    `training_counts` (N,) uses of each item in what the model learned.
    """

    model: Backbone
    calibration: Calibration
    event: Event
    training_counts: np.ndarray

    def stated(self, targets: Targets) -> np.ndarray:
        """List confidence for each history, (U,), as a request that tells it would be answered."""
        scored = evaluate.score_users(self.model, targets.history, self.event)
        said = evaluate.predict(scored, targets, self.calibration.temperature, LIST_LENGTH)
        return stated(evaluate.confidences(said, self.calibration, self.training_counts))


def altered_histories(asked: Asked, test: Targets, seed: int = 0) -> tuple[AlteredHistory, ...]:
    """List confidence of users for their own history, and for what is none: each beside their own.

    A history is all that is known of somebody: it is what the model reads, and what a next new item cannot be.

    Args:
        asked: the model that is judged.
        test: whom to ask about; at most `SAMPLED_USERS` of them, those with two events or more.
        seed: of the sample and the alterations.
    """
    generator = np.random.default_rng(seed)
    sampled = sample(test, generator, SAMPLED_USERS, min_events=2)
    own = sampled.history
    alterations: dict[str, Histories] = {
        "their own": own,
        "their own, in random order": reordered(own, generator),
        "of events of others, at random": replace(own, items=generator.permutation(own.items)),
        "of unknown items": replace(own, items=np.full_like(own.items, UNK)),
    }
    told = {name: asked.stated(replace(sampled, history=read)) for name, read in alterations.items()}
    return tuple(
        AlteredHistory(
            history=name,
            users=len(sampled),
            stated=float(stated_U.mean()),
            difference=None if name == "their own" else Interval.of(mean_estimate(stated_U - told["their own"])),
        )
        for name, stated_U in told.items()
    )


def sample(test: Targets, generator: np.random.Generator, most: int, min_events: int) -> Targets:
    """At most so many test users, those with some events to read."""
    enough = np.flatnonzero(np.diff(test.history.offsets) >= min_events)
    chosen = np.sort(generator.choice(enough, min(most, len(enough)), replace=False))
    return test.of_users(chosen)


def reordered(histories: Histories, generator: np.random.Generator) -> Histories:
    """Each user's items in random order, weights with them; times stay, so that time goes on rising."""
    user = np.repeat(np.arange(len(histories)), np.diff(histories.offsets))
    order = np.lexsort((generator.random(len(user)), user))
    return replace(histories, items=histories.items[order], weights=histories.weights[order])


def catalogue_confidence(asked: Asked, test: Targets, seed: int = 0) -> dict[str, float]:
    """Mean confidence of every item that can be a user's next event, by the item's training uses: stratum → mean.

    Args:
        asked: the model that is judged.
        test: whom to ask about; at most `CATALOGUE_USERS` of them.
        seed: of the sample.
    """
    sampled = sample(test, np.random.default_rng(seed), CATALOGUE_USERS, min_events=0)
    num_items = len(asked.training_counts)
    scored = evaluate.score_users(asked.model, sampled.history, asked.event)
    said = evaluate.predict(scored, sampled, asked.calibration.temperature, num_items)
    confidence_UN = evaluate.confidences(said, asked.calibration, asked.training_counts, num_items)
    uses_UN = asked.training_counts[said.items - FIRST_ITEM]
    possible_UN = np.isfinite(said.list_log_probability)
    return {
        name: float(confidence_UN[member & possible_UN].mean())
        for name, member in strata.members(uses_UN, strata.ITEM_STRATA).items()
        if (member & possible_UN).any()
    }


@torch.no_grad()
def reliability_by_events(model: Backbone, test: Targets, event: Event, seed: int = 0) -> tuple[ReliabilityAfter, ...]:
    """The reliability of lists after each number of events, of users who have so many.

    A list's reliability is the mean over its items (math.md, "Scoring and its uncertainty"). What is below 0, but for
    rounding, is clipped when it is served.

    Args:
        model: with filtering.
        test: whom to ask about; at most `SAMPLED_USERS` of them.
        event: what a list is of.
        seed: of the sample.
    """
    sampled = sample(test, np.random.default_rng(seed), SAMPLED_USERS, min_events=0)
    # Events of weight 0 are none that the model reads.
    num_events = evaluate.num_events(sampled.history)
    most = max(count for count in EVENT_COUNTS if (num_events >= count).sum() >= min(LEAST_LONGEST, len(sampled)))
    rows = []
    for count in EVENT_COUNTS:
        users = np.flatnonzero(num_events >= count)
        if len(users) == 0:
            break
        read = sampled.history.prefixes(users, events_end(sampled.history, users, count))
        reliability_UK = np.concatenate(list(_reliability(model, read, event)))
        served_U = reliability_UK.clip(0, 1).mean(1)
        rows.append(
            ReliabilityAfter(
                events=count,
                users=len(users),
                median=float(np.median(served_U)),
                median_of_longest=float(np.median(served_U[num_events[users] >= most])) if count <= most else None,
                share_clipped=float((reliability_UK < -ROUNDING).mean()),
            )
        )
    return tuple(rows)


def events_end(histories: Histories, users: np.ndarray, count: int) -> np.ndarray:
    """Where in the flat list each user's `count`-th event of weight > 0 ends; the user's begin for 0."""
    before = np.concatenate([[0], np.cumsum(histories.weights > 0)])
    begins = histories.offsets[users]
    return begins if count == 0 else np.searchsorted(before, before[begins] + count)


def _reliability(model: Backbone, histories: Histories, event: Event) -> Iterator[np.ndarray]:
    """(B,K) of the items of each user's list, chunk by chunk."""
    windows = serving_windows(histories, model.config.max_len)
    prior = prior_variance(model)
    for users in torch.arange(len(histories)).split(evaluate.CHUNK_USERS):
        batch = collate(windows, users)
        state = model.final_state(batch.items, batch.weights, batch.timestamps)
        logit = model.score(state).logit
        evaluate.rule_out_seen(logit, histories, users, event)
        listed = logit.topk(min(LIST_LENGTH, model.num_items)).indices
        squares = model.catalogue()[listed].square()
        left = (squares * model.head.own_variance(state)[:, None]).sum(-1)
        yield (1 - left / (squares * prior).sum(-1)).numpy()


def seed_agreement(asked: Asked, other: Asked, test: Targets, seed: int = 0) -> float:
    """`decile_agreement` of two models on the same users, at most `SAMPLED_USERS`."""
    sampled = sample(test, np.random.default_rng(seed), SAMPLED_USERS, min_events=0)
    return decile_agreement(asked.stated(sampled), other.stated(sampled))


def decile_agreement(stated_U: np.ndarray, other_U: np.ndarray) -> float:
    """Share of the users whom two models place in the same tenth by confidence, or in one beside it.

    Args:
        stated_U, other_U: list confidence of the same users by each.
    """
    apart = equal_mass_bins(stated_U, NUM_DECILES) - equal_mass_bins(other_U, NUM_DECILES)
    return float((np.abs(apart) <= 1).mean())
