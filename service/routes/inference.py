"""`/v2/…`: the Open Inference Protocol for the graphs of the loaded models, `encoder`, `step` and `ranker`."""

import importlib.metadata
from collections.abc import AsyncIterator
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Depends, Path

from model.bundle import ENCODER, RANKER, STEP
from service import inference
from service.context import RequestContext
from service.errors import ModelNotFound, problem_responses
from service.inference import (
    PLATFORM,
    InferenceRequest,
    InferenceResponse,
    ModelMetadata,
    ModelReady,
    ServerLive,
    ServerMetadata,
    ServerReady,
)
from service.models import Model, Models
from service.routes.dependencies import ContextDep, JsonRoute, LifeDep, ModelsDep
from service.routes.links import FIRST_VERSION, VERSION, VERSION_INFER, VERSION_READY, linked

router = APIRouter(route_class=JsonRoute, tags=["open inference protocol"])

_SERVER = problem_responses(422, 500, 503, 504)
_GET = problem_responses(404, 422, 500, 503, 504)
_POST = problem_responses(400, 404, 408, 413, 415, 422, 500, 503, 504)

GraphName = Annotated[
    str,
    Path(
        description="`encoder`, `step` (of a causal backbone) or `ranker`",
        json_schema_extra={"enum": [ENCODER, STEP, RANKER], "examples": [ENCODER]},
    ),
]
VersionName = Annotated[str, Path(description="of the default model, or of the canary")]


class Graph(NamedTuple):
    """A graph of a model that the request holds."""

    model: Model
    name: str


async def get_graph(name: GraphName, models: ModelsDep) -> AsyncIterator[Graph]:
    """A graph of the default model."""
    with models.taken_version(None) as model:
        yield _graph(model, name)


async def get_graph_of_version(name: GraphName, version: VersionName, models: ModelsDep) -> AsyncIterator[Graph]:
    """A graph of a model that answers."""
    with models.taken_version(version) as model:
        yield _graph(model, name)


GraphDep = Annotated[Graph, Depends(get_graph)]
GraphOfVersionDep = Annotated[Graph, Depends(get_graph_of_version)]


@router.get("/v2", summary="Server metadata", responses=_SERVER)
async def server_metadata() -> ServerMetadata:
    """No extensions: tensors go as JSON."""
    return ServerMetadata(name="bft-serve", version=importlib.metadata.version("bft-recommender"), extensions=[])


@router.get("/v2/health/live", summary="The process runs", responses=_SERVER)
async def server_live() -> ServerLive:
    """Touches nothing."""
    return ServerLive(live=True)


@router.get("/v2/health/ready", summary="Requests will be answered", responses=_SERVER)
async def server_ready(life: LifeDep) -> ServerReady:
    """As `/readyz` of the operations listener."""
    await life.check_ready()
    return ServerReady(live=True, ready=True)


@router.get(
    "/v2/models/{name}",
    summary="Model metadata",
    responses=_GET
    | linked(
        version=(VERSION, FIRST_VERSION), ready=(VERSION_READY, FIRST_VERSION), infer=(VERSION_INFER, FIRST_VERSION)
    ),
)
async def model_metadata(graph: GraphDep, models: ModelsDep) -> ModelMetadata:
    """Of the default model's graph."""
    return _metadata(graph, models)


@router.get("/v2/models/{name}/versions/{version}", summary="Model metadata of a version", responses=_GET)
async def model_metadata_of_version(graph: GraphOfVersionDep, models: ModelsDep) -> ModelMetadata:
    """Of the graph of a model that answers."""
    return _metadata(graph, models)


@router.get("/v2/models/{name}/ready", summary="A model will answer", responses=_GET)
async def model_ready(graph: GraphDep, life: LifeDep) -> ModelReady:
    """Proven by a recent real inference, or by one made now."""
    await life.check_ready()
    return ModelReady(name=graph.name, ready=True)


@router.get("/v2/models/{name}/versions/{version}/ready", summary="A version will answer", responses=_GET)
async def model_ready_of_version(graph: GraphOfVersionDep, life: LifeDep) -> ModelReady:
    """Proven by a recent real inference, or by one made now."""
    await life.check_ready()
    return ModelReady(name=graph.name, ready=True)


@router.post("/v2/models/{name}/infer", summary="Run a graph", responses=_POST)
async def infer(asked: InferenceRequest, graph: GraphDep, life: LifeDep, context: ContextDep) -> InferenceResponse:
    """Of the default model, on tensors of the caller's: nothing of a user is read or stored. JSON has no NaN and no
    infinity: `null` in `timestamps` says that there is no time, and in an output that the number is not finite."""
    return await _infer(asked, graph, life.settings.max_batch_rows, context)


@router.post("/v2/models/{name}/versions/{version}/infer", summary="Run a version's graph", responses=_POST)
async def infer_of_version(
    asked: InferenceRequest, graph: GraphOfVersionDep, life: LifeDep, context: ContextDep
) -> InferenceResponse:
    """As `POST /v2/models/{name}/infer`, of a model that answers."""
    return await _infer(asked, graph, life.settings.max_batch_rows, context)


def _graph(model: Model, name: str) -> Graph:
    graphs = model.bundle.manifest.graphs
    if name not in graphs:
        raise ModelNotFound(f"this model has no such graph; it has {', '.join(graphs)}")
    return Graph(model, name)


def _metadata(graph: Graph, models: Models) -> ModelMetadata:
    inputs, outputs = graph.model.engine.signature(graph.name)
    having = [model for model in models.active.models if graph.name in model.bundle.manifest.graphs]
    return ModelMetadata(
        name=graph.name,
        versions=[model.version for model in having],
        platform=PLATFORM,
        inputs=inference.metadata(inputs),
        outputs=inference.metadata(outputs),
    )


async def _infer(asked: InferenceRequest, graph: Graph, max_rows: int, context: RequestContext) -> InferenceResponse:
    model, name = graph
    inputs, outputs = model.engine.signature(name)
    inference.check_outputs(name, outputs, asked.outputs)
    feeds = inference.graph_inputs(name, inputs, asked.inputs, model.bundle, max_rows)
    found = await model.engine.infer(name, feeds, inference.num_cells(feeds), context)
    return InferenceResponse(
        model_name=name,
        model_version=model.version,
        id=asked.id,
        outputs=inference.response_outputs(found, asked.outputs),
    )
