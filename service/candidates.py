"""What a model can list: its catalogue, and behind it the items that were added at run time (math.md, "Items that were
never trained").

N catalogue items · A added ones · D width
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from model.bundle import Bundle, Items
from model.config import FIRST_ITEM
from model.new_items import NewItem
from service.engine import AddedRows
from service.states.interface import AddedItems

NOTHING_ADDED = AddedItems(0, {})


class Placed(NamedTuple):
    """An added item among a model's items."""

    metadata: str
    """As the store has it: what the place follows from."""
    item: NewItem


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The items that a model can list at one moment, and their numbers, which of the added ones hold for this moment
    alone: a request takes the candidates once, and keeps them to its end."""

    items: Items
    """The catalogue: FIRST_ITEM … FIRST_ITEM+N−1."""
    source: AddedItems
    """What the store has; some of it the catalogue may know."""
    placed: Mapping[str, Placed]
    """By id: those that the catalogue does not know, FIRST_ITEM+N … FIRST_ITEM+N+A−1 in this order."""
    added_ids: tuple[str, ...]
    added_rows: AddedRows
    training_counts: npt.NDArray[np.int64]
    """(N+A,) 0 for the added ones."""
    _numbers: Mapping[str, int]

    @classmethod
    def of(cls, bundle: Bundle, source: AddedItems, before: "Candidates | None" = None) -> "Candidates":
        """A bundle's catalogue with what was added.

        Args:
            bundle: places the items by their metadata.
            source: of the store.
            before: candidates of the same bundle; whoever has the metadata of then has the place of then.
        """
        items, known = bundle.items, {} if before is None else before.placed
        placed = {
            item_id: known[item_id]
            if item_id in known and known[item_id].metadata == metadata
            else Placed(metadata, bundle.new_items.predict(json.loads(metadata)))
            for item_id, metadata in source.metadata.items()
            if items.number(item_id) is None
        }
        width = bundle.manifest.model.width
        mean = np.array([each.item.mean for each in placed.values()], np.float32).reshape(-1, width)
        variance = np.array([each.item.variance for each in placed.values()], np.float32)
        if not bundle.manifest.model.filtering:
            # A plain model claims to know everything exactly.
            variance = np.zeros_like(variance)
        return cls(
            items=items,
            source=source,
            placed=placed,
            added_ids=tuple(placed),
            added_rows=AddedRows(mean, variance),
            training_counts=np.concatenate([items.training_counts, np.zeros(len(placed), np.int64)]),
            _numbers={item_id: FIRST_ITEM + len(items) + place for place, item_id in enumerate(placed)},
        )

    def __len__(self) -> int:
        return len(self.items) + len(self.placed)

    def number(self, item_id: str) -> int | None:
        """The item's number, or None when nobody knows the id."""
        found = self.items.number(item_id)
        return self._numbers.get(item_id) if found is None else found

    def item_id(self, number: int) -> str:
        """The id behind a number of the catalogue or of an added item."""
        added = number - FIRST_ITEM - len(self.items)
        return self.items.item_id(number) if added < 0 else self.added_ids[added]

    def is_added(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which numbers are those of added items."""
        return np.greater_equal(numbers, FIRST_ITEM + len(self.items))


class Catalogue:
    """The candidates of one model as they are now.

    Args:
        bundle: the model's.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self.current = Candidates.of(bundle, NOTHING_ADDED)

    async def follow(self, added: AddedItems) -> None:
        """Take over what was added. In a thread: placing thousands of items takes longer than a request may."""
        if added.version != self.current.source.version:
            self.current = await asyncio.to_thread(Candidates.of, self._bundle, added, self.current)
