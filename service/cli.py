"""`bft-serve`: run the service, or check that a bundle computes here what it computed in training."""

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn
import uvloop
from fastapi import FastAPI

from model.bundle import BundleError, open_bundle
from model.registry import resolve
from service.app import create_app, create_ops_app
from service.engine import PARITY_TOLERANCE, Engine
from service.errors import StartError
from service.lifecycle import Life
from service.settings import Settings, load_settings
from service.telemetry import Metrics, configure_logging

logger = logging.getLogger(__name__)

EXIT_DIFFERS = 1
EXIT_CANNOT_START = 2

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
    port: Annotated[
        int | None, typer.Option(help="Of the public API; 0: any free one. [env: BFT_PORT]")
    ] = None,
    ops_host: Annotated[
        str | None, typer.Option(help="Of /livez, /readyz, /metrics. [env: BFT_OPS_HOST]")
    ] = None,
    ops_port: Annotated[
        int | None, typer.Option(help="Of /livez, /readyz, /metrics. [env: BFT_OPS_PORT]")
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(
            help="redis://…; without it users live in memory. Shown by ps: prefer [env: BFT_REDIS_URL]"
        ),
    ] = None,
    provider: ProviderOption = None,
    threads: ThreadsOption = None,
    drain_grace_s: Annotated[
        float | None, typer.Option(help="From SIGTERM to the end of accepting. [env: BFT_DRAIN_GRACE_S]")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="DEBUG, INFO, WARNING, ERROR. [env: BFT_LOG_LEVEL]")
    ] = None,
) -> None:
    """Serve a bundle until SIGTERM. Every setting is also an environment variable; flags win."""
    with _errors_as_text():
        settings = load_settings(
            bundle=bundle,
            host=host,
            port=port,
            ops_host=ops_host,
            ops_port=ops_port,
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
        "tolerance": PARITY_TOLERANCE,
        "ok": error <= PARITY_TOLERANCE,
        "custom_ops": {graph: list(ops) for graph, ops in opened.manifest.custom_ops.items()},
    }


async def serve(settings: Settings) -> None:
    """Run both listeners over one lifespan until SIGTERM or SIGINT, then drain.

    Raises:
        BundleError, StartError: nothing was served.
    """
    stop = _Stop()
    app = create_app(settings)
    life: Life = app.state.life
    # Both addresses are taken before a large bundle is loaded for nothing; neither listens yet.
    with (
        _bound(settings.host, settings.port) as public,
        _bound(settings.ops_host, settings.ops_port) as operations,
    ):
        async with (
            _listening(create_ops_app(life), operations, settings, stop),
            app.router.lifespan_context(app),
            _listening(app, public, settings, stop),
        ):
            logger.info("serving", extra={"public": _address(public), "operations": _address(operations)})
            await stop.wait()
            life.drain()
            logger.info("draining", extra={"grace_s": settings.drain_grace_s})
            await stop.wait_again(settings.drain_grace_s)
    logger.info("stopped")


class _Stop:
    """Wishes to end: SIGTERM, SIGINT, or a listener that ended by itself; a second one ends the grace."""

    def __init__(self) -> None:
        self._requests = asyncio.Semaphore(0)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request)

    def request(self) -> None:
        """Ask for the end."""
        self._requests.release()

    async def wait(self) -> None:
        """Until the first request."""
        await self._requests.acquire()

    async def wait_again(self, seconds: float) -> None:
        """Until another request, or for so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._requests.acquire(), seconds)


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to `_Stop`: one signal is for both listeners."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


@asynccontextmanager
async def _listening(
    app: FastAPI, listener: socket.socket, settings: Settings, stop: _Stop
) -> AsyncIterator[None]:
    """Answer on the socket; on the way out finish the requests in flight."""
    config = uvicorn.Config(
        app,
        lifespan="off",  # `serve` runs it, once for both listeners
        loop="none",
        http="httptools",
        ws="none",
        access_log=False,  # it would log paths, which hold user ids
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=round(settings.shutdown_timeout_s),
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve([listener]))
    task.add_done_callback(lambda _: stop.request())
    try:
        while not (server.started or task.done()):
            await asyncio.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        await task


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise StartError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another address"
            ) from error
        yield listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _errors_as_text() -> Iterator[None]:
    """What stops the start-up is told in one line, without a traceback."""
    try:
        yield
    except (BundleError, StartError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_CANNOT_START) from error


if __name__ == "__main__":
    main()
