"""Small models of speech, untrained but sure of themselves, and sounds for them."""

import numpy as np
import torch

from unrolled.data import Vocabulary
from unrolled.interop.onnx.front_end import FULL_SCALE
from unrolled.models import BiLSTMTranscriber, Transcriber, TranscriberConfig
from unrolled.models.bilstm_transcriber import BiLSTMTranscriberConfig

RATE, N_MELS = 8_000, 20
VOCABULARY = Vocabulary("speech", units=["a", "b", "c"], rate=RATE, n_mels=N_MELS, counted="phone")
SIZES = {"vocab_size": 3, "n_mels": N_MELS, "d_model": 16}


def make(attention, **fields):
    torch.manual_seed(0)
    model = Transcriber(TranscriberConfig(attention=attention, n_heads=2, **SIZES, **fields)).eval()
    return with_large_weights(model)


def make_mixed():
    options = {"window": {"window": 4}}
    return make(["window", "linear", "softmax"], n_layers=3, attention_options=options)


def make_lstm():
    torch.manual_seed(0)
    return with_large_weights(
        BiLSTMTranscriber(BiLSTMTranscriberConfig(hidden_size=8, n_layers=2, **SIZES)).eval()
    )


def with_large_weights(model):
    for x in model.parameters():  # as large as trained weights are: small ones would hide differences
        if x.dim() == 2:
            torch.nn.init.normal_(x, std=0.4)
    return model


def sound(n, seed=0):
    rng = np.random.default_rng(seed)
    sines = np.sin(rng.uniform(0.1, 2, 1 + n // 160).repeat(160)[:n] * np.arange(n))  # one for two frames
    return np.rint(3_000 * sines + rng.normal(0, 100, n)).astype(np.int16)


def samples(*lengths):
    return [torch.from_numpy(sound(n, n)) / FULL_SCALE for n in lengths]
