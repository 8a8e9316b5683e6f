"""Does exploring pay? Regret of the policies for new users and for new items, simulated on real ratings.

    python benchmarks/exploration.py [--json] [--quick] [--data LOG] [--models FOLDER] [--results FILE] [--figure FILE]

Two models of one log. The first has read all of it and says what the simulated users like: each is a real user, drawn
once from what that model knows of this one (its state, a Gaussian), and clicks by a multinomial logit. The second
serves, through ONNX Runtime and the service's own ranking, and knows less. It has read half of the users, and of half
of the items at most three events:

- new users: those that it has not read come to it without a history, and are shown the items that it knows;
- new items: those that it has read are shown all items, half of which are new to it.

Every user is shown a list a round. A click joins the history, the next list knows it, and no item is listed after it
was clicked. Regret of a round: the click rate of the list that the preferences say is best, less that of the list
shown. The model is not trained again meanwhile. Intervals are over users, of one training of each model.
"""

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from _environment import environment
from _report import note, parser_of
from _simulated import Course, Preferences, Server, had_rows, simulate
from matplotlib.figure import Figure

from model.backbone import Backbone
from model.build import build_model
from model.bundle import Bundle, open_bundle
from model.config import FIRST_ITEM
from model.filtering import Gaussian
from model.registry import resolve
from service.engine import Engine
from service.ranking import NO_HISTORY, History
from service.schemas import Policy
from service.settings import Settings
from service.telemetry import Metrics
from training.batches import collate, serving_windows
from training.catalog import Catalog
from training.config import RunConfig, load_config
from training.datasets import check_log
from training.events import read_events
from training.figures import GREY, LAYER_COLOURS, save
from training.loop import fit
from training.metrics import bootstrap_interval
from training.pipeline import keep_freed_memory, prepare, train
from training.progress import reporter
from training.splits import to_histories

CONFIG = Path("configs/ml-100k.yaml")
RESULTS, FIGURE = Path("benchmarks/results/exploration.json"), Path("docs/exploration.svg")
POLICIES = {
    "mean": Policy(name="mean", kappa=None, seed=None),
    "lcb": Policy(name="lcb", kappa=1.0, seed=None),
    "ucb": Policy(name="ucb", kappa=1.0, seed=None),
    "ucb, kappa 10": Policy(name="ucb", kappa=10.0, seed=None),
    "thompson": Policy(name="thompson", kappa=None, seed=0),
}
LIST_SIZE = 10
BEST_RATE = 0.5
"""Click rate of a user's best list at the beginning."""
NEW_ITEM_EVENTS, LEAST_USES = 3, 20
"""Events of a new item that the serving model has read; uses that an item has to have for being made a new one."""
SEED = 1


@dataclass(frozen=True)
class Size:
    """How much is simulated, and on what."""

    users: int
    rounds: int
    events: int
    """Of the log, at most, the first users'."""
    settings: tuple[str, ...]
    """Of the models."""


SMALL = ("model.width=32", "model.num_layers=1")
FULL = Size(150, 30, 10**9, (*SMALL, "training.epochs=5", "training.learning_rate=5e-3"))
QUICK = Size(12, 4, 20_000, (*SMALL, "training.epochs=1"))


@dataclass(frozen=True)
class Truth:
    """What has read the whole log, and says what users like."""

    model: Backbone
    catalog: Catalog


@dataclass(frozen=True)
class World:
    """A log, and who knows what of it."""

    log: pl.DataFrame
    known_log: pl.DataFrame
    """What the server has read."""
    new_items: list[str]
    truth: Truth
    server: Server


@dataclass(frozen=True)
class Scenario:
    """Users before a server, and what they like. `hidden`: rows of the items that nobody is shown."""

    name: str
    histories: list[History]
    hidden: np.ndarray
    preferences: Preferences


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="few users and rounds on a part of the log; writes nothing"
    )
    parser.add_argument("--data", type=Path, default=Path("ml-100k"), help="a log, or a data set's name")
    parser.add_argument("--models", type=Path, help="where the two models are kept; those that lie there are used")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures are written")
    parser.add_argument("--figure", type=Path, default=FIGURE, help="where the curves are drawn")
    arguments = parser.parse_args()

    begun = time.monotonic()
    keep_freed_memory()
    torch.set_num_threads(1)
    size = QUICK if arguments.quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        found = explore(arguments.data, size, arguments.models or Path(folder))
    result = {"environment": environment(), "seconds": round(time.monotonic() - begun), "scenarios": found}
    if not arguments.quick:
        arguments.results.write_text(json.dumps(result, indent=1) + "\n")
        save(drawn(found), arguments.figure)
    print(json.dumps(result) if arguments.json else as_text(found))


def explore(data: Path, size: Size, folder: Path) -> dict[str, Any]:
    """Both scenarios: name → what came of each policy."""
    config = load_config(CONFIG, [f"data.path={data}"]).data
    check_log(config.path)
    log = read_events(config).events.filter(pl.col("weight") > 0).head(size.events)
    world = world_of(log, folder, size)
    found = {}
    for scenario in (new_users(world, size), new_items(world, size)):
        courses = {}
        for name, policy in POLICIES.items():
            note(f"{scenario.name}: {name}")
            courses[name] = simulate(
                world.server,
                scenario.histories,
                scenario.hidden,
                scenario.preferences,
                policy,
                rounds=size.rounds,
                size=LIST_SIZE,
                seed=SEED,
            )
        found[scenario.name] = summary(courses, rows_of(world.new_items, world.server))
    return found


# Who knows what


def world_of(log: pl.DataFrame, folder: Path, size: Size) -> World:
    """Half of the users are new to the server, and half of the items nearly so."""
    users = shuffled(log["user_id"].unique(maintain_order=True).to_list())
    known_log = log.filter(pl.col("user_id").is_in(users[: len(users) // 2]))
    uses = known_log["item_id"].value_counts().filter(pl.col("count") >= LEAST_USES)
    items = shuffled(sorted(uses["item_id"].to_list()))
    new = items[: len(items) // 2]
    place = pl.int_range(pl.len()).over(pl.col("item_id"))
    known_log = known_log.filter(~pl.col("item_id").is_in(new) | (place < NEW_ITEM_EVENTS))
    truth, server = truth_of(log, folder / "truth", size), server_of(known_log, folder / "server", size)
    return World(log, known_log, new, truth, server)


def new_users(world: World, size: Size) -> Scenario:
    """Users without a history, of whom the server knows nothing. New items are not shown."""
    known = world.known_log["user_id"].unique().to_list()
    strangers = world.log.filter(~pl.col("user_id").is_in(known))["user_id"].unique(maintain_order=True).to_list()
    users = shuffled(strangers)[: size.users]
    hidden = rows_of(world.new_items, world.server)
    histories = [NO_HISTORY] * len(users)
    return Scenario("new users", histories, hidden, preferences_of(users, world, histories, hidden))


def new_items(world: World, size: Size) -> Scenario:
    """Users whom the server knows, but for their events on new items."""
    users = shuffled(world.known_log["user_id"].unique(maintain_order=True).to_list())[: size.users]
    histories = [history_of(world.known_log, user, world.server.bundle) for user in users]
    hidden = np.empty(0, np.int64)
    return Scenario("new items", histories, hidden, preferences_of(users, world, histories, hidden))


def rows_of(item_ids: Sequence[str], server: Server) -> np.ndarray:
    return np.array([server.bundle.items.number(each) for each in item_ids], np.int64) - FIRST_ITEM


def shuffled(values: list[str]) -> list[str]:
    return [values[place] for place in np.random.default_rng(SEED).permutation(len(values))]


def preferences_of(users: Sequence[str], world: World, histories: Sequence[History], hidden: np.ndarray) -> Preferences:
    """What real users like: each drawn from the truth's state of the whole history, which is then known exactly, and
    choosing items by the truth's softmax."""
    truth, items = world.truth, world.server.bundle.items
    real = to_histories(world.log, truth.catalog)
    row_of = {user: row for row, user in enumerate(real.user_ids)}
    batch = collate(serving_windows(real, truth.model.config.max_len), torch.tensor([row_of[user] for user in users]))
    with torch.no_grad():
        state = truth.model.final_state(batch.items, batch.weights, batch.timestamps)
        noise = torch.from_numpy(np.random.default_rng(SEED).standard_normal(state.mean.shape).astype(np.float32))
        known = state.mean + noise * state.precision.rsqrt()
        logit = truth.model.score(Gaussian(known, torch.full_like(known, torch.inf))).logit.double().numpy()
    rows = truth.catalog.numbers(items.ids) - FIRST_ITEM
    return Preferences.of(logit[:, rows], had_rows(histories, hidden, len(items)), LIST_SIZE, BEST_RATE)


def history_of(log: pl.DataFrame, user: str, bundle: Bundle) -> History:
    """A user's events in a bundle's numbers. Without times, which SASRec does not read."""
    ids = log.filter(pl.col("user_id") == user)["item_id"].to_list()
    numbers = np.array([number for item_id in ids if (number := bundle.items.number(item_id))], np.int64)
    kept = numbers[-bundle.manifest.model.max_len :]
    return History(
        count=len(numbers),
        items=kept,
        weights=np.ones(len(kept), np.float32),
        timestamps=np.full(len(kept), np.nan),
        seen=np.unique(numbers),
    )


def truth_of(log: pl.DataFrame, folder: Path, size: Size) -> Truth:
    """Train on the whole log."""
    config = config_of(log, folder, size)
    prepared = prepare(config)
    torch.manual_seed(config.training.seed)
    model = build_model(config.model, torch.from_numpy(prepared.catalog.training_counts))
    fit(model, prepared.split, prepared.event, config.training, folder / "checkpoint.pt")
    return Truth(model.eval(), prepared.catalog)


def server_of(log: pl.DataFrame, folder: Path, size: Size) -> Server:
    """Train on what is known, and load the bundle as the service does."""
    config = config_of(log, folder, size)
    if not (folder / "registry").exists():
        with reporter(silent=True) as silent:
            train(config, folder, silent, ["exploration.py"])
    bundle = open_bundle(resolve(folder / "registry"))
    return Server(bundle, Engine(bundle, Settings(bundle=bundle.folder, threads=1), Metrics()))


def config_of(log: pl.DataFrame, folder: Path, size: Size) -> RunConfig:
    """How to train on a log, which goes into the folder."""
    note(f"{folder.name}: {len(log):,} events")
    folder.mkdir(parents=True, exist_ok=True)
    log.select("user_id", "item_id", "timestamp").write_parquet(folder / "log.parquet")
    return load_config(CONFIG, [f"data.path={folder / 'log.parquet'}", f"training.seed={SEED}", *size.settings])


# What came of it


def summary(courses: dict[str, Course], new_rows: np.ndarray) -> dict[str, Any]:
    """Of each policy: mean cumulative regret after each round with its interval, clicks a user, and the regret at the
    end less the mean's, over the same users. Of the first lists: shares of their items that are not on the mean's list
    for the same user, and that are new."""
    by_mean, first = courses["mean"].regret.sum(0), courses["mean"].first_lists
    return {
        "users": len(first),
        "policies": {
            name: {
                "regret": [with_interval(regret_U) for regret_U in course.regret.cumsum(0)],
                "regret_less_that_of_mean": with_interval(course.regret.sum(0) - by_mean),
                "clicks": with_interval(course.is_click.sum(0)),
                "first_lists_not_of_mean": float(
                    np.mean([~np.isin(*both) for both in zip(course.first_lists, first, strict=True)])
                ),
                "first_lists_new": float(np.isin(course.first_lists, new_rows).mean()),
            }
            for name, course in courses.items()
        },
    }


def with_interval(values_U: np.ndarray) -> list[float]:
    """Mean, and the ends of its 95 % interval."""
    return [round(float(value), 4) for value in (values_U.mean(), *bootstrap_interval(values_U))]


def as_text(found: dict[str, Any]) -> str:
    lines = []
    for name, scenario in found.items():
        lines.append(
            f"{name}, {scenario['users']} users: cumulative regret (95 %), less the mean's, clicks a user; of the first"
            " lists, items not on the mean's, new items"
        )
        for policy, values in scenario["policies"].items():
            regret, less, clicks = (
                "{:.2f} ({:.2f} … {:.2f})".format(*each)
                for each in (values["regret"][-1], values["regret_less_that_of_mean"], values["clicks"])
            )
            other, new = values["first_lists_not_of_mean"], values["first_lists_new"]
            lines.append(f"  {policy:13} {regret:24} {less:24} {clicks:24} {other:6.1%} {new:6.1%}")
    return "\n".join(lines)


def drawn(found: dict[str, Any]) -> Figure:
    """Cumulative regret over rounds, a panel a scenario, a line a policy with its band."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for panel, (name, scenario) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        for colour, (policy, values) in zip((GREY, *LAYER_COLOURS), scenario["policies"].items(), strict=False):
            mean, low, high = np.array(values["regret"]).T
            rounds = np.arange(1, len(mean) + 1)
            panel.plot(rounds, mean, color=colour, linewidth=1.4, label=policy)
            panel.fill_between(rounds, low, high, color=colour, alpha=0.15, linewidth=0)
        panel.set(title=name, xlabel="lists shown to a user", ylabel="cumulative regret, clicks")
        panel.title.set_fontsize(10)
        panel.grid(color="0.92")
        panel.legend(fontsize=8, frameon=False)
    return figure


if __name__ == "__main__":
    main()
