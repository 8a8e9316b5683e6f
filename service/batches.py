"""Several requests in one: each checked, answered and refused by itself, all under one deadline and one bound."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError

from service.context import RequestContext
from service.errors import ClientLeft, InvalidRequest, Overloaded, ServiceError, validation_problem
from service.schemas import BatchResult, RecommendationRequest, RecommendationResponse

logger = logging.getLogger(__name__)

Answer = Callable[[RecommendationRequest], Awaitable[RecommendationResponse]]


class Batches:
    """Answers batches. One batch counts as many requests as it holds.

    Args:
        max_requests: of all batches that are being worked on, together.
        max_parallel: of one batch, at a time.
    """

    def __init__(self, max_requests: int, max_parallel: int) -> None:
        self._max_requests = max_requests
        self._max_parallel = max_parallel
        self._num_requests = 0

    async def answer(self, sent: Sequence[Any], answer: Answer, request: RequestContext) -> list[BatchResult]:
        """A result for each request, in order.

        Args:
            sent: JSON values, not checked yet.
            answer: makes the answer to one.
            request: that brought them.

        Raises:
            Overloaded: too many requests are being worked on.
            ClientLeft: nobody waits.
            ServiceError: none of the acceptable requests could be answered, and the first for this reason.
        """
        with self._admitted(len(sent)):
            gate = asyncio.Semaphore(self._max_parallel)

            async def outcome_of(value: Any) -> RecommendationResponse | ServiceError:
                async with gate:
                    try:
                        return await answer(check_request(value))
                    except ServiceError as error:
                        return error
                    except Exception:
                        logger.exception("a request of a batch failed", extra={"request_id": request.request_id})
                        return ServiceError("unexpected error")

            outcomes = await asyncio.gather(*map(outcome_of, sent))
        # The log line of a batch names nobody rather than whoever came last.
        request.subject = None
        _raise_what_holds_for_all(outcomes)
        return [_result(outcome, request.request_id) for outcome in outcomes]

    @contextmanager
    def _admitted(self, num_requests: int) -> Iterator[None]:
        # Alone, a batch of any size goes, so that a large one is not refused for ever.
        if self._num_requests > 0 and self._num_requests + num_requests > self._max_requests:
            raise Overloaded(f"{self._num_requests} requests of batches are being worked on", retry_after_s=1)
        self._num_requests += num_requests
        try:
            yield
        finally:
            self._num_requests -= num_requests


def check_request(value: Any) -> RecommendationRequest:
    """A request of a batch.

    Raises:
        InvalidRequest: names the fields.
    """
    try:
        return RecommendationRequest.model_validate(value)
    except ValidationError as error:
        raise validation_problem([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from error


def _raise_what_holds_for_all(outcomes: Sequence[RecommendationResponse | ServiceError]) -> None:
    acceptable = [outcome for outcome in outcomes if not isinstance(outcome, InvalidRequest)]
    failures = [outcome for outcome in acceptable if isinstance(outcome, ServiceError)]
    for failure in failures:
        if isinstance(failure, ClientLeft) or len(failures) == len(acceptable):
            raise failure


def _result(outcome: RecommendationResponse | ServiceError, request_id: str) -> BatchResult:
    if isinstance(outcome, ServiceError):
        return BatchResult(status=outcome.status, problem=outcome.problem(request_id))
    return BatchResult(status=HTTPStatus.OK, body=outcome)
