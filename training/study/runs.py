"""One run of the study: train by a recipe on one data set with one seed, judge on test, and keep a record.

U test users · N catalogue items · K = 10 list length
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model.backbone import Backbone
from model.build import build_model
from model.bundle import Event
from model.config import FIRST_ITEM
from model.precision import PrecisionTable
from training import calibration, evaluate
from training.config import RunConfig, load_config
from training.loop import TrainState, fit
from training.pipeline import PATHS, Prepared, commit, cpu_model, fingerprint, prepare, versions
from training.progress import Reporter
from training.splits import Split, Targets
from training.study import strata
from training.study.records import (
    KEPT_RANK,
    DatasetRecord,
    ListFigures,
    RunRecord,
    dataset_path,
    run_name,
    run_path,
    write,
)
from training.survey import some_users, survey

LIST_LENGTH = 10
SURVEY_USERS = 2000
"""Test users whose gains are looked at; spread evenly over all."""


@dataclass(frozen=True)
class Run:
    """What to train: a recipe on a data set, with filtering on or off, and what differs from the recipe."""

    dataset: str
    backbone: str
    filtering: bool
    seed: int
    variant: str = ""
    overrides: tuple[str, ...] = ()
    """`key=value` over the recipe, for a variant."""

    @property
    def name(self) -> str:
        """The name of its record."""
        return run_name(self.dataset, self.backbone, self.filtering, self.variant, self.seed)

    def recipe(self, recipes: Path) -> Path:
        """The file of its recipe."""
        return recipes / f"{self.backbone}-{self.dataset}.yaml"

    def config(self, recipes: Path, data: list[str]) -> RunConfig:
        """The whole configuration.

        Args:
            recipes: folder of the recipes.
            data: overrides that say where the log lies and how it is read.
        """
        switches = [f"model.filtering={'on' if self.filtering else 'off'}", f"training.seed={self.seed}"]
        return load_config(self.recipe(recipes), [*data, *switches, *self.overrides])


def describe_dataset(name: str, prepared: Prepared) -> DatasetRecord:
    """The record of a data set."""
    test, counts = prepared.split.test, prepared.catalog.training_counts
    return DatasetRecord(
        name=name,
        data={**prepared.log.summary(), **prepared.split.summary()},
        event=prepared.event,
        history_length=_training_events(prepared.split).tolist(),
        target_count=counts[test.target - FIRST_ITEM].tolist(),
        impossible=_impossible(test, prepared.event).tolist(),
        training_counts=counts.tolist(),
    )


def carry_out(run: Run, config: RunConfig, records: Path, scratch: Path, report: Reporter) -> RunRecord:
    """Train and judge one run, and write its record, and its data set's if there is none yet.

    Args:
        run, config: what to train.
        records: folder of the records.
        scratch: folder of the checkpoint, from which an interrupted run goes on.
        report: receives the progress.
    """
    begun = time.monotonic()
    prepared = prepare(config)
    if not dataset_path(records, run.dataset).exists():
        write(dataset_path(records, run.dataset), describe_dataset(run.dataset, prepared))
    checkpoint = scratch / f"{run.name}-{fingerprint(config, prepared.log)}.pt"
    torch.manual_seed(config.training.seed)
    model = build_model(config.model, torch.from_numpy(prepared.catalog.training_counts))
    state = fit(model, prepared.split, prepared.event, config.training, checkpoint, report.step, report.epoch)
    record = _record(run, config, prepared, model, state, time.monotonic() - begun)
    write(run_path(records, run.name), record)
    checkpoint.unlink(missing_ok=True)
    return record


def _record(
    run: Run, config: RunConfig, prepared: Prepared, model: Backbone, state: TrainState, seconds: float
) -> RunRecord:
    best = state.curve[state.best_epoch - 1]
    return RunRecord(
        dataset=run.dataset,
        data_sha256=prepared.log.sha256,
        model=run.backbone,
        filtering=run.filtering,
        variant=run.variant,
        seed=run.seed,
        config=config.model_dump(mode="json", exclude=PATHS),
        commit=commit(),
        environment={"cpu": cpu_model(), "threads": torch.get_num_threads(), **versions()},
        seconds={"training": round(state.seconds, 1), "total": round(seconds, 1)},
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        best_epoch=state.best_epoch,
        curve=[{key: round(value, 6) for key, value in row.items()} for row in state.curve],
        validation={"hr@10": best["val_hr@10"], "ndcg@10": best["val_ndcg@10"]},
        filter=filter_figures(model, prepared) if config.model.filtering else None,
        **judge(model, prepared, prepared.split.test),
    )


def judge(model: Backbone, prepared: Prepared, targets: Targets) -> dict[str, Any]:
    """What a record says of the test users: ranks, lists, likelihood at the temperature fitted on validation."""
    validation = prepared.split.validation
    temperature = calibration.fit_temperature(
        evaluate.score_users(model, validation.history, prepared.event), validation
    )
    scored = evaluate.score_users(model, targets.history, prepared.event)
    predictions = evaluate.predict(scored, targets, temperature, LIST_LENGTH)
    possible = np.isfinite(predictions.log_probability)
    return {
        **ranked(predictions.rank),
        "lists": list_figures(predictions.items, prepared),
        "nll": float(-predictions.log_probability[possible].mean()),
    }


def ranked(ranks_U: np.ndarray) -> dict[str, Any]:
    """The ranks that a record keeps."""
    users = np.flatnonzero(ranks_U <= KEPT_RANK)
    return {"hit_users": users.tolist(), "hit_ranks": ranks_U[users].tolist()}


def list_figures(items_UK: np.ndarray, prepared: Prepared) -> dict[str, ListFigures]:
    """What lists (U,K) of item numbers recommend: of all test users, and of each stratum of users."""
    counts = prepared.catalog.training_counts
    by_user = strata.members(_training_events(prepared.split), strata.USER_STRATA)
    rows_UK = items_UK - FIRST_ITEM

    def figures(users: np.ndarray) -> ListFigures:
        listed = rows_UK[users].ravel()
        exposure = strata.members(counts[listed], strata.ITEM_STRATA)
        return ListFigures(
            users=int(users.sum()),
            coverage=len(np.unique(listed)) / len(counts),
            mean_popularity=float(counts[listed].mean()),
            exposure={name: float(places.mean()) for name, places in exposure.items()},
        )

    everyone = {"all": np.ones(len(rows_UK), bool)}
    return {name: figures(users) for name, users in (everyone | by_user).items() if users.any()}


def filter_figures(model: Backbone, prepared: Prepared) -> dict[str, Any]:
    """What the filter learned, by training uses of an item.

    The gain K at the events of `SURVEY_USERS` test users, with intervals; τ of the catalogue's items.
    """
    counts = prepared.catalog.training_counts
    seen = survey(model, counts, some_users(prepared.split.test.history, SURVEY_USERS)).to_json()
    figures: dict[str, Any] = {
        "gain": {row["bin"]: row["gain"] for row in seen["by_item_frequency"]},
        "gain_by_history_length": {row["bin"]: row["gain"] for row in seen["by_history_length"]},
    }
    if isinstance(model.initial_precision, PrecisionTable):
        precision = model.initial_precision.item_precision().detach().numpy()[FIRST_ITEM:]
        members = strata.members(counts, strata.ITEM_STRATA)
        figures["item_precision"] = {
            name: {"items": int(items.sum()), "quartiles": np.quantile(precision[items], [0.25, 0.5, 0.75]).tolist()}
            for name, items in members.items()
            if items.any()
        }
    return figures


def _training_events(split: Split) -> np.ndarray:
    """(U,) events of positive weight in training of each test user."""
    row = {user_id: index for index, user_id in enumerate(split.train.user_ids)}
    lengths = evaluate.num_events(split.train)
    return np.array([lengths[row[user_id]] if user_id in row else 0 for user_id in split.test.history.user_ids])


def _impossible(targets: Targets, event: Event) -> np.ndarray:
    if event == "next_item":
        return np.empty(0, np.int64)
    had = [
        target - FIRST_ITEM in evaluate.seen_rows(targets.history, user) for user, target in enumerate(targets.target)
    ]
    return np.flatnonzero(had)
