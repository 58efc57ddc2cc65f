"""One step of a model, compiled ahead of time by AOTInductor into a package that runs without Python.

A package is native code for the kind of machine that compiled it. Loading a package executes its code: load
only packages that you made yourself.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unrolled.files import write_file
from unrolled.interop.onnx.folder import description, weights_checksum
from unrolled.interop.onnx.graph import Recurrence, exported, quiet
from unrolled.interop.onnx.manifest import Manifest
from unrolled.interop.onnx.model import ExportedModel
from unrolled.interop.onnx.record import describe_file

PACKAGE = "step.pt2"


class AotModel(ExportedModel):
    """A model compiled by AOTInductor, which reads a prompt token by token."""

    def __init__(self, manifest: Manifest, package: Callable[..., list[Tensor]]) -> None:
        super().__init__(manifest, piece=1)
        self._package = package

    @torch.inference_mode()
    def _call(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return self._package(*(x.contiguous() for x in inputs))


def export_aot(model: Any, folder: str | Path) -> Manifest:
    """Compile a step for any batch size, including the weights, into a folder written by `onnx.export`.

    This takes seconds to minutes, and needs a C++ compiler.

    Args:
        model: the model of that folder, in fp32.
        folder: a folder written by `unrolled.interop.onnx.export`.

    Returns:
        The manifest, which now lists the package.

    Raises:
        ValueError: the folder holds another model.
        UnsupportedError: the model does not run as a recurrence.
    """
    folder = Path(folder)
    manifest = Manifest.load(folder)
    recurrence = Recurrence(deepcopy(model).cpu().eval(), length=1)
    if manifest.model != description(model) or manifest.weights != weights_checksum(model):
        raise ValueError(f"{folder} holds another model than the one given: export that one first")
    program = exported(recurrence)

    def compile_into(file: Path) -> None:
        named = file.with_suffix(".pt2")  # the compiler requires this suffix
        with quiet():
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(named), inductor_configs={"freezing": True}
            )
        named.replace(file)

    write_file(folder / PACKAGE, compile_into)
    manifest.files[PACKAGE] = describe_file(folder / PACKAGE)
    manifest.save(folder)
    return manifest


def load_aot(folder: str | Path) -> AotModel:
    """Load the compiled step of an exported folder, after verifying its hash.

    Raises:
        ValueError: the folder has no compiled step, or its file does not match the manifest.
    """
    folder = Path(folder)
    manifest = Manifest.load(folder)
    if PACKAGE not in manifest.files:
        raise ValueError(f"{folder} holds no {PACKAGE}; export again with --aot")
    manifest.read(folder, PACKAGE)
    return AotModel(manifest, torch._inductor.aoti_load_package(str(folder / PACKAGE)))
