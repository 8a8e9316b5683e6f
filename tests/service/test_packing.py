"""The binary layouts, byte by byte; the rounding of weights against another bfloat16."""

import math
import struct
from dataclasses import replace
from hashlib import blake2b

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.filtered import Cache, State
from service.states.interface import EncodedState, Event, StateUnavailable, StoreLimits, Subject
from service.states.packing import (
    bfloat16_bits,
    is_record_of,
    pack_entry,
    pack_state,
    stored_weight,
    subject_hash,
    unpack_record,
    unpack_seen,
    unpack_state,
)

OWNER = bytes.fromhex("0102030405060708")
LINEAGE = bytes.fromhex("1112131415161718")
NOT_SEEN = np.empty(0, dtype=np.int64)


def event(**changes: object) -> Event:
    fields: dict[str, object] = {
        "item_number": 4,
        "item_id": "a",
        "timestamp_ms": 0,
        "weight": 1.0,
        "identity": None,
        "undated": False,
    }
    return Event(**fields | changes)  # type: ignore[arg-type]


def record_bytes(*entries: str, count: int = 7, epoch: int = 9) -> bytes:
    return b"\x01" + OWNER + LINEAGE + struct.pack("<II", count, epoch) + bytes.fromhex("".join(entries))


def seen_bytes(old: bytes, young: bytes, owner: bytes = OWNER) -> bytes:
    """A seen set; the two counts are for the script alone and no reader needs them."""
    return b"\x01" + owner + struct.pack("<HHH", 0, 0, len(old)) + old + young


# ---- entries and records ---------------------------------------------------------------------------------


def test_entry_is_number_then_48_bit_time_then_bfloat16_weight_little_endian():
    packed = pack_entry(event(item_number=0x80000001, timestamp_ms=0x123456789ABC, weight=1.0))

    assert packed.hex() == "01000080" + "bc9a78563412" + "803f"


def test_record_comes_back_as_it_lies_in_the_bytes():
    value = record_bytes("04000000" + "e80300000000" + "803f", "01000080" + "bc9a78563412" + "0040")

    record = unpack_record(value, NOT_SEEN, "toys")

    assert (record.count, record.epoch, record.lineage) == (7, 9, "toys")
    assert record.items.tolist() == [4, 2**31 + 1]
    assert record.timestamps_ms.tolist() == [1000, 0x123456789ABC]
    assert record.weights.tolist() == [1.0, 2.0]
    assert (record.items.dtype, record.timestamps_ms.dtype, record.weights.dtype) == (
        np.int64,
        np.int64,
        np.float32,
    )


def test_record_of_fifty_events_takes_625_bytes():
    assert len(record_bytes(*[pack_entry(event()).hex()] * 50)) == 25 + 50 * 12


def test_record_of_another_subject_is_not_taken():
    assert is_record_of(record_bytes(), OWNER)
    assert not is_record_of(record_bytes(), LINEAGE)
    assert not is_record_of(None, OWNER)


def test_record_of_another_layout_is_refused_by_name():
    with pytest.raises(StateUnavailable, match="layout 2, this service reads layout 1"):
        is_record_of(b"\x02" + record_bytes()[1:], OWNER)


def test_subject_hash_tells_a_user_from_a_session_of_the_same_id():
    user, session = subject_hash(Subject("user", "é")), subject_hash(Subject("session", "é"))

    assert user == blake2b(b"user\x00\xc3\xa9", digest_size=8).digest()
    assert user != session


# ---- weights ---------------------------------------------------------------------------------------------


@given(st.floats(min_value=2.0**-126, max_value=2.0**127, width=32))
def test_weight_is_rounded_to_the_nearest_bfloat16(weight: float):
    assert stored_weight(weight) == float(ml_dtypes.bfloat16(weight))


def test_rounding_ties_go_to_the_even_neighbour():
    assert stored_weight(1 + 2**-8) == 1.0
    assert stored_weight(1 + 3 * 2**-8) == 1 + 2**-6


@pytest.mark.parametrize("weight", [1e-45, 1e-300, 5e-324])
def test_positive_weight_never_becomes_zero(weight: float):
    assert stored_weight(weight) > 0


def test_zero_weight_stays_zero():
    assert bfloat16_bits(0.0) == 0


# ---- seen sets -------------------------------------------------------------------------------------------


def test_seen_set_adds_up_its_varints_in_both_halves():
    # 4, 4+300 = 304; and 100, 100+2**31. LEB128 of 300 is ac 02, of 2**31 is 80 80 80 80 08.
    value = seen_bytes(bytes.fromhex("04 ac02"), bytes.fromhex("64 8080808008"))

    assert unpack_seen(value, OWNER).tolist() == [4, 100, 304, 100 + 2**31]


@pytest.mark.parametrize(
    "value",
    [None, seen_bytes(b"", b""), seen_bytes(b"\x04", b"", owner=LINEAGE), b"\x02" + bytes(14) + b"\x04"],
)
def test_seen_set_is_empty_when_missing_empty_foreign_or_of_another_layout(value: bytes | None):
    assert unpack_seen(value, OWNER).tolist() == []


def leb128(number: int) -> bytes:
    """From the definition: groups of seven bits from the lowest, all but the last marked."""
    digits = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes([*(digit | 0x80 for digit in digits[:-1]), digits[-1]])


@given(st.sets(st.integers(4, 2**32 - 1), max_size=40), st.integers(0, 40))
def test_seen_set_reads_any_numbers(numbers: set[int], cut: int):
    halves = sorted(numbers)[:cut], sorted(numbers)[cut:]
    old, young = (b"".join(map(leb128, np.diff(half, prepend=0).tolist())) for half in halves)

    assert unpack_seen(seen_bytes(old, young), OWNER).tolist() == sorted(numbers)


# ---- encoded states --------------------------------------------------------------------------------------


MEAN, PRECISION = np.array([1.0, -2.0], np.float32), np.array([0.5, 4.0], np.float32)


def small_cache() -> Cache:
    """Two layers, one head of width 2, three positions."""
    return Cache(
        key=np.arange(12, dtype=np.float32).reshape(2, 1, 3, 2),
        value=np.arange(100, 112, dtype=np.float32).reshape(2, 1, 3, 2),
        log_precision=np.array([[0.5, 1.5, 2.5], [-0.5, -1.5, np.inf]], np.float32),
        timestamps=np.array([np.nan, 1.7e9, 1.7e9 + 0.125]),
    )


def assert_states_equal(found: EncodedState | None, expected: EncodedState) -> None:
    assert found is not None
    assert (found.count, found.epoch) == (expected.count, expected.epoch)
    for left, right in zip(arrays_of(found.state), arrays_of(expected.state), strict=True):
        np.testing.assert_array_equal(left, right)
        assert left.dtype == right.dtype


def arrays_of(state: State) -> list[np.ndarray]:
    cache = state.cache
    held = [] if cache is None else [cache.key, cache.value, cache.log_precision, cache.timestamps]
    return [state.mean, state.precision, *held]


def test_state_without_a_cache_is_header_then_mean_then_precision():
    packed = pack_state(EncodedState(3, 5, State(MEAN, PRECISION)), OWNER)

    assert packed == b"\x02" + OWNER + struct.pack("<IIHBBHH4f", 3, 5, 2, 0, 0, 0, 0, 1.0, -2.0, 0.5, 4.0)
    assert_states_equal(unpack_state(packed, OWNER), EncodedState(3, 5, State(MEAN, PRECISION)))


def test_cache_lies_behind_the_precision_as_times_log_precisions_keys_values():
    packed = pack_state(EncodedState(3, 5, State(MEAN, PRECISION, small_cache())), OWNER)

    head = b"\x02" + OWNER + struct.pack("<IIHBBHH4f", 3, 5, 2, 2, 1, 3, 2, 1.0, -2.0, 0.5, 4.0)
    times = struct.pack("<3d", math.nan, 1.7e9, 1.7e9 + 0.125)
    log_precisions = struct.pack("<6f", 0.5, 1.5, 2.5, -0.5, -1.5, math.inf)
    assert packed == head + times + log_precisions + struct.pack("<24f", *range(12), *range(100, 112))


def test_state_of_fifty_events_takes_52_kilobytes():
    keys = np.zeros((2, 2, 51, 32), np.float32)
    cache = Cache(keys, keys, np.zeros((2, 51), np.float32), np.zeros(51))
    vector = np.ones(64, np.float32)

    assert len(pack_state(EncodedState(50, 1, State(vector, vector, cache)), OWNER)) == 25 + 512 + 51 * (8 + 8 + 1024)


def test_cache_in_float16_has_its_floats_in_two_bytes_each_and_marks_it_in_the_number_of_layers():
    packed = pack_state(EncodedState(3, 5, State(MEAN, PRECISION, small_cache())), OWNER, "float16")

    head = b"\x02" + OWNER + struct.pack("<IIHBBHH4f", 3, 5, 2, 0x80 | 2, 1, 3, 2, 1.0, -2.0, 0.5, 4.0)
    times = struct.pack("<3d", math.nan, 1.7e9, 1.7e9 + 0.125)
    log_precisions = struct.pack("<6e", 0.5, 1.5, 2.5, -0.5, -1.5, math.inf)
    assert packed == head + times + log_precisions + struct.pack("<24e", *range(12), *range(100, 112))
    # Float16 has these numbers exactly.
    assert_states_equal(unpack_state(packed, OWNER), EncodedState(3, 5, State(MEAN, PRECISION, small_cache())))


def test_cache_that_float16_cannot_hold_stays_in_float32():
    cache = small_cache()
    cache.value[0, 0, 0, 0] = 1e5
    encoded = EncodedState(3, 5, State(MEAN, PRECISION, cache))

    assert pack_state(encoded, OWNER, "float16") == pack_state(encoded, OWNER)


def test_state_without_the_cache_that_it_has_is_as_one_that_has_none():
    with_cache, without = State(MEAN, PRECISION, small_cache()), State(MEAN, PRECISION)

    assert pack_state(EncodedState(3, 5, with_cache), OWNER, "none") == pack_state(EncodedState(3, 5, without), OWNER)


floats = st.floats(width=32)


@st.composite
def states(draw: st.DrawFn) -> State:
    def array(*shape: int) -> np.ndarray:
        size = math.prod(shape)
        return np.array(draw(st.lists(floats, min_size=size, max_size=size)), np.float32).reshape(shape)

    width, num_layers, num_heads, num_positions, head_width = (draw(st.integers(1, 3)) for _ in range(5))
    mean, precision = array(width), array(width)
    if draw(st.booleans()):
        return State(mean, precision)
    per_head = (num_layers, num_heads, num_positions, head_width)
    times = draw(st.lists(st.floats(), min_size=num_positions, max_size=num_positions))
    return State(
        mean, precision, Cache(array(*per_head), array(*per_head), array(num_layers, num_positions), np.array(times))
    )


@given(states(), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_any_state_comes_back_as_it_was_packed(state: State, count: int, epoch: int):
    encoded = EncodedState(count, epoch, state)

    assert_states_equal(unpack_state(pack_state(encoded, OWNER), OWNER), encoded)


@given(states())
def test_state_cut_behind_its_precision_comes_back_without_its_cache_and_cut_elsewhere_not_at_all(state: State):
    packed = pack_state(EncodedState(3, 5, state), OWNER)
    head_end = 25 + 8 * len(state.mean)

    assert_states_equal(unpack_state(packed[:head_end], OWNER), EncodedState(3, 5, State(state.mean, state.precision)))
    for end in range(len(packed)):
        if end != head_end:
            assert unpack_state(packed[:end], OWNER) is None
    assert unpack_state(packed + b"\0", OWNER) is None


def test_state_of_another_subject_or_layout_is_not_taken():
    packed = pack_state(EncodedState(3, 5, State(MEAN, PRECISION, small_cache())), OWNER)

    assert unpack_state(packed, LINEAGE) is None
    assert unpack_state(b"\x01" + packed[1:], OWNER) is None
    assert unpack_state(b"\x03" + packed[1:], OWNER) is None
    assert unpack_state(None, OWNER) is None


def test_state_needs_a_precision_for_each_mean():
    with pytest.raises(ValueError, match=r"mean has shape \(2,\), precision \(3,\)"):
        State(np.ones(2, np.float32), np.ones(3, np.float32))


@pytest.mark.parametrize("part", ["key", "value", "log_precision", "timestamps"])
def test_cache_needs_one_shape_for_all_its_parts(part: str):
    whole = small_cache()
    cut = getattr(whole, part)[..., :1]

    with pytest.raises(ValueError, match=r"accepted: \(Y,H,S,C\) twice"):
        replace(whole, **{part: cut})


# ---- what a value may be ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("item_number", 3),
        ("item_number", 2**32),
        ("timestamp_ms", -1),
        ("timestamp_ms", 2**47),
        ("weight", -0.5),
        ("weight", math.inf),
        ("weight", math.nan),
        ("weight", 3e38),
        ("identity", b"seven.."),
    ],
)
def test_event_names_the_field_that_its_layout_cannot_hold(field: str, value: object):
    with pytest.raises(ValueError, match=f"{field} .*; accepted: "):
        event(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_len", 0),
        ("seen_limit", 7),
        ("seen_limit", 4098),
        ("tombstone_ttl_s", 30 * 86_400),
        ("unknown_limit", 2**31 + 1),
    ],
)
def test_limits_name_the_one_that_cannot_be_kept(field: str, value: int):
    with pytest.raises(ValueError, match=f"{field} is {value}; "):
        StoreLimits(**{"max_len": 50} | {field: value})
