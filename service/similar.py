"""Similar items: by the cosine of the angle between their embeddings, read from the bundle's weights.

The embeddings are mapped into memory, not copied: the pages are those that ONNX Runtime maps for the graphs. A query
is one product of the matrix with a vector. Shapes: N items, D width.
"""

import asyncio
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import numpy.typing as npt

from model.bundle import WEIGHTS, Bundle, BundleError
from model.config import FIRST_ITEM
from service.candidates import Candidates, Catalogue
from service.context import RequestContext
from service.errors import DeadlinePassed, ItemNotFound, Overloaded
from service.filtered import Floats
from service.schemas import AbGroup, ModelName, SimilarItem, SimilarItemsResponse

EMBEDDING = "item_embedding.weight"
MAX_WAITING = 64
"""Queries that wait for their turn; beyond it, 503."""


class SimilarItems:
    """Neighbours in the space of the item embeddings.

    Args:
        bundle: the served one; its weights are opened at the first query.
        catalogue: what the model can list.
    """

    def __init__(self, bundle: Bundle, catalogue: Catalogue) -> None:
        self._bundle = bundle
        self._catalogue = catalogue
        self._model = ModelName(name=bundle.manifest.name, version=bundle.manifest.version)
        # One at a time: a query takes all the bandwidth of the memory anyhow.
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    async def to_item(
        self, item_id: str, num_results: int, request: RequestContext, ab_group: AbGroup = None
    ) -> SimilarItemsResponse:
        """The items nearest to one, without itself and retired ones.

        Raises:
            ItemNotFound: the catalogue does not know the id.
            Overloaded: too many queries wait.
            DeadlinePassed: while it waited.
            BundleError: the weights have no item embeddings of the right shape.
        """
        candidates = self._catalogue.current
        number = candidates.number(item_id)
        if number is None:
            raise ItemNotFound("the catalogue does not know this item")
        with self._waiting():
            try:
                async with asyncio.timeout(max(0.0, request.remaining_s())), self._turn:
                    numbers, similarities = await asyncio.to_thread(self.nearest, candidates, number, num_results)
            except TimeoutError as error:
                raise DeadlinePassed("the deadline passed while the request waited for its turn") from error
        nearest = zip(numbers.tolist(), similarities.tolist(), strict=True)
        return SimilarItemsResponse(
            item_id=item_id,
            model=self._model,
            items=[
                SimilarItem(item_id=candidates.item_id(number), rank=rank, similarity=similarity)
                for rank, (number, similarity) in enumerate(nearest, start=1)
            ],
            ab_group=ab_group,
        )

    def nearest(self, candidates: Candidates, number: int, size: int) -> tuple[npt.NDArray[np.int64], Floats]:
        """The nearest items, nearest first, and their cosines; here and now.

        Args:
            candidates: to look among.
            number: of one of them.
            size: of the list; it is shorter in a smaller catalogue.
        """
        row, added = number - FIRST_ITEM, candidates.added_rows.items
        # An item of which nothing is known is the catalogue's average, and like no other.
        is_placed = [place.item.is_regressed for place in candidates.placed.values()]
        added_inverse = np.where(is_placed, _inverse_norms(added), np.float32(0))
        num_known = len(self._embeddings)
        own = self._embeddings[row] if row < num_known else added[row - num_known]
        inverse = np.concatenate([self._inverse_norms, added_inverse])
        cosine: Floats = np.concatenate([self._embeddings @ own, added @ own]) * (inverse * inverse[row])
        left_out = np.union1d(candidates.items.retired - FIRST_ITEM, row)
        cosine[left_out] = -np.inf
        size = min(size, len(cosine) - len(left_out))
        best = np.argpartition(-cosine, size)[:size] if size else np.empty(0, np.int64)
        best = best[np.lexsort((best, -cosine[best]))]
        # Rounding may lead out of the range by the last digit.
        similarities: Floats = np.clip(cosine[best], -1.0, 1.0)
        return best + FIRST_ITEM, similarities

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(f"{self._num_waiting} requests for similar items wait", retry_after_s=1)
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    @cached_property
    def _embeddings(self) -> Floats:
        """(N,D), mapped."""
        return item_embeddings(self._bundle)

    @cached_property
    def _inverse_norms(self) -> Floats:
        """(N,)"""
        return _inverse_norms(self._embeddings)


def _inverse_norms(embeddings: Floats) -> Floats:
    """1/length of each row; 0 for an embedding of zeros, which is similar to nothing."""
    norms = np.sqrt(np.einsum("nd,nd->n", embeddings, embeddings))
    inverse: Floats = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > 0)
    return inverse


def item_embeddings(bundle: Bundle) -> Floats:
    """The embeddings of the catalogue's items (N,D), mapped from the bundle's weights.

    Raises:
        BundleError: they are not there, or not as many float32 as the manifest says.
    """
    path, shape = bundle.folder / WEIGHTS, (FIRST_ITEM + bundle.manifest.num_items, bundle.manifest.model.width)
    # Format of the file (huggingface/safetensors, "Format"): u64 size of the header, JSON header, then the numbers.
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(size)).get(EMBEDDING, {})
    found, (begin, end) = tuple(entry.get("shape", ())), entry.get("data_offsets", (0, 0))
    if entry.get("dtype") != "F32" or found != shape or end - begin != 4 * math.prod(shape):
        raise BundleError(
            f"{bundle.folder}: {WEIGHTS} has no {EMBEDDING} of {shape[0]} × {shape[1]} float32; export the bundle again"
        )
    mapped: Floats = np.memmap(path, dtype="<f4", mode="r", offset=8 + size + begin, shape=shape)[FIRST_ITEM:]
    return mapped
