"""Which keys a query attends to: cross-attention, arbitrary masks, and queries without a key."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from unrolled.contract import Supports
from unrolled.testing._kit import (
    Maker,
    assert_close,
    assert_finite,
    assert_identical,
    assert_same,
    require,
    with_gradients,
)
from unrolled.testing.leaks import LARGE


def check_cross_attention(make: Maker, supports: Supports) -> None:
    """Queries, keys and values may differ in content and number; causal masks are bottom-right aligned."""
    for causal, module in make.each_direction(supports):
        query, memory = make.input(2, 4), make.input(2, 9, seed=1)
        what = f"causal={causal}"
        equal = f"{what}: query = key = value against self-attention"
        assert_same(module, module(memory, memory, memory), module(memory), equal, memory=memory)
        y = module(query, memory)
        require(y.shape == query.shape, f"{what}: 4 queries over 9 keys give {list(y.shape)}")
        assert_close(module(query, memory, memory), y, f"{what}: value given against value = key by default")
        other = make.input(2, 9, seed=2)
        for name, changed in (
            ("query", (other[:, :4], memory, memory)),
            ("key", (query, other, memory)),
            ("value", (query, memory, other)),
        ):
            require(not torch.equal(module(*changed), y), f"{what}: the argument {name} is ignored")
        if causal:
            last = "causal, the last 4 of 9 queries (bottom-right aligned)"
            found, expected = module(memory[:, 5:], memory), module(memory)[:, 5:]
            assert_same(module, found, expected, last, memory=memory)
        if supports.padding:
            mask = torch.zeros(2, 9, dtype=torch.bool)
            mask[:, [1, 2] if causal else [0, 4, 8]] = True
            found, expected = module(query, memory, key_padding_mask=mask), module(query, memory[:, ~mask[0]])
            padded = f"{what}: padded memory against memory without its padding"
            assert_same(module, found, expected, padded, memory=memory)
            found, expected = (module(*xs, key_padding_mask=mask) for xs in ([memory] * 3, [memory]))
            found, expected = found[:, ~mask[0]], expected[:, ~mask[0]]
            assert_same(module, found, expected, f"{equal}, padded", memory=memory)


def check_attn_mask(make: Maker, supports: Supports) -> None:
    """`attn_mask` broadcasts to `[B, H, T, S]`, True = attend, and a masked pair has no effect at all.

    This also holds with padding and in cross-attention, and every head follows its own mask.
    """
    x = make.input(2, 6)
    lower = torch.ones(6, 6, dtype=torch.bool).tril()
    for causal, module in make.each_direction(supports):
        what = f"causal={causal}, attn_mask"
        everything = module(x, attn_mask=torch.ones_like(lower))
        assert_same(module, everything, module(x), f"{what} that allows every pair", x=x)
        alone = torch.cat([module(x_t) for x_t in torch.split(x, 1, 1)], 1)
        assert_close(module(x, attn_mask=torch.eye(6, dtype=torch.bool)), alone, f"{what} of the diagonal")
        masked = module(x, attn_mask=lower)
        for t in range(5):
            other = x.detach().clone()
            other[:, t + 1 :] *= -LARGE
            found = module(other, attn_mask=lower)[:, : t + 1]
            assert_identical(found, masked[:, : t + 1], f"{what}, masked keys change")
        per_row = torch.stack([lower, torch.ones_like(lower)])[:, None]
        expected = torch.cat([masked[:1], module(x)[1:]])
        assert_close(module(x, attn_mask=per_row), expected, f"{what} [B, 1, T, S]")
        per_head = per_row.expand(2, make.n_heads, 6, 6)
        assert_close(module(x, attn_mask=per_head), expected, f"{what} [B, H, T, S]")
        for head in range(make.n_heads if make.n_heads > 1 and not causal else 0):
            of_one = torch.ones(1, make.n_heads, 6, 6, dtype=torch.bool)
            of_one[:, head] = lower
            mixed = module(x, attn_mask=of_one)
            as_one = any(torch.equal(mixed, y) for y in (everything, masked))
            require(not as_one, f"{what} of head {head}: all heads follow one mask")
        if supports.padding:
            padding = torch.zeros(2, 6, dtype=torch.bool)
            padding[:, 2] = True
            kept = ~padding[0]
            found = module(x, attn_mask=lower, key_padding_mask=padding)[:, kept]
            expected = module(x[:, kept], attn_mask=lower[kept][:, kept])
            assert_close(found, expected, f"{what} with padding")
        if supports.cross:
            _check_cross_mask(make, module, f"{what} in cross-attention")
        try:
            added = module(x, attn_mask=torch.zeros(6, 6, dtype=x.dtype).masked_fill(~lower, -torch.inf))
        except ValueError:  # boolean masks only
            continue
        assert_close(added, masked, f"{what} of floating point, -inf at masked pairs")


def _check_cross_mask(make: Maker, module: Any, what: str) -> None:
    query, memory = make.input(2, 4), make.input(2, 7, seed=1)
    allowed = torch.ones(4, 7, dtype=torch.bool).tril(1)  # query i reads keys up to i + 1
    masked = module(query, memory, attn_mask=allowed)
    for t in range(4):
        other = memory.detach().clone()
        other[:, t + 2 :] *= -LARGE
        found = module(query, other, attn_mask=allowed)[:, : t + 1]
        assert_identical(found, masked[:, : t + 1], f"{what}, masked keys change")


def check_nothing_to_attend(make: Maker, supports: Supports) -> None:
    """A query without any key gives a constant with zero gradient, never NaN, and affects no other query."""
    for causal, module in make.each_direction(supports):
        query, memory = make.input(2, 4), make.input(2, 4, seed=1)
        other_query, other_memory = make.input(2, 4, seed=2), make.input(2, 4, seed=3)
        for what, run, starved in _starved(module, supports, causal):
            what = f"causal={causal}, {what}"
            everything = with_gradients(module, run(query, memory), query=query, memory=memory)
            assert_finite(everything, what)
            found = with_gradients(module, run(query, memory)[starved], query=query, memory=memory)
            for name in ("query", "memory"):
                worst = float(found[f"gradient of {name}"].abs().max())
                require(worst == 0, f"{what}: the gradient of {name} is {worst:.3g}, should be 0")
            constant = run(other_query, other_memory)[starved]
            assert_close(found["output"], constant, f"{what}, whatever query and memory hold")
        if supports.padding:
            mask = torch.tensor([[True] * 4, [False] * 4])
            y = module(query, key_padding_mask=mask)
            what = f"causal={causal}, a row of padding only"
            assert_finite(with_gradients(module, y, query=query), what)
            assert_close(y[1:], module(query[1:]), f"{what}, the other row")


Starved = tuple[str, Callable[[Tensor, Tensor], Tensor], Any]


def _starved(module: Any, supports: Supports, causal: bool) -> Iterator[Starved]:
    """Yield each claimed way to leave queries without keys: its name, the call, and the queries' index."""
    everything = (slice(None), slice(None))
    if supports.cross:
        yield "no keys at all", lambda q, m: module(q, m[:, :0]), everything
    if supports.cross and causal:
        yield "4 queries over 3 keys", lambda q, m: module(q, m[:, :3]), (slice(None), slice(0, 1))
    if supports.cross and supports.padding:
        mask = torch.tensor([[True] * 4, [False] * 4])
        yield "memory of padding only", lambda q, m: module(q, m, key_padding_mask=mask), slice(0, 1)
    if supports.attn_mask:
        allowed = torch.ones(4, 4, dtype=torch.bool)
        allowed[1] = False
        yield "attn_mask with an empty row", lambda q, m: module(q, attn_mask=allowed), (slice(None), [1])
