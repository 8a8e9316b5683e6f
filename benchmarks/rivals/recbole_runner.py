"""RecBole's SASRec for benchmarks/rivals.py, run by the rivals' own Python; _job.py says what it reads and writes.

RecBole makes a training row of every prefix of a history, 50 positions each, whose last one alone predicts. It splits
the log itself, leave-one-out; that its test targets are the job's is checked.
"""

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from _job import Clock, read_job, write_result
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.model.sequential_recommender import SASRec
from recbole.trainer import Trainer
from recbole.utils import init_seed

DATASET = "log"

# Importing RecBole's sequential models switches this on (sine.py does), and every gradient is then searched for NaN:
# about a third of SASRec's time. Off, as torch has it.
torch.autograd.set_detect_anomaly(False)


class TimedTrainer(Trainer):
    """RecBole's trainer, with a clock on each epoch's training and the best weights kept in memory."""

    def __init__(self, config: Config, model: SASRec) -> None:
        super().__init__(config, model)
        self.clock = Clock()
        self.best_epoch: int | None = None
        self.best_weights: dict[str, torch.Tensor] = {}

    def _train_epoch(self, *args: Any, **kwargs: Any) -> Any:
        self.clock.begin()
        loss = super()._train_epoch(*args, **kwargs)
        self.clock.end()
        return loss

    def _save_checkpoint(self, epoch: int, verbose: bool = True, **kwargs: Any) -> None:
        self.best_epoch, self.best_weights = epoch + 1, copy.deepcopy(self.model.state_dict())


def main() -> None:
    job, split = read_job()
    torch.set_num_threads(job["threads"])
    validated = job["patience"] is not None
    with tempfile.TemporaryDirectory() as folder:
        write_log(split, Path(folder) / DATASET)
        config = config_of(job, folder)
        init_seed(job["seed"], reproducibility=True)
        dataset = create_dataset(config)
        train_data, validation_data, test_data = data_preparation(config, dataset)
        trainer = TimedTrainer(config, SASRec(config, train_data.dataset))
        trainer.fit(train_data, validation_data if validated else None, verbose=False, saved=validated)
    if validated:
        trainer.model.load_state_dict(trainer.best_weights)
    result = {
        **trainer.clock.result(),
        "targets": len(train_data.dataset),
        "best_epoch": trainer.best_epoch,
        "lists": None if job["list_length"] is None else lists(trainer, test_data, split, job["list_length"]),
    }
    write_result(job, result)


def write_log(split: dict[str, list[Any]], folder: Path) -> None:
    """All events as RecBole reads them, the order as times."""
    folder.mkdir()
    with (folder / f"{DATASET}.inter").open("w") as file:
        file.write("user_id:token\titem_id:token\ttimestamp:float\n")
        for user, *parts in zip(split["users"], split["train"], split["validation"], split["test"], strict=True):
            train, validation, test = parts
            for place, item in enumerate([*train, validation, test]):
                file.write(f"{user}\t{item}\t{place}\n")


def config_of(job: dict[str, Any], folder: str) -> Config:
    settings = {
        "data_path": folder,
        "checkpoint_dir": folder,
        "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
        "USER_ID_FIELD": "user_id",
        "ITEM_ID_FIELD": "item_id",
        "TIME_FIELD": "timestamp",
        "MAX_ITEM_LIST_LENGTH": job["max_len"],
        "hidden_size": job["width"],
        "inner_size": job["width"],
        "n_layers": job["layers"],
        "n_heads": job["heads"],
        "hidden_dropout_prob": job["dropout"],
        "attn_dropout_prob": job["dropout"],
        "loss_type": "CE",
        "train_neg_sample_args": None,
        "train_batch_size": job["batch_size"],
        "learning_rate": job["learning_rate"],
        "epochs": job["epochs"],
        "stopping_step": (job["patience"] or 1) - 1,  # it stops at one epoch more
        "eval_args": {"split": {"LS": "valid_and_test"}, "order": "TO", "mode": "full", "group_by": "user"},
        "metrics": ["NDCG"],
        "topk": [10],
        "valid_metric": "NDCG@10",
        "use_gpu": False,
        "worker": 0,
        "seed": job["seed"],
        "show_progress": False,
        "state": "ERROR",
    }
    return Config(model="SASRec", dataset=DATASET, config_dict=settings)


@torch.no_grad()
def lists(trainer: TimedTrainer, test_data: Any, split: dict[str, list[Any]], length: int) -> dict[str, list[str]]:
    """Each user's best items for the test event; those that the user has had are left out.

    Raises:
        ValueError: RecBole's test targets are not the job's.
    """
    dataset = test_data.dataset
    rows = {user: row for row, user in enumerate(split["users"])}
    found: dict[str, list[str]] = {}
    trainer.model.eval()
    for interaction, _, _, _ in test_data:
        scores = trainer.model.full_sort_predict(interaction)
        scores[:, 0] = -torch.inf  # padding
        users = dataset.id2token("user_id", interaction["user_id"].numpy())
        targets = dataset.id2token("item_id", interaction["item_id"].numpy())
        for row, (user, target) in enumerate(zip(users, targets, strict=True)):
            number = rows[user]
            if target != split["test"][number]:
                raise ValueError(f"RecBole tests user {user} by {target}, the split by {split['test'][number]}")
            seen = [*split["train"][number], split["validation"][number]]
            scores[row, [dataset.field2token_id["item_id"][item] for item in seen]] = -torch.inf
        best = dataset.id2token("item_id", scores.topk(length).indices.numpy())
        found.update(zip(users.tolist(), best.tolist(), strict=True))
    return found


if __name__ == "__main__":
    main()
