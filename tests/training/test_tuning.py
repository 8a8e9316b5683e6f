"""Tuning: trials are few, kept, told, and never see test users."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from training.config import ConfigError
from training.progress import JsonReporter
from training.study.tuning import read_space, tune

SPACE = {
    "space": {
        "training.learning_rate": {"low": 1e-3, "high": 1e-2, "log": True},
        "model.dropout": {"low": 0.0, "high": 0.5},
        "model.width": [4, 8],
    },
    "first": [{"training.learning_rate": 0.005, "model.dropout": 0.25, "model.width": 8}],
}
RECIPE = {"model": {"num_layers": 1, "ffn_width": 8, "max_len": 4}, "training": {"epochs": 2}}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A log of 40 users, a recipe and a search space."""
    paths = {name: tmp_path / name for name in ("log.txt", "recipe.yaml", "space.yaml", "tuning.sqlite")}
    users = [[f"u{user}", *(f"i{(user + step) % 9}" for step in range(5))] for user in range(40)]
    paths["log.txt"].write_text("".join(" ".join(line) + "\n" for line in users))
    paths["recipe.yaml"].write_text(yaml.safe_dump(RECIPE))
    paths["space.yaml"].write_text(yaml.safe_dump(SPACE))
    return paths


def tuned(files: dict[str, Path], trials: int, *overrides: str) -> dict[str, Any]:
    named = [f"data.path={files['log.txt']}", *overrides]
    return tune(files["recipe.yaml"], named, files["space.yaml"], trials, files["tuning.sqlite"], JsonReporter())


def test_the_first_point_is_tried_first_and_every_value_lies_in_the_space(files: dict[str, Path]) -> None:
    record = tuned(files, 3)

    assert record["trials"][0]["params"] == SPACE["first"][0]
    assert [trial["number"] for trial in record["trials"]] == [1, 2, 3]
    for trial in record["trials"]:
        assert 1e-3 <= trial["params"]["training.learning_rate"] <= 1e-2
        assert 0 <= trial["params"]["model.dropout"] <= 0.5
        assert trial["params"]["model.width"] in (4, 8)
        assert trial["epochs"] == 2
    best = max(record["trials"], key=lambda trial: trial["val_ndcg@10"])
    assert record["best"] == best["params"]
    assert record["best_val_ndcg@10"] == pytest.approx(best["val_ndcg@10"], abs=1e-6)


def test_a_number_may_be_written_with_an_exponent_and_no_point(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        "space: {training.learning_rate: {low: 1e-3, high: 1e-2, log: true}}\nfirst: [{training.learning_rate: 2e-3}]"
    )

    choices, first = read_space(path)

    assert (choices[0].low, choices[0].high) == (0.001, 0.01)
    assert first == [{"training.learning_rate": 0.002}]


def test_a_study_goes_on_where_it_stopped_and_ends_at_the_number_asked_for(files: dict[str, Path]) -> None:
    first = tuned(files, 1)
    again = tuned(files, 2)
    no_more = tuned(files, 2)

    assert [len(record["trials"]) for record in (first, again, no_more)] == [1, 2, 2]
    assert again["trials"][0] == first["trials"][0]
    assert no_more["trials"] == again["trials"]


def test_on_and_off_have_studies_of_their_own(files: dict[str, Path]) -> None:
    on, off = tuned(files, 1, "model.filtering=on"), tuned(files, 1, "model.filtering=off")

    assert on["config"]["model"]["filtering"] is True
    assert off["config"]["model"]["filtering"] is False
    assert len(on["trials"]) == len(off["trials"]) == 1


def test_a_test_target_changes_nothing(files: dict[str, Path]) -> None:
    before = tuned(files, 1)
    lines = [line.split() for line in files["log.txt"].read_text().splitlines()]
    files["log.txt"].write_text("".join(" ".join([*line[:-1], "i0"]) + "\n" for line in lines))
    files["tuning.sqlite"].unlink()

    assert tuned(files, 1)["trials"][0]["val_ndcg@10"] == before["trials"][0]["val_ndcg@10"]


@pytest.mark.parametrize(
    "text",
    [
        "space: [1]",
        "first: []",
        "space: {model.width: {low: 3, high: 2}}",
        "space: {model.width: {lowest: 3}}",
        "space: {model.width: wide}",
    ],
)
def test_what_is_no_search_space_is_refused_by_file_with_the_accepted_form(text: str, tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=r"(?s)space\.yaml: not a search space.*accepted: `space:`"):
        read_space(path)


def test_a_file_that_is_no_yaml_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("{")

    with pytest.raises(ConfigError, match=r"space\.yaml: not valid YAML"):
        read_space(path)
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read .* with --space"):
        read_space(tmp_path / "none.yaml")


def test_a_key_that_no_configuration_has_is_refused_with_the_nearest(files: dict[str, Path]) -> None:
    files["space.yaml"].write_text("space: {model.widht: [4]}")

    with pytest.raises(ConfigError, match=r"model\.widht.*model\.width"):
        tuned(files, 1)
