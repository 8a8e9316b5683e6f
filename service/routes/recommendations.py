"""`POST /v1/recommendations`."""

from fastapi import APIRouter

from service.errors import problem_responses
from service.routes.dependencies import ContextDep, JsonRoute, ServiceDep
from service.schemas import RecommendationRequest, RecommendationResponse

router = APIRouter(route_class=JsonRoute, tags=["recommendations"])


@router.post(
    "/v1/recommendations",
    summary="A ranked list with a calibrated confidence for each item",
    responses=problem_responses(400, 408, 413, 415, 422, 500, 503, 504),
)
async def recommend(asked: RecommendationRequest, service: ServiceDep, context: ContextDep) -> RecommendationResponse:
    """For a stored user or session, or for a history told in the request. A subject that nobody has seen gets
    the list of a user before any event, `cold_start: true`. While the stored state is unavailable the answer
    is made from `fallback_history`, and `degraded` says so."""
    return await service.recommender.recommend(asked, context)
