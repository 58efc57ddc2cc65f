"""Random features: their random rows, drawn from a stored seed, and attention with signed features.

A random feature of x is a function f of w . x, with w drawn from N(0, I). Many of them estimate a kernel: the
mean of f(w . x) f(w . y) over n rows w is its expectation k(x, y), up to an error of order 1 / sqrt(n).
"""

import math
from typing import Literal, Unpack, get_args

import numpy as np
import torch
from torch import Tensor, nn

from unrolled.ops.linear import Keys, LinearState, check_state, linear_attention, linear_attention_step
from unrolled.ops.linear.chunked import safe_divide
from unrolled.ops.observing import may_read
from unrolled.ops.options import check_choice, check_integers
from unrolled.ops.precision import accumulated, accumulation_dtype

Rows = Literal["orthogonal", "regularised", "independent"]

SMALLEST_DIVISOR = 1e-6  # for features of norm 1: a millionth of the weight of a key that equals the query


def draw_rows(n: int, dim: int, rows: Rows, generator: torch.Generator) -> Tensor:
    """Draw n directions, `[n, dim]` in fp64 on the CPU.

    "independent" rows are N(0, I). "orthogonal" rows come in blocks of `dim` rows at right angles to each
    other, with the lengths of independent rows, so that each row by itself is still N(0, I) (Yu et al. 2016,
    "Orthogonal Random Features", arXiv 1610.09072). "regularised" rows are orthogonal too, but all have the
    length sqrt(dim).
    """

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64, device="cpu")

    if rows == "independent":
        return normal(n, dim)
    q, r = torch.linalg.qr(normal(-(-n // dim), dim, dim))
    # QR fixes the signs of the basis by convention. With the signs of R's diagonal, the distribution is
    # uniform (Haar) again.
    directions: Tensor = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).flatten(0, 1)[:n]
    if rows == "regularised":
        return directions * math.sqrt(dim)
    return directions * normal(n, dim).square().sum(1, keepdim=True).sqrt()


class Projection(nn.Module):
    """The random rows of a layer, drawn on construction and again only by `redraw`.

    The seed, the number of redraws and the rows are buffers, so a state_dict holds them. Layers with equal
    seeds redraw equal rows.

    Args:
        n_heads: how many heads have separate rows; 1 to share them.
        n_features: number of rows per head.
        dim: width of the rows.
        rows: see `draw_rows`.
        seed: a number of up to 63 bits; by default it is drawn like initial weights, from torch's generator.

    Raises:
        ValueError: unknown rows, or a number out of range.
    """

    weight: Tensor
    seed: Tensor
    redraws: Tensor

    def __init__(self, n_heads: int, n_features: int, dim: int, rows: Rows, seed: int | None = None):
        super().__init__()
        check_integers(1, n_features=n_features)
        check_choice("rows", rows, get_args(Rows))
        if seed is None:
            seed = int(torch.randint(2**63 - 1, (), device="cpu"))
        check_integers(0, seed=seed)
        self.rows = rows
        self.register_buffer("weight", torch.empty(n_heads, n_features, dim))
        self.register_buffer("seed", torch.tensor(seed))
        self.register_buffer("redraws", torch.tensor(0))
        self._draw(seed, 0)

    def redraw(self) -> None:
        """Draw new rows, determined by the seed and the number of redraws."""
        self.redraws += 1
        self._draw(int(self.seed), int(self.redraws))

    def unless_redrawn(self, o: Tensor, draw: Tensor) -> Tensor:
        """Return `o [B,...]`, if no redraw took place since its states were made.

        Args:
            o: the output.
            draw: the number of redraws when the states behind each row of `o` were made, `[B]`.

        Raises:
            ValueError: the rows have been redrawn since. Where reading values has a cost (compiled, or on a
                GPU), the affected rows of `o` become NaN instead.
        """
        same = draw == self.redraws
        if not may_read(draw):
            return o.masked_fill(~same.reshape(-1, *[1] * (o.dim() - 1)), torch.nan)
        if not bool(same.all()):
            raise ValueError(
                f"state was made before a redraw (redraws: {draw.tolist()} then, {int(self.redraws)} now): "
                "redraw between sequences, and begin again from init_state"
            )
        return o

    def forward(self, x: Tensor) -> Tensor:
        """W x: `[..., H, dim]` to `[..., H, n_features]`; H is a multiple of the heads that have rows."""
        rows = self.weight.to(x.dtype)
        if len(rows) == 1:
            return x @ rows[0].mT
        return torch.einsum("...hd,hmd->...hm", x, rows.repeat_interleave(x.shape[-2] // len(rows), 0))

    def extra_repr(self) -> str:
        """Sizes and distribution, for `print(model)`."""
        n_heads, n_features, dim = self.weight.shape
        return f"n_heads={n_heads}, n_features={n_features}, dim={dim}, rows={self.rows!r}"

    def _draw(self, seed: int, redraws: int) -> None:
        entropy = np.random.SeedSequence(seed, spawn_key=(redraws,)).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(entropy))
        n_heads, n_features, dim = self.weight.shape
        drawn = [draw_rows(n_features, dim, self.rows, generator) for _ in range(n_heads)]
        self.weight.copy_(torch.stack(drawn))


def signed_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: LinearState | None = None,
    weight: Tensor | None = None,
    **keys: Unpack[Keys],
) -> tuple[Tensor, LinearState]:
    """Compute `linear_attention` with features that may be negative and have a norm of about 1.

    The denominator d = q_i . z_i estimates a positive number, but may itself be small or negative. Where |d|
    is below 1e-6 w_i, it is replaced by 1e-6 w_i with the sign of d. w_i is 1 by default. If the keys were
    scaled (by 1 - a_t, for example), pass the w_i as `weight [B,T,H]`: w_i is the sum of the factors of all
    keys that query i attends to. Other arguments and results are those of `linear_attention` with
    `return_state`.
    """
    before = None if state is None else _joined(state, q, k, v)
    o, after = linear_attention(q, k, _with_ones(v), state=before, return_state=True, normalize=False, **keys)
    return _divided(o, weight).to(v.dtype), LinearState(after.kv[..., :-1], after.k_sum)


def signed_linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    *,
    log_decay: Tensor | None = None,
    weight: Tensor | None = None,
) -> tuple[Tensor, LinearState]:
    """One token of `signed_linear_attention`, with `weight [B,H]`; otherwise as `linear_attention_step`."""
    o, after = linear_attention_step(
        q, k, _with_ones(v), _joined(state, q, k, v), log_decay=log_decay, normalize=False
    )
    return _divided(o, weight).to(v.dtype), LinearState(after.kv[..., :-1], after.k_sum)


def _with_ones(v: Tensor) -> Tensor:
    """Append a value of 1, whose weighted sum is the denominator, in the accumulation dtype."""
    v = accumulated(v)
    return torch.cat([v, v.new_ones(*v.shape[:-1], 1)], dim=-1)


def _joined(state: LinearState, q: Tensor, k: Tensor, v: Tensor) -> LinearState:
    """Append z to S, as `_with_ones` appends 1 to v."""
    sizes = (state.kv.shape[0], *k.shape[-2:], v.shape[-1])
    check_state(state, sizes, accumulation_dtype(q.dtype, k.dtype, v.dtype), k)
    return LinearState(torch.cat([state.kv, state.k_sum.unsqueeze(-1)], dim=-1), state.k_sum)


def _divided(o: Tensor, weight: Tensor | None) -> Tensor:
    den = o[..., -1:]
    smallest = SMALLEST_DIVISOR * (torch.ones_like(den) if weight is None else weight.unsqueeze(-1))
    smallest = torch.where(den < 0, -smallest, smallest)  # the second derivative of copysign at 0 is NaN
    return safe_divide(o[..., :-1], torch.where(den.abs() < smallest.abs(), smallest, den))
