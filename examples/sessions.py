"""Read a long text once, save the state of the model as a small file, and continue from it several times.

    python examples/sessions.py

The model is not trained, because the example shows only how states are saved, loaded and forked.
"""

import tempfile
from pathlib import Path

import torch

from unrolled.models import Decoder, DecoderConfig
from unrolled.ops import state as states

torch.manual_seed(0)
config = DecoderConfig(vocab_size=256, d_model=64, n_layers=2, n_heads=4, positions="sinusoidal")
model = Decoder(config).eval()
book = torch.randint(256, (1, 20_000))

with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "book.safetensors")
    logits, state = model.prefill(book, model.init_state(1))
    states.save(state, file)
    print(f"read {book.shape[1]:,} tokens into a session of {file.stat().st_size:,} bytes")

    # From here on, also in another process, the book is not needed.
    session = states.load(file, like=model.init_state(1))
    three = states.select(session, [0, 0, 0])  # one row per continuation
    tokens = torch.tensor([10, 20, 30])
    for _ in range(5):
        logits, three = model.step(tokens, three)
        tokens = logits.argmax(-1)
        print("three continuations:", tokens.tolist())

    print(f"the state of each is as small as before: {states.nbytes(states.select(three, [0])):,} bytes")
    assert states.nbytes(session) == states.nbytes(state)  # and the session that was forked is unchanged
