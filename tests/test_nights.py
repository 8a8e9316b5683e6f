"""A day and a night with everything running: the service takes events, the job learns them, the service goes on with
the new model."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import redis

from model.bundle import open_bundle
from tests.service.serving import Server, serving
from tests.service.valkey import valkey as valkey
from tests.service.valkey import valkey_url as valkey_url
from tests.training.retrain.test_job import DAY_S, NUM_ITEMS, SMALL, walks
from tests.training.retrain.test_sources import all_outbox_keys
from tests.training.test_pipeline import Recorder
from training.config import load_config
from training.retrain.config import JobConfig
from training.retrain.job import retrain
from training.retrain.run import Run
from training.retrain.sources import GROUP, Outbox
from training.retrain.store import NUM_BUCKETS, Store

FRESH = "an item that nobody trained"
OVERRIDES = [
    *SMALL,
    "retrain={warm_epochs: 8, judged_events: 300, limits: {min_events: 200, max_new_user_share: 1.0, max_psi: 5.0}}",
    "retrain.gate.margin=0.99",
]


def night(folder: Path, url: str) -> Run:
    with Outbox(url) as outbox:
        config = load_config(None, [f"data.path={folder / 'in'}", *OVERRIDES], JobConfig)
        return retrain(config, folder / "work", folder / "registry", outbox, Recorder(), ["bft-train", "retrain"])


def walk(generator: np.random.Generator) -> list[str]:
    """Twelve steps around the ring of items, over the fresh one, which stands between the last and the first by now.

    Some steps stray, so that one epoch does not learn all that can be learned.
    """
    ring = [*(f"item {number}" for number in range(NUM_ITEMS)), FRESH]
    start = int(generator.integers(NUM_ITEMS - 10, NUM_ITEMS))
    strays = iter(generator.permutation(ring[12 : NUM_ITEMS - 10]).tolist())
    steps = [ring[(start + step) % len(ring)] for step in range(12)]
    return [next(strays) if item != FRESH and generator.random() < 0.25 else item for item in steps]


def events(user_id: str, item_ids: list[str], begin: float) -> list[dict[str, Any]]:
    return [
        {"user_id": user_id, "item_id": item_id, "timestamp": begin + 60 * step, "event_id": f"{user_id} {step}"}
        for step, item_id in enumerate(item_ids)
    ]


def listed(server: Server, *item_ids: str) -> list[str]:
    answer = server.recommend(history=[{"item_id": item_id} for item_id in item_ids], num_results=5)
    return [item["item_id"] for item in answer["items"]]


@pytest.mark.timeout(600)
def test_a_click_on_an_unknown_item_is_learned_overnight_and_an_erased_user_is_not(
    valkey_url: str, tmp_path: Path
) -> None:
    yesterday = time.time() - DAY_S
    walks(tmp_path / "in", "before.csv", yesterday / DAY_S - 20, 300, NUM_ITEMS, seed=1)
    first = night(tmp_path, valkey_url)
    assert first.outcome == "published", first.reason
    generator = np.random.default_rng(2)

    with serving(tmp_path / "registry", tmp_path / "service.log", REDIS_URL=valkey_url, REGISTRY_POLL_S=0.1) as server:
        # The day.
        for user in range(150):
            server.append(*events(f"walker {user}", walk(generator), yesterday + 600 * user))
        server.append(*events("curious", ["item 27", "item 28", "item 29", FRESH], yesterday))
        server.append(*events("gone", ["item 3", "what only this user had"], yesterday))
        assert server.client.delete("/v1/users/gone").status_code == 200
        # The service holds nothing of one whom the first model has learned from a file.
        assert server.client.delete("/v1/users/user%207").json() == {"user_id": "user 7", "erased": False}
        before = server.recommend(user_id="curious", num_results=5)
        assert before["missing_item_ids"] == []
        assert FRESH not in listed(server, "item 28", "item 29")

        # The night.
        second = night(tmp_path, valkey_url)
        assert second.outcome == "published", second.reason
        while server.recommend(history=[], num_results=1)["model"]["version"] != second.bundle:
            time.sleep(0.05)

        # The day after.
        assert FRESH in listed(server, "item 28", "item 29")
        after = server.recommend(user_id="curious", num_results=NUM_ITEMS + 1)
        assert after["num_events"] == 4
        assert FRESH not in [item["item_id"] for item in after["items"]]
        assert after["items"][0]["item_id"] == "item 0"
        seen = server.recommend(user_id="curious", num_results=NUM_ITEMS + 1, exclude_seen=False)
        assert FRESH in [item["item_id"] for item in seen["items"]]

    log = Store(tmp_path / "work" / "log")
    stored = pl.concat([log.bucket(number) for number in range(NUM_BUCKETS)])
    assert stored.filter(pl.col("user_id").is_in(["gone", "user 7"])).is_empty()
    assert "gone" not in (tmp_path / "work" / "log" / "index.json").read_text()
    bundle = open_bundle(tmp_path / "registry" / str(second.bundle))
    assert bundle.items.number("what only this user had") is None
    assert bundle.items.training_counts.sum() == len(stored) == 299 * 12 + 150 * 12 + 4
    with redis.Redis.from_url(valkey_url) as client:
        streams = [key for key in all_outbox_keys() if client.exists(key)]
        assert streams
        assert all(client.xlen(key) == 0 and client.xpending(key, GROUP)["pending"] == 0 for key in streams)
