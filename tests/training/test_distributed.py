"""Several processes: the figures of one, one voice, one bundle."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.conftest import TrainedRun
from tests.training.histories import SMALL, fresh_model, leave_one_out, successor_walks
from tests.training.two_processes import NUM_ITEMS, VARIANTS, figures
from training import evaluate
from training.config import ConfigError, OptimizerConfig
from training.distributed import ALONE, World, joined
from training.loop import fit, micro_batches


def torchrun(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A module of this project in two processes."""
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.fixture(scope="module")
def by_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The figures of `VARIANTS` in two processes."""
    out = tmp_path_factory.mktemp("by_two") / "figures.json"
    done = torchrun("tests.training.two_processes", out)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["processes"] == 2
    return found["figures"]


@pytest.mark.parametrize("name", VARIANTS)
def test_two_processes_give_the_figures_of_one(name: str, by_two: dict[str, dict[str, Any]]) -> None:
    one, two = figures(name, ALONE), by_two[name]

    assert len(one["curve"]) == 2
    for alone, together in zip(one["curve"], two["curve"], strict=True):
        assert together == pytest.approx(alone, rel=1e-6)
    assert two["rank"] == pytest.approx(one["rank"], rel=1e-6)
    assert two["log_probability"] == pytest.approx(one["log_probability"], rel=1e-5)


def test_two_micro_batches_are_the_same_to_the_bit_in_one_process_and_in_two(
    by_two: dict[str, dict[str, Any]],
) -> None:
    assert by_two["dropout"] == figures("dropout", ALONE)


def test_micro_batches_change_the_gradient_by_rounding_alone() -> None:
    split = leave_one_out(successor_walks(40, NUM_ITEMS, length=10))

    def losses(parts: int) -> list[float]:
        config = OptimizerConfig(epochs=2, batch_size=16, learning_rate=1e-2, micro_batches=parts)
        state = fit(fresh_model(split, NUM_ITEMS, SMALL), split, "next_item", config)
        return [row["loss"] for row in state.curve]

    assert losses(3) == pytest.approx(losses(1), rel=1e-6)


def test_micro_batches_that_processes_cannot_share_evenly_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"micro_batches=3 .* 2 processes; set a multiple of 2"):
        micro_batches(OptimizerConfig(micro_batches=3), World(0, 2, torch.device("cpu")))


def test_every_user_is_scored_by_one_of_the_processes() -> None:
    split = leave_one_out(successor_walks(evaluate.CHUNK_USERS * 2 + 10, NUM_ITEMS, length=5))
    model = fresh_model(split, NUM_ITEMS)

    def users(rank: int) -> list[int]:
        world = World(rank, 2, torch.device("cpu"))
        scored = evaluate.score_users(model, split.test.history, "next_item", world)
        return [user for chunk in scored for user in chunk.users.tolist()]

    assert users(0)
    assert users(1)
    assert sorted(users(0) + users(1)) == list(range(len(split.test)))


def test_a_gpu_asked_for_where_there_is_none_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    with pytest.raises(ConfigError, match=r"has no GPU.*training\.device=cpu"), joined("cuda"):
        pass


# The command


def test_the_command_in_two_processes_speaks_and_publishes_once(trained: TrainedRun, tmp_path: Path) -> None:
    done = torchrun(
        "training.cli", "fit", "--config", trained.config, "--data", trained.log, "--out", tmp_path, "--json",
        "training.epochs=2", "training.seed=1",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["users"] == 200
    stages = [json.loads(line)["message"] for line in done.stderr.splitlines() if '"stage"' in line]
    assert sum(message.startswith("published") for message in stages) == 1
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["processes"], record["config"]["training"]["micro_batches"]) == (2, 2)
    assert len([path for path in (tmp_path / "registry").iterdir() if (path / "manifest.json").exists()]) >= 1


@pytest.mark.parametrize(
    ("override", "message"),
    [("training.micro_batches=3", "cannot be shared evenly"), ("data.columns.item_id=nothing", "has no column 'noth")],
    ids=["wrong in every process", "wrong in the one that reads"],
)
def test_an_error_in_several_processes_is_told_once(
    override: str, message: str, trained: TrainedRun, tmp_path: Path
) -> None:
    done = torchrun(
        "training.cli", "fit", "--config", trained.config, "--data", trained.log, "--out", tmp_path, override
    )

    assert done.returncode != 0
    assert done.stderr.count(message) == 1
    assert done.stderr.count("bft-train:") == 1


# Compiled


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler imports parts that torch has deprecated
@pytest.mark.parametrize("filtering", [True, False], ids=["filtering", "plain"])
def test_a_compiled_step_has_the_loss_of_a_plain_one(filtering: bool) -> None:
    split = leave_one_out(successor_walks(32, NUM_ITEMS, length=10))

    def curve(compiled: bool) -> list[float]:
        model = fresh_model(split, NUM_ITEMS, SMALL.model_copy(update={"filtering": filtering}))
        config = OptimizerConfig(epochs=2, batch_size=32, learning_rate=1e-2, compile=compiled)
        return [row["loss"] for row in fit(model, split, "next_item", config).curve]

    assert curve(True) == pytest.approx(curve(False), rel=1e-5)
