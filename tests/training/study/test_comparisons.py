"""Which runs are paired, and what a pair may claim."""

import pytest

from tests.training.study.made_up import baseline, dataset, noise, run
from training.study.comparisons import control_of, noise_of, study_of
from training.study.controls import SHUFFLED, TEST_NOISE
from training.study.records import RunRecord
from training.study.suite import SUITES

LARGE, SMALL = dataset("beauty", 2000), dataset("lastfm", 60)


def test_runs_are_paired_by_data_model_variant_and_seed():
    runs = [run(LARGE, filtering, seed) for filtering in (False, True) for seed in (3, 1, 2)]
    runs += [run(LARGE, filtering, 1, variant="quick") for filtering in (False, True)]
    runs += [baseline(LARGE, "popularity"), run(LARGE, True, 1, variant="no-gain")]

    study = study_of({"beauty": LARGE}, runs)

    assert [(one.label, one.seeds) for one in study.comparisons] == [("SASRec", (1, 2, 3)), ("SASRec, quick", (1,))]
    for comparison in study.comparisons:
        for off, on in zip(comparison.off, comparison.on, strict=True):
            assert (off.filtering, on.filtering, off.seed) == (False, True, on.seed)
    assert study.unpaired == []


def test_a_run_without_partner_is_in_no_comparison_and_is_named():
    runs = [run(LARGE, False, 1), run(LARGE, True, 1), run(LARGE, True, 2), run(SMALL, False, 1)]

    study = study_of({"beauty": LARGE, "lastfm": SMALL}, runs)

    assert [(one.dataset.name, one.seeds) for one in study.comparisons] == [("beauty", (1,))]
    assert study.unpaired == ["beauty-sasrec-on-s2", "lastfm-sasrec-off-s1"]


def settings(filtering: bool, seed: int, loss: str) -> dict[str, object]:
    return {"model": {"filtering": filtering}, "training": {"seed": seed, "loss": loss}}


@pytest.mark.parametrize(
    ("runs", "caveat"),
    [
        ([run(LARGE, filtering, seed) for filtering in (False, True) for seed in (1, 2, 3)], ""),
        ([run(LARGE, filtering, seed) for filtering in (False, True) for seed in (1, 2)], "2 seeds, no claim"),
        ([run(LARGE, filtering) for filtering in (False, True)], "1 seed, no claim"),
        ([run(SMALL, filtering, seed) for filtering in (False, True) for seed in (1, 2, 3)], "only 60 users, no claim"),
        (
            [
                run(LARGE, filtering, config=settings(filtering, 1, loss))
                for filtering, loss in ((False, "full"), (True, "sampled"))
            ],
            "settings differ (training.loss), no claim",
        ),
    ],
)
def test_few_seeds_few_users_and_settings_that_differ_carry_no_claim(runs: list[RunRecord], caveat: str):
    study = study_of({"beauty": LARGE, "lastfm": SMALL}, runs)

    assert [comparison.caveat for comparison in study.comparisons] == [caveat]
    words = study.comparisons[0].in_words(study.comparisons[0].overall["HR@10"])
    assert words.endswith(caveat)


def tuned(filtering: bool, seed: int, dropout: float) -> dict[str, object]:
    return {"model": {"filtering": filtering, "dropout": dropout}, "training": {"seed": seed}}


def test_what_was_tuned_may_differ_between_the_sides_but_not_within_one():
    seeds = (1, 2, 3)
    off = [run(LARGE, False, seed, config=tuned(False, seed, 0.3)) for seed in seeds]
    on = [run(LARGE, True, seed, config=tuned(True, seed, 0.4)) for seed in seeds]
    mixed = [run(LARGE, True, seed, config=tuned(True, seed, 0.3 + 0.1 * (seed == 1))) for seed in seeds]

    apart = study_of({"beauty": LARGE}, [*off, *on]).comparisons[0]
    unsettled = study_of({"beauty": LARGE}, [*off, *mixed]).comparisons[0]

    assert (apart.caveat, apart.own_settings) == ("", ("model.dropout 0.3 off, 0.4 on",))
    assert unsettled.caveat == "settings differ (model.dropout), no claim"


def test_a_record_older_than_a_setting_has_its_default():
    new = {"model": {"filtering": True}, "training": {"seed": 1, "refit_epochs": 0}}
    runs = [run(LARGE, False, config=settings(False, 1, "full")), run(LARGE, True, config=new)]

    assert study_of({"beauty": LARGE}, runs).comparisons[0].differing_settings == ()


def test_comparisons_that_may_carry_a_claim_come_first():
    runs = [run(SMALL, filtering) for filtering in (False, True)]
    runs += [run(LARGE, filtering, model="bert4rec") for filtering in (False, True)]
    runs += [run(LARGE, filtering, seed, model="hstu") for filtering in (False, True) for seed in (1, 2, 3)]

    study = study_of({"beauty": LARGE, "lastfm": SMALL}, runs)

    assert [(one.model, one.dataset.name) for one in study.comparisons] == [
        ("hstu", "beauty"),
        ("bert4rec", "beauty"),
        ("sasrec", "lastfm"),
    ]


def test_noise_is_kept_apart_from_the_recipes():
    runs = [run(LARGE, side, variant="test-noise-05", noise=noise(0.05, side)) for side in (False, True)]

    study = study_of({"beauty": LARGE}, runs)

    assert (study.comparisons, [one.variant for one in study.noise]) == ([], ["test-noise-05"])


def test_every_variant_of_the_suites_is_known_as_what_it_is():
    variants = {run.variant for run in SUITES["full"]} | {SHUFFLED, *TEST_NOISE}

    unknown = [one for one in variants if control_of(one) is None and noise_of(one) is None]

    assert unknown == [""]


@pytest.mark.parametrize(
    ("variant", "control", "disturbance"),
    [
        ("", None, None),
        ("quick", None, None),
        ("no-gain", ("", "no-gain"), None),
        ("quick-shuffled-precision", ("quick", "shuffled-precision"), None),
        ("training-noise-40", None, ("", "training-noise")),
        ("quick-test-noise-05", None, ("quick", "test-noise")),
        ("test-noise-many", None, None),
    ],
)
def test_the_names_of_controls_and_noise_are_told_from_those_of_recipes(
    variant: str, control: tuple[str, str] | None, disturbance: tuple[str, str] | None
):
    assert control_of(variant) == control
    assert noise_of(variant) == disturbance
