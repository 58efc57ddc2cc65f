"""The folder of a tokenised corpus: shards of ids, and `index.json`, which describes them.

tokenizer.json               the tokenizer
index.json                   see `Index`
train-00000.npy, ...         ids, uint16 or uint32; a document ends with an id that has no other use
train-00000-starts.npy, ...  uint32: where documents begin in the shard
val-00000.npy, ...           the same for the documents held out for validation

A shard may begin inside a document. A part is the shards with one number; a split without tokens in this part
has no shard.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from unrolled.contract import Split
from unrolled.files import read_object, write_file

FILE_NAME, TOKENIZER_FILE = "index.json", "tokenizer.json"
FORMAT, VERSION = "unrolled-tokens", 1


@dataclass(frozen=True)
class Shard:
    """A file of ids, and the file of the places where documents begin in it.

    Attributes:
        tokens: number of ids.
        starts: number of documents that begin in the shard.
        sizes: bytes of both files.
        sha256: SHA-256 of both files.
    """

    tokens: int
    starts: int
    sizes: tuple[int, int]
    sha256: tuple[str, str]


@dataclass(frozen=True)
class Part:
    """The shards with one number.

    Attributes:
        shards: the shards, by the name of the split.
        documents: number of documents that begin in the part; a document that is cut between the splits
            counts once.
        text_bytes: number of bytes of UTF-8 that the tokens stand for.
        reached: where the next part begins in the input: the number of the file, of the document in the
            file, and of the character in the document.
    """

    shards: dict[Split, Shard]
    documents: int
    text_bytes: int
    reached: tuple[int, int, int]


@dataclass
class Index:
    """The contents of `index.json`.

    Attributes:
        settings: the input and the options of the corpus; the same settings give the same files.
        vocab_size: number of ids.
        end: the id at the end of every document.
        dtype: dtype of the ids, "uint16" or "uint32".
        complete: whether the whole input was read.
        parts: the parts in order.
    """

    settings: dict[str, Any]
    vocab_size: int
    end: int
    dtype: str
    complete: bool = False
    parts: list[Part] = field(default_factory=list)

    @property
    def totals(self) -> dict[str, int]:
        """The documents, the tokens of each split, and the bytes of text."""
        every = [(split, shard) for part in self.parts for split, shard in part.shards.items()]
        return {
            "documents": sum(part.documents for part in self.parts),
            **{
                f"{split}_tokens": sum(shard.tokens for name, shard in every if name == split)
                for split in get_args(Split)
            },
            "text_bytes": sum(part.text_bytes for part in self.parts),
        }

    def save(self, folder: Path) -> None:
        """Write `index.json`."""
        values = {"format": FORMAT, "version": VERSION, **self.totals, **asdict(self)}
        write_file(folder / FILE_NAME, json.dumps(values, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "Index":
        """Read `index.json`.

        Raises:
            ValueError: there is no such file, or it is damaged.
        """
        path = folder / FILE_NAME
        if not path.is_file():
            raise ValueError(f"{folder} is not a folder of unrolled tokenize: it has no {FILE_NAME}")
        values = read_object(path)
        if not values:
            raise ValueError(f"{path} is damaged: it has no format")
        if (found := (values.get("format"), values.get("version"))) != (FORMAT, VERSION):
            raise ValueError(f"{path} has the format {found}, but must have {(FORMAT, VERSION)}")
        try:
            names = ("settings", "vocab_size", "end", "dtype", "complete")
            parts: Any = values["parts"]
            known: Any = {name: values[name] for name in names}
            index = cls(**known, parts=[_part(part) for part in parts])
            same = {name: values[name] for name in index.totals} == index.totals
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: {error!r}") from error
        if not same:
            raise ValueError(f"{path} is damaged: its totals are not those of its parts")
        return index


def is_corpus(folder: Path) -> bool:
    """Return whether a folder holds a corpus, finished or not."""
    return read_object(folder / FILE_NAME).get("format") == FORMAT


def shard_files(split: Split, number: int) -> tuple[str, str]:
    """Return the names of the two files of a shard: its ids, and the places where documents begin."""
    return f"{split}-{number:05}.npy", f"{split}-{number:05}-starts.npy"


def _part(values: dict[str, Any]) -> Part:
    shards = {
        split: Shard(x["tokens"], x["starts"], tuple(x["sizes"]), tuple(x["sha256"]))
        for split, x in values["shards"].items()
    }
    file, document, character = values["reached"]
    return Part(shards, values["documents"], values["text_bytes"], (file, document, character))
