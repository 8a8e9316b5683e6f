"""Seven nights at the end of a log: what retraining every night is worth, and what a warm start saves.

    python benchmarks/retraining.py DATA.inter [--json] [--windows 7] [--events 4000] [--work DIR] [--figure PNG]
                                    [KEY=VALUE …]

The last windows of the log, in time order, come a night at a time. Before each night the model in service and the one
of the first night answer the new window's events, which neither has learned: the first ten of each user, each from all
that the user did before it. Then `bft-train retrain`'s job takes the window in. Told of each window: NDCG@10 of both
and their difference, each with its 95 % interval (users resampled), how the night ended and what the gate would have
said with its own margins, and how many items are known.

The night of the first window is gone through twice more, warm and from scratch, on the same cut, as the job does
either: seconds of training up to the epoch that is kept, and NDCG@10 on the slice, which neither model has learned.

MovieLens 100K's last users are new ones who rate a hundred films in an evening: the window's checks of new users, of a
user's share and of volume are opened, and the gate's margins are widened, since some forty users decide.
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
from matplotlib.figure import Figure

from model.bundle import Bundle
from model.config import FIRST_ITEM
from model.registry import current_bundle
from model.weights import load_model
from training.catalog import Catalog
from training.confidence.measures import resampled
from training.config import load_config
from training.events import DataConfig, read_events
from training.figures import GREY, LAYER_COLOURS, save
from training.pipeline import Prepared
from training.progress import JsonReporter
from training.retrain.config import JobConfig
from training.retrain.current import learned_by
from training.retrain.gate import Answered, GateConfig
from training.retrain.job import facts_of, retrain
from training.retrain.learn import Candidate, answers, askable, train_candidate
from training.retrain.run import Run
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
    parser.add_argument("--figure", type=Path, help="draw both curves here")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = measure(arguments, arguments.folder or Path(scratch))
    # The report's settings are these but for the machine's own paths.
    arguments.data = arguments.data.name
    arguments.figure = None if arguments.figure is None else arguments.figure.name
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
        cut = Cut(learned_by(current.manifest), float(window["timestamp"][0]))
        windows.append(judged(config, place, cut, current, first, folder / "judged"))
        run = night(config, place, name)
        found += windows[-1].rows(name)
        found += [
            row(f"{name}: the night", f"{run.outcome}: {run.reason}" if run.reason else run.outcome),
            row(f"{name}: the gate with its own margins", by_default(run)),
            row(f"{name}: items known then", place.current().manifest.num_items),
        ]
    if arguments.figure is not None:
        save(curves(windows), arguments.figure)
    return found + all_windows(windows)


def night(config: JobConfig, place: Place, name: str) -> Run:
    run = retrain(config, place.work, place.registry, None, JsonReporter(night=name), ["bft-train", "retrain"])
    note(f"{name}: {run.outcome} {run.reason}")
    return run


def by_default(run: Run) -> str:
    """What the gate would have said of the candidate's NDCG@10, on the same slice, with the margin that it has by
    default."""
    if not run.questions:
        return "not asked"
    found, margin = run.questions[0].found, GateConfig().margin * run.judged["current"]["ndcg@10"]
    return "passed" if found.low >= -margin else "failed" if found.high < -margin else "undecided"


class Window(NamedTuple):
    """What two models answered to a window's events."""

    users: np.ndarray
    """(R,) a number for the user of each target."""
    served: np.ndarray
    """(R,) NDCG@10 of the model in service, `once` of the model of the first night."""
    once: np.ndarray
    unknown_to_once: float
    """Share of the targets that the model of the first night does not know."""

    def mean(self, ndcg_R: np.ndarray) -> Estimate:
        return mean_by_user(ndcg_R, self.users)

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [
            row(f"{name}: targets", len(self.users)),
            row(f"{name}: users", len(np.unique(self.users))),
            row(f"{name}: targets unknown to the model trained once", round(self.unknown_to_once, 4)),
            row(f"{name}: NDCG@10, retrained every night, 95 %", rounded(self.mean(self.served))),
            row(f"{name}: NDCG@10, trained once, 95 %", rounded(self.mean(self.once))),
            row(f"{name}: difference, 95 %", rounded(self.mean(self.served - self.once))),
        ]


def mean_by_user(values_R: np.ndarray, users_R: np.ndarray) -> Estimate:
    """The mean over targets; users resampled."""
    users = np.unique(users_R, return_inverse=True)[1]
    total, number = np.bincount(users, values_R), np.bincount(users)
    return resampled(lambda counts: float(counts @ total / max(counts @ number, 1)), len(number))


def rounded(estimate: Estimate) -> list[float]:
    """Value, low and high."""
    return [round(part, 4) for part in astuple(estimate)]


def curves(windows: list[Window]) -> Figure:
    """NDCG@10 window by window, of the model that is retrained and of the one that is not."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    of_models = {"retrained every night": [w.mean(w.served) for w in windows]}
    of_models["trained once"] = [w.mean(w.once) for w in windows]
    for (name, means), colour, marker, shift in zip(
        of_models.items(), (LAYER_COLOURS[0], GREY), "os", (-0.05, 0.05), strict=True
    ):
        value, low, high = np.array([astuple(mean) for mean in means]).T
        nights = np.arange(1, len(windows) + 1) + shift
        axes.errorbar(nights, value, [value - low, high - value], label=name, color=colour, marker=marker, capsize=3)
    axes.set(xlabel="window", ylabel="NDCG@10 of the next window, 95 %", ylim=(0, None))
    axes.legend()
    return figure


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
    store, learned = place.log, learned_by(current.manifest)
    catalog = grown_catalog(store, Catalog.of_bundle(current))
    facts = facts_of(store, catalog)
    cut = Cut(learned, slice_begin(store, learned, config.retrain.judged_events))
    candidates: dict[str, Candidate] = {}
    for start in ("warm", "scratch"):
        of_start = config.model_copy(update={"retrain": config.retrain.model_copy(update={"start": start})})
        reporter = JsonReporter(start=start)
        candidates[start] = train_candidate(of_start, store, catalog, facts, cut, current, folder / start, reporter)
    ndcg_R = {start: of_slice(each) for start, each in candidates.items()}
    users_R = candidates["warm"].prepared.split.test.history.user_ids
    seconds = {start: to_best_epoch(each) for start, each in candidates.items()}
    difference, share = mean_by_user(ndcg_R["warm"] - ndcg_R["scratch"], users_R), seconds["warm"] / seconds["scratch"]
    return [
        *(
            row(f"{start}: NDCG@10 of the slice, 95 %", rounded(mean_by_user(ndcg_R[start], users_R)))
            for start in seconds
        ),
        row("warm − scratch, 95 %", rounded(difference), "not shown to be less", difference.high >= 0),
        *(row(f"{start}: seconds to the epoch that is kept", seconds[start]) for start in seconds),
        row("share of the time", round(share, 3), "≤ 1/3", share <= 1 / 3),
    ]


def of_slice(candidate: Candidate) -> np.ndarray:
    """NDCG@10 of each target, (R,)."""
    counts = candidate.prepared.catalog.training_counts
    return answers(candidate.model, candidate.calibration, candidate.prepared, counts).ndcg


def to_best_epoch(candidate: Candidate) -> float:
    """Seconds of training."""
    state = candidate.state
    return float(next(line["seconds"] for line in state.curve if line["epoch"] == state.best_epoch))


if __name__ == "__main__":
    main()
