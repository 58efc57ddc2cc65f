"""A setting of torch for tracing with symbolic sizes."""

from contextlib import AbstractContextManager

import torch


def without_shape_cache() -> AbstractContextManager[None]:
    """Trace without torch's cache of the output shapes of operators.

    With symbolic sizes, a lookup takes longer than computing the shape again: exports to ONNX are a sixth
    faster without the cache, and exports of single layers a third.
    """
    patched: AbstractContextManager[None] = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
    return patched
