"""Clients that go away while they are answered."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

Result = TypeVar("Result")


class GoneError(Exception):
    """The client has gone away."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`, and cancel it if the client goes away.

    Raises:
        GoneError: the client went away; the work was cancelled.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(until_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise GoneError
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


async def until_gone(receive: Receive) -> None:
    """Return once the client has gone away; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
