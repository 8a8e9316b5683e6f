"""The end of a listener: whatever was sent before it is answered."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from service.listeners import _listening, _Server, _Stop
from service.settings import Settings
from tests.service.serving import PATIENT_S

pytestmark = pytest.mark.anyio

BODY = b"hello"
REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


@pytest.fixture(params=[{"use_uvloop": True}, {"use_uvloop": False}], ids=["uvloop", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", request.param


async def greet(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": BODY})


class Client(socket.socket):
    """A client that does without the event loop: nothing it sends is read before the test lets the loop go on."""

    def __init__(self, listener: socket.socket) -> None:
        super().__init__()
        self.settimeout(PATIENT_S)
        self.connect(listener.getsockname())

    async def answer(self) -> bytes:
        """A whole answer, or what came before the end of the connection; without holding up the loop."""
        return await asyncio.to_thread(self._receive)

    def _receive(self) -> bytes:
        answer = b""
        while not answer.endswith(BODY) and (more := self.recv(65_536)):
            answer += more
        return answer


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[_Server, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app: Any = greet
        async with _listening(app, listener, Settings(bundle=Path("x")), _Stop()) as server:
            yield server, listener


async def test_a_connection_that_nobody_accepted_yet_is_answered() -> None:
    async with listening() as (server, listener):
        with Client(listener) as client:
            client.sendall(REQUEST)
            await server.shutdown([listener])
            answer = await client.answer()

    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"\r\nconnection: close\r\n" in answer


async def test_a_new_connection_gets_a_moment_for_its_request() -> None:
    async with listening() as (server, listener):
        with Client(listener) as client:
            while not server.server_state.connections:
                await asyncio.sleep(0)
            end = asyncio.create_task(server.shutdown([listener]))
            await asyncio.sleep(0)  # the listener is closed, and the connections were told
            client.sendall(REQUEST)
            answer = await client.answer()
            await end

    assert answer.startswith(b"HTTP/1.1 200 OK")


async def test_a_request_that_came_on_a_kept_connection_but_was_not_read_yet_is_answered() -> None:
    async with listening() as (server, listener):
        with Client(listener) as client:
            client.sendall(REQUEST)
            assert b"\r\nconnection: close\r\n" not in await client.answer()
            client.sendall(REQUEST)
            await server.shutdown([listener])
            answer = await client.answer()

    assert answer.startswith(b"HTTP/1.1 200 OK")


async def test_a_kept_connection_without_a_request_is_closed_at_once() -> None:
    async with listening() as (server, listener):
        with Client(listener) as client:
            client.sendall(REQUEST)
            await client.answer()
            end = asyncio.create_task(server.shutdown([listener]))
            await asyncio.sleep(0)

            assert all(connection.transport.is_closing() for connection in server.server_state.connections)
            assert await client.answer() == b""
            await end


async def test_once_connections_are_retired_an_answer_is_the_last_of_its_connection() -> None:
    async with listening() as (server, listener):
        with Client(listener) as client:
            client.sendall(REQUEST)
            kept = await client.answer()
            server.retire_connections()
            server.retire_connections()
            client.sendall(REQUEST)
            last = await client.answer()

            assert await client.answer() == b""

    assert b"connection: close" not in kept
    assert last.count(b"connection: close") == 1
