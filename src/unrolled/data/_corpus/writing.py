"""Tokenise documents into the shards of a corpus, in parallel; a process that is killed can be resumed.

The pieces of the documents are read in order, encoded by several threads in batches, and written in order.
The tokenizer releases Python's lock while it works. A part ends with the first batch that makes a shard long
enough. Once its files are complete, the part is added to the index, together with the place that the input
was read to. So the files depend neither on the number of threads nor on where an earlier process was killed.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unrolled.contract import Split
from unrolled.data._bpe import SMALLEST
from unrolled.data._corpus.documents import Documents, Piece
from unrolled.data._corpus.index import FILE_NAME, TOKENIZER_FILE, Index, is_corpus
from unrolled.data._corpus.shards import PartWriter, is_intact, remove_parts
from unrolled.data._corpus.splitting import Splitting
from unrolled.data._tokenizer import TextTokenizer
from unrolled.files import file_digest, read_object, write_file
from unrolled.folders import held

BATCH = 2**19  # characters encoded by one thread at a time
WAITING = 3  # batches for each thread, read or encoded but not written yet
Work = Sequence[tuple[Split, Piece]]


@dataclass(frozen=True)
class Tokenizing:
    """The input and the options of a corpus.

    Attributes:
        documents: the documents to read.
        tokenizer: "bpe" learns byte pairs, "bytes" takes single bytes; or the path of a `tokenizer.json`.
        vocab_size: for "bpe", the largest number of ids, including the end of a document and the 256 bytes.
        sample: for "bpe", the largest number of characters to learn from. They are taken from the beginning
            of every file, in proportion to its size, without the documents held out.
        end: the token of a `tokenizer.json` that ends a document; by default the `eos_token` of the
            `tokenizer_config.json` beside it, or one of the usual names.
        val_fraction: fraction of the documents that is held out; see `Splitting`.
        shard_tokens: number of ids after which a shard ends.
    """

    documents: Documents
    tokenizer: str
    vocab_size: int
    sample: int
    end: str | None
    val_fraction: float
    shard_tokens: int

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that determines the files of the corpus, as JSON values; the input is read for it."""
        given, learned = self.tokenizer not in ("bpe", "bytes"), self.tokenizer == "bpe"
        return {
            "files": [[file.name, file_digest(file)] for file in self.documents.files],
            "separator": self.documents.separator,
            "field": self.documents.field,
            "tokenizer": file_digest(Path(self.tokenizer)) if given else self.tokenizer,
            "vocab_size": self.vocab_size if learned else None,
            "sample": self.sample if learned else None,
            "end": self.end if given else None,
            "val_fraction": self.val_fraction,
            "shard_tokens": self.shard_tokens,
        }

    def write(
        self,
        folder: Path,
        *,
        jobs: int = 1,
        start_over: bool = False,
        on_bytes: Callable[[int], object] = lambda done: None,
        on_tokens: Callable[[int], object] = lambda tokens: None,
    ) -> Index:
        """Write the corpus into an existing folder, or finish what an earlier call began there.

        A damaged part is written again, with all parts after it.

        Args:
            folder: the folder to write to.
            jobs: number of threads that encode.
            start_over: replace a corpus of other settings.
            on_bytes: called from time to time with the number of bytes of the files read so far.
            on_tokens: called with the number of ids of each batch that is written.

        Raises:
            ImportError: a library is missing.
            ValueError: a file is not of its format, there is no text, the folder holds a corpus of other
                settings, or another process writes there.
            OSError: a file cannot be read or written; the parts that are finished are kept.
        """
        with held(folder):
            splitting = Splitting.of(self.documents, self.val_fraction)
            settings = self.settings
            index = self._begun(folder, settings, start_over)
            if index is None:
                index = self._begin(folder, settings, splitting)
            kept = 0
            while kept < len(index.parts) and is_intact(folder, kept, index.parts[kept]):
                kept += 1
            if index.complete and kept == len(index.parts):
                return index
            remove_parts(folder, kept)
            del index.parts[kept:]
            index.complete = False
            self._write_parts(folder, index, splitting, jobs, on_bytes, on_tokens)
            return index

    def _begun(self, folder: Path, settings: dict[str, Any], start_over: bool) -> Index | None:
        """Return the index that an earlier call has written; None if there is none to continue.

        Raises:
            ValueError: the index is damaged or has other settings, and `start_over` is False.
        """
        if not (folder / FILE_NAME).exists() or (start_over and not is_corpus(folder)):
            return None
        index = Index.load(folder)
        found = {key: value for key, value in index.settings.items() if key != "tokenizer_sha256"}
        if found != settings:
            if start_over:
                return None
            differing = [key for key, value in settings.items() if found.get(key) != value]
            raise ValueError(
                f"{folder} holds a corpus of other settings ({', '.join(differing)}); name "
                "another folder, or replace this one with --force"
            )
        intact = (folder / TOKENIZER_FILE).is_file()
        same = intact and file_digest(folder / TOKENIZER_FILE) == index.settings["tokenizer_sha256"]
        return index if same else None

    def _begin(self, folder: Path, settings: dict[str, Any], splitting: Splitting) -> Index:
        """Write the tokenizer and an index without parts, in place of an earlier corpus."""
        tokenizer = self._tokenizer(splitting)  # which may fail, or take minutes: the earlier corpus stays
        (folder / FILE_NAME).unlink(missing_ok=True)
        remove_parts(folder, 0)
        write_file(folder / TOKENIZER_FILE, tokenizer.to_json())
        settings = settings | {"tokenizer_sha256": file_digest(folder / TOKENIZER_FILE)}
        assert tokenizer.end is not None
        index = Index(settings, len(tokenizer), tokenizer.end, str(tokenizer.dtype))
        index.save(folder)
        return index

    def _tokenizer(self, splitting: Splitting) -> TextTokenizer:
        if self.tokenizer == "bytes":
            return TextTokenizer.learn([], SMALLEST)
        if self.tokenizer == "bpe":
            return TextTokenizer.learn(self._texts_to_learn_from(splitting), self.vocab_size)
        path = Path(self.tokenizer)
        try:
            found = TextTokenizer.of_json(path.read_text(encoding="utf-8"), None)
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        name = self.end or _default_end(path, found)
        found.end = None if name is None else found.id_of(name)
        if found.end is None:
            wrong = "has no token that ends a document" if name is None else f"has no token {name!r}"
            raise ValueError(f"{path} {wrong}: name one of its tokens with --end")
        return found

    def _texts_to_learn_from(self, splitting: Splitting) -> Iterator[str]:
        sizes = [file.stat().st_size for file in self.documents.files]
        left = [max(1, self.sample * size // max(1, sum(sizes))) for size in sizes]
        for split, piece in splitting.split(self.documents.pieces(most=list(left))):
            number, *_ = piece.place
            if split == "train":
                yield piece.text[: left[number]]
            left[number] -= min(left[number], len(piece.text))

    def _write_parts(
        self,
        folder: Path,
        index: Index,
        splitting: Splitting,
        jobs: int,
        on_bytes: Callable[[int], object],
        on_tokens: Callable[[int], object],
    ) -> None:
        reached = index.parts[-1].reached if index.parts else (0, 0, 0)
        tokenizer = TextTokenizer.of_json((folder / TOKENIZER_FILE).read_text(encoding="utf-8"), index.end)
        pieces = splitting.split(self.documents.pieces(first=reached[0], on_bytes=on_bytes))
        with closing(
            encoded(_batches(x for x in pieces if x[1].place >= reached), tokenizer, jobs)
        ) as batches:
            more = next(batches, None)
            while more is not None:
                with PartWriter(folder, len(index.parts), index.dtype) as part:
                    while more is not None and part.longest < self.shard_tokens:
                        work, arrays = more
                        for (split, piece), ids in zip(work, arrays, strict=True):
                            part.add(split, piece, ids)
                        on_tokens(sum(map(len, arrays)))
                        reached = work[-1][1].after
                        more = next(batches, None)
                    index.parts.append(part.finish(reached))
                index.complete = more is None
                index.save(folder)
        if not index.complete:  # killed between the last part and the end
            index.complete = True
            index.save(folder)


def encoded(
    batches: Iterable[Work], tokenizer: TextTokenizer, jobs: int
) -> Generator[tuple[Work, list[np.ndarray]]]:
    """Encode batches in several threads; yield each with the ids of its pieces, in order.

    A piece that ends a document also gets the id `end`.
    """

    def encode(work: Work) -> list[np.ndarray]:
        end = [] if tokenizer.end is None else [tokenizer.end]
        texts = ((piece.text, end if piece.ends else []) for _, piece in work)
        return [np.array(tokenizer.encode_piece(text) + last, tokenizer.dtype) for text, last in texts]

    waiting: deque[tuple[Work, Future[list[np.ndarray]]]] = deque()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for work in batches:
                waiting.append((work, pool.submit(encode, work)))
                if len(waiting) >= WAITING * jobs:
                    oldest, found = waiting.popleft()
                    yield oldest, found.result()
            while waiting:
                oldest, found = waiting.popleft()
                yield oldest, found.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _batches(pieces: Iterable[tuple[Split, Piece]]) -> Iterator[Work]:
    """Group pieces until they have `BATCH` characters."""
    batch: list[tuple[Split, Piece]] = []
    size = 0
    for split, piece in pieces:
        batch.append((split, piece))
        size += len(piece.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _default_end(path: Path, tokenizer: TextTokenizer) -> str | None:
    """Return the token that ends a document: the `eos_token` beside a `tokenizer.json`, or a usual one."""
    named: Any = read_object(path.with_name("tokenizer_config.json")).get("eos_token")
    named = named.get("content") if isinstance(named, dict) else named
    usual = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end|>")
    return next((x for x in (named, *usual) if isinstance(x, str) and tokenizer.id_of(x) is not None), None)
