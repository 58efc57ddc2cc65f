"""`unrolled translate`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from unrolled.cli._options import Device


def translate(
    run_dir: Annotated[Path, typer.Argument(help="Run folder of unrolled train.")],
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT...", help="Sentences; by default the lines of standard input."),
    ] = None,
    beam_size: Annotated[int, typer.Option(min=1, help="Beam size; 1 is greedy.")] = 4,
    length_penalty: Annotated[
        float, typer.Option(help="0 favours short translations, larger values longer ones.")
    ] = 0.6,
    no_repeat_ngram_size: Annotated[
        int, typer.Option(help="No n-gram of this size occurs twice in a translation; 0 disables.")
    ] = 0,
    n_best: Annotated[
        int | None,
        typer.Option(help="Print the n best translations of each sentence, each after its score and a tab."),
    ] = None,
    device: Device = None,
) -> None:
    """Translate sentences with the best weights of a run, one translation per line.

    An empty line of standard input gives an empty line.

    \b
    Examples:
      unrolled translate runs/multi30k "A dog runs through the snow."
      unrolled translate runs/multi30k < sentences.txt
      unrolled translate runs/multi30k "A dog runs." --n-best 3
    """
    from unrolled import generation
    from unrolled.cli._device import choose
    from unrolled.cli._models import load_for
    from unrolled.data import END_ID, Vocabulary

    if n_best is not None and not 1 <= n_best <= beam_size:
        raise ValueError(f"--n-best is {n_best}, but must be from 1 to --beam-size = {beam_size}")
    vocabulary = Vocabulary.load(run_dir)
    model = load_for("translation", run_dir)
    vocabulary.check(model.config.vocab_size)
    lines = list(texts) if texts else _lines(sys.stdin.read())
    for number, line in enumerate(texts or (), start=1):
        if not line.strip():
            raise ValueError(f"sentence {number} is empty, but must have something to translate")
    sentences = [line.strip() for line in lines if line.strip()]
    if not lines:
        raise ValueError("there are no sentences: pass them as arguments or on standard input")
    model, sources = model.to(choose(device)), [vocabulary.encode(sentence) for sentence in sentences]
    options: Any = {
        "beam_size": beam_size,
        "length_penalty": length_penalty,
        "no_repeat_ngram_size": no_repeat_ngram_size,
        "stop": END_ID,
    }
    if n_best is None:
        found = generation.translate(model, sources, **options)
        told = (one_line(vocabulary.decode(ids)) for ids in found)
    else:
        ranked = generation.n_best(model, sources, **options)
        told = (
            "\n".join(f"{x.score:.4f}\t{one_line(vocabulary.decode(x.tokens))}" for x in hypotheses[:n_best])
            for hypotheses in ranked
        )
    for line in lines:
        typer.echo(next(told) if line.strip() else "")


def one_line(translation: str) -> str:
    """Return a translation with its line breaks, which a poorly trained model may produce, as spaces."""
    return " ".join(translation.split())


def _lines(text: str) -> list[str]:
    """Split at line feeds only, so that line n of the output translates line n of the file."""
    return text.removesuffix("\n").split("\n") if text else []
