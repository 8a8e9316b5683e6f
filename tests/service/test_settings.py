"""Settings: what is refused, what is ignored, what is found out."""

from pathlib import Path

import pytest

from service.errors import StartError
from service.settings import Settings, available_cpus, load_settings, refuse_unknown_variables

FOREIGN = "HOME", "PATH"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"BFT_{name.upper()}", raising=False)
    monkeypatch.setenv("BFT_BUNDLE", "somewhere")


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BFT_PORT", "1234")
    monkeypatch.setenv("BFT_OPS_PORT", "4321")

    settings = load_settings(port=5678, host=None)

    assert (settings.port, settings.ops_port, settings.host) == (5678, 4321, "127.0.0.1")


def test_the_url_of_redis_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BFT_REDIS_URL", "redis://:secret@here")

    settings = load_settings()

    assert settings.redis_url is not None
    assert "secret" not in repr(settings) + str(settings.model_dump())


@pytest.mark.parametrize(("name", "nearest"), [("BFT_PROT", "BFT_PORT"), ("bft_redis_uri", "BFT_REDIS_URL")])
def test_an_unknown_variable_is_refused_and_the_nearest_named(name: str, nearest: str) -> None:
    with pytest.raises(StartError, match=f"{name} is not a setting; did you mean {nearest}"):
        refuse_unknown_variables({name: "x"})


def test_the_service_links_of_kubernetes_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    # As Kubernetes documents them for a Service `bft` with a port named `http`, and for one called `bft-ops`.
    links = {
        "BFT_SERVICE_HOST": "10.0.0.11",
        "BFT_SERVICE_PORT": "8080",
        "BFT_SERVICE_PORT_HTTP": "8080",
        "BFT_PORT": "tcp://10.0.0.11:8080",
        "BFT_PORT_8080_TCP": "tcp://10.0.0.11:8080",
        "BFT_PORT_8080_TCP_PROTO": "tcp",
        "BFT_PORT_8080_TCP_PORT": "8080",
        "BFT_PORT_8080_TCP_ADDR": "10.0.0.11",
        "BFT_OPS_SERVICE_HOST": "10.0.0.12",
        "BFT_OPS_PORT": "tcp://10.0.0.12:9090",
        "BFT_REDIS_PORT": "tcp://10.0.0.13:6379",
    }
    for name, value in links.items():
        monkeypatch.setenv(name, value)

    settings = load_settings()

    assert (settings.port, settings.ops_port) == (8080, 9090)


@pytest.mark.parametrize(
    ("flags", "word"),
    [({"port": 70_000}, "BFT_PORT"), ({"threads": 0}, "BFT_THREADS"), ({"provider": "tpu"}, "BFT_PROVIDER")],
)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_variable(flags: dict[str, object], word: str) -> None:
    with pytest.raises(StartError, match=word):
        load_settings(**flags)


def test_a_key_in_place_of_its_hash_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BFT_API_KEY_SHA256", "bft_a-key-in-clear")

    with pytest.raises(StartError, match="BFT_API_KEY_SHA256") as caught:
        load_settings()

    assert "in-clear" not in str(caught.value)


def cgroup(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 8),
        ({"cpu_dot_max": "max 100000\n"}, 8),
        ({"cpu_dot_max": "250000 100000\n"}, 2),
        ({"cpu_dot_max": "50000 100000\n"}, 1),
        ({"cpu_dot_max": "9900000 100000\n"}, 8),
        ({"cpu__cpu_dot_cfs_quota_us": "300000\n", "cpu__cpu_dot_cfs_period_us": "100000\n"}, 3),
        ({"cpu__cpu_dot_cfs_quota_us": "-1\n", "cpu__cpu_dot_cfs_period_us": "100000\n"}, 8),
    ],
)
def test_threads_follow_the_quota_and_the_affinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cpus: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))

    assert available_cpus(cgroup(tmp_path, **files)) == cpus
