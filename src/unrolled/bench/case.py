"""The parts of a benchmark: cases, their problems, the definitions, and the contenders to time."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unrolled.threads import cpu_threads

LAMBDA = 8.0
"""With this, the probability that rounding alone exceeds a `tolerance` is about 1e-14 per number."""


class MissingError(Exception):
    """A contender is not installed here; the message says what is missing."""


class NotMeasuredError(Exception):
    """A contender is skipped on purpose; the message gives the reason."""


@dataclass(frozen=True)
class Settings:
    """The user's settings.

    Attributes:
        device: where the operations run.
        threads: CPU threads of every contender that does not set its own number.
        seconds: the budget of one case at one size, shared by its contenders.
        lengths: sequence lengths, which replace the sizes of a case if these are sequence lengths.
        quick: tiny sizes, to test the benchmark.
        only: the contenders whose names contain one of these words; all if empty.
    """

    device: str = "cpu"
    threads: int = 1
    seconds: float = 3.0
    lengths: tuple[int, ...] | None = None
    quick: bool = False
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Definition:
    """The function that a contender must compute: its results in fp64, and the work it needs.

    Attributes:
        compute: computes the results, if possible by code that no contender shares.
        names: the names of the results.
        tolerance: the largest error of a correct contender, relative to the largest number of each result; or
            a function that measures it.
        flops: additions, multiplications, divisions and exponentials that the function needs.
        nbytes: bytes that must be read and written once.
        compared: selects the part of a contender's result that `compute` returns; all by default.
    """

    compute: Callable[[], Sequence[Tensor]]
    names: Sequence[str]
    tolerance: float | Callable[[], float]
    flops: float | None = None
    nbytes: float | None = None
    compared: Callable[[Tensor], Tensor] = lambda x: x

    @cached_property
    def allowed(self) -> float:
        """The tolerance, measured once."""
        return self.tolerance() if callable(self.tolerance) else self.tolerance

    @cached_property
    def results(self) -> list[Tensor]:
        """The results of `compute`, computed once and on all cores, since it is not timed."""
        with torch.enable_grad(), cpu_threads(os.cpu_count()):
            return [x.detach().double() for x in self.compute()]


@dataclass(frozen=True)
class Contender:
    """One way to do the job.

    Attributes:
        name: its name in the tables.
        prepare: does the untimed set-up (imports, casts, copies) and returns the function to time, which
            takes no arguments and returns its results in the definition's order. Raises `MissingError`,
            `ImportError` of another library, or `NotMeasuredError` if it cannot run.
        definition: the name of the function that it computes, in the problem's `definitions`.
        ours: whether this project made it; all others are peers.
        threads: CPU threads, instead of those of the settings.
    """

    name: str
    prepare: Callable[[], Callable[[], Sequence[Tensor]]]
    definition: str
    ours: bool = False
    threads: int | None = None


@dataclass(frozen=True)
class Problem:
    """A case at one size.

    Attributes:
        contenders: the contenders to time, in the order of the table.
        definitions: the functions that they compute, by name.
        steps: how often a run does the job; times, operations and bytes are reported per job.
        tokens: sequence positions per job, to report tokens per second.
        remark: maps the medians by contender to a sentence below the table, or to an empty one.
    """

    contenders: Sequence[Contender]
    definitions: Mapping[str, Definition]
    steps: int = 1
    tokens: int | None = None
    remark: Callable[[Mapping[str, float]], str] = lambda medians: ""


@dataclass(frozen=True)
class Case:
    """A question that the benchmark answers, at several sizes.

    Attributes:
        name: its name on the command line.
        about: its description, in one sentence.
        axis: name of the size; "N" is a sequence length.
        sizes, quick: the sizes to measure, and those for the setting `quick`.
        problem: makes the problem of a size.
        memory: whether to measure peak memory, each contender in a separate process.
    """

    name: str
    about: str
    axis: str
    sizes: tuple[int, ...]
    quick: tuple[int, ...]
    problem: Callable[[int, Settings], Problem]
    memory: bool = False

    def chosen_sizes(self, settings: Settings) -> tuple[int, ...]:
        """The sizes to measure with these settings."""
        if settings.lengths is not None and self.axis == "N":
            return settings.lengths
        return self.quick if settings.quick else self.sizes


def tolerance(dtype: torch.dtype, terms: int) -> float:
    """Bound the rounding error of sums of `terms` terms, computed from numbers of `dtype`.

    A sum of n rounded terms in fp32 is off by less than lambda sqrt(n) u with probability
    1 - 2 exp(-lambda^2 / 2) (Higham and Mary 2019, SIAM J. Sci. Comput. 41, theorem 2.4). In half precision
    the inputs of each of the four products of attention and its gradient are rounded once more.
    """
    single = torch.finfo(torch.float32).eps / 2
    rounded = 0.0 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps / 2
    return LAMBDA * math.sqrt(terms) * single + rounded
