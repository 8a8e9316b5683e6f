"""A whole training run: log → split → model → calibration → test figures → bundle → registry."""

import ctypes
import hashlib
import importlib.metadata
import json
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from model import registry
from model.backbone import Backbone
from model.build import build_model
from model.bundle import (
    NEW_ITEMS,
    Bundle,
    Calibration,
    CalibrationReport,
    Event,
    golden_arrays,
    items_frame,
    open_bundle,
    write_bundle,
)
from model.config import FIRST_ITEM
from model.new_items import NewItems, write_new_items
from model.onnx.export import export_graphs
from training import calibration as calibrating
from training import evaluate
from training.catalog import Catalog, read_titles
from training.config import OptimizerConfig, RunConfig
from training.distributed import ALONE, World
from training.events import DataConfig, LogFacts, read_events
from training.files import write_whole
from training.loop import TrainState, fit, micro_batches
from training.metadata import MetadataTable, read_metadata
from training.new_items import fit_new_items
from training.progress import Reporter
from training.splits import MIN_EVENTS_LEAVE_ONE_OUT, Split, SplitName, Targets, make_split, training_counts
from training.streaming import stream_log
from training.tables import DataError

REPEAT_SHARE = 0.01
"""`event: auto` means `next_item` when more than this share of the validation targets were had before."""
SHARDS = "shards"
"""Folder, in the run's own, of a streamed log's training histories; deleted when the run has ended well."""
PATHS: dict[str, Any] = {"data": {"path", "rejects"}, "titles": True, "metadata": {"path"}}
"""What a record leaves out of the configuration: paths mean nothing on another machine."""
LIBRARIES = ("torch", "onnx", "onnxscript", "onnxruntime", "numpy", "polars", "scipy", "pydantic")


@dataclass(frozen=True)
class TrainedModel:
    """A finished run: its bundle in the registry, its record, and the test figures."""

    bundle: Path
    record: dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """A log made ready to learn from."""

    log: LogFacts
    catalog: Catalog
    split: Split
    """Its training histories are in memory, or in shards on the disk."""
    event: Event
    metadata: MetadataTable | None = None


def train(
    config: RunConfig,
    out: Path,
    report: Reporter,
    command: Sequence[str],
    resume: bool = False,
    world: World = ALONE,
) -> TrainedModel:
    """Train by `config` and publish the bundle in `out/registry`.

    Args:
        config: the run's configuration.
        out: the run's folder: receives registry/, checkpoint-<configuration>.pt, record.json, rejects.jsonl
            unless the configuration names another file for bad rows, and while it lasts shards/ of a streamed log.
        report: receives the progress.
        command: the command line, for the record.
        resume: go on from this configuration's checkpoint if there is one.
        world: the processes that train together. The first one reads the log and writes the files.

    Raises:
        DataError: the log, titles or metadata cannot be read, the log leaves nobody to train on, validate with or test
            on, or too few trained items have metadata.
        ConfigError: training diverged, or the batches cannot be shared evenly by the processes.
        ExportError: torch and ONNX Runtime disagree. Nothing is published then.
    """
    keep_freed_memory()
    begun = time.monotonic()
    report.stage(f"reading {config.data.path}")
    config = _settled(config, out, world)
    prepared = world.from_first(lambda: prepare(config, out / SHARDS))
    report.stage(_describe(prepared))

    torch.manual_seed(config.training.seed)
    model = build_model(config.model, torch.from_numpy(prepared.catalog.training_counts))
    checkpoint = out / f"checkpoint-{fingerprint(config, prepared.log)}.pt"
    if not resume and world.is_first:
        checkpoint.unlink(missing_ok=True)
    on_step, on_epoch = report.step, report.epoch
    state = fit(model, prepared.split, prepared.event, config.training, checkpoint, on_step, on_epoch, world)

    report.stage(f"best epoch {state.best_epoch}; fitting the calibration on validation")
    calibration = world.from_first(lambda: calibrate(model, prepared))
    report.stage("ranking the whole catalogue for every test user")
    figures = test_figures(model, prepared, calibration, world)

    item_ids = prepared.catalog.item_ids.to_list()
    new_items, fitted = world.from_first(lambda: fit_new_items(model, item_ids, prepared.metadata))
    report.stage("exporting to ONNX and comparing with torch")
    record = _record(config, prepared, state, figures, fitted, command, time.monotonic() - begun, world)
    bundle = world.from_first(lambda: _deliver(model.cpu(), prepared, calibration, new_items, record, out))
    report.stage(f"published {config.model_name} {bundle.name}")
    return TrainedModel(bundle, record)


def _settled(config: RunConfig, out: Path, world: World) -> RunConfig:
    """The configuration with what depends on the run's folder and processes filled in."""
    data = {**config.data.model_dump(), "rejects": config.data.rejects or out / "rejects.jsonl"}
    training = {**config.training.model_dump(), "micro_batches": micro_batches(config.training, world)}
    return config.model_copy(
        update={
            "data": DataConfig.model_validate(data),
            "training": OptimizerConfig.model_validate(training),
        }
    )


def _deliver(
    model: Backbone,
    prepared: Prepared,
    calibration: Calibration,
    new_items: NewItems,
    record: dict[str, Any],
    out: Path,
) -> Path:
    """Publish the bundle and write the run's record; returns the bundle's folder."""
    calibration = calibration.model_copy(update={"report": _calibration_report(record["test"])})
    bundle = publish(model, prepared, calibration, new_items, record, out / "registry")
    write_whole(out / "record.json", (json.dumps({**record, "bundle": bundle.name}, indent=2) + "\n").encode())
    shutil.rmtree(out / SHARDS, ignore_errors=True)
    return bundle


def prepare(config: RunConfig, shards: Path | None = None) -> Prepared:
    """Read the log, build the catalogue, split.

    Args:
        config: the run's configuration.
        shards: the folder where a streamed log's training histories go; what lies there is deleted.

    Raises:
        ValueError: a log is to be streamed and `shards` is None.
        DataError: the log cannot be read, or a part of the split is empty.
    """
    log, catalog, split = _read_split(config.data, config.split, shards)
    if config.titles is not None:
        catalog = catalog.with_titles(read_titles(config.titles))
    _require(config.data.path, split, "training", int(catalog.training_counts.sum()))
    _require(config.data.path, split, "validation", len(split.validation))
    _require(config.data.path, split, "test", len(split.test))
    metadata = None if config.metadata is None else read_metadata(config.metadata)
    return Prepared(log, catalog, split, resolve_event(config.event, split.validation), metadata)


def _read_split(
    config: DataConfig, name: SplitName, shards: Path | None, catalog: Catalog | None = None
) -> tuple[LogFacts, Catalog, Split]:
    """A log's facts, its catalogue with training counts, its split; by a catalogue that is given, or its own."""
    if config.streaming:
        if shards is None:
            raise ValueError("a streamed log needs a folder for its shards")
        streamed = stream_log(config, name, shards, catalog)
        return streamed.facts, streamed.catalog, streamed.split
    log = read_events(config)
    if catalog is None:
        catalog = Catalog.from_log(log)
    split = make_split(log, catalog, name)
    return log.facts(), catalog.with_training_counts(training_counts(split.train, len(catalog))), split


def resolve_event(asked: Event | Literal["auto"], validation: Targets) -> Event:
    """What a confidence is the probability of; `auto`: by how many validation targets were had before."""
    if asked != "auto":
        return asked
    repeats = [
        target - FIRST_ITEM in evaluate.seen_rows(validation.history, user)
        for user, target in enumerate(validation.target)
    ]
    return "next_item" if np.mean(repeats) > REPEAT_SHARE else "next_new_item"


def calibrate(model: Backbone, prepared: Prepared) -> Calibration:
    """Temperature, then the confidence map, both on the validation users."""
    validation, event = prepared.split.validation, prepared.event

    def scored() -> Any:
        return evaluate.score_users(model, validation.history, event)

    temperature = calibrating.fit_temperature(scored(), validation)
    predictions = evaluate.predict(scored(), validation, temperature, calibrating.FIT_LIST_LENGTH)
    scale = model.head.shrinkage().item()
    return calibrating.fit_confidence(predictions, prepared.catalog.training_counts, temperature, scale, event)


def test_figures(model: Backbone, prepared: Prepared, calibration: Calibration, world: World) -> dict[str, Any]:
    """The test users' figures, by torch."""
    scored = evaluate.score_users(model, prepared.split.test.history, prepared.event, world)
    return _figures(scored, prepared.split.test, calibration, prepared.catalog.training_counts, world)


def evaluate_bundle(bundle: Bundle, data: DataConfig) -> dict[str, Any]:
    """The same figures for a bundle, by its own graphs in ONNX Runtime, on the test users of a log.

    Items of the log that the bundle does not know are read as UNK; they cannot be targets.

    Raises:
        DataError: the log cannot be read, or has no test user whose target the bundle knows.
    """
    prepared = prepare_for(bundle, data)
    scored = evaluate.score_users_by_bundle(bundle, prepared.split.test.history)
    return _figures(scored, prepared.split.test, bundle.calibration, Catalog.of_bundle(bundle).training_counts)


def prepare_for(bundle: Bundle, data: DataConfig) -> Prepared:
    """A log, split as the bundle's was, its items numbered as the bundle numbers them.

    Items that the bundle does not know are read as UNK; they cannot be targets. Training counts are those of this log.

    Raises:
        DataError: the log cannot be read, or has no test user whose target the bundle knows.
    """
    with tempfile.TemporaryDirectory() as shards:
        split_name = bundle.manifest.data["split"]
        log, catalog, split = _read_split(data, split_name, Path(shards), Catalog.of_bundle(bundle))
    _require(data.path, split, "test", len(split.test))
    return Prepared(log, catalog, split, bundle.manifest.event)


def publish(
    model: Backbone,
    prepared: Prepared,
    calibration: Calibration,
    new_items: NewItems,
    record: dict[str, Any],
    folder: Path,
) -> Path:
    """Write the bundle into a registry and make it the current one; returns the bundle's folder."""
    catalog = prepared.catalog
    custom_ops: dict[str, tuple[str, ...]] = {}

    def fill(staging: Path) -> None:
        exported = export_graphs(model, staging, calibration.temperature)
        custom_ops.update(exported.custom_ops)
        frame = items_frame(catalog.item_ids.to_list(), catalog.training_counts, catalog.titles.to_list())
        frame.write_parquet(staging / "items.parquet")
        write_new_items(new_items, staging / NEW_ITEMS)
        (staging / "calibration.json").write_text(calibration.model_dump_json(indent=2) + "\n")
        golden: dict[str, Any] = dict(golden_arrays(exported.golden))
        np.savez(staging / "golden.npz", **golden)

    manifest = {
        "name": record["name"],
        "lineage": catalog.lineage,
        "created_at": datetime.now(UTC),
        "model": model.config,
        "num_items": len(catalog),
        "event": prepared.event,
        "custom_ops": custom_ops,
        "data": record["data"],
        "metrics": record["test"],
        "training": {key: record[key] for key in ("config", "command", "commit", "best_epoch", "seconds", "new_items")},
        "versions": record["versions"],
    }
    bundle = write_bundle(folder, manifest, fill)
    registry.publish(folder, bundle.name)
    return open_bundle(bundle).folder


def _require(path: Path, split: Split, part: str, size: int) -> None:
    if size == 0:
        raise DataError(
            f"{path}: the split {split.name} leaves nothing for {part}; leave_one_out needs users with"
            f" {MIN_EVENTS_LEAVE_ONE_OUT} known items of weight > 0, users some hundred users"
        )


def _figures(
    scored: Any, targets: Targets, calibration: Calibration, counts: np.ndarray, world: World = ALONE
) -> dict[str, Any]:
    predictions = evaluate.predict(scored, targets, calibration.temperature, evaluate.LIST_LENGTH, world)
    popularity = evaluate.popularity_ranks(counts, targets, calibration.event)
    return evaluate.report(predictions, calibration, popularity, counts)


def _calibration_report(figures: dict[str, Any]) -> CalibrationReport:
    return CalibrationReport(
        ece_at_10=figures["ece@10"],
        ece_null_interval=figures["ece_null_interval"],
        mean_confidence=figures["mean_confidence"],
        brier_skill_at_10=figures["brier_skill@10"],
        num_users=figures["users"],
    )


def _record(
    config: RunConfig,
    prepared: Prepared,
    state: TrainState,
    figures: dict[str, Any],
    fitted: dict[str, Any],
    command: Sequence[str],
    seconds: float,
    world: World,
) -> dict[str, Any]:
    """Everything needed to trace the run's figures: configuration, data, curve, versions, commit."""
    return {
        "name": config.model_name,
        "config": config.model_dump(mode="json", exclude=PATHS),
        "command": [Path(command[0]).name, *command[1:]],
        "commit": commit(),
        "data": {"source": config.data.path.name, **prepared.log.summary(), **prepared.split.summary()},
        "event": prepared.event,
        "best_epoch": state.best_epoch,
        "new_items": fitted,
        "seconds": {"training": round(state.seconds, 1), "total": round(seconds, 1)},
        "processes": world.size,
        "device": world.device.type,
        "threads": torch.get_num_threads(),
        "cpu": cpu_model(),
        "versions": versions(),
        "curve": state.curve,
        "test": figures,
    }


def _describe(prepared: Prepared) -> str:
    log, split = prepared.log, prepared.split
    ties = log.tied_last_two_users_share
    tied = "no timestamps" if ties is None else f"{ties:.0%} of users have their last two events in the same instant"
    return (
        f"{log.rows_kept:,} events ({log.rows_rejected:,} rejected)"
        f" of {log.users:,} users on {len(prepared.catalog):,} items;"
        f" {tied}; split {split.name}, event {prepared.event}"
    )


def versions() -> dict[str, str]:
    """Of Python and the libraries that a figure depends on."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in LIBRARIES}


def cpu_model() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def fingerprint(config: RunConfig, log: LogFacts) -> str:
    """Of all that decides the steps taken; not of when to stop, so that a finished run can be resumed for longer."""
    when_to_stop = {"epochs", "max_seconds", "patience"}
    if config.training.schedule != "constant":
        when_to_stop.remove("epochs")  # they say how fast the learning rate falls
    text = config.model_dump_json(exclude=PATHS | {"training": when_to_stop}) + log.sha256
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def commit() -> str | None:
    """The project's commit, marked when the tree is not clean; None outside a checkout."""
    here = Path(__file__).parent
    if not (here.parent / ".git").exists():
        return None  # installed: a repository further up would be another project's
    try:
        described = subprocess.run(
            ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=12"],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()


def keep_freed_memory() -> None:
    """Let glibc keep freed memory: otherwise every large tensor is mapped and its pages faulted in anew.

    That is a third of the training time on a CPU. Other C libraries lack `mallopt` and are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_max = -1, -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)
