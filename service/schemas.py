"""What goes over the wire: requests, which refuse unknown fields, and answers (service.md, "Endpoints")."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from service.errors import Problem
from service.states.interface import Subject
from service.values import MAX_ID_BYTES, MAX_WEIGHT, check_id, check_timestamp, check_weight, whole_number

MAX_RESULTS = 500
MAX_HISTORY = 4096
MAX_FILTER_IDS = 10_000
MAX_EVENTS = 500
MAX_REQUESTS = 100
MAX_CANDIDATES = 500
MAX_KAPPA = 10.0
DEFAULT_KAPPA = 1.0
MAX_SEED = 2**32 - 1

_TIMESTAMP = "Unix seconds, or RFC 3339 with an offset; not before 1970, at most a day ahead of now"
ID_SCHEMA: dict[str, Any] = {
    "minLength": 1,
    "maxLength": MAX_ID_BYTES,
    "pattern": "^[^\\x00-\\x1f\\x7f-\\x9f]+$",
    "description": "1–256 bytes of UTF-8 without control characters",
}
"""As far as JSON Schema can say it: it counts characters, not bytes."""

Id = Annotated[str, AfterValidator(check_id), Field(json_schema_extra=ID_SCHEMA)]
"""1–256 bytes of UTF-8 without control characters."""
_TIMESTAMP_TYPES: list[dict[str, Any]] = [{"type": "number", "minimum": 0}, {"type": "string", "format": "date-time"}]
_TIMESTAMP_SCHEMA = WithJsonSchema({"anyOf": _TIMESTAMP_TYPES, "description": _TIMESTAMP})
Timestamp = Annotated[int, BeforeValidator(check_timestamp), _TIMESTAMP_SCHEMA]
"""Becomes milliseconds since 1970."""
_WEIGHT_SCHEMA: dict[str, Any] = {"minimum": 0, "maximum": int(MAX_WEIGHT)}
Weight = Annotated[float, AfterValidator(check_weight), Field(json_schema_extra=_WEIGHT_SCHEMA)]
NumResults = Annotated[int, Field(ge=1, le=MAX_RESULTS), BeforeValidator(whole_number)]
"""How many items."""


class _Request(BaseModel):
    """Base of requests: no unknown fields, no silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Answer(BaseModel):
    """Base of answers."""

    model_config = ConfigDict(frozen=True)


class _ShownAs:
    """Makes a field of any value appear in the document as a model.

    Args:
        model: that its values will be checked against.
    """

    def __init__(self, model: type[BaseModel]) -> None:
        self._model = model

    def __get_pydantic_json_schema__(self, _: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(self._model.__pydantic_core_schema__)


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


_NULL: dict[str, Any] = {"type": "null"}
# What `SubjectRequest` checks, in the document: exactly one of the three is there and is not null.
_ONE_SUBJECT: dict[str, Any] = {
    "oneOf": [
        {
            "required": ["user_id"],
            "properties": {"user_id": {"type": "string"}, "session_id": _NULL, "history": _NULL},
        },
        {
            "required": ["session_id"],
            "properties": {"user_id": _NULL, "session_id": {"type": "string"}, "history": _NULL},
        },
        {
            "required": ["history"],
            "properties": {
                "user_id": _NULL,
                "session_id": _NULL,
                "history": {"type": "array"},
                "fallback_history": _NULL,
            },
        },
    ]
}


class SubjectRequest(_Request):
    """For whom: a stored user or session, or a history told in the request."""

    user_id: Id | None = None
    session_id: Id | None = None
    history: History | None = None
    fallback_history: Annotated[
        History | None, Field(description="beside an id: used only while the stored state is unavailable")
    ] = None

    @model_validator(mode="after")
    def _one_subject(self) -> Self:
        given = [name for name in ("user_id", "session_id", "history") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"give exactly one of user_id, session_id and history; found: {found}")
        if self.fallback_history is not None and self.history is not None:
            raise ValueError("fallback_history goes with user_id or session_id; leave it out beside history")
        return self

    @property
    def subject(self) -> Subject | None:
        """Whose stored state is asked for; None beside a told history."""
        if self.user_id is not None:
            return Subject("user", self.user_id)
        return None if self.session_id is None else Subject("session", self.session_id)


PolicyName = Literal["mean", "lcb", "ucb", "thompson"]
_NO_KAPPA_NO_SEED: dict[str, Any] = {"kappa": _NULL, "seed": _NULL}
# What `PolicyRequest` checks, in the document.
_KAPPA_AND_SEED: dict[str, Any] = {
    "anyOf": [
        {"properties": {"policy": {"const": "mean"}, **_NO_KAPPA_NO_SEED}},
        {"required": ["policy"], "properties": {"policy": {"enum": ["lcb", "ucb"]}, "seed": _NULL}},
        {"required": ["policy"], "properties": {"policy": {"const": "thompson"}, "kappa": _NULL}},
    ]
}


class PolicyRequest(SubjectRequest):
    """For whom, and by which policy the list is ordered."""

    policy: PolicyName = Field(
        "mean",
        description="what orders the list; no policy changes what is said of an item. mean: the predictive logit, by "
        "which the likeliest item comes first; lcb, ucb: `score` less, or plus, kappa times `std`; thompson: the "
        "predictive logit of one state drawn from what is known of the subject",
    )
    kappa: float | None = Field(
        None, ge=0, le=MAX_KAPPA, description=f"of lcb and ucb only; left out: {DEFAULT_KAPPA:g}"
    )
    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED), BeforeValidator(whole_number)] = Field(
        None, description="of thompson's draw; left out: a new one, which the answer tells"
    )

    @field_validator("kappa")
    @classmethod
    def _goes_with_lcb_and_ucb(cls, kappa: float | None, info: ValidationInfo) -> float | None:
        if kappa is not None and info.data.get("policy") in ("mean", "thompson"):
            raise ValueError(f"goes with policy lcb or ucb; leave it out with policy {info.data['policy']}")
        return kappa

    @field_validator("seed")
    @classmethod
    def _goes_with_thompson(cls, seed: int | None, info: ValidationInfo) -> int | None:
        if seed is not None and info.data.get("policy") in ("mean", "lcb", "ucb"):
            raise ValueError(f"goes with policy thompson; leave it out with policy {info.data['policy']}")
        return seed


class Policy(_Answer):
    """What ordered a list: with the same values, state and model it comes out the same."""

    model_config = ConfigDict(extra="forbid")

    name: PolicyName
    kappa: float | None = Field(None, description="of lcb and ucb; null for the others")
    seed: int | None = Field(None, description="of thompson's draw; null for the others")


Explain = Annotated[bool, Field(description="say which events of the history carried the answer; costs an inference")]


class RecommendationRequest(PolicyRequest):
    """For whom, how many, what may be in the list, and what orders it."""

    model_config = ConfigDict(
        json_schema_extra={
            **_ONE_SUBJECT,
            **_KAPPA_AND_SEED,
            "examples": [
                {"user_id": "u-1024", "num_results": 10},
                {"history": [{"item_id": "50"}, {"item_id": "181"}], "num_results": 5, "exclude_seen": True},
                {"user_id": "u-1024", "fallback_history": [{"item_id": "50"}], "exclude_item_ids": ["172"]},
                {"user_id": "u-1024", "num_results": 10, "explain": True},
                {"user_id": "u-1024", "num_results": 10, "policy": "ucb", "kappa": 0.5},
                {"user_id": "u-1024", "num_results": 10, "policy": "thompson", "seed": 7},
            ],
        }
    )

    num_results: NumResults = 25
    exclude_seen: bool = Field(True, description="keep items that the subject has had out of the list")
    exclude_item_ids: Ids = ()
    allow_item_ids: Ids | None = Field(None, description="only these may be in the list; probabilities do not change")
    min_confidence: float | None = Field(None, ge=0, le=1)
    explain: Explain = False


class NextPageRequest(_Request):
    """How many more items of a list."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"num_results": 10}]})

    num_results: NumResults = 25
    explain: Explain = False


class RankingRequest(PolicyRequest):
    """For whom, which items are to be put in order, and by what."""

    model_config = ConfigDict(
        json_schema_extra={
            **_ONE_SUBJECT,
            **_KAPPA_AND_SEED,
            "examples": [
                {"user_id": "u-1024", "candidate_item_ids": ["172", "50", "not-in-the-catalogue"]},
                {"history": [{"item_id": "50"}], "candidate_item_ids": ["172", "181"]},
                {"user_id": "u-1024", "candidate_item_ids": ["172", "50"], "policy": "lcb"},
            ],
        }
    )

    candidate_item_ids: Annotated[
        tuple[Id, ...],
        Field(
            strict=False,
            min_length=1,
            max_length=MAX_CANDIDATES,
            description="every one comes back; an id that stands here more than once comes back once",
        ),
    ]
    explain: Explain = False


class ModelName(_Answer):
    """Which model made the answer."""

    name: str
    version: str


class RecommendedItem(_Answer):
    """One place of the list."""

    item_id: str
    rank: int = Field(description="from 1; a further page goes on counting")
    score: float = Field(description="posterior mean, on the model's scale; not comparable across users")
    std: float = Field(description="standard deviation of the score")
    confidence: float = Field(
        description="calibrated probability that this item is the next event; the same in every list"
    )
    reliability: float | None = Field(
        description="share of the uncertainty about a user nobody has seen, as it bears on this item, that the "
        "history resolved; null for a model without precisions"
    )


class CalibrationInfo(_Answer):
    """What the confidences are probabilities of, and how far they were right on test users."""

    event: Literal["next_new_item", "next_item"]
    method: str
    ece: float | None = Field(description="expected calibration error over lists of ten, on test users")
    n: int | None = Field(description="test users behind `ece`")


AbGroup = Annotated[
    Literal["default", "canary"] | None, Field(description="which of the served models answered; null: it is not told")
]


class DegradedReason(StrEnum):
    """Why an answer was made with less than the stored state."""

    state_unavailable = "state_unavailable"
    catalog_mismatch = "catalog_mismatch"


class Reason(_Answer):
    """One event of the history, and how much of the answer it carried."""

    item_id: str | None = Field(description="null: the catalogue no longer knows the item")
    timestamp: float | None = Field(description="Unix seconds; null: the event was told without one")
    kriging_weight: float = Field(
        description="share, 0 to 1, that the answering state gave this event when it last listened to the history; "
        "mean over the attention heads"
    )
    precision: float | None = Field(
        description="inverse variance of what the model knew at this event, above 0, on the model's scale; it raised "
        "or lowered the weight; null for a model without precisions"
    )


class Explanation(_Answer):
    """What the answer rests on. It is the state's, and so the same for every item of the list."""

    reasons: list[Reason] = Field(description="the events that weighed most, at most 10, the heaviest first")
    prior_weight: float = Field(
        description="share of what is no event: of BOS, a user before any event, and with BERT4Rec of the MASK that "
        "asks. With the weights of all events of the window, listed or not, it makes 1; alone it is 1 for a cold start"
    )


ShownExplanation = Annotated[
    Explanation | None, Field(description="what the answer rests on; null unless `explain` was asked for")
]


class RecommendationResponse(_Answer):
    """A ranked list with a confidence for each item."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "recommendation_id": "b017-5f0c6b0f4c5c4f0c9a5d1f6f0a3d7b2e",
                    "model": {"name": "bft-sasrec", "version": "a1b2c3d4e5f60718"},
                    "policy": {"name": "mean", "kappa": None, "seed": None},
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
                    "ab_group": "default",
                    "explanation": {
                        "reasons": [
                            {"item_id": "50", "timestamp": 1764424800.0, "kriging_weight": 0.41, "precision": 2.7},
                            {"item_id": "181", "timestamp": 1764424860.0, "kriging_weight": 0.33, "precision": 1.9},
                        ],
                        "prior_weight": 0.26,
                    },
                }
            ]
        }
    )

    recommendation_id: str = Field(description="of this list and its further pages; name it in events that follow it")
    model: ModelName
    policy: Policy
    items: list[RecommendedItem]
    list_confidence: float = Field(description="probability that the next event is in the list: min(1, Σ confidence)")
    calibration: CalibrationInfo
    cold_start: bool = Field(description="no event of the subject is known: the list is what BOS says")
    num_events: int = Field(description="events of the subject that count for the model, forgotten ones included")
    missing_item_ids: list[str] = Field(description="ids of this request that the catalogue does not know")
    degraded: list[DegradedReason]
    ab_group: AbGroup
    explanation: ShownExplanation = None


class BatchRequest(_Request):
    """Several requests for lists, each by itself."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"requests": [{"user_id": "u-1024", "num_results": 10}, {"history": [{"item_id": "50"}]}]},
            ]
        }
    )

    requests: Annotated[
        tuple[Annotated[Any, _ShownAs(RecommendationRequest)], ...],
        Field(strict=False, min_length=1, max_length=MAX_REQUESTS),
    ]
    """Each a `RecommendationRequest`, checked later, so that a wrong one is refused alone."""


class BatchResult(_Answer):
    """What came of one request: `body` with status 200, else `problem`."""

    status: int = Field(description="as it would be of the request alone")
    body: RecommendationResponse | None = None
    problem: Problem | None = None


class BatchResponse(_Answer):
    """A result for each request, in order."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "results": [
                        {
                            "status": 422,
                            "problem": {
                                "type": "urn:problem-type:bft:invalid-request",
                                "title": "The request has a wrong field",
                                "status": 422,
                                "detail": "user_id: must not hold control characters",
                                "action": "Correct the named fields and send the request again.",
                                "errors": [{"field": "user_id", "message": "must not hold control characters"}],
                            },
                        }
                    ]
                }
            ]
        }
    )

    results: list[BatchResult]


class RankedItem(_Answer):
    """One candidate in its place. Of one that the catalogue does not know nothing but the id is known."""

    item_id: str
    rank: int = Field(description="from 1, best first; unknown ones last, in the order in which they were given")
    known: bool = Field(description="whether the catalogue has the item")
    score: float | None = Field(description="posterior mean, on the model's scale; not comparable across users")
    std: float | None = Field(description="standard deviation of the score")
    confidence: float | None = Field(
        description="calibrated probability that this item is the next event; the same as in a recommendation"
    )
    reliability: float | None = Field(
        description="share of the prior uncertainty about this score that the history resolved; null also for a "
        "model without precisions"
    )


class RankingResponse(_Answer):
    """Every candidate once, ordered by the policy."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": {"name": "bft-sasrec", "version": "a1b2c3d4e5f60718"},
                    "policy": {"name": "mean", "kappa": None, "seed": None},
                    "items": [
                        {
                            "item_id": "172",
                            "rank": 1,
                            "known": True,
                            "score": 6.2,
                            "std": 0.8,
                            "confidence": 0.061,
                            "reliability": 0.74,
                        },
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
                    "missing_item_ids": ["not-in-the-catalogue"],
                    "degraded": [],
                    "ab_group": "default",
                    "explanation": None,
                }
            ]
        }
    )

    model: ModelName
    policy: Policy
    items: list[RankedItem]
    list_confidence: float = Field(
        description="probability that the next event is among the candidates: min(1, Σ confidence)"
    )
    calibration: CalibrationInfo
    cold_start: bool = Field(description="no event of the subject is known: the order is what BOS says")
    num_events: int = Field(description="events of the subject that count for the model, forgotten ones included")
    missing_item_ids: list[str] = Field(description="ids of this request that the catalogue does not know")
    degraded: list[DegradedReason]
    ab_group: AbGroup
    explanation: ShownExplanation = None


class SimilarItem(_Answer):
    """A neighbour."""

    item_id: str
    rank: int = Field(description="from 1")
    similarity: float = Field(description="cosine of the angle between the two embeddings, -1 to 1")


class SimilarItemsResponse(_Answer):
    """The items nearest to one in the model's space, without itself."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "item_id": "50",
                    "model": {"name": "bft-sasrec", "version": "a1b2c3d4e5f60718"},
                    "items": [{"item_id": "172", "rank": 1, "similarity": 0.83}],
                    "ab_group": "default",
                }
            ]
        }
    )

    item_id: str
    model: ModelName
    items: list[SimilarItem]
    ab_group: AbGroup


# As the document shows them; an event's values are checked later, each event by itself.
_EventId = Annotated[str, Field(json_schema_extra=ID_SCHEMA)]
_EventTimestamp = Annotated[Any, WithJsonSchema({"anyOf": [*_TIMESTAMP_TYPES, _NULL]})]
_EventWeight = Annotated[float, Field(json_schema_extra=_WEIGHT_SCHEMA)]


class EventIn(_Request):
    """One event to store. Values are checked event by event: a wrong one does not hold up the others."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["user_id"], "properties": {"user_id": {"type": "string"}, "session_id": _NULL}},
                {"required": ["session_id"], "properties": {"user_id": _NULL, "session_id": {"type": "string"}}},
            ]
        }
    )

    event_id: _EventId | None = Field(None, description="makes the event idempotent for 24 h")
    user_id: _EventId | None = None
    session_id: _EventId | None = None
    item_id: _EventId
    timestamp: _EventTimestamp = Field(None, description=_TIMESTAMP + "; left out: now")
    type: _EventId | None = None
    weight: _EventWeight = Field(1.0, description="0 to 1,000,000; 0 only marks the item as seen")
    recommendation_id: _EventId | None = Field(
        None,
        description="of the list that the subject was shown last before the event, whether or not the item is in it; "
        "for retraining, and to tell whether the confidences hold",
    )


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


class HeldSlate(_Answer):
    """A list that was served and is kept for its further pages."""

    recommendation_id: str
    expires_at: datetime


class UserResponse(_Answer):
    """What the service holds of a user.

    Beside it there are only values derived from it, and copies on their way: the models' states (hours), hashes of the
    last events (24 h), and events that retraining has not read yet."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "user_id": "u-1024",
                    "num_events": 1,
                    "events": [{"item_id": "50", "timestamp": 1764424800.0, "weight": 1.0}],
                    "seen_item_ids": ["50"],
                    "recommendations": [
                        {
                            "recommendation_id": "b017-5f0c6b0f4c5c4f0c9a5d1f6f0a3d7b2e",
                            "expires_at": "2026-11-29T15:00:00Z",
                        }
                    ],
                }
            ]
        }
    )

    user_id: str
    num_events: int = Field(description="with positive weight, the ones no longer kept included")
    events: list[StoredEvent] = Field(description="the kept ones, oldest first")
    seen_item_ids: list[str]
    recommendations: list[HeldSlate] = Field(description="lists kept for their further pages, oldest first")


class MergeRequest(_Request):
    """Whose events the user takes over."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"from_session_id": "s-77"}]})

    from_session_id: Id


class MergeResponse(_Answer):
    """The session is empty, and what it held is the user's."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "user_id": "u-1024",
                    "from_session_id": "s-77",
                    "num_merged": 3,
                    "num_duplicates": 0,
                    "num_refused": 0,
                }
            ]
        }
    )

    user_id: str
    from_session_id: str
    num_merged: int = Field(description="events that the user has now and did not have before this call")
    num_duplicates: int = Field(description="events that the user had already")
    num_refused: int = Field(description="events dated before the user's erasure; they are dropped")


class ErasureResponse(_Answer):
    """The user is gone; events dated before now are refused from now on."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"user_id": "u-1024", "erased": True}]})

    user_id: str
    erased: bool = Field(description="false: there was nothing to erase")


# ---- admin -----------------------------------------------------------------------------------------------

Version = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
"""Of a bundle, the name of its folder in the registry."""


class ActiveModelsRequest(_Request):
    """Who is to answer."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"default": "previous"},
                {"default": "current", "canary": "a1b2c3d4e5f60718", "percent": 5},
            ],
            "oneOf": [
                {
                    "required": ["canary", "percent"],
                    "properties": {"canary": {"type": "string"}, "percent": {"type": "number"}},
                },
                {"properties": {"canary": _NULL, "percent": _NULL}},
            ],
        }
    )

    default: str = Field(
        pattern="^(current|previous|[0-9a-f]{16})$",
        description="a version in the registry; or `current` or `previous`, the registry's",
    )
    canary: Version | None = Field(None, description="another version in the registry")
    percent: float | None = Field(None, ge=0, le=100, description="of users and sessions, for the canary")

    @model_validator(mode="after")
    def _canary_and_percent(self) -> Self:
        if (self.canary is None) != (self.percent is None):
            raise ValueError("canary and percent go together: give both, or neither")
        return self


class ActiveModels(_Answer):
    """Who answers."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "default": "18f7e6d5c4b3a291",
                    "canary": "a1b2c3d4e5f60718",
                    "percent": 5.0,
                    "pinned": False,
                    "persisted": False,
                }
            ]
        }
    )

    default: str
    canary: str | None
    percent: float | None = Field(
        description="of users and sessions, the same ones on every replica; a history told in a request has no id and "
        "goes to the default"
    )
    pinned: bool = Field(description="chosen by a call; holds until the registry's current bundle changes")
    persisted: Literal[False] = Field(False, description="a restart serves the registry's current bundle again")


Role = Annotated[Literal["default", "canary", "retired"], Field(description="retired: only finishes requests")]


class ModelDrift(_Answer):
    """What followed a model's lists, against what their confidences promised. The figures are null before 100 lists
    are settled."""

    settled: int = Field(description="lists of which this process knows what followed: the latest, up to 10,000")
    mean_list_confidence: float | None = Field(description="of these lists, as far as they had been shown")
    hit_rate: float | None = Field(description="share of these lists that held the event that followed")
    difference: float | None = Field(description="hit_rate − mean_list_confidence; 0: the confidences hold")
    interval: tuple[float, float] | None = Field(description="95 % confidence interval of the difference")
    zero_inside: bool | None = Field(description="whether the interval holds 0: no drift is shown")


class LoadedModel(_Answer):
    """A model in memory."""

    name: str
    version: str
    role: Role
    backbone: str
    filtering: bool
    max_len: int
    num_items: int
    lineage: str
    event: Literal["next_new_item", "next_item"]
    created_at: datetime
    provider: str = Field(description="of ONNX Runtime, that runs the graphs")
    custom_ops: dict[str, dict[str, Literal["function_body", "native_kernel"]]] = Field(
        description="graph → op of the domain `bft` → what runs it"
    )
    versions: dict[str, str] = Field(description="of the libraries that it was exported with")
    loaded_at: datetime
    load_seconds: float
    num_requests: int = Field(description="that hold it now")
    drift: ModelDrift


class KnownRegistry(_Answer):
    """The registry that `--bundle` names."""

    current: str | None
    previous: str | None
    versions: list[str] = Field(description="of the bundles that lie in it, the oldest first")
    problem: str | None = Field(description="why it cannot be read")


class RefusedBundle(_Answer):
    """A bundle that failed a check; not tried again by itself."""

    version: str
    reason: str = Field(description="names the folder, the file and what is wrong with it")
    at: datetime


class ModelsResponse(_Answer):
    """Every model that this process has or could have."""

    active: ActiveModels
    loaded: list[LoadedModel]
    loading: list[str]
    registry: KnownRegistry | None = Field(description="null: the service was started with one bundle")
    refused: list[RefusedBundle]


MetadataValue = Annotated[
    Id | Annotated[float, Field(allow_inf_nan=False)] | Annotated[tuple[Id, ...], Field(strict=False)] | None,
    Field(description="null: not known"),
]


class ItemRequest(_Request):
    """An item that no model was trained with yet."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"metadata": {"class": ["Comedy", "Romance"], "release_year": "1998"}}, {}]}
    )

    metadata: dict[Id, MetadataValue] = Field(
        {},
        max_length=64,
        description="what is known of the item, under the names of the columns that the model was trained with: a "
        "text, a number, or a list of texts; at most 4,096 bytes of JSON. Other names are kept, and not used",
        # The pattern of the names makes `patternProperties` of them, which allow any other name.
        json_schema_extra={"additionalProperties": False},
    )


class ItemPlace(StrEnum):
    """Where a model has an added item."""

    metadata = "metadata"
    """By its metadata."""
    catalogue_mean = "catalogue_mean"
    """Nothing that it was trained with is known of it: at the catalogue's mean, as wide as the catalogue."""
    superseded = "superseded"
    """It was trained with the item, and uses what it learnt."""


class ItemInModel(_Answer):
    """An added item in a model that answers."""

    version: str
    place: ItemPlace = Field(
        description="`metadata`: by what is known of it; `catalogue_mean`: nothing is that the model was trained with; "
        "`superseded`: the model was trained with the item itself"
    )
    unused: list[str] = Field(description="names in the metadata that say nothing to this model")


class AddedItemResponse(_Answer):
    """An item that was added at run time."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "item_id": "1683",
                    "metadata": {"class": ["Comedy", "Romance"], "release_year": "1998"},
                    "models": [{"version": "18f7e6d5c4b3a291", "place": "metadata", "unused": []}],
                }
            ]
        }
    )

    item_id: str
    metadata: dict[str, str | float | list[str] | None]
    models: list[ItemInModel] = Field(description="those that answer, the default first")


class AddedItemsResponse(_Answer):
    """Items that were added at run time, in the order of their ids."""

    version: int = Field(description="another one after every change; equal on all replicas that have followed")
    num_items: int = Field(description="of all pages")
    items: list[AddedItemResponse]
    next_after: str | None = Field(description="what to send as `after` for the next page; null: there is none")


class RemovedItemResponse(_Answer):
    """The item is not there any more."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"item_id": "1683", "removed": True}]})

    item_id: str
    removed: bool = Field(description="false: it was not there")
