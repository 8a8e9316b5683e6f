"""Registries of several tiny bundles: copies of one export, told apart by their manifests or their catalogues."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._bundles import add_smaller as add_smaller
from benchmarks._bundles import unchanged as unchanged
from model import registry
from tests.service.bundles import variant


def add_version(tiny: Path, folder: Path, name: str, change: Callable[[Path], None] = unchanged, **fields: Any) -> str:
    """Put a variant of the tiny bundle into a registry, without publishing it; returns its version."""
    return variant(tiny, folder, change, name=name, **fields).name


def publish_version(tiny: Path, folder: Path, name: str, **fields: Any) -> str:
    """The same, published."""
    version = add_version(tiny, folder, name, **fields)
    registry.publish(folder, version)
    return version


def republish(folder: Path, version: str) -> None:
    """Make a version current without looking at it, as an operator could by hand."""
    index = registry.read_index(folder)
    assert index is not None
    changed = index.model_copy(update={"current": version, "previous": index.current})
    staging = folder / "index"
    staging.write_text(changed.model_dump_json())
    staging.replace(folder / registry.REGISTRY)


def copied(registry_folder: Path, target: Path) -> Path:
    """A copy of a registry, to be changed."""
    shutil.copytree(registry_folder, target, symlinks=True)
    return target
