"""Model FLOPs utilisation (MFU): the share of a processor's speed that training uses.

A weight of a matrix takes 6 operations for each token: a multiplication and an addition in the forward pass,
and twice as many in the backward pass. With W such weights,

    MFU = 6 W * tokens per second / speed of the processor

(Chowdhery et al. 2022, arXiv 2204.02311, appendix B, without its term for attention, which differs between
the mechanisms). Recomputed activations do not count. The speed is that of a linear layer
(`unrolled.ops.dense.linear`) with a large square weight, in the dtype in which the model computes.
"""

import time
from functools import cache

import torch
from torch import nn

from unrolled.models.heads import Categorical
from unrolled.ops.dense import linear
from unrolled.training.interfaces import Trainable

SIZE = {"cpu": 1024, "cuda": 8192}  # of the matrices, large enough for the highest speed
PRODUCTS = 5


def flops_per_token(model: Trainable) -> int:
    """Count the operations of a forward and a backward pass for one token: 6 for each weight of a matrix.

    Tables of embeddings are only looked up, unless the output is tied to them.
    """
    modules = list(model.modules())
    tied = {m.table.weight for m in modules if isinstance(m, Categorical) and m.tied}
    tables = {m.weight for m in modules if isinstance(m, nn.Embedding)} - tied
    return 6 * sum(x.numel() for _, x in model.named_parameters() if x.dim() > 1 and x not in tables)


def speed_of_products(device: torch.device, *, bf16: bool) -> float:
    """Measure the operations per second of a large linear layer, with torch's threads as they are."""
    return _speed(device, torch.bfloat16 if bf16 else torch.float32, torch.get_num_threads())


@cache
def _speed(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    size = SIZE.get(device.type, SIZE["cpu"])
    a = torch.ones(size, size, device=device, dtype=dtype)
    times = []
    with torch.no_grad():
        for _ in range(PRODUCTS):
            began = time.perf_counter()
            linear(a, a)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
    return 2 * size**3 / min(times)
