"""Print the time of a decoder's step on a GPU, as it is launched from Python and replayed from a CUDA graph.

    python benchmarks/cuda_graph.py

The models are not trained. Each time is the median of five, of 20 steps each.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from unrolled.models import Decoder, DecoderConfig
from unrolled.ops.state import leaves

SMALL: dict[str, Any] = {"vocab_size": 256, "d_model": 256, "n_layers": 8, "n_heads": 8}
LARGE: dict[str, Any] = {"vocab_size": 50_257, "d_model": 768, "n_layers": 12, "n_heads": 12}
MODELS = (
    ("linear", SMALL, torch.float32),
    ("linear", LARGE, torch.bfloat16),
    ("delta_net", LARGE, torch.bfloat16),
)
STEPS, REPEATS = 20, 5


def milliseconds(step: Callable[[], object]) -> float:
    step()
    found = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / STEPS * 1e3)
    return median(found)


print("| decoder | batch | launched, ms | replayed, ms |\n| --- | ---: | ---: | ---: |")
for attention, shape, dtype in MODELS:
    model = Decoder(DecoderConfig(attention=attention, positions="none", **shape)).to("cuda", dtype).eval()
    for batch in (1, 64):
        with torch.inference_mode():
            token, state = torch.zeros(batch, dtype=torch.long, device="cuda"), model.init_state(batch)
            launched = milliseconds(lambda: model.step(token, state))  # noqa: B023
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits, after = model.step(token, state)
                for old, new in zip(leaves(state).values(), leaves(after).values(), strict=True):
                    old.copy_(new)
            replayed = milliseconds(graph.replay)
        name = f"{attention}, {shape['n_layers']} x {shape['d_model']}, {str(dtype).removeprefix('torch.')}"
        print(f"| {name} | {batch} | {launched:.2f} | {replayed:.2f} |", flush=True)
