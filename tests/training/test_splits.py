"""Splits, against loops over plain lists."""

import hashlib
from collections import defaultdict

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.config import FIRST_ITEM, UNK
from tests.training.histories import histories_of
from training.catalog import Catalog
from training.events import EventLog, sort_events
from training.splits import (
    Histories,
    Split,
    Targets,
    held_out_part,
    make_split,
    to_histories,
    training_counts,
    with_validation_learned,
)

Event = tuple[str, str, float, float]
"""user, item, timestamp, weight"""

USERS = [f"user {n}" for n in range(60)]
EVENT = st.tuples(
    st.sampled_from(USERS[:4]),
    st.sampled_from("abcde"),
    st.integers(0, 3).map(float),
    st.sampled_from([0.0, 0.5, 1.0]),
)
LOGS = st.lists(EVENT, min_size=1, max_size=40)


def log_of(events: list[Event]) -> EventLog:
    schema = {
        "user_id": pl.String(),
        "item_id": pl.String(),
        "timestamp": pl.Float64(),
        "weight": pl.Float32(),
    }
    frame = pl.DataFrame(events, schema=schema, orient="row")
    return EventLog(sort_events(frame), "", len(events), 0, 0, has_timestamps=True)


def by_user(events: list[Event]) -> dict[str, list[Event]]:
    users: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event[0], event[2])):
        users[event[0]].append(event)
    return users


def listed(histories: Histories, catalog: Catalog) -> dict[str, list[Event]]:
    """The histories as plain lists."""
    result = {}
    for user, begin, end in zip(histories.user_ids, histories.offsets, histories.offsets[1:], strict=False):
        items = catalog.ids(histories.items[begin:end])
        times, weights = histories.timestamps[begin:end].tolist(), histories.weights[begin:end].tolist()
        result[user] = [(user, *rest) for rest in zip(items, times, weights, strict=True)]
    assert len(result) == len(histories)
    return result


def pairs(targets: Targets, catalog: Catalog) -> dict[str, tuple[list[Event], str]]:
    """User → (history, target id)."""
    histories = listed(targets.history, catalog)
    ids = catalog.ids(targets.target)
    return {user: (history, item) for (user, history), item in zip(histories.items(), ids, strict=True)}


@given(LOGS)
def test_histories_hold_the_whole_log_in_time_order(events: list[Event]) -> None:
    log = log_of(events)
    catalog = Catalog.from_ids(log.events["item_id"])
    histories = to_histories(log.events, catalog)

    assert listed(histories, catalog) == by_user(events)
    types = [array.dtype for array in (histories.offsets, histories.items, histories.weights, histories.timestamps)]
    assert types == [np.int64, np.int64, np.float32, np.float64]


@given(LOGS)
def test_leave_one_out_equals_a_loop_over_users(events: list[Event]) -> None:
    log = log_of(events)
    catalog = Catalog.from_ids(log.events["item_id"])
    split = make_split(log, catalog, "leave_one_out")

    train, validation, test = {}, {}, {}
    for user, history in by_user(events).items():
        weighted = [n for n, event in enumerate(history) if event[3] > 0]
        if len(weighted) < 3:
            train[user] = history
            continue
        *_, second_last, last = weighted
        train[user] = history[:second_last]
        validation[user] = (history[:second_last], history[second_last][1])
        test[user] = (history[:last], history[last][1])
    assert listed(split.train, catalog) == train
    assert pairs(split.validation, catalog) == validation
    assert pairs(split.test, catalog) == test


@given(LOGS)
def test_with_validation_learned_only_the_test_target_and_what_follows_it_is_kept_back(events: list[Event]) -> None:
    log = log_of(events)
    catalog = Catalog.from_ids(log.events["item_id"])
    split = make_split(log, catalog, "leave_one_out")

    learned = with_validation_learned(split)

    expected = {}
    for user, history in by_user(events).items():
        weighted = [n for n, event in enumerate(history) if event[3] > 0]
        expected[user] = history if len(weighted) < 3 else history[: weighted[-1]]
    assert listed(learned.train, catalog) == expected
    assert learned.test is split.test


def test_the_validation_users_of_a_users_split_cannot_be_learned() -> None:
    log = log_of([("u", item, 1.0, 1.0) for item in "dbca"])

    with pytest.raises(ValueError, match="the split users has no validation events of users it trains on"):
        with_validation_learned(make_split(log, Catalog.from_ids(log.events["item_id"]), "users"))


def test_ties_are_left_in_input_order() -> None:
    log = log_of([("u", item, 1.0, 1.0) for item in "dbca"])
    catalog = Catalog.from_ids(log.events["item_id"])
    split = make_split(log, catalog, "leave_one_out")

    assert catalog.ids(split.train.items) == ["d", "b"]
    assert catalog.ids(split.validation.target) == ["c"]
    assert catalog.ids(split.test.target) == ["a"]


def test_an_event_of_weight_zero_is_seen_but_never_a_target() -> None:
    weights = {"a": 1, "b": 1, "hidden": 0, "c": 1, "shown": 0, "d": 1, "after": 0}
    log = log_of([("u", item, float(n), float(w)) for n, (item, w) in enumerate(weights.items())])
    catalog = Catalog.from_ids(log.events["item_id"])
    split = make_split(log, catalog, "leave_one_out")

    assert catalog.ids(split.validation.history.items) == ["a", "b", "hidden"]
    assert catalog.ids(split.validation.target) == ["c"]
    assert catalog.ids(split.test.history.items) == ["a", "b", "hidden", "c", "shown"]
    assert catalog.ids(split.test.target) == ["d"]


def test_an_item_the_catalogue_lacks_is_unk_and_never_a_target() -> None:
    log = log_of([("u", item, float(n), 1.0) for n, item in enumerate("abcdx")])
    catalog = Catalog.from_ids("abcd")
    split = make_split(log, catalog, "leave_one_out")

    assert catalog.ids(split.test.target) == ["d"]
    whole = to_histories(log.events, catalog)
    assert whole.items[-1] == UNK
    assert training_counts(whole, len(catalog)).tolist() == [1, 1, 1, 1]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(USERS),
            st.sampled_from("abc"),
            st.integers(0, 3).map(float),
            st.sampled_from([0.0, 1.0]),
        ),
        min_size=1,
        max_size=150,
    )
)
def test_users_split_equals_a_loop_over_users(events: list[Event]) -> None:
    log = log_of(events)
    catalog = Catalog.from_ids(log.events["item_id"])
    split = make_split(log, catalog, "users")

    train, parts, without_target = {}, {"validation": {}, "test": {}}, 0
    for user, history in by_user(events).items():
        place = int(hashlib.blake2b(user.encode(), digest_size=8).hexdigest(), 16)
        weighted = [n for n, event in enumerate(history) if event[3] > 0]
        if place * 10 >= 2**64:
            train[user] = history
        elif weighted:
            part = "validation" if place * 20 < 2**64 else "test"
            parts[part][user] = (history[: weighted[-1]], history[weighted[-1]][1])
        else:
            without_target += 1
    assert listed(split.train, catalog) == train
    assert pairs(split.validation, catalog) == parts["validation"]
    assert pairs(split.test, catalog) == parts["test"]
    assert split.held_out_without_target == without_target


def test_a_tenth_of_many_users_is_held_out_half_for_each_purpose() -> None:
    parts = [held_out_part(str(n)) for n in range(20_000)]

    # Binomial: five standard deviations are 0.8 of a percent point.
    assert parts.count("validation") / len(parts) == pytest.approx(0.05, abs=0.008)
    assert parts.count("test") / len(parts) == pytest.approx(0.05, abs=0.008)


def test_the_side_of_a_user_does_not_depend_on_the_others() -> None:
    few = [(user, "a", 1.0, 1.0) for user in USERS[:30]]
    many = few + [(user, "b", 1.0, 1.0) for user in USERS]

    def held_out(events: list[Event]) -> set[str]:
        split = make_split(log_of(events), Catalog.from_ids("ab"), "users")
        return set(split.validation.history.user_ids + split.test.history.user_ids)

    assert held_out(few) == held_out(many) & set(USERS[:30])
    assert held_out(few)


def test_a_held_out_user_with_one_event_has_an_empty_history() -> None:
    user = next(name for name in USERS if held_out_part(name) == "test")
    log = log_of([(user, "a", 1.0, 1.0)])
    split = make_split(log, Catalog.from_ids(log.events["item_id"]), "users")

    assert len(split.train) == len(split.validation) == 0
    assert split.test.history.offsets.tolist() == [0, 0]
    assert split.test.target.tolist() == [FIRST_ITEM]


@given(LOGS)
@pytest.mark.parametrize("name", ["leave_one_out", "users"])
def test_counts_see_training_events_of_positive_weight_only(name: str, events: list[Event]) -> None:
    log = log_of(events)
    catalog = Catalog.from_ids(log.events["item_id"])
    split: Split = make_split(log, catalog, name)  # type: ignore[arg-type]

    expected = dict.fromkeys(catalog.item_ids, 0)
    for history in listed(split.train, catalog).values():
        for _, item, _, weight in history:
            expected[item] += weight > 0
    counts = training_counts(split.train, len(catalog))
    assert counts.tolist() == list(expected.values())
    assert counts.dtype == np.int64


ITEM = st.sampled_from([UNK, FIRST_ITEM, FIRST_ITEM + 1, FIRST_ITEM + 2])
HISTORY = st.lists(st.tuples(ITEM, st.sampled_from([0.0, 0.5, 1.0])), max_size=8)


@given(st.lists(st.tuples(HISTORY, ITEM.filter(lambda item: item != UNK)), min_size=1, max_size=5), st.integers(0, 5))
def test_what_follows_the_first_events_equals_a_loop_over_users(
    users: list[tuple[list[tuple[int, float]], int]], num_events: int
) -> None:
    histories = histories_of(
        [[item for item, _ in history] for history, _ in users], [[weight for _, weight in hist] for hist, _ in users]
    )
    rows, found = Targets(histories, np.array([target for _, target in users])).after(num_events)

    expected = []
    for user, (history, target) in enumerate(users):
        events = [*history, (target, 1.0)]
        counted = [place for place, (_, weight) in enumerate(events) if weight > 0]
        if len(counted) > num_events and events[counted[num_events]][0] != UNK:
            place = counted[num_events]
            expected.append((user, events[:place], events[place][0]))
    bounds = zip(found.history.offsets, found.history.offsets[1:], strict=False)
    pairs = [
        list(zip(found.history.items[begin:end].tolist(), found.history.weights[begin:end].tolist(), strict=True))
        for begin, end in bounds
    ]
    assert list(zip(rows.tolist(), pairs, found.target.tolist(), strict=True)) == expected
    assert found.history.user_ids == [f"u{user}" for user, _, _ in expected]


def test_the_summary_counts_users_and_events() -> None:
    log = log_of([("u", item, float(n), 1.0) for n, item in enumerate("abcd")] + [("v", "a", 1.0, 1.0)])

    assert make_split(log, Catalog.from_ids(log.events["item_id"]), "leave_one_out").summary() == {
        "split": "leave_one_out",
        "train_users": 2,
        "train_events": 3,
        "validation_users": 1,
        "test_users": 1,
        "held_out_without_target": 0,
    }


def test_an_unknown_split_is_refused_with_the_known_ones() -> None:
    log = log_of([("u", "a", 1.0, 1.0)])

    with pytest.raises(ValueError, match="no split is called 'random'; known: leave_one_out, users"):
        make_split(log, Catalog.from_ids(log.events["item_id"]), "random")  # type: ignore[arg-type]


def test_histories_of_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="must all have the length"):
        Histories(["u"], np.array([0, 2]), np.zeros(2), np.zeros(1), np.zeros(2))
    with pytest.raises(ValueError, match="1 users need offsets"):
        Histories(["u"], np.array([0]), np.zeros(0), np.zeros(0), np.zeros(0))
