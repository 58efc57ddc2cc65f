"""No output depends on the future, on another row, or on another sequence of the pack."""

import itertools
from typing import Any

import torch
from torch import Tensor

from unrolled.contract import Supports, UnsupportedError
from unrolled.testing._kit import (
    Maker,
    assert_close,
    assert_identical,
    assert_same,
    claimed_variants,
    describe,
    normal,
    recurrent,
    require,
    unroll,
)
from unrolled.testing.forms import LONG

LARGE = 12.0
"""Perturbations are this much larger than the data, since small ones do not show a leak through a maximum."""


def check_no_future_leak(make: Maker, supports: Supports) -> None:
    """The past is bit-identical whatever the future holds."""
    for variant, module in claimed_variants(make, causal=True):
        for length, now in ((9, 1), (9, 5), (LONG, 66)):
            x = make.input(2, length, grad=False)
            other = x.clone()
            other[:, now:] = LARGE * make.input(2, length - now, seed=1, grad=False)
            what = f"{variant}: tokens {now}.. of {length} changed, outputs before"
            assert_identical(module(other)[:, :now], module(x)[:, :now], f"forward, {what}")
            if recurrent(supports):
                y, _ = unroll(module, x, [("prefill", length)])
                y_other, _ = unroll(module, other, [("prefill", length)])
                assert_identical(y_other[:, :now], y[:, :now], f"prefill, {what}")


def check_prefix_invariance(make: Maker, supports: Supports) -> None:
    """f(x[:t]) == f(x)[:t]: no output depends on the length of the sequence."""
    for variant, module in claimed_variants(make, causal=True):
        x = make.input(2, LONG, grad=False)
        y = module(x)
        for t in (1, 2, 9, 64, 100):
            assert_close(module(x[:, :t]), y[:, :t], f"{variant}: forward of the first {t} of {LONG} tokens")


def check_batch_independence(make: Maker, supports: Supports) -> None:
    """A row gives the same result alone and in a batch, and other rows do not change a bit of the result."""
    x = make.input(3, 9, grad=False)
    other = x.clone()
    other[1:] = LARGE * make.input(2, 9, seed=1, grad=False)
    for causal, module in make.each_direction(supports):
        what = f"causal={causal}, forward"
        assert_close(module(x[:1]), module(x)[:1], f"{what} of a row alone against the same row in a batch")
        assert_identical(module(other)[:1], module(x)[:1], f"{what} of row 0 when the other rows change")
    if recurrent(supports):
        module = make(causal=True)
        for plan in ([("prefill", 9)], [("prefill", 4), ("step", 5)]):
            y, _ = unroll(module, x, plan)
            alone, _ = unroll(module, x[:1], plan)
            assert_close(alone, y[:1], f"{describe(plan)} of a row alone against the same row in a batch")
            y_other, _ = unroll(module, other, plan)
            assert_identical(y_other[:1], y[:1], f"{describe(plan)} of row 0 when the other rows change")


def check_packing(make: Maker, supports: Supports) -> None:
    """Packed sequences, also of lengths 1 and 0, give the results of separate runs, and do not interact."""
    lengths = [5, 1, 0, 70, 2, 0]
    total = sum(lengths)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    x = make.input(1, total)
    for causal, variant, module in make.each_variant(supports):
        what = f"{variant}, causal={causal}: sequences of lengths {lengths} in a pack"
        separate = torch.cat([module(part) for part in torch.split(x, lengths, 1)], 1)
        packed = module(x, cu_seqlens=cu_seqlens)
        assert_same(module, packed, separate, f"{what} against separate runs", x=x)
        packed = packed.detach()
        for start, end in itertools.pairwise(cu_seqlens.tolist()):
            if start == end:  # there is nothing to change
                continue
            other = x.detach().clone()
            other[:, start:end] = LARGE * normal(1, end - start, make.d_model, seed=1)
            changed = module(other, cu_seqlens=cu_seqlens)
            rest = [*range(start), *range(end, total)]
            what_changed = f"{what}, tokens {start}..{end} changed, other sequences"
            assert_identical(changed[:, rest], packed[:, rest], what_changed)
        if supports.padding:
            _check_padded_pack(module, x.detach(), cu_seqlens, f"{what}, with padding")
        nothing = module(x[:, :0], cu_seqlens=torch.zeros(3, dtype=torch.int32))
        require(nothing.shape == (1, 0, make.d_model), f"a pack of two empty sequences gives {nothing.shape}")


def _check_padded_pack(module: Any, x: Tensor, cu_seqlens: Tensor, what: str) -> None:
    """A pack with padding is refused, or gives the same results as without the padded tokens."""
    padding = torch.zeros(x.shape[:2], dtype=torch.bool)
    padding[0, [1, 7, 30]] = True
    try:
        found = module(x, cu_seqlens=cu_seqlens, key_padding_mask=padding)
    except (ValueError, UnsupportedError):
        return
    kept = torch.nn.functional.pad((~padding[0]).cumsum(0), (1, 0))[cu_seqlens.long()].int()
    expected = module(x[~padding][None], cu_seqlens=kept)
    assert_close(found[~padding][None], expected, f"{what} against the pack without it")
