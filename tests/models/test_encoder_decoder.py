"""The encoder-decoder against torch's own layers, against itself token by token, and against its sentences."""

import math
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from models.kit import read
from unrolled.contract import IGNORED, UnsupportedError
from unrolled.generation import translate
from unrolled.models import EncoderDecoder, EncoderDecoderConfig
from unrolled.ops.state import nbytes, select

SMALL = {"d_model": 16, "n_layers": 2, "n_heads": 4, "d_ff": 24, "dropout": 0.0}
LINEAR = {"attention": "linear"}


def make(vocab_size: int = 11, seed: int = 0, **fields) -> EncoderDecoder:
    torch.manual_seed(seed)
    model = EncoderDecoder(EncoderDecoderConfig(vocab_size, **SMALL | fields)).double()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def batch(seed: int = 3, B: int = 3, S: int = 7, T: int = 5, vocab_size: int = 11):
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(vocab_size, (B, S), generator=generator)
    targets = torch.randint(vocab_size, (B, T), generator=generator)
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[0, 4:], padding[1, 0] = True, True
    targets[0, 3:] = IGNORED
    return source, targets, padding


def shifted(targets: Tensor, start: int) -> Tensor:
    read = targets.masked_fill(targets == IGNORED, 0)
    return torch.cat([torch.full_like(read[:, :1], start), read[:, :-1]], 1)


def torch_layer(kind: type, ours: nn.Module, norm_first: bool) -> nn.Module:
    """A layer of torch's with the weights of one of ours."""
    layer = kind(16, 4, 24, dropout=0.0, batch_first=True, norm_first=norm_first).double()
    pairs = [(layer.self_attn, ours.attention)]
    norms = [(layer.norm1, ours.attention_norm)]
    if kind is nn.TransformerDecoderLayer:
        pairs.append((layer.multihead_attn, ours.cross))
        norms += [(layer.norm2, ours.cross_norm), (layer.norm3, ours.ff_norm)]
    else:
        norms.append((layer.norm2, ours.ff_norm))
    with torch.no_grad():
        for theirs, own in pairs:
            theirs.in_proj_weight.copy_(own.qkv_proj.weight)
            theirs.in_proj_bias.copy_(own.qkv_proj.bias)
            theirs.out_proj.load_state_dict(own.out_proj.state_dict())
        for theirs, own in norms:
            theirs.load_state_dict(own.state_dict())
        layer.linear1.load_state_dict(ours.ff.up.state_dict())
        layer.linear2.load_state_dict(ours.ff.down.state_dict())
    return layer


class Plain(nn.Module):
    """The paper's model from torch's layers, with positions and embeddings written out."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        pre = model.config.norm == "pre"
        self.table = nn.Parameter(model.embedding.weight.detach().clone())
        self.encoder = nn.ModuleList(
            torch_layer(nn.TransformerEncoderLayer, block, pre) for block in model.encoder.blocks
        )
        self.decoder = nn.ModuleList(
            torch_layer(nn.TransformerDecoderLayer, block, pre) for block in model.blocks
        )
        self.norms = nn.ModuleList()
        if pre:
            for norm in (model.encoder.norm, model.norm):
                self.norms.append(nn.LayerNorm(16).double())
                self.norms[-1].load_state_dict(norm.state_dict())

    def embed(self, ids: Tensor) -> Tensor:
        B, T = ids.shape
        x = self.table[ids] * math.sqrt(16)
        for b in range(B):
            for i in range(8):
                angle = (
                    [p / 10000 ** (2 * i / 16) for p in self.places[b]]
                    if ids is self.source
                    else [p / 10000 ** (2 * i / 16) for p in range(T)]
                )
                wave = torch.tensor(angle, dtype=torch.float64)
                x[b, :, 2 * i] = x[b, :, 2 * i] + wave.sin()
                x[b, :, 2 * i + 1] = x[b, :, 2 * i + 1] + wave.cos()
        return x

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        self.source = source
        valid = (~padding).long()
        self.places = (valid.cumsum(1) - valid).clamp(min=0).tolist()
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=padding)
        blocked = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        if self.norms:
            memory = self.norms[0](memory)
        y = self.embed(target)
        for layer in self.decoder:
            y = layer(y, memory, tgt_mask=blocked, memory_key_padding_mask=padding)
        if self.norms:
            y = self.norms[1](y)
        return y @ self.table[:-1].T


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_it_is_the_stack_of_torchs_layers(norm):
    model = make(norm=norm)
    plain = Plain(model).train()  # in evaluation torch's encoder takes another path
    source, targets, padding = batch()
    target = shifted(targets, 11)
    ours, theirs = model(source, target, key_padding_mask=padding), plain(source, target, padding)
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)
    weight = torch.randn_like(ours)
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    torch.testing.assert_close(model.embedding.weight.grad, plain.table.grad, atol=1e-10, rtol=0)
    for blocks, layers in ((model.encoder.blocks, plain.encoder), (model.blocks, plain.decoder)):
        for block, layer in zip(blocks, layers, strict=True):
            pairs = [
                (block.attention.qkv_proj.weight, layer.self_attn.in_proj_weight),
                (block.attention.qkv_proj.bias, layer.self_attn.in_proj_bias),
                (block.attention.out_proj.weight, layer.self_attn.out_proj.weight),
                (block.ff.up.weight, layer.linear1.weight),
                (block.ff.down.bias, layer.linear2.bias),
                (block.attention_norm.weight, layer.norm1.weight),
            ]
            if hasattr(block, "cross"):
                pairs += [
                    (block.cross.qkv_proj.weight, layer.multihead_attn.in_proj_weight),
                    (block.cross.out_proj.bias, layer.multihead_attn.out_proj.bias),
                    (block.cross_norm.weight, layer.norm2.weight),
                ]
            for a, b in pairs:
                torch.testing.assert_close(a.grad, b.grad, atol=1e-10, rtol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_torchs_without_padding_and_smooth_in_training_only(smoothing):
    model, (source, targets, padding) = make(label_smoothing=smoothing), batch()
    logits = model(source, shifted(targets, 11), key_padding_mask=padding)
    rows = targets != IGNORED
    for training in (True, False):
        model.train(training)
        e = smoothing if training else 0.0
        log_p = logits[rows].log_softmax(-1)
        smooth = torch.full_like(log_p, e / 11)
        smooth.scatter_add_(1, targets[rows].unsqueeze(1), torch.full_like(smooth[:, :1], 1 - e))
        expected = -(smooth * log_p).sum(1).mean()
        got = model.loss(source, targets, key_padding_mask=padding)
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)
        by_torch = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=e)
        torch.testing.assert_close(got, by_torch, atol=1e-10, rtol=0)
    assert model.loss(source, torch.full_like(targets, IGNORED)) == 0


FORMS = [
    {},
    LINEAR,
    {"norm": "pre", "positions": "rotary", "cross_attention": "linear", "n_kv_heads": 2},
    {"attention": ["linear", "softmax"], "decoder_attention": "gated_linear", "cross_attention": "rfa"},
    {"positions": "learned", "max_length": 9, "tie_embeddings": False, "source_vocab_size": 13},
]


@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_every_way_of_cutting_the_target_is_equal(fields):
    model = make(**fields).eval()
    source, targets, padding = batch()
    target = shifted(targets, 11)
    expected = model(source, target, key_padding_mask=padding)
    state = model.init_state(source, key_padding_mask=padding)
    for cuts in ([5], [1, 1, 1, 1, 1], [2, 1, 2]):
        parts = [part[:, 0] if part.shape[1] == 1 else part for part in target.split(cuts, 1)]
        logits, now = read(model, parts, state)
        torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)
        assert now.position.tolist() == [5] * 3
    assert state.position.tolist() == [0] * 3


@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_padding_of_the_source_changes_nothing(fields):
    model = make(**fields).eval()
    source, targets, padding = batch()
    target, expected = shifted(targets, 11), None
    expected = model(source, target, key_padding_mask=padding)
    changed = torch.where(padding, 10 - source.clamp(max=10), source)
    torch.testing.assert_close(model(changed, target, key_padding_mask=padding), expected, atol=0, rtol=0)
    for row in range(3):
        alone = model(source[row : row + 1, ~padding[row]], target[row : row + 1])
        torch.testing.assert_close(alone[0], expected[row], atol=1e-10, rtol=0)


@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_the_future_of_the_target_changes_nothing(fields):
    model = make(**fields).eval()
    source, targets, padding = batch()
    target = shifted(targets, 11)
    before = model(source, target, key_padding_mask=padding)
    target[:, 3:] = (target[:, 3:] + 1) % 11
    after = model(source, target, key_padding_mask=padding)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3:], after[:, 3:])


def test_beams_can_be_reordered():
    model = make().eval()
    source, _, padding = batch()
    state = model.init_state(source, key_padding_mask=padding)
    rows = torch.tensor([2, 0, 0])
    got, _ = model.step(torch.full((3,), 11), select(state, rows))
    expected, _ = model.step(torch.full((3,), 11), state)
    torch.testing.assert_close(got, expected[rows], atol=1e-12, rtol=0)


def test_linear_everywhere_is_an_rnn_of_constant_size():
    model = make(**LINEAR).eval()

    def size(S: int, T: int) -> int:
        state = model.init_state(torch.zeros(1, S, dtype=torch.long))
        _, state = model.prefill(torch.zeros(1, T, dtype=torch.long), state)
        return nbytes(state)

    assert size(2, 1) == size(200, 100)
    model = make().eval()
    assert size(2, 1) < size(200, 1)


@pytest.mark.parametrize("fields", [{}, LINEAR, {"norm": "pre"}])
def test_it_shows_what_it_reads(fields):
    model = make(**fields).eval()
    source, targets, padding = batch()
    weights = model.attend(source, shifted(targets, 11), key_padding_mask=padding)
    assert weights.shape == (3, 5, 7)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 5, dtype=torch.float64))
    assert (weights[padding.unsqueeze(1).expand_as(weights)] == 0).all()
    with pytest.raises(UnsupportedError, match="topk attention does not compute weights"):
        make(cross_attention="topk").attend(source, shifted(targets, 11))


@pytest.mark.parametrize("fields", [{}, LINEAR])
def test_it_learns_to_say_a_word_backwards_and_translates_alike_in_any_batch(fields):
    torch.manual_seed(0)
    config = EncoderDecoderConfig(8, d_model=32, n_layers=1, n_heads=4, d_ff=64, dropout=0.0, **fields)
    model = EncoderDecoder(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        word = torch.randint(1, 8, (32, 3))
        loss = model.loss(word, torch.cat([word.flip(1), torch.zeros_like(word[:, :1])], 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.7  # nats per target, where chance is 1.5
    sources = [[1, 2, 3], [7, 4, 4], [5, 6, 1]]
    found = translate(model, sources, stop=0)
    assert [row.tolist() for row in found] == [
        translate(model, [source], stop=0)[0].tolist() for source in sources
    ]


def test_weights_start_as_the_docs_say():
    torch.manual_seed(0)
    model = EncoderDecoder(EncoderDecoderConfig(2000, d_model=64, n_layers=1, n_heads=4, d_ff=100))
    assert model.embedding.weight.std().item() == pytest.approx(1 / 8, rel=0.02)
    for weight in model.blocks[0].cross.qkv_proj.weight.split(64):
        assert weight.abs().max().item() == pytest.approx(math.sqrt(6 / 128), rel=0.01)
    assert model.blocks[0].ff.up.weight.abs().max().item() == pytest.approx(math.sqrt(6 / 164), rel=0.01)
    assert model.encoder.blocks[0].attention.out_proj.bias.abs().max() == 0
    assert sum(p.numel() for p in model.parameters()) == 64 * 2001 + sum(
        p.numel() for part in (model.encoder, model.blocks) for p in part.parameters()
    )


def test_half_precision_stays_finite():
    model = make().float()
    source, targets, padding = batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(source, targets, key_padding_mask=padding)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"source_vocab_size": 5}, ValueError, "source_vocab_size is 5, but must be vocab_size = 11"),
        ({"reversible": True, "norm": "pre"}, ValueError, "reversible is True, but must be False"),
        (
            {"attention_options": {"window": {}}},
            ValueError,
            "attention_options is for ['window'], but must be for some of",
        ),
        ({"cross_attention": ["softmax"]}, ValueError, "attention has 1 names, but must have n_layers = 2"),
        ({"cross_attention": "window"}, UnsupportedError, "cross_attention cannot be 'window'; use one of"),
        ({"cross_attention": "nystromformer"}, UnsupportedError, "cross_attention cannot be 'nystromformer'"),
        ({"decoder_attention": "bigbird"}, UnsupportedError, "'bigbird' attention cannot be causal"),
        ({"attention": "delta_net"}, UnsupportedError, "cannot be bidirectional"),
    ],
)
def test_wrong_fields_are_named(fields, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make(**fields)


def test_options_reach_the_mechanism_they_are_for():
    model = make(
        decoder_attention="window", attention_options={"window": {"window": 3}, "softmax": {"head_dim": 6}}
    )
    assert model.encoder.blocks[0].attention.head_dim == model.blocks[0].cross.head_dim == 6


def test_wrong_input_is_named():
    model, (source, targets, padding) = make(), batch()
    target = shifted(targets, 11)
    with pytest.raises(ValueError, match=r"source has shape \[3, 0\], but must have at least one token"):
        model(source[:, :0], target)
    for call in (model.init_state, model.encode):
        with pytest.raises(
            ValueError, match="row 0 of source is nothing but padding, but must have at least one token"
        ):
            call(source, key_padding_mask=torch.ones_like(padding))
    with pytest.raises(ValueError, match=r"source holds ids from \d+ to 11, but they must be in \[0, 11\)"):
        model(torch.where(source == source.max(), 11, source), target)
    with pytest.raises(ValueError, match="target holds ids from 0 to 12"):
        model(source, target.clamp(max=0) + torch.arange(5) * 3)
    with pytest.raises(ValueError, match="target has 2 rows, but must have 3"):
        model(source, target[:2])
    with pytest.raises(
        ValueError, match=r"targets is torch.int64 of shape \[2, 5\], but must be .* \[3, 5\]"
    ):
        model.loss(source, targets[:2])
    with pytest.raises(ValueError, match="state is a tuple, but must be the EncoderDecoderState"):
        model.step(target[:, 0], ())
    with pytest.raises(
        ValueError, match=r"state.position is torch.int64 of shape \[3\], but must be torch.long \[2\]"
    ):
        model.step(target[:2, 0], model.init_state(source))


def test_targets_may_be_empty_and_are_rows_of_ids():
    model = EncoderDecoder(EncoderDecoderConfig(7, d_model=8, n_heads=2, n_layers=1))
    source, targets = torch.zeros(3, 5, dtype=torch.long), torch.zeros(3, 4, dtype=torch.long)
    assert float(model.loss(source, targets[:, :0]).detach()) == 0
    for wrong in (targets[:, 0], targets.unsqueeze(2)):
        with pytest.raises(ValueError, match=r"targets has shape .*, but must be \[3, T\]"):
            model.loss(source, wrong)


def test_tokens_of_the_source_may_be_global():
    torch.manual_seed(0)
    options = {"longformer": {"window": 2, "global_tokens": 0}}
    config = EncoderDecoderConfig(
        7, d_model=16, n_layers=2, n_heads=4, attention="longformer", decoder_attention="softmax",
        cross_attention="softmax", attention_options=options,
    )  # fmt: skip
    model = EncoderDecoder(config).double().eval()
    source, target = torch.randint(7, (2, 9)), torch.randint(7, (2, 3))
    is_global = torch.rand(2, 9) < 0.3
    y = model(source, target, global_mask=is_global)
    assert not torch.allclose(y, model(source, target))
    found, _ = model.prefill(target, model.init_state(source, global_mask=is_global))
    torch.testing.assert_close(found, y)
    torch.testing.assert_close(
        model.loss(source, target[:, 1:], global_mask=is_global),
        torch.nn.functional.cross_entropy(
            model(
                source, torch.cat([torch.full((2, 1), 7), target[:, 1:-1]], 1), global_mask=is_global
            ).flatten(0, 1),
            target[:, 1:].flatten(),
        ),
    )
