"""Data sets by name: adding the user's own files to the cache, and finding them there."""

import hashlib
import multiprocessing
import os
from pathlib import Path

import polars as pl
import pytest
import yaml

from training import adding
from training.adding import add, add_known
from training.catalog import read_titles
from training.config import ConfigError, load_config
from training.datasets import (
    DATASETS,
    Dataset,
    DatasetFile,
    DatasetSize,
    FoundDataset,
    check_log,
    find,
    listing,
    resolve,
    stored,
)
from training.events import DataConfig, read_events
from training.tables import DataError

CLICKS = "uid,sku,ts\nada,007,3\nada,x,1\nbob,x,2\n"
HOW = {"columns": {"user_id": "uid", "item_id": "sku", "timestamp": "ts"}}
TITLES = "item_id,title\n007,Seventh Heaven\n"


@pytest.fixture
def clicks(tmp_path: Path) -> DataConfig:
    path = tmp_path / "given" / "Clicks 2026.csv"
    path.parent.mkdir()
    path.write_text(CLICKS)
    return DataConfig.model_validate({"path": path, **HOW})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "bft"


def files_in(cache: Path) -> dict[str, bytes]:
    """Every file below the folder of data sets but the lock, with its bytes."""
    folder = cache / "datasets"
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    files.pop(".lock", None)
    return files


# Adding


def test_an_added_log_is_found_by_name_and_reads_as_its_source_did(clicks: DataConfig, cache: Path) -> None:
    added = add("clicks", clicks)
    clicks.path.unlink()

    found = find("clicks")
    assert (added.dataset, added.is_new, added.rows_rejected) == (found, True, 0)
    assert found.config.path.read_text() == CLICKS
    assert found.config.path.is_relative_to(cache / "datasets" / "clicks")
    assert read_events(found.config).events.select("user_id", "item_id", "timestamp").rows() == [
        ("ada", "x", 1.0),
        ("ada", "007", 3.0),
        ("bob", "x", 2.0),
    ]
    assert found.sha256 == hashlib.sha256(CLICKS.encode()).hexdigest()
    assert found.titles is None


def test_the_size_of_a_data_set_counts_users_items_and_events(clicks: DataConfig, cache: Path) -> None:
    size = add("clicks", clicks).dataset.size

    assert (size.users, size.items, size.events) == (2, 2, 3)
    assert size.density == 3 / 4


@pytest.mark.parametrize("format", ["parquet", "inter", "lines", "folder", "odd suffix"])
def test_every_form_of_log_is_kept_so_that_it_reads_the_same(format: str, tmp_path: Path, cache: Path) -> None:
    source, how = tmp_path / "source", {}
    match format:
        case "parquet":
            source = source.with_suffix(".pq")
            pl.DataFrame({"user_id": ["ada", "bob"], "item_id": ["x", "y"]}).write_parquet(source)
        case "inter":
            source = source.with_suffix(".inter")
            source.write_text("user_id:token\titem_id:token\nada\tx\nbob\ty\n")
        case "lines":
            source = source.with_suffix(".txt")
            source.write_text("ada x\nbob y\n")
        case "folder":
            source.mkdir()
            (source / "part-1.csv").write_text("user_id,item_id\nada,x\n")
            (source / "part-2.csv").write_text("user_id,item_id\nbob,y\n")
            (source / "_SUCCESS").touch()
        case _:
            source = source.with_suffix(".yaml")
            source.write_text("user_id,item_id\nada,x\nbob,y\n")
            how = {"format": "csv"}
    config = DataConfig.model_validate({"path": source, **how})

    found = add("dataset", config).dataset

    log, again = read_events(config), read_events(found.config)
    assert again.events.equals(log.events)
    assert again.sha256 == found.sha256 == log.sha256
    assert again.events.select("user_id", "item_id").rows() == [("ada", "x"), ("bob", "y")]


def test_a_link_is_followed_and_its_contents_kept(clicks: DataConfig, cache: Path) -> None:
    link = clicks.path.with_name("link.csv")
    link.symlink_to(clicks.path)

    found = add("clicks", DataConfig.model_validate({"path": link, **HOW})).dataset

    assert not found.config.path.is_symlink()
    assert found.config.path.read_text() == CLICKS


def test_titles_are_kept_with_the_log(clicks: DataConfig, cache: Path, tmp_path: Path) -> None:
    titles = tmp_path / "names.CSV"
    titles.write_text(TITLES)

    found = add("clicks", clicks, titles).dataset

    assert read_titles(found.titles) == {"007": "Seventh Heaven"}


def test_what_is_kept_says_in_yaml_how_to_read_it(clicks: DataConfig, cache: Path) -> None:
    add("clicks", clicks)

    described = yaml.safe_load((cache / "datasets" / "clicks" / "dataset.yaml").read_text())
    assert described["data"] == HOW
    assert (described["users"], described["items"], described["events"]) == (2, 2, 3)
    assert described["sha256"] == hashlib.sha256(CLICKS.encode()).hexdigest()


def test_adding_the_same_again_writes_nothing(clicks: DataConfig, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TITLES)
    first = add("clicks", clicks, tmp_path / "t.csv").dataset
    changed_at = first.config.path.stat().st_ctime_ns

    for titles in (tmp_path / "t.csv", None):
        again = add("clicks", clicks, titles)

        assert (again.dataset, again.is_new) == (first, False)
    assert first.config.path.stat().st_ctime_ns == changed_at


def test_adding_the_same_again_needs_no_right_to_write(
    clicks: DataConfig, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add("clicks", clicks)

    def read_only(datasets: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(adding, "_lock", read_only)

    assert not add("clicks", clicks).is_new
    with pytest.raises(DataError, match=r"cannot copy into the cache .*Permission denied"):
        add("other", clicks)


def test_other_contents_are_refused_until_told_to_replace(clicks: DataConfig, cache: Path, tmp_path: Path) -> None:
    add("clicks", clicks)
    (tmp_path / "t.csv").write_text(TITLES)
    before = files_in(cache)
    clicks.path.write_text(CLICKS + "eve,y,9\n")
    other_reading = clicks.model_copy(update={"timestamp_unit": "ms"})

    for config, titles in ((clicks, None), (other_reading, None), (clicks, tmp_path / "t.csv")):
        with pytest.raises(DataError, match=r"the data set clicks in .* has another log.*give --replace"):
            add("clicks", config, titles)
    assert files_in(cache) == before

    replaced = add("clicks", clicks, replace=True)
    assert (replaced.is_new, replaced.dataset.size.users) == (True, 3)
    assert set(files_in(cache)) == set(before)


@pytest.mark.parametrize("name", ["", "Clicks", "a/b", "..", ".hidden", "-x", "a b", "a" * 65, "a\n", "ä"])
def test_a_name_that_could_be_a_path_or_an_option_is_refused(name: str, clicks: DataConfig, cache: Path) -> None:
    with pytest.raises(DataError, match="cannot name a data set; accepted: 1 to 64 of a-z"):
        add(name, clicks)
    assert resolve(name) is None
    assert not cache.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("uid,sku,ts\nada,x,1\nbob,y\n", "(?s)1 of 2 rows are bad.*line 3.*accepted: 3 fields"),
        ("uid,item,ts\nada,x,1\n", "no column 'sku' for item_id"),
        ("uid,sku,ts\n", "holds no usable event"),
        ("", "no header"),
    ],
)
def test_a_log_that_cannot_be_used_leaves_nothing_in_the_cache(
    content: str, message: str, clicks: DataConfig, cache: Path
) -> None:
    clicks.path.write_text(content)

    with pytest.raises(DataError, match=message):
        add("clicks", clicks)
    assert not cache.exists()


def test_titles_that_cannot_be_used_leave_nothing_in_the_cache(clicks: DataConfig, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("item_id,name\n")

    with pytest.raises(DataError, match="needs the columns item_id and title"):
        add("clicks", clicks, tmp_path / "t.csv")
    assert not cache.exists()


def test_bad_rows_within_the_limit_are_kept_with_the_limit_that_let_them_pass(clicks: DataConfig, cache: Path) -> None:
    clicks.path.write_text(CLICKS + "eve,y,tomorrow\n")

    added = add("clicks", clicks.model_copy(update={"max_bad_share": 0.5}))

    assert added.rows_rejected == 1
    assert '"value":"tomorrow"' in added.rejects.read_text()
    assert added.dataset.size == DatasetSize(users=2, items=2, events=3)
    assert read_events(added.dataset.config).rows_rejected == 1


def test_a_log_that_grows_while_it_is_added_is_refused(
    clicks: DataConfig, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_then_grow(config: DataConfig) -> object:
        log = read_events(config)
        config.path.write_text(CLICKS + "eve,y,9\n")
        return log

    monkeypatch.setattr(adding, "read_events", read_then_grow)

    with pytest.raises(DataError, match="changed while it was being added"):
        add("clicks", clicks)
    assert files_in(cache) == {}
    assert stored("clicks") is None


@pytest.mark.parametrize("replacing", [False, True])
def test_a_full_disk_leaves_the_cache_as_it_was(
    replacing: bool, clicks: DataConfig, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if replacing:
        add("clicks", clicks)
    before = files_in(cache)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(DataError, match=r"cannot copy into the cache .*No space left on device; make room"):
            add("clicks", clicks, replace=True)

    assert files_in(cache) == before
    assert (stored("clicks") is not None) is replacing


def test_a_cache_that_cannot_be_made_is_named(clicks: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")

    with pytest.raises(DataError, match=r"cannot copy into the cache .*cache/datasets"):
        add("clicks", clicks, cache=tmp_path / "cache")


def test_what_a_killed_process_left_is_cleared_away(clicks: DataConfig, cache: Path) -> None:
    (cache / "datasets" / ".adding").mkdir(parents=True)
    (cache / "datasets" / ".adding" / "half.csv").write_text("half")

    add("clicks", clicks)

    assert set(files_in(cache)) == {"clicks/clicks.csv", "clicks/dataset.yaml"}
    assert [found.name for found in listing().present] == ["clicks"]


def add_many(path: Path, cache: Path) -> None:
    for _ in range(10):
        add("clicks", DataConfig(path=path), cache=cache, replace=True)


def test_two_processes_that_add_at_once_leave_one_of_their_logs_whole(tmp_path: Path) -> None:
    sources = [tmp_path / "one.csv", tmp_path / "two.csv"]
    for number, source in enumerate(sources):
        source.write_text("user_id,item_id\n" + f"user,{number}\n" * 1000)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=add_many, args=(source, tmp_path / "cache")) for source in sources]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)

    assert [worker.exitcode for worker in workers] == [0, 0]
    found = find("clicks", tmp_path / "cache")
    assert read_events(found.config).sha256 == found.sha256
    assert found.config.path.read_bytes() in {source.read_bytes() for source in sources}
    assert set(files_in(tmp_path / "cache")) == {"clicks/clicks.csv", "clicks/dataset.yaml"}


# Known data sets

TOY = {
    "Toy.txt": b"1 1 2\n2 2\n",
    "Film.inter": b"user_id:token\titem_id:token\nu\ta\n",
    "Film.item": b"item_id:token\ttitle:token\na\tA\n",
}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with the files of two known data sets; a third is known and not there."""
    folder = tmp_path / "downloads"
    folder.mkdir()
    files = {}
    for name, content in TOY.items():
        (folder / name).write_bytes(content)
        files[name] = DatasetFile(name, hashlib.sha256(content).hexdigest())
    size = DatasetSize(1, 1, 1)
    rows = [
        Dataset("toy", files["Toy.txt"], size, "free", "a friend"),
        Dataset("film", files["Film.inter"], size, "free", "a friend", files["Film.item"]),
        Dataset("absent", DatasetFile("Absent.txt", "0" * 64), size, "free", "FILE = Absent.txt from a friend"),
    ]
    for name in list(DATASETS):
        monkeypatch.delitem(DATASETS, name)
    for row in rows:
        monkeypatch.setitem(DATASETS, row.name, row)
    return folder


def test_a_folder_of_known_files_is_added_under_their_names_with_their_titles(known: Path, cache: Path) -> None:
    added = add_known(known)

    assert [(one.dataset.name, one.dataset.size) for one in added] == [
        ("toy", DatasetSize(users=2, items=2, events=3)),
        ("film", DatasetSize(users=1, items=1, events=1)),
    ]
    assert read_titles(find("film").titles) == {"a": "A"}
    assert [missing.name for missing in listing().missing] == ["absent"]
    assert [one.is_new for one in add_known(known)] == [False, False]


@pytest.mark.parametrize("file", ["Toy.txt", "Film.item"])
def test_a_known_file_with_other_contents_stops_the_whole_folder(file: str, known: Path, cache: Path) -> None:
    (known / file).write_bytes(TOY[file] + b"9 9\n")

    with pytest.raises(DataError, match=rf"{file} is not the {file} of the data set \w+: its sha256 is [0-9a-f]{{64}}"):
        add_known(known)
    assert not cache.exists()


def test_a_known_name_takes_its_own_log_alone(known: Path, clicks: DataConfig, cache: Path) -> None:
    with pytest.raises(DataError, match=r"is not the Toy\.txt of the data set toy: .*under another name"):
        add("toy", clicks)
    assert not cache.exists()

    assert add("toy", DataConfig(path=known / "Toy.txt")).dataset.config.path.name == "Toy.txt"


@pytest.mark.parametrize(("folder", "message"), [("nowhere", "is not a folder"), ("empty", "looked for: Toy.txt")])
def test_a_folder_without_known_files_is_refused(
    folder: str, message: str, known: Path, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(DataError, match=message):
        add_known(tmp_path / folder)


# Finding


def test_an_unknown_name_is_answered_with_the_nearest_and_how_to_add_it(clicks: DataConfig, cache: Path) -> None:
    add("clicks", clicks)

    with pytest.raises(DataError, match=r"no data set is called 'click'; nearest: 'clicks'; .*`bft-train data add"):
        find("click")
    with pytest.raises(DataError, match="cliks does not exist; no data set is called 'cliks'; nearest: 'clicks'"):
        check_log(Path("cliks"))
    with pytest.raises(DataError, match="/no/where does not exist; give a file, a folder of files, or the name"):
        check_log(Path("/no/where"))


@pytest.mark.parametrize(("name", "how"), [("beauty", "data add beauty FILE"), ("ml-100k", "data fetch ml-100k")])
def test_a_known_data_set_that_is_not_there_says_how_to_get_it(name: str, how: str, cache: Path) -> None:
    with pytest.raises(DataError, match=f"the data set {name} is not in the cache: run `bft-train {how}`"):
        find(name)


def test_a_path_that_exists_is_no_name(
    clicks: DataConfig, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add("clicks", clicks)
    monkeypatch.chdir(tmp_path)
    assert resolve("clicks") == find("clicks")

    (tmp_path / "clicks").mkdir()

    assert resolve("clicks") is None


def truncate(found: FoundDataset) -> None:
    os.truncate(found.config.path, 10)


def lose_titles(found: FoundDataset) -> None:
    found.titles.unlink()


def spoil_description(found: FoundDataset) -> None:
    found.config.path.with_name("dataset.yaml").write_text("log: ../../elsewhere.csv\n")


@pytest.mark.parametrize("damage", [truncate, lose_titles, spoil_description])
def test_a_damaged_data_set_is_named_in_the_list_and_can_be_replaced(
    damage, clicks: DataConfig, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "t.csv").write_text(TITLES)
    damage(add("clicks", clicks, tmp_path / "t.csv").dataset)

    for attempt in (lambda: find("clicks"), lambda: add("clicks", clicks)):
        with pytest.raises(DataError, match=r"is not whole: .*add it again with `bft-train data add clicks FILE --rep"):
            attempt()
    assert list(listing().damaged) == ["clicks"]

    replaced = add("clicks", clicks, tmp_path / "t.csv", replace=True)
    assert find("clicks") == replaced.dataset


def test_a_data_set_that_may_not_be_read_is_named_in_the_list(
    clicks: DataConfig, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add("clicks", clicks)
    read_text = Path.read_text

    def unreadable(path: Path, *args: object) -> str:
        if path.name == "dataset.yaml":
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *args)

    monkeypatch.setattr(Path, "read_text", unreadable)

    assert "the data set clicks cannot be read: [Errno 13] Permission denied" in listing().damaged["clicks"]


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)

    with pytest.raises(DataError, match="set XDG_CACHE_HOME"):
        find("clicks")


# In a configuration


def test_a_name_as_data_path_stands_for_the_log_its_reading_and_its_titles(
    clicks: DataConfig, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "t.csv").write_text(TITLES)
    found = add("clicks", clicks, tmp_path / "t.csv").dataset
    file = tmp_path / "run.yaml"
    file.write_text("data: {path: clicks}\n")

    for config in (load_config(None, ["data.path=clicks"]), load_config(file)):
        assert (config.data, config.titles) == (found.config, found.titles)


def test_what_the_configuration_says_wins_over_the_data_set(clicks: DataConfig, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TITLES)
    add("clicks", clicks, tmp_path / "t.csv")
    file = tmp_path / "run.yaml"
    file.write_text("data: {max_bad_share: 0.2, timestamp_unit: ms}\ntitles: null\n")

    config = load_config(file, ["data.path=clicks", "data.max_bad_share=0.3", "data.columns.timestamp=null"])

    assert config.data.max_bad_share == 0.3
    assert config.data.timestamp_unit == "ms"
    assert (config.data.columns.user_id, config.data.columns.timestamp) == ("uid", None)
    assert config.titles is None


def test_an_unknown_key_is_still_refused_over_a_data_set(clicks: DataConfig, cache: Path) -> None:
    add("clicks", clicks)

    with pytest.raises(ConfigError, match=r"unknown key data\.formt; the nearest is data\.format"):
        load_config(None, ["data.path=clicks", "data.formt=csv"])
