"""`bft-train`: train a model from an interaction log, judge it, fetch data, manage the registry."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from model import registry as registries
from model.bundle import Bundle, BundleError, open_bundle
from training import datasets
from training.config import ConfigError, load_config, override_config
from training.events import DataConfig
from training.progress import reporter
from training.tables import DataError

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
data_app = typer.Typer(no_args_is_help=True, help="Data sets.")
registry_app = typer.Typer(no_args_is_help=True, help="Published bundles: which one is current, and going back.")
app.add_typer(data_app, name="data")
app.add_typer(registry_app, name="registry")

# Read when torch is imported, below. A thread that waits for the others sleeps instead of spinning: with other work on
# the same cores, spinning made an epoch many times longer.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

SECONDS_FOR_THE_FIRST = 5.0
"""How long the others leave it to the first process to say what went wrong."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
RegistryOption = Annotated[Path, typer.Option("--registry", help="The registry's folder.")]


@app.command()
def fit(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="e.g. model=hstu model.width=128 training.epochs=20"),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML configuration file.")] = None,
    data: Annotated[Path | None, typer.Option(help="The interaction log; same as data.path=…")] = None,
    titles: Annotated[Path | None, typer.Option(help="The items' titles; same as titles=…")] = None,
    out: Annotated[Path, typer.Option(help="The run's folder; the bundle goes to OUT/registry.")] = Path("runs/latest"),
    resume: Annotated[bool, typer.Option(help="Go on from this configuration's checkpoint, if there is one.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model, calibrate it, judge it on test users, and publish the bundle.

    Ends with the test figures. Nothing is published unless everything went well. `torchrun --nproc-per-node 2 -m
    training.cli fit …` trains in two processes, each with half of every batch.
    """
    with _errors_as_messages():
        named = [f"{key}={_as_yaml(path)}" for key, path in (("data.path", data), ("titles", titles)) if path]
        run_config = load_config(config, [*named, *(overrides or [])])
        # torch takes seconds to import: a mistake above, and the other commands, need not wait for it.
        from training.distributed import joined
        from training.pipeline import train

        with joined(run_config.training.device) as world, reporter(silent=not world.is_first) as progress:
            trained = train(run_config, out, progress, sys.argv, resume, world)
    figures = trained.record["test"]
    if world.is_first:
        _print({"bundle": str(trained.bundle), **figures} if as_json else _figures_text(figures), as_json)


@app.command()
def evaluate(
    bundle: Annotated[Path, typer.Option(help="A bundle's folder or a registry.")],
    data: Annotated[Path, typer.Option(help="The interaction log whose test users are ranked for.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="How to read the log where it differs from training, e.g. format=csv"
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
    data: Annotated[Path | None, typer.Option(help="An interaction log: its test users, or one with --user.")] = None,
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
            metavar="[KEY=VALUE]...", help="How to read the log where it differs from training, e.g. format=csv"
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


@data_app.command()
def fetch(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(datasets.DATASETS)}")],
    cache: Annotated[Path | None, typer.Option(help="Where to keep it; default: the user's cache folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a public data set, verify its checksum, and keep it; a second call takes no network."""
    with _errors_as_messages(), reporter() as progress:
        fetched = datasets.fetch(name, cache, lambda step: progress.stage(step.message))
    paths = {"interactions": str(fetched.interactions), "items": str(fetched.items)}
    _print(paths if as_json else "\n".join(paths.values()), as_json)


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
    """How to read a log: as the bundle's was read, but for the overrides."""
    as_trained = {"data": dict(bundle.manifest.training["config"]["data"])}
    named = [f"data.path={_as_yaml(data)}", *(f"data.{item}" for item in overrides or [])]
    return override_config(as_trained, named, "configuration").data


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


def _print_index(index: registries.RegistryIndex, as_json: bool) -> None:
    fields = index.model_dump(mode="json")
    text = "\n".join(
        f"{key:9} {', '.join(value) if isinstance(value, list) else value}" for key, value in fields.items()
    )
    _print(fields if as_json else text, as_json)


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
