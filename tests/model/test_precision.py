"""Layer 0: the precision of an event before any context (math.md, "Layer 0")."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from model.config import BOS, FIRST_ITEM, MASK, PAD, UNK
from model.precision import PrecisionNetwork, PrecisionTable
from tests.tolerance import FLOAT32_TOL, assert_precision_close

COUNTS = torch.tensor([0, 1, 7, 500])
NO_TABLE = torch.empty(0, 0)
"""The table form does not read the embeddings."""


def precision_with(level: float, slope: float, deviations: dict[int, float]) -> PrecisionTable:
    module = PrecisionTable(COUNTS)
    with torch.no_grad():
        module.level.fill_(level)
        module.frequency_slope.fill_(slope)
        for number, deviation in deviations.items():
            module.deviation[number] = deviation
    return module


def test_every_event_starts_as_precise_as_its_weight() -> None:
    items = torch.tensor([[BOS, UNK, MASK, FIRST_ITEM, FIRST_ITEM + 3]])
    weights = torch.tensor([[1.0, 0.5, 1.0, 2.0, 4.0]])
    assert torch.equal(PrecisionTable(COUNTS)(items, weights, NO_TABLE), weights)


@pytest.mark.parametrize(
    ("number", "weight", "expected"),
    [
        # exp(a + b·log(1+n) + δ)·w with a = 0.5, b = −0.25, and δ where one is set: by hand.
        (FIRST_ITEM, 1.0, math.exp(0.5)),
        (FIRST_ITEM + 1, 1.0, math.exp(0.5) * 2**-0.25),
        (FIRST_ITEM + 2, 3.0, math.exp(0.5) * 8**-0.25 * math.exp(-1.5) * 3.0),
        (FIRST_ITEM + 3, 1e-6, math.exp(0.5) * 501**-0.25 * 1e-6),
        (BOS, 1.0, math.exp(0.5)),
        (UNK, 0.1, math.exp(0.5) * math.exp(2.0) * 0.1),
    ],
)
def test_precision_is_the_exponential_of_shared_and_own_terms_times_the_weight(
    number: int, weight: float, expected: float
) -> None:
    module = precision_with(0.5, -0.25, {FIRST_ITEM + 2: -1.5, UNK: 2.0})
    found = module(torch.tensor([[number]]), torch.tensor([[weight]]), NO_TABLE)
    assert_precision_close(found, [[expected]], FLOAT32_TOL)


def test_special_tokens_have_their_own_precision_and_no_frequency_term() -> None:
    module = precision_with(0.0, 10.0, {BOS: 1.0, UNK: 2.0, MASK: 3.0})
    expected = [1.0, math.e, math.e**2, math.e**3]
    assert_precision_close(module.item_precision()[:FIRST_ITEM], expected, FLOAT32_TOL)


def test_a_runaway_theta_stays_a_finite_precision() -> None:
    module = precision_with(0.0, 0.0, {FIRST_ITEM: 500.0, FIRST_ITEM + 1: -500.0})
    assert_precision_close(module.item_precision()[FIRST_ITEM : FIRST_ITEM + 2], [1e6, 1e-6], FLOAT32_TOL)


def test_padding_has_precision_1_whatever_its_weight() -> None:
    module = precision_with(3.0, 1.0, {PAD: 5.0})
    found = module(torch.tensor([[BOS, PAD, PAD]]), torch.tensor([[1.0, 0.0, 1e9]]), NO_TABLE)
    assert found[0, 1:].tolist() == [1.0, 1.0]


def gradients(items: Tensor) -> dict[str, Tensor]:
    module = precision_with(0.5, -0.25, {})
    module(items, torch.ones(items.shape), NO_TABLE).log().sum().backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def test_the_gradient_reaches_the_shared_terms_and_the_own_one_of_the_events_alone() -> None:
    # Σ log λ over two uses of item 2 and one of item 3: the derivatives are counts and sums of log(1+n).
    gradient = gradients(torch.tensor([[FIRST_ITEM + 2, FIRST_ITEM + 3, FIRST_ITEM + 2]]))
    assert gradient["level"].item() == pytest.approx(3.0)
    assert gradient["frequency_slope"].item() == pytest.approx(2 * math.log(8) + math.log(501))
    assert gradient["deviation"].tolist() == pytest.approx([0, 0, 0, 0, 0, 0, 2, 1])


def test_padding_passes_no_gradient() -> None:
    gradient = gradients(torch.tensor([[PAD, PAD]]))
    assert all((value == 0).all() for value in gradient.values())


def test_the_network_starts_every_item_at_its_weight_and_hides_padding() -> None:
    torch.manual_seed(0)
    found = PrecisionNetwork(4)(torch.tensor([[BOS, 5, PAD]]), torch.tensor([[1.0, 0.5, 9.0]]), torch.randn(8, 4))
    assert found.tolist() == [[1.0, 0.5, 1.0]]


def test_the_network_is_the_exponential_of_a_two_layer_map_of_the_embedding() -> None:
    torch.manual_seed(1)
    module, table = PrecisionNetwork(4), torch.randn(8, 4)
    torch.nn.init.normal_(module.outer.weight)
    torch.nn.init.normal_(module.outer.bias)
    found = module(torch.tensor([[6]]), torch.tensor([[2.0]]), table)
    state = {name: value.double().numpy() for name, value in module.state_dict().items()}
    hidden = state["inner.weight"] @ table[6].double().numpy() + state["inner.bias"]
    gelu = np.array([x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in hidden])
    expected = 2 * np.exp(state["outer.weight"] @ gelu + state["outer.bias"])
    assert_precision_close(found, [expected], FLOAT32_TOL)
