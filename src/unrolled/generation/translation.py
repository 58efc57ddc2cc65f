"""Translation: beam search with an encoder-decoder."""

from collections.abc import Sequence
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor, nn

from unrolled.fields import Size, check_value
from unrolled.generation.beam import BeamOptions, Hypothesis, Steps, beam_search
from unrolled.models.mode import drawing_mode
from unrolled.ops.checks import is_integral, on_cpu, wrong
from unrolled.ops.masks import any_padding, padding_mask

MORE_THAN_SOURCE = 50  # tokens that a translation may be longer than its source (Vaswani et al., section 6.1)


class SearchOptions(BeamOptions, total=False):
    """Keyword arguments of `n_best`."""

    max_new_tokens: int | None
    batch_size: int


class Translates(Steps, Protocol):
    """A model that `translate` can run."""

    def init_state(self, source: Tensor, *, key_padding_mask: Tensor | None = None) -> Any:
        """Read the sources [B, S]; return the state before the first token of their translations."""


def translate(
    model: Translates, sources: Sequence[Tensor | Sequence[int]], **options: Unpack[SearchOptions]
) -> list[Tensor]:
    """Translate each source to the best hypothesis of a beam search.

    Args:
        model: see `n_best`.
        sources: see `n_best`.
        options: the keyword arguments of `n_best`.

    Returns:
        the tokens [T] of each translation, int64 on the CPU, including the stop unless the maximum length was
        reached; empty if there is no hypothesis.

    Raises:
        ValueError: as `n_best`.
    """
    found = n_best(model, sources, **options)
    return [best[0].tokens if best else torch.empty(0, dtype=torch.long, device="cpu") for best in found]


def n_best(
    model: Translates,
    sources: Sequence[Tensor | Sequence[int]],
    *,
    max_new_tokens: int | None = None,
    batch_size: int = 32,
    **options: Unpack[BeamOptions],
) -> list[list[Hypothesis]]:
    """Translate each source to all hypotheses of a beam search.

    Args:
        model: an encoder-decoder, such as an `EncoderDecoder`.
        sources: nonempty sequences of token ids; with the end symbol, if the model was trained with it.
        max_new_tokens: maximum length of a translation; by default the length of its source plus 50, or as
            many tokens as the model has learned positions, if these are fewer.
        batch_size: sources per search; sources of similar length are batched together.
        options: the other keyword arguments of `beam_search`, such as `beam_size` and `stop`.

    Returns:
        for each source up to `beam_size` hypotheses with their scores, the best first.

    Raises:
        ValueError: a source is empty or not a sequence of ids, or as `beam_search`.
    """
    check_value("batch_size", batch_size, Size)
    given = [_source(index, source) for index, source in enumerate(sources)]
    nothing = torch.empty(0, model.config.vocab_size)  # an empty search checks the options
    most: int | Sequence[int] = [] if max_new_tokens is None else max_new_tokens
    beam_search(model, nothing, None, max_new_tokens=most, **options)
    order = sorted(range(len(given)), key=lambda index: len(given[index]))
    found: dict[int, list[Hypothesis]] = {}
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        lengths = [len(given[index]) for index in chosen]
        least = options.get("min_new_tokens", 0)
        limits = [_longest(model, n, least) if max_new_tokens is None else max_new_tokens for n in lengths]
        with drawing_mode(model):
            logits, state = _begin(model, [given[index] for index in chosen])
        hypotheses = beam_search(model, logits, state, max_new_tokens=limits, **options)
        found |= dict(zip(chosen, hypotheses, strict=True))
    return [found[index] for index in range(len(given))]


def _longest(model: Translates, source: int, least: int) -> int:
    """Return the maximum length of a translation; its last token is not read, but the start symbol is."""
    most, positions = max(source + MORE_THAN_SOURCE, least), getattr(model.config, "n_positions", None)
    return most if positions is None else min(most, positions)


def _begin(model: Translates, sources: list[Tensor]) -> tuple[Tensor, Any]:
    """Read the sources and the start symbol; return logits [B, V] of the first token, and the state."""
    device = next(model.parameters()).device if isinstance(model, nn.Module) else torch.device("cpu")
    ids = nn.utils.rnn.pad_sequence(sources, batch_first=True).to(device)
    padding = padding_mask(torch.tensor([len(source) for source in sources], device="cpu")).to(device)
    state = model.init_state(ids, key_padding_mask=any_padding(padding))
    start = torch.full((len(sources),), int(model.config.vocab_size), device=device)
    return model.step(start, state)


def _source(index: int, source: Tensor | Sequence[int]) -> Tensor:
    ids = on_cpu(f"sources[{index}]", source)
    if ids.dim() != 1 or not is_integral(ids):
        raise wrong(f"sources[{index}]", ids, "whole numbers [S]")
    if not len(ids):
        raise ValueError(f"sources[{index}] is empty, but must have at least one token")
    return ids.long()
