"""What schemathesis is told about this API beyond its document; `bad_input.py` has it loaded by SCHEMATHESIS_HOOKS.

No check is switched off. Some failures are dropped, each kind for the reason that its function states, and counted.
"""

import atexit
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis
from schemathesis import Case, CheckContext, HookContext, Response
from schemathesis.core.failures import AcceptedNegativeData, Failure
from schemathesis.openapi.checks import RejectedPositiveData

DEADLINE = "x-request-timeout-ms"
LONGEST_MS = 60_000
BEYOND_JSON_SCHEMA = ("bytes of UTF-8", "must not be before 1970", "must not be more than a day ahead of now")

statuses: Counter[int] = Counter()
dropped: Counter[str] = Counter()


@schemathesis.hook
def before_call(_: HookContext, case: Case, kwargs: dict[str, Any]) -> None:
    """An acceptable deadline becomes the longest one: whether 1 ms is enough is a matter of the machine, and 504 the
    right answer when it is not. What is not acceptable is sent as it is."""
    for name, value in list((case.headers or {}).items()):
        if name.lower() == DEADLINE and str(value).isdecimal() and 1 <= int(value) <= LONGEST_MS:
            case.headers[name] = str(LONGEST_MS)


@schemathesis.hook
def after_call(_: HookContext, case: Case, response: Response) -> None:
    """Count."""
    statuses[response.status_code] += 1


@schemathesis.check
def every_error_is_a_problem(_: CheckContext, response: Response, case: Case) -> None:
    """RFC 9457, with what to do."""
    if response.status_code < 400:
        return
    media_type = response.headers.get("content-type", [""])[0]
    if media_type != "application/problem+json":
        raise AssertionError(f"an error as {media_type or 'nothing'}")
    problem = response.json()
    if missing := [name for name in ("type", "title", "detail", "action") if not problem.get(name)]:
        raise AssertionError(f"a problem without {', '.join(missing)}")
    if problem.get("status") != response.status_code:
        raise AssertionError("a problem of another status")


@schemathesis.hook
def filter_failure(_: HookContext, failure: Failure, case: Case, response: Response) -> bool:
    """Whether a failure counts."""
    reasons = {AcceptedNegativeData: (refused_alone,), RejectedPositiveData: (beyond_json_schema, tensors, state)}
    for reason in reasons.get(type(failure), ()):
        if reason(case, response):
            dropped[reason.__name__] += 1
            return False
    return True


def refused_alone(case: Case, response: Response) -> bool:
    """A batch, and events, are answered 200 when one of them is wrong: that one has the problem at its place."""
    if case.path not in ("/v1/recommendations/batch", "/v1/events"):
        return False
    return any(result["status"] in (422, "rejected") for result in response.json()["results"])


def beyond_json_schema(_: Case, response: Response) -> bool:
    """JSON Schema counts characters and not bytes, and knows no clock; the document says both in words."""
    errors = refused(response)
    return bool(errors) and all(any(text in message for text in BEYOND_JSON_SCHEMA) for message in errors.values())


def tensors(case: Case, response: Response) -> bool:
    """Which tensors a graph takes, of which shape and range, is in the graph's metadata, not in the document."""
    errors = refused(response)
    return case.path.endswith("/infer") and bool(errors) and all(name.startswith(("in", "out")) for name in errors)


def state(case: Case, response: Response) -> bool:
    """Whether a version lies in the registry, and If-Match names what is, no document can know."""
    if case.path != "/v1/models/active":
        return False
    errors = refused(response)
    return response.status_code in (412, 428) or (bool(errors) and errors.keys() <= {"default", "canary"})


def refused(response: Response) -> dict[str, str]:
    """Field → message of a 422."""
    errors = response.json()["errors"] if response.status_code == 422 else []
    return {error["field"]: error["message"] for error in errors}


@atexit.register
def write_tally() -> None:
    """What was counted, for `bad_input.py`."""
    Path(os.environ["BAD_INPUT_TALLY"]).write_text(json.dumps({"statuses": statuses, "dropped": dropped}))
