"""What the checks share: building the mechanism, running its forms, comparing what comes out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unrolled.contract import Supports, UnsupportedError

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-4}
"""Largest difference of two forms, relative to the largest value compared (and to 1 at least): 4,500 eps."""

Plan = Sequence[tuple[str, int]]
"""How to unroll a sequence: `[("prefill", 3), ("step", 2)]` is a prefill of 3 tokens, then 2 single steps."""


@dataclass(frozen=True)
class Maker:
    """Builds the mechanism under test, always the same one for the same arguments.

    Every parameter gets some noise on top of its own initialisation, so that a bias or a gate that starts at
    zero cannot hide a mistake. The global generators are left as they were. In fp64, mistakes stand out from
    rounding; kernels that have no fp64 are checked with `dtype=torch.float32`.
    """

    mechanism: type[nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)
    d_model: int = 16
    n_heads: int = 4
    dtype: torch.dtype = torch.float64

    def __call__(
        self, *, causal: bool, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any
    ) -> Any:
        """Construct the mechanism in evaluation mode; `overrides` win over the options under test."""
        options = {"d_model": self.d_model, "n_heads": self.n_heads, **self.options, **overrides}
        return noisy(lambda: self.mechanism(causal=causal, **options), dtype or self.dtype, seed)

    @property
    def supports(self) -> Supports:
        """The claims with these options: where they change what is possible, the instance says so."""
        for causal in (True, False):
            try:
                return self(causal=causal).supports  # type: ignore[no-any-return]
            except UnsupportedError:
                continue
        raise AssertionError("neither causal=True nor causal=False was accepted: nothing can be run")

    def input(
        self, batch: int, length: int, *, seed: int = 0, dtype: torch.dtype | None = None, grad: bool = True
    ) -> Tensor:
        """Draw a standard normal `[batch, length, d_model]`."""
        x = normal(batch, length, self.d_model, seed=seed)
        return x.to(dtype or self.dtype).requires_grad_(grad)


@dataclass(frozen=True)
class CellMaker(Maker):
    """Builds a recurrent layer, `d_model` wide on both sides. Its direction is not an option."""

    def __call__(
        self, *, causal: bool, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any
    ) -> Any:
        """Construct the layer; `overrides` are options of attention, and refused."""
        if overrides:
            raise UnsupportedError("a recurrent layer takes no such option")
        module: Any = noisy(
            lambda: self.mechanism(self.d_model, self.d_model, **self.options), dtype or self.dtype, seed
        )
        if not (module.supports.causal if causal else module.supports.bidirectional):
            raise UnsupportedError(
                f"{self.mechanism.__name__} has one way to read a sequence, which is another"
            )
        return module


def noisy(construct: Callable[[], nn.Module], dtype: torch.dtype, seed: int) -> nn.Module:
    """Make a module under a seed of its own, with noise on every parameter, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = construct()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return module.to(dtype).eval()


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Draw from a generator of its own, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def directions(supports: Supports) -> list[bool]:
    """List the values of `causal` that a mechanism claims to support."""
    claimed = [True] * supports.causal + [False] * supports.bidirectional
    require(
        bool(claimed), "supports claims neither causal nor bidirectional: there is nothing that can be run"
    )
    return claimed


def recurrent(supports: Supports) -> bool:
    """Whether the mechanism claims `init_state`, `prefill` and `step`."""
    return supports.causal and supports.recurrence != "none"


def unroll(module: Any, x: Tensor, plan: Plan, state: Any = None, **masks: Any) -> tuple[Tensor, Any]:
    """Run `x` through the recurrent forms as the plan says, from `state` or from the beginning."""
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


def with_gradients(module: nn.Module, output: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
    """Name the output and the gradients of `inputs` and of every parameter, for one fixed random loss."""
    loss = (output * normal(*output.shape, seed=99).to(output.dtype)).sum()
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


def assert_close(found: Compared, expected: Compared, what: str) -> None:
    """Fail unless every value of `found` is within `TOLERANCE` of `expected`, times max(1, its largest)."""
    for name, a, b in _pairs(found, expected, what):
        if a.numel() == 0:
            continue
        error = (a - b).abs().nan_to_num(nan=torch.inf)
        at = _index_of_worst(error)
        allowed = TOLERANCE[b.dtype] * max(1.0, float(b.abs().max()))
        require(
            float(error[at]) <= allowed,
            f"{what}: {name} differs by {float(error[at]):.3g} at {list(at)} "
            f"({float(a[at]):.6g}, should be {float(b[at]):.6g}); {allowed:.3g} is allowed",
        )


def assert_identical(found: Compared, expected: Compared, what: str) -> None:
    """Fail unless `found` and `expected` are the same bit for bit."""
    for name, a, b in _pairs(found, expected, what):
        if not torch.equal(_bits(a), _bits(b)):
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


def assert_raises(
    kind: type[Exception], what: str, target: Any, verb: str, *args: Any, **kwargs: Any
) -> None:
    """Fail unless `target.verb(*args, **kwargs)` raises `kind` with a message."""
    try:
        getattr(target, verb)(*args, **kwargs)
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
    """Yield the mechanism as it is and with each common option that it does not refuse.

    Fewer key/value heads, other widths and rotary positions are not in `Supports`, so a mechanism may refuse
    them, or these sizes of them; what it accepts must work in every form.
    """
    yield "default", make(causal=causal)
    for options in ({"n_kv_heads": make.n_heads // 2}, {"head_dim": 6, "value_dim": 10}, {"rotary": True}):
        try:
            module = make(causal=causal, **options)
        except (UnsupportedError, ValueError):
            continue
        yield ", ".join(f"{name}={value}" for name, value in options.items()), module


def _pairs(found: Compared, expected: Compared, what: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield what is compared, by name; fail where names, shapes or types differ."""
    found, expected = ({"output": x} if isinstance(x, Tensor) else x for x in (found, expected))
    require(found.keys() == expected.keys(), f"{what}: has {sorted(found)}, should have {sorted(expected)}")
    for name, a in found.items():
        b = expected[name]
        require(a.shape == b.shape, f"{what}: {name} has shape {list(a.shape)}, should be {list(b.shape)}")
        require(a.dtype == b.dtype, f"{what}: {name} is {a.dtype}, should be {b.dtype}")
        yield name, a.detach(), b.detach()


def _index_of_worst(error: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))


def _bits(x: Tensor) -> Tensor:
    """Bytes rather than values: unused slots of a state may hold NaN, and NaN is not equal to itself."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)
