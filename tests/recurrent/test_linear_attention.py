import pytest
import torch
from agreement import assert_same_gradients
from torch.nn.functional import elu

from unrolled.models import DecoderConfig
from unrolled.models.blocks import Block
from unrolled.recurrent.linear_attention import LinearAttentionCell


def as_printed(cell, x):
    """Equations 16-20, one head and one token at a time."""
    D, outputs = cell.head_dim, []
    s = torch.zeros(len(x), cell.n_heads, D, D, dtype=x.dtype)
    z = torch.zeros(len(x), cell.n_heads, D, dtype=x.dtype)
    for x_t in x.unbind(1):
        q, k, v = cell.qkv_proj(x_t).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (cell.n_heads, D)) for part in (q, k, v))
        q, k = elu(q) + 1, elu(k) + 1
        s = s + k.unsqueeze(-1) * v.unsqueeze(-2)
        z = z + k
        read = torch.einsum("bhd,bhdm->bhm", q, s) / (q * z).sum(-1, keepdim=True)
        u = cell.attention_norm(cell.out_proj(read.flatten(1)) + x_t)
        outputs.append(cell.ff_norm(u + cell.down(torch.relu(cell.up(u)))))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("n_heads", [1, 2])
def test_scan_and_steps_are_the_equations(n_heads):
    cell = LinearAttentionCell(8, 8, n_heads=n_heads, d_ff=12).double()
    x = torch.randn(2, 70, 8, dtype=torch.float64, requires_grad=True)
    expected, over = as_printed(cell, x), [x, *cell.parameters()]
    state, outputs = cell.init_state(2), []
    for x_t in x.unbind(1):
        y, state = cell.step(x_t, state)
        outputs.append(y)
    for y in (cell(x), torch.stack(outputs, 1)):
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
        assert_same_gradients(y[..., :3], expected[..., :3], over, rtol=0)


def test_it_is_a_transformer_layer():
    config = DecoderConfig(
        5, d_model=8, n_heads=2, d_ff=12, attention="linear", norm="post", activation="relu", positions="none"
    )
    block = Block(config, 0, causal=True).double()
    cell = LinearAttentionCell(8, 8, n_heads=2, d_ff=12).double()
    pairs = {
        "qkv_proj": block.attention.qkv_proj,
        "out_proj": block.attention.out_proj,
        "attention_norm": block.attention_norm,
        "ff_norm": block.ff_norm,
        "up": block.ff.up,
        "down": block.ff.down,
    }
    weights = {f"{name}.{key}": w for name, m in pairs.items() for key, w in m.state_dict().items()}
    cell.load_state_dict(weights)  # and no other
    x = torch.randn(2, 70, 8, dtype=torch.float64)
    torch.testing.assert_close(cell(x), block(x), rtol=0, atol=1e-12)
    state = cell.init_state(2)
    theirs = block.attention.init_state(2)
    for x_t in x[:, :5].unbind(1):
        y, state = cell.step(x_t, state)
        expected, theirs = block.step(x_t, theirs)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(state.s, theirs.kv)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((8, 12), {}, "hidden_size is 12, but must be input_size = 8"),
        ((8, 8), {"n_heads": 3}, "n_heads is 3, but must divide hidden_size = 8"),
        ((8, 8), {"d_ff": 0}, "d_ff is 0, but must be at least 1"),
    ],
)
def test_wrong_sizes_are_named(sizes, options, message):
    with pytest.raises(ValueError, match=message):
        LinearAttentionCell(*sizes, **options)
