"""Which runs are set against which: filtering on against off, seed by seed, and what such a pair may claim.

S seeds · U test users
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from training.config import PATHS, RunConfig, leaves
from training.events import DataConfig
from training.study import strata
from training.study.compare import METRICS, Change, Difference, mean_relative_change, paired_differences
from training.study.records import BASELINES, DatasetRecord, RunRecord

MIN_SEEDS = 3
MIN_USERS = 2000
"""Seeds and test users below which a comparison carries no claim."""
MODELS = {
    "sasrec": "SASRec",
    "hstu": "HSTU",
    "bert4rec": "BERT4Rec",
    "popularity": "popularity",
    "markov": "Markov",
}
"""Names as the literature writes them, in the report's order."""
CONTROLS = {
    "shuffled-precision": "τ shuffled across items",
    "no-kriging-bias": "no precision in the attention",
    "no-gain": "no gain",
    "no-process-noise": "no process noise",
    "no-jacobian": "no Jacobian",
    "no-score-variance": "no variance in the scores",
    "plain-settings": "the settings tuned for the plain model",
}
"""Variants of a model with filtering that have one part changed, in words."""
NOISE = {"test-noise": "test histories", "training-noise": "training histories"}
"""Variants whose events are replaced by random items, and where; the percentage follows."""
ALL = ("all", "all users")
RARE = ("headline", "rare target items")
COLD = ("headline", "cold users")
SWITCHES = ("model.filtering", "training.seed")
"""Settings that differ within a comparison by its nature."""
TUNED = ("model.dropout", "training.batch_size", "training.last_item_share", "training.learning_rate")
"""Settings that were tuned for filtering on and off alike, so that each side may have its own best (configs/spaces)."""
DEFAULTS = RunConfig(data=DataConfig(path=Path("-"))).model_dump(mode="json", exclude=PATHS)
"""What a setting is in a record older than the setting."""

Stratum = tuple[str, str]
"""Division of the test users, and the stratum in it, as in `strata.groups`."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs on one data set that differ by filtering alone, off and on seed by seed."""

    dataset: DatasetRecord
    model: str
    variant: str
    off: tuple[RunRecord, ...]
    on: tuple[RunRecord, ...]

    @property
    def label(self) -> str:
        """The model's name, and what differs from its recipe."""
        return MODELS.get(self.model, self.model) + (f", {self.variant}" if self.variant else "")

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that both sides have."""
        return tuple(run.seed for run in self.on)

    @property
    def records(self) -> tuple[str, ...]:
        """The names of all its records."""
        return tuple(run.name for run in (*self.off, *self.on))

    def of_seeds(self, seeds: Iterable[int]) -> "Comparison":
        """The same with some of its seeds."""
        kept = set(seeds)
        off, on = (tuple(run for run in side if run.seed in kept) for side in (self.off, self.on))
        return replace(self, off=off, on=on)

    @cached_property
    def differing_settings(self) -> tuple[str, ...]:
        """Settings that should be the same in all its runs, or for what is tuned in all of one side, and are not."""
        off, on = (self._values(side) for side in (self.off, self.on))
        return tuple(
            key
            for key in sorted({*off, *on} - set(SWITCHES))
            if max(len(off[key]), len(on[key])) > 1 or (off[key] != on[key] and key not in TUNED)
        )

    @cached_property
    def own_settings(self) -> tuple[str, ...]:
        """What is tuned and differs between the sides, in words."""
        off, on = (self._values(side) for side in (self.off, self.on))
        return tuple(f"{key} {min(off[key])} off, {min(on[key])} on" for key in TUNED if off[key] != on[key])

    @staticmethod
    def _values(side: Sequence[RunRecord]) -> dict[str, set[Any]]:
        """Setting → the values that it has in the runs of one side."""
        values: dict[str, set[Any]] = {}
        for run in side:
            for key, value in (dict(leaves(DEFAULTS)) | dict(leaves(run.config))).items():
                values.setdefault(key, set()).add(value)
        return values

    @property
    def caveat(self) -> str:
        """Why it carries no claim; empty if it may carry one."""
        if self.differing_settings:
            return f"settings differ ({', '.join(self.differing_settings)}), no claim"
        if self.dataset.num_users < MIN_USERS:
            return f"only {self.dataset.num_users:,} users, no claim"
        if len(self.seeds) < MIN_SEEDS:
            return f"{len(self.seeds)} seed{'s' * (len(self.seeds) > 1)}, no claim"
        return ""

    @cached_property
    def users(self) -> dict[Stratum, np.ndarray]:
        """Every stratum's test users, (U,) bool."""
        groups = strata.groups(self.dataset).items()
        return {(division, name): users for division, members in groups for name, users in members.items()}

    @cached_property
    def differences(self) -> dict[Stratum, dict[str, Difference]]:
        """Filtering on against off by stratum and metric; a stratum without users is not there."""
        return {
            stratum: paired_differences(*self.values(stratum)) for stratum, users in self.users.items() if users.any()
        }

    @cached_property
    def overall(self) -> dict[str, Difference]:
        """Filtering on against off over all test users, by metric."""
        return paired_differences(*self.values(ALL))

    def values(self, stratum: Stratum) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """With filtering and without: metric → (S,U) of the stratum's users."""
        users = self.users[stratum]
        return per_user(self.on, self.dataset, users), per_user(self.off, self.dataset, users)

    def has_change(self, stratum: Stratum) -> bool:
        """Whether the stratum has users, and hits without filtering that a change can be told relative to."""
        differences = self.differences.get(stratum)
        return differences is not None and all(difference.second for difference in differences.values())

    def in_words(self, difference: Difference) -> str:
        """What a difference of this comparison says, and why it carries no claim if it does not."""
        return "; ".join(filter(None, (difference.verdict, self.caveat)))


@dataclass(frozen=True, eq=False)
class Study:
    """All records, and the comparisons among them: those that may carry a claim first."""

    datasets: dict[str, DatasetRecord]
    runs: list[RunRecord]
    comparisons: list[Comparison]
    """Of recipes, without controls and noise."""
    noise: list[Comparison]
    unpaired: list[str]
    """Names of records of a comparison whose partner is missing."""

    def named(self, dataset: str, model: str, filtering: bool, variant: str = "") -> tuple[RunRecord, ...]:
        """The runs of that kind, by seed."""
        kind = (dataset, model, filtering, variant)
        found = [run for run in self.runs if (run.dataset, run.model, run.filtering, run.variant) == kind]
        return tuple(sorted(found, key=lambda run: run.seed))

    def of_recipe(self) -> list[Comparison]:
        """The comparisons of the recipes as they stand, without variants."""
        return [comparison for comparison in self.comparisons if not comparison.variant]

    @cached_property
    def together(self) -> dict[tuple[str, Stratum], tuple[tuple[Comparison, ...], dict[str, Change]]]:
        """What the data sets of a backbone say together, where several carry a claim.

        Returns:
            backbone and stratum (all users, rare items, cold users) → the comparisons, and the mean of their relative
            changes by metric.
        """
        claims = [comparison for comparison in self.of_recipe() if not comparison.caveat]
        found = {}
        for model in dict.fromkeys(comparison.model for comparison in claims):
            for stratum in (ALL, RARE, COLD):
                over = tuple(one for one in claims if one.model == model and one.has_change(stratum))
                if len(over) > 1:
                    found[model, stratum] = over, mean_relative_change([one.values(stratum) for one in over])
        return found


def study_of(datasets: dict[str, DatasetRecord], runs: Sequence[RunRecord]) -> Study:
    """Set runs against each other.

    Args:
        datasets, runs: as `records.read_all` gives them.
    """
    comparisons: list[Comparison] = []
    noise: list[Comparison] = []
    unpaired: list[str] = []
    compared = [run for run in runs if run.model not in BASELINES and control_of(run.variant) is None]
    for kind in sorted({(run.dataset, run.model, run.variant) for run in compared}):
        off, on = (
            {run.seed: run for run in compared if (run.dataset, run.model, run.variant, run.filtering) == (*kind, side)}
            for side in (False, True)
        )
        both = sorted(off.keys() & on.keys())
        unpaired += [run.name for seed, run in [*off.items(), *on.items()] if seed not in both]
        if both:
            sides = (tuple(side[seed] for seed in both) for side in (off, on))
            comparison = Comparison(datasets[kind[0]], kind[1], kind[2], *sides)
            (noise if noise_of(comparison.variant) else comparisons).append(comparison)
    return Study(datasets, list(runs), sorted(comparisons, key=_report_order), noise, sorted(unpaired))


def control_of(variant: str) -> tuple[str, str] | None:
    """The recipe's variant and the name in `CONTROLS`; None if the variant is no control."""
    matched = re.fullmatch(rf"(?:(.+)-)?({'|'.join(CONTROLS)})", variant)
    return (matched[1] or "", matched[2]) if matched else None


def noise_of(variant: str) -> tuple[str, str] | None:
    """The recipe's variant and the name in `NOISE`; None if the variant has no noise."""
    matched = re.fullmatch(rf"(?:(.+)-)?({'|'.join(NOISE)})-\d+", variant)
    return (matched[1] or "", matched[2]) if matched else None


def per_user(
    runs: Sequence[RunRecord], dataset: DatasetRecord, users: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Metric → (S,U) of runs on one data set; of some of its users where a mask is given."""
    ranks_SU = np.stack([run.ranks(dataset.num_users) for run in runs])
    kept = ranks_SU if users is None else ranks_SU[:, users]
    return {name: metric(kept) for name, metric in METRICS.items()}


def model_order(model: str) -> tuple[int, str]:
    """Where a model stands in the report."""
    known = list(MODELS)
    return (known.index(model) if model in known else len(known), model)


def _report_order(comparison: Comparison) -> Any:
    few = comparison.dataset.num_users < MIN_USERS
    return bool(comparison.caveat), few, comparison.variant, model_order(comparison.model), comparison.dataset.name


def mean(values: Iterable[float]) -> float:
    """Over runs of several seeds."""
    return float(np.mean(list(values)))
