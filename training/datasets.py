"""Public datasets, fetched once into a cache and checked byte for byte.

They come out of Python wheels, fetched by the user's own pip, so that mirrors, proxies and certificates
configured there also hold here.
"""

import difflib
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from training.files import write_whole
from training.tables import DataError

DOWNLOAD_TIMEOUT_S = 600
MAX_FILE_BYTES = 256 * 2**20
"""Largest file that is unpacked; a wheel is not trusted before its contents are verified."""


@dataclass(frozen=True)
class DatasetFile:
    """One file inside a wheel."""

    name: str
    """In the cache."""
    member: str
    """In the wheel."""
    sha256: str


@dataclass(frozen=True)
class Dataset:
    """Where a dataset comes from. One more dataset is one more row of `DATASETS`."""

    name: str
    requirement: str
    """What pip is asked for, pinned to one version."""
    interactions: DatasetFile
    items: DatasetFile
    terms: str
    """Who may use it for what; to be shown to the user."""


DATASETS = {
    dataset.name: dataset
    for dataset in (
        Dataset(
            name="ml-100k",
            requirement="recbole==1.2.1",
            interactions=DatasetFile(
                name="ml-100k.inter",
                member="recbole/dataset_example/ml-100k/ml-100k.inter",
                sha256="4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
            ),
            items=DatasetFile(
                name="ml-100k.item",
                member="recbole/dataset_example/ml-100k/ml-100k.item",
                sha256="51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
            ),
            terms="MovieLens 100K, GroupLens Research: for research; commercial use needs their permission",
        ),
    )
}


@dataclass(frozen=True)
class FetchedDataset:
    """A dataset on this machine's disk, verified."""

    interactions: Path
    items: Path


@dataclass(frozen=True)
class FetchProgress:
    """One step of `fetch`, for a progress bar or a log line. The length of a download is not known."""

    dataset: str
    stage: Literal["cached", "download", "unpack", "done"]
    message: str


Download = Callable[[str, Path], Path]
"""(requirement, folder) → path of the wheel that now lies in the folder. Raises DataError."""


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/bft` or `~/.cache/bft`; the XDG specification has a relative value ignored."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".cache") / "bft"


def fetch(
    name: str,
    cache_dir: Path | None = None,
    progress: Callable[[FetchProgress], None] = lambda _: None,
    *,
    download: Download | None = None,
) -> FetchedDataset:
    """The dataset's files, from the cache if they are there and whole, else downloaded.

    Args:
        name: a key of `DATASETS`.
        cache_dir: None: `default_cache_dir()`. Files lie in its `datasets/<name>/`.
        progress: called at each step.
        download: how a wheel is obtained; None: `pip_download`.

    Raises:
        DataError: an unknown name, a failed download, a cache that cannot be written, or contents that are
            not the expected ones; the cache then holds nothing new.
    """
    if name not in DATASETS:
        nearest = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.0)[0]
        raise DataError(f"no dataset is called {name!r}; nearest: {nearest!r}; known: {', '.join(DATASETS)}")
    dataset = DATASETS[name]
    folder = (cache_dir or default_cache_dir()) / "datasets" / name
    files = (dataset.interactions, dataset.items)
    result = FetchedDataset(folder / dataset.interactions.name, folder / dataset.items.name)

    if all(_is_whole(folder / file.name, file.sha256) for file in files):
        progress(FetchProgress(name, "cached", f"{name} is in {folder}"))
        return result
    with tempfile.TemporaryDirectory() as temporary:
        progress(FetchProgress(name, "download", f"downloading {dataset.requirement} with pip"))
        wheel = (download or pip_download)(dataset.requirement, Path(temporary))
        progress(FetchProgress(name, "unpack", f"unpacking and verifying {wheel.name}"))
        contents = {file.name: _unpack(wheel, file) for file in files}
    try:
        for file_name, content in contents.items():
            write_whole(folder / file_name, content)
    except OSError as error:
        raise DataError(
            f"cannot write into the cache {folder} ({error.strerror}); choose another cache folder"
        ) from error
    progress(FetchProgress(name, "done", f"{name} is in {folder}. {dataset.terms}"))
    return result


def pip_download(requirement: str, folder: Path) -> Path:
    """Fetch one wheel by this interpreter's pip, without dependencies and without running its code.

    Raises:
        DataError: pip is missing, fails, or takes longer than `DOWNLOAD_TIMEOUT_S`.
    """
    command = [sys.executable, "-m", "pip", "download", requirement, "--dest", str(folder)]
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    try:
        outcome = subprocess.run(
            command + options, capture_output=True, text=True, errors="replace", timeout=DOWNLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"pip did not fetch {requirement} within {DOWNLOAD_TIMEOUT_S} s; check the network") from None
    wheels = list(folder.glob("*.whl"))
    if outcome.returncode != 0 or len(wheels) != 1:
        last_lines = "\n".join(outcome.stderr.strip().splitlines()[-5:])
        raise DataError(
            f"pip could not fetch {requirement}; check the network and pip's settings. It said:\n{last_lines}"
        )
    return wheels[0]


def _is_whole(path: Path, sha256: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


def _unpack(wheel: Path, file: DatasetFile) -> bytes:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(file.member) as member:
            content = member.read(MAX_FILE_BYTES + 1)
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{wheel.name} is not the wheel expected: {error}; clear pip's cache and try again") from error
    actual = hashlib.sha256(content).hexdigest()
    if actual != file.sha256:
        raise DataError(
            f"{file.member} in {wheel.name} has sha256 {actual}, expected {file.sha256}: the wheel is not the"
            " one this project was tested with. Nothing was kept; clear pip's cache and check its index"
        )
    return content
