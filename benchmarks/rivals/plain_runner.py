"""Our own plain SASRec for benchmarks/rivals.py; _job.py says what it reads and writes."""

import json
from typing import Any

import torch
from _job import Clock, read_job, write_result

from model.backbone import Backbone
from model.build import build_model
from training.config import load_config
from training.evaluate import score_users
from training.loop import fit
from training.pipeline import Prepared, keep_freed_memory, prepare


def main() -> None:
    job, _ = read_job()
    torch.set_num_threads(job["threads"])
    keep_freed_memory()
    config = load_config(None, overrides(job))
    prepared = prepare(config)
    torch.manual_seed(job["seed"])
    model = build_model(config.model, torch.from_numpy(prepared.catalog.training_counts))
    clock = Clock()

    def on_step(done: int, total: int, loss: float) -> None:
        if done == total:
            clock.end()

    def on_epoch(row: dict[str, float]) -> None:
        clock.begin()

    clock.begin()
    state = fit(model, prepared.split, prepared.event, config.training, on_step=on_step, on_epoch=on_epoch)
    result = {
        **clock.result(),
        "targets": len(prepared.split.train.items),
        "best_epoch": None if job["patience"] is None else state.best_epoch,
        "lists": None if job["list_length"] is None else lists(model, prepared, job["list_length"]),
    }
    write_result(job, result)


def overrides(job: dict[str, Any]) -> list[str]:
    settings = {
        "data.path": json.dumps(job["data"]),
        "data.rejects": json.dumps(job["result"] + ".rejects.jsonl"),
        "event": "next_new_item",
        "model.filtering": "off",
        "model.width": job["width"],
        "model.ffn_width": job["width"],
        "model.num_layers": job["layers"],
        "model.num_heads": job["heads"],
        "model.max_len": job["max_len"],
        "model.dropout": job["dropout"],
        "model.attention_dropout": job["dropout"],
        "training.loss": "full",
        "training.batch_size": job["batch_size"],
        "training.learning_rate": job["learning_rate"],
        "training.epochs": job["epochs"],
        "training.patience": job["patience"] or job["epochs"],
        "training.seed": job["seed"],
    }
    return [f"{key}={value}" for key, value in settings.items()]


def lists(model: Backbone, prepared: Prepared, length: int) -> dict[str, list[str]]:
    """Each user's best items for the test event; those that the user has had are left out."""
    test, item_ids = prepared.split.test, prepared.catalog.item_ids.to_list()
    return {
        test.history.user_ids[user]: [item_ids[row] for row in best]
        for scored in score_users(model, test.history, prepared.event)
        for user, best in zip(scored.users.tolist(), scored.logit.topk(length).indices.tolist(), strict=True)
    }


if __name__ == "__main__":
    main()
