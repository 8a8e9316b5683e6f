"""`GET` and `DELETE /v1/users/{id}`, `POST /v1/users/{id}/merge`."""

from fastapi import APIRouter

from service.errors import problem_responses
from service.routes.dependencies import ContextDep, JsonRoute, ServiceDep, UserIdDep
from service.routes.links import ERASE, EXPORT, MERGE, USER, linked
from service.schemas import ErasureResponse, MergeRequest, MergeResponse, UserResponse

router = APIRouter(route_class=JsonRoute, tags=["users"])


@router.get(
    "/v1/users/{user_id}",
    summary="Everything that is held of a user",
    responses=problem_responses(404, 422, 500, 503, 504) | linked(erase=(ERASE, USER), merge=(MERGE, USER)),
)
async def export_user(user_id: UserIdDep, service: ServiceDep, context: ContextDep) -> UserResponse:
    """The kept events, oldest first, every item ever seen, and the lists that are kept for their further pages.
    Sessions cannot be exported: nobody can show that one is theirs."""
    return await service.users.export(user_id, context)


@router.delete(
    "/v1/users/{user_id}",
    summary="Erase a user",
    responses=problem_responses(422, 500, 503, 504) | linked(export=(EXPORT, USER)),
)
async def erase_user(user_id: UserIdDep, service: ServiceDep, context: ContextDep) -> ErasureResponse:
    """Removes everything that is held of a user, and tells retraining. Events dated before the erasure are
    refused afterwards, undated ones for ten minutes. Harmless to repeat."""
    return await service.users.erase(user_id, context)


@router.post(
    "/v1/users/{user_id}/merge",
    summary="Make a session's events a user's",
    responses=problem_responses(400, 408, 409, 413, 415, 422, 500, 503, 504) | linked(export=(EXPORT, USER)),
)
async def merge_session(
    user_id: UserIdDep, asked: MergeRequest, service: ServiceDep, context: ContextDep
) -> MergeResponse:
    """After a login: the user has the session's events, each once, in the order of their time, and the items that it
    had seen; the session is empty, and a later event on it begins a new one. Harmless to repeat, and a repetition
    completes a merge that was interrupted; of a session that is empty or unknown nothing is merged. A session whose
    merge into another user has begun and is not complete is 409: nobody else gets its events."""
    return await service.users.merge(user_id, asked.from_session_id, context)
