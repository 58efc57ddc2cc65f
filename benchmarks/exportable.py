"""Which mechanisms and cells can be written as ONNX graphs, and how many tokens a call then reads.

    python benchmarks/exportable.py

Tiny models with random weights; each graph is run and compared with its model before it counts.
"""

from tempfile import TemporaryDirectory

import torch

from unrolled import attention, recurrent
from unrolled.contract import UnsupportedError
from unrolled.interop.onnx import export
from unrolled.models import Decoder, DecoderConfig, RecurrentLM, RecurrentLMConfig

SIZES = {"vocab_size": 11, "d_model": 16, "n_layers": 1}
CELL_OPTIONS = {"low_rank_rnn": {"rank": 2}, "low_rank_lstm": {"rank": 2}}


def outcome(model) -> str:
    """Export a model; say how."""
    with TemporaryDirectory() as folder:
        try:
            length = export(model, folder).length
        except UnsupportedError as error:
            return f"refused: {error}"
    return "any length" if length == "any" else "one token a call"


print("| | tokens in a call |\n| --- | --- |")
for name in attention.names():
    supports = attention.load(name).supports
    if supports.causal and supports.recurrence != "none":
        torch.manual_seed(0)
        config = DecoderConfig(n_heads=2, attention=name, positions="sinusoidal", **SIZES)
        print(f"| {name} | {outcome(Decoder(config))} |", flush=True)
config = DecoderConfig(n_heads=2, inputs="pixels", head="logistic_mixture", start_token=True, **SIZES)
print(f"| linear, pixels and a mixture of logistics | {outcome(Decoder(config))} |", flush=True)
for name in recurrent.names():
    torch.manual_seed(0)
    config = RecurrentLMConfig(cell=name, cell_options=CELL_OPTIONS.get(name, {}), **SIZES)
    print(f"| cell {name} | {outcome(RecurrentLM(config))} |", flush=True)
