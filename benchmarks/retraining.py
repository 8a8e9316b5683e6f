"""Seven nights at the end of a log: what retraining every night is worth, and what a warm start saves.

    python benchmarks/retraining.py DATA.inter [--json] [--windows 7] [--events 4000] [--work DIR] [KEY=VALUE …]

The last windows of the log, in time order, come a night at a time. Before each night the model in service and the one
of the first night answer the new window's events, which neither has learned: the first ten of each user, each from all
that the user did before it. Then `bft-train retrain`'s job takes the window in. Told of each window: NDCG@10 of both
and their difference with its 95 % interval (users resampled), how the night ended, and how many items are known.

The night of the first window is then gone through twice more, warm and from scratch, on the same cut: training seconds
until validation's NDCG@10 is at least what the scratch run ends with, and both models' NDCG@10 on the slice.

MovieLens 100K's last users are new ones who rate a hundred films in an evening: the window's checks of new users, of a
user's share and of volume are opened, and the gate's margin is widened, since some forty users decide.
"""

import argparse
import sys
import tempfile
from dataclasses import astuple, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _report import note, parser_of, report, row

from model.bundle import Bundle
from model.config import FIRST_ITEM
from model.registry import current_bundle
from model.weights import load_model
from training.catalog import Catalog
from training.confidence.measures import resampled
from training.config import load_config
from training.events import DataConfig, read_events
from training.pipeline import Prepared
from training.progress import JsonReporter
from training.retrain.config import JobConfig
from training.retrain.current import learned_by
from training.retrain.gate import Answered
from training.retrain.job import facts_of, retrain
from training.retrain.learn import Candidate, answers, askable, train_candidate
from training.retrain.slices import Cut, grown_catalog, slice_begin, split_at
from training.retrain.sources import new_files
from training.retrain.store import Store
from training.study.layout import Estimate

CONFIG = Path("configs/recipes/sasrec-ml-100k.yaml")
OPENED = (
    "retrain={limits: {max_user_share: 0.5, max_new_user_share: 1.0, max_new_item_share: 0.5, max_psi: 5.0,"
    " max_volume_factor: 100.0}, gate: {margin: 0.3, stratum_margin: 0.5}}",
)


class Place(NamedTuple):
    """Where the job works."""

    source: Path
    work: Path
    registry: Path

    @property
    def log(self) -> Store:
        return Store(self.work / "log")

    def current(self) -> Bundle:
        bundle = current_bundle(self.registry)
        if bundle is None:
            sys.exit("the first night published nothing: see the report above")
        return bundle


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("data", type=Path, help="MovieLens 100K's interactions, a RecBole .inter file")
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--events", type=int, default=4_000, help="of a window")
    parser.add_argument("--work", dest="folder", type=Path, help="keep logs and registry here")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = measure(arguments, arguments.folder or Path(scratch))
    # The report's settings are these but for the machine's own paths.
    arguments.data = arguments.data.name
    report(arguments, results)


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    events = read_events(DataConfig(path=arguments.data)).events.sort("timestamp", maintain_order=True)
    events = events.select("user_id", "item_id", "timestamp")
    begins = [len(events) - left * arguments.events for left in range(arguments.windows, -1, -1)]
    place = Place(folder / "in", folder / "work", folder / "registry")
    place.source.mkdir(parents=True)
    config = load_config(CONFIG, [f"data.path={place.source}", *OPENED, *arguments.overrides], JobConfig)

    events[: begins[0]].write_csv(place.source / "before.csv")
    night(config, place, "before")
    first = place.current()
    found = [
        row("events before the windows", begins[0]),
        row("items known before", first.manifest.num_items),
        row("config", config.model_dump(mode="json", exclude={"data", "titles", "metadata"})),
    ]
    windows = []
    for number, (begin, end) in enumerate(pairwise(begins), 1):
        name = f"window-{number}"
        window = events[begin:end]
        window.write_csv(place.source / f"{name}.csv")
        store = place.log
        store.ingest(new_files(DataConfig(path=place.source), store.index.files_read, place.work / "rejects").incoming)
        current = place.current()
        if number == 1:
            found += warm_and_scratch(config, place, current, folder)
        cut = Cut(learned_by(current), float(window["timestamp"][0]))
        windows.append(judged(config, place, cut, current, first, folder / "judged"))
        ended = night(config, place, name)
        found += windows[-1].rows(name)
        found += [
            row(f"{name}: the night", ended),
            row(f"{name}: items known then", place.current().manifest.num_items),
        ]
    return found + all_windows(windows)


def night(config: JobConfig, place: Place, name: str) -> str:
    run = retrain(config, place.work, place.registry, None, JsonReporter(night=name), ["bft-train", "retrain"])
    note(f"{name}: {run.outcome} {run.reason}")
    return f"{run.outcome}: {run.reason}" if run.reason else run.outcome


class Window(NamedTuple):
    """What two models answered to a window's events."""

    users: np.ndarray
    """(R,) a number for the user of each target."""
    served: np.ndarray
    """(R,) NDCG@10 of the model in service, `once` of the model of the first night."""
    once: np.ndarray
    unknown_to_once: float
    """Share of the targets that the model of the first night does not know."""

    def difference(self) -> Estimate:
        """Of the means over targets; users resampled."""
        users = np.unique(self.users, return_inverse=True)[1]
        gain, number = np.bincount(users, self.served - self.once), np.bincount(users)
        return resampled(lambda counts: float(counts @ gain / max(counts @ number, 1)), len(number))

    def rows(self, name: str) -> list[dict[str, Any]]:
        difference = self.difference()
        return [
            row(f"{name}: targets", len(self.users)),
            row(f"{name}: users", len(np.unique(self.users))),
            row(f"{name}: targets unknown to the model trained once", round(self.unknown_to_once, 4)),
            row(f"{name}: NDCG@10, retrained every night", round(float(self.served.mean()), 4)),
            row(f"{name}: NDCG@10, trained once", round(float(self.once.mean()), 4)),
            row(f"{name}: difference, 95 %", [round(part, 4) for part in astuple(difference)]),
        ]


def judged(config: JobConfig, place: Place, cut: Cut, served: Bundle, once: Bundle, folder: Path) -> Window:
    """Both models' answers to what lies behind the cut."""
    store = place.log
    catalog = grown_catalog(store, Catalog.of_bundle(served))
    counted, split = split_at(store, catalog, cut, folder)
    event = served.manifest.event
    targets = askable(split.test, event)
    prepared = Prepared(facts_of(store, catalog), counted, replace(split, test=targets), event)

    def ndcg(bundle: Bundle) -> np.ndarray:
        said: Answered = answers(load_model(bundle), bundle.calibration, prepared, bundle.items.training_counts)
        return said.ndcg

    unknown = targets.target >= FIRST_ITEM + once.manifest.num_items
    users = np.unique(targets.history.user_ids, return_inverse=True)[1]
    return Window(users, ndcg(served), ndcg(once), float(unknown.mean()))


def all_windows(windows: list[Window]) -> list[dict[str, Any]]:
    """Of all windows together; a user of two windows counts as two."""
    offsets = np.cumsum([0, *(window.users.max() + 1 for window in windows)])
    together = Window(
        np.concatenate([window.users + offset for window, offset in zip(windows, offsets, strict=False)]),
        np.concatenate([window.served for window in windows]),
        np.concatenate([window.once for window in windows]),
        float(np.average([w.unknown_to_once for w in windows], weights=[len(w.users) for w in windows])),
    )
    return together.rows("all windows")


def warm_and_scratch(config: JobConfig, place: Place, current: Bundle, folder: Path) -> list[dict[str, Any]]:
    """The same night with either start."""
    store, learned = place.log, learned_by(current)
    catalog = grown_catalog(store, Catalog.of_bundle(current))
    facts = facts_of(store, catalog)
    cut = Cut(learned, slice_begin(store, learned, config.retrain.judged_events))
    candidates: dict[str, Candidate] = {}
    for start in ("warm", "scratch"):
        of_start = config.model_copy(update={"retrain": config.retrain.model_copy(update={"start": start})})
        reporter = JsonReporter(start=start)
        candidates[start] = train_candidate(of_start, store, catalog, facts, cut, current, folder / start, reporter)
    warm, scratch = candidates["warm"], candidates["scratch"]
    reached = [line["seconds"] for line in warm.state.curve if line["val_ndcg@10"] >= scratch.state.best_ndcg]
    best = next(line["seconds"] for line in scratch.state.curve if line["epoch"] == scratch.state.best_epoch)
    share = round(reached[0] / best, 3) if reached else None
    return [
        *(row(f"{start}: NDCG@10 of validation", round(each.state.best_ndcg, 4)) for start, each in candidates.items()),
        *(row(f"{start}: NDCG@10 of the slice", round(of_slice(each), 4)) for start, each in candidates.items()),
        row("scratch: seconds to its best epoch", best),
        row("warm: seconds to that NDCG@10", reached[0] if reached else None),
        row("share of the time", share, "≤ 1/3", share is not None and share <= 1 / 3),
    ]


def of_slice(candidate: Candidate) -> float:
    counts = candidate.prepared.catalog.training_counts
    return float(answers(candidate.model, candidate.calibration, candidate.prepared, counts).ndcg.mean())


if __name__ == "__main__":
    main()
