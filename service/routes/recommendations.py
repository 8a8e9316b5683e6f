"""`POST /v1/recommendations`, its further pages, and several at once."""

from fastapi import APIRouter

from service.errors import problem_responses
from service.routes.dependencies import BatchesDep, ContextDep, JsonRoute, ModelsDep, RecommendationIdDep, SlatesDep
from service.routes.links import FIRST_ITEM, NEXT_PAGE, RECOMMENDATION, SIMILAR, linked
from service.schemas import (
    BatchRequest,
    BatchResponse,
    NextPageRequest,
    RecommendationRequest,
    RecommendationResponse,
)

router = APIRouter(route_class=JsonRoute, tags=["recommendations"])


@router.post(
    "/v1/recommendations",
    summary="A ranked list with a calibrated confidence for each item",
    responses=problem_responses(400, 408, 413, 415, 422, 500, 503, 504)
    | linked(next_page=(NEXT_PAGE, RECOMMENDATION), similar=(SIMILAR, FIRST_ITEM)),
)
async def recommend(asked: RecommendationRequest, models: ModelsDep, context: ContextDep) -> RecommendationResponse:
    """For a stored user or session, or for a history told in the request. A subject that nobody has seen gets
    the list of a user before any event, `cold_start: true`. A policy orders the list, by default the likeliest item
    first, and changes nothing of what is said of an item. While the stored state is unavailable the answer
    is made from `fallback_history`, and `degraded` says so."""
    with models.taken(asked.subject) as (model, ab_group):
        return await model.recommender.recommend(asked, context, ab_group)


@router.post(
    "/v1/recommendations/batch",
    summary="Several lists at once",
    responses=problem_responses(400, 408, 413, 415, 422, 500, 503, 504),
)
async def recommend_batch(
    asked: BatchRequest, models: ModelsDep, batches: BatchesDep, context: ContextDep
) -> BatchResponse:
    """A result for each request, in order, with the status and the body that it would have alone: a wrong one is
    refused and holds up no other. They share the deadline. Only when no acceptable one can be answered the whole
    answer is an error."""

    async def answer(one: RecommendationRequest) -> RecommendationResponse:
        with models.taken(one.subject) as (model, ab_group):
            return await model.recommender.recommend(one, context, ab_group)

    return BatchResponse(results=await batches.answer(asked.requests, answer, context))


@router.post(
    "/v1/recommendations/{recommendation_id}/next",
    summary="The next page of a list",
    responses=problem_responses(400, 404, 408, 413, 415, 422, 500, 503, 504)
    | linked(next_page=(NEXT_PAGE, RECOMMENDATION)),
)
async def next_page(
    recommendation_id: RecommendationIdDep,
    asked: NextPageRequest,
    models: ModelsDep,
    slates: SlatesDep,
    context: ContextDep,
) -> RecommendationResponse:
    """More items under the same filters and the same policy and seed, by what is known of the subject now; `rank` goes
    on counting. No item of an earlier page comes again, also when two calls run at the same time. At the end the page
    is shorter, then empty. 404 when the list is kept no longer: after its time, after the user's erasure or the
    session's merge, and of a list that could not be kept."""
    with context.timed("state"):
        slate = await slates.load(recommendation_id)
    with models.taken(slate.asked.subject) as (model, ab_group):
        return await model.recommender.next_page(slate, asked.num_results, context, ab_group, asked.explain)
