"""The Gaussian scoring head against the numpy reference, and what holds of its probabilities (math.md)."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.config import FIRST_ITEM, ModelConfig
from model.filtering import Gaussian
from model.scoring import GaussianHead, Scores
from tests import reference
from tests.tolerance import (
    FLOAT32_EXTREME_TOL,
    FLOAT32_TOL,
    FLOAT64_TOL,
    assert_close,
)

few_cases = settings(max_examples=30)


class Case(NamedTuple):
    """A head with random parameters, states to score, and a catalogue."""

    head: GaussianHead
    state: Gaussian
    items: Tensor
    counts: Tensor

    @property
    def log_count(self) -> Tensor:
        return self.counts.to(self.items.dtype).log1p()

    def scores(self) -> Scores:
        return self.head(self.state, self.items, self.head.candidate_variance(self.log_count), self.items.mean(0))

    def params(self) -> dict[str, np.ndarray]:
        """The head and the catalogue under the names of tests/reference.py."""
        values = {name: value.detach().double().numpy() for name, value in self.head.named_parameters()}
        specials = np.zeros((FIRST_ITEM, self.items.shape[1]))
        return {
            "token_embedding": np.concatenate([specials, self.items.double().numpy()]),
            "training_count": np.concatenate([np.zeros(FIRST_ITEM), self.counts.double().numpy()]),
            "final_norm_weight": values["norm.weight"],
            "final_norm_bias": values["norm.bias"],
            "candidate_intercept": values["candidate_level"],
            "candidate_slope_raw": values["candidate_slope"],
            "score_shrinkage_raw": values["variance_scale"],
        }


def draw_case(
    seed: int,
    users: int = 3,
    num_items: int = 7,
    width: int = 5,
    limit: float = 3.0,
    dtype: torch.dtype = torch.float64,
    filtering: bool = True,
) -> Case:
    """Precisions are log-uniform in [1/limit, limit]."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    head = GaussianHead(ModelConfig(width=width, num_heads=1, filtering=filtering)).to(dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.5 * normal(*parameter.shape))
    exponent = 2 * torch.rand(users, width, generator=generator, dtype=torch.float64) - 1
    precision = (exponent * np.log(limit)).exp().to(dtype)
    counts = torch.randint(0, 200, (num_items,), generator=generator)
    return Case(head, Gaussian(normal(users, width), precision), normal(num_items, width), counts)


@pytest.mark.parametrize(
    ("dtype", "limit", "tol"),
    [
        pytest.param(torch.float64, 3.0, FLOAT64_TOL, id="float64"),
        pytest.param(torch.float64, 1e6, FLOAT64_TOL, id="float64-extreme"),
        pytest.param(torch.float32, 3.0, FLOAT32_TOL, id="float32"),
        pytest.param(torch.float32, 1e6, FLOAT32_EXTREME_TOL, id="float32-extreme"),
    ],
)
@few_cases
@given(
    seed=st.integers(0, 2**32 - 1),
    num_items=st.integers(2, 12),
    width=st.integers(2, 16),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
)
def test_scores_and_probabilities_equal_the_reference(
    dtype: torch.dtype, limit: float, tol: float, seed: int, num_items: int, width: int, temperature: float
) -> None:
    case = draw_case(seed, num_items=num_items, width=width, limit=limit, dtype=dtype)
    seen = np.random.default_rng(seed).random(num_items) < 0.4
    seen[0] = False
    scores = case.scores()
    scaled = scores.logit.masked_fill(torch.from_numpy(seen), -torch.inf) / temperature
    probability = scaled.softmax(-1)
    assert scores.logit.dtype == dtype
    for row in range(3):
        mean, precision = (tensor[row].double().numpy() for tensor in case.state)
        expected = reference.score_catalogue(case.params(), mean, precision, seen, temperature)
        assert_close(scores.mean[row], expected.score_mean, tol, "score mean")
        assert_close(scores.variance[row], expected.score_variance, tol, "score variance")
        assert_close(scores.logit[row], expected.logit, tol, "logit")
        assert_close(probability[row], expected.probability, tol, "probability")


@few_cases
@given(seed=st.integers(0, 2**32 - 1))
def test_precisions_of_every_size_give_finite_scores_and_gradients(seed: int) -> None:
    case = draw_case(seed, limit=1e6, dtype=torch.float32)
    leaves = [*case.state, case.items, *case.head.parameters()]
    for leaf in leaves:
        leaf.requires_grad_()
    scores = case.scores()
    gradients = torch.autograd.grad(scores.logit.logsumexp(-1).sum(), leaves)
    assert all(torch.isfinite(values).all() for values in (*scores, *gradients))


@few_cases
@given(seed=st.integers(0, 2**32 - 1), filtering=st.booleans())
def test_a_pair_scores_as_it_does_in_the_whole_table(seed: int, filtering: bool) -> None:
    case = draw_case(seed, users=5, num_items=5, filtering=filtering)
    found = case.head.pairs(case.state, case.items, case.head.candidate_variance(case.log_count), case.items.mean(0))
    for pair, table in zip(found, case.scores(), strict=True):
        assert pair.shape == (5,)
        assert_close(pair, table.diagonal(), 1e-12)


@few_cases
@given(seed=st.integers(0, 2**32 - 1), size=st.floats(0.1, 10.0))
def test_a_vector_added_to_every_item_changes_no_probability(seed: int, size: float) -> None:
    # Held fixed, v is r_i/D·Σz² of a user known exactly: the embeddings do not enter it.
    case = draw_case(seed)
    case = case._replace(state=Gaussian(case.state.mean, torch.full_like(case.state.precision, torch.inf)))
    shift = size * torch.randn(case.items.shape[1], dtype=torch.float64, generator=torch.Generator())
    before, after = case.scores(), case._replace(items=case.items + shift).scores()
    assert torch.equal(after.variance, before.variance)
    assert (before.variance > 0).all()
    assert ((after.mean - before.mean).abs() > 1e-6).any()
    assert_close(after.logit.softmax(-1), before.logit.softmax(-1), FLOAT64_TOL)


@few_cases
@given(seed=st.integers(0, 2**32 - 1))
def test_more_variance_pulls_an_item_s_probability_towards_the_average(seed: int) -> None:
    case = draw_case(seed)
    fewer = case.counts.clone()
    fewer[0] = 0
    case.counts[0] = 150
    before, after = case.scores(), case._replace(counts=fewer).scores()
    above = before.logit[:, 0] > 0
    change = after.logit.softmax(-1)[:, 0] - before.logit.softmax(-1)[:, 0]
    assert (after.variance[:, 0] > before.variance[:, 0]).all()
    assert torch.equal(after.mean, before.mean)
    assert (change[above] < 0).all()
    assert (change[~above] > 0).all()


@few_cases
@given(seed=st.integers(0, 2**32 - 1), factor=st.floats(0.01, 0.9))
def test_a_less_precise_user_has_wider_scores_nearer_to_the_average(seed: int, factor: float) -> None:
    case = draw_case(seed)
    vague = case._replace(state=Gaussian(case.state.mean, factor * case.state.precision))
    sharp_scores, vague_scores = case.scores(), vague.scores()
    assert (vague_scores.variance > sharp_scores.variance).all()
    assert (vague_scores.logit.abs() < sharp_scores.logit.abs()).all()


def test_the_fewer_the_uses_the_wider_the_candidate() -> None:
    head = draw_case(1).head
    widths = head.candidate_variance(torch.tensor([0, 1, 2, 10, 1000], dtype=torch.float64).log1p())
    assert (widths[1:] < widths[:-1]).all()
    assert (widths > 0).all()


def test_the_plain_head_scores_by_the_inner_product_and_claims_no_variance() -> None:
    case = draw_case(2, filtering=False)
    scores = case.scores()
    weight, bias = (value.detach().numpy() for value in case.head.parameters())
    user = reference.layer_norm(case.state.mean.numpy(), weight, bias)
    expected = user @ case.items.numpy().T
    assert_close(scores.mean, expected, FLOAT64_TOL)
    assert_close(scores.logit.softmax(-1), torch.from_numpy(expected).softmax(-1), FLOAT64_TOL)
    assert (scores.variance == 0).all()
    assert case.head.shrinkage().item() == 0
    assert (case.head.candidate_variance(case.log_count) == 0).all()
    assert {name for name, _ in case.head.named_parameters()} == {"norm.weight", "norm.bias"}


def test_a_state_known_exactly_has_a_readout_without_variance() -> None:
    case = draw_case(3)
    certain = Gaussian(case.state.mean, torch.full_like(case.state.precision, torch.inf))
    assert (case.head.readout(certain).variance == 0).all()
