"""What a run of the job found and did, filled in as it goes."""

from dataclasses import dataclass, field
from typing import Any, Literal

from training.retrain.config import JobConfig
from training.retrain.gate import Question
from training.retrain.store import Ingest
from training.retrain.window import Check, Window

Outcome = Literal["published", "would publish", "refused", "undecided", "nothing new", "failed"]
EXIT_STATUS: dict[Outcome, int] = {
    "published": 0,
    "would publish": 0,
    "refused": 3,
    "undecided": 3,
    "nothing new": 4,
    "failed": 2,
}


@dataclass
class Run:
    """The record of a run."""

    begun: str
    config: JobConfig
    """As the job was given it; once it knows the current model, with what it takes over from that."""
    outcome: Outcome = "nothing new"
    """`failed`: an error ended it, which `reason` tells."""
    reason: str = ""
    notes: list[str] = field(default_factory=list)
    """What somebody should know who set the job up."""
    ingests: list[Ingest] = field(default_factory=list)
    repeated_files: list[str] = field(default_factory=list)
    unusable_entries: int = 0
    window: Window | None = None
    checks: list[Check] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    judged: dict[str, Any] = field(default_factory=dict)
    """Of the slice: when it begins, targets, users; figures of both models."""
    training: dict[str, Any] = field(default_factory=dict)
    current: str | None = None
    bundle: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
