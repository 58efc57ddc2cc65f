import re

import pytest
from small_models import small_model

from unrolled import attention
from unrolled.contract import Supports, UnsupportedError
from unrolled.models import Decoder, DecoderConfig, Encoder, EncoderConfig
from unrolled.models.config import TransformerConfig
from unrolled.models.limits import n_positions

TEXT, PIXELS = {"vocab_size": 4}, {"vocab_size": 16, "inputs": "pixels"}
IN_BOTH = {
    "attention_options": {"linear": {"head_dim": 8}},
    "layer_options": {"linear": {"head_dim": [8] * 4}},
}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (TransformerConfig, {"d_model": 30, "n_heads": 4}, "d_model is 30, but must be a multiple of n_heads = 4"),
        (TransformerConfig, {"n_heads": 8, "n_kv_heads": 3}, "n_kv_heads is 3, but must be a divisor of n_heads = 8"),
        (TransformerConfig, {"positions": "sinusoidal", "d_model": 33, "n_heads": 3}, "d_model is 33, but must be even with positions 'sinusoidal'"),
        (TransformerConfig, {"attention": ["linear"] * 3}, "attention has 3 names, but must have n_layers = 4 of them"),
        (TransformerConfig, {"attention_options": {"softmax": {}}}, "attention_options is for ['softmax'], but must be for some of ['linear']"),
        (TransformerConfig, {"layer_options": {"softmax": {}}}, "layer_options is for ['softmax'], but must be for some of ['linear']"),
        (TransformerConfig, {"layer_options": {"linear": {"head_dim": [8, 16]}}}, "is [8, 16], but must be a list of n_layers = 4 values"),
        (TransformerConfig, IN_BOTH, "head_dim of 'linear' is in attention_options and in layer_options, but must be in one of them only"),
        (TransformerConfig, {"norm": ["pre"] * 3}, "norm has 3 values, but must have n_layers = 4 of them"),
        (TransformerConfig, {"norm": ["pre"] * 3 + ["post"], "reversible": True}, "norm is ['pre', 'pre', 'pre', 'post'], but must be 'pre' with reversible True"),
        (TransformerConfig, {"norm": ["middle"] * 4}, "norm is ['middle', 'middle', 'middle', 'middle'], but must be one of 'pre', 'post', 'res_post', or a list of"),
        (DecoderConfig, PIXELS | {"vocab_size": 1}, "vocab_size is 1, but must be at least 2 with inputs 'pixels'"),
        (DecoderConfig, PIXELS | {"tie_embeddings": True}, "tie_embeddings is True, but must be False with inputs 'pixels'"),
        (EncoderConfig, {}, "vocab_size is None and input_dim is None, but one must be given and not both"),
        (EncoderConfig, TEXT | {"input_dim": 3}, "vocab_size is 4 and input_dim is 3, but one must be given and not both"),
        (EncoderConfig, TEXT, "n_classes is None, but must be an integer of at least 1 with output 'classification'"),
        (EncoderConfig, {"input_dim": 4, "output": "masked"}, "vocab_size is None, but must be given with output 'masked'"),
        (EncoderConfig, TEXT | {"n_classes": 2, "tie_embeddings": True}, "tie_embeddings is True, but must be False with output 'classification'"),
        (EncoderConfig, TEXT | {"output": "hidden", "n_classes": 2}, "n_classes is 2, but must be None with output 'hidden'"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused_in_one_sentence(kind, fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(**fields)


def test_the_feed_forward_width_keeps_the_number_of_weights():
    assert TransformerConfig(d_model=96).ff_width == 384
    assert TransformerConfig(d_model=96, activation="swiglu").ff_width == 256
    assert TransformerConfig(d_model=64, activation="swiglu").ff_width == 176
    assert TransformerConfig(d_ff=100).ff_width == 100


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "nothing_of_the_kind"}, "nothing_of_the_kind"),
        (
            {"attention_options": {"linear": {"colour": 1}}},
            r"attention_options\['linear'\] does not fit: .*colour",
        ),
        (
            {"attention_options": {"linear": {"causal": 1}}},
            r"attention_options\['linear'\] does not fit: .*causal",
        ),
        (
            {"layer_options": {"linear": {"colour": [1] * 4}}},
            r"layer_options\['linear'\] does not fit: .*colour",
        ),
    ],
)
def test_an_unknown_mechanism_or_option_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        Decoder(DecoderConfig(vocab_size=4, **fields))


def test_each_layer_gets_its_mechanism_and_that_mechanisms_options():
    options = {"attention": ["softmax", "linear"], "attention_options": {"linear": {"head_dim": 10}}}
    config = DecoderConfig(vocab_size=4, d_model=12, n_heads=2, n_layers=2, **options)
    weights = Decoder(config).state_dict()
    for i, width in enumerate((12, 20)):
        own = {x.shape[0] for n, x in weights.items() if n.startswith(f"stack.blocks.{i}.attention.")}
        assert own == {12, 3 * width}


def test_each_layer_gets_its_own_value_of_an_option():
    config = DecoderConfig(
        vocab_size=4,
        d_model=12,
        n_heads=2,
        n_layers=4,
        attention=["window", "linear", "window", "window"],
        attention_options={"window": {"head_dim": 4}},
        layer_options={"window": {"window": [2, None, 4, [7, 0]], "dilation": [1, None, 3, [1, 2]]}},
    )
    layers = [block.attention for block in Decoder(config).stack.blocks]
    assert [layers[i].window_size for i in (0, 2, 3)] == [(1, 0), (3, 0), (7, 0)]
    assert [layers[i].dilation for i in (0, 2, 3)] == [(1, 1), (3, 3), (1, 2)]
    assert [layer.head_dim for layer in layers] == [4, 6, 4, 4]


def test_a_width_that_the_heads_do_not_divide_needs_a_head_width_in_each_layer():
    sizes = {"d_model": 10, "n_heads": 4, "n_layers": 2}
    TransformerConfig(**sizes, layer_options={"linear": {"head_dim": [2, 3]}})
    with pytest.raises(ValueError, match="d_model is 10, but must be a multiple"):
        TransformerConfig(**sizes, layer_options={"linear": {"feature_map": ["elu", "relu"]}})


def test_a_mechanism_that_cannot_is_refused_with_those_that_can(monkeypatch):
    load = attention.load

    class OneWay:
        def __init__(self, **can):
            self.supports = Supports(cross=False, padding=True, packing=False, recurrence="none", **can)

    extra = {
        "forward_only": OneWay(causal=True, bidirectional=False),
        "both_only": OneWay(causal=False, bidirectional=True),
    }
    monkeypatch.setattr(attention, "load", lambda name: extra.get(name) or load(name))
    monkeypatch.setattr(attention, "names", lambda: ["both_only", "forward_only", "linear"])
    with pytest.raises(UnsupportedError, match=re.escape("use one of ['forward_only', 'linear'] instead")):
        Decoder(DecoderConfig(vocab_size=4, attention="both_only"))
    with pytest.raises(UnsupportedError, match=re.escape("use one of ['both_only', 'linear'] instead")):
        Encoder(EncoderConfig(vocab_size=4, n_classes=2, attention="forward_only"))


def test_the_longest_sequence_is_the_least_of_all_limits():
    options = {"attention_options": {"aft": {"max_length": 8}}}
    assert n_positions(small_model("decoder", attention="aft", **options)) == 8
    assert n_positions(small_model("decoder", attention="aft")) == 16
    assert n_positions(small_model("decoder", positions="none")) is None
