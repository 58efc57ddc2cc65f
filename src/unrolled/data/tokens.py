"""Tokenised corpora of any size, as memory-mapped shards that `unrolled tokenize` wrote."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import MinLen

from unrolled.contract import IGNORED, Batch, Split
from unrolled.data._base import BaseDataset, Task
from unrolled.data._checks import check_batch_size, check_request, check_split
from unrolled.data._corpus.index import Index
from unrolled.data._corpus.reading import Corpus, Ids
from unrolled.data._mixture import MOST, drawn_sources
from unrolled.data._vocabulary import Vocabulary
from unrolled.data._windows import Order, consecutive, shuffled
from unrolled.fields import Positive, Size


@dataclass
class TokensDataset(BaseDataset):
    """Folders of `unrolled tokenize`, cut into windows of consecutive tokens.

    Window i of a split has the tokens i T to i T + T; the last of them is only a target. An epoch has each
    window once, in an order that is computed and never stored. Only the windows that are read come into
    memory. In a mixture, each row of a batch comes from a corpus drawn by weight, and each corpus has its own
    epochs.

    Attributes:
        path: a folder of `unrolled tokenize`, or several folders with weights, as in
            `{books: 0.7, code: 0.3}`; only the ratios of the weights count.
        length: tokens per window, T.
        documents: with "joined", a token sees all tokens before it in its window; with "separate", no token
            sees another document, and the first token of a document is not predicted.
        order: "random", or "consecutive", where each row of a batch continues where the same row of the
            previous batch ended.

    Raises:
        ImportError: the library `tokenizers` is not installed.
        ValueError: an option is impossible, a folder is not a finished corpus or is damaged, a split is too
            short, or the corpora have different tokenizers.
    """

    path: str | Path | Annotated[dict[str, Positive], MinLen(1)] = ""
    length: Size = 256
    documents: Literal["joined", "separate"] = "joined"
    order: Order = "random"

    task: ClassVar[Task] = "tokens"
    start_token: ClassVar[bool] = False
    recipe: ClassVar[str] = "rwkv-lm"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not str(self.path):
            raise ValueError("path is '', but must be a folder of unrolled tokenize, or several with weights")
        weights: dict[str, float] = self.path if isinstance(self.path, dict) else {str(self.path): 1.0}
        if len(weights) > MOST:
            raise ValueError(f"path has {len(weights)} corpora, but must have at most {MOST}")
        if len(weights) > 1 and self.order == "consecutive":
            raise ValueError("order is 'consecutive', but must be 'random' for several corpora")
        self._weights = list(weights.values())
        corpora = [Corpus(Path(name).expanduser()) for name in weights]
        if len({corpus.folder.resolve() for corpus in corpora}) < len(corpora):
            raise ValueError(f"path is {list(weights)}, but must name each corpus once")
        self._corpora, self._corpus = corpora, corpora[0]
        for corpus in corpora[1:]:
            _check_same_tokenizer(self._corpus, corpus)
        self._ids: dict[Split, list[Ids]] = {
            split: [corpus.ids(split) for corpus in corpora] for split in ("train", "val")
        }
        for split, every in self._ids.items():
            for corpus, ids in zip(corpora, every, strict=True):
                if len(ids) <= self.length:
                    raise ValueError(
                        f"length is {self.length}, but must be less than the {len(ids)} tokens "
                        f"of the {split} part of {corpus.folder}"
                    )

    @property
    def vocab_size(self) -> int:
        """Number of ids of the tokenizer."""
        return self._corpus.index.vocab_size

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer, under the name of the folder; in a mixture, under that of the first folder."""
        tokenizer = self._corpus.tokenizer
        name = self._corpus.folder.resolve().name
        return Vocabulary("tokenizer", tokenizer=tokenizer.to_json(), end=tokenizer.end, data=name)

    @property
    def ids_checksum(self) -> str:
        """SHA-256 of the checksums of the shards; the ids are not read. Shards of another size change it."""
        parts = [part for corpus in self._corpora for part in corpus.index.parts]
        digests = [part.shards[split].sha256 for part in parts for split in sorted(part.shards)]
        return hashlib.sha256(repr(digests).encode()).hexdigest()

    def epoch_size(self, split: Split) -> int:
        """Return the number of windows of a split; the last window of each corpus may be incomplete."""
        check_split(split)
        return sum(-(-(len(ids) - 1) // self.length) for ids in self._ids[split])

    def batch(self, split: Split, *, step: int, batch_size: int, seed: int) -> Batch:
        """Return windows of the split, which (seed, step) and `order` determine."""
        check_request(split, step, batch_size, seed)
        every = self._ids[split]
        sizes = [(len(ids) - 1) // self.length for ids in every]
        continues = None
        if self.order == "consecutive":
            numbers, continues = consecutive(sizes[0], step=step, batch_size=batch_size, seed=seed)
            sources = np.zeros_like(numbers)
        else:
            sources, places = drawn_sources(self._weights, step=step, batch_size=batch_size, seed=seed)
            numbers = np.empty_like(places)
            for source, size in enumerate(sizes):
                own = sources == source
                numbers[own] = shuffled(size, places[own], seed, source)
        rows = [(every[source], int(n) * self.length) for source, n in zip(sources, numbers, strict=True)]
        return self._batch(rows, continues)

    def eval_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield consecutive windows in which every token of the split but its first is a target once.

        With separate documents, the first token of each document is not a target. The last window of each
        corpus is padded with `IGNORED` targets, so average losses over targets, not over windows.
        """
        check_batch_size(batch_size)
        return self._evaluation(batch_size)

    def _evaluation(self, batch_size: int) -> Iterator[Batch]:
        rows = ((ids, x) for ids in self._ids["val"] for x in range(0, len(ids) - 1, self.length))
        while group := list(islice(rows, batch_size)):
            yield self._batch(group, None)

    def _batch(self, rows: list[tuple[Ids, int]], continues: np.ndarray | None) -> Batch:
        """Make a batch of the windows that begin at these places."""
        inputs = torch.zeros(len(rows), self.length, dtype=torch.long)
        targets = torch.full_like(inputs, IGNORED)
        bounds: list[np.ndarray] = []
        for row, (ids, start) in enumerate(rows):
            stop = min(start + self.length + 1, len(ids))
            window = torch.from_numpy(ids.read(start, stop))
            inputs[row, : len(window) - 1] = window[:-1]
            targets[row, : len(window) - 1] = window[1:]
            if self.documents == "separate":
                starts = ids.starts(start + 1, stop) + 1
                targets[row, starts - 1] = IGNORED
                within = starts[starts < self.length]
                bounds.append(row * self.length + np.concatenate([[0], within]))
        packs = None
        if self.documents == "separate":
            packs = torch.from_numpy(np.concatenate([*bounds, [inputs.numel()]]).astype(np.int32))
            continues = self._goes_on(rows, continues)
        return Batch(
            inputs,
            targets,
            cu_seqlens=packs,
            continues=None if continues is None else torch.from_numpy(continues),
        )

    def _goes_on(self, rows: list[tuple[Ids, int]], continues: np.ndarray | None) -> np.ndarray | None:
        """Return which rows continue, without those that begin with a new document."""
        if continues is None:
            return None
        return continues & [not len(ids.starts(start, start + 1)) for ids, start in rows]


def _check_same_tokenizer(one: Corpus, other: Corpus) -> None:
    """Raise ValueError unless two corpora have the same tokenizer."""

    def meaning(index: Index) -> tuple[object, ...]:
        return index.settings.get("tokenizer_sha256"), index.vocab_size, index.end

    if meaning(one.index) != meaning(other.index):
        raise ValueError(
            f"{one.folder} and {other.folder} have different tokenizers or ends of documents: tokenize one "
            "of them with the tokenizer.json and the --end of the other"
        )
