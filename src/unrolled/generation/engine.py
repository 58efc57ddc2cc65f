"""Prefill once, fork, then step: generation from any model that runs as a recurrence."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from unrolled.contract import Recurrent
from unrolled.generation import sampling
from unrolled.generation._mode import drawing_mode
from unrolled.generation._stops import Stop, stop_sequences
from unrolled.ops.checks import on_cpu, wrong, wrong_shape
from unrolled.ops.options import check_integers
from unrolled.ops.state import leaves, select

MOST_ROWS = 100_000  # a random generator for each takes 5 kB


def generate(
    model: Recurrent,
    prompt_ids: Tensor | Sequence[Tensor | Sequence[int]],
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
    on_token: Callable[[int, int], bool | None] | None = None,
) -> list[Tensor]:
    """Continue each prompt `num_samples` times.

    The prompts are prefilled once, in parallel; the state is forked for the samples and stepped token by
    token. The logits go through `repetition_penalty`, `temperature`, `top_k`, `top_p` and `min_p`, in this
    order. Each row samples from its own generator, seeded by (seed, index of the prompt, index of the
    sample), independently of the other rows. The model runs in evaluation mode without gradients; its mode
    is restored afterwards.

    Args:
        model: a `Decoder`, or anything with `init_state`, `prefill`, `step` and `config.vocab_size`.
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
        seed: an integer of at least 0; None takes a random one from the operating system.
        on_token: called as `on_token(row, token_id)` for each new token; returning False ends the row.

    Returns:
        B * num_samples 1-D int64 tensors on the CPU, all samples of the first prompt before those of the
        second: the new tokens of each row, without the prompt and with the stop sequence.

    Raises:
        ValueError: an argument is out of range, or a prompt is empty and the model has no start symbol.
    """
    if not isinstance(model, Recurrent):
        raise ValueError(f"model is a {type(model).__name__}, but must have init_state, prefill and step")
    vocab_size = int(model.config.vocab_size)
    start = vocab_size if model.config.start_token else None
    prompts = _prompts(prompt_ids, vocab_size, start)
    stops = stop_sequences(stop, vocab_size)
    check_integers(0, max_new_tokens=max_new_tokens)
    check_integers(1, num_samples=num_samples)
    if len(prompts) * num_samples > MOST_ROWS:
        raise wrong("num_samples", num_samples, f"at most {MOST_ROWS // len(prompts)} in one call")
    generators = _generators(seed, len(prompts), num_samples)

    sampler = _Sampler(temperature, top_k, top_p, min_p, repetition_penalty)
    sampler(torch.zeros(0, 1), torch.zeros(0, 1, dtype=torch.bool), [])  # checks the options before any work

    rows: list[list[int]] = [[] for _ in generators]
    if not rows or max_new_tokens == 0:
        return [torch.tensor(row, dtype=torch.long) for row in rows]

    def goes_on(row: int, token: int) -> bool:
        """Append a token to a row; return whether the row needs more."""
        rows[row].append(token)
        ended = on_token is not None and on_token(row, token) is False
        ended = ended or any(rows[row][-len(ids) :] == ids for ids in stops)
        return not ended and len(rows[row]) < max_new_tokens

    with drawing_mode(model):
        logits, seen, state = _prefill(model, prompts, num_samples)
        active = list(range(len(rows)))  # unfinished rows, in batch order
        while True:
            tokens = sampler(logits, seen, [generators[row] for row in active])
            sampled = enumerate(zip(active, tokens.tolist(), strict=True))
            going = [index for index, (row, token) in sampled if goes_on(row, token)]
            if not going:
                break
            seen.scatter_(1, tokens.unsqueeze(1), True)
            if len(going) < len(active):
                kept = torch.tensor(going, device=tokens.device)
                tokens, seen, state = tokens[kept], seen[kept], select(state, kept)
                active = [active[index] for index in going]
            logits, state = model.step(tokens, state)
    return [torch.tensor(row, dtype=torch.long) for row in rows]


class _Sampler(NamedTuple):
    """The options of sampling; see `sampling`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float

    def __call__(self, logits: Tensor, seen: Tensor, generators: list[torch.Generator]) -> Tensor:
        """Sample a token for each row of `logits [N, V]`."""
        logits = logits.double()
        if self.repetition_penalty != 1.0:
            logits = sampling.repetition_penalty(logits, seen, self.repetition_penalty)
        logits = sampling.temperature(logits, self.temperature)
        logits = logits if self.top_k is None else sampling.top_k(logits, self.top_k)
        logits = logits if self.top_p is None else sampling.top_p(logits, self.top_p)
        logits = logits if self.min_p is None else sampling.min_p(logits, self.min_p)
        return sampling.sample(logits, generators)


def _prefill(model: Recurrent, prompts: list[Tensor], num_samples: int) -> tuple[Tensor, Tensor, Any]:
    """Read the prompts and fork: logits [B * num_samples, V] after each, tokens seen [same], state."""
    state = model.init_state(len(prompts))
    device = next(iter(leaves(state).values())).device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    # Left padding: the last column of the logits then follows every prompt.
    tokens = nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left").to(device)
    padding = torch.arange(tokens.shape[1], device=device) < tokens.shape[1] - lengths.unsqueeze(1)
    logits, state = model.prefill(tokens, state, key_padding_mask=padding if padding.any() else None)
    fork = torch.arange(len(prompts), device=device).repeat_interleave(num_samples)
    vocab_size = logits.shape[-1]  # also the id of the start symbol, and here that of padding
    seen = torch.zeros(len(prompts), vocab_size + 1, dtype=torch.bool, device=device)
    seen.scatter_(1, tokens.masked_fill(padding, vocab_size), True)
    return logits[fork, -1], seen[fork, :vocab_size], select(state, fork)


def _prompts(
    prompt_ids: Tensor | Sequence[Tensor | Sequence[int]], vocab_size: int, start: int | None
) -> list[Tensor]:
    """Check the prompts; return them as 1-D int64 tensors, with the start symbol in front if there is one."""
    if not isinstance(prompt_ids, Tensor | Sequence):
        raise wrong("prompt_ids", f"a {type(prompt_ids).__name__}", "ids [B, T] or B sequences")
    if isinstance(prompt_ids, Tensor) and prompt_ids.dim() != 2:
        raise wrong_shape("prompt_ids", prompt_ids, "[B, T], or a list of prompts")
    prompts = []
    for index, given in enumerate(prompt_ids):
        name = f"prompt_ids[{index}]"
        if isinstance(given, str) or not isinstance(given, Tensor | Sequence):
            raise wrong(name, repr(given), "a sequence of token ids")
        prompt = on_cpu(name, given)
        if prompt.dim() != 1 or prompt.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
            raise wrong(name, prompt, "whole numbers [T]")
        prompt = prompt.long()
        if start is not None and (not len(prompt) or prompt[0] != start):
            prompt = torch.cat([torch.tensor([start]), prompt])
        if not len(prompt):
            raise ValueError(f"{name} is empty, but this model has no start symbol")
        ids = prompt if start is None else prompt[1:]
        if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
            token = ids[(ids < 0) | (ids >= vocab_size)][0].item()
            raise ValueError(f"{name} holds the token id {token}, but must be in [0, {vocab_size})")
        prompts.append(prompt)
    return prompts


def _generators(seed: int | None, n_prompts: int, num_samples: int) -> list[torch.Generator]:
    """One generator per row, seeded by (seed, prompt, sample); prompt-major."""
    if seed is not None:
        check_integers(0, seed=seed)
    entropy = np.random.SeedSequence(seed).entropy
    return [
        torch.Generator().manual_seed(
            int(np.random.SeedSequence(entropy, spawn_key=(prompt, sample)).generate_state(1, np.uint64)[0])
        )
        for prompt, sample in product(range(n_prompts), range(num_samples))
    ]
