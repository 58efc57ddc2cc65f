"""`unrolled tokenize`."""

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unrolled.cli._options import Force, refuse

if TYPE_CHECKING:
    from unrolled.data import CorpusIndex

LEARNED = ("bpe", "bytes")
LARGEST_VOCABULARY = 2**24  # far above what anybody learns, and what the library can hold


def tokenize(
    files: Annotated[
        list[Path], typer.Argument(help="Text, .jsonl or .parquet; text and .jsonl may be .gz or .zst.")
    ],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    tokenizer: Annotated[
        str, typer.Option(help="bpe (learned byte pairs), bytes, or the path of a tokenizer.json.")
    ] = "bpe",
    vocab_size: Annotated[
        int | None, typer.Option(help="Maximum vocabulary size of bpe; by default 8,000.")
    ] = None,
    sample: Annotated[
        int | None, typer.Option(help="Characters to learn byte pairs from; by default 200,000,000.")
    ] = None,
    field: Annotated[
        str | None, typer.Option(help="Field of .jsonl and .parquet with the text; by default text.")
    ] = None,
    separator: Annotated[
        str | None,
        typer.Option(
            help=r'For text: what separates documents, such as "\n\n"; by default a file is one document.'
        ),
    ] = None,
    end: Annotated[
        str | None,
        typer.Option(help="For a tokenizer.json: the token that ends a document; by default its own."),
    ] = None,
    val_fraction: Annotated[
        float, typer.Option(help="Fraction of the documents held out for validation; at least one is.")
    ] = 0.01,
    jobs: Annotated[
        int, typer.Option(help="Threads that encode; the output is the same for any number.")
    ] = 1,
    shard_tokens: Annotated[
        int, typer.Option(help="Tokens after which a shard ends, with its block of text.")
    ] = 2**28,
    force: Force = False,
) -> None:
    """Turn files of any size into tokens to train on. Repeat the command to finish after an interruption.

    No file is held in memory as a whole. Byte pairs are learned from the beginning of every file, in
    proportion to its size, without the documents that are held out. A document is held out or not by a hash
    of its text. If this selects no document or all of them, only the last one is held out. If there
    is only one document, its end is held out.

    \b
    Examples:
      unrolled tokenize corpus/*.txt --out tokens --vocab-size 8000
      unrolled tokenize more.jsonl.zst --out more --field text --jobs 2 \\
        --tokenizer tokens/tokenizer.json
      unrolled tokenize stories.txt --out stories --separator "<|endoftext|>"

    \b
    Train on it, or on a mixture with weights:
      unrolled train data.name=tokens data.path=tokens run_dir=runs/book
      unrolled train data.name=tokens "data.path={tokens: 0.7, more: 0.3}" \\
        run_dir=runs/both
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from unrolled.data import Documents, Tokenizing, is_corpus
    from unrolled.folders import check_folder, contents

    learned = tokenizer in LEARNED
    _check(tokenizer, vocab_size=vocab_size, sample=sample, end=end)
    _check_numbers(jobs=jobs, shard_tokens=shard_tokens, val_fraction=val_fraction)
    _check_files(files, [] if learned else [Path(tokenizer)])
    if separator is not None:
        separator = separator.replace("\\r", "\r").replace("\\n", "\n").replace("\\t", "\t")
        separator = separator.replace("\r\n", "\n")  # as files are read
        if not separator:
            raise ValueError("--separator is empty, but must be a text that stands between documents")
    documents = Documents(files, separator, "text" if field is None else field)
    if "text" not in documents.formats:
        refuse({"--separator": separator}, "text, but no file is one")
    if documents.formats == {"text"}:
        refuse({"--field": field}, ".jsonl and .parquet, but all files are text")
    check_folder(out, "a corpus of unrolled tokenize", lambda: is_corpus(out), force=force)
    made = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    tokenizing = Tokenizing(
        documents=documents,
        tokenizer=tokenizer,
        vocab_size=8_000 if vocab_size is None else vocab_size,
        sample=200_000_000 if sample is None else sample,
        end=end,
        val_fraction=val_fraction,
        shard_tokens=shard_tokens,
    )
    columns: Any = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
    )
    began, written = time.perf_counter(), 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tokenizing", total=sum(file.stat().st_size for file in files), tokens=0)

        def count(tokens: int) -> None:
            nonlocal written
            written += tokens
            bar.update(task, tokens=written)

        try:
            index = tokenizing.write(
                out,
                jobs=jobs,
                start_over=force,
                on_bytes=lambda done: bar.update(task, completed=done),
                on_tokens=count,
            )
        finally:
            if made and not contents(out):
                shutil.rmtree(out)
    _report(index, out, written, time.perf_counter() - began)


def _report(index: "CorpusIndex", out: Path, written: int, seconds: float) -> None:
    """Print what the corpus holds, and how fast this call was."""
    totals = index.totals
    train, val = totals["train_tokens"], totals["val_tokens"]
    tokens = train + val
    documents = f"{totals['documents']:,} document{'' if totals['documents'] == 1 else 's'}"
    typer.echo(
        f"{out}: {documents}, {tokens:,} tokens ({train:,} to train on, {val:,} to "
        f"validate), {totals['text_bytes'] / tokens:.2f} bytes per token, {index.vocab_size:,} ids"
    )
    typer.echo(
        f"{written:,} tokens in {seconds:.1f} s, {written / seconds:,.0f} tokens/s"
        if written
        else "it was finished before; its files are intact"
    )


def _check(tokenizer: str, *, vocab_size: int | None, sample: int | None, end: str | None) -> None:
    """Raise ValueError for options that the tokenizer does not take, or sizes that it cannot have."""
    from unrolled.data import SMALLEST_VOCABULARY

    if tokenizer != "bpe":
        refuse({"--vocab-size": vocab_size, "--sample": sample}, f"--tokenizer bpe, but it is {tokenizer}")
    if tokenizer in LEARNED and end is not None:
        raise ValueError(f"--end is for a tokenizer.json, but --tokenizer is {tokenizer}")
    if vocab_size is not None and not SMALLEST_VOCABULARY <= vocab_size <= LARGEST_VOCABULARY:
        raise ValueError(
            f"--vocab-size is {vocab_size}, but must be from {SMALLEST_VOCABULARY} (256 bytes, and the end "
            f"of a document) to {LARGEST_VOCABULARY}"
        )
    if sample is not None and sample < 1:
        raise ValueError(f"--sample is {sample}, but must be at least 1")


def _check_numbers(*, jobs: int, shard_tokens: int, val_fraction: float) -> None:
    for name, value, most in (("--jobs", jobs, 1024), ("--shard-tokens", shard_tokens, 2**31)):
        if not 1 <= value <= most:
            raise ValueError(f"{name} is {value}, but must be from 1 to {most}")
    if not 0 < val_fraction < 1:
        raise ValueError(f"--val-fraction is {val_fraction}, but must be above 0 and below 1")


def _check_files(files: list[Path], others: list[Path]) -> None:
    for file in [*files, *others]:
        if file.is_dir():
            raise ValueError(f"{file} is a folder, but must be a file")
        if not file.exists():
            raise ValueError(f"{file} is missing")
        if not file.is_file():
            raise ValueError(f"{file} is a pipe or a device, but must be a file, which is read several times")
    if len({file.resolve() for file in files}) < len(files):
        raise ValueError("a file is named twice, but must be named once")
