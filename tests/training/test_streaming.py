"""A streamed log is the log in memory: the same windows, users, counts and facts, whatever the blocks and shards."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from model.build import build_model
from model.bundle import open_bundle
from tests.training.histories import SMALL
from training import events, pipeline, streaming
from training.batches import TrainingWindows, Windows, collate
from training.catalog import Catalog
from training.config import OptimizerConfig, RunConfig, load_config
from training.events import DataConfig, read_events
from training.loop import fit
from training.progress import SilentReporter
from training.splits import SplitName, Targets, make_split, training_counts
from training.streaming import StreamedLog, stream_log
from training.tables import DataError

MAX_LEN = 6


@pytest.fixture(autouse=True)
def _many_small_blocks_and_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users are spread over blocks, rounds and files, and the shards are many."""
    monkeypatch.setattr(events, "PARQUET_BLOCK_ROWS", 70)
    monkeypatch.setattr(streaming, "SCATTER_ROWS", 150)
    monkeypatch.setattr(streaming, "SHARD_BYTES", 1000)


def write_shards(folder: Path, num_users: int = 90, seed: int = 0) -> Path:
    """Two Parquet files of users with awkward ids, unequal weights, and events in the same second."""
    generator = np.random.default_rng(seed)
    users = ["007", "7", "a b", 'ü,"quoted"', *(f"user {number}" for number in range(num_users - 4))]
    lengths = {user: int(generator.integers(1, 25)) for user in users}
    rows = [
        {
            "user_id": user,
            "item_id": f"item/{int(generator.integers(40)):02}",
            "timestamp": float(generator.integers(10)),
            "weight": float(generator.choice([0.0, 0.5, 1.0])),
        }
        for user in users
        for _ in range(lengths[user])
    ]
    frame = pl.DataFrame(rows).sample(fraction=1.0, shuffle=True, seed=seed)
    folder.mkdir()
    half = len(frame) // 2
    frame[:half].write_parquet(folder / "part-0.parquet", row_group_size=100)
    frame[half:].write_parquet(folder / "part-1.parquet")
    return folder


def config_of(path: Path, **changed: Any) -> DataConfig:
    return DataConfig.model_validate({"path": path, "columns": {"weight": "weight"}, **changed})


@pytest.fixture
def log(tmp_path: Path) -> DataConfig:
    return config_of(write_shards(tmp_path / "log"))


def told(windows: Windows, row: int, catalog: Catalog) -> tuple[Any, ...]:
    """A window as the model is told of it, with the items' own ids."""
    batch = collate(windows, torch.tensor([row]))
    return (
        tuple(catalog.ids(batch.items[0, 1:].numpy())),
        tuple(batch.weights[0].tolist()),
        tuple(batch.timestamps[0, 1:].tolist()),
        tuple(batch.positions.tolist()),
        tuple(catalog.ids(batch.targets.numpy())),
    )


def told_in_an_epoch(train: Any, catalog: Catalog, seed: int = 0) -> list[tuple[Any, ...]]:
    windows = TrainingWindows(train, MAX_LEN)
    epoch = windows.epoch(8, torch.Generator().manual_seed(seed))
    return [told(piece, row, catalog) for piece, rows in epoch for row in rows.tolist()]


def judged(targets: Targets, catalog: Catalog) -> list[tuple[Any, ...]]:
    history = targets.history
    return [
        (
            user_id,
            tuple(catalog.ids(history.items[begin:end])),
            tuple(history.weights[begin:end].tolist()),
            tuple(history.timestamps[begin:end].tolist()),
            target,
        )
        for user_id, begin, end, target in zip(
            history.user_ids, history.offsets[:-1], history.offsets[1:], catalog.ids(targets.target), strict=True
        )
    ]


@pytest.mark.parametrize("name", ["leave_one_out", "users"])
def test_streaming_shows_every_window_of_the_log_in_memory_once(
    name: SplitName, log: DataConfig, tmp_path: Path
) -> None:
    in_memory = read_events(log)
    catalog = Catalog.from_ids(in_memory.events["item_id"])
    split = make_split(in_memory, catalog, name)

    streamed = stream_log(log, name, tmp_path / "shards")

    assert streamed.split.train.num_pieces > 5
    shown = told_in_an_epoch(streamed.split.train, streamed.catalog)
    assert Counter(shown) == Counter(told_in_an_epoch(split.train, catalog))
    assert judged(streamed.split.validation, streamed.catalog) == judged(split.validation, catalog)
    assert judged(streamed.split.test, streamed.catalog) == judged(split.test, catalog)
    assert streamed.split.summary() == split.summary()
    assert streamed.facts == in_memory.facts()
    counts = dict(zip(catalog.item_ids, training_counts(split.train, len(catalog)), strict=True))
    assert dict(zip(streamed.catalog.item_ids, streamed.catalog.training_counts, strict=True)) == counts


def test_the_catalogue_holds_the_items_in_the_order_of_reading(log: DataConfig, tmp_path: Path) -> None:
    read = pl.concat([pl.read_parquet(file) for file in sorted(log.path.iterdir())])

    streamed = stream_log(log, "leave_one_out", tmp_path / "shards")

    assert streamed.catalog.item_ids.to_list() == read["item_id"].unique(maintain_order=True).to_list()
    assert streamed.catalog.lineage == Catalog.from_ids(read["item_id"]).lineage


def test_by_a_catalogue_that_is_given_other_items_are_unknown_and_no_targets(log: DataConfig, tmp_path: Path) -> None:
    known = Catalog.from_ids(f"item/{number:02}" for number in range(20))

    streamed = stream_log(log, "leave_one_out", tmp_path / "shards", lambda _: known)

    split = make_split(read_events(log), known, "leave_one_out")
    assert streamed.catalog.item_ids.to_list() == known.item_ids.to_list()
    assert streamed.split.test.history.user_ids == split.test.history.user_ids
    assert streamed.split.test.target.tolist() == split.test.target.tolist()


# Users to judge by


def with_most(log: DataConfig, most: int, folder: Path) -> StreamedLog:
    return stream_log(log.model_copy(update={"max_evaluated_users": most}), "leave_one_out", folder)


def test_a_bounded_number_of_users_is_judged_the_same_ones_whatever_the_shards(
    log: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = with_most(log, 1000, tmp_path / "shards").split
    ten = with_most(log, 10, tmp_path / "shards").split
    monkeypatch.setattr(streaming, "SHARD_BYTES", 10**6)
    of_one_shard = with_most(log, 10, tmp_path / "shards").split

    assert of_one_shard.train.num_pieces == 1 < ten.train.num_pieces
    assert len(every.test) > 10
    chosen = ten.test.history.user_ids
    assert len(chosen) == 10
    assert set(chosen) < set(every.test.history.user_ids)
    assert chosen == sorted(chosen)
    assert chosen == ten.validation.history.user_ids == of_one_shard.test.history.user_ids
    assert len(ten.train) == len(every.train), "training is not bounded"


# Order


def test_the_seed_decides_the_order_of_shards_and_windows(log: DataConfig, tmp_path: Path) -> None:
    streamed = stream_log(log, "leave_one_out", tmp_path / "shards")

    def order(seed: int) -> list[tuple[Any, ...]]:
        return told_in_an_epoch(streamed.split.train, streamed.catalog, seed)

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_progress_knows_how_many_batches_there_are(log: DataConfig, tmp_path: Path) -> None:
    windows = TrainingWindows(stream_log(log, "leave_one_out", tmp_path / "shards").split.train, MAX_LEN)

    batches = list(windows.epoch(8, torch.Generator().manual_seed(0)))

    assert windows.num_batches(8) == len(batches)
    assert all(len(rows) > 0 for _, rows in batches)


def test_a_resumed_streamed_run_takes_the_steps_of_an_unbroken_one(log: DataConfig, tmp_path: Path) -> None:
    streamed = stream_log(log, "leave_one_out", tmp_path / "shards")

    def losses(epochs: int, checkpoint: Path | None = None) -> list[float]:
        torch.manual_seed(0)
        counts = torch.from_numpy(streamed.catalog.training_counts)
        model = build_model(SMALL.model_copy(update={"dropout": 0.2}), counts)
        config = OptimizerConfig(epochs=epochs, batch_size=32, loss="sampled", num_negatives=10)
        return [row["loss"] for row in fit(model, streamed.split, "next_item", config, checkpoint).curve]

    unbroken = losses(3)
    losses(1, tmp_path / "checkpoint.pt")

    assert losses(3, tmp_path / "checkpoint.pt") == unbroken


# Bad rows


def test_bad_rows_are_set_aside_as_in_memory_and_too_many_stop_the_run(log: DataConfig, tmp_path: Path) -> None:
    bad = pl.DataFrame({"user_id": ["u"] * 9, "item_id": [""] * 9, "timestamp": [1.0] * 9, "weight": [1.0] * 9})
    bad.write_parquet(log.path / "part-2.parquet")
    rejects = [tmp_path / "streamed.jsonl", tmp_path / "in_memory.jsonl"]
    allowed = log.model_copy(update={"max_bad_share": 0.02})

    streamed = stream_log(allowed.model_copy(update={"rejects": rejects[0]}), "leave_one_out", tmp_path / "shards")
    read_events(allowed.model_copy(update={"rejects": rejects[1]}))

    assert streamed.facts.rows_rejected == 9
    assert rejects[0].read_text() == rejects[1].read_text() != ""
    with pytest.raises(DataError, match=r"9 of \d+ rows are bad .* more than max_bad_share"):
        stream_log(log.model_copy(update={"max_bad_share": 0.001}), "leave_one_out", tmp_path / "shards")


# The whole run


def run_config(log: DataConfig, *overrides: str) -> RunConfig:
    settings = ["model={max_len: 6, width: 8, num_layers: 1, ffn_width: 8}", "training={epochs: 2, batch_size: 32}"]
    data = [f"data.path={log.path}", "data.columns.weight=weight", "data.streaming=on"]
    return load_config(None, [*data, *settings, *overrides])


def test_a_streamed_run_publishes_a_bundle_that_judges_the_same_users_alike(log: DataConfig, tmp_path: Path) -> None:
    config = run_config(log, "data.max_evaluated_users=30")

    trained = pipeline.train(config, tmp_path / "out", SilentReporter(), ["bft-train"])

    assert trained.record["test"]["users"] == trained.record["data"]["validation_users"] == 30
    assert trained.record["event"] == "next_item", "a third of the items were had before"
    assert not (tmp_path / "out" / pipeline.SHARDS).exists()
    bundle = open_bundle(trained.bundle)
    assert bundle.items.training_counts.sum() > 0
    assert json.loads((tmp_path / "out" / "record.json").read_text())["config"]["data"]["streaming"] is True
    figures = pipeline.evaluate_bundle(bundle, config.data)
    assert figures["users"] == 30
    assert figures["ndcg@10"] == pytest.approx(trained.record["test"]["ndcg@10"], abs=1e-6)


def test_a_streamed_log_too_small_for_its_split_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("user_id,item_id,timestamp\n" + "".join(f"u{row},i,1\n" for row in range(5)))
    config = load_config(None, [f"data.path={path}", "data.streaming=on"])

    with pytest.raises(DataError, match="leaves nothing for validation"):
        pipeline.prepare(config, tmp_path / "shards")
