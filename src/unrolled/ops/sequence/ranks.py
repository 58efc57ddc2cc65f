"""The processes that share a sequence: which they are, what they exchange, and how much."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from unrolled.contract import UnsupportedError
from unrolled.ops.positions import positions_from_cu_seqlens, positions_from_padding

PIPELINE_FROM = 8
"""Number of ranks from which sums are passed from rank to rank by default, rather than gathered.

In a gather, a rank receives P - 1 states at once; in a pipeline, rank r receives one state after r hops. The
number is a rule of thumb: on links where a hop takes as long as sending 100 kB, gather and pipeline take
equally long at about this many ranks.
"""

Scan = Literal["gather", "pipeline"]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Ranks:
    """The processes of a group, in the order of their slices, and the collectives between them.

    Attributes:
        rank: the number of this process in the group, and of its slice.
        size: the number of processes P.
        scan: how sums reach the later ranks; see `sequence_parallel`.
        bytes_sent: what this process has sent so far, forward and backward. What it sends to several ranks
            counts once for each.

    Raises:
        ValueError: an unknown scan.
    """

    def __init__(self, group: dist.ProcessGroup | None, scan: Scan | None = None) -> None:
        self.group, self.bytes_sent, self._compared = group, 0, False
        self.rank, self.size = self._place()
        if scan not in ("gather", "pipeline", None):
            raise ValueError(f"scan is {scan!r}, but must be 'gather', 'pipeline' or None")
        self.scan = scan or ("gather" if self.size < PIPELINE_FROM else "pipeline")

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the `x` of every rank, all of one shape."""
        if x.numel() == 0:
            return [x] * self.size
        every = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._all_gather(every, x.contiguous())
        self._sent(x, self.size - 1)
        return every

    def sum_and_scatter(self, xs: Sequence[Tensor]) -> Tensor:
        """Return the sum of the tensors that all ranks have for this one; `xs[r]` is for rank r."""
        if xs[0].numel() == 0:
            return xs[0]
        mine = torch.empty_like(xs[0], memory_format=torch.contiguous_format)
        self._reduce_scatter(mine, [x.contiguous() for x in xs])
        self._sent(mine, self.size - 1)
        return mine

    def send(self, x: Tensor, rank: int) -> Callable[[], object]:
        """Begin to send `x` to a rank; call the returned function before `x` goes out of scope."""
        if x.numel() == 0:
            return lambda: None
        self._sent(x, 1)
        work = dist.isend(x, group=self.group, group_dst=rank)
        return (lambda: None) if work is None else work.wait

    def receive(self, like: Tensor, rank: int) -> Tensor:
        """Receive from a rank a tensor of this size."""
        x = torch.empty_like(like)
        if x.numel():
            dist.recv(x, group=self.group, group_src=rank)
        return x

    def from_last(self, x: Tensor) -> Tensor:
        """Return the `x` of the last rank."""
        x = x.clone()
        if x.numel():
            dist.broadcast(x, group=self.group, group_src=self.size - 1)
        self._sent(x, self.size - 1 if self.rank == self.size - 1 else 0)
        return x

    def sum_at_last(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks on the last; the other ranks may not use the result."""
        x = x.clone()
        if x.numel():
            dist.reduce(x, group=self.group, group_dst=self.size - 1)
        self._sent(x, 0 if self.rank == self.size - 1 else 1)
        return x

    def counts(self, x: Tensor, key_padding_mask: Tensor | None) -> tuple[int | Tensor, int | Tensor]:
        """Count the tokens before this rank's slice `x [B,T,...]`, and the tokens of all slices.

        With a `key_padding_mask [B,T]`, only valid tokens count, and both counts are `[B]`.
        """
        if key_padding_mask is None:
            return self.rank * x.shape[1], self.size * x.shape[1]
        every = torch.stack(self.gather((~key_padding_mask).sum(1)))
        return every[: self.rank].sum(0), every.sum(0)

    def compare(self, x: Tensor, *, masked: bool) -> None:
        """Check, at the first call, that the slices `x [B,T,...]` have one shape, and all or none is masked.

        Raises:
            ValueError: they differ; on every rank.
        """
        if self._compared:
            return
        self._compared = True
        found = [x.tolist() for x in self.gather(torch.tensor([*x.shape[:2], masked], device=x.device))]
        if any(x != found[0] for x in found):
            shapes = ", ".join(f"[{b}, {t}]{' with a mask' * m}" for b, t, m in found)
            raise ValueError(
                f"the slices of the ranks are {shapes}, but must have one shape, with key_padding_mask on "
                "every rank or on none: cut the sequence into equal parts, padded if need be"
            )

    def _place(self) -> tuple[int, int]:
        return dist.get_rank(self.group), dist.get_world_size(self.group)

    def _all_gather(self, every: list[Tensor], x: Tensor) -> None:
        dist.all_gather(every, x, group=self.group)

    def _reduce_scatter(self, mine: Tensor, xs: list[Tensor]) -> None:
        dist.reduce_scatter(mine, xs, group=self.group)

    def _sent(self, x: Tensor, times: int) -> None:
        self.bytes_sent += times * x.numel() * x.element_size()


_ranks: ContextVar[Ranks | None] = ContextVar("_ranks", default=None)
_lock = Lock()
_open = 0  # contexts in all threads; a plain number, so that torch.compile can see that there is none


@contextmanager
def sequence_parallel(
    group: dist.ProcessGroup | DeviceMesh | None = None, *, scan: Scan | None = None
) -> Iterator[Ranks]:
    """Attend over a sequence whose slices are in the processes of a group, in the order of their ranks.

    `forward`, `loss` and `prefill` of causal decoders and mechanisms then give, on each rank, the outputs of
    its slice of the whole sequence; a loss is the mean over the targets of the slice. Calls that cannot do
    this raise UnsupportedError. Functions such as `linear_attention` know nothing of other slices. A model of
    your own that adds positions to its input asks `token_counts` for the number of tokens before the slice.
    The backward pass may run inside or outside of the context.

    Args:
        group: the processes, as a process group or a mesh of one dimension; None for the default group.
        scan: how sums reach the later ranks. With "gather", every rank receives the sums of all others and
            adds up those before it. With "pipeline", each rank receives the total from the rank before it, in
            pieces, adds its own sum and sends the total on. This moves less data but takes a hop per rank.
            The last tokens that windows and convolutions need then come from the rank before, or from further
            back where slices are shorter or masked. Keys and values, and sums under a maximum, are always
            gathered. None selects "pipeline" from `PIPELINE_FROM` ranks on, and "gather" with fewer.

    Yields:
        the ranks, with `bytes_sent`.

    Raises:
        ValueError: no process group was initialised, a mesh of several dimensions, or another `scan`.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("no process group is initialised, but one is needed: call init_process_group first")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or group.shape
            raise ValueError(f"group is a mesh of dimensions {names}, but must have one: mesh['sequence']")
        group = group.get_group()
    with use(Ranks(group, scan)) as ranks:
        yield ranks


@contextmanager
def use(ranks: Ranks) -> Iterator[Ranks]:
    """Let these ranks share the sequences of all calls in the block, in this thread."""
    global _open
    token = _ranks.set(ranks)
    with _lock:
        _open += 1
    try:
        yield ranks
    finally:
        with _lock:
            _open -= 1
        _ranks.reset(token)


def current() -> Ranks | None:
    """Return the ranks that share the sequence; None outside of `sequence_parallel`."""
    if _open == 0:
        return None
    if torch.compiler.is_compiling():
        raise UnsupportedError("torch.compile cannot exchange states between processes; run uncompiled")
    return _ranks.get()


def check_slices(x: Tensor, key_padding_mask: Tensor | None) -> None:
    """Check, at the first call inside `sequence_parallel`, that the slices `x [B,T,...]` fit together.

    Raises:
        ValueError: the slices of the processes differ in shape, or only some have a mask.
    """
    if (ranks := current()) is not None:
        ranks.compare(x, masked=key_padding_mask is not None)


def refuse(what: str) -> None:
    """Raise UnsupportedError inside `sequence_parallel`, where `what` would not see the other slices."""
    if current() is not None:
        raise UnsupportedError(
            f"{what} cannot read a sequence that processes share; use a causal decoder whose attention has "
            "`sequence` in `unrolled list`, or call it outside of sequence_parallel"
        )


def inside(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Bind `function` to the current ranks, so that it can run later, as recomputation in a backward pass."""
    ranks = current()
    if ranks is None:
        return function

    def run(*args: Any, **kwargs: Any) -> Result:
        with use(ranks):
            return function(*args, **kwargs)

    return run


def token_counts(x: Tensor, key_padding_mask: Tensor | None) -> tuple[int | Tensor, int | Tensor]:
    """Count the tokens before this process's slice `x [B,T,...]`, and the tokens of all slices.

    Without ranks, the sequence is a single slice. With a `key_padding_mask [B,T]`, only valid tokens count,
    and the counts are `[B]`.

    Raises:
        ValueError: the slices of the processes differ in shape.
    """
    if (ranks := current()) is not None:
        check_slices(x, key_padding_mask)
        return ranks.counts(x, key_padding_mask)
    return 0, x.shape[1] if key_padding_mask is None else (~key_padding_mask).sum(1)


def positions_of(
    x: Tensor, key_padding_mask: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return the position of each token of `x [B,T,...]` in its sequence: `[B,T]`, or `[1,T]` for all rows.

    Positions count valid tokens only, also those of the slices of earlier processes.
    """
    if cu_seqlens is not None:
        return positions_from_cu_seqlens(cu_seqlens, x.shape[1])
    if key_padding_mask is not None:
        positions = positions_from_padding(key_padding_mask)
    else:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
    if (ranks := current()) is None:
        return positions
    earlier, _ = ranks.counts(x, key_padding_mask)
    return positions + (earlier.unsqueeze(1) if isinstance(earlier, Tensor) else earlier)
