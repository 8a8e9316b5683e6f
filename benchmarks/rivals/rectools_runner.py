"""RecTools' SASRec for benchmarks/rivals.py, run by the rivals' own Python; _job.py says what it reads and writes."""

import copy
import warnings
from typing import Any

import numpy as np
import pandas as pd
import torch
from _job import Clock, read_job, write_result
from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import EarlyStopping
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel
from rectools.models.nn.transformers.utils import leave_one_out_mask

VALIDATION_USERS = 2048
"""Epochs are chosen by the loss on so many users; the library would score 50 positions for each of them."""


class TrainingClock(Callback):
    """Times each epoch's training."""

    def __init__(self) -> None:
        self.clock = Clock()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.begin()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_last_batch:  # before the validation, which is a part of Lightning's epoch
            self.clock.end()


class Best(Callback):
    """Keeps the weights of the epoch with the lowest validation loss."""

    def __init__(self) -> None:
        self.loss, self.epoch = float("inf"), None
        self.weights: dict[str, torch.Tensor] = {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loss = float(trainer.callback_metrics["val_loss"])
        if loss < self.loss:
            self.loss, self.epoch = loss, trainer.current_epoch + 1
            self.weights = copy.deepcopy(pl_module.state_dict())


def main() -> None:
    job, split = read_job()
    torch.set_num_threads(job["threads"])
    seed_everything(job["seed"], workers=True)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    validated = job["patience"] is not None
    users = chosen_users(split, job["seed"]) if validated else []
    model = model_of(job, users)
    model.fit(dataset_of(split, validation_of=users))
    # The library trains with a copy of the trainer that it was given.
    timed, best = (
        next(callback for callback in model.fit_trainer.callbacks if isinstance(callback, kind))
        for kind in (TrainingClock, Best)
    )
    if validated:
        model.lightning_model.load_state_dict(best.weights)
    result = {
        **timed.clock.result(),
        "targets": sum(min(len(items), job["max_len"] + 1) - 1 for items in split["train"]),
        "best_epoch": best.epoch,
        "lists": None if job["list_length"] is None else lists(model, split, job["list_length"]),
    }
    write_result(job, result)


def model_of(job: dict[str, Any], validation_users: list[str]) -> SASRecModel:
    """The library's SASRec as it comes: its feed-forward part is as wide as the model."""
    validated = bool(validation_users)

    def trainer() -> Trainer:
        stopping = [EarlyStopping("val_loss", patience=job["patience"])] if validated else []
        return Trainer(
            max_epochs=job["epochs"],
            accelerator="cpu",
            devices=1,
            callbacks=[TrainingClock(), Best(), *stopping],
            limit_val_batches=1.0 if validated else 0,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            logger=False,
        )

    def validation_mask(interactions: pd.DataFrame) -> np.ndarray:
        return leave_one_out_mask(interactions, val_users=validation_users)

    return SASRecModel(
        n_factors=job["width"],
        n_blocks=job["layers"],
        n_heads=job["heads"],
        session_max_len=job["max_len"],
        dropout_rate=job["dropout"],
        batch_size=job["batch_size"],
        lr=job["learning_rate"],
        loss="softmax",
        get_trainer_func=trainer,
        get_val_mask_func=validation_mask if validated else None,
    )


def chosen_users(split: dict[str, list[Any]], seed: int) -> list[str]:
    users = np.random.default_rng(seed).permutation(split["users"])
    return users[:VALIDATION_USERS].tolist()


def dataset_of(split: dict[str, list[Any]], validation_of: list[str] | None) -> Dataset:
    """The training events, and the validation event of some users; None: of all."""
    some = None if validation_of is None else set(validation_of)
    sequences = [
        [*train, validation] if some is None or user in some else train
        for user, train, validation in zip(split["users"], split["train"], split["validation"], strict=True)
    ]
    lengths = [len(items) for items in sequences]
    frame = pd.DataFrame(
        {
            Columns.User: np.repeat(split["users"], lengths),
            Columns.Item: [item for items in sequences for item in items],
            Columns.Weight: 1.0,
            # The order, as times: the library sorts by them.
            Columns.Datetime: pd.to_datetime(np.concatenate([np.arange(length) for length in lengths]), unit="s"),
        }
    )
    return Dataset.construct(frame)


def lists(model: SASRecModel, split: dict[str, list[Any]], length: int) -> dict[str, list[str]]:
    """Each user's best items for the test event; those that the user has had are left out."""
    frame = model.recommend(split["users"], dataset_of(split, validation_of=None), k=length, filter_viewed=True)
    return frame.sort_values([Columns.User, Columns.Rank]).groupby(Columns.User)[Columns.Item].agg(list).to_dict()


if __name__ == "__main__":
    main()
