"""`unrolled serve`."""

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from unrolled.cli._options import Weights
from unrolled.extras import how_to_install

if TYPE_CHECKING:
    from pydantic import ByteSize

    from unrolled.serving.opening import Options

STATES_FILE = "states.sqlite"
MEMORY = "memory:"
SERVED = ("fastapi", "granian", "jinja2", "limits", "prometheus_client")


def serve(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders of unrolled train, or folders of unrolled quantize or convert."),
    ] = None,
    *,
    demo: Annotated[
        bool, typer.Option("--demo", help="Serve the models that come with the library: text and digits.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Name of the model in requests; by default that of its folder.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at; if other machines can reach it, --keys is required.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port.")] = 8000,
    weights: Annotated[
        Weights | None, typer.Option(help="Round the weights of decoders to this form.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Maximum continuations at a time, per model.")] = 256,
    memory: Annotated[str, typer.Option(help="Memory for states of running requests, per model.")] = "4GB",
    prefix_memory: Annotated[
        str, typer.Option(help="Memory for states of prompts that begin alike, per model; 0 keeps none.")
    ] = "256MB",
    queue: Annotated[int, typer.Option(min=1, help="Maximum number of waiting requests, per model.")] = 256,
    timeout: Annotated[float, typer.Option(min=0.001, help="Maximum seconds of a request.")] = 300,
    states: Annotated[
        str | None,
        typer.Option(
            help="Where states are kept: a SQLite file, memory:, s3://..., gs://... or redis://...; "
            "by default FOLDER/states.sqlite, with --demo memory:."
        ),
    ] = None,
    ttl: Annotated[
        str | None, typer.Option(help="Drop states that were not used for this long, such as 30d.")
    ] = None,
    state_bytes: Annotated[
        str | None, typer.Option(help="Drop the least recently used states beyond this total, such as 50GB.")
    ] = None,
    state_memory: Annotated[
        str, typer.Option(help="Memory for the most recently used states; for memory:, for all states.")
    ] = "256MB",
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="Bit-identical answers, whatever other requests are running."),
    ] = False,
    keys: Annotated[
        Path | None, typer.Option(help="File of keys, one per line; every request must have one of them.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Maximum rate per key, or per address, such as 600/minute.")
    ] = None,
    origin: Annotated[
        str | None, typer.Option(help="A web page that may send requests, such as https://example.org.")
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, help="Server processes; if more than one, Ray Serve runs them.")
    ] = 1,
) -> None:
    """Serve models over OpenAI's API, with states that can be kept, continued, forked and moved.

    \b
    Serve the library's own models on this machine, and send a request:
      unrolled serve --demo
      curl localhost:8000/v1/completions -H 'content-type: application/json' \\
        -d '{"model": "text", "prompt": "ROMEO:", "keep": true}'

    \b
    Serve several models, also to other machines:
      unrolled serve runs/book runs/digits --host 0.0.0.0 --keys keys.txt

    \b
    Serve by several processes, each of which can continue any state:
      unrolled serve runs/book --replicas 4 --states s3://bucket/book

    On SIGTERM or Ctrl-C, the server lets running requests end; on a second one, it ends at once.
    """
    sources = _folders(folders or [], demo)
    if name is not None and len(sources) > 1:
        raise ValueError(f"--name is {name}, but there are {len(sources)} models: serve one, or leave it out")
    size = _bytes("--memory", memory)
    prefixes = _bytes("--prefix-memory", prefix_memory, least=0)
    most = None if state_bytes is None else _bytes("--state-bytes", state_bytes)
    at_hand = _bytes("--state-memory", state_memory)
    if states == "":
        raise ValueError("--states is empty, but must be an address, such as states.sqlite")
    url = _address(states, None if demo else sources[0])
    if replicas > 1 and url == MEMORY:
        raise ValueError(
            f"--states is {MEMORY}, which the {replicas} replicas of --replicas do not share: name a file, "
            "s3://..., gs://... or redis://..."
        )
    try:
        from unrolled.serving.opening import Options, seconds
        from unrolled.serving.server import serve as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in SERVED:
            raise
        raise ImportError(
            f"serving needs {error.name}, which is missing: {how_to_install('serve')}"
        ) from error

    options = Options(
        folders=sources,
        states=url,
        name=name,
        host=host,
        port=port,
        weights=weights,
        rows=rows,
        memory=size,
        prefix_memory=prefixes,
        queue=queue,
        timeout=timeout,
        ttl=None if ttl is None else seconds("--ttl", ttl),
        state_bytes=most,
        state_memory=at_hand,
        deterministic=deterministic,
        keys=keys,
        rate=rate,
        origin=origin,
    )
    where = "memory, and end with the server" if url == MEMORY else _without_password(url)
    if replicas > 1:
        _serve_replicas(options, replicas, where)
        return
    settings = options.settings()
    models = options.models()
    kept = options.open_states()
    typer.echo(f"states are kept in {where}", err=True)
    names = ", ".join(served.name for served in models)
    run(models, kept, settings, lambda address: typer.echo(f"serving {names} at {address}", err=True))
    _leave()


def _leave() -> NoReturn:
    """End the process without tearing the interpreter down.

    Granian reports that its threads have ended a moment before they do. Before Python 3.14, a thread that
    waits for the interpreter's lock during the teardown aborts the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _serve_replicas(options: "Options", replicas: int, where: str) -> None:
    """Serve with Ray."""
    if importlib.util.find_spec("ray") is None:
        raise ImportError(f"--replicas needs ray, which is missing: {how_to_install('ray')}")
    from unrolled.serving.replicas import serve_replicas

    typer.echo(f"states are kept in {where}; Ray starts, which takes a while", err=True)
    names = options.name or ", ".join(folder.resolve().name for folder in options.folders)
    serve_replicas(
        options,
        replicas,
        lambda address: typer.echo(f"serving {names} at {address} by {replicas} replicas", err=True),
    )


def _folders(given: list[Path], demo: bool) -> list[Path]:
    """Return the folders of the models: those given, or those that come with the library."""
    from unrolled import demo_models

    if demo and given:
        raise ValueError(f"FOLDERS is {given[0]}, but must be left out with --demo")
    if not demo and not given:
        raise ValueError(
            "FOLDERS is missing: name the folder of a model, or serve the library's own with --demo"
        )
    return [demo_models.path("text"), demo_models.path("digits")] if demo else given


def _address(url: str | None, folder: Path | None) -> str:
    """Return the address of the store of states: `url`, else a file in `folder`, else memory."""
    if url is not None:
        return url
    writable = folder is not None and os.access(folder, os.W_OK)
    return str(folder / STATES_FILE) if folder is not None and writable else MEMORY


def _without_password(url: str) -> str:
    """Return an address as it may be shown: without a user, a password and further parameters."""
    shown = re.sub(r"^(\w+://)[^/]*@", r"\1", url)
    return shown.partition("?")[0] if "://" in url else shown


def _bytes(option: str, text: str, least: int = 1) -> "ByteSize":
    """Read a size such as 4GB or 512MiB."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        size = TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        size = ByteSize(-1)
    if size < least:
        raise ValueError(f"{option} is {text}, but must be a size such as 4GB or 512MiB")
    return size
