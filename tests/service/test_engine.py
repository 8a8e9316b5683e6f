"""ONNX Runtime behind rows: padding, batches, the parity check, the choice of a provider."""

from email.message import Message
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from model.bundle import open_bundle
from model.config import BOS, FIRST_ITEM, PAD
from model.registry import resolve
from service import engine as engine_module
from service.context import unhurried
from service.engine import (
    ENCODER,
    RANKER,
    EncoderRow,
    Engine,
    RankerRow,
    State,
    choose_provider,
    encoder_inputs,
    length_buckets,
    ranker_inputs,
    refuse_two_runtimes,
)
from service.errors import EngineStopped, InferenceFailed, StartError
from service.settings import Settings
from service.telemetry import Metrics
from tests.service.bundles import MAX_LEN, NUM_ITEMS, tiny_model

NOTHING = np.empty(0, np.int64)


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Engine:
    bundle = open_bundle(resolve(tiny))
    return Engine(bundle, Settings(bundle=tiny, threads=1), Metrics())


def row(*rows: int) -> EncoderRow:
    """A history of the catalogue's items of those rows."""
    items = np.array([BOS, *(number + FIRST_ITEM for number in rows)], np.int64)
    timestamps = np.array([np.nan, *(1.7e9 + 60 * np.arange(len(rows)))])
    return EncoderRow(items, np.ones(len(items), np.float32), timestamps)


def test_rows_of_all_lengths_encode_in_a_batch_as_they_do_alone_and_as_in_torch(engine: Engine) -> None:
    rows = [row(*range(length)) for length in range(MAX_LEN + 1)]

    together = engine.run_rows(ENCODER, rows)

    model = tiny_model()
    for one, state in zip(rows, together, strict=True):
        alone = engine.run_rows(ENCODER, [one])[0]
        with torch.no_grad():
            history = (torch.from_numpy(part[None]) for part in (one.items, one.weights, one.timestamps))
            expected = model.encode(*history)
        for found in (state, alone):
            np.testing.assert_allclose(found.mean, expected.mean[0, -1], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(np.log(found.precision), expected.precision[0, -1].log(), rtol=1e-5, atol=1e-5)


def test_lists_of_different_sizes_and_filters_rank_in_a_batch_as_they_do_alone(engine: Engine) -> None:
    states = engine.run_rows(ENCODER, [row(1), row(2, 3), row()])
    seen = [np.arange(4, 4 + size) for size in (0, 3, 30)]
    blocked = [np.arange(40, 40 + size) for size in (5, 0, 700)]
    rows = [RankerRow(*fields, size) for *fields, size in zip(states, seen, blocked, (3, 500, 60), strict=True)]

    together = engine.run_rows(RANKER, rows)

    assert [len(ranking.items) for ranking in together] == [3, 500, 60]
    for one, ranking in zip(rows, together, strict=True):
        alone = engine.run_rows(RANKER, [one])[0]
        np.testing.assert_array_equal(ranking.items, alone.items)
        np.testing.assert_allclose(ranking.log_probability, alone.log_probability, rtol=1e-5, atol=1e-5)
        assert not np.isin(ranking.items, one.blocked).any()


def test_a_list_ends_where_the_catalogue_does(engine: Engine) -> None:
    state = engine.run_rows(ENCODER, [row()])[0]
    all_but_two = np.arange(FIRST_ITEM + 2, FIRST_ITEM + NUM_ITEMS)

    short, empty = engine.run_rows(
        RANKER,
        [
            RankerRow(state, NOTHING, all_but_two, 10),
            RankerRow(state, NOTHING, np.arange(FIRST_ITEM, FIRST_ITEM + NUM_ITEMS), 10),
        ],
    )

    assert sorted(short.items.tolist()) == [FIRST_ITEM, FIRST_ITEM + 1]
    assert empty.items.tolist() == []


def test_the_probabilities_of_the_whole_catalogue_add_up_to_one(engine: Engine) -> None:
    state = engine.run_rows(ENCODER, [row(5, 6)])[0]
    seen = np.array([9, 10])

    ranking = engine.run_rows(RANKER, [RankerRow(state, seen, seen, NUM_ITEMS)])[0]

    assert len(ranking.items) == NUM_ITEMS - 2
    assert np.exp(ranking.log_probability).sum() == pytest.approx(1, abs=1e-5)


def test_inputs_are_padded_on_the_right_to_a_bucket() -> None:
    inputs = encoder_inputs([row(0), row(0, 1, 2)], max_positions=51)

    assert inputs["items"].tolist() == [[BOS, 4, *[PAD] * 6], [BOS, 4, 5, 6, *[PAD] * 4]]
    assert inputs["weights"].shape == (2, 8)
    assert inputs["weights"].dtype == np.float32
    assert inputs["timestamps"].dtype == np.float64
    np.testing.assert_array_equal(
        inputs["timestamps"],
        [[np.nan, 1.7e9, *[np.nan] * 6], [np.nan, 1.7e9, 1.7e9 + 60, 1.7e9 + 120, *[np.nan] * 4]],
    )


def test_buckets_reach_exactly_the_longest_row() -> None:
    assert length_buckets(51) == [8, 16, 32, 51]
    assert length_buckets(5) == [5]
    assert length_buckets(8) == [8]


def test_a_list_is_never_longer_than_the_catalogue() -> None:
    state = State(np.zeros(2, np.float32), np.ones(2, np.float32))

    inputs = ranker_inputs([RankerRow(state, NOTHING, np.arange(5), 500)], num_items=12)

    assert inputs["k"].tolist() == [12]
    assert inputs["seen"].tolist() == [[0]]
    assert inputs["blocked"].shape == (1, 16)


@pytest.mark.anyio
async def test_a_score_that_is_no_number_is_an_error_and_not_an_answer(tiny: Path) -> None:
    engine = Engine(open_bundle(resolve(tiny)), Settings(bundle=tiny, threads=1), Metrics())
    engine.start()
    width = engine.run_rows(ENCODER, [row()])[0].mean.shape
    broken = State(np.full(width, np.nan, np.float32), np.ones(width, np.float32))

    with pytest.raises(InferenceFailed, match="no numbers"):
        await engine.rank(RankerRow(broken, NOTHING, NOTHING, 5), unhurried("test", 60))
    await engine.close()
    with pytest.raises(EngineStopped):
        await engine.encode(row(), unhurried("test", 60))


# ---- parity ----------------------------------------------------------------------------------------------


# ---- provider --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "available", "chosen"),
    [
        ("auto", ["CPUExecutionProvider"], "CPUExecutionProvider"),
        ("auto", ["CUDAExecutionProvider", "CPUExecutionProvider"], "CUDAExecutionProvider"),
        ("cpu", ["CUDAExecutionProvider", "CPUExecutionProvider"], "CPUExecutionProvider"),
        ("cuda", ["CUDAExecutionProvider", "CPUExecutionProvider"], "CUDAExecutionProvider"),
    ],
)
def test_cuda_is_taken_where_it_is_offered_and_not_declined(asked: str, available: list[str], chosen: str) -> None:
    assert choose_provider(asked, available) == chosen  # type: ignore[arg-type]


def test_cuda_that_is_asked_for_and_not_offered_stops_the_start() -> None:
    with pytest.raises(StartError, match="install onnxruntime-gpu"):
        choose_provider("cuda", ["CPUExecutionProvider"])


def test_two_onnx_runtimes_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(*names: str) -> None:
        distributions = []
        for name in names:
            metadata = Message()
            metadata["Name"] = name
            distributions.append(SimpleNamespace(metadata=metadata))
        monkeypatch.setattr(engine_module.importlib.metadata, "distributions", lambda: distributions)

    installed("onnxruntime", "numpy")
    refuse_two_runtimes()
    installed("onnxruntime", "onnxruntime-gpu")
    with pytest.raises(StartError, match="both installed"):
        refuse_two_runtimes()
