"""`unrolled bench`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from unrolled.cli._options import Force, refuse
from unrolled.cli._output import can_plot, check_report, write_files

if TYPE_CHECKING:
    from unrolled.bench.case import Case, Settings
    from unrolled.bench.report import Report


def bench(
    cases: Annotated[list[str] | None, typer.Argument(help="Cases to run; all by default.")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases without measuring.")] = False,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Sequence lengths, as in 256,1024, for cases with several lengths; by default those of each "
            "case."
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Only contenders with one of these words in the name, as in performer,aft."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of every contender.")] = 1,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds per case and size, shared by its contenders.")
    ] = 3.0,
    out: Annotated[
        Path, typer.Option(help="The folder of the report; an earlier report there is replaced.")
    ] = Path("runs/bench"),
    device: Annotated[str, typer.Option(help="A torch device, such as cuda.")] = "cpu",
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Tiny sizes and one run each, to test the benchmark; --seconds is ignored and the timings "
            "are meaningless.",
        ),
    ] = False,
    force: Force = False,
) -> None:
    """Measure the speed of this library, compared with others and with the limits of the machine.

    The outputs and gradients of each contender are first checked against their definition in fp64. Only
    correct contenders are timed.

    Contenders run interleaved in one process. The exit code is 1 if any of them was incorrect.

    \b
    Examples:
      unrolled bench --list
      unrolled bench linear-forward step
      unrolled bench linear-forward --lengths 1024,4096 --threads 2
      unrolled bench mechanisms --only linear,performer

    \b
    Files in the folder:
      results.json    all numbers
      results.md      the same as tables
      *.png           time and peak memory against the length
    """
    from unrolled.bench import cases as registry
    from unrolled.bench import runner
    from unrolled.bench.case import Settings
    from unrolled.cli._device import choose
    from unrolled.cli._lengths import parse_lengths
    from unrolled.ops.options import check_finite

    chosen = [registry.find(name) for name in dict.fromkeys(cases or registry.CASES)]
    check_finite(seconds=seconds)
    where = choose(device)
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"--device is {device!r}, but must be cpu or cuda: other devices cannot be timed")
    words = () if only is None else tuple(x.strip() for x in only.split(","))
    sizes = None if lengths is None else parse_lengths(lengths)
    settings = Settings(str(where), threads, 0.0 if quick else seconds, sizes, quick, words)
    if list_cases:
        refuse({"--only": only, "--lengths": lengths}, "measuring, but --list measures nothing")
        for case in chosen:
            typer.echo(f"{case.name:24} {case.about}")
        return
    check_report(out, "results.json", {"machine", "limits", "settings", "rows"}, force)
    if words:
        chosen = runner.matching(chosen, settings)
    if sizes is not None and all(case.axis != "N" for case in chosen):
        names = ", ".join(case.name for case in chosen)
        raise ValueError(f"--lengths is {lengths!r}, but must be left out: no length is varied in {names}")
    _run(chosen, settings, out)


def _run(chosen: "Sequence[Case]", settings: "Settings", out: Path) -> None:
    """Measure case by case, and write the report after each, so that an interrupt loses only one case."""
    from dataclasses import asdict

    from unrolled.bench import cases as registry
    from unrolled.bench import machine, report, runner

    with Console(stderr=True).status("measuring the machine's limits") as status:
        limits = machine.limits(settings)
        found = report.Report(machine.describe(settings), asdict(limits), asdict(settings))
        typer.echo(report.machine_text(found))
        plotted = can_plot()
        plots: dict[str, bytes] = {}
        optional = {f"{name}-{cost}.png" for name in registry.CASES for cost in ("time", "memory")}
        abouts = {case.name: (case.about, case.axis) for case in chosen}
        for case in chosen:
            rows, remarks = runner.run_case(case, settings, limits, status.update)
            found.rows.extend(rows)
            found.remarks[case.name] = remarks
            typer.echo("\n" + report.case_text(found, case.name, case.about, case.axis))
            files = {"results.json": found.to_json(), "results.md": report.markdown(found, abouts)}
            plots |= _plots(found, case) if plotted else {}
            write_files(out, {name: text.encode() for name, text in files.items()} | plots, optional)
    typer.echo(f"\nThe report: {out / 'results.md'}")
    if found.refused:
        names = ", ".join(dict.fromkeys(f"{row.contender} ({row.case})" for row in found.refused))
        typer.secho(f"refused: {names}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1)


def _plots(found: "Report", case: "Case") -> dict[str, bytes]:
    from unrolled.bench import figures  # imports matplotlib

    return figures.draw(found, case.name, case.axis)
