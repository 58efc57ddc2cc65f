"""The documentation page that says which claims hold, according to the results that come with the library."""

from typing import Any

from unrolled import experiments
from unrolled.bench.report import table
from unrolled.cli._experiment_report import EVALUATED, TRIED, in_figures, places
from unrolled.cli._experiments import load
from unrolled.experiments import Experiment

HELD = {True: "held", False: "**not held**", None: "not known yet"}
TEXT = """\
# Which claims hold

This page has the results of [`unrolled reproduce NAME --scale full`](reproduce.md). Expectations are
written down before the runs, and never changed to fit the results. All models are small, and most were
trained on one core of a CPU. So the results show whether a claim holds at this size, not whether it holds
at the sizes in the sources. Losses are in nats, with standard errors over the seeds.
"""


def page() -> str:
    """Return the page, in Markdown."""
    found = [(load(name), experiments.obtained(name)) for name in experiments.names()]
    lines = [_line(*each) for each in found]
    head = "| experiment | claim | expectations | minutes of a core |\n| --- | --- | --- | ---: |"
    sections = [_section(*each) for each in found]
    return "\n".join([TEXT, head, *lines, "", *sections])


def _line(experiment: Experiment, results: dict[str, Any] | None) -> str:
    """Return the row of an experiment in the table of all experiments."""
    state = "not run"
    if results is not None:
        held = [x["held"] for x in results["expectations"]]
        state = f"{held.count(True)} of {len(held)} held" if held else "measured"
        if None in held:
            state += f", {held.count(None)} not known yet"
    minutes = f"{experiment.budget['full']:g}"
    return f"| [{experiment.name}](#{experiment.name}) | {experiment.claim} | {state} | {minutes} |"


def _section(experiment: Experiment, results: dict[str, Any] | None) -> str:
    """Return the section of an experiment: its claim, its results and its expectations."""
    verdicts = {} if results is None else {x["text"]: x for x in results["expectations"]}
    parts = [f"## {experiment.name}\n", f"{experiment.claim}\n", f"Source: {experiment.paper}.\n"]
    if results is None:
        parts.append("Not run at the scale `full` yet.\n")
    else:
        on = places(results["runs"].values(), results["machine"]["processor"])
        parts += [table(**results["table"]), "", f"On {' and '.join(on)}.\n"]
        for name, title in (("evaluated", EVALUATED), ("tried", TRIED)):
            if name in results:
                parts += [f"{title}\n", table(**results[name]), ""]
    for text in experiment.expect:
        verdict = verdicts.get(text)
        parts.append(
            f"- `{text}`" + (f": {HELD[verdict['held']]}{in_figures(verdict['sides'])}" if verdict else "")
        )
    if experiment.expect:
        parts.append("")
    if experiment.finding:
        parts.append(f"{experiment.finding}\n")
    return "\n".join(parts)
