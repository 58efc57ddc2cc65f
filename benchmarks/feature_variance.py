"""Print |q + k|^2 / sqrt(D) for each layer of a trained softmax decoder.

    python benchmarks/feature_variance.py RUN TEXT

The variance of FAVOR+ grows as the exponential of this quantity. RUN is a run folder, and TEXT is the file
that the run was trained on. The decoder reads 256 characters, which begin 50,000 characters before the end of
TEXT.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unrolled.attention import softmax
from unrolled.data import Vocabulary
from unrolled.models import load

LENGTH, BEFORE_THE_END = 256, 50_000


def main(run: Path, text: Path) -> None:
    """Print the median over all pairs of a query and a key, for each layer."""
    attend = softmax.softmax_attention
    medians: list[float] = []

    def watched(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        sums = (q[:, :, None] + k[:, None]).square().sum(-1)
        medians.append(float(sums.median()) / q.shape[-1] ** 0.5)
        return attend(q, k, v, **options)

    softmax.softmax_attention = watched
    whole = text.read_text(encoding="utf-8")
    tokens = Vocabulary.load(run).encode(whole[-BEFORE_THE_END:][:LENGTH])
    with torch.inference_mode():
        load(run)(torch.as_tensor(tokens).reshape(1, -1))
    print(", ".join(f"{x:.1f}" for x in medians))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
