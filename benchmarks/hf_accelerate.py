"""Tokens per second of models of transformers on a CPU, before and after `unrolled.interop.hf.accelerate`.

    python benchmarks/hf_accelerate.py                           # all of it, about an hour of one core
    python benchmarks/hf_accelerate.py Mamba2 Lfm2 --dtypes float32
    python benchmarks/hf_accelerate.py --layers 4 --rounds 2     # a trial
    python benchmarks/hf_accelerate.py Mamba --jobs training --layers 1

The models have the widths of published models. Their weights are random, because the speed does not depend on
the values. All runs use one thread and one sequence. Runs before and after `accelerate` alternate. The
figures are medians over the rounds, after a round that is not timed. Prefill is a prompt of 1,024 tokens and
the first token after it. Decode is 64 tokens after a prompt of 16, whose prefill is part of the time.
Training is the loss of 1,024 tokens and its gradients; it is not measured by default.
"""

import argparse
import copy
from functools import partial
from statistics import median
from typing import Any

import torch
import transformers
from transformers.utils import logging

from unrolled.bench.measure import take_turns
from unrolled.interop import hf

COMMON = {"vocab_size": 32000, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16}
WIDE = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 3584}
SSD = {"mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128}
# For each family: fields of the config, the number of layers, and, if a field of the config lists the kinds
# of the layers, the name of this field and the kinds that it repeats.
FAMILIES: dict[str, tuple[dict[str, Any], int, tuple[str, Any] | None]] = {
    "Qwen3_5": (
        WIDE | DELTA | {"linear_num_value_heads": 16, "head_dim": 256},
        16,
        ("layer_types", ("linear_attention",) * 3 + ("full_attention",)),
    ),
    "OlmoHybrid": (
        WIDE | DELTA | {"linear_num_key_heads": 8, "linear_num_value_heads": 8},
        16,
        ("layer_types", ("linear_attention",) * 3 + ("full_attention",)),
    ),
    "KimiLinear": (
        WIDE
        | {
            "num_key_value_heads": 8,
            "linear_num_heads": 8,
            "linear_head_dim": 128,
            "first_k_dense_replace": 99,
        },
        16,
        ("layer_types", ("linear_attention",) * 3 + ("full_attention",)),
    ),
    "Mamba2": ({"hidden_size": 1024, "num_heads": 32, "head_dim": 64, "n_groups": 1}, 32, None),
    "Mamba": ({"hidden_size": 1024}, 32, None),
    "Rwkv": ({"hidden_size": 1024, "rescale_every": 0}, 24, None),
    "FalconH1": (
        WIDE | SSD | {"intermediate_size": 2048, "mamba_d_ssm": 1536, "mamba_n_heads": 24},
        16,
        None,
    ),
    "GraniteMoeHybrid": (
        WIDE
        | SSD
        | {
            "mamba_n_heads": 32,
            "shared_intermediate_size": 2048,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
        },
        16,
        ("layer_types", ("mamba",) * 3 + ("attention",)),
    ),
    "Lfm2": (
        WIDE | {"intermediate_size": 4608, "block_auto_adjust_ff_dim": False},
        16,
        ("layer_types", ("conv",) * 3 + ("full_attention",)),
    ),
}
PROMPT, PREFILL, DECODE = 16, 1024, 64
TOKENS = {"prefill": PREFILL, "decode": DECODE, "training": PREFILL}


def make(family: str, layers: int | None, dtype: torch.dtype) -> Any:
    """Make a model with random weights and this number of layers, by default that of `FAMILIES`."""
    fields, depth, kinds = FAMILIES[family]
    depth = layers or depth
    if kinds is not None:
        name, period = kinds
        fields = fields | {name: [period[i % len(period)] for i in range(depth)]}
    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(
        transformers, f"{family}Config"
    )
    config = config_class(**COMMON | fields, num_hidden_layers=depth)
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")._from_config(config, dtype=dtype).eval()


def times(model: Any, jobs: list[str], rounds: int) -> dict[tuple[str, bool], float]:
    """Measure the seconds of each job, with and without `accelerate`."""
    ids = torch.randint(2, 32000, (1, PREFILL), generator=torch.Generator().manual_seed(0))

    fast = copy.deepcopy(model, {id(x): x for x in model.parameters()})  # a copy with the same weights
    hf.accelerate(fast)

    def run(job: str, accelerated: bool) -> None:
        chosen = fast if accelerated else model
        if job == "training":
            chosen.train()
            chosen(ids, labels=ids, use_cache=False).loss.backward()
            chosen.eval()
            return
        length, tokens = {"prefill": (PREFILL, 1), "decode": (PROMPT, DECODE)}[job]
        chosen.generate(ids[:, :length], max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)

    runs = {(job, each): partial(run, job, each) for job in jobs for each in (False, True)}
    for warm_up in runs.values():
        warm_up()
    return {key: median(found) for key, found in take_turns(runs, least=rounds, budget=0).items()}


def main() -> None:
    """Measure each family with each dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help=", ".join(FAMILIES))
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument(
        "--layers", type=int, help="number of layers, by default those for 0.1 to 0.5e9 weights"
    )
    parser.add_argument("--jobs", nargs="*", default=["prefill", "decode"], choices=list(TOKENS))
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    print(f"| family | weights | type |{''.join(f' {job} before, after, ratio |' for job in chosen.jobs)}")
    print(f"| --- | ---: | --- |{' ---: |' * len(chosen.jobs)}")
    for family in chosen.families:
        for dtype in chosen.dtypes:
            model = make(family, chosen.layers, getattr(torch, dtype))
            found, cells = times(model, chosen.jobs, chosen.rounds), []
            for job in chosen.jobs:
                tokens, before, after = TOKENS[job], found[job, False], found[job, True]
                cells.append(f"{tokens / before:.1f}, {tokens / after:.1f}, {before / after:.2f}")
            weights = sum(p.numel() for p in model.parameters()) / 1e9
            print(f"| {family} | {weights:.2f}e9 | {dtype} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
