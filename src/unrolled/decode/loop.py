"""The loop of generation in C++: draw a token, read it, and so on, many times in one call."""

import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unrolled.decode.batch import Batch, Drawing
from unrolled.decode.memory import PlanState
from unrolled.decode.request import OnToken, Request
from unrolled.ops import native
from unrolled.ops.state import map_tensors, select

if TYPE_CHECKING:
    from unrolled.decode.plan import Plan

BLOCK_SECONDS = 0.02  # between two returns to Python, where callbacks run and an interrupt is noticed


def run(plan: "Plan", request: Request, on_token: OnToken | None) -> list[Tensor]:
    """Continue the prompts of a request with rows and a limit above 0; return the new tokens of each row."""
    logits, state = _prefill(plan, request)
    batch, rows, block = Batch(plan, logits), request.rows, 1
    seen: Tensor | None = None
    if request.sampling.repetition_penalty != 1:
        seen = _seen(request, logits.shape[1])
    for row, key in enumerate(request.keys.tolist()):
        of_row = map_tensors(partial(_row, row), state)
        used = None if seen is None else seen[row]
        batch.start(row, of_row, Drawing(request.sampling, key, request.limit, request.stops, used))
    while (active := batch.active).any():
        before, began = batch.length.clone(), time.perf_counter()
        steps = min(block, request.limit - int(before[active].min()))
        batch.draw(steps)
        block = max(1, int(BLOCK_SECONDS * steps / (time.perf_counter() - began)))
        if on_token is not None:
            _report(batch, before, on_token)
        for row in batch.failed():  # but not a row that `on_token` has ended
            raise ValueError(batch.reason(row))
    return [batch.tokens(row).clone() for row in range(rows)]


def _report(batch: Batch, before: Tensor, on_token: OnToken) -> None:
    """Call `on_token` for the new tokens, in the order in which they were drawn; it may end a row."""
    first, last = before.tolist(), batch.length.tolist()
    drawn = [(place, row) for row in range(len(first)) for place in range(first[row], last[row])]
    for place, row in sorted(drawn):
        if place < last[row] and on_token(row, int(batch.tokens(row)[place])) is False:
            last[row] = place + 1
            batch.end(row, place + 1)


def _prefill(plan: "Plan", request: Request) -> tuple[Tensor, "PlanState"]:
    """Read the prompts and fork; return the logits after each prompt, and the state."""
    prompts = request.prompts
    lengths = torch.tensor([len(prompt) for prompt in prompts], device="cpu")
    numbers = torch.arange(len(prompts), device="cpu")
    rows = numbers.repeat_interleave(lengths)
    places = torch.full_like(rows, -1)
    places[lengths.cumsum(0) - 1] = numbers
    logits = native.floats(len(prompts), plan.config.vocab_size)
    state = plan.with_room(plan.init_state(len(prompts)), int(lengths.max()))
    plan.read(torch.cat(prompts), rows, places, [state], logits)
    fork = numbers.repeat_interleave(request.num_samples)
    return logits[fork], select(state, fork)


def _row(row: int, x: Tensor) -> Tensor:
    return x[row : row + 1]


def _seen(request: Request, vocab_size: int) -> Tensor:
    """Which tokens the prompt of each row holds: [rows, vocab_size]; the start symbol does not count."""
    seen = torch.zeros(len(request.prompts), vocab_size + 1, dtype=torch.uint8, device="cpu")
    for row, prompt in zip(seen, request.prompts, strict=True):
        row[prompt] = 1
    return seen[:, :vocab_size].repeat_interleave(request.num_samples, 0).contiguous()
