"""The app on many machines, in Ray Serve.

On a cluster: `serve run unrolled.serving.ray:app folders=/models/book states=s3://bucket/book replicas=4`.
Any replica can continue any state of the store. Requests with the same header x-session-id go to the same
replica as long as it exists, so that their states are in its memory.
"""

import math
from typing import TYPE_CHECKING, Annotated, Any, Self

from fastapi import FastAPI
from pydantic import Field, model_validator
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unrolled.serving.app import make_app
from unrolled.serving.logs import to_stderr
from unrolled.serving.opening import MEMORY, Options
from unrolled.serving.settings import Settings

if TYPE_CHECKING:
    from ray.serve import Application

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
SPARE = 64  # further requests, such as /health and those that the engines refuse
FULL = 32  # rows; with more rows, a replica draws hardly more tokens per second
CLOSING = 5.0  # seconds to close a replica after its last request
TRIES = 3  # at starting a replica: a wrong folder stays wrong


class Arguments(Options):
    """The arguments of the app, on the command line of `serve run` or as `args` in a file.

    Paths must lead to the same files on every machine. Relative paths start at the folder of `serve run`.

    Attributes:
        replicas: number of replicas; with `most_replicas`, the minimum number.
        most_replicas: maximum number of replicas. Ray then adds replicas while many requests run.
        cpus: cores of a replica; its kernels run as many threads.
        host: the address at which the `http_options` of Ray make it listen. If other machines can reach it,
            keys are required. This setting does not change where Ray listens.
    """

    replicas: Annotated[int, Field(ge=1)] = 1
    most_replicas: Annotated[int, Field(ge=1)] | None = None
    cpus: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="after")
    def _shared(self) -> Self:
        most = self.most_replicas or self.replicas
        if most < self.replicas:
            raise ValueError(
                f"most_replicas is {most}, but must be at least replicas, which is {self.replicas}"
            )
        if most > 1 and self.states == MEMORY:
            raise ValueError(f"states is {MEMORY}, which replicas do not share: name a store outside of them")
        return self


class Replica:
    """One process that answers requests.

    Args:
        options: the options of the server.
        threads: number of threads of the kernels.
    """

    def __init__(self, options: Options, threads: int) -> None:
        self._models = options.models(threads)
        self._states = options.open_states()
        self._settings = options.settings()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the app, in the process that answers."""
        from ray import serve

        to_stderr()
        app = make_app(self._models, self._states, self._settings)
        app.add_middleware(Named, name=serve.get_replica_context().replica_id.unique_id)
        return app

    def check_health(self) -> None:
        """Raise RuntimeError if an engine has ended, so that Ray replaces the replica."""
        for served in self._models:
            if not served.engine.alive:
                raise RuntimeError(f"the engine of {served.name} has ended")

    def __del__(self) -> None:
        """Close the engines and the store. Ray calls this once the last request has ended."""
        for served in self._models:
            served.engine.drain(0)
        self._states.close()


class Named:
    """Adds the header x-replica, which names the replica, and drops x-request-id, which Ray adds itself.

    Args:
        app: the app that answers.
        name: name of the replica.
    """

    def __init__(self, app: ASGIApp, name: str) -> None:
        self._app, self._name = app, name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-replica"] = self._name
                del headers["x-request-id"]
            await send(message)

        await self._app(scope, receive, send_named)


def app(arguments: Arguments) -> "Application":
    """Return the application for Ray Serve.

    Args:
        arguments: the arguments of the app.
    """
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    room = len(arguments.folders) * (arguments.rows + arguments.queue)
    options = Options(**{name: value for name, value in arguments.from_the_root().items() if name in SHARED})
    deploy = serve.deployment(
        name="unrolled",
        ray_actor_options={"num_cpus": arguments.cpus},
        # The engine refuses requests, with 429; Ray only bounds how many wait for it.
        max_ongoing_requests=room + SPARE,
        max_queued_requests=room,
        graceful_shutdown_timeout_s=Settings.drain + CLOSING,
        graceful_shutdown_wait_loop_s=0.2,
        max_constructor_retry_count=TRIES,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
        **_scale(arguments),
    )
    threads = max(1, math.floor(arguments.cpus))
    return deploy(serve.ingress()(Replica)).bind(options, threads)


SHARED = set(Options.model_fields)


def _scale(arguments: Arguments) -> dict[str, Any]:
    if arguments.most_replicas is None:
        return {"num_replicas": arguments.replicas}
    return {
        "autoscaling_config": {
            "min_replicas": arguments.replicas,
            "max_replicas": arguments.most_replicas,
            "target_ongoing_requests": min(arguments.rows, FULL),
        }
    }
