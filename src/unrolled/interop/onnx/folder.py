"""Write the folder of an exported model: graphs, vocabulary and manifest."""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from unrolled.contract import Recurrent, UnsupportedError
from unrolled.data import VOCABULARY_FILE
from unrolled.folders import MANIFEST_FILE
from unrolled.generation import generate
from unrolled.interop.onnx import manifest as _manifest
from unrolled.interop.onnx.graph import Recurrence
from unrolled.interop.onnx.manifest import Manifest, Probe
from unrolled.interop.onnx.record import Record
from unrolled.interop.onnx.speech_manifest import SpeechManifest
from unrolled.interop.onnx.write import probe_names, quantized, to_onnx
from unrolled.models.limits import n_positions
from unrolled.training.checkpoint import fingerprint

OPSET = 20


def weights_checksum(model: nn.Module) -> str:
    """Return a checksum of the weights of a model, as in its manifest; it is the same on every device."""
    return fingerprint(*model.state_dict().values())


def description(model: Any) -> dict[str, Any]:
    """Return the name and the config of a model, as in its manifest."""
    return {"model": model.model_name, **json.loads(json.dumps(asdict(model.config)))}


def read_manifest(folder: str | Path) -> Record:
    """Read the manifest of an exported model of any kind.

    Raises:
        ValueError: there is no manifest, it was changed after it was written, or it has another format.
    """
    folder = Path(folder)
    try:
        found = json.loads((folder / MANIFEST_FILE).read_text())["format"]
    except (OSError, ValueError, LookupError, TypeError):
        found = None  # `load` says what is wrong
    kind = SpeechManifest if found == SpeechManifest.format else Manifest
    return kind.load(folder)


def is_export_of(folder: str | Path, model: nn.Module) -> bool:
    """Whether `folder` holds an export of `model` with its current weights."""
    try:
        return read_manifest(folder).weights == weights_checksum(model)
    except ValueError:
        return False


def export(
    model: Any,
    folder: str | Path,
    *,
    opset: int = OPSET,
    fused: bool = False,
    int8: bool = False,
    probes: bool = False,
    vocabulary: str | Path | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write a model as ONNX graphs into a folder that `load`, `unrolled generate` and web pages can run.

    Every graph except int8 is run and compared with the model before anything is written.

    Args:
        model: a `Decoder` or a `RecurrentLM` in fp32, on the CPU.
        folder: the folder to write; created if needed. The files of an earlier export in it are deleted.
        opset: version of ONNX's standard operators, 20 to 25.
        fused: also write `fused.onnx`, with ONNX Runtime's own operator for linear attention.
        int8: also write `int8.onnx`, with the matrices in 8 bits.
        probes: make the graphs also output the features of the queries, for visualisation.
        vocabulary: a `vocabulary.json` to copy into the folder.
        sampling: default arguments of `generation.generate`.

    Returns:
        The contents of the folder's `manifest.json`.

    Raises:
        UnsupportedError: a mechanism has no recurrent form, the opset is not supported, the model is not in
            fp32, `fused` is True but the model has no fused graph, or a `PerceiverAR` has fewer latents than
            positions.
        ValueError: `sampling` has an unknown argument, or one that is out of range.
        ImportError: onnx, onnxscript or onnxruntime is missing.
    """
    if unknown := set(sampling or {}) - set(_manifest.SAMPLING):
        raise ValueError(f"sampling has {sorted(unknown)}, but must have only {list(_manifest.SAMPLING)}")
    recurrent = isinstance(model, Recurrent)  # a variable, since mypy would narrow `model` to Recurrent
    if not recurrent:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be exported: it lacks init_state, prefill or step"
        )
    generate(model, [], 0, **(sampling or {}))  # checks the ranges of the arguments
    exported = deepcopy(model).cpu().eval()  # the caller's model keeps its mode and device
    recurrence, contents = _graphs(exported, opset=opset, fused=fused, int8=int8, probes=probes)
    written = _describe(exported, recurrence, opset)
    written.sampling |= dict(sampling or {})
    files = {} if vocabulary is None else {VOCABULARY_FILE: Path(vocabulary).read_bytes()}
    written.write(Path(folder), contents, files)
    return written


def _graphs(
    model: nn.Module, *, opset: int, fused: bool, int8: bool, probes: bool
) -> tuple[Recurrence, dict[str, bytes]]:
    """Trace the graphs of a model; return the traced module and the graphs by name."""
    recurrence, plain = to_onnx(model, opset=opset, probes=probes)
    contents = {"plain": plain}
    if fused:
        same, contents["fused"] = to_onnx(model, opset=opset, fused=True, probes=probes)
        if same.length != recurrence.length:  # the same manifest describes both
            raise UnsupportedError(
                f"the fused graph reads {same.length} token per call, but the plain one reads "
                f"{recurrence.length}; export the plain graph alone"
            )
    if int8:
        contents["int8"] = quantized(plain)
    return recurrence, contents


def _describe(model: Any, recurrence: Recurrence, opset: int) -> Manifest:
    """Make the manifest of a model, without its files."""
    config = model.config
    layers = recurrence.probed.items()
    return Manifest(
        unrolled=version("unrolled"),
        opset=opset,
        model=description(model),
        weights=weights_checksum(model),
        vocab_size=int(config.vocab_size),
        start_token=int(config.vocab_size) if config.start_token else None,
        max_positions=n_positions(model),
        length=recurrence.length,
        state=recurrence.leaves,
        probes=[
            Probe(name, layer, (attention.n_heads, attention.feature_map.feature_dim))
            for name, (layer, attention) in zip(probe_names(recurrence), layers, strict=True)
        ],
    )
