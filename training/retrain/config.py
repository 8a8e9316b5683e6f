"""The retraining job's configuration."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from training.config import ModelRun
from training.events import DataConfig
from training.retrain.gate import GateConfig
from training.retrain.window import Limits


class RetrainConfig(BaseModel):
    """What the job does with new events. Strict and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    start: Literal["warm", "scratch"] = "warm"
    """From the current model's weights, where the model is the same but for its items; or from none."""
    warm_epochs: int = Field(default=3, ge=1)
    """Epochs of a warm start, at a rate that falls from half of `training.learning_rate`."""
    judged_events: int = Field(default=2_000, ge=1)
    """New events, the last ones, that candidate and current model are judged on; more when they cannot tell."""
    keep: int = Field(default=5, ge=2)
    """Bundles that stay in the registry, the current and the previous one among them."""
    without_users: list[str] = []
    """Users whose events are not learned."""
    limits: Limits = Limits()
    gate: GateConfig = GateConfig()


class JobConfig(ModelRun):
    """All that decides a run of the job; `model` and `training` as in a fit."""

    data: DataConfig | None = None
    """A folder of event files, of which each is read once; None: the outbox alone."""
    retrain: RetrainConfig = RetrainConfig()
