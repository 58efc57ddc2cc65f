import copy
import math
import pickle
from itertools import pairwise

import pytest
import torch
from small_models import small_model
from torch import nn

from models.kit import VOCAB, assert_same, randomised, read, tokens_of
from unrolled.models import Decoder, DecoderConfig, EncoderDecoder, EncoderDecoderConfig
from unrolled.models.limits import n_positions
from unrolled.ops import state as states

HYBRID = ["linear", "softmax"]
ATTENTION = ["linear", "softmax", HYBRID]
POSITIONS = ["learned", "sinusoidal", "rotary", "none"]


def decoder(**fields) -> Decoder:
    small = {"d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "n_mixtures": 3, "max_length": 12}
    torch.manual_seed(0)
    return randomised(Decoder(DecoderConfig(VOCAB, **small | fields)))


@pytest.mark.parametrize("head", ["categorical", "logistic_mixture"])
@pytest.mark.parametrize("norm", [("pre", "rmsnorm"), ("post", "layernorm")])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("attention", ATTENTION, ids=str)
@torch.no_grad()
def test_all_ways_to_read_a_sequence_are_equal(attention, positions, norm, head):
    model = decoder(attention=attention, positions=positions, norm=norm[0], norm_type=norm[1], head=head)
    tokens = tokens_of(2, 6)
    whole = model(tokens)
    steps = list(tokens.unbind(1))
    assert_same(read(model, steps)[0], whole)
    assert_same(read(model, list(tokens.split(1, dim=1)))[0], whole)
    for cut in range(7):
        before, after = tokens[:, :cut], tokens[:, cut:]
        assert_same(read(model, [before, after])[0], whole)
        assert_same(read(model, [before, *steps[cut:]])[0], whole)
    assert_same(read(model, [tokens[:, :2], steps[2], tokens[:, 3:]])[0], whole)


@pytest.mark.parametrize("norm", ["pre", "post", "res_post"])
@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu"])
@torch.no_grad()
def test_a_block_is_what_it_says(norm, activation):
    model = decoder(n_layers=1, norm=norm, activation=activation)
    (block,), x = model.stack.blocks, torch.randn(2, 5, 16, dtype=torch.double)

    def feed_forward(h: torch.Tensor) -> torch.Tensor:
        h = block.ff.up(h)
        if activation == "swiglu":
            h = nn.functional.silu(h[..., : h.shape[-1] // 2]) * h[..., h.shape[-1] // 2 :]
        else:
            h = getattr(nn.functional, activation)(h)
        return block.ff.down(h)

    if norm == "pre":
        x1 = x + block.attention(block.attention_norm(x))
        expected = model.stack.norm(x1 + feed_forward(block.ff_norm(x1)))
    elif norm == "res_post":
        x1 = x + block.attention_norm(block.attention(x))
        expected = model.stack.norm(x1 + block.ff_norm(feed_forward(x1)))
    else:
        x1 = block.attention_norm(x + block.attention(x))
        expected = block.ff_norm(x1 + feed_forward(x1))
    assert_same(model.stack(x), expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("attention", ATTENTION, ids=str)
@torch.no_grad()
def test_unequal_prompts_in_one_batch_are_each_as_if_alone(attention, positions, side):
    model = decoder(attention=attention, positions=positions)
    lengths, longest = [5, 2, 0, 3], 5
    prompts = [tokens_of(1, n) for n in lengths]
    tokens = torch.full((4, longest), VOCAB - 1)
    padding = torch.ones(4, longest, dtype=torch.bool)
    spans = [slice(longest - n, None) if side == "left" else slice(n) for n in lengths]
    for row, (span, prompt) in enumerate(zip(spans, prompts, strict=True)):
        tokens[row, span], padding[row, span] = prompt[0], False

    parallel = model(tokens, key_padding_mask=padding)
    logits, state = model.prefill(tokens, model.init_state(4), key_padding_mask=padding)
    assert state.position.tolist() == lengths
    assert parallel.isfinite().all()
    assert logits.isfinite().all()
    more, last = tokens_of(4, 3), tokens_of(4)
    more_padding = torch.tensor([[False, True, False]]).expand(4, 3)  # scattered
    _, state = model.prefill(more, state, key_padding_mask=more_padding)
    stepped, state = model.step(last, state)
    assert state.position.tolist() == [n + 3 for n in lengths]
    for row, (span, prompt) in enumerate(zip(spans, prompts, strict=True)):
        alone = model(torch.cat([prompt, more[row : row + 1, ::2], last[row : row + 1, None]], dim=1))[0]
        n = lengths[row]
        if n:
            assert_same(parallel[row, span], alone[:n])
            assert_same(logits[row, span], alone[:n])
        assert_same(stepped[row], alone[-1])


@pytest.mark.parametrize("kept", [1, 3, 5, 9])
@torch.no_grad()
def test_only_the_logits_that_are_kept_are_computed(kept):
    model, tokens, computed = decoder(attention=HYBRID), tokens_of(2, 5), []
    padding = torch.tensor([[True, True, False, False, False], [False, True, False, False, False]])
    expected, after = model.prefill(tokens, model.init_state(2), key_padding_mask=padding)
    model.head.register_forward_pre_hook(lambda head, inputs: computed.append(inputs[0].shape[1]))
    found, state = model.prefill(tokens, model.init_state(2), key_padding_mask=padding, logits_to_keep=kept)
    assert_same(found, expected[:, -kept:])
    assert computed == [min(kept, 5)]
    assert_same(states.leaves(state), states.leaves(after))


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("attention", ATTENTION, ids=str)
@torch.no_grad()
def test_packed_sequences_are_each_as_if_alone(attention, positions):
    model = decoder(attention=attention, positions=positions)
    tokens, bounds = tokens_of(1, 14), [0, 4, 5, 14]  # longer in all than max_length, each one shorter
    packed = model(tokens, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    alone = [model(tokens[:, a:b]) for a, b in pairwise(bounds)]
    assert_same(packed, torch.cat(alone, dim=1))


@pytest.mark.parametrize("attention", ATTENTION, ids=str)
@torch.no_grad()
def test_a_state_is_a_value(attention, tmp_path):
    model = decoder(attention=attention)
    _, state = model.prefill(tokens_of(2, 5), model.init_state(2))
    before = states.map_tensors(torch.clone, state)
    first, after = model.step(tokens_of(2), state)
    model.prefill(tokens_of(2, 3), state)
    model.step(tokens_of(2), after)
    assert all(torch.equal(x, states.leaves(before)[name]) for name, x in states.leaves(state).items())
    states.save(state, tmp_path / "session.safetensors")
    loaded = states.load(tmp_path / "session.safetensors", model.init_state(1))
    assert torch.equal(model.step(tokens_of(2), loaded)[0], first)
    forked, _ = model.step(tokens_of(2)[[1, 1, 0]], states.select(state, [1, 1, 0]))
    assert_same(forked, first[[1, 1, 0]])


def test_learned_positions_end_at_max_length():
    model = decoder(max_length=5)
    _, state = model.prefill(tokens_of(2, 5), model.init_state(2))
    for call in (
        lambda: model(tokens_of(2, 6)),
        lambda: model.prefill(tokens_of(2, 6), model.init_state(2)),
        lambda: model.step(tokens_of(2), state),
        lambda: model(tokens_of(1, 7), cu_seqlens=torch.tensor([0, 1, 7], dtype=torch.int32)),
    ):
        with pytest.raises(ValueError, match="length 6, but must have at most max_length = 5"):
            call()
    padding = torch.tensor([[True, False, False, False, False, False, True]])
    model.prefill(tokens_of(1, 7), model.init_state(1), key_padding_mask=padding)  # 5 valid tokens fit
    assert model(tokens_of(1, 7), key_padding_mask=padding).isfinite().all()


def test_other_positions_do_not_end():
    for positions in POSITIONS[1:]:
        assert decoder(max_length=5, positions=positions)(tokens_of(1, 30)).isfinite().all()


@pytest.mark.parametrize("inputs", ["tokens", "pixels"])
@pytest.mark.parametrize("head", ["categorical", "logistic_mixture"])
def test_the_start_symbol_is_read_and_never_predicted(inputs, head):
    model = decoder(inputs=inputs, head=head, start_token=True)
    tokens = tokens_of(2, 4)
    started = tokens.clone()
    started[:, 0] = VOCAB
    assert model(started).shape == (2, 4, VOCAB)
    first = {tuple(model(torch.tensor([[i]]))[0, 0].tolist()) for i in range(VOCAB + 1)}
    assert len(first) == VOCAB + 1
    with pytest.raises(ValueError, match="ids from 8 to 8, but they must be in"):
        model(torch.full((1, 2), VOCAB + 1))


def test_a_pixel_enters_as_its_intensity():
    model = decoder(inputs="pixels")
    black, middle, white = model.embedding(torch.tensor([0, 3, 6]))
    torch.testing.assert_close(white - middle, middle - black)
    torch.testing.assert_close(middle, model.embedding.bias)
    torch.testing.assert_close(white - middle, model.embedding.weight)


def test_tied_embeddings_are_one_table_whose_first_rows_predict():
    model = decoder(tie_embeddings=True, start_token=True)
    assert not [name for name in model.state_dict() if name.startswith("head")]
    assert model.embedding.weight.shape == (VOCAB + 1, 16)
    tokens = tokens_of(2, 4)
    separate = decoder(start_token=True)
    separate.load_state_dict(model.state_dict() | {"head.project.weight": model.embedding.weight[:VOCAB]})
    assert torch.equal(model(tokens), separate(tokens))
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.embedding.weight)
    assert (twin(tokens) == 0).all()
    assert not (model(tokens) == 0).any()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_tied_output_follows_the_table_of_its_model(copied, tmp_path):
    model, tokens = decoder(tie_embeddings=True), tokens_of(2, 4)
    model = copied(model)
    model.embedding = nn.Embedding(VOCAB, 16, dtype=model.embedding.weight.dtype)
    model.loss(tokens, tokens).backward()
    assert model.embedding.weight.grad.abs().sum(-1).gt(0).all()  # also of tokens that are not in the input
    model.save(tmp_path)
    assert torch.equal(Decoder.load(tmp_path)(tokens), model(tokens))


@pytest.mark.parametrize("head", ["categorical", "logistic_mixture"])
def test_the_loss_is_the_mean_over_the_targets_that_count(head):
    model = decoder(head=head)
    tokens, targets = tokens_of(3, 5), tokens_of(3, 5).flip(0)
    targets[0, :2] = -100
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    nll = -model(tokens, key_padding_mask=padding).log_softmax(-1)
    counted = (targets != -100) & ~padding
    expected = nll.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)[counted].mean()
    for there in (0, -1, VOCAB):  # what targets hold at padding does not matter
        targets = targets.masked_fill(padding, there)
        torch.testing.assert_close(model.loss(tokens, targets, key_padding_mask=padding), expected)
    assert model.loss(tokens, torch.full_like(targets, -100)) == 0


@pytest.mark.parametrize("norm", [("pre", "rmsnorm"), ("post", "layernorm")])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize(("inputs", "head"), [("tokens", "categorical"), ("pixels", "logistic_mixture")])
def test_bf16_autocast_trains_with_an_fp32_loss(inputs, head, positions, norm):
    model = Decoder(
        DecoderConfig(
            VOCAB, d_model=16, n_heads=4, n_layers=2, attention=HYBRID, inputs=inputs, head=head,
            positions=positions, norm=norm[0], norm_type=norm[1], max_length=8, start_token=True,
        )
    )  # fmt: skip
    tokens = tokens_of(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(tokens, tokens)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, model.loss(tokens, tokens), rtol=0.02, atol=0)
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_checkpointing_keeps_less():
    def kept(checkpointing: bool) -> int:
        model = decoder(attention="softmax", n_layers=4).train()
        model.gradient_checkpointing = checkpointing
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            model.loss(tokens_of(2, 12), tokens_of(2, 12))
        return sum(sizes)

    assert kept(True) < kept(False) / 3


def test_dropout_is_for_training_only():
    model, tokens = decoder(dropout=0.5), tokens_of(2, 6)
    assert torch.equal(model(tokens), model(tokens))
    assert torch.equal(model(tokens), decoder(dropout=0.0)(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


@pytest.mark.compilers
def test_the_model_compiles_as_one_graph():
    model, tokens = decoder(attention=HYBRID, tie_embeddings=True), tokens_of(2, 8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(compiled(tokens), model(tokens))


def test_weights_start_as_in_gpt2():
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(64, d_model=128, n_layers=8, n_heads=4))
    parameters = dict(model.named_parameters())
    std = {name: x.std().item() for name, x in parameters.items() if x.dim() == 2}
    residual = {name for name in std if name.endswith(("ff.down.weight", "attention.out_proj.weight"))}
    assert len(residual) == 16
    for name, found in std.items():
        expected = 0.02 / math.sqrt(16) if name in residual else 0.02
        assert found == pytest.approx(expected, rel=0.05), name
    loss = model.loss(torch.randint(64, (4, 32)), torch.randint(64, (4, 32)))
    assert loss.item() == pytest.approx(math.log(64), rel=0.02)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(tokens_of(4)), r"tokens is torch.int64 of shape \[4\], but must be torch.long \[B, T\]"),
        (lambda m: m(tokens_of(2, 4).int()), "tokens is torch.int32"),
        (lambda m: m(tokens_of(2, 4) - 9), "but they must be in"),
        (lambda m: m(tokens_of(2, 4), key_padding_mask=torch.zeros(2, 5).bool()), "key_padding_mask"),
        (lambda m: m.loss(tokens_of(2, 4), tokens_of(2, 5)), r"targets is .*\[2, 5\], but must be .*\[2, 4\]"),
        (lambda m: m.prefill(tokens_of(2, 4), m.init_state(2), logits_to_keep=0), "logits_to_keep is 0, but must be at least 1"),
        (lambda m: m.step(tokens_of(2, 1), m.init_state(2)), r"token is .*\[2, 1\], but must be .*\[B\]"),
        (lambda m: m.step(tokens_of(2), m.init_state(3)), r"state.position is torch.int64 of shape \[3\], but must be torch.long \[2\]"),
        (lambda m: m.step(tokens_of(2), decoder(n_layers=1).init_state(2)), "state.layers is a tuple of 1, but must be a tuple of 2"),
        (lambda m: m(tokens_of(1, 4), key_padding_mask=torch.zeros(1, 4).bool(), cu_seqlens=torch.tensor([0, 4]).int()), "key_padding_mask was given with cu_seqlens"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_in_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call(decoder())


def test_a_layer_may_rotate_where_the_model_does_not():
    config = DecoderConfig(
        9, d_model=8, n_heads=2, n_layers=2, positions="none", attention=["aft", "retention"],
        attention_options={"retention": {"rotary": True}},
    )  # fmt: skip
    assert [block.attention.rotary for block in Decoder(config).stack.blocks] == [False, True]


@torch.no_grad()
def test_each_layer_may_have_its_own_norm():
    model = decoder(n_layers=3, norm=["res_post", "post", "pre"])
    x = torch.randn(2, 5, 16, dtype=torch.double)
    first, second, third = model.stack.blocks
    x1 = x + first.attention_norm(first.attention(x))
    x1 = x1 + first.ff_norm(first.ff(x1))
    x2 = second.attention_norm(x1 + second.attention(x1))
    x2 = second.ff_norm(x2 + second.ff(x2))
    x3 = x2 + third.attention(third.attention_norm(x2))
    assert_same(model.stack(x), model.stack.norm(x3 + third.ff(third.ff_norm(x3))))
    assert isinstance(decoder(norm=["pre", "post"]).stack.norm, nn.Identity)


def test_only_what_pre_norm_adds_is_drawn_smaller():
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(64, d_model=128, n_layers=3, n_heads=4, norm=["pre", "res_post", "post"]))
    for block, expected in zip(model.stack.layers, (0.02 / math.sqrt(6), 0.02, 0.02), strict=True):
        for layer in (block.attention.out_proj, block.ff.down):
            assert layer.weight.std().item() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
def test_a_model_may_have_no_biases(norm_type):
    attention = ["softmax", "delta_net"]
    options = {"delta_net": {"gated": True}, "softmax": {"output_gate": True}}
    model = decoder(
        bias=False, norm_type=norm_type, attention=attention, attention_options=options, positions="none"
    )
    names = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    assert names == {"stack.blocks.1.attention.decay_bias"}  # of the decay, not of a projection
    tokens = tokens_of(2, 6)
    assert_same(read(model, [tokens[:, :3], *tokens[:, 3:].unbind(1)])[0], model(tokens))


def test_mechanisms_may_have_other_numbers_of_heads():
    options = {"delta_net": {"n_heads": 3, "n_kv_heads": None, "head_dim": 5}, "softmax": {"bias": False}}
    model = decoder(attention=["delta_net", "softmax"], attention_options=options)
    first, second = (block.attention for block in model.stack.layers)
    assert (first.n_heads, first.n_kv_heads, first.head_dim) == (3, 3, 5)
    assert (second.n_heads, second.n_kv_heads, second.head_dim) == (4, 2, 4)
    assert second.qkv_proj.bias is None
    assert first.qkv_proj.bias is not None


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_blocks_may_have_no_feed_forward_layer(norm):
    model = randomised(Decoder(DecoderConfig(VOCAB, d_model=8, n_layers=2, n_heads=2, d_ff=0, norm=norm)))
    assert not any(".ff" in name for name, _ in model.named_parameters())
    tokens = tokens_of(2, 6)
    x = model.positions(model.embedding(tokens))
    for block in model.stack.layers:
        if norm == "pre":
            x = x + block.attention(block.attention_norm(x))
        else:
            x = block.attention_norm(x + block.attention(x))
    assert_same(model(tokens), model.head(model.stack.norm(x)))
    assert_same(read(model, [tokens[:, :3], *tokens[:, 3:].unbind(1)])[0], model(tokens))


def test_blocks_of_other_kinds_need_a_feed_forward_layer():
    with pytest.raises(ValueError, match="d_ff is 0, but must be at least 1 with reversible True"):
        DecoderConfig(VOCAB, d_model=8, n_heads=2, d_ff=0, reversible=True)
    with pytest.raises(ValueError, match="d_ff is 0, but must be at least 1 in this model"):
        EncoderDecoder(EncoderDecoderConfig(VOCAB, d_model=8, n_heads=2, d_ff=0))


def test_a_loss_that_continues_a_state_leaves_out_padding():
    model = small_model("decoder").eval()
    ids = torch.arange(12).view(2, 6) % 5
    padding = torch.tensor([[False] * 4 + [True] * 2, [False] * 6])
    found, _ = model.loss_from(ids, ids, model.init_state(2), key_padding_mask=padding)
    torch.testing.assert_close(found, model.loss(ids, ids, key_padding_mask=padding))


def test_a_layer_may_limit_the_number_of_tokens():
    model = Decoder(DecoderConfig(5, d_model=8, n_layers=2, n_heads=2, positions="none"))
    assert n_positions(model) is None
    model.stack.blocks[1].attention.most_positions = 9
    assert n_positions(model) == 9
