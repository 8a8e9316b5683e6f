"""The registry: which bundle is current, which one was before, and how to go back (architecture.md).

A registry is a folder: one folder a bundle, `registry.json` as the one truth, and `current`, a link to the
current bundle for people and tools. `registry.json` is replaced by rename, so a reader sees the old or the
new, whole.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from model.bundle import MANIFEST, Bundle, BundleError, Manifest, fsync, open_bundle, read_manifest

REGISTRY = "registry.json"
CURRENT = "current"
STRAY_S = 86_400
"""Age of a folder that no index names and that is nobody's work under way any more."""

Version = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
"""A bundle's content hash, the name of its folder."""


class RegistryIndex(BaseModel):
    """The content of registry.json: versions are bundle folder names; history is oldest first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    current: Version
    previous: Version | None = None
    history: tuple[Version, ...] = ()
    rolled_back: Version | None = None
    """What was current until the last rollback; None once another bundle was published."""

    def to_json(self) -> dict[str, Any]:
        """As the file has it: `rolled_back` where there is one."""
        fields = self.model_dump(mode="json")
        return fields if self.rolled_back else {name: value for name, value in fields.items() if name != "rolled_back"}


class RegistryChanged(BundleError):
    """Another bundle is current than the one that was expected."""


def publish(registry: Path, version: str) -> RegistryIndex:
    """Make a bundle that lies in the registry the current one.

    Raises:
        BundleError: the bundle is missing or damaged; the current one stays.
    """
    open_bundle(registry / version)
    with _lock(registry):
        return _make_current(registry, read_index(registry), version)


def publish_after(registry: Path, version: str, expected: str | None) -> RegistryIndex:
    """The same, if the bundle that the new one was judged beside is still the current one.

    Args:
        registry, version: as of `publish`.
        expected: the version that is to be current until then; None: nothing was published yet.

    Raises:
        RegistryChanged: it is not: somebody published or rolled back meanwhile, and that stays.
        BundleError: the bundle is missing or damaged; the current one stays.
    """
    open_bundle(registry / version)
    with _lock(registry):
        index = read_index(registry)
        current = None if index is None else index.current
        if current not in (expected, version):
            raise RegistryChanged(f"{registry}: {current} is current, no longer {expected}; {version} is not published")
        return _make_current(registry, index, version)


def roll_back(registry: Path) -> RegistryIndex:
    """Make the previous bundle current again.

    Raises:
        BundleError: there is no previous bundle, or it is damaged.
    """
    if read_index(registry) is None:
        raise BundleError(f"{registry}: no earlier bundle to go back to; nothing was published here yet")
    with _lock(registry):
        index = read_index(registry)
        if index is None or index.previous is None:
            raise BundleError(f"{registry}: no earlier bundle to go back to")
        open_bundle(registry / index.previous)
        return _make_current(registry, index, index.previous, rolled_back=index.current)


def prune(registry: Path, keep: int) -> list[str]:
    """Remove all but the bundles that were current last, the current and the previous one among them.

    Those by which a bundle that stays was calibrated stay too. What was never current, and is older than
    `STRAY_S`, is what a publisher that died left, and goes.

    Args:
        keep: how many stay, at least 2.

    Returns:
        the versions that were removed.

    Raises:
        BundleError: nothing was published here yet.
    """
    with _lock(registry):
        index = read_index(registry)
        if index is None:
            raise BundleError(f"{registry}: nothing was published here yet")
        latest = list(dict.fromkeys(reversed(index.history)))[: max(keep, 2)]
        kept = {index.current, index.previous, *latest}
        kept |= {_calibrated_by(registry / version) for version in kept if version}
        folders = [path for path in registry.iterdir() if path.is_dir() and not path.is_symlink()]
        removed = [
            path
            for path in folders
            if path.name not in kept and (path.name in index.history or time.time() - path.stat().st_mtime > STRAY_S)
        ]
        history = tuple(version for version in index.history if version in kept)
        # First out of the index: a reader that comes meanwhile finds no name without a folder.
        _replace(registry, index.model_copy(update={"history": history}))
        for path in removed:
            shutil.rmtree(path)
        return sorted(path.name for path in removed)


def read_index(registry: Path) -> RegistryIndex | None:
    """The registry's index, or None where nothing was published yet.

    Raises:
        BundleError: registry.json is there and cannot be read.
    """
    path = registry / REGISTRY
    if not path.exists():
        return None
    try:
        return RegistryIndex.model_validate(json.loads(path.read_bytes()))
    except (ValueError, ValidationError) as error:
        raise BundleError(f"{path}: not a registry index ({error}); restore it or publish again") from error


def current_bundle(registry: Path) -> Bundle | None:
    """The current bundle, or None where nothing was published yet.

    Raises:
        BundleError: the index cannot be read, or the bundle is damaged.
    """
    index = read_index(registry)
    return None if index is None else open_bundle(registry / index.current)


def current_manifest(registry: Path) -> Manifest | None:
    """What the current bundle says of itself, its files not looked at; None where nothing was published yet.

    Raises:
        BundleError: the index or the manifest cannot be read.
    """
    index = read_index(registry)
    return None if index is None else read_manifest(registry / index.current)


def resolve(location: Path | str) -> Path:
    """The bundle folder behind `--bundle`: a bundle's own folder, or a registry's current one.

    Raises:
        BundleError: neither is there.
    """
    folder = Path(location)
    if (folder / MANIFEST).is_file():
        return folder.resolve()
    index = read_index(folder)
    if index is None:
        raise BundleError(f"{folder}: neither a bundle ({MANIFEST}) nor a registry ({REGISTRY}); run `bft-train fit`")
    return (folder / index.current).resolve()


def _calibrated_by(folder: Path) -> str | None:
    """Of a bundle that can be read; an old one of another format is no reason to fail."""
    try:
        return open_bundle(folder).manifest.calibrated_by
    except BundleError:
        return None


def _make_current(
    registry: Path, before: RegistryIndex | None, version: str, rolled_back: str | None = None
) -> RegistryIndex:
    """Make a verified bundle current; the lock is held."""
    if before is None:
        return _replace(registry, RegistryIndex(current=version, history=(version,)))
    if before.current == version:
        _link(registry, version)
        return before
    history = (*before.history, version)
    index = RegistryIndex(current=version, previous=before.current, history=history, rolled_back=rolled_back)
    return _replace(registry, index)


def _replace(registry: Path, index: RegistryIndex) -> RegistryIndex:
    staging = registry / f".{REGISTRY}.{os.getpid()}"
    with staging.open("w") as file:
        file.write(json.dumps(index.to_json(), indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    staging.replace(registry / REGISTRY)
    fsync(registry)
    _link(registry, index.current)
    return index


def _link(registry: Path, version: str) -> None:
    """Point `current` at a version; also repairs it after a publisher that died between index and link."""
    link = registry / f".{CURRENT}.{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(version)
    link.replace(registry / CURRENT)


@contextmanager
def _lock(registry: Path) -> Iterator[None]:
    # flock is released by the kernel when its holder dies, so a killed publisher never blocks the next.
    if not registry.is_dir():
        raise BundleError(f"{registry}: no such registry; a bundle is published where it lies")
    with (registry / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
