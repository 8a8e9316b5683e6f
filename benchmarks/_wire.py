"""A line between the service and its Redis or Valkey that can be stopped at a chosen command.

The service sends one command at a time on a connection and waits for its reply, so the n-th command is a point between
two steps of whatever it does: the command does not arrive, or it is carried out and its reply does not come back.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

Loss = Literal["command", "reply"]
"""What does not get through."""


async def cut() -> bool:
    """What happens at a stop, if nothing else is said: the connection ends."""
    return False


@dataclass(frozen=True)
class Stop:
    """Where the line stops, once.

    Args:
        number: of the command, from 0, counted from when the stop was set.
        lost: the command itself, or its reply after it was carried out.
        then: happens there; true: what was stopped is passed on after all, else the connection is cut.
    """

    number: int
    lost: Loss
    then: Callable[[], Awaitable[bool]] = cut


@dataclass(frozen=True)
class Held:
    """For `Stop.then`: passes on what was stopped when it is told to."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self) -> bool:
        self.reached.set()
        return await self.go_on.wait()


@dataclass
class Wire:
    """The line. Commands are counted over all its connections."""

    server: tuple[str, int]
    url: str = ""
    commands: list[str] = field(default_factory=list)
    """Names of those since `listen`."""
    stops: dict[int, Stop] = field(default_factory=dict)
    """By the number of the command."""
    is_down: bool = False
    """No command gets through."""

    def listen(self, *stops: Stop) -> None:
        """Count from here on, and stop there."""
        self.commands, self.stops = [], {stop.number: stop for stop in stops}

    def _stop_at(self, command: list[bytes]) -> Stop | None:
        self.commands.append(command[0].decode())
        return self.stops.get(len(self.commands) - 1)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of the service."""
        from_server, to_server = await asyncio.open_connection(*self.server)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    raw, command = await read_command(reader)
                    stop = self._stop_at(command)
                    if self.is_down or (stop is not None and stop.lost == "command" and not await stop.then()):
                        return
                    to_server.write(raw)
                    reply = await read_reply(from_server)
                    if stop is not None and stop.lost == "reply" and not await stop.then():
                        return
                    writer.write(reply)
                    await writer.drain()
        finally:
            for each in (to_server, writer):
                each.close()


async def read_command(reader: asyncio.StreamReader) -> tuple[bytes, list[bytes]]:
    """A command as it was sent, and its words: an array of bulk strings (RESP)."""
    head = await reader.readuntil(b"\r\n")
    raw, words = [head], []
    for _ in range(int(head[1:])):
        size = await reader.readuntil(b"\r\n")
        word = await reader.readexactly(int(size[1:]) + 2)
        raw += [size, word]
        words.append(word[:-2])
    return b"".join(raw), words


async def read_reply(reader: asyncio.StreamReader) -> bytes:
    """A reply of RESP2, whole."""
    head = await reader.readuntil(b"\r\n")
    kind, number = head[:1], head[1:-2]
    if kind == b"$" and number != b"-1":
        return head + await reader.readexactly(int(number) + 2)
    if kind == b"*" and number != b"-1":
        return head + b"".join([await read_reply(reader) for _ in range(int(number))])
    return head


@asynccontextmanager
async def wire_to(url: str) -> AsyncIterator[Wire]:
    """A line to the server of this URL, on a port of its own."""
    parts = urlsplit(url)
    wire = Wire((parts.hostname or "127.0.0.1", parts.port or 6379))
    listener = await asyncio.start_server(wire.serve, "127.0.0.1", 0, limit=2**24)
    port = listener.sockets[0].getsockname()[1]
    wire.url = f"redis://127.0.0.1:{port}"
    try:
        yield wire
    finally:
        listener.close()
