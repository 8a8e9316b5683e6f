"""Steady traffic on the service, and a record of every answer: lists that are read, events that are sent until they are
acknowledged."""

import asyncio
import itertools
import random
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import aiohttp
import redis
from _bundles import item_id
from _report import row
from _valkey import PATIENCE_S

NUM_RESULTS = 10
WARM_USERS = 30
EVENTS_OF_A_USER = 8
"""No window of a bundle is shorter, so that an export shows all of them."""
FALLBACK_ITEMS = (5, 3, 8)
DEGRADED = ["state_unavailable"]

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Read:
    """The answer to a request for a list."""

    user_id: str
    told: bool
    """A `fallback_history` came along."""
    phases: tuple[str, str]
    """In which it was asked, and answered."""
    seconds: float
    """From the time it was due."""
    outcome: str
    """`200`, or what came instead."""
    degraded: Sequence[str] = ()
    item_ids: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Write:
    """The answer to events that were sent."""

    phases: tuple[str, str]
    outcome: str
    """`200`, `503` when it has Retry-After, or what came instead."""
    num_acknowledged: int
    num_refused: int
    """Of its events: those of a 503, and those that a 200 calls rejected for now."""


@dataclass
class Traffic:
    """Readers and writers of one service.

    Args:
        session: of the client.
        url: of the public API.
        num_items: catalogue size.
        headers: of every request.
    """

    session: aiohttp.ClientSession
    url: str
    num_items: int
    headers: dict[str, str] = field(default_factory=dict)
    phase: str = "before"
    """What goes on at present; whoever causes it says so here."""
    reads: list[Read] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    acknowledged: dict[str, Event] = field(default_factory=dict)
    """By event_id."""
    acknowledged_in: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By event_id: the phases in which the acknowledged request was sent and answered."""
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    # ---- lists -------------------------------------------------------------------------------------------

    async def read(self, user_id: str, told: bool, due: float) -> None:
        """Ask for a list, and keep the answer."""
        asked_in = self.phase
        body: dict[str, Any] = {"user_id": user_id, "num_results": NUM_RESULTS}
        if told:
            body["fallback_history"] = history(FALLBACK_ITEMS)
        outcome, answer, _ = await self.post("/v1/recommendations", body)
        self.reads.append(
            Read(
                user_id,
                told,
                (asked_in, self.phase),
                time.perf_counter() - due,
                outcome,
                answer.get("degraded", ()),
                ids_of(answer),
            )
        )

    async def keep_reading(self, per_second: float) -> None:
        """Ask by the clock, whatever the answers take: warm and cold users in turn, with and without a fallback."""
        draw, begun, under_way = random.Random(0), time.perf_counter(), set()
        for number in itertools.count():
            due = begun + number / per_second
            if await self._stopped_within(due - time.perf_counter()):
                break
            is_warm, told = number % 2 == 0, number // 2 % 2 == 0
            user_id = f"warm-{draw.randrange(WARM_USERS)}" if is_warm else f"cold-{number}"
            task = asyncio.create_task(self.read(user_id, told, due))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)

    # ---- events ------------------------------------------------------------------------------------------

    async def keep_writing(self, writer: int, per_second: float, num_users: int = 1) -> None:
        """Send an event for each of `num_users` users at a time, and go on when all are acknowledged."""
        for number in itertools.count():
            if await self._stopped_within(1 / per_second):
                return
            generation, place = divmod(number, EVENTS_OF_A_USER)
            await self.send_until_acknowledged(
                [self.event(f"w{writer}-{generation}-{user}", place) for user in range(num_users)]
            )

    async def write_warm_users(self) -> None:
        """Events of the users that are read."""
        for number in range(WARM_USERS):
            await self.send_until_acknowledged([self.event(f"warm-{number}", place) for place in range(3)])

    def event(self, user_id: str, place: int) -> Event:
        """A user's event; its item is no other event's of this user."""
        number = zlib.crc32(user_id.encode()) + place
        return {"event_id": f"{user_id}:{place}", "user_id": user_id, "item_id": item_id(number % self.num_items)}

    async def send_until_acknowledged(self, events: Sequence[Event]) -> None:
        """Send events; those that were refused for now again, when Retry-After is over."""
        while events:
            events, retry_after_s = await self._send(events)
            if events:
                await asyncio.sleep(retry_after_s)

    async def _send(self, events: Sequence[Event]) -> tuple[Sequence[Event], float]:
        """Send events once; those to send again, and when."""
        sent_in = self.phase
        outcome, answer, headers = await self.post("/v1/events", {"events": events})
        phases = (sent_in, self.phase)
        refused: Sequence[Event] = events
        if outcome == "200":
            results = list(zip(events, answer["results"], strict=True))
            refused = [event for event, result in results if result["status"] == "rejected"]
            for event, result in results:
                if result["status"] != "rejected":
                    self.acknowledged[event["event_id"]] = event
                    self.acknowledged_in[event["event_id"]] = phases
                elif result["problem"]["status"] != 503:
                    outcome = f"200 with {result['problem']['type']}"
        elif outcome == "503" and "Retry-After" not in headers:
            outcome = "503 without Retry-After"
        self.writes.append(Write(phases, outcome, len(events) - len(refused), len(refused)))
        return refused, float(headers.get("Retry-After", 1))

    # ---- both --------------------------------------------------------------------------------------------

    async def post(self, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, str]]:
        """The outcome, the body and the headers of an answer."""
        try:
            async with self.session.post(self.url + path, json=body, headers=self.headers) as response:
                return str(response.status), await response.json(content_type=None), dict(response.headers)
        except aiohttp.ClientError as error:
            return type(error).__name__, {}, {}

    async def events_of(self, user_id: str) -> list[dict[str, Any]]:
        """A user's events as exported, oldest first."""
        while True:
            async with self.session.get(f"{self.url}/v1/users/{quote(user_id)}", headers=self.headers) as response:
                answer = await response.json(content_type=None)
                if response.status in (200, 404):
                    return list(answer.get("events", ()))
            if response.status not in (503, 504):
                raise RuntimeError(f"GET /v1/users/{user_id} answered {response.status}: {answer}")
            await asyncio.sleep(float(response.headers.get("Retry-After", 1)))

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Return when the traffic has brought it about."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {PATIENCE_S:.0f} s: {what}")
            await asyncio.sleep(0.02)

    async def last(self, phase: str, seconds: float, num_refused: int = 0) -> None:
        """Return when the present phase has lasted so long, and has seen reads of each kind and so many refusals."""
        self.phase = phase
        await asyncio.sleep(seconds)
        await self.until(
            lambda: (
                all(self.num_reads(phase, kind) >= 2 for kind in itertools.product(("warm", "cold"), (True, False)))
                and sum(write.num_refused for write in self.writes_in(phase)) >= num_refused
            ),
            f"two reads of each kind and {num_refused} refused events while {phase}",
        )

    def num_reads(self, phase: str, kind: tuple[str, bool]) -> int:
        """Reads of a kind that were asked and answered in a phase."""
        return sum((read.user_id.split("-")[0], read.told) == kind for read in self.reads_in(phase))

    def reads_in(self, phase: str) -> list[Read]:
        """Reads that were asked and answered in a phase."""
        return [read for read in self.reads if read.phases == (phase, phase)]

    def writes_in(self, phase: str) -> list[Write]:
        """Writes that were sent and answered in a phase."""
        return [write for write in self.writes if write.phases == (phase, phase)]

    @asynccontextmanager
    async def flowing(
        self, reads_per_second: float, writers: int, writes_per_second: float, users_of_a_write: int = 1
    ) -> AsyncIterator[None]:
        """Traffic for the length of a block; at its end everything that was sent is acknowledged."""
        flows = [
            self.keep_reading(reads_per_second),
            *(self.keep_writing(writer, writes_per_second / writers, users_of_a_write) for writer in range(writers)),
        ]
        async with asyncio.TaskGroup() as group:
            for flow in flows:
                group.create_task(flow)
            try:
                yield
            finally:
                self._stop.set()

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._stop.wait()
        except TimeoutError:
            return False
        return True


def client() -> aiohttp.ClientSession:
    """Connections without a limit, none kept longer than by the server, or a request could meet the end of one."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2))


def history(items: Iterable[int]) -> list[dict[str, str]]:
    """Of a request, oldest first."""
    return [{"item_id": item_id(number)} for number in items]


async def expected_lists(traffic: Traffic) -> dict[bool, Sequence[str]]:
    """What is to be answered while nothing is known of anybody: with the fallback, and without one."""
    _, told, _ = await traffic.post(
        "/v1/recommendations", {"history": history(FALLBACK_ITEMS), "num_results": NUM_RESULTS}
    )
    _, nobody, _ = await traffic.post("/v1/recommendations", {"history": [], "num_results": NUM_RESULTS})
    return {True: ids_of(told), False: ids_of(nobody)}


def ids_of(answer: dict[str, Any]) -> list[str]:
    """The items of a list; none of another answer."""
    return [item["item_id"] for item in answer.get("items", ())]


# ---- what is kept ------------------------------------------------------------------------------------------


async def kept_rows(traffic: Traffic, ports: Iterable[int]) -> list[dict[str, Any]]:
    """Whether each acknowledged event is in its user's export and in the outbox, once; and no others.

    Args:
        traffic: that has ended.
        ports: of the servers that hold the state.
    """
    sent: dict[str, Counter[str]] = {}
    for event in traffic.acknowledged.values():
        sent.setdefault(event["user_id"], Counter())[event["item_id"]] += 1
    lost = doubled = 0
    for user_id, items in sent.items():
        found = Counter(event["item_id"] for event in await traffic.events_of(user_id))
        lost += (items - found).total()
        doubled += (found - items).total()
    outbox = outbox_of(ports)
    missing = traffic.acknowledged.keys() - outbox.keys()
    again = sum(number - 1 for number in outbox.values())
    return [
        row("events_acknowledged", len(traffic.acknowledged)),
        row("acknowledged_events_missing_in_exports", lost, "0", lost == 0),
        row("events_doubled_in_exports", doubled, "0", doubled == 0),
        row("acknowledged_events_missing_in_the_outbox", len(missing), "0", not missing),
        row("events_doubled_in_the_outbox", again, "0", again == 0),
    ]


def outbox_of(ports: Iterable[int]) -> Counter[str]:
    """How often each event_id is in the outbox streams."""
    found: Counter[str] = Counter()
    for port in ports:
        with redis.Redis(port=port) as client:
            for key in client.scan_iter("bft:1:*:ev"):
                entries = [fields for _, fields in client.xrange(key)]
                found.update(fields[b"event_id"].decode() for fields in entries if fields[b"kind"] == b"event")
    return found


def answer_rows(traffic: Traffic) -> list[dict[str, Any]]:
    """Whether every answer was one that a client can work with."""
    failures = Counter(read.outcome for read in traffic.reads if read.outcome != "200")
    others = Counter(write.outcome for write in traffic.writes if write.outcome not in ("200", "503"))
    return [
        row("reads", len(traffic.reads)),
        row("reads_that_failed", failures.total(), "0", not failures),
        row("failures_of_reads", dict(failures)),
        row("writes", len(traffic.writes)),
        row("writes_neither_200_nor_503_with_retry_after", others.total(), "0", not others),
        row("other_answers_to_writes", dict(others)),
    ]


def p99_ms(reads: Sequence[Read]) -> float:
    """Of the time from when a read was due to its answer, in ms."""
    ordered = sorted(read.seconds for read in reads)
    return round(1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 1)
