"""The training loop: epochs over bucketed windows, early stopping on validation NDCG@10, exact resume."""

import copy
import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from model.backbone import Backbone, CausalBackbone
from model.bundle import Event
from model.filtering import Gaussian
from training import losses, metrics
from training.batches import (
    Batch,
    TrainingWindows,
    Windows,
    collate,
    collate_masked,
    with_unknowns,
)
from training.config import ConfigError, OptimizerConfig
from training.distributed import ALONE, World
from training.evaluate import ranks, score_users
from training.splits import Split, TrainingHistories


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
    world: World = ALONE,
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
        world: the processes that share each batch and the validation users; all end with the same state.

    Returns:
        the final state, with the learning curve.

    Raises:
        ConfigError: the loss or its gradient is no longer finite, or the batches cannot be shared evenly.
    """
    training = TrainingWindows(split.train, model.config.max_len, config.prefixes)
    state = _begin(model, config, checkpoint, world)
    batch_loss = world.replicated(BatchLoss(model, config))
    while not _finished(state, config):
        begun = time.monotonic()
        loss = train_epoch(state, batch_loss, training, config, on_step, world)
        ranks_U = ranks(score_users(model, split.validation.history, event, world), split.validation, world)
        ndcg = float(metrics.ndcg(ranks_U, 10).mean())
        if ndcg > state.best_ndcg:
            state.best_ndcg, state.best_epoch = ndcg, state.epoch + 1
            state.best_weights = copy.deepcopy(model.state_dict())
        judged = {"val_ndcg@10": ndcg, "val_hr@10": float((ranks_U <= 10).mean())}
        _end_epoch(state, {"loss": loss, **judged}, begun, checkpoint, world)
        on_epoch(state.curve[-1])
    model.load_state_dict(state.best_weights)
    return state


def refit(
    model: Backbone,
    histories: TrainingHistories,
    epochs: int,
    config: OptimizerConfig,
    checkpoint: Path | None = None,
    on_step: Callable[[int, int, float], None] = lambda done, total, loss: None,
    on_epoch: Callable[[dict[str, float]], None] = lambda row: None,
    world: World = ALONE,
) -> TrainState:
    """Train as `fit` does, for a number of epochs that is known: nobody validates, so that all events can be learned.

    Args:
        model: with the weights to begin from; changed in place, and left with those of the last epoch.
        histories: what to learn.
        epochs: to train, at most `config.epochs`, over which the learning rate falls.
        config, checkpoint, on_step, on_epoch, world: see `fit`; rows of the curve have no validation figures.

    Raises:
        ConfigError: as `fit`.
    """
    training = TrainingWindows(histories, model.config.max_len, config.prefixes)
    state = _begin(model, config, checkpoint, world)
    batch_loss = world.replicated(BatchLoss(model, config))
    while state.epoch < epochs:
        begun = time.monotonic()
        loss = train_epoch(state, batch_loss, training, config, on_step, world)
        _end_epoch(state, {"loss": loss}, begun, checkpoint, world)
        on_epoch(state.curve[-1])
    return state


def going_on(config: OptimizerConfig, epochs: int) -> OptimizerConfig:
    """How a model that is fitted already is trained for some epochs more: the rate falls from half of what it was."""
    return config.model_copy(
        update={"epochs": epochs, "schedule": "linear", "learning_rate": config.learning_rate / 2, "patience": epochs}
    )


def _begin(model: Backbone, config: OptimizerConfig, checkpoint: Path | None, world: World) -> TrainState:
    """The state before the first epoch, or where the checkpoint left off."""
    model.to(world.device)
    state = TrainState(model, _optimizer(model, config), torch.Generator().manual_seed(config.seed))
    if checkpoint is not None:
        _restore(state, world.from_first(lambda: _read(checkpoint)))
    return state


def _end_epoch(state: TrainState, row: dict[str, float], begun: float, checkpoint: Path | None, world: World) -> None:
    """Count the epoch, put its row on the curve, keep the state."""
    state.epoch += 1
    # One clock for all, or they would not agree on when to stop.
    state.seconds += max(world.gathered([time.monotonic() - begun]))
    state.curve.append({"epoch": state.epoch, **row, "seconds": round(state.seconds, 2)})
    if checkpoint is not None and world.is_first:
        _save(state, checkpoint)


def train_epoch(
    state: TrainState,
    batch_loss: nn.Module,
    training: TrainingWindows,
    config: OptimizerConfig,
    on_step: Callable[[int, int, float], None],
    world: World,
) -> float:
    """One pass over all windows, or `epoch_steps` batches of one; returns the mean loss of the steps.

    Args:
        batch_loss: the model's `BatchLoss`, replicated.

    Raises:
        ConfigError: the loss or its gradient is no longer finite, or the batches cannot be shared evenly.
    """
    state.model.train()
    total, steps = 0.0, training.num_batches(config.batch_size)
    if config.epoch_steps is not None:
        steps = min(steps, config.epoch_steps)
    for step, (windows, rows) in enumerate(islice(training.epoch(config.batch_size, state.generator), steps), 1):
        batch = training_batch(state.model, windows, rows, config, state.generator)
        state.optimizer.zero_grad(set_to_none=True)
        loss = accumulate_gradients(batch_loss, batch, config, state.generator, (state.epoch, step), world)
        norm = nn.utils.clip_grad_norm_(state.model.parameters(), config.clip_norm).item()
        # A NaN gradient under a finite loss would turn every weight into NaN.
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise ConfigError(
                f"at step {step} of epoch {state.epoch + 1} the loss is {loss}, its gradient {norm}:"
                " training diverged; lower training.learning_rate or training.precision_rate_multiple"
            )
        _set_learning_rates(state.optimizer, config, state.epoch + (step - 1) / steps)
        state.optimizer.step()
        total += loss
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


def accumulate_gradients(
    batch_loss: nn.Module,
    batch: Batch,
    config: OptimizerConfig,
    generator: torch.Generator,
    moment: tuple[int, int],
    world: World,
) -> float:
    """Add a batch's gradients to the parameters', one micro-batch after the other; returns its mean loss.

    What is drawn depends on the micro-batch and not on the process that works it: all have the same negatives, and
    each has dropout masks of its own.

    Args:
        batch_loss: a `BatchLoss`, replicated.
        moment: (epoch, step), of which dropout's random numbers are a function.

    Raises:
        ConfigError: the micro-batches cannot be shared evenly.
    """
    parts = micro_batches(config, world)
    before, loss = generator.get_state(), 0.0
    *earlier, last = world.share(range(parts))
    for number in (*earlier, last):
        # Few rows leave some numbers without any: they take the first part along, at no weight, and draw like the rest.
        has_rows = number < len(batch.items)
        part = batch.part(number if has_rows else 0, parts).to(world.device)
        weight = len(part.targets) / len(batch.targets) if has_rows else 0.0
        generator.set_state(before)
        torch.manual_seed(_dropout_seed(config.seed, *moment, number))
        with nullcontext() if number == last else world.gradients_kept(batch_loss):
            part_loss = batch_loss(part, generator) * weight
            # The processes' gradients are averaged, where a sum is wanted.
            (part_loss * world.size).backward()
        loss += part_loss.item()
    return world.sum(loss)


def micro_batches(config: OptimizerConfig, world: World) -> int:
    """Into how many parts a batch is cut.

    Raises:
        ConfigError: the processes cannot have equally many.
    """
    parts = config.micro_batches or world.size
    if parts % world.size:
        raise ConfigError(
            f"training.micro_batches={parts} cannot be shared evenly by {world.size} processes; set a multiple of"
            f" {world.size}"
        )
    return parts


class BatchLoss(nn.Module):
    """The mean loss of a batch, as the module whose gradients processes share; `training.compile` compiles its encoder.

    Only the positions that predict reach the output product.
    """

    def __init__(self, model: Backbone, config: OptimizerConfig) -> None:
        super().__init__()
        self.model, self.config = model, config
        # A row that predicts at its end needs no other position's last state.
        self.ends_predict = config.prefixes and model.causal
        encode = cast(CausalBackbone, model).last_states if self.ends_predict else model.encode
        self.encode = torch.compile(encode, dynamic=True) if config.compile else encode

    def states(self, batch: Batch) -> Gaussian:
        """The states (R,D) of the positions that predict."""
        if self.ends_predict:
            # Rows whose target is unknown predict nothing.
            rows = batch.positions // batch.items.shape[1]
            return self.encode(batch.items[rows], batch.weights[rows], batch.timestamps[rows])
        encoded = self.encode(batch.items, batch.weights, batch.timestamps)
        return Gaussian(*(part.flatten(0, 1)[batch.positions] for part in encoded))

    def forward(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """The loss, a scalar; `generator` draws the negatives."""
        device = batch.items.device.type
        # On a CPU the encoder's products are too small and too various to gain: a kernel is compiled for every shape.
        half = self.config.autocast and has_bfloat16_unit(device)
        with torch.autocast(device, torch.bfloat16, enabled=half and device != "cpu"):
            state = self.states(batch)
        with torch.autocast(device, torch.bfloat16, enabled=half):
            if self.config.loss == "full":
                return losses.full_cross_entropy(self.model, state, batch.targets)
            return losses.sampled_softmax(self.model, state, batch.targets, self.config.num_negatives, generator)


def has_bfloat16_unit(device: str) -> bool:
    """Whether a device multiplies bfloat16 matrices in hardware. A processor that does not takes five times as long."""
    if device != "cpu":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    abilities = torch.cpu.get_capabilities()
    return any(abilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def _dropout_seed(seed: int, epoch: int, step: int, micro_batch: int) -> int:
    return int(np.random.SeedSequence([seed % 2**64, epoch, step, micro_batch]).generate_state(1, np.uint64)[0])


def _optimizer(model: Backbone, config: OptimizerConfig) -> torch.optim.Optimizer:
    precision = [p for name, p in model.named_parameters() if name.startswith("initial_precision.")]
    others = [p for name, p in model.named_parameters() if not name.startswith("initial_precision.")]
    groups: list[dict[str, Any]] = [{"params": others, "weight_decay": config.weight_decay, "rate_multiple": 1.0}]
    if precision:
        groups.append({"params": precision, "rate_multiple": config.precision_rate_multiple})
    return torch.optim.Adam(groups, fused=True)


def _set_learning_rates(optimizer: torch.optim.Optimizer, config: OptimizerConfig, epochs_done: float) -> None:
    """Each group's rate, a function of the moment alone: a resumed run has the rates of an unbroken one."""
    left = 1 - epochs_done / config.epochs if config.schedule == "linear" else 1.0
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * group["rate_multiple"] * left


def _finished(state: TrainState, config: OptimizerConfig) -> bool:
    out_of_time = config.max_seconds is not None and state.seconds >= config.max_seconds
    out_of_patience = state.epoch - state.best_epoch >= config.patience
    return state.epoch >= config.epochs or out_of_time or (state.epoch > 0 and out_of_patience)


def _save(state: TrainState, path: Path) -> None:
    document = {
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "generator": state.generator.get_state(),
        "progress": {
            name: getattr(state, name)
            for name in ("epoch", "seconds", "best_ndcg", "best_epoch", "best_weights", "curve")
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_suffix(".staging")
    with staging.open("wb") as file:
        try:
            torch.save(document, file)
        except RuntimeError as error:
            # torch has an error of its own for a full disk.
            raise OSError(f"{path} cannot be written: {error}") from error
        file.flush()
        os.fsync(file.fileno())
    staging.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    return torch.load(path, weights_only=True, map_location="cpu") if path.exists() else None


def _restore(state: TrainState, document: dict[str, Any] | None) -> None:
    if document is None:
        return
    state.model.load_state_dict(document["model"])
    state.optimizer.load_state_dict(document["optimizer"])
    state.generator.set_state(document["generator"])
    for name, value in document["progress"].items():
        setattr(state, name, value)
