"""Kernel smoothing with the kernels of scikit-learn. Opt-in: `make test-oracles`."""

import pytest
import torch
from agreement import assert_agree

from unrolled.attention.similarity import SIMILARITIES, similarity_attention


@pytest.mark.parametrize(
    ("name", "theirs", "options"),
    [
        ("rbf", "rbf_kernel", {"gamma": 8**-0.5}),
        ("polynomial", "polynomial_kernel", {"degree": 2, "gamma": 1.0, "coef0": 1.0}),
        ("linear", "linear_kernel", {}),
    ],
)
def test_scikit_learn_kernels(name, theirs, options):
    sklearn = pytest.importorskip("sklearn")
    kernel = getattr(pytest.importorskip("sklearn.metrics.pairwise"), theirs)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 8, dtype=torch.float64, generator=generator) for n in (20, 30, 30))
    weights = torch.from_numpy(kernel(q[0, :, 0].numpy(), k[0, :, 0].numpy(), **options))
    expected = weights @ v[0, :, 0] / weights.sum(-1, keepdim=True)
    ours = similarity_attention(q, k, v, SIMILARITIES[name]())[0, :, 0]
    library = f"scikit-learn {sklearn.__version__}"
    assert_agree(ours, expected, f"similarity attention, {name}", tolerance=1e-10, library=library)
