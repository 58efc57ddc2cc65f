"""The plots of a benchmark: time and peak memory against the length. Importing this needs matplotlib."""

from collections.abc import Callable, Sequence

from unrolled.cli import plots
from unrolled.cli._units import brief_time, size
from unrolled.cli.bench.fits import exponent
from unrolled.cli.bench.report import Report, Row


def draw(report: Report, case: str, axis: str) -> dict[str, bytes]:
    """Draw one case: PNGs by file name, of what was measured at two lengths or more."""
    if axis != "N":
        return {}
    rows = [row for row in report.rows if row.case == case]
    ours = {row.contender for row in rows if row.ours}
    found = {}
    for quantity, cost, tick in (
        ("time", lambda row: row.median, brief_time),
        ("memory", lambda row: row.peak_bytes, size),
    ):
        lines = _lines(rows, cost)
        if lines:
            title = f"{case}: {'peak ' * (quantity == 'memory')}{quantity}"
            told = {name: _with_exponent(line) for name, line in lines.items()}
            strong = {told[name].name for name in ours & told.keys()}
            figure = plots.against_size(
                plots.LIGHT, title, "N (tokens)", list(told.values()), tick, strong=strong
            )
            found[f"{case}-{quantity}.png"] = plots.png(figure)
    return found


def _lines(rows: Sequence[Row], cost: Callable[[Row], float | None]) -> dict[str, plots.Line]:
    lines = {}
    for name in dict.fromkeys(row.contender for row in rows):
        points = [(row.size, y) for row in rows if row.contender == name and (y := cost(row))]
        if len(points) > 1:
            lines[name] = plots.Line(name, *zip(*points, strict=True))
    return lines


def _with_exponent(line: plots.Line) -> plots.Line:
    power = exponent(line.x, line.y)
    return line if power is None else line._replace(name=f"{line.name}: $N^{{{power:.2f}}}$")
