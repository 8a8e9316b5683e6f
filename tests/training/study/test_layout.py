"""How cells are shown and stored."""

import pytest

from training.study.layout import Cell, Estimate, Row, Table, shown


@pytest.mark.parametrize(
    ("cell", "style", "text"),
    [
        (12345, "count", "12,345"),
        (0.052849, "metric", "0.0528"),
        (-0.00123, "signed", "−0.0012"),
        (0.123, "share", "12.3 %"),
        (-0.0071, "change", "−0.7 %"),
        (17.4567, "number", "17.5"),
        (12345.6, "number", "12,346"),
        ("words", "metric", "words"),
        (None, "metric", "–"),
        (Estimate(0.001, -0.002, 0.004), "signed", "+0.0010 (−0.0020 … +0.0040)"),
    ],
)
def test_a_cell_is_shown_in_the_style_of_its_column(cell: Cell, style: str, text: str):
    assert shown(cell, style) == text


def test_an_unknown_style_is_refused():
    with pytest.raises(ValueError, match="no column is shown as 'metrics'"):
        shown(1.0, "metrics")


def test_a_table_in_markdown_and_as_data():
    row = Row({"name": "a|b", "value": 1 / 3, "gain": Estimate(0.1, 0.0, 0.2)}, ("run-1", "run-2"))
    table = Table(
        "t", "Title", {"name": "text", "value": "metric", "gain": "signed", "left": "count"}, (row,), ("Note.",)
    )

    assert table.to_markdown() == (
        "| name | value | gain | left |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| a\\|b | 0.3333 | +0.1000 (+0.0000 … +0.2000) | – |\n\nNote."
    )
    assert table.to_json() == {
        "key": "t",
        "title": "Title",
        "columns": ["name", "value", "gain", "left"],
        "rows": [
            {
                "name": "a|b",
                "value": 0.333333,
                "gain": {"value": 0.1, "low": 0.0, "high": 0.2},
                "left": None,
                "records": ["run-1", "run-2"],
            }
        ],
        "notes": ["Note."],
    }


def test_a_table_without_rows_says_so():
    assert Table("t", "Title", {"name": "text"}, ()).to_markdown() == "No record yet."
