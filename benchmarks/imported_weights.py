"""Print the largest differences between the outputs of imported models and of the originals.

    python benchmarks/imported_weights.py

Nothing is downloaded: each model is created with 4 layers of width 64. All its parameters are drawn at
random, biases and norms included, so that every parameter affects the output. A model reads two rows of 96
tokens. The second row ends in padding if the original supports padding. A difference is the largest absolute
difference divided by the largest absolute value, in fp32 and in fp64. The last table has settings in which
transformers computes something else than the published definition. The rows of fast-transformers appear if
that library is installed.
"""

import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unrolled.interop.fast_transformers import from_fast_transformers
from unrolled.interop.hf import import_weights
from unrolled.interop.torch import from_transformer_encoder

LENGTH, VOCAB, WIDTH = 96, 200, 64
SIZES = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 128, "pad_token_id": 0, "num_labels": 5,
}  # fmt: skip
FAMILIES = {
    "Bert": {},
    "Roberta": {},
    "Longformer": {"attention_window": 16},
    "BigBird": {"block_size": 24},
    "Nystromformer": {"conv_kernel_size": 1},
}
HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
PERCEIVER = {
    "num_latents": 16, "d_latents": WIDTH, "d_model": 48, "num_blocks": 2, "num_self_attends_per_block": 2,
    "num_self_attention_heads": 4, "num_cross_attention_heads": 1, "vocab_size": VOCAB, "num_labels": 5,
    "max_position_embeddings": 128,
}  # fmt: skip
DELTA = {
    "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 32,
}  # fmt: skip
CAUSAL: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 16},
    "Mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 32},
    "Qwen3Next": DELTA | {"head_dim": 16, "num_experts": 0},
    "Qwen3_5": DELTA | {"head_dim": 16},
    "OlmoHybrid": DELTA,
    "Rwkv": {"rescale_every": 0},
}
# The name, the original, the function that imports it, and whether a row is padded.
Case = tuple[str, nn.Module, Callable[[nn.Module], Any], bool]


@torch.no_grad()
def randomised(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name.lower() and name.endswith("weight")), std=0.2)
    return model.eval()


def hugging_face(name: str, **settings: Any) -> nn.Module:
    import transformers

    family = next(x for x in (*FAMILIES, "Perceiver") if name.startswith(x))
    sizes = PERCEIVER if family == "Perceiver" else SIZES | FAMILIES[family]
    return randomised(
        getattr(transformers, name)(getattr(transformers, f"{family}Config")(**sizes | settings))
    )


def causal(family: str) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{family}{'Text' * (family == 'Qwen3_5')}Config")
    return randomised(getattr(transformers, f"{family}ForCausalLM")(config(**SIZES | CAUSAL[family])))


def sparse_big_bird() -> nn.Module:
    """Return a BigBird of transformers in training mode, in which alone it draws random blocks.

    It draws the blocks from numpy's generator, with the number of the layer as the seed.
    """
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hugging_face("BigBirdForMaskedLM", block_size=4, **off).train()


def with_its_blocks(theirs: Any) -> Any:
    """Import a BigBird, and let it read the random blocks that the original draws."""
    ours = import_weights(theirs)
    for seed, (block, layer) in enumerate(zip(ours.stack.blocks, theirs.bert.encoder.layer, strict=True)):
        attention = layer.attention.self
        np.random.seed(seed)  # noqa: NPY002
        plan, counts = attention._get_rand_attn_plan(LENGTH, 4, 3)
        drawn = attention._bigbird_block_rand_mask_with_head(LENGTH, LENGTH, 4, 4, 4, plan, counts)
        table = nn.functional.pad(torch.tensor(np.stack(drawn)).long(), (0, 0, 1, 1), value=-1)
        block.attention._draw = lambda *_, table=table: table.unsqueeze(0)
    return ours


def cases() -> Iterator[Case]:
    for family in FAMILIES:
        for head in HEADS:
            yield family + head, hugging_face(family + head), import_weights, True
    convolution = hugging_face("NystromformerForMaskedLM", conv_kernel_size=33)
    yield "BigBirdForMaskedLM, 24 blocks, its random ones", sparse_big_bird(), with_its_blocks, False
    yield "NystromformerForMaskedLM, convolution 33 wide, no padding", convolution, import_weights, False
    for head in ("ForMaskedLM", "ForSequenceClassification", "ForImageClassificationFourier"):
        yield f"Perceiver{head}", hugging_face(f"Perceiver{head}"), import_weights, "Image" not in head
    for family in CAUSAL:
        yield f"{family}ForCausalLM", causal(family), import_weights, True
    for pre in (True, False):
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, norm_first=pre, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 4, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        name = f"nn.TransformerEncoder, {'pre' if pre else 'post'}-norm"
        yield name, randomised(encoder), from_transformer_encoder, True
    if importlib.util.find_spec("fast_transformers") is not None:
        from fast_transformers.builders import TransformerEncoderBuilder

        sizes = {"n_layers": 4, "n_heads": 4, "feed_forward_dimensions": 128}
        sizes |= {"query_dimensions": 16, "value_dimensions": 16}
        for kind in ("full", "linear"):
            encoder = TransformerEncoderBuilder.from_kwargs(attention_type=kind, **sizes).get()
            make = partial(from_fast_transformers, causal=False)
            yield f"fast_transformers, {kind}", randomised(encoder), make, True


def difference(case: Case, dtype: torch.dtype) -> float:
    """Return the largest difference divided by the largest value, over the positions without padding."""
    name, theirs, make, padded = case
    theirs.to(dtype)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCAB, (2, LENGTH), generator=generator)
    padding = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [LENGTH - 27 * padded]])
    tokens, given = tokens.masked_fill(padding, 0), {"attention_mask": (~padding).long()}
    x = torch.randn(2, LENGTH, WIDTH, generator=generator, dtype=dtype)
    ours = make(theirs)
    if "Image" in name:
        images = torch.randn(2, 3, 9, 17, generator=generator, dtype=dtype)  # exact coordinates
        torch.set_default_dtype(dtype)  # the dtype in which the original computes its Fourier features
        found, wanted = ours(images.permute(0, 2, 3, 1)), theirs(images).logits
        torch.set_default_dtype(torch.float32)
    elif name.startswith("nn."):
        found, wanted = ours(x, key_padding_mask=padding), theirs(x, src_key_padding_mask=padding)
    elif name.startswith("fast"):
        from fast_transformers.masking import LengthMask

        lengths = LengthMask((~padding).sum(1), max_len=LENGTH)
        found, wanted = ours(x, key_padding_mask=padding), theirs(x, length_mask=lengths)
    else:
        found, wanted = ours(tokens, key_padding_mask=padding), _output(theirs(tokens, **given))
    if found.dim() == 3:
        found, wanted = found[~padding], wanted[:, :LENGTH][~padding]
    return float((found - wanted).abs().max() / wanted.abs().max())


def _output(out: Any) -> Tensor:
    y: Tensor = out.logits if "logits" in out and out.logits is not None else out.last_hidden_state
    return y


def elsewhere() -> Iterator[Case]:
    sparse = hugging_face("BigBirdModel", block_size=4)
    yield (
        "BigBirdModel, 24 blocks in evaluation: reads the first block, not random ones",
        sparse,
        import_weights,
        False,
    )
    several = hugging_face("NystromformerModel", num_landmarks=16, segment_means_seq_len=LENGTH)
    yield "NystromformerModel, 16 landmarks: one start for all heads and rows", several, import_weights, False
    convolution = hugging_face("NystromformerModel", conv_kernel_size=33)
    yield "NystromformerModel, convolution 33 wide: reads padding", convolution, import_weights, True


@torch.no_grad()
def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable()  # transformers logs how it pads lengths
    print("| theirs | fp32 | fp64 |\n| --- | ---: | ---: |")
    for case in cases():
        exact = "" if case[0].startswith("fast") else f"{difference(case, torch.float64):.1e}"
        print(f"| {case[0]} | {difference(case, torch.float32):.1e} | {exact} |", flush=True)
    print("\n| theirs, where it is something else | fp32 |\n| --- | ---: |")
    for case in elsewhere():
        print(f"| {case[0]} | {difference(case, torch.float32):.1e} |")


if __name__ == "__main__":
    main()
