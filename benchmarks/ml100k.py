"""Is the demo's model better than popularity, and does its confidence mean something? Three fixed seeds on ML-100K.

    python benchmarks/ml100k.py [--json] [--filtering on|off] [KEY=VALUE ...]

Trains by configs/ml-100k.yaml with seeds 1, 2 and 3, each chosen by validation and judged once on test (full ranking
of the catalogue, seen items removed), and writes the figures and the machine to benchmarks/results/.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _environment import environment

from training.datasets import fetch

SEEDS = (1, 2, 3)
CONFIG = Path("configs/ml-100k.yaml")
RESULTS = Path("benchmarks/results")
SHOWN = ("hr@10", "ndcg@10", "nll", "ece@10", "mean_confidence", "brier_skill@10")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the whole result as one JSON object")
    parser.add_argument("--filtering", choices=("on", "off"), default="on")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()

    data = fetch("ml-100k")
    overrides = [f"model.filtering={arguments.filtering}", *arguments.overrides]
    runs = [train(data.interactions, seed, overrides) for seed in SEEDS]
    result = {"environment": environment(), "overrides": overrides, "mean": means(runs), "runs": runs}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"ml100k_filtering_{arguments.filtering}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result) if arguments.json else as_text(result))


def train(interactions: Path, seed: int, overrides: list[str]) -> dict[str, Any]:
    """One run's record, without what varies by machine only."""
    with tempfile.TemporaryDirectory() as out:
        command = [
            Path(sys.executable).with_name("bft-train"), "fit",
            "--config", CONFIG, "--data", interactions, "--out", out, f"training.seed={seed}", *overrides,
        ]  # fmt: skip
        subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL)
        record = json.loads((Path(out) / "record.json").read_text())
    return {
        key: record[key] for key in ("config", "data", "event", "best_epoch", "seconds", "threads", "curve", "test")
    }


def means(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {name: statistics.mean(run["test"][name] for run in runs) for name in SHOWN} | {
        f"popularity {name}": statistics.mean(run["test"]["popularity"][name] for run in runs)
        for name in ("hr@10", "ndcg@10")
    }


def as_text(result: dict[str, Any]) -> str:
    lines = [f"{name:22} {value:.4f}" for name, value in result["mean"].items()]
    for run in result["runs"]:
        test = run["test"]
        low, high = test["intervals"]["hr@10 minus popularity"]
        null_low, null_high = test["ece_null_interval"]
        lines.append(
            f"seed {run['config']['training']['seed']}: HR@10 {test['hr@10']:.4f}, gain over popularity {low:+.4f} … "
            f"{high:+.4f}; ECE@10 {test['ece@10']:.4f} (null {null_low:.4f} … {null_high:.4f}, mean confidence "
            f"{test['mean_confidence']:.4f}); Brier skill {test['brier_skill@10']:+.4f}; best epoch "
            f"{run['best_epoch']}, {run['seconds']['training']:.0f} s"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
