"""What items that were never trained do to the lists: 100 items are left out of training and added at run time.

    python benchmarks/new_items.py DATA.inter ITEMS.item [--json] [--epochs 6] [KEY=VALUE …]

100 items are drawn from the catalogue, all alike. The model is trained, by configs/ml-100k.yaml, on the log without
their events and without the last five events of each user; these are then predicted one after the other, each from all
events before it, by the bundle's own graphs and the service's own ranking. Three times: without the new items, with
them and their metadata, with them and no metadata. An event on a new item is read as UNK and makes the item seen.

Told, of the lists of ten: the share of places that new items take against their share of the events that followed
("never crowding out"); the mean confidence of these places, and of the ten best new items for each event wherever they
stand, against how many of them hit; NDCG@10 of the other items before and after, paired. Then the places that new
items with metadata take in the lists of the other policies, and what that costs the other items against the same
policy's lists with nothing added.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from _report import note, parser_of, report, row

from model.bundle import ENCODER, RANKER, Bundle, open_bundle
from model.registry import resolve
from service import ranking
from service.candidates import NOTHING_ADDED, Candidates
from service.engine import Engine, RankerRow
from service.filtered import State
from service.recommender import told_history
from service.schemas import HistoryEvent, Policy
from service.settings import Settings
from service.states import AddedItems
from service.telemetry import Metrics
from training.events import DataConfig, read_events
from training.metadata import MetadataConfig, read_metadata
from training.metrics import bootstrap_interval, ndcg

NUM_NEW = 100
LAST_EVENTS = 5
LIST_LENGTH = 10
BATCH = 64
MEAN = Policy(name="mean")
POLICIES = (Policy(name="ucb", kappa=1.0), Policy(name="ucb", kappa=3.0), Policy(name="thompson", seed=0))
"""Beside the mean, by which all else is told. Each question has a seed of its own."""
CONFIG = Path("configs/ml-100k.yaml")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("data", type=Path, help="MovieLens 100K's interactions, a RecBole .inter file")
    parser.add_argument("items", type=Path, help="its items, a .item file")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1, help="of the draw of new items")
    parser.add_argument("--out", dest="folder", type=Path, help="keep the run here, and use one that lies here")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = measure(arguments, arguments.folder or Path(scratch))
    # The report's settings are these but for the machine's own paths.
    arguments.data, arguments.items = arguments.data.name, arguments.items.name
    report(arguments, results)


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    log = read_events(DataConfig(path=arguments.data)).events.with_row_index("place")
    rng = np.random.default_rng(arguments.seed)
    new_ids = sorted(rng.choice(log["item_id"].unique().sort().to_numpy(), NUM_NEW, replace=False).tolist())
    from_end = pl.col("place").rank("ordinal", descending=True).over("user_id")
    log = log.with_columns(is_held_out=from_end <= LAST_EVENTS, is_new=pl.col("item_id").is_in(new_ids))
    if not (folder / "registry").is_dir():
        train(log.filter(~pl.col("is_held_out") & ~pl.col("is_new")), arguments, folder)
    bundle = open_bundle(resolve(folder / "registry"))
    metadata = read_metadata(MetadataConfig(path=arguments.items)).rows
    described = {item_id: json.dumps(metadata.get(item_id, {})) for item_id in new_ids}
    settings = {
        "none": NOTHING_ADDED,
        "metadata": AddedItems(1, described),
        "no metadata": AddedItems(1, dict.fromkeys(new_ids, "{}")),
    }
    engine = Engine(bundle, Settings(bundle=bundle.folder, provider="cpu", threads=1), Metrics())
    asked = list(questions(log))
    note(f"encoding {len(asked)} histories")
    states = encoded(engine, bundle, asked)
    judged = {}
    for name, added in settings.items():
        note(f"ranking, added: {name}")
        judged[name] = judge(engine, bundle, Candidates.of(bundle, added), asked, states, set(new_ids))
    results = rows(judged, bundle)
    for policy in POLICIES:
        note(f"ranking by {policy.name}")
        without, beside = (
            judge(engine, bundle, Candidates.of(bundle, settings[name]), asked, states, set(new_ids), policy)
            for name in ("none", "metadata")
        )
        results += rows_of(policy, without, beside)
    return results


def train(events: pl.DataFrame, arguments: argparse.Namespace, folder: Path) -> None:
    """Train on these events, as `bft-train fit` does."""
    folder.mkdir(parents=True, exist_ok=True)
    events.select("user_id", "item_id", "timestamp").write_csv(folder / "log.csv")
    command = [
        sys.executable, "-m", "training.cli", "fit", "--config", CONFIG, "--data", folder / "log.csv",
        "--metadata", arguments.items, "--out", folder, f"training.epochs={arguments.epochs}", *arguments.overrides,
    ]  # fmt: skip
    subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL)


class Judged(dict[str, np.ndarray]):
    """Of each predicted event, in the log's order: `is_new`, and `rank` of its item among the ten (inf: not there). Of
    all places of all lists `place_is_new`, `place_confidence`, `place_is_hit`; of lists of new items alone `new_…`."""


class Question(NamedTuple):
    """One event to predict."""

    events: list[HistoryEvent]
    """Before it, oldest first."""
    item_id: str


def questions(log: pl.DataFrame) -> Iterator[Question]:
    """Every held-out event."""
    for user in log.partition_by("user_id", maintain_order=True):
        ids, times = user["item_id"].to_list(), user["timestamp"].to_list()
        events = [
            HistoryEvent.model_validate({"item_id": item_id, "timestamp": time})
            for item_id, time in zip(ids, times, strict=True)
        ]
        for place in np.flatnonzero(user["is_held_out"].to_numpy()):
            yield Question(events[:place], ids[place])


def encoded(engine: Engine, bundle: Bundle, asked: list[Question]) -> list[State]:
    """The state before each event. What is added changes none: the encoder reads it as UNK."""
    max_len = bundle.manifest.model.max_len
    nothing = Candidates.of(bundle, NOTHING_ADDED)
    states = []
    for first in range(0, len(asked), BATCH):
        batch = (told_history(question.events, max_len, nothing) for question in asked[first : first + BATCH])
        states += engine.run_rows(ENCODER, [ranking.encoder_row(history, max_len) for history in batch])
    return states


def judge(
    engine: Engine,
    bundle: Bundle,
    candidates: Candidates,
    asked: list[Question],
    states: list[State],
    new_ids: set[str],
    policy: Policy = MEAN,
) -> Judged:
    """The list of each question, and its best new items alone, as the service makes them."""
    event, max_len = bundle.calibration.event, bundle.manifest.model.max_len
    added = [number for item_id in candidates.added_ids if (number := candidates.number(item_id)) is not None]
    columns: defaultdict[str, list[Any]] = defaultdict(list)
    for first in range(0, len(asked), BATCH):
        batch = slice(first, first + BATCH)
        histories = [told_history(question.events, max_len, candidates) for question in asked[batch]]
        for kind, allowed in (("place", None), ("new", added)):
            chosen = [ranking.filters(history, event, len(candidates), True, (), allowed) for history in histories]
            lists = engine.run_rows(
                RANKER,
                [
                    RankerRow(
                        state,
                        each.seen,
                        each.blocked,
                        LIST_LENGTH,
                        order=ranking.order(of_question(policy, first + place), state),
                        added=candidates.added_rows,
                    )
                    for place, (state, each) in enumerate(zip(states[batch], chosen, strict=True))
                ],
            )
            for question, history, each, ranked in zip(asked[batch], histories, chosen, lists, strict=True):
                listed = ranking.entries(ranked, bundle.calibration, candidates, each.seen, history.count)
                ids = [candidates.item_id(entry.number) for entry in listed]
                columns[f"{kind}_confidence"] += [entry.confidence for entry in listed]
                columns[f"{kind}_is_hit"] += [item_id == question.item_id for item_id in ids]
                columns[f"{kind}_is_new"] += candidates.is_added(ranked.items).tolist()
                if kind == "place":
                    columns["is_new"].append(question.item_id in new_ids)
                    columns["rank"].append(ids.index(question.item_id) + 1 if question.item_id in ids else np.inf)
    return Judged({name: np.array(values) for name, values in columns.items()})


def of_question(policy: Policy, number: int) -> Policy:
    """The policy, which draws anew for each question."""
    return policy if policy.seed is None else policy.model_copy(update={"seed": policy.seed + number})


def rows(judged: dict[str, Judged], bundle: Bundle) -> list[dict[str, Any]]:
    """The figures."""
    fitted = bundle.manifest.training["new_items"]
    before, is_old = judged["none"], ~judged["none"]["is_new"]
    share = before["is_new"].mean()
    found = [
        row("predicted events", len(is_old)),
        row("of them on new items", round(float(share), 4)),
        row("variance of embeddings that metadata explain, leave-one-out", round(fitted["explained_share"], 3)),
        row("NDCG@10 of the other items, nothing added", round(float(ndcg(before["rank"][is_old], 10).mean()), 4)),
    ]
    for name in ("metadata", "no metadata"):
        each = judged[name]
        is_place, confidence, is_hit = each["place_is_new"], each["place_confidence"], each["place_is_hit"]
        places, num_places = float(is_place.mean()), int(is_place.sum())
        change = ndcg(each["rank"][is_old], 10) - ndcg(before["rank"][is_old], 10)
        low, high = bootstrap_interval(change)
        stated = float(confidence[is_place].mean()) if num_places else None
        realised = float(is_hit[is_place].mean()) if num_places else None
        found += [
            row(f"{name}: share of places", round(places, 5), f"≤ {share:.4f}", places <= float(share)),
            row(f"{name}: places", num_places),
            row(f"{name}: mean confidence there", stated),
            row(f"{name}: share of them that hit", realised),
            row(f"{name}: mean confidence of each list's ten best new items", float(each["new_confidence"].mean())),
            row(f"{name}: share of these that hit", float(each["new_is_hit"].mean())),
            row(f"{name}: mean confidence elsewhere", float(confidence[~is_place].mean())),
            row(f"{name}: share of those that hit", float(is_hit[~is_place].mean())),
            row(f"{name}: HR@10 of new items", float((each["rank"][each["is_new"]] <= 10).mean())),
            row(f"{name}: NDCG@10 of the other items", round(float(ndcg(each["rank"][is_old], 10).mean()), 4)),
            row(f"{name}: its change, 95 % interval", [round(float(change.mean()), 5), round(low, 5), round(high, 5)]),
        ]
    return found


def rows_of(policy: Policy, without: Judged, beside: Judged) -> list[dict[str, Any]]:
    """What new items take in a policy's lists, and from whom."""
    name = policy.name if policy.kappa is None else f"{policy.name}, κ {policy.kappa:g}"
    is_old, share = ~without["is_new"], float(without["is_new"].mean())
    before, after = (ndcg(each["rank"][is_old], 10) for each in (without, beside))
    low, high = bootstrap_interval(after - before)
    places = float(beside["place_is_new"].mean())
    return [
        row(f"{name}: share of places that new items take", round(places, 5), f"≤ {share:.4f}", places <= share),
        row(f"{name}: HR@10 of new items", round(float((beside["rank"][~is_old] <= 10).mean()), 4)),
        row(f"{name}: NDCG@10 of the other items, nothing added", round(float(before.mean()), 4)),
        row(
            f"{name}: its change, 95 % interval",
            [round(float((after - before).mean()), 5), round(low, 5), round(high, 5)],
        ),
    ]


if __name__ == "__main__":
    main()
