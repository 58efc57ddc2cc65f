"""Drawing tokens: from logits (`sampling`), one after another (`generate`), and the likeliest (`beam`)."""

from unrolled.generation.beam import Hypothesis, beam_search
from unrolled.generation.engine import generate
from unrolled.generation.translation import n_best, translate

__all__ = ["Hypothesis", "beam_search", "generate", "n_best", "translate"]
