"""`/livez`, `/readyz` and `/metrics`, on their own listener."""

import asyncio

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from service.routes.dependencies import LifeDep

router = APIRouter(tags=["operations"])


@router.get("/livez", summary="The process runs", response_class=PlainTextResponse)
async def live() -> str:
    """Touches nothing: a restart helps only when this fails."""
    return "ok"


@router.get("/readyz", summary="Requests will be answered", response_class=PlainTextResponse)
async def ready(life: LifeDep) -> str:
    """200 after a recent real inference; 503 with the reason while starting, draining or broken."""
    await life.check_ready()
    return "ok"


@router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
async def metrics(life: LifeDep) -> Response:
    """Every metric of this process."""
    await life.refresh_gauges()
    # In a thread: it takes tens of milliseconds, in which requests are answered.
    text = await asyncio.to_thread(generate_latest, life.metrics.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
