"""The log, with a line of JSON for each request, and the ids of requests."""

import json
import logging
import re
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unrolled.serving.metrics import Metrics
from unrolled.serving.protocol.errors import ApiError

PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
log = logging.getLogger("unrolled.serving")
requests = logging.getLogger("unrolled.serving.requests")


@dataclass
class Record:
    """What the log says about a request.

    Attributes:
        id: the header x-request-id if it is short and plain, else a new id.
        client: address of the client, or the number of its key.
        began: when the request began, in seconds of `time.monotonic`.
        status: status of the HTTP response; 0 if there was no response.
        read: number of tokens of states and prompts.
        cached: number of these tokens that were not read again.
        drawn: number of new tokens.
        cut: why a stream ended early: the code of its error event, or "client_closed"; else None.
    """

    id: str
    client: str
    began: float = field(default_factory=time.monotonic)
    status: int = 0
    read: int = 0
    cached: int = 0
    drawn: int = 0
    cut: str | None = None


def record_of(connection: HTTPConnection) -> Record:
    """Return the record of a request."""
    found: Record = connection.state.record
    return found


class Logged:
    """Gives each request an id and a record, writes its line, and answers unexpected errors with 500.

    Args:
        app: the app that answers.
        metrics: counts requests by route and status.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        address = (scope.get("client") or ("unknown",))[0]
        given = Headers(scope=scope).get("x-request-id", "")
        record = Record(given if PLAIN_ID.fullmatch(given) else uuid.uuid4().hex, address)
        scope.setdefault("state", {})["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception("request %s failed", record.id)
            if record.status:
                raise  # the answer has begun: the server closes the connection
            await ApiError(500, "the server failed").response()(scope, receive, send_with_id)
        finally:
            self._tell(scope, address, record)

    def _tell(self, scope: Scope, address: str, record: Record) -> None:
        found = scope.get("route")  # the route of a file of the page has only a path
        route = getattr(found, "path_format", getattr(found, "path", "none"))
        self._metrics.requests.labels(route, record.status).inc()
        if record.cut is not None:
            self._metrics.cut.labels(record.cut).inc()
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": record.id,
            "client": address,
            "method": scope["method"],
            "route": route,
            "status": record.status,
            "seconds": round(time.monotonic() - record.began, 4),
            "read": record.read,
            "cached": record.cached,
            "drawn": record.drawn,
            "cut": record.cut,
        }
        requests.info("%s", json.dumps(line))


def to_stderr() -> None:
    """Write the lines of requests to stderr as they are, and all other messages with their level."""
    for logger, form in ((requests, "%(message)s"), (log, "%(levelname)s: %(message)s")):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(form))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    requests.propagate = False
