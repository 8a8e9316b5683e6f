"""Binary layouts of the values in Redis, little-endian; the Lua in `scripts.py` reads and writes the same.

    user record     schema u8 | subject hash 8 | lineage hash 8 | count u32 | epoch u32 | K entries
    entry           12 bytes: item number u32 | timestamp in ms u48 | weight bfloat16
    seen set        schema u8 | subject hash 8 | old count u16 | young count u16 | old bytes u16 | old | young
    encoded state   state schema u8 | subject hash 8 | count u32 | epoch u32 | D u16 | Y u8 | H u8 | S u16 | C u16 |
                    mean f32 × D | precision f32 × D | cache
    cache           timestamps f64 × S | log_precision f32 × Y·S | key f32 × Y·H·S·C | value f32 × Y·H·S·C; Y, H, S and
                    C are 0 when there is none; when the top bit of Y is set, f16 in the place of f32
    tombstone       kind u8, 1 of a user's erasure, 2 of a session's merge | subject hash 8 | when, in ms u48 |
                    next epoch u32
    claim           of a session under merge, in the place of its tombstone: 3 | subject hash 8 | of the tombstone
                    before, or 0: when, next epoch | claim hash 8

`old` and `young` are ascending item numbers, each as its difference from the one before, in LEB128 varints
(the first from 0). The shapes of a state are those of `service.filtered`. The subject hash is checked on every read:
bytes under the wrong key are never used.
"""

import math
import struct
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from service.filtered import Cache, Floats, State
from service.states.interface import CacheForm, EncodedState, Event, StateUnavailable, Subject, UserRecord

SCHEMA = 1
STATE_SCHEMA = 2
"""Of encoded states alone: one of another layout is encoded anew, where a record is never given up."""

_HALF = 0x80
"""Of Y: the cache is in float16."""
_LARGEST_HALF = 65_504.0

_RECORD_HEADER = struct.Struct("<B8s8sII")
_SEEN_HEADER = struct.Struct("<B8sHHH")
_STATE_HEADER = struct.Struct("<B8sIIHBBHH")
_ENTRY = struct.Struct("<IIHH")
_ENTRY_DTYPE = np.dtype([("item", "<u4"), ("ms_low", "<u4"), ("ms_high", "<u2"), ("weight", "<u2")])


def subject_hash(subject: Subject) -> bytes:
    """8 bytes that tell whose a value is; a user and a session of one id differ."""
    return blake2b(f"{subject.kind}\0{subject.id}".encode(), digest_size=8).digest()


def lineage_hash(lineage: str) -> bytes:
    """8 bytes that tell under which catalogue lineage the item numbers of a record were given."""
    return blake2b(lineage.encode(), digest_size=8).digest()


def claim_hash(session_id: str, user_id: str) -> bytes:
    """8 bytes that tell whether a session is being merged into this user; of no use without both ids."""
    return blake2b(f"{session_id}\0{user_id}".encode(), digest_size=8).digest()


def bfloat16_bits(weight: float) -> int:
    """The 16 bits of the nearest bfloat16, ties to even: 8 significant bits, relative error ≤ 2⁻⁹.

    A positive weight stays positive: what would round to 0 becomes the smallest subnormal.
    """
    bits = int(np.float32(weight).view(np.uint32))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return max(rounded, 1) if weight > 0 else 0


def bfloat16_values(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """float32 values of bfloat16 bits; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def stored_weight(weight: float) -> float:
    """The weight that comes back from the store for one that goes in."""
    return float(bfloat16_values(np.array([bfloat16_bits(weight)], dtype=np.uint16))[0])


def pack_entry(event: Event) -> bytes:
    """The 12 bytes of one event in a record."""
    return _ENTRY.pack(
        event.item_number,
        event.timestamp_ms & 0xFFFFFFFF,
        event.timestamp_ms >> 32,
        bfloat16_bits(event.weight),
    )


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Item numbers, 4 bytes each."""
    return np.asarray(numbers, dtype="<u4").tobytes()


def is_record_of(value: bytes | None, owner: bytes) -> bool:
    """Whether `value` is a user record and belongs to the subject whose hash is `owner`.

    Raises:
        StateUnavailable: it has a layout that this version cannot read.
    """
    if value is None:
        return False
    if value[:1] != bytes([SCHEMA]):
        raise StateUnavailable(unreadable_layout(value[0] if value else 0))
    return len(value) >= _RECORD_HEADER.size and value[1:9] == owner


def unreadable_layout(schema: int) -> str:
    """The message for a value of another layout."""
    return (
        f"a stored user record has layout {schema}, this service reads layout {SCHEMA}: "
        "run the service version that wrote it, or erase the user"
    )


def lineage_of_record(value: bytes) -> bytes:
    """The 8-byte lineage hash in a user record."""
    return value[9:17]


def unpack_record(value: bytes, seen: npt.NDArray[np.int64], lineage: str) -> UserRecord:
    """A user record whose owner and lineage were checked."""
    _, _, _, count, epoch = _RECORD_HEADER.unpack_from(value)
    entries = np.frombuffer(value, dtype=_ENTRY_DTYPE, offset=_RECORD_HEADER.size)
    return UserRecord(
        count=count,
        epoch=epoch,
        lineage=lineage,
        items=entries["item"].astype(np.int64),
        timestamps_ms=entries["ms_low"].astype(np.int64) | (entries["ms_high"].astype(np.int64) << 32),
        weights=bfloat16_values(entries["weight"]),
        seen=seen,
    )


def unpack_seen(value: bytes | None, owner: bytes) -> npt.NDArray[np.int64]:
    """Sorted item numbers of a seen set; empty when there is none or it is not the owner's."""
    if value is None or len(value) < _SEEN_HEADER.size or value[0] != SCHEMA or value[1:9] != owner:
        return np.empty(0, dtype=np.int64)
    _, _, _, _, old_bytes = _SEEN_HEADER.unpack_from(value)
    varints = np.frombuffer(value, dtype=np.uint8, offset=_SEEN_HEADER.size)
    old, young = np.cumsum(_varints(varints[:old_bytes])), np.cumsum(_varints(varints[old_bytes:]))
    return np.sort(np.concatenate([old, young]))


def _varints(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """LEB128: seven bits a byte, the lowest first; the top bit says that more follow."""
    last = np.flatnonzero(data < 0x80)
    first = np.concatenate([[0], last[:-1] + 1]) if last.size else np.empty(0, dtype=np.int64)
    place = np.arange(data.size) - np.repeat(first, last - first + 1)
    septets = (data & 0x7F).astype(np.int64) << (7 * place)
    return np.add.reduceat(septets, first) if last.size else np.empty(0, dtype=np.int64)


def pack_state(encoded: EncodedState, owner: bytes, cache_form: CacheForm = "float32") -> bytes:
    """An encoded state, for the subject whose hash is `owner`.

    Args:
        encoded: the state.
        owner: its subject's hash.
        cache_form: of its cache. With `float16`, a cache that float16 cannot hold is kept as float32.
    """
    cache = encoded.state.cache
    if cache is None or cache_form == "none":
        return b"".join(_packed_head(encoded, owner, (0, 0, 0, 0)))
    parts = (cache.log_precision, cache.key, cache.value)
    is_half = cache_form == "float16" and all(map(_fits_half, parts))
    num_layers, *others = cache.key.shape
    head = _packed_head(encoded, owner, (num_layers | (_HALF if is_half else 0), *others))
    floats = (part.astype("<f2" if is_half else "<f4").tobytes() for part in parts)
    return b"".join([*head, cache.timestamps.astype("<f8").tobytes(), *floats])


def _packed_head(encoded: EncodedState, owner: bytes, shape: tuple[int, ...]) -> list[bytes]:
    state = encoded.state
    header = _STATE_HEADER.pack(STATE_SCHEMA, owner, encoded.count, encoded.epoch, len(state.mean), *shape)
    return [header, state.mean.astype("<f4").tobytes(), state.precision.astype("<f4").tobytes()]


def _fits_half(values: Floats) -> bool:
    return bool(np.all((np.abs(values) <= _LARGEST_HALF) | ~np.isfinite(values)))


def unpack_state(value: bytes | None, owner: bytes) -> EncodedState | None:
    """An encoded state; without its cache when `value` ends before it.

    None when there is none, it is not the owner's, of another layout, or not as long as it says.
    """
    if value is None or len(value) < _STATE_HEADER.size or value[0] != STATE_SCHEMA or value[1:9] != owner:
        return None
    _, _, count, epoch, width, layers, num_heads, num_positions, head_width = _STATE_HEADER.unpack_from(value)
    num_layers, dtype = layers & ~_HALF, np.dtype("<f2" if layers & _HALF else "<f4")
    head_end = _STATE_HEADER.size + 8 * width
    times_end = head_end + 8 * num_positions
    per_layer, per_head = (num_layers, num_positions), (num_layers, num_heads, num_positions, head_width)
    num_floats = math.prod(per_layer) + 2 * math.prod(per_head)
    if len(value) not in (head_end, times_end + dtype.itemsize * num_floats):
        return None
    mean, precision = np.frombuffer(value[_STATE_HEADER.size : head_end], "<f4").astype(np.float32).reshape(2, -1)
    cache = None
    if len(value) > head_end:
        timestamps = np.frombuffer(value[head_end:times_end], "<f8").astype(np.float64)
        floats = np.frombuffer(value[times_end:], dtype).astype(np.float32)
        sizes = math.prod(per_layer), math.prod(per_head)
        log_precision, keys, values = np.split(floats, np.cumsum(sizes))
        cache = Cache(keys.reshape(per_head), values.reshape(per_head), log_precision.reshape(per_layer), timestamps)
    return EncodedState(count, epoch, State(mean, precision, cache))
