import pytest
import torch
from agreement import assert_same_gradients, normal
from contract_parts import check_uncompiled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

from unrolled.recurrent.ntm import NTM, content, interpolate, read, sharpen, shift
from unrolled.testing import CellMaker, check_half_precision, check_rejects_wrong_input


def weights_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return normal(*shape, seed=seed).softmax(-1)


def as_written(layer: NTM, x: torch.Tensor) -> torch.Tensor:
    """Equations 2-9 for one row, head by head and row by row of the memory."""
    N, W, K, R = layer.memory_size, layer.memory_width, 2 * layer.reach + 1, layer.read_heads
    heads, C = R + layer.write_heads, layer.controller_size
    memory = torch.full((N, W), 1e-6, dtype=x.dtype)
    weights = [torch.eye(N, dtype=x.dtype)[0]] * heads
    reads = x.new_zeros(R * W)
    h = c = x.new_zeros(C)
    outputs = []
    for x_t in x:
        carried = reads if layer.controller == "feedforward" else torch.cat([reads, h])
        sums = layer.input_proj(x_t) + layer.recurrent @ carried
        if layer.controller == "feedforward":
            h = torch.tanh(sums)
        else:
            i, f, g, o = sums.chunk(4)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        head_outputs = layer.head_proj(h)
        now = []
        for head in range(heads):
            key, (beta, gate, gamma), s = head_outputs[head * (W + 3 + K) :][: W + 3 + K].split([W, 3, K])
            lengths = (memory.square().sum(1) + 1e-8).sqrt() * (key.square().sum() + 1e-8).sqrt()
            w = torch.softmax(F.softplus(beta) * (memory @ key) / lengths, 0)
            w = torch.sigmoid(gate) * w + (1 - torch.sigmoid(gate)) * weights[head]
            s = s.softmax(0)
            w = torch.stack([sum(w[(i - k + layer.reach) % N] * s[k] for k in range(K)) for i in range(N)])
            w = w ** (1 + F.softplus(gamma))
            now.append(w / w.sum())
        weights = now
        reads = torch.cat([weights[head] @ memory for head in range(R)])
        writing = head_outputs[heads * (W + 3 + K) :].reshape(layer.write_heads, 2, W)
        for w, (erase, _) in zip(weights[R:], writing, strict=True):
            memory = memory * (1 - torch.outer(w, torch.sigmoid(erase)))
        for w, (_, add) in zip(weights[R:], writing, strict=True):
            memory = memory + torch.outer(w, torch.tanh(add))
        outputs.append(layer.out_proj(torch.cat([h, reads])))
    return torch.stack(outputs)


@pytest.mark.parametrize("controller", ["feedforward", "lstm"])
@pytest.mark.parametrize(("read_heads", "write_heads", "reach"), [(1, 1, 1), (2, 3, 2), (1, 1, 0)])
def test_it_is_its_equations(controller, read_heads, write_heads, reach):
    sizes = {"controller_size": 6, "memory_size": 7, "memory_width": 5, "reach": reach}
    layer = NTM(3, 4, controller=controller, read_heads=read_heads, write_heads=write_heads, **sizes).double()
    for parameter in layer.parameters():
        parameter.data.mul_(2)
    x = normal(2, 6, 3).requires_grad_()
    found, expected = layer(x), torch.stack([as_written(layer, row) for row in x])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert_same_gradients(found, expected, [x, *layer.parameters()])


@pytest.mark.slow
def test_several_heads_and_a_feed_forward_controller_keep_the_contract():
    options = {"controller": "feedforward", "read_heads": 2, "write_heads": 2, "memory_size": 9, "reach": 2}
    make = CellMaker(NTM, options)
    # Nothing in its state is hidden_size wide, so that of another size does fit; half precision is slow.
    check_uncompiled(make, check_rejects_wrong_input, check_half_precision)


def test_a_head_that_only_looks_is_softmax_attention_with_cosine_scores():
    memory, key = normal(2, 6, 4), normal(2, 3, 4, seed=1)
    beta, before = normal(2, 3, 1, seed=2).exp(), weights_of(2, 3, 6)
    w = interpolate(content(memory, key, beta), before, torch.ones(2, 3, 1).double())
    stay = torch.tensor([0.0, 1.0, 0.0]).double().expand(2, 3, 3)
    found = read(memory, sharpen(shift(w, stay), torch.ones(2, 3, 1).double()))
    unit_memory, unit_key = F.normalize(memory, dim=-1), F.normalize(key, dim=-1)
    expected = F.scaled_dot_product_attention(beta * unit_key, unit_memory, memory, scale=1.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)  # the 1e-8 in squared norms of about 4


@settings(max_examples=30)
@given(n=st.integers(1, 9), reach=st.integers(0, 4), by=st.integers(-4, 4))
def test_a_shift_rotates_by_what_it_says(n, reach, by):
    if reach >= n or abs(by) > reach:
        return
    w, moves = weights_of(2, 3, n), torch.zeros(2, 3, 2 * reach + 1).double()
    moves[..., by + reach] = 1
    torch.testing.assert_close(shift(w, moves), w.roll(by, -1), rtol=0, atol=0)


def test_sharpening_is_a_power_and_in_the_end_the_largest():
    w = weights_of(2, 3, 6)
    gamma = 1 + normal(2, 3, 1, seed=1).exp()
    torch.testing.assert_close(sharpen(w, gamma), w**gamma / (w**gamma).sum(-1, keepdim=True))
    largest = F.one_hot(w.argmax(-1), 6).double()
    torch.testing.assert_close(sharpen(w, torch.full_like(gamma, 1e4)), largest)


def addressed(memory: torch.Tensor, before: torch.Tensor, *outputs: torch.Tensor) -> torch.Tensor:
    """The weights of the read head after a step for which the controller gives it key, beta, gate, gamma."""
    layer, stay = NTM(3, 4, memory_size=6, memory_width=4).double(), torch.tensor([0.0, 200.0, 0.0])
    layer.head_proj.weight.data.zero_()
    told = torch.cat([x.double().reshape(-1) for x in (*outputs, stay)])
    layer.head_proj.bias.data[: len(told)] = told
    state = layer.init_state(1)
    weights = torch.stack([before, state.weights[0, 1]])[None]
    _, state = layer.step(torch.zeros(1, 3).double(), state._replace(memory=memory[None], weights=weights))
    return state.weights[0, 0]


@pytest.mark.parametrize(("bias", "beta"), [(40.0, 40), (50.0, 50), (100.0, 50), (1e6, 50)])
def test_the_strength_of_a_key_is_at_most_fifty(bias, beta):
    memory, key = 3 + normal(6, 4), 3 + normal(4, seed=1)  # near each other: no weight is almost 0
    found = addressed(memory, weights_of(6), key, *torch.tensor([bias, 200.0, -200.0]))
    expected = (beta * F.cosine_similarity(key[None], memory)).softmax(-1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize(("bias", "gamma"), [(-200.0, 1), (15.0, 16), (19.0, 20), (100.0, 20), (1e6, 20)])
def test_weights_are_sharpened_by_a_power_of_at_most_twenty(bias, gamma):
    before = weights_of(6)
    found = addressed(normal(6, 4), before, normal(4, seed=1), *torch.tensor([0.0, -200.0, bias]))
    torch.testing.assert_close(found, before**gamma / (before**gamma).sum(), rtol=1e-5, atol=0)


def test_hostile_weights_and_inputs_end_finite():
    torch.manual_seed(0)
    layer = NTM(2, 2, controller_size=4, memory_size=5, memory_width=3)
    hostile = torch.Generator().manual_seed(1)
    state = layer.init_state(2)
    with torch.no_grad():
        for part in range(10):
            for parameter in layer.parameters():
                scale = 10 ** torch.empty(1).uniform_(-2, 4, generator=hostile)
                parameter.copy_(torch.randn(parameter.shape, generator=hostile) * scale)
            x = 1e3 * torch.randn(2, 300, 2, generator=hostile)
            x[:, ::7] = 0
            y, state = layer.prefill(x, state)
            assert y.isfinite().all(), part
    assert state.memory.isfinite().all()
    assert ((state.weights >= 0) & (state.weights <= 1)).all()
    torch.testing.assert_close(state.weights.sum(-1), torch.ones(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("controller", ["feedforward", "lstm"])
def test_gradients_stay_finite_at_a_large_learning_rate(controller):
    torch.manual_seed(0)
    layer = NTM(3, 2, controller=controller, controller_size=8, memory_size=6, memory_width=4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=10.0)
    for step in range(40):
        x = torch.randint(2, (4, 12, 3), generator=torch.Generator().manual_seed(step)).float()
        optimizer.zero_grad()
        (layer(x) - x[..., :2].roll(1, 1)).square().mean().backward()
        assert all(p.grad.isfinite().all() for p in layer.parameters()), step
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 10.0)
        optimizer.step()
    assert layer(x).isfinite().all()


def test_a_trace_tells_where_the_heads_were():
    layer = NTM(3, 4, memory_size=5, read_heads=2, write_heads=3)
    x = torch.randn(2, 6, 3)
    trace = layer.trace(x)
    assert (trace.read.shape, trace.write.shape) == ((2, 6, 2, 5), (2, 6, 3, 5))
    _, state = layer.prefill(x, layer.init_state(2))
    torch.testing.assert_close(torch.cat([trace.read[:, -1], trace.write[:, -1]], 1), state.weights)
    with pytest.raises(ValueError, match="x has length 0, but must have at least 1 step to trace"):
        layer.trace(x[:, :0])


def test_the_sizes_that_it_has_by_default():
    state = NTM(3, 4).init_state(2)
    assert (state.memory.shape, state.weights.shape) == ((2, 128, 20), (2, 2, 128))
    assert [x.shape for x in (state.reads, *state.controller)] == [(2, 1, 20), (2, 4), (2, 4)]


def test_the_size_of_the_memory_is_in_no_parameter():
    small, large = NTM(3, 4, memory_size=5), NTM(3, 4, memory_size=50)
    large.load_state_dict(small.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"controller": "gru"}, r"controller is 'gru', but must be one of \('feedforward', 'lstm'\)"),
        ({"memory_size": 0}, "memory_size is 0, but must be a whole number of at least 1"),
        ({"controller_size": 0}, "controller_size is 0, but must be"),
        ({"reach": -1}, "reach is -1, but must be a whole number of at least 0"),
        ({"reach": 4, "memory_size": 4}, "reach is 4, but must be below memory_size = 4"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        NTM(3, 4, **options)


@pytest.mark.parametrize("controller", ["feedforward", "lstm"])
def test_no_parameter_of_a_head_can_overflow(controller):
    layer = NTM(3, 4, controller=controller, memory_size=5, memory_width=2)
    layer.head_proj.bias.data.fill_(1e38)
    x = torch.randn(2, 6, 3, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()


def test_the_recurrent_matrix_starts_in_proportion_to_its_inputs():
    torch.manual_seed(0)
    matrix = NTM(8, 8, controller_size=64).recurrent
    bound = matrix.shape[1] ** -0.5
    assert 0.95 * bound < matrix.abs().max() <= bound
