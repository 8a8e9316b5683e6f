"""Does a log larger than memory train? Makes events, streams them through `bft-train fit`, and measures its memory.

    python benchmarks/streaming.py [--json] [--events N] [--users U] [--items N] [--steps S] [--folder DIR]

The log is a folder of Parquet files, a million rows each, in time order: every user's events lie all over it. A real
command in a process of its own reads it, sorts it into shards, trains one epoch of S batches, validates, calibrates,
tests, exports and publishes; the figure is the largest resident set that the process ever had.
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
        stages = train(log, out, arguments.steps)
        record = json.loads((out / "record.json").read_text())
        source_bytes = sum(file.stat().st_size for file in log.iterdir())
    report(arguments, figures(record, stages, source_bytes))


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


def train(log: Path, out: Path, steps: int) -> list[dict[str, Any]]:
    """Run the command to its end; returns what it reported."""
    command = [sys.executable, "-m", "training.cli", "fit", "--data", str(log), "--out", str(out), "--json"]
    settings = ["data.streaming=on", "training.loss=sampled", "training.epochs=1", f"training.epoch_steps={steps}"]
    lines = []
    with subprocess.Popen([*command, *settings], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as run:
        for line in run.stderr or ():
            note(line.rstrip())
            lines.append(line)
    if run.returncode != 0:
        raise SystemExit("the command failed")
    return [json.loads(line) for line in lines if line.startswith("{")]


def figures(record: dict[str, Any], stages: list[dict[str, Any]], source_bytes: int) -> list[dict[str, Any]]:
    """What is reported."""
    # The largest of all processes waited for: the command, next to which git is nothing.
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    data = record["data"]
    begun, prepared = stages[0]["time"], stages[1]["time"]
    return [
        row("peak resident memory of the run, GiB", round(peak / 2**30, 2), "≤ 4", peak <= LIMIT_BYTES),
        row("events", data["rows_kept"]),
        row("users", data["users"]),
        row("items", data["items"]),
        row("Parquet, MiB", round(source_bytes / 2**20)),
        row("reading, sorting into shards and splitting, s", round(prepared - begun)),
        row("training and validation, s", round(record["seconds"]["training"])),
        row("users tested", record["test"]["users"]),
        row("test HR@10", round(record["test"]["hr@10"], 4)),
        row("test HR@10 of popularity", round(record["test"]["popularity"]["hr@10"], 4)),
    ]


if __name__ == "__main__":
    main()
