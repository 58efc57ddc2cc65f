"""Several replicas on this machine, in an instance of Ray Serve that is started and ended with them."""

import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from unrolled.serving.opening import Options
from unrolled.serving.ray import Arguments, app
from unrolled.serving.server import free_place, shown

NAME = "unrolled"  # name of the application
OBJECTS = 100 * 2**20  # bytes of Ray's shared memory, which is not used here
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # As on Windows and macOS: all parts of Ray listen at 127.0.0.1, which other machines cannot reach.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_AUTH_MODE": "token",
}


def serve_replicas(options: Options, replicas: int, ready: Callable[[str], None] = print) -> None:
    """Serve models by several processes until SIGTERM or SIGINT; then let running requests end.

    After the signal, requests that take too long are cut off. A second signal ends this process and Ray at
    once.

    Args:
        options: the options of the server.
        replicas: number of processes.
        ready: called with the address once requests are answered.

    Raises:
        ValueError, OSError: as `Options.check`, or the server cannot listen at the address.
        ImportError: Ray is missing.
        RuntimeError: the replicas did not start.
    """
    options.check()
    address, port = free_place(options.host, options.port)
    # Ray reads these when it is imported. With this token, it writes no file to the home folder.
    os.environ |= ENVIRONMENT | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    _on_signals()
    try:
        with suppress(
            KeyboardInterrupt, SystemExit
        ):  # SystemExit comes from the handler that Ray sets when it starts
            _start(options, replicas, address, port)
            ready(f"http://{shown(address)}:{port}")
            threading.Event().wait()
    finally:
        _end()


def _start(options: Options, replicas: int, address: str, port: int) -> None:
    """Start Ray and return once the replicas answer."""
    import ray
    from ray import serve

    cores = max(1, (os.cpu_count() or 1) // replicas)
    arguments = Arguments(**options.from_the_root(), replicas=replicas, cpus=cores)
    ray.init(
        address="local",
        num_cpus=cores * replicas,
        object_store_memory=OBJECTS,
        include_dashboard=False,
        logging_level=logging.WARNING,
    )
    _on_signals()  # Ray has set its own
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(http_options={"host": address, "port": port}, logging_config={"log_level": "WARNING"})
    serve.run(app(arguments), name=NAME, route_prefix="/")


def _end() -> None:
    """Let requests end, then stop as much of Ray as has started."""
    with suppress(Exception):  # for example, Ray has not started or has already ended
        import ray
        from ray import serve

        if ray.is_initialized():
            with suppress(Exception):  # for example, there is no application yet
                serve.delete(NAME)
            ray.shutdown()


_stopping = threading.Event()


def _on_signals() -> None:
    """Let the first SIGTERM or SIGINT interrupt this thread; the second ends the process."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if _stopping.is_set():
            os._exit(128 + number)
        _stopping.set()
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
