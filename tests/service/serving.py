"""The service as a process of its own: `bft-serve run` on free ports."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

COMMAND = [sys.executable, "-m", "service.cli"]
ROOT = Path(__file__).parents[2]
PATIENT_S = 60.0
"""Time-out where none is expected: a busy machine is not a failure."""


@dataclass
class Server:
    """A running service."""

    process: subprocess.Popen[bytes]
    log: Path
    client: httpx.Client
    """Of the public API."""
    ops: httpx.Client
    admin: httpx.Client

    def recommend(self, **request: Any) -> dict[str, Any]:
        """A list; the answer must be 200."""
        response = self.client.post("/v1/recommendations", json=request)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def append(self, *events: dict[str, Any]) -> list[dict[str, Any]]:
        """Events' results; the answer must be 200."""
        response = self.client.post("/v1/events", json={"events": events})
        assert response.status_code == 200, response.text
        results: list[dict[str, Any]] = response.json()["results"]
        return results

    def log_lines(self) -> list[dict[str, Any]]:
        """The log so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def request_line(self, response: httpx.Response) -> dict[str, Any]:
        """What the log says of an answer; the line is written after the answer has gone."""
        request_id = response.headers["x-request-id"]
        while True:
            for line in self.log_lines():
                if line["message"] == "request" and line["request_id"] == request_id:
                    return line
            sleep(0.01)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)


def counted(metrics: str, counter: str, label: str) -> dict[str, float]:
    """What a counter says, by the values of its one label, in the text of /metrics."""
    samples = (sample for family in text_string_to_metric_families(metrics) for sample in family.samples)
    return {sample.labels[label]: sample.value for sample in samples if sample.name == counter}


def assert_lists_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two answers with the same items in the same order, their numbers within float32's reach of each other."""
    assert [item["item_id"] for item in found["items"]] == [item["item_id"] for item in expected["items"]]
    for name in ("score", "std", "confidence", "reliability"):
        np.testing.assert_allclose(
            [item[name] for item in found["items"]],
            [item[name] for item in expected["items"]],
            rtol=1e-4,
            atol=1e-5,
            err_msg=name,
        )


def environment(**settings: Any) -> dict[str, str]:
    """This process's environment with only these settings of the service; slow machines get time."""
    patient = {"THREADS": 1, "STATE_TIMEOUT_MS": 5000, "REQUEST_TIMEOUT_MS": 60_000, "DRAIN_GRACE_S": 0}
    others = {name: value for name, value in os.environ.items() if not name.upper().startswith("BFT_")}
    return others | {f"BFT_{name}": str(value) for name, value in {**patient, **settings}.items()}


@contextmanager
def serving(bundle: Path, log: Path, **settings: Any) -> Iterator[Server]:
    """A service for a `with` block.

    Args:
        bundle: a bundle or a registry.
        log: file for its log.
        settings: in capitals, without BFT_.
    """
    command = [*COMMAND, "run", "--bundle", str(bundle), "--port", "0", "--ops-port", "0", "--admin-port", "0"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, env=environment(**settings), cwd=ROOT)
    try:
        started = _wait_for_start(process, log)
        with (
            httpx.Client(base_url=started["public"], timeout=PATIENT_S) as client,
            httpx.Client(base_url=started["operations"], timeout=PATIENT_S) as ops,
            httpx.Client(base_url=started["admin"], timeout=PATIENT_S) as admin,
        ):
            yield Server(process, log, client, ops, admin)
    finally:
        process.terminate()
        process.wait(PATIENT_S)


def _wait_for_start(process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    while process.poll() is None:
        for line in log.read_text().splitlines(keepends=True):
            if line.endswith("\n") and (record := json.loads(line))["message"] == "serving":
                found: dict[str, Any] = record
                return found
        sleep(0.05)
    raise AssertionError(f"the service ended with {process.returncode}: {log.read_text()}")
