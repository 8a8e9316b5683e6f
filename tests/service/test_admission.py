"""Admission: by how many requests are inside and how long each takes, on a clock of the test's own."""

from contextlib import ExitStack, suppress

import pytest

from service.admission import CROWD, PATIENCE, Admission
from service.errors import Overloaded

PATIENT_S = 1000.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def enter(admission: Admission, number: int, remaining_s: float = PATIENT_S) -> list[ExitStack]:
    """So many requests inside, each to be finished by itself."""
    inside = []
    for _ in range(number):
        inside.append(request := ExitStack())
        request.enter_context(admission.let_in(remaining_s))
    return inside


def busy(clock: Clock, seconds_each: float, num_inside: int) -> tuple[Admission, list[ExitStack]]:
    """After 400 requests, one finished every so many seconds, with so many inside all the time."""
    admission = Admission(clock)
    inside = enter(admission, num_inside)
    for _ in range(400):
        clock.now_s += seconds_each
        inside.pop(0).close()
        inside += enter(admission, 1)
    return admission, inside


def test_a_request_is_refused_when_those_before_it_would_take_too_long() -> None:
    admission, _inside = busy(Clock(), seconds_each=0.01, num_inside=9)
    # Ten requests of 10 ms: 100 ms.
    with pytest.raises(Overloaded, match="9 requests are being worked on, an answer would take about 100 ms"):
        enter(admission, 1, remaining_s=0.09 / PATIENCE)
    enter(admission, 1, remaining_s=0.11 / PATIENCE)


def test_a_burst_may_fill_more_of_the_time_than_an_overload() -> None:
    clock = Clock()
    admission, inside = busy(clock, seconds_each=0.01, num_inside=9)
    # 100 ms: in time for a deadline in 200 ms, if only a few such requests come.
    inside += enter(admission, 1, remaining_s=0.2)
    inside.pop(0).close()
    num_let_in = 0
    for _ in range(100):
        with suppress(Overloaded):
            for request in enter(admission, 1, remaining_s=0.2):
                request.close()
                num_let_in += 1
    assert 0 < num_let_in < 50
    with pytest.raises(Overloaded):
        enter(admission, 1, remaining_s=0.2)
    # A caller with more time still gets in.
    enter(admission, 1, remaining_s=1.0)


def test_an_overload_is_forgotten_when_queues_are_short_again() -> None:
    clock = Clock()
    admission, inside = busy(clock, seconds_each=0.01, num_inside=9)
    for _ in range(200):
        with suppress(Overloaded):
            enter(admission, 1, remaining_s=0.2)
    for _ in range(400):
        enter(admission, 1, remaining_s=10.0)
    assert len(inside) == 9
    inside += enter(admission, 1, remaining_s=0.2)


def test_a_refusal_says_when_to_come_back() -> None:
    admission, _inside = busy(Clock(), seconds_each=0.5, num_inside=4)
    with pytest.raises(Overloaded) as refused:
        enter(admission, 1, remaining_s=1.0)
    # Five requests of half a second.
    assert refused.value.retry_after_s == 3


def test_without_a_crowd_everybody_is_let_in_however_slow_the_ones_before_were() -> None:
    clock = Clock()
    admission = Admission(clock)
    for _ in range(10):
        crowd = enter(admission, 2 * CROWD)
        clock.now_s += 60.0
        for request in crowd:
            request.close()
    _inside = enter(admission, CROWD, remaining_s=0.001)
    with pytest.raises(Overloaded):
        enter(admission, 1, remaining_s=0.001)


def test_nothing_is_refused_before_anything_is_known() -> None:
    enter(Admission(Clock()), 100, remaining_s=0.001)


def test_requests_one_after_the_other_say_nothing_about_many_at_once() -> None:
    clock = Clock()
    admission = Admission(clock)
    for _ in range(400):
        (alone,) = enter(admission, 1)
        clock.now_s += 0.05
        alone.close()
    enter(admission, 100, remaining_s=0.1)


def test_idle_time_makes_no_request_look_slow() -> None:
    clock = Clock()
    admission = Admission(clock)
    for _ in range(400):
        clock.now_s += 30.0
        crowd = enter(admission, CROWD)
        clock.now_s += 0.01
        crowd[0].close()
        for request in crowd[1:]:
            request.close()
    assert admission.estimated_s() == pytest.approx(0.01)


def test_requests_that_finish_together_count_as_many() -> None:
    clock = Clock()
    admission = Admission(clock)
    waiting = enter(admission, CROWD)
    for _ in range(200):
        batch = enter(admission, 8)
        clock.now_s += 0.04
        for request in batch:
            request.close()
    # Eight in 40 ms: 5 ms each, within what the newest of a running mean weigh; the crowd is inside all the time.
    assert admission.estimated_s() == pytest.approx((len(waiting) + 1) * 0.005, rel=0.1)


def test_a_refused_request_is_not_inside() -> None:
    admission, _inside = busy(Clock(), seconds_each=0.1, num_inside=CROWD)
    before_s = admission.estimated_s()
    for _ in range(50):
        with pytest.raises(Overloaded):
            enter(admission, 1, remaining_s=0.1)
    assert admission.estimated_s() == before_s
