import torch
from torch import nn

from unrolled.recurrent.rnn import RNN


def test_it_is_the_rnn_of_torch():
    ours, theirs = RNN(3, 5).double(), nn.RNN(3, 5, batch_first=True).double()
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(ours.input_proj.weight)
        theirs.weight_hh_l0.copy_(ours.recurrent)
        theirs.bias_ih_l0.copy_(ours.input_proj.bias)
        theirs.bias_hh_l0.zero_()
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x)[0])
