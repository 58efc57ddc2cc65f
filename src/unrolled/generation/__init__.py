"""Drawing tokens: what to do with logits (`sampling`) and the prefill-then-step loop (`generate`)."""

from unrolled.generation.engine import generate

__all__ = ["generate"]
