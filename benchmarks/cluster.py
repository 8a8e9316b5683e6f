"""Does everything that touches state work on a cluster, and is anything lost when one of its primaries dies?

    python benchmarks/cluster.py [--json] [--items N] [--reads N] [--writes N] [--seconds S] [--threads N]
    python benchmarks/cluster.py --quick [--bundle DIR]

A Valkey Cluster of three primaries and three replicas, and the service with BFT_REDIS_CLUSTER and BFT_STATE_REPLICAS=1:
a write is acknowledged when one replica has it (WAIT 1). First, for users of each primary: events, repeated and late
ones, export, further pages, rankings, unknown items, merge, erasure; and the quota of an API key. Then, under the
traffic of `benchmarks/outage.py`, with events of several users in one request, one primary is killed. Its replica takes
over; while it has no replica of its own, writes to it are refused; then the killed server comes back as its replica.

Counted are the users for whom a thing holds; the answers that a client cannot work with; and afterwards, in the exports
of all users and in the outbox, acknowledged events that are missing and events that are there twice. Each row of the
result has `target`, `value` and `met`.
"""

import argparse
import asyncio
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import uvloop
from _bundles import item_id, publish_random
from _cluster import NUM_PRIMARIES, Cluster, cluster
from _processes import Process, service
from _report import note, quick_parser_of, report, row
from _traffic import Traffic, answer_rows, client, history, ids_of, kept_rows

from model.bundle import open_bundle
from model.registry import resolve
from service.security import new_key, toml_entry
from service.states.scripts import bucket, outbox_key

WRITERS = 4
USERS_OF_A_WRITE = 3
USERS_OF_A_PRIMARY = 3
NODE_TIMEOUT_MS = 1500
BURST = 3

Story = Callable[[Traffic, str], Awaitable[bool]]


def main() -> None:
    parser = quick_parser_of(__doc__)
    parser.add_argument("--items", type=int, default=20_000, help="catalogue size, without --bundle")
    parser.add_argument("--reads", type=float, default=20, help="lists asked for in a second")
    parser.add_argument("--writes", type=float, default=8, help="requests with events in a second")
    parser.add_argument("--seconds", type=float, default=15, help="of calm, and of a primary without a replica")
    parser.add_argument("--threads", type=int, default=1, help="of ONNX Runtime")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report(arguments, uvloop.run(measure(arguments, Path(folder))))


async def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    bundles = arguments.bundle or publish_random(folder / "registry", arguments.items)
    num_items = open_bundle(resolve(bundles)).manifest.num_items
    keys = {"free": new_key(), "limited": new_key()}
    (folder / "keys.toml").write_text(
        f"{toml_entry('free', keys['free'], None, None)}\n{toml_entry('limited', keys['limited'], 1, BURST)}\n"
    )
    note("starting the cluster")
    with cluster(NODE_TIMEOUT_MS) as servers, serving(bundles, folder, servers, arguments) as ours:
        async with client() as session:
            traffic, limited = (
                Traffic(session, ours.url, num_items, {"Authorization": f"Bearer {keys[name]}"})
                for name in ("free", "limited")
            )
            return [
                *await story_rows(traffic, servers),
                *await quota_rows(limited, ours),
                *await failover_rows(traffic, servers, arguments),
            ]


def serving(
    bundles: Path, folder: Path, servers: Cluster, arguments: argparse.Namespace
) -> AbstractContextManager[Process]:
    settings: dict[str, Any] = {
        "REDIS_URL": servers.url,
        "REDIS_CLUSTER": "true",
        "STATE_REPLICAS": 1,
        "API_KEYS_FILE": folder / "keys.toml",
        "THREADS": arguments.threads,
    }
    if arguments.quick:
        # Beside other tests on a busy machine nothing but the outage may take too long.
        settings |= {"STATE_TIMEOUT_MS": 500, "REQUEST_TIMEOUT_MS": 60_000}
    return service(bundles, folder / "service.log", **settings)


# ---- everything that touches state -------------------------------------------------------------------------


async def story_rows(traffic: Traffic, servers: Cluster) -> list[dict[str, Any]]:
    """For how many users each thing holds."""
    users = users_of_each_primary(servers)
    rows = []
    for story in STORIES:
        held = [await story(traffic, user_id) for user_id in users]
        name = story.__name__
        rows.append(row(f"users_of_whom_{name}", sum(held), str(len(users)), all(held)))
    return rows


def users_of_each_primary(servers: Cluster) -> list[str]:
    """As many users on each primary."""
    users: dict[int, list[str]] = {port: [] for port in servers.primaries()}
    for number in itertools.count():
        user_id = f"story {number}"
        found = users[servers.primary_of(key_of(user_id))]
        if len(found) < USERS_OF_A_PRIMARY:
            found.append(user_id)
        if sum(map(len, users.values())) == NUM_PRIMARIES * USERS_OF_A_PRIMARY:
            return list(itertools.chain.from_iterable(users.values()))
    raise AssertionError


def key_of(user_id: str) -> str:
    """A key in the slot of all the user's keys."""
    return outbox_key(bucket(user_id))


async def repeated_and_late_events_count_once_and_in_order(traffic: Traffic, user_id: str) -> bool:
    events = [dated(user_id, place) for place in (1, 3, 2)]
    first = await statuses(traffic, events)
    again = await statuses(traffic, [*events, dated(user_id, 4)])
    return (
        first == ["accepted"] * 3
        and again == ["duplicate"] * 3 + ["accepted"]
        and await exported(traffic, user_id) == [item_id(place) for place in (1, 2, 3, 4)]
    )


async def unknown_items_keep_their_ids(traffic: Traffic, user_id: str) -> bool:
    new = f"new for {user_id}"
    accepted = await statuses(traffic, [{**dated(user_id, 5), "item_id": new}])
    return accepted == ["accepted"] and (await exported(traffic, user_id))[-1] == new


async def pages_never_repeat_an_item(traffic: Traffic, user_id: str) -> bool:
    outcome, page, _ = await traffic.post("/v1/recommendations", {"user_id": user_id, "num_results": 5})
    if outcome != "200" or page["degraded"] or page["num_events"] != 5:
        return False
    given, path = ids_of(page), f"/v1/recommendations/{page['recommendation_id']}/next"
    seen = {item_id(place) for place in (1, 2, 3, 4)}
    for _ in range(2):
        given += ids_of(await following_page(traffic, path))
    return len(set(given)) == 15 and not seen & set(given)


async def following_page(traffic: Traffic, path: str) -> dict[str, Any]:
    """The next page, as soon as the list is kept: that happens behind its answer."""
    while True:
        outcome, page, _ = await traffic.post(path, {"num_results": 5})
        if outcome != "404":
            return page
        await asyncio.sleep(0.02)


async def rankings_have_each_candidate_once(traffic: Traffic, user_id: str) -> bool:
    candidates = [*map(item_id, range(20, 30)), "nobody knows this"]
    outcome, answer, _ = await traffic.post("/v1/rankings", {"user_id": user_id, "candidate_item_ids": candidates})
    ranked = ids_of(answer)
    return (
        outcome == "200"
        and sorted(ranked) == sorted(candidates)
        and ranked[-1] == candidates[-1]
        and not answer["degraded"]
    )


async def sessions_are_merged_once(traffic: Traffic, user_id: str) -> bool:
    # The session's id has another bucket, most often of another primary.
    session_id, path = f"session of {user_id}", f"/v1/users/{quote(user_id)}/merge"
    events = [{**dated(user_id, place), "session_id": session_id} for place in (6, 7)]
    for event in events:
        del event["user_id"]
    accepted = await statuses(traffic, events)
    merged = [(await traffic.post(path, {"from_session_id": session_id}))[1].get("num_merged") for _ in range(2)]
    return (
        accepted == ["accepted"] * 2
        and merged == [2, 0]
        and (await exported(traffic, user_id))[-2:] == [item_id(6), item_id(7)]
    )


async def erasure_leaves_nothing(traffic: Traffic, user_id: str) -> bool:
    path = f"/v1/users/{quote(user_id)}"
    async with traffic.session.delete(traffic.url + path, headers=traffic.headers) as response:
        erased = response.status == 200 and (await response.json())["erased"]
    left = await traffic.events_of(user_id)
    refused = await statuses(traffic, [dated(user_id, 8)])
    _, answer, _ = await traffic.post("/v1/recommendations", {"user_id": user_id})
    return erased and not left and refused == ["rejected"] and answer["cold_start"] and not answer["degraded"]


STORIES: tuple[Story, ...] = (
    repeated_and_late_events_count_once_and_in_order,
    unknown_items_keep_their_ids,
    pages_never_repeat_an_item,
    rankings_have_each_candidate_once,
    sessions_are_merged_once,
    erasure_leaves_nothing,
)
"""Told in this order: each begins where the one before ended."""


def dated(user_id: str, place: int) -> dict[str, Any]:
    """A user's event of a second long ago."""
    return {"event_id": f"{user_id}:{place}", "user_id": user_id, "item_id": item_id(place), "timestamp": 10**9 + place}


async def statuses(traffic: Traffic, events: list[dict[str, Any]]) -> list[str]:
    """What became of each event."""
    outcome, answer, _ = await traffic.post("/v1/events", {"events": events})
    return [result["status"] for result in answer["results"]] if outcome == "200" else [outcome]


async def exported(traffic: Traffic, user_id: str) -> list[str]:
    """A user's items in order."""
    return [event["item_id"] for event in await traffic.events_of(user_id)]


async def quota_rows(limited: Traffic, ours: Process) -> list[dict[str, Any]]:
    """An API key is limited by what the cluster counts."""
    answers: Counter[str] = Counter()
    while "429" not in answers and answers.total() < 20 * BURST:
        outcome, _, _ = await limited.post("/v1/recommendations", {"history": history([1]), "num_results": 1})
        answers[outcome] += 1
    counted = {labels["where"]: value for labels, value in ours.samples("bft_rate_limit_checks_total")}
    is_limited = answers["429"] == 1 and answers["200"] >= BURST and len(answers) == 2
    return [
        row("requests_beyond_a_quota_refused", answers["429"], "1", is_limited),
        row("requests_counted_by_the_service_alone", counted.get("local", 0.0), "0", not counted.get("local")),
    ]


# ---- a primary dies ----------------------------------------------------------------------------------------


async def failover_rows(traffic: Traffic, servers: Cluster, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    await traffic.write_warm_users()
    victim = servers.primary_of(key_of("warm-0"))
    heir = servers.replica_of(victim)
    slots = servers.slots_of(victim)

    def is_its(user_id: str) -> bool:
        return servers.slot_of(key_of(user_id)) in slots

    seconds = 1.0 if arguments.quick else arguments.seconds
    async with traffic.flowing(arguments.reads, WRITERS, arguments.writes, USERS_OF_A_WRITE):
        await traffic.last("calm", seconds)
        traffic.phase = "failing over"
        note("a primary is dead")
        begun = time.perf_counter()
        await asyncio.to_thread(servers.kill, victim)
        await asyncio.to_thread(servers.wait_until_primary, heir)
        failover_s, traffic.phase = time.perf_counter() - begun, "taken over"
        await whole_lists(traffic, is_its)
        recovery_s = time.perf_counter() - begun
        note("its replica has taken over")
        await traffic.last("without a replica", seconds)
        traffic.phase = "coming back"
        await asyncio.to_thread(servers.restart, victim)
        await asyncio.to_thread(servers.wait_until_whole)
        note("it is back, as a replica")
        await traffic.last("calm", seconds)
    failing = traffic.reads_in("failing over")
    degraded = [read for read in failing if read.degraded]
    meanwhile = acknowledged_in(traffic, "failing over")
    others = [user_id for user_id in meanwhile if not is_its(user_id)]
    unprotected = [user_id for user_id in acknowledged_in(traffic, "without a replica") if is_its(user_id)]
    return [
        *answer_rows(traffic),
        row("seconds_until_the_replica_took_over", round(failover_s, 2)),
        row("seconds_until_lists_of_its_users_were_whole", round(recovery_s, 2)),
        row("reads_during_the_failover", len(failing)),
        row("degraded_reads_during_the_failover", len(degraded)),
        row("of_them_for_users_of_other_primaries", sum(not is_its(read.user_id) for read in degraded)),
        row("events_of_other_primaries_acknowledged_meanwhile", len(others), ">= 1", bool(others)),
        row("events_acknowledged_that_only_one_server_had", len(unprotected), "0", not unprotected),
        row("events_refused", sum(write.num_refused for write in traffic.writes)),
        row("lists_degraded_in_calm", sum(bool(read.degraded) for read in traffic.reads_in("calm"))),
        *await kept_rows(traffic, servers.primaries()),
    ]


async def whole_lists(traffic: Traffic, is_its: Callable[[str], bool]) -> None:
    """Return when a list of a user of the dead primary is not degraded any more, by itself."""
    phase = traffic.phase
    await traffic.until(
        lambda: any(
            read.outcome == "200" and not read.degraded and is_its(read.user_id) for read in traffic.reads_in(phase)
        ),
        "a list that is not degraded, of a user of the dead primary",
    )


def acknowledged_in(traffic: Traffic, phase: str) -> list[str]:
    """Of each event that was sent and acknowledged in a phase, its user."""
    return [
        traffic.acknowledged[event_id]["user_id"]
        for event_id, phases in traffic.acknowledged_in.items()
        if phases == (phase, phase)
    ]


if __name__ == "__main__":
    main()
