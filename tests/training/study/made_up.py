"""Records without any training behind them: hits drawn at random, so that a report can be made of them."""

from pathlib import Path
from typing import Any

import numpy as np

from training.study import strata
from training.study.records import (
    BASELINES,
    KEPT_RANK,
    DatasetRecord,
    ListFigures,
    RunRecord,
    dataset_path,
    run_path,
    write,
)

SHA = "5ba" + "0" * 61
ENVIRONMENT = {"cpu": "a processor", "threads": 1, "torch": "2.13.0", "numpy": "2.4.6"}


def dataset(name: str = "beauty", num_users: int = 400, num_items: int = 60, seed: int = 0) -> DatasetRecord:
    generator = np.random.default_rng(seed)
    counts = np.floor(60 / np.arange(1, num_items + 1)).astype(int)
    counts[-5:] = 0
    lengths = generator.choice([2, 3, 4, 5, 8, 20], num_users)
    return DatasetRecord(
        name=name,
        data={
            "sha256": SHA,
            "users": num_users,
            "items": num_items,
            "rows_kept": int(lengths.sum()) + 2 * num_users,
            "train_users": num_users,
        },
        event="next_new_item",
        history_length=lengths.tolist(),
        target_count=counts[generator.integers(num_items, size=num_users)].tolist(),
        impossible=[3, 17],
        training_counts=counts.tolist(),
    )


def run(data: DatasetRecord, filtering: bool, seed: int = 1, hits: float = 0.1, **changes: Any) -> RunRecord:
    """A run that hits so large a share of the users, drawn by seed and side; half of the hits are alike on both."""
    fields: dict[str, Any] = {"model": "sasrec", "variant": ""} | changes
    shared = np.random.default_rng(seed).random(data.num_users)
    own = np.random.default_rng([seed, filtering, len(fields["variant"])]).random(data.num_users)
    users = np.flatnonzero(np.where(np.arange(data.num_users) % 2, shared, own) < 2 * hits)
    ranks = np.random.default_rng([seed, filtering]).integers(1, KEPT_RANK + 1, len(users))
    return RunRecord(
        **{
            "dataset": data.name,
            "data_sha256": data.data["sha256"],
            "filtering": filtering,
            "seed": seed,
            "config": {"model": {"filtering": filtering}, "training": {"seed": seed, "loss": "sampled"}},
            "commit": "0123456789ab",
            "environment": ENVIRONMENT,
            "seconds": {"training": 100.0, "total": 110.0},
            "parameters": 1000,
            "best_epoch": 2,
            "curve": [
                {"epoch": epoch, "loss": 5 / epoch, "val_ndcg@10": 0.01 * epoch, "val_hr@10": 0.02 * epoch}
                for epoch in (1, 2, 3)
            ],
            "validation": {"hr@10": 0.11, "ndcg@10": 0.06},
            "nll": 7.5,
            "hit_users": users.tolist(),
            "hit_ranks": ranks.tolist(),
            "lists": lists(data, rare=0.12 if filtering else 0.1),
            "filter": learned() if filtering else None,
            **fields,
        }
    )


def lists(data: DatasetRecord, rare: float) -> dict[str, ListFigures]:
    exposure = {"0": 0.0, "1–2": rare / 2, "3–5": rare / 2, "6–20": 0.5 - rare, ">20": 0.5}
    groups = {"all": data.num_users}
    members = strata.members(np.array(data.history_length), strata.USER_STRATA)
    groups |= {name: int(users.sum()) for name, users in members.items() if users.any()}
    return {
        name: ListFigures(users=users, coverage=0.6, mean_popularity=17.5, exposure=exposure)
        for name, users in groups.items()
    }


def learned() -> dict[str, Any]:
    def gain(value: float) -> dict[str, Any]:
        return {"mean": value, "interval": [value - 0.01, value + 0.01], "layers": []}

    return {
        "gain": {"BOS": gain(0.5), "1–2": gain(0.6), "101+": gain(0.8)},
        "gain_by_history_length": {"0": gain(0.5), "1": gain(0.7)},
        "item_precision": {
            "1–2": {"items": 20, "quartiles": [1.5, 2.0, 3.0]},
            ">20": {"items": 2, "quartiles": [0.2, 0.3, 0.4]},
        },
    }


def noise(share: float, filtering: bool) -> dict[str, float]:
    figures = {
        "share": share,
        "replaced_events": 100.0,
        "list_confidence": 0.1 - share / 10,
        "list_confidence_true": 0.1,
    }
    figures |= {"kriging_weight_replaced": 0.02, "kriging_weight_other": 0.04}
    return figures | ({"precision_replaced": 0.5, "precision_other": 1.0} if filtering else {})


def baseline(data: DatasetRecord, model: str) -> RunRecord:
    none: dict[str, Any] = {"config": {}, "curve": [], "best_epoch": 0, "parameters": 0, "filter": None, "nll": None}
    return run(data, False, seed=0, hits=0.03, model=model, **none)


def whole_study(num_users: int = 400) -> tuple[list[DatasetRecord], list[RunRecord]]:
    """Every kind of record: recipes with three seeds and with one, baselines, controls, noise."""
    sets = [dataset("beauty", num_users), dataset("toys", num_users, seed=1), dataset("ml-100k", 50, seed=2)]
    runs = [baseline(data, model) for data in sets for model in BASELINES]
    for data in sets:
        for seed in (1,) if data.name == "ml-100k" else (1, 2, 3):
            runs += [run(data, filtering, seed, 0.1 + 0.02 * filtering) for filtering in (False, True)]
    for variant in ("shuffled-precision", "no-gain"):
        runs.append(run(sets[0], True, 1, variant=variant, filter=None))
    for variant, share in (("test-noise-05", 0.05), ("test-noise-40", 0.4)):
        for filtering in (False, True):
            runs.append(run(sets[0], filtering, 1, 0.08, variant=variant, noise=noise(share, filtering), filter=None))
    return sets, runs


def keep(folder: Path, sets: list[DatasetRecord], runs: list[RunRecord]) -> Path:
    for data in sets:
        write(dataset_path(folder, data.name), data)
    for made in runs:
        write(run_path(folder, made.name), made)
    return folder
