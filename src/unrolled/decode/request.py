"""A request for generation, checked once: prompts, sampling options, stops and random streams."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from unrolled.contract import VocabularyConfig
from unrolled.ops.checks import is_integral, on_cpu, wrong, wrong_shape
from unrolled.ops.options import check_integers, is_number

MOST_ROWS = 100_000
LEAST_PENALTY = 1e-6  # logits are divided by the penalty; with this one they do not become infinite

Prompts = Tensor | Sequence[Tensor | Sequence[int]]
Stop = int | Sequence[int | Sequence[int]] | None
OnToken = Callable[[int, int], bool | None]


class Options(TypedDict, total=False):
    """Keyword arguments of `unrolled.generation.generate` besides `on_token` and `weights`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    stop: Stop
    num_samples: int
    seed: int | None


class Sampling(NamedTuple):
    """Options of sampling; see `unrolled.generation.sampling`.

    Raises:
        ValueError: from `check`, if one is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def check(self) -> None:
        """Raise ValueError if an option is out of range."""
        check_repetition_penalty(self.repetition_penalty)
        check_temperature(self.temperature)
        if self.top_k is not None:
            check_top_k(self.top_k)
        if self.top_p is not None:
            check_top_p(self.top_p)
        if self.min_p is not None:
            check_min_p(self.min_p)


class Request(NamedTuple):
    """Prompts that are to be continued.

    Attributes:
        prompts: 1-D int64 tensors, with the start symbol in front if the model has one.
        num_samples: continuations of each.
        limit: maximum number of new tokens of each.
        stops: sequences of token ids that end a continuation.
        sampling: how tokens are drawn.
        keys: the random stream of each continuation, [rows] int64; see
            `unrolled.generation.sampling.uniform`.
    """

    prompts: list[Tensor]
    num_samples: int
    limit: int
    stops: list[list[int]]
    sampling: Sampling
    keys: Tensor

    @property
    def rows(self) -> int:
        """Number of continuations."""
        return len(self.keys)

    @classmethod
    def of(
        cls, config: VocabularyConfig, prompt_ids: Prompts, max_new_tokens: int, **options: Unpack[Options]
    ) -> "Request":
        """Check the arguments of `generate`.

        Raises:
            ValueError: one is out of range, or a prompt is empty and the model has no start symbol.
            TypeError: an option is unknown.
        """
        if unknown := sorted(options.keys() - Options.__annotations__.keys()):
            raise TypeError(f"generate() got an unexpected keyword argument {unknown[0]!r}")
        vocab_size = int(config.vocab_size)
        stops = stop_sequences(options.pop("stop", None), vocab_size)
        num_samples, seed = options.pop("num_samples", 1), options.pop("seed", None)
        prompts = _prompts(prompt_ids, vocab_size, vocab_size if config.start_token else None)
        check_integers(0, max_new_tokens=max_new_tokens)
        check_integers(1, num_samples=num_samples)
        if len(prompts) > MOST_ROWS:
            raise wrong("prompt_ids", f"{len(prompts)} prompts", f"at most {MOST_ROWS} in one call")
        if len(prompts) * num_samples > MOST_ROWS:
            raise wrong("num_samples", num_samples, f"at most {MOST_ROWS // len(prompts)} in one call")
        sampling = Sampling(**options)  # type: ignore[misc]  # the others have been taken out
        sampling.check()
        keys = random_keys(seed, len(prompts), num_samples)
        return cls(prompts, num_samples, max_new_tokens, stops, sampling, keys)


def stop_sequences(stop: Stop, vocab_size: int) -> list[list[int]]:
    """Return each stop as a list of token ids.

    Raises:
        ValueError: a stop is empty, not made of integers, or holds an id outside [0, vocab_size).
    """
    if isinstance(stop, str):
        raise ValueError(f"stop is {stop!r}, but must be an id, or ids or sequences of them")
    alternatives = [] if stop is None else stop if isinstance(stop, Sequence) else [stop]
    stops = [list(ids) if isinstance(ids, Sequence) else [ids] for ids in alternatives]
    for ids in stops:
        if not all(type(token) is int for token in ids):
            raise wrong("stop", repr(stop), "a token id, or a list of ids and of lists of ids")
        if not ids:
            raise ValueError("stop holds an empty sequence, which every continuation ends with")
        if not all(0 <= token < vocab_size for token in ids):
            raise ValueError(f"stop holds {ids}, with a token id outside [0, {vocab_size})")
    return stops


def check_repetition_penalty(penalty: float) -> None:
    """Raise ValueError unless it is at least `LEAST_PENALTY`."""
    if not (is_number(penalty) and penalty >= LEAST_PENALTY):
        raise ValueError(
            f"repetition_penalty is {penalty!r}, but must be a finite number of at least {LEAST_PENALTY}"
        )


def check_temperature(value: float) -> None:
    """Raise ValueError unless it is at least 0."""
    if not (is_number(value) and value >= 0):
        raise ValueError(f"temperature is {value!r}, but must be a finite number of at least 0")


def check_top_k(k: int) -> None:
    """Raise ValueError unless it is an integer of at least 1."""
    if type(k) is not int or k < 1:
        raise ValueError(f"top_k is {k!r}, but must be an integer of at least 1")


def check_top_p(p: float) -> None:
    """Raise ValueError unless it is in (0, 1]."""
    if not (is_number(p) and 0 < p <= 1):
        raise ValueError(f"top_p is {p!r}, but must be in (0, 1]")


def check_min_p(p: float) -> None:
    """Raise ValueError unless it is in [0, 1]."""
    if not (is_number(p) and 0 <= p <= 1):
        raise ValueError(f"min_p is {p!r}, but must be in [0, 1]")


def _prompts(prompt_ids: Prompts, vocab_size: int, start: int | None) -> list[Tensor]:
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
        if prompt.dim() != 1 or not is_integral(prompt):
            raise wrong(name, prompt, "whole numbers [T]")
        prompt = prompt.long()
        if start is not None and (not len(prompt) or prompt[0] != start):
            prompt = torch.cat([torch.tensor([start], device="cpu"), prompt])
        if not len(prompt):
            raise ValueError(f"{name} is empty, but this model has no start symbol")
        ids = prompt if start is None else prompt[1:]
        if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
            token = ids[(ids < 0) | (ids >= vocab_size)][0].item()
            raise ValueError(f"{name} holds the token id {token}, but must be in [0, {vocab_size})")
        prompts.append(prompt)
    return prompts


def random_keys(seed: int | None, n_prompts: int, num_samples: int) -> Tensor:
    """Return the random stream of each continuation, determined by (seed, prompt, sample).

    Args:
        seed: at least 0 and below 2^63; None draws one from the system.
        n_prompts: number of prompts.
        num_samples: continuations of each.

    Returns:
        [n_prompts * num_samples] int64, those of one prompt side by side.

    Raises:
        ValueError: the seed is not such an integer.
    """
    if seed is not None:
        check_integers(0, seed=seed)
    entropy = np.random.SeedSequence(seed).entropy
    keys = [
        np.random.SeedSequence(entropy, spawn_key=row).generate_state(1, np.uint64)[0]
        for row in product(range(n_prompts), range(num_samples))
    ]
    return torch.from_numpy(np.array(keys, np.uint64).view(np.int64))
