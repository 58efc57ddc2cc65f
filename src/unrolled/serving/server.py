"""The server process: granian's HTTP server in an event loop, and each engine in its own thread.

Unlike uvicorn, granian closes connections whose headers do not come in time.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from types import FrameType

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server

from unrolled.serving.app import make_app
from unrolled.serving.logs import to_stderr
from unrolled.serving.model import Served
from unrolled.serving.settings import Settings
from unrolled.serving.states import States

CONNECTIONS = 4_096  # at least
SPARE = 64  # connections for further requests, such as /health and those that the engines refuse
STARTING = 10.0  # seconds that the server may take to listen
CLOSING = 15.0  # seconds for other requests once the engines have stopped, such as those still sending bodies
log = logging.getLogger("unrolled.serving")


def serve(
    models: Sequence[Served], states: States, settings: Settings, ready: Callable[[str], None] = print
) -> None:
    """Serve models until SIGTERM or SIGINT; then let running requests end, and close the states.

    After the signal, no new requests are accepted, and requests that take longer than `settings.drain` get an
    error. A second signal ends the process at once.

    Args:
        models: the models.
        states: the states that clients keep.
        settings: the settings of the server.
        ready: called with the address once the server accepts requests.

    Raises:
        ValueError: two models have the same name.
        OSError: the server cannot listen at the address.
    """
    asyncio.run(_serve(models, states, settings, ready))


async def _serve(
    models: Sequence[Served], states: States, settings: Settings, ready: Callable[[str], None]
) -> None:
    app = make_app(models, states, settings)
    address, port = free_place(settings.host, settings.port)
    to_stderr()
    server = Server(
        app,
        address=address,
        port=port,
        interface=Interfaces.ASGI,
        http=HTTPModes.http1,
        websockets=False,
        backlog=connections(models),
        backpressure=connections(models),
        http1_settings=HTTP1Settings(header_read_timeout=int(1_000 * settings.header_seconds)),
        log_enabled=False,
    )
    stop = _on_signals()
    running = asyncio.create_task(server.serve())
    await _listening(address, port, running)
    ready(f"http://{shown(address)}:{port}")
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
    app.state.service.ready = False
    server.stop()  # type: ignore[no-untyped-call]  # it waits for responses that have begun
    await asyncio.gather(*(asyncio.to_thread(x.engine.drain, settings.drain) for x in models))
    try:
        await asyncio.wait_for(running, CLOSING)
    except TimeoutError:
        log.warning("some connections did not end in time")
    finally:
        stopped.cancel()
        await asyncio.to_thread(states.close)


def connections(models: Sequence[Served]) -> int:
    """Return the maximum number of connections: more than requests run and wait, so that queues fill first.

    Args:
        models: the models.
    """
    return max(CONNECTIONS, sum(served.engine.most for served in models) + SPARE)


def _on_signals() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; a second signal ends the process."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)
        loop.call_soon_threadsafe(stop.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return stop


def free_place(host: str, port: int) -> tuple[str, int]:
    """Return the address and the port to listen at, which no other server may use.

    This is checked because granian would share the port with another server.

    Args:
        host: name or address to listen at.
        port: TCP port; 0 takes a free port.

    Raises:
        OSError: the server cannot listen there.
    """
    family, kind, protocol, _, place = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(place)
        except OSError as error:
            raise OSError(error.errno, f"cannot listen at {host}:{port}: {error.strerror}") from error
        bound = found.getsockname()
    return str(bound[0]), int(bound[1])


async def _listening(address: str, port: int, running: "asyncio.Task[None]") -> None:
    """Wait until the server accepts connections."""
    until = asyncio.get_running_loop().time() + STARTING
    while True:
        try:
            _, writer = await asyncio.open_connection(_reachable(address), port)
        except OSError:
            if running.done() or asyncio.get_running_loop().time() > until:
                raise
            await asyncio.sleep(0.02)
        else:
            writer.close()
            await writer.wait_closed()
            return


def _reachable(address: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)


def shown(address: str) -> str:
    """Return an address as in URLs, where an IPv6 address is in brackets."""
    return f"[{address}]" if ":" in address else address
