"""The state of one sequence as an immutable value, whose id is the SHA-256 of its contents.

The tensors are the state after every token but the last, which is `pending`. So states after a prompt, after
a finished answer and in the middle of a text have the same form: to continue one, the model reads `pending`
and then the new tokens. Equal contents have equal ids, so a request sent twice makes the same state twice.
"""

import hashlib
import json
import re
import struct
from dataclasses import dataclass
from functools import cached_property

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from unrolled.decode.program import MOST_POSITIONS
from unrolled.files import OF_ODD_HEADERS, apart, sort_metadata
from unrolled.ops.state import raw_bytes
from unrolled.serving.store.checks import DIGEST

MOST = MOST_POSITIONS  # tokens of a sequence, and the largest id
MOST_HELD = 4  # tokens of a character that is not complete
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
_KEYS = ("id", "length", "model", "pending")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state of one sequence.

    Two snapshots are equal if their ids are.

    Attributes:
        model: the digest of the model, 64 hex digits.
        length: number of tokens of the sequence so far, including `pending`; at least 1.
        pending: the last token; the tensors are the state before it.
        tensors: tensors of one sequence by name, on the CPU and contiguous; they must not be changed.
        held: the last tokens, if they are the beginning of a character that is not complete, so that no
            answer has shown it yet.

    Raises:
        ValueError: an attribute is not as described.
    """

    model: str
    length: int
    pending: int
    tensors: dict[str, Tensor]
    held: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not DIGEST.fullmatch(self.model):
            raise ValueError(f"model must be 64 hex digits, not {self.model[:80]!r}")
        if len(self.held) > MOST_HELD:
            raise ValueError(f"held must have at most {MOST_HELD} tokens, not {len(self.held)}")
        numbers = [("length", self.length, 1), ("pending", self.pending, 0)]
        for name, value, least in [*numbers, *(("held", token, 0) for token in self.held)]:
            if not least <= value <= MOST:
                raise ValueError(f"{name} must be from {least} to {MOST}, not {value}")
        for name, x in self.tensors.items():
            if name == "__metadata__":
                raise ValueError("a tensor may not be named __metadata__, which safetensors keeps for itself")
            if x.layout != torch.strided or x.device.type != "cpu" or not x.is_contiguous():
                raise ValueError(f"the tensor {name!r} must be contiguous and on the CPU")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    @cached_property
    def id(self) -> str:
        """The SHA-256 of the attributes and of the names, dtypes, shapes and bytes of the tensors, in hex."""
        ordered = sorted(self.tensors.items())
        described = [[name, str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in ordered]
        parts = [self.model, self.length, self.pending, described, *([self.held] if self.held else [])]
        total = hashlib.sha256(json.dumps(parts).encode())
        for _, x in ordered:
            total.update(raw_bytes(x).numpy().data)
        return total.hexdigest()

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(x.nbytes for x in self.tensors.values())

    def to_bytes(self) -> bytes:
        """Return a safetensors file with `model`, `length`, `pending`, `id` and any `held` in its metadata.

        The bytes of a snapshot are the same on every call and every machine.
        """
        metadata = {key: str(getattr(self, key)) for key in _KEYS}
        if self.held:
            metadata["held"] = " ".join(map(str, self.held))
        content = bytearray(save(apart(self.tensors), metadata))
        sort_metadata(content)
        return bytes(content)

    @classmethod
    def of_bytes(cls, content: bytes, expected: str | None = None) -> "Snapshot":
        """Read what `to_bytes` wrote. The content need not be trusted.

        Args:
            content: a safetensors file. Memory and time are proportional to its size.
            expected: the id that the state must have.

        Raises:
            ValueError: `content` is not a safetensors file, its metadata are missing or wrong, or its id does
                not match its contents or `expected`.
        """
        tensors = _tensors(content)
        metadata = _metadata(content)
        if missing := [key for key in _KEYS if key not in metadata]:
            raise ValueError(f"the file is not a state: its metadata lack {', '.join(missing)}")
        length, pending = (_number(key, metadata[key]) for key in ("length", "pending"))
        held = tuple(_number("held", x) for x in metadata["held"].split(" ")) if "held" in metadata else ()
        found = cls(metadata["model"], length, pending, tensors, held)
        if found.id != metadata["id"]:
            raise ValueError(
                f"the state is damaged: it names the id {metadata['id'][:80]!r}, "
                f"but what it holds has the id {found.id}"
            )
        if expected not in (None, found.id):
            raise ValueError(f"the state has the id {found.id}, but must have {expected}")
        return found


def _tensors(content: bytes) -> dict[str, Tensor]:
    try:
        tensors = load(content)
    except SafetensorError as error:
        reason = " ".join(str(error).split())[:200]  # the error may quote the file
        raise ValueError(f"the state is not a readable safetensors file: {reason}") from error
    except OF_ODD_HEADERS as error:
        raise ValueError("the state has a tensor whose dtype or shape PyTorch cannot hold") from error
    for name, x in tensors.items():
        if x.dtype == torch.bool and x.numel() and int(raw_bytes(x).max()) > 1:
            raise ValueError(f"the state's tensor {name[:80]!r} is boolean, but has bytes other than 0 and 1")
    # Copies: tensors read from a file may be unaligned, which changes the rounding of some products.
    return {name: x.clone() for name, x in tensors.items()}


def _metadata(content: bytes) -> dict[str, str]:
    """Read the metadata of a safetensors file whose header safetensors has already checked."""
    (size,) = struct.unpack("<Q", content[:8])
    metadata: dict[str, str] | None = json.loads(content[8 : 8 + size]).get("__metadata__")
    return metadata or {}


def _number(key: str, text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"the state's metadata have {key} {text[:80]!r}, which is not a number of tokens")
    return int(text)
