"""A run's configuration: YAML with dotted overrides, strict, an unknown key answered with the nearest one."""

import copy
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, overload

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from model.config import ModelConfig
from training import datasets
from training.events import DataConfig
from training.metadata import MetadataConfig
from training.splits import SplitName

PATHS: dict[str, Any] = {"data": {"path", "rejects"}, "titles": True, "metadata": {"path"}, "retired": True}
"""What a record leaves out of the configuration: paths mean nothing on another machine."""


class ConfigError(Exception):
    """The configuration is wrong; the message names the file or override, the key, and what is accepted."""


class OptimizerConfig(BaseModel):
    """How a model is fitted. Strict and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    seed: int = 0
    epochs: int = Field(default=60, ge=1)
    epoch_steps: int | None = Field(default=None, ge=1)
    """An epoch ends after so many batches; None: when every window was seen. For logs too long to wait for that."""
    max_seconds: float | None = Field(default=None, gt=0)
    """No further epoch is begun after this many seconds of training."""
    batch_size: int = Field(default=128, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    schedule: Literal["constant", "linear"] = "constant"
    """Of the learning rate: as it is, or falling in a straight line to 0 at the end of the last of `epochs`."""
    precision_rate_multiple: float = Field(default=20.0, gt=0)
    """θ's learning rate as a multiple of the base rate, with which it hardly moves on a small log (measured)."""
    autocast: bool = False
    """Matrix products in bfloat16 where the device has a unit for them (on a CPU those of the loss alone); precisions
    stay float32."""
    weight_decay: float = Field(default=0.0, ge=0)
    loss: Literal["full", "sampled"] = "full"
    num_negatives: int = Field(default=512, ge=1)
    """Shared uniform negatives a batch, for the sampled loss."""
    prefixes: bool = False
    """Each event is predicted from a row of its own, instead of with the user's others: more rows, other dropout."""
    unknown_rate: float = Field(default=0.01, ge=0, lt=1)
    """Share of input events that training replaces by UNK."""
    mask_share: float = Field(default=0.2, gt=0, lt=1)
    """BERT4Rec: probability that an event of a row is masked, to be filled in; one is in any case."""
    last_item_share: float = Field(default=0.5, ge=0, le=1)
    """BERT4Rec: share of the rows that mask their last event alone, as a request does."""
    clip_norm: float = Field(default=5.0, gt=0)
    patience: int = Field(default=8, ge=1)
    """Epochs without a better validation NDCG@10 before training stops."""
    refit_epochs: int = Field(default=0, ge=0)
    """After the best epoch is known and the calibration fitted, go on for so many epochs with the validation events
    learned too, and publish that model: the next event then is as close behind what was learned as the validation
    targets were when the calibration was fitted. 0: publish the model as it was fitted."""
    micro_batches: int | None = Field(default=None, ge=1)
    """A batch is worked in so many parts whose gradients add up; None: one for each process. A run with the same
    number gives the same figures in any number of processes that divides it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU where there is one."""
    compile: bool = False
    """Whether torch.compile makes the encoder's training step; takes a C++ compiler and, at first, a minute or more."""


class ModelRun(BaseModel):
    """What every kind of run decides about its model."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    """The model's name, shown in every answer; None: `bft-` and the backbone."""
    titles: Annotated[Path | None, Field(strict=False)] = None
    """A `.item` or CSV file with the items' titles."""
    retired: Annotated[Path | None, Field(strict=False)] = None
    """A text file with the ids of items that are not to be recommended any more, one a line."""
    metadata: MetadataConfig | None = None
    """What is known of the items, so that those added at run time can be placed among the trained ones."""
    event: Literal["auto", "next_new_item", "next_item"] = "auto"
    """What a confidence is the probability of; `auto`: `next_new_item` unless users repeat items."""
    model: ModelConfig = ModelConfig()
    training: OptimizerConfig = OptimizerConfig()

    @property
    def model_name(self) -> str:
        """The name that the bundle gets."""
        return self.name or f"bft-{self.model.backbone}"


class RunConfig(ModelRun):
    """All that decides a training run; written whole into the manifest and the run's record."""

    data: DataConfig
    split: SplitName = "leave_one_out"


def leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested settings, by dotted names."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


Run = TypeVar("Run", bound=ModelRun)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-3` as text for want of a dot; here it is the number it looks like."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


@overload
def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig: ...
@overload
def load_config(path: Path | None, overrides: Sequence[str], kind: type[Run]) -> Run: ...
def load_config(path: Path | None, overrides: Sequence[str] = (), kind: type[ModelRun] = RunConfig) -> ModelRun:
    """Read a configuration file and apply overrides.

    Args:
        path: a YAML file, or None to start from the defaults. Relative paths inside it are relative to the
            working directory. Its section `without_filtering` has keys that hold instead of the others where the model
            turns out to have filtering off, so that one file can be each side's own best.
        overrides: `dotted.key=value`, the value in YAML; later ones win. `model=NAME` is short for
            `model.backbone=NAME`.
        kind: of the run that is configured.

    Raises:
        ConfigError: the file is missing or not a mapping, an override has no `=`, a key is unknown (names the
            nearest), or a value is not accepted.
        DataError: `data.path` names a data set that is not whole.
    """
    document = {} if path is None else read_yaml(path, "--config")
    return override_config(document, overrides, str(path or "configuration"), kind)


@overload
def override_config(document: dict[str, Any], overrides: Sequence[str], where: str) -> RunConfig: ...
@overload
def override_config(document: dict[str, Any], overrides: Sequence[str], where: str, kind: type[Run]) -> Run: ...
def override_config(
    document: dict[str, Any], overrides: Sequence[str], where: str, kind: type[ModelRun] = RunConfig
) -> ModelRun:
    """A configuration from a document and overrides; arguments and errors as in `load_config`.

    Where `data.path` is no file or folder but the name of a data set in the cache, the data set's log and titles
    are meant, and it says how the log is read where neither document nor overrides do.

    Args:
        document: nested keys and values, `without_filtering` among them.
        overrides: as there.
        where: what the document is called in an error.

    Raises:
        DataError: `data.path` names a data set that is not whole.
    """
    document = dict(document)
    without_filtering = document.pop("without_filtering", {})
    if not isinstance(without_filtering, dict):
        raise ConfigError(f"{where}: without_filtering: expected keys such as model; found {without_filtering!r}")
    config = _validated(document, overrides, where, kind)
    plain = _validated(_merged(document, without_filtering), overrides, where, kind)
    return config if config.model.filtering else plain


def _validated(document: dict[str, Any], overrides: Sequence[str], where: str, kind: type[ModelRun]) -> ModelRun:
    given = _overridden(document, overrides)
    if found := _named_dataset(given):
        # Once more over what the data set says: `data.columns.item_id=sku` changes one column of its own.
        given = _overridden(_over(found, document), overrides)
        given["data"]["path"] = str(found.config.path)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{where}: {_explain(item, kind)}" for item in error.errors())) from error


def _overridden(document: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    document = copy.deepcopy(document)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"override {override!r} is not of the form dotted.key=value, e.g. training.epochs=20")
        value = _parse_yaml(text, f"override {override!r}")
        if key == "model" and isinstance(value, str):
            key = "model.backbone"
        _set(document, key.split("."), value, override)
    return document


def _merged(document: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """The document, with the other's values where it has a key too, section by section."""
    merged = dict(document)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _named_dataset(document: dict[str, Any]) -> datasets.FoundDataset | None:
    data = document.get("data")
    path = data.get("path") if isinstance(data, dict) else None
    return datasets.resolve(path) if isinstance(path, str | Path) else None


def _over(found: datasets.FoundDataset, document: dict[str, Any]) -> dict[str, Any]:
    """A document's keys over what a data set says."""
    reading = found.config.model_dump(mode="json", exclude_unset=True, exclude={"path"})
    titles = {} if found.titles is None else {"titles": str(found.titles)}
    return {**titles, **document, "data": {**reading, **(document.get("data") or {})}}


def read_yaml(path: Path, option: str) -> dict[str, Any]:
    """A document of keys; 1e-3 is a number, as in YAML 1.2.

    Args:
        option: of the command line, which named the file.

    Raises:
        ConfigError: the file cannot be read, or is no YAML document of keys.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a YAML file with {option}") from error
    document = _parse_yaml(text, str(path))
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected keys such as data, model, training; found {type(document).__name__}")
    return document


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - _Loader is a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from error


def _set(document: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    for key in keys[:-1]:
        document = document.setdefault(key, {})
        if not isinstance(document, dict):
            raise ConfigError(f"override {override!r}: {key} is a value, it has no keys below it")
    document[keys[-1]] = value


def _explain(error: Any, kind: type[ModelRun]) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["loc"] in (("data",), ("data", "path")) and error["type"] == "missing":
        return "no interaction log is named; give it with --data FILE, or as data.path"
    if error["type"] != "extra_forbidden":
        return f"{key}: {error['msg']} (got {str(error['input'])[:80]!r})"
    known = list(_known_keys(kind))
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0)
    return f"unknown key {key}; the nearest is {nearest[0]}"


def _known_keys(model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    """Every dotted key, leaves and sections."""
    for name, field in model.model_fields.items():
        yield prefix + name
        annotation = field.annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        for candidate in candidates:
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                yield from _known_keys(candidate, f"{prefix}{name}.")
