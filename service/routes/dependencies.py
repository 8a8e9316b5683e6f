"""What endpoints ask for, and how requests are read."""

import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any
from urllib.parse import unquote_to_bytes

from fastapi import Depends, HTTPException, Path, Request, Response
from fastapi.routing import APIRoute

from service.context import RequestContext
from service.ingest import checked_field
from service.lifecycle import Life, Service
from service.values import check_id


# Coroutines, though nothing waits: FastAPI sends plain functions to a thread, which costs more than the request.
async def get_life(request: Request) -> Life:
    """The process's life."""
    life: Life = request.app.state.life
    return life


async def get_service(request: Request) -> Service:
    """Whatever answers requests."""
    return (await get_life(request)).service


async def get_context(request: Request) -> RequestContext:
    """The request's id, deadline and timings."""
    context: RequestContext = request.state.context
    return context


async def get_user_id(user_id: Annotated[str, Path(description="percent-encoded")]) -> str:
    """The id of the path. Paths are matched as they were sent, so that an id may hold an encoded slash."""
    return checked_field("user_id", lambda sent: check_id(unquote_to_bytes(sent).decode("utf-8")), user_id)


ServiceDep = Annotated[Service, Depends(get_service)]
LifeDep = Annotated[Life, Depends(get_life)]
ContextDep = Annotated[RequestContext, Depends(get_context)]
UserIdDep = Annotated[str, Depends(get_user_id)]


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
