"""Tiny bundles, exported as training exports them: random weights, known confidences."""

import fcntl
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks._bundles import add_copy
from model import registry
from model.backbone import Backbone
from model.build import build_model
from model.bundle import (
    FEATURES,
    NEW_ITEMS,
    Calibration,
    CalibrationReport,
    Event,
    golden_arrays,
    items_frame,
    write_bundle,
)
from model.config import ModelConfig
from model.new_items import write_new_items
from model.onnx.export import ExportedGraphs, export_graphs
from training.new_items import fit_new_items

MAX_LEN = 8
NUM_ITEMS = 800
CONFIG = ModelConfig(max_len=MAX_LEN, width=16, num_layers=2, num_heads=2, ffn_width=32, dropout=0.0)
COUNTS = torch.arange(NUM_ITEMS, 0, -1)
REPORT = CalibrationReport(
    ece_at_10=0.004,
    ece_null_interval=(0.001, 0.006),
    mean_confidence=0.05,
    brier_skill_at_10=0.1,
    num_users=943,
)


ITEM_IDS = [f"item-{index}" for index in range(NUM_ITEMS)]
"""In the order of their numbers."""


def identity_calibration(event: Event, variance_scale: float = 0.7) -> Calibration:
    """A confidence map that says σ(logit p) = p: the confidence is the probability."""
    size = len(FEATURES)
    return Calibration(
        event=event,
        temperature=0.8,
        variance_scale=variance_scale,
        features=FEATURES,
        mean=(0.0,) * size,
        std=(1.0,) * size,
        weights=(1.0,) + (0.0,) * (size - 1),
        bias=0.0,
        report=REPORT,
    )


def tiny_model(backbone: str = "sasrec") -> Backbone:
    """The model that a tiny bundle was exported from."""
    torch.manual_seed(0)
    model = build_model(ModelConfig.model_validate(CONFIG.model_dump() | {"backbone": backbone}), COUNTS)
    with torch.no_grad():
        # Untrained embeddings are so small that every list would be the same.
        model.item_embedding.weight.mul_(25)
    return model.eval()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry with the tiny bundle of SASRec published."""
    return tiny_registry("sasrec", tmp_path_factory)


def tiny_registry(backbone: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry with a backbone's tiny bundle published; made once for all the processes of a test run."""
    # Each of pytest-xdist's workers has a folder of its own below the run's.
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"tiny-{backbone}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "registry.json").exists():
            publish(tiny_model(backbone), folder)
    return folder


def publish(model: Backbone, folder: Path) -> None:
    """Export a model into a registry."""
    exported: list[ExportedGraphs] = []

    def fill(staging: Path) -> None:
        calibration = identity_calibration("next_new_item", model.head.shrinkage().item())
        exported.append(export_graphs(model, staging, calibration.temperature))
        items_frame(ITEM_IDS, COUNTS.numpy(), [None] * NUM_ITEMS).write_parquet(staging / "items.parquet")
        write_new_items(fit_new_items(model).new_items, staging / NEW_ITEMS)
        (staging / "calibration.json").write_text(calibration.model_dump_json())
        np.savez(staging / "golden.npz", **golden_arrays(exported[0].golden))
        manifest.update(custom_ops=exported[0].custom_ops, parity_tolerance=exported[0].tolerance)

    manifest: dict[str, Any] = {
        "name": "tiny",
        "lineage": "tiny-catalogue",
        "calibrated_by": None,
        "created_at": datetime.now(UTC),
        "model": model.config,
        "num_items": NUM_ITEMS,
        "event": "next_new_item",
        "data": {},
        "metrics": {},
        "training": {},
        "versions": {},
    }
    registry.publish(folder, write_bundle(folder, manifest, fill).name)


def variant(tiny: Path, folder: Path, change: Callable[[Path], None], **fields: Any) -> Path:
    """A copy of the tiny bundle with changed files and true checksums.

    Args:
        tiny: the registry.
        folder: receives the copy.
        change: alters files in the folder it is given, before checksums are taken.
        fields: replace fields of the manifest.
    """
    return folder / add_copy(tiny, folder, change, **fields)


def calibrated_for(event: Event) -> Callable[[Path], None]:
    """A change for `variant`: confidences are of another event."""

    def change(staging: Path) -> None:
        path = staging / "calibration.json"
        calibration = Calibration.model_validate_json(path.read_bytes())
        path.write_text(calibration.model_copy(update={"event": event}).model_dump_json())

    return change
