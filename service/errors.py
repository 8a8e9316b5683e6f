"""Every error as `application/problem+json` (RFC 9457), each saying what to do.

    ServiceError                 base: status, type, title; raised deep, written once, here
    ├── InvalidRequest    422    the caller: a field's value; names the fields
    ├── MalformedRequest  400    the caller: no HTTP
    ├── HeadTooLarge      431    the caller: its path and headers together
    ├── Unauthorized      401    the caller: no API key, or one that is not known
    ├── RateLimited       429    the caller: its own quota
    ├── BodyTooLarge      413    the caller
    ├── BodyTooSlow       408    the caller
    ├── UserNotFound      404    the caller
    ├── RecommendationNotFound  404  the caller: its slate expired, or was never kept
    ├── ItemNotFound      404    the caller: an id outside the catalogue
    ├── AddedItemNotFound 404    the caller: no such item was added at run time
    ├── ItemInCatalogue   409    the caller: an item is added that the model was trained with
    ├── ItemsFull         409    the caller: too many items are added at run time
    ├── SessionTaken      409    the caller: the session goes to another user
    ├── SessionBusy       503    the world: a session changes faster than it can be merged
    ├── ModelNotFound     404    the caller: no such graph, or no such version loaded
    ├── ChangeUnderWay    409    the caller: models change one at a time
    ├── NoRegistry        409    the caller: the service serves one bundle and knows no others
    ├── PreconditionFailed    412  the caller: the models changed since it looked
    ├── PreconditionRequired  428  the caller: no If-Match
    ├── BundleRefused     422    the operator: a bundle is damaged or does not fit; the old model answers
    ├── BeforeErasure     409    the caller: an event older than the user's erasure
    ├── ClientLeft        499    the caller went away; only the log sees it
    ├── DeadlinePassed    504    the world: the caller's own deadline
    ├── Overloaded        503    the world: queue full, or the wait would exceed the deadline
    ├── NotReady          503    the world: starting or draining
    ├── EngineStopped     503    the world: the inference worker died; /readyz is red
    └── InferenceFailed   500    us: a batch failed

Errors of the state store (service/states/interface.py) keep their own tree; `STATE_PROBLEMS` says what each
is to a caller of the API. What stops the start-up is a `StartError` or a `model.bundle.BundleError`; neither
has a status.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from service.states.interface import (
    CatalogMismatch,
    NotReplicated,
    OutboxFull,
    StateError,
    StateUnavailable,
    UnknownItemsFull,
)

logger = logging.getLogger(__name__)

TYPE_PREFIX = "urn:problem-type:bft:"
MEDIA_TYPE = "application/problem+json"
MAX_FIELD_ERRORS = 10
MAX_FIELD_CHARS = 200


class StartError(Exception):
    """The service cannot start; the message says why and what to do."""


class FieldError(BaseModel):
    """One field that was refused."""

    field: str
    """Where: `body` path with dots, or `header X-Request-Timeout-Ms`."""
    message: str


class Problem(BaseModel):
    """The body of every error (RFC 9457)."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": f"{TYPE_PREFIX}invalid-request",
                    "title": "The request has a wrong field",
                    "status": 422,
                    "detail": "num_results: Input should be less than or equal to 500",
                    "action": "Correct the named fields and send the request again.",
                    "request_id": "0b9f0ce6c5f44d0f",
                    "errors": [{"field": "num_results", "message": "Input should be less than or equal to 500"}],
                }
            ]
        }
    )

    type: str = Field(description="identifies the kind of problem; does not change between releases")
    title: str
    status: int
    detail: str
    action: str = Field(description="what the caller can do about it")
    request_id: str | None = Field(None, description="as in the X-Request-Id header of the answer")
    errors: list[FieldError] = Field([], description="the refused fields, the first ten")


class ServiceError(Exception):
    """What an endpoint answers instead of a result.

    Args:
        detail: what happened, this time.
        fields: the refused fields.
        retry_after_s: when trying again makes sense; becomes the Retry-After header.
        headers: further headers of the answer.
    """

    status = 500
    type = "internal"
    title = "The service failed"
    action = "Try again; if it happens again, report the request_id to the operator."

    def __init__(
        self,
        detail: str,
        *,
        fields: Sequence[FieldError] = (),
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.fields = fields
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})

    def problem(self, request_id: str | None = None) -> Problem:
        """The body that a caller sees."""
        return Problem(
            type=TYPE_PREFIX + self.type,
            title=self.title,
            status=self.status,
            detail=self.detail,
            action=self.action,
            request_id=request_id,
            errors=list(self.fields),
        )


class InvalidRequest(ServiceError):
    """A value of the request is refused."""

    status = 422
    type = "invalid-request"
    title = "The request has a wrong field"
    action = "Correct the named fields and send the request again."

    @classmethod
    def of(cls, field: str, message: str) -> "InvalidRequest":
        """About one field."""
        return cls(f"{field}: {message}", fields=[FieldError(field=field, message=message)])


class MalformedRequest(ServiceError):
    """The bytes are no HTTP request."""

    status = 400
    type = "bad-request"
    title = "Bad Request"
    action = "Send HTTP/1.1 with a method that it knows."


class HeadTooLarge(ServiceError):
    """The request line and the headers exceed `http1.MAX_HEAD_BYTES`."""

    status = 431
    type = "head-too-large"
    title = "The path and the headers are too large"
    action = "Send fewer or shorter headers, and ids of at most 256 bytes."


class Unauthorized(ServiceError):
    """There is no API key, or not one that this service knows."""

    status = 401
    type = "unauthorized"
    title = "An API key is needed"
    action = "Send a valid key as `Authorization: Bearer <key>`; the operator gives keys out."


class RateLimited(ServiceError):
    """The caller's own quota is used up."""

    status = 429
    type = "rate-limited"
    title = "The quota of this API key is used up"
    action = "Wait as long as Retry-After says, and send fewer requests; the operator sets the quota."


class BodyTooLarge(ServiceError):
    """The body exceeds `max_body_bytes`."""

    status = 413
    type = "body-too-large"
    title = "The body is too large"
    action = "Split the request into smaller ones."


class BodyTooSlow(ServiceError):
    """The body did not arrive in time."""

    status = 408
    type = "body-too-slow"
    title = "The body did not arrive in time"
    action = "Send the request again, whole."


class UserNotFound(ServiceError):
    """Nothing is stored of this user."""

    status = 404
    type = "user-not-found"
    title = "Nothing is stored of this user"
    action = "Check the id; in a path it must be percent-encoded. A user exists after a first event."


class ModelNotFound(ServiceError):
    """No such graph, or it is of a version that is not loaded."""

    status = 404
    type = "model-not-found"
    title = "No such model is loaded"
    action = "Use a name and a version that the model's metadata give."


class ChangeUnderWay(ServiceError):
    """Models are being loaded already."""

    status = 409
    type = "change-under-way"
    title = "Models are being changed"
    action = "Wait until GET /v1/models says that nothing is loading, and look at what is active then."


class NoRegistry(ServiceError):
    """The service was started with a bundle, not with a registry."""

    status = 409
    type = "no-registry"
    title = "There is no registry"
    action = "The operator has to start the service with --bundle naming a registry."


class PreconditionFailed(ServiceError):
    """If-Match names another state than the present one."""

    status = 412
    type = "precondition-failed"
    title = "The models have changed"
    action = "Read GET /v1/models again and send its ETag in If-Match."


class PreconditionRequired(ServiceError):
    """A change without If-Match."""

    status = 428
    type = "precondition-required"
    title = "If-Match is needed"
    action = "Send the ETag of GET /v1/models in If-Match, so that no other change is overwritten."


class BundleRefused(ServiceError):
    """A bundle failed a check; what was served before is still served."""

    status = 422
    type = "bundle-refused"
    title = "The bundle was refused"
    action = "Publish the bundle again, or choose another version; the models that answer have not changed."


class RecommendationNotFound(ServiceError):
    """The slate behind a recommendation is not kept, or not any more."""

    status = 404
    type = "recommendation-not-found"
    title = "This recommendation has no further pages"
    action = "Ask for a new list, with the items already shown in exclude_item_ids. Lists are kept for a limited time."


class ItemNotFound(ServiceError):
    """The catalogue of the served model does not know the id."""

    status = 404
    type = "item-not-found"
    title = "The catalogue does not know this item"
    action = (
        "Check the id; in a path it must be percent-encoded. A new item is known once it was added by the admin API, or"
        " a model was trained with it."
    )


class AddedItemNotFound(ServiceError):
    """Nobody added this item, or it was removed again."""

    status = 404
    type = "added-item-not-found"
    title = "No such item was added at run time"
    action = "Check the id; in a path it must be percent-encoded. GET /v1/items lists all that were added."


class ItemInCatalogue(ServiceError):
    """An item is to be added that the default model was trained with."""

    status = 409
    type = "item-in-catalogue"
    title = "The model was trained with this item"
    action = "Nothing is to be added: the item is recommended by what was learnt of it. New metadata take a training."


class ItemsFull(ServiceError):
    """There are as many items added at run time as there may be."""

    status = 409
    type = "items-full"
    title = "Too many items were added at run time"
    action = "Train a model with these items, and DELETE those that GET /v1/items shows as superseded, or others."


class SessionTaken(ServiceError):
    """Another user's merge of the session has begun and is not complete."""

    status = 409
    type = "session-taken"
    title = "The session goes to another user"
    action = "Repeat the merge into the user that it was begun for, which completes it. Nobody else gets the events."


class SessionBusy(ServiceError):
    """Events on a session arrived faster than they could be merged."""

    status = 503
    type = "session-busy"
    title = "The session is still receiving events"
    action = "Send the same request again after the time in Retry-After; what was merged stays merged, once."


class BeforeErasure(ServiceError):
    """An event from before the user's erasure."""

    status = 409
    type = "before-erasure"
    title = "The user was erased after this event"
    action = "Drop the event. Events dated after the erasure start a new user; undated ones are taken again later."


class ClientLeft(ServiceError):
    """The client closed the connection while its request waited."""

    status = 499
    type = "client-left"
    title = "The client left"
    action = "Nothing."


class DeadlinePassed(ServiceError):
    """The caller's deadline passed before there was an answer."""

    status = 504
    type = "deadline-passed"
    title = "The deadline passed"
    action = "Try again, or allow more time in X-Request-Timeout-Ms."


class Overloaded(ServiceError):
    """More work waits than can be done in time."""

    status = 503
    type = "overloaded"
    title = "The service is overloaded"
    action = "Try again after the time in Retry-After."


class EngineStopped(ServiceError):
    """The inference worker is gone."""

    status = 503
    type = "engine-stopped"
    title = "The service cannot compute"
    action = "Try again; another replica may answer. The operator has to restart this one."


class NotReady(ServiceError):
    """The service is starting or draining; only /readyz says so."""

    status = 503
    type = "not-ready"
    title = "The service is not ready"
    action = "Send requests to another replica, or wait."


class InferenceFailed(ServiceError):
    """ONNX Runtime failed on a batch, or returned something that is no number."""

    type = "inference-failed"
    title = "The model failed on this request"


class TranslatedError(ServiceError):
    """An error of another layer: the router's, or the state store's."""

    def __init__(
        self,
        detail: str,
        *,
        status: int,
        type: str,
        title: str,
        action: str,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail, retry_after_s=retry_after_s, headers=headers)
        self.status, self.type, self.title, self.action = status, type, title, action


STATE_PROBLEMS: Mapping[type[StateError], tuple[str, str, str, int]] = {
    StateUnavailable: (
        "state-unavailable",
        "The state store does not answer",
        "Send the same request again after the time in Retry-After; events with an identity are stored once.",
        1,
    ),
    NotReplicated: (
        "not-replicated",
        "Too few replicas of the state store have the write",
        "Send the same request again after the time in Retry-After; events with an identity are stored once.",
        1,
    ),
    OutboxFull: (
        "outbox-full",
        "Events arrive faster than retraining takes them",
        "Try again later. The operator has to let retraining read the outbox, or raise BFT_OUTBOX_LIMIT.",
        30,
    ),
    UnknownItemsFull: (
        "unknown-items-full",
        "Too many items outside the catalogue",
        "Send events on known items. The operator has to raise BFT_UNKNOWN_LIMIT, and to publish a model that knows the"
        " new items, so that they need no further numbers.",
        60,
    ),
    CatalogMismatch: (
        "catalog-mismatch",
        "The stored history belongs to another catalogue",
        "The operator has to serve a bundle of the lineage that wrote this user, or erase the user.",
        60,
    ),
}
"""Store error → problem type, title, action, Retry-After in seconds; all are 503."""


def state_problem(error: StateError) -> ServiceError:
    """What a store error is to a caller of the API."""
    kind, title, action, retry_after_s = STATE_PROBLEMS[type(error)]
    return TranslatedError(
        str(error) or title, status=503, type=kind, title=title, action=action, retry_after_s=retry_after_s
    )


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's `responses` for the problems an endpoint can answer with."""
    return {status: {"model": Problem, "description": HTTPStatus(status).phrase} for status in statuses}


_HTTP_ACTIONS = {
    400: "Send one JSON object, in UTF-8.",
    404: "Check the path; /openapi.json lists them all.",
    405: "Use a method from the Allow header.",
    415: "Send JSON with the header Content-Type: application/json.",
}


def problem_response(error: ServiceError, request_id: str | None = None, path: str = "") -> Response:
    """The HTTP answer for an error. Pure ASCII, whatever the caller had in its field names.

    Args:
        error: what happened.
        request_id: as in the answer's header.
        path: that was asked for; below /v2 the body also has the member `error` of the Open Inference Protocol.
    """
    document = error.problem(request_id).model_dump(exclude_none=True)
    if path == "/v2" or path.startswith("/v2/"):
        document["error"] = error.detail
    body = json.dumps(document).encode("ascii")
    headers = dict(error.headers)
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return Response(body, error.status, headers, MEDIA_TYPE)


def http_problem(error: HTTPException) -> ServiceError:
    """A plain HTTP error (404 of the router, 405, 415 …) as a problem."""
    title = HTTPStatus(error.status_code).phrase
    return TranslatedError(
        error.detail,
        status=error.status_code,
        type=title.lower().replace(" ", "-"),
        title=title,
        action=_HTTP_ACTIONS.get(error.status_code, ServiceError.action),
        headers=error.headers,
    )


def validation_problem(errors: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """Pydantic's complaints as one problem that names the fields, without repeating what was sent."""
    fields = [_field_error(error) for error in errors[:MAX_FIELD_ERRORS]]
    return InvalidRequest("; ".join(f"{field.field}: {field.message}" for field in fields), fields=fields)


def add_error_handlers(app: FastAPI, routes: Sequence[APIRoute]) -> None:
    """Make every error of `app` a problem; `routes` are searched for the methods that a 405 names."""

    def answer(request: Request, error: ServiceError) -> Response:
        if (context := getattr(request.state, "context", None)) is not None:
            context.problem = error.type
        return problem_response(error, getattr(request.state, "request_id", None), request.scope["path"])

    def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101  (registered for this type)
        problem = http_problem(error)
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            problem.headers["Allow"] = ", ".join(_methods(routes, request.scope["path"]))
        return answer(request, problem)

    def translated(translate: Callable[[Any], ServiceError]) -> Callable[[Request, Exception], Response]:
        return lambda request, error: answer(request, translate(error))

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ServiceError, translated(lambda error: error))
    app.add_exception_handler(StateError, translated(state_problem))
    app.add_exception_handler(RequestValidationError, translated(lambda error: validation_problem(error.errors())))


def _methods(routes: Sequence[APIRoute], path: str) -> list[str]:
    return sorted({method for route in routes if route.path_regex.match(path) for method in route.methods or ()})


def _field_error(error: Mapping[str, Any]) -> FieldError:
    place, *path = error["loc"]
    field = ".".join(str(part) for part in path) or "body"
    if place not in ("body", "path"):
        field = f"{place} {field}"
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = "unknown field; check its name, or remove it"
    return FieldError(field=field[:MAX_FIELD_CHARS], message=message)
