"""Linear attention: every form must equal the definition, in outputs and gradients."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import Case, assert_error_at_most_twice_that_of, outputs_and_gradients

from unrolled.ops import native
from unrolled.ops.feature_maps import Elu, make_feature_map
from unrolled.ops.feature_maps.elementwise import ELEMENTWISE
from unrolled.ops.linear import (
    LinearState,
    linear_attention,
    linear_attention_reference,
    linear_attention_step,
)


def assert_agree(form, other, case: Case, tolerance: float = 1e-12) -> None:
    """Require equal outputs, states and gradients."""
    pairs = zip(outputs_and_gradients(form, case), outputs_and_gradients(other, case), strict=True)
    for x, y in pairs:
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        scale = y.abs().amax() if y.numel() else 0
        torch.testing.assert_close(x, y, rtol=0, atol=float(tolerance * (1 + scale)))


switches = st.booleans()


@settings(max_examples=60)
@given(
    T=st.integers(0, 140),
    S=st.integers(0, 140),
    B=st.integers(0, 2),
    heads=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    widths=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    flags=st.tuples(switches, switches, switches, switches, switches),
    seed=st.integers(0, 9),
)
def test_equals_the_definition(T, S, B, heads, widths, flags, seed):
    causal, gated, padded, stateful, normalize = flags
    case = Case(T, S, B, *heads, *widths, causal, gated, padded, stateful, normalize, seed=seed)
    assert_agree(linear_attention, linear_attention_reference, case)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 90), max_size=6).map(tuple),
    flags=st.tuples(switches, switches, switches, switches, switches),
)
def test_packed_sequences_equal_the_definition(lengths, flags):
    names = ("causal", "gated", "padded", "stateful", "normalize")
    case = Case(lengths=lengths, **dict(zip(names, flags, strict=True)))
    assert_agree(linear_attention, linear_attention_reference, case)


@pytest.mark.parametrize("M", [64, 65, 130])
def test_wide_values_change_the_chunk_not_the_result(M):
    case = Case(T=150, S=150, M=M)
    assert_agree(linear_attention, linear_attention_reference, case)


@pytest.mark.parametrize("cut", [0, 1, 63, 64, 65, 100])
def test_split_anywhere_equals_one_run(cut):
    def in_two_runs(q, k, v, *, log_decay, state, causal, normalize, **_):
        outs = []
        for part in (slice(0, cut), slice(cut, None)):
            options = {"causal": causal, "normalize": normalize, "log_decay": log_decay[:, part]}
            tokens = (x[:, part] for x in (q, k, v))
            o, state = linear_attention(*tokens, **options, state=state, return_state=True)
            outs.append(o)
        return torch.cat(outs, 1), state

    case = Case(T=100, S=100)
    assert_agree(in_two_runs, linear_attention, case)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_steps_equal_one_run(gated, normalize):
    def by_steps(q, k, v, *, log_decay, state, normalize, **_):
        outs = []
        for t in range(q.shape[1]):
            options = {"log_decay": None if log_decay is None else log_decay[:, t], "normalize": normalize}
            o, state = linear_attention_step(q[:, t], k[:, t], v[:, t], state, **options)
            outs.append(o)
        return torch.stack(outs, 1), state

    case = Case(T=70, S=70, gated=gated, normalize=normalize)
    assert_agree(by_steps, linear_attention, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_error_is_at_most_twice_that_of_the_definition_in_the_same_type(dtype, causal, gated):
    case = Case(T=300, S=300, R=16, M=16, causal=causal, gated=gated, dtype=dtype)
    form = partial(linear_attention, backend="plain")
    assert_error_at_most_twice_that_of([linear_attention_reference], form, case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_survives_65536_tokens(dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 65_536, 1, 8, generator=generator).to(dtype) for _ in range(3))
    phi = Elu(8)
    found = linear_attention(phi.phi_q(q), phi.phi_k(k), v, causal=True)
    exact = linear_attention(phi.phi_q(q.double()), phi.phi_k(k.double()), v.double(), causal=True)
    assert found.isfinite().all()
    # Only the output is rounded: half a unit in the last place of each value, and fp32 sums below it.
    half_ulp = torch.finfo(dtype).eps / 2
    error = (found.double() - exact).abs()
    allowed = half_ulp * (exact.abs() * 1.01 + torch.finfo(dtype).smallest_normal) + 2e-6
    assert (error <= allowed).all()


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize(
    ("T", "S", "padded", "causal"), [(30, 30, True, True), (9, 20, False, True), (20, 9, True, False)]
)
def test_a_feature_map_is_that_of_the_features(T, S, name, padded, causal):
    """The map is applied by autograd in the one, by the operator in the other."""

    def by_features(q, k, v, *, feature_map, **options):
        return linear_attention(feature_map.phi_q(q), feature_map.phi_k(k), v, **options)

    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 2**-7)):
        case = Case(T, S, R=6, causal=causal, padded=padded, dtype=dtype, feature_map=name)
        for backend in ("plain", None):
            form = partial(linear_attention, backend=backend)
            assert_agree(form, by_features, case, tolerance)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_with_a_feature_map_only_what_was_given_is_kept_for_the_backward_pass(name):
    q, k, v = (torch.randn(1, 64, 2, 8, requires_grad=True) for _ in range(3))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        linear_attention(q, k, v, causal=True, feature_map=make_feature_map(name, 8))
    given = {x.data_ptr() for x in (q, k, v)}
    assert [x.shape for x in kept if x.data_ptr() not in given] == [(1, 64, 2, 1)], "the divisor"


def test_a_map_that_is_not_elementwise_is_applied_before():
    q, k, v = (torch.randn(2, 9, 2, 3) for _ in range(3))
    phi = make_feature_map("taylor", 3)
    mask = torch.rand(2, 9) < 0.4
    found = linear_attention(q, k, v, feature_map=phi, key_padding_mask=mask)
    expected = linear_attention(phi.phi_q(q), phi.phi_k(k), v, key_padding_mask=mask)
    assert torch.equal(found, expected)


def test_wrong_feature_maps_are_refused():
    x = torch.rand(1, 5, 1, 2)
    with pytest.raises(ValueError, match="feature_map takes heads 3 wide, but q and k are 2"):
        linear_attention(x, x, x, feature_map=Elu(3))
    with pytest.raises(ValueError, match="feature_map is 'elu', but must be a FeatureMap or None"):
        linear_attention(x, x, x, feature_map="elu")


@pytest.mark.parametrize("causal", [True, False])
def test_scale_of_the_features_does_not_matter(causal):
    case = Case(stateful=False, causal=causal, dtype=torch.float32)
    o, *_ = outputs_and_gradients(linear_attention, case)
    scaled, *_ = outputs_and_gradients(linear_attention, case, inputs_scale=1e-4)
    torch.testing.assert_close(scaled, o, rtol=2e-5, atol=1e-6)


def test_nothing_to_attend_to_gives_zero_with_zero_gradient():
    q, k, v = (torch.rand(2, 6, 1, 3).requires_grad_() for _ in range(3))
    padding = torch.tensor([[True] * 6, [True, True] + [False] * 4])
    o = linear_attention(q, k, v, causal=True, key_padding_mask=padding)
    assert (o[0] == 0).all()
    assert (o[1, :2] == 0).all()
    o.sum().backward()
    for x in (q, k, v):
        assert (x.grad[0] == 0).all()
        assert (x.grad[1, :2] == 0).all()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_padding_is_as_if_it_were_not_there(gated, causal):
    # Not compared with the reference, which masks by the same lines: the padded tokens are really taken out.
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.rand(1, 90, 2, 3, dtype=torch.float64, generator=generator) for _ in range(3))
    gates = -torch.rand(1, 90, 2, dtype=torch.float64, generator=generator) if gated else None
    padding = torch.rand(1, 90, generator=generator) < 0.4
    real = ~padding[0]
    if gates is not None:
        gates[padding] = 3  # above 0, which only a padded token may have
    inputs = [x.requires_grad_() for x in (q, k, v, gates) if x is not None]

    def run(keep, mask):
        gates_kept = None if gates is None else gates[:, keep]
        o, state = linear_attention(
            q[:, keep], k[:, keep], v[:, keep],
            causal=causal, log_decay=gates_kept, key_padding_mask=mask, return_state=True,
        )  # fmt: skip
        o = o if mask is None else o[:, real]
        loss = o.square().sum() + state.kv.square().sum() + state.k_sum.square().sum()
        return [o, *state, *torch.autograd.grad(loss, inputs)]

    for x, y in zip(run(slice(None), padding), run(real, None), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_a_gate_of_zero_forgets_everything_before_it():
    q, k, v = (torch.rand(1, 100, 1, 3, dtype=torch.float64) for _ in range(3))
    log_decay = torch.zeros(1, 100, 1, dtype=torch.float64)
    log_decay[0, 70] = -torch.inf
    log_decay.requires_grad_()
    o = linear_attention(q, k, v, causal=True, log_decay=log_decay)
    fresh = linear_attention(q[:, 70:], k[:, 70:], v[:, 70:], causal=True)
    torch.testing.assert_close(o[:, 70:], fresh, rtol=1e-13, atol=0)
    o.sum().backward()
    assert log_decay.grad.isfinite().all()


def test_strong_decay_does_not_overflow():
    # Over a chunk these gates sum to -6400: exp(b_i) exp(-b_j), instead of exp(b_i - b_j), would be inf * 0.
    q, k, v = (torch.rand(1, 64, 1, 3).requires_grad_() for _ in range(3))
    o = linear_attention(q, k, v, causal=True, log_decay=torch.full((1, 64, 1), -100.0))
    o.sum().backward()
    torch.testing.assert_close(o, v, rtol=1e-6, atol=1e-6)
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_autocast_does_not_reach_the_sums():
    q, k, v = (torch.rand(1, 200, 1, 8) for _ in range(3))
    state = LinearState(torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, autocast_state = linear_attention(q, k, v, causal=True, return_state=True)
        step, _ = linear_attention_step(q[:, 0], k[:, 0], v[:, 0], state)
    expected, expected_state = linear_attention(q, k, v, causal=True, return_state=True)
    assert torch.equal(o, expected)
    assert torch.equal(autocast_state.kv, expected_state.kv)
    assert torch.equal(step, linear_attention_step(q[:, 0], k[:, 0], v[:, 0], state)[0])


@pytest.mark.parametrize(("causal", "phi"), [(True, None), (False, None), (True, Elu(2))])
def test_gradients_of_any_order_are_right(causal, phi):
    x = [torch.rand(1, 4, 2, 2, dtype=torch.float64).requires_grad_() for _ in range(3)]
    gates = (-torch.rand(1, 4, 2, dtype=torch.float64)).requires_grad_()
    kv = torch.rand(1, 2, 2, 2, dtype=torch.float64).requires_grad_()
    k_sum = torch.rand(1, 2, 2, dtype=torch.float64).requires_grad_()

    def form(q, k, v, gates, kv, k_sum):
        options = {"causal": causal, "log_decay": gates, "state": LinearState(kv, k_sum)}
        o, state = linear_attention(q, k, v, return_state=True, feature_map=phi, **options)
        return o, *state

    assert torch.autograd.gradcheck(form, (*x, gates, kv, k_sum))
    assert torch.autograd.gradgradcheck(form, (*x, gates, kv, k_sum))


# torch.func.jvp itself goes through what torch has deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_functional_transforms_agree_with_the_definition():
    q, k, v, tangent = (torch.rand(1, 70, 1, 2, dtype=torch.float64) for _ in range(4))
    gates = -torch.rand(1, 70, 1, dtype=torch.float64)

    def of(form):
        return lambda q: form(q, k, v, causal=True, log_decay=gates).sum()

    for transform in (
        lambda f: torch.func.jvp(f, (q,), (tangent,))[1],
        lambda f: torch.func.grad(f)(q),
        lambda f: torch.func.vmap(torch.func.grad(f))(torch.stack([q, 2 * q])),
    ):
        found, expected = transform(of(linear_attention)), transform(of(linear_attention_reference))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_is_a_well_behaved_torch_operator(causal, packed):
    B = 1 if packed else 2
    q, k, v = (torch.rand(B, 9, 2, 3).requires_grad_() for _ in range(3))
    gates = (-torch.rand(B, 9, 2)).requires_grad_()
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32) if packed else None
    kv, k_sum = torch.rand(2, 2, 3, 3).requires_grad_(), torch.rand(2, 2, 3).requires_grad_()
    arguments = (q, k, v, gates, kv, k_sum, cu_seqlens, causal, True, "elu" if packed else None, None)
    torch.library.opcheck(torch.ops.unrolled.linear_attention.default, arguments)


@pytest.mark.slow
def test_an_eager_call_does_not_import_the_compiler():
    """That takes seconds, in which a program waits for its first output."""
    script = """
import sys, torch
from unrolled import linear_attention
q, k, v = (torch.rand(1, 5, 2, 4).requires_grad_() for _ in range(3))
linear_attention(q, k, v, causal=True).sum().backward()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_graph_exported_without_gradients_trains_its_gates():
    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = torch.nn.Linear(4, 2)

        def forward(self, q, k, v):
            return linear_attention(q, k, v, causal=True, log_decay=-self.gate(q[..., 0, :]).sigmoid())

    given, module = [torch.rand(1, 20, 2, 4) for _ in range(3)], Gated()
    with torch.no_grad():
        exported = torch.export.export(module, tuple(given)).module()
    found, expected = (
        torch.autograd.grad(f(*given).square().sum(), list(f.parameters())) for f in (exported, module)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_constant_gates_have_no_gradient_at_all():
    q, k, v = (torch.rand(1, 20, 2, 4).requires_grad_() for _ in range(3))
    gates = -torch.rand(1, 20, 2)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        with torch.autograd.detect_anomaly(check_nan=True):
            linear_attention(q, k, v, causal=True, log_decay=gates).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_compiles_with_everything_at_once_gradients_included():
    case = Case(T=70, S=70, B=2, padded=True, dtype=torch.float32, feature_map="elu")
    compiled = torch.compile(linear_attention, fullgraph=True, backend="aot_eager")
    assert_agree(compiled, linear_attention, case, tolerance=1e-6)


def test_wrong_offsets_are_refused_when_compiled_too():
    compiled = torch.compile(linear_attention, fullgraph=True, backend="aot_eager")
    q, k, v = (torch.rand(1, 5, 1, 2) for _ in range(3))
    with pytest.raises(ValueError, match="but must rise from 0 to T = 5"):
        compiled(q, k, v, causal=True, cu_seqlens=torch.tensor([0, 4, 2, 5], dtype=torch.int32))


def test_states_and_their_gradients_hold_no_more_memory_than_they_say():
    q, k, v = (torch.rand(1, 1000, 1, 4) for _ in range(3))
    state = LinearState(torch.rand(1, 1, 4, 4).requires_grad_(), torch.rand(1, 1, 4).requires_grad_())
    o, after = linear_attention(q, k, v, causal=True, state=state, return_state=True)
    o.sum().backward()
    for x in (*after, state.kv.grad, state.k_sum.grad):
        assert x.untyped_storage().nbytes() == x.nbytes


def test_a_divisor_too_small_to_divide_by_counts_as_nothing():
    q, k = torch.full((1, 2, 1, 1), 1e-20), torch.full((1, 2, 1, 1), 1e-20)  # 1e-40 is denormal in fp32
    assert (linear_attention(q, k, torch.rand(1, 2, 1, 1)) == 0).all()


def test_a_gate_below_the_lowest_forgets_like_it():
    q, k, v = (torch.rand(1, 9, 1, 3) for _ in range(3))
    found = [
        linear_attention(q, k, v, causal=True, log_decay=torch.full((1, 9, 1), gate))
        for gate in (-torch.inf, -1e30, -2e4)
    ]
    assert all(torch.equal(x, found[0]) for x in found)


def inputs(**changes):
    found = {"q": torch.rand(2, 5, 4, 3), "k": torch.rand(2, 5, 2, 3), "v": torch.rand(2, 5, 2, 6)}
    return found | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_decay": torch.zeros(2, 5)}, r"log_decay is torch.float32 of shape \[2, 5\], .* must be .*\[2, 5, 2\]"),
        ({"log_decay": torch.full((2, 5, 2), 0.5)}, r"log_decay is up to 0.5, but must be at most 0"),
        ({"state": LinearState(torch.zeros(2, 2, 3, 5), torch.zeros(2, 2, 3))}, r"state.kv is .* but must be torch.float32 \[2, 2, 3, 6\]"),
        ({"state": LinearState(torch.zeros(2, 2, 3, 6).double(), torch.zeros(2, 2, 3))}, r"state.kv is torch.float64 of .* but must be torch.float32"),
        ({"backend": "fortran"}, r"backend is 'fortran', but must be None .* plain"),
    ],
)  # fmt: skip
def test_wrong_input_gets_one_clear_sentence(changes, message):
    with pytest.raises(ValueError, match=message):
        linear_attention(**inputs(**changes))


@pytest.mark.parametrize("name", ["elu", "relu", "squared_relu", "polynomial"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_step_maps_its_features_itself(name, dtype):
    torch.manual_seed(0)
    phi = make_feature_map(name, 5)
    q, k, v = (torch.randn(2, heads, 5).to(dtype) * 9 for heads in (4, 2, 2))
    q[0, 0, 0], k[1, 1, 1] = -40.0, 0.0
    kept = torch.promote_types(dtype, torch.float32)
    before = torch.rand(2, 2, phi.feature_dim, 5, dtype=kept)
    state = LinearState(before, before.sum(-1))
    o, after = linear_attention_step(q, k, v, state, feature_map=phi)
    expected, expected_after = linear_attention_step(phi.phi_q(q), phi.phi_k(k), v, state)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(tuple(after), tuple(expected_after), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["elu", "relu", "squared_relu"])
def test_a_step_does_not_map_nan_to_a_number(name):
    state = LinearState(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4))
    q, v = torch.ones(1, 1, 4), torch.ones(1, 1, 4)
    k = torch.tensor([[[1.0, torch.nan, -1.0, 2.0]]])
    o, after = linear_attention_step(q, k, v, state, feature_map=make_feature_map(name, 4))
    assert o.isnan().all()
    assert after.k_sum.isnan().tolist() == [[[False, True, False, False]]]


def test_a_feature_map_of_another_width_is_refused():
    state = LinearState(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4))
    x = torch.ones(1, 1, 4)
    with pytest.raises(ValueError, match="feature_map takes heads 3 wide"):
        linear_attention_step(x, x, x, state, feature_map=Elu(3))


@pytest.mark.parametrize("exponent", [-60.0, -70.0, -72.0, -80.0, -85.0, -87.0, -100.0])
@pytest.mark.parametrize("backend", ["plain", *(["native"] if native.available() else [])])
def test_a_divisor_next_to_nothing_leaves_gradients_finite(exponent, backend):
    q = torch.tensor([[[[1.0, 0.0]]]], requires_grad=True)
    k = torch.tensor([[[[exponent, 0.0]]]], requires_grad=True)
    v = torch.tensor([[[[3.0, 40.0]]]], requires_grad=True)
    o = linear_attention(q, k.exp(), v, backend=backend)
    assert torch.isfinite(torch.stack(torch.autograd.grad(o.square().sum(), [q, k]))).all()
    expected = v.detach() if exponent > -71.4 else torch.zeros_like(v)
    torch.testing.assert_close(o, expected)


def test_a_map_that_derives_from_another_is_applied_itself():
    class Shifted(Elu):
        def phi(self, x):
            return 2 + super().phi(x)

    phi = Shifted(3)
    q, k, v = (torch.randn(2, 9, 2, 3) for _ in range(3))
    found = linear_attention(q, k, v, feature_map=phi)
    assert torch.equal(found, linear_attention(phi.phi_q(q), phi.phi_k(k), v))
