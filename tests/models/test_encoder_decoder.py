"""The encoder-decoder against torch's own layers, against itself token by token, and against wrong input."""

import copy
import math
import re
from collections.abc import Iterator

import pytest
import torch
from small_models import small_model
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from models.kit import assert_same, read
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


def twins(layer: nn.Module, ours: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Pair the parameters of one of torch's layers with those of one of our blocks."""
    parts = [(layer.norm1, ours.attention_norm), (layer.linear1, ours.ff.up), (layer.linear2, ours.ff.down)]
    attentions = [(layer.self_attn, ours.attention)]
    if isinstance(layer, nn.TransformerDecoderLayer):
        attentions.append((layer.multihead_attn, ours.cross))
        parts += [(layer.norm2, ours.cross_norm), (layer.norm3, ours.ff_norm)]
    else:
        parts.append((layer.norm2, ours.ff_norm))
    for theirs, own in attentions:
        yield theirs.in_proj_weight, own.qkv_proj.weight
        yield theirs.in_proj_bias, own.qkv_proj.bias
        parts.append((theirs.out_proj, own.out_proj))
    for theirs, own in parts:
        yield from zip(theirs.parameters(), own.parameters(), strict=True)


class Plain(nn.Module):
    """The paper's model from torch's layers, with positions and embeddings written out."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, "norm_first": model.config.norm == "pre"}
        self.table = nn.Parameter(model.embedding.weight.detach().clone())
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(16, 4, 24, **options) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(16, 4, 24, **options) for _ in range(2))
        self.norms = copy.deepcopy(nn.ModuleList([model.encoder.norm, model.norm]))
        self.double()
        for theirs, own in self.twins(model):
            theirs.data.copy_(own)

    def twins(self, model: EncoderDecoder) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        yield self.table, model.embedding.weight
        layers = zip([*self.encoder, *self.decoder], [*model.encoder.blocks, *model.blocks], strict=True)
        for layer, block in layers:
            yield from twins(layer, block)

    def embed(self, ids: Tensor, places: Tensor) -> Tensor:
        angles = places.unsqueeze(-1) / 10000 ** (torch.arange(0, 16, 2).double() / 16)
        return self.table[ids] * math.sqrt(16) + torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        valid = (~padding).long()
        memory = self.embed(source, (valid.cumsum(1) - valid).clamp(min=0))
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=padding)
        blocked = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        memory = self.norms[0](memory)
        y = self.embed(target, torch.arange(target.shape[1]))
        for layer in self.decoder:
            y = layer(y, memory, tgt_mask=blocked, memory_key_padding_mask=padding)
        return self.norms[1](y) @ self.table[:-1].T


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_it_is_the_stack_of_torchs_layers(norm):
    model = make(norm=norm)
    plain = Plain(model).train()  # in evaluation torch's encoder takes another path
    source, targets, padding = batch()
    target = shifted(targets, 11)
    ours, theirs = model(source, target, key_padding_mask=padding), plain(source, target, padding)
    assert_same(ours, theirs, 1e-10)
    weight = torch.randn_like(ours)
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    for a, b in plain.twins(model):
        assert_same(a.grad, b.grad, 1e-10)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_torch_and_smooth_in_training_only(smoothing):
    model, (source, targets, padding) = make(label_smoothing=smoothing), batch()
    logits = model(source, shifted(targets, 11), key_padding_mask=padding)
    for training in (True, False):
        found = model.train(training).loss(source, targets, key_padding_mask=padding)
        e = smoothing if training else 0.0
        expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=e)
        assert_same(found, expected, 1e-10)
    assert model.loss(source, torch.full_like(targets, IGNORED)) == 0


FORMS = [
    {},
    LINEAR,
    {"norm": "pre", "positions": "rotary", "cross_attention": "linear", "n_kv_heads": 2},
    {"positions": "rotary", "attention_options": {"softmax": {"rotary_base": 9.0}}},
    {"attention": ["linear", "softmax"], "decoder_attention": "gated_linear", "cross_attention": "rfa"},
    {"positions": "learned", "max_length": 9, "tie_embeddings": False, "source_vocab_size": 13},
]


forms = pytest.mark.parametrize("fields", FORMS, ids=str)


@forms
def test_every_way_of_cutting_the_target_is_equal(fields):
    model = make(**fields).eval()
    source, targets, padding = batch()
    target = shifted(targets, 11)
    expected = model(source, target, key_padding_mask=padding)
    state = model.init_state(source, key_padding_mask=padding)
    for cuts in ([5], [1, 1, 1, 1, 1], [2, 1, 2]):
        parts = [part[:, 0] if part.shape[1] == 1 else part for part in target.split(cuts, 1)]
        logits, now = read(model, parts, state)
        assert_same(logits, expected, 1e-10)
        assert now.position.tolist() == [5] * 3
    assert state.position.tolist() == [0] * 3


@forms
def test_padding_of_the_source_changes_nothing(fields):
    model = make(**fields).eval()
    source, targets, padding = batch()
    target = shifted(targets, 11)
    expected = model(source, target, key_padding_mask=padding)
    changed = torch.where(padding, 10 - source.clamp(max=10), source)
    assert torch.equal(model(changed, target, key_padding_mask=padding), expected)
    for row in range(3):
        alone = model(source[row : row + 1, ~padding[row]], target[row : row + 1])
        assert_same(alone[0], expected[row], 1e-10)


def test_beams_can_be_reordered():
    model = make().eval()
    source, _, padding = batch()
    state = model.init_state(source, key_padding_mask=padding)
    rows = torch.tensor([2, 0, 0])
    got, _ = model.step(torch.full((3,), 11), select(state, rows))
    expected, _ = model.step(torch.full((3,), 11), state)
    assert_same(got, expected[rows])


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


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, LINEAR])
def test_it_learns_to_reverse_words_and_translates_the_same_in_any_batch(fields):
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
    for source, found in zip(sources, translate(model, sources, stop=0), strict=True):
        assert torch.equal(translate(model, [source], stop=0)[0], found)


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


@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("narrow_first", [False, True])
@torch.no_grad()
def test_a_state_continues_with_and_without_autocast(attention, narrow_first):
    model = make(attention=attention).float().eval()
    source, targets, padding = batch()
    targets[targets == IGNORED] = 0
    expected = model(source, targets, key_padding_mask=padding)
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow_first):
        state = model.init_state(source, key_padding_mask=padding)
        first, state = model.prefill(targets[:, :4], state)
    with torch.autocast("cpu", torch.bfloat16, enabled=not narrow_first):
        last, _ = model.step(targets[:, 4], state)
    found = torch.cat([first, last.unsqueeze(1)], 1).float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05 * float(expected.abs().max()))


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


TOO_FAR = torch.tensor([[0, 3, 6, 9, 12]] * 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, s, t: m(s[:, :0], t), "source has shape [3, 0], but must have at least one token"),
        (lambda m, s, t: m(s.clamp(max=1) + 10, t), "source holds ids from 10 to 11, but they must be in [0, 11)"),
        (lambda m, s, t: m(s, TOO_FAR), "target holds ids from 0 to 12"),
        (lambda m, s, t: m(s, t[:2]), "target has 2 rows, but must have 3"),
        (lambda m, s, t: m.loss(s, t[:2]), "targets is torch.int64 of shape [2, 5], but must be torch.long [3, 5]"),
        (lambda m, s, t: m.loss(s, t[:, 0]), "targets has shape [3], but must be [3, T]"),
        (lambda m, s, t: m.loss(s, t.unsqueeze(2)), "targets has shape [3, 5, 1], but must be [3, T]"),
        (lambda m, s, t: m.step(t[:, 0], ()), "state is a tuple, but must be the EncoderDecoderState"),
        (lambda m, s, t: m.step(t[:2, 0], m.init_state(s)), "state.position is torch.int64 of shape [3], but must be torch.long [2]"),
        *(
            (lambda m, s, t, verb=verb: getattr(m, verb)(s, key_padding_mask=s >= 0), "row 0 of source is nothing but padding, but must have at least one token")
            for verb in ("init_state", "encode")
        ),
    ],
)  # fmt: skip
def test_wrong_input_is_named(call, message):
    source, targets, _ = batch()
    with pytest.raises(ValueError, match=re.escape(message)):
        call(make(), source, shifted(targets, 11))


def test_targets_may_be_empty():
    source, targets, _ = batch()
    assert make().loss(source, targets[:, :0]) == 0


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
    read = shifted(target, 7)
    expected = F.cross_entropy(model(source, read, global_mask=is_global).flatten(0, 1), target.flatten())
    torch.testing.assert_close(model.loss(source, target, global_mask=is_global), expected)


def test_a_translation_has_at_most_as_many_tokens_as_learned_positions():
    torch.manual_seed(0)
    sizes = {"d_model": 8, "n_layers": 1, "n_heads": 2, "max_length": 12}
    model = EncoderDecoder(EncoderDecoderConfig(20, positions="learned", **sizes))
    [found] = translate(model, [[1, 2, 3]], beam_size=2)
    assert len(found) == 12
    with pytest.raises(ValueError, match="length 13"):
        translate(model, [[1, 2, 3]], beam_size=2, max_new_tokens=13)


def test_layers_that_read_the_source_share_what_their_mechanism_shares():
    options = {"attention_options": {"linformer": {"sharing": "layerwise", "max_length": 16}}}
    model = small_model("encoder_decoder", n_layers=2, cross_attention="linformer", **options)
    first, second = (block.cross.projection for block in model.blocks)
    assert first is second


def test_options_of_rotary_positions_are_for_self_attention_only():
    rotation = {"rotary_dim": 2, "rotary_base": 100.0}
    model = small_model("encoder_decoder", positions="rotary", attention_options={"softmax": rotation})
    block = model.blocks[0]
    assert (block.attention.rotary_dim, block.attention.rotary_base) == (2, 100)
    assert (block.cross.rotary, block.cross.rotary_dim) == (False, None)
