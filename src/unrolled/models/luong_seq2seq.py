r"""The encoder-decoder that attends to the source after each step, and feeds the result into the next.

    m = LSTM(E x)                       stacked; its last states are the decoder's initial ones
    h_t = LSTM([E y_{t-1}; v_{t-1}])    stacked, v_0 = 0: input feeding
    c_t = attention(h_t, m)             v_t = tanh(W_c [c_t; h_t])          p(y_t) = softmax(W_s v_t)

Luong et al. 2015, "Effective Approaches to Attention-based Neural Machine Translation", arXiv 1508.04025,
section 3, eq. 5 and 6, and section 3.3; v_t is the attentional vector, h~ in the paper.
"""

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from unrolled.fields import Size
from unrolled.models.cells import run_lstm
from unrolled.models.seq2seq import AttentiveSeq2SeqConfig, Seq2Seq, make_attention
from unrolled.ops.packing import reorder, valid_first
from unrolled.ops.precision import accumulation_dtype, apply, without_autocast
from unrolled.recurrent import lstm_step


@dataclass
class LuongSeq2SeqConfig(AttentiveSeq2SeqConfig):
    """Luong's model; see `AttentiveSeq2SeqConfig` for the other fields.

    Attributes:
        attention: as in `AttentiveSeq2SeqConfig`; "luong" by default.
        n_layers: number of stacked LSTMs in the encoder and in the decoder.
    """

    attention: str = "luong"
    _: KW_ONLY
    n_layers: Size = 2


class LuongSeq2SeqState(NamedTuple):
    """h and c of each layer `[B,n_layers,hidden_size]`, the attentional vector, and the attention's state."""

    h: Tensor
    c: Tensor
    attentional: Tensor
    attention: object


class LuongSeq2Seq(Seq2Seq[LuongSeq2SeqState]):
    """Stacked LSTMs that encode, and as many that decode with attention; weights are from U(-0.1, 0.1)."""

    model_name = "luong_seq2seq"
    config_type = LuongSeq2SeqConfig
    config: LuongSeq2SeqConfig

    def __init__(self, config: LuongSeq2SeqConfig) -> None:
        super().__init__(config)
        width, hidden, layers = config.d_model, config.hidden_size, config.n_layers
        between = config.dropout if layers > 1 else 0.0
        self.encoder = nn.LSTM(width, hidden, layers, batch_first=True, dropout=between)
        self.attention = make_attention(config, hidden)
        self.growing = self.attention.growing
        inputs = [width + hidden] + (layers - 1) * [hidden]
        self.cells = nn.ModuleList(nn.LSTMCell(n, hidden) for n in inputs)
        self.combine = nn.Linear(2 * hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, config.vocab_size, bias=False)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)

    def encode(self, source: Tensor, key_padding_mask: Tensor) -> LuongSeq2SeqState:
        """Read the source from left to right, without padding."""
        order = valid_first(key_padding_mask)
        x = self.dropout(self.source_embedding(source.gather(1, order)))
        if len(source):
            lengths = (~key_padding_mask).sum(1).cpu()
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, (h, c) = run_lstm(self.encoder, packed)
            out, _ = pad_packed_sequence(out, batch_first=True, total_length=source.shape[1])
        else:  # torch cannot pack an empty batch
            out, (h, c) = run_lstm(self.encoder, x)
        out = reorder(out, order.argsort(dim=1))
        attended = self.attention.read(out, key_padding_mask=key_padding_mask)
        dtype = accumulation_dtype(x.dtype)
        h, c = (z.transpose(0, 1).to(dtype) for z in (h, c))
        return LuongSeq2SeqState(h, c, torch.zeros_like(h[:, 0]), attended)

    def decode(self, tokens: Tensor, state: LuongSeq2SeqState) -> tuple[Tensor, Tensor, LuongSeq2SeqState]:
        """Run the decoder over tokens; returns the attentional vectors."""
        y = self.dropout(self.target_embedding(tokens))
        dtype, kept = y.dtype, state.h.dtype
        # The products of all tokens are computed before the loop, with weights in the dtype of the state.
        (first, *others), width = cast("list[nn.LSTMCell]", list(self.cells)), y.shape[-1]
        of_token, fed = torch.split(first.weight_ih, [width, state.h.shape[-1]], 1)
        inputs = F.linear(y, of_token, first.bias_ih + first.bias_hh).to(kept)
        recurrent = torch.cat([fed, first.weight_hh], 1).to(kept)
        upper = [
            (torch.cat([x.weight_ih, x.weight_hh], 1).to(kept), (x.bias_ih + x.bias_hh).to(kept))
            for x in others
        ]
        hs, cs = list(state.h.unbind(1)), list(state.c.unbind(1))
        v, attended = state.attentional, state.attention
        vectors, weights = [], []
        with without_autocast(tokens.device):
            for now in inputs.unbind(1):
                gates = now + F.linear(torch.cat([v, hs[0]], -1), recurrent)
                hs[0], cs[0] = lstm_step(gates, cs[0])
                for i, (weight, bias) in enumerate(upper, 1):
                    below = torch.cat([self.dropout(hs[i - 1]), hs[i]], -1)
                    hs[i], cs[i] = lstm_step(F.linear(below, weight, bias), cs[i])
                context, weight, attended = self.attention.recall(hs[-1].to(dtype).unsqueeze(1), attended)
                v = torch.tanh(apply(self.combine, torch.cat([context.squeeze(1).to(kept), hs[-1]], -1)))
                vectors.append(v)
                weights.append(weight)
        after = LuongSeq2SeqState(torch.stack(hs, 1), torch.stack(cs, 1), v, attended)
        return self.dropout(torch.stack(vectors, 1).to(dtype)), torch.cat(weights, 1), after
