"""The expectations of an experiment: comparisons such as `loss["linear"] - loss["softmax"] < 0.05`."""

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MEASURES = (
    "loss",
    "accuracy",
    "error_rate",
    "iou",
    "bleu",
    "spectral_mass",
    "bits",
    "perplexity",
    "seconds",
    "seconds_per_step",
    "parameters",
)
"""The measures that can be compared; see `results.Results`."""


def _quotient(x: float, y: float) -> float:
    return x / y if y else math.nan  # no comparison with NaN holds


BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
}
COMPARE: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
FUNCTIONS: dict[str, Callable[..., float]] = {"abs": abs, "min": min, "max": max}


class Mean(NamedTuple):
    """The mean over the seeds and its standard error, which is None for a single seed."""

    mean: float
    error: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        """Average values, at least one."""
        n, mean = len(values), math.fsum(values) / len(values)
        if n == 1:
            return cls(mean, None)
        return cls(mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1) / n))


class Verdict(NamedTuple):
    """An expectation, whether it holds, the values of both sides, and the standard error of their difference.

    `held` and `sides` are None if runs are missing. If a run diverged, the expectation does not hold, and has
    no sides. The standard error is None for a single seed.
    """

    text: str
    held: bool | None
    sides: tuple[float, float] | None
    error: float | None

    @property
    def close(self) -> bool:
        """Whether the sides differ by less than the standard error of their difference."""
        if self.sides is None or self.error is None:
            return False
        left, right = self.sides
        return abs(left - right) < self.error


Place = tuple[str, str, str | None]
"""A measure, a contender, and a further evaluation if one is named."""

Values = Callable[[str, str, str | None], Sequence[float] | None]
"""Returns the values of a `Place`, one for each seed; None if they are not known yet."""


class DivergedError(Exception):
    """A run that an expectation needs diverged, so the expectation does not hold."""


@dataclass(frozen=True)
class Expectation:
    """A comparison of two sides.

    A side consists of numbers, + - * /, abs, min, max, and `measure["contender"]`, or for a further
    evaluation `measure["contender", "evaluation"]`; `mean(measure)` is the mean over all contenders.
    """

    text: str
    left: ast.expr
    relation: type[ast.cmpop]
    right: ast.expr

    @classmethod
    def parse(
        cls, text: str, contenders: Collection[str], evaluations: Collection[str] = ()
    ) -> "Expectation":
        """Parse a comparison.

        Raises:
            ValueError: the text is not a comparison, or names something that does not exist.
        """
        try:
            found = ast.parse(str(text).strip(), mode="eval").body
        except SyntaxError as error:
            raise ValueError(f"the expectation {text!r} is not a comparison: {error.msg}") from error
        if not isinstance(found, ast.Compare) or len(found.ops) != 1 or type(found.ops[0]) not in COMPARE:
            raise ValueError(f"the expectation {text!r} must compare two sides with <, <=, > or >=")
        found = _Means(contenders).visit(found)
        for side in (found.left, found.comparators[0]):
            _check(side, text, contenders, evaluations)
        return cls(str(text), found.left, type(found.ops[0]), found.comparators[0])

    @property
    def measures(self) -> set[str]:
        """The measures that are compared."""
        return {measure for measure, _, _ in self._places}

    def judge(self, values: Values) -> Verdict:
        """Judge the expectation by the means of its contenders.

        The standard error is that of the difference of the sides, computed for each seed: values of one model
        depend on each other.
        """
        try:
            found = {place: values(*place) for place in self._places}
        except DivergedError:
            return Verdict(self.text, False, None, None)
        known = {place: of_seeds for place, of_seeds in found.items() if of_seeds is not None}
        if len(known) < len(found):
            return Verdict(self.text, None, None, None)
        sides = self._sides({place: Mean.of(of_seeds).mean for place, of_seeds in known.items()})
        error = None
        if known and len({len(of_seeds) for of_seeds in known.values()}) == 1:
            each = [dict(zip(known, seed, strict=True)) for seed in zip(*known.values(), strict=True)]
            error = Mean.of([left - right for left, right in map(self._sides, each)]).error
        held = COMPARE[self.relation](*sides)
        return Verdict(self.text, held, sides, error if error is None or math.isfinite(error) else None)

    @property
    def _places(self) -> list[Place]:
        nodes = [node for side in (self.left, self.right) for node in ast.walk(side)]
        found = [
            (x.value.id, *_place(x))
            for x in nodes
            if isinstance(x, ast.Subscript) and isinstance(x.value, ast.Name)
        ]
        return list(dict.fromkeys(found))

    def _sides(self, values: Mapping[Place, float]) -> tuple[float, float]:
        return _number(self.left, values), _number(self.right, values)


@dataclass
class _Means(ast.NodeTransformer):
    """Replaces `mean(measure)` by the sum over the contenders, divided by their number."""

    contenders: Collection[str]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(func=ast.Name(id="mean"), args=[ast.Name(id=measure)], keywords=[]):
                terms = " + ".join(f"{measure}[{name!r}]" for name in self.contenders)
                return ast.parse(f"({terms}) / {len(self.contenders)}", mode="eval").body
        return self.generic_visit(node)


def _check(node: ast.expr, text: str, contenders: Collection[str], evaluations: Collection[str]) -> None:
    match node:
        case ast.Constant(value=int() | float() as x) if not isinstance(x, bool):
            return
        case ast.UnaryOp(op=ast.USub(), operand=x):
            parts = [x]
        case ast.BinOp(left=x, op=op, right=y) if type(op) in BINARY:
            parts = [x, y]
        case ast.Call(func=ast.Name(id="abs"), args=[_] as parts, keywords=[]):
            pass
        case ast.Call(func=ast.Name(id="min" | "max"), args=[_, _, *_] as parts, keywords=[]):
            pass
        case ast.Subscript(value=ast.Name(id=name)) if name in MEASURES and len(_names(node)) <= 2:
            contender, evaluation = _place(node)
            known: dict[str, tuple[object, list[str | None]]] = {
                "contender": (contender, [*contenders]),
                "evaluation": (evaluation, [*evaluations, None]),
            }
            for what, (found, names) in known.items():
                if found not in names:
                    listed = ", ".join(str(x) for x in names if x is not None) or "none"
                    raise ValueError(
                        f"the expectation {text!r} has the {what} {found!r}, but there are: {listed}"
                    )
            return
        case _:
            raise ValueError(
                f"the expectation {text!r} has {ast.unparse(node)!r}, but must be made of numbers, + - * /, "
                f"{', '.join(FUNCTIONS)}, mean of a measure, and {', '.join(MEASURES)} with a contender in "
                "brackets and quotes"
            )
    for part in parts:
        _check(part, text, contenders, evaluations)


def _place(node: ast.Subscript) -> tuple[Any, Any]:
    """Return the contender and the evaluation in the brackets."""
    contender, evaluation, *_ = (*_names(node), None, None)
    return contender, evaluation


def _names(node: ast.Subscript) -> tuple[Any, ...]:
    """Return what is in the brackets."""
    try:
        place = ast.literal_eval(node.slice)
    except (ValueError, TypeError):
        place = ast.unparse(node.slice)
    return place if isinstance(place, tuple) else (place,)


def _number(node: ast.expr, values: Mapping[Place, float]) -> float:
    match node:
        case ast.Constant(value=x):
            return float(x)  # type: ignore[arg-type]  # a number, as `_check` has made sure
        case ast.UnaryOp(operand=x):
            return -_number(x, values)
        case ast.BinOp(left=x, op=op, right=y):
            return BINARY[type(op)](_number(x, values), _number(y, values))
        case ast.Call(func=ast.Name(id=name), args=parts):
            return FUNCTIONS[name](*(_number(part, values) for part in parts))
        case ast.Subscript(value=ast.Name(id=name)):
            return values[name, *_place(node)]
    raise AssertionError(ast.dump(node))
