"""Checks before the routes: host names, keys, rates, and the size and speed of bodies."""

import asyncio
import hmac
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from limits import parse
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unrolled.serving.logs import record_of
from unrolled.serving.protocol.errors import ApiError
from unrolled.serving.settings import LOOPBACK, Settings

OPEN = ("/", "/health", "/ready")
OPEN_FOLDER = "/page/"
STATES = "/v1/states/"
DROPPED = 16 * 2**20  # bytes above the limit that are still read: clients look for an answer once all is sent


class LocalHosts:
    """Passes on only requests whose header Host names this machine.

    Args:
        app: the app that answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "http" and _name(host := Headers(scope=scope).get("host", "")) not in LOOPBACK:
            names = ", ".join(LOOPBACK)
            error = ApiError(400, f"the header Host is {host!r}, but must be one of {names}", param="Host")
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _name(host: str) -> str | None:
    """Return the name in a header Host, without the port; None if there is no name."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:  # brackets that hold no address
        return None


class Keys:
    """Passes on only requests that have one of the keys, and limits the rate of each client.

    Args:
        app: the app that answers.
        keys: the keys, which are compared in constant time. A client is a key; without keys, an address.
        rate: maximum rate of requests of a client, such as "600/minute".
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], rate: str | None) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]
        self._rate = None if rate is None else parse(rate)
        self._limiter = MovingWindowRateLimiter(MemoryStorage())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        path = scope.get("path", "")
        if scope["type"] == "http" and path not in OPEN and not path.startswith(OPEN_FOLDER):
            record = record_of(HTTPConnection(scope))
            try:
                if self._keys:
                    record.client = self._known(Headers(scope=scope).get("authorization", ""))
                self._count(record.client)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _known(self, header: str) -> str:
        kind, _, given = header.partition(" ")
        secret = given.strip().encode("utf-8", "replace")
        matches = [hmac.compare_digest(secret, key) for key in self._keys]  # compares all: constant time
        if kind.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "the header Authorization must be 'Bearer KEY' with a key of this server",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return f"key {matches.index(True)}"

    def _count(self, client: str) -> None:
        if self._rate is None or self._limiter.hit(self._rate, client):
            return
        again = self._limiter.get_window_stats(self._rate, client).reset_time - time.time()
        raise ApiError(
            429,
            f"more than {self._rate.amount} requests in {self._rate.get_expiry()} seconds",
            code="rate_limit_exceeded",
            headers={"retry-after": str(max(1, round(again + 0.5)))},
        )


class Bodies:
    """Refuses bodies that are compressed (415), too large (413) or too slow (408).

    The connections of large and slow bodies are closed.

    Args:
        app: the app that answers.
        settings: the limits.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whose body is checked as it is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        settings, headers = self._settings, Headers(scope=scope)
        if headers.get("content-encoding", "identity").lower() != "identity":
            error = ApiError(415, "content-encoding is not supported", param="content-encoding")
            await error.response()(scope, receive, send)
            return
        most = settings.upload_bytes if scope["path"].startswith(STATES) else settings.body_bytes
        declared = headers.get("content-length", "")
        began, size, whole = time.monotonic(), 0, False

        async def receive_checked() -> Message:
            nonlocal size, whole
            if whole:
                return await receive()  # returns when the client goes away
            expected = int(declared[:20]) if declared.isdecimal() else 0
            while not whole and max(size, expected) <= most + DROPPED:
                left = began + settings.body_seconds + size / 2**20 - time.monotonic()
                try:
                    message = await asyncio.wait_for(receive(), max(left, 0))
                except TimeoutError:
                    raise ApiError(
                        408, "the body came too slowly", code="slow_body", headers={"connection": "close"}
                    ) from None
                if message["type"] != "http.request":
                    return message
                size += len(message.get("body", b""))
                whole = not message.get("more_body", False)
                if max(size, expected) <= most:
                    return message
            raise _too_large(most)

        await self._app(scope, receive_checked, send)


def _too_large(most: int) -> ApiError:
    return ApiError(
        413, f"the body has more than {most} bytes", code="body_too_large", headers={"connection": "close"}
    )
