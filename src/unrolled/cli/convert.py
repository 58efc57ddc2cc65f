"""`unrolled convert`."""

import shutil
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer


def convert(
    source: Annotated[
        Path,
        typer.Argument(help="The folder of a run of unrolled train, or of a model that transformers saved."),
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
) -> None:
    """Rewrite a model for Hugging Face transformers, or one of theirs as ours, with the very same weights.

    \b
    For transformers, with a tokenizer where the model was trained on the characters or bytes of a text:
      unrolled convert runs/book book-hf

    \b
    And back:
      unrolled convert book-hf runs/book-again
      unrolled generate runs/book-again --prompt "Once upon"
    """
    from unrolled import models
    from unrolled.cli._vocabulary import FILE_NAME, Vocabulary
    from unrolled.interop import hf  # says what to install where transformers is missing

    import_module("transformers.utils.logging").disable_progress_bar()
    if out.resolve() == source.resolve():
        raise ValueError(f"{out} is the model's own folder, wanted another one to write to")
    vocabulary = Vocabulary.load(source) if (source / FILE_NAME).exists() else None
    if hf.is_saved_by_transformers(source):
        model = hf.from_transformers(hf.load(source))
        model.save(out)
        typer.echo(f"{out}: a {model.model_name} of unrolled", err=True)
    else:
        converted = hf.to_transformers(models.load(source))
        what = type(converted).__name__
        if vocabulary is not None and vocabulary.kind == "text":
            vocabulary.check(converted.config.vocab_size)
            tokenizer = hf.character_tokenizer(vocabulary.characters)
            tokenizer.save_pretrained(out)
            if converted.can_generate():
                converted.generation_config.pad_token_id = tokenizer.pad_token_id
            what += " with its tokenizer"
        converted.save_pretrained(out)
        typer.echo(f"{out}: {what}", err=True)
    if vocabulary is not None:
        shutil.copyfile(source / FILE_NAME, out / FILE_NAME)
