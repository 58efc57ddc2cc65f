"""A SHA-256 of the weights, the config and the documents of a model, in folders of transformers."""

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from unrolled.files import DIGEST_KEY, add_digest, check_digest, read_header, read_object, write_file
from unrolled.folders import CONFIG_FILE
from unrolled.models.saving import read_json

# Fields of a config that do not change what the weights mean, and may be edited after saving. One folder may
# hold a model's weights in several dtypes, as variants.
FREE = ("_name_or_path", "auto_map", "dtype", "id2label", "label2id", "transformers_version")


def seal(
    folder: str | Path, documents: Mapping[str, object] | None = None, variant: str | None = None
) -> None:
    """Write documents into a folder of `save_pretrained`, and a digest of everything into its weights files.

    A weights file with a digest is left as it is, since the last `save_pretrained` did not write it. So is a
    folder without weights files, as in processes of a parallel run that do not write.

    Args:
        folder: the folder that `save_pretrained` has written.
        documents: JSON values by the names of their files, such as a vocabulary.
        variant: that of `save_pretrained`.
    """
    folder, documents = Path(folder), documents or {}
    written = [
        file for file in weights_files(folder, variant) if DIGEST_KEY not in read_header(file).metadata
    ]
    if not written:
        return
    for name, value in documents.items():
        write_file(folder / name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    for file in written:
        add_digest(file, {name: _document(folder, name) for name in (CONFIG_FILE, *documents)})


def check(files: Iterable[Path]) -> dict[str, object]:
    """Compare weights files, and the files beside them, with the digests that `seal` wrote, if there are any.

    Returns:
        The documents that `seal` was given.

    Raises:
        ValueError: a file was changed after it was saved, or cannot be read.
    """
    found: dict[str, object] = {}
    for file in files:
        found |= check_digest(file, partial(_document, file.parent))
    return {name: value for name, value in found.items() if name != CONFIG_FILE}


def weights_files(folder: str | Path, variant: str | None = None) -> list[Path]:
    """Return the weights files that the last `save_pretrained` of this variant wrote into a folder.

    These are the shards of the index, or one file. transformers removes the shards of earlier saves, but not
    their index.
    """
    index = read_object(Path(folder) / _of_variant(SAFE_WEIGHTS_INDEX_NAME, variant)).get("weight_map")
    shards = {Path(folder) / str(name) for name in (index.values() if isinstance(index, dict) else ())}
    if any(file.exists() for file in shards):
        return sorted(shards)
    whole = _one_file(folder, variant)
    return [whole] if whole.exists() else []


def replaced_by_shards(folder: str | Path, variant: str | None = None) -> list[Path]:
    """Return the weights file of a folder that a later `save_pretrained` has replaced by shards, if any.

    transformers does not remove it, and `from_pretrained` prefers it to the new shards.
    """
    whole = _one_file(folder, variant)
    return [whole] if whole.exists() and whole not in weights_files(folder, variant) else []


def _one_file(folder: str | Path, variant: str | None) -> Path:
    return Path(folder) / _of_variant(SAFE_WEIGHTS_NAME, variant)


def _of_variant(name: str, variant: str | None) -> str:
    """Return the name that transformers gives to a file of a variant."""
    stem, _, ending = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{ending}"


def _document(folder: Path, name: str) -> object:
    value = read_json(folder / name)
    if name == CONFIG_FILE and isinstance(value, dict):
        return {key: x for key, x in value.items() if key not in FREE}
    return value
