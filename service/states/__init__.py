"""The user-state store: its interface and its two implementations, Redis and in-process memory."""

from service.states.interface import (
    MAX_EVENTS_PER_CALL,
    AppendStatus,
    CatalogMismatch,
    Claim,
    Clock,
    EncodedState,
    Event,
    Loaded,
    NotReplicated,
    OutboxFull,
    SlateRef,
    StateError,
    StateUnavailable,
    Store,
    StoreLimits,
    Subject,
    UnknownItemsFull,
    UserRecord,
    wall_clock_ms,
)
from service.states.memory import MemoryStore
from service.states.redis import RedisStore

__all__ = [
    "MAX_EVENTS_PER_CALL",
    "AppendStatus",
    "CatalogMismatch",
    "Claim",
    "Clock",
    "EncodedState",
    "Event",
    "Loaded",
    "MemoryStore",
    "NotReplicated",
    "OutboxFull",
    "RedisStore",
    "SlateRef",
    "StateError",
    "StateUnavailable",
    "Store",
    "StoreLimits",
    "Subject",
    "UnknownItemsFull",
    "UserRecord",
    "wall_clock_ms",
]
