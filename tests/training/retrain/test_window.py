"""A window beside the events before: what is counted, and which poison is found."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from training.retrain import window as windows
from training.retrain.store import EVENT_SCHEMA, SESSION, Incoming, Learned, Store
from training.retrain.window import (
    DAY_S,
    Limits,
    Window,
    check,
    check_parts,
    look,
    num_new_events,
    stability_index,
)

NOW = 100 * DAY_S

Row = tuple[str, str, float]
"""User, item, day."""


def frame(rows: Sequence[Row], source: str) -> pl.DataFrame:
    users, items, days = zip(*rows, strict=True)
    columns = {
        "user_id": users,
        "item_id": items,
        "timestamp": [day * DAY_S for day in days],
        "weight": [1.0] * len(rows),
        "event_id": [f"{source} {number}" for number in range(len(rows))],
        "source": [source] * len(rows),
    }
    return pl.DataFrame(columns, schema=EVENT_SCHEMA)


def log(folder: Path, *ingests: Sequence[Row]) -> Store:
    store = Store(folder)
    for number, rows in enumerate(ingests):
        store.ingest(Incoming(blocks=[frame(rows, f"part {number}")]))
    return store


def ordinary(num_events: int, begin_day: int, num_days: int, num_users: int = 50, seed: int = 0) -> list[Row]:
    """Users who take items of a fixed popularity, evenly over some days."""
    generator = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, 41)
    items = generator.choice(40, num_events, p=popularity / popularity.sum())
    users = generator.integers(num_users, size=num_events)
    days = begin_day + np.arange(num_events) * num_days / num_events
    return [(f"u{user}", f"i{item}", float(day)) for user, item, day in zip(users, items, days, strict=True)]


def failed(window: Window) -> list[str]:
    return [one.name for one in check(window, Limits()) if not one.is_met]


def test_of_a_model_that_the_job_did_not_make_the_dates_decide(tmp_path: Path) -> None:
    store = log(tmp_path, [("u", "a", 1.0), ("v", "b", 2.0), ("u", "c", 3.0), ("w", "c", 3.0)])

    window = look(store, Learned(until=2.0 * DAY_S), now=NOW)

    assert (window.events, window.earlier_events, window.learned_until) == (2, 2, 2.0 * DAY_S)
    found = {known: next(one for one in check(window, Limits(), known) if one.name == "known") for known in (2, 3)}
    assert {known: (one.found, one.is_met) for known, one in found.items()} == {2: (1.0, True), 3: (2 / 3, False)}
    assert "known" not in [one.name for one in check(window, Limits())]


def test_a_window_is_what_came_after_what_was_learned(tmp_path: Path) -> None:
    store = log(
        tmp_path,
        [("u", "a", 1.0), ("v", "a", 2.0), ("v", "b", 3.0)],
        [("u", "a", 4.0), ("u", "c", 5.0), ("w", "a", 5.5), ("u", "b", 2.5)],
    )

    window = look(store, learned=Learned(1), now=NOW)

    assert (window.events, window.earlier_events, window.users, window.items) == (4, 3, 2, 3)
    assert (window.first, window.last, window.learned_until) == (2.5 * DAY_S, 5.5 * DAY_S, 3.0 * DAY_S)
    assert (window.new_user_share, window.new_item_share, window.late_share) == (0.25, 0.25, 0.25)
    assert (window.busiest_user, window.busiest_user_share) == ("u", 0.75)
    # One event on day 4, two on day 5, after what was learned; one a day before.
    assert window.events_per_day == pytest.approx(3 / 2)
    assert window.usual_events_per_day == 1.0
    assert window.by_source == {"part 1": 4}


def test_a_log_without_a_model_is_all_new(tmp_path: Path) -> None:
    window = look(log(tmp_path, [("u", "a", 1.0), ("v", "b", 2.0)]), learned=Learned(0), now=NOW)

    assert (window.events, window.earlier_events) == (2, 0)
    assert math.isnan(window.usual_events_per_day)
    assert {one.name for one in check(window, Limits())} == {"busiest_user", "future"}
    assert "usual_events_per_day" not in window.to_json()


def test_nothing_new_is_an_empty_window(tmp_path: Path) -> None:
    window = look(log(tmp_path, [("u", "a", 1.0)]), learned=Learned(1), now=NOW)

    assert (window.events, window.earlier_events, window.psi) == (0, 1, 0.0)


def test_an_ordinary_window_passes(tmp_path: Path) -> None:
    store = log(tmp_path, ordinary(4000, 0, 40), ordinary(1000, 40, 10, seed=1))

    assert failed(look(store, learned=Learned(1), now=NOW)) == []


POISON = {
    "busiest_user": [("bot", f"i{number % 40}", 45.0) for number in range(120)],
    "future": [("u1", "i1", 2000.0), ("u2", "i2", 2000.0)],
    "late": [(f"u{number % 50}", f"i{number % 40}", 1.0) for number in range(1100)],
    "new_items": [(f"u{number % 50}", f"x{number}", 45.0) for number in range(1100)],
    "new_users": [(f"x{number}", f"i{number % 3}", 45.0) for number in range(12_000)],
    "popularity": [(f"u{number % 50}", "i39", 45.0) for number in range(2000)],
}


@pytest.mark.parametrize("name", POISON)
def test_a_poisoned_window_is_found_and_told_what_to_do(name: str, tmp_path: Path) -> None:
    store = log(tmp_path, ordinary(4000, 0, 40), [*ordinary(1000, 40, 10, seed=1), *POISON[name]])

    window = look(store, learned=Learned(1), now=NOW)

    assert name in failed(window)
    told = next(one for one in check(window, Limits()) if one.name == name)
    assert "retrain." in told.advice
    assert float(told.accepted.removeprefix("at most ")) < told.found


@pytest.mark.parametrize(("num_events", "is_met"), [(80, False), (800, True), (12_000, False)])
def test_the_volume_of_a_day_is_held_against_the_usual_one(num_events: int, is_met: bool, tmp_path: Path) -> None:
    store = log(tmp_path, ordinary(4000, 0, 40), ordinary(num_events, 40, 10, seed=1))

    found = {one.name: one for one in check(look(store, learned=Learned(1), now=NOW), Limits())}

    assert found["volume"].is_met == is_met


def test_a_few_late_events_are_no_days_on_which_nothing_happened(tmp_path: Path) -> None:
    late = [(f"u{day}", "i1", float(day)) for day in range(1, 38, 3)]
    store = log(tmp_path, ordinary(4000, 0, 40), [*ordinary(200, 40, 2, seed=1), *late])

    window = look(store, learned=Learned(1), now=NOW)

    assert window.events_per_day == 100
    assert "volume" not in failed(window)


def test_sessions_are_no_new_users(tmp_path: Path) -> None:
    visits = [(f"{SESSION}{number}", f"i{number % 40}", 45.0) for number in range(12_000)]
    store = log(tmp_path, ordinary(4000, 0, 40), [*ordinary(1000, 40, 10, seed=1), *visits])

    assert "new_users" not in failed(look(store, learned=Learned(1), now=NOW))


def test_an_event_of_the_future_that_was_learned_makes_no_other_late(tmp_path: Path) -> None:
    store = log(tmp_path, [*ordinary(4000, 0, 40), ("u1", "i1", 9000.0)], ordinary(1000, 40, 10, seed=1))

    window = look(store, learned=Learned(1), now=NOW)

    assert window.late_share == 0
    assert failed(window) == []


@pytest.mark.parametrize("name", ["busiest_user", "future", "popularity"])
def test_poison_is_found_among_the_clean_events_of_further_nights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "LEAST_PART_EVENTS", 500)
    clean = [ordinary(6000, 50 + 10 * night, 10, seed=night) for night in range(2, 5)]
    few = ordinary(20, 49, 1, seed=9)
    store = log(tmp_path, ordinary(4000, 0, 40), [*ordinary(1000, 40, 10, seed=1), *POISON[name]], few, *clean)

    assert failed(look(store, learned=Learned(1), now=NOW)) == []
    refused = [one for one in check_parts(store, Learned(1), NOW, Limits()) if not one.is_met]

    assert [one.name for one in refused] == [f"{name} of ingest 2"]
    assert "bft-train log forget" in refused[0].advice
    store.forget(2)
    assert all(one.is_met for one in check_parts(store, Learned(1), NOW, Limits()))


def test_small_ingests_are_checked_together_and_a_single_part_by_the_window_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "LEAST_PART_EVENTS", 500)
    parts = [ordinary(200, 40 + 5 * number, 5, seed=number) for number in range(1, 8)]
    store = log(tmp_path, ordinary(4000, 0, 40), *parts)

    names = [one.name for one in check_parts(store, Learned(1), NOW, Limits())]
    assert {name.partition(" of ")[2] for name in names} == {"ingests 2 to 4", "ingests 5 to 8"}
    assert check_parts(store, Learned(1), NOW, Limits(min_events=1000)) == []
    assert check_parts(store, Learned(8), NOW, Limits()) == []


def test_a_user_who_is_left_out_counts_nowhere(tmp_path: Path) -> None:
    store = log(tmp_path, ordinary(4000, 0, 40), [*ordinary(1000, 40, 10, seed=1), *POISON["busiest_user"]])

    window = look(store, learned=Learned(1), now=NOW, without_users=["bot"])

    assert window.events == 1000
    assert failed(window) == []
    assert num_new_events(store, Learned(1), ["bot"]) == 1000
    assert num_new_events(store, Learned(1)) == 1120


def test_the_stability_index_is_that_of_the_formula() -> None:
    # Ten items of equal use: a bin each.
    earlier, new = np.full(10, 10), np.array([20, 5, *[10] * 7, 5])
    p, q = earlier / 100, new / 100

    assert stability_index(earlier, new) == pytest.approx(((q - p) * np.log(q / p)).sum())
    assert stability_index(earlier, earlier * 3) == pytest.approx(0)
    assert stability_index(np.zeros(3), np.ones(3)) == 0


def test_a_window_looks_the_same_each_time(tmp_path: Path) -> None:
    """Items of equal counts lie in one bin of the index or the next: always in the same."""
    before = [(f"u{user}", f"i{item}", 1.0) for item in range(200) for user in range(3)]
    store = log(tmp_path, before, [(f"v{item}", f"i{item}", 3.0) for item in range(0, 200, 3)])

    assert len({look(store, learned=Learned(1), now=NOW).psi for _ in range(10)}) == 1
