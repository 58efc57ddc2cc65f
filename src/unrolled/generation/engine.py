"""Prefill once, fork, then step: generation from any model that runs as a recurrence."""

from typing import Any

import torch
from torch import Tensor, nn

from unrolled.contract import Recurrent, UnsupportedError
from unrolled.decode import Plan, plan, unasked
from unrolled.decode.packing import Weights
from unrolled.decode.request import OnToken, Prompts, Request, Sampling, Stop
from unrolled.generation import sampling
from unrolled.generation.cuda_graph import Step, recordable
from unrolled.models.language_model import keeping
from unrolled.models.mode import drawing_mode
from unrolled.ops.masks import any_padding
from unrolled.ops.sequence import refuse
from unrolled.ops.state import leaves, select

PLANNED_TOKENS = 32  # with fewer, packing the weights takes longer than it saves
RECORDED_TOKENS = 8  # with fewer, recording a CUDA graph takes longer than it saves


def generate(
    model: Recurrent | Plan,
    prompt_ids: Prompts,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: Stop = None,
    num_samples: int = 1,
    seed: int | None = None,
    weights: Weights | None = None,
    on_token: OnToken | None = None,
) -> list[Tensor]:
    """Continue each prompt `num_samples` times.

    The prompts are read once, in parallel. The state is then forked for the samples, and each sample is
    generated token by token. The logits go through `repetition_penalty`, `temperature`, `top_k`, `top_p` and
    `min_p`, in this order. Each row has its own random stream (`sampling.uniform`), determined by the seed,
    the index of the prompt and the index of the sample, so it does not depend on the other rows. The model
    runs in evaluation mode without gradients; its mode is restored afterwards.

    On a CPU, a plan runs the model for 32 or more new tokens, or with `weights`, if `unrolled.decode.plan`
    supports it. The plan is made for this call, and holds its own copy of the weights. It computes in fp32,
    so a model in bf16 or fp16 may draw other tokens than without a plan. To make it only once, keep a plan
    and call `plan.generate`.

    On CUDA, steps are replayed from a CUDA graph if the state has a constant size, unless the model has hooks
    or parts from outside this library, or runs under autocast.

    Args:
        model: a `Decoder`, or any other `unrolled.contract.Recurrent`; or a plan.
        prompt_ids: token ids [B, T], or B sequences of token ids of any lengths. A model with a start symbol
            (`config.start_token`) reads it before every prompt that does not begin with it, so a prompt
            may be empty; other models need at least one token.
        max_new_tokens: maximum number of new tokens per row.
        temperature: see `sampling.temperature`; 0 is greedy.
        top_k: see `sampling.top_k`.
        top_p: see `sampling.top_p`.
        min_p: see `sampling.min_p`.
        repetition_penalty: see `sampling.repetition_penalty`; the prompt's tokens count as seen.
        stop: one token id, or several, each an id or a sequence of ids. A row ends once its new tokens
            end with one of them.
        num_samples: continuations per prompt.
        seed: an integer of at least 0 and below 2^63; None takes a random one from the operating system.
        weights: run a plan with weights in this form; see `unrolled.decode.plan`. None for a plan in fp32
            where it is faster, and for the model itself elsewhere.
        on_token: called as `on_token(row, token_id)` for each new token; returning False ends the row.

    Returns:
        B * num_samples 1-D int64 tensors on the CPU, all samples of the first prompt before those of the
        second: the new tokens of each row, without the prompt and with the stop sequence.

    Raises:
        ValueError: an argument is out of range, a prompt is empty and the model has no start symbol, or
            `weights` differs from the form of a given plan.
        UnsupportedError: `weights` is given, but a plan cannot run the model.
    """
    refuse("generation")
    if not isinstance(model, Recurrent):
        raise ValueError(
            f"model is a {type(model).__name__}, but must have config, init_state, prefill and step"
        )
    request = Request.of(
        model.config, prompt_ids, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, repetition_penalty=repetition_penalty, stop=stop, num_samples=num_samples, seed=seed,
    )  # fmt: skip
    if isinstance(model, Plan) and weights not in (None, model.weights):
        raise ValueError(f"weights is {weights!r}, but must be {model.weights!r}, as in the plan")
    planned = model if isinstance(model, Plan) else _plan(model, request, weights)
    if planned is not None:
        return planned.run(request, on_token)
    return run(model, request, on_token)


def _plan(model: Recurrent, request: Request, weights: Weights | None) -> Plan | None:
    """Make a plan for a request, if it is asked for or pays off."""
    if not isinstance(model, nn.Module):
        if weights is not None:
            raise UnsupportedError(f"weights is {weights!r}, but a plan cannot run {type(model).__name__}")
        return None
    if weights is None and (request.limit < PLANNED_TOKENS or not unasked()):
        return None
    try:
        return plan(model, "fp32" if weights is None else weights)
    except UnsupportedError:
        if weights is not None:
            raise
        return None


def run(model: Recurrent, request: Request, on_token: OnToken | None = None) -> list[Tensor]:
    """Continue the prompts of a request with the model itself, which defines what a plan must return."""
    rows: list[list[int]] = [[] for _ in range(request.rows)]
    if not rows or request.limit == 0:
        return [torch.tensor(row, dtype=torch.long, device="cpu") for row in rows]
    keys = request.keys.tolist()

    def goes_on(row: int, token: int) -> bool:
        """Append a token to a row; return whether the row needs more."""
        rows[row].append(token)
        ended = on_token is not None and on_token(row, token) is False
        ended = ended or any(rows[row][-len(ids) :] == ids for ids in request.stops)
        return not ended and len(rows[row]) < request.limit

    def draws() -> Tensor:
        """Return the next random number of each row of the batch."""
        return torch.tensor(
            [sampling.uniform(keys[row], len(rows[row])) for row in batch], dtype=torch.float64, device="cpu"
        )

    def advance(tokens: Tensor, draws: Tensor, seen: Tensor, state: Any) -> tuple[Tensor, Any]:
        tokens = tokens.clamp(max=seen.shape[1] - 1)  # rows that have ended may have drawn no token
        seen.scatter_(1, tokens.unsqueeze(1), True)
        logits, state = model.step(tokens, state)
        return sampling.draw(filtered(logits, seen, request.sampling), draws), state

    with drawing_mode(model):
        logits, seen, state = _prefill(model, request.prompts, request.num_samples)
        long_enough = request.limit >= RECORDED_TOKENS
        step = Step(advance, record=long_enough and recordable(model, logits.device))
        batch = list(range(len(rows)))  # rows of the batch, in order
        active = set(batch)  # unfinished rows
        tokens = sampling.draw(filtered(logits, seen, request.sampling), draws())
        while True:
            for row, token in zip(batch, tokens.tolist(), strict=True):
                if row in active:
                    sampling.check_drawn(row, token, logits.shape[-1])
                    if not goes_on(row, token):
                        active.remove(row)
            if not active:
                break
            if step.drops_rows(len(batch) - len(active), len(batch)):
                kept = torch.tensor([i for i, row in enumerate(batch) if row in active], device=tokens.device)
                tokens, seen, state = tokens[kept], seen[kept], select(state, kept)
                batch = [row for row in batch if row in active]
            tokens, state = step(tokens, draws(), seen, state)
    return [torch.tensor(row, dtype=torch.long, device="cpu") for row in rows]


def filtered(logits: Tensor, seen: Tensor, options: Sampling) -> Tensor:
    """Apply the options of sampling to `logits [N, V]`; `seen [N, V]` marks the tokens that have occurred."""
    temperature, top_k, top_p, min_p, penalty = options
    logits = logits.double()
    if penalty != 1.0:
        logits = sampling.repetition_penalty(logits, seen, penalty)
    logits = sampling.temperature(logits, temperature)
    logits = logits if top_k is None else sampling.top_k(logits, top_k)
    logits = logits if top_p is None else sampling.top_p(logits, top_p)
    return logits if min_p is None else sampling.min_p(logits, min_p)


def _prefill(model: Recurrent, prompts: list[Tensor], num_samples: int) -> tuple[Tensor, Tensor, Any]:
    """Read the prompts and fork; return logits [B * num_samples, V], tokens seen [same] and the state."""
    state = model.init_state(len(prompts))
    device = next((x.device for x in leaves(state).values()), torch.device("cpu"))
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    # Left padding: the last column of the logits then follows every prompt.
    tokens = nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left").to(device)
    padding = torch.arange(tokens.shape[1], device=device) < tokens.shape[1] - lengths.unsqueeze(1)
    mask = any_padding(padding)
    logits, state = model.prefill(tokens, state, key_padding_mask=mask, **keeping(model, 1))
    fork = torch.arange(len(prompts), device=device).repeat_interleave(num_samples)
    vocab_size = logits.shape[-1]  # also the id of the start symbol, and here that of padding
    seen = torch.zeros(len(prompts), vocab_size + 1, dtype=torch.bool, device=device)
    seen.scatter_(1, tokens.masked_fill(padding, vocab_size), True)
    return logits[fork, -1], seen[fork, :vocab_size], select(state, fork)
