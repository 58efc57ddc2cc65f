"""Train a BERT of transformers on the alphabet, import its weights, and compare the outputs.

    pip install '.[hf]'
    python examples/import_bert.py

Nothing is downloaded: the script creates the model and trains it for some seconds to fill gaps in sequences
of consecutive letters. transformers saves the model in a folder, and `import_weights` reads this folder.
`import_weights` also accepts the name of a model on the hub.
"""

import tempfile

import torch
import transformers

from unrolled.interop.hf import import_weights
from unrolled.models import mask_tokens

LETTERS = "abcdefghijklmnopqrstuvwxyz"
GAP, PADDING = len(LETTERS), len(LETTERS) + 1
LENGTH, STEPS = 12, 300

torch.manual_seed(0)
theirs = transformers.BertForMaskedLM(
    transformers.BertConfig(
        vocab_size=len(LETTERS) + 2,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        pad_token_id=PADDING,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
)
optimizer = torch.optim.AdamW(theirs.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
for _ in range(STEPS):
    begin = torch.randint(len(LETTERS), (32, 1))
    rows = (begin + torch.arange(LENGTH)) % len(LETTERS)
    inputs, targets = mask_tokens(rows, mask_id=GAP, vocab_size=len(LETTERS), probability=0.3)
    loss = theirs(inputs, labels=targets).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
print(f"trained for {STEPS} steps: loss {loss.item():.3f}\n")

with tempfile.TemporaryDirectory() as folder:
    theirs.save_pretrained(folder)
    ours = import_weights(folder).eval()

texts = ["pqr_tuvw_yza", "xy__bcd"]  # the second one is padded
ids = [[GAP if letter == "_" else LETTERS.index(letter) for letter in text] for text in texts]
tokens = torch.tensor([row + [PADDING] * (LENGTH - len(row)) for row in ids])
padding = tokens == PADDING
with torch.no_grad():
    found = ours(tokens, key_padding_mask=padding)
    wanted = theirs.eval()(tokens, attention_mask=(~padding).long()).logits
for text, row in zip(texts, found.argmax(-1), strict=True):
    filled = [LETTERS[i] if gap == "_" else gap for gap, i in zip(text, row.tolist(), strict=False)]
    print(f"{text:12}  ->  {''.join(filled)}")
print(f"\nlargest difference of a logit: {(found - wanted)[~padding].abs().max():.1e}")
