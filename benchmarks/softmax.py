"""Times of torch's kernel for softmax attention over those of the C++ kernels, on one thread.

    python benchmarks/softmax.py bfloat16

Above 1, the C++ kernels are faster. Both run in turn, on 2,048 tokens or more with 4 heads.
"""

from argparse import ArgumentParser
from itertools import product
from statistics import median
from time import perf_counter

import torch

from unrolled.ops.softmax import softmax_attention

LENGTHS = [64, 128, 256, 512, 1024, 2048, 4096]
WIDTHS = [32, 64, 128]
TOKENS, HEADS = 2048, 4
SECONDS, FEWEST = 2.0, 5


def ratio(length: int, width: int, dtype: torch.dtype, *, causal: bool, gradients: bool) -> float:
    """Return the ratio of the median times."""
    size = (max(1, TOKENS // length), length, HEADS, width)
    inputs = [torch.randn(size, dtype=dtype, requires_grad=gradients) for _ in range(3)]
    outer = torch.randn(size, dtype=dtype)
    times: dict[str, list[float]] = {"flash": [], "native": []}
    began = perf_counter()
    while perf_counter() - began < SECONDS or len(times["native"]) <= FEWEST:
        for backend, seconds in times.items():
            start = perf_counter()
            o = softmax_attention(*inputs, causal=causal, backend=backend)
            if gradients:
                torch.autograd.grad(o, inputs, outer)
            seconds.append(perf_counter() - start)
    torchs, ours = (median(x[1:]) for x in times.values())  # the first warms up
    return torchs / ours


def main() -> None:
    """Print a table."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dtype", choices=["float32", "bfloat16", "float16"])
    dtype = getattr(torch, parser.parse_args().dtype)
    torch.set_num_threads(1)
    print("| gradients | causal | width |", " | ".join(f"{x:,}" for x in LENGTHS), "|")
    print("| --- | --- | ---: |", " | ".join("---:" for _ in LENGTHS), "|")
    for gradients, causal, width in product((True, False), (True, False), WIDTHS):
        print("|", " | ".join(("yes" if x else "no") for x in (gradients, causal)), "|", width, end=" | ")
        for length in LENGTHS:
            print(f"{ratio(length, width, dtype, causal=causal, gradients=gradients):.2f}", end=" | ")
        print(flush=True)


if __name__ == "__main__":
    main()
