"""Linearize a small Llama trained on tiny-shakespeare, and measure its loss, and its speed at long contexts.

    python benchmarks/linearize.py                  # all of it, about an hour of one core
    python benchmarks/linearize.py linear           # one recipe, and the softmax model that it begins with
    python benchmarks/linearize.py --table          # print the stored figures, compute nothing
    python benchmarks/linearize.py --scale 0.01     # a trial

The model, the runs and the figures are stored in runs/linearize, those of a trial in a folder in it. What is
stored is not computed again. An interrupted run continues where it stopped.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from unrolled import data
from unrolled.bench.report import table
from unrolled.bench.units import brief_time, size
from unrolled.interop.hf import load_linearized
from unrolled.interop.hf.cache import StateCache
from unrolled.interop.hf.recipe import Recipe, train_linearized
from unrolled.interop.hf.transfer import LanguageModel
from unrolled.training import TrainConfig, train

OUT = Path("runs/linearize")
CONTEXTS = (256, 4096, 32768)
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 65536,
    "bos_token_id": None,
    "eos_token_id": None,
}
SHARED = {"batch_size": 8, "checkpoint_every": 50, "warmup_steps": 30, "weight_decay": 0.0}
TEACHER = TrainConfig(
    steps=1200, batch_size=8, lr=2e-3, min_lr=2e-4, warmup_steps=100, eval_every=1200, checkpoint_every=50
)
TRANSFER = TrainConfig(steps=300, lr=1e-2, min_lr=1e-3, eval_every=300, **SHARED)
FINETUNE = TrainConfig(steps=800, lr=2e-3, min_lr=1e-4, eval_every=800, **SHARED)
HEDGEHOG = {"feature_map": "hedgehog"}
RECIPES = {
    "linear": Recipe("linear", HEDGEHOG, None, TRANSFER, FINETUNE),
    "softmax": Recipe("softmax", {}, None, None, FINETUNE),
    "linear-lora": Recipe("linear", HEDGEHOG, None, TRANSFER, replace(FINETUNE, lr=4e-3), lora=8),
    "hybrid": Recipe("linear", HEDGEHOG, [0, 1, 3], TRANSFER, FINETUNE),
    "window": Recipe("window", {"window": 64}, None, None, FINETUNE),
}
ABOUT = {
    "softmax": "softmax, fine-tuned as long (nothing was replaced)",
    "linear": "linear, Hedgehog features, everything fine-tuned",
    "linear-lora": "linear, Hedgehog features, fine-tuned by updates of rank 8",
    "hybrid": "linear, Hedgehog features, in layers 0, 1 and 3 of 4",
    "window": "window of 64 tokens, everything fine-tuned",
}


def main() -> None:
    """Compute what is missing, then print all figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", help="all of them by default")
    parser.add_argument("--table", action="store_true", help="compute nothing")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the numbers of updates")
    parser.add_argument("--out", type=Path, help="the folder of what is stored")
    chosen = parser.parse_args()
    if unknown := set(chosen.recipes) - RECIPES.keys():
        parser.error(f"there is no recipe {min(unknown)!r}; the recipes are {', '.join(RECIPES)}")
    chosen.out = chosen.out or (OUT if chosen.scale == 1 else OUT / f"scale-{chosen.scale:g}")
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if not chosen.table:
        teacher, dataset = trained(chosen.out, chosen.scale)
        for name in chosen.recipes or RECIPES:
            linearized(name, teacher, dataset, chosen.out, chosen.scale)
        costs(teacher, chosen.out)
    tell(chosen.out)


def trained(out: Path, scale: float) -> tuple[Any, Any]:
    """Train the softmax model that all recipes begin with, or read the stored one."""
    dataset: Any = data.load("text", length=256)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=dataset.vocab_size, **MODEL))
    folder = out / "model"
    if not stored(folder):
        config = scaled(TEACHER, scale)
        if train(LanguageModel(model), dataset, config, out / "training").steps < config.steps:
            raise KeyboardInterrupt
        model.save_pretrained(folder)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval(), dataset


def linearized(name: str, teacher: Any, dataset: Any, out: Path, scale: float) -> None:
    """Run one recipe, unless its result is stored."""
    folder, recipe = out / name, RECIPES[name]
    if stored(folder):
        return
    print(f"{ABOUT[name]}:", flush=True)
    stages = {x: getattr(recipe, x) and scaled(getattr(recipe, x), scale) for x in ("transfer", "finetune")}
    model, losses = train_linearized(teacher, dataset, replace(recipe, **stages), folder)
    model.save_pretrained(folder)
    print(losses, flush=True)


def stored(folder: Path) -> bool:
    """Whether a model was written to a folder, which has checkpoints before that."""
    return (folder / "model.safetensors").exists()


def scaled(config: TrainConfig, scale: float) -> TrainConfig:
    """Multiply the number of steps of a run by `scale`."""
    steps = max(1, round(config.steps * scale))
    return replace(config, steps=steps, warmup_steps=min(config.warmup_steps, steps // 10), eval_every=steps)


@torch.inference_mode()
def costs(teacher: Any, out: Path) -> None:
    """Measure the time per token and the size of the cache of each model, after each length of context.

    Nothing is measured if the stored figures have all models. The models read tokens in turn. The times are
    processor times of one thread, so other programs do not add to them.
    """
    file = out / "costs.json"
    names = [name for name in RECIPES if name != "softmax" and stored(out / name)]
    if file.exists() and {row["recipe"] for row in json.loads(file.read_text())} >= {"softmax", *names}:
        return
    models = {"softmax": teacher} | {name: load_linearized(out / name) for name in names}
    rows = []
    for context in CONTEXTS:
        prompt = torch.randint(65, (1, context), generator=torch.Generator().manual_seed(0))
        caches, read = {}, {}
        for name, model in models.items():
            began = time.process_time()
            found = model(prompt, use_cache=True, logits_to_keep=1)
            read[name], caches[name] = time.process_time() - began, found.cache
        times: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(64):
            for name, model in models.items():
                began = time.process_time()
                model(prompt[:, :1], cache=caches[name], use_cache=True)
                times[name].append(time.process_time() - began)
        for name in models:
            row = {"context": context, "recipe": name, "reading": read[name]}
            rows.append(row | {"token": statistics.median(times[name]), "cache": nbytes(caches[name])})
            print(rows[-1], flush=True)
    file.write_text(json.dumps(rows, indent=1))


def nbytes(cache: Any) -> int:
    """Return the number of bytes in a cache, of transformers or of this library."""
    assert isinstance(cache, DynamicCache | StateCache)
    return StateCache(cache.layers).nbytes()


def tell(out: Path) -> None:
    """Print the tables of the stored figures, and write them to `table.md`."""
    lines = []
    for name, about in ABOUT.items():
        file = out / name / "linearize.json"
        if file.exists():
            losses = json.loads(file.read_text())
            shown = [
                f"{losses[x]:.3f}" if x in losses else "-" for x in ("before", "right after", "transfer")
            ]
            end = losses.get("finetune")
            change = "-" if end is None else f"{end:.3f} ({end / losses['before'] - 1:+.1%})"
            lines.append([about, *shown, change])
    text = table(["attention", "before", "right after", "after transfer", "after fine-tuning"], lines)
    if (out / "costs.json").exists():
        rows = json.loads((out / "costs.json").read_text())
        costs = [
            [
                f"{r['context']:,}",
                r["recipe"],
                f"{1 / r['token']:.0f}",
                brief_time(r["reading"]),
                size(r["cache"]),
            ]
            for r in rows
        ]
        text += "\n\n" + table(
            ["context", "attention", "tokens per second", "reading the context", "cache"], costs
        )
    print(text)
    (out / "table.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
