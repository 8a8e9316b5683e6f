"""`CausalBackbone.last_states`: the last layer asked at one position gives what it gives when asked at all."""

import pytest
import torch

from model.backbone import CausalBackbone
from model.build import build_model
from model.config import BOS, FIRST_ITEM, PAD, ModelConfig
from tests.tolerance import FLOAT64_TOL, assert_close

LENGTHS = (1, 3, 9, 5, 2)
"""Real positions of each row, BOS among them."""
CAUSAL = pytest.mark.parametrize("backbone", ["sasrec", "hstu"])
FILTERING = pytest.mark.parametrize("filtering", [True, False], ids=["filtering", "plain"])


def model_of(backbone: str, filtering: bool, num_layers: int = 2) -> CausalBackbone:
    torch.manual_seed(0)
    config = ModelConfig(backbone=backbone, filtering=filtering, width=16, max_len=8, num_layers=num_layers)
    model = build_model(config, torch.randint(1, 9, (20,))).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    assert isinstance(model, CausalBackbone)
    return model


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Items, weights and timestamps of rows of unequal length."""
    generator = torch.Generator().manual_seed(1)
    items = torch.randint(FIRST_ITEM, FIRST_ITEM + 20, (len(LENGTHS), max(LENGTHS)), generator=generator)
    items[:, 0] = BOS
    for row, length in enumerate(LENGTHS):
        items[row, length:] = PAD
    weights = torch.rand(items.shape, generator=generator, dtype=torch.float64) + 0.5
    timestamps = torch.rand(items.shape, generator=generator, dtype=torch.float64).cumsum(1) * 1e6
    return items, weights, timestamps


@CAUSAL
@FILTERING
@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_last_states_are_those_of_the_whole_encoding(backbone: str, filtering: bool, num_layers: int) -> None:
    model = model_of(backbone, filtering, num_layers)

    found, expected = model.last_states(*rows()), model.final_state(*rows())

    assert_close(found.mean, expected.mean, FLOAT64_TOL)
    if filtering:
        assert_close(found.precision.log(), expected.precision.log(), FLOAT64_TOL)
    else:
        assert torch.isinf(found.precision).all()


@CAUSAL
@FILTERING
def test_the_gradients_of_the_last_states_are_those_of_the_whole_encoding(backbone: str, filtering: bool) -> None:
    model = model_of(backbone, filtering)

    def gradients(state: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        mean, precision = state
        total = mean.square().sum() + (precision.log().sum() if filtering else 0)
        names, parameters = zip(*model.named_parameters(), strict=True)
        found = torch.autograd.grad(total, parameters, allow_unused=True)
        return {name: grad for name, grad in zip(names, found, strict=True) if grad is not None}

    found, expected = gradients(model.last_states(*rows())), gradients(model.final_state(*rows()))

    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert_close(gradient, expected[name], 1e-8, name)
