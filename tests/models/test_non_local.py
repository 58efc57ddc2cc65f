"""The non-local block: its formula place by place, softmax attention in it, and nothing at first."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from models.kit import assert_same
from unrolled.models import NonLocalBlock

PAIRWISE = ("gaussian", "embedded", "dot", "concatenation")
SPACES = ((5,), (3, 4), (2, 3, 2))


def normal(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def block(**options) -> NonLocalBlock:
    torch.manual_seed(0)
    module = NonLocalBlock(6, **options).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def formula(module: NonLocalBlock, x: torch.Tensor) -> torch.Tensor:
    """z_i of one map [C, N], place by place."""
    z = []
    for i in range(x.shape[1]):
        weights = []
        for j in range(x.shape[1]):
            if module.pairwise == "gaussian":
                weights.append(torch.exp(x[:, i] @ x[:, j]))
                continue
            theta, phi = module.theta(x[:, i]), module.phi(x[:, j])
            if module.pairwise == "concatenation":
                w = torch.cat([module.w_theta.weight[0], module.w_phi.weight[0]])
                weights.append((w @ torch.cat([theta, phi])).relu())
            else:
                weights.append((theta @ phi).exp() if module.pairwise == "embedded" else theta @ phi)
        f = torch.stack(weights)
        f = f / (f.sum() if module.pairwise in ("gaussian", "embedded") else len(f))
        y = sum(f[j] * module.g(x[:, j]) for j in range(x.shape[1]))
        z.append(x[:, i] + module.w_z(y))
    return torch.stack(z, 1)


@pytest.mark.parametrize("pairwise", PAIRWISE)
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_it_is_its_formula(pairwise, space):
    module, x = block(pairwise=pairwise), normal(2, 6, *space)
    expected = torch.stack([formula(module, m) for m in x.flatten(2)]).reshape(x.shape)
    found = module(x)
    assert_same(found, expected)
    weights = normal(*x.shape).detach()
    inputs = [x, *module.parameters()]
    gradients = (torch.autograd.grad((y * weights).sum(), inputs) for y in (found, expected))
    for a, b in zip(*gradients, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("pool", [1, 2])
def test_the_embedded_gaussian_is_softmax_attention_between_convolutions(pool):
    module, x = block(pool=pool), normal(2, 6, 4, 5, 6)

    def convolved(layer, x):
        return F.conv3d(x, layer.weight[..., None, None, None], layer.bias)

    def pooled(x):
        return F.max_pool3d(x, (1, pool, pool)).flatten(2).mT

    theta = convolved(module.theta, x).flatten(2).mT
    phi, g = pooled(convolved(module.phi, x)), pooled(convolved(module.g, x))
    assert phi.shape[1] == 4 * (5 // pool) * (6 // pool)
    y = F.scaled_dot_product_attention(theta, phi, g, scale=1.0)
    assert_same(module(x), x + convolved(module.w_z, y.mT.reshape(2, 3, 4, 5, 6)))


@pytest.mark.parametrize("pairwise", PAIRWISE)
def test_it_begins_as_the_identity_and_can_leave_it(pairwise):
    module, x = NonLocalBlock(6, pairwise=pairwise), normal(2, 6, 3, 4).float()
    y = module(x)
    assert torch.equal(y, x)
    (gradient,) = torch.autograd.grad(y.square().sum(), module.w_z.weight)
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("pairwise", PAIRWISE)
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_pooling_reads_the_largest_of_each_square(pairwise, space):
    module, x = block(pairwise=pairwise, pool=2), normal(1, 6, *space)
    assert module(x).shape == x.shape
    same = F.interpolate(normal(1, 6, 2, 3), scale_factor=2)  # squares of one value: a quarter of the keys do
    if pairwise != "concatenation" and len(space) == 2:
        assert_same(module(same), block(pairwise=pairwise)(same))


def largest(x: torch.Tensor, first: int) -> torch.Tensor:
    """The largest of each span of two along every axis from `first` on, `[B, C, *space]` to `[B, K, C]`."""
    for axis in range(first, x.dim()):
        x = x.unfold(axis, 2, 2).amax(-1)
    return x.flatten(2).mT


@pytest.mark.parametrize("pairwise", PAIRWISE)
@pytest.mark.parametrize("space", [(6,), (4, 5), (1, 4, 5), (3, 4, 5)], ids=str)
def test_keys_and_values_are_the_largest_of_each_square(pairwise, space):
    module, x = block(pairwise=pairwise, pool=2), normal(2, 6, *space)

    def layer(made):
        return made(x.movedim(1, -1)).movedim(-1, 1)

    first = 3 if len(space) == 3 else 2  # the time of a video is not pooled
    q, k = (x, x) if pairwise == "gaussian" else (layer(module.theta), layer(module.phi))
    q, k, g = q.flatten(2).mT, largest(k, first), largest(layer(module.g), first)
    if pairwise == "concatenation":
        y = (module.w_theta(q) + module.w_phi(k).mT).relu() / k.shape[1] @ g
    else:
        f = q @ k.mT
        y = (f / k.shape[1] if pairwise == "dot" else f.softmax(-1)) @ g
    assert_same(module(x), x + module.w_z(y).mT.reshape(x.shape))


@pytest.mark.parametrize("pairwise", ["dot", "concatenation"])
def test_the_mean_over_many_places_does_not_overflow_half_precision(pairwise):
    module = NonLocalBlock(2, 1, pairwise=pairwise)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.0 if parameter.dim() == 2 else 16.0)
        if pairwise == "concatenation":
            module.w_theta.weight.fill_(0.5)
            module.w_phi.weight.fill_(0.5)
        module.w_z.weight.fill_(0.25)
    x = torch.zeros(1, 2, 20, 20)
    f = 16.0 * 16.0 if pairwise == "dot" else 16.0
    assert (400 * 16 * 16 if pairwise == "dot" else 400 * 16 * f) > torch.finfo(torch.float16).max
    expected = torch.full_like(x, f * 16 / 4 + 16)
    torch.testing.assert_close(module.half()(x.half()).float(), expected, rtol=1e-2, atol=0)


def test_one_channel_is_wide_enough():
    x = torch.randn(2, 1, 5)
    assert NonLocalBlock(1)(x).shape == x.shape


def test_half_precision_does_not_overflow_where_the_exponential_would():
    module = block(inner_channels=4).bfloat16()
    x = (30 * normal(1, 6, 4, 4)).detach().bfloat16()
    assert (module.theta(x.flatten(2).mT) @ module.phi(x.flatten(2).mT).mT).exp().isinf().any()
    assert module(x).isfinite().all()


@pytest.mark.compilers
def test_it_compiles():
    module, x = block(pool=2), normal(2, 6, 4, 4)
    assert_same(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        ({"pairwise": "cosine"}, [], "pairwise is 'cosine', but must be one of gaussian, embedded"),
        ({"pool": 0}, [], "pool is 0, but must be at least 1"),
        ({}, [2, 5, 3], r"x has shape \[2, 5, 3\], but must be \[B, 6, \*space\]"),
        ({}, [2, 6], "1 to 3 axes"),
        ({"pool": 2}, [2, 6, 3, 1], "must be at least pool = 2"),
    ],
)
def test_wrong_input_is_named(options, shape, message):
    with pytest.raises(ValueError, match=message):
        NonLocalBlock(6, **options)(torch.zeros(shape))


def test_another_dtype_is_named():
    with pytest.raises(ValueError, match=r"x is torch\.float64, but the weights are torch\.float32"):
        NonLocalBlock(6)(torch.zeros(2, 6, 3, dtype=torch.float64))
