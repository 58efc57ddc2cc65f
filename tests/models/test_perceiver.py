"""The Perceiver and Perceiver IO: what they compute, what they share, and what they cannot tell apart."""

import math

import pytest
import torch
from torch import nn

from models.kit import VOCAB, assert_same, randomised, tokens_of
from unrolled.models import Perceiver, PerceiverConfig, PerceiverIO, PerceiverIOConfig
from unrolled.ops.positions import fourier_features, grid_positions

SMALL = {"d_model": 16, "n_layers": 2, "n_heads": 4, "n_latents": 5, "max_length": 12}


def perceiver(**fields) -> Perceiver:
    torch.manual_seed(0)
    small = SMALL | {"n_iterations": 3, "n_classes": 3}
    return randomised(Perceiver(PerceiverConfig(**small | fields)))


def perceiver_io(**fields) -> PerceiverIO:
    torch.manual_seed(0)
    return randomised(PerceiverIO(PerceiverIOConfig(**SMALL | {"n_iterations": 2} | fields)))


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cross_attend(layer, z, x):
    """One cross-attend by its equations, head by head."""
    q = layer.q_proj(layer.query_norm(z))
    kv, width = layer.kv_proj(layer.array_norm(x)), q.shape[-1]
    k, v = kv[..., :width], kv[..., width:]
    heads = []
    for h_q, h_k, h_v in zip(*(y.chunk(layer.heads, -1) for y in (q, k, v)), strict=True):
        weights = (h_q @ h_k.mT / math.sqrt(h_q.shape[-1])).softmax(-1)
        heads.append(weights @ h_v)
    y = layer.out_proj(torch.cat(heads, -1))
    z = z + y if layer.query_residual else y
    return z + layer.ff.down(nn.functional.gelu(layer.ff.up(layer.ff_norm(z))))


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("cross", [{}, {"cross_heads": 2, "cross_width": 6}], ids=str)
def test_a_perceiver_is_what_it_says(share, cross):
    model = perceiver(input_dim=4, positions="none", share_weights=share, **cross)
    x = normal(2, 9, 4)
    z = model.latents.initial.expand(2, -1, -1)
    reads, stacks = list(model.latents.reads), list(model.latents.stacks)
    assert (len(reads), len(stacks)) == ((2, 1) if share else (3, 3))
    for i in range(3):
        z = cross_attend(reads[min(i, 1) if share else i], z, x)
        for block in stacks[0 if share else i].blocks:
            z = block(z)
    assert_same(model(x), z.mean(1) @ model.head.project.weight.T + model.head.project.bias)


WIDTHS = {"query_width": 12, "decoder_heads": 3, "decoder_width": 6, "decoder_value_width": 9}


@pytest.mark.parametrize(
    "widths", [{}, WIDTHS, {"cross_width": 8, "cross_value_width": 6, "cross_heads": 2}], ids=str
)
@pytest.mark.parametrize("residual", [True, False])
def test_a_perceiver_io_is_what_it_says(residual, widths):
    model = perceiver_io(vocab_size=VOCAB, output="tokens", n_classes=3, query_residual=residual, **widths)
    tokens = tokens_of(2, 9)
    x = model.array.embedding(tokens) + model.array.positions.table.weight[:9]
    z = cross_attend(model.latents.reads[0], model.latents.initial.expand(2, -1, -1), x)
    for _ in range(2):
        for block in model.latents.stacks[0].blocks:
            z = block(z)
    queries = model.queries.table.weight[:9].expand(2, -1, -1)
    assert_same(model(tokens), model.head(cross_attend(model.decoder, queries, z)))
    own = normal(2, 4, model.query_width)
    assert_same(model(tokens, queries=own), model.head(cross_attend(model.decoder, own, z)))


def test_sharing_counts_the_parameters_of_two_reads_and_one_stack():
    def count(**fields) -> int:
        return sum(p.numel() for p in perceiver(input_dim=4, positions="none", **fields).parameters())

    model = perceiver(input_dim=4, positions="none")
    read, stack = (sum(p.numel() for p in part[0].parameters()) for part in (model.latents.reads, model.latents.stacks))  # fmt: skip
    once = count(n_iterations=1)
    assert count(n_iterations=2) == once + read
    assert count(n_iterations=8) == once + read
    assert count(n_iterations=8, share_weights=False) == once + 7 * (read + stack)


def test_the_widths_are_those_of_the_paper():
    # 64 bands on two axes and three colours: 2 (2 * 64 + 1) + 3 = 261, which is the cross-attend's width too
    config = PerceiverConfig(
        input_dim=3, grid=[224, 224], positions="none", n_classes=10, d_model=512, n_latents=4, n_layers=1
    )
    model = Perceiver(config)
    (read,) = model.latents.reads
    assert config.array_width == 261
    assert read.q_proj.weight.shape == (261, 512)
    assert read.kv_proj.weight.shape == (522, 261)
    assert read.ff.up.weight.shape == (512, 512)
    assert model.latents.initial.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_grid_gets_its_fourier_features_whatever_its_size():
    model = perceiver(input_dim=3, grid=[4, 6], n_bands=2, positions="none")
    plain = perceiver(input_dim=3 + 2 * 5, positions="none")
    plain.load_state_dict(model.state_dict())
    for sizes in ([4, 6], [3, 8]):
        x = normal(2, *sizes, 3)
        features = fourier_features(grid_positions(sizes), 2, [4, 6], dtype=torch.float64)
        array = torch.cat([x, features.expand(2, -1, -1, -1)], -1).flatten(1, 2)
        assert_same(model(x), plain(array))


def test_without_positions_the_order_of_the_inputs_changes_nothing():
    x, order = normal(2, 9, 4), torch.randperm(9, generator=torch.Generator().manual_seed(0))
    for make in (perceiver, perceiver_io):
        model = make(input_dim=4, positions="none", n_classes=3)
        assert_same(model(x[:, order]), model(x))
    ordered = perceiver(input_dim=4)
    assert not torch.allclose(ordered(x[:, order]), ordered(x), atol=1e-3)


OUTPUTS = [{"n_classes": 3}, {"n_classes": 3, "output": "tokens"}, {"output": "masked"}]


def makers(positions: str):
    yield perceiver(vocab_size=VOCAB, positions=positions)
    for fields in OUTPUTS:
        yield perceiver_io(vocab_size=VOCAB, positions=positions, **fields)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "none"])
@torch.no_grad()
def test_padding_anywhere_changes_nothing(positions):
    padding = torch.zeros(4, 9, dtype=torch.bool)
    padding[1, :4], padding[2, 3:], padding[3, [0, 2, 5, 8]] = True, True, True
    tokens = tokens_of(4, 9)
    other = torch.where(padding, (tokens + 1) % VOCAB, tokens)
    for model in makers(positions):
        logits = model(tokens, key_padding_mask=padding)
        kept = ~padding if logits.dim() == 3 else slice(None)
        assert torch.equal(model(other, key_padding_mask=padding)[kept], logits[kept])
        for row in range(4):
            alone = model(tokens[row][~padding[row]].unsqueeze(0))[0]
            assert_same(logits[row][~padding[row]] if logits.dim() == 3 else logits[row], alone)


def test_a_row_of_padding_only_is_finite():
    padding = torch.tensor([[True] * 5, [False] * 5])
    for model in makers("learned"):
        logits = model(tokens_of(2, 5), key_padding_mask=padding)
        logits.sum().backward()
        assert logits.isfinite().all()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_mask_hides_points_of_a_grid_and_moves_none():
    model = perceiver(input_dim=3, grid=[3, 3], n_bands=2, positions="none")
    x, padding = normal(1, 3, 3, 3), torch.zeros(1, 9, dtype=torch.bool)
    padding[0, [1, 5]] = True
    loud = x.clone()
    loud.view(1, 9, 3)[padding] = 1e4
    found = model(x, key_padding_mask=padding)
    assert torch.equal(model(loud, key_padding_mask=padding), found)
    array = model.array(x)[:, ~padding[0]]
    z = model.latents(array, None)
    assert_same(found, model.head(z.mean(1)))


@pytest.mark.parametrize("fields", OUTPUTS, ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_the_loss_is_the_mean_over_what_is_asked(fields, padded):
    model = perceiver_io(vocab_size=VOCAB, **fields)
    tokens, masks = tokens_of(2, 6), {}
    if padded:
        masks["key_padding_mask"] = torch.tensor([[0] * 6, [0, 0, 0, 0, 1, 1]], dtype=torch.bool)
    logits = model(tokens, **masks)
    targets = torch.randint(logits.shape[-1], logits.shape[:-1])
    if per_token := targets.dim() == 2:
        targets[0, 1] = -100
    counted = targets.masked_fill(masks["key_padding_mask"], -100) if padded and per_token else targets
    loss = model.loss(tokens, targets, **masks)
    assert_same(loss, nn.functional.cross_entropy(logits.flatten(0, -2), counted.flatten()))
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_mask_moves_no_query_of_a_grid():
    fields = {"output": "tokens", "n_classes": 2, "n_latents": 4, "positions": "none", "max_length": 6}
    model = perceiver_io(input_dim=3, grid=[2, 3], n_bands=2, **fields).eval()
    x, mask = normal(1, 2, 3, 3), torch.zeros(1, 6, dtype=torch.bool)
    mask[0, 0] = True
    queries = model.queries(torch.zeros(1, 6, model.query_width, dtype=x.dtype))
    found = model(x, key_padding_mask=mask)
    torch.testing.assert_close(found, model(x, queries=queries, key_padding_mask=mask))


def test_the_loss_of_a_perceiver_reaches_every_parameter():
    model = perceiver(input_dim=4)
    x, targets = normal(3, 9, 4), torch.tensor([0, 2, -100])
    expected = nn.functional.cross_entropy(model(x)[:2], targets[:2])
    loss = model.loss(x, targets)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_bf16_autocast_keeps_the_residual_stream_wide():
    model, seen = perceiver(vocab_size=VOCAB).float(), []
    for layer in (*model.latents.reads, *model.latents.stacks[0].blocks):
        layer.register_forward_hook(lambda _layer, _x, y: seen.append(y.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(tokens_of(2, 6), torch.tensor([0, 2]))
    assert {loss.dtype, *seen} == {torch.float32}


@pytest.mark.slow
def test_a_perceiver_learns_where_on_a_grid_the_light_is():
    torch.manual_seed(0)
    config = PerceiverConfig(
        input_dim=1, grid=[6, 6], n_bands=4, positions="none", n_classes=4,
        d_model=32, n_layers=1, n_heads=4, n_latents=8, n_iterations=2,
    )  # fmt: skip
    model = Perceiver(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        place = torch.randint(36, (64,), generator=generator)
        x = nn.functional.one_hot(place, 36).float().view(64, 6, 6, 1)
        return x, (place // 18) * 2 + (place % 6) // 3  # which quarter

    for _ in range(150):
        optimizer.zero_grad()
        model.loss(*batch()).backward()
        optimizer.step()
    assert model.loss(*batch()).item() < 0.1  # chance is log 4 = 1.39


TOKENS = {"vocab_size": VOCAB}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: perceiver(**TOKENS, norm="post"), "norm is 'post', but must be 'pre'"),
        (lambda: perceiver(**TOKENS, positions="rotary"), "positions is 'rotary', but must be another kind"),
        (lambda: perceiver(), "vocab_size is None and input_dim is None, but one must be given"),
        (lambda: perceiver(input_dim=4, input_width=5), "input_width is 5, but must be None"),
        (lambda: perceiver(input_dim=3, positions="sinusoidal"), "the width of the inputs is 3, but must be even"),
        (lambda: perceiver(input_dim=3, grid=[4]), r"grid is \[4\], but must be None with .* positions 'learned'"),
        (lambda: perceiver(input_dim=3, cross_heads=2), "cross_heads is 2, but must be a divisor of .* width 3"),
        (lambda: perceiver_io(**TOKENS, n_classes=3, decoder_heads=3), "decoder_heads is 3, but must be a divisor of .* width 16"),
        (lambda: perceiver_io(**TOKENS, output="masked", tie_embeddings=True, query_width=8), "inputs as wide as query_width = 8"),
        (lambda: perceiver_io(**TOKENS, output="masked", n_classes=3), "n_classes is 3, but must be None with output 'masked'"),
        (lambda: perceiver_io(**TOKENS, output="masked", tie_embeddings=True, input_width=8), "inputs as wide as d_model = 16"),
        (lambda: perceiver(input_dim=3)(normal(2, 5, 4)), r"x has shape \[2, 5, 4\], but must be \[B, T, 3\]"),
        (lambda: perceiver(input_dim=3, grid=[4, 4], positions="none")(normal(2, 5, 3)), r"but must be \[B, X1, X2, 3\]"),
        (lambda: perceiver(input_dim=3)(torch.zeros(2, 5, 3, dtype=torch.long)), "x is torch.int64, no floating-point type"),
        (lambda: perceiver(input_dim=3, positions="none")(normal(2, 5, 3).float()), "x is torch.float32, but the weights are torch.float64"),
        (lambda: perceiver_io(**TOKENS, n_classes=3)(tokens_of(2, 5), queries=normal(2, 4, 16).float()), "queries is torch.float32, but the weights"),
        (lambda: perceiver(**TOKENS)(tokens_of(2, 13)), "length 13, but must have at most max_length = 12"),
        (lambda: perceiver(**TOKENS)(tokens_of(2, 5) + VOCAB), "but they must be in"),
        (lambda: perceiver(**TOKENS)(tokens_of(2, 5), key_padding_mask=torch.zeros(2, 4).bool()), "key_padding_mask has shape"),
        (lambda: perceiver_io(**TOKENS, n_classes=3)(tokens_of(2, 5), queries=normal(2, 4, 15)), r"queries has shape \[2, 4, 15\], but must be \[2, O, 16\]"),
        (lambda: perceiver(**TOKENS).loss(tokens_of(2, 5), tokens_of(2, 5)), r"targets is .*\[2, 5\], but must be .*\[2\]"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_in_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
