"""Runs with variants made at test time, and with training noise: their records, and what is missing."""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from model.build import build_model
from model.config import FIRST_ITEM
from tests.training.histories import small_model, targets_of
from tests.training.study.planted import write_log, write_recipe
from training.config import ConfigError
from training.evaluate import ranks, score_users
from training.pipeline import prepare
from training.progress import JsonReporter
from training.study import runs as runs_module
from training.study.controls import SHUFFLED, TEST_NOISE, TRAINING_NOISE
from training.study.records import (
    BASELINES,
    KEPT_RANK,
    DatasetRecord,
    RunRecord,
    dataset_path,
    read,
    read_all,
    run_path,
)
from training.study.runs import Run, carry_out, weights_path
from training.study.suite import DATASETS, PARTS, SUITES, Folders, missing, work_through

MOST_NOISE = "test-noise-40"


class Done(NamedTuple):
    """The records of one folder."""

    folder: Path
    dataset: DatasetRecord
    runs: dict[str, RunRecord]

    def hit_rate(self, name: str) -> float:
        """HR@1."""
        return float((self.runs[name].ranks(len(self.dataset.history_length)) <= 1).mean())


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    noisy = {"variant": "training-noise-40", "training_noise": 0.4}
    return [
        Run("planted", "sasrec", False, 1, extras=tuple(TEST_NOISE)),
        Run("planted", "sasrec", True, 1, extras=(SHUFFLED, *TEST_NOISE)),
        *(Run("planted", "sasrec", filtering, 1, **noisy) for filtering in (False, True)),
    ]


@pytest.fixture(scope="module")
def done(runs: list[Run], tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("study")
    data = write_log(folder / "log.txt")
    recipes = write_recipe(folder / "recipes")
    for run in runs:
        carry_out(run, run.config(recipes, data), folder / "records", folder / "scratch", JsonReporter())
    datasets, records = read_all(folder / "records")
    return Done(folder, datasets["planted"], {record.name: record for record in records})


def test_every_extra_has_a_record_with_the_training_of_its_run_and_ranks_of_its_own(done: Done) -> None:
    for side in ("off", "on"):
        own = done.runs[f"planted-sasrec-{side}-s1"]
        extras = [record for record in done.runs.values() if record.filtering == own.filtering and record.seed == 1]
        noisy = [record for record in extras if record.variant in TEST_NOISE]
        assert [record.variant for record in noisy] == list(TEST_NOISE)
        for record in noisy:
            assert (record.curve, record.config, record.parameters) == (own.curve, own.config, own.parameters)
            assert record.hit_ranks != own.hit_ranks
            assert record.filter is None
    assert f"planted-sasrec-on-{SHUFFLED}-s1" in done.runs
    assert f"planted-sasrec-off-{SHUFFLED}-s1" not in done.runs


def test_the_weights_kept_are_those_that_the_record_tells_of(done: Done, runs: list[Run]) -> None:
    run = runs[1]
    config = run.config(done.folder / "recipes", [f"data.path={done.folder / 'log.txt'}"])
    prepared = prepare(config)
    model = build_model(config.model, torch.from_numpy(prepared.catalog.training_counts))
    model.load_state_dict(load_file(weights_path(done.folder / "scratch", run.name)))

    found = ranks(score_users(model, prepared.split.test.history, prepared.event), prepared.split.test)

    assert np.where(found <= KEPT_RANK, found, np.inf).tolist() == done.runs[run.name].ranks(len(found)).tolist()
    assert list((done.folder / "scratch").glob("*.pt")) == []


@pytest.mark.parametrize("side", ["off", "on"])
def test_the_more_noise_a_model_reads_the_fewer_next_items_it_finds(done: Done, side: str) -> None:
    found = [done.hit_rate(f"planted-sasrec-{side}-s1")]
    found += [done.hit_rate(f"planted-sasrec-{side}-{variant}-s1") for variant in TEST_NOISE]

    # The last item alone decides the next one: with two fifths of the events replaced, so many are out of reach.
    assert found[0] > 0.95
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.75


@pytest.mark.parametrize("side", ["off", "on"])
def test_noise_is_told_in_the_record(done: Done, side: str) -> None:
    own = done.runs[f"planted-sasrec-{side}-s1"]
    test = done.runs[f"planted-sasrec-{side}-{MOST_NOISE}-s1"].noise
    training = done.runs[f"planted-sasrec-{side}-training-noise-40-s1"].noise

    assert own.noise is None
    assert test is not None
    assert training is not None
    # 120 users have six events before the test target, and five to learn from.
    assert (test["share"], test["replaced_events"]) == (0.4, round(0.4 * 120 * 6))
    assert (training["share"], training["replaced_events"]) == (0.4, round(0.4 * 120 * 5))
    for told in (test["list_confidence"], test["list_confidence_true"], training["list_confidence"]):
        assert 0 < told <= 1
    assert 0 < test["kriging_weight_replaced"] < 1
    assert ("precision_replaced" in test) == (side == "on")


def test_training_noise_changes_what_is_learned(done: Done) -> None:
    clean, noisy = (done.runs[f"planted-sasrec-on{variant}-s1"] for variant in ("", "-training-noise-40"))

    assert noisy.curve[-1]["loss"] > clean.curve[-1]["loss"]
    assert noisy.filter != clean.filter


def test_a_record_names_the_commit_that_its_run_began_with(
    done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MovingCheckout(JsonReporter):
        def epoch(self, row: dict[str, float]) -> None:
            monkeypatch.setattr(runs_module, "commit", lambda: "after")

    monkeypatch.setattr(runs_module, "commit", lambda: "before")
    run = Run("planted", "sasrec", False, 1, "brief", ("training.epochs=1",))
    config = run.config(done.folder / "recipes", [f"data.path={done.folder / 'log.txt'}"])

    assert carry_out(run, config, tmp_path, tmp_path, MovingCheckout()).commit == "before"


def test_the_record_of_the_data_set_is_of_the_true_log_even_if_a_run_with_training_noise_writes_it(
    done: Done, tmp_path: Path
) -> None:
    run = Run("planted", "sasrec", False, 1, "brief", ("training.epochs=1",), training_noise=0.4)
    config = run.config(done.folder / "recipes", [f"data.path={done.folder / 'log.txt'}"])

    carry_out(run, config, tmp_path, tmp_path, JsonReporter())

    assert read(dataset_path(tmp_path, "planted"), DatasetRecord) == done.dataset


def test_a_model_without_a_precision_for_each_item_is_refused_before_it_is_trained(done: Done, tmp_path: Path) -> None:
    run = Run("planted", "sasrec", True, 1, "network", ("model.initial_precision=mlp",), extras=(SHUFFLED,))
    config = run.config(done.folder / "recipes", [f"data.path={done.folder / 'log.txt'}"])

    with pytest.raises(ConfigError, match=r"model\.initial_precision=table"):
        carry_out(run, config, tmp_path, tmp_path, JsonReporter())

    assert list(tmp_path.iterdir()) == []


def test_a_run_that_lacks_an_extra_s_record_is_missing_and_so_is_one_that_lacks_its_own(
    done: Done, runs: list[Run], tmp_path: Path
) -> None:
    records = done.folder / "records"
    assert missing(runs, records) == []
    for name in (runs[1].name, f"planted-sasrec-on-{MOST_NOISE}-s1"):
        hidden = run_path(records, name).rename(tmp_path / name)

        assert missing(runs, records) == [runs[1]]

        hidden.rename(run_path(records, name))


def test_extras_of_a_variant_carry_its_name() -> None:
    run = Run("toys", "sasrec", True, 1, "quick", extras=(SHUFFLED,))

    assert run.names == ["toys-sasrec-on-quick-s1", f"toys-sasrec-on-quick-{SHUFFLED}-s1"]


def test_an_unknown_extra_one_that_needs_filtering_and_one_beside_training_noise_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="known: shuffled-precision, test-noise-05"):
        Run("toys", "sasrec", True, 1, extras=("test-noise-50",))
    with pytest.raises(ValueError, match="filtering off"):
        Run("toys", "sasrec", False, 1, extras=(SHUFFLED,))
    with pytest.raises(ValueError, match="true log"):
        Run("toys", "sasrec", True, 1, "training-noise-20", training_noise=0.2, extras=(MOST_NOISE,))


def test_what_is_ruled_out_is_what_the_user_had_and_not_what_the_model_reads() -> None:
    had, read = (targets_of([[FIRST_ITEM + row for row in rows]], [FIRST_ITEM]).history for rows in ((1, 2), (3, 2)))

    scored = next(score_users(small_model(6), read, "next_new_item", seen=had))

    assert np.isneginf(scored.logit.numpy()[0]).tolist() == [False, True, True, False, False, False]


# --- the suite ----------------------------------------------------------------------------------------------


def test_the_full_suite_has_every_control_once_after_the_pairs() -> None:
    full = SUITES["full"]
    names = [name for run in full for name in run.names]

    assert len(names) == len(set(names))
    variants = [run.variant for run in full]
    assert not any(variants[: variants.index(next(filter(None, variants)))])
    assert all(re.fullmatch(r"[a-z0-9-]+", extra) for run in full for extra in (run.variant, *run.extras) if extra)
    for dataset in ("beauty", "toys"):
        for variant in (*PARTS, SHUFFLED):
            assert f"{dataset}-sasrec-on-{variant}-s1" in names
        for variant in (*TEST_NOISE, *(TRAINING_NOISE if dataset == "beauty" else ())):
            assert {f"{dataset}-sasrec-{side}-{variant}-s1" for side in ("off", "on")} <= set(names)
    assert {f"{dataset}-{baseline}-off-s0" for dataset in DATASETS for baseline in BASELINES} <= set(names)


def test_a_suite_works_through_baselines_without_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_log(tmp_path / "log.txt")
    folders = Folders(tmp_path / "no recipes", tmp_path / "records", tmp_path / "scratch")
    suite = [Run("planted", "markov", False, 0)]

    assert work_through(suite, folders, lambda name: data, jobs=1, report=JsonReporter()) == []

    assert "planted-markov-off-s0: validation NDCG@10 1.0000" in capsys.readouterr().err
    assert missing(suite, folders.records) == []
