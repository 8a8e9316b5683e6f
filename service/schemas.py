"""What goes over the wire: requests, which refuse unknown fields, and answers (service.md, "Endpoints")."""

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from service.errors import Problem
from service.values import check_id, check_timestamp, check_weight

MAX_RESULTS = 500
MAX_HISTORY = 4096
MAX_FILTER_IDS = 10_000
MAX_EVENTS = 500

_TIMESTAMP = "Unix seconds, or RFC 3339 with an offset; not before 1970, at most a day ahead of now"
_ID = {"minLength": 1, "description": "1–256 bytes of UTF-8 without control characters"}

Id = Annotated[str, AfterValidator(check_id), Field(json_schema_extra=_ID)]
"""1–256 bytes of UTF-8 without control characters."""
_TIMESTAMP_SCHEMA = WithJsonSchema(
    {"anyOf": [{"type": "number"}, {"type": "string", "format": "date-time"}], "description": _TIMESTAMP}
)
Timestamp = Annotated[int, BeforeValidator(check_timestamp), _TIMESTAMP_SCHEMA]
"""Becomes milliseconds since 1970."""
Weight = Annotated[float, AfterValidator(check_weight)]


class _Request(BaseModel):
    """Base of requests: no unknown fields, no silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Answer(BaseModel):
    """Base of answers."""

    model_config = ConfigDict(frozen=True)


class HistoryEvent(_Request):
    """One event that the caller tells of itself; nothing is stored."""

    item_id: Id
    timestamp: Timestamp | None = None
    weight: Weight = Field(1.0, description="0 keeps the event out of the history and in the seen set")


History = Annotated[
    tuple[HistoryEvent, ...],
    # JSON has lists; the tuple keeps the frozen request unchangeable.
    Field(
        strict=False,
        max_length=MAX_HISTORY,
        description="oldest first; sorted when every event has a timestamp",
    ),
]
Ids = Annotated[tuple[Id, ...], Field(strict=False, max_length=MAX_FILTER_IDS)]


class RecommendationRequest(_Request):
    """For whom, how many, and what may be in the list."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"user_id": "u-1024", "num_results": 10},
                {"history": [{"item_id": "50"}, {"item_id": "181"}], "num_results": 5, "exclude_seen": True},
                {"user_id": "u-1024", "fallback_history": [{"item_id": "50"}], "exclude_item_ids": ["172"]},
            ]
        }
    )

    user_id: Id | None = None
    session_id: Id | None = None
    history: History | None = None
    fallback_history: Annotated[
        History | None, Field(description="beside an id: used only while the stored state is unavailable")
    ] = None
    num_results: int = Field(25, ge=1, le=MAX_RESULTS)
    exclude_seen: bool = Field(True, description="keep items that the subject has had out of the list")
    exclude_item_ids: Ids = ()
    allow_item_ids: Ids | None = Field(None, description="only these may be in the list; probabilities do not change")
    min_confidence: float | None = Field(None, ge=0, le=1)

    @model_validator(mode="after")
    def _one_subject(self) -> Self:
        given = [name for name in ("user_id", "session_id", "history") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"give exactly one of user_id, session_id and history; found: {found}")
        if self.fallback_history is not None and self.history is not None:
            raise ValueError("fallback_history goes with user_id or session_id; leave it out beside history")
        return self


class ModelName(_Answer):
    """Which model made the answer."""

    name: str
    version: str


class RecommendedItem(_Answer):
    """One place of the list."""

    item_id: str
    rank: int = Field(description="from 1")
    score: float = Field(description="posterior mean, on the model's scale; not comparable across users")
    std: float = Field(description="standard deviation of the score")
    confidence: float = Field(
        description="calibrated probability that this item is the next event; the same in every list"
    )
    reliability: float | None = Field(
        description="share of the prior uncertainty about this score that the history resolved; null for a "
        "model without precisions"
    )


class CalibrationInfo(_Answer):
    """What the confidences are probabilities of, and how far they were right on test users."""

    event: Literal["next_new_item", "next_item"]
    method: str
    ece: float | None = Field(description="expected calibration error over lists of ten, on test users")
    n: int | None = Field(description="test users behind `ece`")


class DegradedReason(StrEnum):
    """Why an answer was made with less than the stored state."""

    state_unavailable = "state_unavailable"
    catalog_mismatch = "catalog_mismatch"


class RecommendationResponse(_Answer):
    """A ranked list with a confidence for each item."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "recommendation_id": "5f0c6b0f4c5c4f0c9a5d1f6f0a3d7b2e",
                    "model": {"name": "bft-sasrec", "version": "a1b2c3d4e5f60718"},
                    "items": [
                        {
                            "item_id": "172",
                            "rank": 1,
                            "score": 6.2,
                            "std": 0.8,
                            "confidence": 0.061,
                            "reliability": 0.74,
                        }
                    ],
                    "list_confidence": 0.061,
                    "calibration": {
                        "event": "next_new_item",
                        "method": "temperature + logistic map",
                        "ece": 0.004,
                        "n": 943,
                    },
                    "cold_start": False,
                    "num_events": 12,
                    "missing_item_ids": [],
                    "degraded": [],
                }
            ]
        }
    )

    recommendation_id: str
    model: ModelName
    items: list[RecommendedItem]
    list_confidence: float = Field(description="probability that the next event is in the list: min(1, Σ confidence)")
    calibration: CalibrationInfo
    cold_start: bool = Field(description="no event of the subject is known: the list is what BOS says")
    num_events: int = Field(description="events of the subject that count for the model, forgotten ones included")
    missing_item_ids: list[str] = Field(description="ids of this request that the catalogue does not know")
    degraded: list[DegradedReason]


class EventIn(_Request):
    """One event to store. Values are checked event by event: a wrong one does not hold up the others."""

    event_id: str | None = Field(None, description="makes the event idempotent for 24 h")
    user_id: str | None = None
    session_id: str | None = None
    item_id: str
    timestamp: Annotated[Any, _TIMESTAMP_SCHEMA] = Field(None, description=_TIMESTAMP + "; left out: now")
    type: str | None = None
    weight: float = Field(1.0, description="0 to 1,000,000; 0 only marks the item as seen")
    recommendation_id: str | None = None


class EventsRequest(_Request):
    """Events of any subjects, in the order they happened."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "events": [
                        {"event_id": "e-1", "user_id": "u-1024", "item_id": "50", "timestamp": 1764424800},
                        {
                            "session_id": "s-77",
                            "item_id": "172",
                            "timestamp": "2026-11-29T14:00:00Z",
                            "type": "view",
                        },
                    ]
                }
            ]
        }
    )

    events: Annotated[tuple[EventIn, ...], Field(strict=False, min_length=1, max_length=MAX_EVENTS)]


class EventStatus(StrEnum):
    """What became of an event."""

    accepted = "accepted"
    duplicate = "duplicate"
    rejected = "rejected"


class EventResult(_Answer):
    """The fate of one event, at its place in the request."""

    status: EventStatus
    idempotent: bool = Field(
        description="whether sending the event again is harmless: it has an event_id or a timestamp, or the "
        "request has an Idempotency-Key"
    )
    problem: Problem | None = Field(None, description="of a rejected event")


class EventsResponse(_Answer):
    """A result for each event, in order."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "results": [
                        {"status": "accepted", "idempotent": True},
                        {"status": "duplicate", "idempotent": True},
                    ]
                }
            ]
        }
    )

    results: list[EventResult]


class StoredEvent(_Answer):
    """One event of a user's kept history."""

    item_id: str | None = Field(description="null: the catalogue no longer knows the item")
    timestamp: float = Field(description="Unix seconds")
    weight: float


class UserResponse(_Answer):
    """Everything that the service holds of a user."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "user_id": "u-1024",
                    "num_events": 1,
                    "events": [{"item_id": "50", "timestamp": 1764424800.0, "weight": 1.0}],
                    "seen_item_ids": ["50"],
                }
            ]
        }
    )

    user_id: str
    num_events: int = Field(description="with positive weight, the ones no longer kept included")
    events: list[StoredEvent] = Field(description="the kept ones, oldest first")
    seen_item_ids: list[str]


class ErasureResponse(_Answer):
    """The user is gone; events dated before now are refused from now on."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"user_id": "u-1024", "erased": True}]})

    user_id: str
    erased: bool = Field(description="false: there was nothing to erase")
