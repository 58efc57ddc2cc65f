"""Text as a sequence of characters, bytes, byte pairs or words: tiny-shakespeare by name, or any file."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar, get_args

import numpy as np
import torch
from annotated_types import Gt, Lt
from torch import Tensor

from unrolled.contract import IGNORED, Batch, Split
from unrolled.data._base import BaseDataset, Task
from unrolled.data._bpe import SMALLEST
from unrolled.data._checks import check_batch_size, check_request, check_split
from unrolled.data._codec import Codec, listed
from unrolled.data._files import PublishedFile, read_file, read_published
from unrolled.data._tokenizer import BLANKS, DEFAULT_SIZE, WORDS, TextTokenizer, pieces
from unrolled.data._vocabulary import Vocabulary
from unrolled.data._windows import Order, consecutive, shifted
from unrolled.fields import Size

Level = Literal["chars", "bytes", "bpe", "words", "blanks"]
TOKENS = {"chars": "characters", "bytes": "bytes"}
"""The names of the tokens, for the levels at which the text determines their number."""

Part = TypeVar("Part", str, np.ndarray)

WIKITEXT = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2"
KNOWN = {
    "tiny-shakespeare": PublishedFile(
        "tinyshakespeare/input.txt",
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
    "war-and-peace": PublishedFile(
        "warpeace/warpeace_input.txt",
        "https://raw.githubusercontent.com/ZihanDai2005/PSTAT_160B_Final_Project/"
        "d4c76b9190c3f9a187a4e961665c7fd8af2cadcc/data/warpeace_input.txt",
        "cea8ccb6e581165e7b0988ab7e28cccc9447af1e0b1278ac8baeb8f359d9ce62",
    ),
    "wikitext-2-valid": PublishedFile(
        "wikitext2/valid.txt",
        f"{WIKITEXT}/valid.txt",
        "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
    ),
    "wikitext-2-test": PublishedFile(
        "wikitext2/test.txt",
        f"{WIKITEXT}/test.txt",
        "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
    ),
}


@dataclass
class TextDataset(BaseDataset):
    """A long text, in windows: the beginning to train on, and its end or another file to validate.

    With the level "bytes", the file is read unchanged. Otherwise it must be UTF-8; a byte-order mark is
    dropped and every line end becomes a newline. `characters` lists the characters of both splits in the
    order of their ids, for the level "chars" only; `text_tokenizer` encodes byte pairs or words, and is None
    for "chars" and "bytes". Byte pairs and words are learned from the training part each time the data set is
    made, and are always the same. A line break is a word too, and a word without an id of its own is "<unk>".

    Attributes:
        path: a file, decompressed if its name ends in `.gz`, or one of the known names "tiny-shakespeare",
            "war-and-peace", "wikitext-2-valid" and "wikitext-2-test".
        level: "chars" (characters), "bytes", "bpe" (byte pairs), "words" (a sign such as a full stop is a
            word too) or "blanks" (a word is what stands between spaces, as in WikiText).
        length: tokens per window, T.
        val_fraction: the fraction at the end of the text that is held out for validation.
        val_path: a second file to validate on, in place of the end of the first.
        data_dir: the folder of known texts; default `$UNROLLED_DATA`, else `~/.cache/unrolled`.
        vocab_size: for "bpe", the largest number of ids, at least 257 and by default 8,000. For "words" and
            "blanks", the largest number of ids, one of which is "<unk>"; by default, each word that occurs at
            least twice has an id. For the other levels, the text determines it.
        order: "random" cuts the text into windows anew for each epoch, which has each window once in random
            order; "drawn" draws windows with replacement; with "consecutive", each row of a batch continues
            where the same row of the previous batch ended.

    Raises:
        ImportError: `level` is "bpe", "words" or "blanks" and the library `tokenizers` is not installed.
        ValueError: an option is impossible, the file is missing, corrupt or not UTF-8, or a split is too
            short.
    """

    path: str | Path = "tiny-shakespeare"
    level: Level = "chars"
    length: Size = 64
    val_fraction: Annotated[float, Gt(0), Lt(1)] = 0.1
    data_dir: str | Path | None = None
    vocab_size: Size | None = None
    order: Literal[Order, "drawn"] = "random"
    val_path: str | Path | None = None

    task: ClassVar[Task] = "tokens"
    start_token: ClassVar[bool] = False
    recipe: ClassVar[str] = "rwkv-lm"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not str(self.path):
            raise ValueError(f"path is {self.path!r}, but must be the name of a file or of a known text")
        self.characters: tuple[str, ...] | None = None
        if self.val_path is not None and self.val_fraction != TextDataset.val_fraction:
            raise ValueError(f"val_fraction is {self.val_fraction}, but must be left out with val_path")
        if self.val_path is not None and _place(self.val_path) == _place(self.path):
            raise ValueError(f"val_path is {self.val_path}, but must be another file than path")
        self.text_tokenizer: TextTokenizer | None = None
        self._ids: dict[Split, np.ndarray] = self._read()
        split, shortest = min(self._ids.items(), key=lambda part: len(part[1]))
        if len(shortest) <= self.length:
            part = self.val_path if split == "val" and self.val_path else f"the {split} part of {self.path}"
            raise ValueError(
                f"length is {self.length}, but must be less than the {len(shortest)} {self._unit} of {part}"
            )

    @property
    def _unit(self) -> str:
        """What the text is made of, for messages."""
        return "tokens" if self.level == "bpe" else self.level

    @property
    def vocabulary(self) -> Vocabulary:
        """The characters, bytes, byte pairs or words, under the name of the file."""
        name = Path(self.path).name.partition(".")[0] or self.name
        if self.text_tokenizer is not None:
            return Vocabulary(
                "tokenizer", tokenizer=self.text_tokenizer.to_json(), end=self.text_tokenizer.end, data=name
            )
        return Vocabulary(
            "text", characters=None if self.characters is None else list(self.characters), data=name
        )

    @property
    def ids_checksum(self) -> str:
        """CRC-32 of the ids and of what they stand for."""
        meaning = zlib.crc32(repr(self.vocabulary.meaning).encode())
        train, val = (self._ids[split].data for split in get_args(Split))
        return f"{zlib.crc32(val, zlib.crc32(train, meaning)):08x}"

    def encode(self, text: str) -> Tensor:
        """Return the ids of a text, int64 [T]; see `Codec.encode`."""
        if self.text_tokenizer is not None:
            return torch.tensor(self.text_tokenizer.encode(text), dtype=torch.long)
        return Codec(self.characters).encode(text)

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """Return the text of ids [T]; see `Codec.decode`."""
        if self.text_tokenizer is not None:
            return self.text_tokenizer.decode(listed(ids))
        return Codec(self.characters).decode(ids)

    def epoch_size(self, split: Split) -> int:
        """Return the number of consecutive windows that cover a split; the last may be incomplete."""
        check_split(split)
        return -(-(len(self._ids[split]) - 1) // self.length)

    def batch(self, split: Split, *, step: int, batch_size: int, seed: int) -> Batch:
        """Return windows of the split, which (seed, step) and `order` determine."""
        check_request(split, step, batch_size, seed)
        ids = self._ids[split]
        continues = None
        if self.order == "random":
            places = step * batch_size + np.arange(batch_size)
            starts = shifted(len(ids) - 1, self.length, places, seed)
        elif self.order == "drawn":
            starts = np.random.default_rng((seed, step)).integers(len(ids) - self.length, size=batch_size)
        else:
            size = (len(ids) - 1) // self.length
            numbers, reads_on = consecutive(size, step=step, batch_size=batch_size, seed=seed)
            starts, continues = numbers * self.length, torch.from_numpy(reads_on)
        windows = torch.from_numpy(ids[starts[:, None] + np.arange(self.length + 1)].astype(np.int64))
        return Batch(windows[:, :-1], windows[:, 1:], continues=continues)

    def eval_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield consecutive windows in which every token of the split but its first is a target exactly once.

        The last window is padded with `IGNORED` targets, so average losses over targets, not over windows.
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
        """Return the ids of both splits in the smallest integer type; set the attributes that decode them."""
        names = (
            {"path": self.path} if self.val_path is None else {"path": self.path, "val_path": self.val_path}
        )
        contents = [_content(option, path, self.data_dir) for option, path in names.items()]
        if self.level == "bytes":
            self._found(256)
            return self._parts([np.frombuffer(content, np.uint8) for content in contents])
        texts = [_text(content, path) for content, path in zip(contents, names.values(), strict=True)]
        if self.level not in TOKENS:
            return self._learned(self._parts(texts))
        points, ids = np.unique(np.frombuffer("".join(texts).encode("utf-32-le"), "<u4"), return_inverse=True)
        self.characters = tuple(map(chr, points))
        self._found(len(points))
        ids = ids.astype(np.min_scalar_type(len(points) - 1))
        return self._parts(np.split(ids, [len(text) for text in texts[:-1]]))

    def _found(self, vocab_size: int) -> None:
        """Set `vocab_size` to the number of ids that the text has."""
        if self.vocab_size not in (None, vocab_size):
            raise ValueError(
                f"vocab_size is {self.vocab_size}, but {self.path} has {vocab_size} {TOKENS[self.level]}: "
                "leave it out, or choose level='bpe' (in the settings of a saved run: the text has changed)"
            )
        self.vocab_size = vocab_size

    def _parts(self, contents: Sequence[Part]) -> dict[Split, Part]:
        """Return the two contents as the splits, or cut the only content in two."""
        if len(contents) == 2:
            return {"train": contents[0], "val": contents[1]}
        (whole,) = contents
        cut = int(len(whole) * (1 - self.val_fraction))
        return {"train": whole[:cut], "val": whole[cut:]}

    def _learned(self, parts: dict[Split, str]) -> dict[Split, np.ndarray]:
        """Learn byte pairs or words from the training part, and return the ids of both splits."""
        if self.level != "bpe":
            if self.vocab_size == 1:
                raise ValueError(f"vocab_size is 1, but must be at least 2 with level={self.level!r}")
            split = WORDS if self.level == "words" else BLANKS
            self.text_tokenizer = TextTokenizer.learn_words(pieces(parts["train"]), split, self.vocab_size)
            if len(self.text_tokenizer) == 1:
                raise ValueError(
                    f"level is {self.level!r}, but in the training part of {self.path} no word occurs twice: "
                    "set vocab_size, or choose another level"
                )
        else:
            size = DEFAULT_SIZE if self.vocab_size is None else self.vocab_size
            if size < SMALLEST:
                raise ValueError(
                    f"vocab_size is {size}, but must be at least {SMALLEST} with level='bpe': "
                    "256 bytes, and the end of a document"
                )
            self.text_tokenizer = TextTokenizer.learn(pieces(parts["train"]), size)
        self.vocab_size = len(self.text_tokenizer)
        return {split: self.text_tokenizer.encode_array(part) for split, part in parts.items()}


def _content(option: str, path: str | Path, data_dir: str | Path | None) -> bytes:
    """Read a known text or a file."""
    if isinstance(path, str) and path in KNOWN:
        return read_published(KNOWN[path], data_dir)
    if not Path(path).expanduser().is_file():
        raise ValueError(
            f"{option} is {str(path)!r}, which is neither a file nor a known text ({', '.join(KNOWN)})"
        )
    content = read_file(path)
    if not content:
        raise ValueError(f"{path} is empty, but must hold a text")
    return content


def _text(content: bytes, path: str | Path) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 at byte {error.start} ({content[error.start]:#04x}): "
            "read it with data.level=bytes"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _place(path: str | Path) -> Path:
    return Path(path).expanduser().resolve()
