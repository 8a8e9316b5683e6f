"""Which runs the study is made of, and working through them: several at a time, one thread each, none twice."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from training.progress import JsonReporter, Reporter
from training.study import baselines
from training.study.controls import SHUFFLED, TEST_NOISE, TRAINING_NOISE
from training.study.records import BASELINES, run_path
from training.study.runs import Run, carry_out

SEEDS = (1, 2, 3)
LARGE = ("beauty", "toys", "instruments", "sports")
SMALL = ("ml-100k", "lastfm")
"""Too few users for a claim: one seed."""
DATASETS = (*LARGE, *SMALL)
CONTROLLED = ("beauty", "toys")
"""What controls and test-time noise are tried on: SASRec with the first seed."""
NOISY = ("beauty",)
"""What is learned with noise in the training events, which takes a training for each share and side."""
PARTS = {
    "no-kriging-bias": "model.parts.kriging_bias=off",
    "no-gain": "model.parts.gain=off",
    "no-process-noise": "model.parts.process_noise=off",
    "no-jacobian": "model.parts.jacobian=off",
    "no-score-variance": "model.parts.score_variance=off",
    "plain-settings": "model.dropout=0.3",
}
"""Variants with one part of the filter off, or trained as the plain model is, and the override that does it."""


QUICK = ("training.epochs=8", "training.prefixes=off", "training.batch_size=256")
"""Overrides of the quick suite: a few epochs, all predictions of a user from one row."""


def pairs(backbone: str, datasets: Iterable[str], seeds: Iterable[int]) -> list[Run]:
    """Filtering off and on, seed by seed: a suite that is cut short has whole pairs."""
    return [
        Run(dataset, backbone, filtering, seed) for seed in seeds for dataset in datasets for filtering in (False, True)
    ]


def with_extras(run: Run) -> Run:
    """The run, with the test-time variants that the study makes of it."""
    if run.dataset not in CONTROLLED or run.seed != SEEDS[0]:
        return run
    return replace(run, extras=(*((SHUFFLED,) if run.filtering else ()), *TEST_NOISE))


def controls() -> list[Run]:
    """Baselines everywhere; on the controlled data sets one part of the filter off at a time; training noise on one."""
    return [
        *(Run(dataset, baseline, False, 0) for dataset in DATASETS for baseline in BASELINES),
        *(
            Run(dataset, "sasrec", True, SEEDS[0], variant, (override,))
            for dataset in CONTROLLED
            for variant, override in PARTS.items()
        ),
        *(
            Run(dataset, "sasrec", filtering, SEEDS[0], variant, training_noise=share)
            for dataset in NOISY
            for variant, share in TRAINING_NOISE.items()
            for filtering in (False, True)
        ),
    ]


SUITES: dict[str, list[Run]] = {
    "quick": [
        Run(dataset, "sasrec", filtering, 1, "quick", QUICK)
        for dataset in ("beauty", "toys")
        for filtering in (False, True)
    ],
    "full": [
        *map(with_extras, pairs("sasrec", LARGE, SEEDS)),
        *pairs("hstu", ("instruments", "sports"), SEEDS),
        *pairs("hstu", ("beauty",), (1,)),
        *pairs("bert4rec", ("beauty",), (1,)),
        *(run for backbone in ("sasrec", "hstu", "bert4rec") for run in pairs(backbone, SMALL, (1,))),
        *controls(),
    ],
}


@dataclass(frozen=True)
class Folders:
    """Where a suite finds its recipes, keeps its records, and (`scratch`) checkpoints and weights."""

    recipes: Path
    records: Path
    scratch: Path


def missing(runs: Iterable[Run], records: Path) -> list[Run]:
    """The runs that lack a record, in their order.

    A run that lacks the record of one of its extras alone is among them: it is done again, and all its records are
    written anew, so that they tell of one model.
    """
    return [run for run in runs if not all(run_path(records, name).exists() for name in run.names)]


def work_through(
    runs: Sequence[Run], folders: Folders, data: Callable[[str], list[str]], jobs: int, report: Reporter
) -> list[str]:
    """Do every run that lacks a record, `jobs` at a time, each in a process and on a thread of its own.

    Args:
        runs: in the order to begin them.
        folders: where things lie. A run that was interrupted goes on from its checkpoint.
        data: name of a data set → overrides that say where its log lies and how it is read.
        jobs: processes at a time.
        report: told of each run that ends.

    Returns:
        one line a run that failed.

    Raises:
        DataError: a data set is not there. Nothing is begun then.
    """
    to_do = missing(runs, folders.records)
    report.stage(f"{len(runs)} runs, {len(runs) - len(to_do)} with all records; {len(to_do)} to do, {jobs} at a time")
    sources = {run.dataset: data(run.dataset) for run in to_do}
    failed = []
    # A fresh process a run: nothing of one run is left in the next, and its memory goes back.
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        pending = {pool.submit(_work, run, folders, sources[run.dataset]): run for run in to_do}
        for count, future in enumerate(as_completed(pending), 1):
            error = future.exception()
            outcome = future.result() if error is None else f"failed: {error}"
            report.stage(f"{count} of {len(to_do)}: {pending[future].name}: {outcome}")
            if error is not None:
                failed.append(f"{pending[future].name}: {error}")
    return failed


def _work(run: Run, folders: Folders, data: list[str]) -> str:
    """One run, in its own process; returns what is said of it."""
    import torch

    from training.pipeline import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(1)
    config = run.config(folders.recipes, data)
    if run.backbone in BASELINES:
        record = baselines.carry_out(run, config, folders.records)
    else:
        record = carry_out(run, config, folders.records, folders.scratch, JsonReporter(run=run.name))
    return (
        f"validation NDCG@10 {record.validation['ndcg@10']:.4f}, best epoch {record.best_epoch},"
        f" {record.seconds['total']:.0f} s"
    )
