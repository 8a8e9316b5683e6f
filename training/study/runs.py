"""One run of the study: train by a recipe on one data set with one seed, judge on test, and keep its records.

U test users · N catalogue items · K = 10 list length
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from model.backbone import Backbone
from model.build import build_model
from model.bundle import Calibration, Event
from model.config import FIRST_ITEM
from model.precision import PrecisionTable
from training import calibration as calibrating
from training import evaluate
from training.config import PATHS, ConfigError, RunConfig, load_config
from training.evaluate import Predictions
from training.loop import TrainState, fit
from training.pipeline import Prepared, calibrate, commit, cpu_model, fingerprint, prepare, versions
from training.progress import Reporter
from training.splits import Histories, Split, Targets
from training.study import strata
from training.study.controls import (
    SHUFFLED,
    TEST_NOISE,
    heard_events,
    shuffled_precision,
    with_noise,
    with_training_noise,
)
from training.study.records import (
    BASELINES,
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
    """What to train: a recipe on a data set, with filtering on or off, and what differs from the recipe.

    Raises:
        ValueError: an extra is unknown, needs filtering, or meets training noise.
    """

    dataset: str
    backbone: str
    filtering: bool
    seed: int
    variant: str = ""
    overrides: tuple[str, ...] = ()
    """`key=value` over the recipe, for a variant."""
    training_noise: float = 0.0
    """Share of the training events that are replaced by random items, for a variant."""
    extras: tuple[str, ...] = ()
    """Variants made of the trained model at test time, each with a record of its own: `SHUFFLED`, `TEST_NOISE`."""

    def __post_init__(self) -> None:
        if unknown := [extra for extra in self.extras if extra not in (SHUFFLED, *TEST_NOISE)]:
            raise ValueError(f"no extra is called {unknown[0]!r}; known: {', '.join((SHUFFLED, *TEST_NOISE))}")
        if SHUFFLED in self.extras and not self.filtering:
            raise ValueError(f"{SHUFFLED} shuffles τ, which a run with filtering off has not")
        if self.extras and self.training_noise:
            raise ValueError("extras are of a model that learned from the true log; give the run one of the two")

    @property
    def name(self) -> str:
        """The name of its record."""
        return run_name(self.dataset, self.backbone, self.filtering, self.variant, self.seed)

    @property
    def names(self) -> list[str]:
        """The names of all its records: its own, then those of the extras."""
        variants = [self.variant, *map(self.extra_variant, self.extras)]
        return [run_name(self.dataset, self.backbone, self.filtering, variant, self.seed) for variant in variants]

    def extra_variant(self, extra: str) -> str:
        """What the record of an extra is called a variant of."""
        return f"{self.variant}-{extra}" if self.variant else extra

    def recipe(self, recipes: Path) -> Path | None:
        """The file of its recipe; a baseline has none."""
        return None if self.backbone in BASELINES else recipes / f"{self.backbone}-{self.dataset}.yaml"

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
        history_length=training_events(prepared.split).tolist(),
        target_count=counts[test.target - FIRST_ITEM].tolist(),
        impossible=_impossible(test, prepared.event).tolist(),
        training_counts=counts.tolist(),
    )


def carry_out(run: Run, config: RunConfig, records: Path, scratch: Path, report: Reporter) -> RunRecord:
    """Train and judge one run, and write its records, and its data set's if there is none yet.

    The extras' records are written first, the run's own last: of a run that is interrupted the own one is missing.

    Args:
        run, config: what to train.
        records: folder of the records.
        scratch: folder of the checkpoint, from which an interrupted run goes on, and of the weights when it has ended.
        report: receives the progress.

    Returns:
        the run's own record.

    Raises:
        ConfigError: the run wants τ shuffled and the model has no τ for each item (nothing is done then), or training
            diverged.
    """
    begun = time.monotonic()
    if SHUFFLED in run.extras and config.model.initial_precision != "table":
        raise ConfigError(f"{run.name}: {SHUFFLED} needs model.initial_precision=table")
    prepared = prepare(config)
    keep_dataset(run.dataset, prepared, records)
    # Before hours of training, in which the checkout may move on.
    origin = describe_run(run, config, prepared)
    learned, noise = prepared, None
    if run.training_noise:
        learned, num_replaced = with_training_noise(prepared, run.training_noise, run.seed)
        noise = {"share": run.training_noise, "replaced_events": float(num_replaced)}
    checkpoint = scratch / f"{run.name}-{fingerprint(config, prepared)}.pt"
    torch.manual_seed(config.training.seed)
    model = build_model(config.model, torch.from_numpy(learned.catalog.training_counts))
    state = fit(model, learned.split, learned.event, config.training, checkpoint, report.step, report.epoch)

    calibration = calibrate(model, learned)
    predictions = predict(model, learned, calibration.temperature, learned.split.test.history)
    if noise is not None:
        noise["list_confidence"] = list_confidence(predictions, learned, calibration)
    record = RunRecord(
        **origin,
        **describe_training(model, state),
        seconds={"training": round(state.seconds, 1), "total": round(time.monotonic() - begun, 1)},
        filter=filter_figures(model, prepared) if config.model.filtering else None,
        noise=noise,
        # Judged by the true training counts: a list of popular items is one whatever the model was told.
        **judge(predictions, prepared),
    )
    for extra in run.extras:
        report.stage(extra)
        changes = _extra(extra, run.seed, model, prepared, calibration, predictions)
        made = record.model_copy(update={"variant": run.extra_variant(extra), "filter": None, **changes})
        write(run_path(records, made.name), made)
    save_file(model.state_dict(), weights_path(scratch, run.name))
    write(run_path(records, run.name), record)
    checkpoint.unlink(missing_ok=True)
    return record


def weights_path(scratch: Path, name: str) -> Path:
    """Where the weights of a finished run lie: those of its best epoch, by torch's names."""
    return scratch / f"{name}.safetensors"


def keep_dataset(name: str, prepared: Prepared, records: Path) -> None:
    """Write the record of a data set, if there is none yet."""
    if not dataset_path(records, name).exists():
        write(dataset_path(records, name), describe_dataset(name, prepared))


def describe_run(run: Run, config: RunConfig, prepared: Prepared) -> dict[str, Any]:
    """What a record says of where a run comes from."""
    return {
        "dataset": run.dataset,
        "data_sha256": prepared.log.sha256,
        "model": run.backbone,
        "filtering": run.filtering,
        "variant": run.variant,
        "seed": run.seed,
        "config": {} if run.backbone in BASELINES else config.model_dump(mode="json", exclude=PATHS),
        "commit": commit(),
        "environment": {"cpu": cpu_model(), "threads": torch.get_num_threads(), **versions()},
    }


def describe_training(model: Backbone, state: TrainState) -> dict[str, Any]:
    """What a record says of how a model was fitted."""
    best = state.curve[state.best_epoch - 1]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "best_epoch": state.best_epoch,
        "curve": [{key: round(value, 6) for key, value in row.items()} for row in state.curve],
        "validation": {"hr@10": best["val_hr@10"], "ndcg@10": best["val_ndcg@10"]},
    }


def predict(model: Backbone, prepared: Prepared, temperature: float, histories: Histories) -> Predictions:
    """What a model says of the test users, at a temperature, when it reads these histories of theirs.

    The target and what is ruled out as seen are those of the true history, whatever is read.
    """
    test = prepared.split.test
    scored = evaluate.score_users(model, histories, prepared.event, seen=test.history)
    return evaluate.predict(scored, test, temperature, LIST_LENGTH)


def judge(predictions: Predictions, prepared: Prepared) -> dict[str, Any]:
    """What a record says of the test users: ranks, lists, likelihood at the temperature fitted on validation."""
    possible = np.isfinite(predictions.log_probability)
    return {
        **ranked(predictions.rank),
        "lists": list_figures(predictions.items, prepared),
        "nll": float(-predictions.log_probability[possible].mean()),
    }


def list_confidence(predictions: Predictions, prepared: Prepared, calibration: Calibration) -> float:
    """Mean over users of the probability that the next event is in the list, min(1, Σ confidence), as served."""
    confidence_UK = evaluate.confidences(predictions, calibration, prepared.catalog.training_counts)
    return float(np.minimum(confidence_UK.sum(1), 1).mean())


def _extra(
    extra: str, seed: int, model: Backbone, prepared: Prepared, calibration: Calibration, predictions: Predictions
) -> dict[str, Any]:
    """What the record of an extra has otherwise than the run's own, whose calibration and predictions are given."""
    histories = prepared.split.test.history
    if extra == SHUFFLED:
        shuffled = shuffled_precision(model, seed)
        validation = prepared.split.validation
        scored = evaluate.score_users(shuffled, validation.history, prepared.event)
        temperature = calibrating.fit_temperature(scored, validation)
        return judge(predict(shuffled, prepared, temperature, histories), prepared)
    share = TEST_NOISE[extra]
    read, replaced = with_noise(histories, share, seed, len(prepared.catalog))
    disturbed = predict(model, prepared, calibration.temperature, read)
    noise = {
        "share": share,
        "replaced_events": float(replaced.sum()),
        "list_confidence": list_confidence(disturbed, prepared, calibration),
        "list_confidence_true": list_confidence(predictions, prepared, calibration),
        **heard_events(model, read, replaced),
    }
    return {**judge(disturbed, prepared), "noise": noise}


def ranked(ranks_U: np.ndarray) -> dict[str, Any]:
    """The ranks that a record keeps."""
    users = np.flatnonzero(ranks_U <= KEPT_RANK)
    return {"hit_users": users.tolist(), "hit_ranks": ranks_U[users].tolist()}


def list_figures(items_UK: np.ndarray, prepared: Prepared) -> dict[str, ListFigures]:
    """What lists (U,K) of item numbers recommend: of all test users, and of each stratum of users."""
    counts = prepared.catalog.training_counts
    by_user = strata.members(training_events(prepared.split), strata.USER_STRATA)
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


def training_events(split: Split) -> np.ndarray:
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
