"""The C++ kernels of linear attention, on every instruction set that this machine can run."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from defaults import default_dtype
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import (
    Case,
    assert_error_at_most_twice_that_of,
    assert_nan_stays_in_its_head,
    errors,
    outputs_and_gradients,
)
from torch import Tensor

from unrolled.ops import native
from unrolled.ops.dispatch import prefer
from unrolled.ops.feature_maps import make_feature_map
from unrolled.ops.feature_maps.elementwise import ELEMENTWISE
from unrolled.ops.linear import (
    LinearState,
    linear_attention,
    linear_attention_reference,
    linear_attention_step,
)

if not native.available():
    pytest.skip(str(native.missing()), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("instruction_set", "poisoned_memory")
form = partial(linear_attention, backend="native")
plain = partial(linear_attention, backend="plain")


flags = st.booleans()
widths = st.sampled_from([1, 3, 8, 16, 17, 33, 64, 80])
maps = st.sampled_from([None, *ELEMENTWISE])


@settings(max_examples=25)
@given(
    T=st.integers(0, 70),
    S=st.integers(0, 70),
    heads=st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]),
    R=widths,
    M=widths,
    flags=st.tuples(flags, flags, flags, flags, flags),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 9),
    phi=maps,
)
def test_is_as_exact_as_the_plain_form(T, S, heads, R, M, flags, dtype, seed, phi):
    causal, gated, padded, stateful, normalize = flags
    case = Case(T, S, 2, *heads, R, M, causal, gated, padded, stateful, normalize, None, seed, dtype, phi)
    assert_error_at_most_twice_that_of([plain, linear_attention_reference], form, case)


@settings(max_examples=15)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 40]), min_size=0, max_size=5),
    flags=st.tuples(flags, flags, flags, flags),
    M=widths,
    phi=maps,
)
def test_packed_sequences_are_as_exact_as_the_plain_form(lengths, flags, M, phi):
    causal, gated, stateful, normalize = flags
    case = Case(M=M, causal=causal, gated=gated, stateful=stateful, normalize=normalize, dtype=torch.float32)
    case = replace(case, lengths=tuple(lengths), feature_map=phi)
    assert_error_at_most_twice_that_of([plain, linear_attention_reference], form, case)


@pytest.mark.parametrize(("causal", "T"), [(True, 300), (False, 1100)])
@pytest.mark.parametrize("lengths", [None, (270, 7, 0, 130)])
def test_the_backward_pass_keeps_only_a_few_states_of_a_long_sequence(causal, T, lengths):
    case = Case(T, T, 1, 2, 2, 9, 20, causal, gated=True, stateful=True, lengths=lengths, dtype=torch.float32)
    assert_error_at_most_twice_that_of([plain, linear_attention_reference], form, case)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("lengths", [None, (200, 7, 90)])
@pytest.mark.parametrize("G", [1, 3])
def test_threads_share_heads_and_then_segments_of_the_sequence(threads, causal, gated, lengths, G):
    case = Case(260, 260, 1, G, 1, 64, 64, causal, gated, stateful=True, lengths=lengths, dtype=torch.float32)
    threads(3)
    assert_error_at_most_twice_that_of([plain, linear_attention_reference], form, case)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_on_average_as_exact_as_the_plain_form(causal, dtype):
    cases = [Case(200, 200, 1, 2, 1, 64, 64, causal, seed=seed, dtype=dtype) for seed in range(5)]
    found, expected = ([errors(f, case) for case in cases] for f in (form, plain))
    for name in found[0]:
        ours, theirs = (sum(error[name] for error in by_case) for by_case in (found, expected))
        assert ours <= 2 * theirs, f"{name}: {ours:g} against {theirs:g}"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_features_and_their_derivatives_are_exact_at_every_size(name, causal):
    # Each sequence is one query and one key of one feature, so that sums hide nothing.
    sizes = [10.0**n for n in range(-9, 3, 2)]
    x = torch.tensor([0.0, *sizes, *(-size for size in sizes), -70.0, -87.0, -90.0, -100.0, -float("inf")])
    offsets, phi = torch.arange(len(x) + 1, dtype=torch.int32), make_feature_map(name, 1)
    found = []
    for backend, dtype in (("native", torch.float32), ("plain", torch.float64)):
        k = x.to(dtype).view(1, -1, 1, 1).requires_grad_()
        q = torch.ones_like(k, requires_grad=True)
        options = {"causal": causal, "cu_seqlens": offsets, "normalize": False, "feature_map": phi}
        o, state = linear_attention(q, k, torch.ones_like(k), return_state=True, backend=backend, **options)
        found.append([o, *state, *torch.autograd.grad(o.sum(), (q, k))])
    for ours, exact in zip(*found, strict=True):
        # 1e-37: fp32 has fewer digits below, down to 1e-45, which torch may be set to flush
        torch.testing.assert_close(ours.double(), exact.double(), rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("causal", [True, False])
def test_gates_without_a_gradient_change_no_other_gradient(causal):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(2, 70, 3, 20, generator=generator).requires_grad_() for _ in range(3))
    gates = -torch.rand(2, 70, 3, generator=generator)
    kv, k_sum = (torch.rand(2, 3, 20, *m, generator=generator).requires_grad_() for m in ((20,), ()))

    def gradients(log_decay):
        options = {"causal": causal, "log_decay": log_decay, "state": LinearState(kv, k_sum)}
        o, state = form(q, k, v, return_state=True, **options)
        loss = o.square().sum() + sum(x.sin().sum() for x in state)
        return torch.autograd.grad(loss, (q, k, v, kv, k_sum))

    for constant, learned in zip(gradients(gates), gradients(gates.clone().requires_grad_()), strict=True):
        assert torch.equal(constant, learned)


@pytest.mark.parametrize("R", [3, 8, 9, 17])
def test_nan_in_one_head_reaches_no_other(R):
    def gated(q, k, v, gates):
        return form(q, k, v, causal=True, log_decay=gates)

    q, k, v = (torch.rand(1, 40, 2, n) + 0.1 for n in (R, R, 5))
    assert_nan_stays_in_its_head(gated, q, k, v, -torch.rand(1, 40, 2))


@pytest.mark.parametrize(("R", "M"), [(256, 64), (64, 256), (300, 20)])
def test_wide_heads(R, M):
    case = Case(T=50, S=50, B=1, G=1, R=R, M=M, dtype=torch.float32)
    assert_error_at_most_twice_that_of([plain, linear_attention_reference], form, case)


def test_a_view_of_a_projection_is_read_where_it_lies():
    H, D = 4, 16
    projected = torch.rand(2, 50, 3 * H * D)
    q, k, v = projected.view(2, 50, 3, H, D).unbind(2)
    assert not q.is_contiguous()
    expected = form(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    assert torch.equal(form(q, k, v, causal=True), expected)
    by_head = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert torch.equal(form(*by_head, causal=True), expected)
    by_feature = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v))
    assert torch.equal(form(*by_feature, causal=True), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_as_torch_rounds(dtype):
    # One token attends to itself with weight 1: the output is its value, read and written in every case there is.
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    v = bits.view(dtype)
    v = v[v.isfinite()].view(1, -1, 1, 1)
    ones = torch.ones_like(v)
    offsets = torch.arange(v.shape[1] + 1, dtype=torch.int32)
    assert torch.equal(form(ones, ones, v, cu_seqlens=offsets, normalize=False), v)
    # Two keys, of which a tiny feature weighs one: sums that fp32 holds and the type has to round.
    k = torch.tensor([1.0, 2.0**-7], dtype=dtype).repeat(v.shape[1]).view(-1, 2, 1, 1)
    pair = torch.stack([v.flatten(), v.flatten().flip(0)], 1).view(-1, 2, 1, 1)
    found = form(torch.ones_like(k), k, pair, normalize=False)
    expected = (pair.float() * k.float()).sum(1, keepdim=True).to(dtype).expand_as(found)
    assert torch.equal(found[found.isfinite()], expected[found.isfinite()])
    assert torch.equal(found.isfinite(), expected.isfinite())


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("G", "P", "R", "M"), [(2, 1, 8, 8), (1, 3, 5, 33), (3, 2, 64, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_as_exact_as_the_plain_ones(gated, normalize, G, P, R, M, dtype):
    B, T = 2, 9
    q, k, v = torch.rand(B, T, G * P, R), torch.rand(B, T, G, R), torch.randn(B, T, G, M)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    gates = -torch.rand(B, T, G) if gated else None
    state = LinearState(torch.randn(B, G, R, M), torch.rand(B, G, R))

    def run(q: Tensor, k: Tensor, v: Tensor, state: LinearState) -> list[Tensor]:
        outs = []
        for t in range(T):
            gate, before = None if gates is None else gates[:, t], [x.clone() for x in state]
            token = q[:, t], k[:, t], v[:, t]
            o, new = linear_attention_step(*token, state, log_decay=gate, normalize=normalize)
            assert all(map(torch.equal, state, before)), "a state passed in is never changed"
            outs, state = [*outs, o], new
        return [torch.stack(outs), *state]

    found = run(q, k, v, state)
    with prefer("plain"):
        expected = run(q, k, v, state)
    exact = run(q.double(), k.double(), v.double(), LinearState(*(x.double() for x in state)))
    for x, y, z in zip(found, expected, exact, strict=True):
        assert x.dtype == y.dtype
        eps = torch.finfo(torch.float32).eps
        assert (x.double() - z).norm() <= 2 * (y.double() - z).norm() + eps * z.norm()


def test_one_step_of_many_rows_uses_the_threads(threads):
    q, k, v = (torch.rand(40, 8, 64) for _ in range(3))
    state = LinearState(torch.rand(40, 8, 64, 64), torch.rand(40, 8, 64))
    alone = linear_attention_step(q, k, v, state)
    threads(3)
    together = linear_attention_step(q, k, v, state)
    assert torch.equal(alone[0], together[0])
    assert all(map(torch.equal, alone[1], together[1]))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_type_of_new_tensors_does_not_matter(default):
    case = Case(T=300, S=300, R=16, M=16, dtype=torch.float32)
    expected = outputs_and_gradients(form, case)
    with default_dtype(default):
        found = outputs_and_gradients(form, case)
    assert all(map(torch.equal, found, expected))


def test_no_query_heads_and_no_divisor_are_no_accident():
    k, state = torch.rand(2, 2, 64), LinearState(torch.full((2, 2, 64, 64), torch.inf), torch.zeros(2, 2, 64))
    assert linear_attention_step(torch.rand(2, 0, 64), k, k, state)[0].shape == (2, 0, 64)
    o, _ = linear_attention_step(torch.zeros(2, 2, 64), k, k, state)
    assert torch.equal(o, torch.zeros_like(o))


def test_tensors_elsewhere_are_refused():
    q, k = torch.rand(1, 2, 8), torch.rand(1, 2, 8, device="meta")
    state = LinearState(torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 8))
    with pytest.raises(ValueError, match="k is on meta, but must be on cpu like q"):
        linear_attention_step(q, k, q, state)


def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(ValueError, match="instruction set is 'mmx', but must be one of"), native.use("mmx"):
        pass


@pytest.mark.parametrize("keys", [1e-30, 1e-25, 1e28, 1e34])
@pytest.mark.parametrize("gradient", [1e-12, 1.0, 1e4])
def test_the_gradient_of_q_does_not_leave_the_range_of_numbers_on_its_way(keys, gradient):
    torch.manual_seed(0)
    q, k = (torch.rand(1, 40, 2, 16) + 0.1 for _ in range(2))
    v, d_o = (torch.randn(1, 40, 2, 16) for _ in range(2))
    inputs, d_o = (q, keys * k, v), gradient * d_o

    def d_q(run, dtype):
        leaf, *others = (x.to(dtype) for x in inputs)
        leaf.requires_grad_()
        return torch.autograd.grad(run(leaf, *others, causal=True), leaf, d_o.to(dtype))[0]

    exact = d_q(plain, torch.double)
    error, other = ((d_q(run, torch.float32) - exact).norm() for run in (form, plain))
    assert error <= 2 * other + torch.finfo(torch.float32).eps * exact.norm()
