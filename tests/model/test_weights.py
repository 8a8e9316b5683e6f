"""Weights on the disk: torch gets back what it wrote, and a file that does not fit is refused by name."""

from pathlib import Path

import onnx
import pytest
import safetensors.numpy
import torch
from onnx import TensorProto, helper, numpy_helper

from model.backbone import Backbone
from model.build import BACKBONES
from model.bundle import WEIGHTS, BundleError, open_bundle
from model.config import ModelConfig
from model.weights import load_model, write_weights
from tests.model import stand_ins
from tests.model.adapter import perturbed_model, small_config

COUNTS = torch.from_numpy(stand_ins.TRAINING_COUNTS)


def model_of(backbone: str = "sasrec", filtering: bool = True, seed: int = 0) -> Backbone:
    return perturbed_model(small_config(backbone=backbone, filtering=filtering), COUNTS, seed)


def bundle_of(model: Backbone, parent: Path, described: Backbone | None = None) -> Path:
    """A bundle with the model's weights, whose manifest describes this model or another."""
    return stand_ins.write(
        parent,
        change=lambda staging: write_weights(model, [], staging),
        model=(described or model).config,
    )


@pytest.mark.parametrize("filtering", [True, False])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_bundle_s_model_is_the_one_that_was_written(tmp_path: Path, backbone: str, filtering: bool) -> None:
    written = model_of(backbone, filtering)

    loaded = load_model(open_bundle(bundle_of(written, tmp_path)))

    assert type(loaded) is type(written)
    assert not loaded.training
    assert loaded.config == written.config
    expected = written.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert torch.equal(loaded.log_count, written.log_count)


@pytest.mark.parametrize(
    ("described", "complaint"),
    [
        (small_config(width=16), r"item_embedding\.weight has shape \(8, 8\), .* \(8, 16\)"),
        (small_config(num_layers=3), r"layers\.2\.\S+ has shape None"),
        (small_config(backbone="hstu"), r"layers\.0\.position_bias has shape None"),
    ],
)
def test_weights_of_another_model_than_the_manifest_describes_are_refused(
    tmp_path: Path, described: ModelConfig, complaint: str
) -> None:
    other = perturbed_model(described, COUNTS, 0)
    bundle = open_bundle(bundle_of(model_of(), tmp_path, other))

    with pytest.raises(BundleError, match=rf"{WEIGHTS}, tensor {complaint}"):
        load_model(bundle)


def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    bundle = stand_ins.write(tmp_path)

    with pytest.raises(BundleError, match=f"{WEIGHTS} cannot be read"):
        load_model(open_bundle(bundle))


def test_a_graph_s_constant_is_stored_once_and_read_back_through_the_graph(tmp_path: Path) -> None:
    model = model_of()
    table = model.item_embedding.weight.detach().numpy()
    own = table[:, :5].T.copy() * 2
    assert own.nbytes >= 128

    def graph() -> onnx.ModelProto:
        tensors = [
            numpy_helper.from_array(table, "table"),
            numpy_helper.from_array(own.repeat(4, 0), "own"),
            numpy_helper.from_array(own[0, :2].copy(), "little"),
        ]
        outputs = [helper.make_tensor_value_info(t.name + "_out", TensorProto.FLOAT, t.dims) for t in tensors]
        nodes = [helper.make_node("Identity", [t.name], [t.name + "_out"]) for t in tensors]
        return helper.make_model(helper.make_graph(nodes, "constants", [], outputs, tensors))

    graphs = [graph(), graph()]
    write_weights(model, graphs, tmp_path)

    stored = safetensors.numpy.load_file(tmp_path / WEIGHTS)
    extra = set(stored) - set(model.state_dict())
    assert [stored[name].tobytes() for name in extra] == [own.repeat(4, 0).tobytes()]
    for index, written in enumerate(graphs):
        onnx.save(written, tmp_path / f"{index}.onnx")
        read = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / f"{index}.onnx").graph.initializer}
        assert (read["table"] == table).all()
        assert (read["own"] == own.repeat(4, 0)).all()
        assert (read["little"] == own[0, :2]).all()
        inline = [t.name for t in written.graph.initializer if t.raw_data]
        assert inline == ["little"]
