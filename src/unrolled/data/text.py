"""Text as a sequence of characters, bytes or byte pairs: tiny-shakespeare by name, or any file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Gt, Lt
from torch import Tensor

from unrolled.contract import IGNORED, Batch, Split
from unrolled.data._base import BaseDataset, Task
from unrolled.data._checks import check_batch_size, check_request, check_split
from unrolled.data._codec import Codec
from unrolled.data._files import PublishedFile, read_file, read_published
from unrolled.data._tokenizer import DEFAULT_SIZE, SMALLEST, TextTokenizer, pieces
from unrolled.data._vocabulary import Vocabulary
from unrolled.data._windows import Order, consecutive
from unrolled.fields import Size

Level = Literal["chars", "bytes", "bpe"]
TOKENS = {"chars": "characters", "bytes": "bytes", "bpe": "byte pairs"}
"""What the tokens of each level are called."""

KNOWN = {
    "tiny-shakespeare": PublishedFile(
        "tinyshakespeare/input.txt",
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    )
}


@dataclass
class TextDataset(BaseDataset):
    """One long text: windows to train on, its end cut into consecutive windows to validate.

    As characters or byte pairs, a text must be UTF-8; a byte-order mark is dropped and every line end becomes
    a newline. As bytes, a file is read unchanged. `characters` lists the characters of both splits in the
    order of their ids, and `byte_pairs` encodes byte pairs; each is None with the other levels. Byte pairs
    are learned from the training part, again whenever the data set is made, and are always the same.

    Attributes:
        path: a file, decompressed if it ends in `.gz`, or the known name "tiny-shakespeare".
        level: "chars", "bytes" or "bpe" (byte pairs).
        length: tokens per window, T.
        val_fraction: the fraction at the end of the text that is held out for validation.
        data_dir: the folder of known texts; default `$UNROLLED_DATA`, else `~/.cache/unrolled`.
        vocab_size: byte pairs to learn at most, at least 257, by default 8,000; then the number of ids. It
            follows from the text at the other levels.
        order: "random" draws training windows with replacement; "consecutive" lets each row of a batch read
            on where the same row of the batch before ended.

    Raises:
        ImportError: `level` is "bpe" and the library `tokenizers` is not installed.
        ValueError: an option is impossible, the file is missing, corrupt or not UTF-8, or a split is too
            short.
    """

    path: str | Path = "tiny-shakespeare"
    level: Level = "chars"
    length: Size = 64
    val_fraction: Annotated[float, Gt(0), Lt(1)] = 0.1
    data_dir: str | Path | None = None
    vocab_size: Size | None = None
    order: Order = "random"

    task: ClassVar[Task] = "tokens"
    start_token: ClassVar[bool] = False
    recipe: ClassVar[str] = "small-lm"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not str(self.path):
            raise ValueError(f"path is {self.path!r}, but must be the name of a file or of a known text")
        self.characters: tuple[str, ...] | None = None
        self.byte_pairs: TextTokenizer | None = None
        self._ids: dict[Split, np.ndarray] = self._read()
        units = "tokens" if self.level == "bpe" else self.level
        for split, part in self._ids.items():
            if len(part) <= self.length:
                raise ValueError(
                    f"length is {self.length}, but must be less than the {len(part)} {units} "
                    f"of the {split} part of {self.path}"
                )

    @property
    def vocabulary(self) -> Vocabulary:
        """The characters, bytes or byte pairs, under the name of the file."""
        name = Path(self.path).name.partition(".")[0] or self.name
        if self.byte_pairs is not None:
            return Vocabulary(
                "tokenizer", tokenizer=self.byte_pairs.to_json(), end=self.byte_pairs.end, data=name
            )
        return Vocabulary(
            "text", characters=None if self.characters is None else list(self.characters), data=name
        )

    def encode(self, text: str) -> Tensor:
        """Return the ids of a text, int64 [T]; see `Codec.encode`."""
        if self.byte_pairs is not None:
            return torch.tensor(self.byte_pairs.encode(text), dtype=torch.long)
        return Codec(self.characters).encode(text)

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """Return the text of ids [T]; see `Codec.decode`."""
        if self.byte_pairs is not None:
            return self.byte_pairs.decode(torch.as_tensor(ids, dtype=torch.long).tolist())
        return Codec(self.characters).decode(ids)

    def epoch_size(self, split: Split) -> int:
        """Return the number of consecutive windows that cover a split, the last one perhaps in part."""
        check_split(split)
        return -(-(len(self._ids[split]) - 1) // self.length)

    def batch(self, split: Split, *, step: int, batch_size: int, seed: int) -> Batch:
        """Return windows of the split, determined by (seed, step): see `order`."""
        check_request(split, step, batch_size, seed)
        ids = self._ids[split]
        continues = None
        if self.order == "random":
            drawn = np.random.default_rng((seed, step))
            starts = drawn.integers(len(ids) - self.length, size=batch_size)
        else:
            size = (len(ids) - 1) // self.length
            numbers, reads_on = consecutive(size, step=step, batch_size=batch_size, seed=seed)
            starts, continues = numbers * self.length, torch.from_numpy(reads_on)
        windows = torch.from_numpy(ids[starts[:, None] + np.arange(self.length + 1)].astype(np.int64))
        return Batch(windows[:, :-1], windows[:, 1:], continues=continues)

    def eval_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield consecutive windows in which every token of the split but its first is a target exactly once.

        The last window is filled up with `IGNORED` targets, so average losses over targets, not over windows.
        """
        check_batch_size(batch_size)
        return self._consecutive(self._ids["val"], batch_size)

    def _consecutive(self, ids: np.ndarray, batch_size: int) -> Iterator[Batch]:
        for start in range(0, len(ids) - 1, batch_size * self.length):
            piece = torch.from_numpy(ids[start : start + batch_size * self.length + 1].astype(np.int64))
            n_targets = len(piece) - 1
            shape = (-(-n_targets // self.length), self.length)
            inputs, targets = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORED)
            inputs.view(-1)[:n_targets] = piece[:-1]
            targets.view(-1)[:n_targets] = piece[1:]
            yield Batch(inputs, targets)

    def _read(self) -> dict[Split, np.ndarray]:
        """Return the ids of both splits, in the smallest integer type, and set what they mean."""
        content = self._content()
        if not content:
            raise ValueError(f"{self.path} is empty, but must hold a text")
        if self.level == "bytes":
            return self._cut(np.frombuffer(content, np.uint8), 256)
        text = self._text(content)
        if self.level == "bpe":
            return self._learned(text)
        points, ids = np.unique(np.frombuffer(text.encode("utf-32-le"), "<u4"), return_inverse=True)
        self.characters = tuple(map(chr, points))
        return self._cut(ids.astype(np.min_scalar_type(len(points) - 1)), len(points))

    def _cut(self, ids: np.ndarray, vocab_size: int) -> dict[Split, np.ndarray]:
        """Cut ids of all the text into the splits, and set how many there are."""
        if self.vocab_size not in (None, vocab_size):
            raise ValueError(
                f"vocab_size is {self.vocab_size}, but {self.path} has {vocab_size} {TOKENS[self.level]}: "
                "leave it out, or choose level='bpe'"
            )
        self.vocab_size = vocab_size
        cut = int(len(ids) * (1 - self.val_fraction))
        return {"train": ids[:cut], "val": ids[cut:]}

    def _learned(self, text: str) -> dict[Split, np.ndarray]:
        """Learn byte pairs from the training part of a text, and return the ids of both splits."""
        size = DEFAULT_SIZE if self.vocab_size is None else self.vocab_size
        if size < SMALLEST:
            raise ValueError(
                f"vocab_size is {size}, but must be at least {SMALLEST} with level='bpe': "
                "256 bytes, and the end of a document"
            )
        cut = int(len(text) * (1 - self.val_fraction))
        parts: dict[Split, str] = {"train": text[:cut], "val": text[cut:]}
        self.byte_pairs = TextTokenizer.learn(pieces(parts["train"]), size)
        self.vocab_size = len(self.byte_pairs)
        return {split: self.byte_pairs.encode_array(part) for split, part in parts.items()}

    def _content(self) -> bytes:
        if isinstance(self.path, str) and self.path in KNOWN:
            return read_published(KNOWN[self.path], self.data_dir)
        if Path(self.path).expanduser().is_file():
            return read_file(self.path)
        raise ValueError(
            f"path is {str(self.path)!r}, which is neither a file nor a known text ({', '.join(KNOWN)})"
        )

    def _text(self, content: bytes) -> str:
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.path} is not UTF-8 at byte {error.start} ({content[error.start]:#04x}): "
                "read it with level='bytes'"
            ) from error
        return text.replace("\r\n", "\n").replace("\r", "\n")
