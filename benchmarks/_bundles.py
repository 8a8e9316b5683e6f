"""A published bundle of any catalogue size, with random weights: what speed needs, and no training."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model import registry
from model.build import build_model
from model.bundle import FEATURES, Calibration, golden_arrays, items_frame, write_bundle
from model.config import ModelConfig
from model.onnx.export import export_graphs


def item_id(number: int) -> str:
    """The id of the catalogue's n-th item, from 0."""
    return f"item-{number}"


def publish_random(folder: Path, num_items: int, **settings: Any) -> Path:
    """A registry with one bundle of random weights.

    Args:
        folder: becomes the registry.
        num_items: N.
        settings: of `ModelConfig`.
    """
    torch.manual_seed(0)
    counts = torch.randint(1, 500, (num_items,))
    model = build_model(ModelConfig(**settings), counts)
    with torch.no_grad():
        # Untrained embeddings are so small that every list would be the same.
        model.item_embedding.weight.mul_(25)
    size = len(FEATURES)
    calibration = Calibration(
        event="next_new_item",
        temperature=1.0,
        variance_scale=model.head.shrinkage().item(),
        features=FEATURES,
        mean=(0.0,) * size,
        std=(1.0,) * size,
        weights=(1.0,) + (0.0,) * (size - 1),
        bias=0.0,
    )
    manifest: dict[str, Any] = {
        "name": f"random-{model.config.backbone}",
        "lineage": f"random-{num_items}",
        "created_at": datetime.now(UTC),
        "model": model.config,
        "num_items": num_items,
        "event": calibration.event,
        "data": {},
        "metrics": {},
        "training": {},
        "versions": {},
    }

    def fill(staging: Path) -> None:
        exported = export_graphs(model, staging, calibration.temperature)
        manifest["custom_ops"] = exported.custom_ops
        ids = [item_id(number) for number in range(num_items)]
        items_frame(ids, counts.numpy(), [None] * num_items).write_parquet(staging / "items.parquet")
        (staging / "calibration.json").write_text(calibration.model_dump_json())
        golden: dict[str, Any] = dict(golden_arrays(exported.golden))
        np.savez(staging / "golden.npz", **golden)

    registry.publish(folder, write_bundle(folder, manifest, fill).name)
    return folder
