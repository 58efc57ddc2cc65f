"""Loss of models of tiny-shakespeare by position, in windows longer than those they were trained on.

python benchmarks/beyond_length.py runs/demo/text-gated_linear runs/demo/text-softmax
"""

import sys
from itertools import pairwise
from pathlib import Path

import torch

from unrolled import data
from unrolled.contract import IGNORED
from unrolled.models import Decoder

LENGTH = 1024
BANDS = [slice(a, b) for a, b in pairwise((0, 64, 256, 512, LENGTH))]

text = data.load("text", path="tiny-shakespeare", length=LENGTH)
print("nats per character at", ", ".join(f"{band.start} to {band.stop}" for band in BANDS))
for folder in map(Path, sys.argv[1:]):
    model = Decoder.load(folder).eval()
    total, count = torch.zeros(LENGTH), torch.zeros(LENGTH)
    with torch.inference_mode():
        for batch in text.eval_batches(8):
            logits = model(batch.inputs).transpose(1, 2)
            total += torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none").sum(0)
            count += (batch.targets != IGNORED).sum(0)
    print(f"{folder}:", ", ".join(f"{total[band].sum() / count[band].sum():.3f}" for band in BANDS))
