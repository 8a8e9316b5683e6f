"""What does the one-pass full cross-entropy save against the same formula under autograd, chunk by chunk?

    python benchmarks/full_loss.py [--json] [--items N ...] [--rows R]

Both take the same random readouts and catalogue, in turn, on one thread; the figure is the median ratio of pairs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _environment import environment
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from model.backbone import Backbone
from model.build import build_model
from model.config import FIRST_ITEM, ModelConfig
from model.filtering import Gaussian
from training import losses
from training.pipeline import keep_freed_memory

PAIRS = 7
AUTOGRAD_ROWS = 64
"""Rows at a time under autograd: the (rows,N) matrices stay in cache."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--items", type=int, nargs="+", default=[1_682, 12_000], help="catalogue sizes")
    parser.add_argument("--rows", type=int, default=3_500, help="states scored in a step")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()
    results = [compare(num_items, arguments.rows) for num_items in arguments.items]
    if arguments.json:
        print(json.dumps({"environment": environment(), "rows": arguments.rows, "results": results}))
    else:
        for row in results:
            times = f"one pass {row['one_pass_ms']:.0f} ms, autograd {row['autograd_ms']:.0f} ms"
            print(f"N = {row['num_items']}: {times}, ratio {row['ratio']:.2f}")


def compare(num_items: int, num_rows: int) -> dict[str, Any]:
    model = build_model(ModelConfig(), torch.randint(0, 50, (num_items,)))
    state = Gaussian(torch.randn(num_rows, 64, requires_grad=True), torch.rand(num_rows, 64).add(0.5).requires_grad_())
    targets = torch.randint(FIRST_ITEM, FIRST_ITEM + num_items, (num_rows,))
    pairs = [
        (
            seconds(lambda: losses.full_cross_entropy(model, state, targets)),
            seconds(lambda: autograd(model, state, targets)),
        )
        for _ in range(PAIRS + 1)
    ][1:]
    one_pass, by_autograd = zip(*pairs, strict=True)
    return {
        "num_items": num_items,
        "one_pass_ms": 1e3 * statistics.median(one_pass),
        "autograd_ms": 1e3 * statistics.median(by_autograd),
        "ratio": statistics.median(ours / theirs for ours, theirs in pairs),
    }


def autograd(model: Backbone, state: Gaussian, targets: Tensor) -> Tensor:
    """The same loss from `Backbone.score`, each chunk recomputed in backward."""
    chunks = zip(*(part.split(AUTOGRAD_ROWS) for part in (*state, targets - FIRST_ITEM)), strict=True)
    return torch.stack([checkpoint(_chunk, model, *chunk, use_reentrant=False) for chunk in chunks]).sum() / len(
        targets
    )


def _chunk(model: Backbone, mean: Tensor, precision: Tensor, rows: Tensor) -> Tensor:
    return F.cross_entropy(model.score(Gaussian(mean, precision)).logit, rows, reduction="sum")


def seconds(loss: Callable[[], Tensor]) -> float:
    begun = time.perf_counter()
    loss().backward()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
