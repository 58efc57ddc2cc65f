"""`unrolled demo`."""

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unrolled.cli._options import Force, Runtime, refuse
from unrolled.cli._output import check_demo, progress_bar, write_files
from unrolled.cli._page import demo_page, demo_run, serve, shipped_page, train_demo
from unrolled.extras import how_to_install

if TYPE_CHECKING:
    from unrolled.cli.run_config import Run
    from unrolled.models import Decoder

OUT, PAGE = Path("runs/demo"), Path("runs/demo-page")
# The recipe of images, with windows of two rows.
DIGITS = ["data.name=digits", "model.attention_options.window.window=16", "train.eval_every=100"]
STEPS = 2000
SAMPLES = 100
COMPLETED, COMPLETIONS, ROWS_GIVEN = 10, 5, 4

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "d_model": 128,
    "n_layers": 4,
    "n_heads": 8,
    "positions": "sinusoidal",
}
POSITIONS = (100, 250, 500, 1000, 2000, 4000, 8000)
REREAD_POSITIONS = (100, 250, 500, 1000, 2000, 4000)  # beyond these, a token takes a second or more
COMPARED_AT = (100, 4000)
REPEATS = 7


def demo(
    out: Annotated[
        Path | None,
        typer.Option(help=f"Folder to write; by default {OUT}, or {PAGE} for --web without --train."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=10, help=f"Training steps; by default {STEPS}.")] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, max=2**63 - 1, help="Seed of the weights, the data order and the sampling; by default 0."
        ),
    ] = None,
    resume: Annotated[
        bool | None,
        typer.Option("--resume/--fresh", help="Resume from the last checkpoint (default), or start over."),
    ] = None,
    web: Annotated[
        bool, typer.Option("--web", help="Instead of a report, serve a web page that runs small models.")
    ] = False,
    train: Annotated[
        bool, typer.Option("--train", help="With --web: train the models of the page first.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="With --web: port to serve at, 0 for a free one; by default 8000."
        ),
    ] = None,
    no_serve: Annotated[bool, typer.Option("--no-serve", help="With --web: write the page only.")] = False,
    runtime: Runtime = None,
    force: Force = False,
) -> None:
    """Train on handwritten digits, generate new ones as an RNN, and measure the cost per token.

    This takes a few minutes. With --web, a web page runs the two models that come with the library, one of
    digits and one of Shakespeare; nothing is trained. With --web --train, recurrent and softmax models of
    both are trained first, and the page compares them.

    Ctrl-C stops the command at any time; to resume the training, repeat the command.

    \b
    Files in the folder:
      report.html     everything on one page
      figures.json    all numbers
      *.png           all pictures
      the run         for unrolled generate and unrolled info
      page/           with --web --train: a page for any static server
    """
    if not web and (port is not None or no_serve or runtime is not None or train):
        raise ValueError("--port, --no-serve, --runtime and --train require --web")
    if web and not train:
        refuse({"--steps": steps, "--seed": seed, "--resume/--fresh": resume}, "training: add --train")
        _show(shipped_page(PAGE if out is None else out, runtime=runtime, force=force), port, no_serve)
        return
    _require("sklearn", *([] if web else ["matplotlib"]))
    # OpenMP reads this when torch loads it: spinning threads slow each other down on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    out = OUT if out is None else out
    check_demo(out, force)
    budget = [f"train.steps={STEPS if steps is None else steps}", f"train.seed={seed or 0}"]
    if web:
        page = demo_page(out, DIGITS, budget, resume=resume is not False, runtime=runtime)
        _show(page, port, no_serve)
        return
    from unrolled.models import Decoder

    settings = [*DIGITS, *budget]
    run = demo_run(out, settings)
    seconds = train_demo(run, resume=resume is not False)
    _report(Decoder.load(out), run, settings, seconds)  # the best weights, not the last


def _show(page: Path, port: int | None, no_serve: bool) -> None:
    """Print where a page is, and serve it."""
    typer.echo(f"The page: {page / 'index.html'}")
    if not no_serve:
        serve(page, 8000 if port is None else port)


def _require(*packages: str) -> None:
    """Raise ImportError for a missing package before the work rather than after it."""
    for package in packages:
        if find_spec(package) is None:
            raise ImportError(f"the demo needs {package}, which is missing: {how_to_install('demo')}")


def _report(model: "Decoder", run: "Run", settings: Sequence[str], training_seconds: float) -> None:
    """Generate and measure before writing any file, so that an interrupt leaves an earlier report intact."""
    import torch

    from unrolled.bench import measure, plots
    from unrolled.cli import _demo_report, _digits

    dataset: Any = run.dataset
    out, config = run.run_dir, run.train
    times = [time.perf_counter()]
    with progress_bar("drawing", SAMPLES * dataset.length) as advance:
        samples = _digits.draw(model, SAMPLES, dataset.shape, config.seed, advance)
    times.append(time.perf_counter())
    real = dataset.images("val")
    completed = _digits.complete(model, real[:COMPLETED], ROWS_GIVEN, COMPLETIONS, config.seed)
    times.append(time.perf_counter())
    with progress_bar("measuring", REPEATS * (2 * len(POSITIONS) + len(REREAD_POSITIONS))) as advance:
        costs = measure.linear_and_softmax(
            SHAPE, POSITIONS, recompute_positions=REREAD_POSITIONS, repeats=REPEATS, on_run=advance
        )
    times.append(time.perf_counter())
    taken = [training_seconds, *(after - before for before, after in pairwise(times))]
    seconds = dict(zip(("training", "drawing", "completing", "measuring"), taken, strict=True))
    figures = {
        "folder": str(out),
        "settings": settings,
        "model": {"parameters": sum(x.numel() for x in model.parameters()), "config": asdict(model.config)},
        "training": _digits.describe_training(out, config, dataset),
        "samples": _digits.describe_samples(samples, dataset),
        "completions": {"digits": COMPLETED, "each": COMPLETIONS, "rows_given": ROWS_GIVEN},
        "cost": {
            "shape": SHAPE,
            "threads": 1,
            "repeats": REPEATS,
            "window": measure.WINDOW,
            "positions": POSITIONS,
            "compared_at": COMPARED_AT,
            "contenders": {name: [cost._asdict() for cost in line] for name, line in costs.items()},
        },
        "machine": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": platform.platform(terse=True),
            "processors": os.cpu_count(),
        },
        "seconds": {**seconds, "total": sum(seconds.values())},
    }
    pictures = plots.of_report(figures, real.numpy(), samples.numpy(), completed.numpy())
    files = {f"{name}.png": themes["light"] for name, themes in pictures.items()}
    files["figures.json"] = json.dumps(figures, indent=1).encode()
    files["report.html"] = _demo_report.build(figures, pictures).encode()
    write_files(out, files)
    typer.echo(_demo_report.summary(figures))
    typer.echo(f"The report: {out / 'report.html'}")
