"""What each of four processes that share sequences does, by twos and all together, for `tests/ops/test_sequence.py`."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from unrolled import attention
from unrolled.models import Decoder, DecoderConfig
from unrolled.ops.sequence import sequence_parallel
from unrolled.testing import Maker
from unrolled.testing._kit import normal
from unrolled.testing.sequence import run_slices

LENGTH = 280  # slices of 140, 70 and 35 tokens: odd, and no multiple of a chunk
NAMES = [name for name in attention.names() if attention.load(name).supports.sequence]
FEW = ("linear", "delta_net", "window", "softmax")
PASSED_ON = (*FEW, "gated_linear", "rwkv7", "mamba2", "performer")  # `check_sequence` has them all
DECODERS = {
    "hybrid": {
        "attention": ["linear", "window", "linear"],
        "attention_options": {"linear": {"conv": 4}, "window": {"window": 40}},
        "positions": "rotary",
    },
    "gated delta": {
        "attention": "delta_net",
        "attention_options": {"delta_net": {"gated": True, "conv": 4}},
        "positions": "learned",
        "reversible": True,
    },
    "softmax": {"attention": ["softmax", "gated_linear", "mamba2"], "positions": "sinusoidal"},
}
LENGTHS = (1024, 2048, 4096)
WIDTHS = {"head_dim": 64, "value_dim": 64}


def mechanism(name, dtype=torch.float64, **options):
    return Maker(attention.load(name), options, dtype=dtype)(causal=True)


def inputs(dtype=torch.float64):
    return normal(2, LENGTH, 16).to(dtype)


def padding():
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    mask[0, :90] = True  # the whole slice of the first of four ranks
    mask[1, 100::7] = True
    return mask


def decoder(kind, recompute=False):
    torch.manual_seed(0)
    config = DecoderConfig(17, d_model=16, n_layers=3, n_heads=2, max_length=LENGTH, **DECODERS[kind])
    model = Decoder(config).double()
    model.gradient_checkpointing = recompute
    return model


def tokens():
    ids = torch.randint(17, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def decoder_results(kind, rank=0, size=1, recompute=False):
    """This rank's share of the loss and its gradients, the logits of `prefill` in halves, and the state."""
    model = decoder(kind, recompute)
    x, y = (z.chunk(size, 1)[rank] for z in tokens())
    loss = model.loss(x, y) / size
    state, logits = model.init_state(2), []
    for half in tokens()[0].chunk(2, 1):
        more, state = model.prefill(half.chunk(size, 1)[rank], state)
        logits.append(more.detach())
    return model, loss, {"first half": logits[0], "second half": logits[1], "position": state.position}


def backward(model, loss, found):
    loss.backward()
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **found, **{name: g for name, g in gradients.items() if g is not None}}


def sent(name, n, group, scan="gather", **options):
    """Bytes that one rank sends in a forward and a backward pass over n tokens of one row."""
    module = attention.load(name)(16, 8, causal=True, **WIDTHS, **options)
    with sequence_parallel(group, scan=scan) as ranks:
        module(torch.randn(1, 4, 16))  # the first call also compares the shapes of the slices
        before = ranks.bytes_sent
        module(torch.randn(1, n // ranks.size, 16)).sum().backward()
        return ranks.bytes_sent - before


def write(rank: int, folder: Path) -> None:
    """Write what this process found to FOLDER/RANK.pt."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "sequence"))
    pair, found = mesh["sequence"], {}
    for name in NAMES[rank // 2 :: 2]:
        for dtype in (torch.float64, torch.float32):
            with sequence_parallel(pair) as ranks:
                x = inputs(dtype)
                found[f"2 {name} {dtype}"] = run_slices(mechanism(name, dtype), x, None, ranks.rank, 2)
    for name in PASSED_ON:
        with sequence_parallel(scan="pipeline") as ranks:
            found[f"4 {name} padded"] = run_slices(mechanism(name), inputs(), padding(), ranks.rank, 4)
    for name in FEW:
        with sequence_parallel() as ranks:
            found[f"4 {name} {torch.float64}"] = run_slices(mechanism(name), inputs(), None, ranks.rank, 4)
    for kind in DECODERS:
        with sequence_parallel(pair, scan="pipeline") as ranks:
            model, loss, results = decoder_results(kind, ranks.rank, 2)
        found[f"2 {kind} decoder"] = backward(model, loss, results)
        with sequence_parallel() as ranks:
            model, loss, results = decoder_results(kind, ranks.rank, 4, recompute=True)
        found[f"4 {kind} decoder"] = backward(model, loss, results)
    if rank < 2:
        found["sent"] = {
            "linear": [sent("linear", n, pair) for n in LENGTHS],
            "retention": [sent("retention", 1024, pair)],
            "pipelined": [sent("linear", 1024, pair, "pipeline")],
            "pipelined window": [sent("window", 1024, pair, "pipeline", window=65)],
            "delta_net": [sent("delta_net", 1024, pair)],
            "window": [sent("window", 1024, pair, window=65)],
            "softmax": [sent("softmax", n, pair) for n in (1024, 2048)],
        }
    try:
        with sequence_parallel():
            mechanism("linear")(inputs()[:, : 5 + rank % 2])
    except ValueError as error:
        found["uneven"] = str(error)
    try:
        with sequence_parallel():
            mask = None if rank % 2 else torch.zeros(2, 5, dtype=torch.bool)
            decoder("gated delta")(torch.zeros(2, 5, dtype=torch.long), key_padding_mask=mask)
    except ValueError as error:
        found["masked on some ranks"] = str(error)
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
