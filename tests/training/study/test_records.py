"""Records on disk: what is written is read, and what is broken is named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.study.made_up import dataset, keep, run
from training.study import records
from training.tables import DataError


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = dataset(num_users=50)
    return keep(tmp_path, [data], [run(data, filtering) for filtering in (False, True)])


def test_records_are_read_as_they_were_written(folder: Path):
    data = dataset(num_users=50)

    datasets, runs = records.read_all(folder)

    assert datasets == {"beauty": data}
    assert runs == [run(data, False), run(data, True)]


def test_ranks_are_infinite_but_for_the_users_who_hit():
    data = dataset(num_users=50)
    made = run(data, True).model_copy(update={"hit_users": [3, 7], "hit_ranks": [1.0, 12.5]})

    ranks = made.ranks(data.num_users)

    assert np.isinf(ranks).sum() == 48
    assert (ranks[3], ranks[7]) == (1.0, 12.5)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("runs/beauty-sasrec-on-s1", {"seed": "two"}, "beauty-sasrec-on-s1.json: seed: .*integer"),
        ("runs/beauty-sasrec-on-s1", {"sed": 1}, "beauty-sasrec-on-s1.json: sed: "),
        ("runs/beauty-sasrec-on-s1", {"lists": {"all": {"users": 3}}}, "lists.all.coverage: Field required"),
        ("runs/beauty-sasrec-on-s1", {"seed": 2}, "holds the run beauty-sasrec-on-s2"),
        ("runs/beauty-sasrec-on-s1", {"hit_users": [1]}, "hit_users has 1 users, hit_ranks"),
        ("runs/beauty-sasrec-on-s1", {"hit_users": [50], "hit_ranks": [1]}, "hit_users names a user that is none"),
        ("runs/beauty-sasrec-on-s1", {"hit_users": [1], "hit_ranks": [21]}, "hit_ranks holds a rank that is not in 1"),
        ("runs/beauty-sasrec-on-s1", {"data_sha256": "0"}, "made on other data"),
        ("datasets/beauty", {"target_count": [1]}, "history_length has 50 users, target_count 1"),
        ("datasets/beauty", {"impossible": [50]}, "impossible names a user that is none of 0 … 49"),
        ("datasets/beauty", {"data": {"users": 1}}, "data lacks sha256"),
    ],
)  # fmt: skip
def test_a_broken_record_is_named_by_file_and_field(folder: Path, file: str, fields: dict[str, Any], message: str):
    change(folder / f"{file}.json", **fields)

    with pytest.raises(DataError, match=message):
        records.read_all(folder)


def test_a_file_that_is_no_json_and_a_run_without_its_data_set_are_named(folder: Path):
    (folder / "datasets" / "beauty.json").rename(folder / "datasets" / "toys.json")
    with pytest.raises(DataError, match=r"beauty-sasrec-off-s1\.json: no record of the data set 'beauty'"):
        records.read_all(folder)

    (folder / "runs" / "beauty-sasrec-off-s1.json").write_text("{")
    with pytest.raises(DataError, match=r"beauty-sasrec-off-s1\.json: the file: Invalid JSON"):
        records.read_all(folder)
