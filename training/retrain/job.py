"""The retraining job, from yesterday's events to a better model in service.

    lock → ingest → look at what is new → train a candidate → judge it beside the current model → gate
         → learn everything → export → publish → prune → report

The job may be killed at any moment. What it has taken in is in the log for good and only then taken from its source;
the registry changes by one rename at the end; and a run over the same log goes on from its checkpoints. So the next run
finishes what a killed one began, and until then the current model stays. A run that is killed after it has published
has announced its report before; the next run keeps it.
"""

import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import onnxruntime

from model import registry as registries
from model.bundle import ENCODER, RANKER, Bundle, open_bundle
from model.config import FIRST_ITEM
from model.weights import load_model
from training.catalog import Catalog, read_titles
from training.config import PATHS
from training.distributed import ALONE
from training.evaluate import num_events, popularity_ranks
from training.events import LogFacts, tie_counts
from training.files import write_whole
from training.pipeline import commit, cpu_model, test_figures, versions, write
from training.progress import Reporter
from training.retrain import gate
from training.retrain import report as reports
from training.retrain.config import JobConfig
from training.retrain.gate import Answered
from training.retrain.learn import Candidate, answers, learn_everything, train_candidate
from training.retrain.run import Run
from training.retrain.slices import Cut, grown_catalog, slice_begin
from training.retrain.sources import Outbox, new_files
from training.retrain.store import NUM_BUCKETS, Store
from training.retrain.window import Window, check, look, num_events_after
from training.study import strata
from training.tables import DataError

RECEIVED_ENTRIES = 1_000_000
"""Of the outbox, taken into the log at a time."""


class JobLocked(Exception):
    """Another run is under way."""


@contextmanager
def locked(work: Path) -> Iterator[None]:
    """The right to run. The kernel takes it from a run that dies, so that none holds it for ever.

    Raises:
        JobLocked: another run has it.
    """
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobLocked(f"{work}: another run of the job is under way; it holds {work / 'lock'}") from None
        yield


def take_in(store: Store, config: JobConfig, outbox: Outbox | None, work: Path, run: Run) -> None:
    """Move what is new at the sources into the log.

    The outbox first, which must not fill up because of a file. What the service adds meanwhile is the next run's: it
    adds all the time, and each ingest takes longer than it takes an event to come.

    Raises:
        DataError: a source cannot be read; of the others nothing is lost.
    """
    while outbox is not None and (received := outbox.receive(RECEIVED_ENTRIES)):
        run.ingests.append(store.ingest(received.incoming))
        run.unusable_entries += len(received.unusable)
        if received.unusable:
            path = work / "rejects" / f"outbox-{store.index.ingests:06}.jsonl"
            write_whole(path, "".join(json.dumps(one) + "\n" for one in received.unusable).encode())
        outbox.acknowledge(received)
        if len(received.entries) < RECEIVED_ENTRIES:
            break
    if config.data is not None:
        files = new_files(config.data, store.index.files_read, work / "rejects")
        run.repeated_files = list(files.repeated)
        if files.incoming.files_read:
            run.ingests.append(store.ingest(files.incoming))


def retrain(
    config: JobConfig,
    work: Path,
    registry: Path,
    outbox: Outbox | None,
    report: Reporter,
    command: Sequence[str],
    dry_run: bool = False,
    now: float | None = None,
) -> Run:
    """Run the job once.

    Args:
        config: of the job.
        work: folder of the log, of unfinished runs and of the reports.
        registry: what the service reads.
        outbox: of the service; None: files alone.
        report: receives the progress.
        command: the command line, for the bundle's manifest.
        dry_run: end before anything is published; events are taken in all the same.
        now: seconds since 1970; None: the clock's.

    Raises:
        JobLocked: another run is under way.
        DataError, ConfigError, ExportError, BundleError, OSError: what the job could not do. Nothing was published, and
            no event is lost.
    """
    with locked(work):
        reports.keep_announced(work, registry)
        run = Run(begun=datetime.now(UTC).isoformat(timespec="seconds"))
        _carry_out(run, config, work, registry, outbox, report, command, dry_run, time.time() if now is None else now)
        reports.keep(run, work)
        return run


def _carry_out(
    run: Run,
    config: JobConfig,
    work: Path,
    registry: Path,
    outbox: Outbox | None,
    report: Reporter,
    command: Sequence[str],
    dry_run: bool,
    now: float,
) -> None:
    clock = time.monotonic()
    store = Store(work / "log")
    report.stage("taking in new events")
    erased = store.index.erased
    take_in(store, config, outbox, work, run)
    if store.index.erased != erased:
        # What unfinished runs have cut from the log holds whom it has to forget.
        shutil.rmtree(work / "runs", ignore_errors=True)
    current = current_bundle(registry)
    run.current = None if current is None else current.manifest.version
    learned = 0 if current is None else int(current.manifest.training.get("ingest", 0))
    _require_one_job(work, registry, store, learned, current)
    without = tuple(config.retrain.without_users)
    run.window = look(store, learned, now, without)
    run.seconds["taking in"] = time.monotonic() - clock
    report.stage(f"{run.window.events:,} new events beside {run.window.earlier_events:,}")
    if run.window.events < config.retrain.limits.min_events:
        run.reason = f"{run.window.events:,} new events; at least {config.retrain.limits.min_events:,} are waited for"
        return
    held = _rolled_back_ingest(registry)
    if held > learned and (newer := num_events_after(store, held, without)) < config.retrain.limits.min_events:
        run.reason = (
            f"the model that learned all but {newer:,} of the new events was rolled back; at least"
            f" {config.retrain.limits.min_events:,} newer ones are waited for before another learns them"
        )
        return
    run.checks = check(run.window, config.retrain.limits)
    if failed := [one for one in run.checks if not one.is_met]:
        run.outcome = "refused"
        run.reason = "; ".join(f"{one.name} is {one.found:.3g}, {one.accepted}: {one.advice}" for one in failed)
        return

    known = None if current is None else Catalog.of_bundle(current)
    catalog = grown_catalog(store, known)
    if config.titles is not None:
        catalog = catalog.with_titles(read_titles(config.titles))
    facts = facts_of(store, catalog)
    folder = work / "runs" / _fingerprint(config, store, run.current)
    _remove_others(folder)
    candidate, cut, verdict = _judged(run, config, store, catalog, facts, learned, run.window, current, folder, report)
    if verdict != "passed":
        run.outcome = "refused" if verdict == "failed" else "undecided"
        run.reason = "; ".join(
            f"{one.name} {one.found.value:.4f} ({one.found.low:.4f} … {one.found.high:.4f}), {one.accepted}"
            for one in run.questions
            if one.verdict == verdict
        )
        return
    if dry_run:
        run.outcome, run.reason = "would publish", "--dry-run"
        return

    clock = time.monotonic()
    report.stage(f"learning everything, for {candidate.state.best_epoch} epochs")
    model, prepared = learn_everything(config, store, candidate, cut, current, folder, report)
    run.seconds["learning everything"] = time.monotonic() - clock
    report.stage("exporting to ONNX and comparing with torch")
    record = {
        "name": config.model_name,
        "config": config.model_dump(mode="json", exclude=PATHS),
        "command": [Path(command[0]).name, *command[1:]],
        "commit": commit(),
        "data": {"source": "retrain", **facts.summary(), **prepared.split.summary()},
        "best_epoch": candidate.state.best_epoch,
        "seconds": run.seconds,
        "cpu": cpu_model(),
        "versions": versions(),
        "test": run.judged["report"],
        "ingest": store.index.ingests,
        "judged": {name: run.judged[name] for name in ("candidate", "current") if name in run.judged},
    }
    bundle = write(model.cpu(), prepared, candidate.calibration, record, registry)
    if current is not None:
        run.questions.append(gate.latency(_timed(open_bundle(bundle), current), config.retrain.gate))
        if run.questions[-1].verdict == "failed":
            shutil.rmtree(bundle)
            run.outcome, run.reason = "refused", f"{run.questions[-1].name} {run.questions[-1].found.value:.2f}"
            return
    run.outcome, run.bundle = "published", bundle.name
    reports.announce(run, work)
    try:
        registries.publish_after(registry, bundle.name, run.current)
    except registries.RegistryChanged as error:
        shutil.rmtree(bundle)
        run.outcome, run.bundle, run.reason = "refused", None, f"{error}; run the job again to be judged beside it"
        return
    registries.prune(registry, config.retrain.keep)
    shutil.rmtree(folder, ignore_errors=True)


def current_bundle(registry: Path) -> Bundle | None:
    """The registry's current bundle; None where nothing was published yet."""
    index = registries.read_index(registry)
    return None if index is None else open_bundle(registry / index.current)


def _require_one_job(work: Path, registry: Path, store: Store, learned: int, current: Bundle | None) -> None:
    """That log and registry belong together.

    Raises:
        DataError: they cannot: another log was learned, or the registry is empty where this job has published.
    """
    if learned > store.index.ingests:
        raise DataError(
            f"{registry}: the current bundle learned from {learned} ingests, the log in {work} has"
            f" {store.index.ingests}: it is another one, or an older copy of it. Give the --work folder of the job that"
            " published the bundle; or, to start anew, an empty --work and another --registry"
        )
    if current is None and reports.has_published(work):
        raise DataError(
            f"{registry}: nothing was published here, though the job of {work} has published: is the folder mounted,"
            " and the right one? To start anew, give an empty --work"
        )


def _rolled_back_ingest(registry: Path) -> int:
    """Number of the last ingest that the bundle had learned from which somebody rolled back; 0: there is none."""
    index = registries.read_index(registry)
    if index is None or index.rolled_back is None or not (registry / index.rolled_back).is_dir():
        return 0
    return int(open_bundle(registry / index.rolled_back).manifest.training.get("ingest", 0))


def _judged(
    run: Run,
    config: JobConfig,
    store: Store,
    catalog: Catalog,
    facts: LogFacts,
    learned: int,
    window: Window,
    current: Bundle | None,
    folder: Path,
    report: Reporter,
) -> tuple[Candidate, Cut, gate.Verdict]:
    """A candidate, and the gate's verdict on it; where that cannot tell, another on a slice twice as long."""
    # Without earlier events half of the new ones have to be left to learn from.
    most = window.events if window.earlier_events else window.events // 2
    num_events = min(config.retrain.judged_events, most)
    while True:
        without = tuple(config.retrain.without_users)
        cut = Cut(learned, slice_begin(store, learned, num_events, without), without)
        clock = time.monotonic()
        report.stage(f"training a candidate without the last {num_events:,} of the new events")
        candidate = train_candidate(config, store, catalog, facts, cut, current, folder / f"{num_events}", report)
        run.seconds["training the candidate"] = time.monotonic() - clock
        run.training = {
            "start": "warm" if candidate.is_warm else "scratch",
            "best_epoch": candidate.state.best_epoch,
            "curve": candidate.state.curve,
            "training_seconds": round(candidate.state.seconds, 1),
        }
        report.stage(f"judging it on {len(candidate.prepared.split.test):,} events")
        _ask(run, config, candidate, current)
        run.judged["begin"] = cut.begin
        verdict = gate.verdict_of(run.questions)
        if verdict != "undecided" or num_events == most:
            return candidate, cut, verdict
        report.stage("too few events to tell; judging on twice as many")
        num_events = min(2 * num_events, most)


def _ask(run: Run, config: JobConfig, candidate: Candidate, current: Bundle | None) -> None:
    """Put the gate's questions; `run` has the answers."""
    prepared, limits = candidate.prepared, config.retrain.gate
    targets, counts = prepared.split.test, prepared.catalog.training_counts
    users_R = np.unique(targets.history.user_ids, return_inverse=True)[1]
    ours = answers(candidate.model, candidate.calibration, prepared, counts)
    if current is None:
        popularity = popularity_ranks(counts, targets, prepared.event)
        theirs, name = Answered(popularity, np.zeros(len(targets))), "popularity"
    else:
        model = load_model(current)
        theirs, name = answers(model, current.calibration, prepared, current.items.training_counts), "current"
    run.questions = [gate.quality(ours, theirs, users_R, limits)]
    if current is not None:
        told = current.manifest.training.get("judged", {}).get("candidate", {}).get("ndcg@10")
        members = {
            **{
                f"items of {uses} uses": member
                for uses, member in strata.members(counts[targets.target - FIRST_ITEM], strata.ITEM_STRATA).items()
            },
            **{
                f"users of {events} events": member
                for events, member in strata.members(num_events(targets.history), strata.USER_STRATA).items()
            },
        }
        run.questions += gate.surprise(theirs, users_R, told, limits)
        run.questions += gate.strata(ours, theirs, users_R, members, limits)
        run.questions.append(gate.calibration(ours, theirs, users_R, limits))
    run.judged = {
        "targets": len(targets),
        "users": int(users_R.max()) + 1 if len(users_R) else 0,
        "candidate": _figures(ours),
        name: _figures(theirs),
        "report": test_figures(candidate.model, prepared, candidate.calibration, ALONE),
    }


def _figures(answered: Answered) -> dict[str, float]:
    return {
        "ndcg@10": float(answered.ndcg.mean()),
        "hr@10": float(answered.hit.mean()),
        "list_confidence": float(answered.stated.mean()),
    }


def facts_of(store: Store, catalog: Catalog) -> LogFacts:
    """What is known of the log, for a manifest."""
    users = tied = tied_last = 0
    for number in range(NUM_BUCKETS):
        events = store.bucket(number)
        counts = tie_counts(events)
        users, tied, tied_last = users + events["user_id"].n_unique(), tied + counts[0], tied_last + counts[1]
    return LogFacts(
        rows_read=store.index.rows,
        rows_kept=store.index.rows,
        rows_rejected=0,
        blank_lines=0,
        users=users,
        items=len(catalog),
        has_timestamps=True,
        tied_events_share=tied / max(store.index.rows, 1),
        tied_last_two_users_share=tied_last / max(users, 1),
        sha256=hashlib.sha256(store.index.model_dump_json().encode()).hexdigest(),
    )


def _fingerprint(config: JobConfig, store: Store, current: str | None) -> str:
    """Of all that decides a candidate: a killed run over the same goes on from its checkpoints."""
    text = config.model_dump_json(exclude={"data"}) + store.index.model_dump_json() + str(current)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _remove_others(folder: Path) -> None:
    """Make a run's folder, and remove those of unfinished runs over other logs."""
    folder.mkdir(parents=True, exist_ok=True)
    for other in folder.parent.iterdir():
        if other != folder:
            shutil.rmtree(other)


def _timed(candidate: Bundle, current: Bundle) -> Callable[[], tuple[float, float]]:
    """Times the golden cases of encoder and ranker of each bundle once."""
    runs = [_golden_run(bundle) for bundle in (candidate, current)]

    def seconds() -> tuple[float, float]:
        times = []
        for run in runs:
            begun = time.perf_counter()
            run()
            times.append(time.perf_counter() - begun)
        return times[0], times[1]

    seconds()  # the first run of a session allocates
    return seconds


def _golden_run(bundle: Bundle) -> Callable[[], None]:
    sessions = {
        graph: onnxruntime.InferenceSession(bundle.graph_path(graph), providers=["CPUExecutionProvider"])
        for graph in (ENCODER, RANKER)
    }
    cases = [case for case in bundle.golden_cases() if case.graph in sessions]

    def run() -> None:
        for case in cases:
            sessions[case.graph].run(None, case.inputs)

    return run
