r"""Transcription: what a model of speech heard, by the best path or by a beam search over symbol sequences.

The best path takes the most likely symbol of each frame, merges repeats and removes blanks. It is one of many
paths that say the same; the beam search adds them up (Hannun et al. 2014, "First-pass large vocabulary
continuous speech recognition using bi-directional recurrent DNNs", arXiv 1408.2873, algorithm 1, without a
language model). For each prefix y the search keeps two probabilities: b of the paths of y that end in a
blank, and n of the others,

    b_t(y) = p_t(blank) (b_{t-1}(y) + n_{t-1}(y))
    n_t(y) = p_t(c) (b_{t-1}(y') + [c' != c] n_{t-1}(y') + n_{t-1}(y))

where y is y' with the symbol c at its end, and c' is the last symbol of y'. After each frame the `beam_size`
most likely prefixes are kept. If all prefixes are kept, the search is exact.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from unrolled.fields import Size, check_value
from unrolled.models.mode import drawing_mode
from unrolled.ops.checks import check_tensor, shape, wrong
from unrolled.ops.masks import padding_mask

NEVER = -math.inf
Prefix = tuple[int, ...]


class Transcribes(Protocol):
    """A model that `transcribe` can run: see `unrolled.models.ctc.CTCModel`."""

    def __call__(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Log-probabilities `[B,T',V+1]` of the symbols and, last, of the blank."""

    def frames(self, x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """How many of the T' frames each row has: `[B]`."""


def transcribe(
    model: Transcribes, sounds: Sequence[Tensor], *, beam_size: int = 1, batch_size: int = 16
) -> list[Tensor]:
    """Return what is said in each sound.

    Args:
        model: a model in any mode; its mode is restored.
        sounds: the features [T, n_mels] of each sound, of any lengths, or what else the model reads.
        beam_size: prefixes that are kept; 1 takes the best path.
        batch_size: sounds that the model reads together.

    Returns:
        the ids [U] of each sound, int64 on the CPU.

    Raises:
        ValueError: `beam_size` or `batch_size` is not an integer of at least 1, or a sound has another shape
            or type.
    """
    check_value("beam_size", beam_size, Size)
    check_value("batch_size", batch_size, Size)
    for index, sound in enumerate(sounds):
        check_tensor(f"sounds[{index}]", sound)
        if sound.dim() == 0 or not len(sound) or sound.shape[1:] != sounds[0].shape[1:]:
            must_be = f"[{', '.join(['T', *map(str, sounds[0].shape[1:])])}] with T of at least 1"
            raise wrong(f"sounds[{index}]", f"of shape {shape(sound)}", must_be)
    device = next(model.parameters()).device if isinstance(model, nn.Module) else None
    found = []
    with drawing_mode(model):
        for start in range(0, len(sounds), batch_size):
            some = list(sounds[start : start + batch_size])
            x = nn.utils.rnn.pad_sequence(some, batch_first=True).to(device)
            padding = padding_mask(torch.tensor([len(sound) for sound in some])).to(device)
            log_probs = model(x, key_padding_mask=padding)
            for row, frames in zip(log_probs.cpu(), model.frames(x, padding).tolist(), strict=True):
                found.append(decode(row[:frames], beam_size=beam_size))
    return [ids.clone() for ids in found]  # outside inference mode, so that a training may use them


def decode(log_probs: Tensor, *, beam_size: int = 1) -> Tensor:
    """Return what is said by one sound: log-probabilities `[T,V+1]`, the blank last, to ids `[U]`.

    Raises:
        ValueError: `log_probs` is no tensor or has another shape, or `beam_size` is below 1.
    """
    check_value("beam_size", beam_size, Size)
    check_tensor("log_probs", log_probs)
    if log_probs.dim() != 2 or log_probs.shape[1] == 0:
        raise wrong("log_probs", f"of shape {list(log_probs.shape)}", "[T, V + 1]")
    return best_path(log_probs) if beam_size == 1 else prefix_search(log_probs, beam_size)[0][0]


def best_path(log_probs: Tensor) -> Tensor:
    """The symbols of the most likely path: `[T,V+1]` to `[U]`."""
    path: Tensor = torch.unique_consecutive(log_probs.argmax(1))
    return path[path != log_probs.shape[1] - 1]


def prefix_search(log_probs: Tensor, beam_size: int) -> list[tuple[Tensor, float]]:
    """The most likely sequences of symbols `[U]`, best first, with their log-probabilities.

    With a small beam, the probabilities leave out the paths through prefixes that were dropped on the way.
    """
    blank = log_probs.shape[1] - 1
    beam: dict[Prefix, tuple[float, float]] = {(): (0.0, NEVER)}  # log b and log n
    for frame in log_probs.double().tolist():
        ends: dict[Prefix, list[float]] = defaultdict(lambda: [NEVER, NEVER])
        for prefix, (after_blank, after_symbol) in beam.items():
            total = _add(after_blank, after_symbol)
            same = ends[prefix]
            same[0] = _add(same[0], total + frame[blank])
            if prefix:
                same[1] = _add(same[1], after_symbol + frame[prefix[-1]])
            for symbol in range(blank):
                before = after_blank if prefix and symbol == prefix[-1] else total
                longer = ends[*prefix, symbol]
                longer[1] = _add(longer[1], before + frame[symbol])
        kept = sorted(ends.items(), key=lambda item: _add(*item[1]), reverse=True)[:beam_size]
        beam = {prefix: (b, n) for prefix, (b, n) in kept}
    return [(torch.tensor(y, dtype=torch.long, device="cpu"), _add(*ends)) for y, ends in beam.items()]


def _add(a: float, b: float) -> float:
    """log(exp(a) + exp(b))."""
    high, low = (a, b) if a > b else (b, a)
    return high if low == NEVER else high + math.log1p(math.exp(low - high))
