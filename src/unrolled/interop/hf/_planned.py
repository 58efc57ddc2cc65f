"""A plan in place of the model while transformers generates, where the loop calls the model per token."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from weakref import WeakSet

import torch

from unrolled.contract import UnsupportedError
from unrolled.decode import Plan, plan, unasked
from unrolled.decode.packing import Weights
from unrolled.interop.hf.cache import StateLayer
from unrolled.models import Decoder
from unrolled.ops.dropout import Dropout

PLANNED_STEPS = 8  # tokens that the model reads before a plan is made; making it takes about as long


class Generation:
    """One call of `generate`.

    Args:
        model: the decoder that generates.
        weights: form of the weights of the plan; None for fp32, and only if a plan can run the model and the
            model has no dropout to apply, which plans leave out.
    """

    def __init__(self, model: Decoder, weights: Weights | None) -> None:
        self.model, self.weights = model, weights
        self.pad: int | None = None  # the id of padding, in this call only
        self.written = WeakSet[StateLayer]()  # also those of other calls of the model in `generate`
        self._steps = 0
        self._plan = None if weights is None else plan(model, weights)
        self._possible = weights is not None or (unasked() and not _drops(model))

    def reader(self, tokens: int) -> Decoder | Plan:
        """Return the model or plan that reads the next tokens."""
        self._steps += tokens == 1
        if self._plan is None and self._possible and self._steps >= PLANNED_STEPS:
            try:
                self._plan = plan(self.model)
            except UnsupportedError:
                self._possible = False
        return self.model if self._plan is None else self._plan

    def finish(self) -> None:
        """Convert the states that the plan has put into caches to those of the model."""
        for layer in self.written:
            layer.state = layer.state  # reading it converts it


def _drops(model: Decoder) -> bool:
    """Whether dropout acts on the model, as in training."""
    return any(isinstance(x, Dropout) and x.training and x.p > 0 for x in model.modules())


_current: ContextVar[Generation | None] = ContextVar("generation", default=None)
_lock = Lock()
_open = 0  # calls in all threads; a plain number, so that torch.compile can see that there is none


@contextmanager
def generation(model: Decoder, weights: Weights | None) -> Iterator[Generation]:
    """Let a plan read tokens inside the block, in this thread; at its end, convert the states back."""
    global _open
    made = Generation(model, weights)
    token = _current.set(made)
    with _lock:
        _open += 1
    try:
        yield made
    finally:
        with _lock:
            _open -= 1
        _current.reset(token)
        made.finish()


def current(model: Decoder) -> Generation | None:
    """Return the call of `generate` of this model in this thread, if there is one."""
    made = _current.get() if _open else None  # which torch.compile cannot read
    return None if made is None or made.model is not model else made


def reader(model: Decoder, tokens: int) -> Decoder | Plan:
    """Return the plan that reads the next tokens inside `generation` of this model, else the model."""
    made = current(model)
    if made is None or torch.compiler.is_compiling():  # a plan has nothing to compile
        return model
    return made.reader(tokens)
