"""A plan: a snapshot of a model, with its weights packed for generation on a CPU.

    plan = unrolled.decode.plan(model, weights="int8")
    logits, state = plan.prefill(prompts, plan.init_state(len(prompts)))
    logits, state = plan.step(token, state)

A plan computes what the model computes in evaluation mode, from token ids to logits, in one call of a C++
kernel. When the model changes, make another plan. Each call uses the number of threads that torch has at that
time.
"""

from collections.abc import Sequence
from ctypes import Array, addressof, c_char, create_string_buffer
from operator import add
from pathlib import Path
from typing import Unpack, cast

import torch
from torch import Tensor, nn

from unrolled.contract import UnsupportedError
from unrolled.decode import loop, saving, states
from unrolled.decode.memory import Layout, Mark, PlanState, copied
from unrolled.decode.models import program
from unrolled.decode.packing import PACKINGS, Weights
from unrolled.decode.program import MOST_POSITIONS, Program
from unrolled.decode.request import OnToken, Options, Prompts, Request
from unrolled.folders import PLAN_FILE
from unrolled.models import Decoder, DecoderConfig, DecoderState
from unrolled.models.checks import check_ids
from unrolled.ops import native
from unrolled.ops.checks import check_key_padding_mask, wrong
from unrolled.ops.dispatch import prefers
from unrolled.ops.observing import observed
from unrolled.ops.options import check_batch_size, check_integers
from unrolled.ops.sequence import refuse
from unrolled.ops.softmax import CACHE_GROWS
from unrolled.ops.state import leaves, map_tensors


class Plan:
    """A model with packed weights; see `plan`.

    Copies share the weights, which never change. A plan cannot be pickled: save it for another process.

    Attributes:
        config: the config of the model.
        weights: "fp32", "bf16", "int8" or "int4".
        steady: set to True to make logits and states the same, bit by bit, however many tokens are read at
            once. Only bf16 on AMX units needs this; reading fewer than five tokens then takes longer.
        documents: JSON values that belong to the model, such as its vocabulary, by the name of their file.
    """

    def __init__(
        self, config: DecoderConfig, weights: Weights, program: Program, empty: DecoderState
    ) -> None:
        self.config, self.weights = config, weights
        self.steady = False
        self._program, self._empty = program, empty
        self._layout = Layout(program.state_size, program.cache)
        self.documents: dict[str, object] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that the plan holds: packed matrices, embeddings in 16 bits (in fp32 with fp32 matrices), and
        all other weights in fp32.
        """
        return self._program.nbytes

    def save(self, path: str | Path) -> None:
        """Write the plan into the folder `path`, created if needed, for `unrolled.decode.load`.

        A SHA-256 covers the weights, the config and the documents. A crash leaves no file half-written.

        Raises:
            ValueError: the folder holds a model.
        """
        saving.save(self, path)

    def tensors(self) -> dict[str, Tensor]:
        """Return what `save` writes, by name; see `unrolled.decode.saving`."""
        return saving.tensors(self._program)

    def init_state(self, batch_size: int) -> PlanState:
        """The state before the first token."""
        check_batch_size(batch_size)
        return self._layout.empty(batch_size)

    def prefill(
        self,
        tokens: Tensor,
        state: PlanState,
        *,
        key_padding_mask: Tensor | None = None,
        logits_to_keep: int | None = None,
    ) -> tuple[Tensor, PlanState]:
        """Read several tokens [B, T], after those that `state` has read; `state` is not modified.

        With a `key_padding_mask` [B, T], rows may have different numbers of tokens: padding is left out, and
        its logits are 0. `logits_to_keep` is the number of positions, at the end, whose logits are computed;
        all by default.

        Returns:
            logits [B, T, vocab_size], or [B, min(logits_to_keep, T), vocab_size], fp32, and the new state.

        Raises:
            ValueError: ids outside the vocabulary, an argument of the wrong shape or type, a state of another
                plan or batch, more tokens than the model has positions, or `logits_to_keep` below 1.
        """
        self._check("tokens", tokens, state, "[B, T]")
        B, T = tokens.shape
        keep = torch.ones(B, T, dtype=torch.bool, device="cpu")
        if key_padding_mask is not None:
            check_key_padding_mask(key_padding_mask, B, T)
            keep = ~key_padding_mask
        first = 0
        if logits_to_keep is not None:
            check_integers(1, logits_to_keep=logits_to_keep)
            first = max(T - logits_to_keep, 0)
        logits = native.floats(B * (T - first), self.config.vocab_size).zero_()
        row, column = keep.nonzero().unbind(1)
        place = torch.where(column < first, -1, row * (T - first) + column - first)
        after = self.with_room(copied(state), keep.sum(1).tolist())
        self.read(tokens[keep], row, place, [after], logits)
        return logits.view(B, T - first, self.config.vocab_size), after

    def step(self, token: Tensor, state: PlanState, *, in_place: bool = False) -> tuple[Tensor, PlanState]:
        """Read one token [B] per row; return logits [B, vocab_size], fp32, and the new state.

        With `in_place` the new state takes the memory of `state`, which must not be used again.
        """
        self._check("token", token, state, "[B]")
        if in_place and not all(x.is_contiguous() for x in state):
            raise ValueError("state is not contiguous, but must be so with in_place=True")
        rows = torch.arange(len(token), device="cpu")
        logits = native.floats(len(token), self.config.vocab_size)
        after = self.with_room(state if in_place else copied(state), 1)
        self.read(token, rows, rows, [after], logits)
        return logits, after

    def generate(
        self,
        prompt_ids: Prompts,
        max_new_tokens: int,
        *,
        on_token: OnToken | None = None,
        **options: Unpack[Options],
    ) -> list[Tensor]:
        """Continue each prompt, with the options and the random numbers of `unrolled.generation.generate`."""
        return self.run(Request.of(self.config, prompt_ids, max_new_tokens, **options), on_token)

    def run(self, request: Request, on_token: OnToken | None = None) -> list[Tensor]:
        """Continue the prompts of a request; return the new tokens of each row."""
        refuse("a plan")
        if not request.rows or not request.limit:
            return [torch.empty(0, dtype=torch.long, device="cpu") for _ in range(request.rows)]
        return loop.run(self, request, on_token)

    @torch.no_grad()
    def from_model(self, state: DecoderState) -> PlanState:
        """Return the state that continues from a state of the model.

        Raises:
            ValueError: it is a state of another model.
        """
        if not isinstance(state, DecoderState) or not self._fits(state):
            raise ValueError("state is not a state of this plan's model")
        rows = len(state.position)
        after = self.with_room(self.init_state(rows), int(state.position.max()) if rows else 0)
        states.from_model(self._program.slots, state, after)
        return after

    def to_model(self, state: PlanState) -> DecoderState:
        """Return a copy of a state of this plan, as a state of the model.

        Raises:
            ValueError: it is not a state of this plan.
        """
        self._layout.check(state)
        return states.to_model(self._program.slots, state, self._empty)

    def _fits(self, state: DecoderState) -> bool:
        """Whether a state has the tensors of this plan's model, with sizes that are its own."""
        found, own = leaves(state), leaves(self._empty)
        return found.keys() == own.keys() and all(
            x.dim() == own[name].dim()
            and len(x) == len(state.position)
            and all(
                a == b or (b == 0 and name.rpartition(".")[2] in CACHE_GROWS)
                for a, b in zip(x.shape[1:], own[name].shape[1:], strict=True)
            )
            for name, x in found.items()
        )

    # ---- reading in place

    @property
    def n_positions(self) -> int | None:
        """Maximum number of tokens of a sequence; None for any number."""
        most = self._program.most_positions
        return most if most < MOST_POSITIONS else None

    def positions_left(self, state: PlanState) -> int:
        """How many more tokens every row may read."""
        return self._program.most_positions - int(state.position.max())

    def too_long(self, length: int) -> str:
        """Say that the model has no positions for that many tokens."""
        limit = self._program.most_positions
        return f"the input has length {length}, but must have at most {limit}, the positions of the model"

    def with_room(self, state: PlanState, tokens: int | Sequence[int]) -> PlanState:
        """Return the state with room in its cache for more tokens; the rest is shared.

        Args:
            state: a state of this plan.
            tokens: the number of tokens, the same for all rows or one for each.

        Raises:
            ValueError: the model has no positions for them, or the state has an impossible position.
        """
        positions = state.position.tolist() or [0]
        low, high = min(positions), max(positions)
        if low < 0 or high > MOST_POSITIONS:
            raise ValueError(
                f"state has positions from {low} to {high}, but must have them in [0, {MOST_POSITIONS}]"
            )
        added = [tokens] * len(positions) if isinstance(tokens, int) else tokens
        needed = max(map(add, positions, added), default=0)
        if needed > self._program.most_positions:
            raise ValueError(self.too_long(needed))
        return state._replace(cache=self._layout.grown(state.cache, needed))

    def resized(self, state: PlanState, tokens: int) -> PlanState:
        """Return a copy of a state whose cache has room for that many tokens in all, and no more."""
        return self._layout.resized(state, tokens)

    def mark(self, state: PlanState) -> Mark:
        """Note the state of one sequence, for `back`; no more of the cache is copied than one block."""
        return self._layout.mark(state)

    def back(self, mark: Mark) -> PlanState:
        """Return a copy of the state that was noted, as it was then."""
        return self._layout.back(mark)

    def state_bytes(self, tokens: int) -> int:
        """Bytes of the state of one sequence with room for that many tokens."""
        return self._layout.nbytes(tokens)

    def read(
        self, tokens: Tensor, rows: Tensor, places: Tensor, states: Sequence[PlanState], logits: Tensor
    ) -> None:
        """Read tokens, and update the states in place.

        Args:
            tokens: [n] ids; those of one row in order.
            rows: [n], the row that each token belongs to; the rows of all states are numbered from 0 on.
            places: [n], the row of `logits` for what follows each token; -1 for none.
            states: states with room for the tokens, from `with_room`.
            logits: [N, vocab_size] fp32, written.
        """
        arrays = [x.to("cpu", torch.long).contiguous() for x in (tokens, rows, places)]
        token, sequence, place = map(native.address, arrays)
        described = native.struct("Tokens")(
            n=len(tokens), token=token, sequence=sequence, place=place, logits=native.address(logits)
        )
        sequences = self.sequences(states)
        native.call("decode", self.described(sequences), described)

    def described(self, sequences: Array[c_char]) -> bytes:
        """Describe the program and the sequences that it reads to the kernel."""
        p = self._program
        return native.struct("Program")(
            **p.fields,
            threads=torch.get_num_threads(),
            steady=self.steady,
            positions=p.most_positions,
            instruction=p.address,
            sequence=addressof(sequences),
        )

    def sequences(self, states: Sequence[PlanState | None]) -> Array[c_char]:
        """Describe the rows of states, in order, to the kernel; None is a row that is not read."""
        described, pack = [], native.struct("SequenceState")
        for state in states:
            if state is None:
                described.append(pack(position=0, state=0, cache=0, capacity=0))
                continue
            position, fixed, cache = map(native.address, state)
            capacity = state.cache.shape[1]
            fixed_bytes, cache_bytes = 4 * state.fixed.shape[1], 4 * capacity * state.cache.shape[2]
            described += [
                pack(
                    position=position + 8 * row,
                    state=fixed + fixed_bytes * row,
                    cache=cache + cache_bytes * row,
                    capacity=capacity,
                )
                for row in range(len(state.position))
            ]
        return create_string_buffer(b"".join(described))

    def _check(self, name: str, tokens: Tensor, state: PlanState, axes: str) -> None:
        refuse("a plan")
        self._layout.check(state)
        check_ids(name, tokens, self.config.vocab_size + self.config.start_token, state.fixed, axes)
        if (found := len(state.position)) != (rows := tokens.shape[0]):
            raise ValueError(f"state has {found} rows, but must have {rows}, as {name} has")


def plan(model: nn.Module, weights: Weights = "fp32", *, sample: Tensor | None = None) -> Plan:
    """Make a plan of a decoder for generation on a CPU.

    Args:
        model: a `Decoder`, on a CPU. Its attention may be linear (with any feature map of
            `unrolled.ops.feature_maps`), gated_linear, retention, rfa, mamba, mamba2, delta_net, kda, rwkv4,
            rwkv7, window or softmax, and differ by layer.
        weights: the form of the matrices: "fp32", "bf16" (half the memory), "int8" (a quarter) or "int4" (a
            seventh); see `unrolled.decode.packing`. The inputs of a matrix are rounded too: to 16 bits with
            "int8", to 8 bits with "int4", and to bfloat16 with "bf16" on processors with AVX-512 BF16 and
            without AMX. Embeddings are stored in bfloat16, except with "fp32". With "int4", the output layer
            and matrices with fewer than 64 outputs are in "int8". Everything else is computed in fp32.
        sample: token ids [B, T], with "int4" only: matrices are rounded such that their outputs on this
            sample change least; see `unrolled.decode.calibration`. About 16,000 tokens of the training data
            are enough.

    Raises:
        ValueError: `weights` is none of these, or `sample` is given without "int4" or holds invalid ids.
        UnsupportedError: a plan cannot run the model, or the C++ kernels were not built; the message says
            why.
    """
    if weights not in list(PACKINGS):  # a list may be asked for what has no hash
        raise wrong("weights", repr(weights), f"one of {', '.join(PACKINGS)}")
    if sample is not None and weights != "int4":
        raise ValueError(f"sample is given, but must be None for weights = {weights!r}")
    _check_kernels()
    with torch.no_grad(), torch.device("cpu"):
        return _planned(model, weights, program(model, weights, sample=sample))


def load(path: str | Path) -> Plan:
    """Read a plan that `Plan.save` or `unrolled quantize` wrote.

    The weights are mapped into memory, not copied, so processes share them; nothing is packed. About
    half of the time goes into the SHA-256 of the file. Nobody may truncate the file while the plan is in use.

    Raises:
        ValueError: the folder holds no plan; a file is damaged, was changed after it was saved or has another
            layout; or a tensor is missing, unknown or of another shape or type.
        UnsupportedError: the C++ kernels were not built.
    """
    _check_kernels()
    saved = saving.read(path)
    with torch.no_grad(), torch.device("cpu"):
        try:
            return _planned(saved.model, saved.weights, program(saved.model, saved.weights, saved.packed))
        except ValueError as error:
            raise ValueError(f"{Path(path) / PLAN_FILE} is not of this model: {error}") from error


def unasked() -> bool:
    """Whether a plan may replace a model unasked: nothing changes or observes what torch computes."""
    return prefers("native") and not torch.is_autocast_enabled("cpu") and not observed()


def _check_kernels() -> None:
    if (missing := native.missing()) is not None:
        raise UnsupportedError(f"a plan needs the C++ kernels: {missing}")


def _planned(model: nn.Module, weights: Weights, program: Program) -> Plan:
    decoder = cast(Decoder, model)
    empty = map_tensors(lambda x: torch.zeros(x.shape, dtype=x.dtype), decoder.init_state(0))
    made = Plan(decoder.config, weights, program, empty)
    made.documents = dict(decoder.documents)
    return made
