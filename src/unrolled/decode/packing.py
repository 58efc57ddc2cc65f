"""Weights in the form that the kernels read fastest: cut into tiles, in 32, 16, 8 or 4 bits.

`native/packed.h` describes the tiles. A weight w is rounded to the nearest number that its form can hold:

    fp32    none
    bf16    to 8 significant bits
    int8    s round(w / s), with s = max |w| / 127 over the weights of an output, rounded up to 17 bits
    int4    s round(w / s), from -8 s to 7 s, with s in bfloat16, the same for 32 inputs of an output

For int4, let m be the weight of the largest magnitude among these 32. Four scales s are tried. Each is first
m divided by -8, -8.7, 7 or 7.7, and is then fitted by least squares: (sum w q) / (sum q^2) with the rounded
q. The scale with the least squared error is used; `unrolled.decode.calibration` does better with a sample of
the data. Two kinds of matrices stay in int8: the matrix of the head, because rounding it costs
more quality than rounding any other, and matrices with fewer outputs than a tile, such as those of gates.

The rounded weights of int8 are exact in fp32, because the product of 17 and 7 bits has 24 bits. So when a
matrix of such weights is packed again, the bytes are the same.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from unrolled.ops import native

Rounding = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From a matrix `[out, in]` to whole numbers `[out, groups, 32]` and their scales `[out, groups, 1]`."""
Weights = Literal["fp32", "bf16", "int8", "int4"]

TILE = 64  # outputs of a tile
GROUP = 32  # inputs of a group; inputs are padded to whole groups, and a group in int4 shares a scale
FIRST_STEPS = (-8, -8.7, 7, 7.7)  # what a group's largest weight is divided by, before the scale is fitted
GROUPS_AT_ONCE = 2048  # groups that fit in the cache
LAYOUT = f"tiles of {TILE} outputs, groups of {GROUP} inputs"
GROUP_BYTES: dict[Weights, int] = {"fp32": 128, "bf16": 64, "int8": 32, "int4": 18}  # per output


class Packed(NamedTuple):
    """A matrix `[out, in]` and its bias, cut into tiles.

    Attributes:
        inputs: number of inputs.
        outputs: number of outputs.
        weights: the name of the form of the weights.
        tiles: the weights, as bytes.
        scales: of each output, in fp32; with "int8" only.
        sums: of the integers of each output, int32; with "int8" only.
        bias: in fp32, or None.
    """

    inputs: int
    outputs: int
    weights: Weights
    tiles: Tensor
    scales: Tensor | None
    sums: Tensor | None
    bias: Tensor | None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, by their names here."""
        found = {"tiles": self.tiles, "scales": self.scales, "sums": self.sums, "bias": self.bias}
        return {name: x for name, x in found.items() if x is not None}

    def some_tiles(self, first: int, end: int) -> "Packed":
        """View the rows of the tiles from number `first` to before `end`."""
        size = len(self.tiles) // -(-self.outputs // TILE)
        rows = slice(first * TILE, end * TILE)
        scales, sums, bias = (None if x is None else x[rows] for x in (self.scales, self.sums, self.bias))
        outputs = min(self.outputs, end * TILE) - first * TILE
        tiles = self.tiles[first * size : end * size]
        return self._replace(outputs=outputs, tiles=tiles, scales=scales, sums=sums, bias=bias)

    def fields(self) -> tuple[int, ...]:
        """The fields of the struct `Packed` in C++."""
        packing = list(PACKINGS).index(self.weights)
        arrays = (self.tiles, self.scales, self.bias, self.sums)
        return self.inputs, self.outputs, packing, *map(native.address, arrays)


def pack(weight: Tensor, bias: Tensor | None, weights: Weights, rounding: Rounding | None = None) -> Packed:
    """Pack a matrix `[out, in]` and a bias `[out]`; `rounding` replaces the default one of "int4"."""
    outputs, inputs = weight.shape
    wide = weight.detach().to("cpu", torch.float32)
    w = pad(wide.contiguous(), (0, -inputs % GROUP, 0, -outputs % TILE))
    if weights == "int4" and rounding is not None:
        tiles, scales, sums = _int4(*rounding(w))
    else:
        tiles, scales, sums = PACKINGS[weights](w)
    if bias is not None:
        bias = pad(bias.detach().to("cpu", torch.float32), (0, -outputs % TILE)).contiguous()
    return Packed(inputs, outputs, weights, tiles.view(torch.uint8).flatten(), scales, sums, bias)


def check_packed(
    name: str, tensors: Mapping[str, Tensor] | None, sizes: Sequence[int], weights: Weights, biased: bool
) -> Packed:
    """Return the packed matrix of these tensors, of `sizes` [out, in].

    Raises:
        ValueError: a tensor is missing, unknown or of another shape or type.
    """
    outputs, inputs = sizes
    rows, columns = outputs + -outputs % TILE, inputs + -inputs % GROUP
    expected = {"tiles": (torch.uint8, [rows * columns // GROUP * GROUP_BYTES[weights]])}
    if weights == "int8":
        expected |= {"scales": (torch.float32, [rows]), "sums": (torch.int32, [rows])}
    if biased:
        expected["bias"] = (torch.float32, [rows])
    found = {part: (x.dtype, list(x.shape)) for part, x in (tensors or {}).items()}
    if found != expected:
        raise ValueError(
            f"{name} has the packed tensors {_described(found)}, but must have {_described(expected)}"
        )
    assert tensors is not None
    scales, sums, bias = map(tensors.get, ("scales", "sums", "bias"))
    return Packed(inputs, outputs, weights, tensors["tiles"], scales, sums, bias)


def _described(tensors: Mapping[str, tuple[torch.dtype, list[int]]]) -> str:
    return ", ".join(f"{part} {shape} {dtype}" for part, (dtype, shape) in tensors.items()) or "none"


def unpack(packed: Packed) -> Tensor:
    """Return the rounded weights `[out, in]` of a packed matrix, in fp32; `rounded` gives the same."""
    w = _UNPACKINGS[packed.weights](packed.tiles, -(-packed.inputs // GROUP) * GROUP)
    w = w if packed.scales is None else w * packed.scales.unsqueeze(1)
    return w[: packed.outputs, : packed.inputs].contiguous()


def rounded(weight: Tensor, weights: Weights) -> Tensor:
    """Round a matrix `[out, in]` as `pack` does, and return it in fp32."""
    w = weight.detach().to("cpu", torch.float32).contiguous()
    if weights == "fp32":
        return w
    if weights == "bf16":
        return w.bfloat16().float()
    if weights == "int8":
        whole, scale = _by_output(w)
        return whole * scale
    whole, scale = _by_group(pad(w, (0, -w.shape[1] % GROUP)))
    return (whole * scale).flatten(1)[:, : w.shape[1]]


def _tiled(w: Tensor, together: int) -> Tensor:
    """`[out, in]` as `[out / 64, in / together, 64, together]`."""
    outputs, inputs = w.shape
    tiles = w.view(outputs // TILE, TILE, inputs // together, together)
    return tiles.transpose(1, 2).contiguous()


def _untiled(tiles: Tensor, inputs: int, together: int) -> Tensor:
    """The reverse of `_tiled`, in fp32."""
    return tiles.view(-1, inputs // together, TILE, together).transpose(1, 2).reshape(-1, inputs).float()


def _float32(w: Tensor) -> tuple[Tensor, None, None]:
    return _tiled(w, 1), None, None


def _bfloat16(w: Tensor) -> tuple[Tensor, None, None]:
    return _tiled(w.bfloat16(), 2), None, None


def _int8(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    whole, scale = _by_output(w)
    sums = whole.sum(1).to(torch.int32)
    return _tiled(whole.to(torch.int8), 4), scale.flatten().contiguous(), sums


def _int4(whole: Tensor, scale: Tensor) -> tuple[Tensor, None, None]:
    outputs, groups = whole.shape[:2]
    tiles = outputs // TILE
    raised = (whole + 8).to(torch.uint8).view(tiles, TILE, groups, GROUP // 8, 2, 4)
    low, high = raised.unbind(4)
    # [tile, output, group, quad, byte] -> [tile, group, quad, output, byte]
    halves = (low | high << 4).permute(0, 2, 3, 1, 4).reshape(tiles, groups, -1)
    scales = scale.squeeze(2).bfloat16().view(tiles, TILE, groups).transpose(1, 2).contiguous()
    return torch.cat([scales.view(torch.uint8), halves], 2).contiguous(), None, None


def _from_int4(tiles: Tensor, inputs: int) -> Tensor:
    parts = tiles.view(-1, inputs // GROUP, GROUP_BYTES["int4"] * TILE)
    scales = parts[..., : 2 * TILE].contiguous().view(torch.bfloat16).float().transpose(1, 2)
    halves = parts[..., 2 * TILE :].reshape(len(parts), -1, GROUP // 8, TILE, 4)
    # [tile, group, quad, output, byte] -> [tile, output, group, quad, half, byte]
    quads = halves.permute(0, 3, 1, 2, 4)
    whole = torch.stack([quads & 15, quads >> 4], 4).flatten(3).float() - 8
    w: Tensor = whole * scales.unsqueeze(3)
    return w.reshape(-1, inputs)


def _by_output(w: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers `[out, in]`, and their scales `[out, 1]`."""
    scale = w.abs().amax(1, keepdim=True) / 127
    up = (scale.view(torch.int32) + 127 & ~127).view(torch.float32)  # the last 7 bits to 0
    scale = torch.where(scale.isfinite(), up, scale)
    return in_steps(w, scale), scale


def _by_group(w: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers `[out, groups, 32]`, and their scales `[out, groups, 1]`."""
    found = [fitted(groups) for groups in torch.split(w.view(-1, GROUP), GROUPS_AT_ONCE)]
    whole, scale = (
        torch.cat(parts).view(len(w), w.shape[1] // GROUP, -1) for parts in zip(*found, strict=True)
    )
    return whole, scale


def fitted(w: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers `[n, 32]` from -8 to 7, and the scales `[n, 1]` that fit best."""
    largest = w.gather(1, w.abs().argmax(1, keepdim=True))
    whole, scale, least = w, largest, torch.full_like(largest, torch.inf)
    for steps in FIRST_STEPS:
        first = in_steps(w, (largest / steps).bfloat16().float()).clamp_(-8, 7)
        fit = (first * w).sum(1, keepdim=True) / first.square().sum(1, keepdim=True).clamp_(min=1)
        fit = fit.bfloat16().float()
        found = in_steps(w, fit).clamp_(-8, 7)
        error = (found * fit).sub_(w).square_().sum(1, keepdim=True)
        better = ~(error >= least)  # NaN too
        whole, scale = torch.where(better, found, whole), torch.where(better, fit, scale)
        least = torch.where(better, error, least)
    return whole, scale


def in_steps(w: Tensor, scale: Tensor) -> Tensor:
    """Round w / scale to whole numbers; 0 where the scale is 0."""
    return torch.where(scale == 0, 0.0, w / torch.where(scale == 0, 1.0, scale)).round()


PACKINGS: dict[Weights, Callable[[Tensor], tuple[Tensor, Tensor | None, Tensor | None]]] = {
    "fp32": _float32,
    "bf16": _bfloat16,
    "int8": _int8,
    "int4": lambda w: _int4(*_by_group(w)),
}
"""The function that packs the weights in each form, in the order of the enum `Packing` in C++."""

_UNPACKINGS: dict[Weights, Callable[[Tensor, int], Tensor]] = {
    "fp32": lambda tiles, inputs: _untiled(tiles.view(torch.float32), inputs, 1),
    "bf16": lambda tiles, inputs: _untiled(tiles.view(torch.bfloat16), inputs, 2),
    "int8": lambda tiles, inputs: _untiled(tiles.view(torch.int8), inputs, 4),
    "int4": _from_int4,
}
"""The function that unpacks the whole numbers or the weights of each form, given the number of inputs."""
