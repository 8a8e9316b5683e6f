"""Values that callers send: ids, timestamps, weights, and the identity of an event (service.md, "Endpoints").

Each `check_…` returns the value in the service's own form, or raises ValueError with the accepted form; no
message repeats what was sent.
"""

import hashlib
import math
import re
import time
from datetime import datetime
from typing import Any

MAX_ID_BYTES = 256
MAX_WEIGHT = 1e6
MAX_METADATA_BYTES = 4096
"""Of one item, as JSON."""
MAX_AHEAD_S = 86_400
"""How far a caller's clock may be ahead of ours."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# RFC 3339, section 5.6; seconds 60 (a leap second) has no place in Unix time.
_RFC_3339 = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:\d{2}(\.\d{1,9})?([Zz]|[+-]\d{2}:\d{2})", re.ASCII)
_TIMESTAMP_FORM = "must be Unix seconds, or RFC 3339 with an offset, such as 2026-11-29T14:05:00Z"


def whole_number(value: Any) -> Any:
    """An integer for a number such as 10.0, which JSON does not tell from 10; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_id(value: str) -> str:
    """An id: 1–256 bytes of UTF-8 without control characters."""
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise ValueError("must be UTF-8 text; it holds half of a surrogate pair") from None
    if not 1 <= size <= MAX_ID_BYTES:
        raise ValueError(f"must have 1 to {MAX_ID_BYTES} bytes of UTF-8; it has {size}")
    if _CONTROL.search(value):
        raise ValueError("must not hold control characters")
    return value


def check_timestamp(value: Any, now_s: float | None = None) -> int:
    """Milliseconds since 1970 of Unix seconds or an RFC 3339 text, at most a day ahead of now.

    Args:
        value: what was sent, of any JSON type.
        now_s: Unix seconds of now; the machine's clock when left out.
    """
    now_s = time.time() if now_s is None else now_s
    if isinstance(value, str):
        value = _parse_rfc_3339(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ValueError(_TIMESTAMP_FORM)
    if value < 0:
        raise ValueError("must not be before 1970")
    if value > now_s + MAX_AHEAD_S:
        raise ValueError("must not be more than a day ahead of now; numbers are Unix seconds, not milliseconds")
    return round(value * 1000)


def check_weight(value: float) -> float:
    """An event's weight: finite, from 0 (only seen, no part of the history) to 1,000,000."""
    if not (math.isfinite(value) and 0 <= value <= MAX_WEIGHT):
        raise ValueError(f"must be from 0 to {MAX_WEIGHT:.0f}")
    return float(value)


def identity_hash(*parts: str) -> bytes:
    """8 bytes that stand for the parts, which are kept apart whatever characters they hold."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        encoded = part.encode("utf-8")
        digest.update(len(encoded).to_bytes(4, "big"))
        digest.update(encoded)
    return digest.digest()


def _parse_rfc_3339(text: str) -> float:
    if not _RFC_3339.fullmatch(text):
        raise ValueError(_TIMESTAMP_FORM)
    try:
        return datetime.fromisoformat(text.upper()).timestamp()
    except (ValueError, OverflowError):
        raise ValueError("is not a date of the calendar") from None
