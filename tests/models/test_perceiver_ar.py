"""Perceiver AR: a decoder that pays for the prefix once, in whatever calls the tokens come."""

import pytest
import torch
from small_models import small_model
from torch import nn

from models.kit import VOCAB, assert_same, randomised, read, tokens_of
from unrolled.contract import IGNORED, Batch, UnsupportedError
from unrolled.generation import generate
from unrolled.models import Decoder, DecoderConfig, PerceiverAR, PerceiverARConfig
from unrolled.models.perceiver_ar import ReadingBlock
from unrolled.ops import state as states
from unrolled.training import TrainConfig, evaluate

ATTENTION = ["softmax", ["softmax", "linear", "linear"]]
POSITIONS = ["learned", "sinusoidal", "rotary", "none"]
SMALL = {"d_model": 16, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "max_length": 16}


def perceiver(**fields) -> PerceiverAR:
    torch.manual_seed(0)
    return randomised(PerceiverAR(PerceiverARConfig(VOCAB, **SMALL | {"n_latents": 4} | fields)))


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("attention", ATTENTION, ids=str)
def test_with_as_many_latents_as_tokens_it_is_the_decoder_with_its_weights(attention, positions):
    model = perceiver(attention=attention, positions=positions)
    twin = Decoder(DecoderConfig(VOCAB, attention=attention, positions=positions, **SMALL)).double()
    twin.load_state_dict(model.state_dict())
    tokens, padding = tokens_of(2, 9), torch.zeros(2, 9, dtype=torch.bool)
    padding[1, :3] = True
    assert_same(model(tokens, n_latents=9), twin(tokens))
    found = model(tokens, key_padding_mask=padding, n_latents=50)
    assert_same(found[~padding], twin(tokens, key_padding_mask=padding)[~padding])


@torch.no_grad()
def test_the_last_outputs_are_gated_by_their_own_inputs():
    options = {"softmax": {"qk_norm": "head", "output_gate": True, "rotary_dim": 2, "rotary_base": 50.0}}
    model = perceiver(attention="softmax", attention_options=options, positions="rotary", n_layers=1)
    tokens = tokens_of(2, 9)
    expected = model(tokens, n_latents=9)[:, -4:]
    assert_same(model(tokens), expected)
    _, state = model.prefill(tokens[:, :5], model.init_state(2))
    assert_same(model.prefill(tokens[:, 5:], state)[0], expected)
    assert_same(model.prefill(tokens[:, 5:], state, logits_to_keep=3)[0], expected[:, -3:])


def test_the_latents_are_what_the_definition_says():
    model = perceiver(norm="pre", positions="none")
    tokens = tokens_of(2, 9)
    x = model.embedding(tokens)
    first, *rest = model.stack.blocks
    attended = first.attention(first.attention_norm(x))  # the ordinary module, over all positions
    z = (x + attended)[:, -4:]
    z = z + first.ff(first.ff_norm(z))
    for block in rest:
        z = block(z)
    assert_same(model(tokens), model.head(model.stack.norm(z)))


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("attention", ATTENTION, ids=str)
@torch.no_grad()
def test_a_prompt_and_what_follows_give_the_logits_of_one_forward(attention, positions, norm):
    model = perceiver(attention=attention, positions=positions, norm=norm)
    tokens = tokens_of(2, 12)
    for prompt in (3, 4, 7, 12):  # fewer than the latents, as many, more, all
        expected = model(tokens, n_latents=min(4, prompt) + 12 - prompt)
        first, rest = tokens[:, :prompt], tokens[:, prompt:]
        assert_same(read(model, [first, *rest.unbind(1)])[0], expected)
        assert_same(read(model, [first, rest])[0], expected)
        assert_same(read(model, [first[:, :0], first, rest[:, :2], *rest[:, 2:].unbind(1)])[0], expected)
    assert_same(read(model, list(tokens.unbind(1)))[0], model(tokens, n_latents=12))


@pytest.mark.parametrize("attention", ATTENTION, ids=str)
def test_a_carried_state_carries_gradients(attention):
    model = perceiver(attention=attention)
    tokens = tokens_of(2, 9)
    gradients = []
    for logits in (model(tokens, n_latents=6), read(model, [tokens[:, :7], *tokens[:, 7:].unbind(1)])[0]):
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.double)
        gradients.append(torch.autograd.grad((logits * weights).sum(), list(model.parameters())))
    for found, expected in zip(*gradients, strict=True):
        assert_same(found, expected)


def test_every_input_reaches_every_latent():
    model = perceiver()
    x = model.embedding(tokens_of(1, 12)).detach().requires_grad_()
    z = model.stack.blocks[0].last(x, 4, None, None)
    for n in range(4):
        (gradient,) = torch.autograd.grad(z[0, n].sum(), x, retain_graph=True)
        reached = (gradient[0] != 0).any(-1)
        assert reached.tolist() == [t <= 8 + n for t in range(12)]


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("attention", ATTENTION, ids=str)
@torch.no_grad()
def test_padding_anywhere_leaves_each_row_as_if_alone(attention, positions):
    model = perceiver(attention=attention, positions=positions)
    padding = torch.zeros(4, 11, dtype=torch.bool)
    padding[1, :5], padding[2, 8:], padding[3, [0, 2, 3, 5, 6, 7, 8, 10]] = True, True, True
    tokens, more = tokens_of(4, 11), tokens_of(4, 2, seed=3)
    logits = model(tokens, key_padding_mask=padding)
    first, state = model.prefill(tokens, model.init_state(4), key_padding_mask=padding)
    unequal = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]], dtype=torch.bool)
    second, state = model.prefill(more, state, key_padding_mask=unequal)
    third, state = model.step(tokens[:, 0], state)
    for row in range(4):
        alone = tokens[row][~padding[row]].unsqueeze(0)
        n = min(4, alone.shape[1])
        assert_same(logits[row, 4 - n :], model(alone)[0])
        assert_same(first[row, 4 - n :], model(alone)[0])
        rest = more[row][~unequal[row]].unsqueeze(0)
        whole = torch.cat([alone, rest, tokens[row : row + 1, :1]], dim=1)
        expected = model(whole, n_latents=n + rest.shape[1] + 1)[0]
        assert_same(second[row, 2 - rest.shape[1] :], expected[n:-1])
        assert_same(third[row], expected[-1])
    assert state.position.tolist() == [14, 8, 10, 4]


def test_a_call_with_nothing_but_padding_begins_no_row():
    model = perceiver()
    ids, nothing = tokens_of(2, 12), torch.ones(2, 3, dtype=torch.bool)
    expected, _ = model.prefill(ids, model.init_state(2))
    _, state = model.prefill(ids[:, :3], model.init_state(2), key_padding_mask=nothing)
    found, _ = model.prefill(ids, state)
    assert_same(found, expected)
    nothing[0] = False
    _, state = model.prefill(ids[:, :3], model.init_state(2), key_padding_mask=nothing)
    with pytest.raises(ValueError, match="state has read no token in row 1, but some in others"):
        model.prefill(ids, state)


@pytest.mark.parametrize("padded", [False, True])
def test_the_loss_is_that_of_the_last_positions(padded):
    model = perceiver()
    tokens, targets = tokens_of(3, 9), tokens_of(3, 9, seed=2)
    targets[0, 7] = IGNORED
    padding = torch.zeros(3, 9, dtype=torch.bool)
    if padded:
        padding[1, 5:], padding[2, 2:] = True, True
    rows = [
        (model(ids[~mask].unsqueeze(0))[0], y[~mask][-4:])
        for ids, y, mask in zip(tokens, targets, padding, strict=True)
    ]
    expected = nn.functional.cross_entropy(*map(torch.cat, zip(*rows, strict=True)))
    loss = model.loss(tokens, targets, key_padding_mask=padding if padded else None)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_prefix_dropout_hides_prefix_only_and_in_training_only():
    model = perceiver(prefix_dropout=0.9)
    tokens = tokens_of(2, 12)
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    torch.manual_seed(0)
    assert not torch.allclose(model(tokens), model(tokens))
    assert torch.equal(model(tokens, n_latents=12), model(tokens, n_latents=12))


@pytest.mark.parametrize("attention", ATTENTION, ids=str)
def test_it_generates_what_forward_predicts_for_prompts_of_unequal_length(attention):
    model = perceiver(attention=attention, positions="rotary", start_token=True)
    prompts = [[3, 1, 4, 1, 5, 2, 6], [6], [2, 6, 5, 3]]
    rows = [row.tolist() for row in generate(model, prompts, 8, temperature=0)]
    for prompt, row in zip(prompts, rows, strict=True):
        tokens, latents = [VOCAB, *prompt], min(4, len(prompt) + 1)
        for n, token in enumerate(row):
            logits = model(torch.tensor([tokens]), n_latents=latents + n)
            assert token == int(logits[0, -1].argmax())
            tokens.append(token)


def test_the_state_is_a_value_and_only_the_inputs_cache_grows_under_linear_latents(tmp_path):
    model = perceiver(attention=["softmax", "linear", "linear"])
    _, state = model.prefill(tokens_of(2, 9), model.init_state(2))
    before = {name: x.clone() for name, x in states.leaves(state).items()}
    _, after = model.step(tokens_of(2), state)
    assert all(torch.equal(x, before[name]) for name, x in states.leaves(state).items())
    assert states.nbytes(after.layers[1:]) == states.nbytes(state.layers[1:])
    assert states.nbytes(after.layers[:1]) > states.nbytes(state.layers[:1])
    states.save(state, tmp_path / "state")
    loaded = states.load(tmp_path / "state", like=model.init_state(2))
    assert torch.equal(model.step(tokens_of(2), loaded)[0], model.step(tokens_of(2), state)[0])


@pytest.mark.compilers
def test_it_compiles_whole():
    model = perceiver(n_layers=2, positions="rotary")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(compiled(tokens_of(2, 9)), model(tokens_of(2, 9)))


@pytest.mark.slow
def test_it_learns_to_copy_from_the_prefix():
    torch.manual_seed(0)
    fields = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_latents": 6, "max_length": 16}
    model = PerceiverAR(PerceiverARConfig(VOCAB, **fields))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(0)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        half = torch.randint(VOCAB, (64, 6), generator=generator)
        rows = torch.cat([half, half], dim=1)
        return rows[:, :-1], rows[:, 1:]

    for _ in range(150):
        optimizer.zero_grad()
        model.loss(*batch()).backward()
        optimizer.step()
    assert model.loss(*batch()).item() < 0.1  # chance is log 7 = 1.95


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: perceiver(attention="linear"), ValueError, r"attention begins with 'linear', but must begin with 'softmax'.*\['softmax', 'linear'\]"),
        (lambda: perceiver(attention_options={"softmax": {"conv": 3}}), ValueError, "conv of the first block is 3, but must be None"),
        (lambda: perceiver()(tokens_of(2, 5), n_latents=0), ValueError, "n_latents is 0, but must be at least 1"),
        (lambda: perceiver()(tokens_of(1, 5), cu_seqlens=torch.tensor([0, 5], dtype=torch.int32)), UnsupportedError, "use key_padding_mask"),
        (lambda: perceiver()(tokens_of(2, 5), key_padding_mask=torch.zeros(2, 4).bool()), ValueError, r"key_padding_mask has shape \[2, 4\]"),
        (lambda: perceiver().loss(tokens_of(2, 5), tokens_of(2, 4)), ValueError, r"targets is .*\[2, 4\], but must be .*\[2, 5\]"),
        (lambda: perceiver()(tokens_of(2, 17)), ValueError, "length 17, but must have at most max_length = 16"),
        (lambda: perceiver().prefill(tokens_of(2, 5), perceiver().init_state(3)), ValueError, r"state.position is torch.int64 of shape \[3\]"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_in_one_sentence(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("length", [3, 9])
def test_training_counts_the_targets_that_it_predicts(length):
    model, targets = perceiver(), tokens_of(3, length)
    targets[0, -2:] = targets[2] = IGNORED
    padding = torch.zeros(3, length, dtype=torch.bool)
    padding[1, 1] = padding[1, -1] = True
    for mask, counts in ((None, [min(length, 4) - 2, min(length, 4), 0]), (padding, None)):
        found = model.predicted(targets, mask)
        kept = found != IGNORED
        assert torch.equal(found[kept], targets[kept])
        if counts:
            assert kept.sum(1).tolist() == counts
            assert (kept[:, :-4] == 0).all()
        inputs = tokens_of(3, length)
        assert_same(
            model.loss(inputs, found, key_padding_mask=mask),
            model.loss(inputs, targets, key_padding_mask=mask),
        )
    assert kept[1].nonzero().flatten().tolist() == ([0] if length == 3 else [4, 5, 6, 7])


def test_its_evaluation_does_not_depend_on_the_batch_size():
    class Rows:
        def eval_batches(self, batch_size):
            for rows in torch.arange(5).split(batch_size):
                targets = tokens_of(5, 9)
                targets[1, -4:] = targets[3, -2:] = IGNORED
                yield Batch(tokens_of(5, 9)[rows], targets[rows])

    model = perceiver()
    found = [evaluate(model, Rows(), TrainConfig(batch_size=n)) for n in (1, 2, 5)]
    (whole,) = Rows().eval_batches(5)
    assert found == pytest.approx([model.loss(whole.inputs, whole.targets).item()] * 3)


def test_no_latent_is_hidden_by_prefix_dropout():
    model, tokens = (
        small_model("perceiver_ar", n_latents=4, prefix_dropout=0.9).double(),
        torch.randint(7, (32, 4)),
    )
    expected = model.eval()(tokens)
    assert torch.equal(model.train()(tokens), expected)


def test_prefix_dropout_hides_its_share_of_the_prefix(monkeypatch):
    torch.manual_seed(0)
    model, hidden, last = (
        small_model("perceiver_ar", n_latents=4, prefix_dropout=0.25).train(),
        [],
        ReadingBlock.last,
    )
    monkeypatch.setattr(
        ReadingBlock, "last", lambda *args, **rest: hidden.append(rest["hidden"]) or last(*args, **rest)
    )
    model(torch.randint(7, (200, 16)))
    assert hidden[0][:, :-4].float().mean().item() == pytest.approx(0.25, rel=0.1)
    assert not hidden[0][:, -4:].any()
