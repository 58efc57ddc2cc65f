"""What the routes share: models, states, settings, metrics."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request

from unrolled.contract import UnsupportedError
from unrolled.serving.metrics import Metrics
from unrolled.serving.model import Served
from unrolled.serving.protocol.errors import ApiError, invalid
from unrolled.serving.settings import Settings
from unrolled.serving.snapshot import Snapshot
from unrolled.serving.states import States, UnknownState
from unrolled.serving.store import StateTooLargeError

Result = TypeVar("Result")


@dataclass
class Service:
    """The parts of a server.

    Attributes:
        models: the models by name; the first is the default where a request may name none.
        states: the states that clients keep.
        settings: the settings of the server.
        ready: whether the server accepts requests.
    """

    models: dict[str, Served]
    states: States
    settings: Settings
    ready: bool = True
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        engines = [served.engine for served in self.models.values()]
        self.metrics = Metrics(
            lambda: sum(engine.waiting for engine in engines),
            lambda: sum(engine.active for engine in engines),
            {
                "kept": lambda: self.states.memory,
                "running": lambda: sum(engine.running_bytes for engine in engines),
                "prefixes": lambda: sum(engine.prefix_bytes for engine in engines),
            },
        )

    @classmethod
    def of(cls, models: Sequence[Served], states: States, settings: Settings) -> "Service":
        """Make a service of models, by their names.

        Raises:
            ValueError: there is no model, or two models have the same name.
        """
        named = {served.name: served for served in models}
        if not models or len(named) < len(models):
            names = [served.name for served in models]
            raise ValueError(f"models have the names {names}, but must be one or more, each with its own")
        return cls(named, states, settings)

    def model(self, name: str | None) -> Served:
        """Return the model of a name; for None, the first model.

        Raises:
            ApiError: there is no model of this name.
        """
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise ApiError(
                404,
                f"model is {name!r}, but must be one of {', '.join(self.models)}",
                param="model",
                code="model_not_found",
            )
        return self.models[name]

    async def snapshot(self, id: str, served: Served | None = None) -> Snapshot:
        """Return a state.

        Args:
            id: id of the state.
            served: the model that will continue the state; None if the state is not continued.

        Raises:
            ApiError: the state is unknown, damaged, or of another model.
        """
        try:
            found = await self.stored(self.states.get, id)
        except UnknownState:
            raise ApiError(404, f"there is no state {id}", param="state", code="unknown_state") from None
        except ValueError as error:
            raise invalid(f"the state {id} is damaged: {error}", "state", "damaged_state") from None
        if served is not None and found.model != served.digest:
            raise invalid(f"the state {id} is not of the model {served.name}", "state", "foreign_state")
        if served is not None:
            check_last(found, served)  # another program may have written to the store
        return found

    async def stored(self, ask: Callable[..., Result], *given: str | Snapshot | None) -> Result:
        """Call a method of the store of states, in another thread.

        Raises:
            ApiError: the store cannot be reached, read or written, or does not support this.
        """
        try:
            return await asyncio.to_thread(ask, *given)
        except UnsupportedError as error:
            raise ApiError(501, str(error), code="store_cannot") from error
        except OSError as error:
            raise ApiError(
                503, f"the store of states does not work: {error}", code="store_unavailable"
            ) from error

    async def keep(self, snapshot: Snapshot) -> str:
        """Store a state; return its id.

        Raises:
            ApiError: the store cannot be reached, or the state is larger than the limit of the store.
        """
        try:
            return await self.stored(self.states.keep, snapshot)
        except StateTooLargeError as error:
            raise invalid(f"the state cannot be kept: {error}", "keep", "too_large") from None


def check_last(snapshot: Snapshot, served: Served) -> None:
    """Refuse a state whose last tokens, which are read again, are not ids of the model.

    Raises:
        ApiError: an id is not in the vocabulary.
    """
    if (last := max(snapshot.pending, *snapshot.held, 0)) >= served.vocab_size + int(served.start_token):
        raise invalid(
            f"the last tokens of the state have the id {last}, but the model has {served.vocab_size} ids",
            "state",
            "damaged_state",
        )


def service_of(request: Request) -> Service:
    """Return the service that a request came to."""
    found: Service = request.app.state.service
    return found
