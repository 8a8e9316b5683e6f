"""What surrounds every request: id, deadline, bounded body, metrics, one log line. Plain ASGI."""

import asyncio
import logging
import re
import secrets
import time
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.context import RequestContext
from service.errors import (
    BodyTooLarge,
    BodyTooSlow,
    ClientLeft,
    InvalidRequest,
    Overloaded,
    ServiceError,
    problem_response,
)
from service.settings import Settings
from service.telemetry import Metrics

logger = logging.getLogger(__name__)

MAX_TIMEOUT_MS = 60_000

# What may be echoed into a header and a log line; anything else is replaced by an id of our own.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")


class RequestMiddleware:
    """Gives each request its context, reads its body within bounds, counts it and logs it.

    The body is read whole before the application sees it, so that a body that is too large or too slow is
    refused without work, and so that a watcher can notice a client that left.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app = app
        self.settings = settings
        self.metrics = metrics
        self._num_in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.monotonic()
        headers = Headers(scope=scope)
        context = RequestContext(
            request_id=_request_id(headers), deadline=start + self.settings.request_timeout_ms / 1000
        )
        scope.setdefault("state", {}).update(request_id=context.request_id, context=context)
        # Ids in paths may hold an encoded slash: match the path as it was sent, and decode the id afterwards.
        scope["path"] = scope["raw_path"].decode("ascii", "replace")
        answer = _Answer(send, context)
        self._num_in_flight += 1
        self.metrics.in_flight.set(self._num_in_flight)
        try:
            await self._handle(scope, headers, context, receive, answer)
        finally:
            self._num_in_flight -= 1
            self.metrics.in_flight.set(self._num_in_flight)
            self._record(scope, context, answer.status, time.monotonic() - start)

    async def _handle(
        self, scope: Scope, headers: Headers, context: RequestContext, receive: Receive, answer: "_Answer"
    ) -> None:
        try:
            self._admit()
            context.deadline = self._deadline(headers, context)
            body = await self._read_body(headers, receive)
            left = asyncio.Event()
            watcher = asyncio.create_task(_watch(receive, context, left))
            try:
                await self.app(scope, _replay(body, left), answer)
            finally:
                watcher.cancel()
        except ServiceError as error:
            await problem_response(error, context.request_id)(scope, receive, answer)
        except Exception:
            logger.exception("request failed", extra={"request_id": context.request_id})
            if answer.status is not None:
                raise
            await problem_response(ServiceError("unexpected error"), context.request_id)(scope, receive, answer)

    def _admit(self) -> None:
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
        labels = (route, method, str(status or ClientLeft.status))
        self.metrics.requests.labels(*labels).inc()
        self.metrics.request_seconds.labels(*labels).observe(seconds)
        fields = {
            "request_id": context.request_id,
            "method": method,
            "route": route,
            "status": status or ClientLeft.status,
            "duration_ms": round(seconds * 1000, 3),
        }
        if context.subject is not None:
            fields["subject"] = context.subject
        logger.info("request", extra=fields)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class _Answer:
    """`send`, with the status remembered and our headers added."""

    def __init__(self, send: Send, context: RequestContext) -> None:
        self._send = send
        self._context = context
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._headers()]
        await self._send(message)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"x-request-id", self._context.request_id.encode("ascii"))]
        if self._context.timings_s:
            timings = ", ".join(f"{name};dur={s * 1000:.2f}" for name, s in self._context.timings_s.items())
            headers.append((b"server-timing", timings.encode("ascii")))
        return headers


def _request_id(headers: Headers) -> str:
    sent = headers.get("x-request-id", "")
    return sent if _REQUEST_ID.fullmatch(sent) else secrets.token_hex(16)


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
