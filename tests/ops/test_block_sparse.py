"""Block-sparse attention: the definition with multiplicities, whatever the lists hold."""

import pytest
import torch
from agreement import assert_agree
from counted import assert_same, counted_attention, draw
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled.ops import block_sparse, native
from unrolled.ops.block_sparse import block_sparse_attention
from unrolled.ops.merge import merge_softmax


def counts_of(blocks, T, S, C, K, allowed):
    """How often each query reads each key, counted one by one: `[B,H,T,S]`."""
    B, H, _, _ = blocks.shape
    counts = torch.zeros(B, H, T, S)
    for i in range(T):
        for b in range(B):
            for h in range(H):
                for n, block in enumerate(blocks[b, h, i // C].tolist()):
                    for j in range(block * K, min(S, block * K + K)) if block >= 0 else ():
                        counts[b, h, i, j] += bool(allowed[h, i % C, n * K + j % K])
    return counts


@settings(max_examples=40)
@given(
    T=st.integers(0, 9),
    S=st.integers(0, 9),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    L=st.integers(0, 3),
    heads=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    shared=st.tuples(st.booleans(), st.booleans()),
    with_mask=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 9),
)
def test_equals_the_definition(T, S, sizes, L, heads, shared, with_mask, seed):
    (C, K), (G, P), B = sizes, heads, 2
    generator = torch.Generator().manual_seed(seed)
    N, H = -(-T // C), G * P
    size = (1 if shared[0] else B, 1 if shared[1] else H, N, L)
    blocks = torch.randint(-1, max(-(-S // K), 0), size, generator=generator)
    allowed = torch.rand(H, C, L * K, generator=generator) < 0.6 if with_mask[0] else None
    padding = torch.rand(B, S, generator=generator) < 0.3 if with_mask[1] else None
    q, k, v = draw(B, T, H, 3), draw(B, S, G, 3, seed=1), draw(B, S, G, 2, seed=2)
    found = block_sparse_attention(
        q, k, v, blocks, block_size=sizes, allowed=allowed, key_padding_mask=padding
    )
    every = torch.ones(H, C, L * K, dtype=torch.bool)
    counts = counts_of(blocks.expand(B, H, N, L), T, S, C, K, every if allowed is None else allowed)
    if padding is not None:
        counts = counts.masked_fill(padding[:, None, None, :], 0)
    expected = counted_attention(q, k, v, counts) if S > 0 else found
    assert_same(list(found), list(expected), [q, k, v])


def test_groups_of_blocks_change_nothing(monkeypatch):
    inputs = [draw(1, 20, 2, 3), draw(1, 20, 2, 3, seed=1), draw(1, 20, 2, 3, seed=2)]
    blocks = torch.randint(-1, 5, (1, 2, 5, 3), generator=torch.Generator().manual_seed(0))
    whole = block_sparse_attention(*inputs, blocks, block_size=(4, 4))
    for scores in (1, 2 * 4 * 12 * 2):  # one block at a time; two, and one that remains
        monkeypatch.setattr(block_sparse, "CPU_SCORES", scores)
        assert_same(list(block_sparse_attention(*inputs, blocks, block_size=(4, 4))), list(whole), inputs)


def test_scores_of_width_0_are_all_0():
    v, blocks = draw(1, 8, 2, 3), torch.tensor([[0, 1], [1, -1]]).reshape(1, 1, 2, 2)
    found, expected = (
        block_sparse_attention(x, x, v, blocks, block_size=(4, 4)) for x in (v.new_empty(1, 8, 2, 0), 0 * v)
    )
    torch.testing.assert_close(found, expected)


def test_parts_merge_to_the_whole():
    inputs = [draw(1, 8, 1, 3), draw(1, 8, 1, 3, seed=1), draw(1, 8, 1, 3, seed=2)]
    blocks = torch.tensor([[0, 1, 2], [3, 0, -1], [1, 1, 1], [-1, -1, 2]]).reshape(1, 1, 4, 3)
    whole = block_sparse_attention(*inputs, blocks, block_size=(2, 2))
    parts = [block_sparse_attention(*inputs, blocks[..., [n]], block_size=(2, 2)) for n in range(3)]
    assert_same(list(merge_softmax(parts)), list(whole), inputs)


@pytest.mark.skipif(not native.available(), reason=str(native.missing()))
@pytest.mark.parametrize("masked", [False, True])
def test_the_kernels_compute_the_same(masked, monkeypatch):
    inputs = [draw(2, 70, 4, 8), draw(2, 70, 2, 8, seed=1), draw(2, 70, 2, 6, seed=2)]
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(-1, 5, (2, 4, 4, 3), generator=generator)
    blocks[0, 1, 2] = -1  # nothing to read
    padding = torch.rand(2, 70, generator=generator) < 0.3 if masked else None
    options = {"block_size": (18, 16), "key_padding_mask": padding}
    expected = block_sparse_attention(*inputs, blocks, **options)
    seen = []
    kernel = block_sparse.window_attention
    monkeypatch.setattr(block_sparse, "window_attention", lambda *x: seen.append(x) or kernel(*x))
    single = [x.detach().float().requires_grad_() for x in inputs]
    found = block_sparse_attention(*single, blocks, **options)
    assert_agree(found[0], expected[0], tolerance=1e-6)
    finite = expected[1].isfinite()
    assert torch.equal(found[1].isfinite(), finite)
    assert_agree(found[1][finite], expected[1][finite], tolerance=1e-6)
    ours, theirs = (
        torch.autograd.grad(sum(y[finite].square().sum() for y in outputs), of)
        for outputs, of in ((found, single), (expected, inputs))
    )
    for a, b in zip(ours, theirs, strict=True):
        assert_agree(a, b, tolerance=1e-6)
    assert seen


def test_second_derivatives():
    inputs = [draw(1, 5, 2, 2), draw(1, 5, 1, 2, seed=1), draw(1, 5, 1, 2, seed=2)]
    blocks = torch.tensor([[0, 1], [2, -1], [-1, -1]]).reshape(1, 1, 3, 2)

    def outputs(q, k, v):
        o, lse = block_sparse_attention(q, k, v, blocks, block_size=(2, 2))
        return o, lse[:, :4]  # the last query reads nothing: minus infinity

    assert torch.autograd.gradgradcheck(outputs, inputs)
    assert torch.autograd.gradgradcheck(lambda v: outputs(*inputs[:2], v), inputs[2:])


def test_training_keeps_inputs_and_outputs_only():
    blocks = torch.arange(32).reshape(1, 1, 32, 1) - torch.arange(4)
    q, k, v = (draw(1, 32 * 16, 1, 2, seed=i) for i in range(3))
    kept = []

    def keep(x):
        kept.append(x.untyped_storage())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        block_sparse_attention(q, k, v, blocks, block_size=(16, 16))
    storages = {x.data_ptr(): x.nbytes() for x in kept}
    scores = 32 * 16 * 4 * 16 * 8  # bytes
    assert sum(storages.values()) < scores / 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": (0, 4)}, r"block_size is \(0, 4\), but both lengths must be at least 1"),
        ({"blocks": torch.zeros(1, 1, 2, 1)}, r"blocks is torch.float32 of shape \[1, 1, 2, 1\]"),
        ({"blocks": torch.zeros(1, 1, 3, 1).long()}, r"must be torch.int64 \[2, 2, 2, L\]"),
        ({"blocks": torch.zeros(3, 1, 2, 1).long()}, r"must be torch.int64 \[2, 2, 2, L\]"),
        ({"key_padding_mask": torch.zeros(2, 7, dtype=torch.bool)}, r"must be \[2, 8\]"),
    ],
)
def test_wrong_input(change, message):
    arguments = {"blocks": torch.zeros(1, 1, 2, 1).long(), "block_size": (4, 4)} | change
    q, k, v = (torch.randn(2, 8, 2, 3) for _ in range(3))
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(q, k, v, **arguments)


def test_a_block_that_does_not_exist_is_refused():
    q, k, v = (torch.randn(1, 4, 2, 3) for _ in range(3))
    blocks = torch.full((1, 2, 2, 1), 2)
    with pytest.raises(ValueError, match="blocks has 2, but must be below the 2 blocks of keys"):
        block_sparse_attention(q, k, v, blocks, block_size=(2, 2))
