"""Nobody gets another user's data (benchmarks/wrong_user.py), and the check would notice (benchmarks/_answers.py)."""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.service.measured import ROOT, assert_all_met, run_quick

Faults = Callable[[dict[str, Any]], list[str]]


@pytest.mark.timeout(300)
def test_nobody_gets_another_users_data_while_clients_disconnect(tiny: Path) -> None:
    assert_all_met(run_quick("wrong_user.py", tiny))


# ---- the check itself ------------------------------------------------------------------------------------

ANNS, BOBS = ["a1", "a2", "a3"], ["b1", "b2"]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("_answers")


def listed(items: Sequence[str], first_score: float, num_events: int, name: str = "b000-1") -> dict[str, Any]:
    """An answer with these items, best first."""
    shown = [
        {"item_id": item, "score": first_score - place, "confidence": 0.1 / (place + 1)}
        for place, item in enumerate(items)
    ]
    degraded = [] if num_events else ["state_unavailable"]
    return {"recommendation_id": name, "items": shown, "num_events": num_events, "degraded": degraded}


def export(user: str, items: Sequence[str], recommendations: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "user_id": user,
        "num_events": len(items),
        "events": [{"item_id": item} for item in items[-2:]],
        "seen_item_ids": list(items),
        "recommendations": [{"recommendation_id": name} for name in recommendations],
    }


ANN_LISTED = listed(["x", "y", "z", "b1"], 5.0, 3)
BOB_LISTED = listed(["y", "x", "a1", "z"], 4.0, 2, "b000-2")
NOBODY_LISTED = listed(["z", "y", "x", "a1"], 3.0, 0, "b000-3")


@pytest.fixture
def checks(answers: ModuleType) -> dict[str, Faults]:
    """For Ann, who was given the list b000-1; b000-2 is Bob's."""
    ann = answers.Known("ann", ANNS, 2, answers.Listed.of(ANN_LISTED))
    nobody = answers.Listed.of(NOBODY_LISTED)
    observed = answers.Observed(owner={"b000-2": "bob"})
    return {
        "list": lambda answer: answers.faults_of_list(answer, ann, nobody, observed, 4),
        "page": lambda answer: answers.faults_of_page(answer, ann, nobody, observed, "b000-1", {"x"}),
        "ranking": lambda answer: answers.faults_of_ranking(answer, ann, nobody, observed, ["x", "z"]),
        "export": lambda answer: answers.faults_of_export(answer, ann, observed),
        "writer": lambda answer: answers.faults_of_writer_export(answer, "ann", set(ANNS), {"a1"}),
        "batch": lambda answer: answers.faults_of_batch(
            answer, [lambda body: answers.faults_of_list(body, ann, nobody, observed, 4)]
        ),
    }


OWN = {
    "list": ANN_LISTED,
    "page": {**ANN_LISTED, "items": ANN_LISTED["items"][1:3]},
    "ranking": {**ANN_LISTED, "items": [ANN_LISTED["items"][0], ANN_LISTED["items"][2]]},
    "export": export("ann", ANNS, ["b000-1"]),
    "writer": export("ann", ANNS),
    "batch": {"results": [{"status": 200, "body": ANN_LISTED}]},
}


@pytest.mark.parametrize("kind", OWN)
def test_the_check_passes_what_is_the_users_own(kind: str, checks: dict[str, Faults]) -> None:
    assert checks[kind](OWN[kind]) == []


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("list", BOB_LISTED),
        ("list", {**BOB_LISTED, "recommendation_id": "b000-1", "num_events": 3}),
        ("list", {**ANN_LISTED, "recommendation_id": "b000-2"}),
        ("list", {**ANN_LISTED, "num_events": 2}),
        ("list", {**ANN_LISTED, "items": ANN_LISTED["items"][:3]}),
        ("list", listed(["x", "y", "z", "a1"], 5.0, 3)),
        ("list", listed(["x", "y", "z", "b1"], 5.001, 3)),
        ("list", listed(["y", "x", "z", "b1"], 5.0, 3)),
        ("list", {**ANN_LISTED, "degraded": ["state_unavailable"], "num_events": 0}),
        ("page", {**OWN["page"], "recommendation_id": "b000-2"}),
        ("page", ANN_LISTED),
        ("page", {**OWN["page"], "items": ANN_LISTED["items"][2:0:-1]}),
        ("page", {**OWN["page"], "items": BOB_LISTED["items"][1:2]}),
        ("ranking", ANN_LISTED),
        ("ranking", {**OWN["ranking"], "items": [BOB_LISTED["items"][1], BOB_LISTED["items"][3]]}),
        ("export", export("bob", BOBS)),
        ("export", export("ann", BOBS)),
        ("export", export("ann", [*ANNS, "b1"])),
        ("export", export("ann", ANNS[:2])),
        ("export", export("ann", ANNS, ["b000-2"])),
        ("writer", export("bob", ANNS)),
        ("writer", export("ann", [*ANNS, "b1"])),
        ("writer", export("ann", ["a2"])),
        ("batch", {"results": [{"status": 200, "body": BOB_LISTED}]}),
        ("batch", {"results": [{"status": 500, "problem": {}}]}),
        ("batch", {"results": []}),
    ],
)
def test_the_check_notices_what_is_not(kind: str, answer: dict[str, Any], checks: dict[str, Faults]) -> None:
    assert checks[kind](answer) != []


def test_an_answer_for_nobody_passes_only_with_nobodys_list(checks: dict[str, Faults]) -> None:
    assert checks["list"](NOBODY_LISTED) == []
