"""One candidate: trained on all but the newest slice, and judged on the slice beside the current model.

R targets of the slice
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from model.backbone import Backbone
from model.build import build_model
from model.bundle import Bundle, Calibration, Event
from model.config import FIRST_ITEM, UNK, ModelConfig
from model.weights import load_model
from training import evaluate
from training.catalog import Catalog, read_retired
from training.config import OptimizerConfig
from training.events import LogFacts
from training.loop import TrainState, fit, going_on, refit
from training.metadata import read_metadata
from training.pipeline import Prepared, calibrate, resolve_event
from training.progress import Reporter
from training.retrain.config import JobConfig
from training.retrain.gate import Answered
from training.retrain.slices import Cut, split_at
from training.retrain.store import Store
from training.retrain.warm import grown_weights
from training.splits import Targets


class TooFewEvents(Exception):
    """A part of the cut log is empty, so that nothing can be learned, chosen or judged by it."""


@dataclass(frozen=True)
class Candidate:
    """A model that has not learned the slice."""

    model: Backbone
    prepared: Prepared
    calibration: Calibration
    state: TrainState
    settings: OptimizerConfig
    """What it was trained by."""
    is_warm: bool


def begin(config: JobConfig, prepared: Prepared, current: Bundle | None) -> tuple[Backbone, OptimizerConfig, bool]:
    """A model to train, how to train it, and whether it begins with the current model's weights."""
    torch.manual_seed(config.training.seed)
    model = build_model(config.model, torch.from_numpy(prepared.catalog.training_counts))
    if current is None or config.retrain.start == "scratch" or unlike(config.model, current):
        return model, config.training, False
    known = load_model(current).state_dict()
    model.load_state_dict(grown_weights(known, model.state_dict(), current.manifest.num_items))
    return model, going_on(config.training, config.retrain.warm_epochs), True


def train_candidate(
    config: JobConfig,
    store: Store,
    catalog: Catalog,
    facts: LogFacts,
    cut: Cut,
    current: Bundle | None,
    folder: Path,
    report: Reporter,
) -> Candidate:
    """Learn what lies before the cut, validate, calibrate.

    Args:
        folder: receives the shards and the checkpoint; a run over the same log and cut goes on from that.

    Raises:
        DataError: the metadata or the list of retired items cannot be read.
        ConfigError: training diverged.
        TooFewEvents: before the cut, or behind it, is nothing to train, to validate or to judge with.
    """
    counted, split = split_at(store, catalog, cut, folder / "shards")
    if split.train.num_events == 0:
        raise TooFewEvents("every event is in the slice of the newest, and none is left to learn from")
    if len(split.validation) == 0:
        raise TooFewEvents("no user has two events before the slice of the newest, to choose an epoch and calibrate by")
    event = resolve_event(config.event, split.validation)
    if len(askable(split.validation, event)) == 0:
        raise TooFewEvents("every event to choose an epoch and calibrate by is on an item that its user had before")
    metadata = None if config.metadata is None else read_metadata(config.metadata)
    retired = _retired_by(current) if config.retired is None else read_retired(config.retired)
    split = replace(split, test=askable(split.test, event))
    if len(split.test) == 0:
        raise TooFewEvents(
            "none of the newest events can be asked about: they have weight 0"
            + (", or are on items that their users had before" if event == "next_new_item" else "")
        )
    prepared = Prepared(facts, counted, split, event, metadata, retired)
    model, settings, is_warm = begin(config, prepared, current)
    state = fit(model, split, event, settings, folder / "candidate.pt", report.step, report.epoch)
    return Candidate(model, prepared, calibrate(model, prepared), state, settings, is_warm)


def learn_everything(
    config: JobConfig,
    store: Store,
    candidate: Candidate,
    cut: Cut,
    current: Bundle | None,
    folder: Path,
    report: Reporter,
) -> tuple[Backbone, Prepared]:
    """The model to publish: as the candidate, from the same start by the same steps, with the slice learned too."""
    counted, split = split_at(store, candidate.prepared.catalog, replace(cut, begin=np.inf), folder / "all")
    prepared = replace(candidate.prepared, catalog=counted, split=replace(candidate.prepared.split, train=split.train))
    model, settings, _ = begin(config, prepared, current)
    epochs = candidate.state.best_epoch
    refit(model, split.train, epochs, settings, folder / "everything.pt", report.step, report.epoch)
    return model, prepared


def askable(targets: Targets, event: Event) -> Targets:
    """The targets that the event allows: under `next_new_item`, no item that the user had before."""
    if event == "next_item":
        return targets
    new = [
        target - FIRST_ITEM not in evaluate.seen_rows(targets.history, row) for row, target in enumerate(targets.target)
    ]
    return targets.of_users(np.flatnonzero(new))


def answers(model: Backbone, calibration: Calibration, prepared: Prepared, counts: np.ndarray) -> Answered:
    """What a model answers to the slice's targets; an item that it does not know is at no rank.

    Args:
        counts: (N,) training counts of the model's own catalogue, the first N items of the prepared one.
    """
    targets = prepared.split.test
    num_items = len(counts)
    is_known = targets.target < FIRST_ITEM + num_items
    # An unknown item is UNK to the model, in a history as in the service.
    read = as_read_by(targets, num_items)
    scored = evaluate.score_users(model, read.history, prepared.event)
    said = evaluate.predict(scored, read, calibration.temperature, evaluate.LIST_LENGTH)
    confidence = evaluate.confidences(said, calibration, counts)
    return Answered(np.where(is_known, said.rank, np.inf), evaluate.stated(confidence))


def as_read_by(targets: Targets, num_items: int) -> Targets:
    """The targets with items of higher numbers read as UNK; a target that is one stands for the first item."""
    items = targets.history.items
    history = replace(targets.history, items=np.where(items < FIRST_ITEM + num_items, items, UNK))
    return Targets(history, np.where(targets.target < FIRST_ITEM + num_items, targets.target, FIRST_ITEM))


def unlike(wanted: ModelConfig, current: Bundle) -> list[str]:
    """In what a model differs from the current one so that it cannot begin with that one's weights.

    Dropout has no weights.
    """
    without_weights = {"dropout", "attention_dropout"}
    ours, theirs = (one.model_dump(exclude=without_weights) for one in (wanted, current.manifest.model))
    return [name for name, value in ours.items() if theirs[name] != value]


def _retired_by(current: Bundle | None) -> frozenset[str]:
    """Ids of the items that the current bundle does not list."""
    if current is None:
        return frozenset()
    return frozenset(current.items.ids[number - FIRST_ITEM] for number in current.items.retired.tolist())
