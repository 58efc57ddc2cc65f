import math
import re
import shutil

import pytest
import torch
from agreement import assert_same
from contract_parts import check_uncompiled
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled.attention.base import Heads
from unrolled.attention.reformer import ReformerAttention, hashing
from unrolled.attention.reformer.hashing import causal_lsh_attention, hash_buckets, lsh_attention, unit_keys
from unrolled.contract import UnsupportedError
from unrolled.ops.state import nbytes
from unrolled.testing import Maker

F64 = torch.float64


def random_inputs(T, H=2, D=5, M=4, R=2, n_buckets=4, B=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(B, T, H, D, generator=generator, dtype=F64).requires_grad_()
    v = torch.randn(B, T, H, M, generator=generator, dtype=F64).requires_grad_()
    return q, v, torch.randint(n_buckets, (B, T, H, R), generator=generator)


def chunk_sets(buckets, chunk, same_bucket=False, causal=False):
    """P_i of each round, `[R,T,T]`, token by token from `buckets [T,R]`."""
    T, R = buckets.shape
    sets = torch.zeros(R, T, T, dtype=torch.bool)
    for r in range(R):
        order = sorted(range(T), key=lambda i: (int(buckets[i, r]), i))
        place = {token: at for at, token in enumerate(order)}
        n_chunks = math.ceil(T / chunk)
        for i in range(T):
            for j in range(T):
                ahead = (place[i] // chunk - place[j] // chunk) % n_chunks
                allowed = ahead <= 1 and i != j and not (causal and j > i)
                sets[r, i, j] = allowed and not (same_bucket and buckets[i, r] != buckets[j, r])
    return sets


def window_sets(buckets, window):
    T, R = buckets.shape
    sets = torch.zeros(R, T, T, dtype=torch.bool)
    for r in range(R):
        for i in range(T):
            earlier = [j for j in range(i) if buckets[j, r] == buckets[i, r]]
            sets[r, i, earlier[-window:]] = True
    return sets


def by_definition(q, v, sets):
    """One head, `q [T,D]`, `v [T,M]`: the softmax over the union of the sets `[R,T,T]`, or the own value."""
    rows = []
    k = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt() / q.shape[-1] ** 0.5
    for i, union in enumerate(sets.any(0)):
        weights = (k[union] @ q[i]).softmax(0)
        rows.append(weights @ v[union] if bool(union.any()) else v[i])
    return torch.stack(rows)


def of_all_heads(q, v, buckets, sets_of):
    heads = [
        [by_definition(q[b, :, h], v[b, :, h], sets_of(buckets[b, :, h])) for h in range(q.shape[2])]
        for b in range(q.shape[0])
    ]
    return torch.stack([torch.stack(row, 1) for row in heads])


shapes = {
    "T": st.integers(1, 60),
    "size": st.integers(1, 9),
    "R": st.integers(1, 3),
    "n_buckets": st.integers(1, 6),
    "seed": st.integers(0, 99),
}


@pytest.mark.slow
@given(**shapes, same_bucket=st.booleans(), causal=st.booleans())
@settings(max_examples=40)
def test_the_union_of_the_chunks_of_all_rounds(T, size, R, n_buckets, seed, same_bucket, causal):
    q, v, buckets = random_inputs(T, R=R, n_buckets=n_buckets, B=1, seed=seed)
    options = {"same_bucket": same_bucket, "causal": causal}
    found = lsh_attention(q, unit_keys(q), v, buckets, chunk=size, **options)
    expected = of_all_heads(q, v, buckets, lambda b: chunk_sets(b, size, **options))
    assert_same(found, expected, [q, v], rtol=0, atol=1e-12)


@given(**shapes)
@settings(max_examples=40)
def test_the_union_of_the_earlier_members_of_the_buckets(T, size, R, n_buckets, seed):
    q, v, buckets = random_inputs(T, R=R, n_buckets=n_buckets, B=1, seed=seed)
    found = causal_lsh_attention(q, unit_keys(q), v, buckets, n_buckets=n_buckets, window=size)
    expected = of_all_heads(q, v, buckets, lambda b: window_sets(b, size))
    assert_same(found, expected, [q, v], rtol=0, atol=1e-12)


def attend_densely(q, v, causal=False):
    """Softmax attention to the others with unit keys."""
    T = q.shape[1]
    mask = ~torch.eye(T, dtype=torch.bool)
    mask = mask.tril() if causal else mask
    return of_all_heads(q, v, q.new_zeros(*q.shape[:3], 1), lambda _: mask.unsqueeze(0))


@pytest.mark.parametrize(("T", "chunk", "R"), [(7, 7, 3), (7, 30, 2), (14, 7, 1), (13, 7, 3), (1, 4, 1)])
def test_chunks_that_hold_everything_are_dense(T, chunk, R):
    q, v, buckets = random_inputs(T, R=R)
    assert_same(lsh_attention(q, unit_keys(q), v, buckets, chunk=chunk), attend_densely(q, v), [q, v])


def test_one_bucket_that_holds_everything_is_dense():
    q, v, buckets = random_inputs(9, n_buckets=1)
    found = lsh_attention(q, unit_keys(q), v, buckets, chunk=9, same_bucket=True)
    assert_same(found, attend_densely(q, v), [q, v])
    found = causal_lsh_attention(q, unit_keys(q), v, buckets, n_buckets=1, window=8)
    assert_same(found, attend_densely(q, v, causal=True), [q, v])


@pytest.mark.parametrize("T", [12, 60])  # all pairs, and blocks
def test_groups_of_rows_change_nothing(T, monkeypatch):
    q, v, buckets = random_inputs(T, B=3)

    def both():
        k = unit_keys(q)
        return [
            lsh_attention(q, k, v, buckets, chunk=4),
            causal_lsh_attention(q, k, v, buckets, n_buckets=4, window=4),
        ]

    whole = both()
    union, calls = hashing._average, []
    monkeypatch.setattr(hashing, "_average", lambda *x: calls.append(len(x[0])) or union(*x))
    monkeypatch.setattr(hashing, "CPU_SCORES", 1)
    for found, expected in zip(both(), whole, strict=True):
        assert_same(found, expected, [q, v], rtol=0, atol=1e-13)
    assert set(calls) == {1}


@pytest.mark.slow
def test_large_numbers_of_buckets_overflow_nothing():
    q, v, buckets = random_inputs(9, n_buckets=2)
    far = buckets * 2**32
    few, many = (lsh_attention(q, unit_keys(q), v, x, chunk=2, same_bucket=True) for x in (buckets, far))
    torch.testing.assert_close(many, few, rtol=0, atol=0)
    n, window = 4096, 2**20 - 1
    few, many = (
        causal_lsh_attention(q, unit_keys(q), v, x, n_buckets=m, window=window)
        for x, m in ((buckets, 2), (buckets * (n - 1), n))
    )
    torch.testing.assert_close(many, few, rtol=0, atol=1e-13)


def test_more_rounds_come_closer_to_dense():
    q, v, _ = random_inputs(128, D=4, H=1)
    R = 64
    rotations = torch.randn(4, R * 4, generator=torch.Generator().manual_seed(2), dtype=F64)
    buckets = hash_buckets((q @ rotations).unflatten(-1, (R, 4)).detach(), (8,))
    dense = attend_densely(q, v)
    errors = []
    for rounds in (1, 4, 16, 64):
        found = lsh_attention(q, unit_keys(q), v, buckets[..., :rounds], chunk=8)
        errors.append(float((found - dense).detach().square().mean()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.05 * errors[0]


# Causality. What of the future reaches the past in the published form, and that nothing does in ours.


def test_the_published_causal_form_sees_later_tokens_through_its_chunks():
    """The smallest case: chunks of one token, the first token in bucket 0, the second in 2.

    The second one reads the chunk before its own: the first token, until a later one in bucket 1 comes between.
    """
    q, v, _ = random_inputs(3, H=1, B=1)
    second = {}
    for last in (1, 3):
        buckets = torch.tensor([0, 2, last]).view(1, 3, 1, 1)
        second[last] = lsh_attention(q, unit_keys(q), v, buckets, chunk=1, causal=True)[0, 1, 0]
    assert torch.equal(second[3], v[0, 0, 0])
    assert torch.equal(second[1], v[0, 1, 0])  # nothing earlier is left to read but its own value


def published(q, v, buckets):
    return lsh_attention(q, unit_keys(q), v, buckets, chunk=4, causal=True)


def test_it_changes_most_of_the_past():
    q, v, buckets = random_inputs(64, H=1, B=1, n_buckets=16)
    other = buckets.clone()
    other[:, 40:] = random_inputs(64, H=1, B=1, n_buckets=16, seed=1)[2][:, 40:]
    changed = (published(q, v, other) - published(q, v, buckets))[0, :40].abs().amax((1, 2)) > 1e-9
    assert int(changed.sum()) > 20


@given(now=st.integers(1, 39), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_it_sees_no_more_than_how_many_later_tokens_fall_into_each_bucket(now, seed):
    """Later values, queries and the order of their buckets have no effect."""
    q, v, buckets = random_inputs(40, H=1, B=1, n_buckets=6, seed=seed)
    other_q, other_v, _ = random_inputs(40, H=1, B=1, seed=seed + 100)
    shuffled = torch.cat(
        [torch.arange(now), now + torch.randperm(40 - now, generator=torch.Generator().manual_seed(seed))]
    )
    found = published(
        torch.cat([q[:, :now], 12 * other_q[:, now:]], 1),
        torch.cat([v[:, :now], 12 * other_v[:, now:]], 1),
        buckets[:, shuffled],
    )
    assert torch.equal(found[:, :now], published(q, v, buckets)[:, :now])


def test_no_gradient_of_the_published_form_reaches_the_future():
    q, v, buckets = random_inputs(40, H=1, B=1, n_buckets=6)
    published(q, v, buckets)[:, :17].sum().backward()
    assert float(q.grad[:, 17:].abs().max()) == float(v.grad[:, 17:].abs().max()) == 0


# The module.


def module(**options):
    torch.manual_seed(0)
    return ReformerAttention(12, 2, **{"chunk": 3, "n_buckets": 4, "seed": 7} | options).double()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"chunk": 3, "n_buckets": 4},
        {"chunk": 4, "n_buckets": [2, 4], "n_rounds": 1, "same_bucket": True},
        {"chunk": 2, "n_buckets": 2, "n_rounds": 3, "scale": 0.5, "bias": False},
    ],
)
def test_it_keeps_the_contract(options):
    """With chunks that are short against the lengths there; the defaults are checked with all mechanisms."""
    check_uncompiled(Maker(ReformerAttention, options))


@pytest.mark.compilers
@pytest.mark.parametrize("causal", [True, False])
def test_its_blocks_compile_whole(causal):
    attention = module(causal=causal, chunk=1, n_buckets=2, n_rounds=1)
    x = torch.randn(1, 20, 12, dtype=F64)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), attention(x))


@pytest.mark.compilers
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own
def test_inductor_takes_a_causal_training_step():
    attention, x = module(causal=True, chunk=2, n_buckets=4, n_rounds=1), torch.randn(1, 40, 12, dtype=F64)
    x.requires_grad_()
    expected = attention(x)
    found = torch.compile(attention, fullgraph=True)(x)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_a_state_is_no_longer_than_what_can_be_read():
    """12 x 3 tokens are more than 2 rounds of 4 buckets of 3: so the state stops growing at 24."""
    attention = module(causal=True)
    x = torch.randn(2, 36, 12, dtype=F64)
    expected, state = attention(x), attention.init_state(2)
    sizes = []
    for x_t, y_t in zip(x.unbind(1), expected.unbind(1), strict=True):
        found, state = attention.step(x_t, state)
        torch.testing.assert_close(found, y_t)
        sizes.append(nbytes(state))
    assert sizes[22] < sizes[23] == sizes[35]
    assert state.k.shape[1] == 24


def test_rotations_are_drawn_from_the_seed_and_stay():
    x = torch.randn(1, 30, 12, dtype=F64)
    a, b, other = module(), module(), module(seed=8)
    assert torch.equal(a.rotations.weight, b.rotations.weight)
    assert not torch.equal(a.rotations.weight, other.rotations.weight)
    assert torch.equal(a.train()(x), a.eval()(x))
    a.rotations.redraw()
    assert not torch.equal(a(x), b(x))
    b.rotations.redraw()
    assert torch.equal(a(x), b(x))


def test_rounding_to_half_precision_moves_no_token_to_another_bucket():
    """The hash is computed from a projection in fp32, of the weights and inputs as they are."""
    half = module(n_buckets=64, n_rounds=8).bfloat16()
    exact = module(n_buckets=64, n_rounds=8).double()
    exact.load_state_dict(half.state_dict())
    x = torch.randn(2, 200, 12).bfloat16()
    found, expected = (buckets_of(attention, x) for attention in (half, exact))
    assert torch.equal(found, expected)


def buckets_of(attention, x):
    x = x.to(attention.out_proj.weight.dtype)
    return attention._hashed(Heads(*attention.project(x), None, attention.read_input(x)))[2]


def test_hashing():
    """x goes to the row that it has the largest product with, or n/2 further for the negative of a row."""
    rotated = torch.tensor([[3.0, 1.0], [-1.0, 2.0], [-3.0, 1.0], [0.0, -1.0], [0.0, 0.0]])
    assert hash_buckets(rotated, (4,)).tolist() == [0, 1, 2, 3, 0]
    assert hash_buckets(rotated, (2, 2)).tolist() == [0, 1, 1, 2, 0]  # one row each, signs only
    many = hash_buckets(torch.randn(4000, 3 + 4), (6, 8))
    assert many.unique().tolist() == list(range(48))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_buckets": 5}, "n_buckets is 5, but must be even"),
        ({"n_buckets": [4, 3]}, "n_buckets is [4, 3], but must be even, or a list of even factors"),
        ({"n_buckets": []}, "n_buckets is [], but must be even"),
        ({"chunk": 0}, "chunk is 0, but must be at least 1"),
        ({"n_rounds": 0}, "n_rounds is 0, but must be at least 1"),
        ({"n_buckets": 2.5}, "n_buckets is 2.5, but must be even"),
        ({"n_buckets": "44"}, "n_buckets is '44', but must be even"),
        ({"n_buckets": [4, 2.0]}, "n_buckets is [4, 2.0], but must be even"),
        ({"n_kv_heads": 1}, "n_kv_heads is 1, but must be n_heads = 2, since queries and keys share"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        module(**options)


def test_wrong_arguments_are_refused():
    q, v, buckets = random_inputs(5)
    with pytest.raises(ValueError, match=r"buckets is torch.int64 of shape \[2, 4, 2, 2\]"):
        lsh_attention(q, q, v, buckets[:, :4], chunk=2)
    with pytest.raises(ValueError, match="chunk is 0, but must be at least 1"):
        lsh_attention(q, q, v, buckets, chunk=0)
    with pytest.raises(ValueError, match="window is 0, but must be at least 1"):
        causal_lsh_attention(q, q, v, buckets, n_buckets=4, window=0)
    with pytest.raises(ValueError, match="both are of the same tokens"):
        lsh_attention(q[:, :4], q, v, buckets, chunk=2)


def test_bidirectional_attention_says_why_it_has_no_step():
    attention = module()
    with pytest.raises(UnsupportedError, match="only causal attention runs as a recurrence"):
        attention.step(torch.randn(1, 12, dtype=F64), module(causal=True).init_state(1))


def test_padding_takes_no_place_in_a_full_state():
    """2 buckets of 1 token: padding, of which the state takes note, must not push a token out."""
    attention = module(causal=True, chunk=1, n_buckets=2, n_rounds=1)
    x = torch.randn(40, 12, 12, dtype=F64)
    padding = torch.rand(40, 12, generator=torch.Generator().manual_seed(0)) < 0.4
    padding[:, -1] = False
    expected = attention(x, key_padding_mask=padding)
    state, outputs = attention.init_state(40), []
    for part, mask in zip(x[:, :-1].split(3, 1), padding[:, :-1].split(3, 1), strict=True):
        y, state = attention.prefill(part, state, key_padding_mask=mask)
        outputs.append(y)
    y, _ = attention.step(x[:, -1], state)
    found = torch.cat([*outputs, y.unsqueeze(1)], 1)
    torch.testing.assert_close(found[~padding], expected[~padding])
