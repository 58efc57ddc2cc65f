import pytest
import torch
from agreement import assert_same_gradients

from unrolled.recurrent import load
from unrolled.recurrent.gru import GRU
from unrolled.recurrent.gru_reset_before import GRUResetBefore


def as_published(module, x):
    """The equations, gate by gate."""
    W, b, U = module.input_proj.weight, module.input_proj.bias, module.recurrent
    (W_r, W_z, W_n), (b_r, b_z, b_n), (U_r, U_z, U_n) = (w.chunk(3) for w in (W, b, U))
    h, outputs = torch.zeros(len(x), module.hidden_size, dtype=x.dtype), []
    for x_t in x.unbind(1):
        r = torch.sigmoid(x_t @ W_r.T + h @ U_r.T + b_r)
        z = torch.sigmoid(x_t @ W_z.T + h @ U_z.T + b_z)
        n = torch.tanh(x_t @ W_n.T + (r * h) @ U_n.T + b_n)
        h = (1 - z) * h + z * n
        outputs.append(h)
    return torch.stack(outputs, 1)


def test_the_published_cell_is_its_equations():
    module = GRUResetBefore(3, 5).double()
    x = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    ours, expected = module(x), as_published(module, x)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-14)
    assert_same_gradients(ours, expected, [x, *module.parameters()], rtol=0, atol=1e-12)


def test_where_nothing_is_carried_over_the_two_cells_agree_and_else_they_do_not():
    """From h = 0 the reset gate has nothing to reset; negating z turns one update gate into the other."""
    after, before = GRU(3, 5).double(), GRUResetBefore(3, 5).double()
    sign = torch.tensor([1.0, -1.0, 1.0]).repeat_interleave(5)
    with torch.no_grad():
        after.recurrent_bias.zero_()
        before.input_proj.weight.copy_(sign[:, None] * after.input_proj.weight)
        before.input_proj.bias.copy_(sign * after.input_proj.bias)
        before.recurrent.copy_(sign[:, None] * after.recurrent)
        before.recurrent[10:] *= 3
        after.recurrent[10:] *= 3
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(before(x)[:, 0], after(x)[:, 0])
    assert (before(x) - after(x))[:, 1:].abs().amax() > 1e-3


@pytest.mark.parametrize("name", ["gru", "lstm", "rnn"])
def test_autocast_does_not_reach_the_recurrence(name):
    layer = load(name)(3, 5)
    x, state = torch.randn(2, 7, 3), layer.init_state(2)
    with torch.autocast("cpu", torch.bfloat16):
        y, last = layer.prefill(x, state)
        for t in range(7):
            _, state = layer.step(x[:, t], state)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(tuple(last), tuple(state))
