"""What a judgement of cold users keeps: one JSON file a data set, from which its tables and its figure are made."""

from pathlib import Path
from typing import Any, Literal

from training.cold.blend import Signal
from training.confidence.records import Interval, Part


class Figures(Part):
    """How one system answered one question, over its users."""

    system: str
    hr: Interval
    """HR@10."""
    ndcg: Interval
    """NDCG@10."""
    list_confidence: Interval
    """Mean stated probability that the next event is in the list of ten; of popularity, the sum of its shares."""
    overstated: Interval
    """List confidence less hit, user by user."""
    hr_gain: Interval
    """The model's HR@10 less this system's, user by user: above 0, the model is better."""
    ndcg_gain: Interval
    popularity_weight: float | None
    """Of a blend: its mean over the users."""


class Question(Part):
    """Which event follows the first `num_events` ones?"""

    num_events: int
    users: int
    without: int
    """Users of the half who have no such event on an item that the bundle knows."""
    impossible: int
    """Users whose event is on an item that they had had, which the bundle's event rules out: misses of all systems."""
    systems: tuple[Figures, ...]


class FittedBlend(Part):
    """A blend, and what it had over the model on the users it was fitted on, each half of them judged by the other."""

    name: str
    signal: Signal
    intercept: float
    slope: float
    hr_gain: Interval
    """The blend's HR@10 less the model's, a user's mean over the questions: above 0, the blend is better."""
    ndcg_gain: Interval


class ColdRecord(Part):
    """How one bundle answered the held-out users of one data set at their start."""

    format: Literal[1] = 1
    dataset: str
    data: dict[str, Any]
    event: Literal["next_new_item", "next_item"]
    model: str
    models: dict[str, Any]
    """Name of each model that took part → version, configuration, commit and best epoch of its training."""
    temperature: float
    commit: str | None
    environment: dict[str, Any]
    seconds: float
    validation_users: int
    test_users: int
    blends: tuple[FittedBlend, ...]
    default: str
    """The system that the validation half chose: `model`, or a blend that beat it there."""
    questions: tuple[Question, ...]
    """Put to the test half, each to all who can be asked."""
    same_users: tuple[Question, ...]
    """The same of those users who can be asked them all."""


def record_path(folder: Path, dataset: str) -> Path:
    """Where the record of a data set lies."""
    return folder / f"cold-{dataset}.json"
