"""Web pages that run trained models: a self-contained folder for any static server.

index.html, *.js, *.css     the page
runtime/                    ONNX Runtime for browsers, as published on npm, with its licences
models/<name>/              the files that `unrolled.interop.onnx.export` writes
models.json                 the models, and which of them are shown side by side
"""

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict, cast

import unrolled
from unrolled import data
from unrolled.decode import load_model
from unrolled.extras import how_to_install
from unrolled.files import read_object, write_file
from unrolled.folders import writing_folder
from unrolled.models.ctc import CTCModel
from unrolled.models.saving import SavedModel

PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
BUILDS = {
    "wasm": {"module": "ort.wasm.bundle.min.mjs", "binary": "ort-wasm-simd-threaded.wasm"},
    "webgpu": {"module": "ort.webgpu.bundle.min.mjs", "binary": "ort-wasm-simd-threaded.asyncify.wasm"},
}
_ASYNCIFY = BUILDS["webgpu"]["binary"]
SHA256 = {
    "ort.wasm.bundle.min.mjs": "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
    "ort-wasm-simd-threaded.wasm": "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
    "ort.webgpu.bundle.min.mjs": "0730816731ce2cdfb06f273da065d4a1c7091eb9d1756a83b2916c8a89d015e2",
    _ASYNCIFY: "39f9f0894d478800487ed9f7dbe92618498db320cf55c8e3d89adff8dce658da",
}
INDEX, RUNTIME_INDEX = "models.json", "runtime.json"
NAMES = {build["module"]: build["module"].replace(".mjs", ".js") for build in BUILDS.values()}
"""The names of modules on the page: not every server sends .mjs with the type of a script."""
LICENCES = {"LICENSE": "LICENSE.txt", "ThirdPartyNotices.txt": "ThirdPartyNotices.txt"}
TIMEOUT = 600.0  # seconds for npm to fetch 33 MB
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


def write_site(
    runs: Mapping[str, str | Path],
    out: str | Path,
    *,
    runtime: str | Path | None = None,
    webgpu: bool = False,
    opset: int = 20,
    sampling: Mapping[str, object] | None = None,
) -> Path:
    """Write a page that runs trained models.

    Models with the same vocabulary are shown side by side.

    Args:
        runs: folders of training runs or of packed weights, by the names of the models on the page.
        out: the folder to write; created if needed.
        runtime: a folder with the files of onnxruntime-web, such as `node_modules/onnxruntime-web/dist`; None
            takes them from the cache or through npm.
        webgpu: also include the WebGPU build of ONNX Runtime (27 MB), used if the browser finds an adapter.
        opset: version of ONNX's standard operators, 20 to 25.
        sampling: default arguments of `generation.generate` on the page.

    Returns:
        `out`.

    Raises:
        ValueError: there is no run, a name is not a plain file name, a page cannot use the vocabulary of a
            run, or the runtime is missing or is not the published one.
        UnsupportedError: a model cannot be exported.
        ImportError: the extra `onnx` is missing.
    """
    from unrolled.interop import onnx

    out = Path(out)
    if not runs:
        raise ValueError("runs is empty, but must have the folder of at least one run")
    vocabularies = {name: _vocabulary(name, Path(run)) for name, run in runs.items()}
    found = runtime_files(runtime, webgpu=webgpu)
    notices = _notices()

    with writing_folder(out) as page:
        entries: list[Entry] = []
        for name, run in runs.items():
            folder = page / "models" / name
            model = _load(run)
            written: onnx.Manifest | onnx.SpeechManifest
            if isinstance(model, CTCModel):
                units = data.Vocabulary.load(Path(run))
                written = onnx.export_transcriber(model, folder, vocabulary=units, opset=opset)
            else:
                written = onnx.export(
                    model,
                    folder,
                    probes=True,
                    vocabulary=Path(run) / "vocabulary.json",
                    opset=opset,
                    sampling=sampling,
                )
            size = (folder / written.graphs["plain"]["file"]).stat().st_size
            if vocabularies[name]["kind"] in ("image", "ids"):  # the file does not say how many ids there are
                vocabularies[name]["size"] = written.vocab_size
            entries.append(_entry(name, written.model, vocabularies[name], size))
        for source in _sources():
            _copy(source, page / source.name)
        _write_runtime(page / "runtime", found, notices)
        _write_json(page / INDEX, _distinguished(entries, vocabularies))
    return out


def is_page_of(folder: str | Path, runs: Mapping[str, str | Path]) -> bool:
    """Return whether `folder` is a page of these models, or of some of them, written by `write_site`."""
    from unrolled.interop import onnx

    names = _names(Path(folder))
    return names is not None and all(
        name in runs and onnx.is_export_of(Path(folder) / "models" / name, _load(runs[name]))
        for name in names
    )


def is_current_page_of(folder: str | Path, runs: Mapping[str, str | Path]) -> bool:
    """Return whether `folder` is the whole page of exactly these models, written by this version.

    The sizes of the large files are compared, not their hashes.
    """
    from unrolled.interop import onnx

    folder = Path(folder)
    if _names(folder) != list(runs) or not is_page_of(folder, runs):
        return False
    copies = {source: folder / source.name for source in _sources()}
    manifests = {folder / "models" / name: onnx.read_manifest(folder / "models" / name) for name in runs}
    runtime = read_object(folder / "runtime" / RUNTIME_INDEX)
    return (
        all(
            x.unrolled == unrolled.__version__ and _are_whole(place, x.entries())
            for place, x in manifests.items()
        )
        and all(copy.is_file() and copy.read_bytes() == x.read_bytes() for x, copy in copies.items())
        and runtime.get("version") == VERSION
        and _are_whole(folder / "runtime", cast(Any, runtime["files"]))
    )


def _are_whole(folder: Path, entries: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a folder has files of these names and sizes."""
    files = {folder / name: entry["bytes"] for name, entry in entries.items()}
    return all(file.is_file() and file.stat().st_size == size for file, size in files.items())


def runtime_files(folder: str | Path | None = None, *, webgpu: bool = False) -> dict[str, Path]:
    """Find files of onnxruntime-web in a folder, in the cache or through npm, and verify their hashes.

    Raises:
        ValueError: a file is missing, or is not the published one.
    """
    builds = BUILDS if webgpu else {"wasm": BUILDS["wasm"]}
    names = [file for build in builds.values() for file in build.values()]
    if folder is not None:
        found = {name: Path(folder) / name for name in names}
        for name, path in found.items():
            if not path.is_file():
                raise ValueError(
                    f"{folder} has no {name}; it is in dist/ of the npm package {PACKAGE} {VERSION}"
                )
            if _sha256(path) != SHA256[name]:
                raise ValueError(f"{path} is not the file of {PACKAGE} {VERSION}: its SHA-256 differs")
        return found
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unrolled"
    kept = cache / f"{PACKAGE}-{VERSION}"
    found = {name: kept / name for name in names}
    if not all(path.is_file() and _sha256(path) == SHA256[name] for name, path in found.items()):
        kept.mkdir(parents=True, exist_ok=True)
        _fetch(found)
    return found


def _load(run: str | Path) -> SavedModel:
    """Read the model of a run, in fp32 as ONNX graphs have it."""
    return load_model(run).float()


def _sources() -> list[Path]:
    """Return the files of the page that are the same for all models."""
    return list(Path(unrolled.__file__).with_name("web").iterdir())


def _names(folder: Path) -> list[str] | None:
    """Return the names of the models of a page; None if the folder holds no page."""
    try:
        entries = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return [str(entry["name"]) for entry in entries]
    except (OSError, ValueError, TypeError, LookupError):
        return None


def _write_runtime(folder: Path, found: Mapping[str, Path], notices: list[Path]) -> None:
    """Write the files of the runtime, its licences, and the manifest that the page verifies them against."""
    folder.mkdir(exist_ok=True)
    names = NAMES | LICENCES
    for path in [*found.values(), *notices]:
        _copy(path, folder / names.get(path.name, path.name))
    sizes = {name: path.stat().st_size for name, path in found.items()}
    record = {
        "version": VERSION,
        "builds": {
            name: build | {"module": NAMES[build["module"]]}
            for name, build in BUILDS.items()
            if build["binary"] in found
        },
        "files": {
            names.get(name, name): {"sha256": SHA256[name], "bytes": size} for name, size in sizes.items()
        },
        "bytes": max(sizes.values()),  # of the largest build, for the progress bar while loading
    }
    _write_json(folder / RUNTIME_INDEX, record)


def _fetch(files: Mapping[str, Path]) -> None:
    """Download the package with npm, from its configured registry, and unpack files of it."""
    otherwise = (
        f"fetch it with `npm pack {PACKAGE}@{VERSION}` where there is a network, unpack it, "
        "and name its folder package/dist with --runtime"
    )
    npm = shutil.which("npm")
    if npm is None:
        raise ValueError(f"the page needs {PACKAGE} {VERSION}, but there is no npm to fetch it: {otherwise}")
    with tempfile.TemporaryDirectory() as name:
        command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--pack-destination", name]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT, cwd=name)
        except (subprocess.SubprocessError, OSError) as error:
            raise ValueError(f"npm could not fetch {PACKAGE} {VERSION}: {otherwise}") from error
        (archive,) = Path(name).glob("*.tgz")
        with tarfile.open(archive) as package:
            members = {member.name: member for member in package if member.isfile()}
            for file, path in files.items():
                member = members.get(f"package/dist/{file}")
                reader = None if member is None else package.extractfile(member)
                content = b"" if reader is None else reader.read()
                if hashlib.sha256(content).hexdigest() != SHA256[file]:
                    raise ValueError(
                        f"{file} from npm is not the file of {PACKAGE} {VERSION}: its SHA-256 differs"
                    )
                write_file(path, content)


def _notices() -> list[Path]:
    """Return the licences of ONNX Runtime from its Python package."""
    spec = find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        raise ImportError(f"a web page needs onnxruntime, which is missing: {how_to_install('onnx')}")
    return [Path(spec.origin).with_name(name) for name in LICENCES]


def _vocabulary(name: str, run: Path) -> Vocabulary:
    if not name or Path(name).name != name or name.startswith("."):
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


def _entry(name: str, model: Mapping[str, object], vocabulary: Vocabulary, size: int) -> Entry:
    attention = model.get("attention", model.get("cell"))
    if isinstance(attention, list):
        attention = " and ".join(dict.fromkeys(attention))
    words = str(attention).replace("_", " ")
    title = f"{words.capitalize()} attention" if "attention" in model else words.upper()
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


def _distinguished(entries: list[Entry], vocabularies: Mapping[str, Vocabulary]) -> list[Entry]:
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


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _copy(source: Path, target: Path) -> None:
    write_file(target, source.read_bytes())


def _write_json(path: Path, content: object) -> None:
    write_file(path, json.dumps(content, indent=1, ensure_ascii=False))
