"""LSTM, RNN and GRU: torch's kernels and our steps are one function, to the second derivative."""

import pytest
import torch
from agreement import assert_same, normal
from torch import nn

from unrolled import recurrent
from unrolled.recurrent import Bidirectional
from unrolled.recurrent.kronecker_lstm import KroneckerLSTM
from unrolled.recurrent.low_rank_lstm import LowRankLSTM
from unrolled.recurrent.lstm import LSTM

FUSED = ["rnn", "gru", "lstm"]


def torchs(W, b, U, **options):
    """`nn.LSTM` with these weights."""
    theirs = nn.LSTM(W.shape[1], W.shape[0] // 4, batch_first=True, **options).double()
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(W)
        theirs.bias_ih_l0.copy_(b)
        theirs.weight_hh_l0.copy_(U)
        theirs.bias_hh_l0.zero_()
    return theirs


def by_steps(module, x):
    """Without torch's kernels."""
    return module.scan(module.project(x), module.init_state(len(x)), None)[0]


@pytest.mark.parametrize("cell", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_is_the_steps(cell, dtype):
    """oneDNN's kernels, which run in fp32, may not be further from fp64 than twice what the steps are."""
    torch.manual_seed(0)
    module = recurrent.load(cell)(6, 8)
    exact, module = recurrent.load(cell)(6, 8).double(), module.to(dtype)
    exact.load_state_dict(module.state_dict())
    x = normal(3, 40, 6).to(dtype).requires_grad_()
    assert module.fused(x, module.init_state(3)) is not None

    def results(module, run, x):
        y = run(x)
        first = torch.autograd.grad(y.square().sum(), [x, *module.parameters()], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, *module.parameters()])
        return [y, *first, *second]

    fused = results(module, module, x)
    steps = results(module, lambda x: by_steps(module, x), x)
    expected = results(exact, lambda x: by_steps(exact, x), x.detach().double().requires_grad_())
    for a, b, c in zip(fused, steps, expected, strict=True):
        if dtype == torch.float64:
            torch.testing.assert_close(a, c, rtol=1e-12, atol=1e-12)
        else:
            largest = c.abs().max()
            assert (a - c).abs().max() <= 2 * (b - c).abs().max() + 1e-6 * largest


@pytest.mark.parametrize("cell", FUSED)
@torch.no_grad()
def test_a_hook_of_the_projection_acts_on_sequences_too(cell):
    module = recurrent.load(cell)(6, 8).double()
    x, state, outputs = normal(3, 10, 6), module.init_state(3), []
    module.input_proj.register_forward_hook(lambda layer, inputs, y: 2 * y)
    for x_t in x.unbind(1):
        y, state = module.step(x_t, state)
        outputs.append(y)
    torch.testing.assert_close(module(x), torch.stack(outputs, 1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cell", FUSED)
@pytest.mark.parametrize("both_ways", [False, True])
def test_the_kernel_runs_despite_padding(cell, both_ways, monkeypatch):
    """On the right, on the left and between tokens; a row may have no tokens."""
    module = recurrent.load(cell)(3, 4).double()
    if both_ways:
        module = Bidirectional(module, recurrent.load(cell)(3, 4).double())
    padding = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 0], [1] * 5, [0] * 5]).bool()
    x = normal(5, 5, 3).masked_fill(padding.unsqueeze(-1), torch.nan).requires_grad_()

    def results(run):
        y = run(x)[~padding]
        return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]

    def row_by_row(x):
        rows = torch.zeros(5, 5, module.hidden_size, dtype=x.dtype)
        for i, valid in enumerate(~padding):
            rows[i, valid] = module(x[i, valid].unsqueeze(0))[0]
        return rows

    expected = results(row_by_row)
    monkeypatch.setattr(recurrent.load(cell), "scan", None)
    found = results(lambda x: module(x, key_padding_mask=padding))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not found[1][padding].any()


@pytest.mark.parametrize("cell", FUSED)
def test_a_state_is_that_of_the_kernel_if_no_token_is_padding(cell, monkeypatch):
    module, x = recurrent.load(cell)(3, 4), normal(2, 5, 3).float()
    expected = module.prefill(x, module.init_state(2))
    monkeypatch.setattr(type(module), "scan", None)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    found = module.prefill(x, module.init_state(2), key_padding_mask=mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("cell", FUSED)
def test_a_transform_of_torch_func_sees_the_steps(cell):
    module = recurrent.load(cell)(3, 4).double()
    x = normal(2, 3, 5, 3)
    found = torch.func.vmap(module)(x)
    torch.testing.assert_close(found, torch.stack([by_steps(module, row) for row in x]))


@pytest.mark.parametrize("cell", FUSED)
def test_shapes_are_known_on_the_meta_device(cell):
    with torch.device("meta"):
        assert recurrent.load(cell)(3, 4)(torch.empty(2, 5, 3)).shape == (2, 5, 4)


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_low_rank_is_the_projection_of_torch(rank):
    """nn.LSTM(proj_size=r) puts out p = B^T h and reads that back through A."""
    ours = LowRankLSTM(3, 5, rank=rank).double()
    A, B = ours.recurrent.A, ours.recurrent.B
    x = normal(2, 7, 3)
    if rank < 5:
        theirs = torchs(ours.input_proj.weight, ours.input_proj.bias, A, proj_size=rank)
        with torch.no_grad():
            theirs.weight_hr_l0.copy_(B.T)
        torch.testing.assert_close(ours(x) @ B, theirs(x)[0], rtol=0, atol=1e-14)
    dense = torchs(ours.input_proj.weight, ours.input_proj.bias, A @ B.T)
    torch.testing.assert_close(ours(x), dense(x)[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("factors", [[6], [2, 3], [3, 1, 2], None])
def test_kronecker_is_the_lstm_of_the_products(factors):
    ours = KroneckerLSTM(3, 6, factors=factors).double()
    U = []
    for gate in range(4):
        product = torch.ones(1, 1, dtype=torch.float64)
        for W in ours.factors:
            product = torch.kron(product, W[gate])
        U.append(product)
    dense = torchs(ours.input_proj.weight, ours.input_proj.bias, torch.cat(U))
    x = normal(2, 7, 3).requires_grad_()
    assert_same(ours(x), dense(x)[0], [x], rtol=0, atol=1e-14)


def test_parameters_no_longer_grow_with_the_square_of_the_state():
    def recurrent_part(module):
        return sum(p.numel() for p in module.parameters()) - 4 * 64 * (1 + 1)

    assert recurrent_part(LSTM(1, 64)) == 4 * 64**2
    assert recurrent_part(LowRankLSTM(1, 64, rank=4)) == 5 * 64 * 4
    assert recurrent_part(KroneckerLSTM(1, 64)) == 4 * 6 * 2**2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LowRankLSTM(3, 5, rank=6), "rank is 6, but must be an integer from 1 to hidden_size = 5"),
        (lambda: LowRankLSTM(3, 5, rank=0), "rank is 0"),
        (
            lambda: KroneckerLSTM(3, 6, factors=[2, 2]),
            r"factors is \[2, 2\], which multiply to 4, but must multiply to 6",
        ),
        (
            lambda: KroneckerLSTM(3, 6, factors=[6, 0]),
            r"factors is \[6, 0\], but must be whole numbers of at least 1",
        ),
    ],
)
def test_wrong_sizes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("cell", FUSED)
def test_a_projection_without_bias_runs_as_the_steps_do(cell):
    torch.manual_seed(0)
    module = recurrent.load(cell)(6, 8)
    module.input_proj = torch.nn.Linear(6, module.input_proj.out_features, bias=False)
    x = normal(3, 40, 6).float()
    torch.testing.assert_close(module(x), by_steps(module, x))


def test_parameters_start_as_those_of_torch():
    torch.manual_seed(0)
    for parameter in recurrent.load("lstm")(64, 64).parameters():
        assert 0.9 / 8 < parameter.abs().max() <= 1 / 8
