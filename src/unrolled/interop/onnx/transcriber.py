"""An exported model of speech in ONNX Runtime, with the interface that `unrolled.generation` needs."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unrolled.data import Vocabulary
from unrolled.folders import MANIFEST_FILE
from unrolled.interop.onnx.model import open_session
from unrolled.interop.onnx.speech_manifest import GRAPH, LOG_PROBS, SAMPLES, SpeechManifest
from unrolled.ops.checks import check_key_padding_mask, check_tensor, wrong

if TYPE_CHECKING:
    from onnxruntime import InferenceSession


class OnnxTranscriber:
    """A model of speech outside PyTorch, which `unrolled.generation.transcribe` runs on samples.

    Its input is samples, float32 from -1 to 1, in place of features: the graph computes the features.

    Attributes:
        manifest: the manifest of the exported folder.
        vocabulary: the vocabulary, which reads sound files (`samples`) and converts ids to text (`decode`).
    """

    def __init__(self, manifest: SpeechManifest, vocabulary: Vocabulary, session: "InferenceSession") -> None:
        self.manifest, self.vocabulary, self._session = manifest, vocabulary, session

    def __call__(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the log-probabilities of the symbols and, last, of the blank.

        Rows are read one by one without their padding, so they do not influence each other.

        Args:
            x: samples `[B,n]` fp32.
            key_padding_mask: `[B,n]` bool, True at padding, which must be at the end of each row.

        Returns:
            `[B,T',V+1]` fp32; 0 beyond the frames of a row (see `frames`).

        Raises:
            ValueError: an argument has another shape or dtype, or a row has too few samples.
        """
        counts = self._samples(x, key_padding_mask)
        rows = [self._read(row[:count]) for row, count in zip(x, counts, strict=True)]
        if not rows:
            return torch.zeros(0, 0, self.manifest.vocab_size + 1)
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def frames(self, x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Return the number of frames of log-probabilities of each row of `x [B,n]`: `[B]`."""
        return torch.tensor([self.manifest.frames(n) for n in self._samples(x, key_padding_mask)])

    def _read(self, samples: Tensor) -> Tensor:
        feeds = {SAMPLES: samples.detach().contiguous().unsqueeze(0).numpy()}
        (log_probs,) = self._session.run([LOG_PROBS], feeds)
        return torch.from_numpy(log_probs[0])

    def _samples(self, x: Tensor, key_padding_mask: Tensor | None) -> list[int]:
        """Check the arguments; return the number of samples of each row."""
        check_tensor("x", x)
        if x.dim() != 2 or x.dtype != torch.float32:
            raise wrong("x", x, "samples, torch.float32 [B, n]")
        counts = [x.shape[1]] * len(x)
        if key_padding_mask is not None:
            check_key_padding_mask(key_padding_mask, *x.shape)
            if bool((key_padding_mask[:, :-1] & ~key_padding_mask[:, 1:]).any()):
                raise ValueError("key_padding_mask has padding before a sample, but must have it at the end")
            counts = (~key_padding_mask).sum(1).tolist()
        if counts and (fewest := min(counts)) < self.manifest.shortest:
            raise ValueError(f"a row has {fewest} samples, but must have at least {self.manifest.shortest}")
        return counts


def load_transcriber(folder: str | Path, *, threads: int = 1) -> OnnxTranscriber:
    """Load a folder of `export_transcriber` in ONNX Runtime, after verifying the hashes of its files.

    Args:
        folder: the folder.
        threads: threads per operator.

    Raises:
        ValueError: the folder is not the export of a model of speech, or a file does not match its hash.
        ImportError: onnxruntime is missing.
    """
    folder = Path(folder)
    manifest = SpeechManifest.load(folder)
    for name in manifest.files:
        manifest.read(folder, name)
    vocabulary = Vocabulary.load(folder)
    file = manifest.graphs[GRAPH]["file"]
    session = open_session(manifest.read(folder, file), threads)
    found = [x.name for x in (*session.get_inputs(), *session.get_outputs())]
    if found != [SAMPLES, LOG_PROBS]:
        raise ValueError(
            f"{folder / file} has other inputs or outputs than its {MANIFEST_FILE}; export again"
        )
    return OnnxTranscriber(manifest, vocabulary, session)
