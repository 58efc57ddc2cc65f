"""The documentation page that says which claims hold, according to the results that come with the library."""

from typing import Any

from unrolled import experiments
from unrolled.bench.report import table
from unrolled.cli._experiment_report import EVALUATED, in_figures, places, tried, within
from unrolled.cli._experiments import load
from unrolled.experiments import Experiment, Verdict

HELD = {True: "held", False: "**not held**", None: "not known yet"}
TEXT = """\
# Which claims hold

This page has the results of [`unrolled reproduce NAME --scale full`](reproduce.md). Expectations are
written down before the runs, and never changed to fit the results. All models are small, and most were
trained on one core of a CPU. So the results show whether a claim holds at this size, not whether it holds
at the sizes in the sources. Losses are in nats, with standard errors over the seeds.

An expectation compares means. It is marked "within the standard error" if its sides differ by less than the
standard error of their difference, which is known for several seeds only. The runs do not decide such an
expectation.
"""


def page() -> str:
    """Return the page, in Markdown."""
    found = [(load(name), experiments.obtained(name)) for name in experiments.names()]
    lines = [_line(*each) for each in found]
    head = "| experiment | claim | expectations | minutes, estimated |\n| --- | --- | --- | ---: |"
    sections = [_section(*each) for each in found]
    return "\n".join([TEXT, head, *lines, "", *sections])


def _verdicts(results: dict[str, Any]) -> list[Verdict]:
    """Return the expectations of shipped results."""
    return [Verdict(**x | {"sides": x["sides"] and tuple(x["sides"])}) for x in results["expectations"]]


def _line(experiment: Experiment, results: dict[str, Any] | None) -> str:
    """Return the row of an experiment in the table of all experiments."""
    state = "not run"
    if results is not None:
        verdicts = _verdicts(results)
        held = [x.held for x in verdicts]
        state = f"{held.count(True)} of {len(held)} held" if held else "measured"
        if None in held:
            state += f", {held.count(None)} not known yet"
        if close := sum(x.close for x in verdicts):
            state += f", {close} within the standard error"
    minutes = f"{experiment.budget['full']:g}"
    return f"| [{experiment.name}](#{experiment.name}) | {experiment.claim} | {state} | {minutes} |"


def _section(experiment: Experiment, results: dict[str, Any] | None) -> str:
    """Return the section of an experiment: its claim, its results and its expectations."""
    verdicts = {} if results is None else {x.text: x for x in _verdicts(results)}
    parts = [f"## {experiment.name}\n", f"{experiment.claim}\n", f"Source: {experiment.paper}.\n"]
    if results is None:
        parts.append("Not run at the scale `full` yet.\n")
    else:
        on = places(results["runs"].values(), results["machine"]["processor"])
        parts += [table(**results["table"]), "", f"On {' and '.join(on)}.\n"]
        titles = {"evaluated": EVALUATED, "tried": tried(results.get("edges", []))}
        for name, title in titles.items():
            if name in results:
                parts += [f"{title}\n", table(**results[name]), ""]
    for text in experiment.expect:
        verdict = verdicts.get(text)
        said = f": {HELD[verdict.held]}{within(verdict)}{in_figures(verdict)}" if verdict else ""
        parts.append(f"- `{text}`{said}")
    if experiment.expect:
        parts.append("")
    if experiment.finding:
        parts.append(f"{experiment.finding}\n")
    return "\n".join(parts)
