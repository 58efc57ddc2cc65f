"""Running a function a second time exactly as the first: with the same random numbers, and the same choices.

A recomputation may set out from inputs that are off by rounding. What is continuous hardly notices; a choice,
such as the bucket of a token, may turn out another one. So whoever makes one calls `chosen`, and a `Replay`
repeats what was chosen the first time, as it repeats the state of the random generators.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar, TypeVarTuple

import torch
from torch import Tensor

Result = TypeVar("Result")
Ts = TypeVarTuple("Ts")
_running = threading.local()  # .replay: the one that the function now running belongs to


def chosen(choose: Callable[[], Tensor], n: int) -> Tensor:
    """Call `choose`, which gives integers below n; in a `Replay.again`, return what it gave before."""
    if torch.compiler.is_compiling():
        return choose()
    replay: Replay | None = getattr(_running, "replay", None)
    return choose() if replay is None else replay._choice(choose, n)


class Replay:
    """One run of a function of tensors on `device`, to be repeated. It keeps no tensor but the choices."""

    def __init__(self, device: torch.device):
        self.device = device
        self._choices: list[Tensor] = []
        self._next: int | None = None
        self._random: list[Tensor] | None = None
        self._autocast: tuple[bool, torch.dtype] | None = None
        if (kind := device.type) != "meta":  # which knows no autocast
            self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def first(self, function: Callable[[*Ts], Result], *args: *Ts) -> Result:
        """Run the function, and note what it chooses and, if it draws random numbers, where these began."""
        before = self._generators()
        result = self._run(function, args)
        if not all(map(torch.equal, before, self._generators())):
            self._random = before
        return result

    def again(self, function: Callable[[*Ts], Result], *args: *Ts) -> Result:
        """Run it as before, under the autocast of then. The caller's generators are left as they are."""
        self._next = 0
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(cuda) if self._random else nullcontext():
            if self._random:
                torch.set_rng_state(self._random[0])
                if cuda:
                    torch.cuda.set_rng_state(self._random[1], self.device)
            return self._run(function, args)

    def _run(self, function: Callable[[*Ts], Result], args: tuple[*Ts]) -> Result:
        outer, _running.replay = getattr(_running, "replay", None), self
        try:
            with self._as_then():
                return function(*args)
        finally:
            _running.replay = outer

    def _as_then(self) -> AbstractContextManager[object]:
        """The autocast of then, without its cache: a weight converted while nothing is recorded by autograd
        would have no gradient when it is used again."""
        if self._autocast is None:
            return nullcontext()
        enabled, dtype = self._autocast
        return torch.autocast(self.device.type, dtype=dtype, enabled=enabled, cache_enabled=False)

    def _generators(self) -> list[Tensor]:
        cuda = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [torch.get_rng_state(), *cuda]

    def _choice(self, choose: Callable[[], Tensor], n: int) -> Tensor:
        if self._next is None:
            choice = choose()
            self._choices.append(choice.to(_narrowest(n)))
            return choice
        kept = self._choices[self._next]
        self._next += 1
        return kept.long()


def _narrowest(n: int) -> torch.dtype:
    """The type that keeps the integers below n in the fewest bytes."""
    types = (torch.uint8, torch.int16, torch.int32)
    return next((dtype for dtype in types if n - 1 <= torch.iinfo(dtype).max), torch.int64)
