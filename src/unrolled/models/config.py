"""Configuration shared by all transformers: size, attention, norms, positions."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from annotated_types import Gt, Lt, MinLen

from unrolled.fields import Checked, Count, Fraction, FromData, Size, field_types
from unrolled.ops.checks import wrong

Norm = Literal["pre", "post", "res_post"]
NormType = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu_tanh", "relu", "swiglu", "channel_mix"]
Positions = Literal["learned", "axial", "sinusoidal", "rotary", "none"]
Mechanisms = str | list[str]
Norms = Norm | list[Norm]
Sizes = Annotated[list[Size], MinLen(1)]


@dataclass
class ModelConfig(Checked):
    """The base of all model configs: what they require of a data set, and their maximum length."""

    @classmethod
    def from_data(cls) -> dict[str, str]:
        """Return the fields that follow from the data set, each with the name of the data set's attribute."""
        marks = ((name, mark) for name, hint in field_types(cls).items() for mark in get_args(hint))
        return {name: mark.name for name, mark in marks if isinstance(mark, FromData)}

    @property
    def needs(self) -> dict[str, object]:
        """Values that attributes of the data set must have, by name."""
        return {}

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens; None where the model has no such field."""
        return None

    @property
    def n_positions(self) -> int | None:
        """Number of positions; None for any number."""
        return None


def check_one_input(vocab_size: int | None, input_dim: int | None) -> None:
    """Raise ValueError unless a model reads either tokens or continuous inputs."""
    if (vocab_size is None) == (input_dim is None):
        raise ValueError(
            f"vocab_size is {vocab_size} and input_dim is {input_dim}, but one must be given and not both"
        )


def check_classes(output: str, vocab_size: int | None, n_classes: int | None) -> None:
    """Raise ValueError unless the number of outputs is given: of labels, or for "masked" of tokens."""
    if output == "masked" and vocab_size is None:
        raise ValueError("vocab_size is None, but must be given with output 'masked'")
    if (n_classes is None) != (output == "masked"):
        expected = "None" if output == "masked" else "an integer of at least 1"
        raise ValueError(f"n_classes is {n_classes}, but must be {expected} with output {output!r}")


@dataclass(kw_only=True)
class TransformerConfig(ModelConfig):
    """The fields shared by encoders and decoders.

    Attributes:
        d_model: width of the residual stream.
        n_layers: number of blocks.
        n_heads: query heads of each block.
        n_kv_heads: key/value heads (grouped-query attention), a divisor of `n_heads`; None for `n_heads`.
        d_ff: width of the feed-forward layer. None: 4 d_model; with swiglu, which has three matrices instead
            of two, 8/3 d_model rounded up to a multiple of 8. 0: no feed-forward layer, which decoders,
            encoders, ViT, segmenters and transcribers support.
        attention: name of the mechanism (see `unrolled.attention.names()`), or a list with one per layer.
        attention_options: further arguments of the modules of a mechanism, by the mechanism's name, as in
            `{"linear": {"feature_map": "elu"}}`. They take precedence over `n_heads`, `n_kv_heads`, `bias`
            and `positions="rotary"`.
        layer_options: the same, but each argument is a list with one value per layer of the model, as in
            `{"window": {"window": [32, 64, 128, 256]}}`; values for layers of other mechanisms are ignored.
        norm: what is normalised around each sub-layer f: "pre", its input, x + f(norm(x)) (GPT-2); "post",
            the sum, norm(x + f(x)) (Vaswani et al.); "res_post", its output, x + norm(f(x)) (OLMo 2, and Swin
            Transformer V2, arXiv 2111.09883, section 3.2); or a list with one per layer.
        norm_type: "layernorm" or "rmsnorm".
        norm_eps: added to the variance, or to the mean square, in each norm.
        activation: of the feed-forward layer, "gelu", "gelu_tanh" (its approximation by a tanh), "relu",
            "swiglu", or, in decoders, "channel_mix" for RWKV's layer, which also reads the token before.
        bias: add a bias in each linear layer and layer norm of the blocks, except where a mechanism always
            has one.
        positions: "learned" (one vector for each of `max_length` positions), "axial" (learned, as below),
            "sinusoidal" (any length), "rotary" (inside the attention, any length) or "none".
        max_length: number of learned positions. It also limits the outputs of `perceiver_io`, but nothing
            else.
        axial_shape: for axial positions, the sizes [n_1, n_2 ..] of a grid that the positions fill row by
            row: up to n_1 n_2 .. positions, with n_1 + n_2 + .. vectors.
        axial_widths: widths of the vectors of each axis, which add up to d_model; by default about equal.
        dropout: probability, for the embeddings and for the output of each sub-layer.
        reversible: compute each block's input from its output, so that training stores no activations of the
            blocks (see `ReversibleStack`); with norm "pre".
        ff_chunk: number of positions that go through a feed-forward layer at a time; None for all.

    Raises:
        ValueError: a field has another type or is out of range, or fields do not fit each other.
    """

    d_model: Size = 256
    n_layers: Size = 4
    n_heads: Size = 8
    n_kv_heads: Size | None = None
    d_ff: Count | None = None
    attention: Mechanisms = "linear"
    attention_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    layer_options: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    norm: Norms = "pre"
    norm_type: NormType = "layernorm"
    norm_eps: Annotated[float, Gt(0), Lt(1)] = 1e-5
    activation: Activation = "gelu"
    bias: bool = True
    positions: Positions = "learned"
    max_length: Annotated[Size, FromData("longest")] = 1024
    axial_shape: Sizes | None = None
    axial_widths: Sizes | None = None
    dropout: Fraction = 0.0
    reversible: bool = False
    ff_chunk: Size | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_heads % (self.n_kv_heads or self.n_heads):
            raise wrong("n_kv_heads", self.n_kv_heads, f"a divisor of n_heads = {self.n_heads}")
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"d_model is {self.d_model}, but must be even with positions 'sinusoidal'")
        if len(self.norms) != self.n_layers:
            raise ValueError(
                f"norm has {len(self.norms)} values, but must have n_layers = {self.n_layers} of them"
            )
        if self.reversible and set(self.norms) != {"pre"}:
            raise wrong("norm", repr(self.norm), "'pre' with reversible True: others have no inverse")
        if self.reversible and self.d_ff == 0:
            raise wrong("d_ff", 0, "at least 1 with reversible True, whose second stream it feeds")
        if self.activation == "channel_mix" and self.ff_chunk is not None:
            raise wrong("ff_chunk", self.ff_chunk, "None with activation 'channel_mix', which has a state")
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

    @property
    def norms(self) -> list[Norm]:
        """What is normalised in each layer."""
        return self.norm if isinstance(self.norm, list) else [self.norm] * self.n_layers

    def options_of(self, layer: int) -> dict[str, Any]:
        """The arguments of one layer's attention besides d_model and causal."""
        common = {
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "bias": self.bias,
            "rotary": self.positions == "rotary",
        }
        return common | self._own_options(layer)

    def _own_options(self, layer: int) -> dict[str, Any]:
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
        """The width of the vectors to which the positions are added."""
        return self.d_model

    @property
    def n_positions(self) -> int | None:
        """Number of positions; None for any number."""
        if self.positions == "axial":
            return math.prod(self.axial_shape or ())
        return self.max_length if self.positions == "learned" else None

    def _check_axial(self) -> None:
        shape, widths, total = self.axial_shape, self.axial_widths, self.positions_width
        if self.positions != "axial":
            for name, given in {"axial_shape": shape, "axial_widths": widths}.items():
                if given is not None:
                    raise wrong(name, given, f"None with positions {self.positions!r}: use 'axial'")
            return
        if shape is None:
            raise ValueError(
                "axial_shape is None, but must be a list of sizes, such as [32, 32], with positions 'axial'"
            )
        axes = len(shape)
        if widths is None:
            self.axial_widths = widths = [total // axes + (i < total % axes) for i in range(axes)]
        if len(widths) != axes or sum(widths) != total or min(widths) < 1:
            raise wrong("axial_widths", widths, f"{axes} widths, one for each axis, that add up to {total}")

    def _check_attention(self) -> None:
        if not isinstance(self.attention, str) and len(self.attention) != self.n_layers:
            raise ValueError(
                f"attention has {len(self.attention)} names, but must have n_layers = {self.n_layers} of them"
            )
        named = self.mechanisms
        given = {"attention_options": self.attention_options, "layer_options": self.layer_options}
        for field_name, options in given.items():
            if unused := sorted(options.keys() - named):
                raise ValueError(f"{field_name} is for {unused}, but must be for some of {sorted(named)}")
        for name, by_option in self.layer_options.items():
            for option, values in by_option.items():
                if len(values) != self.n_layers:
                    raise ValueError(
                        f"{option} of {name!r} in layer_options is {values!r}, "
                        f"but must be a list of n_layers = {self.n_layers} values"
                    )
                if option in self.attention_options.get(name, {}):
                    raise ValueError(
                        f"{option} of {name!r} is in attention_options and in layer_options, "
                        "but must be in one of them only"
                    )
        for layer, name in enumerate(self.layer_attention):
            if self.d_model % self.n_heads and not {"head_dim", "n_heads"} & self._own_options(layer).keys():
                raise ValueError(
                    f"d_model is {self.d_model}, but must be a multiple of n_heads = {self.n_heads}, "
                    f"unless head_dim is among the attention_options of {name!r}"
                )
