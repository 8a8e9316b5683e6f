"""The bundle: written whole or not at all, opened only when every byte is what it was, and read without pickle."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from model.bundle import (
    FEATURES,
    FORMAT_VERSION,
    MANIFEST,
    WEIGHTS,
    BundleError,
    Calibration,
    Items,
    confidence_features,
    file_names,
    golden_arrays,
    golden_errors,
    items_frame,
    open_bundle,
    write_bundle,
)
from model.config import FIRST_ITEM, ModelConfig
from tests.model import stand_ins

FILES = (
    "encoder.onnx",
    "step.onnx",
    "ranker.onnx",
    "explainer.onnx",
    "model.safetensors",
    "items.parquet",
    "new_items.npz",
    "calibration.json",
    "golden.npz",
)
MANIFEST_FIELDS = (*stand_ins.fields(), "version", "files")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return stand_ins.write(tmp_path)


# --- writing and opening ------------------------------------------------------------------------------------


def test_an_opened_bundle_says_what_was_written(bundle: Path) -> None:
    opened = open_bundle(bundle)
    assert opened.folder == bundle
    assert opened.manifest.format_version == FORMAT_VERSION
    assert opened.manifest.version == bundle.name
    assert opened.manifest.model == ModelConfig(max_len=4, width=2, num_heads=1)
    written = opened.manifest.model_dump(exclude={"format_version", "version", "files", "model"})
    assert written == {name: value for name, value in stand_ins.fields().items() if name != "model"}
    assert opened.calibration == stand_ins.CALIBRATION
    assert opened.items.ids == stand_ins.ITEM_IDS
    assert opened.items.titles == stand_ins.TITLES
    assert opened.items.training_counts.tolist() == stand_ins.TRAINING_COUNTS.tolist()
    assert opened.graph_path("ranker").read_bytes() == b"stand-in for ranker"


def test_a_bundle_opens_through_a_link_and_from_a_string(bundle: Path, tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(bundle.name)
    assert open_bundle(str(link)).folder == bundle


def test_every_file_of_a_bundle_is_readable_by_other_users(tmp_path: Path) -> None:
    bundle = stand_ins.write(tmp_path, change=lambda staging: (staging / WEIGHTS).chmod(0o600))
    assert bundle.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in bundle.iterdir()} == {0o644}
    assert {path.name for path in bundle.iterdir()} == {*FILES, MANIFEST}


def test_the_same_content_lands_in_the_same_folder_and_leaves_nothing_else(tmp_path: Path) -> None:
    first = stand_ins.write(tmp_path)
    inode = (first / MANIFEST).stat().st_ino
    again = stand_ins.write(tmp_path)
    assert again == first
    assert (first / MANIFEST).stat().st_ino == inode
    assert list(tmp_path.iterdir()) == [first]


@pytest.mark.parametrize(
    "changes", [{"seed": 1}, {"name": "other"}, {"lineage": "other"}, {"training": {"command": ["again"]}}]
)
def test_other_content_lands_in_another_folder(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert stand_ins.write(tmp_path) != stand_ins.write(tmp_path, **changes)


# --- what fails leaves nothing behind -----------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_file_left_out_is_named_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(BundleError, match=rf"{name} was not written"):
        stand_ins.write(tmp_path, change=lambda staging: (staging / name).unlink())
    assert list(tmp_path.iterdir()) == []


def test_a_file_too_many_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"encoder\.onnx\.data"):
        stand_ins.write(tmp_path, change=lambda staging: (staging / "encoder.onnx.data").touch())
    assert list(tmp_path.iterdir()) == []


def test_a_backbone_that_is_not_causal_has_no_step(tmp_path: Path) -> None:
    graphs = {"encoder": (), "ranker": (), "explainer": ()}
    bundle = stand_ins.write(tmp_path, custom_ops=graphs, change=lambda staging: (staging / "step.onnx").unlink())
    assert open_bundle(bundle).manifest.graphs == ("encoder", "ranker", "explainer")
    assert {path.name for path in bundle.iterdir()} == {*FILES, MANIFEST} - {"step.onnx"}
    assert set(file_names(graphs)) == set(FILES) - {"step.onnx"}
    with pytest.raises(BundleError, match=r"step\.onnx is no file of this bundle"):
        stand_ins.write(tmp_path, custom_ops=graphs)


@pytest.mark.parametrize(
    "graphs",
    [
        ["encoder"],
        ["step", "ranker", "explainer"],
        ["encoder", "step", "ranker"],
        ["encoder", "ranker", "explainer", "decoder"],
    ],
)
def test_a_graph_too_few_or_unknown_is_named_and_nothing_is_written(tmp_path: Path, graphs: list[str]) -> None:
    def match_files(staging: Path) -> None:
        for path in staging.glob("*.onnx"):
            path.unlink()
        for graph in graphs:
            (staging / f"{graph}.onnx").touch()

    with pytest.raises(
        BundleError, match=f"names the graphs {', '.join(graphs)}; accepted: encoder, ranker, explainer and"
    ):
        stand_ins.write(tmp_path, custom_ops=dict.fromkeys(graphs, ()), change=match_files)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_an_export_that_fails_leaves_nothing_behind(tmp_path: Path, error: BaseException) -> None:
    def fail(staging: Path) -> None:
        raise error

    with pytest.raises(type(error)):
        stand_ins.write(tmp_path, change=fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", stand_ins.fields())
def test_a_missing_manifest_field_is_named_and_nothing_is_written(tmp_path: Path, field: str) -> None:
    given = {name: value for name, value in stand_ins.fields().items() if name != field}
    with pytest.raises(BundleError, match=rf"{MANIFEST}, field {field}: Field required"):
        write_bundle(tmp_path, given, stand_ins.fill)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"colour": "red"}, "colour"), ({"event": "next_click"}, "event"), ({"num_items": "many"}, "num_items")],
)
def test_a_wrong_manifest_field_is_named_and_nothing_is_written(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(BundleError, match=f"field {field}"):
        stand_ins.write(tmp_path, **changes)
    assert list(tmp_path.iterdir()) == []


# --- damage -------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def complaint(bundle: Path) -> str:
    """What `open_bundle` says; the folder is in it."""
    with pytest.raises(BundleError) as raised:
        open_bundle(bundle)
    assert str(bundle) in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (Path.unlink, "is missing"),
        (truncate, "does not match its checksum"),
        (flip_a_bit, "does not match its checksum"),
    ],
)
def test_a_damaged_file_is_named(bundle: Path, name: str, damage: Callable[[Path], None], says: str) -> None:
    damage(bundle / name)
    assert f"{name} {says}" in complaint(bundle)


@pytest.mark.parametrize(("key", "value"), [("size_bytes", 1), ("sha256", "0" * 64)])
def test_a_manifest_with_another_size_or_checksum_names_the_file(bundle: Path, key: str, value: Any) -> None:
    edit_manifest(bundle, lambda document: document["files"][WEIGHTS].update({key: value}), sign=True)
    assert f"{WEIGHTS} does not match its checksum" in complaint(bundle)


@pytest.mark.parametrize("extra", ["notes.txt", ".encoder.onnx.swp", "encoder.weights"])
def test_a_file_that_the_manifest_does_not_list_is_named(bundle: Path, extra: str) -> None:
    (bundle / extra).write_text("?")
    assert f"{extra} is not listed" in complaint(bundle)


def test_a_folder_inside_a_bundle_is_named(bundle: Path) -> None:
    (bundle / "weights").mkdir()
    assert "weights is not listed" in complaint(bundle)


def test_a_file_that_became_a_folder_is_named(bundle: Path) -> None:
    (bundle / "golden.npz").unlink()
    (bundle / "golden.npz").mkdir()
    assert "golden.npz is missing" in complaint(bundle)


def test_a_folder_without_a_manifest_is_no_bundle(bundle: Path, tmp_path: Path) -> None:
    (bundle / MANIFEST).unlink()
    assert f"no {MANIFEST}" in complaint(bundle)
    assert f"no {MANIFEST}" in complaint(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b"null", b"\xff\xfe", b"PK\x03\x04"])
def test_a_manifest_that_is_no_json_object_is_named(bundle: Path, content: bytes) -> None:
    (bundle / MANIFEST).write_bytes(content)
    assert f"{MANIFEST} is not a JSON object" in complaint(bundle)


def edit_manifest(bundle: Path, edit: Callable[[dict[str, Any]], Any], sign: bool = False) -> None:
    """Change the manifest; with `sign`, as somebody who also makes its version fit would."""
    document = json.loads((bundle / MANIFEST).read_text())
    edit(document)
    if sign:
        del document["version"]
        document["version"] = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]
    (bundle / MANIFEST).write_text(json.dumps(document))


@pytest.mark.parametrize("version", [0, 6, 8, "7", None])
def test_a_bundle_of_another_format_says_which_one_is_read(bundle: Path, version: Any) -> None:
    edit_manifest(bundle, lambda document: document.update(format_version=version))
    assert f"{MANIFEST} is of format {version}, this version reads {FORMAT_VERSION}" in complaint(bundle)


def test_a_manifest_without_a_format_version_is_refused(bundle: Path) -> None:
    edit_manifest(bundle, lambda document: document.pop("format_version"))
    assert "is of format None" in complaint(bundle)


@pytest.mark.parametrize("field", MANIFEST_FIELDS)
def test_a_manifest_that_lacks_a_field_names_it(bundle: Path, field: str) -> None:
    edit_manifest(bundle, lambda document: document.pop(field))
    assert f"{MANIFEST}, field {field}: Field required" in complaint(bundle)


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (lambda document: document.update(colour="red"), "colour"),
        (lambda document: document["model"].update(colour="red"), "model.colour"),
        (lambda document: document["model"].update(max_len=5), "model"),
        (lambda document: document["files"]["golden.npz"].update(colour="red"), "files.golden.npz.colour"),
        (lambda document: document.update(created_at="yesterday"), "created_at"),
        (lambda document: document.update(event="next_click"), "event"),
    ],
)
def test_a_manifest_with_an_unknown_or_wrong_field_names_it(
    bundle: Path, edit: Callable[[dict[str, Any]], Any], field: str
) -> None:
    edit_manifest(bundle, edit)
    assert f"{MANIFEST}, field {field}: " in complaint(bundle)


@pytest.mark.parametrize("name", FILES)
def test_a_file_dropped_from_folder_and_manifest_alike_is_missed(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    edit_manifest(bundle, lambda document: document["files"].pop(name), sign=True)
    assert f"{MANIFEST} does not list {name}" in complaint(bundle)


def test_a_changed_metric_in_the_manifest_is_noticed(bundle: Path) -> None:
    edit_manifest(bundle, lambda document: document["metrics"].update({"hr@10": 0.99}))
    assert f"{MANIFEST} was changed after it was written" in complaint(bundle)


def test_every_flipped_bit_of_the_manifest_is_a_bundle_error(bundle: Path) -> None:
    content = (bundle / MANIFEST).read_bytes()
    rng = np.random.default_rng(0)
    complaints = []
    for position in rng.choice(len(content), size=300, replace=False):
        damaged = bytearray(content)
        damaged[position] ^= 1 << int(rng.integers(8))
        (bundle / MANIFEST).write_bytes(damaged)
        try:
            open_bundle(bundle)
        except BundleError as error:
            complaints.append(str(error))
    assert len(complaints) == 300
    assert all(str(bundle) in said for said in complaints)


# --- content that was wrong when it was written -------------------------------------------------------------


def written_with(tmp_path: Path, name: str, write: Callable[[Path], None]) -> str:
    """What opening says of a bundle whose checksums hold but in which one file was written wrong."""
    return complaint(stand_ins.write(tmp_path, change=lambda staging: write(staging / name)))


def frame(**columns: Any) -> pl.DataFrame:
    good = items_frame(stand_ins.ITEM_IDS, stand_ins.TRAINING_COUNTS, stand_ins.TITLES)
    return good.with_columns(**{name: pl.Series(values) for name, values in columns.items()})


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (frame(number=[4, 5, 7, 8]), "numbers do not run from 4"),
        (frame(number=[5, 6, 7, 8]), "numbers do not run from 4"),
        (frame(number=[4, 6, 5, 7]), "numbers do not run from 4"),
        (frame(item_id=["a", "b", "a", "c"]), "an item_id stands twice"),
        (frame().drop("title"), "title"),
        (frame().head(3), f"has 3 items, {MANIFEST} says 4"),
    ],
)
def test_an_item_table_that_breaks_a_rule_is_named(tmp_path: Path, table: pl.DataFrame, says: str) -> None:
    found = written_with(tmp_path, "items.parquet", table.write_parquet)
    assert "items.parquet" in found
    assert says in found


def test_an_item_table_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    found = written_with(tmp_path, "items.parquet", lambda path: path.write_text("number,item_id\n"))
    assert "items.parquet cannot be read" in found


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"variance_scale": -0.1}, "variance_scale"),
        ({"bias": None}, "bias"),
        ({"std": (2.0, 1.0, 1.5, 0.0, 1.0, 0.8)}, "std.3"),
        ({"weights": (1.0,)}, "must be of one length"),
        ({"features": (*FEATURES[:5], "age")}, "unknown features ['age']"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_calibration_that_breaks_a_rule_is_named(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    document = json.loads(stand_ins.CALIBRATION.model_dump_json()) | changes
    found = written_with(tmp_path, "calibration.json", lambda path: path.write_text(json.dumps(document)))
    assert "calibration.json, field " in found
    assert field in found


# --- golden cases -------------------------------------------------------------------------------------------


def test_golden_cases_come_back_in_order_bit_by_bit(bundle: Path) -> None:
    for found, expected in zip(open_bundle(bundle).golden_cases(), stand_ins.GOLDEN, strict=True):
        assert found.graph == expected.graph
        for ours, theirs in ((found.inputs, expected.inputs), (found.outputs, expected.outputs)):
            assert list(ours) == list(theirs)
            for name, array in ours.items():
                assert array.dtype == theirs[name].dtype
                np.testing.assert_array_equal(array, theirs[name])


def test_more_than_nine_golden_cases_keep_their_order(tmp_path: Path) -> None:
    cases = [stand_ins.GoldenCase("encoder", {"items": np.array([index])}, {}) for index in range(23)]

    def write_golden(staging: Path) -> None:
        np.savez(staging / "golden.npz", **golden_arrays(cases))

    found = open_bundle(stand_ins.write(tmp_path, change=write_golden)).golden_cases()
    assert [int(case.inputs["items"][0]) for case in found] == list(range(23))


def test_a_pickled_golden_case_is_never_read(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "exploded",)

    def write_golden(staging: Path) -> None:
        np.savez(staging / "golden.npz", **{"0/encoder/in/items": np.array([Bomb()], object)})

    bundle = open_bundle(stand_ins.write(tmp_path, change=write_golden))
    with pytest.raises(BundleError, match=r"golden\.npz cannot be read .*allow_pickle=False"):
        bundle.golden_cases()
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("content", [b"", b"no zip", b"\x93NUMPY"])
def test_golden_cases_that_are_no_archive_are_named(tmp_path: Path, content: bytes) -> None:
    def write_golden(staging: Path) -> None:
        (staging / "golden.npz").write_bytes(content)

    bundle = open_bundle(stand_ins.write(tmp_path, change=write_golden))
    with pytest.raises(BundleError, match=r"golden\.npz cannot be read"):
        bundle.golden_cases()


# --- items --------------------------------------------------------------------------------------------------


def items() -> Items:
    return Items(items_frame(stand_ins.ITEM_IDS, stand_ins.TRAINING_COUNTS, stand_ins.TITLES))


def test_items_are_numbered_from_the_first_after_the_special_tokens() -> None:
    catalogue = items()
    assert len(catalogue) == 4
    assert [catalogue.number(item_id) for item_id in stand_ins.ITEM_IDS] == [4, 5, 6, 7]
    assert [catalogue.item_id(number) for number in (4, 5, 6, 7)] == stand_ins.ITEM_IDS


@pytest.mark.parametrize("item_id", ["", "TOY", "toy ", "0042", "ß/😀", "4"])
def test_an_id_that_differs_in_any_character_is_unknown(item_id: str) -> None:
    assert items().number(item_id) is None


@pytest.mark.parametrize("number", [-1, 0, FIRST_ITEM - 1, FIRST_ITEM + 4, 2**31])
def test_a_number_outside_the_catalogue_has_no_id(number: int) -> None:
    with pytest.raises(IndexError, match=rf"{number} is not in 4 … 7"):
        items().item_id(number)


def test_retired_items_are_told_by_number() -> None:
    frame = items_frame(
        stand_ins.ITEM_IDS, stand_ins.TRAINING_COUNTS, stand_ins.TITLES, {stand_ins.ITEM_IDS[2], "no-such"}
    )

    assert items().retired.tolist() == []
    assert Items(frame).retired.tolist() == [FIRST_ITEM + 2]


def test_an_item_table_may_be_written_without_a_single_title() -> None:
    assert Items(items_frame(["a"], np.array([1]), [None])).titles == [None]


# --- confidence ---------------------------------------------------------------------------------------------


def small_calibration(**changes: Any) -> Calibration:
    document = stand_ins.CALIBRATION.model_dump() | {
        "features": ("logit_probability", "entropy"),
        "mean": (-2.0, 5.0),
        "std": (4.0, 0.5),
        "weights": (1.5, -0.5),
        "bias": 0.25,
        "report": None,
    }
    return Calibration(**(document | changes))


def test_confidence_is_the_logistic_of_the_standardised_features() -> None:
    features = {
        "logit_probability": np.array([[-2.0, 2.0]]),
        "entropy": np.array([[5.5]]),
        "log_variance": np.array([[1e9, -1e9]]),  # not among this calibration's features
    }
    found = small_calibration().confidence(features)
    # 0.25 + 1.5·(x+2)/4 − 0.5·(5.5−5)/0.5, by hand
    expected = [[1 / (1 + math.exp(0.25)), 1 / (1 + math.exp(-1.25))]]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_confidence_spans_users_by_items() -> None:
    features = {"logit_probability": np.zeros((3, 5)), "entropy": np.array([[4.0], [5.0], [6.0]])}
    found = small_calibration().confidence(features)
    assert found.shape == (3, 5)
    assert (found[0] > found[1]).all()
    assert (found[1] > found[2]).all()


def test_confidence_grows_with_the_probability_and_stays_between_0_and_1() -> None:
    log_probability = np.linspace(-60.0, 0.0, 400)[None]
    size = log_probability.shape
    features = confidence_features(
        log_probability,
        np.full(size, 0.3),
        np.full(size, 12),
        entropy=np.array([5.0]),
        mean_precision=np.array([2.0]),
        num_events=np.array([7]),
    )
    found = stand_ins.CALIBRATION.confidence(features)[0]
    assert (np.diff(found) > 0).all()
    assert (found > 0).all()
    assert (found < 1).all()


@pytest.mark.parametrize("far", [1e4, 1e300])
def test_confidence_neither_overflows_nor_warns_far_from_the_fit(far: float) -> None:
    features = {"logit_probability": np.array([[-far, far, -np.inf]]), "entropy": np.array([[5.0]])}
    assert small_calibration().confidence(features).tolist() == [[0.0, 1.0, 0.0]]


def test_confidence_needs_every_feature_that_was_fitted() -> None:
    with pytest.raises(KeyError, match="entropy"):
        small_calibration().confidence({"logit_probability": np.zeros((1, 1))})


def test_confidence_features_are_what_math_md_lists() -> None:
    found = confidence_features(
        log_probability=np.log(np.array([[0.25, 1e-12]], np.float32)),
        score_variance=np.array([[math.e, 1.0]], np.float32),
        training_count=np.array([[0, 99]]),
        entropy=np.array([6.5], np.float32),
        mean_precision=np.array([math.e**2], np.float32),
        num_events=np.array([3]),
    )
    assert tuple(found) == FEATURES
    expected = {
        "logit_probability": [[math.log(0.25 / 0.75), math.log(1e-12)]],
        "log_variance": [[1.0, 0.0]],
        "log_training_count": [[0.0, math.log(100)]],
        "entropy": [[6.5]],
        "log_mean_precision": [[2.0]],
        "log_num_events": [[math.log(4)]],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6, atol=1e-6, err_msg=name)


def test_confidence_features_of_the_limits_are_finite_but_for_a_plain_model_s_precision() -> None:
    found = confidence_features(
        log_probability=np.array([[0.0, -1e-12, -200.0]]),
        score_variance=np.zeros((1, 3)),
        training_count=np.zeros((1, 3), np.int64),
        entropy=np.zeros(1),
        mean_precision=np.array([np.inf]),
        num_events=np.zeros(1, np.int64),
    )
    assert found.pop("log_mean_precision") == np.inf
    assert all(np.isfinite(values).all() for values in found.values())


def test_a_copy_of_a_bundle_opens_under_any_folder_name(bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle, tmp_path / "elsewhere" / "renamed")
    assert open_bundle(copy).manifest.version == bundle.name


# --- golden outputs against found ones ---------------------------------------------------------------------


def worst(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    return max(golden_errors(found, expected).values())


def ranker_outputs(items: list[int], key: list[float], score: list[float]) -> dict[str, np.ndarray]:
    return {
        "items": np.array([items]),
        "order_key": np.array([key], np.float32),
        "score_mean": np.array([score], np.float32),
    }


def test_the_error_is_relative_and_of_precisions_logarithmic() -> None:
    expected = {"mean": np.array([9.0]), "precision": np.array([1e6])}

    assert worst({"mean": np.array([10.0]), "precision": np.array([1e6])}, expected) == pytest.approx(0.1)
    doubled = worst({"mean": np.array([9.0]), "precision": np.array([2e6])}, expected)
    assert doubled == pytest.approx(np.log(2) / (1 + np.log(1e6)))


def test_equal_infinities_and_nans_are_no_error_and_a_lone_one_is() -> None:
    strange = {"x": np.array([np.inf, np.nan, -np.inf])}

    assert worst(strange, strange) == 0
    assert worst({"x": np.array([np.inf, 1.0, -np.inf])}, strange) == np.inf
    assert worst({"x": np.array([np.nan])}, {"x": np.array([0.0])}) == np.inf


def test_items_in_another_order_are_an_error_unless_their_keys_tie() -> None:
    expected = ranker_outputs([7, 8, 9], [3.0, 2.0, 1.0], [30.0, 20.0, 10.0])
    swapped = ranker_outputs([8, 7, 9], [3.0, 2.0, 1.0], [20.0, 30.0, 10.0])
    tied = ranker_outputs([7, 8, 9], [2.00001, 2.0, 1.0], [30.0, 20.0, 10.0])
    tied_swapped = ranker_outputs([8, 7, 9], [2.00001, 2.0, 1.0], [20.0, 30.0, 10.0])

    assert worst(swapped, expected) == np.inf
    assert worst(tied_swapped, tied) == 0


def test_a_shape_that_differs_is_told() -> None:
    with pytest.raises(ValueError, match=r"output x has shape \(2,\), recorded was \(1,\)"):
        worst({"x": np.zeros(2)}, {"x": np.zeros(1)})


@pytest.mark.parametrize(
    ("name", "actual", "expected", "error"),
    [
        ("mean", [1.0, 2.0], [1.0, 2.0], 0.0),
        ("mean", [1.0, 2.5], [1.0, 2.0], 0.5 / 3.0),
        ("mean", [0.1], [0.0], 0.1),
        ("mean", [-4.0], [4.0], 8.0 / 5.0),
        ("precision", [np.e], [1.0], 1.0),
        ("log_precision", [-1.0], [-3.0], 0.5),
        ("mean_precision", [1e6], [1e6 * np.e], 1.0 / (1.0 + np.log(1e6 * np.e))),
        ("precision", [0.0], [0.0], 0.0),
        ("precision", [np.inf], [np.inf], 0.0),
        ("precision", [0.0], [1.0], np.inf),
        ("precision", [-1.0], [1.0], np.inf),
        ("score_mean", [-np.inf, 1.0], [-np.inf, 1.0], 0.0),
        ("score_mean", [-np.inf], [np.inf], np.inf),
        ("score_mean", [-np.inf], [-5.0], np.inf),
        ("score_mean", [-5.0], [-np.inf], np.inf),
        ("reliability", [np.nan], [np.nan], 0.0),
        ("reliability", [np.nan], [0.5], np.inf),
        ("reliability", [0.5], [np.nan], np.inf),
        ("mean", [], [], 0.0),
    ],
)
def test_the_error_of_one_output(name: str, actual: list[float], expected: list[float], error: float) -> None:
    found = golden_errors({name: np.array(actual)}, {name: np.array(expected)})
    assert found[name] == pytest.approx(error, rel=1e-12)
