"""Items added at run time: put, removed, looked up, and followed by every replica (docs/service.md, "Items added at run
time").

The store has them, once for all replicas, under a version that each of them asks for again and again. Every model
places them among its own items.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from model.bundle import Bundle
from model.new_items import ACCEPTED, Metadata
from service.candidates import NOTHING_ADDED
from service.errors import AddedItemNotFound, FieldError, InvalidRequest, ItemInCatalogue, ItemsFull
from service.models import Model, Models
from service.schemas import AddedItemResponse, AddedItemsResponse, ItemInModel, ItemPlace
from service.states.interface import PutStatus, StateError, Store
from service.values import MAX_METADATA_BYTES

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Put:
    """What came of putting an item."""

    item: AddedItemResponse
    is_new: bool


class RunTimeItems:
    """The items added at run time, as this replica knows them.

    Args:
        store: has them.
        models: whose catalogues follow them.
    """

    def __init__(self, store: Store, models: Models) -> None:
        self._store = store
        self._models = models
        self._current = NOTHING_ADDED
        # Two refreshes at a time could end in the wrong order.
        self._turn = asyncio.Lock()
        self._is_reached = True

    async def refresh(self) -> None:
        """Ask for a newer version, and let every model that answers follow.

        Raises:
            StateError: the store does not answer; what was known stays.
        """
        async with self._turn:
            newer = await self._store.added_items(self._current.version)
            if newer is not None:
                self._current = newer
                logger.info("items added at run time", extra={"number": len(newer.metadata), "version": newer.version})
            # Models that were taken up since are behind, too.
            for model in self._models.active.models:
                await model.catalogue.follow(self._current)

    async def watch(self, poll_s: float) -> None:
        """Follow the store, for ever: ask every `poll_s` seconds."""
        while True:
            await asyncio.sleep(poll_s)
            await self.try_refresh()

    async def try_refresh(self) -> None:
        """Refresh, or tell the log, once, that it cannot be done."""
        try:
            await self.refresh()
            self._is_reached = True
        except Exception as error:
            if self._is_reached:
                is_expected = isinstance(error, StateError)
                logger.warning("items added at run time are not followed: %s", error, exc_info=not is_expected)
            self._is_reached = False

    async def put(self, item_id: str, metadata: Metadata) -> Put:
        """Add an item, or give it other metadata; it can be listed here when this returns. Harmless to repeat.

        Raises:
            ItemInCatalogue: the default model was trained on it.
            InvalidRequest: the metadata are too long, or not of the kinds that a model was trained on.
            ItemsFull: there are as many as there may be.
            StateError: the store cannot do it now.
        """
        if self._models.active.default.bundle.items.number(item_id) is not None:
            raise ItemInCatalogue("the default model was trained with this item")
        for model in self._models.active.models:
            _check_kinds(metadata, model.bundle)
        packed = json.dumps(metadata, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        if len(packed.encode()) > MAX_METADATA_BYTES:
            raise InvalidRequest.of("metadata", f"must have at most {MAX_METADATA_BYTES} bytes of JSON")
        status = await self._store.put_item(item_id, packed)
        if status is PutStatus.full:
            raise ItemsFull("there are as many items added at run time as there may be")
        await self.refresh()
        return Put(self._described(item_id, packed), status is PutStatus.added)

    async def remove(self, item_id: str) -> bool:
        """Take an item away again; False when it was not there.

        Raises:
            StateError: the store cannot do it now.
        """
        is_removed = await self._store.remove_item(item_id)
        await self.refresh()
        return is_removed

    async def find(self, item_id: str) -> AddedItemResponse:
        """An item that was added, and its place in each model.

        Raises:
            AddedItemNotFound: it was not added.
            StateError: the store does not answer.
        """
        await self.refresh()
        packed = self._current.metadata.get(item_id)
        if packed is None:
            raise AddedItemNotFound("no such item was added at run time")
        return self._described(item_id, packed)

    async def page(self, after: str | None, limit: int) -> AddedItemsResponse:
        """The items that were added, by id.

        Args:
            after: the last id of the page before.
            limit: of the page.

        Raises:
            StateError: the store does not answer.
        """
        await self.refresh()
        current = self._current
        ids = sorted(item_id for item_id in current.metadata if after is None or item_id > after)
        return AddedItemsResponse(
            version=current.version,
            num_items=len(current.metadata),
            items=[self._described(item_id, current.metadata[item_id]) for item_id in ids[:limit]],
            next_after=ids[limit - 1] if len(ids) > limit else None,
        )

    def _described(self, item_id: str, packed: str) -> AddedItemResponse:
        metadata = json.loads(packed)
        models = self._models.active.models
        return AddedItemResponse(
            item_id=item_id, metadata=metadata, models=[_in_model(model, item_id, metadata) for model in models]
        )


def _in_model(model: Model, item_id: str, metadata: Metadata) -> ItemInModel:
    new_items = model.bundle.new_items
    if model.bundle.items.number(item_id) is not None:
        return ItemInModel(version=model.version, place=ItemPlace.superseded, unused=list(metadata))
    is_regressed = new_items.predict(metadata).is_regressed
    place = ItemPlace.metadata if is_regressed else ItemPlace.catalogue_mean
    return ItemInModel(version=model.version, place=place, unused=new_items.unused(metadata))


def _check_kinds(metadata: Metadata, bundle: Bundle) -> None:
    misfits: Sequence[FieldError] = [
        FieldError(
            field=f"metadata.{column.name}",
            message=f"must be {ACCEPTED[column.kind]}, or null, as the model {bundle.manifest.version} knows it",
        )
        for column in bundle.new_items.misfits(metadata)
    ]
    if misfits:
        raise InvalidRequest("; ".join(f"{each.field}: {each.message}" for each in misfits), fields=misfits)
