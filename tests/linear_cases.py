"""Cases of linear attention, and the exact result that the error of every form is measured against."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from unrolled.ops.feature_maps import make_feature_map
from unrolled.ops.linear import LinearState, linear_attention_reference
from unrolled.ops.linear.chunked import Inputs


@dataclass(frozen=True)
class Case:
    T: int = 70
    S: int = 70
    B: int = 2
    G: int = 2
    heads_per_group: int = 2
    R: int = 5
    M: int = 7
    causal: bool = True
    gated: bool = True
    padded: bool = False
    stateful: bool = True
    normalize: bool = True
    lengths: tuple[int, ...] | None = None  # packs B = 1
    seed: int = 0
    dtype: torch.dtype = torch.float64
    feature_map: str | None = None  # then q and k are drawn of both signs

    @property
    def offsets(self) -> Tensor | None:
        """`cu_seqlens`, if the sequences are packed."""
        if self.lengths is None:
            return None
        return torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def inputs(self, generator: torch.Generator, scale: float = 1.0) -> Inputs:
        """Draw the inputs; features are bounded away from 0, so that dividing by their products loses no digits."""
        B, T, S, rows = self.B, self.T, self.S, self.B
        if self.lengths is not None:
            B, T, S, rows = 1, sum(self.lengths), sum(self.lengths), len(self.lengths)
        G, R, M = self.G, self.R, self.M
        kept = torch.promote_types(self.dtype, torch.float32)  # the dtype of the state

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def features(*shape: int) -> Tensor:
            x = random(*shape)
            return ((x.abs() if self.feature_map is None else 2 * x) + 0.5) * scale

        return Inputs(
            features(B, T, G * self.heads_per_group, R).to(self.dtype),
            features(B, S, G, R).to(self.dtype),
            random(B, S, G, M).to(self.dtype),
            -random(B, S, G).abs().to(self.dtype) if self.gated else None,
            random(rows, G, R, M).to(kept) if self.stateful else None,
            random(rows, G, R).abs().to(kept) if self.stateful else None,
        )


def outputs_and_gradients(
    form: Callable, case: Case, inputs_scale: float = 1.0, exact: bool = False, disturbance: float = 0.0
) -> list[Tensor]:
    """Output, both parts of the state, and the gradients of every input through all three.

    With `exact`, the inputs are rounded to the type of the case, each then moves by a relative `disturbance` up
    or down, and everything after that is done in fp64.
    """
    generator = torch.Generator().manual_seed(case.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    given = {name: x for name, x in case.inputs(generator, inputs_scale)._asdict().items() if x is not None}
    if exact:
        signs = torch.Generator().manual_seed(case.seed)  # its own: what is drawn below stays the same
        given = {
            name: x.double() * (1 + disturbance * torch.randn(x.shape, generator=signs).sign())
            for name, x in given.items()
        }
    given = {name: x.requires_grad_() for name, x in given.items()}
    mapping = {} if case.feature_map is None else {"feature_map": make_feature_map(case.feature_map, case.R)}
    mask = (torch.rand(given["k"].shape[:2], generator=generator) < 0.4) if case.padded else None
    o, state = form(
        given["q"],
        given["k"],
        given["v"],
        causal=case.causal,
        log_decay=given.get("log_decay"),
        key_padding_mask=mask,
        cu_seqlens=case.offsets,
        state=LinearState(given["kv"], given["k_sum"]) if case.stateful else None,
        return_state=True,
        normalize=case.normalize,
        **mapping,
    )
    total = sum((x.double() * random(*x.shape)).sum() for x in (o, *state))
    gradients = torch.autograd.grad(total, list(given.values()), allow_unused=True, materialize_grads=True)
    return [o.detach(), *(x.detach() for x in state), *gradients]


def errors(form: Callable, case: Case) -> dict[str, float]:
    """Distance from the definition in fp64, by output and gradient, relative to its norm."""
    return _distances(outputs_and_gradients(form, case), case)


def effect_of_rounding(case: Case) -> dict[str, float]:
    """How far the exact results move when every input moves by one unit of fp32 rounding."""
    eps = torch.finfo(torch.float32).eps
    return _distances(
        outputs_and_gradients(linear_attention_reference, case, exact=True, disturbance=eps), case
    )


@lru_cache(maxsize=16)  # of a case every form is compared with it
def _exact(case: Case) -> list[Tensor]:
    return outputs_and_gradients(linear_attention_reference, case, exact=True)


def _distances(found: list[Tensor], case: Case) -> dict[str, float]:
    exact = _exact(case)
    names = ["o", "kv", "k_sum", "dq", "dk", "dv"]
    names += ["dlog_decay"] * case.gated + ["dkv", "dk_sum"] * case.stateful
    distances, largest = {}, max(float(z.norm()) for z in exact)
    for name, x, z in zip(names, found, exact, strict=True):
        assert x.shape == z.shape, name
        size = float(z.norm())
        # A gradient that cancels to nothing, as that of q over a single key, has no size to be measured by.
        size = size if size > 1e-12 * largest else max(largest, 1e-300)
        distances[name] = float((x.double() - z).norm()) / size
    return distances


def assert_error_at_most_twice_that_of(others: list[Callable], form: Callable, case: Case) -> None:
    """Compare the error of a form with the largest of others that compute in the same type.

    In a small case the others may happen to be exact: they are held to be off by one unit of fp32 rounding, and the
    effect of rounding the inputs is granted as well. Where that is exceeded, the mean over other draws decides.
    """
    if found := _excess(others, form, [case]):
        again = _excess(others, form, [replace(case, seed=case.seed + 100 + n) for n in range(16)])
        assert not again, f"{found}; in the mean of 16 draws {again}"


def _excess(others: list[Callable], form: Callable, cases: list[Case]) -> str:
    """Name the outputs and gradients whose error is too large, in the mean over the cases."""

    def mean(found: list[dict[str, float]]) -> dict[str, float]:
        return {name: sum(each[name] for each in found) / len(found) for name in found[0]}

    allowed = [mean([errors(other, case) for case in cases]) for other in others]
    rounding, excess = mean([effect_of_rounding(case) for case in cases]), []
    for name, error in mean([errors(form, case) for case in cases]).items():
        other = max(torch.finfo(torch.float32).eps, *(found[name] for found in allowed))
        limit = 2 * other + rounding[name]
        if error > limit:
            excess.append(f"{name}: {error:g} > {limit:g}")
    return ", ".join(excess)


def assert_nan_stays_in_its_head(form, *inputs):
    """Put NaN into the first head of each input in turn: the output and the gradients of the second stay."""

    def of_second_head(*inputs):
        inputs = [x.clone().requires_grad_() for x in inputs]
        o = form(*inputs)
        return [x[:, :, 1] for x in (o, *torch.autograd.grad(o.sum(), inputs))]

    expected = of_second_head(*inputs)
    for x in inputs:
        bad = x.clone()
        bad[:, 20, 0] = torch.nan
        found = of_second_head(*(bad if y is x else y for y in inputs))
        assert all(map(torch.equal, found, expected))
