"""Where an answer leads: the links of the document (OpenAPI, "Link Object"), from a value in an answer to the call that
takes it. Clients may read them; `benchmarks/bad_input.py` walks the API along them."""

from collections.abc import Mapping
from typing import Any

# The ids that FastAPI gives operations: name of the function, path, method.
NEXT_PAGE = "next_page_v1_recommendations__recommendation_id__next_post"
SIMILAR = "similar_items_v1_items__item_id__similar_get"
EXPORT = "export_user_v1_users__user_id__get"
ERASE = "erase_user_v1_users__user_id__delete"
MERGE = "merge_session_v1_users__user_id__merge_post"
VERSION = "model_metadata_of_version_v2_models__name__versions__version__get"
VERSION_READY = "model_ready_of_version_v2_models__name__versions__version__ready_get"
VERSION_INFER = "infer_of_version_v2_models__name__versions__version__infer_post"
PUT_ACTIVE = "put_active_v1_models_active_put"
GET_ACTIVE = "get_active_v1_models_active_get"
GET_ITEM = "get_item_v1_items__item_id__get"
DELETE_ITEM = "delete_item_v1_items__item_id__delete"

Link = tuple[str, Mapping[str, str]] | tuple[str, Mapping[str, str], Mapping[str, str]]
"""An operation, its parameters, and perhaps its body, as runtime expressions over the request and the answer before."""

RECOMMENDATION: Mapping[str, str] = {"recommendation_id": "$response.body#/recommendation_id"}
FIRST_ITEM: Mapping[str, str] = {"item_id": "$response.body#/items/0/item_id"}
ITEM: Mapping[str, str] = {"item_id": "$response.body#/item_id"}
USER: Mapping[str, str] = {"user_id": "$response.body#/user_id"}
FIRST_USER: Mapping[str, str] = {"user_id": "$request.body#/events/0/user_id"}
FIRST_VERSION: Mapping[str, str] = {"name": "$response.body#/name", "version": "$response.body#/versions/0"}
ETAG: Mapping[str, str] = {"if-match": "$response.header.etag"}
DEFAULT: Mapping[str, str] = {"default": "$response.body#/default"}
DEFAULT_OF_ALL: Mapping[str, str] = {"default": "$response.body#/active/default"}


def linked(**links: Link) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route: the links of its answer 200."""
    return {200: {"links": {name: _link(*link) for name, link in links.items()}}}


def _link(operation: str, parameters: Mapping[str, str], body: Mapping[str, str] | None = None) -> dict[str, Any]:
    described: dict[str, Any] = {"operationId": operation, "parameters": dict(parameters)}
    return described if body is None else {**described, "requestBody": dict(body)}
