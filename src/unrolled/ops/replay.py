"""Replay: running a function again with the same random numbers and the same discrete choices.

Recomputed inputs may differ by rounding. That hardly changes continuous results, but it can change a
discrete choice, such as the bucket of a token. So code that makes a discrete choice calls `chosen`. A
`Replay` then returns the choice of the first run, and it also restores the state of the random generators.
`as_now` restores what a module held.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, TypeVarTuple

import torch
from torch import Tensor, nn

from unrolled.ops.sequence import current, use

Result = TypeVar("Result")
Ts = TypeVarTuple("Ts")
_running = threading.local()  # .replay: the active `Replay`, if any


def chosen(choose: Callable[[], Tensor], n: int) -> Tensor:
    """Call `choose`, which returns integers below n; inside `Replay.again`, return its first result."""
    if torch.compiler.is_compiling():
        return choose()
    replay: Replay | None = getattr(_running, "replay", None)
    return choose() if replay is None else replay._choice(choose, n)


def as_now(module: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Remember which tensors a module holds, and its mode; return what makes contexts in which it has them.

    `torch.func.functional_call` replaces the tensors for one forward pass, and `eval` changes the mode. The
    shards of FSDP2 are not restored: it replaces them by whole weights in every pass. A context raises
    RuntimeError if a parameter was changed in place. Buffers may be: some layers do so in a forward pass.
    """
    tables: list[tuple[dict[str, Any], list[str]]] = []
    versions: list[tuple[Tensor, int, str]] = []
    for each in _reachable(module):
        tables += [(held, list(held)) for held in (each._parameters, each._buffers)]
        tables.append((vars(each), ["training"] if "training" in vars(each) else []))  # compiled: a property
        versions += [
            (x, x._version, f"{name} of {type(each).__name__}")
            for name, x in each._parameters.items()
            if x is not None and type(x) in (Tensor, nn.Parameter) and not x.is_inference()
        ]
    now = [(table, name, table[name]) for table, names in tables for name in names]

    @contextmanager
    def context() -> Iterator[None]:
        for x, version, name in versions:
            if x._version != version:
                raise RuntimeError(
                    f"{name} was changed in place between the forward and the backward pass, which "
                    "recomputes its layer: call backward before optimizer.step()"
                )
        changed = [
            (table, name, x, table[name])
            for table, name, x in now
            if table[name] is not x and type(x) in (Tensor, nn.Parameter, bool)  # a shard is of another type
        ]
        for table, name, x, _ in changed:
            table[name] = x
        try:
            yield
        finally:
            for table, name, _, later in changed:
                table[name] = later

    return context


def _reachable(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module, its sub-modules, and modules that they share with others without registering them."""
    found, left = set[nn.Module](), [module]
    while left:
        if (each := left.pop()) not in found:
            found.add(each)
            yield each
            left += [x for x in (*each.children(), *vars(each).values()) if isinstance(x, nn.Module)]


class Replay:
    """One run of a function of tensors on `device`, to be repeated; inputs and results are not kept."""

    def __init__(self, device: torch.device):
        self.device = device
        self._choices: list[Tensor] = []
        self._next: int | None = None
        self._random: list[Tensor] | None = None
        self._ranks = current()
        self._autocast: tuple[bool, torch.dtype] | None = None
        if (kind := device.type) != "meta":  # the meta device has no autocast
            self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def first(self, function: Callable[[*Ts], Result], *args: *Ts) -> Result:
        """Run the function; record its choices and, if it draws random numbers, the random state before."""
        before = self._generators()
        result = self._run(function, args)
        if not all(map(torch.equal, before, self._generators())):
            self._random = before
        return result

    def again(self, function: Callable[[*Ts], Result], *args: *Ts) -> Result:
        """Run the function again, under the recorded autocast state; the global generators do not advance."""
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
            with self._as_then(), nullcontext() if self._ranks is None else use(self._ranks):
                return function(*args)
        finally:
            _running.replay = outer

    def _as_then(self) -> AbstractContextManager[object]:
        """Restore the autocast state, without its cache: a weight cached under `no_grad` has no gradient."""
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
    """Return the smallest integer dtype that holds the integers below n."""
    types = (torch.uint8, torch.int16, torch.int32)
    return next((dtype for dtype in types if n - 1 <= torch.iinfo(dtype).max), torch.int64)
