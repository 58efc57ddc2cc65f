"""`unrolled evaluate`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unrolled.cli._options import DataDir, Device, Force, refuse
from unrolled.extras import how_to_install

if TYPE_CHECKING:
    import torch
    from torch import nn

    from unrolled.data import BaseDataset

TEST_PART = "test_2016_flickr"
SEARCH: dict[str, Any] = {"beam_size": 4, "length_penalty": 0.6}
"""The beam search of the BLEU that papers report."""


def evaluate(
    run_dir: Annotated[Path, typer.Argument(help="Run folder of unrolled train.")],
    part: Annotated[
        str | None,
        typer.Option("--split", help=f"For translation: the split to translate; by default {TEST_PART}."),
    ] = None,
    beam_size: Annotated[
        int | None, typer.Option(help=f"Beam size; 1 is greedy; by default {SEARCH['beam_size']}.")
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            help=f"Larger values favour longer translations; by default {SEARCH['length_penalty']}."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the translations.")] = None,
    data_dir: DataDir = None,
    device: Device = None,
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

    settings = run_config.read_saved(run_dir, data_dir)
    model: Any = models.load(run_dir)
    run = run_config.resolve(settings)
    task, where = run.dataset.task, choose(device)
    model = model.to(where).eval()
    if task == "translation":
        given = {"beam_size": beam_size, "length_penalty": length_penalty}
        search = SEARCH | {name: x for name, x in given.items() if x is not None}
        report_bleu = _bleu(model, run.dataset, part or TEST_PART, search, out, force)
    else:
        options = {
            "--split": part,
            "--out": out,
            "--beam-size": beam_size,
            "--length-penalty": length_penalty,
        }
        refuse(options, f"translations, but the task of {run_dir} is {task!r}")
    loss = training.evaluate(model, run.dataset, replace(run.train, eval_batches=None))
    bits = f", {loss / math.log(2):.4f} bits" if task in ("tokens", "bits") else ""
    typer.echo(f"validation loss {loss:.4f} {run_config.unit(task, type(model))}{bits}")
    if task in ("labels", "answers"):
        _report_accuracy(model, run.dataset, run.train.batch_size, where)
    if task == "translation":
        report_bleu()


def _report_accuracy(
    model: "nn.Module", dataset: "BaseDataset", batch_size: int, device: "torch.device"
) -> None:
    """Print the accuracy on each split that the data set has."""
    splits = {"validation": dataset.eval_batches, "test": dataset.test_batches}
    for name, batches in splits.items():
        right, count = count_right(model, batches(batch_size), device)
        if count:  # few data sets also have a test split
            typer.echo(f"{name} split: {right:,} of {count:,} correct, {right / count:.2%}")


def _bleu(
    model: Any, dataset: Any, part: str, search: Mapping[str, Any], out: Path | None, force: bool
) -> Callable[[], None]:
    """Check all that could fail, and return a function that translates a split and prints its BLEU."""
    from unrolled.cli.translate import one_line
    from unrolled.files import write_file
    from unrolled.folders import check_file

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


def count_right(model: "nn.Module", batches: Iterable[Any], device: "torch.device") -> tuple[int, int]:
    """Return the number of rows whose most likely label is their first target, and the number of rows."""
    import torch

    right = count = 0
    with torch.inference_mode():
        for batch in batches:
            logits = model(batch.inputs.to(device), key_padding_mask=batch.key_padding_mask.to(device))
            expected = batch.targets.reshape(len(batch.targets), -1)[:, 0]
            right += int((logits.argmax(-1).cpu() == expected).sum())
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
