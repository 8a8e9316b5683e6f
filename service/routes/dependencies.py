"""What endpoints ask for, and how requests are read."""

import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Annotated, Any
from urllib.parse import unquote_to_bytes

from fastapi import Depends, HTTPException, Path, Request, Response
from fastapi.routing import APIRoute

from service.batches import Batches
from service.context import RequestContext
from service.drift import DriftWatch
from service.ingest import checked_field
from service.lifecycle import Life
from service.models import Model, Models
from service.run_time_items import RunTimeItems
from service.schemas import ID_SCHEMA
from service.slates import RECOMMENDATION_ID, Slates, check_recommendation_id
from service.values import check_id

PathId = Annotated[str, Path(json_schema_extra={**ID_SCHEMA, "description": "percent-encoded; 1–256 bytes of UTF-8"})]


# Coroutines, though nothing waits: FastAPI sends plain functions to a thread, which costs more than the request.
async def get_life(request: Request) -> Life:
    """The process's life."""
    life: Life = request.app.state.life
    return life


async def get_models(request: Request) -> Models:
    """The loaded models; an endpoint takes one of them for as long as it works."""
    return (await get_life(request)).models


async def get_service(request: Request) -> AsyncIterator[Model]:
    """The default model, held to the request's end."""
    with (await get_models(request)).taken() as taken:
        yield taken.model


async def get_context(request: Request) -> RequestContext:
    """The request's id, deadline and timings."""
    context: RequestContext = request.state.context
    return context


async def get_user_id(user_id: PathId) -> str:
    """The id of the path. Paths are matched as they were sent, so that an id may hold an encoded slash."""
    return checked_field("user_id", _check_path_id, user_id)


async def get_item_id(item_id: PathId) -> str:
    """Likewise of an item."""
    return checked_field("item_id", _check_path_id, item_id)


async def get_recommendation_id(
    recommendation_id: Annotated[str, Path(json_schema_extra={"pattern": f"^{RECOMMENDATION_ID.pattern}$"})],
) -> str:
    """The id of an earlier answer."""
    return checked_field("recommendation_id", check_recommendation_id, recommendation_id)


async def get_slates(request: Request) -> Slates:
    """The kept lists."""
    return (await get_life(request)).slates


async def get_drift(request: Request) -> DriftWatch:
    """What followed the lists."""
    return (await get_life(request)).drift


async def get_run_time_items(request: Request) -> RunTimeItems:
    """The items added at run time."""
    return (await get_life(request)).run_time_items


async def get_batches(request: Request) -> Batches:
    """What answers several requests at once."""
    return (await get_life(request)).batches


def _check_path_id(sent: str) -> str:
    try:
        return check_id(unquote_to_bytes(sent).decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError("must be UTF-8, percent-encoded") from None


ServiceDep = Annotated[Model, Depends(get_service)]
ModelsDep = Annotated[Models, Depends(get_models)]
LifeDep = Annotated[Life, Depends(get_life)]
ContextDep = Annotated[RequestContext, Depends(get_context)]
UserIdDep = Annotated[str, Depends(get_user_id)]
ItemIdDep = Annotated[str, Depends(get_item_id)]
RecommendationIdDep = Annotated[str, Depends(get_recommendation_id)]
SlatesDep = Annotated[Slates, Depends(get_slates)]
DriftDep = Annotated[DriftWatch, Depends(get_drift)]
RunTimeItemsDep = Annotated[RunTimeItems, Depends(get_run_time_items)]
BatchesDep = Annotated[Batches, Depends(get_batches)]


class JsonRoute(APIRoute):
    """A route whose body is read by `parse_json`, not by a parser that lets NaN and repeated names pass."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, given a request that parses strictly."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_strictly


class _JsonRequest(Request):
    async def body(self) -> bytes:
        body = await super().body()
        content_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if body and content_type != "application/json":
            raise HTTPException(415, "the body is not declared as application/json")
        return body

    async def json(self) -> Any:
        return parse_json(await self.body())


def parse_json(body: bytes) -> Any:
    """JSON as RFC 8259 has it, each name once in an object.

    Raises:
        HTTPException: 400, says what is wrong. FastAPI would turn any other error into one without words.
    """
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except RecursionError:
        raise HTTPException(400, "the body is nested too deeply") from None
    except UnicodeDecodeError:
        raise HTTPException(400, "the body is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise HTTPException(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError:
        # The one other complaint of `json`: Python converts no integer of more than 4300 digits.
        raise HTTPException(400, "the body holds a number of too many digits") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise HTTPException(400, "the body is not JSON: a name stands twice in one object")
    return result


def _refuse_constant(name: str) -> Any:
    raise HTTPException(400, f"the body is not JSON: {name} is no number")
