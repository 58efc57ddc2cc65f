"""The results of a benchmark: rows stored as JSON and reported as Markdown."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from unrolled.bench.fits import exponent
from unrolled.bench.units import brief_time, size

UNDISTURBED = 0.97  # share of the CPU time; the report warns if this process got less

Status = Literal["ok", "wrong", "missing", "not measured", "failed"]


@dataclass(frozen=True)
class Row:
    """One contender of one case at one size.

    Attributes:
        case, size, contender: the contender that was measured, and its case and size.
        ours: whether this project made the contender.
        definition: the function that it computes.
        status, reason: whether it was measured, and if not, why.
        error, tolerance: the largest relative error of its results against fp64, and the tolerance.
        threads, runs: CPU threads, and how many timings there are.
        median, least, most: seconds of a job.
        best_peer: the median of the fastest contender that is not ours and has the same definition.
        working: the fraction of CPU time that this process got while it timed all contenders, if each ran on
            one thread.
        tokens_per_second: if a job has tokens.
        flops, share_of_flops: needed operations per second, and as a fraction of the machine's limit.
        bandwidth, share_of_copying: needed bytes per second, and as a fraction of the copying rate.
        peak_bytes: peak memory.
    """

    contender: str
    ours: bool
    definition: str
    case: str = ""
    size: int = 0
    status: Status = "ok"
    reason: str = ""
    error: float | None = None
    tolerance: float | None = None
    threads: int | None = None
    runs: int = 0
    median: float | None = None
    least: float | None = None
    most: float | None = None
    best_peer: float | None = None
    working: float | None = None
    tokens_per_second: float | None = None
    flops: float | None = None
    share_of_flops: float | None = None
    bandwidth: float | None = None
    share_of_copying: float | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Report:
    """The results of one run of the benchmark."""

    machine: dict[str, Any]
    limits: dict[str, Any]
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    remarks: dict[str, list[str]] = field(default_factory=dict)

    @property
    def refused(self) -> list[Row]:
        """The rows of contenders that were incorrect or failed."""
        return [row for row in self.rows if row.status in ("wrong", "failed")]

    def to_json(self) -> str:
        """Write everything."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**fields | {"rows": [Row(**row) for row in fields["rows"]]})


def markdown(report: Report, abouts: Mapping[str, tuple[str, str]]) -> str:
    """Return a report in Markdown; `abouts` has the description and the size axis of each case."""
    parts = ["# Benchmark", machine_text(report)]
    for case in dict.fromkeys(row.case for row in report.rows):
        parts.append(case_text(report, case, *abouts[case]))
    return "\n\n".join(parts) + "\n"


def machine_text(report: Report) -> str:
    """Describe the machine, the versions and the machine's limits."""
    machine, limits = report.machine, report.limits
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    peak = limits["flops"]
    flops = f"not measured: {limits['flops_missing']}" if peak is None else f"{peak / 1e9:.1f} GFLOP/s"
    memory = "" if machine["memory_bytes"] is None else f", {size(machine['memory_bytes'])} of memory"
    threads = machine["threads"]
    quick = ["- quick: tiny sizes, one run each; the times have no meaning"] * report.settings["quick"]
    load = "" if machine["load"] is None else f", load average {machine['load']:.1f} at the start"
    return "\n".join(
        [
            f"- {machine['date']}, {machine['processor']}, {machine['cores']} cores{memory}, "
            f"{machine['instruction_set']}, device {machine.get('gpu', machine['device'])}, "
            f"{threads} thread{'s' * (threads != 1)}{load}",
            f"- {versions}; native kernels: {machine['kernels']}",
            f"- limits: multiply-adds in registers {flops}; copying {limits['copying'] / 1e9:.1f} GB/s "
            f"(read and written), reading {limits['reading'] / 1e9:.1f} GB/s",
            *quick,
        ]
    )


def case_text(report: Report, case: str, about: str, axis: str) -> str:
    """Report one case: a table of medians, a table of all rows, and the remarks."""
    rows = [row for row in report.rows if row.case == case]
    parts = [f"## {case}", about]
    if len({row.size for row in rows}) > 1 and any(row.median is not None for row in rows):
        parts.append(_medians(rows, axis))
    parts.append(_details(rows, axis))
    parts += report.remarks.get(case, [])
    given = [row.working for row in rows if row.working is not None]
    if report.machine["device"] == "cpu" and min(given, default=1.0) < UNDISTURBED:
        parts.append(
            f"The machine did other work: this process had {min(given):.0%} of the time at worst, so read "
            "the ratios only."
        )
    return "\n\n".join(parts)


def _medians(rows: Sequence[Row], axis: str) -> str:
    names = list(dict.fromkeys(row.contender for row in rows if row.median is not None))
    cells = {(row.size, row.contender): brief_time(row.median) for row in rows if row.median is not None}
    sizes = list(dict.fromkeys(row.size for row in rows))
    lines = [[f"{n:,}", *(cells.get((n, name), "") for name in names)] for n in sizes]
    if axis == "N":
        lines.append(["time grows as", *(_growth(rows, name, lambda row: row.least) for name in names)])
        if any(row.peak_bytes for row in rows):
            lines.append(["memory as", *(_growth(rows, name, lambda row: row.peak_bytes) for name in names)])
    return table([axis, *names], lines)


def _growth(rows: Sequence[Row], name: str, cost: Callable[[Row], float | None]) -> str:
    """Return the exponent of a contender's cost, fitted to its fastest runs."""
    found = [(row.size, cost(row)) for row in rows if row.contender == name]
    known = [(n, x) for n, x in found if x]
    if len(known) < 2:
        return ""
    power = round(exponent(*zip(*known, strict=True)), 2) + 0.0  # not -0.0
    return f"N^{power:.2f}"


COLUMNS: dict[str, Callable[[Row], str | None]] = {
    "median": lambda row: None if row.median is None else brief_time(row.median),
    "min to max": lambda row: (
        None
        if row.least is None or row.most is None
        else f"{brief_time(row.least)} to {brief_time(row.most)}"
    ),
    "speed / best peer": lambda row: (
        None if row.best_peer is None or row.median is None else f"{row.best_peer / row.median:.2f}"
    ),
    "tokens/s": lambda row: None if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
    "GFLOP/s": lambda row: None if row.flops is None else f"{row.flops / 1e9:.1f}",
    "of FMA peak": lambda row: None if row.share_of_flops is None else f"{row.share_of_flops:.0%}",
    "GB/s": lambda row: None if row.bandwidth is None else f"{row.bandwidth / 1e9:.1f}",
    "of copying": lambda row: None if row.share_of_copying is None else f"{row.share_of_copying:.0%}",
    "peak memory": lambda row: None if row.peak_bytes is None else size(row.peak_bytes),
    "error / allowed": lambda row: (
        None if row.error is None else f"{row.error:.0e} / {row.tolerance or 0:.0e}"
    ),
}


def _details(rows: Sequence[Row], axis: str) -> str:
    """Report every row, or why it has no time; empty columns are omitted."""
    columns = {name: tell for name, tell in COLUMNS.items() if any(tell(row) for row in rows)}
    lines: list[list[str]] = []
    without: dict[tuple[str, str], list[str]] = {}  # one line below for all sizes with the same outcome
    for row in rows:
        if row.status == "ok":
            lines.append([f"{row.size:,}", row.contender, *(tell(row) or "" for tell in columns.values())])
        else:
            outcome = f"{row.status}: {row.reason}"
            without.setdefault((row.contender, outcome), []).append(f"{row.size:,}")
    for (contender, outcome), sizes in without.items():
        where = "all" if len(sizes) == len({row.size for row in rows}) else ", ".join(sizes)
        lines.append([where, contender, outcome, *[""] * (len(columns) - 1)])
    return table([axis, "contender", *(columns or ["median"])], lines)


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with right-aligned numbers."""
    rule = ["---" if name == "contender" else "---:" for name in header]
    rows = [[cell.replace("|", r"\|") for cell in cells] for cells in [header, rule, *lines]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
