"""`bft-train explain`: what is recorded inside a model, against the reference and against loops over users."""

import json
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest
import torch
from matplotlib.figure import Figure
from typer.testing import CliRunner, Result

from model import registry
from model.backbone import Backbone
from model.bundle import Items, items_frame
from model.bundle import write_bundle as write
from model.config import BOS, FIRST_ITEM, MASK, PAD, UNK, window_start
from model.weights import write_weights
from tests.behaviour.heard import expected_row
from tests.behaviour.instances import COUNTS, EVERY_CASE, MAX_LEN, NUM_ITEMS, Case, random_rows
from tests.model import stand_ins
from tests.tolerance import FLOAT32_TOL, FLOAT64_TOL, assert_close, assert_precision_close
from tests.training.histories import histories_of
from training import figures, survey
from training.batches import Batch, collate, serving_windows
from training.cli import app
from training.evaluate import score_users
from training.events import Columns, DataConfig, read_events
from training.explain import survey_text
from training.history import Explanation, ToldEvent, explain_history, read_history, user_history
from training.survey import BinnedMeans, Survey, Table
from training.tables import DataError
from training.trace import Trace, trace, with_query

ROOT = Path(__file__).resolve().parents[2]
every_case = pytest.mark.parametrize("case", EVERY_CASE)


def batch_of(seed: int, batch: int, length: int, dtype: torch.dtype = torch.float32) -> Batch:
    """Random rows, padded by two more positions."""
    rows = random_rows(seed, batch, length, dtype).padded(2)
    nothing = torch.zeros(0, dtype=torch.int64)
    return Batch(*rows, last=(rows.items != PAD).sum(1) - 1, positions=nothing, targets=nothing)


# --- what is recorded ---------------------------------------------------------------------------------------


@every_case
def test_recording_changes_no_bit_of_the_state_and_leaves_no_hook(case: Case) -> None:
    model = case.perturbed()
    batch = batch_of(1, batch=5, length=MAX_LEN - 1)
    rows = (batch.items, batch.weights, batch.timestamps)
    with torch.no_grad():
        before = model.final_state(*rows)

    recorded = trace(model, batch).final

    with torch.no_grad():
        after = model.final_state(*rows)
    for part in range(2):
        assert torch.equal(recorded[part], before[part])
        assert torch.equal(after[part], before[part])
    assert not any(layer._forward_pre_hooks for layer in model.modules())


@every_case
def test_weights_gains_sample_sizes_and_precisions_are_the_reference_s(case: Case) -> None:
    model = case.perturbed(torch.float64)
    # The buffers were made in float32; the reference has log(1+n) to its last digit.
    if case.filtering:
        model.initial_precision.log_count[FIRST_ITEM:] = COUNTS.double().log1p()
    batch = batch_of(2, batch=4, length=MAX_LEN - 1, dtype=torch.float64)
    items, weights, timestamps = (part.numpy() for part in with_query(model, batch))
    read_as = model.input_number.numpy()[items]

    seen = trace(model, batch)

    for row in range(len(items)):
        length = int((items[row] != PAD).sum())
        wanted = expected_row(model, *(part[row, :length] for part in (read_as, weights, timestamps)))
        for layer in range(model.config.num_layers):
            heard = seen.heard[layer]
            assert_close(heard.weights[row, :length, :length], wanted.weights[layer], FLOAT64_TOL, "weights")
            assert (heard.weights[row, :length, length:] == 0).all(), "padding is heard by nobody"
            sizes = wanted.effective_sample_size[layer]
            assert_close(heard.effective_sample_size[row, :length], sizes, FLOAT64_TOL, "effective sample size")
            if case.filtering:
                assert_close(seen.gain[layer][row, :length], wanted.gain[layer], FLOAT64_TOL, "gain")
        if case.filtering:
            assert_precision_close(seen.initial_precision[row, :length], wanted.initial_precision, FLOAT64_TOL)
            assert_precision_close(seen.final_precision[row, :length], wanted.final_precision, FLOAT64_TOL)
            assert (seen.initial_precision[row, length:] == 0).all()
        assert seen.last[row] == length - 1
    assert case.filtering or not seen.gain


@every_case
def test_what_a_position_gives_its_neighbours_sums_to_one(case: Case) -> None:
    seen = trace(case.perturbed(), batch_of(3, batch=5, length=MAX_LEN - 1))

    real = seen.items != PAD
    for heard in seen.heard:
        assert (heard.weights >= 0).all()
        assert_close(heard.weights.sum(-1)[real], torch.ones(int(real.sum())), FLOAT32_TOL)
        assert (heard.effective_sample_size[real] >= 1 - FLOAT32_TOL).all()


@pytest.mark.parametrize("backbone", ["sasrec", "hstu"])
def test_a_first_position_hears_itself_alone_and_its_gain_is_one_half(backbone: str) -> None:
    # τ ≡ 1 before training; n = 1 makes σ̂² = σ0² = 1, and K = 1/(1 + 1), whatever the item.
    model = Case(backbone, True).fresh(COUNTS, num_layers=1)

    seen = trace(model, collate(serving_windows(histories_of([[]]), MAX_LEN), torch.tensor([0])))

    assert seen.items.tolist() == [[BOS]]
    assert_close(seen.heard[0].weights, [[[1.0]]], FLOAT32_TOL)
    assert_close(seen.heard[0].effective_sample_size, [[1.0]], FLOAT32_TOL)
    assert_close(seen.gain[0], [[0.5]], FLOAT32_TOL)
    assert_close(seen.initial_precision, [[1.0]], FLOAT32_TOL)


def test_equal_precisions_give_softmax_attention_with_filtering_and_without() -> None:
    on, off = (Case("sasrec", filtering).fresh(COUNTS, num_layers=1) for filtering in (True, False))
    off.load_state_dict({name: on.state_dict()[name] for name in off.state_dict()})
    batch = collate(serving_windows(histories_of([[4, 5, 6, 7]]), MAX_LEN), torch.tensor([0]))

    with_filtering, without = (trace(model, batch).heard[0] for model in (on, off))

    assert_close(with_filtering.weights, without.weights, FLOAT32_TOL)
    assert_close(with_filtering.effective_sample_size, without.effective_sample_size, FLOAT32_TOL)


# --- over a data set ----------------------------------------------------------------------------------------


def many_users(seed: int = 0) -> Any:
    """Users of no event to three windows, with unknown items and weights, some of weight 0."""
    rng = np.random.default_rng(seed)
    users, weights, times = [], [], []
    for length in [0, 1, 1, 2, 3, 3, 5, 8, 9, 13, 20]:
        items = rng.integers(FIRST_ITEM, FIRST_ITEM + NUM_ITEMS, length)
        items[rng.random(length) < 0.2] = UNK
        users.append(items.tolist())
        weights.append(rng.choice([0.0, 0.5, 1.0, 2.0], length).tolist())
        times.append((1.7e9 + rng.uniform(0, 1e5, length).cumsum()).tolist())
    return histories_of(users, weights, times)


class Draws(NamedTuple):
    """Values of one quantity in one bin, user by user."""

    by_user: dict[int, list[float]]

    def mean(self) -> float:
        return float(np.mean([value for values in self.by_user.values() for value in values]))

    def half_width(self) -> float:
        """Of the 95 % interval of a ratio of sums over users, by the textbook's linearised variance."""
        mean, total = self.mean(), sum(map(len, self.by_user.values()))
        residuals = [sum(values) - len(values) * mean for values in self.by_user.values()]
        return 1.96 * math.sqrt(np.var(residuals, ddof=1) * len(residuals)) / total


def brute_force(model: Backbone, histories: Any) -> dict[str, dict[str, dict[str, Draws]]]:
    """table → bin → quantity → draws, from one user, position and layer at a time."""
    found: Any = defaultdict(lambda: defaultdict(lambda: defaultdict(lambda: Draws(defaultdict(list)))))
    windows = serving_windows(histories, model.config.max_len)
    for user in range(len(histories)):
        seen = trace(model, collate(windows, torch.tensor([user])))
        items = seen.items[0].tolist()
        last = len(items) - 1

        def keep(table: str, bin: str, place: int, *names: str, user: int = user, seen: Trace = seen) -> None:
            values: dict[str, float] = {
                "effective_sample_size": np.mean([float(heard.effective_sample_size[0, place]) for heard in seen.heard])
            }
            if model.config.filtering:
                values |= {
                    "gain": np.mean([float(gain[0, place]) for gain in seen.gain]),
                    "initial_precision": math.log(float(seen.initial_precision[0, place])),
                    "final_precision": math.log(float(seen.final_precision[0, place])),
                }
            for name in names or values:
                found[table][bin][name].by_user[user].append(values[name])

        for place, number in enumerate(items):
            event = number >= FIRST_ITEM or number == UNK
            if model.config.filtering:
                keep("by_item_frequency", frequency_name(number), place)
                if event:
                    keep("overall", "all events", place)
            answers = model.causal or place == last
            length = place if model.causal else place - 1
            if not answers:
                continue
            keep("by_history_length", length_name(length), place)
            if length > 0:
                for column, neighbour in (("bos", 0), ("first_event", 1)):
                    share = np.mean([float(heard.weights[0, place, neighbour]) for heard in seen.heard])
                    found["attention"][length_name(length)][column].by_user[user].append(share)
                found["attention"][length_name(length)]["if_all_alike"].by_user[user].append(1 / (place + 1))
    return found


def frequency_name(number: int) -> str:
    if number in (BOS, UNK, MASK):
        return {BOS: "BOS", UNK: "unknown", MASK: "MASK"}[number]
    uses = int(COUNTS[number - FIRST_ITEM])
    bounds = {"0": (0, 0), "1–2": (1, 2), "3–5": (3, 5), "6–20": (6, 20), "21–100": (21, 100), "101+": (101, 10**9)}
    return next(name for name, (low, high) in bounds.items() if low <= uses <= high)


def length_name(length: int) -> str:
    return next(name for name in ("0", "1", "2", "3–4", "5–8") if length <= int(name.split("–")[-1]))


def assert_table(table: Table, wanted: dict[str, dict[str, Draws]], num_layers: int) -> None:
    rows = {row["bin"]: row for row in table.to_json()}
    assert set(rows) == set(wanted)
    for bin, quantities in wanted.items():
        for name, draws in quantities.items():
            cell, log = rows[bin][name], name.endswith("_precision")
            found = math.log(cell["mean"]) if log else cell["mean"]
            assert_close(found, draws.mean(), FLOAT32_TOL, f"{bin} {name}")
            assert rows[bin]["positions"] == sum(map(len, draws.by_user.values()))
            assert rows[bin]["users"] == len(draws.by_user)
            if len(draws.by_user) == 1:
                assert cell["interval"] is None
            else:
                low, high = map(math.log, cell["interval"]) if log else cell["interval"]
                # Differences of squares: users that do not differ leave the root of the rounding error.
                assert (high - low) / 2 == pytest.approx(draws.half_width(), rel=1e-4, abs=1e-5), f"{bin} {name}"
            assert len(cell.get("layers", [])) == (num_layers if name in PER_LAYER else 0)


PER_LAYER = {"gain", "effective_sample_size", "bos", "first_event"}


@every_case
@pytest.mark.parametrize("chunk_users", [3, 256])
def test_a_survey_is_what_a_loop_over_users_positions_and_layers_finds(
    case: Case, chunk_users: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "CHUNK_USERS", chunk_users)
    model = case.perturbed()
    wanted = brute_force(model, many_users())

    found = survey.survey(model, COUNTS.numpy(), many_users())

    layers = model.config.num_layers
    assert found.num_users == 11
    assert_table(found.by_history_length, wanted["by_history_length"], layers)
    assert_table(found.attention_by_history_length, wanted["attention"], layers)
    if case.filtering:
        assert_table(found.overall, wanted["overall"], layers)
        assert_table(found.by_item_frequency, wanted["by_item_frequency"], layers)
    else:
        assert not found.filtering
        assert found.overall is found.by_item_frequency is found.by_sample_size is None


def test_gain_by_sample_size_takes_every_layer_of_every_event() -> None:
    model = Case("sasrec", True).perturbed()
    histories = many_users()
    pooled: dict[int, list[float]] = defaultdict(list)
    by_layer: list[dict[int, list[float]]] = [defaultdict(list) for _ in range(2)]
    for user in range(len(histories)):
        seen = trace(model, collate(serving_windows(histories, MAX_LEN), torch.tensor([user])))
        for place in range(1, seen.items.shape[1]):
            for layer, heard in enumerate(seen.heard):
                size = float(heard.effective_sample_size[0, place])
                bin = sum(size >= bound for bound in survey.SAMPLE_SIZES_FROM) - 1
                for values in (pooled, by_layer[layer]):
                    values[bin].append(float(seen.gain[layer][0, place]))

    tables = survey.survey(model, COUNTS.numpy(), histories).by_sample_size

    for table, wanted in zip(tables, (pooled, *by_layer), strict=True):
        assert table.filled().tolist() == sorted(wanted)
        for bin, gains in wanted.items():
            assert table.positions[bin] == len(gains)
            assert_close(table.columns["gain"].mean[0, bin], np.mean(gains), FLOAT32_TOL)


def test_a_user_s_many_positions_count_as_one_draw() -> None:
    # Two users who do not vary within themselves: ten times the positions must not narrow the interval.
    halves = []
    for repeats in (2, 20):
        means = BinnedMeans(["all"])
        values = torch.tensor([0.2, 0.6])[:, None].expand(2, repeats)
        means.add(torch.zeros(2, repeats, dtype=torch.int64), {"gain": values[None]})
        column = means.table().columns["gain"]
        assert column.mean[0, 0] == pytest.approx(0.4)
        halves.append(column.high[0, 0] - column.mean[0, 0])

    # The two users' means deviate by ∓0.2: a standard error of √(2·(0.2² + 0.2²))/2 = 0.2.
    assert halves == pytest.approx([1.96 * 0.2] * 2)


@pytest.mark.parametrize(
    ("max_len", "labels"),
    [(2, ["0", "1", "2"]), (8, ["0", "1", "2", "3–4", "5–8"]), (50, ["0", "1", "2", "3–4", "5–8", "9–16", "17–32"])],
)
def test_bins_of_history_length_double_and_end_with_the_window(max_len: int, labels: list[str]) -> None:
    bounds = survey.length_bounds(max_len)

    names = survey._range_labels(bounds, max_len)

    assert names[: len(labels)] == labels
    assert names[len(labels) :] == (["33–50"] if max_len == 50 else [])


def test_fewer_users_are_spread_over_all_of_them() -> None:
    histories = histories_of([[4 + user] * (user % 3) for user in range(10)])

    some = survey.some_users(histories, 4)

    assert some.user_ids == ["u0", "u2", "u5", "u7"]
    assert some.items.tolist() == [6, 6, 9, 9, 11]
    assert survey.some_users(histories, None) is histories
    assert survey.some_users(histories, 99) is histories


def test_nobody_to_look_at_is_an_error() -> None:
    with pytest.raises(DataError, match="no user"):
        survey.survey(Case("sasrec", True).perturbed(), COUNTS.numpy(), histories_of([]))


def test_users_before_any_event_leave_most_tables_empty_but_are_told_and_drawn(tmp_path: Path) -> None:
    nobody_knows = survey.survey(Case("sasrec", True).perturbed(), COUNTS.numpy(), histories_of([[], []]))

    fields = json.loads(json.dumps(nobody_knows.to_json(), allow_nan=False))
    assert fields["overall"] is None
    assert [row["bin"] for row in fields["by_item_frequency"]] == ["BOS"]
    assert [row["bin"] for row in fields["by_history_length"]] == ["0"]
    assert fields["attention_by_history_length"] == []
    assert "over 0 events of 2 users" in survey_text(nobody_knows)
    figures.save(figures.survey_figure(nobody_knows, "title"), tmp_path / "empty.png")
    png_size(tmp_path / "empty.png")


def surveys() -> Iterator[Survey]:
    for filtering in (True, False):
        yield survey.survey(Case("sasrec", filtering).perturbed(), COUNTS.numpy(), many_users())


def test_the_tables_show_the_means_and_half_of_their_intervals() -> None:
    on, off = surveys()
    gain, bos = on.overall.columns["gain"], off.attention_by_history_length.columns["bos"]

    text = survey_text(on, off)

    half = (gain.high[0, 0] - gain.low[0, 0]) / 2
    assert f"mean gain {gain.mean[0, 0]:.3f} ± {half:.3f} (layer 1 {gain.mean[1, 0]:.3f}, " in text
    last = text.split("attention of the position that answers")[1].splitlines()[-3]
    assert last.startswith("5–8")
    assert last.split()[8] == f"{bos.mean[0, 4]:.3f}"


# --- one history --------------------------------------------------------------------------------------------

TITLES = ["Cash $1 and $2_{", "映画", None, *["Title"] * (NUM_ITEMS - 3)]
ITEM_IDS = [f"id {row}" for row in range(NUM_ITEMS)]


def catalogue() -> Items:
    return Items(items_frame(ITEM_IDS, COUNTS.numpy(), TITLES))


def told(*ids: str, weights: tuple[float, ...] = ()) -> list[ToldEvent]:
    return [ToldEvent(item_id=id, weight=weight) for id, weight in zip(ids, weights or [1.0] * len(ids), strict=True)]


@every_case
def test_an_explanation_has_a_line_a_position_with_what_the_last_one_gives_it(case: Case) -> None:
    model = case.perturbed()

    explained = explain_history(model, catalogue(), "next_new_item", told("id 1", "nowhere", "id 5"))

    kinds = ["BOS", "event", "event", "event"] + ([] if case.causal else ["MASK"])
    assert [position.kind for position in explained.positions] == kinds
    assert [position.item_id for position in explained.positions[:4]] == [None, "id 1", "nowhere", "id 5"]
    assert [position.title for position in explained.positions[:4]] == [None, "映画", None, "Title"]
    assert [position.read_as_unknown for position in explained.positions[:4]] == [False, False, True, False]
    assert explained.unknown_item_ids == ["nowhere"]
    for layer in range(model.config.num_layers):
        assert sum(position.heard[layer] for position in explained.positions) == pytest.approx(1, abs=1e-5)
    for position in explained.positions:
        assert (position.gain is not None) == (position.final_precision is not None) == case.filtering
    assert json.loads(json.dumps(explained.to_json(), allow_nan=False))["num_events"] == 3


@every_case
def test_an_empty_history_is_a_user_before_any_event(case: Case) -> None:
    explained = explain_history(case.perturbed(), catalogue(), "next_item", [])

    assert [position.kind for position in explained.positions] == ["BOS"] + ([] if case.causal else ["MASK"])
    assert explained.num_events == 0
    assert len(explained.recommendations) == 5


def test_the_window_is_the_rule_s_and_events_of_weight_0_stay_out() -> None:
    ids = [ITEM_IDS[place % NUM_ITEMS] for place in range(15)]
    weights = tuple(0.0 if place == 14 else 1.0 + place for place in range(15))

    explained = explain_history(Case("sasrec", True).perturbed(), catalogue(), "next_item", told(*ids, weights=weights))

    start = window_start(14, MAX_LEN)
    assert (explained.num_events, explained.outside_window) == (14, start)
    assert [position.item_id for position in explained.positions[1:]] == ids[start:14]
    assert [position.weight for position in explained.positions[1:]] == list(weights[start:14])


def test_an_item_that_is_too_rare_is_told_from_one_that_nobody_knows() -> None:
    model = Case("sasrec", True).perturbed(min_input_count=5)

    explained = explain_history(model, catalogue(), "next_item", told("id 2", "id 7", "other"))

    assert [position.read_as_unknown for position in explained.positions] == [False, True, False, True]
    assert explained.unknown_item_ids == ["other"]


@every_case
@pytest.mark.parametrize("event", ["next_item", "next_new_item"])
def test_the_recommendations_are_the_first_places_of_the_evaluated_list(case: Case, event: Any) -> None:
    model = case.perturbed()
    ids, weights = ("id 3", "id 8", "id 1"), (1.0, 2.0, 0.0)
    history = histories_of([[FIRST_ITEM + int(id.split()[1]) for id in ids]], [list(weights)])
    scored = next(iter(score_users(model, history, event)))
    order = scored.logit[0].argsort(descending=True).tolist()[:5]

    explained = explain_history(model, catalogue(), event, told(*ids, weights=weights))

    assert [one.item_id for one in explained.recommendations] == [ITEM_IDS[row] for row in order]
    stds = [float(scored.variance[0, row].sqrt()) for row in order]
    assert [one.std for one in explained.recommendations] == pytest.approx(stds, abs=1e-6)


def test_a_catalogue_that_is_all_seen_leaves_nothing_to_recommend() -> None:
    explained = explain_history(Case("sasrec", True).perturbed(), catalogue(), "next_new_item", told(*ITEM_IDS))

    assert explained.recommendations == []


# A history as it is told


@pytest.mark.parametrize(
    ("text", "ids"),
    [("", []), (" ", []), ("50", ["50"]), ("50,181, 172 ", ["50", "181", "172"]), ("a b,ß/😀", ["a b", "ß/😀"])],
)
def test_a_history_is_item_ids_separated_by_commas(text: str, ids: list[str]) -> None:
    history = read_history(text)

    assert [event.item_id for event in history] == ids
    assert all(event.weight == 1 and event.timestamp is None for event in history)


def test_a_list_may_be_longer_than_any_file_s_name() -> None:
    ids = [f"item {place}" for place in range(2000)]

    assert [event.item_id for event in read_history(",".join(ids))] == ids


def test_a_user_s_events_are_what_the_log_says(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp,w\na,x,2,1e-6\nb,y,1,1\na,z\u00a0z,1,0\n")
    log = read_events(DataConfig(path=tmp_path / "log.csv", columns=Columns(weight="w")))

    events = user_history(log, "a")

    assert [(event.item_id, event.timestamp) for event in events] == [("z\u00a0z", 1.0), ("x", 2.0)]
    assert [event.weight for event in events] == pytest.approx([0, 1e-6])


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_history_is_a_file_put_into_time_order(suffix: str, tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {"item_id": ["007", "b,b", "c", "d"], "timestamp": [30.5, None, 10.0, 10.0], "weight": [1.0, 0.5, 0.0, None]}
    )
    path = tmp_path / f"history.{suffix}"
    {"csv": frame.write_csv, "jsonl": frame.write_ndjson, "parquet": frame.write_parquet}[suffix](path)

    history = read_history(str(path))

    assert [(event.item_id, event.timestamp, event.weight) for event in history] == [
        ("c", 10.0, 0.0),
        ("d", 10.0, 1.0),
        ("007", 30.5, 1.0),
        ("b,b", None, 0.5),
    ]


@pytest.mark.parametrize("time", ["1997-12-04T15:55:49Z", "1997-12-04T16:55:49+01:00", "1997-12-04 15:55:49"])
def test_a_time_is_iso_8601_too_and_utc_without_an_offset(time: str, tmp_path: Path) -> None:
    (tmp_path / "history.csv").write_text(f"item_id,timestamp\na,{time}\n")

    assert read_history(str(tmp_path / "history.csv"))[0].timestamp == 881_250_949


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("h.csv", "item_id,weight\na,1\nb,-1\n", r"h.csv row 2, field weight, value '-1': .*a weight is 0, or"),
        ("h.csv", "item_id,wieght\na,1\n", "row 1: unknown column wieght; accepted: item_id, timestamp, weight"),
        ("h.csv", "weight\n1\n", "has no column item_id; accepted: item_id, timestamp, weight"),
        ("h.csv", "item_id,weight\n,1\n", "row 1, field item_id"),
        ("h.csv", "item_id\na,b\n", "row 1 is not item_id"),
        ("h.csv", "item_id,timestamp\na,tomorrow\n", "row 1, field timestamp, value 'tomorrow'"),
        ("h.csv", "item_id,timestamp\na,1767225600000\n", "a timestamp is seconds since 1970"),
        ("h.csv", "item_id,weight\na,nan\n", "a weight is 0, or"),
        ("h.csv", "item_id,timestamp\na,nan\n", "a timestamp is seconds"),
        ("h.csv", "item_id\na\x07\n", "control characters"),
        ("h.csv", "", "has no column item_id"),
        ("h.jsonl", '{"item_id": "a"}\n["b"]\n', "row 2 is not item_id"),
        ("h.jsonl", '{"item_id": "a"\n', "cannot be read as jsonl"),
        ("h.jsonl", '{"item_id": ["a"]}\n', "field item_id"),
        ("h.parquet", "no parquet", "cannot be read as parquet"),
        ("h.xml", "<a/>", "is not a history; accepted: .csv, .jsonl"),
    ],
)
def test_a_bad_history_file_is_answered_with_row_field_and_value(
    name: str, content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)

    with pytest.raises(DataError, match=message):
        read_history(str(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "message"),
    [("a,,b", "--history, item 2, field item_id"), ("a\x1b[31m", "control characters"), ("nowhere.csv", "not exist")],
)
def test_a_bad_list_of_ids_is_answered_with_the_place(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_history(text)


# --- figures ------------------------------------------------------------------------------------------------


def png_size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG, from its header (RFC 2083)."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[-8:-4] == b"IEND"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def explained_at_random(case: Case, num_events: int, **changes: Any) -> Explanation:
    ids = [ITEM_IDS[place % NUM_ITEMS] for place in range(num_events)]
    return explain_history(case.perturbed(**changes), catalogue(), "next_item", told(*ids, "nowhere"))


@pytest.mark.parametrize(
    ("case", "num_events", "changes"),
    [
        (Case("sasrec", True), 3, {}),
        (Case("bert4rec", False), 3, {}),
        (Case("hstu", True), 2, {"num_layers": 7}),
        (Case("sasrec", True), 300, {"max_len": 400}),
    ],
    ids=["short", "plain", "deep", "long"],
)
def test_a_history_is_drawn_whatever_its_titles_its_length_and_the_model(
    case: Case, num_events: int, changes: dict[str, int], tmp_path: Path
) -> None:
    figures.save(figures.history_figure(explained_at_random(case, num_events, **changes), "title"), tmp_path / "h.png")

    width, height = png_size(tmp_path / "h.png")
    assert 1000 <= width <= 2500
    assert 300 <= height <= 4000


def tick_labels(figure: Figure) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_positions_are_named_beside_the_figure() -> None:
    figure = figures.history_figure(explained_at_random(Case("sasrec", True), 2), "title")

    assert tick_labels(figure) == ["BOS  0", "UNK: id 0 Cash $1 and $2_{  1", "id 1 映画  2", "UNK: nowhere  3"]
    assert [panel.get_title() for panel in figure.axes] == [
        "precision",
        "kriging weight",
        "gain",
        "effective sample size",
    ]


def test_a_survey_is_drawn_alone_and_against_another(tmp_path: Path) -> None:
    on, off = surveys()

    both, alone = figures.survey_figure(on, "title", off), figures.survey_figure(off, "title")

    for figure, panels, name in ((both, 8, "both.png"), (alone, 3, "alone.png")):
        figures.save(figure, tmp_path / name)
        assert len(figure.axes) == panels
        width, height = png_size(tmp_path / name)
        assert width >= 1500
        assert height >= 500
    legends = [{text.get_text() for text in figure.axes[-1].get_legend().get_texts()} for figure in (both, alone)]
    assert legends == [{"filtering on", "filtering off", "if all alike"}, {"filtering off", "if all alike"}]


def test_a_figure_replaces_an_older_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "figure.svg"
    path.write_text("older")

    figures.save(figures.history_figure(explained_at_random(Case("sasrec", True), 2), "title"), path)

    assert path.read_text().rstrip().endswith("</svg>")
    assert [file.name for file in tmp_path.iterdir()] == ["figure.svg"]


# --- the command --------------------------------------------------------------------------------------------


def write_bundle(folder: Path, case: Case, lineage: str = "one", **changes: Any) -> Path:
    """A bundle with a real model, catalogue and manifest; its graphs, which are not asked, are stand-ins."""
    model = case.perturbed(**changes)

    def fill(staging: Path) -> None:
        stand_ins.fill(staging, width=model.config.width)
        write_weights(model, [], staging)
        items_frame(ITEM_IDS, COUNTS.numpy(), TITLES).write_parquet(staging / "items.parquet")

    fields = stand_ins.fields(
        model=model.config,
        num_items=NUM_ITEMS,
        lineage=lineage,
        data={"split": "leave_one_out"},
        training={"config": {"data": {"columns": {"user_id": "who", "item_id": "what", "timestamp": "when"}}}},
    )
    return write(folder, fields, fill)


class Places(NamedTuple):
    """Bundles and a log; `on` is a registry."""

    on: Path
    off: Path
    log: Path


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    folder = tmp_path_factory.mktemp("explain")
    on = write_bundle(folder / "on", Case("sasrec", True))
    registry.publish(folder / "on", on.name)
    rng = np.random.default_rng(5)
    rows = [
        f"user {user},{rng.choice([*ITEM_IDS, 'nowhere'])},{1000 + step}"
        for user in range(30)
        for step in range(int(rng.integers(1, 14)))
    ]
    (folder / "log.csv").write_text("\n".join(["who,what,when", *rows]) + "\n")
    return Places(folder / "on", write_bundle(folder / "off", Case("sasrec", False)), folder / "log.csv")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def explain(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


def test_the_other_commands_need_not_wait_for_torch_or_matplotlib() -> None:
    code = "import sys, training.cli; sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib')))"

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_one_history_is_printed_and_drawn(places: Places, tmp_path: Path) -> None:
    result = explain("--bundle", places.on, "--history", "id 1,nowhere,id 5")

    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[1] == "3 events; not in the catalogue, read as UNK: nowhere"
    assert [line.split("  ")[0] for line in lines if line[:1].isdigit()][-4:] == ["0", "1", "2", "3"]
    assert lines[-1] == "figure: explain.png"
    png_size(tmp_path / "explain.png")


def test_the_table_shows_the_numbers_of_the_json(places: Places) -> None:
    arguments = ("--bundle", places.on, "--history", "id 1,id 5")

    fields = json.loads(explain(*arguments, "--json").stdout)
    text = explain(*arguments).stdout

    assert fields["bundle"]["filtering"] is True
    for place, position in enumerate(fields["positions"]):
        line = next(line for line in text.splitlines() if line.startswith(f"{place}  "))
        numbers = line.split()[-9:]
        assert numbers[0] == "1"
        assert [float(number) for number in numbers[1:3]] == pytest.approx(
            [position["initial_precision"], position["final_precision"]], rel=6e-3
        )
        wanted = [*position["heard"], *position["gain"], *position["effective_sample_size"]]
        assert [float(number) for number in numbers[3:]] == pytest.approx(wanted, abs=0.051)


def test_a_plain_bundle_shows_its_attention_and_says_what_it_lacks(places: Places) -> None:
    text = explain("--bundle", places.off, "--history", "id 1").stdout

    assert "attention" in text
    assert "a plain model has no precision and no gain" in text
    assert "kriging" not in text


def test_an_empty_history_is_bos_alone(places: Places) -> None:
    fields = json.loads(explain("--bundle", places.on, "--history", "", "--json").stdout)

    assert [position["kind"] for position in fields["positions"]] == ["BOS"]


def test_a_user_of_a_log_is_explained_by_all_their_events(places: Places) -> None:
    own = [line.split(",")[1] for line in places.log.read_text().splitlines() if line.startswith("user 3,")]

    fields = json.loads(explain("--bundle", places.on, "--data", places.log, "--user", "user 3", "--json").stdout)

    start = window_start(len(own), MAX_LEN)
    assert [position["item_id"] for position in fields["positions"][1:]] == own[start:]


def test_a_log_is_surveyed_for_one_bundle_or_two(places: Places, tmp_path: Path) -> None:
    arguments = ("--bundle", places.on, "--data", places.log, "--figure", "sub/two.png")

    result = explain(*arguments, "--against", places.off, "--json")

    fields = json.loads(result.stdout)
    assert fields["figure"] == "sub/two.png"
    assert 0 < fields["overall"]["gain"]["mean"] < 1
    assert len(fields["overall"]["gain"]["layers"]) == 2
    assert {row["bin"] for row in fields["by_item_frequency"]} <= set(survey.frequency_labels())
    assert "overall" not in fields["against"]
    assert fields["against"]["bundle"]["filtering"] is False
    assert len(fields["against"]["attention_by_history_length"]) == len(fields["attention_by_history_length"])
    png_size(tmp_path / "sub" / "two.png")
    stages = [json.loads(line)["message"] for line in result.stderr.splitlines()]
    assert sum("looking into" in stage for stage in stages) == 2


@pytest.mark.parametrize("backbone", ["bert4rec", "hstu"])
def test_the_other_backbones_are_explained_alike_and_fewer_users_if_wanted(
    backbone: str, places: Places, tmp_path: Path
) -> None:
    bundle = write_bundle(tmp_path / "other", Case(backbone, True))

    history = explain("--bundle", bundle, "--history", "id 1,id 5")
    log = explain("--bundle", bundle, "--data", places.log, "--users", "5")

    assert history.exit_code == log.exit_code == 0, history.output + log.output
    assert ("MASK" in history.stdout) == (backbone == "bert4rec")
    assert "events of 5 users" in log.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bundle", "{on}"], "explain takes either --history ITEM,ITEM,… or --data LOG"),
        (["--bundle", "{on}", "--history", "a", "--data", "{log}"], "either --history"),
        (["--bundle", "{on}", "--history", "a", "--users", "3"], "--users goes with --data LOG"),
        (["--bundle", "{on}", "--history", "a", "--against", "{off}"], "--against goes with --data LOG"),
        (["--bundle", "{on}", "--data", "{log}", "--user", "user 3", "--users", "3"], "leave out --user"),
        (["--bundle", "{on}", "--data", "{log}", "--user", "nobody"], "no user 'nobody'; its users are such as 'user"),
        (["--bundle", "nowhere", "--history", "a"], "neither a bundle"),
        (["--bundle", "{on}", "--data", "nowhere.csv"], "nowhere.csv does not exist"),
        (["--bundle", "{on}", "--data", "{log}", "--against", "nowhere"], "neither a bundle"),
        (["--bundle", "{on}", "--data", "{log}", "--against", "{lineage}"], "its catalogue lineage is two"),
        (["--bundle", "{on}", "--data", "{log}", "--against", "{hstu}"], "its backbone is hstu, that of"),
        (["--bundle", "{on}", "--data", "{log}", "--against", "{longer}"], "its window is 10, that of"),
        (["--bundle", "{on}", "--data", "{short}"], "leaves no test user to look at"),
        (["--bundle", "nowhere", "--history", "a", "--figure", "figure.jpg"], "must end in .png, .svg, .pdf"),
        (["--bundle", "nowhere", "--history", "a", "--figure", "{on}.png"], "is a folder"),
        (["--bundle", "nowhere", "--history", "a", "--figure", "{log}/figure.png"], "is no folder one may write to"),
    ],
)  # fmt: skip
def test_what_a_user_can_mend_is_a_message_and_no_figure(
    arguments: list[str], message: str, places: Places, tmp_path: Path
) -> None:
    (tmp_path / "short.csv").write_text("who,what,when\na,id 1,1\n")
    (tmp_path / "folder.png").mkdir()
    filled = {"on": places.on, "off": places.off, "log": places.log, "short": tmp_path / "short.csv"}
    others: dict[str, Any] = {
        "lineage": (Case("sasrec", False), {"lineage": "two"}),
        "hstu": (Case("hstu", False), {}),
        "longer": (Case("sasrec", False), {"max_len": 10}),
    }
    for name, (case, changes) in others.items():
        if f"{{{name}}}" in arguments:
            filled[name] = write_bundle(tmp_path / name, case, **changes)
    before = set(tmp_path.rglob("*"))

    result = explain(*(argument.replace("{on}.png", "folder.png").format(**filled) for argument in arguments))

    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert set(tmp_path.rglob("*")) == before
