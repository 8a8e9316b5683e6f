"""Readiness, and what surrounds a request, without a socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from service.engine import Engine
from service.errors import DeadlinePassed, EngineStopped, NotReady
from service.lifecycle import Life
from service.middleware import RequestMiddleware
from service.settings import Settings
from service.telemetry import Metrics

pytestmark = pytest.mark.anyio


@pytest.fixture
async def life(tiny: Path) -> AsyncIterator[Life]:
    # An age of next to nothing: every check makes an inference of its own.
    life = Life(Settings(bundle=tiny, threads=1, ready_max_age_s=1e-9), Metrics())
    async with life.open():
        yield life


async def test_a_life_is_ready_between_opening_and_draining(tiny: Path) -> None:
    life = Life(Settings(bundle=tiny, threads=1), Metrics())
    with pytest.raises(NotReady, match="starting"):
        await life.check_ready()
    async with life.open():
        await life.check_ready()
        life.drain()
        with pytest.raises(NotReady, match="draining"):
            await life.check_ready()


async def test_readiness_turns_red_when_the_inference_worker_dies(life: Life) -> None:
    await life.check_ready()
    task = life.models.active.default.engine._batcher._task
    assert task is not None
    task.cancel()
    await asyncio.wait([task])

    with pytest.raises(EngineStopped):
        await life.check_ready()


async def test_readiness_turns_red_when_inference_hangs(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(engine: Engine, row: Any, request: Any) -> Any:
        raise DeadlinePassed("the probe waited in vain")

    monkeypatch.setattr(Engine, "encode", hang)

    with pytest.raises(DeadlinePassed):
        await life.check_ready()


async def test_a_recent_inference_is_proof_enough(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_more(engine: Engine, row: Any, request: Any) -> Any:
        raise AssertionError("another inference")

    life = Life(Settings(bundle=tiny, threads=1, ready_max_age_s=600), Metrics())
    async with life.open():
        await life.check_ready()
        monkeypatch.setattr(Engine, "encode", no_more)
        await life.check_ready()


# ---- around a request ------------------------------------------------------------------------------------


async def call(app: Any, *messages: Message, settings: Settings) -> list[Message]:
    """What the middleware sends when a client sends these messages."""
    waiting, sent = list(messages), list[Message]()

    async def receive() -> Message:
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "http", "method": "POST", "path": "/x", "raw_path": b"/x", "headers": []}
    await RequestMiddleware(app, settings, Metrics())(scope, receive, send)
    return sent


WHOLE = {"type": "http.request", "body": b"{}", "more_body": False}
LEFT = {"type": "http.disconnect"}


async def test_a_client_that_leaves_is_noticed_while_its_request_is_worked_on() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        context = scope["state"]["context"]
        assert (await receive())["body"] == b"{}"
        assert not context.client_left
        assert (await receive())["type"] == "http.disconnect"
        assert context.client_left

    assert await call(app, WHOLE, LEFT, settings=Settings(bundle=Path("x"))) == []


async def test_a_mistake_of_ours_is_a_500_problem_without_its_details() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError("secret")

    start, body = await call(app, WHOLE, settings=Settings(bundle=Path("x")))

    assert start["status"] == 500
    assert dict(start["headers"])[b"content-type"] == b"application/problem+json"
    problem = json.loads(body["body"])
    assert problem["type"] == "urn:problem-type:bft:internal"
    assert "secret" not in body["body"].decode()
