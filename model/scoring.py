"""Scores as Gaussians: what the final state says of every item, and how surely (math.md, "Scoring")."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import ModelConfig
from model.filtering import Gaussian


class Scores(NamedTuple):
    """Of R states against M candidates, each (R,M).

    `mean` μ, `variance` v ≥ 0, and the `logit` (μ−m)/√(1+c·v) by which lists are ordered.
    """

    mean: Tensor
    variance: Tensor
    logit: Tensor


class Readout(NamedTuple):
    """A final state as the head reads it: `mean` z and `variance` ρ ≥ 0, each (R,D)."""

    mean: Tensor
    variance: Tensor


class FinalLayerNorm(nn.LayerNorm):
    """States through the last LayerNorm LN_f, items as they are."""

    def readout(self, state: Gaussian) -> Readout:
        """z = LN_f(h), ρ = γ²/(s²λ) for states (R,D)."""
        spread = (state.mean.var(-1, correction=0, keepdim=True) + self.eps) * state.precision
        return Readout(self(state.mean), self.weight.square() / spread)

    def own_variance(self, state: Gaussian) -> Tensor:
        """γ²/λ for states (R,D): ρ before LN_f divides by the length s of the state."""
        return self.weight.square() / state.precision

    def items(self, items_MD: Tensor) -> Tensor:
        """The embeddings, unchanged."""
        return items_MD


class UnitNorm(nn.Module):
    """States and items as unit vectors, so that a score is a cosine over a temperature κ.

    κ divides z and not the score: 1 + c·v then compares a variance with the logit's own unit.

    Args:
        temperature: κ > 0.
    """

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, mean_RD: Tensor) -> Tensor:
        """h/(κ‖h‖) (R,D)."""
        return mean_RD / (self.temperature * _length(mean_RD))

    def readout(self, state: Gaussian) -> Readout:
        """z = h/(κ‖h‖), ρ = 1/(κ²‖h‖²λ) for states (R,D)."""
        scale = self.temperature * _length(state.mean)
        return Readout(self(state.mean), (scale.square() * state.precision).reciprocal())

    def own_variance(self, state: Gaussian) -> Tensor:
        """1/λ for states (R,D): ρ, but for a constant, before the state is divided by its length."""
        return state.precision.reciprocal()

    def items(self, items_MD: Tensor) -> Tensor:
        """e/‖e‖."""
        return items_MD / _length(items_MD)


class GaussianHead(nn.Module):
    """The scoring head: a norm and three learned scalars (math.md, "Scoring and its uncertainty" [O]).

    The norm says how a state and the items enter: as unit vectors, or the state through LN_f.

    Args:
        config: `width`, `head`, `temperature`, `filtering`, `parts`; without filtering the head is the product alone.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = UnitNorm(config.temperature) if config.scores_by_cosine else FinalLayerNorm(config.width)
        self.score_variance = config.parts.score_variance
        self.filtering = config.filtering
        if config.filtering:
            self.candidate_level = nn.Parameter(torch.zeros(()))
            self.candidate_slope = nn.Parameter(torch.zeros(()))
            self.variance_scale = nn.Parameter(torch.zeros(()))

    def readout(self, state: Gaussian) -> Readout:
        """z and ρ of states (R,D), by the norm; without filtering ρ = 0."""
        if not self.filtering:
            z = self.norm(state.mean)
            return Readout(z, torch.zeros_like(z))
        return self.norm.readout(state)

    def own_variance(self, state: Gaussian) -> Tensor:
        """What of ρ is the state's own uncertainty, (R,D), whatever its length; 0 without filtering.

        A state's reliability compares it with that of a user nobody has seen, whose state may be several times as long.
        """
        return self.norm.own_variance(state) if self.filtering else torch.zeros_like(state.mean)

    def items(self, items_MD: Tensor) -> Tensor:
        """e of item embeddings (M,D), by the norm: what `forward` and `pairs` take."""
        return self.norm.items(items_MD)

    def shrinkage(self) -> Tensor:
        """c ≥ 0: how far variance pulls a score towards the catalogue's average; 0 for the plain head."""
        if not self.filtering or not self.score_variance:
            return torch.zeros(())
        return F.softplus(self.variance_scale)

    def candidate_variance(self, log_count_M: Tensor) -> Tensor:
        """r_i of each candidate, (M,) > 0: the fewer its training uses, the wider; 0 for the plain head."""
        if not self.filtering:
            return torch.zeros_like(log_count_M)
        return (self.candidate_level - F.softplus(self.candidate_slope) * log_count_M).exp()

    def forward(self, state: Gaussian, items_MD: Tensor, variance_M: Tensor, catalogue_mean_D: Tensor) -> Scores:
        """Score M candidates for R states, all against all: (R,M).

            μ_i = ⟨z, e_i⟩      v_i = Σ_d e²ρ + (r_i/D) Σ_d (z² + ρ)      logit = (μ_i − ⟨z, ē⟩)/√(1 + c·v_i)

        Args:
            state: mean and precision (R,D).
            items_MD: candidates, as `items` gives them.
            variance_M: r_i, as `candidate_variance` gives it.
            catalogue_mean_D: ē, the mean over the whole catalogue of what `items` gives.
        """
        z = self.readout(state)
        mean = z.mean @ items_MD.T
        if not self.filtering:
            return Scores(mean, torch.zeros_like(mean), mean - _centre(z, mean, catalogue_mean_D))
        candidate = _energy(z)[:, None] * variance_M
        variance = torch.addmm(candidate, z.variance, items_MD.square().T)
        return self._scores(z, mean, variance, catalogue_mean_D)

    def pairs(self, state: Gaussian, items_RD: Tensor, variance_R: Tensor, catalogue_mean_D: Tensor) -> Scores:
        """Score one candidate for each state: (R,). Same arguments as `forward`, row by row."""
        z = self.readout(state)
        mean = (z.mean * items_RD).sum(-1)
        if not self.filtering:
            return Scores(mean, torch.zeros_like(mean), mean - _centre(z, mean, catalogue_mean_D))
        candidate = _energy(z) * variance_R
        variance = (items_RD.square() * z.variance).sum(-1) + candidate
        return self._scores(z, mean, variance, catalogue_mean_D)

    def _scores(self, z: Readout, mean: Tensor, variance: Tensor, catalogue_mean_D: Tensor) -> Scores:
        centred = mean - _centre(z, mean, catalogue_mean_D)
        return Scores(mean, variance, centred * (1 + self.shrinkage() * variance).rsqrt())


def _centre(z: Readout, mean: Tensor, catalogue_mean_D: Tensor) -> Tensor:
    """⟨z, ē⟩ of each state, in the shape that `mean`, (R,M) or (R,), subtracts."""
    centre = z.mean @ catalogue_mean_D
    return centre[:, None] if mean.dim() == 2 else centre


def _energy(z: Readout) -> Tensor:
    """(1/D) Σ_d (z² + ρ) of each state, (R,): what a candidate's own variance multiplies."""
    return (z.mean.square() + z.variance).mean(-1)


def _length(vector_RD: Tensor) -> Tensor:
    """‖·‖ (R,1), at least 1e-6: a vector of zeros stays one."""
    return torch.linalg.vector_norm(vector_RD, dim=-1, keepdim=True).clamp_min(1e-6)
