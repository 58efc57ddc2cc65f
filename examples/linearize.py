"""Replace the attention of a trained Llama, and print the loss before and after two short trainings.

    pip install '.[hf]'
    python examples/linearize.py

The model is small. The script trains it on walks over a circle of 16 symbols, so nothing is downloaded.
"""

import copy
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from unrolled.data import Batch
from unrolled.interop import hf
from unrolled.interop.hf.transfer import LanguageModel, finetune, transfer
from unrolled.training import TrainConfig, train
from unrolled.training.evaluation import evaluate


class Walks:
    """Walks whose step lengths repeat: to predict a step, a model has to look back to an earlier one."""

    def batch(self, split, *, step, batch_size, seed):
        """Return the walks of one step."""
        generator = torch.Generator().manual_seed(1000 * seed + step + 500_000 * (split == "val"))
        strides = torch.randint(1, 5, (batch_size, 4), generator=generator).repeat(1, 12)
        places = strides.cumsum(1) % 16
        return Batch(places[:, :-1], places[:, 1:])

    def eval_batches(self, batch_size):
        """Yield walks to validate on."""
        return (self.batch("val", step=step, batch_size=batch_size, seed=0) for step in range(4))


torch.manual_seed(0)
torch.set_num_threads(1)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes, bos_token_id=None, eos_token_id=None))
settings = {"batch_size": 16, "warmup_steps": 10, "eval_every": 1000, "weight_decay": 0.0}
walks = Walks()

with tempfile.TemporaryDirectory() as runs:
    config = TrainConfig(steps=250, lr=5e-3, **settings)
    train(LanguageModel(model), walks, config, f"{runs}/model", progress=False)

    def loss(of):
        """Validation loss in nats per token."""
        return evaluate(LanguageModel(of), walks, config)

    print(f"trained with softmax attention:   {loss(model):.3f} nats per token")

    student = hf.linearize(copy.deepcopy(model), "linear", feature_map="hedgehog")
    print(f"linear attention in its place:    {loss(student):.3f}")

    transfer(student, model, walks, TrainConfig(steps=100, lr=1e-2, **settings), f"{runs}/1", progress=False)
    print(f"after attention transfer:         {loss(student):.3f}")

    finetune(student, walks, TrainConfig(steps=100, lr=2e-3, **settings), f"{runs}/2", progress=False)
    print(f"after fine-tuning:                {loss(student):.3f}")

for name, each in {"softmax": model, "linear": student}.items():
    prompt = walks.batch("val", step=9, batch_size=1, seed=0).inputs[:, :12]
    written = each.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=100, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    cache = hf.StateCache(written.cache.layers)
    print(f"{name}: {cache.nbytes():,} bytes of cache after {written.sequences.shape[1]} tokens")
