"""`unrolled transcribe`."""

from pathlib import Path
from typing import Annotated

import typer

from unrolled.cli._options import Device


def transcribe(
    run_dir: Annotated[Path, typer.Argument(help="Run folder of unrolled train on speech.")],
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Sounds: WAV, FLAC, Ogg, MP3 and others.")
    ],
    beam_size: Annotated[
        int, typer.Option(help="Beam size; 1 takes the most likely symbol of each frame.")
    ] = 1,
    device: Device = None,
) -> None:
    """Write down what is said in sound files, one line for each, with the best weights of a run.

    Sounds may have any sampling rate and number of channels: they are resampled and mixed down.

    \b
    Examples:
      unrolled transcribe runs/speech hello.wav
      unrolled transcribe runs/digits one.wav two.flac --beam-size 8
    """
    from unrolled import generation
    from unrolled.cli._device import choose
    from unrolled.cli._models import load_for
    from unrolled.data import Vocabulary

    if beam_size < 1:
        raise ValueError(f"--beam-size is {beam_size}, but must be at least 1")
    model = load_for("transcription", run_dir)
    vocabulary = Vocabulary.load(run_dir)
    vocabulary.check(model.config.vocab_size)
    sounds = [vocabulary.features(file) for file in files]
    for ids in generation.transcribe(model.to(choose(device)), sounds, beam_size=beam_size):
        typer.echo(vocabulary.decode(ids))
