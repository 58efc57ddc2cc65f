"""Models imported by `import_weights` compute the same as the models of transformers."""

import sys

import numpy as np
import peft
import pytest
import torch
import transformers
from agreement import assert_agree
from defaults import default_dtype
from safetensors.torch import load_file, save_file
from torch import nn

from unrolled.contract import UnsupportedError
from unrolled.interop.hf import import_weights, to_transformers
from unrolled.models import Encoder, PerceiverIO, load

PAD = 0
SIZES = {
    "vocab_size": 19,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "pad_token_id": PAD,
    "num_labels": 3,
}
FAMILIES = {
    "Bert": {"layer_norm_eps": 1e-3},
    "Roberta": {},
    "Longformer": {"attention_window": [4, 8]},
    "BigBird": {"block_size": 4, "num_random_blocks": 2},
    "Nystromformer": {"conv_kernel_size": 1, "num_landmarks": 8, "segment_means_seq_len": 8},
}
HEADS = ["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def hugging_face(family, head="Model", **settings):
    """A model of transformers in which every parameter affects the output."""
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family] | settings)
    torch.manual_seed(0)
    model = getattr(transformers, family + head)(config).eval()
    return randomised(model)


@torch.no_grad()
def randomised(model):
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name.lower() and name.endswith("weight")), std=0.3)
    return model


def batch(length=20, valid=(20, 13), vocab=19):
    tokens = torch.randint(1, vocab, (len(valid), length), generator=torch.Generator().manual_seed(1))
    padding = torch.arange(length) >= torch.tensor(valid).unsqueeze(1)
    return tokens.masked_fill(padding, PAD), padding


def theirs_of(model, tokens, padding, **further):
    out = model(tokens, attention_mask=(~padding).long(), **further)
    return out.last_hidden_state if "last_hidden_state" in out else out.logits


def valid(y, padding):
    return y[~padding] if y.dim() == 3 else y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_outputs_are_equal(family, head, dtype):
    theirs = hugging_face(family, head).to(dtype)
    tokens, padding = batch()
    segments = (torch.arange(20) > 8).long().expand(2, -1)
    for further in ({}, {"token_type_ids": segments}):
        expected = theirs_of(theirs, tokens, padding, **further)
        ours = import_weights(theirs)
        assert isinstance(ours, Encoder)
        found = ours(tokens, key_padding_mask=padding, segments=further.get("token_type_ids"))
        assert found.dtype == dtype
        tolerance = TOLERANCE[dtype]
        if family == "Longformer" and dtype == torch.float64:
            tolerance = 1e-6  # theirs computes its softmax in fp32
        what = f"{family}{head}, {str(dtype).removeprefix('torch.')}"
        assert_agree(valid(found, padding), valid(expected, padding), what, tolerance=tolerance)


@torch.no_grad()
def test_left_padding_counts_positions_from_the_first_token():
    theirs = hugging_face("Bert")
    tokens, padding = (x.flip(1) for x in batch())
    positions = ((~padding).cumsum(1) - 1).clamp(min=0)
    found = import_weights(theirs)(tokens, key_padding_mask=padding)
    expected = theirs_of(theirs, tokens, padding, position_ids=positions)
    assert_agree(found[~padding], expected[~padding])
    assert (found - theirs_of(theirs, tokens, padding))[~padding].abs().max() > 1e-3


@torch.no_grad()
def test_longformer_with_chosen_global_tokens():
    theirs = hugging_face("Longformer")
    tokens, padding = batch()
    is_global = torch.zeros(2, 20, dtype=torch.long)
    is_global[:, [0, 5, 7]] = 1
    found = import_weights(theirs, global_tokens=[0, 5, 7])(tokens, key_padding_mask=padding)
    expected = theirs_of(theirs, tokens, padding, global_attention_mask=is_global)
    assert_agree(found[~padding], expected[~padding])
    assert (import_weights(theirs)(tokens, key_padding_mask=padding) - found).abs().max() > 1e-3
    is_global[1, [1, 2, 3, 9]] = 1  # different tokens in each row, as with two questions
    expected = theirs_of(theirs, tokens, padding, global_attention_mask=is_global)
    ours = import_weights(theirs)
    found = ours(tokens, key_padding_mask=padding, global_mask=is_global.bool())
    assert_agree(found[~padding], expected[~padding])
    found = to_transformers(ours)(tokens, (~padding).long(), global_attention_mask=is_global)
    assert_agree(found.last_hidden_state[~padding], expected[~padding])


@pytest.mark.parametrize("family", ["Bert", "Roberta", "Longformer", "Nystromformer"])
@torch.no_grad()
def test_answers_to_questions(family):
    """Longformer lets all tokens of the question be global: theirs finds them by the separator."""
    theirs = hugging_face(family, "ForQuestionAnswering", num_labels=2, sep_token_id=18)
    tokens, padding = batch(vocab=18)
    tokens[:, [4, 5, 11]] = 18
    out = theirs(tokens, attention_mask=(~padding).long())
    is_global = (torch.arange(20) < 4).expand(2, -1) if family == "Longformer" else None
    found = import_weights(theirs)(tokens, key_padding_mask=padding, global_mask=is_global)
    assert_agree(found[~padding], torch.stack([out.start_logits, out.end_logits], -1)[~padding])


@torch.no_grad()
def test_big_bird_reads_blocks(monkeypatch):
    """Theirs draws its blocks in training only, from numpy's generator; ours is given that table."""
    generator = np.random.get_state()  # noqa: NPY002
    theirs = hugging_face("BigBird", "ForMaskedLM", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    theirs.double().train()
    ours = import_weights(theirs)
    tokens, padding = batch(length=48, valid=(48, 48))
    expected = theirs_of(theirs, tokens, padding)
    assert theirs.bert.attention_type == "block_sparse"
    tables = []
    for seed, layer in enumerate(theirs.bert.encoder.layer):
        sparse = layer.attention.self
        np.random.seed(seed)  # noqa: NPY002 - the generator that theirs draws from
        plan, counts = sparse._get_rand_attn_plan(48, 4, 2)
        table = sparse._bigbird_block_rand_mask_with_head(48, 48, 4, 4, 4, plan, counts)
        drawn = nn.functional.pad(torch.tensor(np.stack(table)).long(), (0, 0, 1, 1), value=-1)
        tables.append(drawn.unsqueeze(0))
    np.random.set_state(generator)  # noqa: NPY002
    drawn_in_turn = iter(tables)
    monkeypatch.setattr("unrolled.attention.bigbird.draw_blocks", lambda *_: next(drawn_in_turn))
    assert_agree(ours(tokens), expected, tolerance=1e-10)


@torch.no_grad()
def test_big_bird_of_full_attention_and_scaled_embeddings():
    settings = {"attention_type": "original_full", "rescale_embeddings": True, "use_bias": False}
    theirs = hugging_face("BigBird", "ForMaskedLM", **settings)
    tokens, padding = batch(length=60, valid=(60, 41))
    ours = import_weights(theirs)
    found = ours(tokens, key_padding_mask=padding)
    assert_agree(found[~padding], theirs_of(theirs, tokens, padding)[~padding])
    assert ours.config.mechanisms == {"softmax"}


@pytest.mark.parametrize("length", [5, 24])
@torch.no_grad()
def test_nystromformer_with_landmarks_and_its_convolution(length):
    """One head and one row: theirs starts its inverse from norms over all heads and rows."""
    sizes = {"num_attention_heads": 1, "num_landmarks": 4, "segment_means_seq_len": 24}
    if length == 5:
        sizes = {"num_landmarks": 4, "segment_means_seq_len": 4}  # which theirs computes as softmax attention
    theirs = hugging_face("Nystromformer", "ForMaskedLM", conv_kernel_size=5, **sizes)
    tokens, padding = batch(length, (length,))
    assert_agree(import_weights(theirs)(tokens), theirs_of(theirs, tokens, padding))


PERCEIVER = {
    "num_latents": 6,
    "d_latents": 16,
    "d_model": 24,
    "num_blocks": 2,
    "num_self_attends_per_block": 2,
    "num_self_attention_heads": 4,
    "num_cross_attention_heads": 2,
    "qk_channels": 8,
    "v_channels": 16,
    "vocab_size": 19,
    "max_position_embeddings": 32,
    "num_labels": 3,
}


def perceiver(head, **settings):
    config = transformers.PerceiverConfig(**PERCEIVER | settings)
    torch.manual_seed(0)
    return randomised(getattr(transformers, f"PerceiverFor{head}")(config).eval())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", ["kv", "q"])
@pytest.mark.parametrize("head", ["MaskedLM", "SequenceClassification"])
@torch.no_grad()
def test_perceivers_of_text_are_equal(head, shape, dtype):
    theirs = perceiver(head, cross_attention_shape_for_attention=shape).to(dtype)
    ours = import_weights(theirs)
    assert isinstance(ours, PerceiverIO)
    tokens, padding = batch()
    expected = theirs(tokens, attention_mask=(~padding).to(dtype), output_hidden_states=True)
    found = ours(tokens, key_padding_mask=padding)
    logits = expected.logits[:, :20] if head == "MaskedLM" else expected.logits
    assert_agree(valid(found, padding), valid(logits, padding), tolerance=TOLERANCE[dtype])
    latents = ours.latents(ours.array(tokens, key_padding_mask=padding), padding)
    assert_agree(latents, expected.hidden_states[-1], tolerance=TOLERANCE[dtype])


@torch.no_grad()
def test_a_perceiver_of_images_is_equal():
    one_head = {"num_cross_attention_heads": 1, "qk_channels": None, "v_channels": None}
    theirs = perceiver("ImageClassificationFourier", **one_head)
    images = torch.randn(2, 3, 5, 9, generator=torch.Generator().manual_seed(1))
    found = import_weights(theirs)(images.permute(0, 2, 3, 1))
    # Theirs computes the angles of its features, up to 350, in the default type, and the coordinates, which
    # are exact for 5 and 9 points, in fp32; ours computes both in fp64.
    assert_agree(found, theirs(images).logits, tolerance=1e-4)
    theirs, images = theirs.double(), images.double()
    found = import_weights(theirs)(images.permute(0, 2, 3, 1))
    with default_dtype(torch.float64):
        expected = theirs(images).logits
    assert_agree(found, expected, tolerance=1e-10)


@pytest.mark.parametrize("activation", ["gelu", "gelu_python", "gelu_new", "gelu_pytorch_tanh", "relu"])
@torch.no_grad()
def test_every_layer_has_the_activation_of_the_model(activation):
    tokens, padding = batch()
    for theirs in (
        hugging_face("Bert", "ForMaskedLM", hidden_act=activation),
        hugging_face("BigBird", "ForSequenceClassification", hidden_act=activation),
        perceiver("SequenceClassification", hidden_act=activation),
    ):
        theirs.double()
        expected = theirs(tokens, attention_mask=(~padding).double()).logits
        found = import_weights(theirs)(tokens, key_padding_mask=padding)
        assert_agree(valid(found, padding), valid(expected, padding), activation, tolerance=1e-10)


@torch.no_grad()
def test_other_numbers_of_segments_and_an_output_matrix_of_its_own():
    tokens, padding = batch()
    for family, settings in (
        ("Roberta", {"type_vocab_size": 1}),  # as all models of its authors
        ("Bert", {"tie_word_embeddings": False}),
    ):
        theirs = hugging_face(family, "ForMaskedLM", **settings)
        found = import_weights(theirs)(tokens, key_padding_mask=padding)
        assert_agree(found[~padding], theirs_of(theirs, tokens, padding)[~padding], family)


@torch.no_grad()
def test_options_replace_those_of_the_original():
    tokens, padding = batch()
    theirs = hugging_face("Longformer")
    wider = hugging_face("Longformer", attention_window=[12, 12])  # the same weights
    found = import_weights(theirs, window=12)(tokens, key_padding_mask=padding)
    assert_agree(found[~padding], theirs_of(wider, tokens, padding)[~padding])
    sizes = {"num_attention_heads": 1, "segment_means_seq_len": 24}
    tokens, padding = batch(24, (24,))
    theirs, finer = (hugging_face("Nystromformer", num_landmarks=n, **sizes) for n in (4, 6))
    assert_agree(import_weights(theirs, n_landmarks=6)(tokens), theirs_of(finer, tokens, padding))
    drawn = import_weights(hugging_face("BigBird"), seed=3, block_size=2, random_blocks=1).stack.blocks
    assert {(x.attention.layout.block_size, x.attention.layout.random_blocks) for x in drawn} == {(2, 1)}
    assert torch.equal(*(x.attention.pattern(64) for x in drawn))


@torch.no_grad()
def test_a_folder_is_read_and_ours_is_saved(tmp_path):
    theirs = hugging_face("Bert", "ForMaskedLM")
    theirs.save_pretrained(tmp_path / "theirs")
    ours = import_weights(tmp_path / "theirs")
    ours.save(tmp_path / "ours")
    tokens, padding = batch()
    found = load(tmp_path / "ours").eval()(tokens, key_padding_mask=padding)
    assert_agree(found[~padding], theirs_of(theirs, tokens, padding)[~padding])


def test_the_copy_shares_no_memory_and_keeps_the_mode():
    theirs = hugging_face("Bert", "ForMaskedLM")
    ours = import_weights(theirs)
    assert not ours.training
    assert import_weights(theirs.train()).training
    assert not import_weights(perceiver("MaskedLM")).training
    assert import_weights(hugging_face("Bert", hidden_dropout_prob=0.3)).config.dropout == 0.3
    before = ours.embedding.weight.clone()
    nn.init.zeros_(theirs.bert.embeddings.word_embeddings.weight)
    assert torch.equal(ours.embedding.weight, before)
    ours.train().loss(*[batch(5, (5, 5))[0]] * 2).backward()
    assert all(p.grad is not None for p in ours.parameters())


def test_losses_and_their_gradients_are_equal():
    theirs = hugging_face("Bert", "ForMaskedLM").double()
    ours = import_weights(theirs)
    tokens, padding = batch()
    targets = ((tokens * 7) % 19).masked_fill(padding, -100)
    found = ours.loss(tokens, targets, key_padding_mask=padding)
    expected = theirs(tokens, attention_mask=(~padding).long(), labels=targets).loss
    assert_agree(found, expected, tolerance=1e-12)
    layers = theirs.bert.encoder.layer
    for ours_weight, theirs_weight in (
        (ours.stack.blocks[0].ff.up.weight, layers[0].intermediate.dense.weight),
        (ours.stack.blocks[1].attention.out_proj.weight, layers[1].attention.output.dense.weight),
        (ours.segments.weight, theirs.bert.embeddings.token_type_embeddings.weight),
        (ours.head.bias, theirs.cls.predictions.decoder.bias),
    ):
        gradients = (
            torch.autograd.grad(loss, weight, retain_graph=True)[0]
            for loss, weight in ((found, ours_weight), (expected, theirs_weight))
        )
        assert_agree(*gradients, "gradient", tolerance=1e-12)


def test_big_bird_draws_other_blocks_in_each_layer():
    first, second = (block.attention for block in import_weights(hugging_face("BigBird")).stack.blocks)
    assert not torch.equal(first.pattern(64), second.pattern(64))


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"run pip install '\.\[hf\]' in a clone of unrolled"):
        import_weights("somewhere")


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9))


def with_adapter():
    model = hugging_face("Bert")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["query"]), model)
    return model


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (gpt2, UnsupportedError, "weights of 'gpt2' models cannot be imported; those of .*'bert'"),
        (lambda: hugging_face("Bert", "ForMultipleChoice"), UnsupportedError, "BertForMultipleChoice has no counterpart"),
        (lambda: hugging_face("BigBird", "ForQuestionAnswering", num_labels=2), UnsupportedError, "has an output that is not a linear layer"),
        (lambda: hugging_face("Bert", "LMHeadModel"), UnsupportedError, "BertLMHeadModel has no counterpart"),
        (with_adapter, UnsupportedError, r"in encoder.layer.0.attention.self.query, which would be lost: merge it"),
        (lambda: hugging_face("Bert", is_decoder=True), UnsupportedError, "BertModel is a decoder"),
        (lambda: hugging_face("Bert", hidden_act="silu"), UnsupportedError, "hidden_act is 'silu', but must be one of"),
        (lambda: perceiver("SequenceClassification", self_attention_widening_factor=2), UnsupportedError, r"hidden_act are \[1, 2\], True and"),
        (lambda: perceiver("SequenceClassification", use_query_residual=False), UnsupportedError, r"hidden_act are \[1\], False and"),
        (lambda: nn.Linear(2, 2), ValueError, "source is a Linear, but must be a model of transformers"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_refused(source, error, message):
    with pytest.raises(error, match=message):
        import_weights(source())


def test_what_cannot_be_read_is_refused_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    file = tmp_path / "model.safetensors"
    unreadable = r"cannot be read as a model of transformers: [^\n]+$"
    with pytest.raises(ValueError, match=f"nobody/nothing {unreadable}"):
        import_weights("nobody/nothing")
    gpt2().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="holds a 'gpt2' model of the class 'GPT2LMHeadModel'"):
        import_weights(tmp_path)
    hugging_face("Bert", "ForMaskedLM").save_pretrained(tmp_path)
    weights = load_file(file)
    del weights["cls.predictions.transform.dense.bias"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 tensors of a BertForMaskedLM, .*transform\.dense\.bias"):
        import_weights(tmp_path)
    file.write_bytes(b"broken")
    with pytest.raises(ValueError, match=unreadable):
        import_weights(tmp_path)
    file.unlink()
    torch.save(hugging_face("Bert", "ForMaskedLM").state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=unreadable):  # a pickle could run code
        import_weights(tmp_path)


def test_a_folder_without_the_pooler_is_read(tmp_path):
    original = hugging_face("Bert", "Model")
    original.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    rest = {name: x for name, x in weights.items() if not name.startswith("pooler.")}
    assert len(rest) == len(weights) - 2
    save_file(rest, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokens, _ = batch(valid=(20, 20))
    torch.testing.assert_close(import_weights(tmp_path)(tokens), original(tokens).last_hidden_state)


def test_a_pooler_that_is_needed_may_not_be_missing(tmp_path):
    hugging_face("Bert", "ForSequenceClassification").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["bert.pooler.dense.bias"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 tensors of a BertForSequenceClassification, .*pooler"):
        import_weights(tmp_path)
