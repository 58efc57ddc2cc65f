"""/health, /ready and /metrics, for the operators of the server."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from unrolled.serving.protocol.answers import Health, answers
from unrolled.serving.protocol.errors import ApiError
from unrolled.serving.service import service_of

router = APIRouter()
FORMAT = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/health", responses=answers(Health))
@router.head("/health", include_in_schema=False)
async def health(request: Request) -> Response:
    """Report whether the engines run; if one has ended, the process must be restarted."""
    stopped = [served.name for served in service_of(request).models.values() if not served.engine.alive]
    if stopped:
        raise ApiError(503, f"the engine of {', '.join(stopped)} does not run", code="stopped")
    return JSONResponse({"status": "ok"})


@router.get("/ready", responses=answers(Health))
@router.head("/ready", include_in_schema=False)
async def ready(request: Request) -> Response:
    """Report whether the server accepts requests, which it does not while it stops."""
    if not service_of(request).ready:
        raise ApiError(503, "the server is stopping", code="stopping")
    return JSONResponse({"status": "ready"})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return the metrics of the server, in the format of Prometheus."""
    return Response(service_of(request).metrics.text(), media_type=FORMAT)
