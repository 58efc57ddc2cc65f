"""Generation: sampling from logits (`sampling`), decoding (`generate`) and beam search (`beam`)."""

from unrolled.generation.beam import Hypothesis, beam_search
from unrolled.generation.engine import generate
from unrolled.generation.transcription import transcribe
from unrolled.generation.translation import n_best, translate

__all__ = ["Hypothesis", "beam_search", "generate", "n_best", "transcribe", "translate"]
