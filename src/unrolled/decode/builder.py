"""Collects the instructions of a program.

What each instruction computes is documented in `native/decode_tokens.h` and `native/decode_sequences.h`.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from unrolled.decode.packing import PACKINGS, TILE, Packed, Rounding, Weights, check_packed, pack
from unrolled.decode.pages import LargePages
from unrolled.decode.program import KEY_BLOCK, MOST_POSITIONS, Constants, Heads, Program, Slot, Value, require
from unrolled.ops import native
from unrolled.ops.dense import Linear

_PLACES = ("first", "second", "third", "gates", "rates", "reader", "writer", "divisor_q", "divisor_k")
_ZERO = (
    *("kind", "n", "heads", "groups", "queries", "keys", "features", "values", "window", "state"),
    *("weights", "bias", "frequencies"),
)
MOST_INPUTS = 65_536  # of a matrix in 8 or 4 bits: larger sums of products may not fit 32 bits
SMALL_WEIGHTS: Weights = "int8"  # the form with the fewest bits if outputs fill no tile, as for gates


class Builder:
    """Collects instructions. A method adds one, and returns the value that it computes.

    Args:
        weights: the form of matrices.
        model: the model whose layers the instructions run.
        given: the tensors of each packed matrix, by the name of its layer; None to pack those of the model.
            If given, the other weights of the model are used in place, not copied.
        roundings: how to round matrices to 4 bits, by the names of their layers; others are rounded as usual.
    """

    def __init__(
        self,
        weights: Weights,
        model: nn.Module,
        given: Mapping[str, Mapping[str, Tensor]] | None = None,
        roundings: Mapping[str, Rounding] | None = None,
    ) -> None:
        self.weights, self.model, self.given = weights, model, given
        self.roundings = roundings or {}
        self.names = {module: name for name, module in model.named_modules()}
        self.packed: dict[str, Packed] = {}
        self._pages = LargePages()
        self._copies: dict[tuple[int, torch.dtype], Tensor] = {}
        self.width = self.state_size = self.widest = 0
        self._top = self._kept_below = 0  # the end of the values in use, and of those that stay
        self.cache: list[int] = []
        self.slots: list[list[Slot | Constants]] = []
        self.instructions: list[bytes] = []
        self.kept: list[Tensor] = []
        self.most_positions = MOST_POSITIONS
        self.table_dtype = torch.float32 if weights == "fp32" else torch.bfloat16  # of embeddings
        self._angles: dict[tuple[float, ...], Value] = {}

    def value(self, size: int) -> Value:
        """Make a place for numbers."""
        made = Value(self._top, size)
        self._top += -(-size // TILE) * TILE  # products write whole tiles
        self.width = max(self.width, self._top)
        return made

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Reuse the places of all values that are made in the block."""
        before = self._top
        yield
        self._top = max(before, self._kept_below)

    def begin_layer(self) -> None:
        """Begin the next layer, which the parts of the state that follow belong to."""
        self.slots.append([])

    def keep_constant(self, **parts: Tensor) -> None:
        """Add copies of parts of the model's state that no token changes, each for one row `[1,...]`."""
        self.slots[-1].append(Constants({name: x.clone() for name, x in parts.items()}))

    def limit_positions(self, n: int) -> None:
        """Allow only that many positions, or fewer if another part of the model has fewer."""
        self.most_positions = min(self.most_positions, n)

    def finish(self, head: int, hidden: Value, logits: Value) -> Program:
        """Return the program; its instructions from number `head` on map `hidden` to `logits`."""
        fields = {
            "instructions": len(self.instructions),
            "head": len(self.instructions) - head,
            "width": self.width,
            "hidden": hidden.place,
            "hidden_width": hidden.size,
            "logits": logits.place,
            "vocabulary": logits.size,
            "widest": self.widest,
        }
        array = ctypes.create_string_buffer(b"".join(self.instructions))
        return Program(
            array, fields, self.kept, self.packed, self._others(), self.state_size, self.cache, self.slots,
            self.most_positions,
        )  # fmt: skip

    # ---- one token

    def embed(self, table: Tensor, to: Value) -> Value:
        """Look a token up in `table [ids, n]`; a parameter takes the type of tables."""
        dtype = self.table_dtype if isinstance(table, nn.Parameter) else torch.float32
        weights = self._keep(table, dtype)
        return self._add("embed", to, n=to.size, kind=int(dtype == torch.bfloat16), weights=weights)

    def add_positions(self, table: Tensor, x: Value) -> Value:
        """Add the vector of the position, a row of `table [positions, n]`."""
        return self._add("add_positions", x, n=x.size, weights=self._float(table))

    def add_sinusoids(self, frequencies: Tensor, scale: float, x: Value) -> Value:
        """Multiply by `scale`, and add sines and cosines of the position times `frequencies [n / 2]`."""
        return self._add("add_sinusoids", x, n=x.size, scale=scale, frequencies=self._double(frequencies))

    def angles(self, frequencies: Tensor) -> Value:
        """Compute the cosines and sines of the position times `frequencies [n]`, once in a program."""
        key = tuple(frequencies.tolist())
        if key not in self._angles:
            to = self.value(2 * len(key))
            self._kept_below = self._top
            self._angles[key] = self._add("angles", to, n=len(key), frequencies=self._double(frequencies))
        return self._angles[key]

    def normalize(
        self,
        x: Value,
        to: Value,
        *,
        eps: float,
        heads: int = 1,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        centred: bool = False,
    ) -> Value:
        """Divide each head by its root mean square, after its mean is subtracted if `centred`."""
        fields = {
            "n": x.size // heads,
            "heads": heads,
            "weights": self._float(weight),
            "bias": self._float(bias),
        }
        return self._add("normalize", to, x, kind=int(centred), epsilon=eps, **fields)

    def layer(
        self, x: Value, layer: nn.Linear, to: Value | None = None, *, least: Weights | None = None
    ) -> Value:
        """Run a linear layer."""
        require(layer, nn.Linear, Linear)
        return self.linear(x, layer.weight, layer.bias, to, name=self.names[layer], least=least)

    def linear(
        self,
        x: Value,
        weight: Tensor,
        bias: Tensor | None,
        to: Value | None = None,
        *,
        name: str,
        least: Weights | None = None,
    ) -> Value:
        """Multiply by a matrix `[out, in]`, and add the bias.

        Args:
            x: the inputs.
            weight, bias: those of the layer.
            to: where the outputs go.
            name: the name of the layer.
            least: the form with the fewest bits that is allowed for this matrix; None for any.

        Raises:
            ValueError: the matrices were given, but none of them has this name and shape.
        """
        packed = self._packed(weight, bias, name, least)
        to = self.value(packed.outputs) if to is None else to
        return self._add("linear_layer", to, x, layer=packed.fields())

    def layer_by_parts(self, xs: Sequence[Value], layer: nn.Linear, sizes: Sequence[int]) -> list[Value]:
        """Run a linear layer whose outputs have parts of these sizes, each part for an input of its own."""
        require(layer, nn.Linear, Linear)
        packed, found, begin = self._packed(layer.weight, layer.bias, self.names[layer]), [], 0
        for x, size in zip(xs, sizes, strict=True):
            first = begin // TILE
            tiles = packed.some_tiles(first, -(-(begin + size) // TILE))
            to = self._add("linear_layer", self.value(tiles.outputs), x, layer=tiles.fields())
            found.append(to.part(begin - first * TILE, size))
            begin += size
        return found

    def _packed(self, weight: Tensor, bias: Tensor | None, name: str, least: Weights | None = None) -> Packed:
        """Pack a matrix, or take it from those that were given; see `linear`."""
        outputs, inputs = weight.shape
        form = self.weights
        if outputs < TILE:
            least = SMALL_WEIGHTS
        if inputs > MOST_INPUTS and least != "fp32":
            least = "bf16"
        if least is not None and list(PACKINGS).index(form) > list(PACKINGS).index(least):
            form = least
        if self.given is None:
            packed = pack(weight, bias, form, self.roundings.get(name))
            packed = packed._replace(tiles=self._pages.keep(packed.tiles))
        else:
            packed = check_packed(name, self.given.get(name), weight.shape, form, bias is not None)
        self.packed[name] = packed
        self.widest = max(self.widest, inputs)
        self.kept += packed.tensors().values()
        return packed

    def linear_by_head(self, x: Value, weight: Tensor, bias: Tensor | None) -> Value:
        """Multiply each head by its `weight [heads, features, n]`, and add `bias [heads, features]`."""
        heads, features, n = weight.shape
        matrix, own_bias = self._float(weight.transpose(1, 2)), self._float(bias)
        fields = {"heads": heads, "n": n, "features": features, "weights": matrix, "bias": own_bias}
        return self._add("linear_by_head", self.value(heads * features), x, **fields)

    def apply(
        self,
        function: str,
        x: Value,
        to: Value | None = None,
        *,
        bias: Tensor | None = None,
        weight: Tensor | None = None,
        scale: float = 1.0,
        times: Value | None = None,
    ) -> Value:
        """Compute f(x + bias) * weight * scale * times, elementwise."""
        other = -1 if times is None else times.place
        fields = {"n": x.size, "second": other, "weights": self._float(weight), "bias": self._float(bias)}
        kind = native.enum("Function")[function.upper()]
        return self._add("apply", x if to is None else to, x, kind=kind, scale=scale, **fields)

    def add(self, x: Value, y: Value, to: Value) -> Value:
        """Add two values."""
        return self._add("add", to, x, second=y.place, n=x.size)

    def scale_heads(self, x: Value, factors: Value, to: Value | None = None) -> Value:
        """Multiply each head by a number of its own."""
        fields = {"second": factors.place, "heads": factors.size, "n": x.size // factors.size}
        return self._add("scale_heads", x if to is None else to, x, **fields)

    def rotate(self, x: Value, angles: Value, width: int, to: Value | None = None) -> Value:
        """Rotate the first pairs of each head, `width` wide, by the angles."""
        fields = {"heads": x.size // width, "features": width, "n": angles.size // 2}
        return self._add("rotate", x if to is None else to, x, second=angles.place, **fields)

    def features(
        self,
        kind: str,
        x: Value,
        width: int,
        features: int,
        *,
        scale: float = 0.0,
        window: int = 0,
        weight: Tensor | None = None,
        frequencies: Tensor | None = None,
    ) -> Value:
        """Map each head, `width` wide, to features."""
        heads = x.size // width
        arrays = {"weights": self._float(weight), "frequencies": self._double(frequencies)}
        fields = {"heads": heads, "n": width, "features": features, "window": window, **arrays}
        to = self.value(heads * features)
        return self._add("features", to, x, kind=native.enum("Features")[kind.upper()], scale=scale, **fields)

    def mixture(self, x: Value, levels: int, components: int, least: float) -> Value:
        """Compute log-probabilities of levels under a mixture of logistic distributions."""
        scratch = self.value(components * (16 + 4))
        fields = {"n": levels, "heads": components, "second": scratch.place}
        return self._add("mixture", self.value(levels), x, epsilon=least, **fields)

    # ---- sequences

    def convolve(self, x: Value, weight: Tensor, to: Value | None = None, *, part: str = "recent") -> Value:
        """Filter channels over the last tokens by `weight [channels, taps]`, the current token's tap last.

        The last inputs are the `part` of the layer's state.
        """
        channels, taps = weight.shape
        flipped = self._float(weight.flip(1).T)
        fields = {"n": channels, "window": taps, "weights": flipped}
        place = self._state((taps - 1) * channels)
        self.slots[-1].append(Slot("convolution", place, (taps - 1, channels), part=part))
        return self._add("convolve", x if to is None else to, x, state=place, **fields)

    def average(self, k: Value, v: Value, log_decay: Tensor, bonus: Tensor) -> Value:
        """Average the values of each channel over all tokens, as `unrolled.ops.wkv` does."""
        place, n = self._state(3 * k.size), k.size
        self.slots[-1].append(Slot("average", place, (n,)))
        arrays = {"weights": self._float(log_decay), "bias": self._float(bonus)}
        return self._add("average", self.value(n), k, second=v.place, n=n, state=place, **arrays)

    def scan(self, x: Value, dt: Value, a: Tensor, b: Value, c: Value) -> Value:
        """Scan each channel with the rates `a [channels, states]`, as `unrolled.ops.selective_scan` does."""
        n, states = a.shape
        place = self._state(states * n)
        self.slots[-1].append(Slot("scan", place, (states, n)))
        fields = {"second": dt.place, "third": b.place, "reader": c.place, "weights": self._float(a.T)}
        return self._add("scan", self.value(n), x, n=n, features=states, state=place, **fields)

    def recur(
        self,
        sizes: Heads,
        q: Value,
        k: Value,
        v: Value,
        *,
        gates: Value | Tensor | None = None,
        rates: Value | None = None,
        reader_and_writer: tuple[Value, Value] | None = None,
        divisor: tuple[Value, Value] | None = None,
        least: float = 0.0,
        averages: bool = False,
        scale: float = 1.0,
    ) -> Value:
        """Run a recurrence over heads.

        Args:
            sizes: of the heads.
            q, k, v: queries, keys, values.
            gates: what the state is multiplied by: a constant for each group, or a number for each group or
                each of its features.
            rates: of the delta rule, for each group.
            reader_and_writer: of the rule of RWKV-7, for each feature of each group: what the state is read
                by, and along what the numbers that were read are removed from it.
            divisor: queries and keys whose sum of products the outputs are divided by.
            least: the smallest absolute value of such a sum, for keys whose factors sum to 1.
            averages: multiply the keys by `rates`, which are 1 minus the gate of each group.
            scale: of the outputs.
        """
        size = sizes.groups * (sizes.features * (sizes.values + (divisor is not None)) + averages)
        place, S = self._state(size), (sizes.groups, sizes.features, sizes.values)
        self.slots[-1].append(Slot("recurrence", place, S, 0, divisor is not None, averages))
        fields = sizes._asdict() | {"second": k.place, "third": v.place, "state": place}
        kind = "NO_GATES"
        if isinstance(gates, Tensor):
            kind, fields["weights"] = "CONSTANT_GATES", self._float(gates)
        elif gates is not None:
            kind = "GATE_PER_HEAD" if gates.size == sizes.groups else "GATE_PER_FEATURE"
            fields["gates"] = gates.place
        fields["kind"] = native.enum("Gates")["GATE_OF_AVERAGE" if averages else kind]
        if rates is not None:
            fields["rates"] = rates.place
        if reader_and_writer is not None:
            reader, writer = reader_and_writer
            fields |= {"reader": reader.place, "writer": writer.place}
        if divisor is not None:
            fields |= {"divisor_q": divisor[0].place, "divisor_k": divisor[1].place}
        to = self.value(sizes.heads * sizes.values)
        return self._add("recur", to, q, scale=scale, epsilon=least, **fields)

    def attend(
        self, sizes: Heads, q: Value, k: Value, v: Value, *, window: int | None, scale: float
    ) -> Value:
        """Attend to the last `window` tokens, or to all of them."""
        kind, place = ("cache", sum(self.cache)) if window is None else ("window", self.state_size)
        self.slots[-1].append(Slot(kind, place, (sizes.groups, window or 0, sizes.features), sizes.values))
        if window is None:
            self.cache += [sizes.features] * sizes.groups + [sizes.values] * sizes.groups
        else:
            slots = -(-window // KEY_BLOCK) * KEY_BLOCK
            self._state(slots * sizes.groups * (sizes.features + sizes.values))
        fields = sizes._asdict() | {"second": k.place, "third": v.place, "state": place}
        to = self.value(sizes.heads * sizes.values)
        return self._add("attend", to, q, window=window or 0, scale=scale, **fields)

    # ---- inner parts

    def _add(self, operation: str, to: Value, x: Value | None = None, **fields: object) -> Value:
        every: dict[str, object] = {**dict.fromkeys(_ZERO, 0), **dict.fromkeys(_PLACES, -1)}
        every |= {"epsilon": 0.0, "scale": 1.0}
        every |= {
            "layer": (0,) * 7,
            "operation": native.enum("Operation")[operation.upper()],
            "to": to.place,
            **fields,
        }
        if x is not None:
            every["first"] = x.place
        self.instructions.append(native.struct("Instruction")(**every))
        return to

    def _state(self, size: int) -> int:
        place = self.state_size
        self.state_size += -(-size // 16) * 16
        return place

    def _float(self, x: Tensor | None) -> int:
        return self._keep(x, torch.float32)

    def _double(self, x: Tensor | None) -> int:
        return self._keep(x, torch.float64)

    def _keep(self, x: Tensor | None, dtype: torch.dtype) -> int:
        if x is None:
            return 0
        self.kept.append(self._copy(x, dtype))
        return self.kept[-1].data_ptr()

    def _copy(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy a tensor; a parameter is copied only once."""
        key = (id(x), dtype)
        if key not in self._copies:
            copy = x.detach().to("cpu", dtype, copy=self.given is None).contiguous()
            if not isinstance(x, nn.Parameter):  # it may be freed, and another tensor get its id
                return copy
            self._copies[key] = copy
        return self._copies[key]

    def _others(self) -> dict[str, Tensor]:
        """Copy what is not packed: embeddings in the type of tables, all other weights in fp32."""
        of_matrices = {f"{name}.{part}" for name in self.packed for part in ("weight", "bias")}
        found = {}
        for name, x in self.model.state_dict(keep_vars=True).items():
            if name not in of_matrices:
                is_table = (id(x), self.table_dtype) in self._copies
                wide = torch.float32 if x.is_floating_point() else x.dtype
                found[name] = self._copy(x, self.table_dtype if is_table else wide)
        return found
