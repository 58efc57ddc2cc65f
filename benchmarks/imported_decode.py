"""Measure the time of a generated token, of models of transformers and of the same weights in plans.

    python benchmarks/imported_decode.py               # Mamba, Mamba-2 and RWKV-4
    python benchmarks/imported_decode.py Mamba --layers 4

Conditions: random weights in the sizes of the smallest published models, batch 1, one thread, greedy. The
models run in turn. A time is the median for 64 tokens less that for 32, per token.
"""

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import transformers

from unrolled import decode
from unrolled.bench.measure import take_turns
from unrolled.interop.hf import import_weights

FAMILIES: dict[str, dict[str, Any]] = {
    "Mamba": {"hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50280},
    "Mamba2": {
        "hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50288, "num_heads": 24, "head_dim": 64,
        "state_size": 128, "n_groups": 1, "tie_word_embeddings": True,
    },
    "Rwkv": {"hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 50277},
}  # fmt: skip
FORMS = ("fp32", "bf16", "int8", "int4")
PROMPT, TOKENS = 16, 32

Generate = Callable[[int], object]


def engines(family: str, layers: int | None) -> dict[str, Generate]:
    """Return functions that generate so many tokens: by transformers, and by a plan of each form."""
    torch.manual_seed(0)
    sizes = FAMILIES[family] | ({} if layers is None else {"num_hidden_layers": layers})
    config = getattr(transformers, f"{family}Config")(**sizes)
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    print(f"{family}, {sum(x.numel() for x in theirs.parameters()):,} weights", flush=True)
    prompt = torch.randint(1, sizes["vocab_size"], (1, PROMPT))
    ours = import_weights(theirs)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found: dict[str, Generate] = {
        "transformers": lambda n: theirs.generate(prompt, max_new_tokens=n, **options)
    }
    for form in FORMS:
        plan = decode.plan(ours, weights=form)
        found[form] = lambda n, plan=plan: plan.generate(prompt.tolist(), max_new_tokens=n, temperature=0)
    return found


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help=", ".join(FAMILIES))
    parser.add_argument("--layers", type=int, help="number of layers, by default as published")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if unknown := set(arguments.families) - FAMILIES.keys():
        parser.error(f"there is no family {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    for family in arguments.families:
        found = engines(family, arguments.layers)
        for generate in found.values():
            generate(TOKENS)
        runs = {(name, n): partial(found[name], n) for name in found for n in (TOKENS, 2 * TOKENS)}
        times = take_turns(runs, least=arguments.rounds, budget=0)
        half, whole = ({name: median(times[name, n]) for name in found} for n in (TOKENS, 2 * TOKENS))
        each = {name: (whole[name] - half[name]) / TOKENS for name in found}
        for name, x in each.items():
            print(f"  {name:<12} {x * 1e3:6.2f} ms  {each['transformers'] / x:5.1f}x", flush=True)


if __name__ == "__main__":
    main()
