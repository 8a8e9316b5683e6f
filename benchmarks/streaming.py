"""Does a log larger than memory train? Makes events, streams them through a command, and measures its memory.

    python benchmarks/streaming.py [fit | retrain] [--json] [--events N] [--users U] [--items N] [--steps S]
                                   [--folder DIR]

The log is a folder of Parquet files, a million rows each, in time order: every user's events lie all over it. A real
command in a process of its own reads it and publishes a model; the figure is the largest resident set that the process
ever had. `bft-train fit` sorts the log into shards, trains one epoch of S batches, validates, calibrates, tests and
exports. `bft-train retrain`, the nightly job, takes the log into its own, looks at it, trains a candidate, judges it,
learns everything and exports.
"""

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from _report import note, parser_of, report, row

ROWS_A_FILE = 1_000_000
KINDS = 50
LIMIT_BYTES = 4 * 2**30


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("job", nargs="?", choices=["fit", "retrain"], default="fit")
    parser.add_argument("--events", type=int, default=50_000_000)
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=200, help="batches of 128 windows of up to 50 events")
    parser.add_argument("--folder", help="where log and run lie; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        log, out = Path(folder) / "log", Path(folder) / "out"
        note(f"making {arguments.events:,} events")
        make_log(log, arguments.events, arguments.users, arguments.items)
        source_bytes = sum(file.stat().st_size for file in log.iterdir())
        found = fit(log, out, arguments.steps) if arguments.job == "fit" else retrain(log, out, arguments.steps)
    # The largest of all processes waited for: the command, next to which git is nothing.
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    report(
        arguments,
        [
            row("peak resident memory of the run, GiB", round(peak / 2**30, 2), "≤ 4", peak <= LIMIT_BYTES),
            row("Parquet, MiB", round(source_bytes / 2**20)),
            *found,
        ],
    )


def make_log(folder: Path, num_events: int, num_users: int, num_items: int, seed: int = 0) -> None:
    """Events whose users are drawn alike, and whose items by Zipf's law among those of the user's kind."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    share = 1 / np.arange(1, num_items // KINDS + 1)
    share /= share.sum()
    for number, begin in enumerate(range(0, num_events, ROWS_A_FILE)):
        size = min(ROWS_A_FILE, num_events - begin)
        users = generator.integers(num_users, size=size)
        # A user likes one of fifty kinds of item, so that there is something to learn.
        items = generator.choice(len(share), size, p=share) * KINDS + users % KINDS
        frame = pl.DataFrame({"user": users, "item": items, "timestamp": np.arange(begin, begin + size) + 1.7e9})
        frame.select(
            user_id=pl.format("user-{}", "user"), item_id=pl.format("item-{}", "item"), timestamp="timestamp"
        ).write_parquet(folder / f"part-{number:05}.parquet")


def fit(log: Path, out: Path, steps: int) -> list[dict[str, Any]]:
    """`bft-train fit`, and what is reported of it."""
    settings = ["data.streaming=on", "training.loss=sampled", "training.epochs=1", f"training.epoch_steps={steps}"]
    stages = run("fit", "--data", str(log), "--out", str(out), *settings)
    record = json.loads((out / "record.json").read_text())
    data, test = record["data"], record["test"]
    return [
        *(row(name, data[key]) for name, key in {"events": "rows_kept", "users": "users", "items": "items"}.items()),
        row("reading, sorting into shards and splitting, s", round(stages[1]["time"] - stages[0]["time"])),
        row("training and validation, s", round(record["seconds"]["training"])),
        row("users tested", test["users"]),
        row("test HR@10", round(test["hr@10"], 4)),
        row("test HR@10 of popularity", round(test["popularity"]["hr@10"], 4)),
    ]


def retrain(log: Path, out: Path, steps: int) -> list[dict[str, Any]]:
    """`bft-train retrain`, a first night with all the events, and what is reported of it."""
    settings = ["training.loss=sampled", "training.epochs=1", f"training.epoch_steps={steps}"]
    # The model is there to be trained, not to be good.
    opened = ["retrain.gate.margin=0.99", "retrain.gate.calibration_tolerance=9.0"]
    run("retrain", "--data", str(log), "--work", str(out), "--registry", str(out / "registry"), *settings, *opened)
    (record,) = (json.loads(path.read_text()) for path in (out / "reports").glob("*.json"))
    return [
        row("how it ended", record["outcome"], "published", record["outcome"] == "published"),
        *(row(name, record["window"][name]) for name in ("events", "users", "items")),
        *(row(f"{stage}, s", round(seconds)) for stage, seconds in record["seconds"].items()),
        row("targets judged", record["judged"]["targets"]),
        row("HR@10 of the candidate", round(record["judged"]["candidate"]["hr@10"], 4)),
        row("HR@10 of popularity", round(record["judged"]["popularity"]["hr@10"], 4)),
    ]


def run(*arguments: str) -> list[dict[str, Any]]:
    """Run `bft-train` to its end; returns what it reported."""
    lines = []
    command = [sys.executable, "-m", "training.cli", arguments[0], "--json", *arguments[1:]]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as running:
        for line in running.stderr or ():
            note(line.rstrip())
            lines.append(line)
    if running.returncode != 0:
        raise SystemExit(f"the command ended with {running.returncode}")
    return [json.loads(line) for line in lines if line.startswith("{")]


if __name__ == "__main__":
    main()
