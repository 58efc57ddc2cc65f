"""Initial values of gates, as in Mamba-2 (Dao and Gu 2024, arXiv 2405.21060)."""

import math

import torch
from torch import Tensor


def random_log_paces(n: int) -> Tensor:
    """Draw the logarithms of paces from 1 to 16."""
    return torch.empty(n).uniform_(1, 16).log()


def random_decay_biases(*sizes: int) -> Tensor:
    """Draw biases whose softplus is log-uniform from 0.001 to 0.1."""
    return torch.empty(sizes).uniform_(math.log(1e-3), math.log(1e-1)).exp().expm1().log()
