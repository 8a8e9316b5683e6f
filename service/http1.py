"""HTTP/1 as uvicorn reads it, with what it lacks: a bound on a request's head, and an orderly end."""

import asyncio
import fcntl
import sys
import termios
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.errors import HeadTooLarge, MalformedRequest, ServiceError, problem_response

MAX_HEAD_BYTES = 2**16
"""Of a request line and its headers, as they are handed on."""
FIRST_REQUEST_S = 5.0
"""How long, after the end of accepting, a connection is waited for that has not sent anything yet."""


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with a bound on the head of a request; its own refusals are problems too, and a request
    that was sent before the end is answered though nobody has read it yet."""

    _in_head = False
    _waiting_bytes = 0
    """Of a head that is not complete; without those of its first chunk, which may hold the end of another request."""
    _head_too_large = False

    def data_received(self, data: bytes) -> None:
        """Parse a chunk; a head that grows without end is refused before it is complete."""
        in_head, request = self._in_head, self.scope
        super().data_received(data)
        if in_head and self._in_head and request is self.scope and not self.transport.is_closing():
            self._waiting_bytes += len(data)
            if self._waiting_bytes > MAX_HEAD_BYTES:
                self._head_too_large = True
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head, self._waiting_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Hand the request on; an error here makes `data_received` send a refusal."""
        self._in_head = False
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            raise ValueError("not HTTP/1")
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._head_too_large = True
            raise ValueError("the head is too large")
        super().on_headers_complete()

    def shutdown(self) -> None:
        """Close when nothing is under way. A new connection gets a moment to send what it was opened for."""
        last: RequestResponseCycle | None = self.cycle
        is_new = last is None
        is_idle = last is None or last.response_complete
        if self.transport.is_closing() or not is_idle or not (is_new or _has_unread(self.transport)):
            super().shutdown()
        else:
            self.loop.call_later(FIRST_REQUEST_S, super().shutdown)

    def send_400_response(self, msg: str) -> None:
        """Answer and close; no application has seen this request."""
        error: ServiceError = MalformedRequest(msg)
        if self._head_too_large:
            error = HeadTooLarge(f"the request line and the headers exceed {MAX_HEAD_BYTES} bytes")
        response = problem_response(error)
        status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode("ascii")
        head = [status, *(name + b": " + value for name, value in response.raw_headers)]
        self.transport.write(b"\r\n".join([*head, b"connection: close", b"", bytes(response.body)]))
        self.transport.close()


def _has_unread(transport: asyncio.Transport) -> bool:
    """Whether bytes have come that the event loop has not taken in yet."""
    number: bytes = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.FIONREAD, bytes(4))
    return int.from_bytes(number, sys.byteorder) > 0
