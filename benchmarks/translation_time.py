"""Print the time per token and the size of the state of translation models, after 16 to 4,096 tokens.

    python benchmarks/translation_time.py runs/multi30k-transformer runs/multi30k-linear

The source is one sentence of 16 tokens. The batch size is 1, on one thread. The state is that of the decoder.
It has a part for the tokens that the decoder has written, and a part for the source. The size of the latter
part is the same after any number of tokens.
"""

import sys
from typing import Any

import torch

from unrolled import models
from unrolled.bench.measure import Contender, cost_per_token, stepping

POSITIONS = (16, 64, 256, 1024, 4096)
SOURCE = 16


def translating(path: str) -> Contender:
    model: Any = models.load(path).eval()
    source = torch.randint(model.config.vocab_size, (1, SOURCE), generator=torch.Generator().manual_seed(0))
    return stepping(model, lambda: model.init_state(source))


contenders = {path: (translating(path), POSITIONS) for path in sys.argv[1:]}
costs = cost_per_token(contenders, repeats=15)
print("| after tokens | " + " | ".join(f"{path}: ms, state" for path in costs) + " |")
print("| ---: " * (len(costs) + 1) + "|")
for index, position in enumerate(POSITIONS):
    cells = (f"{cost[index].seconds * 1e3:.2f}, {cost[index].nbytes / 1e6:.2f} MB" for cost in costs.values())
    print(f"| {position:,} | " + " | ".join(cells) + " |")
