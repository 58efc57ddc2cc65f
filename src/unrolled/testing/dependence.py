"""What an output depends on besides queries, keys and values: positions, the input, global tokens."""

from typing import Any

import torch
from torch import Tensor

from unrolled.attention.base import Masks
from unrolled.contract import Supports, UnsupportedError
from unrolled.ops.state import leaves
from unrolled.testing._kit import (
    Maker,
    allowed_error,
    assert_identical,
    assert_raises,
    describe,
    directions,
    normal,
    recurrent,
    require,
    unroll,
)
from unrolled.testing.refusals import wrong_masks

LENGTH = 200
"""Number of tokens, above the default numbers of clusters and landmarks, up to which attention is exact."""


def check_reads_tokens(make: Maker, supports: Supports) -> None:
    """Some output depends on an earlier token and, unless the attention is causal, some on a later one.

    With options, which may limit attention to one direction as a window does, either is enough.
    """
    for causal, module in make.each_direction(supports):
        read = _reads(module, make.input(1, 12))[0]
        earlier, later = bool(read.tril(-1).any()), bool(read.triu(1).any())
        one_way = bool(make.options) and not causal
        require(earlier or (one_way and later), f"causal={causal}: no output depends on an earlier token")
        require(causal or later or one_way, "causal=False: no output depends on a later token")


def check_positions(make: Maker, supports: Supports) -> None:
    """The output depends on the order of the tokens, and a state counts those that are not padding."""
    for causal, module in make.each_direction(supports):
        if not causal:
            order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
            x = make.input(2, LENGTH, grad=False)
            with torch.no_grad():
                same = _close(module(x[:, order]), module(x)[:, order])
            require(not same, "tokens in another order have the same outputs")
        elif recurrent(supports):
            x, padding = make.input(2, 5, grad=False), torch.zeros(2, 5, dtype=torch.bool)
            padding[0, :2] = supports.padding
            masks = {"key_padding_mask": padding} if supports.padding else {}
            _, state = unroll(module, x, [("prefill", 5)], **masks)
            for plan in ([("prefill", 3)], [("step", 3)]):
                _, after = unroll(module, x[:, :3], plan, state)
                _check_counts(after, 8 - padding.sum(1), f"prefill(5) + {describe(plan)}")


def _check_counts(state: Any, expected: Tensor, what: str) -> None:
    """Fail unless the field `position` of a state is `expected [B]`."""
    counts = [x for name, x in leaves(state).items() if name.split(".")[-1] == "position"]
    require(len(counts) == 1, f"{what}: the state has {len(counts)} fields named position, should have one")
    found = counts[0].tolist()
    require(found == expected.tolist(), f"{what}: position is {found}, should be {expected.tolist()}")


def check_reads_input(make: Maker, supports: Supports) -> None:
    """With `reads_input` and only with it, heads depend on more than their queries, keys and values."""
    differs = False
    for causal in directions(supports):
        for dtype in (make.dtype, torch.bfloat16):  # some mechanisms only make up for rounding
            module = make(causal=causal, dtype=dtype)
            if not hasattr(module, "heads_of"):  # it has other projections
                return
            x, other = (make.input(2, LENGTH, seed=i, dtype=dtype, grad=False) for i in (0, 1))
            with torch.no_grad():
                projected = module.project(x)
                y, z = (module.attend(module.heads_of(projected, of), Masks()) for of in (x, other))
            if not module.supports.reads_input:
                assert_identical(z, y, "heads with the same queries, keys and values of another input")
            differs |= not _close(z.to(make.dtype), y.to(make.dtype))
    require(differs or not supports.reads_input, "heads depend on queries, keys and values only")


def check_global_mask(make: Maker, supports: Supports) -> None:
    """A global token reads all tokens and all read it, except padding; a mask of a wrong kind is refused."""
    for causal, module in make.each_direction(supports):
        x = make.input(2, 12)
        mask = torch.zeros(2, 12, dtype=torch.bool)
        mask[0, [0, 7]] = mask[1, 5] = True
        if causal:
            assert_raises(UnsupportedError, "global_mask (causal)", module, "forward", x, global_mask=mask)
            continue
        padding = torch.zeros_like(mask)
        padding[0, 6:] = True
        for valid, masks in ((~torch.zeros_like(mask), {}), (~padding, {"key_padding_mask": padding})):
            reads = _reads(module, x, global_mask=mask, **masks)
            pairs = valid[:, :, None] & valid[:, None, :]
            required = pairs & (mask[:, :, None] | mask[:, None, :])
            require(bool(reads[required].all()), "a global token does not read all others, or is not read")
            of_padding = valid[:, :, None] & ~valid[:, None, :]
            require(not reads[of_padding].any(), "padding that is marked as global is read")
        for wrong, bad in wrong_masks(2, 12):
            assert_raises(ValueError, f"global_mask {wrong}", module, "forward", x, global_mask=bad)


def _reads(module: Any, x: Tensor, **masks: Tensor | None) -> Tensor:
    """Tell which outputs depend on which tokens of `x [B,T,d_model]`: bool `[B,T,T]`."""
    y = module(x, **masks)
    losses = (y * normal(*y.shape).to(y)).sum((0, 2))
    rows = [torch.autograd.grad(loss, x, retain_graph=True)[0].ne(0).any(-1) for loss in losses]
    return torch.stack(rows, 1)


def _close(found: Tensor, other: Tensor) -> bool:
    """Tell whether two outputs differ only by rounding."""
    return float((found - other).abs().max()) <= allowed_error(other)
