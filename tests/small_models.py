"""One small model of every kind."""

from typing import Any

from unrolled import models
from unrolled.models.saving import SavedModel

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
