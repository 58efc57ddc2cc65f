"""llama.cpp as a peer of generation: RWKV-7 of the size of our decoder, through its Python package."""

import ctypes
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unrolled.bench import rwkv
from unrolled.bench.case import MissingError, NotMeasuredError

HEAD = 64  # numbers that its recurrence processes at once
TOLERANCES = {"fp32": 1e-4, "Q8_0": 0.5}
"""Forms of the weights, and the largest error of each, relative to the largest logit. With Q8_0, inputs of
matrices are rounded to 8 bits too, and random weights are the worst case."""


def steps(shape: rwkv.Shape, form: str, tokens: Tensor, threads: int) -> Callable[[], list[Tensor]]:
    """Return a function that reads tokens `[B,T]`, one of each row at a time, from an empty state.

    Args:
        shape: the sizes of the model.
        form: the form of its weights, in `TOLERANCES`.
        tokens: the tokens to read.
        threads: number of CPU threads.

    Raises:
        MissingError: the packages are not installed, or cannot run the model.
        NotMeasuredError: its heads have a width that llama.cpp does not check.
    """
    try:
        import llama_cpp
    except ImportError as error:
        raise MissingError("llama-cpp-python and gguf are not installed") from error
    if shape.head % HEAD:
        raise NotMeasuredError(f"with AVX-512 it writes out of bounds unless heads are {HEAD} wide")
    llama_cpp.llama_log_set(_silence(), ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        model = _loaded(llama_cpp, Path(folder), shape, form)
    B = len(tokens)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_seq_max = 256 * B, B
    options.n_batch = options.n_ubatch = max(64, B)
    options.n_threads = options.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, options)
    if not context:
        raise MissingError("llama.cpp makes no context of the model")
    batch, ids = llama_cpp.llama_batch_init(B, 0, 1), tokens.T.tolist()
    batch.n_tokens = B
    for row in range(B):
        batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, row, 1

    def run() -> list[Tensor]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        found = []
        for position, row_ids in enumerate(ids):
            for row, token in enumerate(row_ids):
                batch.token[row], batch.pos[row] = token, position
            if llama_cpp.llama_decode(context, batch):
                raise MissingError("llama.cpp does not run the model")
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (B, shape.vocabulary))
            found.append(torch.from_numpy(logits.copy()))
        return [torch.stack(found, 1)]

    return run


def _loaded(llama_cpp: Any, folder: Path, shape: rwkv.Shape, form: str) -> Any:
    """Write the model, quantise it, and load it."""
    path, quantised = folder / "fp32.gguf", folder / "quantised.gguf"
    rwkv.write(rwkv.random_weights(shape), shape, path)
    if form != "fp32":
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype, options.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, 1
        if llama_cpp.llama_model_quantize(str(path).encode(), str(quantised).encode(), ctypes.byref(options)):
            raise MissingError(f"llama.cpp does not quantise the model to {form}")
        path = quantised
    options = llama_cpp.llama_model_default_params()
    # llama.cpp crashes in products on Intel's matrix unit, which need weights in a layout of their own. This
    # switches such layouts off; Q8_0 has no others.
    options.use_mmap = options.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
    if not model:
        raise MissingError("llama.cpp does not load the model")
    return model


@cache
def _silence() -> Any:
    """Return a callback that ignores messages, and keep it: the library calls it until the process ends."""
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda level, text, data: None)
