"""The Triton kernels of linear attention must equal the definition, on a GPU or under Triton's interpreter."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import gpu_compiler
import linear_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import ON_GPU, assert_as_exact_as_plain, needs_triton
from torch import Tensor

from unrolled.ops.linear import LinearState, linear_attention_reference
from unrolled.ops.linear import chunked as linear_chunked
from unrolled.ops.linear import packed as linear_packed
from unrolled.ops.linear import triton as linear_triton
from unrolled.ops.linear.chunked import LOWEST_GATE, Inputs, Options, OutputGradients, Token
from unrolled.ops.linear.triton_check import example
from unrolled.ops.triton.check import Call, mistake

NAMES = ("o", "kv", "k_sum", "dq", "dk", "dv", "dlog_decay", "dkv", "dk_sum")
CAUSAL = Options(None, causal=True, normalize=True)

pytestmark = [needs_triton, pytest.mark.compilers]


Case = partial(cases.Case, B=1, G=1, dtype=torch.float32)


def make(case: cases.Case) -> tuple[Inputs, Options, OutputGradients]:
    """Inputs, options, and the gradients of the output and of the returned state."""
    if case.causal:  # the kernels then need T = S
        case = replace(case, S=case.T)
    generator = torch.Generator().manual_seed(case.seed)
    inputs = case.inputs(generator)
    q, v = inputs.q, inputs.v
    rows = len(q) if case.lengths is None else len(case.lengths)
    shapes = (*q.shape[:3], case.M), (rows, case.G, case.R, case.M), (rows, case.G, case.R)
    go, gkv, gk_sum = (torch.randn(shape, generator=generator) for shape in shapes)
    return (
        inputs,
        Options(case.offsets, case.causal, case.normalize),
        OutputGradients(go.to(v.dtype), gkv, gk_sum),
    )


def in_triton(run, case: cases.Case) -> tuple[Tensor, ...]:
    inputs, options, grads = make(case)
    *results, den = run(linear_triton.forward, inputs, options)
    assert den.is_contiguous()
    return (*results, *run(linear_triton.backward, grads, inputs, den, options))


def in_plain(case: cases.Case) -> tuple[Tensor, ...]:
    inputs, options, grads = make(case)
    *results, den = linear_packed.forward(inputs, options)
    return (*results, *linear_packed.backward(grads, inputs, den, options))


def by_definition(case: cases.Case) -> tuple[Tensor, ...]:
    inputs, options, grads = make(case)
    given = [None if x is None else x.double().requires_grad_() for x in inputs]
    q, k, v, log_decay, kv, k_sum = given
    state = LinearState(kv, k_sum) if case.stateful else None
    o, state = linear_attention_reference(
        q, k, v, causal=case.causal, log_decay=log_decay, cu_seqlens=options.cu_seqlens, state=state,
        return_state=True, normalize=case.normalize,
    )  # fmt: skip
    expected = [x for x in given if x is not None]
    pairs = [(y, g.double()) for y, g in zip((o, *state), grads, strict=True) if y.requires_grad]
    if pairs:
        ys, gs = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(ys, expected, gs, materialize_grads=True))
    else:  # a pack of no sequences
        found = iter([torch.zeros_like(x) for x in expected])
    return (o.detach(), *(x.detach() for x in state), *(None if x is None else next(found) for x in given))


def check(run, case: cases.Case) -> None:
    assert_as_exact_as_plain(NAMES, in_triton(run, case), in_plain(case), by_definition(case))


switches = st.booleans()


@settings(max_examples=16)
@given(
    T=st.integers(0, 140),
    S=st.integers(0, 140),
    B=st.integers(0, 2),
    heads=st.sampled_from([(1, 1), (1, 2), (2, 1)]),
    widths=st.tuples(st.integers(1, 36), st.integers(1, 36)),
    flags=st.tuples(switches, switches, switches, switches),
)
def test_equals_the_definition(run, T, S, B, heads, widths, flags):
    names = ("causal", "gated", "stateful", "normalize")
    sizes = dict(zip(("G", "heads_per_group", "R", "M"), (*heads, *widths), strict=True))
    check(run, Case(T=T, S=S, B=B, **sizes, **dict(zip(names, flags, strict=True))))


@settings(max_examples=6)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 5, 63, 64, 65, 90]), max_size=4).map(tuple),
    flags=st.tuples(switches, switches, switches, switches),
)
def test_packed_sequences_equal_the_definition(run, lengths, flags):
    causal, gated, stateful, normalize = flags
    check(run, Case(causal=causal, gated=gated, stateful=stateful, normalize=normalize, lengths=lengths))


@pytest.mark.parametrize(("R", "M", "causal"), [(256, 20, True), (20, 130, True), (33, 130, False)])
def test_wide_heads_are_worked_through_in_blocks(run, R, M, causal):
    check(run, Case(T=3, heads_per_group=1, R=R, M=M, causal=causal))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("causal", "gated", "normalize"),
    [(True, False, True), (True, True, True), (True, False, False), (False, False, True)],
)
def test_half_precision_is_as_exact_as_the_plain_form(run, dtype, causal, gated, normalize):
    flags = {"causal": causal, "gated": gated, "normalize": normalize}
    check(run, Case(T=130, S=130, R=20, M=70, dtype=dtype, **flags))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_half_precision_where_values_have_much_in_common(run, monkeypatch, dtype, causal):
    def shifted(case, plain_make=make):
        inputs, *others = plain_make(case)
        return (inputs._replace(v=inputs.v + 3), *others)

    monkeypatch.setattr(sys.modules[__name__], "make", shifted)
    check(run, Case(T=130, S=130, R=20, M=70, causal=causal, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_of_half_precision_are_as_exact_as_fp32(run, dtype):
    case = Case(T=130, S=130, R=20, M=20, dtype=dtype)
    results = zip(NAMES, in_triton(run, case), in_plain(case), by_definition(case), strict=True)
    for name, x, y, z in results:
        if x.dtype == torch.float32:
            allowed = 2 * (y - z).norm() + 2 * torch.finfo(torch.float32).eps * z.norm()
            assert (x - z).norm() <= allowed, name


def test_half_precision_with_wide_heads(run):
    check(run, Case(T=66, heads_per_group=1, R=130, M=140, gated=False, dtype=torch.bfloat16))


def test_states_of_fp16_may_be_larger_than_fp16(run):
    inputs, options, grads = make(Case(gated=False, heads_per_group=1, dtype=torch.float16))
    inputs = inputs._replace(k=300 * inputs.k, v=300 * inputs.v)  # sums of their products exceed 65504
    o, kv, _, den = run(linear_triton.forward, inputs, options)
    assert kv.abs().max() > torch.finfo(torch.float16).max
    expected = linear_packed.forward(inputs, options)
    torch.testing.assert_close(o, expected.o, rtol=2e-3, atol=0.5)
    found = run(linear_triton.backward, grads, inputs, den, options)
    plain = linear_packed.backward(grads, inputs, den, options)
    for x, y in zip(found, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=4e-3, atol=4e-3 * float(y.abs().max()) if y.numel() else 0)


def test_strides_and_expanded_gradients_are_honoured(run):
    base = torch.rand(1, 40, 3, 4, 2)
    q, k, v = (base[:, :, i].transpose(2, 3)[..., ::2] for i in range(3))
    log_decay = -torch.rand(1, 2, 40).transpose(1, 2)
    kv, k_sum = torch.rand(1, 2, 2, 2).mT, torch.rand(1, 2, 2).mT
    strided = Inputs(q, k, v, log_decay, kv, k_sum)
    grads = OutputGradients(
        torch.rand(1, 1, 1, 2).expand(2, 40, 6, 2), torch.ones(()).expand(2, 6, 2, 2), torch.rand(2, 2, 6).mT
    )
    contiguous = [type(tensors)(*(x.contiguous() for x in tensors)) for tensors in (strided, grads)]
    results = []
    for x, grad in ((strided, grads), contiguous):
        *outputs, den = run(linear_triton.forward, x, CAUSAL)
        results.append([*outputs, *run(linear_triton.backward, grad, x, den, CAUSAL)])
    for name, x, y in zip(NAMES, *results, strict=True):
        # For other strides, the compiler sums in another order.
        error = 1e-5 if ON_GPU else 0
        torch.testing.assert_close(x, y, rtol=error, atol=error, msg=name)


def test_no_sequence_of_a_pack_sees_another(run):
    case = Case(lengths=(3, 64, 70))
    inputs, options, grads = make(case)
    changed = Inputs(*(x.clone() for x in inputs))
    for x in changed[:4]:
        x[:, 3:67] *= 2
    results = []
    for x in (inputs, changed):
        *outputs, den = run(linear_triton.forward, x, options)
        results.append([*outputs, *run(linear_triton.backward, grads, x, den, options)])
    for name, x, y in zip(NAMES, *results, strict=True):
        parts = ([0], [2]) if name in ("kv", "k_sum", "dkv", "dk_sum") else (slice(3), slice(67, None))
        x, y = (z if z.shape[0] == 3 else z[0] for z in (x, y))
        assert all(torch.equal(x[part], y[part]) for part in parts), name
        assert not torch.equal(x, y), name


@pytest.mark.parametrize("lowest", [-torch.inf, LOWEST_GATE])
def test_a_gate_of_zero_forgets_everything_before_it(run, lowest):
    inputs, options, grads = make(Case(T=100))
    inputs.log_decay[0, 70] = lowest
    o, kv, k_sum, den = run(linear_triton.forward, inputs, options)
    late = Inputs(*(x[:, 70:] for x in inputs[:4]), None, None)
    fresh, *fresh_end, _ = linear_chunked.forward(late, True, True)
    torch.testing.assert_close(o[:, 70:], fresh, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close((kv, k_sum), tuple(fresh_end), rtol=1e-6, atol=1e-6)
    found = run(linear_triton.backward, grads, inputs, den, options)
    assert all(x.isfinite().all() for x in found)
    # A difference of two sums, which the compiler may reorder.
    allowed = 1e-6 if ON_GPU and lowest == LOWEST_GATE else 0
    assert found[3][0, 70].abs() <= allowed


@pytest.mark.parametrize("causal", [True, False])
def test_nothing_to_attend_to_gives_zero_with_zero_gradient(run, causal):
    inputs, options, (go, gkv, gk_sum) = make(Case(T=6, B=2, gated=False, stateful=False, causal=causal))
    inputs.k[0], inputs.k[1, 0] = 0, 1e-20
    inputs.q[1, 0] = 1e-20  # a divisor that is not 0, yet below the least normal number
    nothing = torch.zeros(2, 6, dtype=torch.bool)
    nothing[0], nothing[1, 0] = True, causal
    o, *_, den = run(linear_triton.forward, inputs, options)
    dq, dk, *_ = run(linear_triton.backward, OutputGradients(go, 0 * gkv, 0 * gk_sum), inputs, den, options)
    assert (o[nothing] == 0).all()
    assert (dq[nothing] == 0).all()
    assert (dk[0] == 0).all()
    assert all(x.isfinite().all() for x in (o, dq, dk))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("heads", "R", "M"), [((1, 1), 5, 7), ((2, 3), 33, 65), ((1, 20), 5, 7)])
def test_step_is_the_recurrence_and_leaves_the_state_alone(run, heads, R, M, gated, normalize):
    G, P = heads
    case = Case(T=1, S=1, B=2, G=G, heads_per_group=P, R=R, M=M, gated=gated)
    (q, k, v, log_decay, kv, k_sum), *_ = make(case)
    token = Token(q[:, 0], k[:, 0], v[:, 0], kv, k_sum, None if log_decay is None else log_decay[:, 0])
    before = kv.clone(), k_sum.clone()
    found = run(linear_triton.step, token, normalize)
    assert all(map(torch.equal, (kv, k_sum), before))
    plain = linear_chunked.step(token, normalize)
    exact = linear_chunked.step(Token(*(None if x is None else x.double() for x in token)), normalize)
    for x, y, z in zip(found, plain, exact, strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        ulp = torch.finfo(torch.float32).eps * (1 + z.abs().max())
        assert (x - z).abs().max() <= 2 * (y - z).abs().max() + 4 * ulp


def far_apart(backward: bool) -> tuple[Tensor, ...]:
    """Results of inputs whose heads begin 2^30 numbers apart, the third of them beyond 32 bits, and beside each other."""
    fill, torch.utils.deterministic.fill_uninitialized_memory = (
        torch.utils.deterministic.fill_uninitialized_memory,
        False,  # memory that nobody touches is never allotted
    )
    device = "cuda" if ON_GPU else "cpu"
    near = [torch.rand(1, 3, 3, 4, device=device).half() + 0.5 for _ in range(3)]
    gates, far = -torch.rand(1, 3, 3, device=device).half(), []
    for x in (*near, gates):
        memory = torch.empty(2**31 + 12, dtype=torch.float16, device=device)
        strides = (12, 4, 2**30, 1) if x.dim() == 4 else (3, 1, 2**30)
        far.append(memory.as_strided(x.shape, strides).copy_(x))
    torch.utils.deterministic.fill_uninitialized_memory = fill
    state = torch.rand(1, 3, 4, 4, device=device), torch.rand(1, 3, 4, device=device)
    results = []
    for inputs in (Inputs(*far, *state), Inputs(*near, gates, *state)):
        *outputs, den = linear_triton.forward(inputs, CAUSAL)
        if backward:
            outputs += linear_triton.backward(OutputGradients(inputs.v, *state), inputs, den, CAUSAL)
        else:
            token = (x[:, 0] for x in inputs[:3])
            outputs += linear_triton.step(Token(*token, *state, inputs.log_decay[:, 0]), True)
        results.append(torch.cat([x.flatten().float().cpu() for x in outputs]))
    return tuple(results)


@pytest.mark.parametrize("backward", [False, True])
def test_heads_may_be_more_than_2_31_numbers_apart(backward):
    # In a process of its own: what reads at a wrong address takes its process along.
    folders = [*map(str, Path(__file__).parents[:2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    if not ON_GPU:
        environment["TRITON_INTERPRET"] = "1"
    script = (
        f"import torch, test_linear_triton as t; a, b = t.far_apart({backward}); assert torch.equal(a, b)"
    )
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr[-2000:]


def test_every_run_gives_the_same_bits(run):
    case = Case(T=66)
    for name, x, y in zip(NAMES, in_triton(run, case), in_triton(run, case), strict=True):
        assert torch.equal(x, y), name


def test_what_the_kernels_cannot_do_is_not_supported(run, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    q, v, wide = torch.rand(1, 3, 2, 5), torch.rand(1, 3, 2, 7), torch.rand(1, 3, 2, 257)
    assert not linear_triton.supports(q, v)  # on a CPU

    assert run(linear_triton.supports, q, v)
    assert not run(linear_triton.supports, wide, v)
    assert not run(linear_triton.supports, q.double(), v.double())


KERNELS = {
    "forward": linear_triton._forward,
    "backward": linear_triton._backward,
    "step": linear_triton._step,
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KERNELS)
def test_the_check_at_first_use_passes_correct_kernels(run, kind, causal):
    causal = causal or kind == "step"
    call = Call(
        "linear attention", kind, torch.device("cpu"), torch.float32, (5, 7), False, (2, causal, True)
    )
    assert mistake(call, partial(run, KERNELS[kind]), example) is None


def test_importing_it_does_not_import_triton():
    script = "import sys; import unrolled.ops.linear.triton; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


COMPILE = """
from unrolled.ops.linear import triton as linear_triton
from unrolled.ops.linear.chunked import Inputs, Options, OutputGradients, Token

q, k, v = (torch.empty(1, 128, heads, {width}, dtype=torch.{dtype}) for heads in (4, 2, 2))
log_decay, kv, k_sum = torch.empty(1, 128, 2), torch.empty(1, 2, {width}, {width}), torch.empty(1, 2, {width})
inputs = Inputs(q, k, v, log_decay, kv, k_sum)
options = Options(None, causal=True, normalize=True)
o, kv, k_sum, den = linear_triton.forward(inputs, options)
linear_triton.backward(OutputGradients(o, kv, k_sum), inputs, den, options)
linear_triton.step(Token(q[:, 0], k[:, 0], v[:, 0], kv, k_sum, log_decay[:, 0]), True)
"""


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "spilled"),
    [
        (80, "float32", 256, 320),
        (90, "float32", 64, 320),
        (90, "bfloat16", 64, 0),
        (90, "bfloat16", 128, 48),
        (100, "float16", 128, 256),
        (120, "float32", 64, 96),
    ],
)
def test_it_compiles_for_a_gpu_that_is_not_there(tmp_path, capability, dtype, width, spilled):
    found = gpu_compiler.needs(COMPILE.format(dtype=dtype, width=width), capability, tmp_path)
    assert len(found) == 8
    gpu_compiler.assert_fits(found, spilled)
