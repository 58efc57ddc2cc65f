"""Second derivatives and forward mode of the modules that hand their softmax to torch's fused kernels."""

import pytest
import torch

from unrolled import attention
from unrolled.models import NonLocalBlock, ViT, ViTConfig

VIT = ViTConfig(
    image_size=[4, 4], patch_size=[2, 2], channels=1, n_classes=2, d_model=4, n_heads=2, n_layers=1
)


def mechanism(name, **options):
    return attention.load(name)(4, 2, **options)


MODULES = {
    "softmax": (lambda: mechanism("softmax"), (2, 5, 4)),
    "softmax, causal": (lambda: mechanism("softmax", causal=True, n_kv_heads=1), (2, 5, 4)),
    "linformer": (lambda: mechanism("linformer", max_length=8, rank=3), (1, 5, 4)),
    "nystromformer": (lambda: mechanism("nystromformer", n_landmarks=2), (1, 5, 4)),
    "perceiver": (lambda: mechanism("perceiver", n_latents=2), (1, 5, 4)),
    "NonLocalBlock": (lambda: NonLocalBlock(4, pairwise="embedded"), (1, 4, 5)),
    "ViT": (lambda: ViT(VIT), (1, 1, 4, 4)),
}


REQUIRED = {"aft": {"max_length": 8}}
"""Options without which a causal mechanism cannot be made."""


@pytest.fixture(params=MODULES)
def case(request):
    make, size = MODULES[request.param]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = make().double().eval()
        for parameter in module.parameters():
            parameter.data.normal_(std=0.5)
        return module, torch.randn(size, dtype=torch.float64)


def test_second_derivatives_exist(case):
    module, x = case
    assert torch.autograd.gradgradcheck(module, x.requires_grad_())


# torch.func.jvp itself goes through what torch has deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_forward_mode_and_hessians_agree_with_differences(case):
    module, x = case
    tangent, step = torch.randn_like(x), 1e-5
    difference = (module(x + step * tangent) - module(x - step * tangent)) / (2 * step)
    found = torch.func.jvp(module, (x,), (tangent,))[1]
    torch.testing.assert_close(found, difference, rtol=1e-7, atol=1e-8)

    def loss(x):
        return module(x).square().sum()

    def gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(loss(x), x)[0]

    difference = (gradient(x + step * tangent) - gradient(x - step * tangent)) / (2 * step)
    hessian = torch.func.hessian(loss)(x).reshape(x.numel(), x.numel())
    torch.testing.assert_close(
        (hessian @ tangent.flatten()).reshape(x.shape), difference, rtol=1e-6, atol=1e-7
    )


CAUSAL = [name for name in attention.names() if attention.load(name).supports.causal]


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {"bias": False}) for name in CAUSAL), ("rwkv7", {"conv": 3})]
)
def test_second_derivatives_are_finite_beside_padding(name, options):
    """Padded tokens are exactly 0, where a norm has no second derivative."""
    torch.manual_seed(0)
    module = attention.load(name)(16, 4, causal=True, **REQUIRED.get(name, {}), **options)
    x = torch.randn(2, 6, 16, requires_grad=True)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, :2] = True
    loss = module(x, key_padding_mask=padding)[~padding].square().sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    second = torch.autograd.grad(first.square().sum(), list(module.parameters()), allow_unused=True)
    assert first.isfinite().all()
    assert all(gradient is None or gradient.isfinite().all() for gradient in second)
