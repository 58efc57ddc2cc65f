"""A SHA-256 of the weights, the config and the documents of a model, in folders of transformers."""

import json
from collections.abc import Mapping
from pathlib import Path

from unrolled.files import add_digest, check_digest, write_file
from unrolled.folders import CONFIG_FILE
from unrolled.models.saving import read_json

# Fields of a config that do not affect the outputs of a model, and may be edited after saving.
FREE = ("_name_or_path", "auto_map", "id2label", "label2id", "transformers_version")


def seal(folder: str | Path, documents: Mapping[str, object] | None = None) -> None:
    """Write documents into a folder of `save_pretrained`, and a digest of everything into its weights files.

    A folder without a weights file is left as it is, as in processes of a parallel run that do not write.

    Args:
        folder: the folder that `save_pretrained` has written.
        documents: JSON values by the names of their files, such as a vocabulary.
    """
    folder, documents = Path(folder), documents or {}
    weights = _weights_files(folder)
    if not weights:
        return
    for name, value in documents.items():
        write_file(folder / name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    for file in weights:
        add_digest(file, {name: _document(folder, name) for name in (CONFIG_FILE, *documents)})


def check(folder: str | Path) -> dict[str, object]:
    """Compare the files of a local folder with the digest that `seal` wrote, if there is one.

    Returns:
        The documents that `seal` was given.

    Raises:
        ValueError: a file was changed after it was saved, or cannot be read.
    """
    found: dict[str, object] = {}
    for file in _weights_files(Path(folder)):
        found |= check_digest(file, lambda name: _document(Path(folder), name))
    return {name: value for name, value in found.items() if name != CONFIG_FILE}


def replaced_by_shards(folder: str | Path) -> list[Path]:
    """Return the weights files of a folder that a later `save_pretrained` has replaced by shards.

    Before transformers writes, it removes the shards of earlier saves, but not a file without shards, which
    `from_pretrained` then prefers to the new shards.
    """
    number = "-?????-of-?????"
    stems = {file.stem[: -len(number)] for file in Path(folder).glob(f"*{number}.safetensors")}
    return [file for file in Path(folder).glob("*.safetensors") if file.stem in stems]


def _weights_files(folder: Path) -> list[Path]:
    """Return the weights files of the model in a folder, without those of others, such as adapters."""
    return sorted(folder.glob("model*.safetensors"))


def _document(folder: Path, name: str) -> object:
    value = read_json(folder / name)
    if name == CONFIG_FILE and isinstance(value, dict):
        return {key: x for key, x in value.items() if key not in FREE}
    return value
