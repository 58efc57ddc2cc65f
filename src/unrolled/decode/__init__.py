"""Plans: models with packed weights, for generation on a CPU; see `plan`."""

from unrolled.decode.memory import PlanState
from unrolled.decode.plan import Plan, load, plan, unasked
from unrolled.decode.unpacking import load_model, packed_form

__all__ = ["Plan", "PlanState", "load", "load_model", "packed_form", "plan", "unasked"]
