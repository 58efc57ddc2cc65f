"""Properties of a good module: it compiles, exports, copies and saves, and its output is deterministic."""

import copy
import pickle
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unrolled.contract import Supports
from unrolled.testing._kit import (
    Maker,
    assert_close,
    assert_identical,
    assert_same,
    claimed_together,
    compiled,
    directions,
    exported,
    recurrent,
    require,
    unroll,
)


def check_deterministic(make: Maker, supports: Supports) -> None:
    """The same seed builds the same function, and calling it twice gives the same bits."""
    x = make.input(2, 9)
    for causal, module in make.each_direction(supports):
        y = module(x)
        assert_identical(module(x), y, f"causal={causal}: forward a second time")
        assert_identical(make(causal=causal)(x), y, f"causal={causal}: constructed again under the same seed")
    if recurrent(supports):
        module = make(causal=True)
        plan = [("prefill", 4), ("step", 5)]
        y, _ = unroll(module, x, plan)
        assert_identical(unroll(module, x, plan)[0], y, "prefill(4) + step(5) a second time")


def check_global_randomness(make: Maker, supports: Supports) -> None:
    """No method uses the global random generators of torch, numpy and Python, in evaluation mode."""
    x = make.input(2, 9, grad=False)
    for causal, module in make.each_direction(supports):
        before = _generators()
        module(x)
        if causal and recurrent(supports):
            unroll(module, x, [("prefill", 4), ("step", 5)])
        for name, state in _generators().items():
            require(state == before[name], f"causal={causal}: the global generator of {name} was used")


def _generators() -> dict[str, object]:
    algorithm, keys, *rest = np.random.get_state()  # noqa: NPY002 the global generator is the one to observe
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": (algorithm, np.asarray(keys).tolist(), rest),
        "random": random.getstate(),
    }


def check_state_dict(make: Maker, supports: Supports) -> None:
    """The state_dict is complete: loaded strictly into another module, it gives the same output bits."""
    x = make.input(2, 9, grad=False)
    for causal, module in make.each_direction(supports):
        other = make(causal=causal, seed=1)
        weights = {name: w.clone() for name, w in module.state_dict().items()}
        other.load_state_dict(weights, strict=True)
        what = f"causal={causal}: another module with the loaded state_dict"
        assert_identical(other.state_dict(), weights, f"{what}: its own state_dict")
        assert_identical(other(x), module(x), what)


def check_copies(make: Maker, supports: Supports) -> None:
    """copy.deepcopy and pickle give independent modules that compute the same."""
    x = make.input(2, 9, grad=False)
    for causal, module in make.each_direction(supports):
        y = module(x)
        for name, twin in (
            ("deepcopy", copy.deepcopy(module)),
            ("pickle", pickle.loads(pickle.dumps(module))),  # of bytes made on this line, never of a file
        ):
            what = f"causal={causal}: {name}"
            assert_identical(twin(x), y, what)
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.add_(1)
            assert_identical(module(x), y, f"{what}: the original after its copy was changed")


def check_compiles(make: Maker, supports: Supports) -> None:
    """`torch.compile(fullgraph=True)` compiles every method without a graph break; values are the same.

    Each compilation takes about a second. So with options other than the mechanism's defaults, `forward` is
    compiled in one direction only and without padding.
    """
    x = make.input(2, 5)
    masks: list[dict[str, Tensor]] = [{}]
    if supports.padding and not make.options:
        masks.append({"key_padding_mask": torch.arange(5).expand(2, 5) < torch.tensor([[2], [0]])})
    torch.compiler.reset()
    try:
        for causal in directions(supports)[: 1 if make.options else 2]:
            module = make(causal=causal)
            for mask in masks:
                what = f"causal={causal}: compiled forward({', '.join(['x', *mask])})"
                found = compiled(module.forward)(x, **mask)
                assert_same(module, found, module(x, **mask), what, x=x)
        if recurrent(supports):
            module = make(causal=True)
            with torch.no_grad():
                expected, _ = unroll(module, x, [("prefill", 3), ("step", 2)])
                y, state = compiled(module.prefill)(x[:, :3], module.init_state(2))
                step, outputs = compiled(module.step), [y]
                for x_t in x[:, 3:].unbind(1):
                    y_t, state = step(x_t, state)
                    outputs.append(y_t[:, None])
            assert_close(torch.cat(outputs, 1), expected, "compiled prefill(3) + step(2)")
    finally:
        torch.compiler.reset()


def check_dynamic_length(make: Maker, supports: Supports) -> None:
    """`torch.export` with a dynamic length agrees at every length, or `dynamic_length` is not claimed.

    With default options, the lengths are 8 to 1,000, longer than any default block, chunk or window, since
    short and long inputs often take different paths. With other options, which may limit the length, they are
    8 to 64. Head shapes and rotary positions are the same code in both directions and with other options, so
    they are tried in one direction and with default options only. Each export takes long, so they are tried
    in one module, with all of these options that the mechanism accepts together. A mechanism without the
    claim must fail with its default options; otherwise it should make the claim.
    """
    if make.options and not supports.dynamic_length:
        return
    longest = 64 if make.options else 1000
    for place, causal in enumerate(directions(supports)):
        together = None if place or make.options else claimed_together(make, causal)
        for variant, module in [("default", make(causal=causal)), *([together] if together else [])]:
            if (error := _export_error(module, make, longest)) is None:
                continue
            if not supports.dynamic_length:
                return
            raise AssertionError(f"causal={causal}, {variant}: torch.export with a dynamic length: {error}")
    require(supports.dynamic_length, "torch.export with a dynamic length works, but is not claimed")


def _export_error(module: Any, make: Maker, longest: int) -> str | None:
    """Export 2 rows of 13 tokens, for any number of rows and lengths from 8 to `longest`.

    Return the error of the export, if any.
    """
    shape = {0: torch.export.Dim("rows"), 1: torch.export.Dim("length", min=8, max=longest)}
    try:
        graph = exported(module, (make.input(2, 13, grad=False),), (shape,))
    except Exception as error:  # torch raises many types
        return str(error).partition("\n")[0]
    for rows, n in ((3, 8), (2, 33), (1, longest)):
        x = make.input(rows, n, seed=n, grad=False)
        assert_close(graph(x), module(x), f"{n} tokens, exported with a dynamic length")
    return None
