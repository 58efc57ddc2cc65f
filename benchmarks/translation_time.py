"""Time and memory per token of translating decoders, after more and more tokens of the same translation.

    python benchmarks/translation_time.py runs/multi30k-transformer runs/multi30k-linear

One sentence of 16 tokens as the source, batch 1, one thread. The state is the decoder's own: what it keeps
of the tokens it has written and, the same at all lengths, of the source.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from unrolled import models
from unrolled.cli.measure import WINDOW, Contender, Task, cost_per_token
from unrolled.ops.state import nbytes

POSITIONS = (16, 64, 256, 1024, 4096)
SOURCE = 16


def translating(model: Any) -> Contender:
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(model.config.vocab_size, (1, SOURCE), generator=generator)

    def prepare(position: int) -> Task:
        tokens = torch.randint(model.config.vocab_size, (1, position + WINDOW), generator=generator)
        _, start = model.prefill(tokens[:, :position], model.init_state(source))

        def run() -> Tensor:
            state = start
            for token in tokens[:, position:].unbind(1):
                logits, state = model.step(token, state)
            return logits

        return Task(run, WINDOW, nbytes(start))

    return prepare


contenders = {path: (translating(models.load(path).eval()), POSITIONS) for path in sys.argv[1:]}
costs = cost_per_token(contenders, repeats=15)
print("| after tokens | " + " | ".join(f"{path}: ms, state" for path in costs) + " |")
print("| ---: " * (len(costs) + 1) + "|")
for index, position in enumerate(POSITIONS):
    cells = (f"{cost[index].seconds * 1e3:.2f}, {cost[index].nbytes / 1e6:.2f} MB" for cost in costs.values())
    print(f"| {position:,} | " + " | ".join(cells) + " |")
