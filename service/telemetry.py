"""Logs as one JSON object a line, and Prometheus metrics. Neither ever holds a user's id in the clear."""

import hashlib
import json
import logging
import secrets
import sys
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """One line of JSON a record: time, level, logger, message, and whatever came in `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(level: str) -> None:
    """Send every log of the process to standard error, as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # uvicorn tells of each start and stop in many lines at INFO; ours say the same once.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLevelName(level)))


class IdHasher:
    """Ids as they may appear in logs: a keyed hash, so that nobody can try ids against it afterwards.

    The key lives as long as the process: lines of one run can be joined, and no further.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def __call__(self, kind: str, id: str) -> str:
        """16 hexadecimal digits."""
        return hashlib.blake2b(f"{kind}:{id}".encode(), key=self._key, digest_size=8).hexdigest()


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
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
            registry=self.registry,
        )
        self.in_flight = Gauge("bft_http_requests_in_flight", "Requests being worked on", registry=self.registry)
        self.state_errors = Counter(
            "bft_state_errors",
            "Failed calls of the state store",
            ["operation", "error"],
            registry=self.registry,
        )
        self.breaker_open = Gauge(
            "bft_state_breaker_open",
            "1 while the state store is left alone after failures",
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
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
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
        self.model_info = Gauge(
            "bft_model_info", "1, labelled with the served model", ["name", "version"], registry=self.registry
        )
