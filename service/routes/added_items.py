"""`GET /v1/items` and `PUT`, `GET`, `DELETE /v1/items/{id}`, on the admin listener."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from service.errors import problem_responses
from service.ingest import checked_field
from service.routes.dependencies import ItemIdDep, JsonRoute, RunTimeItemsDep
from service.routes.links import DELETE_ITEM, GET_ITEM, ITEM, linked
from service.schemas import ID_SCHEMA, AddedItemResponse, AddedItemsResponse, ItemRequest, RemovedItemResponse
from service.values import check_id

MAX_PAGE = 1000

router = APIRouter(route_class=JsonRoute, tags=["items added at run time"])


@router.get("/v1/items", summary="The items added at run time", responses=problem_responses(401, 422, 500, 503, 504))
async def list_added_items(
    items: RunTimeItemsDep,
    after: Annotated[str | None, Query(json_schema_extra=ID_SCHEMA)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
) -> AddedItemsResponse:
    """In the order of their ids, `limit` a page; `superseded` ones, which the model was trained with since, among
    them."""
    checked = None if after is None else checked_field("query after", check_id, after)
    return await items.page(checked, limit)


@router.put(
    "/v1/items/{item_id}",
    summary="Add an item",
    responses={201: {"model": AddedItemResponse, "description": "It was added"}}
    | problem_responses(400, 401, 408, 409, 413, 415, 422, 500, 503, 504)
    | linked(get=(GET_ITEM, ITEM), delete=(DELETE_ITEM, ITEM)),
)
async def put_item(
    item_id: ItemIdDep, asked: ItemRequest, items: RunTimeItemsDep, response: Response
) -> AddedItemResponse:
    """It can be recommended at once, on every replica within `BFT_ITEMS_POLL_S`, with a low confidence, until a model
    was trained with it. 201: it is new; 200: it was there, and has these metadata now. An item of the default model's
    catalogue is 409, and so is the 10,001st."""
    put = await items.put(item_id, asked.metadata)
    response.status_code = 201 if put.is_new else 200
    return put.item


@router.get(
    "/v1/items/{item_id}",
    summary="An item added at run time",
    responses=problem_responses(401, 404, 422, 500, 503, 504) | linked(delete=(DELETE_ITEM, ITEM)),
)
async def get_item(item_id: ItemIdDep, items: RunTimeItemsDep) -> AddedItemResponse:
    """Its metadata, and where each model that answers has it."""
    return await items.find(item_id)


@router.delete(
    "/v1/items/{item_id}",
    summary="Take an added item away",
    responses=problem_responses(401, 422, 500, 503, 504),
)
async def delete_item(item_id: ItemIdDep, items: RunTimeItemsDep) -> RemovedItemResponse:
    """It is not recommended any more. Events on it stay, and count once a model was trained with it. An item of the
    catalogue cannot be taken away: requests leave it out by `exclude_item_ids`. Harmless to repeat."""
    return RemovedItemResponse(item_id=item_id, removed=await items.remove(item_id))
