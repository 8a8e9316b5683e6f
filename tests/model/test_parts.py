"""What the filter does without one of its parts: by the plain layer, or by the equations written out again here."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional as F

from model import filtering
from model.build import build_model
from model.config import FilterParts, ModelConfig
from model.filtering import Gaussian
from model.layers import FilteringLayer, PlainLayer
from model.scoring import GaussianHead
from tests.tolerance import FLOAT64_TOL, assert_close

WIDTH = 8
VISIBLE = torch.ones(2, 5, 5).tril().bool()


def layer(**parts: bool) -> FilteringLayer:
    torch.manual_seed(0)
    config = ModelConfig(width=WIDTH, ffn_width=12, dropout=0.0, parts=FilterParts(**parts))
    return FilteringLayer(config).double().eval()


def plain_twin(filtering_layer: FilteringLayer) -> PlainLayer:
    """The plain layer with the same weights."""
    plain = PlainLayer(filtering_layer.config.model_copy(update={"filtering": False})).double().eval()
    plain.load_state_dict(filtering_layer.state_dict(), strict=False)
    return plain


def prior(precise: bool = False) -> Gaussian:
    """Positions of unequal precision, or all of precision 1."""
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(2, 5, WIDTH, generator=generator, dtype=torch.float64)
    precision = torch.rand(2, 5, WIDTH, generator=generator, dtype=torch.float64) + 0.2
    return Gaussian(mean, torch.ones_like(precision) if precise else precision)


@torch.no_grad()
def test_without_its_gain_a_layer_that_finds_all_equally_precise_has_the_plain_layer_s_mean() -> None:
    without = layer(gain=False)
    expected, _ = plain_twin(without)(prior(precise=True), VISIBLE)

    found, _ = without(prior(precise=True), VISIBLE)

    assert_close(found.mean, expected.mean, FLOAT64_TOL)
    with_gain, _ = layer()(prior(precise=True), VISIBLE)
    assert not torch.allclose(with_gain.mean, expected.mean, atol=1e-3)


@torch.no_grad()
def test_without_the_kriging_bias_neighbours_are_weighed_as_the_plain_layer_weighs_them() -> None:
    without = layer(kriging_bias=False)
    expected = plain_twin(without).shares(prior(), VISIBLE)

    assert_close(without.shares(prior(), VISIBLE), expected, FLOAT64_TOL)
    assert not torch.allclose(layer().shares(prior(), VISIBLE), expected, atol=1e-3)


@torch.no_grad()
def test_without_the_process_noise_each_variance_is_smaller_by_it() -> None:
    with_noise, _ = layer()(prior(), VISIBLE)
    without_noise, _ = layer(process_noise=False)(prior(), VISIBLE)

    noise = F.softplus(layer().raw_process_noise).double() - 1e-6
    assert_close(1 / with_noise.precision - 1 / without_noise.precision, noise.expand(2, 5, WIDTH), FLOAT64_TOL)


@torch.no_grad()
def test_without_the_jacobian_the_feed_forward_leaves_the_variance_but_for_the_noise() -> None:
    without = layer(jacobian=False)
    whole, _ = layer()(prior(), VISIBLE)
    found, _ = without(prior(), VISIBLE)

    before = prior()
    observed, _ = without.observe(before, without.attention.norm(before.mean), VISIBLE, None, filtering)
    noise = np.log1p(np.exp(without.raw_process_noise.numpy()))
    assert_close(found.precision, 1 / (1 / observed.precision.numpy() + noise), FLOAT64_TOL)
    assert_close(found.mean, whole.mean, FLOAT64_TOL)
    assert not torch.allclose(found.precision, whole.precision, rtol=1e-3)


@torch.no_grad()
def test_without_the_score_s_variance_a_logit_is_the_mean_over_the_catalogue_s() -> None:
    head = GaussianHead(ModelConfig(width=WIDTH, parts=FilterParts(score_variance=False))).double()
    head.variance_scale.fill_(3.0)
    items = torch.randn(6, WIDTH, dtype=torch.float64)
    state = Gaussian(torch.randn(4, WIDTH, dtype=torch.float64), torch.rand(4, WIDTH, dtype=torch.float64) + 0.1)

    scores = head(state, items, torch.zeros(6), items.mean(0))

    z = F.layer_norm(state.mean, (WIDTH,)).numpy()
    assert_close(scores.logit, z @ (items - items.mean(0)).numpy().T, 1e-6)


@torch.no_grad()
def test_a_cosine_head_scores_the_angle_over_the_temperature() -> None:
    head = GaussianHead(ModelConfig(width=WIDTH, filtering=False, head="cosine", temperature=0.2)).double()
    raw = torch.randn(6, WIDTH, dtype=torch.float64)
    state = Gaussian(torch.randn(4, WIDTH, dtype=torch.float64), torch.full((4, WIDTH), torch.inf))

    scores = head(state, head.items(raw), torch.zeros(6), torch.zeros(WIDTH, dtype=torch.float64))

    a, b = state.mean.numpy(), raw.numpy()
    cosine = a @ b.T / np.linalg.norm(a, axis=1)[:, None] / np.linalg.norm(b, axis=1)
    assert_close(scores.logit, cosine / 0.2, FLOAT64_TOL)


@pytest.mark.parametrize("backbone", ["sasrec", "hstu", "bert4rec"])
@pytest.mark.parametrize("part", ["kriging_bias", "gain", "process_noise", "score_variance"])
@torch.no_grad()
def test_every_backbone_can_do_without_a_part(backbone: str, part: str) -> None:
    items = torch.tensor([[1, 4, 6, 5], [1, 7, 4, 0]])

    def logits(parts: FilterParts) -> torch.Tensor:
        torch.manual_seed(0)
        config = ModelConfig(backbone=backbone, width=WIDTH, max_len=6, parts=parts)
        model = build_model(config, torch.tensor([3, 1, 0, 2])).eval()
        if hasattr(model.initial_precision, "deviation"):
            model.initial_precision.deviation.copy_(torch.linspace(-1, 1, 8))
        return model.score(model.final_state(items, torch.ones(2, 4))).logit

    assert not torch.allclose(logits(FilterParts()), logits(FilterParts(**{part: False})), atol=1e-6)


def test_the_jacobian_is_left_out_of_sasrec_only() -> None:
    with pytest.raises(ValidationError, match="left out of sasrec only, not of bert4rec"):
        ModelConfig(backbone="bert4rec", parts=FilterParts(jacobian=False))
