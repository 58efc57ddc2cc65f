"""llama.cpp as a peer of generation: RWKV-7 of the size of our decoder, through its Python package."""

import ctypes
import tempfile
from collections.abc import Callable, Sequence
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


def steps(shape: rwkv.Shape, *, form: str, tokens: Tensor, threads: int) -> Callable[[], list[Tensor]]:
    """Return a function that reads tokens `[B,T]`, one of each row at a time, from an empty state.

    It returns the logits after every token, `[B,T,V]`.

    Args:
        shape: the sizes of the model.
        form: the form of its weights, in `TOLERANCES`.
        tokens: the tokens to read.
        threads: number of CPU threads.

    Raises:
        MissingError: the packages are not installed, or cannot run the model.
        NotMeasuredError: its heads have a width that llama.cpp does not check.
    """
    B = len(tokens)
    context = _Context(shape, form, sequences=B, length=256 * B, at_once=max(64, B), threads=threads)
    rows, ids = list(range(B)), tokens.T.tolist()

    def run() -> list[Tensor]:
        context.clear()
        found = [context.read(some, rows, [t] * B, logits=rows) for t, some in enumerate(ids)]
        return [torch.stack(found, 1)]

    return run


def prompt(shape: rwkv.Shape, *, form: str, tokens: Tensor, threads: int) -> Callable[[], list[Tensor]]:
    """Return a function that reads tokens `[1,T]` together, from an empty state.

    It returns the logits after the last one, `[1,1,V]`. The arguments and errors are those of `steps`.
    """
    T, ids = tokens.shape[1], tokens[0].tolist()
    context = _Context(shape, form, sequences=1, length=T, at_once=T, threads=threads)

    def run() -> list[Tensor]:
        context.clear()
        return [context.read(ids, [0] * T, range(T), logits=[T - 1])[None]]

    return run


class _Context:
    """A model of llama.cpp that reads up to `at_once` tokens of some sequences together."""

    def __init__(
        self, shape: rwkv.Shape, form: str, *, sequences: int, length: int, at_once: int, threads: int
    ) -> None:
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
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_seq_max = length, sequences
        options.n_batch = at_once
        options.n_ubatch = min(at_once, options.n_ubatch)
        options.n_threads = options.n_threads_batch = threads
        self._library, self._context = llama_cpp, llama_cpp.llama_init_from_model(model, options)
        if not self._context:
            raise MissingError("llama.cpp makes no context of the model")
        self._batch, self._vocabulary = llama_cpp.llama_batch_init(at_once, 0, 1), shape.vocabulary

    def clear(self) -> None:
        """Begin all sequences anew."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def read(
        self, tokens: Sequence[int], sequences: Sequence[int], positions: Sequence[int], logits: Sequence[int]
    ) -> Tensor:
        """Read tokens of sequences at positions; return the logits after those numbered `logits`."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, sequence, position) in enumerate(zip(tokens, sequences, positions, strict=True)):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, 0
        for i in logits:
            batch.logits[i] = 1
        if self._library.llama_decode(self._context, batch):
            raise MissingError("llama.cpp does not run the model")
        found = self._library.llama_get_logits(self._context)
        return torch.from_numpy(np.ctypeslib.as_array(found, (len(logits), self._vocabulary)).copy())


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
