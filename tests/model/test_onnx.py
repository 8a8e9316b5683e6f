"""The exported graphs against torch and brute force, and each function body alone against the reference.

A tiny perturbed model is exported once with filtering on and once with it off; the tests share the two.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.numpy
import torch
from google.protobuf.message import Message
from numpy.typing import NDArray
from onnx import TensorProto, helper

from model.backbone import Backbone
from model.bundle import PARITY_TOLERANCE, WEIGHTS, GoldenCase
from model.config import BOS, FIRST_ITEM, PAD
from model.filtering import Gaussian
from model.onnx import export
from model.onnx.export import OPSET, ExportedGraphs, ExportError, check_parity, export_graphs
from model.onnx.functions import DOMAIN, VERSION, attach_bodies
from model.sasrec import SASRec
from tests import reference
from tests.model.adapter import (
    perturbed_model,
    random_rows,
    reference_params,
    reference_states,
    small_config,
)
from tests.tolerance import FLOAT32_EXTREME_TOL, FLOAT32_TOL, assert_close, assert_precision_close

NUM_ITEMS = 12
COUNTS = torch.tensor([0, 1, 2, 3, 5, 8, 40, 300, 1, 2000, 7, 9])
MAX_LEN = 6
TEMPERATURE = 1.3
GRAPHS = ("encoder", "step", "ranker", "explainer")
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Exported:
    """A model, the folder of its graphs, what the export said, and a session of each graph."""

    model: SASRec
    folder: Path
    said: ExportedGraphs
    sessions: dict[str, onnxruntime.InferenceSession]

    def proto(self, graph: str) -> onnx.ModelProto:
        """The graph's file alone, without the weights beside it."""
        return onnx.load(self.folder / f"{graph}.onnx", load_external_data=False)

    def run(self, graph: str, inputs: Arrays) -> Arrays:
        """Every output by name."""
        names = [output.name for output in self.sessions[graph].get_outputs()]
        return dict(zip(names, self.sessions[graph].run(names, inputs), strict=True))


def export_tiny(folder: Path, filtering: bool) -> Exported:
    config = small_config(filtering=filtering, num_layers=2 if filtering else 1, shrinkage_dof=2.5)
    model = perturbed_model(config, COUNTS, seed=1)
    said = export_graphs(model, folder, TEMPERATURE)
    sessions = {
        graph: onnxruntime.InferenceSession(folder / f"{graph}.onnx", providers=["CPUExecutionProvider"])
        for graph in GRAPHS
    }
    return Exported(model, folder, said, sessions)


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return export_tiny(tmp_path_factory.mktemp("on"), filtering=True)


@pytest.fixture(scope="module")
def off(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return export_tiny(tmp_path_factory.mktemp("off"), filtering=False)


@pytest.fixture(params=["on", "off"])
def exported(request: pytest.FixtureRequest) -> Exported:
    found: Exported = request.getfixturevalue(request.param)
    return found


# --- what the files hold ------------------------------------------------------------------------------------


def test_each_filtering_step_is_one_node_with_one_body(on: Exported) -> None:
    layers = on.model.config.num_layers
    steps = {"DynamicsPredict": layers, "KalmanUpdate": layers, "KrigingAttention": layers}
    expected = {
        "encoder": steps,
        "step": steps,
        "ranker": {"GaussianTopK": 1},
        # What the last layer does with whom it heard is not asked.
        "explainer": dict.fromkeys(steps, layers - 1),
    }
    for graph, nodes in expected.items():
        proto = on.proto(graph)
        assert Counter(node.op_type for node in proto.graph.node if node.domain == DOMAIN) == nodes
        assert [(body.domain, body.name) for body in proto.functions] == [(DOMAIN, name) for name in nodes]
        assert on.said.custom_ops[graph] == tuple(nodes)
        assert {entry.domain: entry.version for entry in proto.opset_import} == {"": OPSET, DOMAIN: VERSION}


def test_the_plain_encoder_has_no_node_of_ours(off: Exported) -> None:
    assert off.said.custom_ops == {"encoder": (), "step": (), "ranker": ("GaussianTopK",), "explainer": ()}
    for graph in ("encoder", "step", "explainer"):
        proto = off.proto(graph)
        assert [node.op_type for node in proto.graph.node if node.domain == DOMAIN] == []
        assert list(proto.functions) == []


@pytest.mark.parametrize("graph", GRAPHS)
def test_weights_lie_beside_the_graph_and_not_in_it(exported: Exported, graph: str) -> None:
    inside = 0
    for tensor in exported.proto(graph).graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            location = {entry.key: entry.value for entry in tensor.external_data}["location"]
            assert location == WEIGHTS
        else:
            inside = max(inside, len(tensor.raw_data))
    assert inside < 256
    assert {path.name for path in exported.folder.iterdir()} == {*(f"{name}.onnx" for name in GRAPHS), WEIGHTS}


def test_the_graphs_share_the_torch_model_s_item_table(exported: Exported) -> None:
    table = exported.model.item_embedding.weight.detach().numpy().tobytes()
    content = (exported.folder / WEIGHTS).read_bytes()
    assert content.count(table) == 1

    for graph in GRAPHS:
        external = ({e.key: e.value for e in t.external_data} for t in exported.proto(graph).graph.initializer)
        assert str(content.index(table)) in {entries.get("offset") for entries in external}
    stored = safetensors.numpy.load_file(exported.folder / WEIGHTS)
    for name, tensor in exported.model.state_dict().items():
        np.testing.assert_array_equal(stored[name], tensor.numpy())


def texts(message: Message) -> Iterator[str]:
    """Every string in a protobuf message, at any depth; tensors' contents are bytes and left out."""
    for field, value in message.ListFields():
        repeated = value if field.is_repeated else [value]
        for item in repeated:
            if isinstance(item, Message):
                yield from texts(item)
            elif isinstance(item, str):
                yield item
            elif isinstance(item, bytes) and field.name != "raw_data":
                yield item.decode()


@pytest.mark.parametrize("graph", GRAPHS)
def test_no_trace_of_the_machine_that_exported_is_in_a_graph(exported: Exported, graph: str) -> None:
    found = list(texts(exported.proto(graph)))
    assert "batch" in found  # the walk does reach names
    traces = re.compile(r"(^|[\s\"'])/\w|\\\w+\\|\.py\b|site-packages|Traceback|File \"|0x[0-9a-f]{6}")
    assert [text for text in found if traces.search(text)] == []
    content = (exported.folder / f"{graph}.onnx").read_bytes()
    for needle in (b"site-packages", b".py", str(Path.home()).encode() + b"/", str(Path.cwd()).encode()):
        assert needle not in content


def test_inputs_and_outputs_carry_their_public_names_and_axes(exported: Exported) -> None:
    def axes(values: Any) -> dict[str, list[str | int]]:
        return {
            value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
            for value in values
        }

    width = exported.model.config.width
    layers, heads = exported.model.config.num_layers, exported.model.config.num_heads
    encoder, step, ranker, explainer = (exported.proto(graph).graph for graph in GRAPHS)
    grid = ["batch", "time"]

    def cache(prefix: str, positions: str) -> dict[str, list[str | int]]:
        per_head: list[str | int] = ["batch", layers, heads, positions, width // heads]
        return {
            f"{prefix}key": per_head,
            f"{prefix}value": per_head,
            f"{prefix}log_precision": ["batch", layers, positions],
        }

    assert axes(encoder.input) == {"items": grid, "weights": grid, "timestamps": grid}
    assert encoder.input[2].type.tensor_type.elem_type == TensorProto.DOUBLE
    state = {"mean": ["batch", width], "precision": ["batch", width]}
    assert axes(encoder.output) == axes(step.output) == state | cache("", "time")
    assert axes(step.input) == axes(encoder.input) | cache("past_", "past") | {
        "past_timestamps": ["batch", "past"],
        "past_length": ["batch"],
    }
    assert axes(explainer.input) == axes(encoder.input)
    assert axes(explainer.output) == {"kriging_weight": grid, "precision": grid}
    assert axes(ranker.input) == {
        "mean": ["batch", width],
        "precision": ["batch", width],
        "added_items": ["num_added", width],
        "added_variance": ["num_added"],
        "seen": ["batch", "num_seen"],
        "blocked": ["batch", "num_blocked"],
        "k": [1],
        "temperature": [],
        "variance_scale": [],
        "order_rows": ["num_ordered"],
        "order_mean": ["num_ordered", width],
        "order_precision": ["num_ordered", width],
        "order_shrinkage": ["num_ordered"],
        "order_kappa": ["num_ordered"],
    }
    listed = ("items", "order_key", "logit", "score_mean", "score_variance", "reliability")
    per_user = ("log_partition", "entropy", "mean_precision")
    assert axes(ranker.output) == {name: ["batch", "k"] for name in listed} | {name: ["batch"] for name in per_user}


# --- the encoder --------------------------------------------------------------------------------------------


def encode(exported: Exported, items: NDArray[np.int64], weights: NDArray[np.float32]) -> Arrays:
    """The state alone, what the ranker takes."""
    found = exported.run("encoder", encoder_inputs(items, weights))
    return {name: found[name] for name in ("mean", "precision")}


def encoder_inputs(items: NDArray[np.int64], weights: NDArray[np.float32]) -> Arrays:
    """Events one day apart, the third without a time."""
    timestamps = 1.7e9 + 86_400.0 * np.arange(items.shape[1]) + np.zeros(items.shape)
    timestamps[items == BOS] = np.nan
    timestamps[:, 3:4] = np.nan
    return {"items": items, "weights": weights, "timestamps": timestamps}


@pytest.mark.parametrize("length", [1, 4, MAX_LEN + 1])
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("padding", [0, 2])
def test_the_encoder_equals_torch_at_the_last_event(exported: Exported, length: int, batch: int, padding: int) -> None:
    items, weights = random_rows(np.random.default_rng(10 * length + batch), batch, length, NUM_ITEMS)
    padding = min(padding, MAX_LEN + 1 - length)
    items = np.pad(items, ((0, 0), (0, padding)))
    weights = np.pad(weights, ((0, 0), (0, padding)))
    found = exported.run("encoder", encoder_inputs(items, weights))
    with torch.no_grad():
        state = exported.model.encode(torch.from_numpy(items), torch.from_numpy(weights))
    for row in range(batch):
        # A row of padding only has mean 0 and precision 0, as any padding has.
        last = max(int((items[row] != PAD).sum()) - 1, 0)
        assert_close(found["mean"][row], state.mean[row, last], FLOAT32_TOL, "mean")
        expected = state.precision[row, last]
        if torch.isinf(expected).all():
            assert (found["precision"][row] == np.inf).all()
        else:
            assert_precision_close(found["precision"][row], expected, FLOAT32_TOL)


def test_the_encoder_equals_the_float64_reference(on: Exported) -> None:
    items, weights = random_rows(np.random.default_rng(3), 4, MAX_LEN + 1, NUM_ITEMS)
    found = on.run("encoder", encoder_inputs(items, weights))
    expected = reference_states(on.model, COUNTS, items, weights)
    assert_close(found["mean"], reference.last_real(expected.mean, items), FLOAT32_TOL, "mean")
    assert_precision_close(found["precision"], reference.last_real(expected.precision, items), FLOAT32_TOL)


# --- the ranker ---------------------------------------------------------------------------------------------


def states(rng: np.random.Generator, batch: int, plain: bool, limit: float = 3.0) -> Arrays:
    width = small_config().width
    mean = rng.normal(size=(batch, width)).astype(np.float32)
    precision = np.exp(rng.uniform(-np.log(limit), np.log(limit), size=(batch, width))).astype(np.float32)
    return {"mean": mean, "precision": np.full_like(mean, np.inf) if plain else precision}


def numbers(rows: list[list[int]]) -> NDArray[np.int64]:
    """Lists of item numbers as one array, short ones filled with 0 as the service fills them."""
    padded = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for row, listed in enumerate(rows):
        padded[row, : len(listed)] = listed
    return padded


NO_ORDER: Arrays = {
    "order_rows": np.empty(0, np.int64),
    "order_mean": np.empty((0, small_config().width), np.float32),
    "order_precision": np.empty((0, small_config().width), np.float32),
    "order_shrinkage": np.empty(0, np.float32),
    "order_kappa": np.empty(0, np.float32),
}
"""Every list by its own logit."""
NOTHING_ADDED: Arrays = {
    "added_items": np.empty((0, small_config().width), np.float32),
    "added_variance": np.empty(0, np.float32),
}
"""The catalogue alone."""


def rank(
    exported: Exported,
    state: Arrays,
    seen: list[list[int]],
    blocked: list[list[int]],
    k: int,
    temperature: float = TEMPERATURE,
    order: Arrays | None = None,
    added: Arrays | None = None,
) -> Arrays:
    inputs = (
        state
        | (added or NOTHING_ADDED)
        | {
            "seen": numbers(seen),
            "blocked": numbers(blocked),
            "k": np.array([k]),
            "temperature": np.array(temperature, np.float32),
            "variance_scale": exported.model.head.shrinkage().detach().numpy(),
            **(order or NO_ORDER),
        }
    )
    return exported.run("ranker", inputs)


class BruteForce:
    """One user's whole catalogue in float64, sorted."""

    def __init__(self, exported: Exported, state: Arrays, row: int, temperature: float = TEMPERATURE) -> None:
        self.temperature = temperature
        self.params = reference_params(exported.model, COUNTS)
        if not exported.model.config.filtering:
            # A plain head is the Gaussian one of a user and items without variance.
            self.params |= {"candidate_intercept": -np.inf, "candidate_slope_raw": 0.0, "score_shrinkage_raw": 0.0}
        self.mean, self.precision = (state[name][row].astype(np.float64) for name in ("mean", "precision"))
        self.scores = self._score(np.zeros(NUM_ITEMS, bool))

    def _score(self, seen: NDArray[np.bool_]) -> reference.CatalogueScores:
        return reference.score_catalogue(self.params, self.mean, self.precision, seen, self.temperature)

    def best(self, blocked: list[int], k: int) -> list[int]:
        """Item numbers by falling logit."""
        left = [n for n in range(FIRST_ITEM, FIRST_ITEM + NUM_ITEMS) if n not in blocked]
        return sorted(left, key=lambda number: -self.scores.logit[number - FIRST_ITEM])[:k]

    def partition(self, seen: list[int]) -> tuple[float, float]:
        """log Σ exp(logit/T) and the entropy over what is not seen."""
        is_seen = np.isin(np.arange(FIRST_ITEM, FIRST_ITEM + NUM_ITEMS), seen)
        total = np.exp(self.scores.logit[~is_seen] / self.temperature).sum()
        return float(np.log(total)), self._score(is_seen).entropy


def assert_ranked(
    exported: Exported,
    found: Arrays,
    state: Arrays,
    seen: list[list[int]],
    blocked: list[list[int]],
    k: int,
    temperature: float = TEMPERATURE,
    tol: float = FLOAT32_TOL,
) -> None:
    """Each row equals brute force: the items, their order and scores, −inf where too few are left."""
    for row in range(len(seen)):
        truth = BruteForce(exported, state, row, temperature)
        expected = truth.best(blocked[row], k)
        rows = [number - FIRST_ITEM for number in expected]
        assert found["items"].shape == (len(seen), k)
        assert found["items"][row, : len(rows)].tolist() == expected
        for name in ("order_key", "logit"):
            assert (found[name][row, len(rows) :] == -np.inf).all()
        assert_close(found["order_key"][row, : len(rows)], truth.scores.logit[rows], tol, "order key")
        for name in ("logit", "score_mean", "score_variance"):
            values = getattr(truth.scores, name)[rows]
            assert_close(found[name][row, : len(rows)], values, tol, name)
        log_partition, entropy = truth.partition(seen[row])
        assert_close(found["log_partition"][row], log_partition, tol, "log partition")
        assert_close(found["entropy"][row], entropy, tol, "entropy")
        if exported.model.config.filtering:
            assert_close(found["mean_precision"][row], truth.precision.mean(), tol, "mean precision")


@pytest.mark.parametrize("k", range(1, NUM_ITEMS + 1))
def test_the_ranker_lists_the_k_best_of_the_whole_catalogue(exported: Exported, k: int) -> None:
    state = states(np.random.default_rng(k), 2, plain=not exported.model.config.filtering)
    nothing: list[list[int]] = [[], []]
    assert_ranked(exported, rank(exported, state, nothing, nothing, k), state, nothing, nothing, k)


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize(("num_seen", "num_blocked"), [(0, 3), (4, 0), (5, 2), (2, 9)])
def test_seen_items_leave_the_normaliser_and_blocked_ones_the_list(
    exported: Exported, batch: int, num_seen: int, num_blocked: int
) -> None:
    rng = np.random.default_rng(100 * batch + num_seen)
    state = states(rng, batch, plain=not exported.model.config.filtering)

    def draw(largest: int) -> list[list[int]]:
        # Widths that differ within the batch, repeats, and special tokens among them.
        sizes = [largest if row == 0 else int(rng.integers(0, largest + 1)) for row in range(batch)]
        return [rng.integers(0, FIRST_ITEM + NUM_ITEMS, size=size).tolist() for size in sizes]

    seen, blocked = draw(num_seen), draw(num_blocked)
    assert_ranked(exported, rank(exported, state, seen, blocked, 7), state, seen, blocked, 7)


@pytest.mark.parametrize("temperature", [0.05, 1.0, 20.0])
def test_the_temperature_is_an_input(on: Exported, temperature: float) -> None:
    state = states(np.random.default_rng(5), 2, plain=False)
    seen = [[BOS, 4, 9], [BOS]]
    found = rank(on, state, seen, seen, 4, temperature)
    # At 0.05 a logit counts twenty times, and its float32 error with it.
    tol = FLOAT32_TOL if temperature >= 1 else FLOAT32_EXTREME_TOL
    assert_ranked(on, found, state, seen, seen, 4, temperature, tol)


def test_precisions_of_every_size_are_ranked(on: Exported) -> None:
    state = states(np.random.default_rng(6), 5, plain=False, limit=1e6)
    nothing: list[list[int]] = [[]] * 5
    found = rank(on, state, nothing, nothing, 5)
    assert_ranked(on, found, state, nothing, nothing, 5, tol=FLOAT32_EXTREME_TOL)


def test_where_all_but_two_are_blocked_the_rest_of_the_list_is_minus_infinity(exported: Exported) -> None:
    state = states(np.random.default_rng(7), 2, plain=not exported.model.config.filtering)
    blocked = [[n for n in range(FIRST_ITEM, FIRST_ITEM + NUM_ITEMS) if n not in left] for left in ((5, 11), (4, 8))]
    seen = [[5], []]
    found = rank(exported, state, seen, blocked, 6)
    assert np.isfinite(found["logit"]).sum() == 4
    assert_ranked(exported, found, state, seen, blocked, 6)


def test_one_who_has_seen_everything_has_an_empty_distribution_and_still_scores(exported: Exported) -> None:
    state = states(np.random.default_rng(8), 2, plain=not exported.model.config.filtering)
    everything = list(range(FIRST_ITEM, FIRST_ITEM + NUM_ITEMS))
    found = rank(exported, state, [everything, []], [[], []], 3)
    assert (found["log_partition"][0], found["entropy"][0]) == (-np.inf, 0.0)
    assert found["items"][0].tolist() == BruteForce(exported, state, 0).best([], 3)
    assert np.isfinite(found["logit"]).all()
    # Batch mates do not notice.
    assert_close(found["log_partition"][1], BruteForce(exported, state, 1).partition([])[0], FLOAT32_TOL)


def test_reliability_is_the_share_of_a_new_user_s_variance_that_the_history_resolved(on: Exported) -> None:
    state = states(np.random.default_rng(9), 3, plain=False)
    state["precision"] *= np.array([[0.01], [30.0], [1e4]], np.float32)
    found = rank(on, state, [[]] * 3, [[]] * 3, 8)
    params = reference_params(on.model, COUNTS)
    new_user = reference_states(on.model, COUNTS, np.array([[BOS]]), np.ones((1, 1), np.float32))
    for row in range(3):
        items, precision = params["token_embedding"][found["items"][row]], state["precision"][row].astype(np.float64)
        expected = reference.reliability(items, params["final_norm_weight"], precision, new_user.precision[0, 0])
        assert_close(found["reliability"][row], expected, FLOAT32_TOL)
    assert (found["reliability"][0] == 0).all()  # less certain than of nobody: not below 0
    assert ((found["reliability"][1] > 0) & (found["reliability"][1] < 1)).all()
    assert (found["reliability"][2] > 0.9).all()


def test_reliability_does_not_ask_how_long_a_state_is(on: Exported) -> None:
    state = states(np.random.default_rng(10), 1, plain=False)
    once = rank(on, state, [[]], [[]], NUM_ITEMS)
    longer = rank(on, state | {"mean": 3 * state["mean"]}, [[]], [[]], NUM_ITEMS)
    in_order, in_other_order = (np.argsort(found["items"][0]) for found in (once, longer))
    assert_close(once["reliability"][0, in_order], longer["reliability"][0, in_other_order], FLOAT32_TOL)


def test_a_new_user_s_reliability_is_zero_and_a_plain_model_has_none(on: Exported, off: Exported) -> None:
    for exported, expected in ((on, 0.0), (off, np.nan)):
        found = rank(exported, encode(exported, np.array([[BOS]]), np.ones((1, 1), np.float32)), [[]], [[]], 5)
        np.testing.assert_allclose(found["reliability"], np.full((1, 5), expected), atol=FLOAT32_TOL)


def test_the_ranker_equals_torch_on_encoded_histories(exported: Exported) -> None:
    items, weights = random_rows(np.random.default_rng(11), 2, MAX_LEN + 1, NUM_ITEMS)
    state = encode(exported, items, weights)
    found = rank(exported, state, [[], []], [[], []], NUM_ITEMS)
    mean, precision = (torch.from_numpy(state[name]) for name in ("mean", "precision"))
    with torch.no_grad():
        scores = exported.model.score(Gaussian(mean, precision))
    order = torch.from_numpy(found["items"]) - FIRST_ITEM
    assert [sorted(row) for row in order.tolist()] == [list(range(NUM_ITEMS))] * 2
    assert_close(found["logit"], scores.logit.gather(1, order), FLOAT32_TOL, "logit")
    assert_close(found["score_mean"], scores.mean.gather(1, order), FLOAT32_TOL, "mean")
    assert_close(found["score_variance"], scores.variance.gather(1, order), FLOAT32_TOL, "variance")
    assert_close(found["log_partition"], (scores.logit / TEMPERATURE).logsumexp(-1), FLOAT32_TOL)


# --- orders -------------------------------------------------------------------------------------------------


def order_of(rows: list[int], by: Arrays, shrinkage: list[float], kappa: list[float]) -> Arrays:
    """The ranker's inputs for these rows, each with its own state of `by`."""
    return {
        "order_rows": np.array(rows),
        "order_mean": by["mean"],
        "order_precision": by["precision"],
        "order_shrinkage": np.array(shrinkage, np.float32),
        "order_kappa": np.array(kappa, np.float32),
    }


def expected_key(exported: Exported, by: Arrays, place: int, shrinkage: float, kappa: float) -> NDArray[np.float64]:
    """(μ−m)/√(1 + s·c·v) + κ·√v of every item, in float64."""
    truth = BruteForce(exported, by, place)
    mean, variance = truth.scores.score_mean, truth.scores.score_variance
    user = reference.final_state(
        truth.mean, truth.precision, truth.params["final_norm_weight"], truth.params["final_norm_bias"]
    ).user
    average = user @ truth.params["token_embedding"][FIRST_ITEM:].mean(axis=0)
    c = float(reference.softplus(truth.params["score_shrinkage_raw"])) if exported.model.config.filtering else 0.0
    return (mean - average) / np.sqrt(1 + shrinkage * c * variance) + kappa * np.sqrt(variance)


def test_named_rows_list_the_best_of_the_whole_catalogue_by_their_own_key(exported: Exported) -> None:
    plain = not exported.model.config.filtering
    rng = np.random.default_rng(20)
    state = states(rng, 6, plain)
    # Another state that is certain; the row's own with κ above and below 0; and what no policy asks for, both at once.
    rows, shrinkage, kappa = [4, 0, 2, 5], [1.0, 0.0, 0.0, 0.5], [0.0, 1.5, -2.0, 0.7]
    by = {name: values[rows].copy() for name, values in state.items()}
    by["mean"][0] = rng.normal(size=by["mean"].shape[1])
    by["precision"][0] = np.inf
    by["mean"][3] = rng.normal(size=by["mean"].shape[1])
    seen, blocked = [[4, 9]] * 6, [[5, 6], [], [7], [8], [4, 15], []]
    k = 5

    found = rank(exported, state, seen, blocked, k, order=order_of(rows, by, shrinkage, kappa))

    for row in range(6):
        truth = BruteForce(exported, state, row)
        key = truth.scores.logit
        if row in rows:
            place = rows.index(row)
            key = expected_key(exported, by, place, shrinkage[place], kappa[place])
        left = [n for n in range(FIRST_ITEM, FIRST_ITEM + NUM_ITEMS) if n not in blocked[row]]
        expected = sorted(left, key=lambda number: -key[number - FIRST_ITEM])[:k]
        assert found["items"][row].tolist() == expected
        listed = [number - FIRST_ITEM for number in expected]
        assert_close(found["order_key"][row], key[listed], FLOAT32_TOL, "order key")
        # What is said of an item, and of the user, is the state's, whatever the order.
        assert_close(found["logit"][row], truth.scores.logit[listed], FLOAT32_TOL, "logit")
        assert_close(found["score_mean"][row], truth.scores.score_mean[listed], FLOAT32_TOL, "score mean")
        assert_close(found["score_variance"][row], truth.scores.score_variance[listed], FLOAT32_TOL, "score variance")
        log_partition, entropy = truth.partition(seen[row])
        assert_close(found["log_partition"][row], log_partition, FLOAT32_TOL, "log partition")
        assert_close(found["entropy"][row], entropy, FLOAT32_TOL, "entropy")


def test_an_order_changes_nothing_of_what_is_said_of_an_item(exported: Exported) -> None:
    state = states(np.random.default_rng(21), 2, plain=not exported.model.config.filtering)
    nothing: list[list[int]] = [[], []]
    by = states(np.random.default_rng(22), 2, plain=True)

    own = rank(exported, state, [[4], []], nothing, NUM_ITEMS)
    other = rank(exported, state, [[4], []], nothing, NUM_ITEMS, order=order_of([1, 0], by, [1.0, 0.0], [0.0, 0.0]))

    assert not np.array_equal(own["items"], other["items"])
    for name in ("log_partition", "entropy", "mean_precision"):
        np.testing.assert_array_equal(own[name], other[name])
    by_item = [np.argsort(found["items"], axis=1) for found in (own, other)]
    for name in ("logit", "score_mean", "score_variance", "reliability"):
        mine, others = (np.take_along_axis(f[name], place, 1) for f, place in zip((own, other), by_item, strict=True))
        np.testing.assert_allclose(mine, others, rtol=1e-6, atol=1e-7, err_msg=name)


def test_a_certain_state_orders_as_its_own_logit_does_and_kappa_adds_nothing_to_it(off: Exported) -> None:
    state = states(np.random.default_rng(23), 3, plain=True)
    nothing: list[list[int]] = [[]] * 3

    own = rank(off, state, nothing, nothing, NUM_ITEMS)
    other = rank(
        off, state, nothing, nothing, NUM_ITEMS, order=order_of([0, 1, 2], state, [1.0, 0.0, 0.0], [0.0, 10.0, -10.0])
    )

    np.testing.assert_array_equal(own["items"], other["items"])


# --- items that were added since ----------------------------------------------------------------------------


def some_added(exported: Exported, rng: np.random.Generator, size: int) -> Arrays:
    """Rows like the catalogue's, wide ones; without variance for a plain model."""
    scale = exported.model.item_embedding.weight.detach().std().item()
    rows = rng.normal(scale=scale, size=(size, small_config().width)).astype(np.float32)
    wide = rng.uniform(1, 3, size).astype(np.float32)
    return {"added_items": rows, "added_variance": wide if exported.model.config.filtering else np.zeros_like(wide)}


class Grown(BruteForce):
    """One user's catalogue with added rows behind it, in float64: their variance is given, and the average is still
    that of the catalogue alone."""

    def __init__(self, exported: Exported, state: Arrays, row: int, added: Arrays) -> None:
        super().__init__(exported, state, row)
        params = self.params
        user = reference.final_state(self.mean, self.precision, params["final_norm_weight"], params["final_norm_bias"])
        catalogue = params["token_embedding"][FIRST_ITEM:]
        items = np.concatenate([catalogue, added["added_items"].astype(np.float64)])
        own = reference.candidate_variance(
            params["training_count"][FIRST_ITEM:],
            float(params["candidate_intercept"]),
            float(params["candidate_slope_raw"]),
        )
        variance = np.concatenate([own, added["added_variance"].astype(np.float64)])
        self.score_mean = reference.score_mean(user.user, items)
        self.score_variance = reference.score_variance(user.user, user.user_variance, items, variance)
        average = float(user.user @ catalogue.mean(axis=0))
        shrinkage = float(reference.softplus(params["score_shrinkage_raw"])) if exported.model.config.filtering else 0.0
        self.logit = reference.predictive_logit(self.score_mean, average, self.score_variance, shrinkage)


@pytest.mark.parametrize("size", [1, 3])
def test_added_items_are_ranked_and_normalised_as_if_they_were_the_catalogue_s_last(
    exported: Exported, size: int
) -> None:
    rng = np.random.default_rng(30 + size)
    state, added = states(rng, 3, plain=not exported.model.config.filtering), some_added(exported, rng, size)
    last = FIRST_ITEM + NUM_ITEMS + size - 1
    seen, blocked = [[last, 5], [], [4]], [[5], [last, 6], []]
    k = NUM_ITEMS + size

    found = rank(exported, state, seen, blocked, k, added=added)

    for row in range(3):
        truth = Grown(exported, state, row, added)
        left = [n for n in range(FIRST_ITEM, last + 1) if n not in blocked[row]]
        expected = sorted(left, key=lambda number: -truth.logit[number - FIRST_ITEM])
        assert found["items"][row, : len(left)].tolist() == expected
        rows = np.array(expected) - FIRST_ITEM
        for name in ("logit", "score_mean", "score_variance"):
            assert_close(found[name][row, : len(left)], getattr(truth, name)[rows], FLOAT32_TOL, name)
        assert_close(found["order_key"][row, : len(left)], truth.logit[rows], FLOAT32_TOL, "order key")
        possible = np.delete(truth.logit, np.array(seen[row], int) - FIRST_ITEM) / TEMPERATURE
        log_partition = np.log(np.exp(possible).sum())
        probability = np.exp(possible - log_partition)
        assert_close(found["log_partition"][row], log_partition, FLOAT32_TOL, "log partition")
        assert_close(found["entropy"][row], -(probability * np.log(probability)).sum(), FLOAT32_TOL, "entropy")


def test_added_items_are_ordered_by_a_policy_s_key_too(on: Exported) -> None:
    rng = np.random.default_rng(40)
    state, added = states(rng, 2, plain=False), some_added(on, rng, 2)
    k = NUM_ITEMS + 2

    found = rank(
        on,
        state,
        [[], []],
        [[], []],
        k,
        order=order_of([1], {n: v[1:] for n, v in state.items()}, [0.0], [2.0]),
        added=added,
    )

    truth = Grown(on, state, 1, added)
    catalogue = truth.params["token_embedding"][FIRST_ITEM:]
    user = reference.final_state(
        truth.mean, truth.precision, truth.params["final_norm_weight"], truth.params["final_norm_bias"]
    ).user
    key = truth.score_mean - user @ catalogue.mean(axis=0) + 2 * np.sqrt(truth.score_variance)
    expected = np.argsort(-key)
    assert (found["items"][1] - FIRST_ITEM).tolist() == expected.tolist()
    assert_close(found["order_key"][1], key[expected], FLOAT32_TOL, "order key")


def test_nothing_added_changes_nothing_and_an_item_nobody_can_want_takes_no_probability(on: Exported) -> None:
    state = states(np.random.default_rng(41), 1, plain=False)
    far = {
        "added_items": np.full((1, small_config().width), 0.0, np.float32),
        "added_variance": np.zeros(1, np.float32),
    }

    alone = rank(on, state, [[]], [[]], NUM_ITEMS)
    blocked = rank(on, state, [[FIRST_ITEM + NUM_ITEMS]], [[FIRST_ITEM + NUM_ITEMS]], NUM_ITEMS, added=far)

    for name, values in alone.items():
        np.testing.assert_allclose(blocked[name], values, rtol=1e-6, err_msg=name)


# --- each function body alone -------------------------------------------------------------------------------


def run_body(name: str, inputs: Arrays, num_outputs: int, **attributes: float) -> list[NDArray[Any]]:
    """Run a graph of this one node, by the body that `attach_bodies` gives it."""
    outputs = [f"out_{index}" for index in range(num_outputs)]
    node = helper.make_node(name, list(inputs), outputs, domain=DOMAIN, **attributes)
    graph = helper.make_graph(
        [node],
        name,
        [
            helper.make_tensor_value_info(key, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for key, value in inputs.items()
        ],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, [None] * 3) for output in outputs],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    assert attach_bodies(model) == (name,)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: list[NDArray[Any]] = session.run(outputs, inputs)
    return found


def normal(rng: np.random.Generator, *size: int, scale: float = 1.0) -> NDArray[np.float32]:
    return (scale * rng.normal(size=size)).astype(np.float32)


def positive(rng: np.random.Generator, limit: float, *size: int) -> NDArray[np.float32]:
    """Log-uniform in [1/limit, limit]."""
    return np.exp(rng.uniform(-np.log(limit), np.log(limit), size=size)).astype(np.float32)


def float64(*arrays: NDArray[Any]) -> list[NDArray[Any]]:
    return [array if array.dtype == bool else array.astype(np.float64) for array in arrays]


LIMITS = [
    pytest.param(3.0, FLOAT32_TOL, id="moderate"),
    pytest.param(1e6, FLOAT32_EXTREME_TOL, id="extreme"),
]
# batch, heads, channels, positions, neighbours
SHAPES = [(1, 1, 1, 1, 1), (2, 3, 4, 7, 7), (3, 2, 5, 1, 6), (1, 4, 2, 12, 12)]


@pytest.mark.parametrize(("limit", "tol"), LIMITS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shrinkage_dof", [1.0, 2.5])
def test_the_body_of_kriging_attention_equals_the_reference(
    shape: tuple[int, ...], shrinkage_dof: float, limit: float, tol: float
) -> None:
    batch, heads, channels, positions, neighbours = shape
    rng = np.random.default_rng(sum(shape))
    real = np.arange(neighbours) < rng.integers(1, neighbours + 1, size=(batch, 1))
    real[-1] &= batch == 1  # the last of several rows is padding only
    causal = np.tril(np.ones((positions, neighbours), bool), neighbours - positions)
    visible = causal & real[:, None, :]
    precision = positive(rng, limit, batch, neighbours)
    precision[~visible.any(1)] = 0.0  # what padding comes with
    inputs = {
        "query": normal(rng, batch, heads, positions, channels),
        "key": normal(rng, batch, heads, neighbours, channels),
        "value": normal(rng, batch, heads, neighbours, channels),
        "neighbour_precision": precision,
        "visible": visible,
    }
    mean, variance, sample_size = run_body("KrigingAttention", inputs, 3, shrinkage_dof=shrinkage_dof)
    expected = reference.krige(*float64(*inputs.values()), shrinkage_dof=shrinkage_dof)
    seen = visible.any(-1)
    assert_close(mean, expected.kriged_mean, tol, "kriged mean")
    assert_close(sample_size, expected.effective_sample_size, tol, "effective sample size")
    assert_close(variance[seen], expected.reml_variance[seen], tol, "REML variance")
    assert (variance[~seen] == 1).all()


# Far below 0 a SiLU is as good as its exponential; a runtime's own Sigmoid is not.
@pytest.mark.parametrize(("limit", "tol"), LIMITS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("level", "shrinkage_dof"), [(0.0, 1.0), (0.0, 2.5), (-14.0, 1.0), (-100.0, 1.0)])
def test_the_body_of_sandwich_attention_equals_the_reference(
    shape: tuple[int, ...], level: float, shrinkage_dof: float, limit: float, tol: float
) -> None:
    batch, heads, channels, positions, neighbours = shape
    rng = np.random.default_rng(sum(shape))
    real = np.arange(neighbours) < rng.integers(1, neighbours + 1, size=(batch, 1))
    real[-1] &= batch == 1  # the last of several rows is padding only
    causal = np.tril(np.ones((positions, neighbours), bool), neighbours - positions)
    visible = causal & real[:, None, :]
    precision = positive(rng, limit, batch, neighbours)
    precision[~visible.any(1)] = 0.0  # what padding comes with
    inputs = {
        "query": normal(rng, batch, heads, positions, channels),
        "key": normal(rng, batch, heads, neighbours, channels),
        "value": normal(rng, batch, heads, neighbours, channels),
        "bias": level + normal(rng, batch, positions, neighbours),
        "neighbour_precision": precision,
        "visible": visible,
    }
    mean, variance, sample_size = run_body(
        "SandwichAttention", inputs, 3, attention_norm=50.0, shrinkage_dof=shrinkage_dof
    )
    expected = reference.sandwich(*float64(*inputs.values()), attention_norm=50.0, shrinkage_dof=shrinkage_dof)
    seen = expected.effective_sample_size.transpose(0, 2, 1).repeat(channels, -1) > 0
    assert seen.any() == (level > -100)
    assert_close(mean, expected.mean, tol, "mean")
    assert_close(sample_size, expected.effective_sample_size, tol, "effective sample size")
    assert_close(variance[seen], expected.variance[seen], tol, "sandwich variance")
    assert (variance[~seen] == 1).all()


@pytest.mark.parametrize(("limit", "tol"), LIMITS)
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 5, 8)])
def test_the_body_of_kalman_update_equals_the_reference(size: tuple[int, int, int], limit: float, tol: float) -> None:
    rng = np.random.default_rng(sum(size))
    observed = positive(rng, limit, *size)
    observed[-1, -1] = 0.0  # a position that saw nothing
    inputs = {
        "prior_mean": normal(rng, *size),
        "prior_precision": positive(rng, limit, *size),
        "innovation": normal(rng, *size),
        "observation_precision": observed,
    }
    mean, precision, gain = run_body("KalmanUpdate", inputs, 3)
    expected = reference.update(*float64(*inputs.values()))
    assert_close(gain, expected.gain, tol, "gain")
    assert_close(mean, expected.mean, tol, "posterior mean")
    assert_precision_close(precision, expected.precision, tol)


@pytest.mark.parametrize(("limit", "tol"), LIMITS)
@pytest.mark.parametrize("size", [(1, 1, 2, 1), (2, 1, 8, 12), (3, 6, 5, 9)])
@pytest.mark.parametrize(
    ("name", "step"), [("DynamicsPredict", reference.predict), ("PostNormPredict", reference.predict_post_norm)]
)
def test_the_bodies_of_both_predictions_equal_the_reference(
    name: str, step: Callable[..., reference.Gaussian], size: tuple[int, int, int, int], limit: float, tol: float
) -> None:
    batch, length, width, hidden = size
    rng = np.random.default_rng(sum(size))
    # A spread over d near 1, as a trained state has: J is of order 1/spread.
    mean = rng.normal(size=(batch, length, width))
    mean = (mean - mean.mean(-1, keepdims=True)) / mean.std(-1, keepdims=True) + rng.normal(size=(batch, length, 1))
    inputs = {
        "mean": mean.astype(np.float32),
        "precision": positive(rng, limit, batch, length, width),
        "ln_weight": 1 + normal(rng, width, scale=0.2),
        "ln_bias": normal(rng, width, scale=0.2),
        "w1": normal(rng, hidden, width, scale=0.5 / width**0.5),
        "b1": normal(rng, hidden, scale=0.2),
        "w2": normal(rng, width, hidden, scale=0.5 / hidden**0.5),
        "b2": normal(rng, width, scale=0.2),
        "process_noise_variance": 0.02 * positive(rng, 2.0, width),
    }
    ln_eps = 1e-5
    predicted_mean, predicted_precision = run_body(name, inputs, 2, ln_eps=ln_eps)
    values = float64(*inputs.values())
    expected = step(*values[:4], ln_eps, *values[4:])
    assert_close(predicted_mean, expected.mean, tol, "predicted mean")
    assert_precision_close(predicted_precision, expected.precision, tol)


# --- the proof that graph and torch agree -------------------------------------------------------------------


def test_golden_cases_cover_three_lengths_by_three_batch_sizes_of_every_graph(exported: Exported) -> None:
    cases = exported.said.golden
    shapes = {case.inputs["items"].shape for case in cases if case.graph == "encoder"}
    assert shapes == {(batch, length) for batch in (1, 2, 5) for length in (1, MAX_LEN // 2 + 1, MAX_LEN + 1)}
    assert Counter(case.graph for case in cases) == dict.fromkeys(GRAPHS, 9)
    assert any((case.inputs["items"] == PAD).any() for case in cases if case.graph == "encoder")
    steps = [case.inputs for case in cases if case.graph == "step"]
    assert {int(length) for inputs in steps for length in inputs["past_length"]} >= {0, 1, 3}
    assert any((inputs["past_length"] < inputs["past_timestamps"].shape[1]).any() for inputs in steps)
    assert exported.said.max_error == check_parity(exported.folder, cases) <= PARITY_TOLERANCE


def magnifying(scale: float) -> Backbone:
    """A model whose weights are so many times as large."""
    config = small_config(num_layers=2, shrinkage_dof=2.5)
    model = perturbed_model(config, COUNTS, seed=1).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    return model


def test_a_model_that_magnifies_rounding_is_allowed_for_as_much(on: Exported, tmp_path: Path) -> None:
    assert on.said.tolerance == PARITY_TOLERANCE

    said = export_graphs(magnifying(10), tmp_path, TEMPERATURE)

    assert PARITY_TOLERANCE < said.max_error <= said.tolerance < 1e-2


def test_a_model_whose_states_are_rounding_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"in float32 are off by .*rounding alone.*lower training\.learning_rate"):
        export_graphs(magnifying(300), tmp_path, TEMPERATURE)


def wrong(case: GoldenCase, name: str) -> GoldenCase:
    """The case with its first number off by a little more than the tolerance allows."""
    output = case.outputs[name].copy()
    output.reshape(-1)[0] += 1 if output.dtype == np.int64 else 1e-4 * (1 + np.abs(output.reshape(-1)[0]))
    return replace(case, outputs=case.outputs | {name: output})


def test_one_wrong_number_in_any_output_is_found_and_named(on: Exported) -> None:
    for graph in GRAPHS:
        index, case = next((i, case) for i, case in enumerate(on.said.golden) if case.graph == graph)
        for name in case.outputs:
            cases = list(on.said.golden)
            cases[index] = wrong(case, name)
            with pytest.raises(ExportError, match=rf"^{graph}\.onnx: output {name} of shape .* differs"):
                check_parity(on.folder, cases)


def test_every_input_and_output_of_a_graph_has_its_golden_values(exported: Exported) -> None:
    for case in exported.said.golden:
        session = exported.sessions[case.graph]
        assert {value.name for value in session.get_inputs()} == case.inputs.keys()
        assert {value.name for value in session.get_outputs()} == case.outputs.keys()


def test_a_graph_that_computes_something_else_is_found(on: Exported, tmp_path: Path) -> None:
    for path in on.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = safetensors.numpy.load_file(tmp_path / WEIGHTS)
    stretched = {name: np.asarray(1.001 * array, array.dtype) for name, array in weights.items()}
    safetensors.numpy.save_file(stretched, tmp_path / WEIGHTS)
    with pytest.raises(ExportError, match=r"^encoder\.onnx: output"):
        check_parity(tmp_path, on.said.golden)


@pytest.mark.parametrize("num_items", [1, 2, 5])
def test_golden_cases_of_a_catalogue_smaller_than_a_history_leave_items_to_list(num_items: int) -> None:
    model = perturbed_model(small_config(), torch.ones(num_items), seed=2)
    for case in export.golden_cases(model, TEMPERATURE):
        for name, output in case.outputs.items():
            assert np.isfinite(output).all(), name
            assert output.size > 0


def test_an_export_that_fails_leaves_the_exporter_s_log_as_loud_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    before = logger.level
    monkeypatch.setattr(torch.onnx, "export", lambda *args, **kwargs: None)
    model = perturbed_model(small_config(), COUNTS, seed=3)
    with pytest.raises(ExportError, match="returned nothing"):
        export_graphs(model, tmp_path, TEMPERATURE)
    assert logger.level == before
    assert list(tmp_path.iterdir()) == []
