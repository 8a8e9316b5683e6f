"""`bft-serve`: run the service, check that a bundle computes here what it computed in training, or keep its lists."""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from model.bundle import BundleError, open_bundle
from model.registry import resolve
from service.engine import Engine
from service.errors import StartError
from service.listeners import serve
from service.security import new_key, toml_entry
from service.settings import Settings, load_settings
from service.slate_log import AFTER_S, SESSION_SLATES_S, Export, ExportError, export
from service.states.interface import StateUnavailable, wall_clock_ms
from service.states.redis import connect
from service.states.scanning import kept_slates
from service.telemetry import Metrics, configure_logging

EXIT_DIFFERS = 1
EXIT_CANNOT_START = 2
SCAN_TIMEOUT_S = 10.0

cli = typer.Typer(
    name="bft-serve", help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)

BundleOption = Annotated[
    Path | None, typer.Option(help="A bundle's folder, or a registry with a published one. [env: BFT_BUNDLE]")
]
ProviderOption = Annotated[str | None, typer.Option(help="auto, cpu or cuda. [env: BFT_PROVIDER]")]
ThreadsOption = Annotated[int | None, typer.Option(help="Threads of one inference. [env: BFT_THREADS]")]


def main() -> None:
    """The entry point of the command `bft-serve`."""
    cli()


@cli.command()
def run(
    bundle: BundleOption = None,
    host: Annotated[str | None, typer.Option(help="Of the public API. [env: BFT_HOST]")] = None,
    port: Annotated[int | None, typer.Option(help="Of the public API; 0: any free one. [env: BFT_PORT]")] = None,
    ops_host: Annotated[str | None, typer.Option(help="Of /livez, /readyz, /metrics. [env: BFT_OPS_HOST]")] = None,
    ops_port: Annotated[int | None, typer.Option(help="Of /livez, /readyz, /metrics. [env: BFT_OPS_PORT]")] = None,
    admin_host: Annotated[
        str | None, typer.Option(help="Of /v1/models; off loopback only with BFT_ADMIN_KEY. [env: BFT_ADMIN_HOST]")
    ] = None,
    admin_port: Annotated[int | None, typer.Option(help="Of /v1/models. [env: BFT_ADMIN_PORT]")] = None,
    registry_poll_s: Annotated[
        float | None, typer.Option(help="How often to look for a new bundle; 0: never. [env: BFT_REGISTRY_POLL_S]")
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(help="redis://…; without it users live in memory. Shown by ps: prefer [env: BFT_REDIS_URL]"),
    ] = None,
    provider: ProviderOption = None,
    threads: ThreadsOption = None,
    drain_grace_s: Annotated[
        float | None, typer.Option(help="From SIGTERM to the end of accepting. [env: BFT_DRAIN_GRACE_S]")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING, ERROR. [env: BFT_LOG_LEVEL]")] = None,
) -> None:
    """Serve a bundle until SIGTERM. Every setting is also an environment variable; flags win."""
    with _errors_as_text():
        settings = load_settings(
            bundle=bundle,
            host=host,
            port=port,
            ops_host=ops_host,
            ops_port=ops_port,
            admin_host=admin_host,
            admin_port=admin_port,
            registry_poll_s=registry_poll_s,
            redis_url=redis_url,
            provider=provider,
            threads=threads,
            drain_grace_s=drain_grace_s,
            log_level=log_level,
        )
        configure_logging(settings.log_level)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))


@cli.command()
def check(
    bundle: BundleOption = None,
    provider: ProviderOption = None,
    threads: ThreadsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare ONNX Runtime on this machine with the bundle's golden outputs; exit 1 when they differ."""
    with _errors_as_text():
        settings = load_settings(bundle=bundle, provider=provider, threads=threads)
        report = check_bundle(settings)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        for name, value in report.items():
            typer.echo(f"{name}: {value}")
    if not report["ok"]:
        raise typer.Exit(EXIT_DIFFERS)


@cli.command(name="export-slates")
def export_slates(
    out: Annotated[Path, typer.Option(help="The folder of the files. Keep the newest: the next run begins there.")],
    redis_url: Annotated[
        str, typer.Option(envvar="BFT_REDIS_URL", help="redis://…, of the running service. Shown by ps.")
    ],
    redis_cluster: Annotated[
        bool, typer.Option(envvar="BFT_REDIS_CLUSTER", help="The server is a Redis Cluster.")
    ] = False,
    after_s: Annotated[
        int, typer.Option(min=0, max=1500, help="How long a list is left for an event to settle it.")
    ] = AFTER_S,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Take the lists that were served, and what followed them, to a file for `bft-train replay`, before they expire.

    Each run writes those made since the last run. Run it from cron every ten minutes.
    """
    with _errors_as_text():
        found = asyncio.run(_export_slates(out, redis_url, redis_cluster, after_s))
    if found.perhaps_missed_s:
        typer.echo(
            f"warning: {found.perhaps_missed_s} s passed unread, and lists for sessions of that time have expired"
            f" (after an hour those for users too); run this at least every {SESSION_SLATES_S - after_s} s",
            err=True,
        )
    if found.unreadable:
        typer.echo(
            f"warning: {found.unreadable} lists are in no file: another version of the service kept them."
            " Run the command of that version",
            err=True,
        )
    fields = {**asdict(found), "file": str(found.file)}
    typer.echo(json.dumps(fields) if as_json else f"{found.file}: {found.slates} lists, {found.settled} settled")


async def _export_slates(out: Path, redis_url: str, redis_cluster: bool, after_s: int) -> Export:
    try:
        client = connect(redis_url, SCAN_TIMEOUT_S, redis_cluster)
    except ValueError as error:
        # Its message names the accepted schemes and not the URL, which may hold a password.
        raise StartError(f"BFT_REDIS_URL: {error}") from error
    try:
        return await export(kept_slates(client), out, wall_clock_ms(), after_s)
    finally:
        await client.aclose()


@cli.command(name="new-key")
def make_key(
    name: Annotated[str, typer.Argument(help="Who gets the key; appears in logs.")],
    requests_per_second: Annotated[int | None, typer.Option(min=1, help="Its quota.")] = None,
    burst: Annotated[int | None, typer.Option(min=1, help="How many at once after a pause.")] = None,
) -> None:
    """Make an API key: print it once, on standard error, and its entry of the keys file on standard output."""
    with _errors_as_text():
        key = new_key()
        entry = toml_entry(name, key, requests_per_second, burst)
    typer.echo(f"The key, which is kept nowhere: {key}", err=True)
    typer.echo(entry)


def check_bundle(settings: Settings) -> dict[str, Any]:
    """What `bft-serve check` prints. Raises as `Engine` and `Engine.parity_error` do."""
    opened = open_bundle(resolve(settings.bundle))
    engine = Engine(opened, settings, Metrics())
    error = engine.parity_error()
    return {
        "bundle": str(opened.folder),
        "name": opened.manifest.name,
        "version": opened.manifest.version,
        "provider": engine.provider,
        "max_error": error,
        "tolerance": opened.manifest.parity_tolerance,
        "ok": error <= opened.manifest.parity_tolerance,
        "custom_ops": {graph: list(ops) for graph, ops in opened.manifest.custom_ops.items()},
    }


@contextmanager
def _errors_as_text() -> Iterator[None]:
    """What stops a command is told in one line, without a traceback."""
    try:
        yield
    except (BundleError, ExportError, StartError, StateUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_CANNOT_START) from error


if __name__ == "__main__":
    main()
