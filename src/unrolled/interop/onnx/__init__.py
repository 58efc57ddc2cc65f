"""Models as ONNX graphs: `export` writes a folder, `load` runs it in ONNX Runtime (extra `onnx`).

A graph is the recurrence itself, tokens and state in, logits and state out, with batch and length open. One
graph therefore reads a prompt in parallel and generates token by token.
"""

from unrolled.interop.onnx.folder import export, is_export_of
from unrolled.interop.onnx.manifest import Manifest
from unrolled.interop.onnx.model import OnnxModel, load

__all__ = ["Manifest", "OnnxModel", "export", "is_export_of", "load"]
