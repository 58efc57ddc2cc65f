"""The loop of generation in C++: draw a token, read it, and so on, many times in one call."""

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unrolled.decode.request import OnToken, Request
from unrolled.ops import native
from unrolled.ops.state import select

if TYPE_CHECKING:
    from unrolled.decode.plan import Plan, PlanState

BLOCK_SECONDS = 0.02  # between two returns to Python, where callbacks run and an interrupt is noticed


class Loop:
    """Rows that are continued.

    Args:
        plan: what continues them.
        request: with at least one row, and a limit above 0.
    """

    def __init__(self, plan: "Plan", request: Request) -> None:
        self.plan, self.request = plan, request
        self.logits, self.state = _prefill(plan, request)
        rows = request.rows
        self.tokens = torch.zeros(rows, request.limit, dtype=torch.long)
        self.length = torch.zeros(rows, dtype=torch.long)
        self.active = torch.ones(rows, dtype=torch.uint8)
        self.seen: Tensor | None = None
        if request.sampling.repetition_penalty != 1:
            self.seen = _seen(request, self.logits.shape[1])

    def run(self, on_token: OnToken | None) -> list[Tensor]:
        """Continue all rows to their ends: the new tokens of each."""
        block = 1
        while self.active.any():
            before, began = self.length.clone(), time.perf_counter()
            self._draw(min(block, self.request.limit - int(before[self.active == 1].min())))
            if time.perf_counter() - began < BLOCK_SECONDS / 2:
                block *= 2
            if on_token is not None:
                self._report(before, on_token)
        lengths = self.length.tolist()
        return [row[:length].clone() for row, length in zip(self.tokens, lengths, strict=True)]

    def _draw(self, n: int) -> None:
        """Draw up to n tokens for each row, and read them."""
        left = self.plan.positions_left(self.state)
        self.state = self.plan.with_room(self.state, n if left is None else min(n, left))
        request, (temperature, top_k, top_p, min_p, penalty) = self.request, self.request.sampling
        V = self.logits.shape[1]
        sampling = native.struct("Sampling")(
            temperature=temperature,
            top_k=min(V if top_k is None else top_k, V),
            top_p=1.0 if top_p is None else top_p,
            min_p=0.0 if min_p is None else min_p,
            repetition_penalty=penalty,
        )
        ends = torch.tensor([len(ids) for ids in request.stops], dtype=torch.long).cumsum(0)
        stops = torch.tensor([token for ids in request.stops for token in ids], dtype=torch.long)
        continuation = native.struct("Continuation")(
            rows=request.rows,
            most=n,
            limit=request.limit,
            logits=native.address(self.logits),
            seen=native.address(self.seen),
            key=native.address(request.keys),
            length=native.address(self.length),
            tokens=native.address(self.tokens),
            active=native.address(self.active),
            stops=len(request.stops),
            stop=native.address(stops),
            stop_end=native.address(ends),
        )
        native.call("decode_on", self.plan.described(self.state), sampling, continuation)
        if (bad := (self.active == native.enum("RowStatus")["NO_DISTRIBUTION"]).nonzero()).numel():
            raise ValueError(
                f"logits of row {int(bad[0])} hold NaN, +inf or only -inf, but must define a distribution"
            )
        if (self.active == native.enum("RowStatus")["NO_POSITION"]).any():
            self.plan.with_room(self.state, 1)  # raises

    def _report(self, before: Tensor, on_token: OnToken) -> None:
        """Call `on_token` for the new tokens, in the order in which they were drawn; it may end a row."""
        first, last = before.tolist(), self.length.tolist()
        for place in range(min(first), max(last)):
            for row in range(len(first)):
                drawn = first[row] <= place < last[row]
                if drawn and on_token(row, int(self.tokens[row, place])) is False:
                    last[row] = place + 1
                    self.length[row], self.active[row] = place + 1, 0


def _prefill(plan: "Plan", request: Request) -> tuple[Tensor, "PlanState"]:
    """Read the prompts, and fork: logits after each, and the state."""
    prompts = request.prompts
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    rows = torch.arange(len(prompts)).repeat_interleave(lengths)
    places = torch.full((len(rows),), -1)
    places[lengths.cumsum(0) - 1] = torch.arange(len(prompts))
    logits = torch.empty(len(prompts), plan.config.vocab_size)
    state = plan.with_room(plan.init_state(len(prompts)), int(lengths.max()))
    plan.read(torch.cat(prompts), rows, places, state, logits)
    fork = torch.arange(len(prompts)).repeat_interleave(request.num_samples)
    return logits[fork], select(state, fork)


def _seen(request: Request, vocab_size: int) -> Tensor:
    """Which tokens the prompt of each row holds: [rows, vocab_size]; the start symbol is none."""
    seen = torch.zeros(len(request.prompts), vocab_size + 1, dtype=torch.uint8)
    for row, prompt in zip(seen, request.prompts, strict=True):
        row[prompt] = 1
    return seen[:, :vocab_size].repeat_interleave(request.num_samples, 0).contiguous()
