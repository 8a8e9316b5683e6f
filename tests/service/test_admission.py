"""Admission: by how many requests are inside and how long each takes, on a clock of the test's own."""

from contextlib import ExitStack

import pytest

from service.admission import HEADROOM, Admission
from service.errors import Overloaded

PATIENT_S = 1000.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def busy(clock: Clock, seconds_each: float, num_inside: int) -> tuple[Admission, ExitStack]:
    """After 400 requests of so many seconds each, one after the other, with so many inside."""
    admission, inside = Admission(clock), ExitStack()
    for _ in range(400):
        with admission.let_in(PATIENT_S):
            clock.now_s += seconds_each
    for _ in range(num_inside):
        inside.enter_context(admission.let_in(PATIENT_S))
    return admission, inside


def test_a_request_is_refused_when_those_before_it_would_take_too_long() -> None:
    admission, inside = busy(Clock(), seconds_each=0.01, num_inside=9)
    with inside:
        # Ten requests of 10 ms: 100 ms.
        with pytest.raises(Overloaded, match="9 requests are being worked on, an answer would take about 100 ms"):
            inside.enter_context(admission.let_in(0.09 / HEADROOM))
        with admission.let_in(0.11 / HEADROOM):
            pass


def test_a_refusal_says_when_to_come_back() -> None:
    admission, inside = busy(Clock(), seconds_each=0.5, num_inside=4)
    with inside, pytest.raises(Overloaded) as refused:
        inside.enter_context(admission.let_in(1.0))
    # Five requests of half a second.
    assert refused.value.retry_after_s == 3


def test_a_request_that_would_be_alone_is_let_in_however_slow_the_ones_before_were() -> None:
    admission, _ = busy(Clock(), seconds_each=60.0, num_inside=0)
    with admission.let_in(0.001):
        pass


def test_nothing_is_refused_before_anything_is_known() -> None:
    admission = Admission(Clock())
    with ExitStack() as inside:
        for _ in range(100):
            inside.enter_context(admission.let_in(0.001))


def test_idle_time_makes_no_request_look_slow() -> None:
    clock = Clock()
    admission, _ = busy(clock, seconds_each=0.01, num_inside=0)
    for _ in range(400):
        clock.now_s += 30.0
        with admission.let_in(PATIENT_S):
            clock.now_s += 0.01
    assert admission.estimated_s() == pytest.approx(0.01)


def test_requests_that_finish_together_count_as_many() -> None:
    clock = Clock()
    admission = Admission(clock)
    for _ in range(200):
        with ExitStack() as batch:
            for _ in range(8):
                batch.enter_context(admission.let_in(PATIENT_S))
            clock.now_s += 0.04
    # Eight in 40 ms: 5 ms each, within what the newest of a running mean weigh.
    assert admission.estimated_s() == pytest.approx(0.005, rel=0.1)


def test_a_refused_request_is_not_inside() -> None:
    clock = Clock()
    admission, inside = busy(clock, seconds_each=0.1, num_inside=2)
    before_s = admission.estimated_s()
    for _ in range(50):
        with pytest.raises(Overloaded):
            inside.enter_context(admission.let_in(0.1))
    assert admission.estimated_s() == before_s
    inside.close()
