"""Agreement of imported encoders with fast-transformers, in parallel and step by step.

Opt-in: `make test-oracles` installs it. Both are run in fp32, the only type that its causal product knows.
"""

import pytest
import torch
from agreement import assert_agree
from oracles.comparing import assert_all_agree
from torch import nn

from unrolled.contract import UnsupportedError
from unrolled.interop.fast_transformers import from_fast_transformers

LIBRARY = "pytorch-fast-transformers 0.4.0"
PADDING = torch.arange(30) >= torch.tensor([[30], [17]])


def encoder(attention, *, recurrent=False, **settings):
    """Theirs, with weights that count; the recurrent form has the same."""
    builders = pytest.importorskip("fast_transformers.builders")
    kind = builders.RecurrentEncoderBuilder if recurrent else builders.TransformerEncoderBuilder
    sizes = {
        "n_layers": 2,
        "n_heads": 4,
        "query_dimensions": 6,
        "value_dimensions": 4,
        "feed_forward_dimensions": 24,
    }
    builder = kind.from_kwargs(attention_type=attention, **sizes | settings)
    theirs = builder.get().eval()
    torch.manual_seed(0)
    for name, parameter in theirs.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name and name.endswith("weight")), std=0.4)
    return theirs


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("settings", [{}, {"activation": "gelu", "final_normalization": False}], ids=str)
@pytest.mark.parametrize(
    ("attention", "causal"), [("full", False), ("full", True), ("linear", False), ("causal-linear", True)]
)
def test_encoders(attention, causal, settings):
    masking = pytest.importorskip("fast_transformers.masking")
    theirs = encoder(attention, **settings)
    ours = from_fast_transformers(theirs, causal=causal)
    x = normal(2, 30, 16).requires_grad_()
    mask = masking.TriangularCausalMask(30) if causal else masking.FullMask(30)
    expected = theirs(x, attn_mask=mask, length_mask=masking.LengthMask((~PADDING).sum(1), max_len=30))[
        ~PADDING
    ]
    found = ours(x, key_padding_mask=PADDING)[~PADDING]
    what = f"encoder, {attention}, causal={causal}"
    assert_all_agree(found, expected, [x], what, library=LIBRARY)


@torch.no_grad()
def test_no_digit_of_double_precision_is_lost():
    theirs = encoder("full").double()
    for parameter in theirs.parameters():
        parameter.mul_(torch.rand_like(parameter) + 0.5)
    x = normal(2, 9, 16).double()
    assert_agree(from_fast_transformers(theirs, causal=False)(x), theirs(x), tolerance=1e-12)


@pytest.mark.parametrize(("attention", "parallel"), [("full", "full"), ("linear", "causal-linear")])
@torch.no_grad()
def test_their_recurrent_form_is_our_step(attention, parallel):
    theirs = encoder(attention, recurrent=True)
    ours = from_fast_transformers(encoder(parallel), causal=True)
    again = from_fast_transformers(theirs, causal=True)
    x, memory, state = normal(2, 30, 16), None, ours.init_state(2)
    for t in range(30):
        expected, memory = theirs(x[:, t], state=memory)
        found, state = ours.step(x[:, t], state)
        assert_agree(
            found, expected, f"encoder, {attention}, step by step", library=LIBRARY if t == 29 else None
        )
    assert torch.equal(again(x), ours(x))


def other_features():
    maps = pytest.importorskip("fast_transformers.feature_maps")
    squares = maps.ActivationFunctionFeatureMap.factory(torch.square)
    return encoder("linear", feature_map=squares)


def random_features():
    maps = pytest.importorskip("fast_transformers.feature_maps")
    return encoder("linear", feature_map=maps.Favor.factory(n_dims=8))


def other_dropout():
    theirs = encoder("full")
    theirs.layers[1].dropout.p = 0.5
    return theirs


@pytest.mark.parametrize(
    ("make", "causal", "error", "message"),
    [
        (lambda: nn.Linear(2, 2), True, ValueError, "encoder is a Linear, but must be an encoder of fast_transformers"),
        (lambda: encoder("linear"), True, ValueError, "causal is True, but must be False: encoder has LinearAttention"),
        (lambda: encoder("causal-linear"), False, ValueError, "causal is False, but must be True: encoder has CausalLinearAttention"),
        (lambda: encoder("local", local_context=4), True, UnsupportedError, "encoder has LocalAttention attention, but must have one of"),
        (lambda: encoder("full", softmax_temp=0.3), True, UnsupportedError, "softmax_temp 0.3"),
        (other_features, False, UnsupportedError, r"features other than elu\(x\) \+ 1"),
        (other_dropout, False, UnsupportedError, r"dropouts of \[0.1, 0.5\]"),
        (random_features, False, UnsupportedError, r"features other than elu\(x\) \+ 1"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_refused(make, causal, error, message):
    with pytest.raises(error, match=message):
        from_fast_transformers(make(), causal=causal)
