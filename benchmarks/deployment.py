"""Measure the time per token of a model in every runtime, and the loss of a trained model with 8-bit weights.

    python benchmarks/deployment.py                         # linear attention, 4 x 256 and 8 x 512
    python benchmarks/deployment.py --attention softmax --without compiled aot
    python benchmarks/deployment.py --int8-loss src/unrolled/demo_models/text

Conditions: one token at a time, batch 1, one thread, vocabulary 256, heads 64 wide, untrained weights. The
runtimes run in turn, 50 tokens each, so that other load on the machine affects all of them equally. Each row
has the median time and, in brackets, the 10th and the 90th percentile. All runtimes read the same tokens.
"agrees to" is the largest difference of the logits from those of eager PyTorch over the first 200 tokens.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unrolled.cli import run_config
from unrolled.contract import IGNORED
from unrolled.decode import load_model
from unrolled.interop import onnx
from unrolled.interop.aot import export_aot, load_aot
from unrolled.models import Decoder, DecoderConfig

SIZES = {"4x256": (4, 256), "8x512": (8, 512)}
RUNTIMES = ("eager", "compiled", "aot", "plain", "fused", "int8")
COMPARED = 200
TURN, WARM_UP = 50, 5  # tokens of a turn; the first ones refill the processor's caches and are not timed

Step = Callable[[torch.Tensor, Any], tuple[torch.Tensor, Any]]


def steps(model: Decoder, folder: Path, runtimes: list[str]) -> dict[str, tuple[Step, Any]]:
    """Return the step function and the first state of each runtime."""
    graphs = [name for name in ("fused", "int8") if name in runtimes]
    onnx.export(model, folder, **dict.fromkeys(graphs, True))
    found: dict[str, tuple[Step, Any]] = {}
    for name in runtimes:
        if name == "eager":
            found[name] = model.step, model.init_state(1)
        elif name == "compiled":
            found[name] = torch.compile(model.step, dynamic=True), model.init_state(1)
        elif name == "aot":
            export_aot(model, folder)
            package = load_aot(folder)
            found[name] = package.step, package.init_state(1)
        else:
            graph = onnx.load(folder, name)
            found[name] = graph.step, graph.init_state(1)
    return found


@torch.inference_mode()
def measure(runtimes: dict[str, tuple[Step, Any]], tokens: int) -> None:
    """Print a row for each runtime."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(256, (tokens, 1), generator=generator)
    states = {name: state for name, (_, state) in runtimes.items()}
    times: dict[str, list[float]] = {name: [] for name in runtimes}
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in runtimes}
    for turn in drawn.split(TURN):
        for name, (step, _) in runtimes.items():
            for i, token in enumerate(turn):
                began = time.perf_counter()
                y, states[name] = step(token, states[name])
                if i >= WARM_UP:
                    times[name].append(1000 * (time.perf_counter() - began))
                if len(logits[name]) < COMPARED:
                    logits[name].append(y)
    eager = torch.stack(logits["eager"])
    worst = {name: float((torch.stack(each) - eager).abs().max()) for name, each in logits.items()}
    for name, taken in times.items():
        taken = sorted(taken[COMPARED:])  # by the first of these, everything is compiled
        low, high = taken[len(taken) // 10], taken[-len(taken) // 10]
        median = statistics.median(taken)
        print(
            f"  {name:<9} {median:7.3f} ms  [{low:.3f}, {high:.3f}]  agrees to {worst[name]:.1e}", flush=True
        )


@torch.inference_mode()
def int8_loss(run_dir: Path) -> None:
    """Print the validation loss of a run's weights in PyTorch and in the int8 graph."""
    model = load_model(run_dir)
    dataset: Any = run_config.resolve(run_config.read_saved(run_dir)).dataset
    with tempfile.TemporaryDirectory() as folder:
        onnx.export(model, folder, int8=True)
        graphs = {name: onnx.load(folder, name) for name in ("plain", "int8")}
        sizes = {name: x.manifest.graphs[name]["bytes"] for name, x in graphs.items()}
    total, count, same = dict.fromkeys(("torch", *graphs), 0.0), 0, 0
    model.eval()
    for batch in dataset.eval_batches(64):
        wanted = batch.targets != IGNORED
        logits = {"torch": model(batch.inputs)}
        for name, graph in graphs.items():
            logits[name], _ = graph.prefill(batch.inputs, graph.init_state(len(batch.inputs)))
        for name, x in logits.items():
            nll = torch.nn.functional.cross_entropy(x[wanted], batch.targets[wanted], reduction="sum")
            total[name] += float(nll)
        count += int(wanted.sum())
        same += int((logits["int8"].argmax(-1) == logits["torch"].argmax(-1))[wanted].sum())
    for name, nats in total.items():
        size = f"{sizes[name]:,} bytes" if name in sizes else ""
        print(f"  {name:<6} {nats / count:.4f} nats per token over {count:,}  {size}")
    print(f"  the likeliest token is the same in {same / count:.2%}")


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--attention", default="linear")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--without", nargs="+", default=[], choices=RUNTIMES[1:])
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--int8-loss", type=Path, metavar="RUN_DIR")
    arguments = parser.parse_args()
    if arguments.tokens < TURN:
        parser.error(f"--tokens is {arguments.tokens}, but must be at least {TURN}, the tokens of a turn")
    torch.set_num_threads(1)
    if arguments.int8_loss is not None:
        int8_loss(arguments.int8_loss)
        return
    left_out = {*arguments.without, *(() if arguments.attention == "linear" else ("fused",))}
    for size in arguments.sizes:
        n_layers, d_model = SIZES[size]
        torch.manual_seed(0)
        config = DecoderConfig(
            256,
            d_model=d_model,
            n_layers=n_layers,
            n_heads=d_model // 64,
            attention=arguments.attention,
            positions="sinusoidal",
        )
        model = Decoder(config).eval()
        print(f"{arguments.attention} {size}", flush=True)
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            found = steps(model, Path(folder), [name for name in RUNTIMES if name not in left_out])
            measure(found, COMPARED + arguments.tokens)


if __name__ == "__main__":
    main()
