"""Grid and cube attention: the definition over a dense mask, what it equals, and how a video is laid out."""

import itertools
import re

import pytest
import torch
from contract_parts import in_two_parts
from counted import draw
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled.attention.spatiotemporal import SpatiotemporalAttention, spatiotemporal_attention
from unrolled.attention.spatiotemporal.grid import Part, grouped, read_by_groups, ungrouped
from unrolled.ops.softmax import softmax_attention
from unrolled.testing import Maker


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def gradients(loss, inputs):
    return torch.autograd.grad(loss, inputs, materialize_grads=True)  # of a single key, nothing depends on q


def coordinates(size):
    return list(itertools.product(*map(range, size)))


def is_read(i, j, radius, stride):
    apart = [abs(a - b) for a, b in zip(i, j, strict=True)]
    if radius is None:
        return sum(d > 0 for d in apart) <= 1
    in_cube = all(d <= r for d, r in zip(apart, radius, strict=True))
    return in_cube or (stride is not None and all(d % s == 0 for d, s in zip(apart, stride, strict=True)))


def definition(q, k, v, size, *, radius=None, stride=None, scale=None, relative=None):
    """Softmax over the pairs that the definition names, one query at a time; H = G."""
    places, rows = coordinates(size), []
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for i in range(q.shape[1]):
        read = [j for j in range(q.shape[1]) if is_read(places[i], places[j], radius, stride)]
        keys = k[:, read].transpose(1, 2)
        if relative is not None:
            apart = [[b - a for a, b in zip(places[i], places[j], strict=True)] for j in read]
            keys = keys + torch.stack([sum(r[d + len(r) // 2] for r, d in zip(relative, ds, strict=True)) for ds in apart])  # fmt: skip
        weights = (scale * q[:, i].unsqueeze(2) @ keys.mT).softmax(-1)
        rows.append((weights @ v[:, read].transpose(1, 2)).squeeze(2))
    return torch.stack(rows, 1)


axis = st.integers(1, 5)
reach = st.none() | st.tuples(*[st.integers(0, 5)] * 3)
apart = st.none() | st.tuples(*[st.integers(1, 4)] * 3)


@settings(max_examples=60)
@given(
    st.tuples(axis, axis, axis), st.floats(0, 1), reach, apart, st.booleans(), st.sampled_from([None, 1.0])
)
def test_it_is_a_softmax_over_the_places_that_the_definition_names(
    size, end, radius, stride, relative, scale
):
    frame = size[1] * size[2]
    length = (size[0] - 1) * frame + 1 + int(end * (frame - 1))  # the last frame may end early
    q, k, v = draw(2, length, 2, 4), draw(2, length, 2, 4, seed=1), draw(2, length, 2, 3, seed=2)
    tables = [draw(2 * n + 1, 4, seed=3 + n) for n in size] if relative else None  # one more than needed
    options = {"radius": radius, "stride": stride if radius else None, "scale": scale, "relative": tables}
    o = spatiotemporal_attention(q, k, v, *size[1:], **options)
    expected = definition(q, k, v, size, **options)
    assert_same(o, expected)
    inputs, weights = [q, k, v, *(tables or [])], draw(*o.shape, seed=9).detach()
    for found, right in zip(*(gradients((y * weights).sum(), inputs) for y in (o, expected)), strict=True):
        assert_same(found, right)


@pytest.mark.parametrize("options", [{}, {"radius": 1}, {"radius": [0, 1, 2], "stride": [1, 2, 3]}], ids=str)
def test_the_pattern_is_what_is_read(options):
    module = SpatiotemporalAttention(8, 2, shape=(3, 3, 4), **options).double()
    x = draw(1, 34, 8)
    pattern = module.pattern(34)
    assert pattern.shape == (2, 34, 34)
    assert pattern.dtype == torch.int64
    for i in (0, 17, 33):
        (read,) = torch.autograd.grad(module(x)[0, i].sum(), x)
        assert torch.equal(read[0].abs().sum(-1) > 0, pattern[0, i] > 0)


def test_embeddings_of_one_axis_for_each_pair_are_the_same_if_those_of_no_difference_are():
    size = (2, 3, 4)
    q, k, v = (draw(1, 24, 1, 4, seed=seed) for seed in range(3))
    tables = [draw(2 * n - 1, 4, seed=n).detach() for n in size]
    for table in tables[:2]:
        table[len(table) // 2] = tables[2][3]
    bias = torch.zeros(24, 24, dtype=torch.float64)
    for (i, a), (j, b) in itertools.product(enumerate(coordinates(size)), repeat=2):
        axis = next((x for x in range(3) if a[x] != b[x]), 2)  # a place itself is in its row
        bias[i, j] = q[0, i, 0] @ tables[axis][b[axis] - a[axis] + len(tables[axis]) // 2]
    allowed = SpatiotemporalAttention(4, 1, shape=size).pattern(24)[0] > 0
    expected = softmax_attention(q, k, v, attn_mask=bias.masked_fill(~allowed, -torch.inf), scale=1)
    assert_same(spatiotemporal_attention(q, k, v, 3, 4, scale=1, relative=tables), expected)


@in_two_parts
def test_it_keeps_the_contract_with_every_option(check_part):
    options = {"radius": (2, 1, 1), "stride": (5, 2, 1), "relative": True, "scale": 1.0}
    make = Maker(SpatiotemporalAttention, {"shape": (100, 3, 2), **options})
    assert make.supports.padding
    check_part(make)


@pytest.mark.parametrize("options", [{}, {"radius": 1}, {"radius": 1, "stride": 4}], ids=str)
def test_rows_that_a_short_video_lacks_cost_nothing(options):
    tall, low = (SpatiotemporalAttention(4, 2, shape=(1, h, 8), **options).double() for h in (2**40, 3))
    low.load_state_dict(tall.state_dict())
    x = draw(2, 19, 4)
    assert_same(tall(x), low(x))


@pytest.mark.parametrize(
    "options", [{}, {"radius": 1}, {"radius": (0, 2, 2)}, {"radius": 1, "stride": 4}], ids=str
)
def test_the_memory_follows_the_pairs(options):
    module = SpatiotemporalAttention(4, 2, shape=(1, 8, 8), **options).double()

    def per_pair(time: int) -> float:
        sizes = {}

        def note(x):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            y = module(draw(1, time * 64, 4))
        assert y.requires_grad
        return sum(sizes.values()) / int(module.pattern(time * 64).sum())

    assert per_pair(16) < 1.2 * per_pair(8)
    assert per_pair(16) < 100  # bytes, of which the scores of two heads are 16


def test_groups_are_what_they_are_called():
    x = torch.arange(24.0).reshape(1, 1, 2, 3, 4, 1)
    columns = Part((1, 3, 1))
    assert grouped(x, columns)[0, 0, 1].flatten().tolist() == [1, 5, 9]
    classes = Part((1, 2, 2), step=(2, 2, 2))  # one row more than there are
    assert grouped(x, classes)[0, 0, 1].flatten().tolist() == [1, 3, 9, 11]
    tiles = Part((2, 2, 2), halo=(0, 1, 1))
    assert read_by_groups(x, tiles).shape == (1, 1, 4, 2 * 4 * 4, 1)
    assert read_by_groups(x, tiles)[0, 0, 0, :16].flatten().tolist() == [0, 0, 0, 0, 0, 0, 1, 2, 0, 4, 5, 6, 0, 8, 9, 10]  # fmt: skip
    for part in (columns, classes, tiles):
        assert torch.equal(ungrouped(grouped(x, part), part, (2, 3, 4)), x)


def attend(n_keys=4, **options):
    k = torch.zeros(1, n_keys, 1, 2)
    return spatiotemporal_attention(torch.zeros(1, 4, 1, 2), k, k, 2, 2, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": None}, "shape is None, but must be three numbers"),
        ({"shape": 2.5}, "shape is 2.5, but must be three numbers"),
        ({"shape": "444"}, "shape is ['4', '4', '4'], but must be integers of at least 1"),
        ({"shape": (8, 8)}, "shape is (8, 8), but must be three numbers"),
        ({"shape": (4, 0, 4)}, "shape is [4, 0, 4], but must be integers of at least 1"),
        ({"radius": 1.5}, "radius is 1.5, but must be three numbers"),
        ({"radius": -1}, "radius is [-1, -1, -1]"),
        ({"radius": 1, "stride": (1, 2.0, 1)}, "stride is [1, 2.0, 1], but must be integers of at least 1"),
        ({"scale": float("inf")}, "scale is inf, but must be a finite number"),
        ({"stride": 2}, "radius is None, but must be given with stride = 2"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SpatiotemporalAttention(8, 2, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [

        (lambda: SpatiotemporalAttention(8, 2, shape=(2, 2, 2), relative=True)(torch.zeros(1, 9, 8)), "has time 3, but must have at most 2"),
        (lambda: attend(n_keys=3), "k has length 3, but must have 4 like q"),
        (lambda: attend(stride=(2, 2, 2)), r"radius is None, but must be given with stride = \(2, 2, 2\)"),
        (lambda: attend(relative=[torch.zeros(4, 2)] * 3), r"relative has \[4, 2\] for time"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
