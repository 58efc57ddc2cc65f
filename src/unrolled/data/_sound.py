"""Sound files as log-mel features, the input of models of speech.

A frame is a window of 25 ms, and the next frame begins 10 ms later. The features of a frame are the
logarithms of its energy in `n_mels` frequency bands that are equally wide on the mel scale, as in Kaldi. Each
band is then shifted and scaled to mean 0 and standard deviation 1 over the sound, which removes the loudness
and the colour of the microphone.

The libraries are those of the extra `speech`.
"""

import io
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unrolled.extras import how_to_install

WINDOW = 25  # milliseconds of a frame, and the minimum of a sound
FULL_SCALE = 32768.0  # the samples of Kaldi have the scale of 16 bits

Samples = np.ndarray[Any, np.dtype[np.int16]]


def library(name: str) -> Any:
    """Import a library of the extra `speech`.

    Raises:
        ImportError: the library is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"speech needs the library {name}: {how_to_install('speech')}") from error


def read_sound(source: str | Path | bytes, rate: int) -> Samples:
    """Read a sound file (WAV, FLAC, Ogg or most other formats of libsndfile) as int16 [n].

    Channels are averaged, and a sound of another sampling rate is resampled.

    Args:
        source: the name of the file, or its content.
        rate: samples per second.

    Raises:
        ImportError: soundfile or soxr is not installed.
        ValueError: there is no such file, it is not a sound, or it is too short.
    """
    soundfile = library("soundfile")
    name = "its content" if isinstance(source, bytes) else str(source)
    if not isinstance(source, bytes) and not Path(source).is_file():
        raise ValueError(f"{name} is not a file, but must be a sound")
    try:
        with soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else str(source)) as file:
            found, n = file.samplerate, file.frames  # some formats must be told how much to read
            # As int16, libsndfile would cut off fractions, and wrap what is too loud in an Ogg file.
            if file.subtype in ("FLOAT", "DOUBLE", "VORBIS", "OPUS"):
                samples = _of_floats(file.read(n, dtype="float64", always_2d=True))
            else:
                samples = file.read(n, dtype="int16", always_2d=True)
    except soundfile.SoundFileError as error:
        raise ValueError(f"{name} cannot be read as a sound: {error}") from error
    mono = samples[:, 0] if samples.shape[1] == 1 else np.rint(samples.mean(1)).astype(np.int16)
    if found != rate:
        mono = library("soxr").resample(mono, found, rate)
    if len(mono) < (shortest := rate * WINDOW // 1000):
        raise ValueError(
            f"{name} has {len(mono)} samples at {rate} Hz, but must have at least {shortest}: {WINDOW} ms"
        )
    return np.asarray(mono, np.int16)


def _of_floats(samples: np.ndarray[Any, np.dtype[np.float64]]) -> Samples:
    """Round samples of -1 to 1 to 16 bits; louder ones are clipped, and NaN becomes 0."""
    scaled = np.rint(np.nan_to_num(samples).clip(-1, 1) * FULL_SCALE)
    rounded: Samples = np.minimum(scaled, FULL_SCALE - 1).astype(np.int16)
    return rounded


def log_mel(samples: Samples, rate: int, n_mels: int) -> Tensor:
    """Return the normalised features of a sound: int16 [n] -> fp32 [T, n_mels], T about 100 n / rate.

    Raises:
        ImportError: kaldi-native-fbank is not installed.
        ValueError: n_mels does not suit sound of this rate.
    """
    fbank = library("kaldi_native_fbank")
    options = fbank.FbankOptions()
    options.frame_opts.samp_freq, options.frame_opts.frame_length_ms = rate, WINDOW
    options.frame_opts.dither = 0  # with dither, the features of a sound would change from call to call
    options.frame_opts.snip_edges = False
    options.mel_opts.num_bins = n_mels
    try:
        computer = fbank.OnlineFbank(options)
    except ValueError as error:
        raise ValueError(f"n_mels is {n_mels}, which does not suit sound of {rate} Hz: {error}") from error
    computer.accept_waveform(rate, samples.astype(np.float32))
    computer.input_finished()
    frames = np.stack([computer.get_frame(i) for i in range(computer.num_frames_ready)])
    features = torch.from_numpy(frames).clamp(min=0)  # below one unit of a sample is digital silence
    return (features - features.mean(0)) / (features.std(0, correction=0) + 1e-3)
