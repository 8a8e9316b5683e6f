"""`GET /v1/models` and `PUT /v1/models/active`, on the admin listener."""

from typing import Annotated

from fastapi import APIRouter, Header, Response

from service.drift import DriftWatch, ModelKey
from service.errors import PreconditionRequired, problem_responses
from service.models import Active, Model, Models, RegistryView
from service.routes.dependencies import ContextDep, DriftDep, JsonRoute, ModelsDep
from service.routes.links import DEFAULT, DEFAULT_OF_ALL, ETAG, GET_ACTIVE, PUT_ACTIVE, linked
from service.schemas import (
    ActiveModels,
    ActiveModelsRequest,
    KnownRegistry,
    LoadedModel,
    ModelDrift,
    ModelsResponse,
    RefusedBundle,
    Role,
)

router = APIRouter(route_class=JsonRoute, tags=["models"])


@router.get(
    "/v1/models",
    summary="What is loaded, and what could be",
    responses=problem_responses(401, 422, 500, 503, 504) | linked(put_active=(PUT_ACTIVE, ETAG, DEFAULT_OF_ALL)),
)
async def list_models(models: ModelsDep, drift: DriftDep, response: Response) -> ModelsResponse:
    """The ETag is that of `active`: equal on all replicas that serve the same models in the same way. It does not cover
    `drift`."""
    view = await models.look()
    _tag(response, models)
    return _described(models, drift, view)


@router.get(
    "/v1/models/active",
    summary="Who answers",
    responses=problem_responses(401, 422, 500, 503, 504) | linked(put_active=(PUT_ACTIVE, ETAG, DEFAULT)),
)
async def get_active(models: ModelsDep, response: Response) -> ActiveModels:
    """As `active` of `GET /v1/models`, with the same ETag."""
    _tag(response, models)
    return _active(models)


@router.put(
    "/v1/models/active",
    summary="Load, canary, roll back",
    responses=problem_responses(400, 401, 408, 409, 412, 413, 415, 422, 428, 500, 503, 504)
    | linked(get_active=(GET_ACTIVE, {}), put_active=(PUT_ACTIVE, ETAG, DEFAULT)),
)
async def put_active(
    asked: ActiveModelsRequest,
    models: ModelsDep,
    context: ContextDep,
    response: Response,
    if_match: Annotated[str | None, Header(description="the ETag of GET /v1/models; or *")] = None,
) -> ActiveModels:
    """Answers when it is so, at the latest after `BFT_LOAD_TIMEOUT_S` (or X-Request-Timeout-Ms): a model that is not
    loaded is verified, loaded, compared with its recorded outputs and warmed first. Either all of it happens or
    nothing. Of this process only, and not written down: a restart serves the registry's current bundle. A version (or
    `previous`) stays until the registry's current bundle changes or `default` is put to `current`."""
    if if_match is None:
        raise PreconditionRequired("a change of models needs If-Match")
    await models.put(asked.default, asked.canary, asked.percent or 0.0, if_match, context)
    _tag(response, models)
    return _active(models)


def _tag(response: Response, models: Models) -> None:
    response.headers["ETag"] = models.active.etag
    response.headers["Cache-Control"] = "no-store"


def _described(models: Models, drift: DriftWatch, view: RegistryView) -> ModelsResponse:
    active = models.active
    registry = None
    if models.has_registry:
        registry = KnownRegistry(
            current=None if view.index is None else view.index.current,
            previous=None if view.index is None else view.index.previous,
            versions=list(view.versions),
            problem=view.problem,
        )
    return ModelsResponse(
        active=_active(models),
        loaded=[_loaded(model, active, drift) for model in (*active.models, *models.retired)],
        loading=list(models.loading),
        registry=registry,
        refused=[RefusedBundle(version=it.version, reason=it.reason, at=it.at) for it in models.refused],
    )


def _active(models: Models) -> ActiveModels:
    active = models.active
    return ActiveModels(
        default=active.default.version,
        canary=None if active.canary is None else active.canary.version,
        percent=None if active.canary is None else active.percent,
        pinned=active.pinned,
    )


def _loaded(model: Model, active: Active, drift: DriftWatch) -> LoadedModel:
    manifest, engine = model.bundle.manifest, model.engine
    role: Role = "default" if model is active.default else "canary" if model is active.canary else "retired"
    return LoadedModel(
        name=manifest.name,
        version=manifest.version,
        role=role,
        backbone=manifest.model.backbone,
        filtering=manifest.model.filtering,
        max_len=manifest.model.max_len,
        num_items=manifest.num_items,
        lineage=manifest.lineage,
        event=manifest.event,
        created_at=manifest.created_at,
        provider=engine.provider,
        custom_ops=engine.custom_ops,
        versions=manifest.versions,
        loaded_at=model.loaded_at,
        load_seconds=round(model.load_seconds, 3),
        num_requests=model.num_requests,
        drift=_drift(drift, ModelKey(manifest.name, manifest.version)),
    )


def _drift(watch: DriftWatch, model: ModelKey) -> ModelDrift:
    found = watch.drift(model)
    return ModelDrift(
        settled=found.settled,
        mean_list_confidence=found.mean_list_confidence,
        hit_rate=found.hit_rate,
        difference=found.difference,
        interval=found.interval,
        zero_inside=None if found.interval is None else found.interval[0] <= 0 <= found.interval[1],
    )
