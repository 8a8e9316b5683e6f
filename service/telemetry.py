"""Logs as one JSON object a line, and Prometheus metrics. Neither ever holds a user's id in the clear."""

import hashlib
import json
import logging
import secrets
import sys
import traceback
from collections.abc import MutableMapping
from typing import Any

import orjson
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from structlog.stdlib import ProcessorFormatter
from structlog.typing import Processor

EventDict = MutableMapping[str, Any]

FASTEST_S = 0.00025
SLOWEST_S = 10.0
BUCKETS_PER_DOUBLING = 4


def configure_logging(level: str) -> None:
    """Send every log of the process to standard error, as one JSON object a line.

    Modules log by the standard library, as every library here does; its records go through structlog's processors.
    The line that each request costs goes to structlog itself, which takes a third of the time.
    """
    both: list[Processor] = [_time, _exception, _plain]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                structlog.stdlib.ExtraAdder(),
            ],
            processors=[ProcessorFormatter.remove_processors_meta, *both, _json_text],
        )
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # uvicorn tells of each start and stop in many lines at INFO; ours say the same once.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLevelName(level)))
    structlog.configure(
        processors=[structlog.processors.add_log_level, *both, _json_bytes],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level)),
        logger_factory=structlog.BytesLoggerFactory(sys.stderr.buffer),
        cache_logger_on_first_use=True,
    )


_time = structlog.processors.TimeStamper(fmt="iso", utc=True, key="time")


def _exception(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """What was raised and where, without messages: they may quote what a caller sent, as pydantic's do."""
    found = event.pop("exc_info", None)
    if found is True:
        found = sys.exc_info()
    error = found[1] if isinstance(found, tuple) else found
    if isinstance(error, BaseException):
        event["exception"] = "".join(_told(error))
    return event


def _told(error: BaseException) -> list[str]:
    lines = []
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        lines += [*_told(cause), "\nwhich led to\n\n"]
    lines += traceback.format_tb(error.__traceback__)
    kind = type(error)
    # ONNX Runtime's messages name nodes and shapes, and are needed to find out what a graph did not take.
    message = f": {error}" if kind.__module__.startswith("onnxruntime") else ""
    return [*lines, f"{kind.__module__}.{kind.__qualname__}{message}\n"]


def _plain(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """The field names of our lines."""
    message = event.pop("event")
    # Further lines of asyncio's messages show a task with the message of its exception.
    if event.get("logger") == "asyncio":
        message = message.partition("\n")[0]
    # uvicorn repeats its message in colour.
    event.pop("color_message", None)
    return {
        "time": event.pop("time"),
        "level": event.pop("level").upper(),
        "logger": event.pop("logger", None),
        "message": message,
        **event,
    }


def _json_bytes(_logger: Any, _method: str, event: EventDict) -> bytes:
    try:
        return orjson.dumps(event, default=str)
    except TypeError:
        # Half a surrogate pair, or a key that is no text.
        return json.dumps(event, default=str).encode("ascii")


def _json_text(_logger: Any, _method: str, event: EventDict) -> str:
    return _json_bytes(_logger, _method, event).decode()


class IdHasher:
    """Ids as they may appear in logs: a keyed hash, so that nobody can try ids against it afterwards.

    The key lives as long as the process: lines of one run can be joined, and no further.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def __call__(self, kind: str, id: str) -> str:
        """16 hexadecimal digits."""
        return hashlib.blake2b(f"{kind}:{id}".encode(), key=self._key, digest_size=8).hexdigest()


def geometric_buckets() -> tuple[float, ...]:
    """Bounds of durations in seconds from FASTEST_S on: four to a doubling, so each is 19 % above the one before.

    A percentile read from them is off by no more than that, whether answers take one millisecond or one second.
    """
    bounds = [FASTEST_S]
    while bounds[-1] < SLOWEST_S:
        bounds.append(FASTEST_S * 2 ** (len(bounds) / BUCKETS_PER_DOUBLING))
    return tuple(float(f"{bound:.4g}") for bound in bounds)


class Metrics:
    """Every metric of one application, in a registry of its own. Labels come from small closed sets."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "bft_http_requests", "Answers sent", ["route", "method", "status"], registry=self.registry
        )
        self.request_seconds = Histogram(
            "bft_http_request_duration_seconds",
            "From the request's first byte to the answer's last",
            ["route", "method", "status"],
            buckets=geometric_buckets(),
            registry=self.registry,
        )
        self.stage_seconds = Histogram(
            "bft_stage_duration_seconds",
            "Time of a request in one stage: limit, state, queue, infer_encoder, infer_step, infer_ranker, "
            "infer_explainer, rank",
            ["stage"],
            buckets=geometric_buckets(),
            registry=self.registry,
        )
        self.errors = Counter(
            "bft_errors",
            "Problems answered, by the stage that failed (request: none of them) and by the type of the problem",
            ["stage", "error"],
            registry=self.registry,
        )
        self.in_flight = Gauge("bft_http_requests_in_flight", "Requests being worked on", registry=self.registry)
        self.state_errors = Counter(
            "bft_state_errors",
            "Failed calls of the state store",
            ["operation", "error"],
            registry=self.registry,
        )
        self.saves = Counter(
            "bft_saves",
            "Writes behind an answer: of a state, a slate, or that slates are settled; kept, failed, or dropped "
            "because too many are under way",
            ["what", "outcome"],
            registry=self.registry,
        )
        self.rate_limit_checks = Counter(
            "bft_rate_limit_checks",
            "Requests counted towards a quota: for all replicas together (shared), or by this one alone (local)",
            ["where"],
            registry=self.registry,
        )
        self.rate_limited = Counter(
            "bft_rate_limited", "Requests refused for their key's quota", registry=self.registry
        )
        self.breaker_open = Gauge(
            "bft_state_breaker_open",
            "Servers of the state store that are left alone after failures",
            registry=self.registry,
        )
        self.outbox_fill = Gauge(
            "bft_outbox_fill_ratio",
            "Fill of the fullest outbox stream; at 1 writes are refused",
            registry=self.registry,
        )
        self.queue_cells = Gauge("bft_engine_queue_cells", "Rows × length that wait", registry=self.registry)
        self.queue_rows = Gauge("bft_engine_queue_rows", "Rows that wait", registry=self.registry)
        self.batch_rows = Histogram(
            "bft_engine_batch_rows",
            "Rows that went through a graph together",
            ["graph"],
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
            registry=self.registry,
        )
        self.batch_seconds = Histogram(
            "bft_engine_batch_duration_seconds",
            "Time of one batch in the inference thread",
            ["graph"],
            buckets=geometric_buckets(),
            registry=self.registry,
        )
        self.states = Counter(
            "bft_states",
            "States behind the answers: current, with events folded in, encoded from the history, or nobody's",
            ["how"],
            registry=self.registry,
        )
        self.cold_starts = Counter(
            "bft_cold_starts", "Answers for somebody without any known event", registry=self.registry
        )
        self.degraded = Counter(
            "bft_degraded_answers",
            "Answers made without the stored state",
            ["reason"],
            registry=self.registry,
        )
        self.events = Counter("bft_events", "Events by what became of them", ["status"], registry=self.registry)
        of_model = ["name", "version"]
        self.slates_settled = Counter(
            "bft_slates_settled", "Lists of which it is known what followed", of_model, registry=self.registry
        )
        self.slates_hit = Counter(
            "bft_slates_hit", "Settled lists that held the event that followed", of_model, registry=self.registry
        )
        self.slates_confidence = Counter(
            "bft_slates_list_confidence",
            "Sum of the list confidences of the settled lists: the hits that were promised",
            of_model,
            registry=self.registry,
        )
        self.slates_unsettled = Counter(
            "bft_slates_unsettled", "Events that named a list and settled none", ["reason"], registry=self.registry
        )
        self.drift = Gauge(
            "bft_list_confidence_drift",
            "Share of hits less mean list confidence, over the lists that this process settled last",
            of_model,
            registry=self.registry,
        )
        self.model_info = Gauge(
            "bft_model_info", "1, labelled with each served model", ["name", "version"], registry=self.registry
        )
        self.model_loads = Counter(
            "bft_model_loads", "Bundles by what became of them: loaded or refused", ["result"], registry=self.registry
        )
        self.registry_failures = Counter(
            "bft_registry_poll_failures", "Times that the registry could not be read", registry=self.registry
        )
