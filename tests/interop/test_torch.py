from copy import deepcopy
from functools import partial

import peft
import pytest
import torch
from agreement import assert_agree, gradients
from torch import nn

from unrolled import attention
from unrolled.contract import UnsupportedError
from unrolled.interop.torch import MultiheadAttention, from_transformer_encoder


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@torch.no_grad()
def randomised(module):
    """Draw weights that no single-precision number equals."""
    torch.manual_seed(0)
    module = module.double().eval()
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name and name.endswith("weight")), std=0.4)
    return module


def encoder(*, norm=None, **settings):
    sizes = {"d_model": 16, "nhead": 4, "dim_feedforward": 24, "layer_norm_eps": 1e-3}
    layer = nn.TransformerEncoderLayer(**sizes | {"batch_first": True} | settings)
    last = nn.LayerNorm(16, **norm) if norm is not None else None
    return randomised(nn.TransformerEncoder(layer, 2, norm=last, enable_nested_tensor=False))


@pytest.mark.parametrize("norm", [None, {}, {"elementwise_affine": False}], ids=str)
@pytest.mark.parametrize(
    "settings", [{}, {"activation": "gelu"}, {"bias": False}, {"batch_first": False}], ids=str
)
@pytest.mark.parametrize("norm_first", [False, True])
@torch.no_grad()
def test_an_encoder_becomes_a_stack(norm_first, settings, norm):
    theirs = encoder(norm_first=norm_first, norm=norm, **settings)
    x, padding = normal(2, 7, 16), torch.arange(7) >= torch.tensor([[7], [4]])
    axes = (0, 0) if settings.get("batch_first", True) else (0, 1)  # theirs may take the batch second
    expected = theirs(x.transpose(*axes), src_key_padding_mask=padding).transpose(*axes)
    found = from_transformer_encoder(theirs)(x, key_padding_mask=padding)
    assert_agree(found[~padding], expected[~padding], tolerance=1e-12)


@pytest.mark.parametrize("norm_first", [False, True])
@torch.no_grad()
def test_a_causal_one_runs_step_by_step(norm_first):
    theirs = encoder(norm_first=norm_first, norm={})
    x = normal(2, 7, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=x.dtype)
    expected = theirs(x, mask=mask, is_causal=True)
    ours = from_transformer_encoder(theirs, causal=True)
    y, state = ours.prefill(x[:, :3], ours.init_state(2))
    steps = [y]
    for t in range(3, 7):
        y, state = ours.step(x[:, t], state)
        steps.append(y.unsqueeze(1))
    assert_agree(ours(x), expected, tolerance=1e-12)
    assert_agree(torch.cat(steps, dim=1), expected, tolerance=1e-12)


def test_another_mechanism_gets_the_projections():
    stack = from_transformer_encoder(encoder(), attention="linear", feature_map="relu")
    assert type(stack.blocks[0].attention) is attention.load("linear")
    expected = from_transformer_encoder(encoder()).state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in stack.state_dict().items())


class Strange(nn.TransformerEncoderLayer):
    pass


def different():
    theirs = encoder()
    theirs.layers[1] = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return theirs


def with_dropout(layer, part):
    theirs = encoder(dropout=0.1)
    setattr(theirs.layers[layer], part, nn.Dropout(0.5))
    return theirs


def with_adapters():
    return peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["linear1"]), encoder())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: nn.Linear(2, 2), ValueError, "encoder is a Linear, but must be a torch.nn.TransformerEncoder"),
        (lambda: nn.TransformerEncoder(Strange(8, 2), 1, enable_nested_tensor=False), UnsupportedError, "layers of another type"),
        (different, UnsupportedError, "layers that differ"),
        (lambda: with_dropout(0, "dropout2"), UnsupportedError, r"dropouts of \[0.1, 0.5\]; a stack here has equal ones"),
        (lambda: with_dropout(1, "dropout1"), UnsupportedError, r"dropouts of \[0.1, 0.5\]"),
        (with_adapters, UnsupportedError, "an adapter in layers.0.linear1, which would be lost"),
        (lambda: encoder(activation=nn.functional.silu), UnsupportedError, "the activation <function silu"),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 1, norm=nn.RMSNorm(8), enable_nested_tensor=False), UnsupportedError, "the last norm is a RMSNorm"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        from_transformer_encoder(make())


def pair(**settings):
    """Torch's and ours, with the same weights."""
    theirs = randomised(nn.MultiheadAttention(16, 4, **settings))
    ours = MultiheadAttention(16, 4, **settings, dtype=torch.float64).eval()
    ours.load_state_dict(theirs.state_dict())
    assert list(theirs.state_dict()) == list(ours.state_dict())
    return ours, theirs


MASKS = {
    "none": {},
    "padding": {"key_padding_mask": torch.arange(6) >= torch.tensor([[6], [3]])},
    "mask": {"attn_mask": torch.arange(5).unsqueeze(1) < torch.arange(6) - 2},
    "added": {"attn_mask": normal(8, 5, 6), "key_padding_mask": torch.where(torch.arange(6) > 4, -torch.inf, 0.0).double().expand(2, -1)},
}  # fmt: skip


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize(
    "settings",
    [
        {"batch_first": True},
        {"batch_first": False},
        {"bias": False, "batch_first": True},
        {"kdim": 6, "vdim": 10, "batch_first": True},
        {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    ],
    ids=str,
)
def test_outputs_weights_and_gradients_are_torchs(settings, masks):
    ours, theirs = pair(**settings)
    widths = 16, settings.get("kdim", 16), settings.get("vdim", 16)
    inputs = [normal(2, n, d) for n, d in zip((5, 6, 6), widths, strict=True)]
    inputs = [(x if settings["batch_first"] else x.transpose(0, 1)).requires_grad_() for x in inputs]
    for average in (True, False):
        found = ours(*inputs, **MASKS[masks], average_attn_weights=average)
        expected = theirs(*inputs, **MASKS[masks], average_attn_weights=average)
        for a, b in zip(found, expected, strict=True):
            assert_agree(a, b, tolerance=1e-12)
    for a, b in zip(gradients(found[0], inputs), gradients(expected[0], inputs), strict=True):
        assert_agree(a, b, "gradient", tolerance=1e-12)
    assert ours(*inputs, **MASKS[masks], need_weights=False)[1] is None


@pytest.mark.parametrize("sizes", [(2, 0, 0), (0, 3, 3), (2, 0, 3), (2, 3, 0)], ids=str)
def test_empty_batches_and_lengths_are_torchs(sizes):
    ours, theirs = pair(batch_first=True)
    batch, T, S = sizes
    x, y = normal(batch, T, 16), normal(batch, S, 16)
    for found, expected in zip(ours(x, y, y), theirs(x, y, y), strict=True):
        torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_without_a_batch():
    ours, theirs = pair()
    inputs = normal(5, 16), normal(6, 16), normal(6, 16)
    padding = torch.arange(6) > 3
    for a, b in zip(ours(*inputs, padding), theirs(*inputs, padding), strict=True):
        assert_agree(a, b, tolerance=1e-12)


@torch.no_grad()
def test_clustered_attention_to_additional_keys():
    """Padding of the queries is that of their own keys, and additional keys are never padding."""
    ours = MultiheadAttention(
        16, 4, attention="clustered", n_clusters=5, n_keys=4, add_bias_kv=True, add_zero_attn=True,
        batch_first=True, dtype=torch.float64,
    )  # fmt: skip
    x, padding = normal(2, 20, 16), torch.arange(20) >= torch.tensor([[15], [20]])
    found = ours(x, x, x, padding, need_weights=False)[0]
    alone = ours(y := x[:1, :15], y, y, need_weights=False)[0]
    assert_agree(found[:1, :15], alone, tolerance=1e-12)


@torch.no_grad()
def test_inside_of_torchs_encoder_layer():
    """Torch's layer has a fast path that never calls its attention: it must not be taken."""
    theirs = encoder()
    expected = theirs(x := normal(2, 7, 16), src_key_padding_mask=torch.arange(7).expand(2, -1) > 4)
    for kind in ("softmax", "linear"):
        changed = encoder()
        for layer in changed.layers:
            swapped = MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64, attention=kind)
            swapped.load_state_dict(layer.self_attn.state_dict())
            layer.self_attn = swapped
        changed.eval()
        found = changed(x, src_key_padding_mask=torch.arange(7).expand(2, -1) > 4)[:, :5]
        if kind == "softmax":
            assert_agree(found, expected[:, :5], tolerance=1e-12)
        else:
            stack = from_transformer_encoder(theirs, attention="linear")
            assert_agree(found, stack(x[:, :5]), tolerance=1e-12)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@torch.no_grad()
def test_nested_tensors_are_refused():
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    theirs = nn.TransformerEncoder(layer, 1).eval()
    theirs.layers[0].self_attn = MultiheadAttention(16, 4, batch_first=True)
    with pytest.raises(UnsupportedError, match="enable_nested_tensor=False"):
        theirs(torch.zeros(2, 7, 16), src_key_padding_mask=torch.arange(7).expand(2, -1) > 4)
    with pytest.raises(UnsupportedError, match="layers of another type"):
        from_transformer_encoder(theirs)


@torch.no_grad()
def test_a_copy_has_projections_of_its_own():
    module = MultiheadAttention(16, 4, batch_first=True, attention="linear", dtype=torch.float64)
    x = normal(2, 5, 16)
    before = module(x, x, x, need_weights=False)[0]
    copy = deepcopy(module)
    nn.init.zeros_(copy.out_proj.weight)
    nn.init.ones_(copy.out_proj.bias)
    assert (copy(x, x, x, need_weights=False)[0] == 1).all()
    assert torch.equal(module(x, x, x, need_weights=False)[0], before)


@torch.no_grad()
def test_another_layer_in_the_place_of_a_projection_is_used():
    """As adapters of low rank and quantisation put them there."""
    module = MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    x = normal(2, 5, 16)
    before = module(x, x, x)[0]
    module.out_proj = nn.Sequential(module.out_proj, nn.Tanh())
    assert torch.equal(module(x, x, x)[0], before.tanh())


@torch.no_grad()
def test_causal_attention_without_a_mask_of_pairs():
    module = MultiheadAttention(16, 4, batch_first=True, attention="linear", causal=True, dtype=torch.float64)
    x = normal(2, 7, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=x.dtype)
    found, _ = module(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
    begin = x[:, :4]
    assert_agree(found[:, :4], module(begin, begin, begin, need_weights=False)[0], tolerance=1e-12)


@pytest.mark.parametrize("name", attention.names())
@torch.no_grad()
def test_every_mechanism_computes_what_its_own_module_does_or_is_refused(name):
    torch.manual_seed(0)
    kind = attention.load(name)
    causal = not kind.supports.bidirectional
    settings = {"causal": causal} if kind.supports.causal or kind.supports.bidirectional else {}
    own = kind(16, 4, **settings).double()
    make = partial(MultiheadAttention, 16, 4, batch_first=True, attention=name, dtype=torch.float64)
    packed = getattr(own, "qkv_proj", None)
    if packed is None or packed.weight.shape != (48, 16) or own.mixes_input:
        with pytest.raises(UnsupportedError, match="other projections than torch's"):
            make(causal=causal)
        return
    module = make(causal=causal)
    weights = own.state_dict()
    weights["qkv_proj.weight"], weights["qkv_proj.bias"] = module.in_proj_weight, module.in_proj_bias
    weights |= {f"out_proj.{key}": x for key, x in module.out_proj.state_dict().items()}
    weights |= module.mechanism.state_dict()
    own.load_state_dict(weights)
    x = normal(2, 9, 16)
    padding = torch.arange(9) >= torch.tensor([[9], [5]]) if module.mechanism.supports.padding else None
    found, _ = module(x, x, x, padding, need_weights=False)
    expected = own(x, key_padding_mask=padding)
    kept = slice(None) if padding is None else ~padding
    assert_agree(found[kept], expected[kept], tolerance=1e-12)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MultiheadAttention(16, 4, dropout=0.1), UnsupportedError, "dropout is 0.1"),
        (lambda: MultiheadAttention(16, 4, attention="linear", n_kv_heads=2), UnsupportedError, "other projections than torch's"),
        (lambda: MultiheadAttention(16, 4, attention="linear", causal=True, add_bias_kv=True), UnsupportedError, "add_bias_kv=False"),
        (lambda: MultiheadAttention(16, 4, attention="longformer", kdim=8), UnsupportedError, "reads its input"),
        (lambda: linear(attn_mask=torch.zeros(5, 5).bool()), UnsupportedError, "linear attention does not support attn_mask"),
        (lambda: linear(attn_mask=torch.zeros(5, 5).bool(), is_causal=True), UnsupportedError, "construct it with causal=True"),
        (lambda: linear(is_causal=True), ValueError, "without attn_mask"),
        (lambda: linear(attention="performer"), UnsupportedError, "use need_weights=False"),
        (lambda: linear(key_padding_mask=torch.ones(5, 2)), UnsupportedError, "numbers other than 0 and -inf"),
        (lambda: linear(key_padding_mask=torch.zeros(2, 5).long()), ValueError, "key_padding_mask is torch.int64, but must be bool"),
        (lambda: linear(attention="softmax", attn_mask=torch.zeros(5, 5, 5)), ValueError, r"attn_mask has shape \[5, 5, 5\], but must have \[8, 5, 5\] or \[5, 5\]"),
        (lambda: linear(value=torch.zeros(4, 2, 16)), ValueError, "value has length 4, but must have key's, 5"),
        (lambda: linear(value=torch.zeros(5, 2, 15)), ValueError, "value has batch size 2 and width 15"),
        (lambda: linear(value=torch.zeros(5, 16)), ValueError, "an input has 2 axes"),
        (lambda: linear(attention="longformer", key=torch.zeros(5, 2, 16)), UnsupportedError, "longformer attention does not support a key"),
    ],
)  # fmt: skip
def test_wrong_calls_are_refused_in_one_sentence(call, error, message):
    with pytest.raises(error, match=message):
        call()


def linear(*, attention="linear", key=None, value=None, **further):
    x = torch.zeros(5, 2, 16)
    key = x if key is None else key
    return MultiheadAttention(16, 4, attention=attention)(x, key, key if value is None else value, **further)


@pytest.mark.parametrize(
    ("part", "name", "value"), [("norm1", "eps", 0.1), ("norm2", "eps", 0.1), ("self_attn", "num_heads", 2)]
)
def test_layers_that_differ_in_a_number_are_refused(part, name, value):
    theirs = encoder()
    setattr(getattr(theirs.layers[1], part), name, value)
    with pytest.raises(UnsupportedError, match="layers that differ"):
        from_transformer_encoder(theirs)


@torch.no_grad()
def test_the_last_norm_keeps_its_epsilon():
    theirs, x = encoder(norm={"eps": 0.5}), normal(2, 7, 16)
    assert_agree(from_transformer_encoder(theirs)(x), theirs(x), tolerance=1e-12)
