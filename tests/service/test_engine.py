"""ONNX Runtime behind rows: padding, batches, the parity check, the choice of a provider."""

from email.message import Message
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from model.bundle import ENCODER, EXPLAINER, RANKER, STEP, BundleError, open_bundle
from model.config import BOS, FIRST_ITEM, PAD
from model.registry import resolve
from service import engine as engine_module
from service.context import unhurried
from service.engine import (
    EncoderRow,
    Engine,
    Order,
    RankerRow,
    StepRow,
    choose_provider,
    encoder_inputs,
    length_buckets,
    ranker_inputs,
    refuse_two_runtimes,
    step_inputs,
)
from service.errors import EngineStopped, InferenceFailed, StartError
from service.filtered import Cache, State
from service.settings import Settings
from service.telemetry import Metrics
from tests.service.bundles import MAX_LEN, NUM_ITEMS, tiny_model, variant
from tests.tolerance import FLOAT32_TOL, assert_close, assert_precision_close

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


def test_rows_of_all_lengths_are_explained_in_a_batch_as_they_are_alone_and_as_in_torch(engine: Engine) -> None:
    rows = [row(*range(length)) for length in range(MAX_LEN + 1)]

    together = engine.run_rows(EXPLAINER, rows)

    model = tiny_model()
    for one, heard in zip(rows, together, strict=True):
        alone = engine.run_rows(EXPLAINER, [one])[0]
        with torch.no_grad():
            history = (torch.from_numpy(part[None]) for part in (one.items, one.weights, one.timestamps))
            expected = model.reasons(*history)
        for found in (heard, alone):
            assert_close(found.kriging_weight, expected.kriging_weight[0], FLOAT32_TOL, "kriging weight")
            assert_precision_close(found.precision, expected.precision[0], FLOAT32_TOL)


def cut(whole: EncoderRow, start: int, end: int) -> EncoderRow:
    """Positions of a row."""
    return EncoderRow(whole.items[start:end], whole.weights[start:end], whole.timestamps[start:end])


def assert_same(found: State, expected: State) -> None:
    assert_close(found.mean, expected.mean, FLOAT32_TOL, "mean")
    assert_precision_close(found.precision, expected.precision, FLOAT32_TOL)
    assert (found.cache is None) == (expected.cache is None)
    if found.cache is not None and expected.cache is not None:
        for name in ("key", "value", "log_precision"):
            assert_close(getattr(found.cache, name), getattr(expected.cache, name), FLOAT32_TOL, name)
        np.testing.assert_array_equal(found.cache.timestamps, expected.cache.timestamps)


def steps_of_all_lengths(engine: Engine) -> tuple[list[StepRow], list[EncoderRow]]:
    """Every way to cut histories into a cached beginning and at least one further event; and the whole histories."""
    steps, wholes = [], []
    for length in range(1, MAX_LEN + 1):
        whole = row(*range(length, 2 * length))
        for num_cached in range(1, length + 1):
            cache = engine.run_rows(ENCODER, [cut(whole, 0, num_cached)])[0].cache
            assert cache is not None
            rest = cut(whole, num_cached, length + 1)
            steps.append(StepRow(cache, rest.items, rest.weights, rest.timestamps))
            wholes.append(whole)
    return steps, wholes


def test_steps_of_all_lengths_in_one_batch_end_where_the_whole_histories_do(engine: Engine) -> None:
    steps, wholes = steps_of_all_lengths(engine)

    together = engine.run_rows(STEP, steps)

    assert len(together) == MAX_LEN * (MAX_LEN + 1) // 2
    for step, whole, state in zip(steps, wholes, together, strict=True):
        assert_same(state, engine.run_rows(ENCODER, [whole])[0])
        assert_same(state, engine.run_rows(STEP, [step])[0])


def test_a_cache_is_not_a_part_of_its_batch(engine: Engine) -> None:
    steps, _ = steps_of_all_lengths(engine)

    for state in (*engine.run_rows(ENCODER, [row(1)] * 32), *engine.run_rows(STEP, steps)):
        # A view would keep the arrays of the whole batch alive for as long as one user's state.
        for array in (state.cache.key, state.cache.value, state.cache.log_precision):
            assert array.base is None or array.base.nbytes == array.nbytes


def test_step_inputs_are_padded_on_the_right_to_buckets() -> None:
    def small(num_positions: int) -> Cache:
        numbers = np.arange(1, num_positions + 1, dtype=np.float32)
        per_head = numbers.reshape(1, 1, -1, 1)
        return Cache(per_head, -per_head, numbers[None] / 2, np.arange(num_positions) + 0.5)

    def step(cache: Cache, num_events: int) -> StepRow:
        events = row(*range(num_events))
        return StepRow(cache, events.items[1:], events.weights[1:], events.timestamps[1:])

    inputs = step_inputs([step(small(2), 3), step(small(9), 1)], max_positions=51)

    assert inputs["items"].tolist() == [[4, 5, 6, PAD], [4, PAD, PAD, PAD]]
    assert inputs["past_length"].tolist() == [2, 9]
    assert inputs["past_key"].shape == inputs["past_value"].shape == (2, 1, 1, 16, 1)
    assert inputs["past_key"][0, 0, 0, :, 0].tolist() == [1, 2, *[0] * 14]
    assert inputs["past_value"][1, 0, 0, :, 0].tolist() == [*range(-1, -10, -1), *[0] * 7]
    assert inputs["past_log_precision"][0].tolist() == [[0.5, 1.0, *[0] * 14]]
    np.testing.assert_array_equal(inputs["past_timestamps"][0], [0.5, 1.5, *[np.nan] * 14])
    types = {name: array.dtype for name, array in inputs.items()}
    assert {types["past_key"], types["past_value"], types["past_log_precision"]} == {np.dtype(np.float32)}
    assert (types["past_timestamps"], types["past_length"]) == (np.float64, np.int64)


def test_the_recorded_outputs_of_the_step_count_for_parity(engine: Engine, tiny: Path, tmp_path: Path) -> None:
    def changed(staging: Path) -> None:
        with np.load(staging / "golden.npz") as arrays:
            wrong = {name: array + 0.5 if name.endswith("step/out/key") else array for name, array in arrays.items()}
        np.savez(staging / "golden.npz", **wrong)

    def without(staging: Path) -> None:
        with np.load(staging / "golden.npz") as arrays:
            kept = {name: array for name, array in arrays.items() if "/step/" not in name}
        np.savez(staging / "golden.npz", **kept)

    def engine_of(change: object, folder: str) -> Engine:
        bundle = variant(tiny, tmp_path / folder, change)  # type: ignore[arg-type]
        return Engine(open_bundle(bundle), Settings(bundle=bundle, threads=1), Metrics())

    assert engine.parity_error() <= FLOAT32_TOL
    assert engine_of(changed, "changed").parity_error() > 0.01
    with pytest.raises(BundleError, match=r"golden\.npz has no case of step\.onnx"):
        engine_of(without, "without").parity_error()


def test_warming_runs_every_graph(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(open_bundle(resolve(tiny)), Settings(bundle=tiny, threads=1, max_batch_rows=4), Metrics())
    seen: set[tuple[str, tuple[int, ...], int]] = set()
    ordered: set[tuple[int, int]] = set()
    run = engine.run

    def note(graph: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        shape = feeds["mean" if graph == RANKER else "items"].shape
        seen.add((graph, shape, feeds["past_key"].shape[3] if graph == STEP else 0))
        if graph == RANKER:
            ordered.add((len(feeds["mean"]), len(feeds["order_rows"])))
        return run(graph, feeds)

    monkeypatch.setattr(engine, "run", note)
    engine.warm()

    # Nine positions in all: one or eight of them new, one to eight cached, in a bucket of eight.
    for batch in (1, 4):
        assert {(ENCODER, (batch, 8), 0), (ENCODER, (batch, 9), 0), (RANKER, (batch, 16), 0)} <= seen
        assert {(EXPLAINER, (batch, 8), 0), (EXPLAINER, (batch, 9), 0)} <= seen
        assert {(STEP, (batch, events), 8) for events in (1, 2, 4, 8)} <= seen
        assert {(batch, 0), (batch, batch)} <= ordered


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


def test_rows_of_different_orders_rank_in_a_batch_as_they_do_alone(engine: Engine) -> None:
    states = engine.run_rows(ENCODER, [row(1), row(2, 3), row(), row(4)])
    other = engine.run_rows(ENCODER, [row(*range(MAX_LEN))])[0]
    certain = np.full_like(other.precision, np.inf)
    orders = [
        Order(states[0].mean, states[0].precision, shrinkage=0.0, kappa=3.0),
        None,
        Order(other.mean, certain, shrinkage=1.0, kappa=0.0),
        Order(states[3].mean, states[3].precision, shrinkage=0.0, kappa=-3.0),
    ]
    rows = [RankerRow(state, NOTHING, NOTHING, 100, order) for state, order in zip(states, orders, strict=True)]

    together = engine.run_rows(RANKER, rows)

    for one, ranking in zip(rows, together, strict=True):
        alone = engine.run_rows(RANKER, [one])[0]
        np.testing.assert_array_equal(ranking.items, alone.items)
        np.testing.assert_allclose(ranking.log_probability, alone.log_probability, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(ranking.score_mean, alone.score_mean, rtol=1e-5, atol=1e-5)
        by_logit = engine.run_rows(RANKER, [RankerRow(one.state, NOTHING, NOTHING, 100)])[0]
        assert np.array_equal(ranking.items, by_logit.items) == (one.order is None)


def test_only_rows_that_are_ordered_otherwise_give_the_ranker_work() -> None:
    mean, precision = np.arange(3, dtype=np.float32), np.ones(3, np.float32)
    own = RankerRow(State(mean, precision), NOTHING, NOTHING, 5)
    ordered = RankerRow(State(mean, precision), NOTHING, NOTHING, 5, Order(mean + 1, precision * 2, 1.0, -0.5))

    nobody, two = (ranker_inputs(rows, num_items=12) for rows in ([own, own], [own, ordered, own, ordered]))

    names = ("order_rows", "order_mean", "order_precision", "order_shrinkage", "order_kappa")
    assert [nobody[name].shape for name in names] == [(0,), (0, 3), (0, 3), (0,), (0,)]
    assert two["order_rows"].tolist() == [1, 3]
    assert two["order_mean"].tolist() == [[1, 2, 3]] * 2
    assert two["order_precision"].tolist() == [[2, 2, 2]] * 2
    assert (two["order_shrinkage"].tolist(), two["order_kappa"].tolist()) == ([1, 1], [-0.5, -0.5])
    for inputs in (nobody, two):
        assert [inputs[name].dtype for name in names] == [np.int64, *[np.float32] * 4]


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
    assert length_buckets(50, shortest=1) == [1, 2, 4, 8, 16, 32, 50]
    assert length_buckets(2, shortest=1) == [1, 2]


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
    sound = State(np.ones(width, np.float32), np.ones(width, np.float32))
    order = Order(broken.mean, broken.precision, shrinkage=1.0, kappa=0.0)
    with pytest.raises(InferenceFailed, match="no numbers"):
        await engine.rank(RankerRow(sound, NOTHING, NOTHING, 5, order), unhurried("test", 60))
    await engine.close()
    with pytest.raises(EngineStopped):
        await engine.encode(row(), unhurried("test", 60))


@pytest.mark.anyio
async def test_a_weight_that_is_no_number_is_an_error_and_not_an_answer(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(open_bundle(resolve(tiny)), Settings(bundle=tiny, threads=1), Metrics())
    broken = {name: np.full((1, 8), np.nan, np.float32) for name in ("kriging_weight", "precision")}
    monkeypatch.setattr(engine, "run", lambda graph, feeds: broken)
    engine.start()

    with pytest.raises(InferenceFailed, match="no numbers"):
        await engine.explain(row(1), unhurried("test", 60))
    await engine.close()


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
