"""A decoder whose logits a plan computes, so that it is evaluated like any other model."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from unrolled.decode import Plan, PlanState
from unrolled.models import Decoder


class Planned(nn.Module):
    """A decoder whose logits are those of a plan.

    Args:
        model: the decoder that the plan was made from.
        plan: computes the logits.
    """

    def __init__(self, model: Decoder, plan: Plan) -> None:
        super().__init__()
        self.model, self.config, self.plan = model, model.config, plan

    def forward(self, tokens: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """`[B,T]` -> `[B,T,vocab_size]`; packed sequences, for which B is 1, are read one by one."""
        if cu_seqlens is not None:
            bounds = pairwise(cu_seqlens.tolist())
            return torch.cat([self(tokens[:, start:stop]) for start, stop in bounds], dim=1)
        return self.prefill(tokens, self.init_state(len(tokens)))[0]

    def init_state(self, batch_size: int) -> PlanState:
        """Return the state before the first token."""
        return self.plan.init_state(batch_size)

    def prefill(self, tokens: Tensor, state: PlanState) -> tuple[Tensor, PlanState]:
        """Read several tokens `[B,T]` from a state; return their logits and the new state."""
        return self.plan.prefill(tokens, state)
