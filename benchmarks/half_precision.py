"""Print the error of causal linear attention (elu + 1) in half precision over 65,536 tokens, against fp64.

    python benchmarks/half_precision.py

The inputs are rounded to the type first, so that the error is that of the computation alone. "rounding alone"
is the error of the exact result after one rounding to the type. No computation can have a smaller error.
"""

import torch

from unrolled import linear_attention
from unrolled.ops.feature_maps import Elu

T, D = 65_536, 64
generator = torch.Generator().manual_seed(0)
phi = Elu(D)
print(f"{T} tokens, head width {D}: root mean square error relative to that of the output, o [last 1,000]")
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    q, k, v = (torch.randn(1, T, 1, D, generator=generator).to(dtype) for _ in range(3))
    q, k = phi.phi_q(q), phi.phi_k(k)
    found = linear_attention(q, k, v, causal=True)
    exact = linear_attention(q.double(), k.double(), v.double(), causal=True)
    error = (found.double() - exact).square().mean(-1).sqrt().squeeze()
    rounding = (exact.to(dtype).double() - exact).square().mean(-1).sqrt().squeeze()
    size = exact.square().mean(-1).sqrt().squeeze()
    finite = bool(found.isfinite().all())
    overall, end = (error.mean() / size.mean()).item(), (error[-1000:].mean() / size[-1000:].mean()).item()
    ideal = (rounding.mean() / size.mean()).item()
    name = str(dtype).removeprefix("torch.")
    print(f"{name:<9} finite: {finite}  error {overall:.2e} [{end:.2e}]  rounding alone {ideal:.2e}")
