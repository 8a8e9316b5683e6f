"""Makes loss_curve.json: the loss of twenty optimiser steps at a fixed seed.

Run it from the repository's root when a change is meant to change the computation, and say in the commit what did:

    python -m tests.training.golden.make_loss_curve
"""

import json
from pathlib import Path

from tests.training.histories import SMALL, fresh_model, leave_one_out, successor_walks
from training.config import OptimizerConfig
from training.loop import fit

PATH = Path(__file__).with_name("loss_curve.json")
VARIANTS = {
    "filtering, full loss": (True, "full"),
    "plain, full loss": (False, "full"),
    "filtering, sampled loss": (True, "sampled"),
}
"""Whether the layers filter, and the loss."""


def losses_of_twenty_steps(filtering: bool, loss: str) -> list[float]:
    """Mean loss of the epoch after each of its twenty steps.

    Without dropout: its random numbers are drawn differently from one processor family to the next.
    """
    split = leave_one_out(successor_walks(num_users=160, num_items=25, length=10))
    model = fresh_model(split, 25, SMALL.model_copy(update={"filtering": filtering}))
    config = OptimizerConfig.model_validate(
        {"epochs": 1, "batch_size": 8, "learning_rate": 3e-3, "loss": loss, "num_negatives": 10}
    )
    losses: list[float] = []
    fit(model, split, "next_item", config, on_step=lambda done, total, mean: losses.append(mean))
    return losses


if __name__ == "__main__":
    curves = {name: losses_of_twenty_steps(*variant) for name, variant in VARIANTS.items()}
    PATH.write_text(json.dumps(curves, indent=1) + "\n")
