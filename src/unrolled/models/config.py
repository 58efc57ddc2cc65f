"""What every transformer here is told: its size, its attention, its norms, its positions."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from unrolled.models.checks import check_size

Norm = Literal["pre", "post"]
NormType = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu_tanh", "relu", "swiglu"]
Positions = Literal["learned", "axial", "sinusoidal", "rotary", "none"]


@dataclass(kw_only=True)
class TransformerConfig:
    """The fields that the encoder and the decoder share. Every field is checked when the config is made.

    Attributes:
        d_model: width of the residual stream.
        n_layers: number of blocks.
        n_heads: query heads of each block.
        n_kv_heads: key/value heads (grouped-query attention), a divisor of `n_heads`; None for `n_heads`.
        d_ff: width of the feed-forward layer; None for 4 d_model, or for swiglu, which has three matrices
            instead of two, 8/3 d_model rounded up to a multiple of 8.
        attention: name of the mechanism (see `unrolled.attention.names()`), or a list with one per layer.
        attention_options: for a mechanism's name, the further arguments that each of its modules is made
            with, as in `{"linear": {"feature_map": "elu"}}`.
        layer_options: the same, but each argument is a list with one value per layer of the model, as in
            `{"window": {"window": [32, 64, 128, 256]}}`; values for layers of other mechanisms are not read.
        norm: "pre" normalises what enters each sub-layer (GPT-2), "post" what leaves it (Vaswani et al.).
        norm_type: "layernorm" or "rmsnorm".
        norm_eps: what each norm adds to the variance, or to the mean square.
        activation: of the feed-forward layer, "gelu", "gelu_tanh" (its approximation by a tanh), "relu" or
            "swiglu".
        positions: "learned" (one vector for each of `max_length` positions), "axial" (learned, as below),
            "sinusoidal" (any length), "rotary" (inside the attention, any length) or "none".
        max_length: number of learned positions; bounds nothing else.
        axial_shape: for axial positions, the sizes [n_1, n_2 ..] of a grid that the positions fill row by
            row: up to n_1 n_2 .. of them, with n_1 + n_2 + .. vectors.
        axial_widths: widths of the vectors of each axis, which add up to d_model; by default about equal.
        dropout: probability, for the embeddings and for what each sub-layer adds to the residual stream.
        reversible: let each block's input be computed from its output, so that training keeps no activations
            of the blocks (see `ReversibleStack`); with norm "pre".
        ff_chunk: number of positions that go through a feed-forward layer at a time; None for all.
    """

    d_model: int = 256
    n_layers: int = 4
    n_heads: int = 8
    n_kv_heads: int | None = None
    d_ff: int | None = None
    attention: str | list[str] = "linear"
    attention_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    layer_options: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    norm: Norm = "pre"
    norm_type: NormType = "layernorm"
    norm_eps: float = 1e-5
    activation: Activation = "gelu"
    positions: Positions = "learned"
    max_length: int = 1024
    axial_shape: list[int] | None = None
    axial_widths: list[int] | None = None
    dropout: float = 0.0
    reversible: bool = False
    ff_chunk: int | None = None

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "n_heads", "max_length"):
            self._at_least(name, 1)
        for name in ("n_kv_heads", "d_ff", "ff_chunk"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        self._one_of("norm", get_args(Norm))
        self._one_of("norm_type", get_args(NormType))
        self._one_of("activation", get_args(Activation))
        self._one_of("positions", get_args(Positions))
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout!r}, wanted a probability in [0, 1)")
        if not isinstance(self.norm_eps, int | float) or not 0 < self.norm_eps < 1:
            raise ValueError(f"norm_eps is {self.norm_eps!r}, wanted a number between 0 and 1")
        if self.n_heads % (self.n_kv_heads or self.n_heads):
            raise ValueError(f"n_kv_heads is {self.n_kv_heads}, wanted a divisor of n_heads = {self.n_heads}")
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"d_model is {self.d_model}, wanted an even width for sinusoidal positions")
        self._true_or_false("reversible")
        if self.reversible and self.norm != "pre":
            raise ValueError(
                f"norm is {self.norm!r}, wanted 'pre' where blocks are reversible: others have no inverse"
            )
        self._check_axial()
        self._check_attention()

    @property
    def layer_attention(self) -> list[str]:
        """The name of each layer's mechanism."""
        return [self.attention] * self.n_layers if isinstance(self.attention, str) else self.attention

    @property
    def mechanisms(self) -> set[str]:
        """The names of all mechanisms."""
        return set(self.layer_attention)

    def options_of(self, layer: int) -> dict[str, Any]:
        """The further arguments of one layer's attention: its `attention_options` and `layer_options`."""
        name = self.layer_attention[layer]
        own = {option: values[layer] for option, values in self.layer_options.get(name, {}).items()}
        return {**self.attention_options.get(name, {}), **own}

    @property
    def ff_width(self) -> int:
        """The width of the feed-forward layer, with the default filled in."""
        if self.d_ff is not None:
            return self.d_ff
        return 8 * -(-self.d_model // 3) if self.activation == "swiglu" else 4 * self.d_model

    @property
    def positions_width(self) -> int:
        """The width of what the positions are added to."""
        return self.d_model

    @property
    def n_positions(self) -> int | None:
        """How many positions there are; None for any number."""
        if self.positions == "axial":
            return math.prod(self.axial_shape or ())
        return self.max_length if self.positions == "learned" else None

    def _check_axial(self) -> None:
        shape, widths, total = self.axial_shape, self.axial_widths, self.positions_width
        if self.positions != "axial":
            for name in ("axial_shape", "axial_widths"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is given with positions {self.positions!r}, wanted 'axial'")
            return
        if not _sizes(shape):
            raise ValueError(f"axial_shape is {shape!r}, wanted a list of sizes, such as [32, 32]")
        axes = len(shape or ())
        if widths is None:
            self.axial_widths = [total // axes + (i < total % axes) for i in range(axes)]
            widths = self.axial_widths
        if not _sizes(widths) or len(widths) != axes or sum(widths) != total:
            raise ValueError(
                f"axial_widths is {widths!r}, wanted one width for each of {axes} axes, {total} in all"
            )

    def _check_attention(self) -> None:
        self._check_names("attention")
        if not isinstance(self.attention, str) and len(self.attention) != self.n_layers:
            raise ValueError(
                f"attention has {len(self.attention)} names, wanted n_layers = {self.n_layers} of them"
            )
        for field_name in ("attention_options", "layer_options"):
            self._check_options(field_name)
        for name, options in self.layer_options.items():
            for option, values in options.items():
                if not isinstance(values, list) or len(values) != self.n_layers:
                    raise ValueError(
                        f"{option} of {name!r} in layer_options is {values!r}, "
                        f"wanted a list of n_layers = {self.n_layers} values"
                    )
                if option in self.attention_options.get(name, {}):
                    raise ValueError(
                        f"{option} of {name!r} is in attention_options and in layer_options, "
                        "wanted it in one of them"
                    )
        for layer, name in enumerate(self.layer_attention):
            if self.d_model % self.n_heads and "head_dim" not in self.options_of(layer):
                raise ValueError(
                    f"d_model is {self.d_model}, wanted a multiple of n_heads = {self.n_heads}, "
                    f"or head_dim among the attention_options of {name!r}"
                )

    def _check_names(self, field_name: str) -> None:
        value = getattr(self, field_name)
        named = [value] if isinstance(value, str) else value
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise ValueError(f"{field_name} is {value!r}, wanted a name or a list of names")

    def _check_options(self, field_name: str) -> None:
        options = getattr(self, field_name)
        if not isinstance(options, dict) or not all(isinstance(x, dict) for x in options.values()):
            raise ValueError(f"{field_name} is {options!r}, wanted a dict of options for each name")
        named = self.mechanisms
        if unused := sorted(options.keys() - named):
            raise ValueError(f"{field_name} is for {unused}, wanted names among {sorted(named)}")

    def _at_least(self, name: str, low: int) -> None:
        check_size(name, getattr(self, name), low)

    def _true_or_false(self, name: str) -> None:
        if not isinstance(value := getattr(self, name), bool):
            raise ValueError(f"{name} is {value!r}, wanted True or False")

    def _one_of(self, name: str, choices: Collection[str]) -> None:
        if (value := getattr(self, name)) not in choices:
            raise ValueError(f"{name} is {value!r}, wanted one of {sorted(choices)}")


def _sizes(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(size) is int and size >= 1 for size in value)
