"""The entries of a page: what it shows about a model, and whether it can use the model's vocabulary."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from unrolled import data

Vocabulary = dict[str, object]
"""The contents of a `vocabulary.json`."""


class Entry(TypedDict):
    """A model in `models.json`."""

    name: str
    title: str
    kind: str
    attention: object
    transformer: bool
    group: str
    bytes: int


def vocabulary_of(name: str, run: Path) -> Vocabulary:
    """Read the vocabulary of a run for the model `name` of a page.

    Raises:
        ValueError: the name is not a plain file name, or a page cannot use the vocabulary.
    """
    if not is_plain(name):
        raise ValueError(
            f"the name of a model is {name!r}, but must be a plain file name: it becomes a folder of the page"
        )
    path = run / "vocabulary.json"
    if not path.is_file():
        raise ValueError(f"{run} is not a run folder of unrolled train: it has no vocabulary.json")
    try:
        vocabulary: Vocabulary = dict(json.loads(path.read_text(encoding="utf-8")))
        kind = vocabulary["kind"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    if kind not in ("text", "tokenizer", "image", "ids", "speech"):
        raise ValueError(
            f"{run} has a vocabulary of the kind {kind!r}, "
            "but must have 'text', 'tokenizer', 'image', 'ids' or 'speech' for a page"
        )
    if kind == "tokenizer" and not _has_byte_pairs(str(vocabulary.get("tokenizer"))):
        raise ValueError(
            f"{run} has a tokenizer that a page cannot run: "
            "it must be byte pairs within the words of GPT-2, as unrolled learns them"
        )
    return vocabulary


def is_plain(name: str) -> bool:
    """Return whether a name is that of a visible file, without a path."""
    return bool(name) and Path(name).name == name and not name.startswith(".")


WORDS = {
    "aft": "AFT", "kda": "KDA", "mamba": "Mamba", "mamba2": "Mamba-2", "rfa": "RFA", "rwkv4": "RWKV-4",
    "rwkv7": "RWKV-7",
}  # fmt: skip
"""The names of mechanisms in a title, where they are not their words."""


def entry_of(name: str, model: Mapping[str, object], vocabulary: Vocabulary, size: int) -> Entry:
    """Return the entry of a model whose graph has `size` bytes."""
    attention = model.get("attention", model.get("cell"))
    names = attention if isinstance(attention, list) else [str(attention)]
    *first, last = (WORDS.get(name, name.replace("_", " ")) for name in dict.fromkeys(names))
    words = f"{', '.join(first)} and {last}" if first else last
    title = f"{words[0].upper()}{words[1:]} attention" if "attention" in model else words.upper()
    if attention is None:  # of the models without both, a model of speech
        title = "BiLSTM"
    sizes = vocabulary.get("shape")
    if vocabulary.get("data"):
        group = str(vocabulary["data"])
    elif isinstance(sizes, list):
        group = f"{sizes[0]} × {sizes[1]} pixels"
    else:
        group = {"ids": "Token ids", "speech": "Speech"}.get(str(vocabulary["kind"]), "Text")
    return {
        "name": name,
        "title": title,
        "kind": str(vocabulary["kind"]) if vocabulary["kind"] in ("image", "speech") else "text",
        "attention": attention,
        "transformer": "attention" in model,
        "group": group,
        "bytes": size,
    }


def distinguished(entries: list[Entry], vocabularies: Mapping[str, Vocabulary]) -> list[Entry]:
    """Make the names of groups and the titles of models unique by appending model names."""
    groups: dict[str, Vocabulary] = {}
    titles: set[tuple[str, str]] = set()
    for entry in entries:
        vocabulary = {key: value for key, value in vocabularies[entry["name"]].items() if key != "data"}
        same = [group for group, other in groups.items() if other == vocabulary]
        if same:
            entry["group"] = same[0]
        elif entry["group"] in groups:
            entry["group"] += f": {entry['name']}"
        groups[entry["group"]] = vocabulary
        if (entry["group"], entry["title"]) in titles:
            entry["title"] += f" ({entry['name']})"
        titles.add((entry["group"], entry["title"]))
    return entries


def _has_byte_pairs(tokenizer: str) -> bool:
    """Return whether a `tokenizer.json` is of the kind that `pairs.js` runs."""
    try:
        found = json.loads(tokenizer)
        model, words = found["model"], found["pre_tokenizer"] or {}
        plain = not any(model.get(x) for x in ("ignore_merges", "dropout", "byte_fallback"))
        affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        return (
            model["type"] == "BPE"
            and data.byte_letters().keys() <= model["vocab"].keys()
            and plain
            and not affixes
            and words.get("type") == "ByteLevel"
            and not words.get("add_prefix_space", True)
            and words.get("use_regex", True)
            and found["normalizer"] is None
            and (found["decoder"] or {}).get("type") == "ByteLevel"
            and all(token["special"] for token in found["added_tokens"])
        )
    except (ValueError, TypeError, LookupError, AttributeError):
        return False
