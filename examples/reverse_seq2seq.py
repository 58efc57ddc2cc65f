"""Train a small encoder-decoder to reverse words, and print the attention weights of one word.

    python examples/reverse_seq2seq.py

The model is that of Bahdanau et al. 2014. It writes each word from its last letter to its first. Nothing
in the model tells the decoder which letter to attend to. Training puts the large weights on the antidiagonal.
"""

import random

import torch
from torch.nn.utils.rnn import pad_sequence

from unrolled.contract import IGNORED
from unrolled.generation import translate
from unrolled.models import RNNSeq2Seq, RNNSeq2SeqConfig

LETTERS = "abcdef"
END = len(LETTERS)  # the id of the end symbol; the start symbol has the id END + 1
SHADES = " .:=#"  # one for each range of weights, from 0 to 1
draw = random.Random(0)
torch.manual_seed(0)


def ids(word: str) -> torch.Tensor:
    """Return the ids of a word, followed by the end symbol."""
    return torch.tensor([*map(LETTERS.index, word), END])


def words(count: int) -> list[str]:
    """Draw words of 3 to 5 letters."""
    return ["".join(draw.choices(LETTERS, k=draw.randint(3, 5))) for _ in range(count)]


model = RNNSeq2Seq(RNNSeq2SeqConfig(END + 1, d_model=24, hidden_size=48))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(201):
    batch = words(32)
    sources = pad_sequence([ids(word) for word in batch], batch_first=True, padding_value=IGNORED)
    targets = pad_sequence([ids(word[::-1]) for word in batch], batch_first=True, padding_value=IGNORED)
    loss = model.loss(sources.clamp(min=0), targets, key_padding_mask=sources == IGNORED)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: {loss:.3f} nats per letter")

model.eval()
new = words(100)
written = translate(model, [ids(word) for word in new], beam_size=1, stop=END)
right = sum(torch.equal(found, ids(word[::-1])) for word, found in zip(new, written, strict=True))
print(f"{right} of 100 new words reversed")

source, target = ids("decaf"), ids("faced")
read = torch.cat([torch.tensor([END + 1]), target[:-1]])  # what the decoder reads before each letter
weights = model.attend(source[None], read[None])[0]
print("  " + " ".join("decaf$"))
for letter, row in zip("faced$", weights.tolist(), strict=True):
    print(letter, " ".join(SHADES[round(weight * (len(SHADES) - 1))] for weight in row))
assert right >= 90
