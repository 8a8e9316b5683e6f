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
    """A final state seen through the last LayerNorm: `mean` z and `variance` ρ ≥ 0, each (R,D)."""

    mean: Tensor
    variance: Tensor


class GaussianHead(nn.Module):
    """The scoring head: LN_f and three learned scalars (math.md, "Scoring and its uncertainty" [O]).

    Args:
        config: `width` and `filtering`; without filtering the head is the inner product alone.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.filtering = config.filtering
        if config.filtering:
            self.candidate_level = nn.Parameter(torch.zeros(()))
            self.candidate_slope = nn.Parameter(torch.zeros(()))
            self.variance_scale = nn.Parameter(torch.zeros(()))

    def readout(self, state: Gaussian) -> Readout:
        """z = LN_f(h), ρ = γ²/(s²λ) for states (R,D); an infinite precision gives variance 0."""
        spread = (state.mean.var(-1, correction=0, keepdim=True) + self.norm.eps) * state.precision
        return Readout(self.norm(state.mean), self.norm.weight.square() / spread)

    def shrinkage(self) -> Tensor:
        """c ≥ 0: how far variance pulls a score towards the catalogue's average; 0 for the plain head."""
        return F.softplus(self.variance_scale) if self.filtering else torch.zeros(())

    def candidate_variance(self, log_count_M: Tensor) -> Tensor:
        """r_i of each candidate, (M,) > 0: the fewer its training uses, the wider; 0 for the plain head."""
        if not self.filtering:
            return torch.zeros_like(log_count_M)
        return (self.candidate_level - F.softplus(self.candidate_slope) * log_count_M).exp()

    def forward(self, state: Gaussian, items_MD: Tensor, log_count_M: Tensor, catalogue_mean_D: Tensor) -> Scores:
        """Score M candidates for R states, all against all: (R,M).

            μ_i = ⟨z, e_i⟩      v_i = Σ_d e²ρ + (r_i/D) Σ_d (z² + ρ)      logit = (μ_i − ⟨z, ē⟩)/√(1 + c·v_i)

        Args:
            state: mean and precision (R,D).
            items_MD: candidates' embeddings.
            log_count_M: log(1 + n_i).
            catalogue_mean_D: ē, the mean embedding of the whole catalogue.
        """
        z = self.readout(state)
        mean = z.mean @ items_MD.T
        if not self.filtering:
            return self._scores(z, mean, torch.zeros_like(mean), catalogue_mean_D)
        candidate = _energy(z)[:, None] * self.candidate_variance(log_count_M)
        variance = torch.addmm(candidate, z.variance, items_MD.square().T)
        return self._scores(z, mean, variance, catalogue_mean_D)

    def pairs(self, state: Gaussian, items_RD: Tensor, log_count_R: Tensor, catalogue_mean_D: Tensor) -> Scores:
        """Score one candidate for each state: (R,). Same arguments as `forward`, row by row."""
        z = self.readout(state)
        mean = (z.mean * items_RD).sum(-1)
        if not self.filtering:
            return self._scores(z, mean, torch.zeros_like(mean), catalogue_mean_D)
        candidate = _energy(z) * self.candidate_variance(log_count_R)
        variance = (items_RD.square() * z.variance).sum(-1) + candidate
        return self._scores(z, mean, variance, catalogue_mean_D)

    def _scores(self, z: Readout, mean: Tensor, variance: Tensor, catalogue_mean_D: Tensor) -> Scores:
        centre = z.mean @ catalogue_mean_D
        if mean.dim() == 2:
            centre = centre[:, None]
        return Scores(mean, variance, (mean - centre) * (1 + self.shrinkage() * variance).rsqrt())


def _energy(z: Readout) -> Tensor:
    """(1/D) Σ_d (z² + ρ) of each state, (R,): what a candidate's own variance multiplies."""
    return (z.mean.square() + z.variance).mean(-1)
