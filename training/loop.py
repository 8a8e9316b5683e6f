"""The training loop: epochs over bucketed windows, early stopping on validation NDCG@10, exact resume."""

import copy
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model.backbone import Backbone
from model.bundle import Event
from model.filtering import Gaussian
from training import losses, metrics
from training.batches import (
    Batch,
    Windows,
    collate,
    collate_masked,
    shuffled_batches,
    training_windows,
    with_unknowns,
)
from training.config import ConfigError, OptimizerConfig
from training.evaluate import ranks, score_users
from training.splits import Split


@dataclass
class TrainState:
    """All of a run's state; a checkpoint is this, whole."""

    model: Backbone
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    epoch: int = 0
    seconds: float = 0.0
    best_ndcg: float = -1.0
    best_epoch: int = 0
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)


def fit(
    model: Backbone,
    split: Split,
    event: Event,
    config: OptimizerConfig,
    checkpoint: Path | None = None,
    on_step: Callable[[int, int, float], None] = lambda done, total, loss: None,
    on_epoch: Callable[[dict[str, float]], None] = lambda row: None,
) -> TrainState:
    """Train until the epochs, the seconds or the patience end; the model is left with its best weights.

    Args:
        model: initialised; changed in place.
        split: training histories and validation targets.
        event: what counts as the next event, for validation.
        config: the optimiser's settings.
        checkpoint: where the state is saved after each epoch and resumed from if it is there. A resumed run
            takes the same steps as an unbroken one.
        on_step, on_epoch: progress: (step, steps of this epoch, mean loss so far), and the epoch's row of the
            learning curve.

    Returns:
        the final state, with the learning curve.

    Raises:
        ConfigError: the loss or its gradient is no longer finite.
    """
    windows = training_windows(split.train, model.config.max_len)
    state = TrainState(model, _optimizer(model, config), torch.Generator().manual_seed(config.seed))
    torch.manual_seed(config.seed)
    if checkpoint is not None and checkpoint.exists():
        _restore(state, checkpoint)
    while not _finished(state, config):
        begun = time.monotonic()
        loss = train_epoch(state, windows, config, on_step)
        ranks_U = ranks(score_users(model, split.validation.history, event), split.validation)
        ndcg = float(metrics.ndcg(ranks_U, 10).mean())
        state.epoch += 1
        state.seconds += time.monotonic() - begun
        row = {
            "epoch": state.epoch,
            "loss": loss,
            "val_ndcg@10": ndcg,
            "val_hr@10": float((ranks_U <= 10).mean()),
        }
        state.curve.append({**row, "seconds": round(state.seconds, 2)})
        if ndcg > state.best_ndcg:
            state.best_ndcg, state.best_epoch = ndcg, state.epoch
            state.best_weights = copy.deepcopy(model.state_dict())
        if checkpoint is not None:
            _save(state, checkpoint)
        on_epoch(state.curve[-1])
    model.load_state_dict(state.best_weights)
    return state


def train_epoch(
    state: TrainState, windows: Windows, config: OptimizerConfig, on_step: Callable[[int, int, float], None]
) -> float:
    """One pass over all windows; returns the mean loss of the steps.

    Raises:
        ConfigError: the loss or its gradient is no longer finite.
    """
    state.model.train()
    total, steps = 0.0, -(-len(windows) // config.batch_size)
    for step, rows in enumerate(shuffled_batches(windows, config.batch_size, state.generator), 1):
        batch = training_batch(state.model, windows, rows, config, state.generator)
        with torch.autocast(batch.items.device.type, torch.bfloat16, enabled=config.autocast):
            loss = batch_loss(state.model, batch, config, state.generator)
        state.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(state.model.parameters(), config.clip_norm)
        # A NaN gradient under a finite loss would turn every weight into NaN.
        if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
            raise ConfigError(
                f"at step {step} of epoch {state.epoch + 1} the loss is {loss.item()}, its gradient {norm.item()}:"
                " training diverged; lower training.learning_rate or training.precision_rate_multiple"
            )
        state.optimizer.step()
        total += loss.item()
        on_step(step, steps, total / step)
    return total / steps


def training_batch(
    model: Backbone, windows: Windows, rows: Tensor, config: OptimizerConfig, generator: torch.Generator
) -> Batch:
    """The batch of the named windows: a causal model predicts each next event, another fills in masked ones."""
    if model.causal:
        batch = collate(windows, rows)
    else:
        batch = collate_masked(windows, rows, config.mask_share, config.last_item_share, generator)
    return with_unknowns(batch, config.unknown_rate, generator)


def batch_loss(model: Backbone, batch: Batch, config: OptimizerConfig, generator: torch.Generator) -> Tensor:
    """The loss of one batch; only the positions that predict reach the output product."""
    encoded = model.encode(batch.items, batch.weights, batch.timestamps)
    mean, precision = (part.flatten(0, 1)[batch.positions] for part in encoded)
    if config.loss == "full":
        return losses.full_cross_entropy(model, Gaussian(mean, precision), batch.targets)
    return losses.sampled_softmax(model, Gaussian(mean, precision), batch.targets, config.num_negatives, generator)


def _optimizer(model: Backbone, config: OptimizerConfig) -> torch.optim.Optimizer:
    precision = [p for name, p in model.named_parameters() if name.startswith("initial_precision.")]
    others = [p for name, p in model.named_parameters() if not name.startswith("initial_precision.")]
    groups: list[dict[str, Any]] = [{"params": others, "weight_decay": config.weight_decay}]
    if precision:
        groups.append({"params": precision, "lr": config.learning_rate * config.precision_rate_multiple})
    return torch.optim.Adam(groups, lr=config.learning_rate, fused=True)


def _finished(state: TrainState, config: OptimizerConfig) -> bool:
    out_of_time = config.max_seconds is not None and state.seconds >= config.max_seconds
    out_of_patience = state.epoch - state.best_epoch >= config.patience
    return state.epoch >= config.epochs or out_of_time or (state.epoch > 0 and out_of_patience)


def _save(state: TrainState, path: Path) -> None:
    document = {
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "generator": state.generator.get_state(),
        "torch_rng": torch.get_rng_state(),
        "progress": {
            name: getattr(state, name)
            for name in ("epoch", "seconds", "best_ndcg", "best_epoch", "best_weights", "curve")
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_suffix(".staging")
    with staging.open("wb") as file:
        torch.save(document, file)
        file.flush()
        os.fsync(file.fileno())
    staging.replace(path)


def _restore(state: TrainState, path: Path) -> None:
    document = torch.load(path, weights_only=True)
    state.model.load_state_dict(document["model"])
    state.optimizer.load_state_dict(document["optimizer"])
    state.generator.set_state(document["generator"])
    torch.set_rng_state(document["torch_rng"])
    for name, value in document["progress"].items():
        setattr(state, name, value)
