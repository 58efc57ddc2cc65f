"""Plans: models with packed weights, for generation on a CPU; see `plan`."""

from unrolled.decode.plan import Plan, PlanState, load, plan, unasked

__all__ = ["Plan", "PlanState", "load", "plan", "unasked"]
