"""What the study keeps: one small JSON file a data set and one a run. Every number of the report comes from these.

    FOLDER/datasets/beauty.json
    FOLDER/runs/beauty-sasrec-on-s1.json

U test users, in the order of their ids, the same in every record of a data set
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from training.files import write_whole
from training.tables import DataError

KEPT_RANK = 20
"""Places of a list that a record keeps: HR and NDCG up to 20 follow from them."""

BASELINES = ("popularity", "markov")
"""Models that only count (`baselines`): no recipe, no configuration, no curve; seed 0."""

DATA_KEYS = ("sha256", "users", "items", "rows_kept", "train_users")
"""What a data set's record must say of reading and splitting."""

Record = TypeVar("Record", bound=BaseModel)


class _Record(BaseModel):
    """Strict, and frozen once made."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DatasetRecord(_Record):
    """A data set as the study splits it, with what the strata are cut by: training counts alone."""

    format: Literal[1] = 1
    name: str
    data: dict[str, Any]
    """What reading and splitting found: sha256, rows, users, items, events, ties."""
    event: Literal["next_new_item", "next_item"]
    history_length: list[int]
    """(U,) training events of each test user."""
    target_count: list[int]
    """(U,) training uses of each test user's target."""
    impossible: list[int]
    """Users whose target the event rules out (had before): no model can hit it."""
    training_counts: list[int]
    """(N,) training uses of each catalogue item."""

    @property
    def num_users(self) -> int:
        """Test users."""
        return len(self.history_length)

    @model_validator(mode="after")
    def _one_entry_a_user(self) -> Self:
        if len(self.history_length) != len(self.target_count):
            raise ValueError(
                f"history_length has {len(self.history_length)} users, target_count {len(self.target_count)}"
            )
        if any(not 0 <= user < self.num_users for user in self.impossible):
            raise ValueError(f"impossible names a user that is none of 0 … {self.num_users - 1}")
        if lacking := [key for key in DATA_KEYS if key not in self.data]:
            raise ValueError(f"data lacks {', '.join(lacking)}")
        return self


class ListFigures(_Record):
    """What the lists of ten recommend, whoever hits: a rare-item gain must not be a shift of popularity."""

    users: int
    coverage: float
    """Share of the catalogue that appears in a list."""
    mean_popularity: float
    """Mean training uses of a listed item."""
    exposure: dict[str, float]
    """Share of the lists' places by the listed item's stratum."""


class RunRecord(_Record):
    """One model on one data set with one seed; a baseline without learning has no configuration and no curve."""

    format: Literal[1] = 1
    dataset: str
    data_sha256: str
    model: str
    """`sasrec`, `bert4rec`, `hstu`, or a baseline: `popularity`, `markov`."""
    filtering: bool
    variant: str = ""
    """Empty, or what differs from the recipe: a control or a disturbance. Of a variant made at test time all that tells
    of the training (configuration, curve, validation) is the trained model's."""
    seed: int
    config: dict[str, Any] = Field(default_factory=dict)
    """The whole configuration, without paths."""
    commit: str | None
    environment: dict[str, Any]
    """CPU, cores, threads, versions."""
    seconds: dict[str, float]
    parameters: int = 0
    best_epoch: int = 0
    curve: list[dict[str, float]] = Field(default_factory=list)
    validation: dict[str, float] = Field(default_factory=dict)
    """HR@10 and NDCG@10, at the best epoch of what is trained: what choices were made by."""
    nll: float | None = None
    """Test, nats, mean over users whose target the event allows."""
    hit_users: list[int]
    """Users, by row, whose test target stands among the first `KEPT_RANK`."""
    hit_ranks: list[float]
    """Their ranks, from 1; a tie counts as half a place."""
    lists: dict[str, ListFigures]
    """Of the test users: `all`, and by stratum of users."""
    filter: dict[str, Any] | None = None
    """With filtering: τ of the items and the gain K, by training uses (`runs.filter_figures`). Not of extras."""
    noise: dict[str, float] | None = None
    """Where events were replaced by random items: `share` asked for and `replaced_events`; `list_confidence`, mean over
    the test users of the probability that the next event is among the ten. Test noise has beside it
    `list_confidence_true` of the same model on the true histories; `kriging_weight_replaced` and
    `kriging_weight_other`, the mean share that the position that answers gives to an event of either kind, mean over
    layers and heads (of a plain model, of its attention); with filtering `precision_replaced` and `precision_other`,
    the geometric mean of the events' initial precision λ."""

    @model_validator(mode="after")
    def _one_rank_a_hit(self) -> Self:
        if len(self.hit_users) != len(self.hit_ranks):
            raise ValueError(f"hit_users has {len(self.hit_users)} users, hit_ranks {len(self.hit_ranks)}")
        if any(not 1 <= rank <= KEPT_RANK for rank in self.hit_ranks):
            raise ValueError(f"hit_ranks holds a rank that is not in 1 … {KEPT_RANK}")
        return self

    @property
    def name(self) -> str:
        """The name of its file, without the ending."""
        return run_name(self.dataset, self.model, self.filtering, self.variant, self.seed)

    def ranks(self, num_users: int) -> np.ndarray:
        """(U,) ranks; infinite beyond `KEPT_RANK`."""
        ranks = np.full(num_users, np.inf)
        ranks[self.hit_users] = self.hit_ranks
        return ranks


def run_name(dataset: str, model: str, filtering: bool, variant: str, seed: int) -> str:
    """`beauty-sasrec-on-s1`, `toys-sasrec-off-noise-20-s1`."""
    parts = [dataset, model, "on" if filtering else "off", *([variant] if variant else []), f"s{seed}"]
    return "-".join(parts)


def run_path(folder: Path, name: str) -> Path:
    """Where the record of a run lies."""
    return folder / "runs" / f"{name}.json"


def dataset_path(folder: Path, name: str) -> Path:
    """Where the record of a data set lies."""
    return folder / "datasets" / f"{name}.json"


def write(path: Path, record: BaseModel) -> None:
    """Write a record: one line a field, long lists on one line."""
    fields = record.model_dump(mode="json")
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items())
    write_whole(path, f"{{\n{lines}\n}}\n".encode())


def read(path: Path, kind: type[Record]) -> Record:
    """Read a record.

    Raises:
        DataError: the file is missing, no JSON, or not of this kind; names the file and the field.
    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(f"{path}: {field}: {first['msg']}; make the run again or restore the file") from error


def read_all(folder: Path) -> tuple[dict[str, DatasetRecord], list[RunRecord]]:
    """Every record of a folder: data sets by name, and runs by the name of their file.

    Raises:
        DataError: a record is broken, is called otherwise than its file, lacks its data set, or was made on other data.
    """
    datasets = {path.stem: read(path, DatasetRecord) for path in _files(folder / "datasets")}
    runs = []
    for path in _files(folder / "runs"):
        run = read(path, RunRecord)
        if run.name != path.stem:
            raise DataError(f"{path}: holds the run {run.name}; a record's file is called as its run")
        if run.dataset not in datasets:
            raise DataError(f"{path}: no record of the data set {run.dataset!r} in {folder / 'datasets'}")
        if run.data_sha256 != datasets[run.dataset].data["sha256"]:
            raise DataError(f"{path}: made on other data than {dataset_path(folder, run.dataset)} tells of")
        if max(run.hit_users, default=0) >= datasets[run.dataset].num_users or min(run.hit_users, default=0) < 0:
            last = datasets[run.dataset].num_users - 1
            raise DataError(f"{path}: hit_users names a user that is none of 0 … {last}; make the run again")
        runs.append(run)
    return datasets, runs


def _files(folder: Path) -> Iterable[Path]:
    return sorted(folder.glob("*.json"))
