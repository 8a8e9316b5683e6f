"""`POST /v1/rankings`."""

from fastapi import APIRouter

from service.errors import problem_responses
from service.routes.dependencies import ContextDep, JsonRoute, ModelsDep
from service.routes.links import FIRST_ITEM, SIMILAR, linked
from service.schemas import RankingRequest, RankingResponse

router = APIRouter(route_class=JsonRoute, tags=["rankings"])


@router.post(
    "/v1/rankings",
    summary="Given items, ranked",
    responses=problem_responses(400, 408, 413, 415, 422, 500, 503, 504) | linked(similar=(SIMILAR, FIRST_ITEM)),
)
async def rank(asked: RankingRequest, models: ModelsDep, context: ContextDep) -> RankingResponse:
    """Every candidate comes back once, ordered by the policy, whether the subject has had it or not; an id
    that was sent several times comes back once. Ids that the catalogue does not know stand last, `known: false`, in the
    order in which they were given. `confidence` is the number that a recommendation gives for the item."""
    with models.taken(asked.subject) as (model, ab_group):
        return await model.recommender.rank(asked, context, ab_group)
