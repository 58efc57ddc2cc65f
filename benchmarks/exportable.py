"""List the mechanisms and cells that can be exported as ONNX graphs, and how many tokens one call reads.

    python benchmarks/exportable.py

The models are tiny and have random weights. The export runs each graph and compares it with its model.
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
    """Export a model, and return how many tokens a call of the graph reads, or why the export was refused."""
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
