"""Registries of several tiny bundles: copies of one export, told apart by their manifests or their catalogues."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import polars as pl

from model import registry
from model.bundle import RANKER, golden_arrays, open_bundle
from model.config import FIRST_ITEM, PAD
from model.registry import resolve
from tests.service.bundles import variant

BY_ITEM = ("item_table", "candidate_variance")
"""The ranker's tensors with a row for each special token and item."""


def unchanged(staging: Path) -> None:
    """A change for `variant` that changes no file."""


def add_version(tiny: Path, folder: Path, name: str, change: Callable[[Path], None] = unchanged, **fields: Any) -> str:
    """Put a variant of the tiny bundle into a registry, without publishing it; returns its version."""
    return variant(tiny, folder, change, name=name, **fields).name


def publish_version(tiny: Path, folder: Path, name: str, **fields: Any) -> str:
    """The same, published."""
    version = add_version(tiny, folder, name, **fields)
    registry.publish(folder, version)
    return version


def republish(folder: Path, version: str) -> None:
    """Make a version current without looking at it, as an operator could by hand."""
    index = registry.read_index(folder)
    assert index is not None
    changed = index.model_copy(update={"current": version, "previous": index.current})
    staging = folder / "index"
    staging.write_text(changed.model_dump_json())
    staging.replace(folder / registry.REGISTRY)


def add_smaller(tiny: Path, folder: Path, name: str, num_items: int) -> str:
    """The tiny bundle as it was before its last items joined the catalogue; returns its version."""
    golden = open_bundle(resolve(tiny)).golden_cases()

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
        np.savez(staging / "golden.npz", **golden_arrays(golden))

    return add_version(tiny, folder, name, change, num_items=num_items)


def _cut_rows(tensor: onnx.TensorProto, num_items: int) -> None:
    """Keep the first rows of a tensor that lies outside the file: they lie first there too."""
    kept = FIRST_ITEM + num_items
    (length,) = (entry for entry in tensor.external_data if entry.key == "length")
    length.value = str(int(length.value) // tensor.dims[0] * kept)
    tensor.dims[0] = kept


def copied(registry_folder: Path, target: Path) -> Path:
    """A copy of a registry, to be changed."""
    shutil.copytree(registry_folder, target, symlinks=True)
    return target
