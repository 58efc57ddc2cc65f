"""Several replicas on this machine: Ray Serve, started for them alone and ended with them."""

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

NAME = "unrolled"  # of the application
OBJECTS = 100 * 2**20  # bytes of Ray's shared memory, through which nothing passes here
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # What Ray does on Windows and macOS: every part listens at 127.0.0.1 and at no address others can reach.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_AUTH_MODE": "token",
}


def serve_replicas(options: Options, replicas: int, ready: Callable[[str], None] = print) -> None:
    """Serve models by several processes until SIGTERM or SIGINT; then let running requests end.

    Requests that take too long then are cut off. A second signal ends this process at once, and Ray with it.

    Args:
        options: what is served.
        replicas: the number of processes.
        ready: called with the address once requests are answered.

    Raises:
        ValueError, OSError: what `Options.check` raises, or the address cannot be listened at.
        ImportError: Ray is missing.
        RuntimeError: the replicas did not start.
    """
    options.check()
    address, port = free_place(options.host, options.port)
    # Ray reads these when it is imported. A token from here leaves no file in the home folder.
    os.environ |= ENVIRONMENT | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray
    from ray import serve

    cores = max(1, (os.cpu_count() or 1) // replicas)
    fields = options.from_the_root() | {"replicas": replicas, "cpus": cores}
    arguments = Arguments(**fields)
    _on_signals()
    try:
        with suppress(KeyboardInterrupt):
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
            ready(f"http://{shown(address)}:{port}")
            threading.Event().wait()
    finally:
        if ray.is_initialized():
            with suppress(Exception):  # such as that there is no application yet, or no Ray any more
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
