"""Layer 0: how precise an event is before any context (math.md, "Layer 0")."""

import math

import torch
from torch import Tensor, nn

from model.config import FIRST_ITEM, PAD, ModelConfig

THETA_BOUND = math.log(1e6)
"""|θ| at most: the range the filter is tested in; beyond it float32 overflows in the backward of 1/σ̂²."""


class PrecisionTable(nn.Module):
    """One learned precision per item, with shared frequency terms (math.md, Layer 0 [P], [O]).

        λ_{t,d} = τ_{item(t)}·w_t      τ_i = exp(θ_i)      θ_i = a + b·log(1+n_i) + δ_i

    a and b are shared, δ_i is the item's own; all start at 0, so every item starts at τ = 1.

    Args:
        training_counts: (N,) uses of each catalogue item in training; special tokens count as 0.
    """

    log_count: Tensor

    def __init__(self, training_counts: Tensor) -> None:
        super().__init__()
        log_count = torch.zeros(FIRST_ITEM + len(training_counts))
        log_count[FIRST_ITEM:] = training_counts.float().log1p()
        self.register_buffer("log_count", log_count, persistent=False)
        self.level = nn.Parameter(torch.zeros(()))
        self.frequency_slope = nn.Parameter(torch.zeros(()))
        self.deviation = nn.Parameter(torch.zeros(len(log_count)))

    def item_precision(self) -> Tensor:
        """τ of every number, special tokens first: (FIRST_ITEM + N,) > 0."""
        theta = self.level + self.frequency_slope * self.log_count + self.deviation
        return theta.clamp(-THETA_BOUND, THETA_BOUND).exp()

    def forward(self, items_BT: Tensor, weights_BT: Tensor, embedding_VD: Tensor) -> Tensor:
        """Precision (B,T) of each position; 1 on padding, where the attention mask hides it.

        Args:
            items_BT: item numbers.
            weights_BT: event weights > 0; 1 on special tokens, anything finite on padding.
            embedding_VD: the item table; not read.
        """
        return torch.where(items_BT == PAD, 1, self.item_precision()[items_BT] * weights_BT)


class PrecisionNetwork(nn.Module):
    """τ = exp(MLP(embedding)): gives a precision to items that were never trained (math.md, Layer 0 [P]).

    The last layer starts at 0, so every item starts at τ = 1.

    Args:
        width: D.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, 1)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, items_BT: Tensor, weights_BT: Tensor, embedding_VD: Tensor) -> Tensor:
        """As `PrecisionTable.forward`, from the embeddings of the positions' items."""
        theta = self.outer(nn.functional.gelu(self.inner(embedding_VD[items_BT]))).squeeze(-1)
        return torch.where(items_BT == PAD, 1, theta.clamp(-THETA_BOUND, THETA_BOUND).exp() * weights_BT)


def initial_precision(config: ModelConfig, training_counts: Tensor) -> nn.Module:
    """The form of initial precision that the configuration asks for."""
    if config.initial_precision == "table":
        return PrecisionTable(training_counts)
    return PrecisionNetwork(config.width)
