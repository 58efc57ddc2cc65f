"""Learn to repeat a key that was given 100,000 tokens before, with full and with truncated gradients.

    python benchmarks/long_memory.py                   # about an hour
    python benchmarks/long_memory.py --length 20000    # quicker

A sequence begins with a key of four digits, and ends with a question for this key. In between, two filler
tokens repeat (`data.name=passkey data.depth=0`). Two models are trained. Both have one layer of the delta
rule with a short convolution, and read the same sequences in segments of 4,096 tokens. The first model gets
the gradient of the whole sequence. The second model gets the gradient of each segment alone, with the state
carried from segment to segment (truncated backpropagation). Guessing has a loss of log 8 = 2.08 nats per
digit.
"""

import argparse

import torch

from unrolled import data
from unrolled.bench.report import table
from unrolled.contract import Batch
from unrolled.models import Decoder, DecoderConfig
from unrolled.ops.state import detach
from unrolled.training import TrainConfig, evaluate
from unrolled.training.gradients import add_gradient

SEGMENT = 4_096
ROWS = 8


def main() -> None:
    """Train both models, and print their losses on sequences outside the training data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    options = {"n_filler": 2, "n_symbols": 8, "key_length": 4, "depth": 0.0, "val_size": 64}
    task = data.load("passkey", length=chosen.length, **options)
    config = TrainConfig(segment=SEGMENT, batch_size=ROWS)
    losses: dict[str, list[float]] = {}
    for name, gradient in {"whole sequence": whole, "truncated": truncated}.items():
        torch.manual_seed(0)
        one_layer = {"d_model": 32, "n_layers": 1, "n_heads": 2, "positions": "none"}
        options = {"delta_net": {"conv": 4}}
        model = Decoder(
            DecoderConfig(task.vocab_size, attention="delta_net", attention_options=options, **one_layer)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 20, total_iters=20)
        losses[name] = []
        for step in range(chosen.steps):
            optimizer.zero_grad()
            gradient(model, task.batch("train", step=step, batch_size=ROWS, seed=0), config)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warmup.step()
            if (step + 1) % chosen.every == 0:
                losses[name].append(evaluate(model, task, config))
                print(f"{name}, step {step + 1}: {losses[name][-1]:.3f}", flush=True)
    steps = range(chosen.every, chosen.steps + 1, chosen.every)
    lines = [[str(n), *(f"{x[i]:.3f}" for x in losses.values())] for i, n in enumerate(steps)]
    print(table(["steps", *losses], lines))


def whole(model: Decoder, batch: Batch, config: TrainConfig) -> None:
    """Add the gradient of the whole sequences."""
    add_gradient(model, batch, 1.0, config, torch.device("cpu"))


def truncated(model: Decoder, batch: Batch, config: TrainConfig) -> None:
    """Add the gradients of the segments; no segment has both a digit of the key and the question for it."""
    state = model.init_state(len(batch.inputs))
    for start in range(0, batch.inputs.shape[1], SEGMENT):
        part = slice(start, start + SEGMENT)
        loss, state = model.loss_from(batch.inputs[:, part], batch.targets[:, part], detach(state))
        loss.backward()  # all targets are in the last segment


if __name__ == "__main__":
    main()
