"""`unrolled compare`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from unrolled.cli._options import Force
from unrolled.cli._output import can_plot, check_report, write_files

if TYPE_CHECKING:
    from unrolled.bench.comparison import Row, Settings

PLOTS = {"error.png", "time.png", "memory.png"}


def compare(
    mechanisms: Annotated[
        list[str] | None, typer.Argument(help="Mechanisms to compare; by default all of them.")
    ] = None,
    against: Annotated[str, typer.Option(help="The mechanism to compare with.")] = "softmax",
    lengths: Annotated[str, typer.Option(help="Sequence lengths, as in 256,1024.")] = "256,1024,4096",
    options: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME.KEY=VALUE", help="An option of a mechanism; the value is YAML."),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Compare causal attention.")] = False,
    d_model: Annotated[int, typer.Option(min=1, help="Model width.")] = 256,
    n_heads: Annotated[int, typer.Option(min=1, help="Number of heads.")] = 8,
    spread: Annotated[
        float,
        typer.Option(help="Standard deviation of queries, keys and values; larger makes softmax sharper."),
    ] = 1.0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Seconds per length for the forward passes, and as many for forward and backward passes.",
        ),
    ] = 2.0,
    out: Annotated[
        Path, typer.Option(help="The folder of the report; an earlier report there is replaced.")
    ] = Path("runs/compare"),
    force: Force = False,
) -> None:
    """Measure error, time and memory of mechanisms relative to softmax attention.

    All layers get the same random input and the same projections. The error is |y - y*| / |y*|, where y* is
    the output of the reference mechanism. 0 means the same function; about 1 means little in common, as
    expected of a mechanism that is not an approximation. Random inputs are a hard case: real queries and keys
    have more structure.

    Beyond 4,096 tokens, `similarity` and `topk` need gigabytes or minutes, and are not measured. `aft` has
    position_bias=local unless --set says otherwise. Recurrences that forget are measured with --causal only.
    The report is written after each length.

    \b
    Examples:
      unrolled compare performer nystromformer linformer
      unrolled compare performer --set performer.n_features=1024 --spread 0.5
      unrolled compare --causal --lengths 1024,16384

    \b
    Files in the folder:
      comparison.json   all numbers
      comparison.md     the same as a table
      *.png             error, time and memory against the number of tokens
    """
    import json
    from dataclasses import asdict

    from unrolled import attention
    from unrolled.bench import comparison
    from unrolled.cli._lengths import parse_lengths
    from unrolled.ops.options import check_finite
    from unrolled.threads import cpu_threads

    check_finite(seconds=seconds)
    sizes = parse_lengths(lengths)
    if not 0 < spread < float("inf"):
        raise ValueError(f"--spread is {spread}, but must be above 0")
    check_report(out, "comparison.json", {"settings", "rows"}, force)
    settings = comparison.Settings(
        against, d_model, n_heads, causal, spread, seconds=seconds, options=_by_mechanism(options or [])
    )
    plotted = can_plot()

    def write(rows: "Sequence[Row]") -> None:
        numbers = {"settings": asdict(settings), "rows": [asdict(row) for row in rows]}
        text = f"{_markdown(rows, settings)}\n"
        files = {"comparison.json": json.dumps(numbers, indent=1).encode(), "comparison.md": text.encode()}
        write_files(out, files | (_plots(rows) if plotted else {}), PLOTS)

    with cpu_threads(threads), Console(stderr=True).status("measuring") as status:
        rows = comparison.compare(mechanisms or attention.names(), sizes, settings, status.update, write)
    typer.echo(_markdown(rows, settings))
    typer.echo(f"\nThe report: {out / 'comparison.md'}")


def _by_mechanism(overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    from unrolled.cli import run_config

    found = run_config.read(None, overrides, example="performer.seed=1")
    for name, options in found.items():
        if not isinstance(options, dict):
            raise ValueError(
                f"--set is {name}={options!r}, but must be NAME.KEY=VALUE, as in performer.seed=1"
            )
        for key in {"d_model", "n_heads", "causal"} & options.keys():
            raise ValueError(
                f"--set has {name}.{key}, which all mechanisms share: use --{key.replace('_', '-')}"
            )
    return found


def _markdown(rows: "Sequence[Row]", settings: "Settings") -> str:
    from unrolled.bench.report import table
    from unrolled.bench.units import brief_time, size

    base = {row.length: row for row in rows if row.mechanism == settings.against}

    def beside(value: float | None, other: float | None, tell: Any) -> str:
        return "" if value is None or other is None else f"{tell(value)} ({value / other:.2f})"

    lines = []
    for row in rows:
        other = base[row.length]
        if row.refused:
            lines.append([f"{row.length:,}", row.mechanism, f"refused: {row.refused}", "", "", ""])
        else:
            error = "-" if row.error is None else f"{row.error:.2g}"
            costs = [
                beside(row.forward, other.forward, brief_time),
                beside(row.training, other.training, brief_time),
                beside(row.memory, other.memory, size),
            ]
            lines.append([f"{row.length:,}", row.mechanism, error, *costs])
    kind = "causal" if settings.causal else "bidirectional"
    about = (
        f"{kind}, {settings.d_model} wide, {settings.n_heads} heads, spread {settings.spread:g}; "
        f"in brackets, the ratio to {settings.against} attention"
    )
    header = ["tokens", "contender", "error", "forward", "with gradients", "training memory"]
    return f"{about}\n\n{table(header, lines)}"


def _plots(rows: "Sequence[Row]") -> dict[str, bytes]:
    from unrolled.bench import plots
    from unrolled.bench.units import brief_time, size

    def draw(title: str, quantity: str, tick: Any) -> bytes | None:
        lines = []
        for name in dict.fromkeys(row.mechanism for row in rows):
            points = [(row.length, getattr(row, quantity)) for row in rows if row.mechanism == name]
            points = [(x, y) for x, y in points if y]  # an error of 0 has no logarithm
            if points:
                lines.append(plots.Line(name, *map(list, zip(*points, strict=True))))
        if not lines:
            return None
        return plots.png(plots.against_size(plots.LIGHT, title, "tokens", lines, tick))

    drawn = {
        "error.png": draw("error", "error", "{:.2g}".format),
        "time.png": draw("time, forward", "forward", brief_time),
        "memory.png": draw("training memory", "memory", size),
    }
    return {name: image for name, image in drawn.items() if image is not None}
