"""Helpers shared by the checks: building the mechanism, running its forms, comparing the results."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn

from unrolled.contract import Supports, UnsupportedError
from unrolled.ops.state import raw_bytes
from unrolled.ops.tracing import without_shape_cache

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-4}
"""Largest difference of two forms, relative to the largest expected value (at least 1): 4,500 eps."""

Plan = Sequence[tuple[str, int]]
"""How to run a sequence: `[("prefill", 3), ("step", 2)]` is a prefill of 3 tokens, then 2 single steps."""


@dataclass(frozen=True)
class Maker:
    """Builds the mechanism under test; equal arguments build equal modules.

    Noise is added to every initial parameter, so that a bias or a gate that is initially zero cannot hide a
    mistake. The global random generators keep their state. Modules are in fp64, where mistakes stand out from
    rounding; kernels without fp64 are checked with `dtype=torch.float32`.
    """

    mechanism: type[nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)
    d_model: int = 16
    n_heads: int = 4
    dtype: torch.dtype = torch.float64
    causal: bool | None = None  # the only value that is checked, if given

    def __call__(
        self, *, causal: bool, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any
    ) -> Any:
        """Construct the mechanism in evaluation mode; `overrides` replace the options under test."""
        if self.causal not in (None, causal):
            raise UnsupportedError(f"causal is {causal}, but only {self.causal} is checked")
        options = {"d_model": self.d_model, "n_heads": self.n_heads, **self.options, **overrides}
        return noisy(lambda: self.mechanism(causal=causal, **options), dtype or self.dtype, seed)

    @property
    def supports(self) -> Supports:
        """The claims with these options, read from instances, since options may change them."""
        claims: list[Supports] = []
        for causal in (True, False):
            with suppress(UnsupportedError):
                claims.append(self(causal=causal).supports)
        require(bool(claims), "neither causal=True nor causal=False was accepted: nothing can be run")
        # Causal attention has no global tokens, and without them it may not read its input either.
        only_one = ("global_mask", "reads_input")
        found = claims[0].but(**{name: any(getattr(c, name) for c in claims) for name in only_one})
        if self.causal is None:
            return found
        sequence = found.sequence and self.causal  # slices are for causal attention
        return found.but(causal=self.causal, bidirectional=not self.causal, sequence=sequence)

    def each_direction(self, supports: Supports) -> Iterator[tuple[bool, Any]]:
        """Yield each claimed value of `causal`, and the mechanism with it."""
        for causal in directions(supports):
            yield causal, self(causal=causal)

    def each_variant(self, supports: Supports) -> Iterator[tuple[bool, str, Any]]:
        """Yield each claimed value of `causal` with each of its `claimed_variants`."""
        for causal in directions(supports):
            for variant, module in claimed_variants(self, causal):
                yield causal, variant, module

    def input(
        self, batch: int, length: int, *, seed: int = 0, dtype: torch.dtype | None = None, grad: bool = True
    ) -> Tensor:
        """Draw a standard normal `[batch, length, d_model]`."""
        x = normal(batch, length, self.d_model, seed=seed)
        return x.to(dtype or self.dtype).requires_grad_(grad)


@dataclass(frozen=True)
class CellMaker(Maker):
    """Builds a recurrent layer with inputs and outputs `d_model` wide; its direction cannot be chosen."""

    def __call__(
        self, *, causal: bool, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any
    ) -> Any:
        """Construct the layer; `overrides` are options of attention, and refused."""
        if overrides:
            raise UnsupportedError("a recurrent layer takes no such option")
        size = self.d_model
        module: Any = noisy(lambda: self.mechanism(size, size, **self.options), dtype or self.dtype, seed)
        if not (module.supports.causal if causal else module.supports.bidirectional):
            raise UnsupportedError(f"{self.mechanism.__name__} cannot read a sequence in this direction")
        return module


def noisy(construct: Callable[[], nn.Module], dtype: torch.dtype, seed: int) -> nn.Module:
    """Make a module with this seed, with noise on every parameter, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = construct()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return module.to(dtype).eval()


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Draw fp64 numbers from a standard normal, from a new generator with this seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def directions(supports: Supports) -> list[bool]:
    """List the values of `causal` that a mechanism claims to support."""
    claimed = [True] * supports.causal + [False] * supports.bidirectional
    require(bool(claimed), "supports claims neither causal nor bidirectional: nothing can be run")
    return claimed


def recurrent(supports: Supports) -> bool:
    """Whether the mechanism claims `init_state`, `prefill` and `step`."""
    return supports.causal and supports.recurrence != "none"


P = ParamSpec("P")


def run_all(checks: Iterable[Callable[P, None]], kind: type, *args: P.args, **kwargs: P.kwargs) -> list[str]:
    """Run each check with these arguments; return their names. Exceptions get a note that names the check."""
    ran = []
    for check in checks:
        try:
            check(*args, **kwargs)
        except Exception as error:
            error.add_note(f"in {check.__name__} of {kind.__name__}")
            raise
        ran.append(check.__name__)
    return ran


def unroll(module: Any, x: Tensor, plan: Plan, state: Any = None, **masks: Any) -> tuple[Tensor, Any]:
    """Run `x` through the recurrent forms according to the plan, from `state` or from the beginning."""
    state = module.init_state(x.shape[0]) if state is None else state
    outputs, at = [x[:, :0]], 0
    for verb, n in plan:
        segment = x[:, at : at + n]
        at += n
        if verb == "prefill":
            y, state = module.prefill(segment, state, **masks)
            outputs.append(y)
        else:
            for x_t in segment.unbind(1):
                y_t, state = module.step(x_t, state)
                outputs.append(y_t[:, None])
    return torch.cat(outputs, 1), state


def describe(plan: Plan) -> str:
    """Write a plan as in `prefill(3) + step(2)`."""
    return " + ".join(f"{verb}({n})" for verb, n in plan)


def exported(module: nn.Module, inputs: tuple[Tensor, ...], lengths: tuple[dict[int, Any], ...]) -> Any:
    """Export a module for inference with dynamic lengths, without torch's warnings about its own code."""
    with warnings.catch_warnings(), torch.no_grad(), without_shape_cache():
        warnings.simplefilter("ignore")
        return torch.export.export(module, inputs, dynamic_shapes=lengths, strict=False).module()


def compiled(function: Any) -> Any:
    """Compile by aot_eager: it traces forward and backward, which finds graph breaks, but emits no code."""
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def with_gradients(module: nn.Module, output: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
    """Return, by name, the output and its gradients of `inputs` and parameters for a fixed random loss."""
    loss = (output * normal(*output.shape, seed=99).to(output)).sum()
    named = {**inputs, **dict(module.named_parameters())}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
    return {"output": output.detach()} | {
        f"gradient of {name}": g for name, g in zip(named, gradients, strict=True)
    }


def require(condition: bool, message: str) -> None:
    """Fail with `message` unless the condition holds; `python -O` does not switch this off."""
    if not condition:
        raise AssertionError(message)


Compared = Tensor | Mapping[str, Tensor]


def assert_same(module: nn.Module, found: Tensor, expected: Tensor, what: str, **inputs: Tensor) -> None:
    """Fail unless two outputs are close, and also their gradients of `inputs` and parameters."""
    assert_close(with_gradients(module, found, **inputs), with_gradients(module, expected, **inputs), what)


def assert_close(found: Compared, expected: Compared, what: str) -> None:
    """Fail where values differ by more than `TOLERANCE` times max(1, the largest expected value)."""
    for name, a, b in _pairs(found, expected, what):
        if a.numel() == 0:
            continue
        error = (a - b).abs().nan_to_num(nan=torch.inf)
        at = _index_of_worst(error)
        allowed = allowed_error(b)
        require(
            float(error[at]) <= allowed,
            f"{what}: {name} differs by {float(error[at]):.3g} at {list(at)} "
            f"({float(a[at]):.6g}, should be {float(b[at]):.6g}); {allowed:.3g} is allowed",
        )


def allowed_error(expected: Tensor) -> float:
    """Return how far values may be from these: `TOLERANCE` times the largest of them, or of 1."""
    return TOLERANCE[expected.dtype] * max(1.0, float(expected.abs().max()))


def assert_identical(found: Compared, expected: Compared, what: str) -> None:
    """Fail unless `found` and `expected` are the same bit for bit."""
    for name, a, b in _pairs(found, expected, what):
        if not torch.equal(raw_bytes(a), raw_bytes(b)):  # unused slots may hold NaN
            error = (a.double() - b.double()).abs().nan_to_num(nan=torch.inf)
            at = _index_of_worst(error)
            changed = int((error > 0).sum())
            raise AssertionError(
                f"{what}: {name} changed in {changed} of {error.numel()} values, "
                f"by {float(error[at]):.3g} at {list(at)}; it must stay the same bit for bit"
            )


def assert_finite(found: Compared, what: str) -> None:
    """Fail on NaN or infinity."""
    for name, a, _ in _pairs(found, found, what):
        for first in (~torch.isfinite(a)).nonzero()[:1].tolist():
            raise AssertionError(f"{what}: {name} is not finite, first at {first}")


def assert_raises(kind: type[Exception], what: str, target: Any, verb: str, *args: Any, **masks: Any) -> None:
    """Fail unless `target.verb(*args, **masks)` raises `kind` with a message."""
    try:
        getattr(target, verb)(*args, **masks)
    except kind as error:
        if not str(error):
            raise AssertionError(f"{what}: {kind.__name__} came without a message") from error
    except Exception as error:
        raise AssertionError(
            f"{what}: raised {type(error).__name__} ({error}), should raise {kind.__name__}"
        ) from error
    else:
        raise AssertionError(f"{what}: was accepted, should raise {kind.__name__}")


def claimed_variants(make: Maker, causal: bool) -> Iterator[tuple[str, Any]]:
    """Yield the mechanism with its own options, then with each common option that it does not refuse.

    Fewer key/value heads, other widths and rotary positions are not claims of `Supports`, so a mechanism may
    refuse these options, or these values of them. Every option that it accepts must work in every form.
    """
    yield "default", make(causal=causal)
    for options in _common_options(make):
        if (module := _accepted(make, causal, options)) is not None:
            yield _name(options), module


def claimed_together(make: Maker, causal: bool) -> tuple[str, Any] | None:
    """Return the mechanism with all common options that it accepts together, or None if it accepts none."""
    together: dict[str, Any] = {}
    for options in _common_options(make):
        if _accepted(make, causal, together | options) is not None:
            together |= options
    return (_name(together), make(causal=causal, **together)) if together else None


def _common_options(make: Maker) -> list[dict[str, Any]]:
    """List options that differ from those of the mechanism itself."""
    options: list[dict[str, Any]] = [
        {"n_kv_heads": make.n_heads // 2},
        {"head_dim": 6, "value_dim": 10},
        {"rotary": True},
    ]
    return [each for each in options if {**make.options, **each} != make.options]


def _accepted(make: Maker, causal: bool, options: Mapping[str, Any]) -> Any:
    """Return the mechanism with these options, or None where it has no such options or refuses them."""
    taken = inspect.signature(make.mechanism).parameters
    if not options.keys() <= taken.keys() and all(x.kind != x.VAR_KEYWORD for x in taken.values()):
        return None
    try:
        return make(causal=causal, **options)
    except (UnsupportedError, ValueError):
        return None


def _name(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _pairs(found: Compared, expected: Compared, what: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the tensors to compare with their names; fail where names, shapes or dtypes differ."""
    found, expected = ({"output": x} if isinstance(x, Tensor) else x for x in (found, expected))
    require(found.keys() == expected.keys(), f"{what}: has {sorted(found)}, should have {sorted(expected)}")
    for name, a in found.items():
        b = expected[name]
        require(a.shape == b.shape, f"{what}: {name} has shape {list(a.shape)}, should be {list(b.shape)}")
        require(a.dtype == b.dtype, f"{what}: {name} is {a.dtype}, should be {b.dtype}")
        yield name, a.detach(), b.detach()


def _index_of_worst(error: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
