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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
from model.new_items import write_new_items
from model.onnx.export import export_graphs
from training import calibration as calibrating
from training import evaluate
from training.catalog import Catalog, read_retired, read_titles
from training.config import PATHS, ConfigError, OptimizerConfig, RunConfig
from training.distributed import ALONE, World
from training.events import DataConfig, LogFacts, read_events
from training.files import write_parquet, write_whole
from training.loop import TrainState, fit, going_on, micro_batches, refit
from training.metadata import MetadataTable, read_metadata
from training.new_items import fit_new_items
from training.progress import Reporter
from training.splits import (
    MIN_EVENTS_LEAVE_ONE_OUT,
    Split,
    SplitName,
    Targets,
    make_split,
    training_counts,
    with_validation_learned,
)
from training.streaming import stream_log
from training.tables import DataError

REPEAT_SHARE = 0.01
"""`event: auto` means `next_item` when more than this share of the validation targets were had before."""
SAME_CATALOGUE = 0.5
"""Share of a catalogue's items that a log has to have, to be of that catalogue."""
MakeCatalog = Callable[[Iterable[str]], Catalog]
SHARDS = "shards"
"""Folder, in the run's own, of a streamed log's training histories; deleted when the run has ended well."""
TRAINING = ("config", "command", "commit", "best_epoch", "seconds", "log", "ingest", "judged")
"""What a manifest tells of a record; the last three are the retraining job's."""
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
    retired: frozenset[str] = frozenset()
    """Ids of items that the service is not to list; they are learned and judged like all others."""

    def with_validation_learned(self) -> "Prepared":
        """The same, its validation events among those to learn from, counts included."""
        split = with_validation_learned(self.split)
        counts = training_counts(split.train, len(self.catalog))
        return replace(self, split=split, catalog=self.catalog.with_training_counts(counts))


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
            on, too few trained items have metadata, or the registry's models are of another log.
        ConfigError: training diverged, the batches cannot be shared evenly by the processes, or a refit is asked for
            that the split does not allow.
        ExportError: torch and ONNX Runtime disagree. Nothing is published then.
    """
    if config.training.refit_epochs and (config.split != "leave_one_out" or config.data.streaming):
        raise ConfigError(
            "training.refit_epochs learns the validation events of split=leave_one_out, from memory"
            " (data.streaming=off); leave it out: the users that split=users holds out are new to the model in any case"
        )
    keep_freed_memory()
    begun = time.monotonic()
    report.stage(f"reading {config.data.path}")
    config = _settled(config, out, world)
    prepared = world.from_first(lambda: prepare(config, out / SHARDS, catalogue_after(out / "registry")))
    report.stage(_describe(prepared))

    checkpoint = out / f"checkpoint-{fingerprint(config, prepared)}.pt"
    if not resume and world.is_first:
        for path in (checkpoint, *out.glob(f"refit-{checkpoint.stem}-*.pt")):
            path.unlink(missing_ok=True)
    model = new_model(config, prepared)
    progress = report.step, report.epoch, world
    state = fit(model, prepared.split, prepared.event, config.training, checkpoint, *progress)

    report.stage(f"best epoch {state.best_epoch}; fitting the calibration on validation")
    calibration = world.from_first(lambda: calibrate(model, prepared))

    def judged(model: Backbone, prepared: Prepared, training_seconds: float) -> dict[str, Any]:
        report.stage("ranking the whole catalogue for every test user")
        figures = test_figures(model, prepared, calibration, world)
        seconds = {"training": round(training_seconds, 1), "total": round(time.monotonic() - begun, 1)}
        return _record(config, prepared, state, figures, command, seconds, world)

    record, calibrated_by = judged(model, prepared, state.seconds), None
    if epochs := config.training.refit_epochs:
        report.stage("exporting to ONNX the model that the calibration was fitted by")
        fitted = world.from_first(lambda: write(model.cpu(), prepared, calibration, record, out / "registry"))
        report.stage(f"going on with the validation events for {epochs} epochs")
        prepared, calibrated_by = prepared.with_validation_learned(), fitted.name
        model = new_model(config, prepared)
        model.load_state_dict(state.best_weights)
        refit_checkpoint = out / f"refit-{checkpoint.stem}-{state.best_epoch}-{epochs}.pt"
        further = going_on(config.training, epochs)
        again = refit(model, prepared.split.train, epochs, further, refit_checkpoint, *progress)
        record = judged(model, prepared, state.seconds + again.seconds)

    report.stage("exporting to ONNX and comparing with torch")
    bundle = world.from_first(lambda: _deliver(model.cpu(), prepared, calibration, record, calibrated_by, out))
    report.stage(f"published {config.model_name} {bundle.name}")
    return TrainedModel(bundle, record)


def new_model(config: RunConfig, prepared: Prepared) -> Backbone:
    """A model of the configuration for the log that was prepared, initialised by the training seed."""
    torch.manual_seed(config.training.seed)
    return build_model(config.model, torch.from_numpy(prepared.catalog.training_counts))


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
    record: dict[str, Any],
    calibrated_by: str | None,
    out: Path,
) -> Path:
    """Publish the bundle and write the run's record; returns the bundle's folder."""
    bundle = write(model, prepared, calibration, record, out / "registry", calibrated_by)
    registry.publish(bundle.parent, bundle.name)
    told = {**record, "new_items": open_bundle(bundle).manifest.training["new_items"], "bundle": bundle.name}
    write_whole(out / "record.json", (json.dumps(told, indent=2) + "\n").encode())
    shutil.rmtree(out / SHARDS, ignore_errors=True)
    return bundle


def catalogue_after(folder: Path) -> MakeCatalog:
    """How a registry's next model numbers the items of a log: as the current one does, with new ones behind.

    A service that runs, and the histories that it has stored, know items by these numbers.

    Raises:
        BundleError: the current bundle is damaged. Of what is returned DataError: less than `SAME_CATALOGUE` of the
            current model's items are in the log.
    """
    current = registry.current_bundle(folder)
    if current is None:
        return Catalog.from_ids
    known = Catalog.of_bundle(current)

    def grown(ids: Iterable[str]) -> Catalog:
        found = known.num_among(ids)
        if found < SAME_CATALOGUE * len(known):
            raise DataError(
                f"{folder}: its models know {len(known):,} items, of which the log has {found:,}: a service that runs"
                " on them could not take the new model over. Give another --out"
            )
        return known.grow(ids)

    return grown


def prepare(config: RunConfig, shards: Path | None = None, catalogue: MakeCatalog = Catalog.from_ids) -> Prepared:
    """Read the log, build the catalogue, split.

    Args:
        config: the run's configuration.
        shards: the folder where a streamed log's training histories go; what lies there is deleted.
        catalogue: makes the catalogue of the log's item ids.

    Raises:
        ValueError: a log is to be streamed and `shards` is None.
        DataError: the log cannot be read, or a part of the split is empty.
    """
    log, catalog, split = _read_split(config.data, config.split, shards, catalogue)
    if config.titles is not None:
        catalog = catalog.with_titles(read_titles(config.titles))
    _require(config.data.path, split, "training", int(catalog.training_counts.sum()))
    _require(config.data.path, split, "validation", len(split.validation))
    _require(config.data.path, split, "test", len(split.test))
    metadata = None if config.metadata is None else read_metadata(config.metadata)
    retired = frozenset() if config.retired is None else read_retired(config.retired)
    return Prepared(log, catalog, split, resolve_event(config.event, split.validation), metadata, retired)


def _read_split(
    config: DataConfig, name: SplitName, shards: Path | None, catalogue: MakeCatalog
) -> tuple[LogFacts, Catalog, Split]:
    """A log's facts, its catalogue with training counts, its split."""
    if config.streaming:
        if shards is None:
            raise ValueError("a streamed log needs a folder for its shards")
        streamed = stream_log(config, name, shards, catalogue)
        return streamed.facts, streamed.catalog, streamed.split
    log = read_events(config)
    catalog = catalogue(log.events["item_id"])
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
    split_name = bundle.manifest.data["split"]
    if split_name == "time":
        raise DataError(
            f"{bundle.folder} was made by the retraining job and has learned all of its log: nothing is left to judge"
            " it on. Its run's report has the figures of the newest events, judged before they were learned"
        )
    known = Catalog.of_bundle(bundle)
    with tempfile.TemporaryDirectory() as shards:
        log, catalog, split = _read_split(data, split_name, Path(shards), lambda _: known)
    _require(data.path, split, "test", len(split.test))
    return Prepared(log, catalog, split, bundle.manifest.event)


def write(
    model: Backbone,
    prepared: Prepared,
    calibration: Calibration,
    record: dict[str, Any],
    folder: Path,
    calibrated_by: str | None = None,
) -> Path:
    """Write the bundle into a registry, not yet as the current one; returns the bundle's folder.

    Args:
        model: on the CPU.
        prepared: what it learned from.
        calibration: to go with it; its report is taken from the record, and c from the model, which may have learned
            more than the one that the rest was fitted by.
        record: of the run, with the test figures.
        folder: the registry's.
        calibrated_by: see `Manifest`.

    Raises:
        ExportError: torch and ONNX Runtime disagree. Nothing is written then.
        DataError: too few trained items have metadata. Likewise.
    """
    of_model = {"report": _calibration_report(record["test"]), "variance_scale": model.head.shrinkage().item()}
    calibration = calibration.model_copy(update=of_model)
    catalog = prepared.catalog
    new_items, fitted = fit_new_items(model, catalog.item_ids.to_list(), prepared.metadata)
    manifest: dict[str, Any] = {}

    def fill(staging: Path) -> None:
        exported = export_graphs(model, staging, calibration.temperature)
        manifest.update(custom_ops=exported.custom_ops, parity_tolerance=exported.tolerance)
        ids, titles = catalog.item_ids.to_list(), catalog.titles.to_list()
        write_parquet(items_frame(ids, catalog.training_counts, titles, prepared.retired), staging / "items.parquet")
        write_new_items(new_items, staging / NEW_ITEMS)
        (staging / "calibration.json").write_text(calibration.model_dump_json(indent=2) + "\n")
        golden: dict[str, Any] = dict(golden_arrays(exported.golden))
        np.savez(staging / "golden.npz", **golden)

    manifest |= {
        "name": record["name"],
        "lineage": catalog.lineage,
        "calibrated_by": calibrated_by,
        "created_at": datetime.now(UTC),
        "model": model.config,
        "num_items": len(catalog),
        "event": prepared.event,
        "data": record["data"],
        "metrics": record["test"],
        "training": {"new_items": fitted, **{key: record[key] for key in TRAINING if key in record}},
        "versions": record["versions"],
    }
    return write_bundle(folder, manifest, fill)


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
    command: Sequence[str],
    seconds: dict[str, float],
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
        "seconds": seconds,
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


def fingerprint(config: RunConfig, prepared: Prepared) -> str:
    """Of all that decides the steps taken; not of when to stop, so that a finished run can be resumed for longer."""
    when_to_stop = {"epochs", "max_seconds", "patience", "refit_epochs"}
    if config.training.schedule != "constant":
        when_to_stop.remove("epochs")  # they say how fast the learning rate falls
    text = config.model_dump_json(exclude=PATHS | {"training": when_to_stop}) + prepared.log.sha256
    text += "\n".join(prepared.catalog.item_ids)
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
