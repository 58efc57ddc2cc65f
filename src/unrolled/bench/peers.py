"""Causal linear attention of other libraries, each imported only when used.

A peer gets its inputs in its preferred layout, copied before the clock starts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from unrolled.bench.attention import Function
from unrolled.bench.case import MissingError, NotMeasuredError


def chunked(q: Tensor, k: Tensor, v: Tensor, chunk: int = 64) -> Tensor:
    """Causal normalised linear attention by batched products over chunks, in plain PyTorch; `[B,H,N,D]`."""
    N = q.shape[2]
    padded = (F.pad(x, (0, 0, 0, -N % chunk)) for x in (q, k, v))
    q, k, v = (x.reshape(*x.shape[:2], -1, chunk, x.shape[-1]) for x in padded)
    states = (k.mT @ v).cumsum(2)
    before = F.pad(states[:, :, :-1], (0, 0, 0, 0, 1, 0))
    o = q @ before + (q @ k.mT).tril() @ v
    divisor = (q.flatten(2, 3) * k.flatten(2, 3).cumsum(2)).sum(-1, keepdim=True)
    return o.flatten(2, 3)[:, :, :N] / divisor[:, :, :N]  # at padding, both are 0


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Softmax attention by torch; `[B,H,N,D]`."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention by FlashAttention-2, through torch, on CUDA in half precision; `[B,H,N,D]`."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def idiap() -> Function:
    """Return pytorch-fast-transformers' causal product, divided as its attention does; `[B,H,N,D]`."""
    from fast_transformers.causal_product import causal_dot_product

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        divisor = torch.einsum("bhnd,bhnd->bhn", q, k.cumsum(2)) + 1e-6
        product: Tensor = causal_dot_product(q, k, v)
        return product / divisor.unsqueeze(-1)

    return attention


def fla_naive() -> Function:
    """Return the one chunked form of flash-linear-attention that runs on a CPU; `[B,N,H,D]`."""
    from fla.ops.linear_attn.naive import naive_chunk_linear_attn

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[1] % 64:
            raise NotMeasuredError(f"it needs a multiple of 64 tokens, not {q.shape[1]}")
        o: Tensor = naive_chunk_linear_attn(q, k, v, normalize=True)
        return o

    return attention


def fla_triton(name: str) -> Function:
    """Return `chunk_linear_attn` or `fused_recurrent_linear_attn` of flash-linear-attention; `[B,N,H,D]`."""
    from fla.ops import linear_attn

    function = getattr(linear_attn, name)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = function(q, k, v, normalize=True)[0]
        return o

    return attention


def onnxruntime_linear(q: Tensor, k: Tensor, v: Tensor, threads: int) -> Callable[[], Tensor]:
    """Bind ONNX Runtime's fused operator to `[1,N,H,D]`: inference, not normalised.

    The operator takes `[B,N,H*D]`, which has the same memory layout; inputs and outputs are bound once.
    """
    import numpy as np
    import onnxruntime
    from onnx import TensorProto, helper

    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 31):
        raise MissingError(f"onnxruntime is {onnxruntime.__version__}, but must be 1.31 or newer")
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (B, N, H, D), M = q.shape, v.shape[-1]
    queries, values_shape = [B, N, H * D], [B, N, H * M]
    shapes = {"q": queries, "k": queries, "v": values_shape, "o": values_shape, "s": [B, H, D, M]}
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, s) for name, s in shapes.items()}
    node = helper.make_node(
        "LinearAttention",
        ["q", "k", "v"],
        ["o", "s"],
        domain="com.microsoft",
        q_num_heads=H,
        kv_num_heads=H,
        update_rule="linear",
        scale=1.0,
    )
    graph = helper.make_graph([node], "linear", [values[x] for x in "qkv"], [values["o"], values["s"]])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session: Any = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    o, state = torch.empty(B, N, H, M), torch.empty(B, H, D, M)
    bound = {"q": q, "k": k, "v": v, "o": o, "s": state}
    for name, x in bound.items():
        bind = binding.bind_input if name in "qkv" else binding.bind_output
        bind(name, "cpu", 0, np.float32, shapes[name], x.data_ptr())

    def attention() -> Tensor:
        session.run_with_iobinding(binding)
        return o

    attention.__dict__["keeps"] = bound  # the binding holds addresses, not tensors
    return attention
