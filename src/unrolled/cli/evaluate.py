"""`unrolled evaluate`."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unrolled.cli._output import Force
from unrolled.extras import how_to_install

if TYPE_CHECKING:
    import torch

TEST_PART = "test_2016_flickr"
BEAM_SIZE, LENGTH_PENALTY = 4, 0.6


def evaluate(
    run_dir: Annotated[Path, typer.Argument(help="Run folder of unrolled train.")],
    part: Annotated[
        str | None,
        typer.Option("--split", help=f"For translation: the split to translate; by default {TEST_PART}."),
    ] = None,
    beam_size: Annotated[
        int | None,
        typer.Option(help=f"Beam size; 1 is greedy; by default {BEAM_SIZE}."),
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            help=f"0 favours short translations, larger values long ones; by default {LENGTH_PENALTY}."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the translations.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the data files, if not that of the training.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default cuda if available.")
    ] = None,
    force: Force = False,
) -> None:
    """Evaluate the best weights of a run: validation loss, and accuracy or BLEU where they apply.

    The loss is that of training: nats per token, label, answer or bit, the mean squared error, or the ranking
    loss per target. Labels and answers also get an accuracy, translations the BLEU of sacrebleu with its
    signature.

    \b
    Examples:
      unrolled evaluate runs/digits
      unrolled evaluate runs/multi30k --split test_2017_flickr --out translations.txt
    """
    import math
    from dataclasses import replace

    from unrolled import models, training
    from unrolled.cli import run_config
    from unrolled.cli._device import choose
    from unrolled.cli.translate import one_line
    from unrolled.files import write_file
    from unrolled.folders import check_file

    settings = run_dir / run_config.FILE_NAME
    if not settings.exists():
        raise ValueError(f"{run_dir} is not a run folder of unrolled train: it has no {run_config.FILE_NAME}")
    model: Any = models.load(run_dir)
    overrides = [] if data_dir is None else [f"data.data_dir={str(data_dir)!r}"]
    run: Any = run_config.resolve(run_config.read(settings, overrides))
    task, where = run.dataset.task, choose(device)
    given = {"--split": part, "--out": out, "--beam-size": beam_size, "--length-penalty": length_penalty}
    if task != "translation" and (named := [name for name, value in given.items() if value is not None]):
        raise ValueError(f"{named[0]} is for translations, but the task of {run_dir} is {task!r}")
    beam_size = BEAM_SIZE if beam_size is None else beam_size
    length_penalty = LENGTH_PENALTY if length_penalty is None else length_penalty
    model = model.to(where).eval()
    if task == "translation":  # fail before the work
        score, (sources, references) = scorer(), run.dataset.sentences(part or TEST_PART)
        translations_of(model, run.dataset, [], beam_size, length_penalty)
        if out is not None:
            check_file(out, force=force)
    loss = training.evaluate(model, run.dataset, replace(run.train, eval_batches=None))
    bits = f", {loss / math.log(2):.4f} bits" if task in ("tokens", "bits") else ""
    typer.echo(f"validation loss {loss:.4f} {run_config.unit(task, type(model))}{bits}")
    if task in ("labels", "answers"):
        splits = {"validation": run.dataset.eval_batches, "test": run.dataset.test_batches}
        for name, batches in splits.items():
            right, count = count_right(model, batches(run.train.batch_size), where)
            if count:  # few data sets also have a test split
                typer.echo(f"{name} split: {right:,} of {count:,} correct, {right / count:.2%}")
    if task == "translation":
        translations = translations_of(model, run.dataset, sources, beam_size, length_penalty)
        if out is not None:
            text = "".join(f"{one_line(translation)}\n" for translation in translations)
            write_file(out, text)
        bleu, signature = score(translations, references)
        how = f"beam {beam_size}, length penalty {length_penalty:g}"
        typer.echo(f"{part or TEST_PART}: BLEU {bleu:.2f} with {how}")
        typer.echo(f"signature: {signature}")


def count_right(model: Any, batches: Iterable[Any], device: "torch.device") -> tuple[int, int]:
    """Return the number of rows whose most likely label is their first target, and the number of rows."""
    import torch

    right = count = 0
    with torch.inference_mode():
        for batch in batches:
            logits = model(batch.inputs.to(device), key_padding_mask=batch.key_padding_mask.to(device))
            wanted = batch.targets.reshape(len(batch.targets), -1)[:, 0]
            right += int((logits.argmax(-1).cpu() == wanted).sum())
            count += len(batch.targets)
    return right, count


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


def scorer() -> Any:
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
