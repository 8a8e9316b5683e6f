"""Bundles with stand-ins for graphs: everything that `model.bundle` and `model.registry` look at, made in a blink."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from model.bundle import (
    FEATURES,
    NEW_ITEMS,
    WEIGHTS,
    Calibration,
    CalibrationReport,
    GoldenCase,
    golden_arrays,
    items_frame,
    write_bundle,
)
from model.config import ModelConfig
from model.new_items import NewItems, write_new_items

GRAPHS = {"encoder": ("KalmanUpdate",), "step": (), "ranker": ("GaussianTopK",), "explainer": ()}
"""Every graph a bundle may have, with its nodes of the domain `bft`."""

ITEM_IDS = ["toy", "42", "042", "ß/😀 x"]
TRAINING_COUNTS = np.array([9, 4, 1, 0])
TITLES = ["Toy Story (1995)", None, "Forty-two", None]

CALIBRATION = Calibration(
    event="next_new_item",
    temperature=1.3,
    variance_scale=0.7,
    features=FEATURES,
    mean=(-3.0, 0.5, 2.0, 6.0, 1.0, 3.0),
    std=(2.0, 1.0, 1.5, 0.5, 1.0, 0.8),
    weights=(1.1, -0.2, 0.1, -0.3, 0.05, 0.0),
    bias=-4.0,
    report=CalibrationReport(
        ece_at_10=0.004,
        ece_null_interval=(0.001, 0.006),
        mean_confidence=0.05,
        brier_skill_at_10=0.1,
        num_users=943,
    ),
)

GOLDEN = [
    GoldenCase(
        "encoder",
        {
            "items": np.array([[1, 4]]),
            "weights": np.array([[1.0, 0.5]], np.float32),
            "timestamps": np.array([[np.nan, 1.7e9]]),
        },
        {"mean": np.array([[0.1, -0.2]], np.float32), "precision": np.array([[3.0, np.inf]], np.float32)},
    ),
    GoldenCase("ranker", {"k": np.array([2]), "temperature": np.array(1.3, np.float32)}, {"logit": np.array([[1.0]])}),
    GoldenCase("encoder", {"items": np.zeros((2, 0), np.int64)}, {"mean": np.array([[np.nan]])}),
]


def fields(**changes: Any) -> dict[str, Any]:
    """The manifest's fields that `write_bundle` asks for."""
    return {
        "name": "tiny",
        "lineage": "tiny-catalogue",
        "created_at": datetime(2026, 11, 29, 12, 0, tzinfo=UTC),
        "model": ModelConfig(max_len=4, width=2, num_heads=1),
        "num_items": len(ITEM_IDS),
        "event": "next_new_item",
        "custom_ops": GRAPHS,
        "parity_tolerance": 1e-5,
        "calibrated_by": None,
        "data": {"events": 14},
        "metrics": {"ndcg@10": 0.05, "interval": [0.04, 0.06]},
        "training": {"command": ["bft-train", "fit"]},
        "versions": {"torch": "2.13.0"},
    } | changes


def fill(staging: Path, seed: int = 0, width: int = 2) -> None:
    """Write every file of a bundle of a model so wide; the seed makes the weights differ."""
    for graph in GRAPHS:
        (staging / f"{graph}.onnx").write_bytes(f"stand-in for {graph}".encode())
    (staging / WEIGHTS).write_bytes(np.random.default_rng(seed).bytes(64))
    items_frame(ITEM_IDS, TRAINING_COUNTS, TITLES).write_parquet(staging / "items.parquet")
    write_new_items(NewItems(np.linspace(0.5, -0.5, width), 0.1, 0.02), staging / NEW_ITEMS)
    (staging / "calibration.json").write_text(CALIBRATION.model_dump_json())
    np.savez(staging / "golden.npz", **golden_arrays(GOLDEN))


def write(
    parent: Path, *, seed: int = 0, change: Callable[[Path], None] = lambda staging: None, **changes: Any
) -> Path:
    """Write a bundle; `change` alters its files before their checksums are taken, `changes` the manifest's fields."""

    described = fields(**changes)

    def fill_and_change(staging: Path) -> None:
        fill(staging, seed, described["model"].width)
        change(staging)

    return write_bundle(parent, described, fill_and_change)
