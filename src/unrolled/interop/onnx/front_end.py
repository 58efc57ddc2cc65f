r"""The front end of a model of speech as a module: samples to log-mel features, in plain operations.

It computes the features that `unrolled.data` computes with kaldi-native-fbank, so that a graph can take
samples. With W samples in 25 ms, S samples in 10 ms, and N >= W the next power of two, frame t begins at
sample b_t = S t + floor(S / 2) - floor(W / 2) (Kaldi's `snip_edges=false`):

    f_ti = 32768 s[r(b_t + i)]      i < W;  r(j) = -1 - j before the first sample, 2 n - 1 - j after the last
    g_t  = f_t - mean f_t           without the DC offset
    h_ti = w_i (g_ti - 0.97 g_t,i-1)       g_t,-1 = g_t0;  w_i = (0.5 - 0.5 cos(2 pi i / (W - 1)))^0.85
    P_tk = (sum_i h_ti cos(2 pi i k / N))^2 + (sum_i h_ti sin(2 pi i k / N))^2          k < N / 2
    y_tm = max(0, log sum_k M_mk P_tk)
    x_tm = (y_tm - mean_t y_tm) / (deviation_t y_tm + 0.001)

with triangles M_m, equally wide on the mel scale 1127 log(1 + Hz / 700) from 20 Hz to half the sampling rate:
M_m rises from 0 at the centre of band m - 1 to 1 at the centre of band m, and falls to 0 at the centre of
band m + 1.

There are T = floor((n + floor(S / 2)) / S) frames. Povey et al. 2011, "The Kaldi Speech Recognition Toolkit",
ASRU, and `feat/feature-window.cc` and `feat/mel-computations.cc` of its sources.

Cost: O(T N^2), as the discrete Fourier transform is a product with a matrix.
"""

import math

import torch
from torch import Tensor

from unrolled.ops.dense import Layer

FULL_SCALE = 32768.0  # the samples of Kaldi have the scale of 16 bits
WINDOW, SHIFT = 25, 10  # milliseconds
PRE_EMPHASIS = 0.97
LOWEST = 20.0  # Hz


class LogMel(Layer):
    """Samples to normalised log-mel features.

    Args:
        rate: samples per second.
        n_mels: features of a frame.
    """

    window: Tensor
    transform: Tensor
    mels: Tensor

    def __init__(self, rate: int, n_mels: int) -> None:
        super().__init__()
        self.width, self.shift = (rate * milliseconds // 1000 for milliseconds in (WINDOW, SHIFT))
        size = 1 << (self.width - 1).bit_length()
        i = torch.arange(self.width, dtype=torch.float64)
        hann = 0.5 - 0.5 * torch.cos(2 * math.pi * i / (self.width - 1))
        angles = 2 * math.pi / size * torch.outer(i, torch.arange(size // 2, dtype=torch.float64))
        self.register_buffer("window", hann.pow(0.85).float())
        self.register_buffer("transform", torch.cat([angles.cos(), angles.sin()], 1).float())
        self.register_buffer("mels", mel_filters(rate, size, n_mels).float())

    def forward(self, samples: Tensor) -> Tensor:
        """Compute the features of sounds of one length.

        Args:
            samples: `[B,n]` fp32 from -1 to 1, with n at least the length of a window.

        Returns:
            `[B,T,n_mels]` fp32.
        """
        x = self._frames(samples * FULL_SCALE)
        x = x - x.mean(-1, keepdim=True)
        before = torch.cat([x[..., :1], x[..., :-1]], -1)
        x = (x - PRE_EMPHASIS * before) * self.window
        real, imaginary = (x @ self.transform).chunk(2, -1)
        energy = (real.square() + imaginary.square()) @ self.mels
        y = energy.clamp(min=1).log()  # the maximum with 0, before the logarithm, to avoid log 0
        centred = y - y.mean(1, keepdim=True)
        deviation = centred.square().mean(1, keepdim=True).sqrt()
        return centred / (deviation + 1e-3)

    def _frames(self, samples: Tensor) -> Tensor:
        """Cut `[B,n]` into frames `[B,T,W]`; beyond the edges, the samples are mirrored."""
        n = samples.shape[1]
        starts = torch.arange(count_frames(n, self.shift)) * self.shift
        at = starts.unsqueeze(1) + (torch.arange(self.width) + self.shift // 2 - self.width // 2)
        at = torch.where(at < 0, -1 - at, at)
        at = torch.where(at >= n, 2 * n - 1 - at, at)
        return samples[:, at]


def count_frames(n: int, shift: int) -> int:
    """Return T, the number of frames of n samples: n divided by the shift, rounded."""
    return (n + shift // 2) // shift


def mel_filters(rate: int, size: int, n_mels: int) -> Tensor:
    """Return the triangles `M [size / 2, n_mels]` fp64, for a transform of `size` samples.

    If there are many bands, a band may lie between two frequencies of the transform. Such a band is 0, and so
    is its feature.
    """
    edges = torch.linspace(_mel(LOWEST), _mel(rate / 2), n_mels + 2, dtype=torch.float64)
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    hertz = torch.arange(size // 2, dtype=torch.float64) * rate / size
    mel = (1127 * (1 + hertz / 700).log()).unsqueeze(1)
    return torch.minimum((mel - left) / (centre - left), (right - mel) / (right - centre)).clamp(min=0)


def _mel(hertz: float) -> float:
    return 1127 * math.log(1 + hertz / 700)
