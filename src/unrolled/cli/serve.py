"""`unrolled serve`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unrolled.cli._options import Weights
from unrolled.extras import how_to_install

if TYPE_CHECKING:
    from unrolled.serving.store import Store

STATES_FILE = "states.sqlite"
SERVED = ("fastapi", "granian", "jinja2", "limits", "prometheus_client")


def serve(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders of unrolled train, or folders of unrolled quantize."),
    ] = None,
    *,
    demo: Annotated[
        bool, typer.Option("--demo", help="Serve the models that come with the library: text and digits.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Name of the model in requests; by default that of its folder.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at; one that others can reach requires --keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    weights: Annotated[
        Weights | None, typer.Option(help="Round the weights of decoders to this form.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Continuations at a time, of each model.")] = 256,
    memory: Annotated[str, typer.Option(help="For the states of running requests, of each model.")] = "4GB",
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait, of each model.")] = 256,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that a request may take.")] = 300,
    states: Annotated[
        str | None,
        typer.Option(
            help="Where states are kept: a SQLite file, memory:, s3://..., gs://... or redis://...; "
            "by default FOLDER/states.sqlite."
        ),
    ] = None,
    ttl: Annotated[
        str | None, typer.Option(help="Drop states that were not used for so long, such as 30d.")
    ] = None,
    state_bytes: Annotated[
        str | None, typer.Option(help="Drop the least recently used states above this size, such as 50GB.")
    ] = None,
    state_memory: Annotated[
        str, typer.Option(help="For kept states that are at hand in memory besides the store.")
    ] = "256MB",
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="Answers do not depend, bit for bit, on what else is asked."),
    ] = False,
    keys: Annotated[
        Path | None, typer.Option(help="File of keys, one a line; every request must have one of them.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Most requests of a key, or of an address, such as 600/minute.")
    ] = None,
    origin: Annotated[
        str | None, typer.Option(help="A web page that may ask, such as https://example.org.")
    ] = None,
) -> None:
    """Serve models by OpenAI's API, with states that can be kept, continued, forked and moved.

    \b
    The models that come with the library, for programs of this machine, and a question:
      unrolled serve --demo
      curl localhost:8000/v1/completions -H 'content-type: application/json' \\
        -d '{"model": "text", "prompt": "ROMEO:", "keep": true}'

    \b
    Several models; for others to reach:
      unrolled serve runs/book runs/digits --host 0.0.0.0 --keys keys.txt --rate 600/minute

    SIGTERM and Ctrl-C let running requests end; a second one does not.
    """
    sources = _folders(folders or [], demo)
    if name is not None and len(sources) > 1:
        raise ValueError(f"--name is {name}, but there are {len(sources)} models: serve one, or leave it out")
    size = _bytes("--memory", memory)
    most = None if state_bytes is None else _bytes("--state-bytes", state_bytes)
    at_hand, seconds = _bytes("--state-memory", state_memory), _seconds(ttl)
    try:
        from unrolled.serving.model import Limits, open_model
        from unrolled.serving.server import serve as run
        from unrolled.serving.settings import Settings, read_keys
        from unrolled.serving.states import States
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in SERVED:
            raise
        raise ImportError(
            f"serving needs {error.name}, which is missing: {how_to_install('serve')}"
        ) from error

    settings = Settings(
        host=host,
        port=port,
        keys=() if keys is None else read_keys(keys),
        rate=rate,
        origin=origin,
        timeout=timeout,
    )
    limits = Limits(rows=rows, memory=size, queue=queue)
    models = [
        open_model(folder, name=name, weights=weights, limits=limits, deterministic=deterministic)
        for folder in sources
    ]
    kept = States(_open_store(states, None if demo else sources[0], most, seconds), at_hand)
    names = ", ".join(served.name for served in models)
    run(models, kept, settings, lambda address: typer.echo(f"serving {names} at {address}", err=True))


def _folders(given: list[Path], demo: bool) -> list[Path]:
    """Return the folders of the models: those given, or those that come with the library."""
    from unrolled import demo_models

    if demo and given:
        raise ValueError(f"FOLDERS is {given[0]}, but must be left out with --demo")
    if not demo and not given:
        raise ValueError(
            "FOLDERS is missing: name the folder of a model, or serve the library's own by --demo"
        )
    return [demo_models.path("text"), demo_models.path("digits")] if demo else given


def _open_store(url: str | None, folder: Path | None, most: int | None, seconds: float | None) -> "Store":
    """Open the store of states, by default in a folder, and say where it is."""
    from unrolled.serving.store import open_store

    if url is None:
        writable = folder is not None and os.access(folder, os.W_OK)
        url = str(folder / STATES_FILE) if folder is not None and writable else "memory:"
    store = open_store(url, most_bytes=most, seconds=seconds)
    where = "memory, and end with the server" if url == "memory:" else url
    typer.echo(f"states are kept in {where}", err=True)
    return store


def _bytes(option: str, text: str) -> int:
    """Read a size such as 4GB or 512MiB."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if size < 1:
        raise ValueError(f"{option} is {text}, but must be a size such as 4GB or 512MiB")
    return size


def _seconds(text: str | None) -> float | None:
    """Read a time such as 30d, 12h, 15m or 90s."""
    if text is None:
        return None
    units = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
    number, unit = text[:-1], text[-1:]
    if unit not in units or not number.isdecimal() or int(number) < 1:
        raise ValueError(f"--ttl is {text}, but must be a time such as 30d, 12h, 15m or 90s")
    return float(int(number) * units[unit])
