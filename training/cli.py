"""`bft-train`: train a model from an interaction log, judge it, fetch data, manage the registry."""

import fnmatch
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from model import registry as registries
from model.bundle import Bundle, BundleError, open_bundle
from training import adding, datasets
from training.config import ConfigError, load_config, override_config
from training.events import DataConfig
from training.progress import Reporter, reporter
from training.tables import DataError

if TYPE_CHECKING:  # it takes torch's seconds to import
    from training.replay.evaluation import Replay
    from training.retrain.store import Store

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
data_app = typer.Typer(no_args_is_help=True, help="Data sets.")
log_app = typer.Typer(no_args_is_help=True, help="The log of `bft-train retrain`: what it took in, and forgetting it.")
registry_app = typer.Typer(no_args_is_help=True, help="Published bundles: which one is current, and going back.")
app.add_typer(data_app, name="data")
app.add_typer(log_app, name="log")
app.add_typer(registry_app, name="registry")

# Read when torch is imported, below. A thread that waits for the others sleeps instead of spinning: with other work on
# the same cores, spinning made an epoch many times longer.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

STUDY_RECORDS, STUDY_REPORT, QUICK_STUDY = Path("benchmarks/results"), Path("docs/study"), Path("runs/quick")
SECONDS_FOR_THE_FIRST = 5.0
"""How long the others leave it to the first process to say what went wrong."""

HOW_TO_READ = "How to read the log where it differs from training, or from the data set named, e.g. format=csv"
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
CacheOption = Annotated[Path | None, typer.Option(help="Where data sets are kept; default: the user's cache folder.")]
SlatesOption = Annotated[Path, typer.Option(help="What `bft-serve export-slates` wrote: the folder, or one file.")]
RedrawsOption = Annotated[int, typer.Option(min=100, help="Of each list, to know its propensities.")]
WorkOption = Annotated[Path, typer.Option("--work", help="Folder of the job's log, unfinished runs and reports.")]
RegistryOption = Annotated[Path, typer.Option("--registry", help="The registry's folder.")]


@app.command()
def fit(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="e.g. model=hstu model.width=128 training.epochs=20"),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML configuration file.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="The interaction log, or the name of a data set; same as data.path=…")
    ] = None,
    titles: Annotated[
        Path | None, typer.Option(help="The items' titles; same as titles=…; default: those of the data set named")
    ] = None,
    metadata: Annotated[
        Path | None,
        typer.Option(
            help="What is known of the items (.item, .csv, .parquet), for those added at run time; same as"
            " metadata.path=…"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The run's folder; the bundle goes to OUT/registry.")] = Path("runs/latest"),
    resume: Annotated[bool, typer.Option(help="Go on from this configuration's checkpoint, if there is one.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model, calibrate it, judge it on test users, and publish the bundle.

    Ends with the test figures. Nothing is published unless everything went well. `torchrun --nproc-per-node 2 -m
    training.cli fit …` trains in two processes, each with half of every batch.
    """
    with _errors_as_messages():
        files = {"data.path": data, "titles": titles, "metadata.path": metadata}
        named = [f"{key}={_as_yaml(path)}" for key, path in files.items() if path]
        run_config = load_config(config, [*named, *(overrides or [])])
        datasets.check_log(run_config.data.path)
        # torch takes seconds to import: a mistake above, and the other commands, need not wait for it.
        from training.distributed import joined
        from training.pipeline import train

        with joined(run_config.training.device) as world, reporter(silent=not world.is_first) as progress:
            trained = train(run_config, out, progress, sys.argv, resume, world)
    figures = trained.record["test"]
    if world.is_first:
        _print({"bundle": str(trained.bundle), **figures} if as_json else _figures_text(figures), as_json)


@app.command()
def tune(
    recipe: Annotated[Path, typer.Option(help="YAML configuration that every trial starts from.")],
    space: Annotated[Path, typer.Option(help="YAML file of the search space, e.g. configs/spaces/sasrec.yaml.")],
    data: Annotated[str, typer.Option(help="The interaction log, or the name of a data set; same as data.path=…")],
    record: Annotated[Path, typer.Option(help="Where the trials are told: a JSON file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. model.filtering=off")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Trials in total, those of earlier calls included.")] = 12,
    storage: Annotated[Path, typer.Option(help="SQLite file of the studies.")] = Path("runs/tuning.sqlite"),
    threads: Annotated[int, typer.Option(min=1, help="Threads to train on.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Choose hyper-parameters by validation NDCG@10, with optuna: few trials, pruned, kept, resumable.

    Test users are never looked at. The recipe's file is yours to change by what comes out.
    """
    with _errors_as_messages():
        import torch

        from training.pipeline import keep_freed_memory
        from training.study import tuning

        keep_freed_memory()
        torch.set_num_threads(threads)
        named = [f"data.path={json.dumps(data)}", *(overrides or [])]
        with reporter() as progress:
            found = tuning.tune(recipe, named, space, trials, storage, progress)
        tuning.write_record(record, found)
    text = "\n".join(f"{key}: {value}" for key, value in found["best"].items())
    shown = {"best": found["best"], "best_val_ndcg@10": found["best_val_ndcg@10"], "record": str(record)}
    _print(shown if as_json else f"validation NDCG@10 {found['best_val_ndcg@10']:.4f}\n{text}", as_json)


@app.command()
def evaluate(
    bundle: Annotated[Path, typer.Option(help="A bundle's folder or a registry.")],
    data: Annotated[
        Path, typer.Option(help="The interaction log whose test users are ranked for, or the name of a data set.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help=HOW_TO_READ,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rank the whole catalogue for every test user of a log, by the bundle's own graphs in ONNX Runtime."""
    with _errors_as_messages():
        opened = open_bundle(registries.resolve(bundle))
        log = _data_config(opened, data, overrides)
        from training.pipeline import evaluate_bundle

        figures = evaluate_bundle(opened, log)
    _print(figures if as_json else _figures_text(figures), as_json)


@app.command()
def explain(
    bundle: Annotated[Path, typer.Option(help="A bundle's folder or a registry.")],
    history: Annotated[
        str | None,
        typer.Option(
            help="One history: item ids separated by commas, oldest first, or a CSV, JSON-lines or Parquet file with"
            " item_id and, if wanted, timestamp and weight. Empty: a user before any event."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="An interaction log, or the name of a data set: its test users, or one with --user."),
    ] = None,
    user: Annotated[str | None, typer.Option(help="With --data: the whole history of this one user.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="With --data: a second bundle whose attention is set beside the first's.")
    ] = None,
    users: Annotated[
        int | None, typer.Option(min=1, help="With --data: at most so many users, spread evenly over all.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help=HOW_TO_READ,
        ),
    ] = None,
    figure: Annotated[Path, typer.Option(help="Where the figure is saved: .png, .svg or .pdf.")] = Path("explain.png"),
    as_json: AsJson = False,
) -> None:
    """Look inside the filter: precision, kriging weights, gain and effective sample size.

    Of one history, position by position (--history, or --data and --user), or over the test users of a log, by
    item frequency, history length and effective sample size (--data).
    """
    with _errors_as_messages():
        _check_question(history, data, user, against, users, overrides)
        from training.figures import check_writable

        check_writable(figure)
        opened = open_bundle(registries.resolve(bundle))
        other = open_bundle(registries.resolve(against)) if against else None
        from training import explain as explaining
        from training.figures import save
        from training.history import read_history

        with reporter() as progress:
            if data is None:
                answer = explaining.explain_told(opened, read_history(history or ""))
            elif user is not None:
                answer = explaining.explain_user(opened, _data_config(opened, data, overrides), user)
            else:
                log = _data_config(opened, data, overrides)
                answer = explaining.explain_log(opened, log, other, users, progress)
        save(answer.figure, figure)
    _print({**answer.fields, "figure": str(figure)} if as_json else f"{answer.text}\n\nfigure: {figure}", as_json)


@app.command()
def calibrate(
    bundle: Annotated[Path, typer.Option(help="The bundle whose confidences are judged: a folder or a registry.")],
    data: Annotated[Path, typer.Option(help="The log that it was trained on, or the name of a data set.")],
    plain: Annotated[
        Path | None, typer.Option(help="A bundle without filtering, trained on the same log, to compare with.")
    ] = None,
    ensemble: Annotated[
        list[Path] | None, typer.Option(help="Bundles whose mean is compared; name the option once for each.")
    ] = None,
    other_seed: Annotated[
        Path | None, typer.Option(help="The bundle of another seed: are the two sure of the same users?")
    ] = None,
    dropout_passes: Annotated[
        int, typer.Option(min=0, help="Passes of MC dropout, to compare with (of --plain if given); 0: none.")
    ] = 0,
    record: Annotated[
        Path | None, typer.Option(help="Where the record goes. Default: OUT/calibration-DATA.json.")
    ] = None,
    out: Annotated[Path, typer.Option("--report", help="Folder for confidence.md and its figures.")] = Path(
        "runs/confidence"
    ),
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help=HOW_TO_READ)] = None,
    as_json: AsJson = False,
) -> None:
    """How true a bundle's confidences are on test users, and what precision adds to confidences that come for free.

    Writes a report with tables and figures, and the record from which they are made.
    """
    with _errors_as_messages():
        opened, *several = (open_bundle(registries.resolve(path)) for path in (bundle, *(ensemble or [])))
        without_filtering, of_another_seed = (
            open_bundle(registries.resolve(path)) if path else None for path in (plain, other_seed)
        )
        log = _data_config(opened, data, overrides)
        from training.confidence.bundles import judge_bundle
        from training.confidence.records import record_path
        from training.confidence.report import write_report
        from training.study.records import write

        with reporter() as progress:
            found = judge_bundle(
                opened,
                log,
                data.stem,
                without_filtering,
                several,
                of_another_seed,
                dropout_passes,
                progress,
            )
            files = write_report(found, out)
            kept = record or record_path(out, found.dataset)
            kept.parent.mkdir(parents=True, exist_ok=True)
            write(kept, found)
    result = {"record": str(kept), "files": [str(path) for path in files], **found.model_dump(mode="json")}
    _print(result if as_json else f"{files[0]}", as_json)


@app.command()
def cold(
    bundle: Annotated[Path, typer.Option(help="The bundle, trained with split=users: a folder or a registry.")],
    data: Annotated[Path, typer.Option(help="The log that it was trained on, or the name of a data set.")],
    plain: Annotated[
        Path | None, typer.Option(help="A bundle without filtering, trained on the same log, to compare with.")
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Where the record goes. Default: OUT/cold-DATA.json.")] = None,
    out: Annotated[Path, typer.Option("--report", help="Folder for cold.md and its figure.")] = Path("runs/cold"),
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help=HOW_TO_READ)] = None,
    as_json: AsJson = False,
) -> None:
    """How good a bundle's answers are to users it never saw, before their first event and after 1, 2, 3 and 5.

    Beside popularity, blends of the two, and a plain model. Writes a report with tables and a figure, and the record
    from which they are made.
    """
    with _errors_as_messages():
        opened = open_bundle(registries.resolve(bundle))
        other = open_bundle(registries.resolve(plain)) if plain else None
        log = _data_config(opened, data, overrides)
        from training.cold.bundles import judge_bundle
        from training.cold.records import record_path
        from training.cold.report import write_report
        from training.study.records import write

        with reporter() as progress:
            found = judge_bundle(opened, log, data.stem, other, progress)
            files = write_report(found, out)
            kept = record or record_path(out, found.dataset)
            write(kept, found)
    result = {"record": str(kept), "files": [str(path) for path in files], **found.model_dump(mode="json")}
    _print(result if as_json else f"{files[0]}", as_json)


@app.command()
def report(
    records: Annotated[
        Path | None,
        typer.Option(
            "--from",
            "--records",
            help="Folder of the records, with datasets/ and runs/; with --suite they are also kept there. Default:"
            f" {STUDY_RECORDS}, and {QUICK_STUDY} for the quick suite.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for report.md, tables.json and the figures. Default:"
            f" {STUDY_REPORT}, and {QUICK_STUDY}/report for the quick suite."
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Write nothing; recompute every table and compare with OUT. Status 1 names the first difference.",
        ),
    ] = False,
    suite: Annotated[
        Literal["quick", "full"] | None,
        typer.Option(
            help="First train what has no record yet. quick: SASRec on Beauty and Toys, 8 epochs, one seed, at most 20"
            " minutes on 2 cores. full: up to 24 hours on one thread; can be interrupted and goes on."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="With --suite: runs at a time, one thread each.")] = 2,
    only: Annotated[
        str, typer.Option(metavar="GLOB", help="With --suite: runs whose names match, e.g. 'toys-*-s1'.")
    ] = "*",
    recipes: Annotated[Path, typer.Option(help="With --suite: folder of the recipes.")] = Path("configs/recipes"),
    scratch: Annotated[
        Path, typer.Option(help="With --suite: folder of unfinished runs' checkpoints and finished ones' weights.")
    ] = Path("runs/study"),
    as_json: AsJson = False,
) -> None:
    """Does filtering help, on which data, for which users and items, how certainly? From run records alone.

    Beside them lie the records of `calibrate` and `cold`, which make confidence.md and a page each.

    Writes the report with its tables and figures, or, with --check, tells whether the written one still follows from
    the records.
    """
    quick = suite == "quick"
    records = records or (QUICK_STUDY if quick else STUDY_RECORDS)
    out = out or (QUICK_STUDY / "report" if quick else STUDY_REPORT)
    with _errors_as_messages():
        if check and suite:
            raise ConfigError("--check trains nothing; leave out --suite")
        from training.confidence import overview
        from training.study import report as reporting

        with reporter() as progress:
            failed = _work_through(suite, only, recipes, records, scratch, jobs, progress) if suite else []
            _complain(failed)
            if failed and not any(records.glob("runs/*.json")):
                raise typer.Exit(1)
            progress.stage(f"reading the records in {records}")
            composed = reporting.compose(records, out)
            if check:
                difference = reporting.first_difference(composed, out) or overview.first_difference(records, out)
                _complain([difference] if difference else [])
                result: dict[str, Any] = {"runs": len(composed.study.runs), "difference": difference}
                text = difference or f"{out}: every table follows from {result['runs']} run records and the judgements"
            else:
                difference = None
                progress.stage(f"writing the report to {out}")
                written = [*reporting.write_report(composed, out), *overview.write_pages(records, out)]
                files = [str(path) for path in written]
                result = {"files": files, "failed": failed, "answer": composed.tables["tables"][0]["rows"]}
                text = files[0]
    _print(result if as_json else text, as_json)
    if failed or difference:
        raise typer.Exit(1)


@app.command()
def retrain(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="e.g. retrain.judged_events=5000 training.epochs=20"),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML configuration file.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="A folder of event files, each of which is read once; same as data.path=…")
    ] = None,
    outbox: Annotated[
        str | None,
        typer.Option(
            envvar="BFT_REDIS_URL",
            help="The service's Redis, whose events are taken over; better told by BFT_REDIS_URL.",
        ),
    ] = None,
    cluster: Annotated[bool, typer.Option(envvar="BFT_REDIS_CLUSTER", help="That Redis is a cluster.")] = False,
    work: WorkOption = Path("runs/retrain"),
    registry: Annotated[Path, typer.Option(help="The registry that the service reads.")] = Path("runs/latest/registry"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Do all but publish. Events are taken in all the same.")
    ] = False,
    mlflow: Annotated[
        str | None,
        typer.Option(
            envvar="MLFLOW_TRACKING_URI",
            help="An MLflow tracking server, which gets the run and the published bundle; needs the extra `mlflow`.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Take in new events, train on them, judge the new model beside the current one, and publish it if it holds.

    Made for cron: it may be killed at any moment, and the next run finishes what it began. Exit status: 0 published, 3
    refused or undecided, 4 nothing new, 5 another run is under way, 2 an error.
    """
    with _errors_as_messages():
        from training.retrain import job, report, tracking
        from training.retrain.config import JobConfig
        from training.retrain.lock import JobLocked
        from training.retrain.run import EXIT_STATUS
        from training.retrain.sources import Outbox

        named = [f"data.path={_as_yaml(data)}"] if data else []
        job_config = load_config(config, [*named, *(overrides or [])], JobConfig)
        if job_config.data is None and outbox is None:
            raise ConfigError(
                "no source of events: give --data FOLDER, or the service's Redis as BFT_REDIS_URL, or both"
            )
        if mlflow is not None:
            tracking.require_mlflow()
        with ExitStack() as stack:
            streams = stack.enter_context(Outbox(outbox, cluster)) if outbox else None
            progress = stack.enter_context(reporter())
            try:
                run = job.retrain(job_config, work, registry, streams, progress, sys.argv, dry_run)
            except JobLocked as error:
                _complain([str(error)])
                raise typer.Exit(5) from None
    path = report.path_of(run, work)
    shown = {**report.to_json(run), "report": str(path)}
    if mlflow is not None:
        try:
            shown["mlflow_run"] = tracking.track(mlflow, run, path, registry)
        except Exception as error:
            # The night is over, and what came of it stands. The text may hold the server's password.
            _complain([f"MLflow did not take the run ({type(error).__name__}); its report lies at {path}"])
    _print(shown if as_json else f"{run.outcome}: {run.reason or run.bundle}\n{path}", as_json)
    raise typer.Exit(EXIT_STATUS[run.outcome])


@app.command()
def replay(
    slates: SlatesOption,
    bundle: Annotated[Path, typer.Option(help="The bundle that made the lists: its folder, or a registry.")],
    policy: Annotated[
        Literal["mean", "lcb", "ucb", "thompson"], typer.Option(help="The target: what would have ordered the lists.")
    ] = "mean",
    kappa: Annotated[float, typer.Option(min=0, max=10, help="Of lcb and ucb.")] = 1.0,
    target: Annotated[
        Path | None,
        typer.Option(help="The target's bundle, of the same catalogue; default: that of --bundle."),
    ] = None,
    redraws: RedrawsOption = 500,
    within_s: Annotated[int, typer.Option(min=1, help="How long after a list an event can make it a hit.")] = 900,
    as_json: AsJson = False,
) -> None:
    """Off-policy evaluation: the hit rate that another policy would have had on the lists that were served.

    By inverse propensity scoring (IPS and SNIPS), on lists with support alone: served with policy thompson, by which
    the target's items had a chance. All others are refused, and counted.
    """
    with _errors_as_messages():
        opened = open_bundle(registries.resolve(bundle))
        other = open_bundle(registries.resolve(target)) if target else None
        from training.replay import evaluation
        from training.replay.slates import Policy, read_slates

        wanted = Policy(name=policy, kappa=kappa if policy in ("lcb", "ucb") else None, seed=None)
        with reporter() as progress:
            found = evaluation.replay(read_slates(slates), opened, wanted, other, redraws, within_s, progress)
    _print(asdict(found) if as_json else _replay_text(found), as_json)


@app.command()
def propensities(
    slates: SlatesOption,
    bundle: Annotated[Path, typer.Option(help="The bundle that made the lists: its folder, or a registry.")],
    out: Annotated[Path, typer.Option(help="JSON-lines file: a line for each item that was shown.")],
    redraws: RedrawsOption = 500,
    as_json: AsJson = False,
) -> None:
    """How likely each item was to be listed: the share of redraws of its list that list it, with a 95 % interval."""
    with _errors_as_messages():
        opened = open_bundle(registries.resolve(bundle))
        from training.replay.propensities import write_propensities
        from training.replay.slates import read_slates

        with reporter() as progress:
            counts = write_propensities(read_slates(slates), opened, redraws, out, progress)
    text = "\n".join(f"{name}: {number:,}" for name, number in counts.items())
    _print({"file": str(out), **counts} if as_json else f"{out}\n{text}", as_json)


@data_app.command()
def fetch(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(datasets.FETCHABLE)}")],
    cache: CacheOption = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a public data set, verify its checksum, and keep it; a second call takes no network."""
    with _errors_as_messages(), reporter() as progress:
        fetched = datasets.fetch(name, cache, lambda step: progress.stage(step.message))
    paths = {"interactions": str(fetched.interactions), "items": str(fetched.items)}
    _print(paths if as_json else "\n".join(paths.values()), as_json)


@data_app.command()
def add(
    name: Annotated[str | None, typer.Argument(help="What it will be called: a-z, 0-9, '.', '_' and '-'.")] = None,
    file: Annotated[
        Path | None, typer.Argument(help="The interaction log: a file, or a folder of files of one format.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="How to read it, e.g. format=csv columns.user_id=uid"),
    ] = None,
    titles: Annotated[Path | None, typer.Option(help="The items' titles, a .item or CSV file; kept with it.")] = None,
    known: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Instead of NAME and FILE: add every known data set that lies in FOLDER."),
    ] = None,
    replace: Annotated[bool, typer.Option(help="Let it replace another log of that name.")] = False,
    cache: CacheOption = None,
    as_json: AsJson = False,
) -> None:
    """Add an interaction log to the data sets: read it whole, and keep a copy that `--data NAME` finds.

    A known data set's name takes that data set's file alone, verified by its checksum. Adding the same again
    changes nothing.
    """
    with _errors_as_messages():
        if known is not None:
            if name is not None or titles is not None:
                raise ConfigError("--known FOLDER goes without NAME, FILE, KEY=VALUE and --titles")
            added = adding.add_known(known, cache, replace=replace)
            missing = datasets.listing(cache).missing
            fields = {
                "added": [_added_fields(one) for one in added],
                "missing": [_missing_fields(one) for one in missing],
            }
            _print(fields if as_json else "\n".join([*map(_added_text, added), *map(_missing_text, missing)]), as_json)
            return
        if name is None or file is None:
            raise ConfigError("data add takes NAME and FILE, or --known FOLDER")
        if not file.exists():
            raise DataError(f"{file} does not exist; FILE is the log, a file or a folder of files")
        config = override_config({}, _data_overrides(file, overrides), "configuration").data
        if config.path != file:
            raise ConfigError("FILE says where the log lies; leave out path=…")
        one = adding.add(name, config, titles, cache, replace=replace)
    _print(_added_fields(one) if as_json else _added_text(one), as_json)


@data_app.command("list")
def list_datasets(cache: CacheOption = None, as_json: AsJson = False) -> None:
    """The data sets that are there, and how to get the known ones that are not."""
    with _errors_as_messages():
        listing = datasets.listing(cache)
    fields = {
        "cache": str(listing.folder),
        "present": [_found_fields(found) for found in listing.present],
        "damaged": [{"name": name, "problem": problem} for name, problem in listing.damaged.items()],
        "missing": [_missing_fields(known) for known in listing.missing],
    }
    text = [*map(_found_text, listing.present), *listing.damaged.values(), *map(_missing_text, listing.missing)]
    _print(fields if as_json else "\n".join(text), as_json)


@log_app.command("show")
def show_log(work: WorkOption, as_json: AsJson = False) -> None:
    """What the job took in, ingest by ingest."""
    with _errors_as_messages():
        from training.retrain.store import Store

        try:
            rows = Store(work / "log").ingests().to_dicts()
        except (DataError, FileNotFoundError):
            # The job replaced the files meanwhile, in the moment that an ingest takes.
            rows = Store(work / "log").ingests().to_dicts()
    lines = [f"{'ingest':>6} {'events':>11}  {'first':<19}  {'last':<19}  sources"]
    for row in rows:
        first, last = (f"{datetime.fromtimestamp(row[name], UTC):%Y-%m-%d %H:%M:%S}" for name in ("first", "last"))
        lines.append(f"{row['ingest']:>6} {row['events']:>11,}  {first}  {last}  {', '.join(row['sources'])}")
    _print({"ingests": rows} if as_json else "\n".join(lines), as_json)


@log_app.command()
def forget(
    ingest: Annotated[int, typer.Argument(help="Its number, as reports and `bft-train log show` have it.")],
    work: WorkOption,
    as_json: AsJson = False,
) -> None:
    """Remove the events of one ingest: a poisoned file, a night of a broken source.

    Its files stay read; a mended one, with other content, is read as any new file. A model that has learned the events
    keeps what it learned: roll back, or train once with retrain.start=scratch. Exit status 5: the job is running.
    """
    with _errors_as_messages(), _log_alone(work) as store:
        removed = store.forget(ingest)
    _print({"ingest": ingest, "removed": removed} if as_json else f"{removed:,} events removed", as_json)


@log_app.command()
def erase(
    user: Annotated[str, typer.Argument(help="The id, as the log has it.")],
    work: WorkOption,
    as_json: AsJson = False,
) -> None:
    """Remove a user's events for good: those dated up to now do not come back either. Of the user a hash is kept.

    A service's own `DELETE /v1/users/{id}` reaches the log by itself; this is for logs that are made of files. The
    files are yours to clear. A model that has learned the events keeps what it learned until it is trained anew: train
    once with retrain.start=scratch. Exit status 5: the job is running.
    """
    with _errors_as_messages(), _log_alone(work) as store:
        from training.retrain.store import Incoming

        removed = store.ingest(Incoming(erasures={user: time.time()})).erased
    _print({"removed": removed} if as_json else f"{removed:,} events removed", as_json)


@registry_app.command()
def show(registry: RegistryOption, as_json: AsJson = False) -> None:
    """Which bundle is current, which was before, and all that were published."""
    with _errors_as_messages():
        index = registries.read_index(registry)
        if index is None:
            raise BundleError(f"{registry}: nothing is published here yet; run `bft-train fit --out …`")
    _print_index(index, as_json)


@registry_app.command()
def rollback(registry: RegistryOption, as_json: AsJson = False) -> None:
    """Make the previous bundle current again."""
    with _errors_as_messages():
        index = registries.roll_back(registry)
    _print_index(index, as_json)


def main() -> None:
    """Entry point of `bft-train`."""
    app()


@contextmanager
def _log_alone(work: Path) -> "Iterator[Store]":
    """The job's log, while no job runs. Raises Exit(5) if one does."""
    from training.retrain.lock import JobLocked, locked
    from training.retrain.store import Store

    if not (work / "log").is_dir():
        raise DataError(f"{work}: no log of `bft-train retrain` here; give the folder that the job has as --work")
    from training.retrain.job import remove_past

    try:
        with locked(work):
            store = Store(work / "log")
            yield store
            # What a killed night had cut from the log would outlive what is removed now.
            remove_past(work, store)
    except JobLocked as error:
        _complain([str(error)])
        raise typer.Exit(5) from None


def _complain(problems: list[str]) -> None:
    """Say on standard error what went wrong, one line each."""
    for problem in problems:
        typer.echo(f"bft-train: {problem}", err=True)


def _work_through(
    suite: str, only: str, recipes: Path, records: Path, scratch: Path, jobs: int, progress: Reporter
) -> list[str]:
    """Do the runs of a suite that have no record; one line each that failed."""
    # torch, which reading records does without.
    from training.study import suite as suites

    runs = [run for run in suites.SUITES[suite] if fnmatch.fnmatchcase(run.name, only)]
    if not runs:
        names = ", ".join(run.name for run in suites.SUITES[suite])
        raise ConfigError(f"--only {only!r} matches no run of the suite {suite}; they are: {names}")
    folders = suites.Folders(recipes, records, scratch)
    return suites.work_through(runs, folders, _log_overrides, jobs, progress)


def _log_overrides(name: str) -> list[str]:
    """Overrides that say where the log of a data set lies and how it is read."""
    found = datasets.find(name).config.model_dump(mode="json")
    return [f"data.{key}={json.dumps(value)}" for key, value in found.items()]


def _check_question(
    history: str | None,
    data: Path | None,
    user: str | None,
    against: Path | None,
    users: int | None,
    overrides: list[str] | None,
) -> None:
    """That `explain` is asked one thing."""
    if (history is None) == (data is None):
        raise ConfigError("explain takes either --history ITEM,ITEM,… or --data LOG")
    given = {"--user": user, "KEY=VALUE": overrides, "--against": against, "--users": users}
    named = [name for name, value in given.items() if value]
    if history is not None and named:
        raise ConfigError(f"{', '.join(named)} goes with --data LOG, not with --history")
    if user is not None and (others := [name for name in named if name in ("--against", "--users")]):
        raise ConfigError(f"{', '.join(others)} looks at the test users of a log; leave out --user")


def _data_config(bundle: Bundle, data: Path, overrides: list[str] | None) -> DataConfig:
    """How to read a log, but for the overrides: as the bundle's was read, or as the data set named says.

    The data set that the bundle was trained on is read as it was then.
    """
    as_trained = {"data": bundle.manifest.training["config"]["data"]}
    found = datasets.resolve(data)
    if found is not None and found.sha256 != bundle.manifest.data.get("sha256"):
        as_trained = {}
    config = override_config(as_trained, _data_overrides(data, overrides), "configuration").data
    datasets.check_log(config.path)
    return config


def _data_overrides(path: Path, overrides: list[str] | None) -> list[str]:
    return [f"data.path={_as_yaml(path)}", *(f"data.{item}" for item in overrides or [])]


def _as_yaml(path: Path) -> str:
    """A path as YAML text: unquoted, `2024` would be a number and `log #1.csv` would lose its end."""
    return json.dumps(str(path), ensure_ascii=False)


@contextmanager
def _errors_as_messages() -> Iterator[None]:
    """What a user can mend is a message and exit status 2, never a traceback."""
    try:
        yield
    except Exception as error:
        if os.environ.get("RANK", "0") != "0":
            # The first of torchrun's processes has the same to say, or is the cause; torchrun then ends this one.
            time.sleep(SECONDS_FOR_THE_FIRST)
        if not isinstance(error, BundleError | ConfigError | DataError | OSError):
            raise
        typer.echo(f"bft-train: {error}", err=True)
        raise typer.Exit(2) from None


def _print(result: Any, as_json: bool) -> None:
    typer.echo(json.dumps(result) if as_json else result)


def _replay_text(found: "Replay") -> str:
    """The estimates as a person reads them."""
    estimates = found.estimates
    refused = ", ".join(f"{number:,} {reason}" for reason, number in found.refused.items()) or "none"
    rates = {
        "logged": estimates.logged,
        "target, IPS": estimates.ips,
        "target, SNIPS": estimates.snips,
        "SNIPS less logged": estimates.difference,
    }
    return "\n".join(
        [
            f"{found.lists:,} lists, {found.support:.1%} of them with support; refused: {refused}",
            f"hits a list, over {estimates.lists:,} lists of {estimates.subjects:,} subjects (95 % interval)",
            *(f"  {name:18} {rate.value:+.4f} ({rate.low:+.4f} … {rate.high:+.4f})" for name, rate in rates.items()),
            f"worth {estimates.effective_lists:,.0f} lists of the target; weights: largest"
            f" {estimates.largest_weight:.1f}, mean {estimates.mean_weight.value:.3f}",
        ]
    )


def _print_index(index: registries.RegistryIndex, as_json: bool) -> None:
    fields = index.to_json()
    text = "\n".join(
        f"{key:11} {', '.join(value) if isinstance(value, list) else value}" for key, value in fields.items()
    )
    _print(fields if as_json else text, as_json)


def _found_fields(found: datasets.FoundDataset) -> dict[str, Any]:
    return {
        "name": found.name,
        "users": found.size.users,
        "items": found.size.items,
        "events": found.size.events,
        "density": found.size.density,
        "sha256": found.sha256,
        "path": str(found.config.path),
        "bytes": datasets.size_bytes(found.config.path),
        "titles": str(found.titles) if found.titles else None,
    }


def _added_fields(added: adding.AddedDataset) -> dict[str, Any]:
    rejects = str(added.rejects) if added.rows_rejected else None
    reading = {"rows_rejected": added.rows_rejected, "rejects": rejects}
    return {**_found_fields(added.dataset), **reading, "added": added.is_new}


def _missing_fields(known: datasets.Dataset) -> dict[str, Any]:
    file = known.interactions
    return {
        "name": known.name,
        "file": file.name,
        "sha256": file.sha256,
        "how": known.how_to_get,
        "terms": known.terms,
    }


def _found_text(found: datasets.FoundDataset) -> str:
    size, path = found.size, found.config.path
    titles = f"\n  titles {found.titles}" if found.titles else ""
    return (
        f"{found.name}: {size.users:,} users, {size.items:,} items, {size.events:,} events,"
        f" density {size.density:.3%}\n"
        f"  log {path}, {datasets.size_bytes(path):,} bytes\n  sha256 {found.sha256}{titles}"
    )


def _added_text(added: adding.AddedDataset) -> str:
    known = datasets.DATASETS.get(added.dataset.name)
    lines = [_found_text(added.dataset)]
    if known:
        lines.append(f"  {known.terms}")
    if added.rows_rejected:
        lines.append(f"  {added.rows_rejected:,} bad rows, set aside whenever it is read: {added.rejects}")
    if not added.is_new:
        lines.append("  was there already, nothing was written")
    return "\n".join(lines)


def _missing_text(known: datasets.Dataset) -> str:
    return f"{known.name} is not there: {known.how_to_get}\n  {known.terms}"


def _figures_text(figures: dict[str, Any]) -> str:
    """The figures as a person reads them: the model beside popularity, then the confidence."""
    popularity, intervals = figures["popularity"], figures["intervals"]
    lines = [f"test, {figures['users']:,} users, full ranking     model    popularity    gain (95 % interval)"]
    for name in ("hr@10", "ndcg@10"):
        low, high = intervals[f"{name} minus popularity"]
        gain = f"{figures[name] - popularity[name]:+.4f} ({low:+.4f} … {high:+.4f})"
        lines.append(f"  {name.upper():32}  {figures[name]:.4f}        {popularity[name]:.4f}    {gain}")
    null_low, null_high = figures["ece_null_interval"]
    rows = {
        "NLL of the next item": f"{figures['nll']:.3f} nats (uniform {figures['uniform_nll']:.3f})",
        "stated confidence of the ten": f"{figures['mean_confidence']:.4f}",
        "share of the ten that hit": f"{figures['hit_rate_per_item']:.4f}",
        "ECE@10": f"{figures['ece@10']:.4f} (a perfect model: {null_low:.4f} … {null_high:.4f})",
        "Brier skill@10": f"{figures['brier_skill@10']:+.4f}",
    }
    return "\n".join(lines + [f"  {name:32}  {text}" for name, text in rows.items()])


if __name__ == "__main__":
    main()
