"""What the current bundle is to the job: how far it has learned the log, and which model the next one goes on with."""

import math
from pathlib import Path
from typing import Any

from model import registry as registries
from model.bundle import Bundle, Manifest, read_manifest
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
    return learned_by(read_manifest(registry / index.rolled_back))


def require_one_job(work: Path, registry: Path, store: Store, current: Manifest | None) -> None:
    """That log and registry belong together. Asked before events are taken in: what is acknowledged is only here.

    Raises:
        DataError: they cannot: another log was learned, or the registry is empty where this job has published.
    """
    learned = learned_by(current)
    if current is not None and "log" in current.training:
        of_another = current.training["log"] != store.index.log
        if of_another or learned.ingest > store.index.ingests:
            raise DataError(
                f"{registry}: the current bundle learned {learned.ingest} ingests of the log"
                f" {current.training['log']}; {work} has"
                + (f" another log, {store.index.log or 'empty'}" if of_another else f" {store.index.ingests} of them")
                + ". Nothing was taken in. Give the --work folder of the job that published the bundle, or restore its"
                " newest copy; or, to start anew, an empty --work and another --registry"
            )
    if current is None and store.index.has_published:
        raise DataError(
            f"{registry}: nothing was published here, though the job of {work} has published: is the folder mounted,"
            " and the right one? To start anew, give an empty --work"
        )


def going_on(config: JobConfig, current: Bundle | None, run: Run) -> JobConfig:
    """The configuration with the current model, its name and its event where it names none.

    What is lost all the same is noted.
    """
    if current is None:
        return config
    manifest = current.manifest
    kept: dict[str, Any] = {}
    if "model" not in config.model_fields_set:
        kept["model"] = manifest.model
    if config.name is None and manifest.name != f"bft-{manifest.model.backbone}":
        kept["name"] = manifest.name
    if "event" not in config.model_fields_set:
        # From night to night the share of repeats may cross the line, and what a confidence means would change.
        kept["event"] = manifest.event
    config = config.model_copy(update=kept)
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


def learned_by(current: Manifest | None) -> Learned:
    """What the current model has learned of the job's log.

    One that another command fitted has learned the log that it was given, if that log has timestamps; a date ahead of
    the fit itself is a wrong clock's.
    """
    if current is None:
        return Learned()
    if "ingest" in current.training:
        return Learned(ingest=current.training["ingest"])
    last = current.data.get("last_timestamp")
    return Learned() if last is None else Learned(until=min(last, current.created_at.timestamp()))


def num_known_users(current: Manifest | None) -> int | None:
    """Of how many users the current model learned, if another command fitted it, on a log with timestamps."""
    if current is None or math.isinf(learned_by(current).until):
        return None
    return int(current.data["users"])
