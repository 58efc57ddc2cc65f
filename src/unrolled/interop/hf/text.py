"""Text files as the tokens of a model of transformers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from unrolled.contract import Split
from unrolled.data import Vocabulary
from unrolled.data.text import TextDataset


class TokenizedText(TextDataset):
    """Concatenated files as tokens: windows for training, and the end held out for validation.

    Args:
        files: UTF-8 texts.
        tokenizer: a tokenizer of transformers; no special tokens are added.
        length: tokens per window.
        val_fraction: the fraction at the end that is held out for validation.

    Attributes:
        largest_id: the largest id of the text.

    Raises:
        ValueError: a file is missing or not UTF-8, or a part is too short.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        length: int = 256,
        val_fraction: float = 0.1,
    ) -> None:
        self.files, self.tokenizer = files, tokenizer
        path = ", ".join(map(str, files))
        super().__init__(path=path, length=length, val_fraction=val_fraction)

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens, under the name of the last file; plain numbers for a tokenizer in Python alone."""
        name = super().vocabulary.data
        if not self.tokenizer.is_fast:
            return Vocabulary("ids", data=name)
        contents = self.tokenizer.backend_tokenizer.to_str()
        return Vocabulary("tokenizer", tokenizer=contents, end=self.tokenizer.eos_token_id, data=name)

    def encode(self, text: str) -> Tensor:
        """Return the ids of a text, int64 [T]."""
        return torch.tensor(self._tokens(text), dtype=torch.long)

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """Return the text of ids [T]."""
        values = torch.as_tensor(ids, dtype=torch.long).tolist()
        return str(self.tokenizer.decode(values, clean_up_tokenization_spaces=False))

    def _read(self) -> dict[Split, np.ndarray]:
        texts = []
        for file in self.files:
            try:
                texts.append(Path(file).read_text(encoding="utf-8-sig"))
            except OSError as error:
                raise ValueError(f"{file}: {error.strerror}") from error
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 at byte {error.start}") from error
        self._found(len(self.tokenizer))
        text = "\n".join(texts)
        ids = np.asarray(self._tokens(text), dtype=np.int32)
        if text and not len(ids):  # transformers makes an empty tokenizer where it finds no files
            raise ValueError(
                "the tokenizer makes no tokens of the text: the folder of the model may have none"
            )
        self.largest_id = int(ids.max(initial=0))
        return self._parts([ids])

    @property
    def _unit(self) -> str:
        return "tokens"

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
