"""A warm start: known items keep their rows, new ones begin at the mean, and the model ranks as it did."""

import pytest
import torch

from model.backbone import Backbone
from model.build import build_model
from model.config import FIRST_ITEM, ModelConfig
from training.retrain.warm import grown_weights

BACKBONES = pytest.mark.parametrize("backbone", ["sasrec", "bert4rec", "hstu"])


def model_of(num_items: int, seed: int, backbone: str = "sasrec", width: int = 16) -> Backbone:
    torch.manual_seed(seed)
    config = ModelConfig(backbone=backbone, width=width, num_layers=1, ffn_width=16, max_len=8)  # type: ignore[arg-type]
    model = build_model(config, torch.ones(num_items, dtype=torch.int64)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@BACKBONES
def test_known_items_are_scored_as_before_and_new_ones_are_the_mean(backbone: str) -> None:
    known, fresh = model_of(12, 0, backbone), model_of(15, 1, backbone)
    fresh.load_state_dict(grown_weights(known.state_dict(), fresh.state_dict(), 12))
    items = torch.tensor([[1, FIRST_ITEM + 3, FIRST_ITEM + 7]])  # BOS first
    ones, no_time = torch.ones(1, 3), torch.full((1, 3), torch.nan, dtype=torch.float64)

    states = [model.final_state(items, ones, no_time) for model in (known, fresh)]

    torch.testing.assert_close(states[0].mean, states[1].mean)
    torch.testing.assert_close(states[0].precision, states[1].precision)
    table = fresh.item_embedding.weight
    torch.testing.assert_close(table[FIRST_ITEM + 12], table[FIRST_ITEM : FIRST_ITEM + 12].mean(0))


def test_models_that_differ_in_more_than_their_items_are_refused() -> None:
    known, wide = model_of(12, 0), model_of(15, 1, width=32)

    with pytest.raises(ValueError, match=r"has shape \(.*16\) and would be \(.*32\)"):
        grown_weights(known.state_dict(), wide.state_dict(), 12)
    with pytest.raises(ValueError, match="the models differ in"):
        grown_weights(known.state_dict(), model_of(15, 1, "bert4rec").state_dict(), 12)
