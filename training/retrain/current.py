"""What the current bundle is to the job: how far it has learned the log, and which model the next one goes on with."""

import math
from pathlib import Path

from model import registry as registries
from model.bundle import Bundle, open_bundle
from training.retrain import report as reports
from training.retrain.config import JobConfig
from training.retrain.learn import unlike
from training.retrain.run import Run
from training.retrain.store import Learned, Store
from training.tables import DataError


def is_current(registry: Path, version: str) -> bool:
    """Whether a bundle is the one that the service takes."""
    index = registries.read_index(registry)
    return index is not None and index.current == version


def rolled_back(registry: Path) -> Learned:
    """What the bundle had learned from which somebody rolled back; nothing where there is none."""
    index = registries.read_index(registry)
    if index is None or index.rolled_back is None or not (registry / index.rolled_back).is_dir():
        return Learned()
    return learned_by(open_bundle(registry / index.rolled_back))


def require_one_job(work: Path, registry: Path, store: Store, learned: Learned, current: Bundle | None) -> None:
    """That log and registry belong together.

    Raises:
        DataError: they cannot: another log was learned, or the registry is empty where this job has published.
    """
    if learned.ingest > store.index.ingests:
        raise DataError(
            f"{registry}: the current bundle learned from {learned.ingest} ingests, the log in {work} has"
            f" {store.index.ingests}: it is another one, or an older copy of it. Give the --work folder of the job that"
            " published the bundle; or, to start anew, an empty --work and another --registry"
        )
    if current is None and reports.has_published(work):
        raise DataError(
            f"{registry}: nothing was published here, though the job of {work} has published: is the folder mounted,"
            " and the right one? To start anew, give an empty --work"
        )


def going_on(config: JobConfig, current: Bundle | None, run: Run) -> JobConfig:
    """The configuration with the current model where it names none; what is lost all the same is noted."""
    if current is None:
        return config
    if "model" not in config.model_fields_set:
        config = config.model_copy(update={"model": current.manifest.model})
    if config.retrain.start == "warm" and (differs := unlike(config.model, current)):
        run.notes.append(
            f"the candidate begins from nothing: its model differs from the current one's in {', '.join(differs)};"
            " leave `model` out of the configuration to go on with the current one"
        )
    if config.metadata is None and current.new_items.regression is not None:
        run.notes.append(
            "the current model places items that are added at run time by their metadata, the next one will not: give"
            " the job metadata.path"
        )
    return config


def learned_by(current: Bundle | None) -> Learned:
    """What the current model has learned of the job's log.

    One that another command fitted has learned the log that it was given, if that log has timestamps; a date ahead of
    the fit itself is a wrong clock's.
    """
    if current is None:
        return Learned()
    manifest = current.manifest
    if "ingest" in manifest.training:
        return Learned(ingest=manifest.training["ingest"])
    last = manifest.data.get("last_timestamp")
    return Learned() if last is None else Learned(until=min(last, manifest.created_at.timestamp()))


def num_known_users(current: Bundle | None) -> int | None:
    """Of how many users the current model learned, if another command fitted it, on a log with timestamps."""
    if current is None or math.isinf(learned_by(current).until):
        return None
    return int(current.manifest.data["users"])
