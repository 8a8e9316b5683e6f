"""The benchmarks of what must hold, in their quick form: the same scripts, fewer requests, nothing about time."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_quick(script: str, bundle: Path, *options: str) -> list[dict[str, Any]]:
    """The rows of `benchmarks/<script> --quick` on a bundle."""
    command = [sys.executable, f"benchmarks/{script}", "--json", "--quick", "--bundle", str(bundle), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    rows: list[dict[str, Any]] = json.loads(ran.stdout)["results"]
    return rows


def assert_all_met(rows: list[dict[str, Any]]) -> None:
    """Some of the rows are judged, and each of these is met."""
    assert any(row["met"] is not None for row in rows)
    missed = [row for row in rows if row["met"] is False]
    # As a message of its own: pytest abridges what it finds in a comparison.
    assert not missed, json.dumps(missed, indent=2)
