"""The log cut at a moment, against a loop over users."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.catalog import Catalog
from training.retrain import slices
from training.retrain.slices import Cut, grown_catalog, slice_begin, split_at
from training.retrain.store import EVENT_SCHEMA, Incoming, Learned, Store
from training.splits import Histories, Targets, place_of, training_counts

Row = tuple[str, str, float, float]
"""User, item, time, weight."""


def frame(rows: list[Row]) -> pl.DataFrame:
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    named = dict(zip(("user_id", "item_id", "timestamp", "weight"), columns, strict=True))
    rest = {"event_id": [None] * len(rows), "source": ["file"] * len(rows)}
    return pl.DataFrame({**named, **rest}, schema=EVENT_SCHEMA)


def log(folder: Path, *ingests: list[Row]) -> Store:
    store = Store(folder / "log")
    for rows in ingests:
        store.ingest(Incoming(blocks=[frame(rows)]))
    return store


def listed(histories: Histories, catalog: Catalog) -> list[tuple[str, list[str]]]:
    bounds = zip(histories.user_ids, histories.offsets, histories.offsets[1:], strict=False)
    return [(user, catalog.ids(histories.items[begin:end])) for user, begin, end in bounds]


def asked(targets: Targets, catalog: Catalog) -> list[tuple[str, list[str], str]]:
    histories = listed(targets.history, catalog)
    return [(*history, item) for history, item in zip(histories, catalog.ids(targets.target), strict=True)]


def learned_of(split: Any, catalog: Catalog) -> dict[str, list[str]]:
    pieces = [split.train.piece(number) for number in range(split.train.num_pieces)]
    return {user: items for piece in pieces for user, items in listed(piece, catalog)}


LATER = st.lists(
    st.tuples(
        st.sampled_from(["u1", "u2", "u3", "u4"]),
        st.sampled_from("abcd"),
        st.integers(1, 12).map(float),
        st.sampled_from([0.0, 1.0]),
    ),
    max_size=14,
    unique_by=lambda row: (row[0], row[2]),
)


@settings(max_examples=40, deadline=None)
@given(LATER, LATER, st.sampled_from([4.0, 8.0, math.inf]), st.sampled_from([0, 1, 2]))
def test_the_cut_is_that_of_a_loop_over_users(
    tmp_path_factory: pytest.TempPathFactory, first: list[Row], second: list[Row], begin: float, least: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    known = [(row[0], row[2]) for row in first]
    second = [row for row in second if (row[0], row[2]) not in known]
    store = log(folder, first, second)
    catalog = grown_catalog(store, None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(slices, "MAX_VALIDATION_SHARE", 0.5)
        patched.setattr(slices, "LEAST_VALIDATION_USERS", least)
        catalog, split = split_at(store, catalog, Cut(learned=Learned(1), begin=begin), folder / "shards")

    learned, validation, test = {}, [], []
    # Who has an event to be asked about that is new, and one before it.
    with_new = 0
    for user in sorted({row[0] for row in first + second}):
        before = [(*row, False) for row in first if row[0] == user and row[3] > 0]
        before += [(*row, True) for row in second if row[0] == user and row[3] > 0 and row[2] < begin]
        with_new += len(before) >= 2 and max(before, key=lambda row: row[2])[4]
    for user in sorted({row[0] for row in first + second}):
        events = [(*row, False, False) for row in first if row[0] == user]
        events += [(*row, row[2] >= begin, True) for row in second if row[0] == user]
        events.sort(key=lambda row: row[2])
        num_earlier = max((number + 1 for number, event in enumerate(events) if not event[4]), default=0)
        earlier, later = events[:num_earlier], events[num_earlier:]
        items = [event[1] for event in events]
        test += [(user, items[: num_earlier + n], event[1]) for n, event in enumerate(later) if event[3] > 0]
        weighted = [number for number, event in enumerate(earlier) if event[3] > 0]
        end = num_earlier
        may_validate = bool(weighted) and (with_new < least or events[weighted[-1]][5])
        if math.isfinite(begin) and place_of(user) < 0.5 and len(weighted) >= 2 and may_validate:
            end = weighted[-1]
            validation.append((user, items[:end], items[end]))
        learned[user] = items[:end]

    assert {user: items for user, items in learned_of(split, catalog).items() if items} == {
        user: items for user, items in learned.items() if items and any(learned_of(split, catalog).values())
    }
    assert sorted(asked(split.validation, catalog)) == sorted(validation)
    assert sorted(asked(split.test, catalog)) == sorted(test)
    counted = [training_counts(split.train.piece(n), len(catalog)) for n in range(split.train.num_pieces)]
    assert catalog.training_counts.tolist() == (np.sum(counted, 0) if counted else np.zeros(len(catalog))).tolist()


def test_the_catalogue_grows_by_what_was_used_first_and_no_number_moves(tmp_path: Path) -> None:
    store = log(tmp_path, [("u", "b", 2.0, 1.0), ("v", "c", 1.0, 1.0)], [("v", "a", 0.5, 0.0), ("u", "z", 9.0, 1.0)])

    assert grown_catalog(store, None).item_ids.to_list() == ["a", "c", "b", "z"]
    assert grown_catalog(store, Catalog.from_ids(["z", "old"])).item_ids.to_list() == ["z", "old", "a", "c", "b"]


def test_who_is_left_out_brings_no_item(tmp_path: Path) -> None:
    store = log(tmp_path, [("u", "b", 2.0, 1.0), ("bot", "made up", 1.0, 1.0), ("bot", "b", 1.0, 1.0)])

    assert grown_catalog(store, None, ["bot"]).item_ids.to_list() == ["b"]


def test_visitors_of_one_event_do_not_stand_for_users_to_validate_with(tmp_path: Path) -> None:
    """Events that the current model learned validate then, of whom nobody else can."""
    regulars = [(f"u{user}", item, time, 1.0) for user in range(60) for time, item in enumerate("abc", 1)]
    visitors = [(f"v{user}", "a", 5.0, 1.0) for user in range(500)]
    store = log(tmp_path, regulars, [*visitors, ("u1", "d", 9.0, 1.0)])

    _, split = split_at(store, grown_catalog(store, None), Cut(Learned(1), 8.0), tmp_path / "shards")

    assert len(split.validation) == sum(place_of(f"u{user}") < slices.MAX_VALIDATION_SHARE for user in range(60)) > 20


def test_the_slice_begins_where_enough_new_events_lie(tmp_path: Path) -> None:
    store = log(
        tmp_path,
        [("u", "a", 50.0, 1.0)],
        [(f"u{number}", "a", float(number), 1.0) for number in range(20)] + [("u", "b", 60.0, 0.0)],
    )

    assert slice_begin(store, learned=Learned(1), num_events=5) == 15.0
    assert slice_begin(store, learned=Learned(1), num_events=100) == 0.0
    assert slice_begin(store, learned=Learned(2), num_events=5) == math.inf


def test_of_a_user_the_first_events_of_the_slice_are_targets(tmp_path: Path) -> None:
    rows = [("u", f"i{number}", float(number), 1.0) for number in range(30)]
    store = log(tmp_path, rows)
    catalog, split = split_at(
        store, grown_catalog(store, None), Cut(learned=Learned(0), begin=10.0), tmp_path / "shards"
    )

    assert [item for _, _, item in asked(split.test, catalog)] == [f"i{number}" for number in range(10, 20)]


def test_some_users_are_left_out_everywhere(tmp_path: Path) -> None:
    store = log(tmp_path, [("bot", "a", 1.0, 1.0), ("u", "a", 1.0, 1.0), ("bot", "b", 9.0, 1.0), ("u", "b", 9.0, 1.0)])
    cut = Cut(learned=Learned(0), begin=5.0, without_users=("bot",))

    catalog, split = split_at(store, grown_catalog(store, None), cut, tmp_path / "shards")

    assert learned_of(split, catalog) == {"u": ["a"]}
    assert asked(split.test, catalog) == [("u", ["a"], "b")]


def test_a_large_log_is_judged_on_some_users_and_kept_in_several_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "MAX_JUDGED_USERS", 20)
    monkeypatch.setattr(slices, "SHARD_EVENTS", 60)
    store = log(tmp_path, [(f"u{user}", "a", time, 1.0) for user in range(100) for time in (1.0, 2.0, 9.0)])

    catalog, split = split_at(
        store, grown_catalog(store, None), Cut(learned=Learned(0), begin=5.0), tmp_path / "shards"
    )

    assert split.train.num_pieces > 2
    assert len(learned_of(split, catalog)) == split.train.num_users == 100
    expected = [f"u{user}" for user in range(100) if place_of(f"u{user}") < 0.2]
    assert sorted(split.test.history.user_ids) == sorted(expected)
    assert 5 < len(expected) < 40
