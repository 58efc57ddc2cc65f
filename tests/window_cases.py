"""Cases of window attention, and the exact result that the error of every form is measured against."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from unrolled.ops.window import window_attention_reference

PADDINGS = ("none", "left", "right", "scattered", "whole row")


@dataclass(frozen=True)
class Case:
    T: int = 70
    S: int = 70
    window: tuple[int, int] = (5, 3)
    B: int = 2
    G: int = 2
    heads_per_group: int = 2
    D: int = 5
    M: int = 7
    padding: str = "none"
    scale: float | None = None
    lengths: tuple[int, ...] | None = None  # packs B = 1
    seed: int = 0
    dtype: torch.dtype = torch.float64  # that the inputs are rounded to
    computed_in: torch.dtype | None = None  # another one, if given
    disturbance: float = 0.0  # by which each input then moves up or down, relatively

    @property
    def sizes(self) -> tuple[int, int, int]:
        packed = self.lengths is not None
        return (1, sum(self.lengths), sum(self.lengths)) if packed else (self.B, self.T, self.S)

    def tensors(self) -> tuple[list[Tensor], dict]:
        """Leaves q, k, v, and the other arguments."""
        B, T, S = self.sizes
        generator = torch.Generator().manual_seed(self.seed)
        H = self.G * self.heads_per_group
        shapes = ((B, T, H, self.D), (B, S, self.G, self.D), (B, S, self.G, self.M))
        qkv = [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]
        options: dict = {"window_size": self.window, "scale": self.scale}
        if self.padding != "none":
            place, cut = torch.arange(S), torch.randint(0, S + 1, (B, 1), generator=generator)
            options["key_padding_mask"] = {
                "left": place < cut,
                "right": place >= cut,
                "scattered": torch.rand(B, S, generator=generator) < 0.4,
                "whole row": (torch.arange(B) == 0).unsqueeze(1).expand(B, S),
            }[self.padding]
        if self.lengths is not None:
            offsets = torch.tensor([0, *self.lengths], dtype=torch.int32)
            options["cu_seqlens"] = offsets.cumsum(0, dtype=torch.int32)
        rounded = [x.to(self.dtype).to(self.computed_in or self.dtype) for x in qkv]
        if self.disturbance:
            rounded = [
                x * (1 + self.disturbance * torch.randn(x.shape, generator=generator).sign()) for x in rounded
            ]
        return [x.requires_grad_() for x in rounded], options


def outputs_and_gradients(form: Callable, case: Case) -> list[Tensor]:
    """Output and lse, and the gradients of q, k and v through both."""
    qkv, options = case.tensors()
    o, lse = form(*qkv, **options, return_lse=True)
    generator = torch.Generator().manual_seed(case.seed + 1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (o, lse)]
    total = (o * weights[0]).sum() + (lse.masked_fill(lse == -math.inf, 0) * weights[1]).sum()
    gradients = [torch.zeros_like(x) for x in qkv]
    if total.requires_grad:
        gradients = torch.autograd.grad(total, qkv, allow_unused=True, materialize_grads=True)
    return [o.detach(), lse.detach(), *gradients]


def errors(form: Callable, case: Case) -> dict[str, float]:
    """Distance from the definition in fp64, by output and gradient, relative to its norm."""
    return _distances(outputs_and_gradients(form, case), case)


def effect_of_rounding(case: Case) -> dict[str, float]:
    """How far the exact results move when every input moves by one unit of fp32 rounding."""
    moved = replace(case, computed_in=torch.float64, disturbance=torch.finfo(torch.float32).eps)
    return _distances(outputs_and_gradients(window_attention_reference, moved), case)


@lru_cache(maxsize=16)  # of a case every form is compared with it
def _exact(case: Case) -> list[Tensor]:
    return outputs_and_gradients(window_attention_reference, replace(case, computed_in=torch.float64))


def _distances(found: list[Tensor], case: Case) -> dict[str, float]:
    distances = {}
    for name, x, z in zip(("o", "lse", "dq", "dk", "dv"), found, _exact(case), strict=True):
        assert x.shape == z.shape, name
        assert torch.equal(x == -math.inf, z == -math.inf), name
        x, z = (y.double().masked_fill(y == -math.inf, 0) for y in (x, z))
        distances[name] = float((x - z).norm() / z.norm().clamp(min=1e-300)) if (x - z).any() else 0.0
    return distances


def assert_error_at_most_twice_that_of(
    others: list[Callable], form: Callable, case: Case, summed: int = 0
) -> None:
    """Compare the error of a form with the largest of others that compute in the same type.

    In a small case the others may happen to be exact: they are held to be off by one unit of fp32 rounding, and the
    effect of rounding the inputs is granted as well. Where the form sums up so many terms one after the other, the
    definition in fp32 would too, and be off by eps sqrt(n / 24) of the norm: n roundings of eps / sqrt(12) of partial
    sums that grow like a random walk. Other forms may sum in a tree, as some processors' libraries do.
    """
    one_by_one = torch.finfo(torch.float32).eps * math.sqrt(summed / 24)
    allowed, rounding = [errors(other, case) for other in others], effect_of_rounding(case)
    for name, error in errors(form, case).items():
        other = max(torch.finfo(torch.float32).eps, one_by_one, *(found[name] for found in allowed))
        limit = 2 * other + rounding[name]
        assert error <= limit, f"{name}: {error:g} > {limit:g}"
