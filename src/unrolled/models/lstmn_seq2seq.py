r"""LSTMN as an encoder and a decoder, with shallow or deep attention fusion.

    h_j, c_j = LSTMN(E x_j)             of the source; its last entry is the first of the decoder's tape
    shallow:    a_t = attention(s_{t-1}, h)        s_t = LSTMN([E y_{t-1}; a_t])
    deep:       s_t = DeepFusionLSTMN(E y_{t-1}; tapes h and c)
    p(y_t) = softmax(W s_t + b)

Cheng, Dong and Lapata 2016, "Long Short-Term Memory-Networks for Machine Reading", arXiv 1601.06733,
section 4 and figure 3. The paper does not say how the decoder is initialised.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled.models.seq2seq import AttentiveSeq2SeqConfig, Seq2Seq, Seq2SeqConfig, State, make_attention
from unrolled.ops.precision import without_autocast
from unrolled.recurrent.lstmn import LSTMN, DeepFusionLSTMN, DeepFusionState, LSTMNState, tapes


@dataclass
class LSTMNSeq2SeqConfig(AttentiveSeq2SeqConfig):
    """Shallow fusion; see `AttentiveSeq2SeqConfig` for the fields."""


@dataclass
class DeepLSTMNSeq2SeqConfig(Seq2SeqConfig):
    """Deep fusion; see `Seq2SeqConfig` for the fields."""


class LSTMNSeq2SeqState(NamedTuple):
    """The decoder's tape, its last output `[B,hidden_size]`, and its attention, which holds the source."""

    tape: LSTMNState
    s: Tensor
    attention: object


class _LSTMNSeq2Seq(Seq2Seq[State]):
    """Shared by both: the encoder and the output layer."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config)
        self.encoder = LSTMN(config.d_model, config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.vocab_size)

    def read(self, source: Tensor, key_padding_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode: hidden states h and memories c `[B,S,N]`, and the last entry [h; c] `[B,1,2N]`."""
        x = self.dropout(self.source_embedding(source))
        _, state = self.encoder.prefill(x, self.encoder.init_state(len(x)), key_padding_mask=key_padding_mask)
        hidden, memory, _ = (part[:, 1:] for part in tapes(state))  # without its initial zeros
        place = torch.arange(1, source.shape[1] + 1, device=source.device)
        last = torch.where(key_padding_mask, 0, place).argmax(1)
        rows = torch.arange(len(source), device=source.device)
        entry = torch.cat([hidden[rows, last], memory[rows, last]], -1)
        return hidden, memory, entry.unsqueeze(1)

    def _initial(self, cell: LSTMN, entry: Tensor) -> LSTMNState:
        """The state of a tape whose first entry is `entry [B,1,2 hidden_size]`."""
        state = cell.init_state(len(entry))
        entry = entry.to(state.tape.dtype)
        with without_autocast(entry.device):
            keys = F.linear(entry[..., : cell.hidden_size], cell.key_proj.to(entry.dtype))
        return state._replace(tape=entry, keys=keys)


class LSTMNSeq2Seq(_LSTMNSeq2Seq[LSTMNSeq2SeqState]):
    """Shallow fusion: any attention to the encoder's hidden states, whose context the decoder's cell reads.

    Weights have the initial values of the layers.
    """

    model_name = "lstmn_seq2seq"
    config_type = LSTMNSeq2SeqConfig
    config: LSTMNSeq2SeqConfig

    def __init__(self, config: LSTMNSeq2SeqConfig) -> None:
        super().__init__(config)
        self.attention = make_attention(config, config.hidden_size)
        self.cell = LSTMN(config.d_model + config.hidden_size, config.hidden_size)
        self.growing = {"tape": self.cell.growing, "attention": self.attention.growing}

    def encode(self, source: Tensor, key_padding_mask: Tensor) -> LSTMNSeq2SeqState:
        """Read the source from left to right."""
        hidden, _, entry = self.read(source, key_padding_mask)
        memory = hidden.to(self.out.weight.dtype)
        attended = self.attention.read(memory, key_padding_mask=key_padding_mask)
        tape = self._initial(self.cell, entry)
        return LSTMNSeq2SeqState(tape, tape.tape[:, 0, : self.config.hidden_size], attended)

    def decode(self, tokens: Tensor, state: LSTMNSeq2SeqState) -> tuple[Tensor, Tensor, LSTMNSeq2SeqState]:
        """Run the decoder over tokens; returns s."""
        tape, s, attended = state
        y = self.dropout(self.target_embedding(tokens))
        outputs, weights = [], []
        for now in y.unbind(1):
            context, weight, attended = self.attention.recall(s.to(y.dtype).unsqueeze(1), attended)
            inputs = self.cell.project(torch.cat([now, context.squeeze(1)], -1))
            with without_autocast(tokens.device):
                s, tape = self.cell.advance(inputs.to(s.dtype), tape)
            outputs.append(s)
            weights.append(weight)
        hidden = self.dropout(torch.stack(outputs, 1).to(y.dtype))
        return hidden, torch.cat(weights, 1), LSTMNSeq2SeqState(tape, s, attended)


class DeepLSTMNSeq2Seq(_LSTMNSeq2Seq[DeepFusionState]):
    """Deep fusion: the decoder's cell attends to the encoder's tapes and adds their memory to its own.

    Weights have the initial values of the layers.
    """

    model_name = "deep_lstmn_seq2seq"
    config_type = DeepLSTMNSeq2SeqConfig
    config: DeepLSTMNSeq2SeqConfig

    def __init__(self, config: DeepLSTMNSeq2SeqConfig) -> None:
        super().__init__(config)
        self.decoder = DeepFusionLSTMN(config.d_model, config.hidden_size)
        self.growing = self.decoder.growing

    def encode(self, source: Tensor, key_padding_mask: Tensor) -> DeepFusionState:
        """Read the source from left to right."""
        hidden, memory, entry = self.read(source, key_padding_mask)
        state = self.decoder.init_state(hidden, memory, key_padding_mask=key_padding_mask)
        return state._replace(own=self._initial(self.decoder.cell, entry))

    def decode(self, tokens: Tensor, state: DeepFusionState) -> tuple[Tensor, Tensor, DeepFusionState]:
        """Run the decoder over tokens; returns s."""
        y = self.dropout(self.target_embedding(tokens))
        hidden, weights, state = self.decoder.prefill(y, state)
        return self.dropout(hidden), weights, state
