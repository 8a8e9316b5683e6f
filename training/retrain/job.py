"""The retraining job, from yesterday's events to a better model in service.

    lock → ingest → look at what is new → train a candidate → judge it beside the current model → gate
         → learn everything → export, compare, time → publish → prune → report

The job may be killed at any moment. What it has taken in is in the log for good and only then taken from its source;
the registry changes by one rename at the end; and a run over the same log goes on from its checkpoints. So the next run
finishes what a killed one began, and until then the current model stays. A run that is killed after it has published
has announced its report before; the next run keeps it.
"""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import onnxruntime

from model import registry as registries
from model.bundle import ENCODER, RANKER, Bundle, open_bundle
from model.config import FIRST_ITEM
from model.onnx.export import ExportError
from model.weights import load_model
from training.catalog import Catalog, read_titles
from training.config import PATHS
from training.distributed import ALONE
from training.evaluate import num_events, popularity_ranks
from training.events import LogFacts, last_timestamp, tie_counts
from training.files import write_whole
from training.pipeline import commit, cpu_model, keep_freed_memory, test_figures, versions, write
from training.progress import Reporter
from training.retrain import gate
from training.retrain import report as reports
from training.retrain.config import JobConfig
from training.retrain.current import (
    going_on,
    is_current,
    learned_by,
    num_known_users,
    require_one_job,
    rolled_back,
)
from training.retrain.gate import Answered
from training.retrain.learn import Candidate, TooFewEvents, answers, learn_everything, train_candidate
from training.retrain.lock import locked
from training.retrain.run import Run
from training.retrain.slices import Cut, bucket_without, grown_catalog, slice_begin
from training.retrain.sources import Outbox, new_files
from training.retrain.store import NUM_BUCKETS, Learned, Store
from training.retrain.window import Window, check, check_parts, look, num_new_events
from training.study import strata

RECEIVED_ENTRIES = 1_000_000
"""Of the outbox, taken into the log at a time."""


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
        dry_run: do all but publish; events are taken in all the same.
        now: seconds since 1970; None: the clock's.

    Raises:
        JobLocked: another run is under way.
        DataError, ConfigError, BundleError, OSError: what the job could not do, which its report tells too, if it can
            be written. Nothing was published, and no event is lost. What fails after a publication fails nothing.
    """
    keep_freed_memory()
    with locked(work):
        run = Run(begun=datetime.now(UTC).isoformat(timespec="seconds"), config=config)
        moment = time.time() if now is None else now
        try:
            reports.keep_announced(work, registry)
            _carry_out(run, config, work, registry, outbox, report, command, dry_run, moment)
            reports.keep(run, work)
        except Exception as error:
            if run.bundle is not None and is_current(registry, run.bundle):
                # The disk is full, for one. The next run keeps what this one has announced.
                report.stage(f"published; what is left to do is the next run's: {error}")
                return run
            run.outcome, run.bundle, run.reason = "failed", None, str(error) or type(error).__name__
            with suppress(Exception):  # the first error is the one to tell
                reports.keep(run, work)
            raise
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
    manifest = registries.current_manifest(registry)
    require_one_job(work, registry, store, manifest)
    if manifest is not None and "log" in manifest.training:
        store.note_publication()  # which a run that was killed could not
    report.stage("taking in new events")
    try:
        take_in(store, config, outbox, work, run)
    finally:
        remove_past(work, store)
    current = registries.current_bundle(registry)
    manifest = None if current is None else current.manifest
    run.current = None if manifest is None else manifest.version
    config = run.config = going_on(config, current, run)
    for note in run.notes:
        report.stage(note)
    learned = learned_by(manifest)
    without = tuple(config.retrain.without_users)
    run.window = look(store, learned, now, without)
    run.seconds["taking in"] = time.monotonic() - clock
    report.stage(f"{run.window.events:,} new events beside {run.window.earlier_events:,}")
    limits = config.retrain.limits
    if run.window.events < limits.min_events:
        run.reason = f"{run.window.events:,} new events; at least {limits.min_events:,} are waited for"
        return
    held = rolled_back(registry)
    if held.ingest > learned.ingest and (newer := num_new_events(store, held, without)) < limits.min_events:
        run.reason = (
            f"the model that learned all but {newer:,} of the new events was rolled back; at least"
            f" {limits.min_events:,} newer ones are waited for before another learns them"
        )
        return
    run.checks = check(run.window, limits, num_known_users(manifest))
    run.checks += check_parts(store, learned, now, limits, without)
    if failed := [one for one in run.checks if not one.is_met]:
        run.outcome = "refused"
        run.reason = "; ".join(f"{one.name} is {one.found:.3g}, {one.accepted}: {one.advice}" for one in failed)
        return

    known = None if current is None else Catalog.of_bundle(current)
    catalog = grown_catalog(store, known, without)
    if config.titles is not None:
        catalog = catalog.with_titles(read_titles(config.titles))
    facts = facts_of(store, catalog, without)
    folder = _folder_of(work, store) / _fingerprint(config, store, run.current)
    try:
        candidate, cut, verdict = _judged(
            run, config, store, catalog, facts, learned, run.window, current, folder, report
        )
    except TooFewEvents as few:
        run.outcome, run.reason = "undecided", f"{few}; the job waits for more events"
        return
    if verdict != "passed":
        run.outcome = "refused" if verdict == "failed" else "undecided"
        run.reason = "; ".join(
            f"{one.name} {one.found.value:.4f} ({one.found.low:.4f} … {one.found.high:.4f}), {one.accepted}"
            for one in run.questions
            if one.verdict == verdict
        )
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
        "log": store.index.log,
        "ingest": store.index.ingests,
        "judged": {name: run.judged[name] for name in ("candidate", "current") if name in run.judged},
    }
    try:
        place = folder / "registry" if dry_run else registry
        bundle = write(model.cpu(), prepared, candidate.calibration, record, place)
    except ExportError as error:
        run.outcome, run.reason = "refused", str(error)
        return
    if current is not None:
        run.questions.append(gate.latency(_timed(open_bundle(bundle), current), config.retrain.gate))
        if run.questions[-1].verdict == "failed":
            shutil.rmtree(bundle)
            run.outcome, run.reason = "refused", f"{run.questions[-1].name} {run.questions[-1].found.value:.2f}"
            return
    if dry_run:
        shutil.rmtree(bundle)
        run.outcome, run.reason = "would publish", "--dry-run"
        return
    run.outcome, run.bundle = "published", bundle.name
    reports.announce(run, work)
    try:
        registries.publish_after(registry, bundle.name, run.current)
    except registries.RegistryChanged as error:
        shutil.rmtree(bundle)
        run.outcome, run.bundle, run.reason = "refused", None, f"{error}; run the job again to be judged beside it"
        return
    store.note_publication()
    registries.prune(registry, config.retrain.keep)
    shutil.rmtree(work / "runs", ignore_errors=True)


def _judged(
    run: Run,
    config: JobConfig,
    store: Store,
    catalog: Catalog,
    facts: LogFacts,
    learned: Learned,
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
        try:
            candidate = train_candidate(config, store, catalog, facts, cut, current, folder / f"{num_events}", report)
        except TooFewEvents:
            if num_events == most:
                raise
        else:
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


def facts_of(store: Store, catalog: Catalog, without_users: Sequence[str] = ()) -> LogFacts:
    """What is known of the log, for a manifest."""
    kept, users, tied, tied_last, last = 0, 0, 0, 0, -math.inf
    for number in range(NUM_BUCKETS):
        events = bucket_without(store, number, without_users)
        counts = tie_counts(events)
        kept, users = kept + len(events), users + events["user_id"].n_unique()
        tied, tied_last, last = tied + counts[0], tied_last + counts[1], max(last, last_timestamp(events))
    return LogFacts(
        rows_read=store.index.rows,
        rows_kept=kept,
        rows_rejected=store.index.rows - kept,
        blank_lines=0,
        users=users,
        items=len(catalog),
        has_timestamps=True,
        tied_events_share=tied / max(kept, 1),
        tied_last_two_users_share=tied_last / max(users, 1),
        last_timestamp=last,
        sha256=hashlib.sha256(store.index.model_dump_json().encode()).hexdigest(),
    )


def _fingerprint(config: JobConfig, store: Store, current: str | None) -> str:
    """Of all that decides a candidate: a killed run over the same goes on from its checkpoints."""
    text = config.model_dump_json(exclude={"data"}) + store.index.model_dump_json() + str(current)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _folder_of(work: Path, store: Store) -> Path:
    """Where the runs over the log as it is now lie."""
    return work / "runs" / f"{store.index.ingests:06}"


def remove_past(work: Path, store: Store) -> None:
    """Remove the folders of unfinished runs over the log as it was: they hold whom it may have forgotten since."""
    for folder in (work / "runs").glob("*"):
        if folder != _folder_of(work, store):
            shutil.rmtree(folder)


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
