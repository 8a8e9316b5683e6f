"""The listed bad inputs of `bad_input.py`: requests that must be refused, as bytes, and what the refusal must say."""

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

Port = Literal["public", "admin"]
JSON = (("Content-Type", "application/json"),)
MIB = 2**20
HOLE = "@@hole@@"
"""Stands in a body for the JSON that a case puts there."""


@dataclass(frozen=True)
class Endpoint:
    """An endpoint that takes a body, with one that it accepts."""

    port: Port
    method: str
    path: str
    body: Mapping[str, Any]
    ids: Sequence[str]
    """Fields that hold an id, as dotted paths."""
    numbers: Sequence[str]
    times: Sequence[str] = ()
    headers: Sequence[tuple[str, str]] = ()

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    def with_json(self, path: str, text: bytes) -> bytes:
        """The body with this JSON, or what pretends to be JSON, in a field."""
        body = deepcopy(dict(self.body))
        *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
        place: Any = body
        for part in parents:
            place = place[part]
        place[last] = HOLE
        return json.dumps(body).encode().replace(f'"{HOLE}"'.encode(), text)


@dataclass(frozen=True)
class BadInput:
    """A request, byte by byte, and what must be answered."""

    kind: str
    port: Port
    target: str
    """Endpoint, and the field if it is about one."""
    request: bytes
    status: frozenset[int]
    named: str | None = None
    """Its last part must be named, numbers of places left out; None: the whole request is wrong, and no field."""
    says: str = ""
    """A regular expression that the problem's text must hold: what is accepted, or what is wrong."""
    slow: bool = False
    """The request never ends; the answer comes after the service's time-out."""


def http(
    method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes | None = None, chunked: bool = False
) -> bytes:
    """A request of HTTP/1.1, after which the connection closes."""
    lines = [f"{method} {path} HTTP/1.1", "Host: service", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers]
    if chunked:
        lines.append("Transfer-Encoding: chunked")
    elif body is not None:
        lines.append(f"Content-Length: {len(body)}")
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    if body is None:
        return head
    return head + (b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body)


def endpoints(recommendation_id: str, version: str) -> list[Endpoint]:
    """All that take a body."""
    seen = [{"item_id": "item-1", "timestamp": 1_700_000_000, "weight": 1.0}]
    asked = {"user_id": "u", "fallback_history": seen, "num_results": 5, "exclude_item_ids": ["x"]}
    infer = {
        "inputs": [
            {"name": "items", "shape": [1, 2], "datatype": "INT64", "data": [1, 4]},
            {"name": "weights", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 1.0]},
            {"name": "timestamps", "shape": [1, 2], "datatype": "FP64", "data": [None, 1_700_000_000]},
        ]
    }
    event = {"event_id": "e", "user_id": "u", "item_id": "item-1", "timestamp": 1_700_000_000, "type": "view"}
    history_ids = ("user_id", "fallback_history.0.item_id")
    tensors = ("inputs.0.shape.0", "inputs.0.data.1", "inputs.1.data.1", "inputs.2.data.1")
    return [
        Endpoint(
            "public",
            "POST",
            "/v1/recommendations",
            {**asked, "allow_item_ids": ["y"], "min_confidence": 0.1, "policy": "ucb", "kappa": 0.5},
            (*history_ids, "exclude_item_ids.0", "allow_item_ids.0", "policy"),
            ("num_results", "min_confidence", "kappa", "fallback_history.0.weight"),
            ("fallback_history.0.timestamp",),
        ),
        Endpoint(
            "public",
            "POST",
            "/v1/recommendations/batch",
            {"requests": [asked]},
            [f"requests.0.{name}" for name in (*history_ids, "exclude_item_ids.0")],
            ("requests.0.num_results", "requests.0.fallback_history.0.weight"),
            ("requests.0.fallback_history.0.timestamp",),
        ),
        Endpoint(
            "public", "POST", f"/v1/recommendations/{recommendation_id}/next", {"num_results": 5}, (), ("num_results",)
        ),
        Endpoint(
            "public",
            "POST",
            "/v1/rankings",
            {
                "user_id": "u",
                "fallback_history": seen,
                "candidate_item_ids": ["item-1"],
                "policy": "thompson",
                "seed": 7,
            },
            (*history_ids, "candidate_item_ids.0", "policy"),
            ("fallback_history.0.weight", "seed"),
            ("fallback_history.0.timestamp",),
        ),
        Endpoint(
            "public",
            "POST",
            "/v1/events",
            {"events": [{**event, "weight": 1.0, "recommendation_id": recommendation_id}]},
            [f"events.0.{name}" for name in ("event_id", "user_id", "item_id", "type", "recommendation_id")],
            ("events.0.weight",),
            ("events.0.timestamp",),
        ),
        Endpoint("public", "POST", "/v1/users/u/merge", {"from_session_id": "s"}, ("from_session_id",), ()),
        Endpoint("public", "POST", "/v2/models/encoder/infer", infer, ("inputs.0.name", "inputs.0.datatype"), tensors),
        Endpoint(
            "public",
            "POST",
            f"/v2/models/encoder/versions/{version}/infer",
            infer,
            ("inputs.0.name", "inputs.0.datatype"),
            tensors,
        ),
        Endpoint(
            "admin",
            "PUT",
            "/v1/models/active",
            {"default": version, "canary": None, "percent": None},
            ("default", "canary"),
            ("percent",),
            headers=(("If-Match", "*"),),
        ),
    ]


# ---- wrong values of fields --------------------------------------------------------------------------------

BAD_IDS = {
    "id of 64 KB": b'"%b"' % (b"x" * 2**16),
    "empty id": b'""',
    "id with a NUL": rb'"a\u0000b"',
    "id with a line break": rb'"a\r\nb"',
    "id with a C1 control character": rb'"a\u0085b"',
    "id with half of a surrogate pair": rb'"\ud800"',
    "number as id": b"7",
    "boolean as id": b"true",
    "list as id": b"[]",
}
BAD_NUMBERS = {
    "number as text": b'"3"',
    "boolean as number": b"true",
    "number of 1,000 digits": b"9" * 1000,
    "negative number of 1,000 digits": b"-" + b"9" * 1000,
    "number beyond float64": b"1e999",
    "negative number": b"-1",
    "list as number": b"[]",
}
BAD_TIMES = {
    "time before 1970": b"-1",
    "time long before 1970": b"-1e300",
    "time in milliseconds": b"1764424800000",
    "time in the far future": b"1e300",
    "time beyond float64": b"1e999",
    "time of 1,000 digits": b"9" * 1000,
    "text of the far future": b'"9999-12-31T23:59:59Z"',
    "text of before 1970": b'"1969-12-31T23:59:59Z"',
    "date without an offset": b'"2026-11-29T14:00:00"',
    "no date of the calendar": b'"2026-02-30T00:00:00Z"',
    "number as text": b'"1764424800"',
    "boolean as time": b"true",
}
NO_JSON = {
    "NaN": (b"NaN", "NaN is no number"),
    "Infinity": (b"Infinity", "Infinity is no number"),
    "-Infinity": (b"-Infinity", "-Infinity is no number"),
    "number of 5,000 digits": (b"9" * 5000, "too many digits"),
    "bytes that are no UTF-8": (b'"\xff\xfe"', "not UTF-8"),
    "surrogate as bytes": (b'"\xed\xa0\x80"', "not UTF-8"),
    "bare control character": (b'"a\x01b"', "not JSON"),
    "depth of 10,000 lists": (b"[" * 10_000 + b"]" * 10_000, "too deeply"),
    "depth of 10,000 objects": (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "too deeply"),
    "unfinished depth of 100,000": (b"[" * 100_000, "too deeply"),
}
TOO_MANY = {
    "num_results": ("501 results", b"501"),
    "candidate_item_ids": ("501 candidates", json.dumps([f"item-{n}" for n in range(501)]).encode()),
    "exclude_item_ids": ("10,001 ids in a filter", json.dumps([f"x{n}" for n in range(10_001)]).encode()),
    "allow_item_ids": ("10,001 ids in a filter", json.dumps([f"x{n}" for n in range(10_001)]).encode()),
    "fallback_history": ("4,097 events of a history", json.dumps([{"item_id": "item-1"}] * 4097).encode()),
    "events": ("501 events", json.dumps([{"user_id": "u", "item_id": "item-1", "event_id": "e"}] * 501).encode()),
    "requests": ("101 requests in a batch", json.dumps([{"user_id": "u"}] * 101).encode()),
    "inputs": ("17 tensors", json.dumps([{"name": "a", "shape": [], "datatype": "FP32", "data": []}] * 17).encode()),
}


def of_fields(endpoint: Endpoint) -> Iterator[BadInput]:
    """A wrong value in each field."""
    values = ((endpoint.ids, BAD_IDS), (endpoint.numbers, BAD_NUMBERS), (endpoint.times, BAD_TIMES))
    for paths, bad in values:
        for path in paths:
            for kind, text in bad.items():
                yield _of_field(endpoint, kind, path, text)
    for path in (*endpoint.ids, *endpoint.numbers, *endpoint.times)[:2]:
        for kind, (text, says) in NO_JSON.items():
            yield _posted(endpoint, kind, endpoint.with_json(path, text), 400, says=says, field_path=path)
    holder = endpoint.body["requests"][0] if "requests" in endpoint.body else endpoint.body
    for name, (kind, text) in TOO_MANY.items():
        if name in endpoint.body:
            yield _of_field(endpoint, kind, name, text)
        elif name in holder:
            yield _of_field(endpoint, kind, f"requests.0.{name}", text)


def _of_field(endpoint: Endpoint, kind: str, path: str, text: bytes) -> BadInput:
    request = endpoint.with_json(path, text)
    return _posted(endpoint, kind, request, 422, named=path, field_path=path)


# ---- wrong bodies ------------------------------------------------------------------------------------------


def of_bodies(endpoint: Endpoint) -> Iterator[BadInput]:
    """Whole bodies, content types and methods."""
    good = json.dumps(endpoint.body).encode()
    first = next(iter(endpoint.body))
    twice = good[:-1] + b', "%b": %b}' % (first.encode(), json.dumps(endpoint.body[first]).encode())
    large = b'{"a": "%b"}' % (b"x" * 10 * MIB)
    yield _posted(endpoint, "unknown field", good[:-1] + b', "nonsense": 1}', 422, named="nonsense", says="unknown")
    yield _posted(endpoint, "name twice", twice, 400, says="twice")
    yield _posted(endpoint, "body cut short", good[:-1], 400, says="not JSON")
    yield _posted(endpoint, "no body", b"", 422, named="body")
    yield _posted(endpoint, "byte order mark", b"\xef\xbb\xbf" + good, 400, says="not JSON")
    yield _posted(endpoint, "UTF-16", good.decode().encode("utf-16"), 400, says="UTF-8")
    for kind, body in {"null": b"null", "list": b"[]", "text": b'"text"', "number": b"1e999"}.items():
        yield _posted(endpoint, f"{kind} as body", body, 422, named="body")
    yield _posted(endpoint, "body of 10 MB", large, 413, says=r"\d+ bytes")
    yield _posted(endpoint, "body of 10 MB in chunks", large, 413, says=r"\d+ bytes", chunked=True)
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx"):
        headers = (*endpoint.headers, ("Content-Type", content_type))
        request = http(endpoint.method, endpoint.path, headers, good)
        yield _bad(endpoint, f"content type {content_type}", request, 415, says="application/json")
    yield _bad(endpoint, "no content type", http(endpoint.method, endpoint.path, endpoint.headers, good), 415)
    for method in ("GET", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"):
        if not (endpoint.path == "/v1/models/active" and method == "GET"):
            request = http(method, endpoint.path, (*endpoint.headers, *JSON), good)
            yield _bad(endpoint, f"method {method}", request, 405, says="Allow")
    head = http(endpoint.method, endpoint.path, (*endpoint.headers, *JSON), chunked=True)
    for kind, request in {
        "chunks without end": head + b"5\r\n" + good[:5] + b"\r\n",
        "body that never comes": http(endpoint.method, endpoint.path, (*JSON, ("Content-Length", "10"))),
    }.items():
        yield _bad(endpoint, kind, request, 408, says="took longer than", slow=True)
    yield _bad(endpoint, "chunk of no size", head + b"nonsense\r\n", 400)


# ---- wrong paths, queries and headers ----------------------------------------------------------------------

BAD_SEGMENTS = {
    "id of 64 KB": "x" * 2**16,
    "bytes that are no UTF-8": "%FF",
    "half of a surrogate pair": "%ED%A0%80",
    "NUL": "%00",
    "line break": "a%0D%0Ab",
    "C1 control character": "%C2%85",
}
DEADLINE = "X-Request-Timeout-Ms"
BAD_TIMEOUTS = ("0", "-1", "60001", "1e3", "1.5", "NaN", "true", "9" * 1000, " ")
BAD_KEYS = {"empty id": "", "id of 257 bytes": "x" * 257, "C1 control character": "a\x85"}
BROKEN_VALUES = {"a line feed": "a\nX-Injected: 1", "a bare return": "a\rX-Injected: 1", "a NUL": "a\0b"}


def of_paths() -> Iterator[BadInput]:
    """Ids in paths, and the one query."""
    rest = {
        "GET /v1/users/{}": "user_id",
        "DELETE /v1/users/{}": "user_id",
        "POST /v1/users/{}/merge": "user_id",
        "GET /v1/items/{}/similar": "item_id",
        "POST /v1/recommendations/{}/next": "recommendation_id",
    }
    for target, name in rest.items():
        method, path = target.split()
        headers, body = ((), None) if method != "POST" else (JSON, _body_for(path))
        for kind, segment in BAD_SEGMENTS.items():
            request = http(method, path.format(segment), headers, body)
            long = len(segment) >= 2**16
            yield BadInput(
                f"path: {kind}",
                "public",
                target,
                request,
                frozenset({431 if long else 422}),
                None if long else name,
                r"\d+ bytes" if long else "must",
            )
        yield BadInput(
            "path: empty id", "public", target, http(method, path.format(""), headers, body), frozenset({404})
        )
    for target in ("GET /v2/models/{}", "GET /v2/models/encoder/versions/{}", "GET /v2/models/{}/ready"):
        method, path = target.split()
        for kind, segment in BAD_SEGMENTS.items():
            request = http(method, path.format(segment), ())
            status, says = (431, r"\d+ bytes") if len(segment) >= 2**16 else (404, "has|loaded")
            yield BadInput(f"path: {kind}", "public", target, request, frozenset({status}), says=says)
    for value in ("501", "0", "-1", "9" * 1000, "1e2", "NaN", "true", "", "%FF", "2.5"):
        request = http("GET", f"/v1/items/item-1/similar?num_results={value}", ())
        kind = f"query: num_results={value[:8]}"
        yield BadInput(kind, "public", "GET /v1/items/{}/similar", request, frozenset({422}), "num_results")


def _body_for(path: str) -> bytes:
    return b'{"from_session_id": "s"}' if path.endswith("/merge") else b'{"num_results": 5}'


def of_headers(endpoint: Endpoint) -> Iterator[BadInput]:
    """Headers that the service reads, and headers that are too much."""
    good = json.dumps(endpoint.body).encode()

    def sent(*headers: tuple[str, str]) -> bytes:
        return http(endpoint.method, endpoint.path, (*endpoint.headers, *JSON, *headers), good)

    for value in BAD_TIMEOUTS:
        kind, request = f"deadline of {value[:8]!r}", sent((DEADLINE, value))
        yield _bad(endpoint, kind, request, 422, named=f"header {DEADLINE}", says="1 to 60000")
    yield _bad(endpoint, "one header of 1 MB", sent(("X-A", "x" * MIB)), 431, says=r"\d+ bytes")
    yield _bad(endpoint, "20,000 headers", sent(*[("X-A", "x")] * 20_000), 431, says=r"\d+ bytes")
    yield _bad(endpoint, "path of 1 MB", http(endpoint.method, "/" + "x" * MIB, JSON, good), 431, says=r"\d+ bytes")
    for kind, value in BROKEN_VALUES.items():
        yield _bad(endpoint, f"X-Request-Id with {kind}", sent(("X-Request-Id", value)), 400)
    if endpoint.path == "/v1/events":
        for kind, value in BAD_KEYS.items():
            request = sent(("Idempotency-Key", value))
            yield _bad(endpoint, f"Idempotency-Key: {kind}", request, 422, named="header Idempotency-Key", says="must")


NO_HTTP = {
    "bytes": bytes(range(256)),
    "NULs": b"\0" * 100 + b"\r\n\r\n",
    "TLS": bytes.fromhex("16030100a5010000a10303") + b"x" * 100 + b"\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "unknown method": b"BREW /v1/users/u HTTP/1.1\r\nHost: a\r\n\r\n",
    "no version": b"GET /v1/users/u\r\nHost: a\r\n\r\n",
    "version 9": b"GET /v1/users/u HTTP/9.9\r\nHost: a\r\n\r\n",
    "space before the colon": b"GET /v1/users/u HTTP/1.1\r\nHost : a\r\n\r\n",
    "no colon": b"GET /v1/users/u HTTP/1.1\r\nHost\r\n\r\n",
    "two lengths": b"POST /v1/events HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "negative length": b"POST /v1/events HTTP/1.1\r\nContent-Length: -1\r\n\r\n{}",
    "length of 1,000 digits": b"POST /v1/events HTTP/1.1\r\nContent-Length: %b\r\n\r\n{}" % (b"9" * 1000),
    "length and chunks": (
        b"POST /v1/events HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "raw bytes in the path": b"GET /v1/users/\xff\xfe HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
}


def of_connections() -> Iterator[BadInput]:
    """Bytes that are no HTTP."""
    ports: tuple[Port, ...] = ("public", "admin")
    for port in ports:
        for kind, request in NO_HTTP.items():
            yield BadInput(f"no HTTP: {kind}", port, "the port", request, frozenset({400}))


def _posted(
    endpoint: Endpoint,
    kind: str,
    body: bytes,
    status: int,
    *,
    named: str | None = None,
    says: str = "",
    field_path: str = "",
    chunked: bool = False,
) -> BadInput:
    request = http(endpoint.method, endpoint.path, (*endpoint.headers, *JSON), body, chunked)
    return _bad(endpoint, kind, request, status, named=named, says=says, field_path=field_path)


def _bad(
    endpoint: Endpoint,
    kind: str,
    request: bytes,
    status: int,
    *,
    named: str | None = None,
    says: str = "",
    field_path: str = "",
    slow: bool = False,
) -> BadInput:
    target = " ".join(part for part in (endpoint.name, field_path) if part)
    return BadInput(kind, endpoint.port, target, request, frozenset({status}), named, says, slow=slow)
