"""The front end of graphs computes the features of kaldi-native-fbank."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unrolled.data._sound import log_mel
from unrolled.interop.onnx.front_end import FULL_SCALE, LogMel, mel_filters

pytest.importorskip("kaldi_native_fbank")


def sound(n: int, seed: int) -> np.ndarray:
    """Noise that grows louder, a sine and direct current, int16."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, 10 ** np.linspace(2, 3, n))
    sine = 10 ** rng.uniform(1, 3.5) * np.sin(rng.uniform(0.02, 3) * np.arange(n))
    return np.rint(np.clip(noise + sine + rng.uniform(-3_000, 3_000), -32_768, 32_767)).astype(np.int16)


def features(samples: np.ndarray, rate: int, n_mels: int) -> torch.Tensor:
    return LogMel(rate, n_mels)(torch.from_numpy(samples / np.float32(FULL_SCALE)).unsqueeze(0))[0]


def exact(samples: np.ndarray, rate: int, n_mels: int) -> torch.Tensor:
    """The equations in fp64, with numpy's padding and Fourier transform."""
    width, shift = rate * 25 // 1000, rate // 100
    size = 2 ** int(np.ceil(np.log2(width)))
    edge = width // 2 - shift // 2
    padded = np.pad(samples.astype(np.float64), (edge, width), mode="symmetric")
    frames = np.stack([padded[i * shift :][:width] for i in range((len(samples) + shift // 2) // shift)])
    frames -= frames.mean(1, keepdims=True)
    frames -= 0.97 * np.concatenate([frames[:, :1], frames[:, :-1]], 1)
    power = abs(np.fft.rfft(frames * np.hanning(width) ** 0.85, size)[:, :-1]) ** 2
    y = torch.from_numpy(np.log(np.maximum(power @ mel_filters(rate, size, n_mels).numpy(), 1)))
    return (y - y.mean(0)) / (y.std(0, correction=0) + 1e-3)


@settings(max_examples=60)
@given(
    st.integers(400, 3_000), st.sampled_from([8_000, 16_000]), st.sampled_from([20, 40]), st.integers(0, 99)
)
@example(400, 16_000, 40, 0)  # a window
@example(559, 16_000, 40, 0)  # the most samples of three frames
@example(560, 16_000, 40, 0)  # the fewest of four
def test_features_are_those_of_kaldi(n, rate, n_mels, seed):
    samples = sound(n, seed)
    found, kaldi = features(samples, rate, n_mels), log_mel(samples, rate, n_mels)
    assert found.shape == kaldi.shape
    torch.testing.assert_close(found, kaldi, rtol=0, atol=1e-3)


def test_energies_below_one_unit_are_silence_as_in_kaldi():
    clicks = (np.random.default_rng(0).random(8_000) < 0.01).astype(np.int16)
    found, kaldi = features(clicks, 16_000, 40), log_mel(clicks, 16_000, 40)
    torch.testing.assert_close(found, kaldi, rtol=0, atol=1e-3)
    lowest = (found == found.min(0).values).float().mean(0)
    assert 0.1 < float(lowest.mean()) < 0.9  # below it in some frames and bands only


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050])
def test_errors_of_rounding_are_at_most_twice_those_of_kaldi(rate):
    samples = sound(2 * rate, rate)
    true = exact(samples, rate, 40)
    found, kaldi = features(samples, rate, 40).double(), log_mel(samples, rate, 40).double()
    error, of_kaldi = ((x - true).square().mean().sqrt() for x in (found, kaldi))
    assert error <= 2 * of_kaldi
    assert of_kaldi < 1e-5  # so that this says something


def test_silence_is_zero_and_loudness_changes_nothing():
    assert torch.equal(LogMel(16_000, 40)(torch.zeros(2, 1_000)), torch.zeros(2, 6, 40))
    samples = torch.from_numpy(sound(4_000, 1) / np.float32(FULL_SCALE)).unsqueeze(0)
    front_end = LogMel(8_000, 20)
    torch.testing.assert_close(front_end(samples / 4), front_end(samples), rtol=0, atol=1e-5)


def test_rows_are_independent():
    samples = torch.from_numpy(np.stack([sound(1_234, i) for i in range(3)]) / np.float32(FULL_SCALE))
    front_end = LogMel(16_000, 40)
    alone = torch.cat([front_end(row.unsqueeze(0)) for row in samples])
    torch.testing.assert_close(front_end(samples), alone, rtol=0, atol=1e-4)
