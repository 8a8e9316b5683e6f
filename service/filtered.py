"""A user's filtered state: the engine computes it, the store keeps it, the ranker reads it.

D width · Y layers · H heads · C = D/H · S positions read: BOS, then the events of the window
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Cache:
    """What a causal encoder keeps of the positions it has read, so that it can fold in events without reading them.

    Raises:
        ValueError: the shapes do not belong together.
    """

    key: Floats
    """(Y,H,S,C)"""
    value: Floats
    """(Y,H,S,C)"""
    log_precision: Floats
    """(Y,S) log λ̄; infinite for a plain model."""
    timestamps: npt.NDArray[np.float64]
    """(S,) seconds, as the encoder was told them; NaN where there is none, as on BOS."""

    def __post_init__(self) -> None:
        num_layers, _, num_positions, _ = self.key.shape
        per_layer = (num_layers, num_positions)
        found = self.key.shape, self.value.shape, self.log_precision.shape, self.timestamps.shape
        if found != (self.key.shape, self.key.shape, per_layer, (num_positions,)):
            raise ValueError(
                "key has shape {}, value {}, log_precision {}, timestamps {}; "
                "accepted: (Y,H,S,C) twice, (Y,S), (S,)".format(*found)
            )

    @property
    def num_positions(self) -> int:
        """S"""
        return len(self.timestamps)

    @property
    def nbytes(self) -> int:
        """Bytes of all its numbers."""
        return self.key.nbytes + self.value.nbytes + self.log_precision.nbytes + self.timestamps.nbytes

    def extended(self, added: "Cache") -> "Cache":
        """The cache of these positions and, behind them, the added ones."""
        return Cache(
            np.concatenate([self.key, added.key], 2),
            np.concatenate([self.value, added.value], 2),
            np.concatenate([self.log_precision, added.log_precision], 1),
            np.concatenate([self.timestamps, added.timestamps]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """What is known of a user: a Gaussian, and what it takes to fold in further events.

    Raises:
        ValueError: mean and precision are not two vectors of one length.
    """

    mean: Floats
    """(D,)"""
    precision: Floats
    """(D,) inverse variance, > 0; infinite for a plain model."""
    cache: Cache | None = None
    """None: the model is not causal, or nobody needs it."""

    def __post_init__(self) -> None:
        if self.mean.ndim != 1 or self.mean.shape != self.precision.shape:
            raise ValueError(
                f"mean has shape {self.mean.shape}, precision {self.precision.shape}; accepted: (D,) twice"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all its numbers."""
        return self.mean.nbytes + self.precision.nbytes + (0 if self.cache is None else self.cache.nbytes)
