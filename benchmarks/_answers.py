"""Whose answer is it? What must be true of an answer to a user whose history and list are known."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Answer = Mapping[str, Any]
Check = Callable[[Answer], list[str]]
"""What is wrong with an answer; empty when it is the asked user's own."""

SCORE_TOLERANCE = 1e-4
TIE = 1e-5
"""Confidences that differ by less, relatively, may change places."""


@dataclass(frozen=True)
class Listed:
    """A list as it was given quietly: its items in order, with scores and confidences."""

    score: Mapping[str, float]
    confidence: Mapping[str, float]

    @classmethod
    def of(cls, answer: Answer) -> "Listed":
        items = answer["items"]
        return cls(
            {item["item_id"]: item["score"] for item in items}, {item["item_id"]: item["confidence"] for item in items}
        )

    def tie(self, one: str, other: str) -> bool:
        """Whether two of its items may change places."""
        first, second = self.confidence[one], self.confidence[other]
        return abs(first - second) <= TIE * max(first, second)


@dataclass(frozen=True)
class Known:
    """A user of whom everything is known."""

    user_id: str
    items: Sequence[str]
    """Of the events, in order; each once."""
    max_len: int
    """Events that the store keeps."""
    listed: Listed


@dataclass
class Observed:
    """What answers said so far."""

    owner: dict[str, str] = field(default_factory=dict)
    """Recommendation id → the user who got it."""
    recognised: int = 0
    """Answers with something of the user's own in them that no other user has."""
    degraded: int = 0


def faults_of_list(answer: Answer, known: Known, nobody: Listed, observed: Observed, num_results: int) -> list[str]:
    """A first page: the beginning of the user's own list, or of nobody's when the store was away."""
    owner = observed.owner.setdefault(answer["recommendation_id"], known.user_id)
    faults = [] if owner == known.user_id else [f"the recommendation was {owner}'s"]
    expected = _expected(answer, known, nobody, observed, faults)
    wanted = list(expected.score)[:num_results]
    found = [item["item_id"] for item in answer["items"]]
    if len(found) != len(wanted):
        faults.append(f"{len(found)} items, not {len(wanted)}")
    for item, other in zip(found, wanted, strict=False):
        if item != other and not (item in expected.score and expected.tie(item, other)):
            faults.append(f"{item} in the place of {other}")
    return [*faults, *_of_scores(answer["items"], expected)]


def faults_of_page(
    answer: Answer, known: Known, nobody: Listed, observed: Observed, recommendation_id: str, shown: set[str]
) -> list[str]:
    """A further page: items of the same list, in its order, that were not shown. Some may be missing: those of a page
    that was given out to a client that had left."""
    faults = [] if answer["recommendation_id"] == recommendation_id else ["it is a page of another list"]
    expected = _expected(answer, known, nobody, observed, faults)
    found = [item["item_id"] for item in answer["items"]]
    faults += [f"{item} was shown before" for item in shown.intersection(found)]
    place = {item: number for number, item in enumerate(expected.score)}
    for item, following in itertools.pairwise(item for item in found if item in place):
        if place[item] > place[following] and not expected.tie(item, following):
            faults.append(f"{item} before {following}")
    return [*faults, *_of_scores(answer["items"], expected)]


def faults_of_ranking(
    answer: Answer, known: Known, nobody: Listed, observed: Observed, candidates: Sequence[str]
) -> list[str]:
    """The candidates, with the scores that the user's own list has for them."""
    faults: list[str] = []
    expected = _expected(answer, known, nobody, observed, faults)
    if sorted(item["item_id"] for item in answer["items"]) != sorted(candidates):
        faults.append("the candidates are others")
    # Nobody's list may lack what the user's has.
    return [*faults, *_of_scores([item for item in answer["items"] if item["item_id"] in expected.score], expected)]


def faults_of_batch(answer: Answer, checks: Sequence[Check]) -> list[str]:
    """Each result, by the check of its request; one that was refused for the moment is no fault."""
    results = answer["results"]
    if len(results) != len(checks):
        return [f"{len(results)} results of {len(checks)} requests"]
    faults = []
    for result, check in zip(results, checks, strict=True):
        if result["status"] == 200:
            faults += check(result["body"])
        elif result["status"] not in (503, 504):
            faults.append(f"a result of status {result['status']}")
    return faults


def faults_of_export(answer: Answer, known: Known, observed: Observed) -> list[str]:
    """Exactly the user's events, and no list that another user got."""
    faults = [] if answer["user_id"] == known.user_id else [f"it is {answer['user_id']}'s"]
    if [event["item_id"] for event in answer["events"]] != list(known.items[-known.max_len :]):
        faults.append("the events are others")
    if sorted(answer["seen_item_ids"]) != sorted(known.items):
        faults.append("the seen items are others")
    if answer["num_events"] != len(known.items):
        faults.append(f"{answer['num_events']} events, not {len(known.items)}")
    for held in answer["recommendations"]:
        owner = observed.owner.get(held["recommendation_id"], known.user_id)
        if owner != known.user_id:
            faults.append(f"it has a recommendation of {owner}")
    observed.recognised += not faults
    return faults


def faults_of_writer_export(answer: Answer, user_id: str, own_items: set[str], acknowledged: set[str]) -> list[str]:
    """Of a user who is being written to: own items alone, and all that were acknowledged before the request."""
    faults = [] if answer["user_id"] == user_id else [f"it is {answer['user_id']}'s"]
    seen = {*answer["seen_item_ids"], *(event["item_id"] for event in answer["events"])}
    faults += [f"{item} is not theirs" for item in seen - own_items]
    faults += [f"{item} is missing" for item in acknowledged - set(answer["seen_item_ids"])]
    return faults


def _expected(answer: Answer, known: Known, nobody: Listed, observed: Observed, faults: list[str]) -> Listed:
    """The list that an answer must be of; what its count and items say otherwise is added to the faults."""
    if answer["degraded"]:
        observed.degraded += 1
        if answer["num_events"] != 0:
            faults.append(f"degraded, with {answer['num_events']} events")
        return nobody
    observed.recognised += 1
    if answer["num_events"] != len(known.items):
        faults.append(f"{answer['num_events']} events, not {len(known.items)}")
    own = set(known.items)
    faults += [f"{item['item_id']} was seen" for item in answer["items"] if item["item_id"] in own]
    return known.listed


def _of_scores(items: Sequence[Mapping[str, Any]], expected: Listed) -> Iterator[str]:
    for item in items:
        score = expected.score.get(item["item_id"])
        if score is None:
            yield f"{item['item_id']} is not in the list"
        elif abs(item["score"] - score) > SCORE_TOLERANCE:
            yield f"{item['item_id']} has score {item['score']}, not {score}"
