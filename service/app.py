"""The applications of one process, over one `Life`: the public API, the operations endpoints, the admin API."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from service.docs import ASSET_PATHS, INIT_PATH, OPENAPI_PATH, PAGE_PATH, docs_router
from service.errors import MEDIA_TYPE, add_error_handlers
from service.lifecycle import Life
from service.limiting import open_rate_limits
from service.middleware import MAX_TIMEOUT_MS, RequestMiddleware
from service.routes import added_items, admin, events, inference, items, operations, rankings, recommendations, users
from service.security import admin_keys, load_api_keys
from service.settings import Settings
from service.telemetry import Metrics

_DESCRIPTION = """\
Sequential recommendation in which every ranked item comes with a calibrated confidence: the probability that
it is the subject's next event.

Every error is an `application/problem+json` (RFC 9457) that says what to do."""

_HEADER_PARAMETERS = [
    {
        "name": "X-Request-Id",
        "in": "header",
        "description": "echoed in the answer, and in the logs; made up when it is missing or not 1 to 128 letters, "
        "digits and ._~:/+=@-",
        "schema": {"type": "string"},
    },
    {
        "name": "X-Request-Timeout-Ms",
        "in": "header",
        "description": "the caller's deadline; past it the answer is 504",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_TIMEOUT_MS},
    },
]

_PROBLEM = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
_KEY_PROBLEMS = {
    "401": {"description": "There is no API key, or not one that is known", "content": _PROBLEM},
    "429": {"description": "The quota of the API key is used up; Retry-After says for how long", "content": _PROBLEM},
}

# What the page and its browser load before anybody could send a key.
_OPEN_PATHS = (PAGE_PATH, INIT_PATH, *ASSET_PATHS, OPENAPI_PATH)


def create_app(settings: Settings) -> FastAPI:
    """The public API. What it works with is born in its lifespan; `app.state.life` is the handle on it.

    Raises:
        StartError: a setting cannot be met, or the keys file is not as it must be.
    """
    metrics = Metrics()
    life = Life(settings, metrics)
    keys = load_api_keys(settings)
    limits = open_rate_limits(settings, keys, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with aclosing(limits), life.open():
            yield

    app = FastAPI(
        title="BFT recommender",
        version="1",
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.life = life
    app.add_middleware(
        RequestMiddleware,
        settings=settings,
        metrics=metrics,
        keys=keys,
        limits=limits,
        open_paths=_OPEN_PATHS if settings.docs else (),
    )
    documentation = [docs_router()] if settings.docs else []
    public = (recommendations, rankings, items, events, users, inference)
    _add_routers(app, [*(module.router for module in public), *documentation])
    _describe(app, with_keys=bool(keys))
    return app


def create_ops_app(life: Life) -> FastAPI:
    """The operations endpoints of a process; they answer from its first moment to its last."""
    app = FastAPI(
        title="BFT recommender, operations",
        version="1",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.life = life
    _add_routers(app, [operations.router])
    return app


def create_admin_app(life: Life) -> FastAPI:
    """The admin API of a process, behind the admin key if there is one."""
    settings = life.settings
    app = FastAPI(
        title="BFT recommender, admin",
        version="1",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.life = life
    app.add_middleware(
        RequestMiddleware,
        # A bundle takes longer to load than a list to make.
        settings=settings.model_copy(update={"request_timeout_ms": round(settings.load_timeout_s * 1000)}),
        metrics=life.metrics,
        keys=admin_keys(settings),
    )
    _add_routers(app, [admin.router, added_items.router])
    _describe(app, with_keys=settings.admin_key is not None)
    return app


def _add_routers(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    for router in routers:
        app.include_router(router)
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    add_error_handlers(app, routes)


def _describe(app: FastAPI, with_keys: bool) -> None:
    """Put into the OpenAPI document what FastAPI cannot know: the problems' media type, common headers, the API key."""
    described: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not described:
            described.update(
                get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            )
            for operations_of_path in described["paths"].values():
                for operation in operations_of_path.values():
                    _describe_operation(operation)
                    if with_keys:
                        operation["responses"] |= _KEY_PROBLEMS
            if with_keys:
                described["components"]["securitySchemes"] = {"api_key": {"type": "http", "scheme": "bearer"}}
                described["security"] = [{"api_key": []}]
        return described

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document


def _describe_operation(operation: dict[str, Any]) -> None:
    operation.setdefault("parameters", []).extend(_HEADER_PARAMETERS)
    for status, response in operation["responses"].items():
        if int(status) >= 400:
            response["content"] = {MEDIA_TYPE: response["content"]["application/json"]}
