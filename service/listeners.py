"""The listeners of the process over one lifespan: start, serve until SIGTERM, drain (service.md, "Life")."""

import asyncio
import contextlib
import functools
import gc
import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from fastapi import FastAPI

from service.app import create_admin_app, create_app, create_ops_app
from service.errors import StartError
from service.http1 import Protocol
from service.lifecycle import Life
from service.settings import Settings

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005


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
            _listening(app, public, settings, stop) as server,
        ):
            addresses = {"public": public, "operations": operations, "admin": admin}
            _tune_the_interpreter()
            logger.info("serving", extra={name: _address(listener) for name, listener in addresses.items()})
            await stop.wait()
            life.drain()
            server.retire_connections()
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


def _tune_the_interpreter() -> None:
    """Shorten what a request may wait for in Python itself."""
    # What was built at the start lives as long as the process; to look through it again stops all requests for a tenth
    # of a second.
    gc.collect()
    gc.freeze()
    # The event loop and the inference thread hand the interpreter to each other at every batch, and with Python's 5 ms
    # the one waits for the other for longer than a small batch takes.
    sys.setswitchinterval(SWITCH_INTERVAL_S)


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
    """A uvicorn server that leaves signals to `_Stop`, one being for all listeners, and ends without resetting a
    connection that a request is on its way on."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    def retire_connections(self) -> None:
        """From now on an answer is the last of its connection, and says so. A proxy that keeps connections open has
        none left, or few, when the listener closes, and sends nothing on one that is being closed."""
        close = (b"connection", b"close")
        if close not in self.config.encoded_headers:
            self.config.encoded_headers = [*self.config.encoded_headers, close]
            # uvicorn renews these from the above only once a second.
            self.server_state.default_headers = [*self.server_state.default_headers, close]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take in who waits in the listener's queue, which closing it would reset; then close it, and finish."""
        self.retire_connections()
        waiting = [connection for listener in sockets or () for connection in _waiting(listener)]
        for server in self.servers:
            server.close()
        protocol = functools.partial(Protocol, self.config, self.server_state, self.lifespan.state)
        for connection in waiting:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)
        await super().shutdown(sockets)


def _waiting(listener: socket.socket) -> Iterator[socket.socket]:
    """Accept all that wait now."""
    # It is BlockingIOError when nobody waits; whatever else it is, nobody can be taken in.
    with contextlib.suppress(OSError):
        while True:
            yield listener.accept()[0]


@asynccontextmanager
async def _listening(app: FastAPI, listener: socket.socket, settings: Settings, stop: _Stop) -> AsyncIterator[_Server]:
    """Answer on the socket; on the way out finish the requests in flight."""
    config = uvicorn.Config(
        app,
        lifespan="off",  # `serve` runs it, once for all listeners
        loop="none",
        http=Protocol,
        ws="none",
        access_log=False,  # it would log paths, which hold user ids
        log_config=None,
        server_header=False,
        proxy_headers=False,  # nothing here asks who the client is
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=round(settings.shutdown_timeout_s),
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve([listener]))
    task.add_done_callback(lambda _: stop.request())
    try:
        while not (server.started or task.done()):
            await asyncio.sleep(0.01)
        yield server
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
