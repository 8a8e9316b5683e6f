"""Confidence behaves as its meaning asks, on a log where it is known of whom and of what one can be sure."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.training.histories import histories_of
from training import pipeline
from training.confidence.records import AlteredHistory
from training.confidence.sanity import (
    Asked,
    altered_histories,
    catalogue_confidence,
    decile_agreement,
    events_end,
    reliability_by_events,
    reordered,
    seed_agreement,
)
from training.config import load_config
from training.loop import fit
from training.splits import Targets

pytestmark = pytest.mark.timeout(300)  # two trainings come first

NUM_TASTES, TASTE_ITEMS, COMMON, RARE = 5, 30, 60, 60


def write_log(path: Path, num_users: int = 900) -> None:
    """Users of some taste each, which is a ring of items that they go around.

    Most items are in several tastes, so that it takes two events or more to know whose taste a user has, and these in
    their order. Tastes differ in how often their users stray: those of the first never do, those of the last always.
    Hardly anybody uses a rare item.
    """
    generator = np.random.default_rng(3)
    tastes = [generator.choice(COMMON, TASTE_ITEMS, replace=False) for _ in range(NUM_TASTES)]
    strays = np.linspace(0.0, 1.0, NUM_TASTES)
    rows = []
    for user in range(num_users):
        taste = int(generator.integers(NUM_TASTES))
        place = int(generator.integers(TASTE_ITEMS))
        for step in range(int(generator.integers(4, 16))):
            if generator.random() < 0.02:
                item = f"rare {int(generator.integers(RARE))}"
            elif generator.random() < strays[taste]:
                item = f"common {int(generator.integers(COMMON))}"
            else:
                item = f"common {tastes[taste][(place + step) % TASTE_ITEMS]}"
            rows.append((f"user {user}", item, 1000 + 60 * step))
    pl.DataFrame(rows, ["user_id", "item_id", "timestamp"], orient="row").write_csv(path)


@dataclass(frozen=True)
class Trained:
    """Two models of two seeds, and the users to ask about."""

    one: Asked
    other: Asked
    test: Targets


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    log = tmp_path_factory.mktemp("sanity") / "log.csv"
    write_log(log)
    settings = [
        f"data.path={log}",
        "model={width: 32, num_layers: 2, ffn_width: 32, max_len: 16, dropout: 0.1}",
        "training={epochs: 20, batch_size: 64, learning_rate: 1e-2, precision_rate_multiple: 1.0}",
    ]
    prepared = pipeline.prepare(load_config(None, settings))

    def asked(seed: int) -> Asked:
        config = load_config(None, [*settings, f"training.seed={seed}"])
        model = pipeline.new_model(config, prepared)
        fit(model, prepared.split, prepared.event, config.training)
        calibration = pipeline.calibrate(model, prepared)
        return Asked(model, calibration, prepared.event, prepared.catalog.training_counts)

    return Trained(asked(1), asked(2), prepared.split.test)


@pytest.fixture(scope="module")
def altered(trained: Trained) -> dict[str, AlteredHistory]:
    return {one.history: one for one in altered_histories(trained.one, trained.test)}


@pytest.mark.parametrize(
    "history", ["their own, in random order", "of events of others, at random", "of unknown items"]
)
def test_a_history_that_is_nobodys_is_answered_less_surely(altered: dict[str, AlteredHistory], history: str) -> None:
    difference = altered[history].difference

    assert difference is not None
    assert difference.high < 0
    assert difference.value == pytest.approx(altered[history].stated - altered["their own"].stated)


def test_the_rarer_an_item_the_lower_its_confidence(trained: Trained) -> None:
    found = catalogue_confidence(trained.one, trained.test)

    assert found["0"] < found["1–2"] < found["3–5"] < found[">20"]


def test_reliability_begins_at_nothing_and_grows_until_the_taste_is_known(trained: Trained) -> None:
    found = reliability_by_events(trained.one.model, trained.test, trained.one.event)

    medians = [one.median for one in found]
    of_same = [one.median_of_longest for one in found]
    assert of_same[:4] == sorted(of_same[:4])  # with other users in each row, growth could be one of who is left
    assert of_same[-1] == medians[-1], "all who have so many are the same"
    assert [one.events for one in found] == [0, 1, 2, 3, 5, 10]
    assert medians[0] == pytest.approx(0, abs=1e-6)
    assert medians[:4] == sorted(medians[:4])
    assert min(medians[3:]) > medians[1] > 0.3
    assert [one.share_clipped for one in found] == [0] * 6


def test_events_of_weight_0_are_not_counted() -> None:
    own = histories_of([[3, 4, 5, 6], [7, 8]], weights=[[0, 1, 0, 1], [1, 1]])
    users = np.array([0, 1])

    assert events_end(own, users, 0).tolist() == [0, 4]
    assert events_end(own, users, 1).tolist() == [2, 5]
    assert events_end(own, users, 2).tolist() == [4, 6]


def test_two_seeds_are_sure_of_the_same_users(trained: Trained) -> None:
    by_chance = 28 / 100  # of the pairs of tenths, those that are equal or neighbours

    assert seed_agreement(trained.one, trained.other, trained.test) > 2 * by_chance


def test_agreement_is_the_share_of_users_within_a_tenth() -> None:
    stated = np.arange(100) / 100

    assert decile_agreement(stated, stated**2) == 1
    # All but the two tenths in the middle, which change places, land more than one away.
    assert decile_agreement(stated, -stated) == 0.2
    # Half a tenth up: everybody into the same or the next, but the last five, who become the first.
    assert decile_agreement(stated, (stated + 0.05) % 1) == 0.95


def test_a_reordered_history_has_the_same_events_of_the_same_user() -> None:
    walks = [[3, 4, 5, 6, 7], [8, 9], [10]]
    own = histories_of(walks, timestamps=[[1, 2, 3, 4, 5], [1, 2], [1]])

    moved = reordered(own, np.random.default_rng(0))

    assert [sorted(moved.items[begin:end]) for begin, end in ((0, 5), (5, 7), (7, 8))] == walks
    assert moved.items[:5].tolist() != walks[0]
    assert moved.timestamps.tolist() == own.timestamps.tolist()
