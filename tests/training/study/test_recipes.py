"""The recipes in configs/: one for each backbone and data set, none that favours a side."""

from pathlib import Path

import pytest
import yaml

from training.study.suite import CONTROLLED, PARTS, SUITES
from training.study.tuning import read_space

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "configs" / "recipes"
RUNS = {(run.backbone, run.dataset): run for suite in SUITES.values() for run in suite}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_says_neither_whether_to_filter_nor_the_seed(path: Path) -> None:
    document = yaml.safe_load(path.read_text())

    assert "filtering" not in document["model"]
    assert "seed" not in document["training"]
    assert path.stem == f"{document['model']['backbone']}-{path.stem.partition('-')[2]}"


@pytest.mark.parametrize(("backbone", "dataset"), sorted(RUNS))
def test_every_run_of_a_suite_has_a_recipe_that_is_a_configuration(backbone: str, dataset: str, tmp_path: Path) -> None:
    run = RUNS[backbone, dataset]

    if backbone not in ("popularity", "markov"):
        config = run.config(RECIPES, [f"data.path={tmp_path / 'log.txt'}"])
        assert config.model.backbone == backbone
        assert config.model.filtering == run.filtering
        assert config.training.seed == run.seed


def test_the_control_by_the_plain_model_s_settings_has_them() -> None:
    for dataset in CONTROLLED:
        recipe = yaml.safe_load((RECIPES / f"sasrec-{dataset}.yaml").read_text())
        assert PARTS["plain-settings"] == f"model.dropout={recipe['without_filtering']['model']['dropout']}"
        assert set(recipe["without_filtering"]) == {"model"}


@pytest.mark.parametrize("backbone", ["sasrec", "hstu", "bert4rec"])
def test_all_data_sets_of_a_backbone_are_trained_by_one_loss(backbone: str) -> None:
    losses = {yaml.safe_load(path.read_text())["training"]["loss"] for path in RECIPES.glob(f"{backbone}-*.yaml")}

    assert len(losses) == 1


def test_the_search_spaces_can_be_read() -> None:
    for path in (ROOT / "configs" / "spaces").glob("*.yaml"):
        choices, first = read_space(path)
        assert choices
        assert all(set(point) == {choice.key for choice in choices} for point in first)
