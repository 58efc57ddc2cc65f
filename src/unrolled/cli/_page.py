"""Web pages: `unrolled export --web` writes one from runs, `unrolled demo --web` trains the runs first."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from unrolled.cli._output import DEMO

if TYPE_CHECKING:
    from unrolled.models import Decoder
    from unrolled.training import TrainConfig

ADDRESS = "127.0.0.1"
SAMPLING = {"temperature": 0.8}  # at 1, models this small ramble
# Without gates, linear attention learns little from text in so few steps.
TEXT_MODELS: dict[str, dict[str, Any]] = {
    "gated_linear": {"positions": "none"},  # its gates encode how long ago a token was
    "softmax": {"positions": "rotary"},
}
TEXT_SIZE: dict[str, Any] = {"d_model": 128, "n_layers": 4, "n_heads": 4}
TEXT_TRAIN: dict[str, Any] = {
    "batch_size": 8,
    "lr": 3e-3,
    "warmup_steps": 50,
    "eval_every": 200,
    "checkpoint_every": 100,
}
TEXT_LENGTH = 256  # the page's default: softmax degrades beyond the training length
DIGITS = ("linear", "softmax")


def write_page(runs: Sequence[Path], out: Path, *, force: bool, **options: Any) -> None:
    """Write a page of runs, each named after its folder; the options are those of `interop.web.write_site`.

    Raises:
        ValueError: `out` holds anything but a page of these runs and `force` is False, two folders have the
            same name, a model does not predict tokens or has another model's vocabulary, or as `write_site`.
    """
    from unrolled.cli._models import load_for
    from unrolled.data import Vocabulary
    from unrolled.folders import check_folder
    from unrolled.interop.web import is_page_of, write_site

    named: dict[str, Path] = {}
    for run in runs:
        name = run.resolve().name
        if name in named:
            raise ValueError(f"{named[name]} and {run} have the same name, but the page needs distinct names")
        Vocabulary.load(run).check(load_for("tokens", run).config.vocab_size)
        named[name] = run
    check_folder(out, "a page of these runs", lambda: is_page_of(out, named), force=force)
    write_site(named, out, **options)
    typer.echo(f"The page: {out / 'index.html'}. Serve it with any static server, such as")
    typer.echo(f"  python -m http.server --bind {ADDRESS} --directory {out}")


def demo_page(
    out: Path,
    train: Callable[..., object],
    digits: Mapping[str, Any],
    digits_train: Mapping[str, Any],
    runtime: Path | None,
) -> Path:
    """Train small models of digits and text, recurrent and softmax, and write the page that runs them.

    Args:
        out: the folder of the linear model of digits, as in the demo without a page; the rest goes below it.
        train: `train_demo` with the options of the demo.
        digits: fields of the config of the models of digits.
        digits_train: settings of their training.
        runtime: as for `write_site`.

    Returns:
        The folder of the page.
    """
    from unrolled import data
    from unrolled.interop.web import runtime_files, write_site

    runtime_files(runtime)  # fails before the training rather than after it
    runs = {f"digits-{name}": out if name == "linear" else out / f"digits-{name}" for name in DIGITS}
    dataset: Any = data.load("digits")
    for name, run in zip(DIGITS, runs.values(), strict=True):
        train(run, dataset, {"attention": name, **digits}, digits_train)
    try:
        text: Any = data.load("text", path="tiny-shakespeare", length=TEXT_LENGTH)
    except ValueError as error:
        typer.echo(f"the page will have no text models: {error}", err=True)
    else:
        for name, own in TEXT_MODELS.items():
            runs[f"text-{name}"] = out / f"text-{name}"
            train(runs[f"text-{name}"], text, {"attention": name, **TEXT_SIZE, **own}, TEXT_TRAIN)
    typer.echo("writing the page", err=True)
    return write_site(runs, out / "page", runtime=runtime, sampling=SAMPLING)


def train_demo(
    run: Path,
    dataset: Any,
    model: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    steps: int,
    seed: int,
    resume: bool,
    describe: "Callable[[Decoder], str] | None" = None,
) -> tuple["TrainConfig", float]:
    """Train a model of the demo; return its settings and the seconds that it took.

    Args:
        run: the folder of the run.
        dataset: the training data.
        model: fields of the config of the model.
        settings: fields of the config of the training, besides the steps and the seed.
        steps, seed, resume: as for the demo.
        describe: returns what is printed before the training; by default the name of the mechanism.
    """
    import torch

    from unrolled import training
    from unrolled.models import Decoder, DecoderConfig

    torch.manual_seed(seed)  # the initial weights
    decoder = Decoder(DecoderConfig(dataset.vocab_size, start_token=dataset.start_token, **model))
    dataset.vocabulary.attach(decoder)
    what = f"{model['attention']} attention" if describe is None else describe(decoder)
    typer.echo(f"{what}, folder {run}", err=True)
    config = training.TrainConfig(steps=steps, seed=seed, **settings)
    result = training.train(decoder, dataset, config, run, resume=resume, metadata=DEMO)
    result.raise_if_interrupted()
    return config, result.seconds


def make_server(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """Make a server of a folder on the loopback address; port 0 selects a free port."""
    return ThreadingHTTPServer((ADDRESS, port), partial(_Quiet, directory=str(folder)))


def serve(folder: Path, port: int) -> None:
    """Serve a folder until Ctrl-C."""
    with make_server(folder, port) as server:
        typer.echo(f"The page: http://{ADDRESS}:{server.server_port}/ (stop with Ctrl-C)")
        server.serve_forever()


class _Quiet(SimpleHTTPRequestHandler):
    """Does not log requests, and does not use the system's MIME types, which may be wrong for modules."""

    extensions_map = {  # noqa: RUF012
        **SimpleHTTPRequestHandler.extensions_map,
        ".js": "text/javascript",
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
