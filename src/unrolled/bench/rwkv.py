"""RWKV-7 run by llama.cpp: the model, with random weights, as a file and as its definition in fp64.

Peng et al. 2025, "RWKV-7 'Goose' with Expressive Dynamic State Evolution", arXiv 2503.14456. The equations of
its time mixing are in `unrolled.attention.rwkv7`; in every layer but the first, a learned share of the first
layer's values is added. Names of weights are those of llama.cpp's files.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

RANK, GATE_RANK = 32, 64  # of the matrices that compute the decay, the rates and the gate
EPS, HEAD_EPS = 1e-5, 64e-5
MIXTURES = "rwkvag"


class Shape(NamedTuple):
    """Sizes of a model.

    Attributes:
        layers: number of layers.
        width: width of the model, a multiple of `head`.
        head: width of a head.
        vocabulary: number of token ids.
    """

    layers: int
    width: int
    head: int
    vocabulary: int


def random_weights(shape: Shape) -> dict[str, Tensor]:
    """Draw the weights of a model, always the same; products have about the size of their inputs."""
    generator, d = torch.Generator().manual_seed(0), shape.width
    found: dict[str, Tensor] = {}

    def matrix(name: str, outputs: int, inputs: int) -> None:
        found[name] = torch.randn(outputs, inputs, generator=generator) / math.sqrt(inputs)

    def vectors(*names: str, mean: float = 0.0) -> None:
        for name in names:
            found[name] = mean + 0.1 * torch.randn(d, generator=generator)

    def norm(name: str) -> None:
        vectors(f"{name}.weight", mean=1.0)
        vectors(f"{name}.bias")

    matrix("token_embd.weight", shape.vocabulary, d)
    norm("token_embd_norm")
    for i in range(shape.layers):
        block = f"blk.{i}"
        norm(f"{block}.attn_norm")
        norm(f"{block}.attn_norm_2")
        for name in "wav":
            vectors(f"{block}.time_mix_{name}0.weight")
            matrix(f"{block}.time_mix_{name}1.weight", RANK, d)
            matrix(f"{block}.time_mix_{name}2.weight", d, RANK)
        matrix(f"{block}.time_mix_g1.weight", GATE_RANK, d)
        matrix(f"{block}.time_mix_g2.weight", d, GATE_RANK)
        found[f"{block}.time_mix_lerp_fused.weight"] = torch.rand(6, 1, 1, d, generator=generator)
        vectors(*(f"{block}.time_mix_{name}.weight" for name in ("k_k", "k_a", "r_k")), mean=0.5)
        for name in ("receptance", "key", "value", "output"):
            matrix(f"{block}.time_mix_{name}.weight", d, d)
        norm(f"{block}.time_mix_ln")
        found[f"{block}.channel_mix_lerp_k.weight"] = torch.rand(1, 1, d, generator=generator)
        matrix(f"{block}.channel_mix_key.weight", 4 * d, d)
        matrix(f"{block}.channel_mix_value.weight", d, 4 * d)
    norm("output_norm")
    matrix("output.weight", shape.vocabulary, d)
    return found


def write(weights: Mapping[str, Tensor], shape: Shape, path: Path) -> None:
    """Write a model as a file of llama.cpp, in fp32."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "rwkv7")
    writer.add_context_length(1024)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(4 * shape.width)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(0)
    writer.add_layer_norm_eps(EPS)
    writer.add_wkv_head_size(shape.head)
    writer.add_head_count(0)
    writer.add_decay_lora_rank(RANK)
    writer.add_iclr_lora_rank(RANK)
    writer.add_value_residual_mix_lora_rank(RANK)
    writer.add_gate_lora_rank(GATE_RANK)
    writer.add_token_shift_count(2)
    for name, x in weights.items():
        writer.add_tensor(name, x.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def definition(weights: Mapping[str, Tensor], shape: Shape, tokens: Tensor) -> Tensor:
    """Return the logits [B, T, V] after each of the tokens [B, T], in fp64."""
    w = {name: x.double() for name, x in weights.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], EPS)

    x, first = norm(w["token_embd.weight"][tokens], "token_embd_norm"), None
    for i in range(shape.layers):
        block = {name.removeprefix(f"blk.{i}."): y for name, y in w.items() if name.startswith(f"blk.{i}.")}
        y, first = _time_mix(block, shape, norm(x, f"blk.{i}.attn_norm"), first)
        x = x + y
        y = norm(x, f"blk.{i}.attn_norm_2")
        mixed = y + (_shifted(y) - y) * block["channel_mix_lerp_k.weight"]
        up = (mixed @ block["channel_mix_key.weight"].T).relu().square()
        x = x + up @ block["channel_mix_value.weight"].T
    logits: Tensor = norm(x, "output_norm") @ w["output.weight"].T
    return logits


def _shifted(x: Tensor) -> Tensor:
    """The numbers of the token before each token; zeros before the first."""
    return F.pad(x, (0, 0, 1, -1))


def _time_mix(
    w: Mapping[str, Tensor], shape: Shape, x: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output of a layer, and the values of the first layer."""
    shares = w["time_mix_lerp_fused.weight"].flatten(1)
    of: dict[str, Tensor] = {
        name: x + (_shifted(x) - x) * share for name, share in zip(MIXTURES, shares, strict=True)
    }

    def low_rank(name: str, y: Tensor) -> Tensor:
        return y @ w[f"time_mix_{name}2.weight"].T + w[f"time_mix_{name}0.weight"]

    def down(name: str) -> Tensor:
        return of[name] @ w[f"time_mix_{name}1.weight"].T

    r, k, v = (
        of[mixed] @ w[f"time_mix_{name}.weight"].T
        for mixed, name in (("r", "receptance"), ("k", "key"), ("v", "value"))
    )
    decay = (-math.exp(-0.5) * low_rank("w", down("w").tanh()).sigmoid()).exp()
    if first is None:
        first = v
    else:
        v = v + (first - v) * low_rank("v", down("v")).sigmoid()
    gate = down("g").sigmoid() @ w["time_mix_g2.weight"].T
    rate = low_rank("a", down("a")).sigmoid()
    erased = k * w["time_mix_k_k.weight"]
    k = k * (1 + (rate - 1) * w["time_mix_k_a.weight"])

    def heads(y: Tensor) -> Tensor:
        return torch.unflatten(y, -1, (-1, shape.head))

    r, k, v, decay, rate, erased = map(heads, (r, k, v, decay, rate, erased))
    erased = F.normalize(erased, dim=-1, eps=1e-12)
    replaced = rate * erased
    state, outputs = x.new_zeros(*r.shape[::2], shape.head, shape.head), []
    for t in range(x.shape[1]):
        removed = (state @ erased[:, t].unsqueeze(-1)) * replaced[:, t].unsqueeze(-2)
        state = state * decay[:, t].unsqueeze(-2) - removed + v[:, t].unsqueeze(-1) * k[:, t].unsqueeze(-2)
        outputs.append((state @ r[:, t].unsqueeze(-1)).squeeze(-1))
    o = torch.stack(outputs, 1)
    o = (o - o.mean(-1, keepdim=True)) / (o.var(-1, correction=0, keepdim=True) + HEAD_EPS).sqrt()
    o = o.flatten(-2) * w["time_mix_ln.weight"] + w["time_mix_ln.bias"]
    o = o + ((r * k * heads(w["time_mix_r_k.weight"])).sum(-1, keepdim=True) * v).flatten(-2)
    return (o * gate) @ w["time_mix_output.weight"].T, first
