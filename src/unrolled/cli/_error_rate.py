"""The error rate of transcriptions."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unrolled.extras import how_to_install

if TYPE_CHECKING:
    from unrolled.data import BaseDataset


@dataclass(frozen=True)
class ErrorRate:
    """The error rate of transcriptions, in words or phones.

    Attributes:
        unit: "word" or "phone".
        rate: number of units substituted, deleted or inserted, divided by the number of units that were said;
            it can exceed 1.
        standard_error: standard error of `rate` over the utterances; None for a single utterance.
        errors: number of errors.
        units: number of words or phones that were said.
        utterances: number of utterances.
        beam_size: beam size of the search.
    """

    unit: str
    rate: float
    standard_error: float | None
    errors: int
    units: int
    utterances: int
    beam_size: int


def error_rate(model: Any, dataset: "BaseDataset", batch_size: int, beam_size: int) -> ErrorRate:
    """Transcribe the validation split and count the errors with jiwer.

    The standard error is that of a ratio of two means,

        sqrt(N / (N - 1) sum_i (e_i - r n_i)^2) / sum_i n_i

    where r is the error rate, N the number of utterances, and e_i the number of errors in the n_i words of
    utterance i.

    Raises:
        ImportError: jiwer is not installed.
    """
    try:
        import jiwer
    except ImportError as error:
        raise ImportError(f"error rates need the library jiwer: {how_to_install('speech')}") from error
    from unrolled import generation
    from unrolled.contract import IGNORED

    vocabulary, counts = dataset.vocabulary, []
    for inputs, targets, padding, *_ in dataset.eval_batches(batch_size):
        rows = inputs if padding is None else [x[~pad] for x, pad in zip(inputs, padding, strict=True)]
        found = generation.transcribe(model, list(rows), beam_size=beam_size)
        for ids, said in zip(found, targets, strict=True):
            words = vocabulary.decode(said[said != IGNORED])
            result = jiwer.process_words(words, vocabulary.decode(ids))
            wrong = result.substitutions + result.deletions + result.insertions
            counts.append((wrong, len(words.split())))
    errors, units, n = sum(e for e, _ in counts), sum(n for _, n in counts), len(counts)
    rate, deviation = errors / units, None
    if n > 1:
        deviation = math.sqrt(n / (n - 1) * sum((e - rate * k) ** 2 for e, k in counts)) / units
    return ErrorRate(str(vocabulary.counted), rate, deviation, errors, units, n, beam_size)


def sentence(found: ErrorRate) -> str:
    """Describe an error rate."""
    deviation = "" if found.standard_error is None else f" ± {found.standard_error:.2%}"
    return (
        f"{found.unit} error rate {found.rate:.2%}{deviation} ({found.errors:,} errors in {found.units:,} "
        f"{found.unit}s of {found.utterances:,} utterances, beam {found.beam_size})"
    )
