"""The ASGI app: OpenAI's API for models whose state is a value.

POST /v1/completions, /v1/chat/completions, /v1/images/completions
GET  /v1/models, /v1/models/{id}
GET, PUT, DELETE /v1/states/{id}, /v1/sessions/{name}
POST /tokenize, /detokenize; GET /tokenizer_info
GET  /health, /ready, /metrics, /openapi.json; / and /page/, which are the web page
"""

import importlib.util
import os
from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from unrolled.serving.gone import GoneError
from unrolled.serving.guards import Bodies, Keys, LocalHosts
from unrolled.serving.logs import Logged
from unrolled.serving.model import Served
from unrolled.serving.openapi import describe_models
from unrolled.serving.protocol.errors import ApiError, error_body, of_validation
from unrolled.serving.routes import chat, completions, images, models, operation, states, tokens
from unrolled.serving.routes.page import add_page
from unrolled.serving.service import Service
from unrolled.serving.settings import Settings
from unrolled.serving.states import States

CLIENT_CLOSED = 499
ROUTES = (completions, chat, images, models, states, tokens, operation)


def make_app(served: Sequence[Served], states: States, settings: Settings) -> FastAPI:
    """Return the app; its parts are in `app.state.service`.

    Args:
        served: the models; the first is used for requests that name no model, where that is allowed.
        states: the states that clients keep.
        settings: the settings of the server.

    Raises:
        ValueError: there is no model, or two models have the same name.
    """
    service = Service.of(served, states, settings)
    exported = "OTEL_EXPORTER_OTLP_ENDPOINT" in os.environ and _has("opentelemetry.exporter.otlp.proto.http")
    app = FastAPI(
        title="unrolled",
        docs_url=None,
        redoc_url=None,
        telemetry={"auto_configure": exported, "logs": False, "operation_spans": False},
    )
    app.state.service = service
    for module in ROUTES:
        app.include_router(module.router, responses={"4XX": _error_schema(), "5XX": _error_schema()})
    describe_models(app, list(service.models))
    add_page(app)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(GoneError, _on_gone)
    app.add_exception_handler(ClientDisconnect, _on_gone)
    # The middleware that is added last sees a request first.
    app.add_middleware(Bodies, settings=settings)
    app.add_middleware(Keys, keys=settings.keys, rate=settings.rate)
    if settings.origin is not None:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[settings.origin],
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=["etag", "retry-after", "x-request-id"],
        )
    if settings.loopback:  # refuses pages whose host name was made to point here (DNS rebinding)
        app.add_middleware(LocalHosts)
    app.add_middleware(Logged, metrics=service.metrics)
    return app


async def _on_http(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return error.response()
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ClientDisconnect):  # FastAPI reports it as a body that cannot be parsed
        return await _on_gone(request, error)
    body = error_body(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(
        body, error.status_code, _allowed(request) if error.status_code == 405 else error.headers
    )


def _allowed(request: Request) -> dict[str, str]:
    """Return the header with all methods of a path: each method has its own route, which knows no other."""
    operations = request.app.openapi()["paths"].get(
        getattr(request.scope.get("route"), "path_format", ""), {"get": {}}
    )
    return {"allow": ", ".join(method.upper() for method in operations)}


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return of_validation(error.errors()).response()


async def _on_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)  # only for the log: nobody reads the response


def _error_schema() -> dict[str, object]:
    text = {"type": "string"}
    known = {"type": "object", "required": ["message", "type"], "properties": {"message": text, "type": text}}
    schema = {"type": "object", "required": ["error"], "properties": {"error": known}}
    return {"description": "an error", "content": {"application/json": {"schema": schema}}}


def _has(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
