"""The report's tables against loops over the users and numbers worked out by hand."""

import math
from typing import Any

import pytest

from tests.training.study.made_up import dataset, lists, noise, run, whole_study
from training.study import tables
from training.study.comparisons import Study, study_of
from training.study.layout import Estimate, Table
from training.study.records import RunRecord

DATA = dataset("beauty", 400)


def cells(table: Table, **wanted: Any) -> dict[str, Any]:
    """The one row with these cells."""
    rows = [row.cells for row in table.rows if all(row.cells[name] == value for name, value in wanted.items())]
    assert len(rows) == 1, f"{len(rows)} rows of {table.key} have {wanted}"
    return dict(rows[0])


def study(*runs: RunRecord) -> Study:
    return study_of({"beauty": DATA}, list(runs))


def pair(**changes: Any) -> list[RunRecord]:
    return [run(DATA, filtering, **changes) for filtering in (False, True)]


def place(made: RunRecord, user: int) -> float:
    """Rank of a user's target by the record's own lists."""
    return made.hit_ranks[made.hit_users.index(user)] if user in made.hit_users else math.inf


def test_the_main_table_has_the_means_over_users_and_seeds():
    off, on = ([run(DATA, filtering, seed) for seed in (1, 2, 3)] for filtering in (False, True))

    table = tables.main(study(*off, *on))

    for side, runs in (("off", off), ("on", on)):
        ranks = [place(made, user) for made in runs for user in range(400)]
        hits = sum(rank <= 10 for rank in ranks) / 1200
        gains = sum(1 / math.log2(1 + rank) for rank in ranks if rank <= 10) / 1200
        assert cells(table, metric="HR@10")[side] == pytest.approx(hits)
        assert cells(table, metric="NDCG@10")[side] == pytest.approx(gains)
    by_seed = [
        sum(place(b, u) <= 10 for u in range(400)) - sum(place(a, u) <= 10 for u in range(400))
        for a, b in zip(off, on, strict=True)
    ]
    row = cells(table, metric="HR@10")
    assert (row["seeds"], row["seeds above 0"]) == (3, sum(gain > 0 for gain in by_seed))
    assert row["difference"].value == pytest.approx(sum(by_seed) / 1200)
    assert row["change"] == pytest.approx(row["difference"].value / row["off"])


def test_baselines_stand_beside_the_models_where_there_are_records():
    sets, runs = whole_study()
    with_them = tables.main(study_of({data.name: data for data in sets}, runs))
    without = tables.main(study(*pair()))

    popularity = next(made for made in runs if made.model == "popularity" and made.dataset == "beauty")
    hits = sum(rank <= 10 for rank in popularity.hit_ranks) / 400
    assert cells(with_them, **{"data set": "beauty", "metric": "HR@10"})["popularity"] == pytest.approx(hits)
    assert cells(without, metric="HR@10")["popularity"] is None


def test_sizes_and_ceilings_of_strata_are_those_of_a_loop():
    headline = tables.headline(study(*pair()))
    (strata,) = [table for table in tables.all_tables(study(*pair())) if table.key.startswith("strata")]

    rare = [user for user in range(400) if DATA.target_count[user] <= 5]
    possible = [user for user in rare if user not in DATA.impossible]
    row = cells(headline, group="rare target items", metric="HR@10")
    assert (row["users"], row["ceiling"]) == (len(rare), pytest.approx(len(possible) / len(rare)))
    middle = [user for user in range(400) if 6 <= DATA.history_length[user] <= 10]
    row = cells(strata, division="users by training events", stratum="6–10")
    on = run(DATA, True)
    assert row["users"] == len(middle)
    assert row["HR@10 on"] == pytest.approx(sum(place(on, user) <= 10 for user in middle) / len(middle))


def test_a_stratum_without_users_is_left_out():
    data = DATA.model_copy(update={"history_length": [20] * 400})
    made = study_of({"beauty": data}, [run(data, filtering) for filtering in (False, True)])

    (table,) = [table for table in tables.all_tables(made) if table.key.startswith("strata")]

    divisions = [row.cells["stratum"] for row in table.rows if row.cells["division"] == "users by training events"]
    assert divisions == [">10"]
    assert [row.cells["group"] for row in tables.headline(made).rows] == ["rare target items"] * 2


def hits(users: list[int]) -> dict[str, Any]:
    return {"hit_users": users, "hit_ranks": [1.0] * len(users)}


@pytest.mark.parametrize(
    ("rare_on", "gains", "words"),
    [
        (0.2, True, "gain at rare items, and they are listed more often: this may be a shift of popularity"),
        (0.1, True, "gain at rare items, and they are listed as often: no shift of popularity"),
        (0.05, False, "no difference shown at rare items, and they are listed less often"),
    ],
)
def test_the_words_tell_a_gain_at_rare_items_from_listing_more_of_them(rare_on: float, gains: bool, words: str):
    rare = [user for user in range(400) if DATA.target_count[user] <= 5]
    off = run(DATA, False, **hits(rare[:20]), lists=lists(DATA, rare=0.1))
    on = run(DATA, True, **hits(rare[: 80 if gains else 20]), lists=lists(DATA, rare=rare_on))

    row = cells(tables.shift(study(off, on)), model="SASRec")

    assert row["in words"] == f"{words}; only 400 users, no claim"
    # 20 hits of rare targets in the tenth of 4,000 places that rare items hold.
    assert row["hits per 1,000 off"] == pytest.approx(1000 * 20 / (0.1 * 4000))


def test_gain_against_sparsity_is_ordered_and_says_what_so_few_data_sets_can_tell():
    names = ("beauty", "toys", "sports")
    sets = {name: dataset(name, 2000, num_items=20 * (3 - index), seed=index) for index, name in enumerate(names)}
    runs = []
    # The sparser the data, the larger the gain: hits of filtering on, off always 100.
    for name, extra in zip(names, (60, 40, 20), strict=True):
        for seed in (1, 2, 3):
            runs.append(run(sets[name], False, seed, **hits(list(range(100)))))
            runs.append(run(sets[name], True, seed, **hits(list(range(100 + extra)))))

    table = tables.sparsity(study_of(sets, runs))

    assert [row.cells["data set"] for row in table.rows] == ["beauty", "toys", "sports"]
    relative = [row.cells["HR@10"] for row in table.rows]
    assert [one.value for one in relative if isinstance(one, Estimate)] == pytest.approx([0.6, 0.4, 0.2])
    assert "−1.00 over 3 data sets" in table.notes[1]
    assert "p = 0.33" in table.notes[1]  # two of 3! orders are perfect


def test_the_data_sets_that_carry_a_claim_are_told_together():
    sets = {name: dataset(name, users, seed=users) for name, users in (("beauty", 2000), ("toys", 2500), ("tiny", 300))}
    runs = []
    for name, extra in (("beauty", 60), ("toys", 20), ("tiny", 100)):
        for seed in (1, 2, 3):
            runs.append(run(sets[name], False, seed, **hits(list(range(100)))))
            runs.append(run(sets[name], True, seed, **hits(list(range(100 + extra)))))

    row = cells(tables.pooled(study_of(sets, runs)), group="all users", metric="HR@10")

    assert (row["model"], row["data sets"], row["in words"]) == ("SASRec", 2, "better")
    assert row["change"].value == pytest.approx((0.6 + 0.2) / 2)  # whatever their sizes, and without the small one
    assert 0 < row["change"].low < 0.4 < row["change"].high < 0.6


def test_one_data_set_that_carries_a_claim_is_not_told_together():
    data = dataset("beauty", 2000)
    runs = [run(data, filtering, seed) for filtering in (False, True) for seed in (1, 2, 3)]

    assert tables.pooled(study_of({"beauty": data}, runs)).rows == ()


def test_targets_say_by_how_much_they_are_missed_and_how_many_seeds_are_lacking():
    runs = [run(DATA, False, seed, **hits(list(range(35)))) for seed in (1, 2)]

    table = tables.targets(study(*runs))

    wanted = {"data set": "beauty", "model": "SASRec"}
    assert cells(table, **wanted, metric="HR@10")["in words"] == "missed by 0.0025; 2 of 3 seeds"  # 35/400 of 0.090
    assert cells(table, **wanted, metric="NDCG@10")["in words"] == "reached; 2 of 3 seeds"
    assert cells(table, **{"data set": "toys", "metric": "HR@10"})["in words"] == "no record"


def test_a_control_stands_against_the_full_filter_and_against_none():
    off, on = run(DATA, False, **hits(list(range(30)))), run(DATA, True, **hits(list(range(60))))
    changed = run(DATA, True, variant="shuffled-precision", **hits(list(range(30))))

    row = cells(tables.controls(study(off, on, changed)), metric="HR@10")

    assert (row["off"], row["full"], row["changed filter"]) == (30 / 400, 60 / 400, 30 / 400)
    assert row["changed"] == "τ shuffled across items"
    assert row["against full"].value == pytest.approx(-30 / 400)
    assert row["full, in words"] == "worse; 1 seed, no claim"
    assert row["against off"] == Estimate(0, 0, 0)


def test_a_control_without_the_full_filters_record_says_so():
    row = cells(tables.controls(study(run(DATA, True, variant="no-gain"))), metric="HR@10")

    assert (row["against full"], row["full, in words"]) == (None, "no record to compare with")


def test_noise_stands_beside_the_same_seeds_without_noise_by_rising_share():
    runs = [*pair(seed=1), *pair(seed=2)]
    for share, variant in ((0.4, "test-noise-40"), (0.05, "test-noise-05")):
        runs += [run(DATA, side, variant=variant, noise=noise(share, side)) for side in (False, True)]

    table = tables.noise(study(*runs))

    assert [row.cells["share"] for row in table.rows] == [0.0, 0.05, 0.4]
    clean, _, most = (row.cells for row in table.rows)
    assert clean["off"] == pytest.approx(sum(rank <= 10 for rank in run(DATA, False, 1).hit_ranks) / 400)
    assert (clean["confidence on"], clean.get("weight on")) == (pytest.approx(0.1), None)
    assert (most["confidence on"], most["weight on"]) == (pytest.approx(0.06), pytest.approx(0.5))
    assert (most["precision off"], most["precision on"]) == (None, pytest.approx(0.5))


def test_every_row_of_runs_comes_from_the_record_that_it_names():
    sets, runs = whole_study(2000)

    made = {table.key: table for table in tables.all_tables(study_of({data.name: data for data in sets}, runs))}

    assert sorted(str(row.cells["record"]) for row in made["runs"].rows) == sorted(one.name for one in runs)
    names = {one.name for one in runs}
    for table in made.values():
        if table.key not in ("datasets", "targets"):
            assert table.rows
            assert all(row.records and set(row.records) <= names for row in table.rows), table.key
    assert len({table.key for table in made.values()}) == len(made)
