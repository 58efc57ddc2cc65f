"""Padded keys: no value of theirs affects a result, and none counts in a later call."""

from functools import partial

import pytest
import torch

from unrolled.attention import bigbird, efficient, perceiver, topk
from unrolled.attention.clustered import clustered_attention
from unrolled.attention.linear import LinearAttention, rotary_linear_attention
from unrolled.attention.linformer import LinearProjection, MaxPooling, linformer_attention
from unrolled.attention.nystromformer import nystrom_attention
from unrolled.attention.performer import FavorMap, favor_attention
from unrolled.attention.reformer import hashing
from unrolled.attention.retention import retention
from unrolled.attention.rfa.sums import signed_rfa_attention
from unrolled.attention.similarity import Exponential, similarity_attention
from unrolled.attention.sparse_transformer import factorized
from unrolled.attention.sparse_transformer import state as factorized_state
from unrolled.attention.spatiotemporal import spatiotemporal_attention
from unrolled.attention.topk import TopkAttention
from unrolled.ops import delta, linear, softmax, window
from unrolled.ops.block_sparse import block_sparse_attention
from unrolled.ops.gla import diagonal_linear_attention, diagonal_linear_attention_reference
from unrolled.ops.random_features import Projection, signed_linear_attention
from unrolled.ops.window import state as window_state
from unrolled.ops.window.dilated import dilated_window_attention
from unrolled.testing.padding import PADDING

B, T = PADDING.shape
H, D = 2, 4
NEAR = {"left": 3, "dilation": (1, 1)}
LAYOUT = factorized.Layout(causal=True, n_heads=H, stride=2, window=2, summary=1)
BUCKETS = torch.arange(T).remainder(3)[None, :, None, None].expand(B, T, H, 1)
BLOCKS = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]]).expand(1, 1, 4, 2)
CLUSTER = torch.arange(T)[None, :, None].remainder(2).expand(B, T, H)
LATENTS, WEIGHT = torch.ones(3, H, D), torch.ones(H * D, H * D) / 8
FAVOR = FavorMap(D, "positive", Projection(H, 8, D, "independent", 0))


def softmax_twice(q, k, v, **mask):
    o, cache = softmax.softmax_prefill(q, k, v, softmax.empty_cache(B, H, D, D, q), **mask)
    return o, softmax.softmax_prefill(q, q, q, cache)[0], softmax.softmax_step(*q[:, :3].unbind(1), cache)[0]


def topk_twice(q, k, v, **mask):
    o, cache = topk.topk_prefill(q, k, v, softmax.empty_cache(B, H, D, D, q), 2, **mask)
    return o, topk.topk_step(*q[:, :3].unbind(1), cache, 2)[0]


def window_twice(q, k, v, **mask):
    o, state = window_state.window_prefill(
        q, k, v, window_state.empty_window(B, 3, H, D, D, q), **NEAR, **mask
    )
    return o, *state[:2], window_state.window_step(*q[:, :3].unbind(1), state, **NEAR)[0]


def factorized_twice(q, k, v, **mask):
    empty = factorized_state.empty_state(LAYOUT, B, H, D, D, q)
    o, state = factorized_state.factorized_prefill(q, k, v, LAYOUT, empty, **mask)
    return o, factorized_state.factorized_step(*q[:, :3].unbind(1), LAYOUT, state)[0]


# Each returns outputs `[B,T,...]` first, then other results. Gates are computed from k, so they are padded too.
FUNCTIONS = {
    "softmax": softmax.softmax_attention,
    "causal softmax": lambda *x, **m: softmax.softmax_attention(*x, causal=True, **m),
    "softmax, a cache": softmax_twice,
    "topk": lambda *x, **m: topk.topk_attention(*x, 2, **m),
    "topk, a cache": topk_twice,
    "window": lambda *x, **m: window.window_attention(*x, window_size=(2, 0), return_lse=True, **m),
    "window_reference": lambda *x, **m: window.window_attention_reference(*x, window_size=(2, 0), **m),
    "dilated_window": lambda *x, **m: dilated_window_attention(*x, window_size=(1, 1), dilation=(1, 2), **m),
    "window, a state": window_twice,
    "factorized": lambda *x, **m: factorized.factorized_attention(*x, LAYOUT, **m),
    "factorized, a state": factorized_twice,
    "block_sparse": lambda *x, **m: block_sparse_attention(*x, BLOCKS, block_size=(2, 2), **m),
    "bigbird": lambda *x, **m: bigbird.bigbird_attention(
        *x, bigbird.Layout(2, 1, (1, 0), 0, 1), BLOCKS[..., :1].expand(1, H, 4, 1), **m
    ),
    "lsh": lambda *x, **m: hashing.lsh_attention(*x, BUCKETS, chunk=2, **m),
    "causal lsh": lambda *x, **m: hashing.causal_lsh_attention(*x, BUCKETS, n_buckets=3, window=2, **m),
    "linear": lambda *x, **m: linear.linear_attention(*x, return_state=True, **m),
    "causal linear": lambda *x, **m: linear.linear_attention(*x, causal=True, return_state=True, **m),
    "linear, gates": lambda q, k, v, **m: linear.linear_attention(
        q, k, v, causal=True, log_decay=-k[..., 0].abs(), return_state=True, **m
    ),
    "linear_reference": lambda q, k, v, **m: linear.linear_attention_reference(
        q, k, v, causal=True, log_decay=-k[..., 0].abs(), return_state=True, **m
    ),
    "diagonal": lambda q, k, v, **m: diagonal_linear_attention(q, k, v, -k.abs(), return_state=True, **m),
    "diagonal_reference": lambda q, k, v, **m: diagonal_linear_attention_reference(
        q, k, v, -k.abs(), return_state=True, **m
    ),
    "signed_linear": signed_linear_attention,
    "rotary_linear": lambda *x, **m: rotary_linear_attention(*x, torch.arange(T).expand(B, T), **m),
    "rfa": lambda q, k, v, **m: signed_rfa_attention(q, k, v, gate_logits=k[..., 0], causal=True, **m),
    "retention": lambda *x, **m: retention(*x, torch.tensor([-0.1, -0.2]), **m),
    "delta_rule": lambda q, k, v, **m: delta.delta_rule(
        q, k / 9, v, 1 + k[..., 0] / 9, log_decay=-k[..., 1].abs(), **m
    ),
    "delta_rule_reference": lambda q, k, v, **m: delta.delta_rule_reference(
        q, k / 9, v, 1 + k[..., 0] / 9, log_decay=-k[..., 1].abs(), **m
    ),
    "favor": lambda q, k, v, **m: favor_attention(q, k, v, FAVOR, **m),
    "causal favor": lambda q, k, v, **m: favor_attention(q, k, v, FAVOR, causal=True, **m),
    "efficient": efficient.efficient_attention,
    "causal efficient": efficient.causal_efficient_attention,
    "clustered": lambda *x, **m: clustered_attention(*x, CLUSTER, 2, 2, **m),
    "linformer": lambda *x, **m: linformer_attention(*x, *[LinearProjection(3, T)] * 2, **m),
    "linformer, maximum": lambda *x, **m: linformer_attention(*x, *[MaxPooling(T, T)] * 2, **m),
    "nystrom": lambda *x, **m: nystrom_attention(*x, n_landmarks=3, **m),
    "perceiver": lambda *x, **m: perceiver.perceiver_attention(*x, LATENTS, WEIGHT, **m),
    "similarity": lambda *x, **m: similarity_attention(*x, Exponential(), causal=True, **m),
    "spatiotemporal": lambda *x, **m: spatiotemporal_attention(*x, 1, 3, **m),
    "spatiotemporal, a cube": lambda *x, **m: spatiotemporal_attention(*x, 1, 3, radius=(1, 1, 1), **m),
}


def run(function, q, k, v):
    """Return all results: outputs of valid queries, other results, and gradients of q, k and v."""
    with torch.random.fork_rng():
        torch.manual_seed(0)  # of the projections that are made in the call
        found = function(q, k, v, key_padding_mask=PADDING)
    o, *more = found if isinstance(found, tuple) else (found,)
    more = [part for x in more for part in (x if isinstance(x, tuple) else (x,))]
    results = [o[~PADDING], *more]
    seen = [x for x in results if x.requires_grad]
    losses = [torch.randn(x.shape, generator=torch.Generator().manual_seed(9)) for x in seen]
    kept = [x.nan_to_num(neginf=0, posinf=0) for x in seen]
    gradients = torch.autograd.grad(kept, (q, k, v), losses, materialize_grads=True, allow_unused=True)
    return [*results, *gradients]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_padded_keys_affect_nothing(function, value):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, T, H, D, generator=generator, requires_grad=True) for _ in range(3))
    expected = run(function, q, k, v)
    extreme = (x.detach().masked_fill(PADDING[..., None, None], value).requires_grad_() for x in (k, v))
    for found, right in zip(run(function, q, *extreme), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=False)


@pytest.mark.parametrize(
    "make",
    [partial(LinearAttention, rotary=True), partial(TopkAttention, n_keys=3)],
    ids=["positions", "keys"],
)
def test_what_was_padding_in_one_call_does_not_count_in_the_next(make):
    module = make(8, 2, causal=True).double()
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    padding = torch.tensor([[True, True, False, False], [False] * 4])
    _, state = module.prefill(x[:, :4], module.init_state(2), key_padding_mask=padding)
    y, _ = module.prefill(x[:, 4:], state)
    torch.testing.assert_close(y[0], module(x[:1, 2:])[0, 2:])
    torch.testing.assert_close(y[1], module(x[1:])[0, 4:])
