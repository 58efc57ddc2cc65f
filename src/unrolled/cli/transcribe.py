"""`unrolled transcribe`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unrolled.cli._options import Device

if TYPE_CHECKING:
    from torch import Tensor

    from unrolled.data import Vocabulary
    from unrolled.generation.transcription import Transcribes

    Read = Callable[[Path], Tensor]


def transcribe(
    run_dir: Annotated[Path, typer.Argument(help="Run folder of a model of speech, or an export of it.")],
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Sound files: WAV, FLAC, Ogg, MP3 and others.")
    ],
    beam_size: Annotated[
        int, typer.Option(min=1, help="Beam size; 1 takes the most likely symbol of each frame.")
    ] = 1,
    device: Device = None,
) -> None:
    """Write down what is said in sound files, one line for each, with the best weights of a run.

    Sounds may have any sampling rate and number of channels: they are resampled and mixed down. The model in
    a folder of unrolled export runs in ONNX Runtime.

    \b
    Examples:
      unrolled transcribe runs/speech hello.wav
      unrolled transcribe runs/speech one.wav two.flac --beam-size 8
      unrolled export runs/speech exported
      unrolled transcribe exported hello.wav
    """
    from unrolled import generation
    from unrolled.cli._models import is_exported

    load = _exported if is_exported(run_dir) else _run
    model, vocabulary, read = load(run_dir, device)
    sounds = [read(file) for file in files]
    for ids in generation.transcribe(model, sounds, beam_size=beam_size):
        typer.echo(vocabulary.decode(ids))


def _run(folder: Path, device: str | None) -> "tuple[Transcribes, Vocabulary, Read]":
    """Load the model of a run, its vocabulary, and the function that reads its input from a sound file."""
    from unrolled.cli._device import choose
    from unrolled.cli._models import load_for
    from unrolled.data import Vocabulary

    model = load_for("transcription", folder)
    vocabulary = Vocabulary.load(folder)
    vocabulary.check(model.config.vocab_size)
    return model.to(choose(device)), vocabulary, vocabulary.features


def _exported(folder: Path, device: str | None) -> "tuple[Transcribes, Vocabulary, Read]":
    """Load an exported model, its vocabulary, and the function that reads its input from a sound file."""
    from unrolled.interop import onnx

    if device not in (None, "cpu"):
        raise ValueError(f"--device is {device}, but an exported model runs on the CPU")
    model = onnx.load_transcriber(folder)
    return model, model.vocabulary, model.vocabulary.samples
