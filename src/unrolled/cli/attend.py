"""`unrolled attend`."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unrolled.cli._options import DataDir, Force, refuse
from unrolled.cli._output import check_picture, require_matplotlib, software

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from unrolled.bench.attention_plots import Alignment
    from unrolled.data import Vocabulary


def attend(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run.")],
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="A sentence to translate, or a line of a story that ends with the question; repeatable."
        ),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="File with more such texts, one per line.")] = None,
    example: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Without a text: number of the test question or validation example, from 0; by default 0.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="File of the picture.")] = Path("attention.png"),
    beam_size: Annotated[
        int | None, typer.Option(min=1, help="Beam size of the translation; by default 4.")
    ] = None,
    data_dir: DataDir = None,
    force: Force = False,
) -> None:
    """Draw what a trained model attends to.

    For a translation model: the weight of each source word (columns) for each generated word (rows). For a
    memory network: what each hop reads from the story. For a Neural Turing Machine: where its heads are at
    each step.

    \b
    Examples:
      unrolled attend runs/en-de --text "A man rides a bicycle." --out man.png
      unrolled attend runs/babi/1 --example 3
      unrolled attend runs/babi/1 --file story.txt
      unrolled attend runs/ntm
    """
    from unrolled import models

    require_matplotlib()
    from unrolled.bench import plots
    from unrolled.cli.run_config import read_text
    from unrolled.files import write_file

    check_picture(out, "attend", force)
    lines = list(text or [])
    if file is not None:
        sentences = [line for line in read_text(file).splitlines() if line.strip()]
        if not sentences:
            raise ValueError(f"{file} has no sentence")
        lines += sentences
    model: Any = models.load(run_dir).eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # drawn as a box
        figure = _figure(model, run_dir, lines, example, beam_size, data_dir)
        picture = plots.png(figure, software("attend"))
    write_file(out, picture)
    typer.echo(f"drawn: {out}", err=True)


def _figure(
    model: Any,
    run_dir: Path,
    lines: list[str],
    example: int | None,
    beam_size: int | None,
    data_dir: Path | None,
) -> "Figure":
    from unrolled.models import MemN2N, MemNN

    if hasattr(model, "attend") and not isinstance(model, MemN2N | MemNN):
        refuse({"--example": example}, "a memory network or a Neural Turing Machine")
        return _translations(model, run_dir, lines, 4 if beam_size is None else beam_size)
    refuse({"--beam-size": beam_size}, "a translation model")
    if isinstance(model, MemN2N | MemNN):
        if lines:
            refuse({"--example": example}, "a picture without a text")
        return _story(model, run_dir, lines, example or 0, data_dir)
    if hasattr(model, "trace"):
        if lines:
            raise ValueError(f"{run_dir} holds a model that does not read text; use --example")
        return _trace(model, run_dir, example or 0, data_dir)
    raise ValueError(
        f"{run_dir} holds a model of the kind {model.model_name!r}, whose attention cannot be drawn; "
        "use a translation model, a memory network or a Neural Turing Machine"
    )


def alignment(model: Any, vocabulary: "Vocabulary", sentence: str, *, beam_size: int = 4) -> "Alignment":
    """Translate a sentence and return the alignment between its words and those of the translation.

    The pieces of a word are merged: weights are summed over source pieces and averaged over target pieces.

    Raises:
        ValueError: the sentence is empty.
    """
    import torch

    from unrolled.bench.attention_plots import Alignment
    from unrolled.data import END_ID
    from unrolled.generation import translate

    source = vocabulary.encode(sentence)
    if not sentence.strip():
        raise ValueError("--text is empty, but must be a sentence to translate")
    (target,) = translate(model, [source], beam_size=beam_size, stop=END_ID)
    read = torch.cat([torch.tensor([model.config.vocab_size]), target[:-1]])
    with torch.inference_mode():
        weights = model.attend(torch.tensor([source]), read.unsqueeze(0))[0].double()
    columns, of_column = words(vocabulary, source, END_ID)
    rows, of_row = words(vocabulary, target.tolist(), END_ID)
    weights = weights.new_zeros(len(target), len(columns)).index_add(1, of_column, weights)
    weights = weights.new_zeros(len(rows), len(columns)).index_add(0, of_row, weights)
    return Alignment((weights / of_row.bincount().unsqueeze(1)).numpy(), rows, columns)


def words(vocabulary: "Vocabulary", ids: Sequence[int], stop: int | None) -> tuple[list[str], "Tensor"]:
    """Return the words of the pieces, including the end symbol, and the index of the word of each piece."""
    import torch

    place: list[int] = []
    spelled: list[str] = []
    for n, piece in enumerate(ids, 1):
        if piece == stop:
            spelled.append("</s>")
        else:
            found = vocabulary.decode(torch.tensor(ids[:n])).split()
            if not found:  # only a space, which belongs to the next word
                found = [""]
            spelled = found
        place.append(len(spelled) - 1)
    return spelled, torch.tensor(place).clamp(max=len(spelled) - 1)  # a trailing space of several bytes


def _translations(model: Any, run_dir: Path, lines: list[str], beam_size: int) -> "Figure":
    from unrolled.bench import attention_plots, plots
    from unrolled.data import Vocabulary

    if not lines:
        raise ValueError("--text is missing: this model translates a sentence, as in --text 'A man sleeps.'")
    vocabulary = Vocabulary.load(run_dir)
    panels = [alignment(model, vocabulary, line, beam_size=beam_size) for line in lines]
    for panel in panels:
        typer.echo(" ".join(panel.rows))
    return attention_plots.alignments(plots.LIGHT, panels)


def _story(model: Any, run_dir: Path, lines: list[str], example: int, data_dir: Path | None) -> "Figure":
    import torch

    from unrolled.bench import attention_plots, plots

    dataset = _dataset(run_dir, data_dir)
    batch = dataset.encode(lines) if lines else _example(dataset.test_batches(1), example)
    padding = batch.key_padding_mask
    with torch.inference_mode():
        logits = model(batch.inputs, key_padding_mask=padding)
        weights = model.attend(batch.inputs, key_padding_mask=padding)
    *story, question = [dataset.decode(*row) for row in zip(batch.inputs[0], padding[0], strict=True)]
    # The numbers of the supporting sentences may follow the answer in the targets.
    answer, right = int(logits.argmax()), int(batch.targets.flatten()[0])
    title = f"{question}?  {dataset.words[answer]}"
    if not lines and answer != right:
        title += f"  (right: {dataset.words[right]})"
    typer.echo(title)
    return attention_plots.hops(plots.LIGHT, weights[0].T.numpy(), story, title)


def _trace(model: Any, run_dir: Path, example: int, data_dir: Path | None) -> "Figure":
    import torch

    from unrolled.bench import attention_plots, plots

    batch = _example(_dataset(run_dir, data_dir).eval_batches(1), example)
    with torch.inference_mode():
        trace = model.trace(batch.inputs)
    panels = [
        (f"{verb} head" + (f" {head + 1}" if weights.shape[2] > 1 else ""), weights[0, :, head].numpy())
        for verb, weights in (("write", trace.write), ("read", trace.read))
        for head in range(weights.shape[2])
    ]
    return attention_plots.heads(plots.LIGHT, panels)


def _dataset(run_dir: Path, data_dir: Path | None) -> Any:
    from unrolled.cli import run_config

    return run_config.reopen(run_dir, run_config.read_saved(run_dir, data_dir)).dataset


def _example(batches: Any, example: int) -> Any:
    for index, batch in enumerate(batches):
        if index == example:
            return batch
    raise ValueError(f"--example is {example}, but must be at most {index}")
