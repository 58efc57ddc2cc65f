"""A state is a value: batch-first tensors that no call modifies; rows can be selected, and states saved."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unrolled.contract import Supports
from unrolled.ops.state import leaves, load, map_tensors, nbytes, save, select
from unrolled.testing._kit import Maker, assert_close, assert_identical, describe, require, unroll


def check_state_is_a_value(make: Maker, supports: Supports) -> None:
    """prefill and step leave the given state bitwise unchanged, and it can be continued twice."""
    module = make(causal=True)
    x, other = make.input(2, 66, grad=False), make.input(2, 2, seed=1, grad=False)
    for autograd in (True, False):
        for seen in (0, 3, 63, 64):
            for verb in ("prefill", "step"):
                what = f"{verb} after {seen} tokens, autograd {'on' if autograd else 'off'}"
                with torch.set_grad_enabled(autograd):
                    _, state = unroll(module, x[:, :seen], [("prefill", seen)])
                    before = map_tensors(torch.clone, state)
                    expected, after = unroll(module, x[:, seen : seen + 2], [(verb, 2)], state)
                    first = map_tensors(torch.clone, after)
                    assert_identical(leaves(state), leaves(before), f"{what}: the state that was passed in")
                    unroll(module, other, [(verb, 2)], state)
                    assert_identical(leaves(after), leaves(first), f"{what}: an earlier continuation's state")
                    again, _ = unroll(module, x[:, seen : seen + 2], [(verb, 2)], state)
                assert_identical(again, expected, f"{what}: the same state continued a second time")


def check_interleaved_sequences(make: Maker, supports: Supports) -> None:
    """One module can run several sequences in turn, since it keeps nothing of a sequence."""
    module = make(causal=True)
    sequences = [make.input(batch, 7, seed=i, grad=False) for i, batch in enumerate((2, 3, 2))]
    expected = [unroll(module, x, [("prefill", 3), ("step", 4)])[0] for x in sequences]
    begun = [unroll(module, x[:, :3], [("prefill", 3)]) for x in sequences]
    states = [state for _, state in begun]
    outputs = [[y] for y, _ in begun]
    for t in range(3, 7):
        module(sequences[t % 3])
        for i, x in enumerate(sequences):
            y, states[i] = module.step(x[:, t], states[i])
            outputs[i].append(y[:, None])
    for i, parts in enumerate(outputs):
        assert_identical(torch.cat(parts, 1), expected[i], f"sequence {i} stepped in turn with two others")


def check_state_round_trip(make: Maker, supports: Supports) -> None:
    """Rows of a state can be selected, and a saved state continues identically in a twin module."""
    module = make(causal=True)
    x, more = make.input(3, 70, grad=False), make.input(3, 4, seed=1, grad=False)
    plan = [("step", 2), ("prefill", 2)]
    for seen in (0, 9, 70):
        _, state = unroll(module, x[:, :seen], [("prefill", seen)])
        expected, _ = unroll(module, more, plan, state)
        rows = [2, 0, 0]
        found, _ = unroll(module, more[rows], plan, select(state, rows))
        assert_close(found, expected[rows], f"continued after {seen} tokens with rows {rows} of the state")
        twin = make(causal=True)
        loaded = saved_and_loaded(state, twin.init_state(1), f"state after {seen} tokens")
        found, _ = unroll(twin, more, plan, loaded)
        assert_identical(found, expected, f"a twin module continuing the loaded state after {seen} tokens")


def saved_and_loaded(state: Any, like: Any, what: str) -> Any:
    """Save a state and load it again; not a bit may change."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        save(state, path)
        loaded = load(path, like=like)
    assert_identical(leaves(loaded), leaves(state), f"{what}, saved and loaded")
    return loaded


def check_state_structure(make: Maker, supports: Supports) -> None:
    """A state is batch-first tensors: fp64 in fp64 modules, and fp32 in all others."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        module = make(causal=True, dtype=dtype)
        x = make.input(3, 4, dtype=dtype)
        states = {
            "init_state": module.init_state(3),
            "prefill": unroll(module, x, [("prefill", 4)])[1],
            "step": unroll(module, x, [("prefill", 2), ("step", 2)])[1],
        }
        what = f"{dtype} module, init_state"
        require(hasattr(states["init_state"], "_fields"), f"{what}: is no NamedTuple")
        structure = _structure(states["init_state"], what)
        for verb, state in states.items():
            what = f"{dtype} module, state of {verb}"
            require(_structure(state, what) == structure, f"{what} has another structure than init_state's")
            require_batched(state, 3, dtype, what)


def require_batched(state: Any, rows: int, dtype: torch.dtype, what: str) -> None:
    """Fail unless all tensors of a state have `rows` rows, and the type of states in a module of `dtype`."""
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    for name, x in leaves(state).items():
        require(x.shape[:1] == (rows,), f"{what}: {name} has shape {list(x.shape)}, should have {rows} rows")
        right = not x.is_floating_point() or x.dtype == expected
        require(right, f"{what}: {name} is {x.dtype}, should be {expected}")


def _structure(state: Any, what: str) -> Any:
    """Reduce a state to its nested field names."""
    if isinstance(state, Tensor):
        return "tensor"
    require(isinstance(state, tuple), f"{what}: holds {type(state).__name__}, should be (tuples of) tensors")
    return tuple(getattr(state, "_fields", ())), tuple(_structure(part, what) for part in state)


def check_constant_state(make: Maker, supports: Supports) -> None:
    """The bytes of a constant state, and the memory it keeps, do not depend on the number of tokens seen."""
    module = make(causal=True)
    expected, kept = nbytes(module.init_state(2)), []
    for plan in ([("step", 1)], [("step", 20)], [("prefill", 20)], [("prefill", 200)]):
        with torch.no_grad():
            state = unroll(module, make.input(2, plan[0][1]), plan)[1]
        what, found = f"state of 2 rows after {describe(plan)}", nbytes(state)
        require(found == expected, f"{what}: {found} bytes, init_state has {expected}")
        kept.append(_kept(state))
    require(kept[-1] == kept[-2], f"{what}: keeps {kept[-1]} bytes in memory, and {kept[-2]} after 20 tokens")


def _kept(state: Any) -> int:
    """Count the bytes that a state keeps in memory: for a slice, those of the whole tensor."""
    storages = [x.untyped_storage() for x in leaves(state).values()]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())
