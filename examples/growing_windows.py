"""Train a model of Python source code whose attention windows grow from layer to layer.

    python examples/growing_windows.py

The windows of the four layers have 4, 8, 16 and 32 characters, so an output of the last layer depends on 57
characters at most. The state that the model carries from one character to the next never grows.
"""

import inspect
import math
from pathlib import Path

import torch

from unrolled import data, generation
from unrolled.models import Decoder, DecoderConfig
from unrolled.ops.state import nbytes

WINDOWS = [4, 8, 16, 32]
STEPS = 250

torch.manual_seed(0)
source = Path(inspect.getfile(inspect))  # 100 kB of Python source that every installation has
text = data.load("text", path=source, length=128)
model = Decoder(
    DecoderConfig(
        text.vocab_size,
        d_model=64,
        n_layers=4,
        n_heads=4,
        positions="rotary",
        attention="window",
        layer_options={"window": {"window": WINDOWS}},
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
for step in range(STEPS):
    batch = text.batch("train", step=step, batch_size=8, seed=0)
    loss = model.loss(batch.inputs, batch.targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 50 == 49:
        print(f"step {step + 1}   {loss.item() / math.log(2):.2f} bits per character")

prompt = text.encode("    def __init__(self")
with torch.inference_mode():
    for length in (100, 2000):
        _, state = model.prefill(torch.zeros(1, length, dtype=torch.long), model.init_state(1))
        print(f"after {length:,} characters the state takes {nbytes(state):,} bytes")
(drawn,) = generation.generate(model, [prompt], max_new_tokens=200, temperature=0.7, seed=0)
print(text.decode(prompt) + text.decode(drawn))

assert loss.item() < 2.2
