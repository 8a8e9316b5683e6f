"""Where events come from: each file once, and the service's own outbox, which is emptied only by what is stored."""

import asyncio
import itertools
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import redis

from model.config import UNKNOWN_BASE
from service.states import Event, RedisStore, StoreLimits, Subject
from service.states.scripts import all_outbox_keys
from tests.service.valkey import valkey, valkey_cluster, valkey_cluster_url, valkey_url
from training.events import DataConfig
from training.retrain import sources
from training.retrain.config import JobConfig
from training.retrain.job import take_in
from training.retrain.run import Run
from training.retrain.sources import Outbox, new_files, outbox_stream
from training.retrain.store import EVENT_SCHEMA, NUM_BUCKETS, SESSION, Store
from training.tables import DataError

__all__ = ["valkey", "valkey_cluster", "valkey_cluster_url", "valkey_url"]

USER = Subject("user", "u")
SESSION_S = Subject("session", "s")


def rows_of(store: Store) -> list[tuple[Any, ...]]:
    events = [store.bucket(number) for number in range(NUM_BUCKETS)]
    columns = ("user_id", "item_id", "timestamp", "weight", "event_id", "source")
    return sorted(row for part in events for row in part.select(columns).rows())


# Files


def write(path: Path, rows: str) -> Path:
    path.write_text("user_id,item_id,timestamp\n" + rows)
    return path


def test_a_file_is_read_once_under_whatever_name(tmp_path: Path) -> None:
    folder, store = tmp_path / "in", Store(tmp_path / "log")
    folder.mkdir()
    write(folder / "monday.csv", "u,a,1\nu,b,2\n")
    first = new_files(DataConfig(path=folder), store.index.files_read, tmp_path / "rejects")
    store.ingest(first.incoming)

    write(folder / "again.csv", "u,a,1\nu,b,2\n")
    write(folder / "tuesday.csv", "u,b,2\nv,a,3\n")
    write(folder / "wednesday.csv", "u,b,2\nv,a,3\n")
    second = new_files(DataConfig(path=folder), store.index.files_read, tmp_path / "rejects")
    ingest = store.ingest(second.incoming)

    assert first.repeated == ()
    assert second.repeated == ("again.csv", "monday.csv", "wednesday.csv")
    assert (ingest.read, ingest.new, ingest.duplicates) == (2, 1, 1)
    assert rows_of(store) == [
        ("u", "a", 1.0, 1.0, None, "monday.csv"),
        ("u", "b", 2.0, 1.0, None, "monday.csv"),
        ("v", "a", 3.0, 1.0, None, "tuesday.csv"),
    ]
    assert sorted(store.index.files_read.values()) == ["monday.csv", "tuesday.csv"]


def test_an_empty_folder_has_nothing_new(tmp_path: Path) -> None:
    (tmp_path / "_SUCCESS").touch()

    assert list(new_files(DataConfig(path=tmp_path), {}, tmp_path / "rejects").incoming.blocks) == []


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        new_files(DataConfig(path=tmp_path / "in"), {}, tmp_path / "rejects")


def test_bad_rows_are_set_aside_by_file(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "monday.csv", "u,a,1\nu,,2\n")
    config = DataConfig(path=tmp_path / "in", max_bad_share=0.5)

    found = new_files(config, {}, tmp_path / "rejects")

    assert [len(block) for block in found.incoming.blocks] == [1]
    (kept,) = (tmp_path / "rejects").glob("monday.csv-*.jsonl")
    rejected = json.loads(kept.read_text())
    assert (rejected["line"], rejected["field"]) == (3, "item_id")


def test_a_file_without_times_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user_id,item_id,when\nu,a,1\n")

    found = new_files(DataConfig(path=tmp_path / "log.csv"), {}, tmp_path / "rejects")

    with pytest.raises(DataError, match=r"has no timestamps.*data\.columns\.timestamp"):
        list(found.incoming.blocks)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    found = new_files(DataConfig(path=write(tmp_path / "log.csv", "u,a,1\n")), {}, tmp_path / "rejects")
    write(tmp_path / "log.csv", "u,a,1\nu,b,2\n")

    with pytest.raises(DataError, match="changed while it was read"):
        list(found.incoming.blocks)


# The outbox


def event(item_id: str, time_s: float, **fields: Any) -> Event:
    return Event(
        item_number=UNKNOWN_BASE + ord(item_id),
        item_id=item_id,
        timestamp_ms=round(time_s * 1000),
        weight=fields.pop("weight", 1.0),
        identity=f"{item_id}{time_s:07}"[:8].encode(),
        undated=False,
        **fields,
    )


def serve(url: str, cluster: bool, *calls: Callable[[RedisStore], Awaitable[Any]], now_s: float = 1000.0) -> None:
    """What a service does to its store."""

    async def run() -> None:
        store = RedisStore(
            url,
            lineage="catalogue",
            limits=StoreLimits(max_len=50),
            timeout_ms=5000,
            cluster=cluster,
            clock=lambda: round(now_s * 1000),
        )
        try:
            for call in calls:
                await call(store)
        finally:
            await store.close()

    asyncio.run(run())


def emptied_into(store: Store, url: str, cluster: bool = False) -> list[tuple[int, int, int]]:
    """Move all of the outbox into the log; returns read, new and erased of each ingest."""
    counts = []
    with Outbox(url, cluster) as outbox:
        while received := outbox.receive(1000):
            ingest = store.ingest(received.incoming)
            counts.append((ingest.read, ingest.new, ingest.erased))
            outbox.acknowledge(received)
    return counts


@pytest.fixture(params=["plain", "cluster"])
def server(request: pytest.FixtureRequest) -> tuple[str, bool]:
    cluster = request.param == "cluster"
    return request.getfixturevalue("valkey_cluster_url" if cluster else "valkey_url"), cluster


def test_the_service_s_events_come_out_of_the_outbox_and_leave_it(server: tuple[str, bool], tmp_path: Path) -> None:
    url, cluster = server
    store = Store(tmp_path)
    serve(
        url,
        cluster,
        lambda states: states.append(USER, [event("a", 5.25, event_id="x"), event("b", 6.0, weight=0.0)]),
        lambda states: states.append(SESSION_S, [event("c", 7.0, type="view")]),
    )

    assert emptied_into(store, url, cluster) == [(3, 3, 0)]
    assert rows_of(store) == [
        (SESSION + "s", "c", 7.0, 1.0, None, "outbox"),
        ("u", "a", 5.25, 1.0, "x", "outbox"),
        ("u", "b", 6.0, 0.0, None, "outbox"),
    ]
    assert emptied_into(store, url, cluster) == []
    with redis.RedisCluster.from_url(url) if cluster else redis.Redis.from_url(url) as client:
        assert sum(client.xlen(key) for key in all_outbox_keys()) == 0
        assert all(
            client.xpending(key, sources.GROUP)["pending"] == 0 for key in all_outbox_keys() if client.exists(key)
        )


def test_what_was_received_and_not_acknowledged_comes_again_and_is_stored_once(valkey_url: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    serve(valkey_url, False, lambda states: states.append(USER, [event("a", 5.0), event("b", 6.0)]))
    with Outbox(valkey_url) as outbox:
        received = outbox.receive(1)
        assert received is not None
        store.ingest(received.incoming)  # and is killed before it acknowledges

    assert emptied_into(store, valkey_url) == [(2, 1, 0)]
    assert [row[1] for row in rows_of(store)] == ["a", "b"]


def test_a_merge_and_an_erasure_are_honoured(valkey_url: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    serve(
        valkey_url,
        False,
        lambda states: states.append(SESSION_S, [event("c", 7.0)]),
        lambda states: states.absorb("u", "s", [event("c", 7.0)], []),
        lambda states: states.append(Subject("user", "forget me"), [event("a", 5.0)]),
    )
    emptied_into(store, valkey_url)
    assert [row[:2] for row in rows_of(store)] == [("forget me", "a"), ("u", "c")]

    serve(valkey_url, False, lambda states: states.erase("forget me"))

    assert emptied_into(store, valkey_url) == [(0, 0, 1)]
    assert [row[:2] for row in rows_of(store)] == [("u", "c")]
    assert emptied_into(store, valkey_url) == []


def test_a_session_that_was_merged_into_an_erased_user_is_forgotten_though_the_merge_was_never_read(
    valkey_url: str, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    serve(valkey_url, False, lambda states: states.append(SESSION_S, [event("c", 7.0)]))
    emptied_into(store, valkey_url)
    assert [row[1] for row in rows_of(store)] == ["c"]

    serve(
        valkey_url,
        False,
        lambda states: states.absorb("u", "s", [event("c", 7.0)], []),
        lambda states: states.erase("u"),
    )

    assert emptied_into(store, valkey_url) == [(0, 0, 1)]
    assert rows_of(store) == []


def test_an_entry_that_says_nothing_is_told_and_taken_off(valkey_url: str, tmp_path: Path) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        client.xadd(outbox_stream(3), {"kind": "event", "user_id": "u", "timestamp_ms": "1000", "weight": "1"})
        client.xadd(outbox_stream(3), {"kind": "riddle"})
        with Outbox(valkey_url) as outbox:
            received = outbox.receive(10)
            assert received is not None
            outbox.acknowledge(received)
        assert client.xlen(outbox_stream(3)) == 0

    assert [one["problem"] for one in received.unusable] == [
        "lacks 'item_id'",
        "kind is 'riddle'; known: event, merge, erase",
    ]
    assert received.unusable[0]["stream"] == outbox_stream(3)


def test_a_server_whose_memory_is_full_is_emptied(valkey_url: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    serve(valkey_url, False, lambda states: states.append(USER, [event("a", 5.0)]))
    emptied_into(store, valkey_url)  # an earlier night has made the group
    serve(valkey_url, False, lambda states: states.append(USER, [event("b", 6.0)]))
    with redis.Redis.from_url(valkey_url) as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("anything", 1)
        try:
            assert emptied_into(store, valkey_url) == [(1, 1, 0)]
        finally:
            client.config_set("maxmemory", 0)


def test_a_server_whose_memory_was_full_from_the_start_is_emptied(server: tuple[str, bool], tmp_path: Path) -> None:
    url, cluster = server
    store = Store(tmp_path)
    serve(url, cluster, lambda states: states.append(USER, [event("a", 5.0), event("b", 6.0)]))
    with redis.Redis.from_url(url) as client:
        client.config_set("maxmemory", 1)
        try:
            with Outbox(url, cluster) as outbox:
                for item_id in "ab":
                    received = outbox.receive(1)
                    assert received is not None
                    assert pl.concat(received.incoming.blocks)["item_id"].to_list() == [item_id]
                    store.ingest(received.incoming)
                    outbox.acknowledge(received)
                assert outbox.receive(1) is None
        finally:
            client.config_set("maxmemory", 0)
    serve(url, cluster, lambda states: states.append(USER, [event("c", 7.0)]))

    assert emptied_into(store, url, cluster) == [(1, 1, 0)]


def test_what_stands_before_an_erasure_is_forgotten_whatever_its_date(valkey_url: str, tmp_path: Path) -> None:
    store, stream = Store(tmp_path), outbox_stream(7)
    fields = {"kind": "event", "user_id": "u", "weight": "1"}
    ahead, erase, later = (
        fields | {"item_id": "ahead", "timestamp_ms": "90000"},
        {"kind": "erase", "user_id": "u", "timestamp_ms": "50000"},
        fields | {"item_id": "later", "timestamp_ms": "60000"},
    )
    # A service that died before it took the user's events off the stream.
    with redis.Redis.from_url(valkey_url) as client:
        for entry in (ahead, fields | ahead | {"user_id": "v"}, erase, later):
            client.xadd(stream, entry)

    assert emptied_into(store, valkey_url) == [(3, 2, 0)]
    assert [row[:2] for row in rows_of(store)] == [("u", "later"), ("v", "ahead")]


def test_the_night_ends_while_the_service_takes_events(valkey_url: str, tmp_path: Path) -> None:
    done, store, night = threading.Event(), Store(tmp_path / "log"), Run("now", JobConfig())

    def click() -> None:
        fields = {"kind": "event", "user_id": "u", "timestamp_ms": "1000", "weight": "1"}
        with redis.Redis.from_url(valkey_url) as client:
            for number in itertools.count():
                if done.is_set():
                    break
                client.xadd(outbox_stream(number % 256), fields | {"item_id": f"i{number}"})

    clicking = threading.Thread(target=click)
    clicking.start()
    try:
        with Outbox(valkey_url) as outbox:
            while not (store.index.rows or done.wait(0.01)):
                take_in(store, JobConfig(), outbox, tmp_path, night)
    finally:
        done.set()
        clicking.join()

    assert len(night.ingests) <= 2, "one, or a first that was too early"
    with redis.Redis.from_url(valkey_url) as client:
        client.flushall()


def test_a_file_of_a_day_on_which_nothing_happened_is_read_and_adds_nothing(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "monday.csv", "u,a,1\n")
    write(tmp_path / "in" / "tuesday.csv", "")
    found = new_files(DataConfig(path=tmp_path / "in"), {}, tmp_path / "rejects")

    ingest = Store(tmp_path / "log").ingest(found.incoming)

    assert (ingest.read, ingest.new) == (1, 1)
    assert sorted(found.incoming.files_read.values()) == ["monday.csv", "tuesday.csv"]


def test_the_outbox_is_emptied_although_a_file_cannot_be_read(valkey_url: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "README.md").write_text("what lies here")
    store, settings = Store(tmp_path / "log"), JobConfig(data=DataConfig(path=tmp_path / "in"))
    serve(valkey_url, False, lambda states: states.append(USER, [event("a", 5.0)]))

    with Outbox(valkey_url) as outbox, pytest.raises(DataError, match=r"README\.md"):
        take_in(store, settings, outbox, tmp_path, Run("now", settings))

    assert [row[1] for row in rows_of(Store(tmp_path / "log"))] == ["a"]


@pytest.mark.parametrize("cluster", [False, True])
def test_a_server_that_is_down_is_named_without_its_password(cluster: bool) -> None:
    told = r"^redis://127\.0\.0\.1:1/0: the outbox cannot be read.*run the job again"
    with (
        pytest.raises(DataError, match=told) as raised,
        Outbox("redis://me:secret@127.0.0.1:1/0", cluster) as outbox,
    ):
        outbox.receive(1)
    assert "secret" not in str(raised.value)


def test_the_streams_are_the_service_s() -> None:
    assert [outbox_stream(number) for number in range(sources.NUM_STREAMS)] == all_outbox_keys()


def test_what_is_read_has_the_log_s_columns(tmp_path: Path) -> None:
    found = new_files(DataConfig(path=write(tmp_path / "log.csv", "u,a,1\n")), {}, tmp_path / "rejects")

    assert pl.concat(found.incoming.blocks).columns == EVENT_SCHEMA.names()
