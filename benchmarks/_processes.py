"""Servers as processes of their own, for the benchmarks that drive them from outside."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parent.parent
START_S = 120.0


@dataclass(frozen=True)
class Process:
    """A running server."""

    pid: int
    url: str
    ops_url: str | None = None
    admin_url: str | None = None

    def resident_mib(self) -> float:
        """Memory in use."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise ProcessLookupError(f"process {self.pid} is gone")

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """A metric's samples: labels and value."""
        text = httpx.get(f"{self.ops_url}/metrics", timeout=30).text
        return [
            (sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        ]


@contextmanager
def service(bundle: Path, log: Path, **settings: object) -> Iterator[Process]:
    """`bft-serve run` for a `with` block.

    Args:
        bundle: a bundle or a registry.
        log: file for its log.
        settings: in capitals, without BFT_.
    """
    ports = ["--port", "0", "--ops-port", "0", "--admin-port", "0"]
    command = [sys.executable, "-m", "service.cli", "run", "--bundle", str(bundle), *ports]
    ours = {f"BFT_{name}": str(value) for name, value in settings.items()}
    with running(command, log, ours) as process:
        started = _logged(process, log, "serving")
        yield Process(process.pid, started["public"], started["operations"], started["admin"])


@contextmanager
def running(command: list[str], log: Path, settings: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the project's root, ended with the block."""
    others = {name: value for name, value in os.environ.items() if not name.upper().startswith("BFT_")}
    environment = {**others, "PYTHONPATH": str(ROOT), **settings}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=ROOT)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _logged(process: subprocess.Popen[bytes], log: Path, message: str) -> dict[str, str]:
    """The log's first line with this message."""
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        for line in log.read_text().splitlines(keepends=True):
            if line.startswith("{") and line.endswith("\n"):
                record: dict[str, str] = json.loads(line)
                if message in (record.get("message"), record.get("event")):
                    return record
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")


class Replica:
    """A service on an address of its own, that is ended and started again. The calls block.

    Args:
        bundle: a bundle or a registry.
        log: file for its log; each start begins it anew.
        number: from 0; the replica listens on 127.0.0.(number + 2). No connection leaves from there, so none takes the
            port while the replica is away.
        settings: in capitals, without BFT_.
    """

    def __init__(self, bundle: Path, log: Path, number: int, **settings: object) -> None:
        self.host = f"127.0.0.{number + 2}"
        self.port = free_port(self.host)
        self._log = log
        addresses = ["--host", self.host, "--port", str(self.port), "--ops-port", "0", "--admin-port", "0"]
        self._command = [sys.executable, "-m", "service.cli", "run", "--bundle", str(bundle), *addresses]
        self._settings = {f"BFT_{name}": str(value) for name, value in settings.items()}
        self._running = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Of the public API."""
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        """Return when it answers."""
        self._process = self._running.enter_context(running(self._command, self._log, self._settings))
        _logged(self._process, self._log, "serving")

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        """`kill -9`; returns the exit code."""
        return self._end(signal.SIGKILL)

    def close(self) -> None:
        """End it if it runs."""
        self._running.close()

    def _end(self, number: signal.Signals) -> int:
        if self._process is None:
            raise ProcessLookupError(f"the replica at {self.url} does not run; start it first")
        self._process.send_signal(number)
        code = self._process.wait(START_S)
        self._running.close()
        return code


def free_port(host: str) -> int:
    """A port of this address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
