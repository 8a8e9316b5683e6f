"""What a judgement of confidences keeps: one JSON file a data set, from which its tables and figures are made."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from training.study.layout import Estimate


class Part(BaseModel):
    """Strict, and frozen once made."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Interval(Part):
    """A number and its 95 % interval, users resampled."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, estimate: Estimate) -> "Interval":
        """The same as a record keeps it."""
        return cls(value=estimate.value, low=estimate.low, high=estimate.high)

    @property
    def estimate(self) -> Estimate:
        """The same as a table shows it."""
        return Estimate(self.value, self.low, self.high)


class Likelihood(Part):
    """Of the true next item, where the event allows it, in nats; lower is better."""

    users: int
    model: Interval
    popularity: Interval
    uniform: Interval
    """Over what the event leaves of the catalogue."""
    popularity_minus_model: Interval
    uniform_minus_model: Interval


class ItemConfidence(Part):
    """Of the places of lists: whether the confidence is the rate of hits."""

    places: int
    mean_confidence: float
    hit_rate: float
    ece: Interval
    ece_null: tuple[float, float]
    """Between these the ECE of a perfectly calibrated model would fall 95 times in 100."""
    brier_skill: Interval | None
    """Against the constant base rate; None where too little was hit."""


class ListConfidence(Part):
    """Of whole lists: whether the sum of the confidences is the rate of hits, and whom it picks out."""

    users: int
    stated: float
    realised: float
    slope: Interval | None
    decile_stated: tuple[float, ...]
    decile_realised: tuple[float, ...]
    chi_square: float | None
    p_value: float | None
    """None where too few hits are expected."""
    top_over_bottom: Interval | None
    """Rate of hits of the surest tenth, as a multiple of the least sure one's; None where that is hardly ever hit."""
    aurc: Interval
    hit_rate_at: dict[str, float]
    """Share of the users, surest first → HR@10."""
    ndcg_at: dict[str, float]


class Comparison(Part):
    """A confidence for the hit of a list, and what the compared one has over it."""

    name: str
    kind: Literal["served", "signal", "combination", "asked", "system"]
    """A system is `asked` about the served lists, and speaks of its own as a `system`."""
    hit_rate: float
    """Of the list that it speaks of."""
    aurc: Interval
    log_loss: Interval
    aurc_difference: Interval | None
    """This one's less the served list confidence's: above 0, the latter is better."""
    log_loss_difference: Interval | None
    cost: float | None
    """Seconds to score the test users, as a multiple of the served model's; None: nothing beside it."""


class PrecisionAdds(Part):
    """What a confidence for the hit of a served list is better by when it may know precision: without less with."""

    to: Literal["the served confidence", "a fitted combination"]
    aurc: Interval
    log_loss: Interval


class AlteredHistory(Part):
    """What lists state for users of two events or more when the model reads another history than theirs."""

    history: str
    users: int
    stated: float
    difference: Interval | None
    """To what they state for their own; None: that one itself."""


class ReliabilityAfter(Part):
    """The reliability of lists after a number of events, of the users who have so many."""

    events: int
    users: int
    median: float
    """Over users, of the mean of a list's items as they are served, 0 to 1."""
    median_of_longest: float | None
    """The same of those users who have the most events asked about, whatever row it is; None: they are too few."""
    share_clipped: float
    """Of the items, how many are below 0 before they are served as 0."""


class ConfidenceRecord(Part):
    """How the confidences of one bundle did on the test users of one data set."""

    format: Literal[2] = 2
    dataset: str
    data: dict[str, Any]
    event: Literal["next_new_item", "next_item"]
    model: str
    models: dict[str, Any]
    """Name of each model that took part → version, configuration, commit and best epoch of its training."""
    temperature: float
    commit: str | None
    environment: dict[str, Any]
    seconds: float
    likelihood: Likelihood
    likelihood_by_user: dict[str, Likelihood]
    likelihood_by_target: dict[str, Likelihood]
    """By the training uses of the true next item."""
    items: ItemConfidence
    lists: ListConfidence
    risk_curve: dict[str, list[float]]
    """`coverage`, and the risk 1 − HR@10 at each under `served` and, if there is one, `plain`."""
    reliability_curve: dict[str, list[float]]
    """Of the places of lists, in bins of equal mass: `stated`, `realised`."""
    by_user: dict[str, ListConfidence]
    by_user_items: dict[str, ItemConfidence]
    by_item: dict[str, ItemConfidence]
    """Places of lists by the training uses of the listed item."""
    comparisons: tuple[Comparison, ...]
    comparisons_by_user: dict[str, tuple[Comparison, ...]]
    """Of them the served, the best free, and, of a model with filtering, the served without precision."""
    best_free: str
    """Which of them is the best that no precision went into."""
    precision_adds: tuple[PrecisionAdds, ...]
    """None of a model without filtering."""
    altered: tuple[AlteredHistory, ...]
    by_catalogue_item: dict[str, float]
    """Mean confidence of every item that can be the event, by its training uses."""
    reliability: tuple[ReliabilityAfter, ...]
    """None of a model without filtering."""
    seed_agreement: float | None
    """Share of the users whom a model of another seed puts in the same tenth by list confidence, or in one beside it;
    None: there was no such model."""


def record_path(folder: Path, dataset: str) -> Path:
    """Where the record of a data set lies."""
    return folder / f"calibration-{dataset}.json"
