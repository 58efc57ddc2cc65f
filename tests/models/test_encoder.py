import pytest
import torch
from torch import nn

from models.kit import VOCAB, assert_same, randomised
from unrolled.contract import UnsupportedError
from unrolled.models import Encoder, EncoderConfig, mask_tokens

ATTENTION = ["linear", "softmax", ["linear", "softmax"]]
POSITIONS = ["learned", "sinusoidal", "rotary", "none"]


def encoder(**fields) -> Encoder:
    small = {"d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "max_length": 12}
    torch.manual_seed(0)
    return randomised(Encoder(EncoderConfig(**small | fields)))


OUTPUTS = [
    {"vocab_size": VOCAB, "n_classes": 3, "pooling": "mean"},
    {"vocab_size": VOCAB, "n_classes": 3, "pooling": "first"},
    {"vocab_size": VOCAB, "n_classes": 3, "output": "tokens"},
    {"vocab_size": VOCAB, "output": "masked"},
    {"vocab_size": VOCAB, "output": "masked", "tie_embeddings": True},
    {"input_dim": 5, "n_classes": 3},
    {"input_dim": 5, "n_classes": 3, "output": "tokens"},
]
BERT = {"norm": "post", "n_segments": 2, "embedding_norm": True, "activation": "gelu_tanh", "norm_eps": 1e-3}
MASKED = {"output": "masked", "tie_embeddings": True, "head_hidden": "gelu", "output_bias": True}
OUTPUTS_OF_BERT = [
    BERT | {"vocab_size": VOCAB, "n_classes": 3, "pooling": "first", "head_hidden": "tanh"},
    BERT | {"vocab_size": VOCAB, **MASKED},
]


def inputs_for(model: Encoder, B: int, T: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if model.config.vocab_size is None:
        return torch.randn(B, T, 5, dtype=torch.double, generator=generator)
    return torch.randint(VOCAB, (B, T), generator=generator)


@pytest.mark.parametrize("fields", OUTPUTS + OUTPUTS_OF_BERT, ids=str)
def test_outputs_and_losses(fields):
    model = encoder(**fields)
    x, padding = inputs_for(model, 2, 6), torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    logits = model(x, key_padding_mask=padding)
    n_outputs = fields.get("n_classes", VOCAB)
    sequence = fields.get("output", "classification") == "classification"
    assert logits.shape == ((2, n_outputs) if sequence else (2, 6, n_outputs))
    targets = torch.randint(n_outputs, logits.shape[:-1])
    if not sequence:
        targets[0, 0] = -100
    counted = targets if sequence else targets.masked_fill(padding, -100)
    loss = model.loss(x, targets, key_padding_mask=padding)
    assert_same(loss, nn.functional.cross_entropy(logits.flatten(0, -2), counted.flatten()))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_what_bert_has_is_what_it_says():
    """Embeddings of three kinds, their norm, and the layers of the head, written out."""
    model = encoder(**OUTPUTS_OF_BERT[1])
    tokens, segments = inputs_for(model, 2, 6), torch.tensor([[0, 0, 1, 1, 0, 1]]).expand(2, -1)
    weights = model.state_dict()

    def norm(x, name):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-3).sqrt()
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    table = weights["embedding.weight"]
    x = table[tokens] + weights["positions.table.weight"][:6] + weights["segments.weight"][segments]
    x = model.stack(norm(x, "embedding_norm"))
    torch.testing.assert_close(model.encode(tokens, segments=segments), x)
    x = nn.functional.gelu(x @ weights["head_hidden.dense.weight"].T + weights["head_hidden.dense.bias"])
    x = norm(x, "head_hidden.norm") @ table.T + weights["head.bias"]
    torch.testing.assert_close(model(tokens, segments=segments), x)
    zeros = torch.zeros_like(tokens)
    assert torch.equal(model(tokens), model(tokens, segments=zeros))


@torch.no_grad()
def test_without_an_output_layer_the_hidden_vectors_come_out():
    model = encoder(vocab_size=VOCAB, output="hidden")
    tokens = inputs_for(model, 2, 6)
    assert torch.equal(model(tokens), model.encode(tokens))
    with pytest.raises(UnsupportedError, match="output 'hidden' has no loss"):
        model.loss(tokens, tokens)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (torch.zeros(2, 5).long(), r"segments has shape \[2, 5\], but must be \[2, 6\]"),
        (torch.full((2, 6), 2), r"segments holds ids from 2 to 2, but they must be in \[0, 2\)"),
    ],
)
def test_wrong_segments_are_refused(segments, message):
    model = encoder(**OUTPUTS_OF_BERT[0])
    with pytest.raises(ValueError, match=message):
        model(inputs_for(model, 2, 6), segments=segments)


def test_segments_are_refused_by_a_model_without():
    plain = encoder(vocab_size=VOCAB, n_classes=3)
    with pytest.raises(ValueError, match="segments are given, but must be None for a model whose n_segments"):
        plain(inputs_for(plain, 2, 6), segments=torch.zeros(2, 6).long())


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("attention", ATTENTION, ids=str)
@pytest.mark.parametrize("fields", [OUTPUTS[0], OUTPUTS[1], OUTPUTS[2], OUTPUTS[6]], ids=str)
@torch.no_grad()
def test_padding_on_any_side_changes_nothing(fields, attention, positions):
    model = encoder(attention=attention, positions=positions, **fields)
    lengths = [4, 9, 1]
    whole = inputs_for(model, 3, 9)
    filler = (whole + 1) % VOCAB
    for side in ("left", "right"):
        x, padding = filler.clone(), torch.ones(3, 9, dtype=torch.bool)
        spans = [slice(9 - n, None) if side == "left" else slice(n) for n in lengths]
        for row, span in enumerate(spans):
            padding[row, span] = False
            x[row, span] = whole[row, : lengths[row]]
        logits = model(x, key_padding_mask=padding)
        for row, span in enumerate(spans):
            alone = model(whole[row : row + 1, : lengths[row]])[0]
            found = logits[row] if logits.dim() == 2 else logits[row, span]
            assert_same(found, alone)


@pytest.mark.parametrize("pooling", ["mean", "first"])
@pytest.mark.parametrize("attention", ["linear", "softmax", "similarity"])
def test_a_row_without_tokens_pools_to_zero(attention, pooling):
    model = encoder(input_dim=5, n_classes=3, pooling=pooling, attention=attention)
    x, padding = inputs_for(model, 2, 4).requires_grad_(), torch.zeros(2, 4, dtype=torch.bool)
    padding[0] = True
    for y in (model(x, key_padding_mask=padding)[0], model(x[:, :0])[1]):
        torch.testing.assert_close(y, model.head.project.bias)
        leaves = [x, *model.parameters()]
        gradients = torch.autograd.grad(y.sum(), leaves, materialize_grads=True, allow_unused=True)
        assert (gradients[0] == 0).all()
        assert all(g.isfinite().all() for g in gradients)


def test_the_mean_does_not_overflow_in_fp16():
    model = encoder(input_dim=5, n_classes=3, pooling="mean").half()
    y = torch.full((1, 40_000, model.config.d_model), 2.0, dtype=torch.float16)
    pooled = model._pool(y, torch.zeros(y.shape[:2], dtype=torch.bool))
    assert pooled.dtype == torch.float16
    assert (pooled == 2).all()


@pytest.mark.parametrize("attention", ATTENTION, ids=str)
def test_every_position_sees_every_other(attention):
    model = encoder(attention=attention, vocab_size=VOCAB, n_classes=3, output="tokens")
    x = inputs_for(model, 1, 6)
    embedded = model.embedding(x).detach().requires_grad_()
    hidden = model.stack(embedded)
    for t in range(6):
        (gradient,) = torch.autograd.grad(hidden[0, t].sum(), embedded, retain_graph=True)
        assert (gradient != 0).any(dim=-1).all()


@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
def test_bf16_autocast_keeps_the_residual_stream_wide(norm_type):
    model = encoder(input_dim=5, n_classes=3, positions="none", norm_type=norm_type).float()
    x, targets, seen = torch.randn(2, 6, 5), torch.tensor([0, 2]), []
    for block in model.stack.blocks:
        block.register_forward_hook(lambda _block, _x, y: seen.append(y.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(x, targets)
    assert {loss.dtype, *seen} == {torch.float32}
    loss.backward()


def test_masking_follows_berts_recipe():
    tokens = torch.randint(100, (200, 500), generator=torch.Generator().manual_seed(0))
    before = tokens.clone()

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        return mask_tokens(tokens, mask_id=100, vocab_size=100, generator=generator)

    inputs, targets = make()
    assert torch.equal(tokens, before)
    assert all(torch.equal(a, b) for a, b in zip((inputs, targets), make(), strict=True))
    chosen = targets != -100
    assert torch.equal(targets[chosen], tokens[chosen])
    assert torch.equal(inputs[~chosen], tokens[~chosen])
    # 100,000 draws: five standard deviations of each share
    assert chosen.float().mean().item() == pytest.approx(0.15, abs=0.006)
    masked, kept = inputs[chosen] == 100, inputs[chosen] == tokens[chosen]
    assert masked.float().mean().item() == pytest.approx(0.8, abs=0.017)
    assert kept.float().mean().item() == pytest.approx(0.101, abs=0.013)  # a random id may be the same one
    random = inputs[chosen][~masked & ~kept]
    assert len(random.unique()) == 100
    assert random.float().mean().item() == pytest.approx(49.5, abs=4)


@pytest.mark.parametrize("probability", [15, -0.1, float("nan")])
def test_a_probability_of_masking_is_between_0_and_1(probability):
    with pytest.raises(ValueError, match=f"probability is {probability}, but must be between 0 and 1"):
        mask_tokens(torch.zeros(2, 8).long(), mask_id=10, vocab_size=10, probability=probability)


def test_a_masked_model_learns_to_fill_a_gap():
    torch.manual_seed(0)
    config = EncoderConfig(11, d_model=32, n_layers=1, n_heads=4, output="masked", max_length=8)
    model = Encoder(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randint(10, (32, 1), generator=generator).expand(32, 8)  # one symbol, repeated
        return mask_tokens(rows, mask_id=10, vocab_size=10, probability=0.3, generator=generator)

    first = model.loss(*batch()).item()
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(*batch()).backward()
        optimizer.step()
    assert model.loss(*batch()).item() < first / 10


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(torch.zeros(2, 4, 3)), r"x has shape \[2, 4, 3\], but must be \[B, T, 5\]"),
        (lambda m: m(torch.zeros(2, 4, 5)), "x is torch.float32, but the weights are torch.float64"),
        (lambda m: m(torch.zeros(2, 13, 5).double()), "length 13, but must have at most max_length = 12"),
        (
            lambda m: m.loss(torch.zeros(2, 4, 5).double(), torch.zeros(2, 4).long()),
            r"targets is .* must be .*\[2\]",
        ),
    ],
)
def test_wrong_input_is_refused_in_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call(encoder(input_dim=5, n_classes=3))


def question(model: Encoder) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and a mask of tokens that are to be global: others in each row."""
    is_global = torch.tensor([[1, 1, 0, 0, 0, 0, 0, 0, 1], [0, 0, 1, 0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    return inputs_for(model, 2, 9), is_global


@pytest.mark.parametrize("reversible", [False, True])
@pytest.mark.parametrize("attention", ["longformer", ["softmax", "longformer"]])
def test_tokens_of_a_question_read_all_others_and_are_read_by_them(attention, reversible):
    options = {"longformer": {"window": 2, "global_tokens": 0}}
    fields = {"attention": attention, "attention_options": options, "reversible": reversible}
    model = encoder(vocab_size=VOCAB, n_classes=3, output="tokens", **fields)
    x, is_global = question(model)
    found = model(x, global_mask=is_global)
    for row, mask in zip((0, 1), is_global, strict=True):
        options["longformer"]["global_tokens"] = mask.nonzero().flatten().tolist()
        alone = encoder(vocab_size=VOCAB, n_classes=3, output="tokens", **fields)
        torch.testing.assert_close(found[row], alone(x)[row])
    assert not torch.allclose(found, model(x))
    targets = torch.randint(3, (2, 9))
    model.loss(x, targets, global_mask=is_global).backward()
    plain = torch.nn.functional.cross_entropy(found.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model.loss(x, targets, global_mask=is_global), plain)


def test_global_tokens_are_refused_where_no_layer_has_them():
    model = encoder(vocab_size=VOCAB, n_classes=3, attention="softmax")
    x, is_global = question(model)
    with pytest.raises(
        UnsupportedError, match="no layer of this model takes global_mask; use bidirectional longformer"
    ):
        model(x, global_mask=is_global)
