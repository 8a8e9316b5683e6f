"""The confidences of a bundle, judged on the test users of its log, beside other bundles'."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

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
from training.pipeline import Prepared, commit, cpu_model, prepare_for, versions
from training.progress import Reporter
from training.splits import Histories
from training.tables import DataError


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
        BundleError: a bundle learned from another log or split than the first, is not what it is to stand for, was
            refitted where another was not, or what a refitted one was calibrated by is missing.
        DataError: the log cannot be read, or is not the one that the bundle was trained on.
    """
    begun = time.monotonic()
    others = [*ensemble, *(one for one in (plain, other_seed) if one is not None)]
    require_one_log(bundle, others)
    if plain is not None:
        require_plain(plain)
    if len({one.manifest.version for one in ensemble}) < len(ensemble):
        raise BundleError("a bundle stands twice in the ensemble; each --ensemble needs a seed of its own")
    if len({one.manifest.model.max_len for one in ensemble}) > 1:
        raise BundleError("the models of the ensemble read windows of different model.max_len; train all with one")
    if other_seed is not None and other_seed.manifest.version == bundle.manifest.version:
        raise BundleError(f"{other_seed.folder}: is the bundle that is judged; --other-seed is trained with another")
    for other in others:
        if _refitted(other) != _refitted(bundle):
            raise BundleError(
                f"{other.folder} and {bundle.folder}: one of them has learned the validation events, the other has not;"
                " train both with the same training.refit_epochs"
            )
    report.stage(f"reading {data.path}")
    prepared = prepare_for(bundle, data)
    require_log(bundle, data, prepared)
    learned = prepared.with_validation_learned() if _refitted(bundle) else prepared
    event = prepared.event

    def by(scorer: Scorer, max_len: int, histories: Histories) -> Iterator[ScoredUsers]:
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
        dropped = system(
            [plain or bundle],
            lambda models: partial(by, mc_dropout(models[0], dropout_passes), models[0].config.max_len),
        )
        systems[f"MC dropout, {dropout_passes} passes"] = dropped
    if ensemble:
        several = system(ensemble, lambda models: partial(by, ensemble_of(models), models[0].config.max_len))
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
            "served": origin(bundle),
            **({PLAIN: origin(plain)} if plain is not None else {}),
            **({"MC dropout": origin(plain or bundle)} if dropout_passes else {}),
            **({"other seed": origin(other_seed)} if other_seed is not None else {}),
            **({"ensemble": [origin(one) for one in ensemble]} if ensemble else {}),
        },
        commit=commit(),
        environment={"cpu": cpu_model(), "threads": torch.get_num_threads(), **versions()},
        seconds=round(time.monotonic() - begun, 1),
        altered=altered_histories(judged, test),
        by_catalogue_item=catalogue_confidence(judged, test),
        reliability=reliability_by_events(judged.model, test, event) if bundle.manifest.model.filtering else (),
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


def origin(bundle: Bundle) -> dict[str, Any]:
    """What a record says of a model, so that it can be trained again."""
    training = bundle.manifest.training
    return {
        "version": bundle.manifest.version,
        **{key: training.get(key) for key in ("config", "commit", "best_epoch")},
    }


def _refitted(bundle: Bundle) -> bool:
    return bundle.manifest.calibrated_by is not None


def require_plain(bundle: Bundle) -> None:
    """That a bundle is fit to stand for a model without filtering.

    Raises:
        BundleError: it filters.
    """
    if bundle.manifest.model.filtering:
        raise BundleError(f"{bundle.folder}: filters; --plain is a model that was trained with model.filtering=off")


def require_one_catalogue(bundle: Bundle, others: Sequence[Bundle]) -> None:
    """That bundles number the same items alike.

    Raises:
        BundleError: one of the others is of another catalogue.
    """
    for other in others:
        if _catalogue(other) != _catalogue(bundle):
            raise BundleError(f"{other.folder}: knows other items than {bundle.folder}; train both on one log")


def require_one_log(bundle: Bundle, others: Sequence[Bundle]) -> None:
    """That bundles learned the same part of the same log, about the same event.

    Raises:
        BundleError: one of the others did not.
    """
    require_one_catalogue(bundle, others)
    for other in others:
        if (other.manifest.data["sha256"], other.manifest.data["split"]) != (
            bundle.manifest.data["sha256"],
            bundle.manifest.data["split"],
        ):
            raise BundleError(
                f"{other.folder}: learned from another log, or another split of it, than {bundle.folder}, so that it"
                " may have seen what the other is judged on; train both alike"
            )
        if other.manifest.event != bundle.manifest.event:
            raise BundleError(
                f"{other.folder}: its confidences are of {other.manifest.event}, those of {bundle.folder} of"
                f" {bundle.manifest.event}; train both with the same `event`"
            )


def require_log(bundle: Bundle, data: DataConfig, prepared: Prepared) -> None:
    """That a log is the one that a bundle was trained on.

    Raises:
        DataError: it is another one, of which the bundle may have learned the test events.
    """
    if prepared.log.sha256 != bundle.manifest.data["sha256"]:
        raise DataError(
            f"{data.path}: not the log that {bundle.folder} was trained on (sha256 {prepared.log.sha256[:12]}…, there"
            f" {bundle.manifest.data['sha256'][:12]}…), so that the model may have learned what it would be judged on;"
            " give the log of the training, or train again"
        )


def _catalogue(bundle: Bundle) -> tuple[str, int]:
    return bundle.manifest.lineage, bundle.manifest.num_items
