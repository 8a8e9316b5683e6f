"""`GET` and `DELETE /v1/users/{id}`."""

from fastapi import APIRouter

from service.errors import problem_responses
from service.routes.dependencies import ContextDep, JsonRoute, ServiceDep, UserIdDep
from service.schemas import ErasureResponse, UserResponse

router = APIRouter(route_class=JsonRoute, tags=["users"])


@router.get(
    "/v1/users/{user_id}",
    summary="Everything that is held of a user",
    responses=problem_responses(404, 422, 500, 503),
)
async def export_user(user_id: UserIdDep, service: ServiceDep, context: ContextDep) -> UserResponse:
    """The kept events, oldest first, and every item ever seen."""
    return await service.users.export(user_id, context)


@router.delete(
    "/v1/users/{user_id}",
    summary="Erase a user",
    responses=problem_responses(422, 500, 503),
)
async def erase_user(user_id: UserIdDep, service: ServiceDep, context: ContextDep) -> ErasureResponse:
    """Removes everything that is held of a user, and tells retraining. Events dated before the erasure are
    refused afterwards, undated ones for ten minutes. Harmless to repeat."""
    return await service.users.erase(user_id, context)
