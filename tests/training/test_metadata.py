"""Items' metadata from files, and what cannot be used."""

from pathlib import Path

import polars as pl
import pytest

from training.metadata import MetadataConfig, read_metadata
from training.tables import DataError


def written(folder: Path, name: str, text: str) -> MetadataConfig:
    (folder / name).write_text(text)
    return MetadataConfig(path=folder / name)


def test_a_recbole_file_says_what_its_columns_hold_and_titles_are_left_out(tmp_path: Path) -> None:
    config = written(
        tmp_path,
        "ml.item",
        "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\tlength:float\n"
        "1\tToy Story\t1995\tAnimation Children's Comedy\t81\n"
        "2\tGoldenEye\t\tAction\t\n",
    )

    found = read_metadata(config)

    assert found.kinds == {"release_year": "category", "class": "tags", "length": "number"}
    assert found.rows == {
        "1": {"release_year": "1995", "class": ("Animation", "Children's", "Comedy"), "length": 81.0},
        "2": {"release_year": None, "class": ("Action",), "length": None},
    }


def test_of_a_csv_it_is_found_by_looking(tmp_path: Path) -> None:
    config = written(
        tmp_path,
        "items.csv",
        'item_id,title,genres,studio,year\n1,One,"Action|Sci-Fi",Pixar,1995\n2,Two,Drama,7,\n',
    )

    found = read_metadata(config)

    assert found.kinds == {"genres": "tags", "studio": "category", "year": "number"}
    assert found.rows["1"] == {"genres": ("Action", "Sci-Fi"), "studio": "Pixar", "year": 1995.0}
    assert found.rows["2"] == {"genres": ("Drama",), "studio": "7", "year": None}


def test_the_configuration_chooses_columns_and_kinds(tmp_path: Path) -> None:
    config = written(tmp_path, "items.csv", "item_id,title,year\n1,One,1995\n")

    found = read_metadata(config.model_copy(update={"columns": {"year": "category", "title": "category"}}))

    assert found.rows == {"1": {"year": "1995", "title": "One"}}


def test_parquet_keeps_its_types(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {"item_id": [7, 8], "genres": [["Action", "Drama"], None], "price": [1.5, None], "code": ["01", "a|b"]}
    )
    frame.write_parquet(tmp_path / "items.parquet")

    found = read_metadata(MetadataConfig(path=tmp_path / "items.parquet"))

    assert found.kinds == {"genres": "tags", "price": "number", "code": "tags"}
    assert found.rows == {
        "7": {"genres": ("Action", "Drama"), "price": 1.5, "code": ("01",)},
        "8": {"genres": None, "price": None, "code": ("a", "b")},
    }


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("items.txt", "item_id\n", "not a metadata file; accepted: an existing .item, .csv or .parquet file"),
        ("items.csv", "id,year\n1,2\n", "needs the column item_id; its columns: id, year"),
        ("items.csv", "item_id,title\n1,One\n", "no column of metadata"),
        ("items.csv", "item_id,year\n1,2\n1,3\n", "line 3, field item_id, value '1': has a row already"),
        ("items.csv", "item_id,year\n,2\n", "line 2, field item_id: missing"),
        ("items.csv", "item_id,year\n1\n", "1 fields where the header has 2"),
        ("a.item", "item_id:token\tv:float_seq\n1\t2\n", "field v: type 'float_seq' is not read as metadata"),
        ("a.item", "item_id:token\tv:float\n1\tmany\n", "line 2, field v, value 'many': not a number"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_what_is_wrong(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    with pytest.raises(DataError) as refusal:
        read_metadata(written(tmp_path, name, text))

    assert says in str(refusal.value)


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = written(tmp_path, "items.csv", "item_id,year\n1,2\n")

    with pytest.raises(DataError, match=r"no column 'yaer', which metadata\.columns names; its columns: year"):
        read_metadata(config.model_copy(update={"columns": {"yaer": "number"}}))
