"""The confidences of a bundle, judged on the test users of its log, beside other bundles'."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from model.backbone import Backbone
from model.bundle import Bundle, BundleError, open_bundle
from model.weights import load_model
from training.confidence.judge import PLAIN, Scoring, System, judge
from training.confidence.paid import ensemble as ensemble_of
from training.confidence.paid import mc_dropout
from training.confidence.records import ConfidenceRecord
from training.confidence.sanity import (
    Asked,
    altered_histories,
    catalogue_confidence,
    reliability_by_events,
    seed_agreement,
)
from training.evaluate import ScoredUsers, Scorer, score_users, score_users_by
from training.events import DataConfig
from training.pipeline import commit, cpu_model, prepare_for, versions
from training.progress import Reporter
from training.splits import Histories


def judge_bundle(
    bundle: Bundle,
    data: DataConfig,
    dataset: str,
    plain: Bundle | None,
    ensemble: Sequence[Bundle],
    other_seed: Bundle | None,
    dropout_passes: int,
    report: Reporter,
) -> ConfidenceRecord:
    """Judge the confidences of a bundle on its log's test users.

    Args:
        bundle: whose confidences are judged, by its own calibration.
        data: its log.
        dataset: what the log is called.
        plain: a model without filtering, trained on the same log.
        ensemble: models whose mean is a paid confidence; none: no such row.
        other_seed: the same training with another seed, to see whether the two are sure of the same users.
        dropout_passes: of MC dropout, of `plain` if there is one, else of the bundle; 0: no such row.
        report: receives the progress.

    Raises:
        BundleError: a bundle is of another catalogue than the first, one of them was refitted and another not, or what
            a refitted one was calibrated by is missing.
        DataError: the log cannot be read, or is none that the bundle was trained on.
    """
    begun = time.monotonic()
    others = [*ensemble, *(one for one in (plain, other_seed) if one is not None)]
    require_one_catalogue(bundle, others)
    for other in others:
        if _refitted(other) != _refitted(bundle):
            raise BundleError(
                f"{other.folder} and {bundle.folder}: one of them has learned the validation events, the other has not;"
                " train both with the same training.refit_epochs"
            )
    report.stage(f"reading {data.path}")
    prepared = prepare_for(bundle, data)
    learned = prepared.with_validation_learned() if _refitted(bundle) else prepared
    event, max_len = prepared.event, bundle.manifest.model.max_len

    def by(scorer: Scorer, histories: Histories) -> Iterator[ScoredUsers]:
        return score_users_by(scorer, histories, event, max_len)

    def system(bundles: Sequence[Bundle], scorer: Callable[[list[Backbone]], Scoring]) -> System:
        return System(
            *(scorer([load_model(one) for one in some]) for some in ([fitted_by(b) for b in bundles], bundles))
        )

    def alone(models: list[Backbone]) -> Scoring:
        return lambda histories: score_users(models[0], histories, event)

    systems: dict[str, System] = {}
    if plain is not None:
        systems[PLAIN] = system([plain], alone)
    if dropout_passes:
        dropped = system([plain or bundle], lambda models: partial(by, mc_dropout(models[0], dropout_passes)))
        systems[f"MC dropout, {dropout_passes} passes"] = dropped
    if ensemble:
        several = system(ensemble, lambda models: partial(by, ensemble_of(models)))
        systems[f"ensemble of {len(ensemble)}"] = several
    report.stage(f"scoring {len(prepared.split.test):,} test users by the model and {len(systems)} other systems")
    parts = judge(system([bundle], alone), bundle.calibration, prepared, learned, systems)
    report.stage("asking about histories that are nobody's, rare items, and by number of events")
    counts, test = learned.catalog.training_counts, prepared.split.test

    def asked(one: Bundle) -> Asked:
        return Asked(load_model(one), one.calibration, event, counts)

    judged = asked(bundle)
    return ConfidenceRecord(
        dataset=dataset,
        data={**prepared.log.summary(), **prepared.split.summary()},
        model=bundle.manifest.name,
        models={
            "served": bundle.manifest.version,
            **({PLAIN: plain.manifest.version} if plain is not None else {}),
            **({"other seed": other_seed.manifest.version} if other_seed is not None else {}),
            **({"ensemble": [one.manifest.version for one in ensemble]} if ensemble else {}),
        },
        commit=commit(),
        environment={"cpu": cpu_model(), "threads": torch.get_num_threads(), **versions()},
        seconds=round(time.monotonic() - begun, 1),
        altered=altered_histories(judged, test),
        by_catalogue_item=catalogue_confidence(judged, test),
        reliability=reliability_by_events(judged.model, test) if bundle.manifest.model.filtering else (),
        seed_agreement=None if other_seed is None else seed_agreement(judged, asked(other_seed), test),
        **parts,
    )


def fitted_by(bundle: Bundle) -> Bundle:
    """The bundle that a bundle's calibration was fitted by: itself, or the one that lies beside it.

    Raises:
        BundleError: that one is not there, or is damaged.
    """
    version = bundle.manifest.calibrated_by
    if version is None:
        return bundle
    folder = bundle.folder.parent / version
    if not folder.is_dir():
        raise BundleError(
            f"{bundle.folder}: its calibration was fitted by the bundle {version}, which does not lie beside it any"
            " more; without that one nothing can be fitted on validation. Train again with training.refit_epochs"
        )
    return open_bundle(folder)


def _refitted(bundle: Bundle) -> bool:
    return bundle.manifest.calibrated_by is not None


def require_one_catalogue(bundle: Bundle, others: Sequence[Bundle]) -> None:
    """That bundles number the same items alike.

    Raises:
        BundleError: one of the others is of another catalogue.
    """
    for other in others:
        if _catalogue(other) != _catalogue(bundle):
            raise BundleError(f"{other.folder}: knows other items than {bundle.folder}; train both on one log")


def _catalogue(bundle: Bundle) -> tuple[str, int]:
    return bundle.manifest.lineage, bundle.manifest.num_items
