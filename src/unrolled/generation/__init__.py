"""Drawing tokens: from logits (`sampling`), one after another (`generate`), and the likeliest (`beam`)."""

from unrolled.generation.beam import Hypothesis, beam_search, translate
from unrolled.generation.engine import generate

__all__ = ["Hypothesis", "beam_search", "generate", "translate"]
