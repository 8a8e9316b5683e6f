"""A published bundle of any catalogue size, with random weights: what speed needs, and no training; copies of one."""

import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import polars as pl
import torch

from model import registry
from model.build import build_model
from model.bundle import FEATURES, NEW_ITEMS, RANKER, Calibration, golden_arrays, items_frame, open_bundle, write_bundle
from model.config import FIRST_ITEM, PAD, ModelConfig
from model.new_items import write_new_items
from model.onnx.export import export_graphs
from model.registry import resolve
from training.new_items import fit_new_items

BY_ITEM = ("item_table", "candidate_variance")
"""The ranker's tensors with a row for each special token and item."""


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
        "calibrated_by": None,
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
        manifest.update(custom_ops=exported.custom_ops, parity_tolerance=exported.tolerance)
        ids = [item_id(number) for number in range(num_items)]
        items_frame(ids, counts.numpy(), [None] * num_items).write_parquet(staging / "items.parquet")
        write_new_items(fit_new_items(model).new_items, staging / NEW_ITEMS)
        (staging / "calibration.json").write_text(calibration.model_dump_json())
        golden: dict[str, Any] = dict(golden_arrays(exported.golden))
        np.savez(staging / "golden.npz", **golden)

    registry.publish(folder, write_bundle(folder, manifest, fill).name)
    return folder


def unchanged(staging: Path) -> None:
    """A change for `add_copy` that changes no file."""


def add_copy(bundles: Path, folder: Path, change: Callable[[Path], None] = unchanged, **fields: Any) -> str:
    """Put a copy of a registry's current bundle into a registry, without publishing it; returns its version.

    Args:
        bundles: the registry whose current bundle is copied.
        folder: receives the copy; may be the same.
        change: alters files in the folder it is given, before checksums are taken.
        fields: replace fields of the manifest.
    """
    origin = open_bundle(resolve(bundles))

    def fill(staging: Path) -> None:
        for name in origin.manifest.files:
            shutil.copy(origin.folder / name, staging / name)
        change(staging)

    manifest = origin.manifest.model_dump(exclude={"format_version", "version", "files"})
    return write_bundle(folder, {**manifest, **fields}, fill).name


def add_smaller(bundles: Path, folder: Path, name: str, num_items: int) -> str:
    """The bundle as it was before its last items joined the catalogue, as `add_copy` does it."""
    golden = open_bundle(resolve(bundles)).golden_cases()

    def change(staging: Path) -> None:
        items = staging / "items.parquet"
        pl.read_parquet(items).head(num_items).write_parquet(items)
        path = staging / "ranker.onnx"
        graph = onnx.load(path, load_external_data=False)
        for tensor in graph.graph.initializer:
            if tensor.name in BY_ITEM:
                _cut_rows(tensor, num_items)
        onnx.save_model(graph, path)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        for case in golden:
            if case.graph == RANKER:
                for numbers in ("seen", "blocked"):
                    known = case.inputs[numbers] < FIRST_ITEM + num_items
                    case.inputs[numbers] = np.where(known, case.inputs[numbers], PAD)
                names = list(case.outputs)
                case.outputs.update(zip(names, session.run(names, case.inputs), strict=True))
        arrays: dict[str, Any] = dict(golden_arrays(golden))
        np.savez(staging / "golden.npz", **arrays)

    return add_copy(bundles, folder, change, name=name, num_items=num_items)


def _cut_rows(tensor: onnx.TensorProto, num_items: int) -> None:
    """Keep the first rows of a tensor that lies outside the file: they lie first there too."""
    kept = FIRST_ITEM + num_items
    (length,) = (entry for entry in tensor.external_data if entry.key == "length")
    length.value = str(int(length.value) // tensor.dims[0] * kept)
    tensor.dims[0] = kept
