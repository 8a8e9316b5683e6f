"""Data sets by name: which are known, which lie in the cache, and how each is read.

A data set gets into the cache in one of two ways: out of a Python wheel, fetched by the user's own pip, so that
mirrors, proxies and certificates configured there also hold here (`fetch`); or from files that the user has
(`training/adding.py`), with a `dataset.yaml` beside them that says how to read them. Known ones are checked byte
for byte.
"""

import difflib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from training.events import DataConfig
from training.files import write_whole
from training.tables import DataError

DOWNLOAD_TIMEOUT_S = 600
MAX_FILE_BYTES = 256 * 2**20
"""Largest file that is unpacked; a wheel is not trusted before its contents are verified."""


NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""What a data set may be called."""
DESCRIPTION = "dataset.yaml"
"""Beside the files of a data set that was added: a `Description`."""


@dataclass(frozen=True)
class DatasetFile:
    """One file of a known data set."""

    name: str
    sha256: str


@dataclass(frozen=True)
class DatasetSize:
    """How much a log holds."""

    users: int
    items: int
    events: int

    @property
    def density(self) -> float:
        """Events per pair of a user and an item; above 1 only where users repeat items."""
        return self.events / (self.users * self.items)


@dataclass(frozen=True)
class Wheel:
    """A Python package that carries a data set's files."""

    requirement: str
    """What pip is asked for, pinned to one version."""
    folder: str
    """Where the files lie in the wheel."""


@dataclass(frozen=True)
class Dataset:
    """A known data set. One more is one more row of `DATASETS`."""

    name: str
    interactions: DatasetFile
    size: DatasetSize
    terms: str
    """Where it comes from and who may use it for what, as far as known; to be shown to the user."""
    source: Wheel | str
    """What it is fetched from, or in words where the user finds the file."""
    items: DatasetFile | None = None
    """The items' titles."""

    @property
    def files(self) -> tuple[DatasetFile, ...]:
        """All of its files, the log first."""
        return (self.interactions,) if self.items is None else (self.interactions, self.items)

    @property
    def how_to_get(self) -> str:
        """What to run to have it."""
        if isinstance(self.source, Wheel):
            return f"run `bft-train data fetch {self.name}`"
        return f"run `bft-train data add {self.name} FILE` with {self.source}"


def _one_user_a_line(name: str, file: DatasetFile, size: tuple[int, int, int], source: str, terms: str) -> Dataset:
    form = "one user a line, item ids in time order, no timestamps"
    return Dataset(name, file, DatasetSize(*size), f"{terms}; {form}", source)


def _s3_rec(name: str, file: DatasetFile, size: tuple[int, int, int], origin: str) -> Dataset:
    source = f"FILE = data/{file.name} of the GitHub repository RUCAIBox/CIKM2020-S3Rec"
    terms = f"{origin}, as preprocessed for S3-Rec, whose authors state no licence and ask to be cited"
    return _one_user_a_line(name, file, size, source, terms)


_AMAZON_2014 = "Amazon reviews up to 2014 (McAuley et al.), category {}, 5-core"

DATASETS = {
    dataset.name: dataset
    for dataset in (
        _s3_rec(
            "beauty",
            DatasetFile("Beauty.txt", "226cce9c3105299ca0db9615d7d3fb32b3175e90da43100ae352599f0f0107b8"),
            (22_363, 12_101, 198_502),
            _AMAZON_2014.format("Beauty"),
        ),
        _s3_rec(
            "sports",
            DatasetFile("Sports_and_Outdoors.txt", "2a095e0648872beb9982408958290f5d655db5be2911c3756b5446de9f0b8de2"),
            (35_598, 18_357, 296_337),
            _AMAZON_2014.format("Sports and Outdoors"),
        ),
        _s3_rec(
            "toys",
            DatasetFile("Toys_and_Games.txt", "176c680c688d497598c4a89a03b402c0fe78d795e5db335c2e78dd5f2d778a3f"),
            (19_412, 11_924, 167_597),
            _AMAZON_2014.format("Toys and Games"),
        ),
        _one_user_a_line(
            "instruments",
            DatasetFile("Instruments.txt", "b45a59d9a0ee22ffaafa896546adfee067e883c856e833633d4b89b2a61f13e7"),
            (24_772, 9_922, 206_153),
            "FILE = Instruments.txt, of which no public address is known here",
            "Amazon reviews, category Musical Instruments, not the 5-core set of 2014; release and terms are not known",
        ),
        _s3_rec(
            "lastfm",
            DatasetFile("LastFM.txt", "9ded486adb5b0fe9dc761950afa0a9a05e93ff018992e0c52bf11afec529f802"),
            (1_090, 3_646, 52_551),
            "Last.fm artists by user, HetRec 2011",
        ),
        Dataset(
            name="ml-100k",
            interactions=DatasetFile(
                "ml-100k.inter", "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff"
            ),
            size=DatasetSize(943, 1_682, 100_000),
            terms="MovieLens 100K, GroupLens Research: for research; commercial use needs their permission",
            source=Wheel("recbole==1.2.1", "recbole/dataset_example/ml-100k"),
            items=DatasetFile("ml-100k.item", "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532"),
        ),
    )
}
FETCHABLE = [dataset.name for dataset in DATASETS.values() if isinstance(dataset.source, Wheel)]


class Description(BaseModel):
    """A data set that was added: which files are its own, how its log is read, what it holds."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    log: Annotated[str, Field(pattern=r"^[^/.][^/]*$")]
    """Name of a file or folder beside the description."""
    data: dict[str, Any]
    """The keys of `DataConfig` but `path` and `rejects`."""
    titles: Annotated[str, Field(pattern=r"^[^/.][^/]*$")] | None = None
    """Name of a file beside the description."""
    sha256: str
    """Of the log, as `EventLog.sha256`."""
    size_bytes: int
    """Of the log."""
    users: int
    items: int
    events: int


@dataclass(frozen=True)
class FoundDataset:
    """A data set in the cache."""

    name: str
    config: DataConfig
    """Where the log lies and how to read it."""
    titles: Path | None
    sha256: str
    """Of the log, as `EventLog.sha256`; verified when the data set came into the cache."""
    size: DatasetSize


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
    if configured.is_absolute():
        return configured / "bft"
    try:
        return Path.home() / ".cache" / "bft"
    except RuntimeError:
        raise DataError("this user has no home folder to keep data sets in; set XDG_CACHE_HOME") from None


def dataset_folder(name: str, cache: Path | None = None) -> Path:
    """Where the files of a data set lie, or would.

    Args:
        name: what it is called.
        cache: None: `default_cache_dir()`.
    """
    return (cache or default_cache_dir()) / "datasets" / name


# Finding


def find(name: str, cache: Path | None = None) -> FoundDataset:
    """The data set of this name.

    Raises:
        DataError: it is not in the cache (says how to get it), or not whole there.
    """
    found = stored(name, cache)
    if found is None:
        raise DataError(_absence(name, cache))
    return found


def resolve(path: str | Path, cache: Path | None = None) -> FoundDataset | None:
    """The data set that is meant where a log is named: an existing path means itself, else a name its data set.

    Returns:
        None where `path` exists, or is the name of no data set in the cache.

    Raises:
        DataError: the data set is not whole.
    """
    name = str(path)
    if not NAME.fullmatch(name) or Path(name).exists():
        return None
    return stored(name, cache)


def check_log(path: Path, cache: Path | None = None) -> None:
    """That a log, which may have been meant as a data set's name, exists.

    Raises:
        DataError: it does not; names the nearest data set.
    """
    if not path.exists():
        absence = _absence(str(path), cache) if NAME.fullmatch(str(path)) else _LOGS
        raise DataError(f"{path} does not exist; {absence}")


_LOGS = "give a file, a folder of files, or the name of a data set (`bft-train data list` shows them)"


def stored(name: str, cache: Path | None = None) -> FoundDataset | None:
    """The data set of this name in the cache, None where there is none; errors as in `find`."""
    if not NAME.fullmatch(name):
        return None
    folder = dataset_folder(name, cache)
    try:
        folder.lstat()
        return _described(name, folder) if (folder / DESCRIPTION).is_file() else _fetched(name, folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"the data set {name} cannot be read: {error}; let this user read {folder}") from error


@dataclass(frozen=True)
class Listing:
    """What a cache holds and lacks."""

    folder: Path
    present: list[FoundDataset]
    damaged: dict[str, str]
    """Name → what is wrong."""
    missing: list[Dataset]
    """The known ones that are not there."""


def listing(cache: Path | None = None) -> Listing:
    """Every data set in the cache, by name, and every known one that is not."""
    folder = dataset_folder("", cache)
    names = _stored_names(cache)
    present: list[FoundDataset] = []
    damaged: dict[str, str] = {}
    for name in names:
        try:
            present.append(find(name, cache))
        except DataError as error:
            damaged[name] = str(error)
    return Listing(folder, present, damaged, [known for known in DATASETS.values() if known.name not in names])


def _stored_names(cache: Path | None) -> list[str]:
    folder = dataset_folder("", cache)
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and NAME.fullmatch(path.name))


def size_bytes(path: Path) -> int:
    """Bytes of a file, or of the files in a folder."""
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))


def _described(name: str, folder: Path) -> FoundDataset:
    """A data set that was added."""
    try:
        description = Description.model_validate(yaml.safe_load((folder / DESCRIPTION).read_text()))
        config = DataConfig.model_validate({**description.data, "path": folder / description.log})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise _not_whole(name, folder, f"{DESCRIPTION}, {key}: {first['msg']}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise _not_whole(name, folder, f"{DESCRIPTION}: {error}") from error
    titles = None if description.titles is None else folder / description.titles
    if not config.path.exists() or size_bytes(config.path) != description.size_bytes:
        raise _not_whole(name, folder, f"{description.log} is not the {description.size_bytes} bytes that were added")
    if titles is not None and not titles.is_file():
        raise _not_whole(name, folder, f"{description.titles} is missing")
    size = DatasetSize(description.users, description.items, description.events)
    return FoundDataset(name, config, titles, description.sha256, size)


def _fetched(name: str, folder: Path) -> FoundDataset:
    """A data set that `fetch` has put there."""
    known = DATASETS.get(name)
    if known is None or not all(is_whole(folder / file.name, file.sha256) for file in known.files):
        raise _not_whole(name, folder, "files are missing or damaged")
    config = DataConfig(path=folder / known.interactions.name)
    titles = folder / known.items.name if known.items else None
    return FoundDataset(name, config, titles, known.interactions.sha256, known.size)


def _not_whole(name: str, folder: Path, problem: str) -> DataError:
    again = f"add it again with `bft-train data add {name} FILE --replace`"
    if name in FETCHABLE:
        again = f"{DATASETS[name].how_to_get}, or {again}"
    return DataError(f"the data set {name} in {folder} is not whole: {problem}; {again}")


def _absence(name: str, cache: Path | None) -> str:
    """Why there is no data set of this name, and what to do."""
    if name in DATASETS:
        return f"the data set {name} is not in the cache: {DATASETS[name].how_to_get}"
    names = sorted({*DATASETS, *_stored_names(cache)})
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    return (
        f"no data set is called {name!r}; nearest: {nearest!r}; `bft-train data list` shows all,"
        " `bft-train data add NAME FILE` adds one"
    )


# Fetching


def fetch(
    name: str,
    cache: Path | None = None,
    progress: Callable[[FetchProgress], None] = lambda _: None,
    *,
    download: Download | None = None,
) -> FetchedDataset:
    """The dataset's files, from the cache if they are there and whole, else downloaded.

    Args:
        name: a key of `DATASETS`.
        cache: None: `default_cache_dir()`. Files lie in its `datasets/<name>/`.
        progress: called at each step.
        download: how a wheel is obtained; None: `pip_download`.

    Raises:
        DataError: a name that is unknown or in no wheel, a failed download, a cache that cannot be written, or
            contents that are not the expected ones; the cache then holds nothing new.
    """
    if name not in DATASETS:
        nearest = difflib.get_close_matches(name, FETCHABLE, n=1, cutoff=0.0)[0]
        raise DataError(f"no dataset is called {name!r}; nearest: {nearest!r}; known: {', '.join(FETCHABLE)}")
    dataset = DATASETS[name]
    source = dataset.source
    if not isinstance(source, Wheel) or dataset.items is None:
        raise DataError(f"{name} cannot be fetched: {dataset.how_to_get}")
    folder = dataset_folder(name, cache)
    result = FetchedDataset(folder / dataset.interactions.name, folder / dataset.items.name)

    if all(is_whole(folder / file.name, file.sha256) for file in dataset.files):
        progress(FetchProgress(name, "cached", f"{name} is in {folder}"))
        return result
    with tempfile.TemporaryDirectory() as temporary:
        progress(FetchProgress(name, "download", f"downloading {source.requirement} with pip"))
        wheel = (download or pip_download)(source.requirement, Path(temporary))
        progress(FetchProgress(name, "unpack", f"unpacking and verifying {wheel.name}"))
        contents = {file.name: _unpack(wheel, f"{source.folder}/{file.name}", file.sha256) for file in dataset.files}
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


def is_whole(path: Path, sha256: str) -> bool:
    """Whether a file is there with these contents."""
    return path.is_file() and file_sha256(path) == sha256


def file_sha256(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(wheel: Path, member: str, sha256: str) -> bytes:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{wheel.name} is not the wheel expected: {error}; clear pip's cache and try again") from error
    actual = hashlib.sha256(content).hexdigest()
    if actual != sha256:
        raise DataError(
            f"{member} in {wheel.name} has sha256 {actual}, expected {sha256}: the wheel is not the"
            " one this project was tested with. Nothing was kept; clear pip's cache and check its index"
        )
    return content
