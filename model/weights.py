"""A model's weights on the disk: one safetensors file, which torch loads and into which the ONNX graphs point."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import onnx
import safetensors.numpy
import safetensors.torch
import torch
from onnx import numpy_helper
from onnx.external_data_helper import set_external_data

from model.backbone import Backbone
from model.build import build_model
from model.bundle import WEIGHTS, Bundle, BundleError

INLINE_BYTES = 256
"""A graph keeps a smaller tensor itself."""
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, which is JSON."""


def load_model(bundle: Bundle) -> Backbone:
    """The bundle's model in torch, in eval mode.

    Raises:
        BundleError: the weights are not those of the model that the manifest describes.
    """
    model = build_model(bundle.manifest.model, torch.from_numpy(bundle.items.training_counts))
    try:
        tensors = safetensors.torch.load_file(bundle.folder / WEIGHTS)
    except (safetensors.SafetensorError, OSError) as error:
        raise BundleError(f"{bundle.folder}: {WEIGHTS} cannot be read ({error}); export the bundle again") from error
    for name, expected in model.state_dict().items():
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != tuple(expected.shape):
            raise BundleError(
                f"{bundle.folder}: {WEIGHTS}, tensor {name} has shape {found}, that of the manifest's model"
                f" {tuple(expected.shape)}; export the bundle again"
            )
    model.load_state_dict({name: tensors[name] for name in model.state_dict()})
    return model.eval()


def write_weights(model: Backbone, graphs: Iterable[onnx.ModelProto], folder: Path) -> None:
    """Write the model's weights and the graphs' constants, each once, and let the graphs point to them.

    Args:
        model: its state is stored under torch's names.
        graphs: changed in place: an initializer of `INLINE_BYTES` or more becomes external data.
        folder: receives the file.
    """
    tensors = {name: tensor.numpy(force=True) for name, tensor in model.state_dict().items()}
    names = {_digest(array.tobytes()): name for name, array in tensors.items()}
    external = [
        (initializer, initializer.raw_data)
        for graph in graphs
        for initializer in graph.graph.initializer
        if len(initializer.raw_data) >= INLINE_BYTES
    ]
    for initializer, data in external:
        digest = _digest(data)
        if digest not in names:
            names[digest] = f"graph.{digest}"
            tensors[names[digest]] = numpy_helper.to_array(initializer)
    path = folder / WEIGHTS
    safetensors.numpy.save_file(tensors, path)

    offsets = _offsets(path)
    for initializer, data in external:
        set_external_data(initializer, WEIGHTS, offset=offsets[names[_digest(data)]], length=len(data))
        initializer.ClearField("raw_data")


def _offsets(path: Path) -> dict[str, int]:
    """Where in a safetensors file each tensor begins, in bytes."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(header_bytes))
    return {name: _LENGTH_BYTES + header_bytes + entry["data_offsets"][0] for name, entry in header.items()}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
