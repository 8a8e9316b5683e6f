"""What every backbone is: embeddings, an initial precision, a scoring head, and an encoder of its own.

B batch · T positions (BOS first, then events, right padding) · S neighbours · D width · H heads · C = D/H · Y layers
N catalogue items · R states · M candidates
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from model import filtering
from model.config import FIRST_ITEM, PAD, UNK, ModelConfig
from model.dropout import apply_dropout
from model.filtering import Gaussian
from model.layers import Neighbours, Steps
from model.precision import initial_precision
from model.scoring import GaussianHead, Scores

EMBEDDING_STD = 0.02


class Reasons(NamedTuple):
    """Whom the state that answers heard in the last layer (math.md, "Reasons").

    `kriging_weight` (B,T) in [0, 1], the share of each position, mean over heads; `precision` (B,T), the λ̄ that the
    layer weighted it by, infinite without filtering. Both are 0 on padding.
    """

    kriging_weight: Tensor
    precision: Tensor


class Backbone(nn.Module, ABC):
    """The interface of the three backbones, and what they share.

    Args:
        config: hyper-parameters.
        training_counts: (N,) uses of each catalogue item in training.
    """

    causal: ClassVar[bool]
    """Whether a later event never changes an earlier position's state; such a model is trained on every position."""

    layers: nn.ModuleList
    log_count: Tensor
    input_number: Tensor

    def __init__(self, config: ModelConfig, training_counts: Tensor) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("log_count", training_counts.float().log1p(), persistent=False)
        self.register_buffer("input_number", _input_numbers(training_counts, config), persistent=False)
        self.item_embedding = nn.Embedding(FIRST_ITEM + len(training_counts), config.width)
        nn.init.normal_(self.item_embedding.weight, std=EMBEDDING_STD)
        if config.filtering:
            self.initial_precision = initial_precision(config, training_counts)
        self.head = GaussianHead(config)

    @abstractmethod
    def enter(self, items_BT: Tensor, weights_BT: Tensor, timestamps_BT: Tensor) -> tuple[Gaussian, Any]:
        """What the first layer is called with: the state before any layer, and the layers' sight (who sees whom).

        Args:
            items_BT, weights_BT, timestamps_BT: as in `encode`.
        """

    @abstractmethod
    def encode(
        self, items_BT: Tensor, weights_BT: Tensor, timestamps_BT: Tensor | None = None, steps: Steps = filtering
    ) -> Gaussian:
        """The filtered state at every position.

        Args:
            items_BT: int64 item numbers: BOS at position 0, events in time order, PAD on the right.
            weights_BT: event weights > 0, 1 on BOS.
            timestamps_BT: seconds, float64, NaN where an event has none; None: no event has one.
            steps: the filtering steps; an export passes its own.

        Returns:
            mean and precision (B,T,D); padding has mean 0 and precision 0. A plain backbone claims to know its
            state exactly: its precision is infinite.
        """

    def final_state(
        self, items_BT: Tensor, weights_BT: Tensor, timestamps_BT: Tensor | None = None, steps: Steps = filtering
    ) -> Gaussian:
        """The state (B,D) from which the next event is predicted: the last real position's."""
        return last_state(self.encode(items_BT, weights_BT, timestamps_BT, steps), items_BT)

    def reasons(
        self, items_BT: Tensor, weights_BT: Tensor, timestamps_BT: Tensor | None = None, steps: Steps = filtering
    ) -> Reasons:
        """Whom the state of `final_state` heard in the last layer."""
        *before_last, last_layer = self.layers
        state, sight = self.enter(items_BT, weights_BT, times(timestamps_BT, items_BT))
        for layer in before_last:
            state, _ = layer(state, sight, steps=steps)
        shares_BTT = cast(Any, last_layer).shares(state, sight).mean(1)
        precision_BT = torch.where(items_BT != PAD, state.precision.mean(-1), 0)
        return Reasons(_at_last(shares_BTT, items_BT), precision_BT)

    @property
    def num_items(self) -> int:
        """N, catalogue items without the special tokens."""
        return len(self.log_count)

    def catalogue(self) -> Tensor:
        """The N items (N,D) as the head reads them."""
        return self.head.items(self.item_embedding.weight[FIRST_ITEM:])

    def score(self, state: Gaussian, items_M: Tensor | None = None) -> Scores:
        """Scores (R,M) of candidates for states (R,D); all N catalogue items, in order, when none are named.

        Args:
            state: mean and precision (R,D).
            items_M: catalogue rows (item number − FIRST_ITEM), or None.
        """
        catalogue, variance = self.catalogue(), self.head.candidate_variance(self.log_count)
        mean = catalogue.mean(0)
        if items_M is None:
            return self.head(state, catalogue, variance, mean)
        return self.head(state, catalogue[items_M], variance[items_M], mean)

    def score_pairs(self, state: Gaussian, items_R: Tensor) -> Scores:
        """Scores (R,) of one catalogue row for each state (R,D)."""
        catalogue, variance = self.catalogue(), self.head.candidate_variance(self.log_count)
        return self.head.pairs(state, catalogue[items_R], variance[items_R], catalogue.mean(0))

    def embed(self, items_BT: Tensor) -> Tensor:
        """Item embeddings (B,T,D), scaled by √D; what the model has not learned as an input is read as UNK."""
        return self.item_embedding(self.input_number[items_BT]) * math.sqrt(self.config.width)

    def prior(self, mean_BTD: Tensor, items_BT: Tensor, weights_BT: Tensor) -> Gaussian:
        """The embedded positions with their initial precision; dropout acts on the mean."""
        dropped = apply_dropout(mean_BTD, self.config.dropout, self.training)
        if not self.config.filtering:
            return Gaussian(dropped, torch.full_like(dropped, math.inf))
        embedding = self.item_embedding.weight
        precision = self.initial_precision(self.input_number[items_BT], weights_BT, embedding)
        return Gaussian(dropped, precision[..., None].expand_as(dropped))


class Cache(NamedTuple):
    """What a causal encoder keeps of the positions it has read, so that `CausalBackbone.step` need not read them again.

    `key`, `value` (B,Y,H,S,C) and `log_precision` (B,Y,S), log λ̄, of every layer, `timestamps` (B,S) as the encoder
    was told them; the first `length` (B,) of the S positions are real, the others padding.
    """

    key: Tensor
    value: Tensor
    log_precision: Tensor
    timestamps: Tensor
    length: Tensor

    @classmethod
    def of(cls, shown: Sequence[Neighbours], timestamps_BT: Tensor, real_BT: Tensor) -> "Cache":
        """From what the layers' positions showed."""
        return cls(
            key=torch.stack([layer.key for layer in shown], 1),
            value=torch.stack([layer.value for layer in shown], 1),
            log_precision=torch.stack([layer.precision.log() for layer in shown], 1),
            timestamps=timestamps_BT,
            length=real_BT.sum(1),
        )

    def layer(self, index: int) -> Neighbours:
        """What one layer's positions show."""
        return Neighbours(self.key[:, index], self.value[:, index], self.log_precision[:, index].exp())

    def extended(self, added: "Cache") -> "Cache":
        """The cache of these positions and the added ones behind them, all padding on the right."""
        real_BS = torch.cat([self._real(), added._real()], 1)
        order_BS = (~real_BS).int().argsort(dim=1, stable=True)[:, : int(real_BS.sum(1).max())]

        def placed(past: Tensor, new: Tensor, order: Tensor, axis: int) -> Tensor:
            return torch.cat([past, new], axis).take_along_dim(order, axis)

        return Cache(
            placed(self.key, added.key, order_BS[:, None, None, :, None], 3),
            placed(self.value, added.value, order_BS[:, None, None, :, None], 3),
            placed(self.log_precision, added.log_precision, order_BS[:, None], 2),
            placed(self.timestamps, added.timestamps, order_BS, 1),
            self.length + added.length,
        )

    def _real(self) -> Tensor:
        return torch.arange(self.timestamps.shape[1], device=self.length.device) < self.length[:, None]


class Sight(NamedTuple):
    """Where positions stand and whom they see.

    `position` (B,T) or (1,T), counted from BOS; `neighbour_position` (B,S) or (1,S); `visible` (B,T,S), bool. The
    S neighbours are the cached positions, then the T ones themselves. No position is beyond max_len, padding neither.
    """

    position: Tensor
    neighbour_position: Tensor
    visible: Tensor


class CausalBackbone(Backbone):
    """A backbone in which a later event never changes an earlier position's state: events can be folded in one by one.

    To encode a history and to fold events into a cached one is the same computation, `read`.
    """

    causal: ClassVar[bool] = True

    @abstractmethod
    def enter(
        self, items_BT: Tensor, weights_BT: Tensor, timestamps_BT: Tensor, cache: Cache | None = None
    ) -> tuple[Gaussian, Any]:
        """See `Backbone.enter`; with a cache, of T positions that follow the cached ones and see them."""

    def read(
        self, cache: Cache | None, items_BT: Tensor, weights_BT: Tensor, timestamps_BT: Tensor, steps: Steps
    ) -> tuple[Gaussian, list[Neighbours]]:
        """The state at T positions that follow the cached ones, and what they show in every layer; see `step`."""
        state, sight = self.enter(items_BT, weights_BT, timestamps_BT, cache)
        shown = []
        for index, layer in enumerate(self.layers):
            state, neighbours = layer(state, sight, cache and cache.layer(index), steps)
            shown.append(neighbours)
        return without_padding(state, items_BT != PAD), shown

    def last_states(self, items_BT: Tensor, weights_BT: Tensor, timestamps_BT: Tensor | None = None) -> Gaussian:
        """What `final_state` gives, in about half the time: the last layer is asked at each row's last position alone.

        Args:
            items_BT, weights_BT, timestamps_BT: as in `encode`, at least one real position a row.
        """
        state, sight = self.enter(items_BT, weights_BT, times(timestamps_BT, items_BT))
        *before_last, last_layer = self.layers
        for layer in before_last:
            state, _ = layer(state, sight)
        last_B = (items_BT != PAD).sum(1) - 1
        asked = Gaussian(*(_at(part, last_B)[:, None] for part in state))
        final, _ = last_layer(asked, _asked_at(sight, last_B), cast(Any, last_layer).shown(state))
        return Gaussian(final.mean[:, 0], final.precision[:, 0])

    def encode(
        self, items_BT: Tensor, weights_BT: Tensor, timestamps_BT: Tensor | None = None, steps: Steps = filtering
    ) -> Gaussian:
        """See `Backbone.encode`; T ≤ max_len + 1."""
        return self.read(None, items_BT, weights_BT, times(timestamps_BT, items_BT), steps)[0]

    def step(
        self,
        cache: Cache | None,
        items_BT: Tensor,
        weights_BT: Tensor,
        timestamps_BT: Tensor | None = None,
        steps: Steps = filtering,
    ) -> tuple[Gaussian, Cache]:
        """Fold T further positions into a cached state, in O(T·(S+T)·D) (math.md, "What must hold", 4).

        Args:
            cache: of the S positions before, BOS among them; None: these are the first, BOS among them.
            items_BT, weights_BT, timestamps_BT, steps: as in `encode`; with the cached ones at most max_len + 1
                positions.

        Returns:
            the filtered state (B,T,D) at each of the T positions, and what they add to the cache.
        """
        timestamps_BT = times(timestamps_BT, items_BT)
        state, shown = self.read(cache, items_BT, weights_BT, timestamps_BT, steps)
        return state, Cache.of(shown, timestamps_BT, items_BT != PAD)

    def sight(self, cache: Cache | None, real_BT: Tensor) -> Sight:
        """Each position sees the real ones up to itself."""
        place = torch.arange(real_BT.shape[1], device=real_BT.device)
        visible = (place[None, :] <= place[:, None])[None] & real_BT[:, None, :]
        if cache is None:
            return Sight(place[None], place[None], visible)
        position = (cache.length[:, None] + place).clamp_max(self.config.max_len)
        past = torch.arange(cache.timestamps.shape[1], device=real_BT.device)
        past_is_real = (past < cache.length[:, None])[:, None, :].expand(-1, place.shape[0], -1)
        return Sight(
            position,
            torch.cat([past.expand(position.shape[0], -1), position], 1),
            torch.cat([past_is_real, visible], 2),
        )


def times(timestamps_BT: Tensor | None, items_BT: Tensor) -> Tensor:
    """The timestamps (B,T); NaN throughout where none were given."""
    return torch.full_like(items_BT, math.nan, dtype=torch.float64) if timestamps_BT is None else timestamps_BT


def last_state(state: Gaussian, items_BT: Tensor) -> Gaussian:
    """The state (B,D) at each row's last real position; of a row of padding, its first."""
    return Gaussian(_at_last(state.mean, items_BT), _at_last(state.precision, items_BT))


def _at_last(values_BTX: Tensor, items_BT: Tensor) -> Tensor:
    """The values (B,X) at each row's last real position."""
    return _at(values_BTX, ((items_BT != PAD).sum(1) - 1).clamp_min(0))


def _at(values_BTX: Tensor, position_B: Tensor) -> Tensor:
    """The values (B,X) at one position of each row."""
    return values_BTX.gather(1, position_B[:, None, None].expand(-1, 1, values_BTX.shape[-1]))[:, 0]


def _asked_at(sight: Any, position_B: Tensor) -> Any:
    """The sight of one position of each row, (B,1,T+1): of all T as before, and of itself last, once.

    Args:
        sight: `visible` (B,T,T), or relations of such tensors of which `visible` is the first.
        position_B: which.
    """

    def asked(relation: Tensor) -> Tensor:
        row_BT = _at(relation.expand(len(position_B), -1, -1), position_B)
        return torch.cat([row_BT, row_BT.gather(1, position_B[:, None])], 1)[:, None]

    if isinstance(sight, Tensor):
        visible = asked(sight)
        return visible.scatter(2, position_B[:, None, None], False)
    visible, *others = map(asked, sight)
    return type(sight)(visible.scatter(2, position_B[:, None, None], False), *others)


def without_padding(state: Gaussian, real_BT: Tensor) -> Gaussian:
    """The state with mean 0 and precision 0 on padding."""
    real_BT1 = real_BT[..., None]
    return Gaussian(torch.where(real_BT1, state.mean, 0), torch.where(real_BT1, state.precision, 0))


def _input_numbers(training_counts: Tensor, config: ModelConfig) -> Tensor:
    """The number under which each item enters the encoder: its own, or UNK below `min_input_count` uses."""
    numbers = torch.arange(FIRST_ITEM + len(training_counts))
    numbers[FIRST_ITEM:][training_counts < config.min_input_count] = UNK
    return numbers
