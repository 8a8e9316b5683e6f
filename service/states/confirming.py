"""Scripts that are answered for when enough replicas have what they wrote: WAIT.

A primary answers before its replicas have the write, and what they do not have is lost when one of them takes over.
WAIT counts the replicas that have what *its own connection* wrote last. So script and WAIT go out together, by one
connection. A script that writes nothing, because what it was to write is there, vouches for somebody else's write, of
which its connection knows nothing; so between the two a mark is written, behind everything that the script found.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import redis.asyncio
import redis.exceptions
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import AbstractConnection

from service.states import scripts
from service.states.cluster import PatientCluster
from service.states.commands import Client
from service.states.interface import NotReplicated

MARK_TTL_S = 60
WAIT_GRACE_S = 0.2
"""A server that has nothing else to do looks at the time-out of a WAIT ten times a second."""
MAX_ATTEMPTS = 3
"""A script may be unknown to the server, and its slot have moved."""


async def run_confirmed(
    client: Client, script: scripts.Script, keys: Sequence[str], arguments: Sequence[Any], replicas: int, wait_ms: int
) -> Any:
    """A script's reply, when so many replicas have what it wrote or found.

    Args:
        client: of a single node or a cluster.
        script: to run.
        keys: its keys, of one slot.
        arguments: its further arguments.
        replicas: that must have it.
        wait_ms: how long they may take.

    Raises:
        NotReplicated: fewer have it. It was carried out all the same.
        RedisError: the server did not answer, or with an error.
    """
    operands = (len(keys), *keys, *arguments)
    command: tuple[Any, ...] = ("EVALSHA", script.sha, *operands)
    error: Exception | None = None
    for _ in range(MAX_ATTEMPTS):
        try:
            reply, num_replicas = await _ask(client, keys[0], command, replicas, wait_ms)
        except redis.exceptions.NoScriptError as refusal:
            error, command = refusal, ("EVAL", script.source, *operands)
        except redis.exceptions.MovedError as refusal:
            error = refusal
            if isinstance(client, PatientCluster):
                await client.nodes_manager.move_slot(refusal)
        else:
            if num_replicas < replicas:
                raise NotReplicated(num_replicas, replicas)
            return reply
    raise redis.exceptions.ClusterError(f"no node runs the script: {type(error).__name__}") from error


async def _ask(client: Client, key: str, command: tuple[Any, ...], replicas: int, wait_ms: int) -> tuple[Any, int]:
    """The script's reply, and the number of replicas that have what it wrote."""
    mark = ("SET", scripts.mark_key(key), 1, "EX", MARK_TTL_S)
    async with _connection(client, key) as connection:
        await connection.send_packed_command(connection.pack_commands([command, mark, ("WAIT", replicas, wait_ms)]))
        # All replies are read, or the next command by this connection would get them.
        reply, marked = await _reply(connection), await _reply(connection)
        num_replicas = await connection.read_response(timeout=wait_ms / 1000 + WAIT_GRACE_S)
        if num_replicas is None:
            await connection.disconnect(nowait=True)
    for outcome in (reply, marked):
        if isinstance(outcome, Exception):
            raise outcome
    return reply, num_replicas or 0


async def _reply(connection: AbstractConnection) -> Any:
    """The next reply; one that is an error is returned, too."""
    try:
        return await connection.read_response()
    except redis.exceptions.ResponseError as error:
        return error


@asynccontextmanager
async def _connection(client: Client, key: str) -> AsyncIterator[AbstractConnection]:
    """A connection to the node that has a key's slot, alone."""
    if not isinstance(client, PatientCluster):
        pool: Any = cast("redis.asyncio.Redis", client).connection_pool
        connection = await pool.get_connection()
        try:
            yield connection
        finally:
            await pool.release(connection)
        return
    async with client.turn():
        await client.initialize()
        node = cast("ClusterNode", client.get_node_from_key(key))
        connection = node.acquire_connection()
        try:
            await node.disconnect_if_needed(connection)
            yield connection
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            # Another node may have its slots by now.
            await client.nodes_manager.initialize(last_failed_node_name=node.name)
            raise
        finally:
            await node.disconnect_if_needed(connection)
            node.release(connection)
