"""`unrolled reproduce`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unrolled.cli._options import DataDir, Device, Force, refuse

if TYPE_CHECKING:
    from unrolled.experiments import Experiment, Results

DEFAULT_OUT = Path("runs", "reproduce")
REPORT_EVERY = 10.0  # seconds; a report takes half a second, and very short runs less


def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="An experiment, or the .yaml file of one; by default all are listed.")
    ] = None,
    *,
    scale: Annotated[
        str | None,
        typer.Option(
            help="Scale of the experiment, such as quick or full; by default the first in its file, and full "
            "with --shipped."
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Train only these contenders, separated by commas.")
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Only report the finished runs.")] = False,
    shipped: Annotated[
        bool, typer.Option("--shipped", help="Use results that come with the library; train only the rest.")
    ] = False,
    copy: Annotated[
        Path | None, typer.Option(help="Write the experiment to this .yaml file, for you to change and run.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of all experiments.")] = DEFAULT_OUT,
    data_dir: DataDir = None,
    device: Device = None,
    force: Force = False,
) -> None:
    """Check a claim of a paper: train the models that it compares, the contenders, and compare the results.

    \b
    Examples:
      unrolled reproduce
      unrolled reproduce copy-convergence --scale quick
      unrolled reproduce copy-convergence --scale quick --table
      unrolled reproduce copy-convergence --copy mine.yaml
      unrolled reproduce mine.yaml --only linear,softmax

    Each run is an ordinary run folder below OUT/NAME/SCALE. To continue after an interruption, repeat the
    command: finished runs are not trained again. OUT/NAME/SCALE also holds results.json, table.md, plot.png
    and report.html. `--shipped` uses the results that come with the library, which are of the scale full, and
    trains only other contenders and seeds.
    """
    from unrolled import experiments
    from unrolled.cli import _experiment_report, _experiments
    from unrolled.cli._device import choose

    of_runs = {"--scale": scale, "--only": only, "--table": table or None, "--shipped": shipped or None}
    if name is None:
        refuse(of_runs | {"--copy": copy, "--force": force or None}, "an experiment")
        _list(out)
        return
    experiment = _experiments.load(name)
    if copy is not None:
        refuse(of_runs, "training, but --copy trains nothing")
        _copy(name, copy, force)
        return
    refuse({"--force": force or None}, "--copy")
    if table:
        refuse({"--only": only}, "training, but --table trains nothing")
    if shipped and scale not in (None, "full"):
        raise ValueError(
            f"--scale is {scale!r}, but must be full: the results of --shipped are of this scale"
        )
    if shipped and experiments.obtained(experiment.name) is None:
        raise ValueError(f"no results of {experiment.name} come with the library: leave out --shipped")
    scale = scale or ("full" if shipped else next(iter(experiment.scales)))
    experiment = experiment.at(scale)
    contenders = _chosen(experiment, only)
    folder = out / experiment.name / scale
    if table:
        results = _experiments.ended(experiment, folder, data_dir, shipped=shipped)
        if not results.runs:
            raise ValueError(f"no run of {experiment.name} has ended in {folder}: leave out --table")
    else:
        written = -REPORT_EVERY

        def on_end(results: "Results") -> None:
            nonlocal written
            if time.monotonic() - written >= REPORT_EVERY:
                _experiment_report.write(results, scale, folder)
                written = time.monotonic()

        results = _experiments.run(
            experiment, folder, contenders, data_dir, choose(device), on_end, shipped=shipped
        )
    _experiment_report.write(results, scale, folder)
    _tell(results)
    typer.echo(f"\nThe report: {folder / 'report.html'}")


def _list(out: Path) -> None:
    """Print the experiments, with how many of their runs have ended at each scale."""
    from rich.console import Console
    from rich.table import Table

    from unrolled import experiments
    from unrolled.cli import _experiments

    listed = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("experiment", "claim", "scale", "minutes", "ended"):
        listed.add_column(column, justify="right" if column in ("minutes", "ended") else "left")
    for name in experiments.names():
        experiment = _experiments.load(name)
        for i, scale in enumerate(experiment.scales):
            at = experiment.at(scale)
            count = _experiments.count(out / name / scale)
            total = sum(len(list(at.sweeps(x))) + len(at.seeds) - 1 for x in at.contenders)
            first = ("", "") if i else (name, experiment.claim)
            listed.add_row(*first, scale, f"{experiment.budget[scale]:g}", f"{count} of {total}")
    Console(soft_wrap=False).print(listed)


def _copy(name: str, to: Path, force: bool) -> None:
    """Write the file of an experiment to `to`."""
    from unrolled import experiments
    from unrolled.files import write_file
    from unrolled.folders import check_file

    if to.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--copy is {str(to)!r}, but must end in .yaml")
    text = experiments.path(name).read_text(encoding="utf-8")
    check_file(to, lambda: to.read_text(encoding="utf-8") == text, force=force)
    write_file(to, text)
    typer.echo(f"written: {to}")


def _chosen(experiment: "Experiment", only: str | None) -> list[str]:
    """Return the contenders to train."""
    if only is None:
        return list(experiment.contenders)
    chosen = [x.strip() for x in only.split(",")]
    for x in chosen:
        if x not in experiment.contenders:
            raise ValueError(f"--only has {x!r}, but the contenders are {', '.join(experiment.contenders)}")
    return chosen


def _tell(results: "Results") -> None:
    """Print the tables and the expectations."""
    from unrolled.bench.report import table
    from unrolled.cli._experiment_report import more_tables, told

    typer.echo(table(*results.table()))
    for title, more in more_tables(results):
        typer.echo(f"\n{title}\n\n{table(*more)}\n")
    for text in told(results):
        typer.echo(text)
