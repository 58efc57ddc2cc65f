"""Models of speech as ONNX graphs: samples in, log-probabilities of the symbols out."""

import json
from copy import deepcopy
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from unrolled.contract import UnsupportedError
from unrolled.data import VOCABULARY_FILE, Vocabulary
from unrolled.interop.onnx import forms
from unrolled.interop.onnx.folder import OPSET, description, weights_checksum
from unrolled.interop.onnx.front_end import LogMel
from unrolled.interop.onnx.graph import quiet
from unrolled.interop.onnx.lstm import OnnxLSTM
from unrolled.interop.onnx.model import open_session
from unrolled.interop.onnx.speech_manifest import GRAPH, LOG_PROBS, SAMPLES, SpeechManifest
from unrolled.interop.onnx.write import check_agreement, check_exportable, translated, why
from unrolled.models.ctc import CTCModel
from unrolled.ops.dense import Layer
from unrolled.ops.tracing import without_shape_cache

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

FRAME_SHIFTS = (2.5, 4.5, 27.3, 110.8)  # lengths in frames of the sounds on which the graph is compared


class SamplesToSymbols(Layer):
    """A model of speech with its front end: `samples [B,n]` -> log-probabilities `[B,T',V+1]`.

    T' = ceil(T / 4) for the T frames of `LogMel`; rows have no padding.
    """

    def __init__(self, model: CTCModel, rate: int) -> None:
        super().__init__()
        self.front_end, self.model = LogMel(rate, model.n_mels), model

    def forward(self, samples: Tensor) -> Tensor:
        """Transcribe sounds of one length, fp32 from -1 to 1."""
        log_probs: Tensor = self.model(self.front_end(samples))
        return log_probs


def export_transcriber(
    model: CTCModel, folder: str | Path, *, vocabulary: Vocabulary, opset: int = OPSET
) -> SpeechManifest:
    """Write a model of speech as an ONNX graph into a folder that `load_transcriber` reads.

    The graph maps `samples [B,n]`, float32 from -1 to 1 at the vocabulary's rate, to
    `log_probs [B,ceil(T/4),V+1]`, the blank last, with T frames as in `LogMel`. It computes the features too.
    The graph is run and compared with the model before anything is written.

    Args:
        model: a `Transcriber` or a `BiLSTMTranscriber` in fp32.
        folder: the folder to write; created if needed. An earlier graph in it is replaced.
        vocabulary: the vocabulary of the model's data set; it is written too.
        opset: version of ONNX's standard operators, 20 to 25.

    Returns:
        The contents of the folder's `manifest.json`.

    Raises:
        UnsupportedError: the computation of a mechanism depends on the length or on values, the positions
            have a maximum length, the opset is not supported, or the model is not in fp32.
        ValueError: the model or the vocabulary is of another kind, or they do not match.
        ImportError: onnx, onnxscript or onnxruntime is missing.
    """
    if not isinstance(model, CTCModel):
        raise ValueError(f"model is a {type(model).__name__}, but must be a model of speech")
    rate, n_mels = vocabulary.rate, vocabulary.n_mels
    if rate is None:
        raise ValueError(f"vocabulary is of the kind {vocabulary.kind!r}, but must be of the kind 'speech'")
    vocabulary.check(model.vocab_size)
    if n_mels != model.n_mels:
        raise ValueError(f"vocabulary has n_mels {n_mels}, but must have the {model.n_mels} of the model")
    check_exportable(model, opset)
    positions = getattr(model.config, "positions", None)
    if positions in ("learned", "axial"):
        raise UnsupportedError(
            f"positions is {positions!r}, but must be 'rotary', 'sinusoidal' or 'none' in a graph"
        )
    traced = SamplesToSymbols(deepcopy(model).cpu(), rate).eval()
    content = _graph(traced, rate, opset)
    written = SpeechManifest(
        unrolled=version("unrolled"),
        opset=opset,
        model=description(model),
        weights=weights_checksum(model),
        vocab_size=model.vocab_size,
        rate=rate,
        shortest=traced.front_end.width,
    )
    names = (json.dumps(asdict(vocabulary), indent=2) + "\n").encode()
    written.write(Path(folder), {GRAPH: content}, {VOCABULARY_FILE: names})
    return written


def _graph(module: SamplesToSymbols, rate: int, opset: int) -> bytes:
    """Trace a model and translate it to a graph, and compare the graph with the model."""
    try:
        with forms.InPlace(forms.portable()):
            program = _traced(_with_onnx_lstms(module), rate)
        proto = translated(program, opset, [SAMPLES], [LOG_PROBS])
        for value, axes in (
            (proto.graph.input[0], ("batch", "length")),
            (proto.graph.output[0], ("batch", "frames")),
        ):
            for dim, name in zip(value.type.tensor_type.shape.dim, axes, strict=False):
                dim.dim_param = name
        content: bytes = proto.SerializeToString()
        compare(module, rate, open_session(content))
    except (UnsupportedError, ImportError, MemoryError):
        raise
    except Exception as error:  # torch's exporter raises errors of many types
        raise UnsupportedError(
            f"this model cannot be written as a graph: {why(error)}; linear, window and softmax attention can"
        ) from error
    return content


def _with_onnx_lstms(module: SamplesToSymbols) -> SamplesToSymbols:
    """Copy a module, with the ONNX operator in place of each LSTM."""
    copy = deepcopy(module)
    for name, layer in list(copy.named_modules()):
        if isinstance(layer, nn.LSTM):
            copy.set_submodule(name, OnnxLSTM(layer))
    return copy


@torch.no_grad()
def _traced(module: SamplesToSymbols, rate: int) -> ExportedProgram:
    """Trace a module for any number of sounds of the same length, whatever it is."""
    arguments = (torch.zeros(2, rate // 4),)
    # Tracing assumes sizes of 2 or more, and here more than one frame after subsampling; `compare` tests that
    # smaller sizes work too. torch cannot derive this from the number of samples, so it inserts assertions.
    sizes = {0: Dim("batch", min=2), 1: Dim("n", min=6 * module.front_end.shift)}
    with quiet(), without_shape_cache():
        return torch.export.export(
            module, arguments, dynamic_shapes=(sizes,), prefer_deferred_runtime_asserts_over_guards=True
        )


@torch.no_grad()
def compare(module: SamplesToSymbols, rate: int, session: "InferenceSession") -> None:
    """Run a graph and the model on noise of several lengths.

    Raises:
        DisagreementError: the outputs differ; see `check_agreement`.
    """
    generator = torch.Generator().manual_seed(0)
    for batch_size, frames in zip((2, 1, 3, 1), FRAME_SHIFTS, strict=True):
        samples = torch.randn(batch_size, int(frames * module.front_end.shift), generator=generator) / 10
        (found,) = session.run([LOG_PROBS], {SAMPLES: samples.numpy()})
        check_agreement(LOG_PROBS, torch.from_numpy(found), module(samples))
