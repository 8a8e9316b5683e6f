"""A bundle's first answers, judged on the held-out users of its log."""

import time

import torch

from model.bundle import Bundle, BundleError
from model.weights import load_model
from training.cold.judge import PLAIN, Judged, judge
from training.cold.records import ColdRecord
from training.confidence.bundles import origin, require_log, require_one_log, require_plain
from training.evaluate import score_users
from training.events import DataConfig
from training.pipeline import commit, cpu_model, prepare_for, versions
from training.progress import Reporter
from training.tables import DataError


def judge_bundle(bundle: Bundle, data: DataConfig, dataset: str, plain: Bundle | None, report: Reporter) -> ColdRecord:
    """Judge what a bundle answers to the held-out users of its log at their start.

    Args:
        bundle: trained with the split `users`.
        data: its log.
        dataset: what the log is called.
        plain: a model without filtering, trained on the same log and split.
        report: receives the progress.

    Raises:
        BundleError: a bundle was trained with another split, so that it knows every user; `plain` filters; or they
            learned different logs.
        DataError: the log cannot be read, is another one than the bundle learned, or one of the halves of its held-out
            users is empty.
    """
    begun = time.monotonic()
    others = [] if plain is None else [plain]
    for one in (bundle, *others):
        if (split := one.manifest.data["split"]) != "users":
            raise BundleError(
                f"{one.folder}: was trained with split {split}, which holds no user out: every user is known to it;"
                " train one with `bft-train fit … split=users`"
            )
    if plain is not None:
        require_plain(plain)
    require_one_log(bundle, others)
    report.stage(f"reading {data.path}")
    prepared = prepare_for(bundle, data)
    require_log(bundle, data, prepared)
    if len(prepared.split.validation) == 0:
        raise DataError(f"{data.path}: none of its users is among the held-out ones that a default is chosen by")

    def judged(one: Bundle) -> Judged:
        model = load_model(one)
        return Judged(lambda histories: score_users(model, histories, prepared.event), one.calibration)

    report.stage(
        f"asking {len(prepared.split.validation):,} validation users and {len(prepared.split.test):,} test users"
    )
    parts = judge(judged(bundle), judged(plain) if plain else None, prepared)
    return ColdRecord(
        dataset=dataset,
        data={**prepared.log.summary(), **prepared.split.summary()},
        model=bundle.manifest.name,
        models={"model": origin(bundle), **({PLAIN: origin(plain)} if plain else {})},
        commit=commit(),
        environment={"cpu": cpu_model(), "threads": torch.get_num_threads(), **versions()},
        seconds=round(time.monotonic() - begun, 1),
        **parts,
    )
