"""Adding the user's own files to the cache as a data set: read whole, copied, verified, renamed into place.

One process adds at a time. A reader sees the data set as it was or as it is, or, for the moment between two
renames that a replacement takes, none.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from model.bundle import fsync
from training.catalog import read_titles
from training.datasets import (
    DATASETS,
    DESCRIPTION,
    NAME,
    DatasetFile,
    Description,
    FoundDataset,
    dataset_folder,
    file_sha256,
    find,
    is_whole,
    size_bytes,
    stored,
)
from training.events import DataConfig, EventLog, Format, read_events, source_files, source_sha256
from training.files import write_whole
from training.tables import DataError

COPY_BYTES = 2**20
_SUFFIXES: dict[Format, str] = {"csv": ".csv", "parquet": ".parquet", "inter": ".inter", "lines": ".txt"}


@dataclass(frozen=True)
class AddedDataset:
    """A data set that is in the cache now."""

    dataset: FoundDataset
    is_new: bool
    """False: the same lay there already, and nothing was written."""
    rows_rejected: int
    """Bad rows of its log: the copy has them too, and they are set aside whenever it is read."""
    rejects: Path
    """Where this reading has put them."""


def add(
    name: str, config: DataConfig, titles: Path | None = None, cache: Path | None = None, *, replace: bool = False
) -> AddedDataset:
    """Read a log and its titles, and copy them into the cache.

    Args:
        name: what it will be called. That of a known data set takes that data set's log only.
        config: where the log lies and how to read it; kept with the copy, but for `rejects`.
        titles: the items' titles, as `read_titles` takes them. None: none, or those of the same log that lies
            in the cache already.
        cache: None: `default_cache_dir()`.
        replace: whether another log of that name, or another way to read it, gives way.

    Raises:
        DataError: a name or log that is not accepted, a log that is not the known one, a name that is taken, or
            a cache that cannot be written; the cache is then as it was.
    """
    if not NAME.fullmatch(name):
        raise DataError(
            f"{name!r} cannot name a data set; accepted: 1 to 64 of a-z, 0-9, '.', '_' and '-',"
            " a letter or digit first, e.g. clicks-2026"
        )
    log = read_events(config)
    if titles is not None:
        read_titles(titles)
    known = DATASETS.get(name)
    if known is not None and log.sha256 != known.interactions.sha256:
        raise _another(config.path, log.sha256, name, known.interactions)
    folder = dataset_folder(name, cache)

    def result(dataset: FoundDataset, is_new: bool) -> AddedDataset:
        return AddedDataset(dataset, is_new, log.rows_rejected, config.rejects_path)

    # First without the lock, which a cache that this user may only read does not give.
    if not replace and (present := _in_place(name, config, log, titles, cache)):
        return result(present, is_new=False)
    try:
        with _lock(folder.parent):
            if not replace and (present := _in_place(name, config, log, titles, cache)):
                return result(present, is_new=False)
            _install(folder, lambda staging: _fill(staging, name, config, log, titles))
    except OSError as error:
        raise DataError(
            f"cannot copy into the cache {folder.parent}: {error}; make room there, or choose another cache"
        ) from error
    return result(find(name, cache), is_new=True)


def add_known(folder: Path, cache: Path | None = None, *, replace: bool = False) -> list[AddedDataset]:
    """Add every known data set whose log lies in a folder under its own name, with its titles where they lie there.

    Raises:
        DataError: there is none, or a file has such a name but other contents (nothing is added then); else as
            in `add`.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; name the one that holds the known data sets' files")
    here = [known for known in DATASETS.values() if (folder / known.interactions.name).is_file()]
    if not here:
        names = ", ".join(known.interactions.name for known in DATASETS.values())
        raise DataError(f"{folder} holds no known data set; looked for: {names}")
    for known in here:
        for file in known.files:
            if (folder / file.name).is_file() and not is_whole(folder / file.name, file.sha256):
                raise _another(folder / file.name, file_sha256(folder / file.name), known.name, file)
    added = []
    for known in here:
        titles = folder / known.items.name if known.items and (folder / known.items.name).is_file() else None
        added.append(add(known.name, DataConfig(path=folder / known.interactions.name), titles, cache, replace=replace))
    return added


def _another(path: Path, sha256: str, name: str, known: DatasetFile) -> DataError:
    return DataError(
        f"{path} is not the {known.name} of the data set {name}: its sha256 is {sha256}, expected {known.sha256};"
        " another version can be added under another name"
    )


def _in_place(
    name: str, config: DataConfig, log: EventLog, titles: Path | None, cache: Path | None
) -> FoundDataset | None:
    """What has the name already, if it is the same; None where nothing has.

    Raises:
        DataError: something else has the name.
    """
    present = stored(name, cache)
    if present is None:
        return None
    has_titles = titles is None or (present.titles is not None and is_whole(present.titles, file_sha256(titles)))
    if present.sha256 == log.sha256 and _reading(present.config) == _reading(config) and has_titles:
        return present
    raise DataError(
        f"the data set {name} in {dataset_folder(name, cache)} has another log, other titles or another way to read"
        f" them; choose another name, or give --replace to have it replaced by {config.path}"
    )


def _reading(config: DataConfig) -> dict[str, object]:
    """How a log is read, wherever it lies."""
    return {**config.model_dump(exclude={"path", "rejects"}), "format": source_files(config)[0]}


def _fill(staging: Path, name: str, config: DataConfig, log: EventLog, titles: Path | None) -> None:
    """Write all of a data set's files into an empty folder."""
    known = DATASETS.get(name)
    format, files = source_files(config)
    if config.path.is_dir():
        copy = staging / f"{name}.parts"
        copy.mkdir()
        digests = {file: _copy(file, copy / file.name) for file in files}
        fsync(copy)
    else:
        copy = staging / (known.interactions.name if known else name + _SUFFIXES[format])
        digests = {config.path: _copy(config.path, copy)}
    if source_sha256(config.path, digests) != log.sha256:
        raise DataError(f"{config.path} changed while it was being added; wait until it is written and add it again")
    if titles is not None:
        _copy(titles, staging / _titles_name(name, titles))
    description = Description(
        log=copy.name,
        data=config.model_dump(mode="json", exclude_unset=True, exclude={"path", "rejects"}),
        titles=None if titles is None else _titles_name(name, titles),
        sha256=log.sha256,
        size_bytes=size_bytes(copy),
        users=log.events["user_id"].n_unique(),
        items=log.events["item_id"].n_unique(),
        events=log.rows_kept,
    )
    text = yaml.safe_dump(description.model_dump(), sort_keys=False, allow_unicode=True)
    write_whole(staging / DESCRIPTION, f"# Written by `bft-train data add`.\n{text}".encode())


def _titles_name(name: str, titles: Path) -> str:
    """What the titles are called in the cache: by their known name where they are the known ones, as `fetch` has it."""
    known = DATASETS.get(name)
    if known is not None and known.items is not None and is_whole(titles, known.items.sha256):
        return known.items.name
    return f"{name}.titles{titles.suffix.lower()}"


def _copy(source: Path, target: Path) -> str:
    """Copy a file's bytes onto the disk; returns their sha256."""
    digest = hashlib.sha256()
    with source.open("rb") as reading, target.open("xb") as writing:
        while block := reading.read(COPY_BYTES):
            digest.update(block)
            writing.write(block)
        writing.flush()
        os.fsync(writing.fileno())
    return digest.hexdigest()


@contextmanager
def _lock(datasets: Path) -> Iterator[None]:
    # flock is released by the kernel when its holder dies, so a killed process never blocks the next.
    datasets.mkdir(parents=True, exist_ok=True)
    with (datasets / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(folder: Path, fill: Callable[[Path], None]) -> None:
    """Put a filled folder in the place of `folder`, all or nothing; the lock is held."""
    staging, old = folder.with_name(".adding"), folder.with_name(".replaced")
    _remove(staging)  # of a process that was killed
    _remove(old)
    staging.mkdir()
    try:
        fill(staging)
        fsync(staging)
        if os.path.lexists(folder):
            folder.rename(old)
        staging.rename(folder)
        fsync(folder.parent)
    finally:
        _remove(staging)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
