"""Short training runs whose figures do not depend on how many processes take them; `torchrun` starts this as well.

python -m torch.distributed.run --nproc-per-node 2 -m tests.training.two_processes OUT.json
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.training.histories import SMALL, fresh_model, leave_one_out, successor_walks
from training.config import OptimizerConfig
from training.distributed import World, joined
from training.evaluate import predict, score_users
from training.loop import fit

NUM_ITEMS = 25
# 70 users and 23 rows a batch: the last batch has one row, fewer than there are processes.
BATCHES = {"batch_size": 23, "epochs": 2, "learning_rate": 1e-2, "unknown_rate": 0.1}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "filtering, full loss": ({}, {"loss": "full"}),
    "plain, sampled loss": ({"filtering": False}, {"loss": "sampled", "num_negatives": 10}),
    "masked, sampled loss": ({"backbone": "bert4rec"}, {"loss": "sampled", "num_negatives": 10}),
    "time, full loss": ({"backbone": "hstu"}, {"loss": "full"}),
    "dropout": ({"dropout": 0.3, "attention_dropout": 0.1}, {"loss": "sampled", "micro_batches": 2}),
    "resumed": ({"dropout": 0.3}, {"micro_batches": 2}),
    "four micro-batches": ({"dropout": 0.3}, {"loss": "full", "micro_batches": 4}),
}
"""Changes to the model's and to the optimiser's settings."""


def figures(name: str, world: World) -> dict[str, Any]:
    """The learning curve and the test users' ranks and log-probabilities, without the times."""
    model_changes, changes = VARIANTS[name]
    split = leave_one_out(successor_walks(70, NUM_ITEMS, length=10))
    model = fresh_model(split, NUM_ITEMS, SMALL.model_copy(update=model_changes))
    config = OptimizerConfig.model_validate({**BATCHES, **changes})
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint.pt"
        if name == "resumed":
            first_epoch = config.model_copy(update={"epochs": 1})
            fit(fresh_model(split, NUM_ITEMS, model.config), split, "next_item", first_epoch, checkpoint, world=world)
        state = fit(model, split, "next_item", config, checkpoint, world=world)
    scored = score_users(model, split.test.history, "next_item", world)
    predictions = predict(scored, split.test, 1.0, 5, world)
    curve = [{key: value for key, value in row.items() if key != "seconds"} for row in state.curve]
    return {
        "curve": curve,
        "rank": predictions.rank.tolist(),
        "log_probability": predictions.log_probability.tolist(),
    }


def main() -> None:
    """All variants, written by the first process."""
    torch.set_num_threads(1)
    with joined("cpu") as world:
        found = {name: figures(name, world) for name in VARIANTS}
    if world.is_first:
        Path(sys.argv[1]).write_text(json.dumps({"processes": world.size, "figures": found}))


if __name__ == "__main__":
    main()
