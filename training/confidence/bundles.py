"""The confidences of a bundle, judged on the test users of its log, beside other bundles'."""

import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from model.backbone import Backbone
from model.bundle import Bundle, BundleError
from model.weights import load_model
from training.confidence.judge import PLAIN, Scoring, judge
from training.confidence.paid import ensemble as ensemble_of
from training.confidence.paid import mc_dropout
from training.confidence.records import ConfidenceRecord
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
        dropout_passes: of MC dropout, of `plain` if there is one, else of the bundle; 0: no such row.
        report: receives the progress.

    Raises:
        BundleError: a bundle is of another catalogue than the first.
        DataError: the log cannot be read, or is none that the bundle was trained on.
    """
    begun = time.monotonic()
    require_one_catalogue(bundle, [*ensemble, *([] if plain is None else [plain])])
    report.stage(f"reading {data.path}")
    prepared = prepare_for(bundle, data)
    model = load_model(bundle)
    event, max_len = prepared.event, bundle.manifest.model.max_len

    def scoring(scored: Backbone) -> Scoring:
        return lambda histories: score_users(scored, histories, event)

    def by(scorer: Scorer, histories: Histories) -> Iterator[ScoredUsers]:
        return score_users_by(scorer, histories, event, max_len)

    systems: dict[str, Scoring] = {}
    alone = model if plain is None else load_model(plain)
    if plain is not None:
        systems[PLAIN] = scoring(alone)
    if dropout_passes:
        systems[f"MC dropout, {dropout_passes} passes"] = partial(by, mc_dropout(alone, dropout_passes))
    if ensemble:
        systems[f"ensemble of {len(ensemble)}"] = partial(by, ensemble_of([load_model(one) for one in ensemble]))
    report.stage(f"scoring {len(prepared.split.test):,} test users by the model and {len(systems)} other systems")
    parts = judge(scoring(model), bundle.calibration, prepared, systems)
    return ConfidenceRecord(
        dataset=dataset,
        data={**prepared.log.summary(), **prepared.split.summary()},
        model=bundle.manifest.name,
        models={
            "served": bundle.manifest.version,
            **({PLAIN: plain.manifest.version} if plain is not None else {}),
            **({"ensemble": [one.manifest.version for one in ensemble]} if ensemble else {}),
        },
        commit=commit(),
        environment={"cpu": cpu_model(), "threads": torch.get_num_threads(), **versions()},
        seconds=round(time.monotonic() - begun, 1),
        **parts,
    )


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
