"""The BLEU of a run that translates."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from unrolled.extras import how_to_install

TEST_PART = "test_2016_flickr"
SEARCH: dict[str, Any] = {"beam_size": 4, "length_penalty": 0.6}
"""The beam search of the BLEU that papers report."""


def bleu_reporter(
    model: Any, dataset: Any, part: str, search: Mapping[str, Any], out: Path | None, force: bool
) -> Callable[[], None]:
    """Check everything that could fail, and return a function that translates a split and prints its BLEU.

    Settings of `search` that are None are those of `SEARCH`.
    """
    from unrolled.cli.translate import one_line
    from unrolled.files import write_file
    from unrolled.folders import check_file

    search = SEARCH | {name: x for name, x in search.items() if x is not None}
    score, (sources, references) = scorer(), dataset.sentences(part)
    translations_of(model, dataset, [], **search)  # refuses a beam size of 0
    if out is not None:
        check_file(out, force=force)

    def report() -> None:
        translations = translations_of(model, dataset, sources, **search)
        if out is not None:
            write_file(out, "".join(f"{one_line(translation)}\n" for translation in translations))
        bleu, signature = score(translations, references)
        how = "beam {beam_size}, length penalty {length_penalty:g}".format_map(search)
        typer.echo(f"{part}: BLEU {bleu:.2f} with {how}")
        typer.echo(f"signature: {signature}")

    return report


def bleu(model: Any, dataset: Any) -> float:
    """Translate `TEST_PART` by greedy search and return the BLEU.

    Raises:
        ImportError: sacrebleu is not installed.
    """
    score, (sources, references) = scorer(), dataset.sentences(TEST_PART)
    found, _ = score(translations_of(model, dataset, sources, beam_size=1, length_penalty=0.0), references)
    return found


def translations_of(
    model: Any, dataset: Any, sources: Sequence[str], beam_size: int, length_penalty: float
) -> list[str]:
    """Translate sentences by beam search."""
    from unrolled import generation

    found = generation.translate(
        model,
        [dataset.encode(source) for source in sources],
        beam_size=beam_size,
        length_penalty=length_penalty,
        stop=dataset.stop,
    )
    return [dataset.decode(ids) for ids in found]


def scorer() -> Callable[[Sequence[str], Sequence[str]], tuple[float, str]]:
    """Return a function from translations and references to their BLEU and its signature.

    Raises:
        ImportError: sacrebleu is not installed.
    """
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise ImportError(f"BLEU needs sacrebleu, which is missing: {how_to_install('translate')}") from error
    metric = BLEU()

    def score(translations: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
        found = metric.corpus_score(list(translations), [list(references)])
        return float(found.score), str(metric.get_signature())

    return score
