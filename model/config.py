"""The model's hyper-parameters, its special tokens and its window rule (math.md, "The sequence").

Free of torch: training and service both read it.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PAD = 0
"""Fills the right end of a shorter row; takes no attention mass."""
BOS = 1
"""A user before any event: position 0 of every sequence."""
UNK = 2
"""An item this model does not know; keeps an unknown event's place."""
MASK = 3
"""BERT4Rec's query token."""
FIRST_ITEM = 4
"""Catalogue items are numbered FIRST_ITEM … FIRST_ITEM + N - 1."""
UNKNOWN_BASE = 2**31
"""Numbers from here on stand for ids outside the catalogue; the service shows them to the encoder as UNK."""


def window_start(count: int, max_len: int) -> int:
    """First event that the window of a user with `count` events shows (math.md, "The sequence").

    A pure function of the count, so that training, encoder, step and an evicted cache agree.

    Args:
        count: events the user has in total, ≥ 0.
        max_len: window length L in events, even, ≥ 2; BOS is not counted.

    Returns:
        0 while count ≤ L, else the smallest multiple of L/2 that leaves at most L events.
    """
    if count <= max_len:
        return 0
    stride = max_len // 2
    return -(-(count - max_len) // stride) * stride


class FilterParts(BaseModel):
    """Parts of the filter that can be left out, to see what each does. A model to be served has them all."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kriging_bias: bool = True
    """Off: all neighbours count as equally precise, λ̄ = 1, in the weights and in the prior variance."""
    gain: bool = True
    """Off: the innovation is added whole, K = 1, as in a plain residual; the precision goes on as before."""
    process_noise: bool = True
    """Off: Q is fixed at 1e-6."""
    jacobian: bool = True
    """Off: J = 0, the feed-forward moves the mean and leaves the variance. SASRec only."""
    score_variance: bool = True
    """Off: c = 0, a score's variance changes neither the loss nor the order of a list."""


class ModelConfig(BaseModel):
    """Hyper-parameters of one network. Strict and frozen; written whole into manifest and report."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    backbone: Literal["sasrec", "bert4rec", "hstu"] = "sasrec"
    """SASRec and HSTU look back from each event; BERT4Rec sees both directions and is asked by a MASK at the end."""
    filtering: bool = True
    """`on`: precision-aware layers; `off`: the plain backbone."""
    max_len: int = Field(default=50, ge=2, le=4096)
    """Window length L in events, BOS not counted; even, because the window moves by L/2."""
    width: int = Field(default=64, ge=1, le=4096)
    num_layers: int = Field(default=2, ge=1, le=64)
    num_heads: int = Field(default=2, ge=1, le=64)
    ffn_width: int = Field(default=256, ge=1, le=16384)
    dropout: float = Field(default=0.3, ge=0.0, lt=1.0)
    """On embeddings, innovation (HSTU: on its input) and feed-forward output: the mean path only."""
    attention_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """On the kriging weights of the mean path; spread and sample size use the undropped weights."""
    initial_precision: Literal["table", "mlp"] = "table"
    """One learned scalar per item, or a network on its embedding, which also serves never-trained items."""
    min_input_count: int = Field(default=1, ge=0)
    """An item with fewer training uses is read as UNK: nothing was learned about it as an input."""
    process_noise_init: float = Field(default=0.02, gt=0.0, le=10.0)
    """Q at the start, a variance per layer and dimension."""
    shrinkage_dof: float = Field(default=1.0, gt=0.0, le=100.0)
    """ν0 of the scaled-inverse-χ² prior on the residual variance."""
    attention_norm: float = Field(default=50.0, gt=0.0, le=1e6)
    """HSTU: what its attention is divided by, a constant, whatever the length of the history or its padding."""
    time_buckets: int = Field(default=72, ge=1, le=1024)
    """HSTU: time differences told apart, each 1.35 times the one before; the last of 72 begins at 57 years."""
    head: Literal["auto", "inner_product", "cosine"] = "auto"
    """A score is the inner product of LN(h) with an item, or the cosine of the two over `temperature`; `auto`: the
    cosine for HSTU, the inner product for the others."""
    temperature: float = Field(default=0.05, gt=0.0, le=10.0)
    """What a cosine is divided by to make a score."""
    parts: FilterParts = FilterParts()

    @property
    def scores_by_cosine(self) -> bool:
        """Whether the head is the cosine."""
        return self.head == "cosine" or (self.head == "auto" and self.backbone == "hstu")

    @model_validator(mode="after")
    def _shapes_fit(self) -> "ModelConfig":
        if self.max_len % 2:
            raise ValueError(f"max_len is {self.max_len}; it must be even, because the window moves by max_len/2")
        if not self.parts.jacobian and self.backbone != "sasrec":
            raise ValueError(f"parts.jacobian can be left out of sasrec only, not of {self.backbone}")
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")
        return self
