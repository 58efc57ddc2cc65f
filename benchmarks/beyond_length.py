"""Loss of models of tiny-shakespeare by position, in windows longer than those they were trained on.

python benchmarks/beyond_length.py runs/demo/text-gated_linear runs/demo/text-softmax
"""

import argparse
from itertools import pairwise
from pathlib import Path

import torch

from unrolled import data
from unrolled.contract import IGNORED
from unrolled.models import Decoder

parser = argparse.ArgumentParser()
parser.add_argument("folders", nargs="+", type=Path)
parser.add_argument("--length", type=int, default=1024)
given = parser.parse_args()
BANDS = [slice(a, b) for a, b in pairwise(sorted({0, 64, 256, 512, 1024, given.length})) if b <= given.length]

text = data.load("text", path="tiny-shakespeare", length=given.length)
print("nats per character at", ", ".join(f"{band.start} to {band.stop}" for band in BANDS), "and in all")
for folder in given.folders:
    model = Decoder.load(folder).eval()
    total, count = torch.zeros(given.length), torch.zeros(given.length)
    with torch.inference_mode():
        for batch in text.eval_batches(8):
            logits = model(batch.inputs).transpose(1, 2)
            total += torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none").sum(0)
            count += (batch.targets != IGNORED).sum(0)
    losses = [total[band].sum() / count[band].sum() for band in (*BANDS, slice(None))]
    print(f"{folder}:", ", ".join(f"{loss:.3f}" for loss in losses))
