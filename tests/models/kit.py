"""Shared by the tests of models: weights that matter, ids, and reading a sequence in parts."""

import torch
from torch import Tensor, nn

VOCAB = 7


def randomised(model: nn.Module, std: float = 0.4) -> nn.Module:
    """Draw all parameters from N(0, std^2), in fp64: initial weights are too small to reveal a mistake."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=std)
    return model.double().eval()


def tokens_of(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def assert_same(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def read(model: nn.Module, parts: list[Tensor], state: object = None) -> tuple[Tensor, object]:
    """Logits of a sequence given in parts, and the last state: [B, t] are prefilled, [B] stepped."""
    state, logits = model.init_state(parts[0].shape[0]) if state is None else state, []
    for part in parts:
        out, state = model.prefill(part, state) if part.dim() == 2 else model.step(part, state)
        logits.append(out if part.dim() == 2 else out.unsqueeze(1))
    return torch.cat(logits, dim=1), state
