"""Strata of users and of target items, by training counts alone.

U test users
"""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from training.study.records import DatasetRecord

USER_STRATA: Mapping[str, tuple[int, int | None]] = {"≤3": (0, 3), "4–5": (4, 5), "6–10": (6, 10), ">10": (11, None)}
"""Users by training events: lowest and highest, both included."""
ITEM_STRATA: Mapping[str, tuple[int, int | None]] = {
    "0": (0, 0),
    "1–2": (1, 2),
    "3–5": (3, 5),
    "6–20": (6, 20),
    ">20": (21, None),
}
"""Items by training uses."""
COLD_USERS = ("≤3",)
"""Of `USER_STRATA`: whom the study calls cold."""
RARE_ITEMS = ("0", "1–2", "3–5")
"""Of `ITEM_STRATA`: what the study calls rare."""
QUARTILES = ("Q0", "Q1", "Q2", "Q3")
"""Of test users by their target's training uses, rarest first; equal counts stay together."""


def members(values: np.ndarray, strata: Mapping[str, tuple[int, int | None]]) -> dict[str, np.ndarray]:
    """Name of the stratum → which of the values lie in it, bool."""
    return {
        name: (values >= low) & (values <= (np.iinfo(np.int64).max if high is None else high))
        for name, (low, high) in strata.items()
    }


def quartiles(target_count: np.ndarray) -> dict[str, np.ndarray]:
    """The users of each quartile, (U,) bool: about a quarter each, less where many targets share a count."""
    edges = [-1, *np.quantile(target_count, [0.25, 0.5, 0.75], method="inverted_cdf").tolist(), np.inf]
    return {
        name: (target_count > low) & (target_count <= high)
        for name, (low, high) in zip(QUARTILES, pairwise(edges), strict=True)
    }


def groups(dataset: DatasetRecord) -> dict[str, dict[str, np.ndarray]]:
    """Every division of the test users: its title → stratum → (U,) bool.

    The first, `all`, has one stratum; `headline` has the two that the study's claims are about.
    """
    length, count = np.array(dataset.history_length), np.array(dataset.target_count)
    by_user, by_item = members(length, USER_STRATA), members(count, ITEM_STRATA)
    return {
        "all": {"all users": np.ones(len(length), bool)},
        "headline": {
            "rare target items": np.any([by_item[name] for name in RARE_ITEMS], axis=0),
            "cold users": np.any([by_user[name] for name in COLD_USERS], axis=0),
        },
        "users by training events": by_user,
        "targets by training uses": by_item,
        "targets by quartile": quartiles(count),
    }
