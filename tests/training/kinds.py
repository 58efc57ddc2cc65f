"""A small model of every kind and mechanism, with batches that it can be trained on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from small_models import small_model

from unrolled import alignment, attention, recurrent
from unrolled.contract import Batch
from unrolled.models.saving import SavedModel

ROWS, LENGTH, VOCAB = 8, 16, 7
TRANSFORMERS = ("decoder", "encoder", "encoder_decoder", "perceiver", "perceiver_ar", "perceiver_io", "vit")


@dataclass
class Batches:
    """Random batches in the shape that a kind of model takes; some targets are hidden."""

    kind: str

    def batch(self, split: str, *, step: int, batch_size: int, seed: int) -> Batch:
        g = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCAB, (batch_size, LENGTH), generator=g)
        labels = torch.randint(3, (batch_size,), generator=g)
        hidden = torch.rand(batch_size, LENGTH, generator=g) < 0.3
        if self.kind in ("encoder", "perceiver", "perceiver_io"):
            return Batch(ids, labels)
        if self.kind == "vit":
            return Batch(torch.randn(batch_size, 3, 8, 8, generator=g), labels)
        if self.kind in ("ntm", "segmenter"):
            return Batch(
                torch.randn(batch_size, 6, 4, generator=g),
                (ids[:, :24] > 3).float()[:, :6, None].expand(-1, -1, 4),
            )
        if self.kind == "ntm_numbers":
            return Batch(torch.randn(batch_size, 6, 4, generator=g), torch.randn(batch_size, 4, generator=g))
        if self.kind == "memory_network":
            return Batch(ids.reshape(batch_size, 4, 4), ids[:, 0])
        if self.kind == "memnn":
            return Batch(ids.reshape(batch_size, 4, 4), torch.stack([ids[:, 0], labels, labels], dim=1))
        if self.kind in ("transcriber", "bilstm_transcriber"):
            return Batch(torch.randn(batch_size, 40, 6, generator=g), ids[:, :4])
        targets = (ids * 3 + 1) % VOCAB
        return Batch(ids, targets.masked_fill(hidden, -100))

    def eval_batches(self, batch_size: int) -> Iterator[Batch]:
        for i in range(3):
            yield self.batch("val", step=-1 - i, batch_size=batch_size, seed=0)


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, kind and fields of each model."""
    yield "memory_network", "memory_network", {"noise": 0.0}
    for kind in (
        "memnn",
        "ntm",
        "ntm_numbers",
        "segmenter",
        "rnn_seq2seq",
        "luong_seq2seq",
        "lstmn_seq2seq",
        "deep_lstmn_seq2seq",
        "transcriber",
        "bilstm_transcriber",
        *TRANSFORMERS,
    ):
        yield kind, kind, {}
    for cell in recurrent.names():
        yield f"recurrent_lm of {cell}", "recurrent_lm", {"cell": cell}
    for name in alignment.names():
        if name != "hard":  # it samples
            yield f"rnn_seq2seq with {name}", "rnn_seq2seq", {"attention": name}
    for name in attention.names():
        supports = attention.load(name).supports
        for kind, able in (("decoder", supports.causal), ("encoder", supports.bidirectional)):
            if able:
                yield f"{kind} of {name}", kind, {"attention": name}
        if supports.cross and supports.single_queries and supports.causal:
            yield (
                f"encoder_decoder of {name}",
                "encoder_decoder",
                {"attention": name, "cross_attention": name},
            )
    yield "hybrid", "decoder", {"attention": ["linear", "softmax"]}
    yield "reversible", "decoder", {"reversible": True}
    yield "reversible reformer", "decoder", {"attention": "reformer", "reversible": True}
    yield "tied", "decoder", {"tie_embeddings": True}
    for sharing in ("headwise", "key-value", "layerwise"):
        yield (
            f"linformer {sharing}",
            "encoder",
            {"attention": "linformer", "attention_options": {"linformer": {"sharing": sharing}}},
        )


def made(kind: str, fields: dict[str, Any]) -> SavedModel:
    torch.manual_seed(0)
    return small_model(kind, **fields)
