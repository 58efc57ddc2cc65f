"""Ranks that share a sequence give the results of a single process; here, ranks are threads of a process."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from queue import Queue
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch
from torch import Tensor

from unrolled.contract import Supports, UnsupportedError
from unrolled.ops.sequence import Ranks, use
from unrolled.ops.state import leaves
from unrolled.testing._kit import (
    Maker,
    assert_close,
    assert_identical,
    assert_raises,
    claimed_variants,
    normal,
    recurrent,
)

PATIENCE = 60.0  # seconds that a rank waits for the others
SLICE = 5  # tokens: no multiple of a chunk, and more than a convolution reaches back

Result = TypeVar("Result")
Results = dict[str, Tensor]


def check_sequence(make: Maker, supports: Supports) -> None:
    """Slices on two ranks give the outputs, states and gradients of the whole sequence, or are refused."""
    x = make.input(2, SLICE, grad=False)
    shared = "where two ranks share the sequence"
    for causal, module in make.each_direction(supports):
        with use(Meeting(2).of(0)):
            if not (causal and supports.sequence):
                assert_raises(UnsupportedError, f"forward, causal={causal}, {shared}", module, "forward", x)
            elif supports.packing:
                ends = torch.tensor([0, 2, SLICE], dtype=torch.int32)
                what = f"cu_seqlens {shared}"
                assert_raises(UnsupportedError, what, module, "forward", x[:1], cu_seqlens=ends)
            if causal and recurrent(supports):
                state = module.init_state(2)
                assert_raises(UnsupportedError, f"step {shared}", module, "step", x[:, 0], state)
                if not supports.sequence:
                    assert_raises(UnsupportedError, f"prefill {shared}", module, "prefill", x, state)
    if not supports.sequence:
        return
    x = make.input(2, 4 * SLICE, grad=False)
    padding = torch.zeros(2, 4 * SLICE, dtype=torch.bool)
    padding[0, [0, 1, 2, 3, 4, 8, 12, 19]] = True  # among them a whole slice
    padded = padding if supports.padding else None
    for variant, module in claimed_variants(make, causal=True):
        common = [("gather", None)]
        for scan, mask in (
            [*common, ("gather", padded), ("pipeline", padded)] if variant == "default" else common
        ):
            found = _in_threads(module, x, mask, scan)
            masked = "" if mask is None else ", padded"
            what = f"{variant}{masked}, two slices with scan={scan!r} against one sequence"
            assert_close(joined(found), joined([run_slices(module, x, mask)]), what)
            for name, result in found[0].items():
                if name.startswith("state"):
                    assert_identical(found[1][name], result, f"{what}, {name} of both ranks")


def run_slices(module: Any, x: Tensor, padding: Tensor | None, rank: int = 0, size: int = 1) -> Results:
    """Run one rank on its slice of `x [B,L,d_model]`, and then on its slices of the two halves of `x`.

    Returns:
        the outputs of `forward` and of the two calls of `prefill`, the state after them, and the gradients of
        this rank's share of a fixed random loss on all of these.
    """

    def mine(y: Tensor) -> list[Tensor]:
        return [part.chunk(size, 1)[rank] for part in (y, *y.chunk(2, 1))]

    parts = [part.clone().requires_grad_() for part in mine(x)]
    masks = [None] * 3 if padding is None else mine(padding)
    state = module.init_state(len(x))
    outputs = [module(parts[0], key_padding_mask=masks[0])]
    for part, mask in zip(parts[1:], masks[1:], strict=True):
        y, state = module.prefill(part, state, key_padding_mask=mask)
        outputs.append(y)
    outputs = [_zeroed(y, mask) for y, mask in zip(outputs, masks, strict=True)]
    after = {f"state.{name}": part for name, part in leaves(state).items()}
    weights = mine(normal(*x.shape, seed=99).to(x.dtype))
    losses = [(y * w).sum() for y, w in zip(outputs, weights, strict=True)]
    losses += [(s * normal(*s.shape, seed=98)).sum() / size for s in after.values() if s.requires_grad]
    names = ["slice", "first", "second"]
    wanted = dict(zip(names, parts, strict=True)) | dict(module.named_parameters())
    gradients = torch.autograd.grad(
        torch.stack(losses).sum(), list(wanted.values()), allow_unused=True, materialize_grads=True
    )
    return (
        {f"output of {name}": y.detach() for name, y in zip(names, outputs, strict=True)}
        | {name: part.detach().to(x.dtype) for name, part in after.items()}
        | {f"gradient of {name}": g for name, g in zip(wanted, gradients, strict=True)}
    )


def joined(ranks: Sequence[Results]) -> Results:
    """Join what `run_slices` returned on every rank: slices end to end, gradients of parameters added."""
    result = {}
    for name, first in ranks[0].items():
        every = [rank[name] for rank in ranks]
        if name.startswith("state"):
            result[name] = first
        elif name.endswith((" slice", " first", " second")):
            result[name] = torch.cat(every, 1)
        else:
            result[name] = torch.stack(every).sum(0)
    return result


def _zeroed(y: Tensor, padding: Tensor | None) -> Tensor:
    return y if padding is None else y.masked_fill(padding.unsqueeze(-1), 0)


def _in_threads(module: Any, x: Tensor, padding: Tensor | None, scan: Any) -> list[Results]:
    meeting = Meeting(2, scan)

    def run(rank: int) -> Results:
        with use(meeting.of(rank)):
            return run_slices(module, x, padding, rank, 2)

    return meeting.run(run)


class Meeting:
    """Ranks that are threads of this process, one for each slice."""

    def __init__(self, size: int, scan: Any = None) -> None:
        self.size, self.scan = size, scan
        self.barrier, self.places = Barrier(size, timeout=PATIENCE), [None] * size
        self.mail: dict[tuple[int, int], Queue[Tensor]] = {
            (i, j): Queue() for i in range(size) for j in range(size)
        }

    def of(self, rank: int) -> "ThreadRanks":
        """Make the `Ranks` object of one rank."""
        return ThreadRanks(self, rank)

    def exchange(self, rank: int, mine: Any) -> list[Any]:
        """Give `mine` to all ranks, and return what every rank gave."""
        self.places[rank] = mine
        self.barrier.wait()
        found = list(self.places)
        self.barrier.wait()
        return found

    def run(self, function: Callable[[int], Result]) -> list[Result]:
        """Call a function for each rank at the same time; raise the error of the first that failed."""

        def guarded(rank: int) -> Result:
            try:
                return function(rank)
            except BaseException:
                self.barrier.abort()  # nobody waits for this rank
                raise

        with ThreadPoolExecutor(self.size) as pool:
            runs = [pool.submit(copy_context().run, guarded, rank) for rank in range(self.size)]
        errors = [error for run in runs if (error := run.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        return [run.result() for run in runs]


class ThreadRanks(Ranks):
    """The ranks of a `Meeting`; they exchange copies of tensors within this process."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self._rank = meeting, rank
        super().__init__(None, meeting.scan)

    def _place(self) -> tuple[int, int]:
        return self._rank, self.meeting.size

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the `x` of every rank."""
        return self.meeting.exchange(self.rank, x.detach().clone())

    def sum_and_scatter(self, xs: Sequence[Tensor]) -> Tensor:
        """Return the sum over all ranks of what each has for this rank."""
        every = self.meeting.exchange(self.rank, [x.clone() for x in xs])
        return torch.stack([of_rank[self.rank] for of_rank in every]).sum(0)

    def send(self, x: Tensor, rank: int) -> Callable[[], object]:
        """Leave a copy for a rank."""
        self.meeting.mail[self.rank, rank].put(x.clone())
        return lambda: None

    def receive(self, like: Tensor, rank: int) -> Tensor:
        """Wait for what a rank sends."""
        return self.meeting.mail[rank, self.rank].get(timeout=PATIENCE)

    def from_last(self, x: Tensor) -> Tensor:
        """Return the `x` of the last rank."""
        return self.gather(x)[-1]

    def sum_at_last(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks."""
        return torch.stack(self.gather(x)).sum(0)
