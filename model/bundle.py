"""The bundle: a model as one immutable, checksummed folder that training writes and the service reads.

Files (architecture.md, "The bundle"):
    encoder.onnx         history → state, and its cache
    step.onnx            cache + further events → state, and what they add to the cache; causal backbones only
    ranker.onnx          state → top-k with mean, variance and log-partition
    explainer.onnx       history → whom its state heard: each position's kriging weight and precision
    model.safetensors    the weights: torch's, by their names there, and what else the graphs hold; the graphs point
                         into it, so that each is on the disk, and mapped into memory, once
    items.parquet        number ↔ id, training count, title, whether retired
    new_items.npz        what is believed of items that were never trained, by their metadata
    calibration.json     temperature and confidence map
    golden.npz           inputs and outputs for the parity check on load
    manifest.json        what the model is, and the sha256 of every other file

Free of torch. Errors: every complaint about a bundle is a `BundleError` that names the folder and the file.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from zipfile import BadZipFile

import numpy as np
import polars as pl
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from model.config import FIRST_ITEM, ModelConfig
from model.new_items import NewItems, read_new_items

FORMAT_VERSION = 7
PARITY_TOLERANCE = 1e-5
"""|a − b| ≤ tolerance·(1 + |b|), precisions compared as logarithms (math.md, "What must hold"); more for a model whose
own rounding is more, see `Manifest.parity_tolerance`."""
MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
NEW_ITEMS = "new_items.npz"
ENCODER, STEP, RANKER, EXPLAINER = GRAPHS = "encoder", "step", "ranker", "explainer"
"""The graphs; a bundle has `step` if its backbone is causal, and always the others."""

Event = Literal["next_new_item", "next_item"]
"""What a confidence is the probability of: the next item not had before, or the next item of any kind."""

FEATURES = (
    "logit_probability",
    "log_variance",
    "log_training_count",
    "entropy",
    "log_mean_precision",
    "log_num_events",
)
"""Inputs of the confidence map, in order (math.md, "Scoring and its uncertainty")."""


ITEM_FEATURES = ("log_variance", "log_training_count")
"""Those of them in which an item that was never trained lies outside everything that the map was fitted on."""
UNTRAINED_DEVIATIONS = 3.0
"""How unfavourable, in standard deviations of the fit, each of these is taken to be for such an item, at the least."""


class BundleError(Exception):
    """A bundle is missing, damaged or of another format; the message names the folder, the file, the cure."""


class Strict(BaseModel):
    """Base of the bundle's JSON documents."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class CalibrationReport(Strict):
    """How far the confidences could be trusted on test: each number beside its interval, if it has one."""

    ece_at_10: float
    ece_null_interval: tuple[float, float]
    mean_confidence: float
    brier_skill_at_10: float
    num_users: int


class Calibration(Strict):
    """From scores to probabilities and confidences (math.md, "Scoring and its uncertainty").

    The raw probability of item i is softmax_i(logit_i/T); its confidence is σ(bias + w·(x_i − mean)/std), a
    logistic map over `features`, increasing in the probability, that never looks at the list around the item.
    """

    event: Event
    method: str = "temperature + logistic map"
    temperature: float = Field(gt=0)
    """T of the raw probabilities, fitted on validation."""
    variance_scale: float = Field(ge=0)
    """c of the predictive logit, learned in training; 0 for a plain model."""
    features: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[Annotated[float, Field(gt=0)], ...]
    weights: tuple[float, ...]
    bias: float
    report: CalibrationReport | None = None

    @model_validator(mode="after")
    def _one_number_a_feature(self) -> "Calibration":
        if not len(self.features) == len(self.mean) == len(self.std) == len(self.weights):
            raise ValueError("features, mean, std and weights must be of one length")
        if unknown := set(self.features) - set(FEATURES):
            raise ValueError(f"unknown features {sorted(unknown)}; known are {', '.join(FEATURES)}")
        if any(weight < 0 for name, weight in zip(self.features, self.weights, strict=True) if name == FEATURES[0]):
            raise ValueError(f"the weight of {FEATURES[0]} is negative; a confidence rises with the probability")
        return self

    def confidence(self, features: dict[str, np.ndarray], untrained: np.ndarray | None = None) -> np.ndarray:
        """Calibrated probability, in (0, 1), that each item is the user's next event.

        An item that was never trained never gains by that: where the map would follow its variance or its count of 0
        upwards, far beyond what it was fitted on, the item counts as the least favourable trained one.

        Args:
            features: name → array; arrays broadcast against each other, users along axis 0.
            untrained: which items were never trained, broadcasting too; None: none.
        """
        logit: Any = self.bias
        for name, mean, std, weight in zip(self.features, self.mean, self.std, self.weights, strict=True):
            part = weight * (features[name] - mean) / std
            if untrained is not None and name in ITEM_FEATURES:
                part = np.where(untrained, np.minimum(part, -UNTRAINED_DEVIATIONS * abs(weight)), part)
            logit = logit + part
        # σ by its logarithm: 1/(1 + exp(−x)) overflows for a far negative x.
        return np.asarray(np.exp(-np.logaddexp(0, -np.asarray(logit, np.float64))))


def confidence_features(
    log_probability: np.ndarray,
    score_variance: np.ndarray,
    training_count: np.ndarray,
    entropy: np.ndarray,
    mean_precision: np.ndarray,
    num_events: np.ndarray,
) -> dict[str, np.ndarray]:
    """The confidence map's inputs, by the names of `FEATURES`.

    Args:
        log_probability: (B,M) log p_i ≤ 0 of each item.
        score_variance: (B,M) v_i ≥ 0.
        training_count: (B,M) n_i.
        entropy: (B,) of the distribution over the catalogue, in nats.
        mean_precision: (B,) mean over dimensions of the final state's precision; infinite for a plain model.
        num_events: (B,) events of the user.
    """
    # log p − log(1−p), exact for small p; p is kept off 1 so that the odds stay finite.
    log_probability = np.minimum(log_probability.astype(np.float64), -1e-9)
    tiny = np.finfo(np.float32).tiny
    return {
        "logit_probability": log_probability - np.log(-np.expm1(log_probability)),
        "log_variance": np.log(np.maximum(score_variance, tiny)),
        "log_training_count": np.log1p(training_count),
        "entropy": entropy[:, None],
        "log_mean_precision": np.log(np.maximum(mean_precision, tiny))[:, None],
        "log_num_events": np.log1p(num_events)[:, None],
    }


Document = TypeVar("Document", bound=Strict)


class FileEntry(Strict):
    """What one file must be, to the byte."""

    sha256: str
    size_bytes: int


def _parse_time(value: Any) -> Any:
    return datetime.fromisoformat(value) if isinstance(value, str) else value


class Manifest(Strict):
    """What the bundle is and where it comes from."""

    format_version: int
    name: str
    version: str
    """Content hash of the bundle, also its folder's name."""
    lineage: str
    """Catalogue lineage: item numbers mean the same in every bundle of one lineage."""
    calibrated_by: str | None
    """Version of the bundle that the calibration was fitted by, on events that this one has learned since; it lies
    beside this one. None: by this one."""
    created_at: Annotated[datetime, BeforeValidator(_parse_time)]
    model: ModelConfig
    num_items: int
    event: Event
    parity_tolerance: Annotated[float, Field(ge=PARITY_TOLERANCE)]
    """Of the golden cases: how far an execution may be from torch's (`model.onnx.export.parity_tolerance`)."""
    custom_ops: dict[str, tuple[str, ...]]
    """Graph → names of its nodes in the ONNX domain `bft`; every graph of the bundle is named."""
    data: dict[str, Any]
    metrics: dict[str, Any]
    training: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, FileEntry]

    @property
    def graphs(self) -> tuple[str, ...]:
        """The bundle's graphs, of `GRAPHS`."""
        return tuple(self.custom_ops)

    @model_validator(mode="after")
    def _graphs_are_known(self) -> "Manifest":
        if not set(GRAPHS) - {STEP} <= set(self.graphs) <= set(GRAPHS):
            raise ValueError(
                f"custom_ops names the graphs {', '.join(self.graphs)}; accepted: {ENCODER}, {RANKER}, {EXPLAINER}"
                f" and, for a causal backbone, {STEP}"
            )
        return self


def file_names(graphs: Iterable[str]) -> tuple[str, ...]:
    """The files of a bundle with these graphs, but the manifest."""
    graph_files = (f"{graph}.onnx" for graph in graphs)
    return (*graph_files, WEIGHTS, "items.parquet", NEW_ITEMS, "calibration.json", "golden.npz")


class Items:
    """The catalogue as the service needs it: id ↔ number, training count, title, and who is not to be listed.

    Args:
        frame: columns number, item_id, training_count, title (nullable), is_retired; sorted by number from
            FIRST_ITEM on.
    """

    def __init__(self, frame: pl.DataFrame) -> None:
        numbers = frame["number"].to_numpy()
        if not np.array_equal(numbers, np.arange(FIRST_ITEM, FIRST_ITEM + len(frame))):
            raise BundleError("items.parquet: numbers do not run from 4 upwards without a gap; re-export the bundle")
        self.ids: list[str] = frame["item_id"].to_list()
        self.training_counts = frame["training_count"].to_numpy().astype(np.int64)
        self.titles: list[str | None] = frame["title"].to_list()
        self.retired = frame.filter("is_retired")["number"].to_numpy()
        """Sorted numbers of the items that are known and not recommended any more."""
        self._rows = {item_id: row for row, item_id in enumerate(self.ids)}
        if len(self._rows) != len(self.ids):
            raise BundleError("items.parquet: an item_id stands twice; re-export the bundle")

    def __len__(self) -> int:
        return len(self.ids)

    def number(self, item_id: str) -> int | None:
        """The item's number, or None when the catalogue does not know the id."""
        row = self._rows.get(item_id)
        return None if row is None else row + FIRST_ITEM

    def item_id(self, number: int) -> str:
        """The external id of a catalogue number.

        Raises:
            IndexError: the number is a special token's, or beyond the catalogue.
        """
        if not FIRST_ITEM <= number < FIRST_ITEM + len(self.ids):
            raise IndexError(f"item number {number} is not in {FIRST_ITEM} … {FIRST_ITEM + len(self.ids) - 1}")
        return self.ids[number - FIRST_ITEM]


def items_frame(
    ids: list[str], training_counts: np.ndarray, titles: list[str | None], retired: Collection[str] = ()
) -> pl.DataFrame:
    """The table that becomes items.parquet, in catalogue order; `retired` are ids."""
    return pl.DataFrame(
        {
            "number": np.arange(FIRST_ITEM, FIRST_ITEM + len(ids), dtype=np.int64),
            "item_id": pl.Series(ids, dtype=pl.String),
            "training_count": training_counts.astype(np.int64),
            "title": pl.Series(titles, dtype=pl.String),
            "is_retired": pl.Series([item_id in retired for item_id in ids], dtype=pl.Boolean),
        }
    )


@dataclass(frozen=True)
class GoldenCase:
    """One recorded call of a graph: named inputs and the outputs they gave in training."""

    graph: str
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]


def golden_arrays(cases: list[GoldenCase]) -> dict[str, np.ndarray]:
    """Golden cases as the flat names of golden.npz: `<case>/<graph>/<in|out>/<name>`."""
    return {
        f"{index}/{case.graph}/{side}/{name}": array
        for index, case in enumerate(cases)
        for side, arrays in (("in", case.inputs), ("out", case.outputs))
        for name, array in arrays.items()
    }


def golden_errors(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> dict[str, float]:
    """How far a graph's outputs are from the recorded ones: name → largest |found − expected|/(1 + |expected|).

    Precisions are compared as logarithms; whole numbers must be equal; equal infinities and NaNs agree, others never
    do. In a list, two items whose keys tie within the tolerance may come in either order, or one for the other at the
    list's end.

    Raises:
        ValueError: an output has another shape than was recorded.
    """
    for name, wanted in expected.items():
        if found[name].shape != wanted.shape:
            raise ValueError(f"output {name} has shape {found[name].shape}, recorded was {wanted.shape}")
    errors = {name: _errors(name, found[name], wanted) for name, wanted in expected.items()}
    if "items" in expected:
        swapped = (found["items"] != expected["items"]) & _tied(expected["order_key"])
        for name, error in errors.items():
            if error.shape == swapped.shape and name != "order_key":
                errors[name] = np.where(swapped, 0.0, error)
    return {name: float(error.max(initial=0.0)) for name, error in errors.items()}


def _errors(name: str, found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    if np.issubdtype(wanted.dtype, np.integer):
        return np.where(found == wanted, 0.0, np.inf)
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        if name in ("precision", "mean_precision"):
            a, b = np.log(a), np.log(b)
        equal = (a == b) | (np.isnan(a) & np.isnan(b))
        error = np.where(equal, 0.0, np.abs(a - b) / (1 + np.abs(b)))
    return np.nan_to_num(error, nan=np.inf, posinf=np.inf)


def _tied(key: np.ndarray) -> np.ndarray:
    """Places of lists (B,M) that are last, padding, or within the tolerance of a neighbour's key."""
    key = key.astype(np.float64)
    room = 2 * PARITY_TOLERANCE * (1 + np.abs(key))
    with np.errstate(invalid="ignore"):
        close = np.abs(np.diff(key, axis=1)) <= room[:, 1:]
    edge = np.ones((len(key), 1), bool)
    return np.asarray(np.hstack([close, edge]) | np.hstack([~edge, close]) | np.isneginf(key))


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its folder, and its small documents parsed. Whoever runs the graphs loads them."""

    folder: Path
    manifest: Manifest
    calibration: Calibration
    items: Items
    new_items: NewItems

    def graph_path(self, graph: str) -> Path:
        """Path of one of the manifest's `graphs`."""
        return self.folder / f"{graph}.onnx"

    def golden_cases(self) -> list[GoldenCase]:
        """The recorded calls, in the order they were recorded.

        Raises:
            BundleError: golden.npz is not what `golden_arrays` makes; pickled objects are never read.
        """
        cases: dict[str, GoldenCase] = {}
        try:
            with np.load(self.folder / "golden.npz", allow_pickle=False) as arrays:
                for key in arrays.files:
                    index, graph, side, name = key.split("/")
                    case = cases.setdefault(index, GoldenCase(graph, {}, {}))
                    (case.inputs if side == "in" else case.outputs)[name] = arrays[key]
        except (ValueError, OSError, EOFError, BadZipFile) as error:
            raise BundleError(f"{self.folder}: golden.npz cannot be read ({error}); export again") from error
        return list(cases.values())


def open_bundle(folder: Path | str) -> Bundle:
    """Verify every checksum and parse the documents.

    Args:
        folder: the bundle's folder, or a link to it.

    Raises:
        BundleError: the folder or a file is missing, damaged, unlisted, or of a format not read here.
    """
    folder = Path(folder).resolve()
    manifest = read_manifest(folder)
    _verify_files(folder, manifest)
    calibration = _parse(folder / "calibration.json", Calibration)
    try:
        items = Items(pl.read_parquet(folder / "items.parquet"))
    except (pl.exceptions.PolarsError, OSError) as error:
        raise BundleError(f"{folder}: items.parquet cannot be read ({error}); publish the bundle again") from error
    except BundleError as error:
        raise BundleError(f"{folder}: {error}") from error
    try:
        new_items = read_new_items(folder / NEW_ITEMS)
    except ValueError as error:
        raise BundleError(f"{folder}: {NEW_ITEMS} cannot be read ({error}); export the bundle again") from error
    if len(new_items.mean) != manifest.model.width:
        raise BundleError(
            f"{folder}: {NEW_ITEMS} has width {len(new_items.mean)}, {MANIFEST} says {manifest.model.width}; re-export"
        )
    if len(items) != manifest.num_items:
        raise BundleError(
            f"{folder}: items.parquet has {len(items)} items, {MANIFEST} says {manifest.num_items}; re-export"
        )
    if calibration.event != manifest.event:
        raise BundleError(
            f"{folder}: calibration.json is for event {calibration.event}, {MANIFEST} for {manifest.event}; re-export"
        )
    return Bundle(folder, manifest, calibration, items, new_items)


def write_bundle(parent: Path, manifest: dict[str, Any], fill: Callable[[Path], None]) -> Path:
    """Write a bundle under `parent`, in a folder named by its content hash, all or nothing.

    Args:
        parent: the folder that receives the bundle.
        manifest: the fields of `Manifest` but `format_version`, `version` and `files`, which are added here.
        fill: writes every file of `file_names` into the folder it is given; `manifest` is read after it.

    Returns:
        the bundle's folder; an identical bundle that is already there is left as it is.

    Raises:
        BundleError: `fill` left out a file or wrote one too many, or the manifest's fields are wrong; nothing
            stays behind.
    """
    parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=parent))
    try:
        fill(staging)
        described = {**manifest, "format_version": FORMAT_VERSION, "version": "", "files": {}}
        try:
            names = file_names(Manifest.model_validate(described).graphs)
        except ValidationError as error:
            raise BundleError(f"{parent}: {MANIFEST}, {_first_complaint(error)}; nothing was written") from error
        for path in staging.iterdir():
            if path.name not in names:
                raise BundleError(f"{staging}: {path.name} is no file of this bundle; the export wrote too much")
        for name in names:
            if not (staging / name).is_file():
                raise BundleError(f"{staging}: {name} was not written; the export is incomplete")
            size_bytes = (staging / name).stat().st_size
            described["files"][name] = FileEntry(sha256=_sha256(staging / name), size_bytes=size_bytes)
        document = json.loads(Manifest.model_validate(described).model_dump_json())
        document["version"] = _content_hash(document)
        (staging / MANIFEST).write_text(json.dumps(document, indent=2) + "\n")
        for path in staging.iterdir():
            path.chmod(0o644)  # the service may run as another user
            fsync(path)
        staging.chmod(0o755)
        fsync(staging)
        target: Path = parent / document["version"]
        if target.exists():
            shutil.rmtree(staging)
        else:
            staging.rename(target)
            fsync(parent)
        return target
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def read_manifest(folder: Path) -> Manifest:
    """What a bundle says of itself; whether its files are whole `open_bundle` looks at.

    Raises:
        BundleError: it is missing, was changed, or is of a format not read here.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise BundleError(
            f"{folder}: no {MANIFEST} here; point to a bundle's folder or to a registry with one published"
        )
    try:
        document = json.loads(path.read_bytes())
        found = document.get("format_version")
    except (ValueError, AttributeError) as error:
        raise BundleError(f"{folder}: {MANIFEST} is not a JSON object; publish the bundle again") from error
    if found != FORMAT_VERSION:
        raise BundleError(
            f"{folder}: {MANIFEST} is of format {found}, this version reads {FORMAT_VERSION}: upgrade, or export again"
        )
    manifest = _parse(path, Manifest)
    if manifest.version != _content_hash(document):
        raise BundleError(f"{folder}: {MANIFEST} was changed after it was written; publish the bundle again")
    return manifest


def _verify_files(folder: Path, manifest: Manifest) -> None:
    present = {path.name for path in folder.iterdir()} - {MANIFEST}
    for name in sorted(present - set(manifest.files)):
        raise BundleError(f"{folder}: {name} is not listed in {MANIFEST}; remove it, or publish the bundle again")
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise BundleError(f"{folder}: {name} is missing; publish the bundle again")
        if path.stat().st_size != entry.size_bytes or _sha256(path) != entry.sha256:
            raise BundleError(f"{folder}: {name} does not match its checksum in {MANIFEST}; publish the bundle again")
    for name in file_names(manifest.graphs):
        if name not in manifest.files:
            raise BundleError(f"{folder}: {MANIFEST} does not list {name}; export the bundle again")


def _parse(path: Path, model: type[Document]) -> Document:
    try:
        return model.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise BundleError(f"{path.parent}: {path.name}, {_first_complaint(error)}; export the bundle again") from error


def _first_complaint(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"field {'.'.join(str(part) for part in first['loc'])}: {first['msg']}"


def _content_hash(document: dict[str, Any]) -> str:
    """Of the manifest but its `version`, and through the listed checksums of every file."""
    content = {key: value for key, value in document.items() if key != "version"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Put a file, or a folder's list of names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
