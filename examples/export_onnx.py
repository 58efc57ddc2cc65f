"""Export a model as an ONNX graph, and generate the same tokens with ONNX Runtime as with PyTorch.

    pip install '.[onnx]'
    python examples/export_onnx.py

The model is not trained, because the example shows only the export.
"""

import tempfile
from pathlib import Path

import torch

from unrolled.generation import generate
from unrolled.interop import onnx
from unrolled.models import Decoder, DecoderConfig
from unrolled.ops import state as states

torch.manual_seed(0)
config = DecoderConfig(vocab_size=256, d_model=64, n_layers=1, n_heads=4, positions="sinusoidal")
model = Decoder(config).eval()

with tempfile.TemporaryDirectory() as folder:
    manifest = onnx.export(model, folder)
    size = Path(folder, "plain.onnx").stat().st_size
    print(f"a graph of {size:,} bytes: {', '.join(manifest.inputs)} -> {', '.join(manifest.outputs)}")

    found = onnx.load(folder)
    prompt = [list(b"attention ")]
    drawn = generate(found, prompt, 50, temperature=0)[0]
    assert torch.equal(drawn, generate(model, prompt, 50, temperature=0)[0])
    print("greedy tokens, equal to PyTorch's:", drawn[:10].tolist(), "...")

    _, short = found.prefill(torch.randint(256, (1, 10)), found.init_state(1))
    _, long = found.prefill(torch.randint(256, (1, 1000)), found.init_state(1))
    assert states.nbytes(short) == states.nbytes(long)
    print(f"the state after 10 tokens and after 1,000: {states.nbytes(long):,} bytes")
