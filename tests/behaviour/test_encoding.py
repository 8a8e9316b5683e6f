"""What every backbone's encoder must do, with filtering and without: one suite for all (math.md, "What must hold").

What a backbone is able to do it declares, and the suite asks it: a causal one must not look ahead, another must.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn import functional as F

from model.backbone import Backbone, Reasons
from model.bundle import PARITY_TOLERANCE
from model.config import BOS, FIRST_ITEM, PAD, UNK, window_start
from model.filtering import Gaussian
from model.onnx.export import ExportedGraphs, export_graphs
from tests.behaviour.heard import assert_reasons
from tests.behaviour.instances import (
    COUNTS,
    EVERY_CASE,
    MAX_LEN,
    NUM_ITEMS,
    Case,
    Rows,
    at,
    random_rows,
    user,
    window,
)
from tests.tolerance import FLOAT32_TOL, FLOAT64_TOL, assert_close, assert_precision_close

every_case = pytest.mark.parametrize("case", EVERY_CASE)
RARE = 3
"""A `min_input_count` that leaves some items below it."""


def assert_same(found: Gaussian, expected: Gaussian, tol: float = FLOAT64_TOL) -> None:
    """Means and precisions agree; a precision may be infinite on both sides."""
    assert_close(found.mean, expected.mean, tol, "mean")
    known = torch.isfinite(expected.precision)
    assert torch.equal(torch.isfinite(found.precision), known)
    assert_precision_close(found.precision[known], expected.precision[known], tol)


def largest_change(after: Gaussian, before: Gaussian) -> float:
    """Of the means."""
    return float((after.mean - before.mean).detach().abs().max())


# --- what a state depends on --------------------------------------------------------------------------------


@every_case
def test_padding_and_batch_mates_change_no_state(case: Case) -> None:
    model = case.perturbed(torch.float64)
    rows = random_rows(2, batch=6, length=MAX_LEN - 1, dtype=torch.float64)
    lengths = rows.lengths()
    assert len(set(lengths)) >= 4

    together, final = model.encode(*rows.padded(2)), model.final_state(*rows.padded(2))

    for index, length in enumerate(lengths):
        alone = rows.row(index, length)
        assert_same(Gaussian(*(part[index : index + 1, :length] for part in together)), model.encode(*alone))
        assert_same(Gaussian(*(part[index : index + 1] for part in final)), model.final_state(*alone))
    padding = rows.padded(2).items == PAD
    assert (together.mean[padding] == 0).all()
    assert (together.precision[padding] == 0).all()


@every_case
def test_a_causal_encoder_never_looks_ahead_and_another_does(case: Case) -> None:
    model = case.perturbed(torch.float64)
    rows = random_rows(3, batch=1, length=MAX_LEN + 1, dtype=torch.float64)
    before = model.encode(*rows)

    for cut in range(1, MAX_LEN + 1):
        items, weights, timestamps = (part.clone() for part in rows)
        items[:, cut:] = FIRST_ITEM + (items[:, cut:] + 5) % NUM_ITEMS
        weights[:, cut:] *= 7
        timestamps[:, cut:] += 86_400 * cut
        after = model.encode(items, weights, timestamps)

        earlier, own = (
            [Gaussian(*(part[:, places] for part in state)) for state in (after, before)]
            for places in (slice(cut), slice(cut, None))
        )
        assert largest_change(*own) > 1e-3
        if case.causal:
            assert_same(*earlier)
        else:
            assert largest_change(*earlier) > 1e-6


@every_case
def test_every_event_of_the_window_reaches_the_final_state(case: Case) -> None:
    model = case.perturbed(torch.float64)
    rows = random_rows(4, batch=1, length=MAX_LEN + 1, dtype=torch.float64)
    before = model.final_state(*rows)

    for place in range(1, MAX_LEN + 1):
        items = rows.items.clone()
        items[:, place] = FIRST_ITEM + (items[:, place] + 5) % NUM_ITEMS
        assert largest_change(model.final_state(items, *rows[1:]), before) > 1e-6


@every_case
def test_the_order_of_events_reaches_the_final_state(case: Case) -> None:
    model = case.perturbed(torch.float64)
    ones = torch.ones(1, 4, dtype=torch.float64)
    forth, back = (torch.tensor([[BOS, *(FIRST_ITEM + n for n in order)]]) for order in ((5, 6, 7), (6, 5, 7)))

    assert largest_change(model.final_state(forth, ones), model.final_state(back, ones)) > 1e-6


@every_case
def test_no_timestamps_at_all_are_timestamps_that_no_event_has(case: Case) -> None:
    model = case.perturbed()
    items, weights, timestamps = random_rows(5, batch=3, length=MAX_LEN + 1)
    nowhere = torch.full_like(timestamps, torch.nan)

    for read in (model.encode, model.final_state):
        for told, untold in zip(read(items, weights, nowhere), read(items, weights), strict=True):
            assert torch.equal(told, untold)


@every_case
def test_an_event_s_weight_reaches_the_precision_and_without_filtering_nothing(case: Case) -> None:
    model = case.perturbed(torch.float64)
    rows = random_rows(6, batch=1, length=MAX_LEN + 1, dtype=torch.float64)
    before = model.final_state(*rows)

    for place in range(1, MAX_LEN + 1):
        weights = rows.weights.clone()
        weights[:, place] *= 9
        after = model.final_state(rows.items, weights, rows.timestamps)
        if case.filtering:
            assert (after.precision.log() - before.precision.log()).abs().max() > 1e-6
        else:
            assert torch.equal(after.mean, before.mean)
            assert (after.precision == math.inf).all()


@every_case
def test_unknown_items_and_items_below_the_minimum_count_read_alike(case: Case) -> None:
    model = case.perturbed(min_input_count=RARE)
    rows = random_rows(7, batch=1, length=5)

    def read(number: int) -> Gaussian:
        items = rows.items.clone()
        items[:, 2] = number
        return model.final_state(items, *rows[1:])

    unknown = read(UNK)
    for row, count in enumerate(COUNTS.tolist()):
        state = read(FIRST_ITEM + row)
        if count < RARE:
            assert torch.equal(state.mean, unknown.mean)
            assert torch.equal(state.precision, unknown.precision)
        else:
            assert largest_change(state, unknown) > 1e-6


# --- rows with little or nothing in them --------------------------------------------------------------------


@every_case
def test_empty_rows_and_rows_of_one_event_are_finite_forward_and_backward(case: Case) -> None:
    model = case.perturbed(dropout=0.2, attention_dropout=0.2).train()
    items = torch.tensor([[PAD, PAD, PAD], [BOS, PAD, PAD], [BOS, FIRST_ITEM + 5, PAD], [BOS, UNK, PAD]])
    timestamps = torch.full(items.shape, torch.nan, dtype=torch.float64)
    timestamps[2, 1] = 1.7e9

    every, final = (read(items, torch.ones(items.shape), timestamps) for read in (model.encode, model.final_state))
    # Nobody scores a row of padding, but what it leaves behind must not spoil the batch.
    scored = Gaussian(final.mean[1:], final.precision[1:])
    logit = model.score(scored).logit
    known = torch.isfinite(every.precision) & (every.precision > 0)
    loss = logit.logsumexp(-1).sum() + every.mean.square().sum() + every.precision[known].log().sum()
    (loss + final.mean.square().sum()).backward()

    assert (final.mean[0] == 0).all()
    assert (final.precision[0] == 0).all()
    assert (scored.precision > 0).all()
    assert all(torch.isfinite(values).all() for values in (every.mean, final.mean, logit))
    assert torch.isfinite(every.precision).all() or not case.filtering
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert model.item_embedding.weight.grad is not None
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


# --- the model on disk --------------------------------------------------------------------------------------


@every_case
def test_a_saved_and_loaded_model_says_the_same(case: Case, tmp_path: Path) -> None:
    model = case.perturbed(seed=1, min_input_count=RARE)
    rows = random_rows(8, batch=4, length=MAX_LEN + 1)
    torch.save(model.state_dict(), tmp_path / "model.pt")

    loaded = case.perturbed(seed=2, min_input_count=RARE)
    assert largest_change(loaded.final_state(*rows), model.final_state(*rows)) > 1e-3
    loaded.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))

    for found, expected in zip(loaded.encode(*rows), model.encode(*rows), strict=True):
        assert torch.equal(found, expected)
    scores = (one.score(one.final_state(*rows)) for one in (loaded, model))
    for found, expected in zip(*scores, strict=True):
        assert torch.equal(found, expected)


@dataclass(frozen=True)
class Exported:
    """A model, and its graphs that read events in ONNX Runtime."""

    model: Backbone
    said: ExportedGraphs
    encoder: onnxruntime.InferenceSession
    step: onnxruntime.InferenceSession | None
    """Of a causal one."""
    explainer: onnxruntime.InferenceSession

    def run(self, rows: Rows) -> Gaussian:
        feeds = {name: tensor.numpy() for name, tensor in rows._asdict().items()}
        return Gaussian(*map(torch.from_numpy, self.encoder.run(["mean", "precision"], feeds)))


@pytest.fixture(scope="module")
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("exported")
    model = request.param.perturbed()
    said = export_graphs(model, folder, temperature=1.0)
    encoder, step, explainer = (
        onnxruntime.InferenceSession(folder / f"{graph}.onnx", providers=["CPUExecutionProvider"])
        if graph in said.custom_ops
        else None
        for graph in ("encoder", "step", "explainer")
    )
    return Exported(model, said, encoder, step, explainer)


every_export = pytest.mark.parametrize("exported", EVERY_CASE, indirect=True, scope="module")
every_causal_export = pytest.mark.parametrize(
    "exported", [param for param in EVERY_CASE if param.values[0].causal], indirect=True, scope="module"
)


@every_export
def test_an_export_checks_itself_against_torch(exported: Exported) -> None:
    assert 0 <= exported.said.max_error <= PARITY_TOLERANCE
    graphs = {"encoder", "ranker", "explainer"} | ({"step"} if exported.model.causal else set())
    assert {case.graph for case in exported.said.golden} == set(exported.said.custom_ops) == graphs


@every_export
@pytest.mark.parametrize("length", [1, 4, MAX_LEN + 1])
@pytest.mark.parametrize("batch", [1, 2, 5])
@torch.no_grad()
def test_torch_and_onnx_runtime_agree_on_the_final_state(exported: Exported, batch: int, length: int) -> None:
    rows = random_rows(10 * length + batch, batch, length)
    padded = rows.padded(min(2, MAX_LEN + 1 - length))

    expected = exported.model.final_state(*rows)

    assert_same(exported.run(padded), expected, FLOAT32_TOL)


@every_export
@pytest.mark.parametrize(("batch", "length", "padding"), [(1, 1, 0), (2, 4, 2), (5, MAX_LEN + 1, 0)])
def test_onnx_runtime_tells_whom_the_reference_s_state_heard(
    exported: Exported, batch: int, length: int, padding: int
) -> None:
    rows = random_rows(10 * length + batch, batch, length).padded(padding)

    feeds = {name: tensor.numpy() for name, tensor in rows._asdict().items()}
    found = exported.explainer.run(["kriging_weight", "precision"], feeds)

    assert_reasons(Reasons(*map(torch.from_numpy, found)), exported.model, rows, FLOAT32_TOL)


@every_export
@torch.no_grad()
def test_a_row_of_padding_in_onnx_runtime_knows_nothing_and_hurts_no_other(exported: Exported) -> None:
    rows = random_rows(9, batch=3, length=5)
    rows.items[1] = PAD

    found = exported.run(rows)

    assert (found.mean[1] == 0).all()
    assert (found.precision[1] == 0).all()
    others = [0, 2]
    expected = exported.model.final_state(*(part[others] for part in rows))
    assert_same(Gaussian(*(part[others] for part in found)), expected, FLOAT32_TOL)


@every_export
@torch.no_grad()
def test_the_probabilities_of_a_final_state_are_a_distribution_over_the_catalogue(exported: Exported) -> None:
    scores = exported.model.score(exported.model.final_state(*random_rows(11, batch=3, length=5)))
    probability = F.softmax(scores.logit, -1)

    assert probability.shape == (3, NUM_ITEMS)
    np.testing.assert_allclose(probability.sum(-1), 1, rtol=1e-6)
    assert (scores.variance > 0).all() if exported.model.config.filtering else (scores.variance == 0).all()


@every_causal_export
@torch.no_grad()
def test_step_onnx_folds_what_encoder_onnx_cached_for_every_count(exported: Exported) -> None:
    model, events = exported.model, user(6, torch.float32)
    encoder, step = exported.encoder, exported.step
    assert step is not None

    def run(session: onnxruntime.InferenceSession, **feeds: np.ndarray) -> dict[str, np.ndarray]:
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, feeds), strict=True))

    def fed(rows: Rows) -> dict[str, np.ndarray]:
        return {name: part.numpy() for name, part in rows._asdict().items()}

    cached = fed(window(events, 0)) | run(encoder, **fed(window(events, 0)))
    for count in range(1, 3 * MAX_LEN + 1):
        rows = window(events, count)
        if window_start(count, MAX_LEN) == window_start(count - 1, MAX_LEN):
            new = fed(at(rows, slice(-1, None)))
            past = {f"past_{name}": cached[name] for name in ("key", "value", "log_precision", "timestamps")}
            found = run(step, **new, **past, past_length=np.array([cached["timestamps"].shape[1]]))
            axes = {"key": 3, "value": 3, "log_precision": 2, "timestamps": 1}
            cached = {name: np.concatenate([cached[name], (new | found)[name]], axis) for name, axis in axes.items()}
        else:
            found = run(encoder, **fed(rows))
            cached = fed(rows) | found
        state = Gaussian(torch.from_numpy(found["mean"]), torch.from_numpy(found["precision"]))
        assert_same(state, model.final_state(*rows), FLOAT32_TOL)
