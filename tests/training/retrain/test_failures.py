"""What the job says and leaves behind when a disk is full, the registry cannot be written, or the store is down."""

import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from model import registry as registries
from tests.training.retrain.test_job import NUM_ITEMS, SMALL, walks
from training.retrain.store import Store

ROOT = Path(__file__).parents[3]
OVERRIDES = [*SMALL, "training.epochs=2", "retrain.gate.margin=0.99", "retrain.limits.max_future_share=1.0"]


def job(folder: Path, *options: str, largest_file: int | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """One run of the command.

    Args:
        folder: of its source, its log and its registry.
        options: further ones.
        largest_file: bytes; a write beyond them fails, as it does on a full disk.
        env: further variables.
    """

    def limit() -> None:
        if largest_file is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    paths = ["--data", folder / "in", "--work", folder / "work", "--registry", folder / "registry"]
    return subprocess.run(
        [sys.executable, "-m", "training.cli", "retrain", *map(str, paths), *options, *OVERRIDES],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    walks(tmp_path / "in", "monday.csv", 0, 100, NUM_ITEMS, seed=1)
    return tmp_path


@pytest.mark.parametrize("largest_file", [500, 20_000, 60_000])
def test_a_disk_that_is_full_is_told_and_the_next_run_finishes(folder: Path, largest_file: int) -> None:
    failed = job(folder, largest_file=largest_file)

    assert (failed.returncode, failed.stdout) == (2, ""), failed.stderr
    assert "Traceback" not in failed.stderr
    assert "File too large" in failed.stderr
    assert registries.read_index(folder / "registry") is None
    assert Store(folder / "work" / "log").index.rows in (0, 1200)

    finished = job(folder)
    assert finished.returncode == 0, finished.stderr
    assert Store(folder / "work" / "log").index.rows == 1200


def test_a_registry_that_cannot_be_written_is_told_and_no_event_is_lost(folder: Path) -> None:
    (folder / "file").write_text("")

    failed = job(folder, "--registry", str(folder / "file" / "registry"))

    assert failed.returncode == 2, failed.stderr
    assert "Traceback" not in failed.stderr
    assert f"{folder}/file" in failed.stderr
    assert Store(folder / "work" / "log").index.rows == 1200


def test_a_store_that_is_down_is_told_without_its_password(folder: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        failed = job(folder, BFT_REDIS_URL=f"redis://:secret@127.0.0.1:{port}/0")

    assert failed.returncode == 2
    assert f"redis://127.0.0.1:{port}/0: the outbox cannot be read" in failed.stderr
    assert "secret" not in failed.stderr
    assert "Traceback" not in failed.stderr
    assert registries.read_index(folder / "registry") is None
