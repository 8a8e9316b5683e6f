"""The two applications of one process: the public API and the operations endpoints, over one `Life`."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from service.errors import MEDIA_TYPE, add_error_handlers
from service.lifecycle import Life
from service.middleware import MAX_TIMEOUT_MS, RequestMiddleware
from service.routes import events, operations, recommendations, users
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
        "description": "echoed in the answer, and in the logs; made up when missing",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._~:/+=@-]{1,128}$"},
    },
    {
        "name": "X-Request-Timeout-Ms",
        "in": "header",
        "description": "the caller's deadline; past it the answer is 504",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_TIMEOUT_MS},
    },
]


def create_app(settings: Settings) -> FastAPI:
    """The public API. What it works with is born in its lifespan; `app.state.life` is the handle on it."""
    metrics = Metrics()
    life = Life(settings, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with life.open():
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
    app.add_middleware(RequestMiddleware, settings=settings, metrics=metrics)
    _add_routers(app, [recommendations.router, events.router, users.router])
    _describe(app)
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


def _add_routers(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    for router in routers:
        app.include_router(router)
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    add_error_handlers(app, routes)


def _describe(app: FastAPI) -> None:
    """Put into the OpenAPI document what FastAPI cannot know: the problems' media type, common headers."""
    described: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not described:
            described.update(
                get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            )
            for operations_of_path in described["paths"].values():
                for operation in operations_of_path.values():
                    _describe_operation(operation)
        return described

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document


def _describe_operation(operation: dict[str, Any]) -> None:
    operation.setdefault("parameters", []).extend(_HEADER_PARAMETERS)
    for status, response in operation["responses"].items():
        if int(status) >= 400:
            response["content"] = {MEDIA_TYPE: response["content"]["application/json"]}
