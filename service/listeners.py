"""The listeners of the process over one lifespan: start, serve until SIGTERM, drain (service.md, "Life")."""

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.app import create_admin_app, create_app, create_ops_app
from service.errors import HeadTooLarge, MalformedRequest, ServiceError, StartError, problem_response
from service.lifecycle import Life
from service.settings import Settings

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 2**16
"""Of a request line and its headers, as they are handed on."""


async def serve(settings: Settings) -> None:
    """Run all listeners over one lifespan until SIGTERM or SIGINT, then drain.

    Raises:
        BundleError, StartError: nothing was served.
    """
    refuse_open_admin(settings)
    stop = _Stop()
    app = create_app(settings)
    life: Life = app.state.life
    # The addresses are taken before a large bundle is loaded for nothing; none listens yet.
    with (
        _bound(settings.host, settings.port) as public,
        _bound(settings.ops_host, settings.ops_port) as operations,
        _bound(settings.admin_host, settings.admin_port) as admin,
    ):
        async with (
            _listening(create_ops_app(life), operations, settings, stop),
            _listening(create_admin_app(life), admin, settings, stop),
            app.router.lifespan_context(app),
            _listening(app, public, settings, stop),
        ):
            addresses = {"public": public, "operations": operations, "admin": admin}
            logger.info("serving", extra={name: _address(listener) for name, listener in addresses.items()})
            await stop.wait()
            life.drain()
            logger.info("draining", extra={"grace_s": settings.drain_grace_s})
            await stop.wait_again(settings.drain_grace_s)
    logger.info("stopped")


def refuse_open_admin(settings: Settings) -> None:
    """Whoever reaches the admin API can change the models: it takes a key where others can reach it.

    Raises:
        StartError: there is no key, and the address is not a loopback one.
    """
    if settings.admin_key is None and not _is_loopback(settings.admin_host):
        raise StartError(
            f"the admin API would be open on {settings.admin_host}: set BFT_ADMIN_KEY, or BFT_ADMIN_HOST to 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Stop:
    """Wishes to end: SIGTERM, SIGINT, or a listener that ended by itself; a second one ends the grace."""

    def __init__(self) -> None:
        self._requests = asyncio.Semaphore(0)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request)

    def request(self) -> None:
        """Ask for the end."""
        self._requests.release()

    async def wait(self) -> None:
        """Until the first request."""
        await self._requests.acquire()

    async def wait_again(self, seconds: float) -> None:
        """Until another request, or for so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._requests.acquire(), seconds)


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to `_Stop`: one signal is for all listeners."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with a bound on the head of a request, which it has not; its own refusals are problems
    too."""

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


@asynccontextmanager
async def _listening(app: FastAPI, listener: socket.socket, settings: Settings, stop: _Stop) -> AsyncIterator[None]:
    """Answer on the socket; on the way out finish the requests in flight."""
    config = uvicorn.Config(
        app,
        lifespan="off",  # `serve` runs it, once for all listeners
        loop="none",
        http=_Protocol,
        ws="none",
        access_log=False,  # it would log paths, which hold user ids
        log_config=None,
        server_header=False,
        proxy_headers=False,  # nothing here asks who the client is
        timeout_graceful_shutdown=round(settings.shutdown_timeout_s),
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve([listener]))
    task.add_done_callback(lambda _: stop.request())
    try:
        while not (server.started or task.done()):
            await asyncio.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        await task


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise StartError(f"cannot listen on {host}:{port} ({error.strerror}); choose another address") from error
        yield listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
