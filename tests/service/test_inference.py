"""The Open Inference Protocol through a real process; expected numbers come from ONNX Runtime asked directly."""

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime
import pytest

from model.bundle import ENCODER, EXPLAINER, GRAPHS, RANKER, STEP, Bundle, open_bundle
from model.config import BOS, FIRST_ITEM
from model.registry import resolve
from service.context import unhurried
from service.engine import EncoderRow, Engine
from service.errors import InferenceFailed
from service.settings import Settings
from service.telemetry import Metrics
from tests.service.bundles import MAX_LEN, NUM_ITEMS
from tests.service.serving import Server, counted, serving

DATATYPES = {"int64": "INT64", "float32": "FP32", "float64": "FP64"}
LAST = FIRST_ITEM + NUM_ITEMS - 1


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "service.log"
    with serving(tiny, log, MAX_BATCH_ROWS=8, MAX_BODY_BYTES=4_000_000) as running:
        yield running


@pytest.fixture(scope="module")
def bundle(tiny: Path) -> Bundle:
    return open_bundle(resolve(tiny))


def session(bundle: Bundle, graph: str) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(bundle.graph_path(graph), providers=["CPUExecutionProvider"])


def tensor(name: str, values: Any, dtype: str | None = None) -> dict[str, Any]:
    """A tensor as JSON; numbers that JSON lacks become null."""
    array = np.asarray(values, dtype)
    flat = [
        None if isinstance(value, float) and not math.isfinite(value) else value for value in array.ravel().tolist()
    ]
    return {"name": name, "shape": list(array.shape), "datatype": DATATYPES[array.dtype.name], "data": flat}


def array(output: dict[str, Any]) -> np.ndarray:
    values = [math.nan if value is None else value for value in output["data"]]
    return np.array(values, np.float64).reshape(output["shape"])


def infer(server: Server, graph: str, *inputs: dict[str, Any], **fields: Any) -> httpx.Response:
    return server.client.post(f"/v2/models/{graph}/infer", json={"inputs": inputs, **fields})


def history(*numbers: int, **changes: Any) -> list[dict[str, Any]]:
    """The encoder's inputs for one history; `changes` replace fields of an input."""
    items = [BOS, *numbers]
    inputs = {
        "items": tensor("items", [items]),
        "weights": tensor("weights", [[1.0] * len(items)], "float32"),
        "timestamps": tensor("timestamps", [[math.nan, *(1.7e9 + place for place in range(len(numbers)))]], "float64"),
    }
    for name, fields in changes.items():
        inputs[name] = inputs[name] | fields
    return list(inputs.values())


def refused(response: httpx.Response, status: int = 422) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    # The protocol's own error object, as a member of the problem.
    assert body["error"] == body["detail"]
    assert body["action"]
    return body


# ---- metadata --------------------------------------------------------------------------------------------


def test_the_server_tells_its_name_and_that_it_is_ready(server: Server) -> None:
    metadata = server.client.get("/v2").json()

    assert metadata["name"] == "bft-serve"
    assert metadata["extensions"] == []
    assert isinstance(metadata["version"], str)
    assert server.client.get("/v2/health/live").json() == {"live": True}
    assert server.client.get("/v2/health/ready").json() == {"live": True, "ready": True}


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_model_tells_its_tensors_as_its_graph_has_them(server: Server, bundle: Bundle, graph: str) -> None:
    expected = session(bundle, graph)
    names = {"tensor(int64)": "INT64", "tensor(float)": "FP32", "tensor(double)": "FP64"}

    for path in (f"/v2/models/{graph}", f"/v2/models/{graph}/versions/{bundle.manifest.version}"):
        metadata = server.client.get(path).json()
        assert metadata["name"] == graph
        assert metadata["platform"] == "onnxruntime_onnx"
        assert metadata["versions"] == [bundle.manifest.version]
        for side, nodes in (("inputs", expected.get_inputs()), ("outputs", expected.get_outputs())):
            assert metadata[side] == [
                {
                    "name": node.name,
                    "datatype": names[node.type],
                    "shape": [size if isinstance(size, int) else -1 for size in node.shape],
                }
                for node in nodes
            ]
        assert server.client.get(f"{path}/ready").json() == {"name": graph, "ready": True}


@pytest.mark.parametrize(
    "path", ["/v2/models/decoder", "/v2/models/encoder/versions/0000000000000000", "/v2/models/decoder/ready"]
)
def test_an_unknown_model_or_version_is_a_404_in_both_shapes(server: Server, path: str) -> None:
    assert refused(server.client.get(path), 404)["type"] == "urn:problem-type:bft:model-not-found"
    assert refused(server.client.post(f"{path}/infer", json={"inputs": []}), 404)["error"]


def test_other_errors_below_v2_have_both_shapes_too_and_no_others(server: Server) -> None:
    refused(server.client.get("/v2/nothing"), 404)
    refused(
        server.client.post("/v2/models/encoder/infer", content=b"[", headers={"Content-Type": "application/json"}), 400
    )
    refused(server.client.post("/v2/models/encoder/infer", content=b" " * 4_000_001), 413)
    assert "error" not in server.client.get("/v1/nothing").json()


# ---- inference -------------------------------------------------------------------------------------------


def test_every_graph_answers_what_onnx_runtime_does(server: Server, bundle: Bundle) -> None:
    asked: set[str] = set()
    for case in bundle.golden_cases():
        direct = session(bundle, case.graph)
        names = [output.name for output in direct.get_outputs()]
        expected = dict(zip(names, direct.run(names, case.inputs), strict=True))

        response = infer(server, case.graph, *(tensor(name, values) for name, values in case.inputs.items()), id="a-1")

        assert response.status_code == 200, response.text
        body = response.json()
        assert (body["model_name"], body["model_version"], body["id"]) == (case.graph, bundle.manifest.version, "a-1")
        assert [output["name"] for output in body["outputs"]] == names
        for output in body["outputs"]:
            wanted = expected[output["name"]]
            assert (output["shape"], output["datatype"]) == (list(wanted.shape), DATATYPES[wanted.dtype.name])
            finite = np.where(np.isfinite(wanted), wanted, np.nan)
            # The number of threads may differ, and with it the order of sums.
            np.testing.assert_allclose(array(output), finite, rtol=1e-5, atol=1e-5, err_msg=output["name"])
        asked.add(case.graph)
    assert asked == set(GRAPHS)


def test_encoder_step_and_ranker_make_the_list_of_the_api(server: Server) -> None:
    numbers = [10, 400, 77]
    told = [
        {"item_id": f"item-{number - FIRST_ITEM}", "timestamp": 1.7e9 + place} for place, number in enumerate(numbers)
    ]
    expected = server.recommend(history=told, num_results=5)

    first = {it["name"]: it for it in infer(server, ENCODER, *history(*numbers[:2])).json()["outputs"]}
    past = {f"past_{name}": first[name] | {"name": f"past_{name}"} for name in ("key", "value", "log_precision")}
    state = infer(
        server,
        STEP,
        tensor("items", [numbers[2:]]),
        tensor("weights", [[1.0]], "float32"),
        tensor("timestamps", [[1.7e9 + 2]], "float64"),
        *past.values(),
        tensor("past_timestamps", [[math.nan, 1.7e9, 1.7e9 + 1]], "float64"),
        tensor("past_length", [3]),
        outputs=[{"name": "precision"}, {"name": "mean"}],
    ).json()["outputs"]
    ranked = infer(
        server,
        RANKER,
        *state,
        tensor("added_items", np.empty((0, 16)), "float32"),
        tensor("added_variance", [], "float32"),
        tensor("seen", [numbers]),
        tensor("blocked", [numbers]),
        tensor("k", [5]),
        tensor("temperature", 0.8, "float32"),
        tensor("variance_scale", 0.7, "float32"),
        tensor("order_rows", [], "int64"),
        tensor("order_mean", np.empty((0, 16)), "float32"),
        tensor("order_precision", np.empty((0, 16)), "float32"),
        tensor("order_shrinkage", [], "float32"),
        tensor("order_kappa", [], "float32"),
        outputs=[{"name": "items"}, {"name": "score_mean"}],
    ).json()["outputs"]

    assert [output["name"] for output in state] == ["precision", "mean"]
    items, scores = ranked
    assert [f"item-{number - FIRST_ITEM}" for number in items["data"]] == [it["item_id"] for it in expected["items"]]
    np.testing.assert_allclose(scores["data"], [it["score"] for it in expected["items"]], rtol=1e-4)


def test_nested_data_says_the_same_as_flat(server: Server) -> None:
    flat = infer(server, ENCODER, *history(5, 6)).json()
    nested = infer(server, ENCODER, *history(5, 6, items={"data": [[BOS, 5, 6]]})).json()

    assert nested["outputs"] == flat["outputs"]


def test_what_a_caller_runs_is_counted_apart(server: Server) -> None:
    def rows() -> float:
        return counted(server.ops.get("/metrics").text, "bft_engine_batch_rows_sum", "graph").get("raw:encoder", 0.0)

    before = rows()
    assert infer(server, ENCODER, *history(5)).status_code == 200

    assert rows() == before + 1


# ---- what is refused -------------------------------------------------------------------------------------

LONG = list(range(FIRST_ITEM, FIRST_ITEM + MAX_LEN + 1))


@pytest.mark.parametrize(
    ("inputs", "word"),
    [
        pytest.param(history(5)[:2], "timestamps is missing", id="an input is missing"),
        pytest.param([*history(5), tensor("extra", [1])], "no such input", id="an unknown input"),
        pytest.param([*history(5), history(5)[0]], "items is given twice", id="an input twice"),
        pytest.param(history(5, items={"datatype": "INT32"}), "items is INT64", id="another type"),
        pytest.param(history(5, weights={"datatype": "FP64"}), "weights is FP32", id="another width"),
        pytest.param(history(5, items={"shape": [2]}), r"[batch, time]", id="another number of dimensions"),
        pytest.param(history(5, items={"shape": [1, 3]}), "3", id="too few values"),
        pytest.param(history(5, items={"shape": [1, 10**30]}), "accepted", id="an immense dimension"),
        pytest.param(history(5, items={"shape": [-1, -2]}), "accepted", id="a negative dimension"),
        pytest.param(history(5, items={"shape": [0, 2], "data": []}), "batch", id="no rows"),
        pytest.param(history(5, weights={"shape": [1, 1], "data": [1]}), "time = 2", id="dimensions that differ"),
        pytest.param(history(5, items={"data": [[1], [4]]}), "nested", id="nested in another shape"),
        pytest.param(history(5, items={"data": [[1, 4], 5]}), "nested", id="half nested"),
        pytest.param(history(5, items={"data": [1.5, 4]}), "whole numbers", id="a fraction as an item"),
        pytest.param(history(5, items={"data": [True, 4]}), "whole numbers", id="a truth value"),
        pytest.param(history(5, items={"data": ["1", 4]}), "whole numbers", id="a text"),
        pytest.param(history(5, items={"data": [None, 4]}), "whole numbers", id="null as an item"),
        pytest.param(history(5, items={"data": [1, 2**80]}), "beyond INT64", id="an item beyond 64 bits"),
        pytest.param(history(LAST + 1), f"0 to {LAST}", id="an item beyond the catalogue"),
        pytest.param(history(-5), f"0 to {LAST}", id="a negative item"),
        pytest.param(history(2**31), f"0 to {LAST}", id="a number of an unknown item"),
        pytest.param(history(0, 5), "padding", id="padding on the left"),
        pytest.param(history(5, items={"data": [0, 0]}), "padding", id="padding alone"),
        pytest.param(history(*LONG), f"1 to {MAX_LEN + 1}", id="longer than the window"),
        pytest.param(history(5, weights={"data": [1, 0]}), "above 0", id="a weight of 0"),
        pytest.param(history(5, weights={"data": [1, -1]}), "above 0", id="a negative weight"),
        pytest.param(history(5, weights={"data": [1, None]}), "numbers only", id="null as a weight"),
        pytest.param(history(5, weights={"data": [1, 1e300]}), "beyond FP32", id="a weight beyond 32 bits"),
        pytest.param(history(5, timestamps={"data": [None, -1]}), "seconds from 0", id="a time before 1970"),
        pytest.param(history(5, timestamps={"data": [None, 1e300]}), "seconds from 0", id="a time without end"),
        pytest.param(history(5, timestamps={"data": [None, "now"]}), "numbers only, or null", id="a time in words"),
        pytest.param(history(5, items={"parameters": {"binary_data_size": 8}}), "no parameters", id="binary data"),
        pytest.param(history(5, items={"note": 1}), "unknown field", id="an unknown field"),
    ],
)
def test_what_the_encoder_cannot_read_is_refused_by_name(
    server: Server, inputs: list[dict[str, Any]], word: str
) -> None:
    body = refused(infer(server, ENCODER, *inputs))

    assert word in body["detail"]
    assert body["errors"][0]["field"].startswith("inputs")


def test_the_explainer_reads_what_the_encoder_does(server: Server) -> None:
    assert infer(server, EXPLAINER, *history(5)).status_code == 200
    assert f"0 to {LAST}" in refused(infer(server, EXPLAINER, *history(LAST + 1)))["detail"]


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_json_number_is_a_400(server: Server, literal: str) -> None:
    sent = f'{{"inputs": [{{"name": "weights", "shape": [1, 1], "datatype": "FP32", "data": [{literal}]}}]}}'
    headers = {"Content-Type": "application/json"}

    refused(server.client.post("/v2/models/encoder/infer", content=sent, headers=headers), 400)


def step_inputs(bundle: Bundle, **changes: Any) -> list[dict[str, Any]]:
    case = next(case for case in bundle.golden_cases() if case.graph == STEP)
    inputs = {name: tensor(name, values) for name, values in case.inputs.items()}
    return [fields | changes.get(name, {}) for name, fields in inputs.items()]


def order(**changes: list[Any]) -> dict[str, dict[str, Any]]:
    """Changes of the ranker's inputs: rows to be ordered otherwise."""
    num = len(changes["rows"])
    values = {
        "mean": [[0.5] * 16] * num,
        "precision": [[None] * 16] * num,
        "shrinkage": [1.0] * num,
        "kappa": [0.0] * num,
    } | changes
    width = {"mean": [16], "precision": [16]}
    return {f"order_{name}": {"data": data, "shape": [num, *width.get(name, [])]} for name, data in values.items()}


def test_rows_may_be_ordered_by_another_state(server: Server, bundle: Bundle) -> None:
    answer = infer(server, RANKER, *ranker_inputs(bundle, **order(rows=[0])), outputs=[{"name": "order_key"}])

    assert answer.status_code == 200, answer.text
    key = answer.json()["outputs"][0]["data"]
    assert key == sorted(key, reverse=True)


def ranker_inputs(bundle: Bundle, **changes: Any) -> list[dict[str, Any]]:
    case = next(case for case in bundle.golden_cases() if case.graph == RANKER)
    inputs = {name: tensor(name, values) for name, values in case.inputs.items()}
    return [fields | changes.get(name, {}) for name, fields in inputs.items()]


@pytest.mark.parametrize(
    ("graph", "changes", "word"),
    [
        (STEP, {"past_length": {"data": [99]}}, "past_length"),
        (STEP, {"past_length": {"data": [-1]}}, "past_length"),
        (STEP, {"past_key": {"shape": [1, 2, 2, 1, 9]}}, "past_key"),
        (RANKER, {"k": {"data": [0]}}, "k.data: accepted: 1 to 500"),
        (RANKER, {"k": {"data": [501]}}, "k.data: accepted: 1 to 500"),
        (RANKER, {"k": {"data": [5, 6], "shape": [2]}}, "k has the shape [1]"),
        # The golden cases add three items.
        (RANKER, {"seen": {"data": [LAST + 4], "shape": [1, 1]}}, f"0 to {LAST + 3}"),
        (RANKER, {"blocked": {"data": [-1], "shape": [1, 1]}}, f"0 to {LAST + 3}"),
        (RANKER, {"added_variance": {"data": [1.0, -1.0, 1.0]}}, "added_variance.data: accepted: numbers from 0 on"),
        (RANKER, {"temperature": {"data": [0]}}, "temperature"),
        (RANKER, {"temperature": {"data": []}}, "values"),
        (RANKER, {"variance_scale": {"data": [-1]}}, "variance_scale"),
        (RANKER, {"order_rows": {"data": [1], "shape": [1]}}, "num_ordered"),
        (RANKER, order(rows=[1]), "order_rows.data: accepted: rows, 0 to 0, each once"),
        (RANKER, order(rows=[-1]), "rows, 0 to 0"),
        (RANKER, order(rows=[0, 0]), "each once"),
        (RANKER, order(rows=[0], precision=[[0.0] * 16]), "order_precision.data: accepted: positive numbers, or null"),
        (RANKER, order(rows=[0], shrinkage=[-0.5]), "order_shrinkage"),
        (RANKER, order(rows=[0], kappa=[1e39]), "beyond FP32"),
        (RANKER, {"precision": {"data": [0.0] * 16, "shape": [1, 16]}}, "precision"),
        (RANKER, {"precision": {"data": [None] * 16, "shape": [1, 16]}}, "numbers only"),
        (RANKER, {"mean": {"data": [0.0] * 15, "shape": [1, 15]}}, "mean has the shape [batch, 16]"),
        (RANKER, {"mean": {"data": [0.0] * 144, "shape": [9, 16]}}, "1 to 8"),
    ],
)
def test_what_step_and_ranker_cannot_read_is_refused_by_name(
    server: Server, bundle: Bundle, graph: str, changes: dict[str, Any], word: str
) -> None:
    made = step_inputs if graph == STEP else ranker_inputs
    assert infer(server, graph, *made(bundle)).status_code == 200

    assert word in refused(infer(server, graph, *made(bundle, **changes)))["detail"]


def test_an_output_that_is_not_there_is_refused_before_anything_runs(server: Server) -> None:
    body = refused(infer(server, ENCODER, *history(5), outputs=[{"name": "mean"}, {"name": "median"}]))

    assert body["errors"][0]["field"] == "outputs.1.name"
    refused(infer(server, ENCODER, *history(5), outputs=[{"name": "mean", "parameters": {"binary_data": True}}]))


def test_after_all_that_the_service_answers(server: Server) -> None:
    assert server.ops.get("/readyz").status_code == 200
    assert server.recommend(user_id="u")["cold_start"] is True
    assert not [line for line in server.log_lines() if line["level"] == "ERROR"]


# ---- the engine ------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_inputs_that_a_graph_cannot_run_on_fail_alone(tiny: Path) -> None:
    engine = Engine(open_bundle(resolve(tiny)), Settings(bundle=tiny, threads=1), Metrics())
    engine.start()
    good = {
        "items": np.array([[BOS]]),
        "weights": np.ones((1, 1), np.float32),
        "timestamps": np.full((1, 1), np.nan),
    }
    bad = good | {"weights": np.ones((1, 5), np.float32)}
    request = unhurried("test", 60)
    try:
        found = await asyncio.gather(
            *(engine.infer(ENCODER, feeds, 1, request) for feeds in (good, bad, good)), return_exceptions=True
        )
        state = await engine.encode(EncoderRow(*(values[0] for values in good.values())), request)
    finally:
        await engine.close()

    assert isinstance(found[1], InferenceFailed)
    for outputs in (found[0], found[2]):
        np.testing.assert_allclose(outputs["mean"][0], state.mean, rtol=1e-5, atol=1e-5)  # type: ignore[index,call-overload]
