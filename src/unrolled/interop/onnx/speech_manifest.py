"""`manifest.json` of an exported model of speech."""

from dataclasses import dataclass
from typing import ClassVar

from unrolled.interop.onnx.front_end import SHIFT, count_frames
from unrolled.interop.onnx.record import Record
from unrolled.models.ctc import SUBSAMPLING

GRAPH, SAMPLES, LOG_PROBS = "plain", "samples", "log_probs"


@dataclass(kw_only=True)
class SpeechManifest(Record):
    """The contents of `manifest.json`; see `Record` for the rest.

    Attributes:
        rate: samples per second of the input.
        shortest: the minimum number of samples that the graph can read.
    """

    format: ClassVar[str] = "unrolled-onnx-speech"

    rate: int
    shortest: int

    def frames(self, n: int) -> int:
        """Return T', the number of rows of log-probabilities for a sound of n samples."""
        return -(-count_frames(n, self.rate * SHIFT // 1000) // SUBSAMPLING)

    @property
    def inputs(self) -> list[str]:
        """The names of a graph's inputs."""
        return [SAMPLES]

    @property
    def outputs(self) -> list[str]:
        """The names of a graph's outputs."""
        return [LOG_PROBS]
