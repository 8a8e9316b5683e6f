"""The client of a Redis Cluster."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio
import redis.exceptions


class PatientCluster(redis.asyncio.RedisCluster):
    """A cluster client whose commands wait for their turn, as those of a blocking pool do.

    redis-py's own has no such pool: it fails a command at once when all connections to its node are in use.

    Args:
        max_commands: under way at a time.
        turn_timeout_s: how long a command may wait for its turn.
        options: as of `RedisCluster`.
    """

    def __init__(self, *, max_commands: int, turn_timeout_s: float, **options: Any) -> None:
        # Pipelines take no turn: the other half is theirs.
        super().__init__(max_connections=2 * max_commands, **options)
        self._turns = asyncio.Semaphore(max_commands)
        self._turn_timeout_s = turn_timeout_s

    def primary_of(self, key: str) -> str:
        """The name of the node that has a key's slot, as far as it is known."""
        nodes = self.nodes_manager.slots_cache.get(self.keyslot(key))
        return nodes[0].name if nodes else ""

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """As in `RedisCluster`."""
        async with self.turn():
            return await super().execute_command(*args, **kwargs)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The right to use one connection.

        Raises:
            MaxConnectionsError: it did not come in time.
        """
        try:
            async with asyncio.timeout(self._turn_timeout_s):
                await self._turns.acquire()
        except TimeoutError as error:
            raise redis.exceptions.MaxConnectionsError("no connection to the cluster became free in time") from error
        try:
            yield
        finally:
            self._turns.release()
