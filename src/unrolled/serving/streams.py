"""Server-sent events: chunks of JSON that are sent to a client as soon as they are made."""

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from unrolled.serving.gone import GoneError, unless_gone
from unrolled.serving.logs import Record, record_of
from unrolled.serving.protocol.errors import ApiError

Chunks = AsyncGenerator[dict[str, Any], None]
DONE = b"data: [DONE]\n\n"
log = logging.getLogger("unrolled.serving")


async def stream(request: Request, chunks: Chunks) -> "EventStream":
    """Return the response of a stream once its first chunk has been made.

    Raises:
        ApiError: there was an error before the first chunk; it is the response then.
        GoneError: the client went away before the first chunk.
    """
    try:
        first = await unless_gone(request, _next(chunks))
    except BaseException:
        await chunks.aclose()
        raise
    return EventStream(first, chunks)


class EventStream(Response):
    """A response of chunks and then [DONE]; after an error, an event with this error ends it.

    Args:
        first: the first chunk.
        chunks: the other chunks; closed at the end, also when the client goes away.
    """

    media_type = "text/event-stream"

    def __init__(self, first: dict[str, Any], chunks: Chunks) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first, self._chunks, self._whole = first, chunks, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client goes away."""
        request = Request(scope, receive)
        try:
            await unless_gone(request, self._send(send, record_of(request)))
        except (GoneError, OSError):  # OSError: sending found that the client has gone
            if not self._whole:
                record_of(request).cut = "client_closed"
        finally:
            await self._chunks.aclose()

    async def _send(self, send: Send, record: Record) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        async for event in self._events(record):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, record: Record) -> AsyncIterator[bytes]:
        yield _event(self._first)
        try:
            async for chunk in self._chunks:
                yield _event(chunk)
        except ApiError as error:
            record.cut = error.code or str(error.status_code)
            yield _event(error.body())
        except Exception:
            log.exception("a stream failed")
            record.cut = "server_error"
            yield _event(ApiError(500, "the server failed").body())
        else:
            self._whole = True
            yield DONE


async def _next(chunks: Chunks) -> dict[str, Any]:
    return await anext(chunks)


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
