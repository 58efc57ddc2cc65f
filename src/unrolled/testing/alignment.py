"""The contract of an alignment: two forms give the same results, padding is masked, states are values."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unrolled import alignment
from unrolled.ops.state import leaves, map_tensors, select
from unrolled.testing._kit import (
    TOLERANCE,
    assert_close,
    assert_finite,
    assert_identical,
    assert_raises,
    assert_same,
    compiled,
    exported,
    noisy,
    normal,
    require,
    run_all,
    with_gradients,
)
from unrolled.testing.refusals import wrong_masks
from unrolled.testing.states import require_batched, saved_and_loaded

B, T, S = 2, 4, 7
PLANS: tuple[tuple[int, ...], ...] = ((1, 1, 1, 1), (4,), (1, 2, 1), (0, 3, 1))
"""Numbers of queries in consecutive calls of `recall`."""


@dataclass(frozen=True)
class AlignmentMaker:
    """Builds the attention under test; equal arguments build equal modules, as for `Maker`."""

    mechanism: type[nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)
    query_dim: int = 12
    memory_dim: int = 10
    dtype: torch.dtype = torch.float64

    def __call__(self, *, dtype: torch.dtype | None = None, seed: int = 0) -> Any:
        """Construct the attention in evaluation mode."""
        sizes = (self.query_dim, self.memory_dim)
        return noisy(lambda: self.mechanism(*sizes, **self.options), dtype or self.dtype, seed)

    def inputs(
        self, batch: int = B, queries: int = T, length: int = S, *, seed: int = 0, dtype: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Draw queries `[batch,queries,query_dim]` and a memory `[batch,length,memory_dim]`."""
        query = normal(batch, queries, self.query_dim, seed=2 * seed)
        memory = normal(batch, length, self.memory_dim, seed=2 * seed + 1)
        dtype = dtype or self.dtype
        return query.to(dtype).requires_grad_(), memory.to(dtype).requires_grad_()


def check_alignment(name_or_class: str | type[nn.Module], **options: Any) -> list[str]:
    """Run every check of `ALIGNMENT_CHECKS`.

    Args:
        name_or_class: a name in `unrolled.alignment`, or any class that follows `Alignment`.
        options: passed to its constructor; `query_dim` (12) and `memory_dim` (10) may be given too.

    Returns:
        The names of the checks that ran; all of them passed.

    Raises:
        AssertionError: a promise is broken; the message says what differed and by how much.
        ValueError: there is no mechanism of that name.
    """
    mechanism = alignment.load(name_or_class) if isinstance(name_or_class, str) else name_or_class
    sizes = {name: options.pop(name) for name in ("query_dim", "memory_dim") if name in options}
    return run_all(ALIGNMENT_CHECKS, mechanism, AlignmentMaker(mechanism, options, **sizes))


def ask(module: Any, query: Tensor, state: Any, plan: tuple[int, ...]) -> tuple[Tensor, Any]:
    """Call `recall` with the queries split into these lengths; return `[contexts, weights]` and the state."""
    outputs, at = [], 0
    for n in plan:
        context, weights, state = module.recall(query[:, at : at + n], state)
        outputs.append(torch.cat([context, weights], -1))
        at += n
    return torch.cat(outputs, 1), state


def paddings() -> dict[str, Tensor]:
    """Masks `[B,S]` with padding on each side, and scattered; the second row has none."""
    row, places = torch.tensor([[True], [False]]), torch.arange(S)
    padded = {"left": [0, 1, 2], "right": [4, 5, 6], "scattered": [0, 3, 5]}
    return {name: row & torch.isin(places, torch.tensor(at)) for name, at in padded.items()}


def check_verbs_agree(make: AlignmentMaker) -> None:
    """`forward` equals `recall` of all queries at once or in parts, with padding, gradients and without."""
    module = make()
    for where, mask in {"no": None, **paddings()}.items():
        query, memory = make.inputs()
        inputs = {"query": query, "memory": memory}
        contexts = module(query, memory, key_padding_mask=mask)
        together, _ = ask(module, query, module.read(memory, key_padding_mask=mask), (T,))
        assert_close(contexts, together[..., : make.memory_dim], f"{where} padding: forward against recall")
        expected = with_gradients(module, together, **inputs)
        for plan in PLANS:
            y, state = ask(module, query, module.read(memory, key_padding_mask=mask), plan)
            found = with_gradients(module, y, **inputs)
            assert_close(found, expected, f"{where} padding: queries in parts of {plan} against all at once")
            with torch.no_grad():
                y, _ = ask(module, query, module.read(memory, key_padding_mask=mask), plan)
            what = f"{where} padding: queries in parts of {plan} without autograd"
            assert_close(y, expected["output"], what)
            seen = state.position.tolist()
            require(seen == [T] * B, f"position after {T} queries is {seen}")


def check_weights_are_shares(make: AlignmentMaker) -> None:
    """Weights are at least 0, add up to at most 1, are 0 at padding, and are those of the context.

    The context is the sum of the memory with these weights, times a number that may depend on the query.
    """
    module = make()
    for where, mask in paddings().items():
        query, memory = make.inputs()
        context, weights, _ = module.recall(query, module.read(memory, key_padding_mask=mask))
        weights = weights.detach()
        require(weights.shape == (B, T, S), f"weights have shape {list(weights.shape)}, not {[B, T, S]}")
        low, high = float(weights.min()), float(weights.sum(-1).max())
        allowed = 1 + TOLERANCE[weights.dtype]
        require(low >= 0 and high <= allowed, f"weights are at least {low:.3g} and add up to {high:.3g}")
        at_padding = float(weights[0][:, mask[0]].abs().max())
        require(at_padding == 0, f"{where} padding gets a weight of {at_padding:.3g}, should be 0")
        read = weights @ memory.detach().masked_fill(mask.unsqueeze(-1), 0)
        gate = (context.detach() * read).sum(-1, keepdim=True) / read.square().sum(-1, keepdim=True)
        assert_close(context, gate * read, f"{where} padding: context against the weighted memory")


def check_memory_padding(make: AlignmentMaker) -> None:
    """Padding changes nothing, whatever its position and content, and gets no gradient."""
    module = make()
    for where, mask in paddings().items():
        query, memory = make.inputs()
        kept = memory.detach()[:1, ~mask[0]].requires_grad_()
        expected = with_gradients(module, module(query[:1], kept), query=query, memory=kept)
        y = module(query, memory, key_padding_mask=mask)
        found = with_gradients(module, y[:1], query=query, memory=memory)
        what = f"{where} padding"
        at_padding = float(found["gradient of memory"][0, mask[0]].abs().max())
        require(at_padding == 0, f"{what}: its gradient is {at_padding:.3g}, should be 0")
        found["gradient of memory"] = found["gradient of memory"][:1, ~mask[0]]
        assert_close(found, expected, f"{what} against the memory without it")
        for holds in (torch.nan, torch.inf, 1e30):
            changed = memory.detach().clone()
            changed[mask] = holds
            again = module(query, changed, key_padding_mask=mask)
            assert_identical(again, y, f"{what} that holds {holds}")


def check_nothing_to_read(make: AlignmentMaker) -> None:
    """A memory of padding only gives context and weights 0 with zero gradients, and affects no other row."""
    module = make()
    query, memory = make.inputs()
    mask = torch.tensor([[True] * S, [False] * S])

    def run() -> Tensor:
        return ask(module, query, module.read(memory, key_padding_mask=mask), (T,))[0]

    for name, x in with_gradients(module, run()[:1], query=query, memory=memory).items():
        require(bool((x == 0).all()), f"a memory of padding only: {name} should be 0")
    assert_finite(with_gradients(module, run(), query=query, memory=memory), "a memory of padding only")
    alone, _ = ask(module, query[1:], module.read(memory[1:]), (T,))
    assert_close(run()[1:], alone, "the row beside a memory of padding only")


def check_rows_are_independent(make: AlignmentMaker) -> None:
    """The result of a row does not depend on other rows, nor the result of a query on later queries."""
    module = make()
    query, memory = make.inputs()
    expected, _ = ask(module, query, module.read(memory), (T,))
    other = module(query.flip(0), memory.flip(0)).flip(0)
    assert_close(other, expected[..., : make.memory_dim], "the rows in another order")
    changed = query.detach().clone()
    changed[:, -1] *= -1e3
    found, _ = ask(module, changed, module.read(memory), (T,))
    assert_close(found[:, :-1], expected[:, :-1], "the last query changed: the others")


def check_memory_state_is_a_value(make: AlignmentMaker) -> None:
    """recall does not modify the state, and the module keeps nothing of a sequence."""
    module = make()
    query, memory = make.inputs()
    other_query, other_memory = make.inputs(seed=1)
    for autograd in (True, False):
        with torch.set_grad_enabled(autograd):
            state = module.read(memory)
            before = map_tensors(torch.clone, state)
            expected, _ = ask(module, query, state, (1, 3))
            ask(module, other_query, module.read(other_memory), (2, 1, 1))
            assert_identical(leaves(state), leaves(before), "the state that was passed in")
            again, _ = ask(module, query, state, (1, 3))
            assert_identical(again, expected, "the same state queried a second time")


def check_memory_state_round_trip(make: AlignmentMaker) -> None:
    """Rows of a state can be selected, and a saved state continues identically in a twin module."""
    module = make()
    query, memory = make.inputs()
    mask = paddings()["scattered"]
    _, state = ask(module, query, module.read(memory, key_padding_mask=mask), (1, 1))
    expected, _ = ask(module, query, state, (1, 3))
    rows = [1, 0, 0]
    found, _ = ask(module, query[rows], select(state, rows), (1, 3))
    assert_close(found, expected[rows], f"rows {rows} of the state")
    loaded = saved_and_loaded(state, make().read(memory[:1]), "the state")
    found, _ = ask(make(), query, loaded, (1, 3))
    assert_identical(found, expected, "a twin module with the loaded state")


def check_memory_dtypes(make: AlignmentMaker) -> None:
    """Outputs have the type of the query, states are fp32 or fp64; half precision and autocast are finite."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        module, (query, memory) = make(dtype=dtype), make.inputs(dtype=dtype)
        y, state = ask(module, query, module.read(memory), (1, 3))
        require(y.dtype == dtype, f"queries of {dtype} give {y.dtype}")
        require(hasattr(state, "_fields"), f"the state is a {type(state).__name__}, should be a NamedTuple")
        require_batched(state, B, dtype, f"state of a {dtype} module")
        large = 30 * query, 30 * memory
        assert_finite(with_gradients(module, module(*large), query=query, memory=memory), f"{dtype}")
    single, (query, memory) = make(dtype=torch.float32), make.inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = single(query, memory)
    assert_finite(with_gradients(single, y, query=query, memory=memory), "fp32 under autocast")


def check_memory_module(make: AlignmentMaker) -> None:
    """The state_dict is complete, copies are equal, and torch's global generator is not used."""
    module, other = make(), make(seed=1)
    query, memory = make.inputs()
    before = torch.get_rng_state()
    y = module(query, memory)
    require(torch.equal(before, torch.get_rng_state()), "torch's global generator was used")
    assert_identical(module(query, memory), y, "forward a second time")
    other.load_state_dict(module.state_dict(), strict=True)
    assert_identical(other(query, memory), y, "another module with the loaded state_dict")
    assert_identical(copy.deepcopy(module)(query, memory), y, "a deep copy")


def check_memory_sizes(make: AlignmentMaker) -> None:
    """A memory of 1, no queries, and an empty batch work, with gradients."""
    module = make()
    for batch, queries, length in ((2, 3, 1), (2, 0, 3), (0, 3, 4), (1, 1, 40)):
        query, memory = make.inputs(batch, queries, length)
        y = module(query, memory)
        what = f"{batch} rows, {queries} queries, a memory of {length}"
        expected = (batch, queries, make.memory_dim)
        require(y.shape == expected, f"{what}: contexts have shape {list(y.shape)}, not {list(expected)}")
        assert_finite(with_gradients(module, y, query=query, memory=memory), what)


def check_memory_refusals(make: AlignmentMaker) -> None:
    """Arguments of a wrong shape or type, and a memory of length 0, raise ValueError."""
    module = make()
    query, memory = (x.detach() for x in make.inputs())
    state = module.read(memory)
    wide = torch.cat([memory, memory[..., :1]], -1)
    for what, verb, *args in (
        ("a memory of length 0", "read", memory[:, :0]),
        ("a memory of another width", "read", wide),
        ("a memory without a batch", "read", memory[0]),
        ("a memory of whole numbers", "read", memory.long()),
        ("queries without a length", "recall", query[:, 0], state),
        ("a state of another batch", "recall", query[:1], state),
        ("a state that is none", "recall", query, ()),
        ("queries of another width", "recall", query[..., 1:], state),
    ):
        assert_raises(ValueError, what, module, verb, *args)
    for wrong, mask in wrong_masks(B, S):
        assert_raises(ValueError, f"key_padding_mask {wrong}", module, "read", memory, key_padding_mask=mask)


def check_alignment_compiles(make: AlignmentMaker) -> None:
    """`torch.compile(fullgraph=True)` compiles forward and recall, and gives the same values."""
    module = make()
    query, memory = make.inputs()
    mask = paddings()["left"]
    torch.compiler.reset()
    try:
        found = compiled(module.forward)(query, memory, key_padding_mask=mask)
        expected = module(query, memory, key_padding_mask=mask)
        assert_same(module, found, expected, "compiled forward", query=query, memory=memory)
        with torch.no_grad():
            state = module.read(memory)
            found = compiled(module.recall)(query[:, :1], state)
            expected = module.recall(query[:, :1], state)
        for part, x, y in zip(("context", "weights"), found, expected, strict=False):
            assert_close(x, y, f"compiled recall, {part}")
    finally:
        torch.compiler.reset()


def check_alignment_dynamic_lengths(make: AlignmentMaker) -> None:
    """`torch.export` of forward, with any number of queries and any length, gives the same values."""
    module = make()
    queries, memory = ({1: torch.export.Dim(name, min=2, max=32)} for name in ("queries", "memory"))
    graph = exported(module, make.inputs(2, 9, 11), (queries, memory))
    for count, length in ((2, 32), (29, 5)):
        inputs = make.inputs(2, count, length)
        what = f"{count} queries of a memory of {length}, exported with dynamic lengths"
        assert_close(graph(*inputs), module(*inputs), what)


ALIGNMENT_CHECKS: tuple[Callable[[AlignmentMaker], None], ...] = (
    check_verbs_agree,
    check_weights_are_shares,
    check_memory_padding,
    check_nothing_to_read,
    check_rows_are_independent,
    check_memory_state_is_a_value,
    check_memory_state_round_trip,
    check_memory_dtypes,
    check_memory_module,
    check_memory_sizes,
    check_memory_refusals,
    check_alignment_compiles,
    check_alignment_dynamic_lengths,
)
"""Every check, each of which can be run alone: `check(AlignmentMaker(MyAttention, {"my_option": 3}))`."""
