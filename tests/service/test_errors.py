"""The one table from errors to problems is complete, and events' values are judged as documented."""

import json

import pytest

from service import errors, ingest
from service.errors import ServiceError, problem_response, state_problem, validation_problem
from service.schemas import EventIn
from service.states.interface import (
    CatalogMismatch,
    NotReplicated,
    OutboxFull,
    StateError,
    StateUnavailable,
    UnknownItemsFull,
)
from service.values import check_timestamp, identity_hash

NOW_S = 1_800_000_000.0


def every(kind: type[Exception]) -> list[type[Exception]]:
    return [found for sub in kind.__subclasses__() for found in (sub, *every(sub))]


def test_every_error_of_the_store_is_a_problem() -> None:
    assert set(every(StateError)) == set(errors.STATE_PROBLEMS)


@pytest.mark.parametrize(
    "error",
    [
        StateUnavailable("away"),
        NotReplicated(0, 1),
        OutboxFull(10),
        UnknownItemsFull(10),
        CatalogMismatch("another"),
    ],
)
def test_what_the_store_cannot_do_now_is_a_503_that_says_when_to_come_back(error: StateError) -> None:
    response = problem_response(state_problem(error), "request-1")

    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    problem = json.loads(bytes(response.body))
    assert problem["request_id"] == "request-1"
    assert problem["detail"]
    assert problem["action"]


def test_no_two_errors_share_a_type() -> None:
    kinds = [kind for kind in every(ServiceError) if kind is not errors.TranslatedError]
    types = [kind.type for kind in kinds if issubclass(kind, ServiceError)]

    assert len(set(types)) == len(types)
    assert "internal" not in types


def test_a_problem_survives_what_callers_put_into_names() -> None:
    found = validation_problem([{"loc": ("body", "\ud800" + "x" * 1000), "msg": "no", "type": "extra_forbidden"}] * 50)

    body = bytes(problem_response(found).body)

    assert body.isascii()
    assert len(json.loads(body)["errors"]) == errors.MAX_FIELD_ERRORS
    assert len(json.loads(body)["errors"][0]["field"]) == errors.MAX_FIELD_CHARS


def event(**fields: object) -> EventIn:
    return EventIn.model_validate({"user_id": "u", "item_id": "i", **fields})


def identity(place: int = 0, key: str | None = None, **fields: object) -> bytes | None:
    return ingest.check_event(event(**fields), NOW_S, key, place).identity


def test_an_identity_is_the_name_else_the_content_else_the_place_under_a_key() -> None:
    assert identity(event_id="e", timestamp=1) == identity(event_id="e", item_id="other")
    assert identity(timestamp=1, type="view") == identity(timestamp="1970-01-01T00:00:01Z", type="view", weight=2.0)
    assert identity(timestamp=1, type="view") != identity(timestamp=1, type="buy")
    assert identity(timestamp=1, item_id="i") != identity(timestamp=1, item_id="j")
    assert identity(key="k", place=0) == identity(key="k", place=0)
    assert len({identity(key="k", place=0), identity(key="k", place=1), identity(key="l", place=0)}) == 3
    assert identity() is None


def test_an_undated_event_happens_now() -> None:
    undated = ingest.check_event(event(), NOW_S, None, 0)

    assert (undated.timestamp_ms, undated.undated) == (1_800_000_000_000, True)


def test_the_parts_of_an_identity_do_not_run_together() -> None:
    assert identity_hash("ab", "c") != identity_hash("a", "bc")


@pytest.mark.parametrize(
    ("sent", "timestamp_ms"),
    [
        (0, 0),
        (1.5, 1500),
        (NOW_S + 86_400, 1_800_086_400_000),
        ("2026-11-29T14:05:00Z", 1_795_961_100_000),
        ("2026-11-29t14:05:00.25z", 1_795_961_100_250),
        ("2026-11-29 15:05:00+01:00", 1_795_961_100_000),
    ],
)
def test_timestamps_are_unix_seconds_or_rfc_3339(sent: float | str, timestamp_ms: int) -> None:
    assert check_timestamp(sent, NOW_S) == timestamp_ms


@pytest.mark.parametrize("sent", [NOW_S + 86_401, -1e-9, float("nan"), float("inf"), "20261129T140500Z", None, {}])
def test_other_timestamps_are_refused(sent: object) -> None:
    with pytest.raises(ValueError, match="must"):
        check_timestamp(sent, NOW_S)
