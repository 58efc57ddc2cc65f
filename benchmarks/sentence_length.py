"""Print and plot the BLEU of translation models against the length of the source.

    python benchmarks/sentence_length.py runs/multi30k-fixed runs/multi30k-rnn --out sentence_length.png

The sources are the sentences of `test_2016_flickr`, alone and joined two and three at a time, because few
captions are long. The plot follows figure 2 of Bahdanau et al. 2014, arXiv 1409.0473.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import Any

from matplotlib import pyplot

from unrolled import models
from unrolled.cli import run_config
from unrolled.cli._bleu import scorer, translations_of

BOUNDS = (
    0,
    8,
    12,
    16,
    24,
    32,
    64,
)  # words of a source; a group has more words than one bound, and at most as many as the next bound
BEAM, LENGTH_PENALTY = 4, 0.6


def joined(sentences: Sequence[str], n: int) -> list[str]:
    """Join every n consecutive sentences; fewer than n sentences at the end are dropped."""
    return [" ".join(sentences[i : i + n]) for i in range(0, len(sentences) - n + 1, n)]


def groups(pairs: Sequence[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Group pairs of a source and its reference by the number of words of the source."""
    for low, high in pairwise(BOUNDS):
        yield [pair for pair in pairs if low < len(pair[0].split()) <= high]


def scores(run_dir: Path, limit: int | None) -> Iterator[tuple[float, float]]:
    """Yield the mean number of words of the sources, and the BLEU, for each group; NaN for an empty one."""
    run = run_config.resolve(run_config.read_saved(run_dir))
    data: Any = run.dataset
    model: Any = models.load(run_dir).eval()
    sides = data.sentences("test_2016_flickr")
    pairs = [
        pair for n in (1, 2, 3) for pair in zip(*(joined(side[:limit], n) for side in sides), strict=True)
    ]
    for group in groups(pairs):
        if not group:
            yield nan, nan
            continue
        sources, references = zip(*group, strict=True)
        found = translations_of(model, data, sources, BEAM, LENGTH_PENALTY)
        bleu, _ = scorer()(found, references)
        yield sum(len(text.split()) for text in sources) / len(sources), bleu


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("runs", nargs="+", type=Path)
parser.add_argument("--out", type=Path, default=Path("sentence_length.png"))
parser.add_argument("--limit", type=int, help="take so many sentences of the test set; all by default")
options = parser.parse_args()

figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
print("| words | " + " | ".join(f"{low + 1} to {high}" for low, high in pairwise(BOUNDS)) + " |")
print("| --- " + "| ---: " * (len(BOUNDS) - 1) + "|")
for run_dir in options.runs:
    points = list(scores(run_dir, options.limit))
    axes.plot(*zip(*points, strict=True), marker="o", label=run_dir.name)
    print(f"| {run_dir.name} | " + " | ".join(f"{bleu:.1f}" for _, bleu in points) + " |", flush=True)
axes.set(xlabel="words in the source, mean", ylabel="BLEU", ylim=(0, None))
axes.grid(alpha=0.3)
axes.legend()
figure.savefig(options.out, dpi=160)
