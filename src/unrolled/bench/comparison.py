"""Error, time and memory of an attention mechanism relative to another."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from unrolled import attention
from unrolled.bench.measure import take_turns
from unrolled.bench.mechanisms import OPTIONS, too_long
from unrolled.contract import UnsupportedError
from unrolled.training.memory import PeakBytes


@dataclass(frozen=True)
class Settings:
    """Settings of a comparison.

    Attributes:
        against: the reference mechanism.
        d_model, n_heads, causal: of every layer.
        spread: standard deviation of the numbers in queries and keys: the sharper softmax is, the harder it
            is to approximate.
        batch: number of sequences.
        seconds: the time that all layers share at one length, once for the forward pass, and once for the
            forward and backward pass.
        options: further arguments by the name of the mechanism. By default, AFT has biases in a window only,
            and `max_length` is the largest length.
    """

    against: str = "softmax"
    d_model: int = 256
    n_heads: int = 8
    causal: bool = False
    spread: float = 1.0
    batch: int = 1
    seconds: float = 2.0
    options: Mapping[str, Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Row:
    """One mechanism at one length.

    Attributes:
        mechanism, length: the mechanism that was measured, and the number of tokens.
        error: |y - y*| / |y*| over all numbers of the output y; y* is the output of the other mechanism with
            the same projections. None where the projections have other shapes.
        forward, training: median seconds without gradients, and with the gradients of input and weights.
        memory: peak bytes of the tensors of a training pass.
        refused: why nothing was measured.
    """

    mechanism: str
    length: int
    error: float | None = None
    forward: float | None = None
    training: float | None = None
    memory: int | None = None
    refused: str = ""


def compare(
    names: Sequence[str],
    lengths: Sequence[int],
    settings: Settings,
    tell: Callable[[str], object] = lambda _: None,
    save: Callable[[list[Row]], object] = lambda _: None,
) -> list[Row]:
    """Compare mechanisms with `settings.against`, which comes first in the result, at each length.

    All mechanisms get the same standard normal inputs and the same weights in their projections. Their other
    parameters, such as gates or random features, are those of a construction with torch's seed 0.

    `tell` is called with the current length, and `save` with all rows so far, after each length.

    Raises:
        ValueError: a mechanism or one of its options does not exist, or a length is too large for
            `settings.against`.
        UnsupportedError: `settings.against` cannot run at all.
    """
    if unused := sorted((settings.options or {}).keys() - {settings.against, *names}):
        raise ValueError(f"options are given for {', '.join(unused)}, but these are not compared")
    longest = max(lengths)
    if reason := too_long(settings.against, longest):
        raise ValueError(f"{longest:,} tokens are too many for {settings.against}: {reason}")
    first = _layer(settings.against, longest, settings)
    layers: dict[str, nn.Module | str] = {settings.against: first}
    for name in names:
        if name not in layers:
            try:
                layers[name] = _layer(name, longest, settings)
            except UnsupportedError as error:
                layers[name] = str(error)
    for layer in layers.values():
        if isinstance(layer, nn.Module) and _comparable(layer, first):
            layer.load_state_dict(_projections(first), strict=False)
    rows: list[Row] = []
    for length in lengths:
        tell(f"{length:,} tokens")
        rows += _at(length, layers, settings)
        save(rows)
    return rows


def _at(length: int, layers: Mapping[str, nn.Module | str], settings: Settings) -> list[Row]:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(settings.batch, length, settings.d_model, generator=generator)
    able: dict[str, nn.Module] = {}
    refused: dict[str, str] = {}
    outputs: dict[str, Tensor] = {}
    for name, layer in layers.items():
        try:
            if isinstance(layer, str):
                raise UnsupportedError(layer)
            if reason := too_long(name, length):
                raise UnsupportedError(reason)
            with torch.inference_mode():
                outputs[name] = layer(x)
            able[name] = layer
        except (UnsupportedError, ValueError) as error:
            if name == settings.against:
                raise
            refused[name] = " ".join(str(error).split())
    calls = {name: partial(layer, x) for name, layer in able.items()}
    with torch.inference_mode():
        forward = take_turns(calls, least=3, budget=settings.seconds)
    passes = {name: _training(layer, x) for name, layer in able.items()}
    training = take_turns(passes, least=3, budget=settings.seconds)
    rows = []
    for name in layers:
        if name in refused:
            rows.append(Row(name, length, refused=refused[name]))
            continue
        with PeakBytes() as memory:
            passes[name]()
        distance, expected = None, outputs[settings.against]
        if _comparable(able[name], able[settings.against]):
            distance = float((outputs[name] - expected).norm() / expected.norm())
        rows.append(Row(name, length, distance, median(forward[name]), median(training[name]), memory.peak))
    return rows


def _layer(name: str, longest: int, settings: Settings) -> nn.Module:
    mechanism: Any = attention.load(name)
    bound = {"max_length": longest} if mechanism.supports.max_length else {}
    options = bound | OPTIONS.get(name, {}) | dict((settings.options or {}).get(name, {}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            layer: nn.Module = mechanism(
                settings.d_model, settings.n_heads, causal=settings.causal, **options
            )
        except TypeError as error:
            raise ValueError(f"invalid options for {name}: {error}") from error
        std = settings.spread / settings.d_model**0.5
        for projection in (layer.get_submodule("qkv_proj"), layer.get_submodule("out_proj")):
            nn.init.normal_(projection.weight, std=std)  # type: ignore[arg-type]
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)  # type: ignore[arg-type]
    return layer.eval()


def _projections(layer: nn.Module) -> dict[str, Tensor]:
    return {name: x for name, x in layer.state_dict().items() if name.startswith(("qkv_proj.", "out_proj."))}


def _comparable(layer: nn.Module, other: nn.Module) -> bool:
    """Whether the projections of two layers have the same shapes, so that they can have the same weights."""
    mine, its = ({name: x.shape for name, x in _projections(m).items()} for m in (layer, other))
    return mine == its


def _training(layer: nn.Module, x: Tensor) -> Callable[[], object]:
    parameters = [p for p in layer.parameters() if p.requires_grad]

    def run() -> object:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(layer(leaf).square().sum(), [leaf, *parameters], allow_unused=True)

    return run
