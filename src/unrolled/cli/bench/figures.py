"""The plots of a benchmark: time and peak memory against the size. Importing this module needs matplotlib."""

from collections.abc import Callable, Sequence

from unrolled.cli import plots
from unrolled.cli._units import brief_time, size
from unrolled.cli.bench.fits import exponent
from unrolled.cli.bench.report import Report, Row


def draw(report: Report, case: str, axis: str) -> dict[str, bytes]:
    """Draw one case: PNGs by file name, none where fewer than two sizes were measured."""
    rows = [row for row in report.rows if row.case == case]
    what = "N (tokens)" if axis == "N" else axis
    time = _lines(rows, lambda row: row.median)
    memory = _lines(rows, lambda row: row.peak_bytes)
    found = {}
    if time:
        figure = plots.against_size(plots.LIGHT, f"{case}: time", what, time, brief_time)
        found[f"{case}-time.png"] = plots.png(figure)
    if memory:
        figure = plots.against_size(plots.LIGHT, f"{case}: peak memory", what, memory, size)
        found[f"{case}-memory.png"] = plots.png(figure)
    return found


def _lines(rows: Sequence[Row], cost: Callable[[Row], float | None]) -> list[plots.Line]:
    lines = []
    for name in dict.fromkeys(row.contender for row in rows):
        points = [(row.size, y) for row in rows if row.contender == name and (y := cost(row))]
        if len(points) < 2:
            continue
        sizes, costs = zip(*points, strict=True)
        power = exponent(sizes, costs)
        lines.append(plots.Line(name if power is None else f"{name}: $N^{{{power:.2f}}}$", sizes, costs))
    return lines
