"""API keys: what is accepted, what is kept, and who is let in."""

import hashlib
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import jsonschema
import pytest
from starlette.datastructures import Headers
from typer.testing import CliRunner

from service.cli import cli
from service.errors import StartError, Unauthorized
from service.security import ApiKeys, Quota, load_api_keys, new_key, toml_entry
from service.settings import Settings
from tests.service.serving import Server, serving

KEY = "bft_a-key-for-tests"
OTHER = "bft_another-key-for-tests"


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def keys_file(folder: Path, text: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    return path


def load(path: Path | None, **settings: object) -> ApiKeys:
    return load_api_keys(Settings.model_validate({"bundle": "x", "api_keys_file": path, **settings}))


def bearer(value: str) -> Headers:
    return Headers({"Authorization": value})


# ---- the file --------------------------------------------------------------------------------------------


def test_keys_come_from_the_file_and_the_environment_with_their_quotas(tmp_path: Path) -> None:
    text = f"""
        [[keys]]
        name = "shop"
        sha256 = "{sha256(KEY)}"
        requests_per_second = 7

        [[keys]]
        name = "app"
        sha256 = "{sha256(OTHER).upper()}"
        requests_per_second = 7
        burst = 9
    """
    path = keys_file(tmp_path, text)

    keys = list(load(path, api_key_sha256=sha256("third"), requests_per_second=100, burst=300))

    assert [(key.name, key.quota) for key in keys] == [
        ("shop", Quota(7, 7)),
        ("app", Quota(7, 9)),
        ("default", Quota(100, 300)),
    ]


def test_without_a_rate_a_key_has_no_quota(tmp_path: Path) -> None:
    (key,) = load(None, api_key_sha256=sha256(KEY))

    assert key.quota is None


GOOD = f'[[keys]]\nname = "shop"\nsha256 = "{sha256(KEY)}"\n'
WRONG: dict[str, tuple[str, str]] = {
    "no TOML": ("keys: shop", "TOML"),
    "no keys": ("", "keys"),
    "an empty list": ("keys = []", "keys"),
    "an unknown field": (f"{GOOD}rate = 3\n", r"keys\.0\.rate"),
    "a missing field": ('[[keys]]\nname = "shop"\n', r"keys\.0\.sha256"),
    "a key in clear": (f'[[keys]]\nname = "shop"\nsha256 = "{KEY}"\n', r"keys\.0\.sha256"),
    "a name of two words": (f'[[keys]]\nname = "a b"\nsha256 = "{sha256(KEY)}"\n', r"keys\.0\.name"),
    "a rate of nothing": (f"{GOOD}requests_per_second = 0\n", r"keys\.0\.requests_per_second"),
    "a rate as text": (f'{GOOD}requests_per_second = "3"\n', r"keys\.0\.requests_per_second"),
    "a burst alone": (f"{GOOD}burst = 3\n", "burst without requests_per_second"),
    "the same name twice": (f'{GOOD}[[keys]]\nname = "Shop"\nsha256 = "{sha256(OTHER)}"\n', "same name"),
    "the same key twice": (f'{GOOD}[[keys]]\nname = "b"\nsha256 = "{sha256(KEY).upper()}"\n', "same sha256"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_keys_file_stops_the_start_and_shows_no_key(tmp_path: Path, case: str) -> None:
    text, words = WRONG[case]

    with pytest.raises(StartError, match=words) as caught:
        load(keys_file(tmp_path, text))

    assert KEY not in str(caught.value)


def test_a_keys_file_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"BFT_API_KEYS_FILE: .*none\.toml"):
        load(tmp_path / "none.toml")


# ---- the header ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER   {KEY}"])
def test_the_scheme_may_be_written_in_any_case(value: str) -> None:
    keys = load(None, api_key_sha256=sha256(KEY))

    assert keys.of(bearer(value)).name == "default"


@pytest.mark.parametrize(
    "value",
    ["", KEY, f"Basic {KEY}", f"Bearer{KEY}", "Bearer ", f"Bearer {KEY} x", f"Bearer {KEY}ü", f"Bearer {'a' * 257}"],
)
def test_what_is_no_bearer_token_is_asked_for_one(value: str) -> None:
    keys = load(None, api_key_sha256=sha256(KEY))

    with pytest.raises(Unauthorized) as caught:
        keys.of(bearer(value))

    assert caught.value.headers == {"WWW-Authenticate": 'Bearer realm="bft"'}


@pytest.mark.parametrize("sent", [OTHER, KEY[:-1], f"{KEY}=", sha256(KEY)])
def test_an_unknown_key_is_told_from_a_missing_one(sent: str) -> None:
    keys = load(None, api_key_sha256=sha256(KEY))

    with pytest.raises(Unauthorized, match="not known") as caught:
        keys.of(bearer(f"Bearer {sent}"))

    assert caught.value.headers == {"WWW-Authenticate": 'Bearer realm="bft", error="invalid_token"'}


# ---- new keys --------------------------------------------------------------------------------------------


def test_a_new_key_has_256_random_bits() -> None:
    made = {new_key() for _ in range(100)}

    assert len(made) == 100
    # 43 characters of 6 bits.
    assert {len(key.removeprefix("bft_")) for key in made} == {43}


def test_new_key_prints_a_key_and_the_entry_that_lets_it_in(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["new-key", "shop", "--requests-per-second", "5", "--burst", "8"])
    key = done.stderr.split()[-1]

    (loaded,) = load(keys_file(tmp_path, done.stdout))

    assert done.exit_code == 0
    assert key not in done.stdout
    assert loaded.digest.hex() == sha256(key) == tomllib.loads(done.stdout)["keys"][0]["sha256"]
    assert (loaded.name, loaded.quota) == ("shop", Quota(5, 8))


def test_new_key_refuses_a_name_that_the_file_would_refuse() -> None:
    done = CliRunner().invoke(cli, ["new-key", 'a"b'])

    assert done.exit_code == 2
    assert done.stderr.startswith("error: name")
    assert done.stdout == ""


def test_entries_of_two_keys_make_one_file(tmp_path: Path) -> None:
    text = "\n".join([toml_entry("a", KEY, None, None), toml_entry("b", OTHER, 3, None)])

    assert [key.quota for key in load(keys_file(tmp_path, text))] == [None, Quota(3, 3)]


# ---- a running service -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("keys")
    file = keys_file(folder, toml_entry("shop", KEY, None, None))
    with serving(tiny, folder / "service.log", API_KEYS_FILE=file) as running:
        yield running


ROUTES = [
    ("POST", "/v1/recommendations"),
    ("POST", "/v1/events"),
    ("GET", "/v1/users/a"),
    ("DELETE", "/v1/users/a"),
    ("GET", "/no/such/path"),
    ("PUT", "/v1/events"),
    ("GET", "/docs/"),
    ("GET", "/docs%2F..%2Fv1%2Fusers%2Fa"),
]


def with_key(server: Server, method: str, path: str, key: str | None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return server.client.request(method, path, headers=headers)


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("key", [None, OTHER])
def test_nothing_of_the_api_is_answered_without_a_known_key(
    server: Server, method: str, path: str, key: str | None
) -> None:
    response = with_key(server, method, path, key)

    assert response.status_code == 401
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["www-authenticate"].startswith("Bearer ")
    assert response.json()["type"] == "urn:problem-type:bft:unauthorized"


def test_a_known_key_is_let_in_and_its_name_is_logged(server: Server) -> None:
    line = server.request_line(with_key(server, "GET", "/v1/users/a", KEY))

    assert (line["key"], line["status"], line["problem"]) == ("shop", 404, "user-not-found")


def test_a_large_body_is_not_read_for_a_stranger(server: Server) -> None:
    response = server.client.post("/v1/events", content=b" " * 2**21)

    assert response.status_code == 401


def test_neither_log_nor_metrics_nor_answers_hold_a_key(server: Server) -> None:
    answers = [with_key(server, method, path, key) for method, path in ROUTES for key in (KEY, OTHER)]

    server.request_line(answers[-1])
    told = server.log.read_text() + server.ops.get("/metrics").text
    told += "".join(answer.text + str(answer.headers) for answer in answers)
    assert KEY not in told
    assert OTHER not in told
    assert sha256(KEY) not in told


def test_the_description_asks_for_the_key_that_the_service_asks_for(server: Server, tiny: Path, tmp_path: Path) -> None:
    document = server.client.get("/openapi.json").json()
    with serving(tiny, tmp_path / "log") as without:
        open_document = without.client.get("/openapi.json").json()

    (name,) = document["components"]["securitySchemes"]
    assert document["components"]["securitySchemes"][name] == {"type": "http", "scheme": "bearer"}
    assert document["security"] == [{name: []}]
    for path in document["paths"].values():
        for operation in path.values():
            assert {"401", "429"} <= operation["responses"].keys()
    refused = with_key(server, "GET", "/v1/users/a", None).json()
    jsonschema.validate(refused, {"$ref": "#/components/schemas/Problem", "components": document["components"]})
    assert "security" not in open_document
    assert "securitySchemes" not in open_document["components"]
