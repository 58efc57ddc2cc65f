r"""The encoder-decoder that introduced attention: it attends to the source before each step (RNNsearch).

    h_j = [GRU(E x_j, h_{j-1}); the same right to left]           of the source; s_0 = tanh(W_s h<-_1)
    c_i = attention(s_{i-1}, h)        s_i = GRU([E y_{i-1}; c_i], s_{i-1})
    t_i = maxout(U_o s_{i-1} + V_o E y_{i-1} + C_o c_i)           p(y_i) = softmax(W_o t_i)

The GRU applies its reset gate before the matrix product; maxout takes the larger of each pair of adjacent
numbers. Bahdanau et al. 2014, "Neural Machine Translation by Jointly Learning to Align and Translate",
arXiv 1409.0473, section 3 and appendix A. The text conditions y_i on s_i, the formulas of the appendix on
s_{i-1}: `readout_state` selects one.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled.fields import Size
from unrolled.models.seq2seq import AttentiveSeq2SeqConfig, Seq2Seq, make_attention
from unrolled.ops.observing import changed
from unrolled.ops.precision import apply, without_autocast
from unrolled.recurrent import Bidirectional
from unrolled.recurrent.gru import GRUState
from unrolled.recurrent.gru_reset_before import GRUResetBefore

ReadoutState = Literal["previous", "current"]


@dataclass
class RNNSeq2SeqConfig(AttentiveSeq2SeqConfig):
    """Bahdanau's model; see `AttentiveSeq2SeqConfig` for the other fields.

    Attributes:
        readout_size: width of t_i; None for half of `hidden_size`.
        readout_state: the state that the output layer reads, "previous" or "current".
    """

    _: KW_ONLY
    readout_size: Size | None = None
    readout_state: ReadoutState = "previous"


class RNNSeq2SeqState(NamedTuple):
    """The decoder's state `[B,hidden_size]`, and that of its attention, which holds the source."""

    s: Tensor
    attention: object


class RNNSeq2Seq(Seq2Seq[RNNSeq2SeqState]):
    """A bidirectional GRU that encodes, and a GRU that decodes with attention to it.

    Initial weights are those of the paper: square recurrent matrices are orthogonal, biases are 0, and all
    other weights are drawn from N(0, 0.01^2). The attention has its own initial weights.
    """

    model_name = "rnn_seq2seq"
    config_type = RNNSeq2SeqConfig
    config: RNNSeq2SeqConfig

    def __init__(self, config: RNNSeq2SeqConfig) -> None:
        super().__init__(config)
        width, hidden = config.d_model, config.hidden_size
        self.encoder = Bidirectional(GRUResetBefore(width, hidden), GRUResetBefore(width, hidden))
        self.first = nn.Linear(hidden, hidden)
        self.attention = make_attention(config, 2 * hidden)
        self.growing = self.attention.growing
        self.cell = GRUResetBefore(width + 2 * hidden, hidden)
        size = max(1, hidden // 2) if config.readout_size is None else config.readout_size
        self.readout = nn.Linear(hidden + width + 2 * hidden, 2 * size)
        self.out = nn.Linear(size, config.vocab_size)
        self._reset()

    def _reset(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding) and not name.startswith("attention"):
                nn.init.normal_(module.weight, std=0.01)
            if isinstance(module, nn.Linear) and module.bias is not None and not name.startswith("attention"):
                nn.init.zeros_(module.bias)
            if isinstance(module, GRUResetBefore):
                for square in torch.split(module.recurrent, module.hidden_size):
                    nn.init.orthogonal_(square)

    def encode(self, source: Tensor, key_padding_mask: Tensor) -> RNNSeq2SeqState:
        """Read the source in both directions."""
        x = self.dropout(self.source_embedding(source))
        memory, ends = self.encoder.read(x, key_padding_mask=key_padding_mask)
        (last,) = ends.right_to_left
        s = torch.tanh(self.first(last.to(x.dtype))).to(last.dtype)
        return RNNSeq2SeqState(s, self.attention.read(memory, key_padding_mask=key_padding_mask))

    def decode(self, tokens: Tensor, state: RNNSeq2SeqState) -> tuple[Tensor, Tensor, RNNSeq2SeqState]:
        """Run the decoder over tokens; returns t before W_o."""
        s, attended = state
        y = self.dropout(self.target_embedding(tokens))
        dtype, project = y.dtype, self._projection(y, s.dtype)
        states, contexts, weights = [s], [], []
        with without_autocast(tokens.device):
            for t in range(tokens.shape[1]):
                context, weight, attended = self.attention.recall(s.to(dtype).unsqueeze(1), attended)
                s, _ = self.cell.advance(project(t, context.squeeze(1).to(s.dtype)), GRUState(s))
                states.append(s)
                contexts.append(context)
                weights.append(weight)
        read = states[:-1] if self.config.readout_state == "previous" else states[1:]
        joined = torch.cat([torch.stack(read, 1).to(dtype), y, torch.cat(contexts, 1)], -1)
        pairs = self.readout(joined).unflatten(-1, (-1, 2))
        return self.dropout(pairs.amax(-1)), torch.cat(weights, 1), RNNSeq2SeqState(s, attended)

    def _projection(self, y: Tensor, dtype: torch.dtype) -> Callable[[int, Tensor], Tensor]:
        """Return the inputs of the cell as a function of t and c_t `[B,M]`, for tokens y `[B,T,d_model]`."""
        layer = self.cell.input_proj
        if type(layer) is not nn.Linear or changed([layer]):  # such as an adapter
            return lambda t, context: apply(layer, torch.cat([y[:, t].to(dtype), context], -1))
        of_token, of_context = torch.split(layer.weight, [y.shape[-1], self.attention.memory_dim], 1)
        inputs, of_context = F.linear(y, of_token, layer.bias).to(dtype), of_context.to(dtype)
        return lambda t, context: inputs[:, t] + F.linear(context, of_context)
