"""The states before and after the slices of all ranks, from their summaries: gathered, or passed on."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unrolled.ops.precision import without_autocast
from unrolled.ops.sequence.ranks import Ranks
from unrolled.ops.sequence.summaries import Fields, Summary


def scan(ranks: Ranks, state: Fields, summary: Summary, *, to_end: bool = True) -> tuple[Fields, Fields]:
    """Exchange summaries; return the state before this rank's slice, and the state after all slices.

    All ranks call this together, and take part in its backward pass together.

    Args:
        ranks: the ranks, one slice each.
        state: the state before the first slice, the same on all ranks, with the fields of the summary.
        summary: what this rank's slice does to a state.
        to_end: whether the second result is needed; it is empty otherwise.
    """
    kind: type[torch.autograd.Function] = _Gathered
    if summary.pipelined and ranks.scan == "pipeline":
        kind = _Pipelined
    replaces = summary.replaces(state)
    plan = _Plan(ranks, tuple(state), type(summary), summary.through is not None, to_end, replaces)
    run: Callable[..., tuple[Tensor, ...]] = kind.apply
    found = run(plan, *state.values(), *plan.flat(summary))
    n = len(state)
    return plan.named(found[:n]), plan.named(found[n:]) if to_end else {}


@dataclass(frozen=True)
class _Plan:
    """The arguments of a scan, without its tensors."""

    ranks: Ranks
    names: tuple[str, ...]  # of the fields of the state
    kind: type[Summary]
    through: bool
    to_end: bool
    replaces: bool

    def named(self, tensors: Iterable[Tensor]) -> Fields:
        return dict(zip(self.names, tensors, strict=True))

    def flat(self, summary: Summary) -> list[Tensor]:
        tensors = [summary.own[name] for name in self.names]
        return tensors if summary.through is None else [*tensors, summary.through]

    def summary(self, tensors: Sequence[Tensor]) -> Summary:
        n = len(self.names)
        return self.kind(self.named(tensors[:n]), tensors[n] if self.through else None)

    def fold(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the state before the slice of this rank, and then the state after all slices if needed.

        Args:
            tensors: those of the state, then those of the summary of every rank.
        """
        n, width, rank = len(self.names), len(self.names) + self.through, self.ranks.rank
        summaries = [self.summary(tensors[i : i + width]) for i in range(n, len(tensors), width)]
        with without_autocast(tensors[0].device):
            before = self.kind.after_all(self.named(tensors[:n]), summaries[:rank])
            after = self.kind.after_all(before, summaries[rank:]) if self.to_end else {}
        return *before.values(), *after.values()


class _Gathered(torch.autograd.Function):
    """Every rank receives the summaries of all, and folds them."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        n = len(plan.names)
        ctx.plan = plan
        by_rank = zip(*_gather(plan.ranks, tensors[n:]), strict=True)
        tensors = (*tensors[:n], *(x for summary in by_rank for x in summary))
        ctx.save_for_backward(*tensors)
        return _results(ctx, plan.fold(tensors), tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        plan, n = ctx.plan, len(ctx.plan.names)
        width = n + plan.through
        found = _gradients(plan.fold, ctx.saved_tensors, gradients)
        by_rank = [found[i : i + width] for i in range(n, len(found), width)]
        return None, *found[:n], *_scatter(plan.ranks, list(zip(*by_rank, strict=True)))


class _Pipelined(torch.autograd.Function):
    """Every rank receives the state before its slice from the rank before, in pieces that follow each other.

    The pieces are parts of the columns of the first field; the other fields travel with the first piece.
    Where the slice replaces the whole state, as with a short window, a rank sends its state at once, in one
    piece, before it receives.
    """

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        ranks, n = plan.ranks, len(plan.names)
        last, befores, afters, sent = ranks.rank == ranks.size - 1, [], [], []

        def send(state: Sequence[Tensor], own: Sequence[Tensor]) -> None:
            if plan.to_end or not last:
                afters.append(_after(plan, (*state, *own, *tensors[2 * n :])))
            if not last:
                sent.append(_sending(ranks, _packed(afters[-1]), ranks.rank + 1))

        for state, own in zip(_pieces(tensors[:n], plan), _pieces(tensors[n : 2 * n], plan), strict=True):
            if plan.replaces:
                send(state, own)
            if ranks.rank > 0:
                state = _unpacked(ranks.receive(_packed(state), ranks.rank - 1), state)
            befores.append(state)
            if not plan.replaces:
                send(state, own)
        before = _joined(befores)
        after: tuple[Tensor, ...] = ()
        if plan.to_end:
            after = _unpacked(ranks.from_last(_packed(_joined(afters))), before)
        for wait in sent:
            wait()
        ctx.plan = plan
        ctx.save_for_backward(*before, *tensors[n:])
        return _results(ctx, (*before, *after), tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        plan, ranks, n = ctx.plan, ctx.plan.ranks, len(ctx.plan.names)
        last, saved, sent = ranks.rank == ranks.size - 1, ctx.saved_tensors, []
        before, own, through = saved[:n], saved[n : 2 * n], saved[2 * n :]
        of_end = tuple(torch.zeros_like(x) for x in before)
        if plan.to_end:
            of_end = _unpacked(ranks.sum_at_last(_packed(gradients[n:])), before)
        of_state, of_own, of_through = [], [], [torch.zeros_like(x) for x in through]

        def send(of_piece: Sequence[Tensor]) -> None:
            if ranks.rank > 0:
                sent.append(_sending(ranks, _packed(of_piece), ranks.rank - 1))

        pieces = (_pieces(x, plan) for x in (before, own, gradients[:n], of_end))
        for state, part, read, ended in zip(*pieces, strict=True):
            if plan.replaces:
                send(read)
            after = ended
            if not last:
                after = _unpacked(ranks.receive(_packed(ended), ranks.rank + 1), ended)
            found = _gradients(lambda x: _after(plan, x), (*state, *part, *through), after)
            k = len(state)
            of_state.append(tuple(x + y for x, y in zip(read, found[:k], strict=True)))
            of_own.append(tuple(found[k : 2 * k]))
            of_through = [x + y for x, y in zip(of_through, found[2 * k :], strict=True)]
            if not plan.replaces:
                send(of_state[-1])
        for wait in sent:
            wait()
        # Only the first rank read the given state.
        first = _joined(of_state)
        of_given = first if ranks.rank == 0 else tuple(torch.zeros_like(x) for x in first)
        of_floats = (x if x.is_floating_point() else None for x in of_through)
        return None, *of_given, *_joined(of_own), *of_floats


def _after(plan: _Plan, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return a piece of the state after a slice.

    Args:
        plan: the plan of the scan.
        tensors: the piece of the state before the slice, that of the slice's own state, and `through` if any.
    """
    n = (len(tensors) - plan.through) // 2
    names = plan.names[:n]
    own = dict(zip(names, tensors[n : 2 * n], strict=True))
    piece = plan.kind(own, tensors[-1] if plan.through else None)
    with without_autocast(tensors[0].device):
        return tuple(piece.after(dict(zip(names, tensors[:n], strict=True))).values())


def _results(ctx: Any, results: tuple[Tensor, ...], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copy the results that are inputs too, and mark those that have no gradient."""
    results = tuple(x.clone() if any(x is y for y in inputs) else x for x in results)
    n, needed = len(ctx.plan.names), ctx.needs_input_grad[1:]
    for i, x in enumerate(results):
        if not x.is_floating_point() or not (needed[i % n] or needed[n + i % n]):
            ctx.mark_non_differentiable(x)
    return results


def _gradients(
    function: Callable[[Sequence[Tensor]], tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    of_outputs: Sequence[Tensor],
) -> list[Tensor]:
    """Run a function again for the gradients of its inputs; zeros for inputs that have none."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        outputs = function(leaves)
    pairs = [(y, g) for y, g in zip(outputs, of_outputs, strict=True) if y.requires_grad]
    wanted = [x for x in leaves if x.requires_grad]
    ys, gs = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(ys, wanted, gs, allow_unused=True, materialize_grads=True))
    return [next(found) if x.requires_grad else torch.zeros_like(x) for x in leaves]


def _gather(ranks: Ranks, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Gather several tensors, those of one dtype together; return for each a list of all ranks' tensors."""
    every: list[list[Tensor]] = [[]] * len(tensors)
    for same in _by_dtype(tensors):
        mine = [tensors[i] for i in same]
        flat = [_unpacked(x, mine) for x in ranks.gather(_packed(mine))]
        for i, of_ranks in zip(same, zip(*flat, strict=True), strict=True):
            every[i] = list(of_ranks)
    return every


def _scatter(ranks: Ranks, every: Sequence[Sequence[Tensor]]) -> list[Tensor | None]:
    """Sum the gradients of gathered tensors at the rank that each came from; None for integers."""
    mine: list[Tensor | None] = [None] * len(every)
    for same in _by_dtype([x[0] for x in every]):
        if every[same[0]][0].is_floating_point():
            flat = ranks.sum_and_scatter([_packed([every[i][r] for i in same]) for r in range(ranks.size)])
            for i, x in zip(same, _unpacked(flat, [every[i][0] for i in same]), strict=True):
                mine[i] = x
    return mine


def _by_dtype(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    dtypes = dict.fromkeys(x.dtype for x in tensors)
    return ([i for i, x in enumerate(tensors) if x.dtype == dtype] for dtype in dtypes)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _unpacked(flat: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    parts = torch.split(flat, [x.numel() for x in like])
    return tuple(part.view(x.shape) for part, x in zip(parts, like, strict=True))


def _pieces(fields: Sequence[Tensor], plan: _Plan) -> list[tuple[Tensor, ...]]:
    """Cut the first field's columns into one piece per rank, or fewer; other fields join the first piece."""
    first, *others = fields
    first_piece, *pieces = first.chunk(1 if plan.replaces else plan.ranks.size, -1)
    return [(first_piece, *others), *((piece,) for piece in pieces)]


def _joined(pieces: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    (_, *others), *_ = pieces
    return torch.cat([piece[0] for piece in pieces], -1), *others


def _sending(ranks: Ranks, x: Tensor, rank: int) -> Callable[[], object]:
    """Begin to send; the returned function waits for the end, and keeps `x` alive until then."""
    wait = ranks.send(x, rank)
    return lambda: (wait(), x)
