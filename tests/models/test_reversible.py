import re

import pytest
import torch

from models.kit import assert_same, read
from unrolled.bench.measure import PeakBytes
from unrolled.contract import UnsupportedError
from unrolled.models import Decoder, DecoderConfig, Encoder, EncoderConfig
from unrolled.models.perceiver_ar import PerceiverARConfig
from unrolled.ops.masks import without_padding

BUCKETS = {"chunk": 4, "n_buckets": 4, "seed": 1}
CLUSTERS, TOPK = {"n_clusters": 4, "n_keys": 3, "seed": 1}, "torch.Tensor.topk"
REFORMER = {"attention": "reformer", "attention_options": {"reformer": BUCKETS}}


def decoder(**fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "d_model": 16, "n_heads": 2, "n_layers": 3, "reversible": True}
    return Decoder(DecoderConfig(**sizes | fields)).double()


def tokens_of(batch=2, length=21):
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(0))


def by_hand(stack, x, **masks):
    """The equations, with autograd as usual."""
    if masks:
        x = without_padding(x, masks["key_padding_mask"])
    x1 = x2 = x
    for block in stack.blocks:
        x1 = x1 + block.dropout(block.attention(block.attention_norm(x2), **masks))
        x2 = x2 + block.dropout(block.ff(block.ff_norm(x1)))
    return stack.norm((x1 + x2) / 2)


def gradients(y, x, stack):
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    return torch.autograd.grad((y * weights).sum(), [x, *stack.parameters()])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "fields",
    [{}, {"attention": "softmax", "ff_chunk": 4}, REFORMER, {"attention": ["linear", "softmax", "linear"]}],
    ids=["linear", "softmax, chunked", "reformer", "mixed"],
)
def test_outputs_and_gradients_are_those_of_ordinary_autograd(fields, dropout):
    stack = decoder(dropout=dropout, **fields).stack.train()
    x = torch.randn(2, 21, 16, dtype=torch.float64, requires_grad=True)
    padding = torch.arange(21) >= torch.tensor([[21], [13]])
    torch.manual_seed(5)
    expected = by_hand(stack, x, key_padding_mask=padding)
    torch.manual_seed(5)
    found = stack(x, key_padding_mask=padding)
    assert torch.equal(found, expected)
    torch.manual_seed(6)  # the backward draws what the forward drew, and leaves this generator alone
    before = torch.get_rng_state()
    found = gradients(found, x, stack)
    assert torch.equal(torch.get_rng_state(), before)
    for ours, theirs in zip(found, gradients(expected, x, stack), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize(
    ("attention", "options", "choices"),
    [
        ("reformer", BUCKETS, ["unrolled.attention.reformer.hash_buckets"]),
        ("topk", {"n_keys": 3}, [TOPK]),
        ("clustered", CLUSTERS, [TOPK, "unrolled.attention.clustered.sign_clusters"]),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_choices_are_those_of_the_forward(attention, options, choices, monkeypatch):
    """A restored input differs by rounding; here a choice would come out as none if it were made again."""
    fields = {"vocab_size": 11, "d_model": 16, "n_heads": 2, "n_layers": 2, "reversible": True}
    fields |= {"attention": attention, "attention_options": {attention: options}}
    torch.manual_seed(0)
    causal = attention != "clustered"
    model = Decoder(DecoderConfig(**fields)) if causal else Encoder(EncoderConfig(n_classes=2, **fields))
    stack = model.double().stack
    x = torch.randn(2, 21, 16, dtype=torch.float64, requires_grad=True)
    expected = gradients(stack(x), x, stack)
    y, chosen = stack(x), []
    for choice in choices:
        monkeypatch.setattr(choice, lambda *_, **__: chosen.append(1))
    for ours, theirs in zip(gradients(y, x, stack), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert not chosen


def activation_peak(n_layers, **fields):
    """Bytes of activations at the peak of a forward and a backward, beyond the gradients of the weights."""
    stack = decoder(n_layers=n_layers, d_model=32, dropout=0.1, **fields).float().stack.train()
    x = torch.randn(2, 128, 32, requires_grad=True)
    with PeakBytes() as forward:
        y = stack(x)
        kept = forward.live
    with PeakBytes() as backward:
        y.sum().backward()
        weights = sum(p.grad.nbytes for p in stack.parameters())
    return kept, kept + backward.peak - weights


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_activations_do_not_depend_on_the_depth(attention):
    """Not counted: a few kilobytes for each layer with dropout, to draw the same again."""
    shallow, deep = activation_peak(2, attention=attention), activation_peak(16, attention=attention)
    assert deep == shallow
    ordinary = [activation_peak(n, attention=attention, reversible=False)[0] for n in (2, 16)]
    assert ordinary[1] > 7 * ordinary[0]


def test_reformer_keeps_a_byte_for_each_bucket():
    shallow, deep = activation_peak(2, **REFORMER), activation_peak(16, **REFORMER)
    assert deep[0] - shallow[0] == 14 * 2 * 128 * 2 * 2  # layers, rows, tokens, heads, rounds


@pytest.mark.parametrize("fields", [{}, {"attention": "softmax"}, REFORMER, {"ff_chunk": 3}])
def test_prefill_and_step_give_what_forward_gives(fields):
    model, tokens = decoder(**fields).eval(), tokens_of()
    expected = model(tokens)
    with torch.no_grad():
        assert torch.equal(model(tokens), expected)
    found, _ = read(model, [tokens[:, :9], *tokens[:, 9:].unbind(1)])
    assert_same(found, expected, 1e-10)


def test_it_has_the_weights_of_an_ordinary_stack():
    assert decoder(reversible=False).state_dict().keys() == decoder().state_dict().keys()


def test_streams_are_fp32_in_half_precision():
    model = decoder(n_layers=8).bfloat16().train()
    streams = []
    hook = model.stack.blocks[3].register_forward_hook(lambda _, args, y: streams.append(y.dtype))
    with torch.no_grad():
        model(tokens_of())
    hook.remove()
    assert streams == [torch.float32]
    model.loss(tokens_of(), tokens_of()).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_autocast_is_that_of_the_forward():
    model = decoder(attention="softmax").float().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(tokens_of(), tokens_of())
        inside = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    outside = torch.autograd.grad(loss, list(model.parameters()))
    for a, b in zip(inside, outside, strict=True):
        assert torch.equal(a, b)
        assert a.abs().max() > 0


RECOMPUTED = [{}, {"reversible": False, "ff_chunk": 4}, {"reversible": False, "gradient_checkpointing": True}]


def recomputing(gradient_checkpointing=False, **fields):
    model = decoder(**fields).train()
    model.gradient_checkpointing = gradient_checkpointing
    return model


def losses(model, parameters, tokens):
    return torch.func.functional_call(
        Loss(model), {f"model.{k}": v for k, v in parameters.items()}, (tokens,)
    )


class Loss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets=None):
        return self.model.loss(tokens, tokens if targets is None else targets)


@pytest.mark.parametrize("fields", RECOMPUTED, ids=str)
@pytest.mark.parametrize("kind", [torch.nn.Parameter, torch.Tensor.requires_grad_])
def test_gradients_are_those_of_the_parameters_of_the_forward(fields, kind):
    model, tokens = recomputing(**fields), tokens_of()
    parameters = {name: kind(x.detach() + 0.1 * torch.randn_like(x)) for name, x in model.named_parameters()}
    own = dict(model.named_parameters())
    found = torch.autograd.grad(losses(model, parameters, tokens), list(parameters.values()))
    assert all(x is own[name] for name, x in model.named_parameters())
    assert all(x.grad is None for x in own.values())
    model.load_state_dict({**model.state_dict(), **parameters})
    expected = torch.autograd.grad(model.loss(tokens, tokens), list(model.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_gradients_are_those_of_the_tied_parameters_of_the_forward():
    tied = {"linformer": {"sharing": "layerwise", "rank": 4, "max_length": 8}}
    sizes = {"vocab_size": 11, "d_model": 16, "n_layers": 3, "n_heads": 2, "n_classes": 3}
    model = Encoder(EncoderConfig(**sizes, attention="linformer", attention_options=tied)).double().train()
    tokens, labels = torch.arange(14).view(2, 7) % 11, torch.tensor([0, 2])
    other = {
        name: (x.detach() + 0.1 * torch.randn_like(x)).requires_grad_()
        for name, x in model.named_parameters()
    }
    found = []
    for model.gradient_checkpointing in (False, True):
        wrapped = {f"model.{name}": x for name, x in other.items()}
        loss = torch.func.functional_call(Loss(model), wrapped, (tokens, labels))
        found.append(torch.autograd.grad(loss, list(other.values())))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fields", RECOMPUTED, ids=str)
def test_transforms_of_torch_func_take_gradients(fields):
    model, tokens = recomputing(**fields), tokens_of()
    own = {name: x.detach() for name, x in model.named_parameters()}
    one = torch.func.grad(lambda parameters, row: losses(model, parameters, row.unsqueeze(0)))
    found = torch.func.vmap(one, (None, 0))(own, tokens)
    for i, row in enumerate(tokens):
        loss = model.loss(row.unsqueeze(0), row.unsqueeze(0))
        expected = torch.autograd.grad(loss, list(model.parameters()))
        torch.testing.assert_close([x[i] for x in found.values()], list(expected), rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("fields", [RECOMPUTED[0], RECOMPUTED[2]], ids=str)
def test_gradients_are_those_of_the_mode_of_the_forward(fields):
    model, tokens, found = recomputing(dropout=0.3, **fields), tokens_of(), []
    for later in (model.train, model.eval):
        model.train()
        torch.manual_seed(3)
        loss = model.loss(tokens, tokens)
        later()
        modes = [module.training for module in model.modules()]
        found.append(torch.autograd.grad(loss, list(model.parameters())))
        assert [module.training for module in model.modules()] == modes
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("fields", RECOMPUTED, ids=str)
def test_a_parameter_changed_in_place_before_the_backward_is_refused(fields):
    model, tokens = recomputing(**fields), tokens_of()
    loss = model.loss(tokens, tokens)
    with torch.no_grad():
        model.stack.blocks[1].ff.up.bias.add_(1)
    with pytest.raises(RuntimeError, match="bias of Linear was changed in place"):
        loss.backward()


class Adapter(torch.nn.Module):
    """A layer to which a path with dropout was added, as LoRA does."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.dropout = layer, torch.nn.Dropout(0.5)
        self.path = torch.nn.Linear(layer.in_features, layer.out_features, bias=False).double()

    def forward(self, x):
        return self.layer(x) + self.path(self.dropout(x))


@pytest.mark.parametrize("fields", RECOMPUTED, ids=str)
def test_dropout_of_an_adapter_is_the_same_when_it_is_recomputed(fields):
    model, tokens = recomputing(**fields), tokens_of()
    ff = model.stack.blocks[0].ff
    ff.up = Adapter(ff.up)
    weight = ff.up.path.weight

    def loss():
        torch.manual_seed(1)
        return model.loss(tokens, tokens)

    direction, step = torch.randn_like(weight), 1e-5
    (gradient,) = torch.autograd.grad(loss(), weight)
    with torch.no_grad():
        weight.add_(direction, alpha=step)
        above = loss()
        weight.sub_(direction, alpha=2 * step)
        slope = (above - loss()) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-10)


@pytest.mark.compilers
@pytest.mark.parametrize("fields", RECOMPUTED, ids=str)
def test_compiled_parts_are_recomputed(fields):
    model, tokens = recomputing(**fields), tokens_of()
    expected = torch.autograd.grad(model.loss(tokens, tokens), list(model.parameters()))
    for block in model.stack.blocks:
        block.ff.up = torch.compile(block.ff.up, backend="eager")
    found = torch.autograd.grad(model.loss(tokens, tokens), list(model.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "change",
    [
        lambda block: block.register_forward_hook(lambda _, x, y: 2 * y),
        lambda block: block.register_full_backward_hook(lambda _, x, y: None),
        lambda block: block.compile(backend="eager"),
    ],
    ids=["forward hook", "backward hook", "compile"],
)
def test_what_training_would_not_call_is_refused(change):
    model, tokens = decoder(), tokens_of()
    change(model.stack.blocks[1])
    with pytest.raises(UnsupportedError, match=re.escape("must be on block.attention or block.ff")):
        model.loss(tokens, tokens)


def test_it_trains_an_encoder_with_frozen_embeddings():
    config = EncoderConfig(vocab_size=11, n_classes=2, d_model=16, n_heads=2, n_layers=2, reversible=True)
    model = Encoder(config).train()
    model.embedding.requires_grad_(False)
    model.positions.requires_grad_(False)
    model.loss(tokens_of(), torch.tensor([0, 1])).backward()
    assert all(p.grad is not None for p in model.stack.parameters())


@pytest.mark.compilers
def test_it_compiles_whole():
    model, tokens = decoder(n_layers=1), tokens_of(2, 9)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), model(tokens))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: decoder(norm="post"), "norm is 'post', but must be 'pre' with reversible True"),
        (lambda: PerceiverARConfig(vocab_size=11, reversible=True), "reversible is True, but must be False"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_chunks_change_no_output_and_no_gradient():
    whole, chunked = decoder(reversible=False), decoder(reversible=False, ff_chunk=4)
    x = torch.randn(2, 21, 16, dtype=torch.float64, requires_grad=True)
    y, expected = chunked.stack(x), whole.stack(x)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-13)
    for ours, theirs in zip(gradients(y, x, chunked.stack), gradients(expected, x, whole.stack), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_chunks_bound_the_wide_activations():
    def peak(**fields):
        ff = decoder(d_model=16, d_ff=512, **fields).stack.blocks[0].ff
        x = torch.randn(1, 256, 16, dtype=torch.float64, requires_grad=True)
        with PeakBytes() as memory:
            ff(x).sum().backward()
        return memory.peak

    one_wide_tensor = 256 * 512 * 8
    assert peak() > 2 * one_wide_tensor
    assert peak(ff_chunk=16) < one_wide_tensor
