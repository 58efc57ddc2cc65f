"""The remaining claims: weights, queries one by one, and a largest length."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unrolled.attention.base import Masks
from unrolled.contract import Supports, UnsupportedError
from unrolled.ops.masks import without_padding
from unrolled.ops.state import select
from unrolled.testing._kit import Maker, assert_close, assert_raises, require, with_gradients


def _paddings(rows: int, length: int) -> list[Tensor | None]:
    """No mask, and one with padding on either side."""
    mask = torch.zeros(rows, length, dtype=torch.bool)
    mask[0, length // 2 :] = True
    mask[1, 0] = True
    return [None, mask]


def check_weights(make: Maker, supports: Supports) -> None:
    """The weights add up to 1, or are 0 for a query without keys; the output is the mean they define."""
    for _, module in make.each_direction(supports):
        x = make.input(2, 7, grad=False)
        for mask in _paddings(2, 7):
            masks = Masks(mask)
            valid = x if mask is None else without_padding(x, mask)
            heads = module.heads_of(module.project(valid), valid, masks)
            weights = module.weights_of(heads, masks)
            _check_mean(module, weights, heads.v, x, mask, module(x, key_padding_mask=mask))
            if supports.cross:
                query = make.input(2, 5, seed=1, grad=False)
                weights = module.weights(query, x, key_padding_mask=mask)
                v = module.project(query, valid)[2]
                _check_mean(module, weights, v, query, mask, module(query, x, key_padding_mask=mask))


def _check_mean(
    module: Any, weights: Tensor, v: Tensor, query: Tensor, mask: Tensor | None, expected: Tensor
) -> None:
    """Compare an output with the mean of the values, weighted by `weights [B,H,T,S]`."""
    reads = weights.ne(0).any(-1).to(weights.dtype)
    assert_close(weights.sum(-1), reads, "the weights of each query, added up")
    if mask is not None:
        require(not weights[mask[:, None, None].expand_as(weights)].any(), "padding has weights")
    v = v.repeat_interleave(module.n_heads // module.n_kv_heads, 2)
    mean = module.merge_heads(torch.einsum("bhts,bshm->bthm", weights, v), query)
    assert_close(mean, expected, "the mean of the values by the weights against the output")


def check_single_queries(make: Maker, supports: Supports) -> None:
    """`read`, then `recall`, equals `forward`, gradients included, however the queries are split."""
    if not supports.bidirectional:
        return
    module = make(causal=False)
    query, memory = make.input(3, 5), make.input(3, 7, seed=1)
    inputs = {"query": query, "memory": memory}
    for mask in _paddings(3, 7):
        expected = with_gradients(module, module(query, memory, key_padding_mask=mask), **inputs)
        for pieces in ([5], [1, 1, 1, 1, 1], [2, 3]):
            state = module.read(memory, key_padding_mask=mask)
            y = torch.cat([module.recall(part, state) for part in torch.split(query, pieces, 1)], 1)
            assert_close(with_gradients(module, y, **inputs), expected, f"recall of {pieces} queries")
    rows = torch.tensor([1, 0, 1])
    moved = module.recall(query, select(module.read(memory), rows))
    assert_close(moved, module(query, memory[rows]), "recall from rows in another order")


def check_max_length(make: Maker, supports: Supports) -> None:
    """A sequence of `max_length` tokens runs, and one token more is refused."""
    longest = int(make.options.get("max_length", 8))
    limited = replace(make, options={**make.options, "max_length": longest})
    for _, module in limited.each_direction(supports):
        y = module(make.input(2, longest))
        require(bool(y.isfinite().all()), "a sequence of max_length gives numbers that are not finite")
        assert_raises(ValueError, "a token beyond max_length", module, "forward", make.input(2, longest + 1))


def check_refuses_unclaimed_verbs(make: Maker, supports: Supports) -> None:
    """Without the claim, `read` and `weights` raise UnsupportedError, in the modules that have them."""
    for causal, module in make.each_direction(supports):
        x = make.input(2, 5, grad=False)
        if hasattr(module, "recall") and (causal or not supports.single_queries):
            assert_raises(UnsupportedError, "read (not claimed)", module, "read", x)
        if hasattr(module, "weights") and not supports.weights:
            assert_raises(UnsupportedError, "weights (not claimed)", module, "weights", x, x)
