"""What benchmarks/rivals.py hands to the rivals, and how it reads their answers. The rivals themselves are not here."""

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

from training.config import ConfigError
from training.tables import DataError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("rivals")


def test_every_library_is_told_the_same_last_two_events_of_each_user(rivals: ModuleType, tmp_path: Path):
    log = tmp_path / "log.txt"
    log.write_text("ann a b c d\nbob c a b\n")

    split = rivals.hand_over(log, tmp_path)

    assert split == {
        "users": ["ann", "bob"],
        "train": [["a", "b"], ["c"]],
        "validation": ["c", "a"],
        "test": ["d", "b"],
    }
    assert json.loads((tmp_path / "split.json").read_text()) == split
    assert rivals.num_events(split) == 3


def test_a_user_too_short_for_the_split_is_refused(rivals: ModuleType, tmp_path: Path):
    log = tmp_path / "log.txt"
    log.write_text("ann a b c d\nbob c a\n")

    with pytest.raises(DataError, match="at least 3 events of every user"):
        rivals.hand_over(log, tmp_path)


def test_a_rank_is_the_place_in_the_list_and_infinite_outside_it(rivals: ModuleType):
    split = {"users": ["ann", "bob", "cid"], "test": ["x", "y", "z"]}

    ranks = rivals.ranks_in_lists({"ann": ["w", "x"], "bob": ["w", "x"]}, split)

    assert ranks.tolist() == [2, math.inf, math.inf]


def test_rows_of_prefixes_are_as_many_a_step_as_the_others_have_events(rivals: ModuleType):
    arguments = rivals.parser().parse_args(["--data", "log.txt"])
    split = {"users": ["ann", "bob"], "train": [["a", "b"], ["c"]]}

    sizes = {name: rivals.job_of(name, arguments, split)["batch_size"] for name in ("ours", "RecTools", "RecBole")}

    assert sizes == {"ours": 128, "RecTools": 128, "RecBole": 192}


def test_the_rivals_are_never_installed_beside_the_project(rivals: ModuleType):
    with pytest.raises(ConfigError, match="the project's environment"):
        rivals.rivals_python(Path(sys.prefix))
