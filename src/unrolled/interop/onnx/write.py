"""Write a model as ONNX graphs, traced once for any batch and length, and compared with the model."""

import re
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from unrolled.contract import UnsupportedError
from unrolled.extras import how_to_install
from unrolled.interop.onnx import forms
from unrolled.interop.onnx.graph import Length, Recurrence, exported, quiet
from unrolled.interop.onnx.model import open_session
from unrolled.models.limits import n_positions
from unrolled.ops.tracing import without_shape_cache

if TYPE_CHECKING:
    from onnx import ModelProto
    from onnxruntime import InferenceSession

OPSETS = range(20, 26)  # versions with all operators of the graphs
MOST_BYTES = 2**31 - 2**24  # of the weights in a file of protobuf, with 16 MiB for the rest of the graph
AGREEMENT = 1e-4  # largest difference from the model, relative to the largest number compared


class DisagreementError(RuntimeError):
    """The outputs of a graph differ from those of the model it was traced from."""


def to_onnx(model: Any, *, opset: int, fused: bool = False, probes: bool = False) -> tuple[Recurrence, bytes]:
    """Trace a model; return the recurrence that was traced and the bytes of its graph.

    A graph reads any number of tokens per call if the parallel forms of the mechanisms can be exported, else
    one token.

    Raises:
        UnsupportedError: the model has no recurrent form or is not in fp32, the opset cannot be written, or
            the fused operator supports no part of the model.
    """
    check_exportable(model, opset)
    replaced = forms.fused() if fused else forms.portable()
    reasons = []
    lengths: tuple[Length, ...] = ("any", 1)
    for length in lengths:
        recurrence = Recurrence(model, length=length, probes=probes)
        try:
            content = _trace(recurrence, replaced, opset)
            compare(recurrence, open_session(content))
        except (UnsupportedError, ImportError, MemoryError):
            raise
        except Exception as error:  # torch's exporter raises errors of many types
            reasons.append(error)
            continue
        if fused and b"com.microsoft" not in content:
            raise UnsupportedError(
                "the fused graph requires linear attention, which this model lacks; use the plain graph"
            )
        return recurrence, content
    raise UnsupportedError(
        f"this model cannot be written as a graph: {why(reasons[-1])}; "
        "linear, window and softmax attention can"
    ) from reasons[-1]


def check_exportable(model: nn.Module, opset: int) -> None:
    """Check that the opset can be written, that the model is in fp32, and that a graph can hold its weights.

    Raises:
        UnsupportedError: the opset or the model is not supported.
        ValueError: a weight is not finite.
    """
    if opset not in OPSETS:
        raise UnsupportedError(f"opset is {opset}, but must be from {OPSETS[0]} to {OPSETS[-1]}")
    if wrong := {x.dtype for x in model.parameters()} - {torch.float32}:
        raise UnsupportedError(f"the model is {wrong.pop()}, but must be float32; convert it with .float()")
    weights = dict(model.named_parameters())
    size = sum(x.nbytes for x in weights.values())
    if size > MOST_BYTES:
        raise UnsupportedError(
            f"the model has {size / 1e9:.1f} GB of weights; a graph holds at most {MOST_BYTES / 1e9:.1f} GB"
        )
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise ValueError(f"{name} has numbers that are not finite, so there is nothing to export")


def why(error: Exception) -> str:
    """Summarise an error of torch's exporter."""
    said = re.sub("\x1b\\[\\d+m", "", str(error))  # remove colours
    if missing := re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", said):
        return f"ONNX has no operator for {missing[1]}"
    if "Constraints violated" in said:
        return "its computation depends on the number of tokens read"
    if isinstance(error, GuardOnDataDependentSymNode) or "data-dependent" in said:
        return "its computation depends on the values of the tokens"
    if isinstance(error, DisagreementError):
        return said
    return (said.splitlines() or [""])[0][:200].rstrip(" .") or type(error).__name__


@torch.no_grad()
def compare(recurrence: Recurrence, session: "InferenceSession") -> None:
    """Run a graph and the model on random tokens, in calls of several sizes.

    Raises:
        DisagreementError: the outputs differ by more than `AGREEMENT` of the largest number compared.
    """
    bound = n_positions(recurrence.model) or 16
    lengths = (1,) * min(4, bound) if recurrence.length == 1 else (min(5, bound), min(3, bound - 6), 1)
    outputs = [x.name for x in session.get_outputs()]
    inputs = [x.name for x in session.get_inputs()]
    generator = torch.Generator().manual_seed(0)
    for batch_size in (1, 3):
        state: tuple[Tensor, ...] = tuple(leaf.initial(batch_size) for leaf in recurrence.leaves)
        for length in lengths:
            if length < 1:
                break
            vocab_size = recurrence.model.config.vocab_size
            tokens = torch.randint(vocab_size, (batch_size, length), generator=generator)
            expected = recurrence(tokens, *state)
            feeds = {name: x.numpy() for name, x in zip(inputs, (tokens, *state), strict=True)}
            for name, x, y in zip(outputs, session.run(outputs, feeds), expected, strict=True):
                check_agreement(name, torch.from_numpy(x), y)
            state = expected[1 : 1 + len(state)]


def check_agreement(name: str, found: Tensor, expected: Tensor) -> None:
    """Compare an output of a graph with that of the model.

    Raises:
        DisagreementError: the shapes differ, or the numbers differ by more than `AGREEMENT` of the largest.
    """
    found, y = found.double(), expected.double()
    if found.shape != y.shape:
        raise DisagreementError(f"{name} has shape {list(found.shape)}, but must have {list(y.shape)}")
    # Equal infinities agree, but their difference is NaN.
    apart = torch.where(found == y, 0.0, (found - y).abs())
    size = torch.where(y.isfinite(), y.abs(), 0.0)
    difference, largest = (float(z.max()) if z.numel() else 0.0 for z in (apart, size))
    if not difference <= AGREEMENT * max(1.0, largest):
        raise DisagreementError(f"{name} differs from the model's by {difference:.1e}")


def quantized(content: bytes) -> bytes:
    """Return a graph with int8 matrices and dynamically quantised activations."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load_from_string(content)
    del model.graph.value_info[:]  # the quantiser would compare shapes with these, which have dynamic axes
    with TemporaryDirectory() as folder, quiet():
        path = Path(folder) / "int8.onnx"
        # Signed weights would need sums that overflow 16 bits on processors without VNNI, such as Zen 3.
        quantize_dynamic(model, path, weight_type=QuantType.QUInt8)
        return path.read_bytes()


def _trace(recurrence: Recurrence, replaced: forms.Forms, opset: int) -> bytes:
    names = [leaf.name for leaf in recurrence.leaves]
    outputs = ["logits", *(f"next.{name}" for name in names), *probe_names(recurrence)]
    with forms.InPlace(replaced):
        program = exported(recurrence)
    model = translated(program, opset, ["tokens", *names], outputs)
    _name_axes(model, recurrence)
    content: bytes = model.SerializeToString()
    return content


@torch.no_grad()
def translated(program: ExportedProgram, opset: int, inputs: list[str], outputs: list[str]) -> "ModelProto":
    """Translate a traced program to ONNX.

    Raises:
        NotImplementedError: the program has an operator of the library that has no form.
        UnsupportedError: torch wrote another opset, or operators that neither ONNX nor ONNX Runtime has.
        ImportError: onnx or onnxscript is missing.
    """
    try:
        import onnx  # noqa: F401  # torch imports it too, with a less clear error
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"exporting needs {error.name}, which is missing: {how_to_install('onnx')}"
        ) from error
    for node in program.graph.nodes:  # torch would find it too, but after seconds
        if getattr(node.target, "namespace", None) == "unrolled":
            name = str(node.target).removesuffix(".default")
            raise NotImplementedError(f"ONNX has no operator for {name}")
    with quiet(), without_shape_cache():
        written = torch.onnx.export(
            program,
            opset_version=opset,
            input_names=inputs,
            output_names=outputs,
            dynamo=True,
            verbose=False,
        )
    assert written is not None  # with dynamo
    model = written.model_proto
    found = {entry.domain: entry.version for entry in model.opset_import}
    if found.get("") != opset:
        raise UnsupportedError(f"opset is {opset}, but torch {torch.__version__} wrote {found.get('')}")
    if foreign := found.keys() - {"", "ai.onnx", "com.microsoft"}:
        raise UnsupportedError(f"the graph would need operators of {', '.join(sorted(foreign))}")
    _cut_weights(model)
    _remove_notes(model)
    return model


def _cut_weights(model: "ModelProto") -> None:
    """Split and transpose weights once, not in every call. The quantiser needs each matrix by itself.

    A transposed weight that is also read as it is, such as a tied embedding, stays one weight.
    """
    import numpy as np
    from onnx.numpy_helper import from_array, to_array

    graph = model.graph
    weights = {x.name: x for x in graph.initializer}
    given = set(weights)
    readers = Counter(name for x in graph.node for name in x.input)
    cut = []
    for node in graph.node:  # every node comes after those that it reads
        if node.op_type not in ("Split", "Transpose") or not {*node.input} <= weights.keys():
            continue
        if node.op_type == "Transpose" and readers[node.input[0]] > 1:
            continue
        whole, *sizes = (to_array(weights[name]) for name in node.input)
        options = {x.name: x for x in node.attribute}
        if node.op_type == "Transpose":
            parts = [whole.transpose([*options["perm"].ints] if "perm" in options else None)]
        elif sizes:
            parts = np.split(whole, np.cumsum(sizes[0])[:-1], options["axis"].i if "axis" in options else 0)
        else:
            continue
        for part, name in zip(parts, node.output, strict=True):
            weights[name] = from_array(np.ascontiguousarray(part), name)
        cut.append(node)
    for node in cut:
        graph.node.remove(node)
    used = {name for x in graph.node for name in x.input} | {x.name for x in graph.output}
    graph.initializer.extend(weights[name] for name in weights if name in used and name not in given)
    for i in reversed(range(len(graph.initializer))):
        if graph.initializer[i].name not in used:
            del graph.initializer[i]


def _remove_notes(model: "ModelProto") -> None:
    """Remove where each operator comes from: large, and full of paths of this machine."""
    graph = model.graph
    values = (*graph.input, *graph.output, *graph.value_info, *graph.initializer)
    for part in (model, graph, *model.functions, *graph.node, *values):
        del part.metadata_props[:]
        part.doc_string = ""


def probe_names(recurrence: Recurrence) -> list[str]:
    """Return the names of the outputs that hold features of queries."""
    return [f"layers.{layer}.phi_q" for layer in recurrence.probed]


def _name_axes(model: "ModelProto", recurrence: Recurrence) -> None:
    """Name the dynamic axes of inputs and outputs "batch", "length", "past" and "total" (past + length)."""
    growing = {leaf.name: leaf.growing_axis for leaf in recurrence.leaves}
    for value in (*model.graph.input, *model.graph.output):
        dims = value.type.tensor_type.shape.dim
        after = value.name.startswith("next.")
        dims[0].dim_param = "batch"
        axis = growing.get(value.name.removeprefix("next."))
        if axis is not None:
            dims[axis].dim_param = "total" if after else "past"
        if (value.name in ("tokens", "logits") or value.name in probe_names(recurrence)) and (
            recurrence.length == "any"
        ):
            dims[1].dim_param = "length"
