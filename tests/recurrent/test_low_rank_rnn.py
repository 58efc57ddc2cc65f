import pytest
import torch
from agreement import assert_same_gradients
from torch import nn

from unrolled.recurrent.low_rank_rnn import LowRankRNN


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_it_is_the_rnn_of_torch_with_the_product(rank):
    ours, theirs = LowRankRNN(3, 5, rank=rank).double(), nn.RNN(3, 5, batch_first=True).double()
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(ours.input_proj.weight)
        theirs.weight_hh_l0.copy_(ours.recurrent.A @ ours.recurrent.B.T)
        theirs.bias_ih_l0.copy_(ours.input_proj.bias)
        theirs.bias_hh_l0.zero_()
    x = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    y, expected = ours(x), theirs(x)[0]
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-14)
    assert_same_gradients(y, expected, [x], rtol=0, atol=1e-13)


def test_the_product_starts_with_the_variance_of_torchs_weights():
    torch.manual_seed(0)
    low = LowRankRNN(1, 256, rank=16).recurrent
    assert (low.A @ low.B.T).var().item() == pytest.approx(nn.RNN(1, 256).weight_hh_l0.var().item(), rel=0.1)
