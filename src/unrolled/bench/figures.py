"""The plots of a benchmark: time and peak memory against the length. Importing this needs matplotlib."""

from collections.abc import Callable, Sequence

from unrolled.bench import plots
from unrolled.bench.fits import exponent
from unrolled.bench.report import Report, Row
from unrolled.bench.units import brief_time, size

Cost = Callable[[Row], float | None]


def draw(report: Report, case: str, axis: str) -> dict[str, bytes]:
    """Draw one case: PNGs by file name, with the contenders that were measured at two or more lengths."""
    if axis != "N":
        return {}
    rows = [row for row in report.rows if row.case == case]
    return {
        f"{case}-{name}.png": image
        for name, title, cost, best, tick in (
            ("time", "time", lambda row: row.median, lambda row: row.least, brief_time),
            ("memory", "peak memory", lambda row: row.peak_bytes, lambda row: row.peak_bytes, size),
        )
        if (image := _draw(rows, f"{case}: {title}", cost, best, tick)) is not None
    }


def _draw(
    rows: Sequence[Row], title: str, cost: Cost, best: Cost, tick: Callable[[float], str]
) -> bytes | None:
    """Draw the cost; exponents are fitted to the best costs seen, which a busy machine disturbs least."""
    lines, strong = [], set()
    for name in dict.fromkeys(row.contender for row in rows):
        its = [row for row in rows if row.contender == name and cost(row) and best(row)]
        if len(its) > 1:
            sizes = [row.size for row in its]
            power = exponent(sizes, [best(row) or 0 for row in its])
            label = f"{name}: $N^{{{power:.2f}}}$"
            lines.append(plots.Line(label, sizes, [cost(row) or 0 for row in its]))
            strong |= {label} if its[0].ours else set()
    if not lines:
        return None
    return plots.png(plots.against_size(plots.LIGHT, title, "N (tokens)", lines, tick, strong))
