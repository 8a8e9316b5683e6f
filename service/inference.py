"""The Open Inference Protocol, version 2, over HTTP with JSON tensors: its objects, and tensors in and out of them.

Field names and datatypes are those of the protocol's specification (inference_rest.md). Inputs are checked as far as
the graphs rely on them, so that no request can make one fail. JSON has no NaN and no infinity; `null` stands for them:

    in `timestamps`, `past_timestamps`        there is no time (NaN)
    in `precision`, `past_log_precision`      +∞, and only of a model without filtering, where it is always that
    in `order_precision`                      +∞, of a state that is certain, such as a drawn one
    in an output                              NaN or ±∞, such as the logit behind the end of a short list
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from model.bundle import ENCODER, EXPLAINER, RANKER, STEP, Bundle
from model.config import FIRST_ITEM, PAD
from service.engine import Arrays, Tensor
from service.errors import InvalidRequest
from service.schemas import MAX_RESULTS
from service.states.interface import MAX_ADDED_ITEMS
from service.values import MAX_WEIGHT

PLATFORM = "onnxruntime_onnx"
MAX_TENSORS = 16
MAX_DIMENSIONS = 8
MAX_TIME_S = 1e11

_DATATYPES = {np.dtype(np.int64): "INT64", np.dtype(np.float32): "FP32", np.dtype(np.float64): "FP64"}
_NO_TIME = {"timestamps": math.nan, "past_timestamps": math.nan}
_NO_UNCERTAINTY = {"precision": math.inf, "past_log_precision": math.inf}
_CERTAIN = {"order_precision": math.inf}


def _no_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    if parameters:
        raise ValueError("no parameters are known here; tensors go as JSON, binary ones are not taken")
    return parameters


Parameters = Annotated[dict[str, Any], AfterValidator(_no_parameters), Field(json_schema_extra={"maxProperties": 0})]


class _Object(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class RequestInput(_Object):
    """An input tensor."""

    name: str
    shape: list[int] = Field(max_length=MAX_DIMENSIONS)
    datatype: str
    parameters: Parameters = {}
    data: list[Any] = Field(description="row-major, flat or nested")


class RequestOutput(_Object):
    """An output that is wanted."""

    name: str
    parameters: Parameters = {}


class InferenceRequest(_Object):
    """Inputs of a graph."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": "42",
                    "inputs": [
                        {"name": "items", "shape": [1, 2], "datatype": "INT64", "data": [1, 4]},
                        {"name": "weights", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 1.0]},
                        {"name": "timestamps", "shape": [1, 2], "datatype": "FP64", "data": [None, 1764424800]},
                    ],
                    "outputs": [{"name": "mean"}, {"name": "precision"}],
                }
            ]
        }
    )

    id: str | None = Field(None, max_length=256)
    parameters: Parameters = {}
    inputs: list[RequestInput] = Field(max_length=MAX_TENSORS)
    outputs: list[RequestOutput] | None = Field(None, max_length=MAX_TENSORS, description="left out: all")


class ResponseOutput(_Object):
    """An output tensor."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any] = Field(description="row-major, flat; null for what JSON has no number for")


class InferenceResponse(_Object):
    """Outputs of a graph."""

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[ResponseOutput]


class MetadataTensor(_Object):
    """A tensor of a graph; -1 is any size."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(_Object):
    """A graph, its versions and its tensors."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[MetadataTensor]
    outputs: list[MetadataTensor]


class ServerMetadata(_Object):
    """The server."""

    name: str
    version: str
    extensions: list[str]


class ServerLive(_Object):
    """The server runs."""

    live: bool


class ServerReady(_Object):
    """The server answers; the specification's text has `live` here, its servers say `ready`."""

    live: bool
    ready: bool


class ModelReady(_Object):
    """The model answers."""

    name: str
    ready: bool


def metadata(tensors: Sequence[Tensor]) -> list[MetadataTensor]:
    """A graph's tensors as the protocol describes them."""
    return [
        MetadataTensor(
            name=tensor.name,
            datatype=_DATATYPES[tensor.dtype],
            shape=[size if isinstance(size, int) else -1 for size in tensor.shape],
        )
        for tensor in tensors
    ]


def graph_inputs(
    graph: str, expected: Sequence[Tensor], sent: Sequence[RequestInput], bundle: Bundle, max_rows: int
) -> dict[str, npt.NDArray[Any]]:
    """The inputs of a graph, checked.

    Args:
        graph: one of the bundle's.
        expected: its inputs.
        sent: by the caller.
        bundle: its catalogue, its window, whether it filters.
        max_rows: accepted size of the dimension `batch`.

    Raises:
        InvalidRequest: names the input and what is accepted.
    """
    places = {tensor.name: place for place, tensor in enumerate(sent)}
    known = ", ".join(tensor.name for tensor in expected)
    for place, tensor in enumerate(sent):
        if tensor.name not in [wanted.name for wanted in expected]:
            raise InvalidRequest.of(f"inputs.{place}.name", f"the {graph} has no such input; it has {known}")
        if places[tensor.name] != place:
            raise InvalidRequest.of(f"inputs.{place}.name", f"{tensor.name} is given twice")
    nulls = {**_NO_TIME, **_CERTAIN, **({} if bundle.manifest.model.filtering else _NO_UNCERTAINTY)}
    longest, num_items = bundle.manifest.model.max_len + 1, bundle.manifest.num_items
    bounds = {
        "batch": (1, max_rows),
        "time": (1, longest),
        "past": (0, longest - 1),
        "num_seen": (0, num_items + MAX_ADDED_ITEMS),
        "num_blocked": (0, num_items + MAX_ADDED_ITEMS),
        "num_ordered": (0, max_rows),
        "num_added": (0, MAX_ADDED_ITEMS),
    }
    sizes: dict[str, int] = {}
    feeds: dict[str, npt.NDArray[Any]] = {}
    for wanted in expected:
        name = wanted.name
        if name not in places:
            raise InvalidRequest.of("inputs", f"{name} is missing; the {graph} needs {known}")
        place = places[name]
        feeds[name] = _array(wanted, sent[place], f"inputs.{place}", sizes, bounds, nulls.get(name))
    check = {ENCODER: _check_encoder, EXPLAINER: _check_encoder, STEP: _check_step, RANKER: _check_ranker}[graph]
    check(feeds, bundle)
    return feeds


def num_cells(feeds: Arrays) -> int:
    """What inputs are counted with in the queue: rows × (positions, entries and item numbers)."""
    rows = len(feeds["items"] if "items" in feeds else feeds["mean"])
    lengths = [feeds[name].shape[1] for name in ("items", "past_timestamps", "seen", "blocked") if name in feeds]
    lengths += [len(feeds["added_items"])] if "added_items" in feeds else []
    num_listed = int(feeds["k"][0]) if "k" in feeds else 0
    return int(rows * (sum(lengths) + num_listed))


def response_outputs(outputs: Arrays, asked: Sequence[RequestOutput] | None) -> list[ResponseOutput]:
    """The outputs that are wanted, as the protocol writes them. `check_outputs` was there before."""
    names = list(outputs) if asked is None else [output.name for output in asked]
    return [
        ResponseOutput(
            name=name,
            shape=list(outputs[name].shape),
            datatype=_DATATYPES[outputs[name].dtype],
            data=_json_numbers(outputs[name]),
        )
        for name in names
    ]


def check_outputs(graph: str, known: Sequence[Tensor], asked: Sequence[RequestOutput] | None) -> None:
    """Before anything is computed: the graph has what is wanted.

    Raises:
        InvalidRequest: an output that it does not have.
    """
    names = [tensor.name for tensor in known]
    for place, output in enumerate(asked or ()):
        if output.name not in names:
            raise InvalidRequest.of(
                f"outputs.{place}.name", f"the {graph} has no such output; it has {', '.join(names)}"
            )


def _array(
    expected: Tensor,
    sent: RequestInput,
    field: str,
    sizes: dict[str, int],
    bounds: Mapping[str, tuple[int, int]],
    null: float | None,
) -> npt.NDArray[Any]:
    """One tensor; `sizes` binds the graph's named dimensions to the sizes they are first met with."""
    datatype = _DATATYPES[expected.dtype]
    if sent.datatype != datatype:
        raise InvalidRequest.of(f"{field}.datatype", f"{expected.name} is {datatype}")
    _check_shape(expected, sent.shape, f"{field}.shape", sizes, bounds)
    flat = _flattened(sent.data, sent.shape, f"{field}.data")
    kinds = set(map(type, flat))
    accepted: set[type] = {int} if expected.dtype.kind == "i" else {int, float}
    if null is not None:
        accepted.add(type(None))
    if not kinds <= accepted:
        what = "whole numbers" if expected.dtype.kind == "i" else "numbers"
        raise InvalidRequest.of(f"{field}.data", f"{what} only{', or null' if null is not None else ''}")
    if type(None) in kinds:
        flat = [null if value is None else value for value in flat]
    try:
        with np.errstate(over="ignore"):
            array = np.array(flat, expected.dtype).reshape(sent.shape)
    except OverflowError:
        raise InvalidRequest.of(f"{field}.data", f"a number is beyond {datatype}") from None
    if np.isinf(array).any() and null != math.inf:
        raise InvalidRequest.of(f"{field}.data", f"a number is beyond {datatype}")
    return array


def _check_shape(
    expected: Tensor, shape: Sequence[int], field: str, sizes: dict[str, int], bounds: Mapping[str, tuple[int, int]]
) -> None:
    wanted = "[" + ", ".join(str(size) for size in expected.shape) + "]"
    if len(shape) != len(expected.shape):
        raise InvalidRequest.of(field, f"{expected.name} has the shape {wanted}")
    for size, dimension in zip(shape, expected.shape, strict=True):
        bound = sizes.setdefault(dimension, size) if isinstance(dimension, str) else dimension
        if size != bound:
            raise InvalidRequest.of(field, f"{expected.name} has the shape {wanted}, with {dimension} = {bound}")
        least, most = bounds.get(str(dimension), (bound, bound))
        if not least <= size <= most:
            raise InvalidRequest.of(field, f"accepted as {dimension} of {expected.name}: {least} to {most}")


def _flattened(data: list[Any], shape: Sequence[int], field: str) -> list[Any]:
    """Row-major values of flat or nested data."""
    if data and isinstance(data[0], list):
        for size in shape[:-1]:
            if len(data) != size or not all(isinstance(part, list) for part in data):
                raise InvalidRequest.of(field, "nested data must have the shape that is given")
            if len({len(part) for part in data}) > 1:
                raise InvalidRequest.of(field, "nested data must have the shape that is given")
            shape = [size * shape[1], *shape[2:]]
            data = list(chain.from_iterable(data))
    if len(data) != math.prod(shape):
        raise InvalidRequest.of(field, f"there are {len(data)} values; the shape asks for {math.prod(shape)}")
    return data


def _check_encoder(feeds: Arrays, bundle: Bundle) -> None:
    _check_events(feeds, bundle)


def _check_step(feeds: Arrays, bundle: Bundle) -> None:
    lengths = _check_events(feeds, bundle)
    past, longest = feeds["past_length"], bundle.manifest.model.max_len + 1
    num_past = feeds["past_timestamps"].shape[1]
    _require(((past >= 0) & (past <= num_past)).all(), "past_length", f"0 to {num_past}, the size of `past`")
    _require((past + lengths <= longest).all(), "past_length", f"with the new events at most {longest} positions")
    _check_times(feeds, "past_timestamps")


def _check_ranker(feeds: Arrays, bundle: Bundle) -> None:
    num_items = bundle.manifest.num_items + len(feeds["added_items"])
    for name in ("seen", "blocked"):
        _check_items(feeds, name, num_items)
    most = min(num_items, MAX_RESULTS)
    _require(1 <= feeds["k"][0] <= most, "k", f"1 to {most}")
    _require((feeds["precision"] > 0).all(), "precision", "positive numbers")
    _require((feeds["added_variance"] >= 0).all(), "added_variance", "numbers from 0 on")
    _require(bool(feeds["temperature"] > 0), "temperature", "a positive number")
    _require(bool(feeds["variance_scale"] >= 0), "variance_scale", "a number from 0 on")
    _check_order(feeds)


def _check_order(feeds: Arrays) -> None:
    rows, last = feeds["order_rows"], len(feeds["mean"]) - 1
    is_row = ((rows >= 0) & (rows <= last)).all()
    _require(is_row and len(np.unique(rows)) == len(rows), "order_rows", f"rows, 0 to {last}, each once")
    _require((feeds["order_precision"] > 0).all(), "order_precision", "positive numbers, or null")
    _require((feeds["order_shrinkage"] >= 0).all(), "order_shrinkage", "numbers from 0 on")


def _check_events(feeds: Arrays, bundle: Bundle) -> npt.NDArray[np.int64]:
    """Events of an encoder or a step; their number in each row, without the padding."""
    items, weights = feeds["items"], feeds["weights"]
    _check_items(feeds, "items", bundle.manifest.num_items)
    is_event = items != PAD
    lengths: npt.NDArray[np.int64] = is_event.sum(1)
    is_left = np.arange(items.shape[1]) < lengths[:, None]
    _require((is_event == is_left).all() and lengths.all(), "items", "in each row one at least, then padding (0) only")
    in_range = (weights > 0) & (weights <= MAX_WEIGHT)
    _require((in_range | ~is_event).all(), "weights", f"above 0, up to {MAX_WEIGHT:.0f}")
    _check_times(feeds, "timestamps")
    return lengths


def _check_items(feeds: Arrays, name: str, num_items: int) -> None:
    last = FIRST_ITEM + num_items - 1
    _require(((feeds[name] >= 0) & (feeds[name] <= last)).all(), name, f"item numbers, 0 to {last}")


def _check_times(feeds: Arrays, name: str) -> None:
    times = feeds[name]
    in_range = (times >= 0) & (times <= MAX_TIME_S)
    _require((in_range | np.isnan(times)).all(), name, f"seconds from 0 to {MAX_TIME_S:.0f}, or null")


def _require(condition: "bool | np.bool_", name: str, accepted: str) -> None:
    if not condition:
        raise InvalidRequest.of(f"inputs.{name}.data", f"accepted: {accepted}")


def _json_numbers(array: npt.NDArray[Any]) -> list[Any]:
    flat = array.ravel()
    if np.isfinite(flat).all():
        return list(flat.tolist())
    return [value if math.isfinite(value) else None for value in flat.tolist()]
