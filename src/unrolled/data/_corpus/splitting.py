"""Which documents are held out for validation."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from unrolled.contract import Split
from unrolled.data._corpus.documents import Documents, Piece


@dataclass(frozen=True)
class Splitting:
    """How a corpus is split.

    A document is held out if the hash of its first piece, as a number from 0 to 1, is below the fraction, so
    that equal documents are in the same split. If this leaves a split empty, as with few documents, only the
    last document is held out instead, even if an earlier one equals it; of a single document, its end.

    Attributes:
        fraction: fraction of the documents to hold out.
        last: the place of the last document if that one is held out; None if hashes decide.
        cut: for a single document, the number of characters before the part that is held out; else None.
    """

    fraction: float
    last: tuple[int, int] | None = None
    cut: int | None = None

    @classmethod
    def of(cls, documents: Documents, fraction: float) -> "Splitting":
        """Read documents until both splits have one, or to the end of the input.

        Raises:
            ValueError: there is no document, or as `Documents.pieces`.
        """
        sides, count, characters, last = set(), 0, 0, None
        for piece in documents.pieces():
            if piece.begins:
                sides.add(_hash(piece.text) < fraction)
                count += 1
            if len(sides) == 2:
                return cls(fraction)
            characters, last = characters + len(piece.text), piece.place[:2]
        if last is None:
            raise ValueError("the files have no text, but must have a document to train on")
        cut = min(int(characters * (1 - fraction)), characters - 1)  # at least one is held out
        return cls(fraction, last, cut if count == 1 else None)

    def split(self, pieces: Iterator[Piece]) -> Iterator[tuple[Split, Piece]]:
        """Yield each piece with its split; a piece that reaches from one split into the other is cut.

        If the end of a document is held out, the part before it does not end the document.
        """
        held_out: Split = "train"
        for piece in pieces:
            if self.cut is not None:
                yield from self._cut_piece(piece, self.cut)
                continue
            if piece.begins:
                chosen = piece.place[:2] == self.last if self.last else _hash(piece.text) < self.fraction
                held_out = "val" if chosen else "train"
            yield held_out, piece

    def _cut_piece(self, piece: Piece, cut: int) -> Iterator[tuple[Split, Piece]]:
        file, document, character = piece.place
        text, first = piece.text, cut - character
        if first > 0:
            yield "train", piece._replace(text=text[:first], ends=False)
        if first < len(text):
            place, begins = (file, document, max(character, cut)), character <= cut
            yield "val", Piece(text[max(first, 0) :], place, begins, piece.ends)


def _hash(text: str) -> float:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
