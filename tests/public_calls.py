"""Right calls of the public functions and modules, for tests to spoil one argument at a time."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from small_models import FIELDS, small_model
from torch import Tensor

from unrolled import alignment, attention, recurrent
from unrolled.contract import UnsupportedError
from unrolled.generation import generate

B, T, H, D, WIDTH = 2, 6, 2, 4, 8
Call = tuple[Callable[..., Any], dict[str, Any]]


def normal(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0))


def heads() -> dict[str, Tensor]:
    return {name: normal(B, T, H, D) for name in "qkv"}


def padding() -> Tensor:
    return torch.zeros(B, T, dtype=torch.bool)


def verbs(name: str, module: Any, x: Tensor, first: str) -> dict[str, Call]:
    """Calls of forward and, where there is a recurrent form, of the three verbs of it."""
    found: dict[str, Call] = {f"{name} forward": (module, {first: x})}
    try:
        state = module.init_state(len(x))
        _, state = module.prefill(x[:, :3], state)
    except UnsupportedError:
        return found
    prefill, step = (next(iter(inspect.signature(x).parameters)) for x in (module.prefill, module.step))
    return found | {
        f"{name} init_state": (module.init_state, {"batch_size": 2}),
        f"{name} prefill": (module.prefill, {prefill: x[:, 3:], "state": state}),
        f"{name} step": (module.step, {step: x[:, 3], "state": state}),
    }


def mechanism(name: str) -> dict[str, Call]:
    if name in alignment.names():
        made: Any = alignment.load(name)
        module, memory = made(WIDTH, WIDTH) if "hidden" not in name else made(WIDTH), normal(B, T, WIDTH)
        state, query = module.read(memory), normal(B, 3, WIDTH)
        return {
            f"{name} forward": (module, {"query": query, "memory": memory, "key_padding_mask": padding()}),
            f"{name} read": (module.read, {"memory": memory}),
            f"{name} recall": (module.recall, {"query": query, "state": state}),
        }
    made = attention.load(name)
    options = {"d_model": WIDTH, "n_heads": 2, "causal": bool(made.supports.causal)}
    module = made(**options).eval()
    found = {f"{name}()": (made, options | {"bias": True})}
    found |= verbs(name, module, normal(B, T, WIDTH), "query")
    if module.supports.padding:
        found[f"{name} with padding"] = (
            module,
            {"query": normal(B, T, WIDTH), "key_padding_mask": padding()},
        )
    if module.supports.packing:
        bounds = torch.tensor([0, 2, T], dtype=torch.int32)
        found[f"{name} packed"] = (module, {"query": normal(1, T, WIDTH), "cu_seqlens": bounds})
    return found


def cell(name: str) -> dict[str, Call]:
    made: Any = recurrent.load(name)
    found = verbs(f"cell {name}", made(WIDTH, WIDTH).eval(), normal(B, T, WIDTH), "x")
    return found | {f"cell {name}()": (made, {"input_size": WIDTH, "hidden_size": WIDTH})}


def model(kind: str) -> dict[str, Call]:
    made: Any = small_model(kind).eval()
    ids = torch.randint(7, (B, T), generator=torch.Generator().manual_seed(0))
    found: dict[str, Call] = {kind: (type(made.config), dict(FIELDS[kind]))}
    if kind in ("decoder", "recurrent_lm", "perceiver_ar"):
        found |= verbs(kind, made, ids, "tokens")
        found[f"{kind} generate"] = (
            generate,
            {"model": made, "prompt_ids": ids, "max_new_tokens": 2, "top_k": 3, "seed": 0, "num_samples": 1},
        )
        found[f"{kind} stop"] = (generate, {"model": made, "prompt_ids": ids, "max_new_tokens": 2, "stop": 1})
    if kind in ("encoder", "perceiver", "perceiver_io"):
        found[f"{kind} forward"] = (made, {"x": ids, "key_padding_mask": padding()})
    if kind == "vit":
        found["vit forward"] = (made, {"x": normal(B, 3, 8, 8)})
    if kind in ("memnn", "memory_network"):
        found[f"{kind} forward"] = (made, {"inputs": ids.reshape(B, 3, 2)})
    if kind in ("ntm", "ntm_numbers"):
        found[f"{kind} forward"] = (made, {"x": normal(B, T, 4)})
    if kind.startswith(("encoder_decoder", "luong", "lstmn", "deep", "rnn")):
        state = made.init_state(ids)
        found |= {
            f"{kind} init_state": (made.init_state, {"source": ids, "key_padding_mask": padding()}),
            f"{kind} prefill": (made.prefill, {"tokens": ids, "state": state}),
            f"{kind} step": (made.step, {"token": ids[:, 0], "state": state}),
        }
    return found
