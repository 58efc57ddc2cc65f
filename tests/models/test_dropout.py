"""Dropout acts, in training, at every place that the fields and the equations name."""

import pytest
import torch
from small_models import B, arguments, small_model

from models.kit import randomised
from unrolled.ops.dropout import Dropout

CALLS = {
    "bilstm_transcriber": 2 + 1,  # the input of each layer, the output of the last
    "decoder": 1 + 2 * 2,  # the embeddings, each sub-layer
    "deep_lstmn_seq2seq": 3,  # both embeddings, the input of the output layer
    "encoder": 1 + 2 * 2,
    "encoder_decoder": 1 + 2 + 1 + 3,
    "lstmn_seq2seq": 3,
    "luong_seq2seq": 3 + 5,  # and between the layers, for each of 5 tokens
    "perceiver": 1 + 2 + 2 * 2,  # the inputs, the cross-attention, each sub-layer
    "perceiver_ar": 1 + 2 * 2,
    "perceiver_io": 1 + 2 + 2 * 2 + 2,
    "recurrent_lm": 1 + 2,  # the embeddings, the output of each layer
    "rnn_seq2seq": 3,
    "segmenter": 1 + 2 * 2,
    "transcriber": 1 + 2 * 2,
    "vit": 1 + 2 * 2,
}


@pytest.mark.parametrize("kind", CALLS)
def test_dropout_acts_wherever_the_fields_say(kind, monkeypatch):
    layers = {"n_layers": 2} if kind == "recurrent_lm" else {}
    model, (inputs, _), calls = small_model(kind, dropout=0.5, **layers).double().train(), arguments(kind), []

    def forward(self, x):
        if self.training:  # not in a check of a state
            calls.append(self.p)
        return x

    monkeypatch.setattr(Dropout, "forward", forward)
    model(*inputs)
    assert calls == [0.5] * CALLS[kind]
    if hasattr(model, "prefill"):
        calls.clear()
        state = model.init_state(inputs[0]) if len(inputs) == 2 else model.init_state(B)
        model.prefill(inputs[-1], state)
        assert calls == [0.5] * CALLS[kind]


@pytest.mark.parametrize("norm", ["pre", "post", "res_post"])
def test_a_block_whose_sub_layers_are_dropped_passes_its_input_on(norm, monkeypatch):
    block, x = (
        randomised(small_model("decoder", norm=norm)).stack.blocks[0].train(),
        torch.randn(B, 5, 16).double(),
    )
    monkeypatch.setattr(Dropout, "forward", lambda self, x: torch.zeros_like(x))
    expected = block.ff_norm(block.attention_norm(x)) if norm == "post" else x
    assert torch.equal(block(x), expected)


def test_the_encoder_of_luong_has_dropout_between_its_layers():
    assert small_model("luong_seq2seq", dropout=0.5).encoder.dropout == 0.5
    assert small_model("luong_seq2seq", dropout=0.5, n_layers=1).encoder.dropout == 0
