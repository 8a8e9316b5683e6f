"""How commands reach Redis: those of one moment together, and none of them cancelled on its way.

A connection goes back to its pool only after its replies were read, so no reply reaches another caller: commands are
sent by tasks of their own, which no caller's cancellation reaches.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import redis.asyncio
import redis.exceptions

from service.states.scripts import Script

Client = redis.asyncio.Redis | redis.asyncio.RedisCluster
Words = tuple[Any, ...]
"""A command and its operands."""


class _Command(NamedTuple):
    words: Words
    otherwise: Words
    """What to send when the server does not know the script."""
    reply: "asyncio.Future[Any]"


class Commands:
    """Sends the commands of one turn of the event loop together: one write and one read serve them all.

    The more requests there are at a time, the less each of them costs. On a cluster every command goes alone, since
    their keys may be on several nodes.

    Args:
        client: one server's, or a cluster's.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting: list[_Command] = []
        self._in_flight: set[asyncio.Task[None]] = set()

    def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Any]) -> "asyncio.Future[Any]":
        """A script's reply, as `execute` has it. It runs by its digest, or by its text on a server that lacks it."""
        operands = (len(keys), *keys, *arguments)
        return self._add(("EVALSHA", script.sha, *operands), ("EVAL", script.source, *operands))

    def execute(self, *words: Any) -> "asyncio.Future[Any]":
        """A command's reply, or what the server or the connection raised."""
        return self._add(words, ())

    async def finish(self) -> None:
        """Return when nothing is under way."""
        while self._waiting or self._in_flight:
            await asyncio.gather(*self._in_flight, asyncio.sleep(0))

    def _add(self, words: Words, otherwise: Words) -> "asyncio.Future[Any]":
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send_waiting)
        command = _Command(words, otherwise, loop.create_future())
        self._waiting.append(command)
        return command.reply

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        is_cluster = isinstance(self._client, redis.asyncio.RedisCluster)
        for together in [[command] for command in waiting] if is_cluster else [waiting]:
            task = asyncio.create_task(self._send(together))
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)

    async def _send(self, commands: Sequence[_Command]) -> None:
        replies = await self._replies([command.words for command in commands])
        if unknown := [place for place, reply in enumerate(replies) if _is_unknown_script(reply)]:
            again = await self._replies([commands[place].otherwise for place in unknown])
            for place, reply in zip(unknown, again, strict=True):
                replies[place] = reply
        for command, reply in zip(commands, replies, strict=True):
            if command.reply.done():  # its caller was cancelled
                continue
            if isinstance(reply, Exception):
                command.reply.set_exception(reply)
            else:
                command.reply.set_result(reply)

    async def _replies(self, commands: Sequence[Words]) -> list[Any]:
        """To each command its reply, or what the server or the connection raised."""
        try:
            if len(commands) == 1:
                return [await self._client.execute_command(*commands[0])]
            pipeline = self._client.pipeline(transaction=False)
            for words in commands:
                pipeline.execute_command(*words)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
        except Exception as error:
            return [error] * len(commands)
        return replies


def _is_unknown_script(reply: Any) -> bool:
    return isinstance(reply, redis.exceptions.NoScriptError)
