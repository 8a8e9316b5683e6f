"""`POST /v1/events`."""

from typing import Annotated

from fastapi import APIRouter, Header

from service.errors import problem_responses
from service.routes.dependencies import ContextDep, JsonRoute, ServiceDep
from service.routes.links import ERASE, EXPORT, FIRST_USER, linked
from service.schemas import ID_SCHEMA, EventsRequest, EventsResponse
from service.values import MAX_ID_BYTES

router = APIRouter(route_class=JsonRoute, tags=["events"])


@router.post(
    "/v1/events",
    summary="Store events, with a result for each",
    response_model_exclude_none=True,
    responses=problem_responses(400, 408, 413, 415, 422, 500, 503, 504)
    | linked(export=(EXPORT, FIRST_USER), erase=(ERASE, FIRST_USER)),
)
async def append_events(
    asked: EventsRequest,
    service: ServiceDep,
    context: ContextDep,
    idempotency_key: Annotated[
        str | None,
        Header(
            description="names this request, as ids are; for events without a name",
            json_schema_extra={"minLength": 1, "maxLength": MAX_ID_BYTES, "pattern": ID_SCHEMA["pattern"]},
        ),
    ] = None,
) -> EventsResponse:
    """Wrong shapes (unknown or missing fields, wrong types) refuse the whole request and store nothing; an
    event with a wrong value is rejected alone. An event is known again by its `event_id`, else by item,
    timestamp and type, else by the Idempotency-Key and its place; without these `idempotent` is false."""
    return EventsResponse(results=await service.ingest.append(asked.events, idempotency_key, context))
