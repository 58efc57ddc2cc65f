import re

import pytest
import torch

from models.kit import read
from unrolled.models import Decoder, DecoderConfig
from unrolled.models.config import TransformerConfig
from unrolled.models.embeddings import PositionEmbedding


def axial(shape, widths=None, d_model=10):
    fields = {"positions": "axial", "axial_shape": shape, "axial_widths": widths}
    return PositionEmbedding.of(TransformerConfig(d_model=d_model, n_heads=2, **fields))


@pytest.mark.parametrize(("shape", "widths"), [([3, 4], [6, 4]), ([2, 3, 2], [2, 5, 3]), ([5], [10])])
def test_a_position_is_a_point_of_the_grid(shape, widths):
    module = axial(shape, widths)
    points = torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape))
    expected = torch.stack(
        [torch.cat([t.weight[i] for t, i in zip(module.axes, p, strict=True)]) for p in points.tolist()]
    )
    n = len(points)
    assert torch.equal(module(torch.zeros(1, n, 10))[0], expected)
    assert torch.equal(module(torch.zeros(1, n - 1, 10))[0], expected[:-1])  # any length up to the product
    assert torch.equal(module.at(torch.zeros(10), torch.tensor(n - 1)), expected[-1])


def test_it_has_a_sum_of_sizes_where_a_table_has_their_product():
    module = axial([100, 200], [5, 5])
    assert sum(p.numel() for p in module.parameters()) == (100 + 200) * 5
    assert axial([4, 4, 4]).axes[0].weight.shape == (4, 4)  # widths 4, 3, 3 of 10 by default
    assert axial([4, 4, 4]).axes[2].weight.shape == (4, 3)


def test_a_decoder_steps_as_it_reads():
    config = DecoderConfig(
        vocab_size=7, d_model=16, n_heads=2, n_layers=2, positions="axial", axial_shape=[3, 5]
    )
    model = Decoder(config).double()
    tokens = torch.randint(7, (2, 15))
    expected = model(tokens)
    found, state = read(model, [tokens[:, :7], *tokens[:, 7:].unbind(1)])
    torch.testing.assert_close(found, expected)
    message = "the input has length 16, but must have at most the product of axial_shape = 15"
    for call in (
        lambda: model(torch.zeros(1, 16, dtype=torch.long)),
        lambda: model.step(tokens[:, 0], state),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"axial_shape": [4, 4]}, "axial_shape is [4, 4], but must be None with positions 'learned'"),
        ({"positions": "axial"}, "axial_shape is None, but must be a list of sizes, such as [32, 32]"),
        *(
            ({"positions": "axial", "axial_shape": [4, 4], "axial_widths": widths}, f"axial_widths is {widths}, but must be 2 widths, one for each axis, that add up to 256")
            for widths in ([128, 127], [256])
        ),
    ],
)  # fmt: skip
def test_a_shape_that_does_not_fit_is_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TransformerConfig(**fields)
