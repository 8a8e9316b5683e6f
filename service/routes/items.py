"""`GET /v1/items/{id}/similar`."""

from typing import Annotated

from fastapi import APIRouter, Query

from service.errors import problem_responses
from service.routes.dependencies import ContextDep, ItemIdDep, JsonRoute, ModelsDep
from service.routes.links import FIRST_ITEM, SIMILAR, linked
from service.schemas import MAX_RESULTS, SimilarItemsResponse

router = APIRouter(route_class=JsonRoute, tags=["items"])


@router.get(
    "/v1/items/{item_id}/similar",
    summary="The items most like one",
    responses=problem_responses(404, 422, 500, 503, 504) | linked(similar=(SIMILAR, FIRST_ITEM)),
)
async def similar_items(
    item_id: ItemIdDep,
    models: ModelsDep,
    context: ContextDep,
    num_results: Annotated[int, Query(ge=1, le=MAX_RESULTS)] = 25,
) -> SimilarItemsResponse:
    """By the cosine of the angle between the item embeddings of the served model; without the item itself."""
    with models.taken() as (model, ab_group):
        return await model.similar.to_item(item_id, num_results, context, ab_group)
