"""Print the time of a decoder's step on a GPU, launched from Python and replayed from a CUDA graph.

    python benchmarks/cuda_graph.py

The last column is the time per token of `generate`, which replays steps: 128 tokens after 16, drawn from the
50 most likely ones. The models are not trained. Each time is the median of five.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from unrolled.generation import generate
from unrolled.models import Decoder, DecoderConfig
from unrolled.ops.state import leaves

SMALL: dict[str, Any] = {"vocab_size": 256, "d_model": 256, "n_layers": 8, "n_heads": 8}
LARGE: dict[str, Any] = {"vocab_size": 50_257, "d_model": 768, "n_layers": 12, "n_heads": 12}
MODELS = (
    ("linear", SMALL, torch.float32),
    ("linear", LARGE, torch.bfloat16),
    ("delta_net", LARGE, torch.bfloat16),
)
STEPS, TOKENS, REPEATS = 20, 128, 5


def milliseconds(run: Callable[[], object], times: int) -> float:
    """Return the median time of one of so many runs."""
    run()
    found = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            run()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / times * 1e3)
    return median(found)


print("| decoder | batch | launched, ms | replayed, ms | generate, ms |\n| --- | ---: | ---: | ---: | ---: |")
for attention, shape, dtype in MODELS:
    model = Decoder(DecoderConfig(attention=attention, positions="none", **shape)).to("cuda", dtype).eval()
    for batch in (1, 64):
        with torch.inference_mode():
            token, state = torch.zeros(batch, dtype=torch.long, device="cuda"), model.init_state(batch)
            launched = milliseconds(lambda: model.step(token, state), STEPS)  # noqa: B023
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits, after = model.step(token, state)
                for old, new in zip(leaves(state).values(), leaves(after).values(), strict=True):
                    old.copy_(new)
            replayed = milliseconds(graph.replay, STEPS)
        prompts = torch.zeros(batch, 16, dtype=torch.long)
        drawn = milliseconds(lambda: generate(model, prompts, TOKENS, top_k=50, seed=0), 1) / TOKENS  # noqa: B023
        name = f"{attention}, {shape['n_layers']} x {shape['d_model']}, {str(dtype).removeprefix('torch.')}"
        print(f"| {name} | {batch} | {launched:.2f} | {replayed:.2f} | {drawn:.2f} |", flush=True)
