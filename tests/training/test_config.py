"""Configuration: YAML, overrides, and errors that name the key and what would be accepted."""

import subprocess
import sys
from pathlib import Path

import pytest

from training.config import ConfigError, RunConfig, load_config

MAP = "column: c, values: {a: 1.0}"


def config_file(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_a_file_and_defaults_make_a_configuration(tmp_path: Path) -> None:
    path = config_file(
        tmp_path,
        "name: shop\ndata: {path: log.csv, columns: {user_id: who}}\nmodel: {width: 32}\ntraining: {loss: sampled}\n",
    )

    config = load_config(path)

    assert config.name == "shop"
    assert config.data.path == Path("log.csv")
    assert config.data.columns.user_id == "who"
    assert (config.model.width, config.model.num_layers) == (32, 2)
    assert (config.training.loss, config.training.seed) == ("sampled", 0)
    assert (config.split, config.event) == ("leave_one_out", "auto")


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(tmp_path: Path) -> None:
    path = config_file(tmp_path, "data: {path: log.csv}\nmodel: {width: 32, num_layers: 3}\n")

    config = load_config(path, ["model.width=48", "model.width=64", "data.columns.weight=rating", "titles=t.csv"])

    assert (config.model.width, config.model.num_layers) == (64, 3)
    assert config.data.columns.weight == "rating"
    assert config.titles == Path("t.csv")


def test_a_model_s_name_alone_chooses_the_backbone_and_keeps_the_rest(tmp_path: Path) -> None:
    path = config_file(tmp_path, "data: {path: log.csv}\nmodel: {width: 32, backbone: bert4rec}\n")

    config = load_config(path, ["model.num_layers=3", "model=hstu", "model.num_heads=4"])

    model = config.model
    assert (model.backbone, model.width, model.num_layers, model.num_heads) == ("hstu", 32, 3, 4)


def test_overrides_alone_are_enough() -> None:
    config = load_config(None, ["data.path=log.csv", "model={width: 32, num_heads: 4}", "training.max_seconds=null"])

    assert (config.model.width, config.model.num_heads) == (32, 4)
    assert config.training.max_seconds is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("2E+0", 2.0), ("1.5e3", 1500.0), ("1.e-2", 0.01), ("0.01", 0.01), ("1", 1.0)],
)
def test_numbers_may_be_written_with_an_exponent(text: str, value: float, tmp_path: Path) -> None:
    by_override = load_config(None, ["data.path=log.csv", f"training.learning_rate={text}"])
    by_file = load_config(config_file(tmp_path, f"data: {{path: log.csv}}\ntraining:\n  learning_rate: {text}\n"))

    assert by_override.training.learning_rate == by_file.training.learning_rate == value


def test_text_in_quotes_stays_text() -> None:
    config = load_config(None, ['data.path="1e-3"'])

    assert config.data.path == Path("1e-3")


@pytest.mark.parametrize(
    ("override", "unknown", "nearest"),
    [
        ("trainig={}", "trainig", "training"),
        ("splitt=users", "splitt", "split"),
        ("model.widht=32", "model.widht", "model.width"),
        ("training.learning_rat=1", "training.learning_rat", "training.learning_rate"),
        ("data.max_bad_shares=0", "data.max_bad_shares", "data.max_bad_share"),
        ("data.columns.item=i", "data.columns.item", "data.columns.item_id"),
        (f"data.weight_map={{{MAP}, defaults: 1.0}}", "data.weight_map.defaults", "data.weight_map.default"),
    ],
)  # fmt: skip
def test_an_unknown_key_names_the_nearest_one(override: str, unknown: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, ["data.path=log.csv", override])

    assert f"unknown key {unknown}; the nearest is {nearest}" in str(error.value).splitlines()[0]


def test_an_error_in_a_file_names_the_file_and_every_bad_key(tmp_path: Path) -> None:
    path = config_file(tmp_path, "data: {path: log.csv}\nmodel: {width: wide, max_len: 7}\ntraining: {epoch: 3}\n")

    with pytest.raises(ConfigError) as error:
        load_config(path)

    lines = str(error.value).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"{path}: model.width: ")
    assert "integer" in lines[0]
    assert "'wide'" in lines[0]
    assert lines[1] == f"{path}: unknown key training.epoch; the nearest is training.epochs"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.width=2.5", r"model\.width: .*integer.*2\.5"),
        ("model.width='32'", r"model\.width: .*integer.*32"),
        ("model.filtering=1", r"model\.filtering: .*boolean.*1"),
        ("model.max_len=7", r"model: .*max_len is 7; it must be even"),
        ("model.width=9", r"model: .*width 9 is not a multiple of num_heads 2"),
        ("training.epochs=0", r"training\.epochs: .*greater than or equal to 1.*0"),
        ("training.loss=bpr", r"training\.loss: .*'full' or 'sampled'.*bpr"),
        ("split=random", r"split: .*'leave_one_out' or 'users'.*random"),
        ("name=My Model", r"name: .*pattern.*My Model"),
        ("data.weight_map={column: c, values: {a: -1.0}}", r"weight_map\.values: .*weight -1\.0 is not accepted"),
    ],
)  # fmt: skip
def test_a_value_that_is_not_accepted_is_answered_with_what_is(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, ["data.path=log.csv", override])


@pytest.mark.parametrize("override", ["epochs", "=3", ""])
def test_an_override_without_key_and_value_is_shown_the_form(override: str) -> None:
    with pytest.raises(ConfigError, match=r"dotted\.key=value"):
        load_config(None, [override])


def test_an_override_below_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="width is a value, it has no keys below it"):
        load_config(None, ["data.path=log.csv", "model.width=32", "model.width.more=1"])


def test_a_missing_file_says_which_option_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read .*--config"):
        load_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "not valid YAML"),
        ("a: !!python/name:os.system", "not valid YAML"),
        ("- a\n- b\n", "found list"),
        ("", "found NoneType"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"run\.yaml: .*{message}"):
        load_config(config_file(tmp_path, text))


def test_a_missing_log_is_named() -> None:
    with pytest.raises(ConfigError, match="no interaction log is named; give it with --data FILE"):
        load_config(None)


def test_one_file_says_what_differs_without_filtering(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        """
        data: {path: log.csv}
        model: {width: 32, dropout: 0.4}
        without_filtering:
          model: {dropout: 0.3}
          training: {batch_size: 64}
        """
    )
    with_it, without = load_config(path), load_config(path, ["model.filtering=off"])
    assert (with_it.model.dropout, with_it.training.batch_size) == (0.4, 128)
    assert (without.model.dropout, without.model.width, without.training.batch_size) == (0.3, 32, 64)
    assert load_config(path, ["model.filtering=off", "model.dropout=0.2"]).model.dropout == 0.2


def test_what_differs_without_filtering_is_checked_with_filtering_too(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("data: {path: log.csv}\nwithout_filtering: {model: {droput: 0.3}}\n")
    with pytest.raises(ConfigError, match=r"recipe\.yaml: unknown key model\.droput; the nearest is model\.dropout"):
        load_config(path)
    path.write_text("data: {path: log.csv}\nwithout_filtering: dropout\n")
    with pytest.raises(ConfigError, match="without_filtering: expected keys such as model; found 'dropout'"):
        load_config(path)


def test_a_configuration_survives_json() -> None:
    config = load_config(None, ["data.path=log.csv", "training.max_seconds=60", "model.dropout=0"])

    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_reading_a_configuration_takes_no_torch() -> None:
    code = "import sys, training.cli, training.config; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
