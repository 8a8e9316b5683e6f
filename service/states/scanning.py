"""Every slate that a Redis or Valkey keeps, for whoever takes them to a file; nothing is written."""

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from service.states import scripts
from service.states.commands import Client
from service.states.redis import failures_as_unavailable

KEYS_AT_A_TIME = 500


class KeptSlate(NamedTuple):
    """A slate as the store has it."""

    parts: list[bytes]
    """What was asked, then the pages."""
    outcome: bytes | None
    """What followed it; None: nothing yet."""


async def kept_slates(client: Client) -> AsyncIterator[KeptSlate]:
    """Each slate that lives from the first look to the last, once; of the others some. Reads a few hundred at a time.

    Args:
        client: of a server or a cluster.

    Raises:
        StateUnavailable: the server did not answer.
    """
    met: set[bytes] = set()  # SCAN may tell a key twice
    keys: list[bytes] = []
    with failures_as_unavailable():
        async for key in client.scan_iter(match=scripts.SLATE_KEYS, count=KEYS_AT_A_TIME):
            name = bytes.fromhex(key[-32:].decode())
            if name not in met:
                met.add(name)
                keys.append(key)
            if len(keys) == KEYS_AT_A_TIME:
                for slate in await _read(client, keys):
                    yield slate
                keys = []
        for slate in await _read(client, keys):
            yield slate


async def _read(client: Client, keys: list[bytes]) -> list[KeptSlate]:
    if not keys:
        return []
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.execute_command("HGETALL", key)
    # Of a slate that is gone by now there is nothing.
    return [_slate(fields) for fields in map(_fields, await pipeline.execute()) if fields]


def _fields(reply: Any) -> dict[bytes, bytes]:
    """A hash: as redis-py makes it of one server's reply, or the flat list of a cluster's pipeline."""
    if isinstance(reply, dict):
        return reply
    return dict(zip(reply[::2], reply[1::2], strict=True))


def _slate(fields: dict[bytes, bytes]) -> KeptSlate:
    pages = [fields[b"p%d" % number] for number in range(sum(name.startswith(b"p") for name in fields))]
    return KeptSlate([fields[b"a"], *pages], fields.get(b"s"))
