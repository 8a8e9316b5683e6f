"""The catalogue: stable numbers, lineage, counts, titles."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.config import FIRST_ITEM, UNK
from training.catalog import Catalog, read_retired, read_titles
from training.events import DataConfig, read_events
from training.tables import DataError

IDS = st.lists(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=3),
    max_size=12,
)


def test_numbers_start_at_the_first_item_in_order_of_first_appearance() -> None:
    catalog = Catalog.from_ids(["b", "007", "b", "a", "7"])

    assert catalog.item_ids.to_list() == ["b", "007", "a", "7"]
    assert catalog.numbers(["7", "b", "b"]).tolist() == [FIRST_ITEM + 3, FIRST_ITEM, FIRST_ITEM]
    assert catalog.numbers(["b"]).dtype == np.int64


def test_an_unknown_id_is_unk() -> None:
    assert Catalog.from_ids(["a"]).numbers(["b", "a", "A"]).tolist() == [UNK, FIRST_ITEM, UNK]
    assert Catalog.from_ids([]).numbers(["a"]).tolist() == [UNK]
    assert Catalog.from_ids(["a"]).numbers([]).tolist() == []


@given(IDS, IDS, IDS)
def test_growing_never_moves_a_number_and_keeps_the_lineage(
    first: list[str], second: list[str], third: list[str]
) -> None:
    small = Catalog.from_ids(first)
    grown = small.grow(second).grow(third)

    assert grown.item_ids.to_list() == list(dict.fromkeys(first + second + third))
    assert grown.numbers(first).tolist() == small.numbers(first).tolist()
    assert grown.lineage == small.lineage
    assert len(grown.training_counts) == len(grown.titles) == len(grown)


@given(IDS)
def test_ids_and_numbers_are_inverse(ids: list[str]) -> None:
    catalog = Catalog.from_ids(ids)

    assert catalog.ids(catalog.numbers(ids)) == ids


@pytest.mark.parametrize("number", [UNK, FIRST_ITEM - 1, FIRST_ITEM + 2])
def test_a_number_outside_the_catalogue_has_no_id(number: int) -> None:
    with pytest.raises(IndexError, match=f"{number} is not an item number; the catalogue's are 4 to 5"):
        Catalog.from_ids(["a", "b"]).ids(np.array([FIRST_ITEM, number]))


def test_lineage_is_the_sha256_of_the_first_ids_in_order() -> None:
    assert Catalog.from_ids(["a", "é", "a"]).lineage == hashlib.sha256("a\né".encode()).hexdigest()
    lineages = {Catalog.from_ids(ids).lineage for ids in (["a", "b"], ["b", "a"], ["ab"], ["a"], [])}
    assert len(lineages) == 5


def test_growing_keeps_counts_and_titles_and_starts_new_items_without() -> None:
    catalog = Catalog.from_ids(["a", "b"]).with_training_counts(np.array([3, 0])).with_titles({"b": "B", "z": "Z"})
    grown = catalog.grow(["b", "c"])

    assert grown.training_counts.tolist() == [3, 0, 0]
    assert grown.titles.to_list() == [None, "B", None]
    assert len(catalog) == 2


def test_counts_of_another_catalogue_are_refused() -> None:
    with pytest.raises(ValueError, match="2 items, 3 training counts and 2 titles"):
        Catalog.from_ids(["a", "b"]).with_training_counts(np.zeros(3))


def test_a_logs_catalogue_holds_items_of_weight_zero_too(tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("user_id,item_id,w\nv,late,1\nu,a,1\nu,hidden,0\n")
    log = read_events(DataConfig.model_validate({"path": tmp_path / "l.csv", "columns": {"weight": "w"}}))

    assert Catalog.from_ids(log.events["item_id"]).item_ids.to_list() == ["a", "hidden", "late"]


# Titles


def test_titles_come_from_a_recbole_item_file(tmp_path: Path) -> None:
    path = tmp_path / "x.item"
    path.write_text(
        "item_id:token\tmovie_title:token_seq\trelease_year:token\n"
        '1\tToy Story\t1995\n007\t"Quoted", 😀\t1996\n3\t\t1997\n'
    )

    assert read_titles(path) == {"1": "Toy Story", "007": '"Quoted", 😀'}


def test_titles_come_from_a_csv_and_lose_control_characters(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('title,item_id\n"Two\nlines",1\n"\x1b[31mred",2\n"say ""hi""",3\n')

    assert read_titles(path) == {"1": "Two lines", "2": " [31mred", "3": 'say "hi"'}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "x.csv",
            "item_id,name\n1,A\n",
            "needs the columns item_id and title or movie_title; its columns: item_id, name",
        ),
        (
            "x.csv",
            "item_id,title\n1,A\n1,B\n",
            "line 3, field title, value 'B': item '1' already has the title 'A'",
        ),
        ("x.csv", "item_id,title\n,A\n", "line 2, field item_id: missing"),
        (
            "x.item",
            "item_id:token\ttitle:token\n1\tA\tB\n",
            r"line 2, field \(row\), value '1\\tA\\tB': 3 fields",
        ),
        ("x.json", "{}", r"accepted: an existing \.item or \.csv file"),
    ],
)
def test_an_unusable_titles_file_is_refused_with_what_is_wrong(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(DataError, match=message):
        read_titles(tmp_path / name)


def test_retired_items_are_the_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "retired.txt"
    path.write_bytes("\ufeff7\r\n\r\n  0042 \nan id, with a comma\n".encode())

    assert read_retired(path) == {"7", "0042", "an id, with a comma"}


@pytest.mark.parametrize("content", [None, b"\xff\xfe7"], ids=["missing", "not UTF-8"])
def test_an_unusable_list_of_retired_items_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "retired.txt"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(
        DataError, match=r"retired\.txt: not a list of retired items .* accepted: UTF-8 text, an id a line"
    ):
        read_retired(path)
