"""Runs a case: every contender is checked before anything is timed; incorrect ones are not timed."""

import math
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from unrolled.bench import machine, memory
from unrolled.bench.case import Case, Contender, Definition, MissingError, NotMeasuredError, Problem, Settings
from unrolled.bench.machine import Limits
from unrolled.bench.measure import take_turns
from unrolled.bench.report import Row
from unrolled.contract import UnsupportedError
from unrolled.threads import cpu_threads

LEAST = 3  # minimum timings of each contender, however long one takes
NOTHING = 1e-9  # below this part of the largest number of all results, a result is zero but for rounding


def matching(cases: Sequence[Case], settings: Settings) -> list[Case]:
    """Leave out the cases of whose contenders the settings choose none.

    Raises:
        ValueError: the settings choose no contender of any case.
    """
    names = {}
    for case in cases:
        problem = case.problem(case.chosen_sizes(settings)[0], settings)
        names[case.name] = [x.name for x in problem.contenders]
    found = [case for case in cases if any(_chosen(name, settings) for name in names[case.name])]
    if not found:
        known = "; ".join(dict.fromkeys(name for of_case in names.values() for name in of_case))
        raise ValueError(f"--only is {','.join(settings.only)!r}, but the contenders are: {known}")
    return found


def run_case(
    case: Case, settings: Settings, limits: Limits, tell: Callable[[str], object] = lambda _: None
) -> tuple[list[Row], list[str]]:
    """Check and measure a case at each of its sizes; return the rows and the remarks on them.

    `tell` is called with the current activity.
    """
    rows, remarks = [], []
    for size in case.chosen_sizes(settings):
        tell(f"{case.name}, {case.axis} = {size:,}")
        problem = case.problem(size, settings)
        found = run_problem(problem, settings, limits)
        rows += [replace(row, case=case.name, size=size) for row in found]
        medians = {row.contender: row.median for row in found if row.median is not None}
        if remark := problem.remark(medians):
            remarks.append(f"{case.axis} = {size:,}: {remark}")
    if case.memory and not settings.quick:
        rows, unknown = _with_memory(case, rows, settings, tell)
        remarks += unknown
    return rows, remarks


def run_problem(problem: Problem, settings: Settings, limits: Limits) -> list[Row]:
    """Check and measure the chosen contenders of a problem; the rows are in their order."""
    contenders = [x for x in problem.contenders if _chosen(x.name, settings)]
    rows, runs = {}, {}
    with cpu_threads(settings.threads):
        for contender in contenders:
            rows[contender.name], run = _check(contender, problem, settings)
            if run is not None:
                runs[contender.name] = run
        clocks = time.perf_counter(), time.process_time()
        seconds = take_turns(runs, least=1 if settings.quick else LEAST, budget=settings.seconds)
        passed, worked = time.perf_counter() - clocks[0], time.process_time() - clocks[1]
    alone = all((x.threads or settings.threads) == 1 for x in contenders)
    working = min(1.0, worked / passed) if alone else None  # more threads would hide that others work too
    medians = {name: median(taken) / problem.steps for name, taken in seconds.items()}
    peers = [x for x in contenders if x.name in medians and not x.ours]
    for contender in contenders:
        if (name := contender.name) in seconds:
            threads = contender.threads or settings.threads
            row = _timed(rows[name], seconds[name], problem, threads, limits, settings)
            alike = (contender.definition, contender.threads)
            same = [medians[x.name] for x in peers if (x.definition, x.threads) == alike]
            rows[name] = replace(row, best_peer=min(same, default=None), working=working)
    return list(rows.values())


def _chosen(name: str, settings: Settings) -> bool:
    """Whether the settings choose a contender of this name."""
    return not settings.only or not set(settings.only).isdisjoint(re.split(r"[\s,]+", name))


def _check(
    contender: Contender, problem: Problem, settings: Settings
) -> tuple[Row, Callable[[], object] | None]:
    """Compare a contender with its definition; if it is correct, also return the function to time."""
    definition = problem.definitions[contender.definition]
    row = Row(contender=contender.name, ours=contender.ours, definition=contender.definition)
    threads = contender.threads or settings.threads
    torch.set_num_threads(threads)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of third-party libraries
            run = contender.prepare()
            found = [x.detach() for x in run()]
    except (MissingError, ImportError, UnsupportedError) as error:
        # an import that fails within this library is a defect of it
        broken = isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "unrolled"
        return replace(row, status="failed" if broken else "missing", reason=_sentence(error)), None
    except NotMeasuredError as error:
        return replace(row, status="not measured", reason=_sentence(error)), None
    except Exception as error:  # a peer may raise anything; measure the others anyway
        return replace(row, status="failed", reason=_sentence(error)), None
    largest, name = largest_error(found, definition)
    row = replace(row, error=largest, tolerance=definition.allowed)
    if largest > definition.allowed:
        reason = f"max error {largest:.2g} in {name}, where at most {definition.allowed:.2g} is rounding"
        return replace(row, status="wrong", reason=reason), None

    def timed() -> None:
        torch.set_num_threads(threads)
        run()

    return row, machine.synchronized(timed, settings.device)


def largest_error(found: Sequence[Tensor], definition: Definition) -> tuple[float, str]:
    """Return the largest error of any result, relative to that result's largest number, and its name.

    A result that is zero but for rounding, as some gradients of one token are, is compared with the largest
    number of all results instead.
    """
    errors, whole = [], max(exact.abs().max() for exact in definition.results)
    parts = map(definition.compared, found)
    for x, exact, name in zip(parts, definition.results, definition.names, strict=True):
        if x.shape != exact.shape:
            return math.inf, f"{name} (of shape {list(x.shape)}, not {list(exact.shape)})"
        own = exact.abs().max()
        error = float((x.double() - exact).abs().max() / (own if own > NOTHING * whole else whole))
        errors.append((math.inf, f"{name} (NaN)") if math.isnan(error) else (error, name))
    return max(errors)


def _timed(
    row: Row, taken: Sequence[float], problem: Problem, threads: int, limits: Limits, settings: Settings
) -> Row:
    """Add the times of a contender, and its operations and bytes per second, to its row."""
    each = [x / problem.steps for x in taken]
    definition = problem.definitions[row.definition]
    middle = median(each)
    flops = None if definition.flops is None else definition.flops / middle
    nbytes = None if definition.nbytes is None else definition.nbytes / middle
    peak = None if limits.flops is None else limits.flops * threads / settings.threads
    return replace(
        row,
        threads=threads,
        runs=len(each),
        median=middle,
        least=min(each),
        most=max(each),
        tokens_per_second=None if problem.tokens is None else problem.tokens / middle,
        flops=flops,
        share_of_flops=None if flops is None or peak is None else flops / peak,
        bandwidth=nbytes,
        # copying was only measured with the threads of the settings
        share_of_copying=None if nbytes is None or threads != settings.threads else nbytes / limits.copying,
    )


def _with_memory(
    case: Case, rows: Sequence[Row], settings: Settings, tell: Callable[[str], object]
) -> tuple[list[Row], list[str]]:
    """Add peak memory to the rows that have a time; also return a remark for each failure."""
    found: dict[tuple[str, int], int] = {}
    unknown = []
    for name in dict.fromkeys(row.contender for row in rows if row.median is not None):
        tell(f"{case.name}: memory of {name}")
        sizes = [row.size for row in rows if row.contender == name and row.median is not None]
        try:
            peaks = memory.peaks(case, name, sizes, settings)
        except RuntimeError as error:
            unknown.append(f"peak memory of {name}: not measured: {error}")
            continue
        found |= {(name, size): peak for size, peak in peaks.items()}
    return [replace(row, peak_bytes=found.get((row.contender, row.size))) for row in rows], unknown


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
