"""Strata against loops over the users."""

import numpy as np

from tests.training.study.made_up import dataset
from training.study import strata


def test_every_user_is_in_one_stratum_of_each_division_as_a_loop_says():
    data = dataset(num_users=200)

    groups = strata.groups(data)

    bounds = {"≤3": (0, 3), "4–5": (4, 5), "6–10": (6, 10), ">10": (11, 10**9)}
    for name, (low, high) in bounds.items():
        expected = [low <= length <= high for length in data.history_length]
        assert groups["users by training events"][name].tolist() == expected
    bounds = {"0": (0, 0), "1–2": (1, 2), "3–5": (3, 5), "6–20": (6, 20), ">20": (21, 10**9)}
    for name, (low, high) in bounds.items():
        expected = [low <= count <= high for count in data.target_count]
        assert groups["targets by training uses"][name].tolist() == expected
    for division in ("users by training events", "targets by training uses", "targets by quartile"):
        assert np.sum(list(groups[division].values()), axis=0).tolist() == [1] * 200


def test_headline_groups_are_targets_of_at_most_five_uses_and_users_of_at_most_three_events():
    data = dataset(num_users=200)

    headline = strata.groups(data)["headline"]

    assert headline["rare target items"].tolist() == [count <= 5 for count in data.target_count]
    assert headline["cold users"].tolist() == [length <= 3 for length in data.history_length]


def test_quartiles_hold_a_quarter_each_rarest_first_and_keep_equal_counts_together():
    apart = strata.quartiles(np.arange(100)[::-1])
    together = strata.quartiles(np.array([1] * 60 + [5] * 40))

    assert [users.sum() for users in apart.values()] == [25, 25, 25, 25]
    assert apart["Q0"].nonzero()[0].tolist() == list(range(75, 100))
    assert {name: int(users.sum()) for name, users in together.items()} == {"Q0": 60, "Q1": 0, "Q2": 40, "Q3": 0}
