r"""LSTMN: an LSTM that keeps all past states on a tape, and attends to them in place of the last one.

    a_i = v . tanh(W_h h_i + W_x x_t + W_a h~_{t-1})        s = softmax_i(a)        i = 0 ... t-1
    [h~_t; c~_t] = sum_i s_i [h_i; c_i]
    i, f, g, o = sigma, sigma, tanh, sigma of U h~_t + V x_t + b
    c_t = f c~_t + i g        h_t = o tanh(c_t)

The tape starts with a pair of zeros, h_0 and c_0, which stays on it. Cheng, Dong and Lapata 2016, "Long
Short-Term Memory-Networks for Machine Reading", arXiv 1601.06733, eq. 4-9. The encoder in the code of the
paper leaves out W_a h~; here, `attended_proj` = 0 has that effect.

Shallow fusion with another sequence (section 4) is ordinary attention outside this layer; deep fusion is
`DeepFusionLSTMN`.

Cost, with N = hidden_size, P = input_size and A = score_size: time O(T N (N+P+A) + T^2 (N+A)), sequentially;
per generated token time O(N (N+P+A) + T (N+A)), state O(T (N+A)). With a `tape_length` of L, replace T by L.
Cannot: run in parallel over the sequence.
Equals softmax attention: never. With a tape of length 1 it is `torch.nn.LSTM`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled.ops.checks import check_key_padding_mask, shape
from unrolled.ops.observing import transforming
from unrolled.ops.precision import without_autocast
from unrolled.ops.state_checks import CONSTANT, Growing, check_state
from unrolled.recurrent._layer import RecurrentLayer, uniform


class LSTMNState(NamedTuple):
    """The tape of S entries, the oldest first, and what the last step read from the tape.

    `tape [B,S,2N]` of [h_i; c_i]; `keys [B,S,A]`, W_h h_i; `filled [B,S]`, False where an entry is empty, as
    at padding; `attended [B,N]`, h~.
    """

    tape: Tensor
    keys: Tensor
    filled: Tensor
    attended: Tensor


def tape_weights(keys: Tensor, query: Tensor, score: Tensor, filled: Tensor) -> Tensor:
    """Compute the softmax of score . tanh(key + query) over the filled entries (eq. 4, 5).

    `keys [B,S,A]`, `query [B,A]`, `score [A]` and `filled [B,S]`, True at least once in each row, to
    `[B,S]`.
    """
    scores = (keys + query.unsqueeze(1)).tanh() @ score
    return scores.masked_fill(~filled, -math.inf).softmax(-1)


def read_tape(weights: Tensor, tape: Tensor) -> tuple[Tensor, Tensor]:
    """Average the entries of `tape [B,S,2N]` by `weights [B,S]` (eq. 6): h~ and c~ `[B,N]`."""
    hidden, memory = torch.bmm(weights.unsqueeze(1), tape).squeeze(1).chunk(2, -1)
    return hidden, memory


class LSTMN(RecurrentLayer[LSTMNState]):
    """A layer of LSTM cells that attend to their own past.

    All weights are initialised uniformly in +-1/sqrt(hidden_size), as in torch's LSTM.

    Args:
        input_size: width of the inputs.
        hidden_size: width of the outputs.
        score_size: width A of the layer that scores; `hidden_size` by default.
        tape_length: number of latest entries that are kept, where the initial zeros count as one; by default
            all are kept.

    Raises:
        ValueError: a size below 1.
    """

    supports = RecurrentLayer.supports.but(recurrence="growing")
    growing: Growing = dict.fromkeys(("tape", "keys", "filled"), (1, "S"))

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        score_size: int | None = None,
        tape_length: int | None = None,
    ):
        super().__init__(input_size, hidden_size)
        for name, size in (("score_size", score_size), ("tape_length", tape_length)):
            if size is not None and size < 1:
                raise ValueError(f"{name} is {size!r}, but must be a whole number of at least 1, or None")
        if tape_length is not None:
            self.supports = RecurrentLayer.supports
            self.growing = CONSTANT
        self.tape_length = tape_length
        self.score_size = hidden_size if score_size is None else score_size
        N, A = hidden_size, self.score_size
        self.input_proj = nn.Linear(input_size, 4 * N + A)  # of the gates, then of the query
        self.recurrent = nn.Parameter(torch.empty(4 * N, N))
        self.key_proj = nn.Parameter(torch.empty(A, N))
        self.attended_proj = nn.Parameter(torch.empty(A, N))
        self.score = nn.Parameter(torch.empty(A))
        uniform(self, N)

    def init_state(self, batch_size: int) -> LSTMNState:
        """Make a tape with a pair of zeros; a bounded tape has its final length from the start."""
        B, S, N = batch_size, self.tape_length or 1, self.hidden_size
        zeros = self.recurrent.new_zeros(B, N, dtype=self._state_dtype)
        filled = torch.zeros(B, S, dtype=torch.bool, device=zeros.device)
        filled[:, -1] = True
        return LSTMNState(zeros.new_zeros(B, S, 2 * N), zeros.new_zeros(B, S, self.score_size), filled, zeros)

    def advance(self, inputs: Tensor, state: LSTMNState) -> tuple[Tensor, LSTMNState]:
        """Run one step, and append to the tape; a full tape loses its oldest entry."""
        return self._append(state, *self._turn(inputs, state, 0.0))

    def scan(self, inputs: Tensor, state: LSTMNState, padding: Tensor | None) -> tuple[Tensor, LSTMNState]:
        """Run all steps.

        A growing tape is allocated once and then written to, except where autograd has to keep the tape of
        every step, and under `torch.func` transforms, which do not support such writes.

        A step at padding uses an entry of the tape, but this entry is never read.
        """
        B, T = inputs.shape[:2]
        if self.tape_length is not None or T == 0:
            return super().scan(inputs, state, padding)
        S, recording = state.tape.shape[1], torch.is_grad_enabled() or transforming()
        new = inputs.new_ones(B, T, dtype=torch.bool) if padding is None else ~padding
        all_filled = torch.cat([state.filled, new], 1)
        if not recording:
            all_tape, all_keys = (F.pad(x, (0, 0, 0, T)) for x in (state.tape, state.keys))
        outputs = []
        for n, now in enumerate(inputs.unbind(1), start=S):
            h, entry, key, attended = self._turn(now, state, 0.0)
            if recording:
                tape, keys = torch.cat([state.tape, entry], 1), torch.cat([state.keys, key], 1)
            else:
                all_tape[:, n : n + 1], all_keys[:, n : n + 1] = entry, key
                tape, keys = all_tape[:, : n + 1], all_keys[:, : n + 1]
            if padding is not None:
                attended = torch.where(padding[:, n - S, None], state.attended, attended)
            state = LSTMNState(tape, keys, all_filled[:, : n + 1], attended)
            outputs.append(h)
        return torch.stack(outputs, 1), state

    def _append(
        self, state: LSTMNState, h: Tensor, entry: Tensor, key: Tensor, attended: Tensor
    ) -> tuple[Tensor, LSTMNState]:
        oldest = 0 if self.tape_length is None else 1
        tape = torch.cat([state.tape[:, oldest:], entry], 1)
        keys = torch.cat([state.keys[:, oldest:], key], 1)
        filled = F.pad(state.filled[:, oldest:], (0, 1), value=True)
        return h, LSTMNState(tape, keys, filled, attended)

    def _turn(
        self, inputs: Tensor, state: LSTMNState, besides: Tensor | float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Read the tape and run one step: return h, the entry [h; c] `[B,1,2N]`, its key, and h~.

        `besides [B,N]` is added to the cell state.
        """
        dtype = inputs.dtype
        sums, query = torch.split(inputs, [4 * self.hidden_size, self.score_size], -1)
        query = torch.addmm(query, state.attended, self.attended_proj.to(dtype).mT)
        weights = tape_weights(state.keys, query, self.score.to(dtype), state.filled)
        attended, memory = read_tape(weights, state.tape)
        sums = torch.addmm(sums, attended, self.recurrent.to(dtype).mT)
        i, f, g, o = sums.chunk(4, -1)
        c = f.sigmoid() * memory + i.sigmoid() * g.tanh() + besides
        h = o.sigmoid() * c.tanh()
        entry, key = torch.cat([h, c], 1), F.linear(h, self.key_proj.to(dtype))
        return h, entry.unsqueeze(1), key.unsqueeze(1), attended


class DeepFusionState(NamedTuple):
    """The reader's own tape, and the tapes of the encoder.

    `own`, the state of the `LSTMN`; `source [B,S,2N]` of [gamma_j; alpha_j] and its `keys [B,S,A]`;
    `filled [B,S]`, False at padding; `read [B,N]`, gamma~.
    """

    own: LSTMNState
    source: Tensor
    keys: Tensor
    filled: Tensor
    read: Tensor


def tapes(state: LSTMNState) -> tuple[Tensor, Tensor, Tensor]:
    """Split an encoder's state: hidden and memory `[B,S,N]`, and a mask `[B,S]`, True at empty entries."""
    hidden, memory = state.tape.chunk(2, -1)
    return hidden, memory, ~state.filled


class DeepFusionLSTMN(nn.Module):
    r"""An LSTMN that also attends to the tapes of an encoder, and adds the result to its cell state.

        p_j from gamma_j, x_t and gamma~_{t-1}, as s_i from h_i, x_t and h~_{t-1}, but with other weights
        [gamma~_t; alpha~_t] = sum_j p_j [gamma_j; alpha_j]
        r_t = sigma(W_r [gamma~_t; x_t])        c_t = r_t alpha~_t + f c~_t + i g

    Cheng, Dong and Lapata 2016, arXiv 1601.06733, section 4, "deep attention fusion". The tapes hold the
    hidden states gamma and the memory cells alpha of any LSTM that is `hidden_size` wide. A row whose source
    is all padding reads zeros.

    Args:
        input_size, hidden_size, score_size, tape_length: see `LSTMN`.
    """

    def __init__(self, input_size: int, hidden_size: int, **options: int | None):
        super().__init__()
        self.cell = LSTMN(input_size, hidden_size, **options)
        grows: Growing = dict.fromkeys(("source", "keys", "filled"), (1, "S"))
        self.growing: Growing = {**grows, "own": self.cell.growing}
        N, A = hidden_size, self.cell.score_size
        self.input_proj = nn.Linear(input_size, N + A)  # of the gate r, then of the query
        self.recurrent = nn.Parameter(torch.empty(N, N))
        self.key_proj = nn.Parameter(torch.empty(A, N))
        self.read_proj = nn.Parameter(torch.empty(A, N))
        self.score = nn.Parameter(torch.empty(A))
        uniform(self, N)

    def init_state(
        self, hidden: Tensor, memory: Tensor, *, key_padding_mask: Tensor | None = None
    ) -> DeepFusionState:
        """Make the state for the tapes `hidden` and `memory [B,S,N]`; padding (`[B,S]`, True) is masked.

        Raises:
            ValueError: the tapes are empty, not N wide, or differ in shape.
        """
        if hidden.dim() != 3 or hidden.shape != memory.shape or hidden.shape[-1] != self.cell.hidden_size:
            raise ValueError(
                f"hidden has shape {shape(hidden)} and memory {shape(memory)}, but both must be "
                f"[B, S, {self.cell.hidden_size}]"
            )
        B, S = hidden.shape[:2]
        if S == 0:
            raise ValueError("hidden has length 0, but must have at least one entry to read")
        own = self.cell.init_state(B)
        source = torch.cat([hidden, memory], -1).to(own.tape.dtype)
        filled = torch.ones(B, S, dtype=torch.bool, device=source.device)
        if key_padding_mask is not None:
            check_key_padding_mask(key_padding_mask, B, S)
            filled = ~key_padding_mask
            source = source.masked_fill(key_padding_mask.unsqueeze(-1), 0)
        with without_autocast(source.device):
            keys = F.linear(source[..., : self.cell.hidden_size], self.key_proj.to(source.dtype))
        return DeepFusionState(own, source, keys, filled, own.attended)

    def step(self, x_t: Tensor, state: DeepFusionState) -> tuple[Tensor, Tensor, DeepFusionState]:
        """Run one token `x_t [B,input_size]`: h `[B,N]`, the weights p `[B,S]`, and the new state.

        Raises:
            ValueError: `x_t` has another shape or type, or another number of rows than the state.
        """
        self.cell._check_input("x_t", x_t, 2)
        check_state(self, state, len(x_t), self.recurrent, self._empty_state)
        own, dtype = state.own, state.source.dtype
        sums, fusing = self.cell.project(x_t), self.input_proj(x_t)
        with without_autocast(x_t.device):
            gate, query = torch.split(fusing.to(dtype), [self.cell.hidden_size, self.cell.score_size], -1)
            query = torch.addmm(query, state.read, self.read_proj.to(dtype).mT)
            nothing = ~state.filled.any(1, keepdim=True)
            weights = tape_weights(state.keys, query, self.score.to(dtype), state.filled | nothing)
            weights = weights * state.filled
            read, memory = read_tape(weights, state.source)
            gate = torch.addmm(gate, read, self.recurrent.to(dtype).mT).sigmoid()
            h, own = self.cell._append(own, *self.cell._turn(sums.to(dtype), own, gate * memory))
        return h.to(sums.dtype), weights, state._replace(own=own, read=read)

    def prefill(self, x: Tensor, state: DeepFusionState) -> tuple[Tensor, Tensor, DeepFusionState]:
        """Run `x [B,T,input_size]`: h `[B,T,N]`, the weights p `[B,T,S]`, and the new state.

        Raises:
            ValueError: as `step`, or `x` has length 0.
        """
        self.cell._check_input("x", x, 3)
        if x.shape[1] == 0:
            raise ValueError(f"x has shape {shape(x)}, but must have at least one step")
        outputs, weights = [], []
        for x_t in x.unbind(1):
            h, p, state = self.step(x_t, state)
            outputs.append(h)
            weights.append(p)
        return torch.stack(outputs, 1), torch.stack(weights, 1), state

    def _empty_state(self) -> DeepFusionState:
        """Make the state for tapes of no rows."""
        tape = self.recurrent.new_empty(0, 1, self.cell.hidden_size)
        with torch.no_grad():
            return self.init_state(tape, tape)
