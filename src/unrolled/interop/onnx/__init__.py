"""Models as ONNX graphs: `export` writes a folder, and `load` runs it in ONNX Runtime (extra `onnx`).

A graph is the recurrence itself: it maps tokens and a state to logits and the next state, for any batch size.
So the same graph reads a prompt and generates token by token. With most mechanisms, a call reads any number
of tokens in parallel; with the others, it reads one token (`Manifest.length`).

`export_transcriber` and `load_transcriber` do the same for models of speech, whose graph maps samples to
log-probabilities of symbols.
"""

from unrolled.interop.onnx.folder import export, is_export_of, read_manifest
from unrolled.interop.onnx.manifest import Manifest
from unrolled.interop.onnx.model import OnnxModel, load
from unrolled.interop.onnx.record import listed_files
from unrolled.interop.onnx.speech import export_transcriber
from unrolled.interop.onnx.speech_manifest import SpeechManifest
from unrolled.interop.onnx.transcriber import OnnxTranscriber, load_transcriber

__all__ = [
    "Manifest",
    "OnnxModel",
    "OnnxTranscriber",
    "SpeechManifest",
    "export",
    "export_transcriber",
    "is_export_of",
    "listed_files",
    "load",
    "load_transcriber",
    "read_manifest",
]
