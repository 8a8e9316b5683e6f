"""Whom a state heard in the last layer: every backbone in torch against tests/reference.py.

`test_encoding.py`, which has the exported graphs, asks ONNX Runtime the same.
"""

import pytest
import torch

from model.config import FIRST_ITEM, PAD
from tests.behaviour.heard import assert_reasons
from tests.behaviour.instances import COUNTS, EVERY_CASE, MAX_LEN, Case, random_rows
from tests.tolerance import FLOAT64_TOL

every_case = pytest.mark.parametrize("case", EVERY_CASE)


@every_case
@torch.no_grad()
def test_torch_tells_the_reference_s_weights_and_precisions(case: Case) -> None:
    model = case.perturbed(torch.float64)
    # The buffers were made in float32; the reference has log(1+n) to its last digit.
    if case.filtering:
        model.initial_precision.log_count[FIRST_ITEM:] = COUNTS.double().log1p()
    rows = random_rows(1, batch=5, length=MAX_LEN - 1, dtype=torch.float64).padded(2)

    assert_reasons(model.reasons(*rows), model, rows, FLOAT64_TOL)


@every_case
@torch.no_grad()
def test_a_single_layer_tells_the_initial_precision(case: Case) -> None:
    model = case.perturbed(torch.float64, num_layers=1)
    rows = random_rows(2, batch=3, length=MAX_LEN + 1, dtype=torch.float64)
    state, _ = model.enter(*rows)

    found = model.reasons(*rows).precision

    assert torch.equal(found, torch.where(rows.items != PAD, state.precision.mean(-1), 0))


@every_case
@torch.no_grad()
def test_a_row_of_padding_hears_nobody(case: Case) -> None:
    rows = random_rows(3, batch=3, length=5)
    rows.items[1] = PAD

    found = case.perturbed().reasons(*rows)

    assert (found.kriging_weight[1] == 0).all()
    assert torch.isfinite(found.kriging_weight).all()


@every_case
@torch.no_grad()
def test_events_of_lower_precision_weigh_less_only_where_precisions_are_read(case: Case) -> None:
    model = case.perturbed(torch.float64, num_layers=1)
    rows = random_rows(4, batch=1, length=MAX_LEN + 1, dtype=torch.float64)
    before = model.reasons(*rows)

    for place in range(1, MAX_LEN):
        weights = rows.weights.clone()
        weights[:, place] /= 4
        after = model.reasons(rows.items, weights, rows.timestamps)
        if case.filtering:
            assert after.precision[0, place] == pytest.approx(before.precision[0, place].item() / 4)
            assert after.kriging_weight[0, place] < before.kriging_weight[0, place]
        else:
            assert torch.equal(after.kriging_weight, before.kriging_weight)
