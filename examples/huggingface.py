"""Train a linear transformer with Trainer of transformers, generate text, and continue from a state.

    pip install '.[hf]'
    python examples/huggingface.py

The cache has the same size after 200 characters as after 20.
"""

import tempfile

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.utils import logging

from unrolled.interop import hf

logging.disable_progress_bar()
set_seed(0)
verse = "the wheels on the bus go round and round, round and round, round and round. "
characters = sorted(set(verse))
tokenizer = hf.character_tokenizer(characters)
song = tokenizer(verse * 3, return_tensors="pt")["input_ids"][0]
data = [{"input_ids": song[i : i + 64], "labels": song[i : i + 64]} for i in range(len(verse))]

config = hf.UnrolledConfig(
    vocab_size=len(characters), d_model=64, n_layers=2, n_heads=4, attention="linear", positions="sinusoidal"
)
model = hf.UnrolledForCausalLM(config)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=250,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        logging_steps=50,
        save_strategy="no",
    )
    Trainer(model, arguments, train_dataset=data).train()
    model.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)

prompt = tokenizer("the wheels on ", return_tensors="pt")
for length in (20, 200):
    out = model.generate(**prompt, max_new_tokens=length, do_sample=False, return_dict_in_generate=True)
    print(f"{length} characters, a cache of {out.cache.nbytes():,} bytes:")
    print(f"  {tokenizer.decode(out.sequences[0])}")

# A state is never changed in place: both continuations begin with the state of a prompt that is read once.
with torch.no_grad():
    state = model(**prompt, use_cache=True).cache.layers[0].state
for more in ("the bus", "round"):
    text = tokenizer("the wheels on " + more, return_tensors="pt")
    out = model.generate(**text, cache=state, max_new_tokens=20, do_sample=False)
    print("from the state:", tokenizer.decode(out[0]))
