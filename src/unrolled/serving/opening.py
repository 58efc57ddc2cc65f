"""The options of the server, for `unrolled serve` and Ray, and the models, states and settings from them."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator

from unrolled.decode.packing import Weights
from unrolled.folders import CONFIG_FILE
from unrolled.serving.engine import Limits
from unrolled.serving.model import Served, open_model
from unrolled.serving.settings import Settings, read_keys
from unrolled.serving.states import States, untold
from unrolled.serving.store import open_store

MEMORY = "memory:"
UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
Size = Annotated[ByteSize, Field(gt=0)]


class Options(BaseModel):
    """The options of the server.

    Attributes:
        folders: folders of the models; a text may hold several, separated by commas.
        states: address of the store of states; see `unrolled.serving.store.open_store`.
        name: name of the model in requests; None for the name of its folder.
        host, port: address and port to listen at.
        weights: the form that the weights are rounded to; None keeps the form in the folders.
        rows: maximum number of continuations at a time, per model.
        memory: maximum memory for the states of running requests, per model, such as "4GB".
        prefix_memory: maximum memory for states of prompts that may begin others, per model; 0 keeps none.
        queue: maximum number of requests that wait, per model.
        timeout: maximum time of a request, in seconds.
        ttl: drop states that were not used for this time: a number of seconds, or a text such as "30d".
        state_bytes: maximum number of bytes of all states; beyond it, the least recently used states are
            dropped.
        state_memory: memory for a cache of the most recently used states of the store; for "memory:", the
            default of `state_bytes`.
        deterministic: whether answers must not depend, bit for bit, on other requests.
        keys: file with one key per line.
        rate: maximum rate of requests of a client, such as "600/minute".
        origin: a web page on another server that may send requests.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    folders: Annotated[list[Path], Field(min_length=1)]
    states: Annotated[str, Field(min_length=1)]
    name: str | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    weights: Weights | None = None
    rows: Annotated[int, Field(ge=1)] = 256
    memory: Size = ByteSize(4 * 10**9)
    prefix_memory: Annotated[ByteSize, Field(ge=0)] = ByteSize(256 * 10**6)
    queue: Annotated[int, Field(ge=1)] = 256
    timeout: Annotated[float, Field(ge=0.001)] = 300.0
    ttl: Annotated[float, Field(gt=0)] | None = None
    state_bytes: Size | None = None
    state_memory: Size = ByteSize(256 * 10**6)
    deterministic: bool = False
    keys: Path | None = None
    rate: str | None = None
    origin: str | None = None

    @field_validator("folders", mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        return [part for part in given.split(",") if part] if isinstance(given, str) else given

    @field_validator("ttl", mode="before")
    @classmethod
    def _time(cls, given: Any) -> Any:
        return seconds("ttl", given) if isinstance(given, str) else given

    def models(self, threads: int | None = None) -> list[Served]:
        """Open the models.

        Args:
            threads: number of threads of the kernels; None for torch's number.

        Raises:
            ValueError: a folder holds no model that can be served, or a name is given to several models.
        """
        if self.name is not None and len(self.folders) > 1:
            raise ValueError(f"name is {self.name!r}, but there are {len(self.folders)} models")
        limits = Limits(
            rows=self.rows,
            memory=self.memory,
            prefix_memory=self.prefix_memory,
            queue=self.queue,
            threads=threads,
        )
        return [
            open_model(
                folder, name=self.name, weights=self.weights, limits=limits, deterministic=self.deterministic
            )
            for folder in self.folders
        ]

    def open_states(self) -> States:
        """Open the store of states.

        Raises:
            ValueError: the address is wrong, or this kind of store does not support `ttl` or `state_bytes`.
            OSError: the store cannot be reached, read or written.
        """
        ttl = None if self.ttl is None else self.ttl + untold(self.ttl)
        if self.states == MEMORY:  # without a second copy in a cache
            most = self.state_bytes or self.state_memory
            return States(open_store(MEMORY, state_bytes=most, ttl=ttl), 0, self.ttl)
        store = open_store(self.states, state_bytes=self.state_bytes, ttl=ttl)
        return States(store, self.state_memory, self.ttl)

    def settings(self) -> Settings:
        """Return the settings of the app.

        Raises:
            ValueError: there are no keys although other machines can reach `host`, or the rate is invalid.
            OSError: the file of keys cannot be read.
        """
        return Settings(
            host=self.host,
            port=self.port,
            keys=() if self.keys is None else read_keys(self.keys),
            rate=self.rate,
            origin=self.origin,
            timeout=self.timeout,
        )

    def check(self) -> None:
        """Raise the error that opening would raise for a wrong folder, store, file of keys or setting."""
        self.settings()
        for folder in self.folders:
            if not (folder / CONFIG_FILE).is_file():
                raise ValueError(f"{folder} has no {CONFIG_FILE}")
        self.open_states().close()

    def from_the_root(self) -> dict[str, Any]:
        """Return the fields, with absolute paths, for a process that has another working folder."""
        states = self.states
        if states != MEMORY and "://" not in states:
            states = f"sqlite:{Path(states.removeprefix('sqlite:')).absolute()}"
        found = {
            "folders": [folder.absolute() for folder in self.folders],
            "states": states,
            "keys": None if self.keys is None else self.keys.absolute(),
        }
        return {name: getattr(self, name) for name in type(self).model_fields} | found


def seconds(name: str, text: str) -> float:
    """Read a time such as 30d, 12h, 15m or 90s.

    Args:
        name: name of the option, for the message.
        text: the time.

    Raises:
        ValueError: the text is not a time.
    """
    number, unit = text[:-1], text[-1:]
    if unit not in UNITS or not number.isdecimal() or int(number) < 1:
        raise ValueError(f"{name} is {text}, but must be a time such as 30d, 12h, 15m or 90s")
    return float(int(number) * UNITS[unit])
