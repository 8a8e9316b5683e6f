"""Choosing a recipe by validation: an optuna study of few trials, kept in SQLite, pruned, and told in a record.

Test users are never looked at. Filtering on and off get studies of their own over the same space with the same number
of trials, so that neither is tuned more than the other.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import torch

from model.build import build_model
from training.config import PATHS, ConfigError, load_config, read_yaml
from training.files import write_whole
from training.loop import fit
from training.pipeline import commit, cpu_model, prepare, versions
from training.progress import Reporter

STARTUP_TRIALS = 3
"""Trials before anything is pruned or modelled."""
WARMUP_EPOCHS = 5
"""No trial is pruned before it has had so many."""


@dataclass(frozen=True)
class Choice:
    """One key of the search space: a list of values, or a range on a logarithmic or linear scale."""

    key: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def __post_init__(self) -> None:
        if not self.values and not self.low < self.high:
            raise ValueError(f"{self.key}: low must be below high")

    def suggest(self, trial: optuna.Trial) -> Any:
        """A value for this trial."""
        if self.values:
            return trial.suggest_categorical(self.key, self.values)
        return trial.suggest_float(self.key, self.low, self.high, log=self.log)


def read_space(path: Path) -> tuple[list[Choice], list[dict[str, Any]]]:
    """A search space and the points to begin with.

        space:
          model.dropout: {low: 0.3, high: 0.7}
          training.learning_rate: {low: 5e-4, high: 3e-3, log: true}
          model.width: [64, 128]
        first:
          - {model.dropout: 0.5, training.learning_rate: 1e-3, model.width: 64}

    Raises:
        ConfigError: the file cannot be read, or a key is neither a list nor a range.
    """
    try:
        document = read_yaml(path, "--space")
        choices = [
            Choice(key, values=tuple(domain)) if isinstance(domain, list) else Choice(key, **domain)
            for key, domain in document["space"].items()
        ]
        return choices, list(document.get("first", []))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path}: not a search space ({error}); accepted: `space:` with keys such as"
            " `model.width: [64, 128]` or `model.dropout: {low: 0.3, high: 0.7}`, and a list `first:` of points"
        ) from error


def tune(
    recipe: Path, overrides: Sequence[str], space: Path, trials: int, storage: Path, report: Reporter
) -> dict[str, Any]:
    """Run trials until the study has as many as asked for; a study that was interrupted goes on.

    Args:
        recipe, overrides: the configuration that every trial starts from; they name the data.
        space: file of the search space, see `read_space`.
        trials: in total, those of earlier calls included.
        storage: SQLite file; made if it is not there.
        report: receives the progress.

    Returns:
        the record: configuration, every trial with its values, state, epochs and validation NDCG@10, and the best.

    Raises:
        ConfigError: the space or a configuration is wrong.
        DataError: the log cannot be read.
    """
    choices, first = read_space(space)
    base = load_config(recipe, overrides)
    prepared = prepare(base)
    storage.parent.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name=f"{recipe.stem} {' '.join(overrides)}",
        storage=f"sqlite:///{storage.absolute()}",
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=STARTUP_TRIALS),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS, n_warmup_steps=WARMUP_EPOCHS),
        load_if_exists=True,
    )
    for point in first:
        study.enqueue_trial(point, skip_if_exists=True)

    def objective(trial: optuna.Trial) -> float:
        chosen = {choice.key: choice.suggest(trial) for choice in choices}
        config = load_config(recipe, [*overrides, *(f"{key}={json.dumps(value)}" for key, value in chosen.items())])
        report.stage(f"trial {trial.number + 1}: {chosen}")

        def on_epoch(row: dict[str, float]) -> None:
            report.epoch(row)
            trial.report(row["val_ndcg@10"], int(row["epoch"]))
            if trial.should_prune():
                raise optuna.TrialPruned

        torch.manual_seed(config.training.seed)
        model = build_model(config.model, torch.from_numpy(prepared.catalog.training_counts))
        state = fit(model, prepared.split, prepared.event, config.training, on_step=report.step, on_epoch=on_epoch)
        return state.best_ndcg

    done = sum(trial.state.is_finished() for trial in study.trials)
    begun = time.monotonic()
    study.optimize(objective, n_trials=max(0, trials - done))
    return {
        "recipe": recipe.stem,
        "config": base.model_dump(mode="json", exclude=PATHS),
        "space": read_yaml(space, "--space")["space"],
        "data_sha256": prepared.log.sha256,
        "commit": commit(),
        "environment": {"cpu": cpu_model(), "threads": torch.get_num_threads(), **versions()},
        "seconds": round(time.monotonic() - begun, 1),
        "trials": [_trial(trial) for trial in study.trials],
        "best": study.best_params,
        "best_val_ndcg@10": round(study.best_value, 6),
    }


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write what `tune` returned."""
    write_whole(path, (json.dumps(record, indent=1) + "\n").encode())


def _trial(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    values = list(trial.intermediate_values.values())
    return {
        "number": trial.number + 1,
        "state": trial.state.name.lower(),
        "params": trial.params,
        "epochs": len(values),
        "val_ndcg@10": round(max(values), 6) if values else None,
        "seconds": round(trial.duration.total_seconds(), 1) if trial.duration else None,
    }
