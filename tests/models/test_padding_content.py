"""NaN, infinity and huge numbers at padding reach nothing in models and drop-ins that read vectors."""

import pytest
import torch
from torch import nn

from unrolled.interop.torch import MultiheadAttention, from_transformer_encoder
from unrolled.models.encoder import Encoder, EncoderConfig
from unrolled.models.perceiver import Perceiver, PerceiverConfig, PerceiverIO, PerceiverIOConfig
from unrolled.testing._kit import assert_identical, noisy, with_gradients
from unrolled.testing.padding import PADDING

SIZES = {"d_model": 16, "n_layers": 2, "n_heads": 4}
READS = {**SIZES, "input_dim": 16, "n_classes": 3}


def torchs(**options):
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, **options)
    return from_transformer_encoder(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def drop_in(**options):
    return MultiheadAttention(16, 4, batch_first=True, **options)


def forward(model, x):
    return model(x, key_padding_mask=PADDING)


def by_token(model, x):
    return forward(model, x)[~PADDING]


def to_itself(model, x):
    return model(x, x, x, PADDING, need_weights=False)[0][~PADDING]


def read_by_others(model, x):
    query = torch.linspace(-1, 1, 5 * 3 * 16, dtype=x.dtype).reshape(5, 3, 16)
    return model(query, x, x, PADDING)[0]


def a_float_mask(model, x):
    mask = torch.zeros(PADDING.shape, dtype=x.dtype).masked_fill(PADDING, -torch.inf)
    return model(x, x, x, mask, need_weights=False)[0][~PADDING]


CASES = {
    "encoder": (lambda: Encoder(EncoderConfig(**READS, norm="pre")), forward),
    "encoder, post-norm": (lambda: Encoder(EncoderConfig(**READS, norm="post", pooling="first")), forward),
    "encoder, reversible": (lambda: Encoder(EncoderConfig(**READS, reversible=True)), forward),
    "perceiver": (lambda: Perceiver(PerceiverConfig(**READS, n_latents=3, positions="sinusoidal")), forward),
    "perceiver_io": (lambda: PerceiverIO(PerceiverIOConfig(**READS, n_latents=3)), forward),
    "torch's encoder": (torchs, by_token),
    "torch's encoder, pre-norm": (lambda: torchs(norm_first=True), by_token),
    "torch's attention": (drop_in, to_itself),
    "torch's attention, linear": (lambda: drop_in(attention="linear"), to_itself),
    "torch's attention, a mask of numbers": (drop_in, a_float_mask),
    "torch's attention, a memory": (lambda: drop_in(add_bias_kv=True), read_by_others),
}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, torch.finfo(torch.float64).max])
@pytest.mark.parametrize(("make", "run"), CASES.values(), ids=CASES)
def test_what_stands_at_padding_reaches_nothing(make, run, value):
    model = noisy(make, torch.float64, seed=0)
    x = torch.linspace(-2, 2, 5 * 7 * 16, dtype=torch.float64).sin().reshape(5, 7, 16).requires_grad_()
    loud = x.detach().masked_fill(PADDING.unsqueeze(-1), value).requires_grad_()
    expected = with_gradients(model, run(model, x), x=x)
    assert not expected["gradient of x"][PADDING].any()
    assert_identical(with_gradients(model, run(model, loud), x=loud), expected, f"padding that holds {value}")
