"""Web pages: of runs, by `unrolled export`, and of the models of the library, by `unrolled demo`."""

import json
import shlex
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from unrolled.cli._output import DEMO

if TYPE_CHECKING:
    from unrolled.cli.run_config import Run

ADDRESS = "127.0.0.1"
SAMPLING = {"temperature": 0.8}  # at 1, models this small ramble
TEXT, SOFTMAX = "data.name=text", "model.attention=softmax"


def write_page(runs: Sequence[Path], out: Path, *, force: bool, **options: Any) -> None:
    """Write a page of runs, each named after its folder; the options are those of `interop.web.write_site`.

    Raises:
        ValueError: `out` holds anything but a page of these runs and `force` is False; two folders have the
            same name; a model neither predicts tokens nor transcribes, or does not match its vocabulary; a
            sampling option is given although all models are models of speech; or as `write_site`.
    """
    from unrolled.cli._models import load_for
    from unrolled.data import Task, Vocabulary
    from unrolled.folders import check_folder
    from unrolled.interop.web import is_page_of, write_site

    named: dict[str, Path] = {}
    tasks = set()
    for run in runs:
        name = run.resolve().name
        if name in named:
            raise ValueError(f"{named[name]} and {run} have the same name, but the page needs distinct names")
        vocabulary = Vocabulary.load(run)
        task: Task = "transcription" if vocabulary.kind == "speech" else "tokens"
        vocabulary.check(load_for(task, run).config.vocab_size)
        tasks.add(task)
        named[name] = run
    if options["sampling"] and tasks == {"transcription"}:
        raise ValueError("--temperature and the like cannot be used with models of speech")
    check_folder(out, "a page of these runs", lambda: is_page_of(out, named), force=force)
    write_site(named, out, **options)
    typer.echo(f"The page: {out / 'index.html'}. Serve it with any static server, such as")
    typer.echo(f"  python -m http.server --bind {ADDRESS} --directory {shlex.quote(str(out))}")


def shipped_page(out: Path, *, runtime: Path | None, force: bool) -> Path:
    """Write the page of the models that come with the library into `out`, unless `out` already holds it.

    Raises:
        ValueError: `out` holds anything else and `force` is False, or as `write_site`.
    """
    from unrolled import demo_models
    from unrolled.folders import check_folder
    from unrolled.interop.web import is_current_page_of, is_page_of, runtime_files, write_site

    if runtime is not None:
        runtime_files(runtime)  # checks it, even if it is not needed
    models: dict[str, Path] = {name: demo_models.path(name) for name in demo_models.NAMES}
    if not force and is_current_page_of(out, models):
        return out
    check_folder(out, "the page of these models", lambda: is_page_of(out, models), force=force)
    typer.echo("writing the page, once: this takes about twenty seconds", err=True)
    return write_site(models, out, runtime=runtime, sampling=SAMPLING)


def demo_page(
    out: Path, digits: Sequence[str], budget: Sequence[str], *, resume: bool, runtime: Path | None
) -> Path:
    """Train small models of digits and text, recurrent and softmax, and write the page that runs them.

    Args:
        out: the folder of the recurrent model of digits, as in the demo without a page; the other models and
            the page are written to subfolders.
        digits: settings of that model; see `train_demo`.
        budget: training settings of all models.
        resume: whether to resume the training from the last checkpoints.
        runtime: as for `write_site`.

    Returns:
        The folder of the page.
    """
    from unrolled.interop.web import runtime_files, write_site

    runtime_files(runtime)  # fails before the training rather than after it
    models = {
        "digits-linear": [*digits, *budget],
        "digits-softmax": ["data.name=digits", SOFTMAX, *budget],
        "text-rwkv4": [TEXT, *budget],
        "text-softmax": [TEXT, SOFTMAX, "model.activation=gelu", *budget],
    }
    runs = {}
    for name, settings in models.items():
        folder = out if name == "digits-linear" else out / name
        try:
            run = demo_run(folder, settings)
        except ValueError as error:
            if TEXT not in settings:
                raise
            typer.echo(f"the page will have no {name} model: {error}", err=True)
        else:
            train_demo(run, resume=resume)
            runs[name] = folder
    typer.echo("writing the page", err=True)
    return write_site(runs, out / "page", runtime=runtime, sampling=SAMPLING)


def demo_run(folder: Path, settings: Sequence[str]) -> "Run":
    """Resolve the settings of `unrolled train` for a model of the demo, in this folder.

    Raises:
        ValueError: the data are missing, or as `run_config.resolve`.
    """
    from unrolled.cli import run_config

    return run_config.resolve(run_config.read(None, [*settings, f"run_dir={json.dumps(str(folder))}"]))


def train_demo(run: "Run", *, resume: bool) -> float:
    """Train a model of the demo as `unrolled train` does; return the seconds that it took."""
    import torch

    from unrolled import training

    training.keep_freed_memory()
    model = run.new_model(torch.device("cpu"))
    parameters = sum(x.numel() for x in model.parameters())
    typer.echo(f"{parameters:,} parameters, {run.dataset.name}, run folder {run.run_dir}", err=True)
    result = training.train(
        model,
        run.dataset,
        run.train,
        run.run_dir,
        resume=resume,
        metadata=DEMO,
        on_start=lambda resumed: run.save(),
    )
    result.raise_if_interrupted()
    return result.seconds


def make_server(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """Make a server of a folder on the loopback address; port 0 selects a free port."""
    return ThreadingHTTPServer((ADDRESS, port), partial(_Quiet, directory=str(folder)))


def serve(folder: Path, port: int) -> None:
    """Serve a folder until Ctrl-C."""
    try:
        made = make_server(folder, port)
    except OSError as error:
        raise ValueError(f"--port {port} cannot be used: {error.strerror}; 0 selects a free port") from error
    with made as server:
        typer.echo(f"The page: http://{ADDRESS}:{server.server_port}/ (stop with Ctrl-C)")
        server.serve_forever()


class _Quiet(SimpleHTTPRequestHandler):
    """Serves files without a log, and with MIME types of its own: the system's may be wrong for modules."""

    extensions_map = {  # noqa: RUF012
        **SimpleHTTPRequestHandler.extensions_map,
        ".js": "text/javascript",
        ".wasm": "application/wasm",
    }

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
