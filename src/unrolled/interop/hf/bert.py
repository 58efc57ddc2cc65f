"""BERT and models of the same architecture: post-norm blocks after a normalised sum of embeddings.

    x = norm(word + position + segment)
    x <- norm(x + attend(x)),  x <- norm(x + W2 f(W1 x))

Devlin et al. 2019, arXiv 1810.04805. RoBERTa, Longformer, BigBird and Nyströmformer differ in the attention,
the first position, and the layer before the output. Each function converts a model of transformers to an
`Encoder`; `import_weights` selects the function.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from torch import nn

from unrolled.contract import UnsupportedError
from unrolled.interop.copying import Foreign, copy_linear, copy_norm, fill
from unrolled.models import Encoder, EncoderConfig
from unrolled.models.blocks import Block
from unrolled.models.encoder import HiddenLayer

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
OUTPUTS = {
    "Model": "hidden",
    "ForMaskedLM": "masked",
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "tokens",
    "ForQuestionAnswering": "tokens",  # two logits: for the first and the last token of the answer
}


@dataclass
class Head:
    """The layers after the last block: a hidden layer with an activation, its norm, and the output layer."""

    dense: Foreign | None = None
    activation: str | None = None
    norm: Foreign | None = None
    output: nn.Linear | None = None


def from_bert(model: Foreign, options: Mapping[str, object]) -> Encoder:
    """BERT: softmax attention; classification goes through its pooler."""
    return _encoder(model, "softmax", options, _bert_head(model, pooler=True))


def from_roberta(model: Foreign, options: Mapping[str, object]) -> Encoder:
    """RoBERTa (Liu et al. 2019, arXiv 1907.11692): the first position is the id of the padding plus one."""
    return _encoder(model, "softmax", options, _roberta_head(model), first=model.config.pad_token_id + 1)


def from_longformer(model: Foreign, options: Mapping[str, object]) -> Encoder:
    """Longformer: RoBERTa with a window in each layer; for classification, the first token is global."""
    classifies = _output(model) == "classification"
    options = {"global_tokens": 1 if classifies else 0, **options}
    windows = [layer.attention.self.one_sided_attn_window_size for layer in model.base_model.encoder.layer]
    layers = {} if "window" in options else {"window": [2 * one_side for one_side in windows]}
    first = model.config.pad_token_id + 1
    ours = _encoder(model, "longformer", options, _roberta_head(model), first=first, layer_options=layers)
    for block, layer in _pairs(ours, model):
        a, mechanism = layer.attention.self, cast(Foreign, block.attention)
        copy_linear(mechanism.global_proj, a.query_global, a.key_global, a.value_global)
    return ours


def from_big_bird(model: Foreign, options: Mapping[str, object]) -> Encoder:
    """BigBird: local, random and global blocks, or softmax attention for attention_type "original_full"."""
    config, head = model.config, _bert_head(model, pooler=False)
    if config.attention_type == "original_full":  # the model switches to it for short inputs
        return _encoder(model, "softmax", options, head)
    sizes = {"block_size": config.block_size, "random_blocks": config.num_random_blocks}
    seeds = {} if "seed" in options else {"seed": list(range(config.num_hidden_layers))}
    return _encoder(model, "bigbird", {**sizes, **options}, head, layer_options=seeds)


def from_nystromformer(model: Foreign, options: Mapping[str, object]) -> Encoder:
    """Nyströmformer: landmarks and a convolution; attention is exact if every token is a landmark."""
    config = model.config
    everything = config.num_landmarks == config.segment_means_seq_len  # at any length
    n_landmarks = config.max_position_embeddings if everything else config.num_landmarks
    sizes = {"n_landmarks": n_landmarks, "conv_width": config.conv_kernel_size}
    head = _bert_head(model, pooler=False)
    ours = _encoder(model, "nystromformer", {**sizes, **options}, head, first=2)
    for block, layer in _pairs(ours, model):
        cast(Foreign, block.attention).conv.load_state_dict(layer.attention.self.conv.state_dict())
    return ours


def _output(model: Foreign) -> str:
    """Return the output that a class of transformers has, by its name."""
    name = type(model).__name__
    kind = re.search(r"(LMHeadModel|Model|For[A-Z]\w*)$", name)
    if kind is None or kind[0] not in OUTPUTS:
        raise UnsupportedError(f"{name} has no counterpart here; load its weights as one of {list(OUTPUTS)}")
    return OUTPUTS[kind[0]]


def _bert_head(model: Foreign, *, pooler: bool) -> Head:
    output, activation = _output(model), _activation(model.config.hidden_act)
    if output == "masked":
        predictions = model.cls.predictions
        transform = predictions.transform
        return Head(transform.dense, activation, transform.LayerNorm, predictions.decoder)
    if output == "classification" and pooler:
        return Head(model.base_model.pooler.dense, "tanh", None, model.classifier)
    if output == "classification":
        return Head(model.classifier.dense, activation, None, model.classifier.out_proj)
    return Head(output=_output_of_tokens(model))


def _roberta_head(model: Foreign) -> Head:
    output = _output(model)
    if output == "masked":
        head = model.lm_head
        return Head(head.dense, "gelu", head.layer_norm, head.decoder)
    if output == "classification":
        return Head(model.classifier.dense, "tanh", None, model.classifier.out_proj)
    return Head(output=_output_of_tokens(model))


def _output_of_tokens(model: Foreign) -> nn.Linear | None:
    """Return the output layer of a model with outputs for each token; None for other models."""
    if _output(model) != "tokens":
        return None
    if not isinstance(output := getattr(model, "qa_outputs", getattr(model, "classifier", None)), nn.Linear):
        raise UnsupportedError(
            f"{type(model).__name__} has an output that is not a linear layer; load it as a ...Model"
        )
    return output


def _encoder(
    model: Foreign,
    attention: str,
    options: Mapping[str, object],
    head: Head,
    *,
    first: int = 0,
    layer_options: Mapping[str, list[int]] | None = None,
) -> Encoder:
    """Make an encoder with a model's sizes, and copy the common weights; the first position is `first`."""
    config, base = model.config, model.base_model
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise UnsupportedError(f"{type(model).__name__} is a decoder; only encoders can be imported")
    words, positions = base.embeddings.word_embeddings.weight, base.embeddings.position_embeddings.weight
    output = _output(model)
    scale = config.hidden_size**0.5 if getattr(config, "rescale_embeddings", False) else 1.0
    out = head.output
    tied = output == "masked" and out is not None and out.weight is words and scale == 1
    ours = Encoder(
        EncoderConfig(
            vocab_size=len(words),
            d_model=config.hidden_size,
            n_layers=config.num_hidden_layers,
            n_heads=config.num_attention_heads,
            d_ff=config.intermediate_size,
            attention=attention,
            attention_options={attention: dict(options)} if options else {},
            layer_options={attention: dict(layer_options)} if layer_options else {},
            norm="post",
            norm_eps=config.layer_norm_eps,
            activation=_activation(config.hidden_act),  # type: ignore[arg-type]
            positions="learned",
            max_length=len(positions) - first,
            dropout=float(config.hidden_dropout_prob),
            n_segments=config.type_vocab_size,
            embedding_norm=True,
            output=output,  # type: ignore[arg-type]
            n_classes=None if out is None or output == "masked" else out.out_features,
            pooling="first",
            tie_embeddings=tied,
            head_hidden=head.activation,  # type: ignore[arg-type]
            output_bias=True if tied else None,
        )
    ).to(words)
    fill(ours.embedding.weight, words * scale)
    for table, rows in (
        (ours.positions.table, positions[first:]),
        (ours.segments, base.embeddings.token_type_embeddings.weight),
    ):
        assert table is not None  # by the config above
        fill(table.weight, rows)
    copy_norm(ours.embedding_norm, base.embeddings.LayerNorm)
    for block, layer in _pairs(ours, model):
        _copy_block(block, layer)
    _copy_head(ours, head)
    return ours.train(model.training)


def _pairs(ours: Encoder, model: Foreign) -> Iterator[tuple[Block, Foreign]]:
    return zip(ours.stack.full_layers, model.base_model.encoder.layer, strict=True)


def _copy_block(block: Block, layer: Foreign) -> None:
    attention = layer.attention.self
    copy_linear(block.attention.qkv_proj, attention.query, attention.key, attention.value)
    copy_linear(block.attention.out_proj, layer.attention.output.dense)
    copy_norm(block.attention_norm, layer.attention.output.LayerNorm)
    copy_linear(block.ff.up, layer.intermediate.dense)
    copy_linear(block.ff.down, layer.output.dense)
    copy_norm(block.ff_norm, layer.output.LayerNorm)


def _copy_head(ours: Encoder, head: Head) -> None:
    if isinstance(ours.head_hidden, HiddenLayer):
        if head.dense is not None:
            copy_linear(ours.head_hidden.dense, head.dense)
        if head.norm is not None:
            copy_norm(ours.head_hidden.norm, head.norm)
    if ours.head is None or head.output is None:
        return
    if ours.head.project is not None:
        copy_linear(ours.head.project, head.output)
    elif ours.head.bias is not None:
        fill(ours.head.bias, head.output.bias)


def _activation(name: object) -> str:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedError(f"hidden_act is {name!r}, but must be one of {list(ACTIVATIONS)}")
    return ACTIVATIONS[name]
