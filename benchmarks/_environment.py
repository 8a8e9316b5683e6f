"""Where and with what a benchmark ran; recorded beside its numbers."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from training.pipeline import cpu_model

LIBRARIES = ("torch", "onnxruntime", "onnx", "numpy", "polars", "fastapi", "redis")


def environment() -> dict[str, Any]:
    """CPU model, cores, library versions, and the project's commit, marked when the tree is not clean."""
    described = subprocess.run(
        ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
    )
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {library: importlib.metadata.version(library) for library in LIBRARIES},
        "commit": described.stdout.strip() or None,
    }
