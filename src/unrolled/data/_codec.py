"""Characters or bytes as ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Codec:
    """Text to ids and back.

    Attributes:
        vocabulary: the characters in the order of their ids, or None for the bytes of UTF-8.
    """

    vocabulary: Sequence[str] | None

    def encode(self, text: str) -> Tensor:
        """Return the ids of a text, int64 [T].

        Raises:
            ValueError: a character is not in the vocabulary.
        """
        if self.vocabulary is None:
            return torch.tensor(list(text.encode()), dtype=torch.long)
        ids = {character: i for i, character in enumerate(self.vocabulary)}
        unknown = sorted(set(text) - ids.keys())
        if unknown:
            found = ", ".join(map(repr, unknown))
            raise ValueError(
                f"the text has {found}, which the vocabulary of {len(ids)} characters does not have"
            )
        return torch.tensor([ids[character] for character in text], dtype=torch.long)

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """Return the text of ids [T]; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        values = ids_below(256 if self.vocabulary is None else len(self.vocabulary), ids)
        if self.vocabulary is None:
            return bytes(values).decode(errors="replace")
        return "".join([self.vocabulary[i] for i in values])


def ids_below(size: int, ids: Tensor | Sequence[int]) -> list[int]:
    """Return ids as a list.

    Raises:
        ValueError: an id is negative, or `size` or more.
    """
    values = listed(ids)
    if values and not 0 <= min(values) <= max(values) < size:
        raise ValueError(f"ids reach from {min(values)} to {max(values)}, but must be from 0 to {size - 1}")
    return values


def listed(ids: Tensor | Sequence[int]) -> list[int]:
    """Return ids as a list."""
    # A server decodes single ids: a tensor of each would take most of the time.
    return ids.tolist() if isinstance(ids, Tensor) else [int(i) for i in ids]
