"""The encoder-decoder without attention: its context is the encoder's last state."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from unrolled.alignment.fixed import FixedAttention
from unrolled.models import LuongSeq2Seq, LuongSeq2SeqConfig, RNNSeq2Seq, RNNSeq2SeqConfig
from unrolled.testing import check_alignment


def test_it_keeps_the_contract():
    check_alignment("fixed")


def test_every_query_reads_the_last_vector_that_is_no_padding():
    memory, query = torch.randn(4, 5, 3), torch.randn(4, 2, 6)
    padding = torch.zeros(4, 5, dtype=torch.bool)
    padding[1, 3:] = padding[2, :2] = padding[3] = True
    context, weights, _ = FixedAttention(6, 3).recall(
        query, FixedAttention(6, 3).read(memory, key_padding_mask=padding)
    )
    last = torch.stack([memory[0, 4], memory[1, 2], memory[2, 4], torch.zeros(3)])
    assert torch.equal(context, last.unsqueeze(1).expand(4, 2, 3))
    assert weights.sum(-1).tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]


def test_a_model_with_it_reads_the_source_through_torchs_last_hidden_state():
    torch.manual_seed(0)
    model = LuongSeq2Seq(LuongSeq2SeqConfig(9, d_model=4, hidden_size=5, attention="fixed")).eval()
    source, target = torch.randint(9, (2, 6)), torch.randint(9, (2, 3))
    padding = torch.arange(6) >= torch.tensor([[6], [4]])
    state = model.init_state(source, key_padding_mask=padding)
    context, _, _ = model.attention.recall(torch.zeros(2, 1, 5), state.attention)
    packed = pack_padded_sequence(model.source_embedding(source), torch.tensor([6, 4]), batch_first=True)
    torch.testing.assert_close(context[:, 0], model.encoder(packed)[1][0][-1])
    logits = model(source, target, key_padding_mask=padding)
    swapped = source.clone()
    swapped[:, 0] = (source[:, 0] + 1) % 9
    assert not torch.equal(model(swapped, target, key_padding_mask=padding), logits)


@pytest.mark.slow
def test_it_learns_to_reverse_short_words():
    torch.manual_seed(0)
    model = RNNSeq2Seq(RNNSeq2SeqConfig(6, d_model=16, hidden_size=32, attention="fixed"))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    source = torch.cartesian_prod(*[torch.arange(4)] * 3)
    for _ in range(300):
        optimizer.zero_grad()
        loss = model.loss(source, source.flip(1))
        loss.backward()
        optimizer.step()
    assert loss < 0.05
