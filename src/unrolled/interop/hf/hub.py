"""Models on the hub of Hugging Face, which are named as folders are."""

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model"]  # configs, weights and tokenizers


def folder_of(source: str | Path, **options: Any) -> Path:
    """Return the folder `source`, or the one to which the hub's model of that name was downloaded.

    `options` are those of `huggingface_hub.snapshot_download`, which also says which errors there are.
    """
    if Path(source).is_dir():
        return Path(source)
    return Path(snapshot_download(str(source), allow_patterns=PATTERNS, **options))
