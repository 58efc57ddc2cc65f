"""`unrolled convert`."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unrolled.cli._options import Force

if TYPE_CHECKING:
    from unrolled.data import Vocabulary

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder of unrolled train, of unrolled quantize, or of a model saved by transformers."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    force: Force = False,
) -> None:
    """Convert a model to Hugging Face transformers or back, with identical weights.

    \b
    To transformers, with a tokenizer if the model was trained on text:
      unrolled convert runs/book book-hf

    \b
    And back:
      unrolled convert book-hf runs/book-again
      unrolled generate runs/book-again --prompt "Once upon"
    """
    from unrolled.data import VOCABULARY_FILE, Vocabulary
    from unrolled.folders import check_folder, writing_folder
    from unrolled.interop import hf  # says what to install if transformers is missing

    import_module("transformers.utils.logging").disable_progress_bar()
    if out.resolve() == source.resolve():
        raise ValueError(f"{out} is the model's own folder, but must be another one")
    model, to_ours = _read(source), hf.is_saved_by_transformers(source)
    converted = model if to_ours else hf.to_transformers(model)
    vocabulary = Vocabulary.load(source) if VOCABULARY_FILE in model.documents else None
    if vocabulary is not None and not to_ours and vocabulary.is_text:
        vocabulary.check(model.config.vocab_size)

    def made_before() -> bool:
        return hf.is_saved_by_transformers(out) != to_ours and _same(out, model)

    check_folder(out, f"the same conversion of {source}", made_before, force=force)
    with writing_folder(out, [VOCABULARY_FILE, *TOKENIZER_FILES] if force else []) as folder:
        if to_ours:
            model.save(folder)
            what = f"a {model.model_name} of unrolled"
        else:
            what = _save_for_transformers(converted, vocabulary, folder)
    typer.echo(f"{out}: {what}", err=True)


def _read(folder: Path) -> Any:
    """Load a model saved by either library, as a model of this library."""
    from unrolled.decode import load_model
    from unrolled.interop import hf

    return (
        hf.from_transformers(hf.load(folder)) if hf.is_saved_by_transformers(folder) else load_model(folder)
    )


def _same(folder: Path, model: Any) -> bool:
    """Return whether a folder holds a model with the config and the weights of `model`."""
    try:
        other = _read(folder)
    except (ValueError, OSError):
        return False
    mine, its = model.state_dict(), other.state_dict()
    return (
        other.config == model.config
        and its.keys() == mine.keys()
        and all(its[name].equal(x) for name, x in mine.items())
    )


def _save_for_transformers(converted: Any, vocabulary: "Vocabulary | None", folder: Path) -> str:
    """Save a model and, if it was trained on text, its tokenizer; return a description."""
    from unrolled.interop import hf

    what = type(converted).__name__
    if vocabulary is not None and vocabulary.is_text:
        if vocabulary.kind == "tokenizer":
            tokenizer = hf.text_tokenizer(vocabulary)
        else:
            tokenizer = hf.character_tokenizer(vocabulary.characters)
        tokenizer.save_pretrained(folder)
        if converted.can_generate():
            settings = converted.generation_config
            if settings.pad_token_id is None:
                settings.pad_token_id = tokenizer.pad_token_id
            if settings.eos_token_id is None:
                settings.eos_token_id = vocabulary.end
        what += " with its tokenizer"
    converted.save_pretrained(folder)
    return what
