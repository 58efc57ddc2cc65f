"""One small model of every kind."""

from typing import Any

import torch
from torch import Tensor

from unrolled import models
from unrolled.models.saving import SavedModel

B, T = 2, 5  # of the arguments

TRANSFORMER = {"d_model": 16, "n_layers": 2, "n_heads": 4, "max_length": 16}
SEQ2SEQ = {"d_model": 8, "hidden_size": 8}
FIELDS: dict[str, dict[str, Any]] = {
    "bilstm_transcriber": {"vocab_size": 7, "n_mels": 6, "d_model": 8, "hidden_size": 8, "n_layers": 2},
    "decoder": {"vocab_size": 7, **TRANSFORMER},
    "encoder": {"vocab_size": 7, "n_classes": 3, **TRANSFORMER},
    "encoder_decoder": {"vocab_size": 7, "d_model": 16, "n_layers": 1, "n_heads": 4},
    "luong_seq2seq": {"vocab_size": 7, **SEQ2SEQ},
    "lstmn_seq2seq": {"vocab_size": 7, **SEQ2SEQ},
    "deep_lstmn_seq2seq": {"vocab_size": 7, **SEQ2SEQ},
    "memnn": {"vocab_size": 7, "d_model": 8},
    "memory_network": {"vocab_size": 7, "d_model": 8, "memory_size": 5},
    "ntm": {"input_size": 4, "output_size": 4, "hidden_size": 8},
    "ntm_numbers": {"input_size": 4, "output_size": 4, "hidden_size": 8},
    "perceiver": {"vocab_size": 7, "n_classes": 3, "n_latents": 4, **TRANSFORMER},
    "perceiver_ar": {"vocab_size": 7, "n_latents": 16, **TRANSFORMER},
    "perceiver_io": {"vocab_size": 7, "n_classes": 3, "n_latents": 4, **TRANSFORMER},
    "recurrent_lm": {"vocab_size": 7, "d_model": 8},
    "rnn_seq2seq": {"vocab_size": 7, **SEQ2SEQ},
    "segmenter": {"input_size": 4, "output_size": 4, **TRANSFORMER},
    "transcriber": {"vocab_size": 7, "n_mels": 6, **TRANSFORMER},
    "vit": {"image_size": [8, 8], "patch_size": [4, 4], "n_classes": 3, **TRANSFORMER, "max_length": 5},
}


def small_model(kind: str, **fields: Any) -> SavedModel:
    """Make a model of a kind, with some of its fields changed."""
    made = models.KINDS[kind]
    return made(made.config_type(**FIELDS[kind] | fields))


def arguments(kind: str) -> tuple[tuple[Tensor, ...], Tensor]:
    """What `forward` reads, and the targets of `loss`."""
    ids, classes = torch.randint(7, (B, T)), torch.randint(3, (B,))
    stories = (torch.randint(7, (B, 4, 3)),)
    if kind == "memnn":
        return stories, torch.ones(B, 3, dtype=torch.long)
    if kind == "memory_network":
        return stories, classes
    if kind == "vit":
        return (torch.rand(B, 3, 8, 8).double(),), classes
    if kind.endswith("transcriber"):
        return (torch.randn(B, 40, 6).double(),), torch.randint(7, (B, 3))
    if kind in ("ntm", "ntm_numbers", "segmenter"):
        bits = torch.randint(2, (B, T, 4)).double()
        return (bits,), bits[:, 0] if kind == "ntm_numbers" else bits
    if kind.endswith(("encoder_decoder", "seq2seq")):
        return (ids, torch.randint(7, (B, T))), torch.randint(7, (B, T))
    return (ids,), classes if kind in ("encoder", "perceiver", "perceiver_io") else torch.randint(7, (B, T))
