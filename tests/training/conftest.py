"""One small log and the one bundle trained from it by the real command, shared by the tests of training/."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# Models this small are slowed down many times by threads that wait for one another, and a fixed number of
# threads keeps sums in one order.
torch.set_num_threads(1)

CONFIG = """\
name: tiny
data:
  columns: {user_id: who, item_id: what, timestamp: when}
  weight_map: {column: stars, values: {"1": 0.0, "3": 0.5, "5": 1.0}}
model: {width: 16, num_layers: 1, ffn_width: 32, max_len: 8, dropout: 0.1}
training: {epochs: 6, batch_size: 64, learning_rate: 2e-2}
"""
BAD_ROWS = 2


@dataclass(frozen=True)
class TrainedRun:
    """A finished `bft-train fit --json`: its inputs, its folder, and what it printed."""

    log: Path
    titles: Path
    config: Path
    out: Path
    figures: dict[str, Any]
    stderr: str

    @property
    def registry(self) -> Path:
        return self.out / "registry"


def write_log(path: Path, num_users: int = 200, num_items: int = 40, seed: int = 0) -> None:
    """Users who walk along a cycle of items, now and then skipping one, so that nobody repeats an item.

    Every user's first event has one star, weight 0; two rows are bad.
    """
    generator = np.random.default_rng(seed)
    cycle = [f"item {row:02}" for row in generator.permutation(num_items)]
    rows = ["who,what,when,stars"]
    for user in range(num_users):
        place = int(generator.integers(num_items))
        for step in range(int(generator.integers(4, 16))):
            stars = 1 if step == 0 else generator.choice([3, 5])
            rows.append(f"user {user},{cycle[place % num_items]},{1000 + step},{stars}")
            place += 1 + int(generator.random() < 0.2)
    rows[5:5] = ["user 0,item 00,tomorrow,5", "user 0,item 00,1000,4"]
    path.write_text("\n".join(rows) + "\n")


def bft_train(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "training.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    folder = tmp_path_factory.mktemp("trained")
    log, titles, config, out = (folder / name for name in ("log.csv", "titles.csv", "run.yaml", "out"))
    write_log(log)
    titles.write_text("item_id,title\nitem 07,Seventh Heaven\nelsewhere,Unknown\n")
    config.write_text(CONFIG)

    done = bft_train("fit", "--config", config, "--data", log, "--titles", titles, "--out", out, "--json")

    assert done.returncode == 0, done.stderr
    return TrainedRun(log, titles, config, out, json.loads(done.stdout), done.stderr)
