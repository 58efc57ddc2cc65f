"""The report of an experiment: results.json, table.md, plot.png and report.html."""

import base64
import json
import platform
from collections.abc import Iterable
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import torch

from unrolled.bench.machine import processor
from unrolled.bench.report import table
from unrolled.cli._output import can_plot, software
from unrolled.experiments import BESIDE, Figures, Mean, Results, Table, Verdict
from unrolled.files import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVALUATED = "The same models, evaluated in other ways:"
HORIZONTAL = {"step": "training step", "seconds": "seconds of training"}


def write(results: Results, scale: str, folder: Path) -> None:
    """Write the four files; the plot only if matplotlib is installed."""
    experiment, about = results.experiment, {"scale": scale, "machine": machine()}
    header, lines = results.table()
    verdicts = told(results)
    text = f"{table(header, lines)}\n\n" + "".join(f"- {x}\n" for x in verdicts)
    for title, more in more_tables(results):
        text += f"\n{title}\n\n{table(*more)}\n"
    write_file(folder / "results.json", f"{json.dumps(results.to_json() | about, indent=1)}\n")
    write_file(folder / "table.md", f"# {experiment.name}, {scale}\n\n{experiment.claim}\n\n{text}")
    picture = plot(results) if can_plot() else None
    if picture is None:
        (folder / "plot.png").unlink(missing_ok=True)
    else:
        write_file(folder / "plot.png", picture)
    write_file(folder / "report.html", page(results, scale, picture))


def more_tables(results: Results) -> list[tuple[str, Table]]:
    """Return the tables after the first, each with its title."""
    experiment, found = results.experiment, []
    if experiment.evaluate:
        found.append((EVALUATED, results.evaluated()))
    if experiment.sweep:
        found.append((tried(results.edges()), results.tried()))
    return found


def tried(edges: Iterable[str]) -> str:
    """Return the title of the table of swept values; `edges` are sentences about the best values."""
    return " ".join(["Loss at each value that was tried, with the first seed.", *edges])


def machine() -> dict[str, str]:
    """Return the processor and the versions that the figures depend on."""
    return {"processor": processor(), "torch": torch.__version__, "python": platform.python_version()}


def places(runs: Iterable[Figures], processor: str) -> list[str]:
    """Name what runs were trained on; older figures do not say it, and count as trained on `processor`."""
    found = ((x.get("processor", processor), x.get("device", "cpu")) for x in runs)
    return sorted({name if device != "cpu" else f"one core of {name}" for name, device in found})


def plot(results: Results) -> bytes | None:
    """Draw the runs that have ended: their losses during training, or their further evaluations, if any."""
    from unrolled.bench import plots

    of = evaluations if results.experiment.horizontal == "evaluate" else losses
    figure = of(results)
    return None if figure is None else plots.png(figure, software("reproduce"))


def evaluations(results: Results) -> "Figure | None":
    """Draw the means over the seeds of the first measure in `BESIDE` that the further evaluations have."""
    from unrolled.bench import plots

    places, contenders = (None, *results.experiment.evaluate), results.experiment.contenders

    def means(measure: str, at: str | None) -> list[Mean | None]:
        return [results.mean(measure, name, at) for name in contenders]

    measure = next((x for x in BESIDE if any(any(means(x, at)) for at in places[1:])), None)
    if measure is None:
        return None
    known = {at or "as trained": found for at in places if any(found := means(measure, at))}
    title = measure.replace("_", " ")
    return plots.points(plots.LIGHT, title, list(contenders), known)


def losses(results: Results) -> "Figure | None":
    """Draw the validation loss of each contender, at its best settings with the first seed."""
    from unrolled.bench import plots

    experiment, lines = results.experiment, []
    for name in experiment.contenders:
        figures = None if (best := results.best(name)) is None else results.figures(best)
        if figures is not None and figures["loss"] is not None:
            curve = figures["curve"]
            unit = figures["seconds_per_step"] if experiment.horizontal == "seconds" else 1
            lines.append(plots.Line(name, [x * unit for x in curve["step"]], curve["loss"]))
    if not lines:
        return None
    return plots.loss_curves(plots.LIGHT, "validation loss", lines, HORIZONTAL[experiment.horizontal])


def page(results: Results, scale: str, picture: bytes | None) -> str:
    """Return a page that needs no other file."""
    experiment = results.experiment
    header, lines = results.table()
    template = Template(
        resources.files("unrolled.cli").joinpath("experiment.html").read_text(encoding="utf-8")
    )
    image = ""
    if picture is not None:
        source = base64.b64encode(picture).decode()
        image = f'<img alt="Plot of the results" src="data:image/png;base64,{source}">'
    more = "\n".join(f"<p>{title}</p>\n{_html(*of)}" for title, of in more_tables(results))
    shown = ("base", "contenders", *(["evaluate"] if experiment.evaluate else []))
    settings = json.dumps({x: getattr(experiment, x) for x in shown}, indent=1)
    return template.substitute(
        name=escape(experiment.name),
        scale=escape(scale),
        claim=escape(experiment.claim),
        paper=escape(experiment.paper),
        table=_html(header, lines),
        more=more,
        verdicts="".join(f"<li>{escape(x)}</li>" for x in told(results)),
        picture=image,
        settings=escape(settings),
        places=escape(" and ".join(places(results.runs.values(), machine()["processor"]))),
        machine=escape(", ".join(f"{key} {value}" for key, value in machine().items())),
    )


def _html(header: list[str], lines: list[list[str]]) -> str:
    """Write a table."""
    head = "".join(f"<th>{escape(x)}</th>" for x in header)
    rows = ["".join(f"<td>{escape(x)}</td>" for x in line) for line in lines]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def told(results: Results) -> list[str]:
    """Return a line for each expectation that says whether it holds, with the values of both sides."""
    trials = [trial for name in results.experiment.contenders for trial in results.trials(name)]
    ended = all(results.figures(trial) is not None for trial in trials)
    said = {True: "held", False: "NOT HELD", None: "not measured" if ended else "not known yet"}
    return [f"{said[x.held]}{within(x)}: {x.text}{in_figures(x)}" for x in results.verdicts()]


def within(verdict: Verdict) -> str:
    """Say so if the sides of an expectation differ by less than the standard error of their difference."""
    return f", within the standard error of {verdict.error:.2g}" if verdict.close else ""


def in_figures(verdict: Verdict) -> str:
    """Write the values of both sides in brackets, if they are known, with digits that tell them apart."""
    if verdict.sides is None:
        return ""
    left, right = verdict.sides
    digits = next((n for n in range(4, 18) if f"{left:.{n}g}" != f"{right:.{n}g}"), 4)
    return f" ({left:.{digits}g} and {right:.{digits}g})"
