"""The job's log: each event once, whole after a kill, without whom it has to forget."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training import files
from training.retrain import store as stores
from training.retrain.store import EVENT_SCHEMA, INDEX, NOBODY, SESSION, Incoming, Merge, Store
from training.tables import DataError

Row = tuple[str, str, float, str | None]
"""User, item, time, event id."""


def frame(rows: Sequence[Row], source: str = "a file") -> pl.DataFrame:
    columns = {
        "user_id": [row[0] for row in rows],
        "item_id": [row[1] for row in rows],
        "timestamp": [row[2] for row in rows],
        "weight": [1.0] * len(rows),
        "event_id": [row[3] for row in rows],
        "source": [source] * len(rows),
    }
    return pl.DataFrame(columns, schema=EVENT_SCHEMA)


def incoming(rows: Sequence[Row], **rest: Any) -> Incoming:
    return Incoming(blocks=[frame(rows)], **rest)


def stored(store: Store) -> list[Row]:
    """All events, in the order of the buckets."""
    events = [store.bucket(number) for number in range(stores.NUM_BUCKETS)]
    return [row for part in events for row in part.select("user_id", "item_id", "timestamp", "event_id").rows()]


def test_events_lie_by_user_in_the_order_of_time(tmp_path: Path) -> None:
    store = Store(tmp_path / "log")
    ingest = store.ingest(incoming([("u", "b", 2.0, None), ("v", "c", 1.0, None), ("u", "a", 1.0, None)]))

    assert (ingest.read, ingest.new, ingest.duplicates) == (3, 3, 0)
    rows = stored(Store(tmp_path / "log"))
    assert [row for row in rows if row[0] == "u"] == [("u", "a", 1.0, None), ("u", "b", 2.0, None)]
    assert sorted(rows) == [("u", "a", 1.0, None), ("u", "b", 2.0, None), ("v", "c", 1.0, None)]


def test_what_comes_twice_is_there_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.ingest(incoming([("u", "a", 1.0, None), ("u", "a", 1.5, "x"), ("u", "b", 3.0, None)]))

    # The second has the id of one that is there, at another time; the last one is new by its time alone.
    again = store.ingest(incoming([("u", "a", 1.0, None), ("u", "c", 9.0, "x"), ("u", "b", 3.5, None)]))

    assert (again.read, again.new, again.duplicates) == (3, 1, 2)
    assert stored(store) == [("u", "a", 1.0, None), ("u", "a", 1.5, "x"), ("u", "b", 3.0, None), ("u", "b", 3.5, None)]
    assert store.bucket(stores.bucket_of("u"))["ingest"].to_list() == [1, 1, 1, 2]


def test_a_file_without_ids_adds_nothing_to_what_the_outbox_brought(tmp_path: Path) -> None:
    store = Store(tmp_path)
    clicks = [("u", "a", 1.0, "x"), ("u", "a", 1.0, "y"), ("u", "b", 2.0, "z")]

    for rows, new in ((clicks, 3), ([(*row[:3], None) for row in clicks], 0), ([("u", "c", 3.0, None)], 1)):
        assert store.ingest(incoming(rows)).new == new
    assert store.ingest(incoming([("u", "c", 3.0, "w")])).new == 0, "the other way round"

    assert stored(store) == [*clicks, ("u", "c", 3.0, None)], "two ids are two events"


@pytest.mark.parametrize("is_merged_first", [True, False])
def test_what_was_told_for_a_session_and_for_its_user_is_there_once_under_whatever_ids(
    is_merged_first: bool, tmp_path: Path
) -> None:
    store, merge = Store(tmp_path), Merge(session_id="s", user_id="u", timestamp=10.0)
    of_session, of_user = [(SESSION + "s", "a", 1.0, "x"), (SESSION + "s", "b", 2.0, "z")], [("u", "a", 1.0, "y")]

    if is_merged_first:
        store.ingest(incoming(of_session, merges=[merge]))
        store.ingest(incoming(of_user))
    else:
        store.ingest(incoming([*of_user, *of_session]))
        store.ingest(Incoming(merges=[merge]))
    store.ingest(incoming(of_session))

    assert [row[:3] for row in stored(store)] == [("u", "a", 1.0), ("u", "b", 2.0)]
    assert store.ingest(incoming([("u", "b", 7.0, "z")])).new == 0, "by the id that it had in the session"


def test_an_erased_user_is_gone_and_does_not_come_back_with_old_events(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.ingest(incoming([("u", "a", 1.0, None), ("v", "a", 1.0, None)]))

    erasing = store.ingest(incoming([("u", "b", 4.0, None), ("u", "c", 6.0, None)], erasures={"u": 5.0}))
    again = store.ingest(incoming([("u", "a", 1.0, None), ("u", "d", 7.0, None)], erasures={"u": 2.0}))

    assert (erasing.new, erasing.of_erased, erasing.erased) == (1, 1, 1)
    assert (again.new, again.of_erased, again.erased) == (1, 1, 0)
    assert sorted(stored(store)) == [("u", "c", 6.0, None), ("u", "d", 7.0, None), ("v", "a", 1.0, None)]
    assert '"u"' not in (tmp_path / INDEX).read_text()


def test_an_erasure_alone_is_an_ingest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.ingest(incoming([("u", "a", 1.0, None)]))

    assert store.ingest(Incoming(erasures={"u": 2.0})).erased == 1
    assert stored(Store(tmp_path)) == []
    assert [path.name for path in tmp_path.iterdir()] == [INDEX]


def test_a_merged_session_s_events_are_the_user_s(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.ingest(incoming([(SESSION + "s", "a", 1.0, None), ("u", "b", 2.0, None)]))

    merge = Merge(session_id="s", user_id="u", timestamp=10.0)
    merging = store.ingest(incoming([(SESSION + "s", "c", 3.0, None)], merges=[merge]))
    late = store.ingest(incoming([(SESSION + "s", "d", 4.0, None), (SESSION + "s", "e", 11.0, None)]))

    assert (merging.new, late.new) == (1, 2)
    assert sorted(stored(store)) == [
        (SESSION + "s", "e", 11.0, None),
        ("u", "a", 1.0, None),
        ("u", "b", 2.0, None),
        ("u", "c", 3.0, None),
        ("u", "d", 4.0, None),
    ]
    assert store.index.rows == 5


def test_the_events_of_an_erased_user_s_session_do_not_come_later(tmp_path: Path) -> None:
    store = Store(tmp_path)
    merge = Merge(session_id="s", user_id="u", timestamp=10.0)
    store.ingest(incoming([("u", "a", 1.0, None)], merges=[merge], erasures={"u": 20.0}))

    late = store.ingest(incoming([(SESSION + "s", "b", 9.0, None), (SESSION + "s", "c", 11.0, None)]))

    assert (late.new, late.of_erased) == (1, 1)
    assert stored(store) == [(SESSION + "s", "c", 11.0, None)], "of the session that began after the merge"
    assert '"u"' not in (tmp_path / INDEX).read_text()


def test_a_session_that_is_merged_after_an_erasure_is_the_new_user_s(tmp_path: Path) -> None:
    store = Store(tmp_path)
    merge = Merge(session_id="s", user_id="u", timestamp=30.0)
    store.ingest(incoming([(SESSION + "s", "a", 25.0, None)], merges=[merge], erasures={"u": 20.0}))

    store.ingest(incoming([(SESSION + "s", "b", 26.0, None)]))

    assert stored(store) == [("u", "a", 25.0, None), ("u", "b", 26.0, None)]


def test_what_a_session_had_until_it_was_nobody_s_is_dropped(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.ingest(incoming([(SESSION + "s", "a", 1.0, None), (SESSION + "s", "b", 11.0, None)]))

    erasing = store.ingest(Incoming(merges=[Merge(session_id="s", user_id=NOBODY, timestamp=10.0)]))

    assert erasing.erased == 1
    assert stored(store) == [(SESSION + "s", "b", 11.0, None)]


@pytest.mark.parametrize("told", ["by merges", "by the service", "in turn"])
def test_of_a_session_of_several_users_each_has_the_own_events(told: str, tmp_path: Path) -> None:
    """A shared device: until 10 ann's, until 20 bob's, until 30 cleo's. Ann and cleo are erased."""
    store, session = Store(tmp_path), SESSION + "s"
    events = incoming([(session, "ann's", 5.0, None), (session, "bob's", 15.0, None), (session, "cleo's", 25.0, None)])
    late = incoming([(session, "ann's, late", 6.0, None), (session, "bob's, late", 16.0, None)])
    users = {"ann": 10.0, "bob": 20.0, "cleo": 30.0}
    merges = [Merge(session_id="s", user_id=user, timestamp=at) for user, at in users.items()]
    erasures = {"ann": 40.0, "cleo": 40.0}

    match told:
        case "by merges":
            store.ingest(replace(events, merges=merges, erasures=erasures))
        case "by the service":  # which replaces the merges of whom it erases
            nobodys = [one.model_copy(update={"user_id": NOBODY} if one.user_id in erasures else {}) for one in merges]
            store.ingest(replace(events, merges=nobodys, erasures=erasures))
        case "in turn":
            store.ingest(events)
            store.ingest(Incoming(merges=merges))
            store.ingest(Incoming(erasures=erasures))
    store.ingest(late)

    assert stored(store) == [("bob", "bob's", 15.0, None), ("bob", "bob's, late", 16.0, None)]
    assert "ann" not in (tmp_path / INDEX).read_text()


def test_a_clock_that_is_behind_keeps_no_erased_user_s_id(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.ingest(incoming([(SESSION + "s", "a", 5.0, None)], merges=[Merge(session_id="s", user_id="u", timestamp=31)]))

    store.ingest(Incoming(erasures={"u": 30.0}))

    assert stored(store) == []
    assert '"u"' not in (tmp_path / INDEX).read_text()


def test_merges_that_waited_for_days_are_carried_out(tmp_path: Path) -> None:
    store, day = Store(tmp_path), 86_400.0
    rows = [(SESSION + session, "a", 1.0, None) for session in ("friday", "monday")]
    merges = [
        Merge(session_id="friday", user_id="u", timestamp=20 * day),
        Merge(session_id="monday", user_id="v", timestamp=23 * day),
    ]

    store.ingest(incoming(rows, merges=merges))

    assert sorted(row[0] for row in stored(store)) == ["u", "v"]
    assert [merge.session_id for merge in store.index.merges] == ["monday"], "the other one's events are all there"


def test_a_merge_that_a_wrong_clock_dated_ahead_makes_no_other_old(tmp_path: Path) -> None:
    store = Store(tmp_path)
    ahead = Merge(session_id="s", user_id="u", timestamp=time.time() + 400 * 86_400)
    merge = Merge(session_id="t", user_id="v", timestamp=time.time())

    store.ingest(Incoming(merges=[ahead, merge]))

    assert store.index.merges == (ahead, merge)


def test_a_session_that_was_merged_twice_goes_to_each_user_with_what_it_had_then(tmp_path: Path) -> None:
    store = Store(tmp_path)
    merges = [Merge(session_id="s", user_id="v", timestamp=20.0), Merge(session_id="s", user_id="u", timestamp=10.0)]
    store.ingest(incoming([(SESSION + "s", "a", 5.0, None), (SESSION + "s", "b", 15.0, None)], merges=merges))

    assert sorted(stored(store)) == [("u", "a", 5.0, None), ("v", "b", 15.0, None)]


def test_an_event_that_user_and_session_both_had_is_there_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.ingest(incoming([("u", "a", 1.0, None), (SESSION + "s", "a", 1.0, None)]))
    store.ingest(Incoming(merges=[Merge(session_id="s", user_id="u", timestamp=2.0)]))

    assert stored(store) == [("u", "a", 1.0, None)]
    assert store.index.rows == 1


@pytest.mark.parametrize("dies_at", ["_write_durably", "write_whole"])
def test_an_ingest_that_dies_leaves_the_log_as_it_was(
    dies_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    store.ingest(incoming([("u", "a", 1.0, None)]))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(stores, dies_at, full)
        with pytest.raises(OSError, match="No space left"):
            store.ingest(incoming([("u", "b", 2.0, None), ("v", "b", 2.0, None)]))

    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert store.ingest(incoming([("u", "b", 2.0, None)])).new == 1


def test_an_index_that_was_renamed_and_not_made_durable_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    store.ingest(incoming([("u", "a", 1.0, None)]))
    before = {path.name for path in tmp_path.iterdir()}

    def fail(_: Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(files, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            store.ingest(incoming([("u", "b", 2.0, None)]))

    # After a power cut the folder may be as it was: its files are there too.
    assert before < {path.name for path in tmp_path.iterdir()}
    again = Store(tmp_path)
    assert [row[1] for row in stored(again)] == ["a", "b"]
    assert again.ingest(incoming([("u", "b", 2.0, None), ("u", "c", 3.0, None)])).new == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_what_a_killed_ingest_left_is_removed_by_the_next(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.ingest(incoming([("u", "a", 1.0, None)]))
    (tmp_path / "000002-arrived").mkdir()
    (tmp_path / "000002-arrived" / "01-000001.parquet").write_bytes(b"half")
    (tmp_path / "63-000002.parquet").write_bytes(b"half")

    Store(tmp_path).ingest(incoming([("u", "b", 2.0, None)]))

    assert [row[1] for row in stored(Store(tmp_path))] == ["a", "b"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_log_with_a_missing_file_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.ingest(incoming([("u", "a", 1.0, None)]))
    os.remove(tmp_path / str(store.index.buckets[stores.bucket_of("u")]))

    with pytest.raises(DataError, match=r"index\.json names .*, which is missing; restore the folder"):
        Store(tmp_path)


def test_an_index_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("{}{")

    with pytest.raises(DataError, match="not the index of a job's log"):
        Store(tmp_path)


ROWS = st.lists(
    st.tuples(
        st.sampled_from("uvw"),
        st.sampled_from("ab"),
        st.sampled_from([1.0, 2.0, 3.0]),
        st.sampled_from([None, "x", "y"]),
    ),
    max_size=8,
)
INGESTS = st.lists(st.tuples(ROWS, st.dictionaries(st.sampled_from("uv"), st.sampled_from([1.0, 2.0]))), max_size=5)


@settings(max_examples=40, deadline=None)
@given(INGESTS)
def test_the_log_is_that_of_a_loop(tmp_path_factory: pytest.TempPathFactory, ingests: list[Any]) -> None:
    store = Store(tmp_path_factory.mktemp("log"))
    expected: list[Row] = []
    erased: dict[str, float] = {}

    for rows, erasures in ingests:
        counted = store.ingest(incoming(rows, erasures=erasures))
        assert counted.read == counted.new + counted.duplicates + counted.of_erased
        # Of the users who are erased now nothing is left; an erasure that is no later than one before changes nothing.
        now = {user for user, moment in erasures.items() if moment > erased.get(user, 0.0)}
        erased |= {user: erasures[user] for user in now}
        expected = [row for row in expected if row[0] not in now]
        # By their ids, then by their places, of which the first to come has the say.
        of_ids: list[Row] = []
        for row in [*expected, *(row for row in rows if row[2] > erased.get(row[0], 0.0))]:
            if row[3] is None or all((row[0], row[3]) != (one[0], one[3]) for one in of_ids):
                of_ids.append(row)
        expected, first = [], {}
        for row in of_ids:
            if first.setdefault(row[:3], row) is row or None not in (row[3], first[row[:3]][3]):
                expected.append(row)

    assert sorted(stored(store), key=str) == sorted(expected, key=str)
    assert store.index.rows == len(expected)


def test_buckets_are_stable() -> None:
    # CRC-32 of the bytes, modulo 64; the check value of the algorithm's specification is 0xCBF43926.
    assert stores.bucket_of("123456789") == 0xCBF43926 % 64


def blocks_that_fail(rows: Sequence[Row]) -> Iterator[pl.DataFrame]:
    yield frame(rows)
    raise DataError("part-2.csv line 7: no item")


def test_a_source_that_cannot_be_read_to_its_end_adds_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)

    with pytest.raises(DataError, match="line 7"):
        store.ingest(Incoming(blocks=blocks_that_fail([("u", "a", 1.0, None)])))

    assert stored(store) == []
    assert list(tmp_path.iterdir()) == []


def test_the_files_that_were_read_are_remembered(tmp_path: Path) -> None:
    read: Mapping[str, str] = {"ab12": "monday.csv"}
    Store(tmp_path).ingest(incoming([("u", "a", 1.0, None)], files_read=read))

    assert Store(tmp_path).index.files_read == read


def test_an_ingest_can_be_shown_and_forgotten(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.ingest(incoming([("u", "a", 1.0, None), ("v", "a", 2.0, None)]))
    store.ingest(incoming([("u", "a", 1.0, None), ("u", "b", 3.0, None), ("w", "b", 4.0, None)], erasures={"v": 9.0}))
    assert store.ingests().to_dicts() == [
        {"ingest": 1, "events": 1, "first": 1.0, "last": 1.0, "sources": ["a file"]},
        {"ingest": 2, "events": 2, "first": 3.0, "last": 4.0, "sources": ["a file"]},
    ]

    assert store.forget(2) == 2

    reopened = Store(tmp_path)
    assert stored(reopened) == [("u", "a", 1.0, None)]
    assert (reopened.index.rows, reopened.index.ingests) == (1, 3)
    assert len(list(tmp_path.iterdir())) == 2, "the index, and a file for each bucket that has events"
    again = reopened.ingest(incoming([("u", "b", 3.0, None), ("v", "c", 5.0, None)]))
    assert (again.number, again.new, again.of_erased) == (4, 1, 1), "an erasure stays"
    with pytest.raises(DataError, match="there is no ingest 5; there were 4"):
        reopened.forget(5)
