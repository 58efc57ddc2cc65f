"""Text files as the tokens of a model of transformers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from unrolled.contract import Split
from unrolled.data.text import TextDataset


class TokenizedText(TextDataset):
    """Concatenated files as tokens: windows for training, and the end held out for validation.

    Args:
        files: UTF-8 texts.
        tokenizer: a tokenizer of transformers; no special tokens are added.
        length: tokens per window.
        val_fraction: the fraction at the end that is held out for validation.

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

    def _read(self) -> dict[Split, np.ndarray]:
        texts = []
        for file in self.files:
            try:
                texts.append(Path(file).read_text(encoding="utf-8-sig"))
            except OSError as error:
                raise ValueError(f"{file}: {error.strerror}") from error
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 at byte {error.start}") from error
        ids = self.tokenizer("\n".join(texts), add_special_tokens=False, verbose=False)["input_ids"]
        self._found(len(self.tokenizer))
        return self._parts([np.asarray(ids, dtype=np.int32)])
