"""Neither the content nor the amount of padding affects outputs, states or gradients."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unrolled.contract import Supports
from unrolled.ops.state import leaves
from unrolled.testing._kit import (
    Maker,
    assert_close,
    assert_finite,
    assert_identical,
    normal,
    recurrent,
    require,
    unroll,
    with_gradients,
)

PADDING = torch.tensor(
    [
        [0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 1],
        [0, 1, 1, 0, 1, 0, 0],
        [1, 0, 0, 1, 0, 0, 1],
    ],
    dtype=torch.bool,
)
"""No padding, on the left, on the right, scattered, on both sides: `[5, 7]`, True = padding."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_padding(make: Maker, supports: Supports) -> None:
    """Padding anywhere changes nothing in valid outputs and gradients."""
    x = make.input(*PADDING.shape)
    for causal, variant, module in make.each_variant(supports):
        verbs: list[list[list[int]]] = [[[]]]  # forward, then prefill of these numbers of tokens and a step
        if causal and recurrent(supports):
            verbs.append([[7], [4, 3]])
        for plans in verbs:
            alone = with_gradients(module, _rows_alone(module, x, bool(plans[0])), x=x)
            for segments in plans:
                form = " + ".join(f"prefill({n})" for n in segments) + " + step" if segments else "forward"
                what = f"{variant}, causal={causal}: {form} of padded rows"
                padded = with_gradients(module, _padded(module, x, segments, what), x=x)
                assert_close(padded, alone, f"{what} against each row without its padding")


def check_padding_content(make: Maker, supports: Supports) -> None:
    """NaN, infinity and the largest number of the dtype at padding change no bit of any result.

    Results are outputs of valid tokens, states, and the gradients of all parameters and tokens, which are
    exactly 0 at padding; in fp32 and half precision too.
    """
    for dtype in dict.fromkeys((make.dtype, *DTYPES)):
        x = make.input(*PADDING.shape, dtype=dtype)
        for causal, variant, module in replace(make, dtype=dtype).each_variant(supports):
            if variant == "default":
                contents = [torch.nan, torch.inf, torch.finfo(dtype).max]
            elif dtype == make.dtype:
                contents = [torch.nan]  # enough to show any use of the padding
            else:
                continue
            verbs = {"forward": _forward}
            if supports.cross and variant != "rotary=True":  # rotary positions exclude cross-attention
                verbs |= {"forward(other, x)": _cross, "forward(other, other, x)": _read_values}
            if causal and recurrent(supports):
                verbs["prefill(4) + prefill(3) + step"] = _continue
            for verb, run in verbs.items():
                _check_content(run, module, x, contents, f"{variant}, causal={causal}, {dtype}: {verb}")


Run = Callable[[Any, Tensor, Tensor], dict[str, Tensor]]


def _check_content(run: Run, module: Any, x: Tensor, contents: list[float], what: str) -> None:
    """Compare `run(module, x, other)` between padding of ordinary numbers and of each of `contents`."""
    other, signs = (normal(*x.shape, seed=seed).to(x.dtype).requires_grad_() for seed in (1, 2))
    expected = run(module, x, other)
    at_padding = expected["gradient of x"][PADDING]
    require(not at_padding.any(), f"{what}: the gradient at padding is not 0")
    for value in contents:
        extreme = torch.where(PADDING[..., None], signs.detach().sign() * value, x.detach()).requires_grad_()
        assert_identical(run(module, extreme, other), expected, f"{what}, where padding holds {value:g}")


def _forward(module: Any, x: Tensor, other: Tensor) -> dict[str, Tensor]:
    return with_gradients(module, module(x, key_padding_mask=PADDING)[~PADDING], x=x)


def _cross(module: Any, x: Tensor, other: Tensor) -> dict[str, Tensor]:
    return with_gradients(module, module(other, x, key_padding_mask=PADDING), x=x, other=other)


def _read_values(module: Any, x: Tensor, other: Tensor) -> dict[str, Tensor]:
    return with_gradients(module, module(other, other, x, key_padding_mask=PADDING), x=x, other=other)


def _continue(module: Any, x: Tensor, other: Tensor) -> dict[str, Tensor]:
    """Continue from the state after `other`, so that the initial state gets a gradient too."""
    _, state = module.prefill(other, module.init_state(len(x)))
    outputs = []
    for part, mask in zip(*(torch.split(t, [4, 3], 1) for t in (x, PADDING)), strict=True):
        y, state = module.prefill(part, state, key_padding_mask=mask)
        outputs.append(y[~mask])
    after = {f"state.{name}": part for name, part in leaves(state).items()}
    last, _ = module.step(other[:, 0], state)
    sums = [part.nan_to_num().sum() for part in after.values() if part.requires_grad]  # unused slots hold NaN
    seen = torch.cat([*outputs, last]).to(sums[0].dtype) + torch.stack(sums).sum()
    return with_gradients(module, seen, x=x, other=other) | after


def _rows_alone(module: Any, x: Tensor, continued: bool) -> Tensor:
    """Run each row without its padding; concatenate the outputs and, if `continued`, those of a step."""
    rows = [row[keep][None] for row, keep in zip(x, ~PADDING, strict=True)]
    if not continued:
        return torch.cat([module(row)[0] for row in rows])
    outputs, last = [], []
    for row, next_token in zip(rows, normal(len(rows), 1, x.shape[-1]).to(x.dtype), strict=True):
        y, state = unroll(module, row, [("prefill", row.shape[1])])
        outputs.append(y[0])
        last.append(module.step(next_token, state)[0])
    return torch.cat([*outputs, *last])


def _padded(module: Any, x: Tensor, segments: list[int], what: str) -> Tensor:
    """Run all rows as one padded batch, and concatenate the valid outputs in the order of `_rows_alone`."""
    if not segments:
        y: Tensor = module(x, key_padding_mask=PADDING)
        assert_finite(y, f"{what}, padded positions included")
        return y[~PADDING]
    outputs, state = [], module.init_state(len(x))
    for part, mask in zip(*(torch.split(t, segments, 1) for t in (x, PADDING)), strict=True):
        y, state = module.prefill(part, state, key_padding_mask=mask)
        assert_finite(y, f"{what}, padded positions included")
        outputs.append(y)
    last, _ = module.step(normal(len(x), x.shape[-1]).to(x.dtype), state)
    return torch.cat([torch.cat(outputs, 1)[~PADDING], last])
