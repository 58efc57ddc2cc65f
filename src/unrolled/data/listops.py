"""ListOps (Nangia and Bowman 2018, arXiv 1804.06028) in the form of the Long Range Arena (Tay et al. 2020).

    [MAX 2 9 [MIN 4 7 ] 0 ]  ->  9

An expression is a digit, or an operator with expressions as arguments; its value is one of ten labels. The
operators are the minimum, the maximum, the median (of an even number of values, the mean of the two in the
middle, rounded down) and the sum modulo 10. As in the Long Range Arena (arXiv 2011.04006, section 2.2.1, and
its published code), a node above the last level is an operator with probability 0.25, an operator has 2 to
`arguments` arguments, all other choices are uniform, and expressions outside the range of lengths are drawn
again.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge

from unrolled.contract import Batch
from unrolled.data._base import Task
from unrolled.data._drawn import DrawnDataset
from unrolled.data._padding import padded
from unrolled.fields import Size


def median(values: Sequence[int]) -> int:
    """Return the median; of an even number of values, the mean of the two in the middle, rounded down."""
    values, half = sorted(values), len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) // 2


OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": median,
    "[SM": lambda values: sum(values) % 10,
}
WORDS = [*map(str, range(10)), *OPERATORS, "]"]
"""The meaning of the ids; a digit has its own value."""
FIRST_OPERATOR, END = 10, len(WORDS) - 1
OPERATOR_PROBABILITY = 0.25
ATTEMPTS = 200_000  # at drawing an expression whose length is in the range


@dataclass
class ListopsDataset(DrawnDataset):
    """Unlimited random training examples, and a fixed validation set.

    An example is padded at its end to the longest of its batch. Labels are not equally frequent: always
    guessing 0 is right in about a sixth of the cases.

    Attributes:
        shortest: minimum number of tokens of an expression.
        length: maximum number of tokens of an expression.
        depth: maximum number of levels of an expression; the last level has only digits.
        arguments: maximum number of arguments of an operator.
        val_size: examples of the validation set.

    Raises:
        ValueError: an option is impossible.
    """

    shortest: Size = 500
    length: Size = 2_000
    depth: Size = 10
    arguments: Annotated[int, Ge(2)] = 10
    val_size: Size = 1_000

    task: ClassVar[Task] = "labels"
    vocab_size: ClassVar[int] = len(WORDS)
    n_classes: ClassVar[int] = 10

    def _check(self) -> None:
        if self.shortest > self.length:
            raise ValueError(f"shortest is {self.shortest}, but must be at most length = {self.length}")

    def _draw(self, rng: np.random.Generator, count: int) -> Batch:
        source = random.Random(int(rng.integers(2**63)))
        drawn = [self._expression(source) for _ in range(count)]
        inputs, padding = padded(drawn)
        return Batch(inputs, torch.tensor([value_of(ids) for ids in drawn]), padding)

    def _expression(self, source: random.Random) -> list[int]:
        for _ in range(ATTEMPTS):
            ids: list[int] = []
            if self._grow(source, ids, 1) and len(ids) >= self.shortest:
                return ids
        raise ValueError(
            f"shortest is {self.shortest} and length {self.length}, but of {ATTEMPTS:,} expressions of depth "
            f"{self.depth} with {self.arguments} arguments none is in between: choose a wider range"
        )

    def _grow(self, source: random.Random, ids: list[int], depth: int) -> bool:
        """Add an expression to `ids`; return False as soon as it is too long."""
        if depth >= self.depth or source.random() >= OPERATOR_PROBABILITY:
            ids.append(int(10 * source.random()))
            return len(ids) <= self.length
        ids.append(FIRST_OPERATOR + int(len(OPERATORS) * source.random()))
        for _ in range(source.randint(2, self.arguments)):
            if not self._grow(source, ids, depth + 1):
                return False
        ids.append(END)
        return len(ids) <= self.length


def value_of(ids: Sequence[int]) -> int:
    """Return the value of an expression."""
    operators = list(OPERATORS.values())
    waiting: list[list[int]] = [[]]
    for i in ids:
        if i < FIRST_OPERATOR:
            waiting[-1].append(i)
        elif i < END:
            waiting.append([i])
        else:
            operator, *values = waiting.pop()
            waiting[-1].append(operators[operator - FIRST_OPERATOR](values))
    return waiting[0][0]
