"""What surrounds every request: id, API key, quota, deadline, bounded body, metrics, one log line. Plain ASGI."""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import orjson
import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.admission import Admission
from service.context import STAGES, RequestContext
from service.errors import (
    BodyTooLarge,
    BodyTooSlow,
    ClientLeft,
    DeadlinePassed,
    InvalidRequest,
    Overloaded,
    ServiceError,
    problem_response,
)
from service.limiting import RateLimits
from service.security import ApiKey, ApiKeys
from service.settings import Settings
from service.telemetry import Metrics

logger = logging.getLogger(__name__)
request_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

MAX_TIMEOUT_MS = 60_000
BATCH_PATH = "/v1/recommendations/batch"
"""Counts towards a quota as many times as it has requests."""

# What may be echoed into a header and a log line; anything else is replaced by an id of our own.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")

# W3C Trace Context, section 3.2: version, trace-id, parent-id, trace-flags; a later version may say more behind them.
_TRACEPARENT = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?P<rest>(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(-.*)?"
)


class RequestMiddleware:
    """Gives each request its context, reads its body within bounds, counts it and logs it.

    The body is read whole before the application sees it, so that a body that is too large or too slow is
    refused without work, and so that a watcher can notice a client that left.

    Args:
        app: what answers.
        settings: bounds and deadlines.
        metrics: counts requests and times stages.
        keys: who is let in; without any, everybody.
        limits: what each key may ask for; None: no limits.
        open_paths: answered without a key.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        metrics: Metrics,
        keys: ApiKeys | None = None,
        limits: RateLimits | None = None,
        open_paths: Collection[str] = (),
    ) -> None:
        self.app = app
        self.settings = settings
        self.metrics = metrics
        self.keys = keys
        self.limits = limits
        self.open_paths = frozenset(open_paths)
        self._num_in_flight = 0
        self._admission = Admission()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.monotonic()
        headers = Headers(scope=scope)
        context = RequestContext(
            request_id=_request_id(headers),
            deadline=start + self.settings.request_timeout_ms / 1000,
            traceparent=_traceparent(headers),
        )
        scope.setdefault("state", {}).update(request_id=context.request_id, context=context)
        # Ids in paths may hold an encoded slash: match the path as it was sent, and decode the id afterwards.
        scope["path"] = scope["raw_path"].decode("ascii", "replace")
        answer = _Answer(send, context, start)
        self._num_in_flight += 1
        self.metrics.in_flight.inc()
        try:
            await self._handle(scope, headers, context, receive, answer)
        finally:
            self._num_in_flight -= 1
            self.metrics.in_flight.dec()
            self._record(scope, context, answer.status, time.monotonic() - start)

    async def _handle(
        self, scope: Scope, headers: Headers, context: RequestContext, receive: Receive, answer: "_Answer"
    ) -> None:
        try:
            self._bound_in_flight()
            key = self._key(scope, headers)
            context.key_name = None if key is None else key.name
            context.deadline = self._deadline(headers, context)
            body = await self._read_body(headers, receive)
            # A client that is slow to send keeps nobody out.
            with self._admission.let_in(context.remaining_s()):
                await self._work(scope, body, key, context, receive, answer)
        except ServiceError as error:
            await self._refuse(error, context, scope, receive, answer)
        except Exception:
            logger.exception("request failed", extra={"request_id": context.request_id})
            if answer.status is not None:
                raise
            await self._refuse(ServiceError("unexpected error"), context, scope, receive, answer)

    async def _work(
        self,
        scope: Scope,
        body: bytes,
        key: ApiKey | None,
        context: RequestContext,
        receive: Receive,
        answer: "_Answer",
    ) -> None:
        left = asyncio.Event()
        watcher = asyncio.create_task(_watch(receive, context, left))
        try:
            async with asyncio.timeout(max(0.0, context.remaining_s())) as deadline:
                answer.deadline = deadline
                if key is not None and self.limits is not None:
                    with context.timed("limit"):
                        answer.add(await self.limits.take(key, _cost(scope, body)))
                await self.app(scope, _replay(body, left), answer)
        except TimeoutError as error:
            # Nothing that was cancelled is lost: commands to the store run to their end in tasks of their own.
            if answer.deadline is None or not answer.deadline.expired():
                raise
            raise DeadlinePassed("the request's deadline passed while it was worked on") from error
        finally:
            answer.deadline = None
            watcher.cancel()

    async def _refuse(
        self, error: ServiceError, context: RequestContext, scope: Scope, receive: Receive, answer: "_Answer"
    ) -> None:
        context.problem = error.type
        await problem_response(error, context.request_id, scope["path"])(scope, receive, answer)

    def _key(self, scope: Scope, headers: Headers) -> ApiKey | None:
        if not self.keys or scope["path"] in self.open_paths:
            return None
        return self.keys.of(headers)

    def _bound_in_flight(self) -> None:
        if self._num_in_flight > self.settings.max_in_flight:
            raise Overloaded(f"{self.settings.max_in_flight} requests are being worked on", retry_after_s=1)

    def _deadline(self, headers: Headers, context: RequestContext) -> float:
        text = headers.get("x-request-timeout-ms")
        if text is None:
            return context.deadline
        if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= MAX_TIMEOUT_MS):
            raise InvalidRequest.of("header X-Request-Timeout-Ms", f"must be a whole number, 1 to {MAX_TIMEOUT_MS}")
        return context.deadline + (int(text) - self.settings.request_timeout_ms) / 1000

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes:
        limit = self.settings.max_body_bytes
        too_large = BodyTooLarge(f"the body exceeds {limit} bytes")
        declared = headers.get("content-length", "0")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.settings.body_timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft("the client left before its body had arrived")
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > limit:
                        raise too_large
        except TimeoutError as error:
            raise BodyTooSlow(f"the body took longer than {self.settings.body_timeout_s:g} s") from error
        return bytes(body)

    def _record(self, scope: Scope, context: RequestContext, status: int | None, seconds: float) -> None:
        # A label per path would be a label per user: unmatched paths share one.
        route = getattr(scope.get("route"), "path_format", "unmatched")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        status = status or ClientLeft.status
        labels = (route, method, str(status))
        self.metrics.requests.labels(*labels).inc()
        self.metrics.request_seconds.labels(*labels).observe(seconds)
        for stage in STAGES:
            if (stage_seconds := context.timings_s.get(stage)) is not None:
                self.metrics.stage_seconds.labels(stage).observe(stage_seconds)
        if context.problem is not None:
            self.metrics.errors.labels(context.failed_stage or "request", context.problem).inc()
        request_log.info(
            "request", logger=__name__, method=method, route=route, status=status, **_told(context, seconds)
        )


def _told(context: RequestContext, seconds: float) -> dict[str, Any]:
    """What a log line says of a request."""
    told: dict[str, Any] = {
        "request_id": context.request_id,
        "duration_ms": round(seconds * 1000, 3),
        "stages_ms": {stage: round(stage_s * 1000, 3) for stage, stage_s in context.timings_s.items()},
    }
    if context.traceparent is not None:
        _, told["trace_id"], told["parent_id"], _ = context.traceparent.split("-")
    if context.problem is not None:
        told["problem"] = context.problem
    for name, value in (
        ("failed_stage", context.failed_stage if context.problem is not None else None),
        ("subject", context.subject),
        ("key", context.key_name),
        ("model_version", context.model_version),
    ):
        if value is not None:
            told[name] = value
    return told


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class _Answer:
    """`send`, with the status remembered and our headers added."""

    def __init__(self, send: Send, context: RequestContext, start: float) -> None:
        self._send = send
        self._context = context
        self._start = start
        self._headers: dict[str, str] = {}
        self.status: int | None = None
        self.deadline: asyncio.Timeout | None = None

    def add(self, headers: Mapping[str, str]) -> None:
        """Headers of the answer, whoever gives it."""
        self._headers |= headers

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.deadline is not None and not self.deadline.expired():
                # An answer that began is finished, however slowly its client reads.
                self.deadline.reschedule(None)
            message["headers"] = [*message.get("headers", ()), *self._all_headers()]
        await self._send(message)

    def _all_headers(self) -> list[tuple[bytes, bytes]]:
        headers = {
            "X-Request-Id": self._context.request_id,
            "Server-Timing": self._context.server_timing(time.monotonic() - self._start),
            **self._headers,
        }
        if self._context.traceparent is not None:
            headers["traceparent"] = self._context.traceparent
        return [(name.lower().encode("ascii"), value.encode("ascii")) for name, value in headers.items()]


def _request_id(headers: Headers) -> str:
    sent = headers.get("x-request-id", "")
    return sent if _REQUEST_ID.fullmatch(sent) else secrets.token_hex(16)


def _traceparent(headers: Headers) -> str | None:
    sent = headers.getlist("traceparent")
    found = _TRACEPARENT.fullmatch(sent[0]) if len(sent) == 1 else None
    # Version 00 has nothing more to say, and what a later one adds we cannot pass on.
    if found is None or (found["version"] == "00" and found[3] is not None):
        return None
    return f"00-{found['rest']}"


def _cost(scope: Scope, body: bytes) -> int:
    """How many requests of a quota this one takes. What is no batch, or cannot be read, is refused later: one."""
    if scope["path"] != BATCH_PATH:
        return 1
    try:
        return max(1, len(orjson.loads(body)["requests"]))
    except (ValueError, TypeError, KeyError):
        return 1


def _replay(body: bytes, left: asyncio.Event) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    return receive


async def _watch(receive: Receive, context: RequestContext, left: asyncio.Event) -> None:
    with suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
        context.client_left = True
        left.set()
