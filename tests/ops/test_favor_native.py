"""Linear attention of random features that the C++ kernels make, on every instruction set of this machine."""

from itertools import pairwise

import exactness
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import assert_nan_stays_in_its_head

from unrolled.attention.performer import FavorMap, PerformerAttention, favor_attention
from unrolled.ops import favor, native
from unrolled.ops.dispatch import prefer
from unrolled.ops.favor import FavorState
from unrolled.ops.random_features import Projection

if not native.available():
    pytest.skip(str(native.missing()), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("instruction_set", "poisoned_memory")

NAMES = ["o", "kv", "k_sum", "dq", "dk", "dv", "dkv", "dk_sum"]


def feature_map(D=9, R=20, features="positive", heads=1):
    return FavorMap(D, features, Projection(heads, R, D, "orthogonal", 0))


def inputs(sizes, dtype, seed):
    """q, k, v, kv and k_sum. The products of q and k are small, so that the definition needs no shift."""
    (B, T, S, H, G, D, M, R), generator = sizes, torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    tokens = [x.to(dtype) for x in (normal(B, T, H, D) / 2, normal(B, S, G, D) / 2, normal(B, S, G, M))]
    return [*tokens, normal(B, G, R, M), normal(B, G, R).abs() + 0.1]


def log_scale(kv):
    """The maximum before the first key: not 0, so that an error with it would be seen."""
    return torch.linspace(-1, 0.5, kv.shape[0] * kv.shape[1]).view(kv.shape[:2]).to(kv)


def definition(q, k, v, kv, k_sum, phi, causal, key_padding_mask):
    """The sums over all pairs with nothing shifted; in half precision it computes in fp32."""
    dtype, share = v.dtype, q.shape[2] // k.shape[2]
    q, k, v = (x.to(kv.dtype) for x in (q, k, v))
    scale = log_scale(kv).exp().unsqueeze(-1)
    kv, k_sum = kv * scale.unsqueeze(-1), k_sum * scale
    q, k = (phi(x).shifted(torch.zeros_like(x[..., 0])) for x in (q, k))
    if key_padding_mask is not None:
        k = k * ~key_padding_mask[:, :, None, None]
    weights = torch.einsum("bthr,bshr->bhts", q, k.repeat_interleave(share, 2))
    weights = weights.tril() if causal else weights
    o = torch.einsum("bhts,bshm->bthm", weights, v.repeat_interleave(share, 2))
    o = o + torch.einsum("bthr,bhrm->bthm", q, kv.repeat_interleave(share, 1))
    divisor = weights.sum(-1).mT + torch.einsum("bthr,bhr->bth", q, k_sum.repeat_interleave(share, 1))
    kv, k_sum = kv + torch.einsum("bsgr,bsgm->bgrm", k, v), k_sum + k.sum(1)
    return (o / divisor.unsqueeze(-1)).to(dtype), kv, k_sum


def operation(q, k, v, kv, k_sum, phi, causal, key_padding_mask):
    """The same by shifted features, with the scale multiplied into the state that it returns."""
    state, options = FavorState(kv, k_sum, log_scale(kv)), {"key_padding_mask": key_padding_mask}
    o, after = favor_attention(q, k, v, phi, causal=causal, state=state, **options)
    scale = after.log_scale.exp().unsqueeze(-1)
    return o, after.kv * scale.unsqueeze(-1), after.k_sum * scale


def plain(*given):
    with prefer("plain"):
        return operation(*given)


def results(form, given, phi, exact, *options):
    """Outputs, and the gradients of a sum of all that weighs every element differently."""
    given = [(x.double() if exact else x).detach().requires_grad_() for x in given]
    outputs = form(*given, phi.double() if exact else phi.float(), *options)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.double) for x in outputs]
    loss = sum((x.double() * w).sum() for x, w in zip(outputs, weights, strict=True))
    return [*(x.detach() for x in outputs), *torch.autograd.grad(loss, given)]


def assert_as_exact(draw, phi, causal, mask=None, draws=4):
    """Our errors are at most twice those of the definition in fp32.

    Four roundings of a result are allowed in any case, since an exponent of 8 is rounded before it is shifted;
    and the square root of D of them, since an exponent is a sum of D products. How torch sums them depends on
    the number of features: with five, its error is only half of that with sixteen.
    """

    def form(function):
        return lambda given, exact: results(function, given, phi, exact, causal, mask)

    tokens = draw(0)[:3]
    assert favor.supports(*tokens, causal)
    expected = form(definition)
    exactness.assert_as_exact(
        NAMES,
        draw,
        draws,
        definition=expected,
        ours=form(operation),
        others=[expected],
        least=max(4, tokens[0].shape[-1] ** 0.5),
    )


widths = st.sampled_from([1, 3, 8, 16, 17, 33, 64])


@settings(max_examples=25)
@given(
    T=st.integers(1, 70),
    S=st.integers(0, 70),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)]),
    D=widths,
    M=widths,
    R=st.sampled_from([1, 5, 16, 40, 100]),
    features=st.sampled_from(["positive", "hyperbolic"]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_is_as_exact_as_features_in_memory(T, S, heads, D, M, R, features, flags, dtype):
    (H, G), (causal, padded, per_head) = heads, flags
    S, B = (T if causal else S), exactness.rows_for(D, M)
    phi = feature_map(D, R, features, G if per_head else 1)
    mask = torch.rand(B, S, generator=torch.Generator().manual_seed(0)) < 0.3 if padded else None
    sizes = (B, T, S, H, G, D, M, phi.feature_dim)
    assert_as_exact(lambda seed: inputs(sizes, dtype, seed), phi, causal, mask, draws=1)


@pytest.mark.parametrize("causal", [True, False])
def test_wide_heads(causal):
    phi = feature_map(64, 256)
    assert_as_exact(lambda seed: inputs((1, 150, 150, 2, 1, 64, 64, 256), torch.float32, seed), phi, causal)


@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_are_sequences_by_themselves(causal):
    offsets = [0, 40, 41, 41, 100]
    q, k, v, *_ = inputs((1, 100, 100, 4, 2, 9, 20, 20), torch.float32, 0)
    k = k * torch.linspace(1, 6, 100).view(1, 100, 1, 1)  # so that every sequence has another maximum
    phi, given = feature_map(), [x.requires_grad_() for x in (q, k, v)]
    pack = torch.tensor(offsets, dtype=torch.int32)
    found, _ = favor_attention(*given, phi, causal=causal, cu_seqlens=pack)
    parts = [
        favor_attention(*(x[:, a:b] for x in given), phi, causal=causal)[0] for a, b in pairwise(offsets)
    ]
    expected = torch.cat(parts, 1)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.autograd.grad((o * weights).sum(), given) for o in (found, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("causal", [True, False])
def test_threads_share_heads_and_then_segments_of_the_sequence(threads, causal):
    threads(3)
    for H, G in ((4, 2), (1, 1)):
        sizes = (1, 300, 300, H, G, 17, 33, 40)
        assert_as_exact(
            lambda seed, sizes=sizes: inputs(sizes, torch.float32, seed), feature_map(17, 40), causal
        )


def test_a_later_key_changes_no_earlier_output():
    q, k, v, *_ = inputs((1, 70, 70, 2, 2, 9, 20, 20), torch.float32, 0)
    changed = k.clone()
    changed[:, 50] *= 40
    phi = feature_map()
    before, after = (favor_attention(q, x, v, phi, causal=True)[0] for x in (k, changed))
    assert torch.equal(before[:, :50], after[:, :50])
    assert not torch.equal(before[:, 50:], after[:, 50:])


@pytest.mark.parametrize("R", [3, 9, 20])
def test_nan_in_one_head_reaches_no_other(R):
    q, k, v, *_ = inputs((1, 40, 40, 2, 2, 9, 5, R), torch.float32, 0)
    phi = feature_map(R=R)
    assert_nan_stays_in_its_head(lambda q, k, v: favor_attention(q, k, v, phi, causal=True)[0], q, k, v)


def test_reads_any_strides():
    q, k, v, *_ = inputs((2, 50, 50, 4, 4, 16, 32, 20), torch.float32, 0)
    phi = feature_map(16)
    expected, _ = favor_attention(q, k, v, phi, causal=True)
    for move in (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.mT.contiguous().mT):
        found, _ = favor_attention(*map(move, (q, k, v)), phi, causal=True)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["native", "plain"])
@pytest.mark.parametrize("size", [0.3, 3.0])
def test_a_state_continues_with_smaller_and_larger_keys(causal, backend, size):
    q, k, v, *_ = inputs((2, 40, 40, 2, 2, 9, 20, 20), torch.float32, 0)
    k[:, 20:] *= size
    phi = feature_map()
    with prefer(backend):
        _, state = favor_attention(q[:, :0], k[:, :20], v[:, :20], phi)
        o, after = favor_attention(q[:, 20:], k[:, 20:], v[:, 20:], phi, causal=causal, state=state)
        whole, end = favor_attention(q, k, v, phi, causal=causal)
    torch.testing.assert_close(o, whole[:, 20:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after, end, rtol=1e-4, atol=1e-5)


def test_what_it_refuses():
    q, k, v, *_ = inputs((1, 12, 12, 2, 2, 9, 20, 20), torch.float32, 0)
    phi, pack = feature_map(), torch.tensor([0, 4, 12], dtype=torch.int32)
    _, state = favor_attention(q, k, v, phi)
    with pytest.raises(ValueError, match="state and cu_seqlens are both given"):
        favor_attention(q, k, v, phi, causal=True, cu_seqlens=pack, state=state)
    with pytest.raises(ValueError, match=r"rows .* must be \[1, R, 9\] or \[2, R, 9\]"):
        favor.favor_attention(q, k, v, torch.randn(1, 20, 8))
    with pytest.raises(ValueError, match="log_scale is"):
        favor_attention(q, k, v, phi, state=state._replace(log_scale=torch.zeros(1)))
    with pytest.raises(ValueError, match="q has shape"):
        favor_attention(q[0], k, v, phi)


def test_features_that_are_observed_or_learned_are_made_by_pytorch():
    q, k, v, *_ = inputs((1, 12, 12, 2, 2, 9, 20, 20), torch.float32, 0)
    phi, seen = feature_map(), []
    handle = phi.register_forward_hook(lambda module, given, features: seen.append(features))
    observed, _ = favor_attention(q, k, v, phi)
    handle.remove()
    assert len(seen) == 2
    torch.testing.assert_close(observed, favor_attention(q, k, v, phi)[0])
    rows = phi.projection.weight.requires_grad_()
    favor_attention(q, k, v, phi)[0].sum().backward()
    assert rows.grad.abs().sum() > 0


def test_keys_of_another_type_are_promoted():
    q, k, v, *_ = inputs((1, 12, 12, 2, 2, 9, 20, 20), torch.float32, 0)
    phi = feature_map()
    found, _ = favor_attention(q, k.double(), v, phi)
    torch.testing.assert_close(found, favor_attention(q, k, v, phi)[0])
    half, _ = favor_attention(q, k.bfloat16(), v, phi)
    torch.testing.assert_close(half, favor_attention(q, k.bfloat16().float(), v, phi)[0])


def test_features_are_not_stored():
    """Autograd keeps the inputs and outputs, but nothing that is R wide for every token."""
    saved = []
    q, k, v = (x.requires_grad_() for x in inputs((1, 300, 300, 2, 2, 8, 8, 256), torch.float32, 0)[:3])
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        favor_attention(q, k, v, feature_map(8, 256), causal=True)
    assert max(saved) <= q.numel()


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_a_sound_torch_operator(causal):
    q, k, v, kv, k_sum = (x.requires_grad_() for x in inputs((2, 20, 20, 2, 1, 5, 3, 7), torch.float32, 0))
    rows, mask = torch.randn(1, 7, 5), torch.rand(2, 20) < 0.3
    arguments = (q, k, v, kv, k_sum, rows, log_scale(kv).detach(), mask, None, causal)
    torch.library.opcheck(torch.ops.unrolled.favor_attention.default, arguments)


@pytest.mark.parametrize("causal", [True, False])
def test_second_derivatives_are_those_of_features_in_memory(causal):
    given, phi = inputs((2, 20, 20, 2, 1, 5, 3, 20), torch.float32, 0), feature_map(5)
    mask = torch.arange(20).expand(2, 20) > 15

    def second(form):
        leaves = [x.detach().requires_grad_() for x in given]
        o, *_ = form(*leaves, phi, causal, mask)
        (first,) = torch.autograd.grad(o.square().sum(), leaves[1], create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaves)

    for x, y in zip(second(operation), second(plain), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


def test_steps_continue_what_the_kernels_began():
    module = PerformerAttention(16, 2, causal=True, n_features=32)
    x = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0)) * 2
    whole, _ = module.prefill(x, module.init_state(2))
    first, state = module.prefill(x[:, :30], module.init_state(2))
    rest = []
    for token in x[:, 30:].unbind(1):
        o, state = module.step(token, state)
        rest.append(o)
    torch.testing.assert_close(torch.cat([first, torch.stack(rest, 1)], 1), whole)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["native", "plain"])
@pytest.mark.parametrize("size", [(1, 60), (60, 1)])
def test_keys_of_one_packed_sequence_do_not_scale_those_of_another(causal, backend, size):
    """The exponents of the two differ by far more than fp32 can hold."""
    q, k, v, *_ = inputs((1, 12, 12, 2, 2, 9, 5, 20), torch.float32, 0)
    k[:, :6] *= size[0]
    k[:, 6:] *= size[1]
    bounds = torch.tensor([0, 6, 12], dtype=torch.int32)
    with prefer(backend):
        found, _ = favor_attention(q, k, v, feature_map(), causal=causal, cu_seqlens=bounds)
        alone = [
            favor_attention(*(x[:, part] for x in (q, k, v)), feature_map(), causal=causal)[0]
            for part in (slice(6), slice(6, None))
        ]
    torch.testing.assert_close(found, torch.cat(alone, 1))
