"""Writes a page, and recognises one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import unrolled
from unrolled import data
from unrolled.decode import load_model
from unrolled.files import read_object, write_file
from unrolled.folders import MANIFEST_FILE, writing_folder
from unrolled.interop.web.entries import Entry, distinguished, entry_of, is_plain, vocabulary_of
from unrolled.interop.web.runtime import RUNTIME_INDEX, VERSION, find_licences, runtime_files, write_runtime
from unrolled.models.ctc import CTCModel
from unrolled.models.saving import SavedModel

INDEX = "models.json"


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
        out: the folder to write; created if needed. The models and the runtime of an earlier page in it are
            deleted.
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
    vocabularies = {name: vocabulary_of(name, Path(run)) for name, run in runs.items()}
    found = runtime_files(runtime, webgpu=webgpu)
    licences = find_licences()

    with writing_folder(out, _listed_files(out)) as page:
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
            entries.append(entry_of(name, written.model, vocabularies[name], size))
        for source in _sources():
            write_file(page / source.name, source.read_bytes())
        write_runtime(page / "runtime", found, licences)
        index = json.dumps(distinguished(entries, vocabularies), indent=1, ensure_ascii=False)
        write_file(page / INDEX, index)
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


def _listed_files(folder: Path) -> list[str]:
    """Name the files of models and runtime that the page in a folder lists; none if it holds no page."""
    from unrolled.interop import onnx

    names = _names(folder)
    if names is None:
        return []
    files = read_object(folder / "runtime" / RUNTIME_INDEX).get("files")
    paths = [f"runtime/{file}" for file in files if is_plain(file)] if isinstance(files, dict) else []
    for name in filter(is_plain, names):
        if listed := onnx.listed_files(folder / "models" / name):
            paths += [f"models/{name}/{file}" for file in [*listed, MANIFEST_FILE]]
    return [path for path in paths if (folder / path).is_file()]


def _are_whole(folder: Path, entries: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a folder has files of these names and sizes."""
    files = {folder / name: entry["bytes"] for name, entry in entries.items()}
    return all(file.is_file() and file.stat().st_size == size for file, size in files.items())


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
