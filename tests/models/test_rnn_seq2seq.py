"""Bahdanau's and Luong's encoder-decoders: one function in three verbs, and what their equations say."""

import warnings
from copy import deepcopy

import pytest
import torch
from adapters import Doubled
from small_models import small_model
from torch.nn import functional as F  # noqa: N812

from models.kit import assert_same, read
from unrolled.generation import translate
from unrolled.models import DeepLSTMNSeq2Seq, LSTMNSeq2Seq, LuongSeq2Seq, RNNSeq2Seq
from unrolled.ops.state import leaves, load, map_tensors, save, select

V, B, S, T = 7, 3, 5, 4
START = V
LOCAL = {"attention": "luong.LocalPredictiveAttention", "attention_options": {"window": 2}}
KINDS = [
    (RNNSeq2Seq, {}),
    (RNNSeq2Seq, {"readout_state": "current", "attention": "cosine", "readout_size": 3}),
    (RNNSeq2Seq, {"attention": "luong", "attention_options": {"score": "concat"}}),
    (LuongSeq2Seq, {}),
    (LuongSeq2Seq, {"n_layers": 1, **LOCAL}),
    (LuongSeq2Seq, {"attention": "luong.LocalMonotonicAttention", "source_vocab_size": 9}),
    (LuongSeq2Seq, {"attention": "hard", "n_layers": 3}),
    (LSTMNSeq2Seq, {}),
    (LSTMNSeq2Seq, {"attention": "fixed", "source_vocab_size": 9}),
    (DeepLSTMNSeq2Seq, {"source_vocab_size": 9}),
]
every = pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)


def make(kind, vocab_size=V, d_model=6, hidden_size=8, **options):
    torch.manual_seed(0)
    return kind(kind.config_type(vocab_size, d_model=d_model, hidden_size=hidden_size, **options))


def made(kind, options, dtype=torch.float64):
    """A small model, with weights large enough for everything to matter."""
    model = make(kind, **options).to(dtype).eval()
    for parameter in model.parameters():
        parameter.data = 0.5 * torch.randn_like(parameter)
    return model


def ids():
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randint(V, (B, n), generator=generator) for n in (S, T))
    target[:, 0] = START
    mask = torch.zeros(B, S, dtype=torch.bool)
    mask[0, [0, 3]] = mask[1, 4] = True
    return source, target, mask


@every
def test_every_way_to_read_a_target_is_equal(kind, options):
    model = made(kind, options)
    source, target, mask = ids()
    expected = model(source, target, key_padding_mask=mask)
    weights = list(model.parameters())
    gradients = torch.autograd.grad(
        expected.square().sum(), weights, allow_unused=True, materialize_grads=True
    )
    assert expected.shape == (B, T, V)
    for plan in ([1, 1, 1, 1], [2, 2], [1, 3], [0, 4]):
        first = model.init_state(source, key_padding_mask=mask)
        before = map_tensors(torch.clone, first)
        parts = [part[:, 0] if part.shape[1] == 1 else part for part in target.split(plan, 1)]
        found, _ = read(model, parts, first)
        assert_same(found, expected)
        assert all(map(torch.equal, leaves(first).values(), leaves(before).values()))
        again = torch.autograd.grad(found.square().sum(), weights, allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(again, gradients, rtol=1e-11, atol=1e-11)


@every
def test_padding_changes_nothing(kind, options):
    model = made(kind, options)
    source, target, mask = ids()
    expected = model(source, target, key_padding_mask=mask)
    other = source.masked_fill(mask, 2)
    assert torch.equal(model(other, target, key_padding_mask=mask), expected)
    for row in range(B):
        alone = model(source[row : row + 1, ~mask[row]], target[row : row + 1])
        assert_same(alone[0], expected[row])
    weights = model.attend(source, target, key_padding_mask=mask)
    assert weights.shape == (B, T, S)
    assert not weights.transpose(1, 2)[mask].any()
    assert ((weights.sum(-1) > 0) & (weights.sum(-1) < 1 + 1e-12)).all()


@every
def test_rows_of_a_state_are_selected_saved_and_loaded(kind, options, tmp_path):
    model = made(kind, options)
    source, target, mask = ids()
    _, state = model.prefill(target[:, :2], model.init_state(source, key_padding_mask=mask))
    expected, _ = model.prefill(target[:, 2:], state)
    rows = [2, 0, 0]
    found, _ = model.prefill(target[rows, 2:], select(state, rows))
    assert_same(found, expected[rows])
    save(state, tmp_path / "state.safetensors")
    loaded = load(tmp_path / "state.safetensors", like=model.init_state(source[:1]))
    assert torch.equal(model.prefill(target[:, 2:], loaded)[0], expected)


@every
def test_the_loss_shifts_the_targets_itself(kind, options):
    model = made(kind, options)
    source, target, mask = ids()
    targets = torch.cat([target[:, 1:], torch.full((B, 1), 3)], 1)
    targets[1, 2:] = -100
    found = model.loss(source, targets, key_padding_mask=mask)
    logits = model(source, target, key_padding_mask=mask)
    assert_same(found, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    nothing = model.loss(source, torch.full_like(targets, -100))
    assert float(nothing.detach()) == 0


def test_labels_are_smoothed_in_training_only():
    model = made(RNNSeq2Seq, {"label_smoothing": 0.1})
    source, target, _ = ids()
    targets = torch.cat([target[:, 1:], torch.full((B, 1), 3)], 1)
    logits = model(source, target).flatten(0, 1)
    assert_same(model.loss(source, targets), F.cross_entropy(logits, targets.flatten()))
    smoothed = F.cross_entropy(logits, targets.flatten(), label_smoothing=0.1)
    assert_same(model.train().loss(source, targets), smoothed)


@torch.no_grad()
@pytest.mark.parametrize("read", ["previous", "current"])
def test_bahdanaus_decoder_is_that_of_the_equations(read):
    model = made(RNNSeq2Seq, {"readout_state": read})
    source, target, _ = ids()
    E, cell, attention = model.target_embedding.weight, model.cell, model.attention

    def gru(cell, x, h):
        n = cell.hidden_size
        (W_r, W_z, W_n), (b_r, b_z, b_n) = cell.input_proj.weight.split(n), cell.input_proj.bias.split(n)
        U_r, U_z, U_n = cell.recurrent.split(n)
        r, z = torch.sigmoid(W_r @ x + U_r @ h + b_r), torch.sigmoid(W_z @ x + U_z @ h + b_z)
        return (1 - z) * h + z * torch.tanh(W_n @ x + U_n @ (r * h) + b_n)

    logits = model(source, target)
    for b in range(B):
        xs, h = [model.source_embedding.weight[i] for i in source[b]], torch.zeros(8, dtype=torch.float64)
        forth, back, g = [], [], h
        for x in xs:
            forth.append(h := gru(model.encoder.left_to_right, x, h))
        for x in reversed(xs):
            back.insert(0, g := gru(model.encoder.right_to_left, x, g))
        memory = [torch.cat(pair) for pair in zip(forth, back, strict=True)]
        s = torch.tanh(model.first.weight @ back[0] + model.first.bias)
        for t, token in enumerate(target[b]):
            query = attention.query_proj(s)
            e = torch.stack([attention.v @ torch.tanh(query + attention.key_proj(m)) for m in memory])
            c = sum(w * m for w, m in zip(e.softmax(0), memory, strict=True))
            after = gru(cell, torch.cat([E[token], c]), s)
            shown = s if read == "previous" else after
            pairs = model.readout.weight @ torch.cat([shown, E[token], c]) + model.readout.bias
            maxout = torch.stack([max(pairs[i], pairs[i + 1]) for i in range(0, len(pairs), 2)])
            expected = model.out.weight @ maxout + model.out.bias
            torch.testing.assert_close(logits[b, t], expected, rtol=1e-11, atol=1e-12)
            s = after


@torch.no_grad()
def test_luongs_decoder_is_that_of_the_equations():
    model = made(LuongSeq2Seq, {})
    source, target, _ = ids()
    memory, (h, c) = model.encoder(model.source_embedding(source))
    h, c = list(h), list(c)
    v = torch.zeros(B, 8, dtype=torch.float64)
    logits = model(source, target)
    for t in range(T):
        x = torch.cat([model.target_embedding(target[:, t]), v], -1)
        for i, cell in enumerate(model.cells):
            h[i], c[i] = cell(x, (h[i], c[i]))
            x = h[i]
        a = torch.einsum("bn,nm,bsm->bs", x, model.attention.score.key_proj.weight, memory).softmax(-1)
        v = torch.tanh(model.combine(torch.cat([torch.einsum("bs,bsm->bm", a, memory), x], -1)))
        torch.testing.assert_close(logits[:, t], model.out(v), rtol=1e-11, atol=1e-12)


@every
def test_a_beam_of_one_is_greedy_decoding(kind, options):
    model = made(kind, options)
    sources = [[1, 2, 3], [4], [5, 6, 1, 2, 3]]
    translations = translate(model, sources, beam_size=1, stop=6, max_new_tokens=5)
    for source, found in zip(sources, translations, strict=True):
        token, state, said = torch.tensor([START]), model.init_state(torch.tensor([source])), []
        while len(said) < 5 and 6 not in said:
            logits, state = model.step(token, state)
            said.append(int(token := logits.argmax(-1)))
        assert found.tolist() == said


@pytest.mark.parametrize(("kind", "part"), [(RNNSeq2Seq, "cell.input_proj"), (LuongSeq2Seq, "combine")])
def test_an_adapter_counts(kind, part):
    model, (source, target, mask) = made(kind, {}), ids()
    doubled = deepcopy(model)
    for parameter in doubled.get_submodule(part).parameters():
        parameter.data *= 2
    model.set_submodule(part, Doubled(model.get_submodule(part)))
    expected = doubled(source, target, key_padding_mask=mask)
    torch.testing.assert_close(model(source, target, key_padding_mask=mask), expected)
    assert not torch.allclose(expected, made(kind, {})(source, target, key_padding_mask=mask))


@pytest.mark.parametrize("kind", [RNNSeq2Seq, LuongSeq2Seq])
def test_linear_layers_may_be_replaced_by_quantised_ones(kind):
    model, (source, target, _) = made(kind, {}, torch.float32), ids()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a function that leaves torch one day
        packed = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    torch.testing.assert_close(packed(source, target), model(source, target), atol=0.2, rtol=0.1)


def test_only_reading_a_source_draws_new_seeds_in_training():
    model = make(LuongSeq2Seq, attention="hard").train()
    source, target = ids()[:2]
    state = model.init_state(source)
    model.prefill(target, state)
    model.step(target[:, 0], state)
    assert dict(model.named_buffers())["attention.begun"] == 1


def test_weights_begin_as_in_the_paper():
    model = make(RNNSeq2Seq, 50, 64, 128)
    for square in model.cell.recurrent.split(128):
        torch.testing.assert_close(square @ square.T, torch.eye(128), rtol=0, atol=1e-5)
    for weight in (model.cell.input_proj.weight, model.readout.weight, model.target_embedding.weight):
        assert abs(float(weight.detach().std()) / 0.01 - 1) < 0.05
    assert abs(float(model.attention.key_proj.weight.detach().std()) / 0.001 - 1) < 0.05
    assert not model.attention.v.any()
    luong = make(LuongSeq2Seq, 50, 64, 128)
    assert all(0.09 < float(p.detach().abs().max()) <= 0.1 for p in luong.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "options"), KINDS[::3], ids=str)
def test_half_precision_is_finite(kind, options, dtype):
    model = made(kind, options, dtype)
    source, target, mask = ids()
    logits = model(source, target, key_padding_mask=mask)
    assert logits.dtype == dtype
    assert model.loss(source, target.clamp(max=V - 1), key_padding_mask=mask).isfinite()
    exact = made(kind, options)
    exact.load_state_dict(model.state_dict())
    expected = exact(source, target, key_padding_mask=mask)
    assert float((logits - expected).detach().abs().max() / expected.detach().abs().max()) < 0.05
    with torch.autocast("cpu", dtype=torch.bfloat16):
        single = made(kind, options, torch.float32)
        single.loss(source, target.clamp(max=V - 1), key_padding_mask=mask).backward()
    assert all(p.grad.isfinite().all() for p in single.parameters() if p.grad is not None)


@every
@pytest.mark.parametrize("narrow_first", [False, True])
@torch.no_grad()
def test_a_state_continues_with_and_without_autocast(kind, options, narrow_first):
    model = made(kind, options, torch.float32)
    source, target, mask = ids()
    expected = model(source, target, key_padding_mask=mask)
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow_first):
        first, state = model.prefill(target[:, :2], model.init_state(source, key_padding_mask=mask))
    with torch.autocast("cpu", torch.bfloat16, enabled=not narrow_first):
        last, _ = model.prefill(target[:, 2:], state)
    found = torch.cat([first, last], 1).float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05 * float(expected.abs().max()))


@every
def test_empty_batches_and_targets(kind, options):
    model = made(kind, options)
    source, target, _ = ids()
    assert model(source, target[:, :0]).shape == (B, 0, V)
    assert model(source[:0], target[:0]).shape == (0, T, V)
    assert float(model.loss(source, target[:, :0]).detach()) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, s, t, k: m(s[:, :0], t), "source has shape .*, but must have at least one token"),
        (
            lambda m, s, t, k: m(s, t, key_padding_mask=s >= 0),
            "row 0 of source is nothing but padding, but must",
        ),
        (lambda m, s, t, k: m(s + V, t), r"source holds ids from .* but they must be in \[0, 7\)"),
        (lambda m, s, t, k: m(s, t + 1), r"target holds ids from .* but they must be in \[0, 8\)"),
        (lambda m, s, t, k: m(s[:2], t), "target has 3 rows, but must have 2, as source has"),
        (lambda m, s, t, k: m.attend(s[:2], t), "target has 3 rows, but must have 2, as source has"),
        (lambda m, s, t, k: m.loss(s, t), r"targets holds values from .* must be in \[0, 7\)"),
        (lambda m, s, t, k: m.loss(s, t[:, 0]), r"targets has shape \[3\], but must be \[3, T\]"),
        (lambda m, s, t, k: m(s, t, key_padding_mask=k[:, 1:]), "key_padding_mask has shape"),
        (lambda m, s, t, k: m.step(t, m.init_state(s)), "token is torch.int64 of shape"),
        (
            lambda m, s, t, k: m.step(t[:2, 0], m.init_state(s)),
            r"state.\w is .*\[3, .* must be torch.float64 \[2, ",
        ),
        (lambda m, s, t, k: m.prefill(t, ()), "state is a tuple, but must be a .*State of"),
    ],
)
@pytest.mark.parametrize("kind", [RNNSeq2Seq, LuongSeq2Seq])
def test_wrong_input_is_named(kind, call, message):
    with pytest.raises(ValueError, match=message):
        call(made(kind, {}), *ids())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"label_smoothing": -0.1}, "label_smoothing is -0.1"),
        ({"attention": "linear"}, "attention is 'linear', but must be one of bahdanau"),
        ({"attention_options": {"scores": 1}}, "attention_options of 'bahdanau' does not fit"),
    ],
)
def test_wrong_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        make(RNNSeq2Seq, **fields)


def lstmn_steps(cell, xs, tape, besides=None):
    """LSTMN as its equations are written, from a tape of pairs (h, c) `[2N]`: what the steps append to it."""
    N, h = cell.hidden_size, torch.zeros_like(cell.recurrent[0])
    tape = list(tape)
    for x in xs:
        x = x(tape[-1][:N]) if callable(x) else x
        gates, query = cell.input_proj(x).split([4 * N, cell.score_size])
        keys = torch.stack([cell.key_proj @ pair[:N] for pair in tape])
        weights = ((keys + query + cell.attended_proj @ h).tanh() @ cell.score).softmax(0)
        h, c = (weights @ torch.stack(tape)).split(N)
        i, f, g, o = (gates + cell.recurrent @ h).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh() + (0 if besides is None else besides(x))
        tape.append(torch.cat([o.sigmoid() * c.tanh(), c]))
    return tape


def test_shallow_and_deep_fusion_are_their_equations():
    source, target, _ = ids()
    zeros = torch.zeros(16, dtype=torch.float64)
    shallow = made(LSTMNSeq2Seq, {})
    read = torch.stack(lstmn_steps(shallow.encoder, shallow.source_embedding(source[0]), [zeros])[1:])

    def joined(y):
        def with_context(s):
            state = shallow.attention.read(read[None, :, :8])
            return torch.cat([y, shallow.attention.recall(s[None, None], state)[0][0, 0]])

        return with_context

    xs = [joined(y) for y in shallow.target_embedding(target[0])]
    expected = torch.stack(lstmn_steps(shallow.cell, xs, [read[-1]])[1:])[:, :8]
    torch.testing.assert_close(shallow(source, target)[0], shallow.out(expected))

    deep = made(DeepLSTMNSeq2Seq, {})
    read = torch.stack(lstmn_steps(deep.encoder, deep.source_embedding(source[0]), [zeros])[1:])
    other, gamma = deep.decoder, torch.zeros(8, dtype=torch.float64)

    def taken_over(y):
        nonlocal gamma
        gate, query = other.input_proj(y).split([8, 8])
        keys = read[:, :8] @ other.key_proj.T
        p = ((keys + query + other.read_proj @ gamma).tanh() @ other.score).softmax(0)
        gamma, alpha = (p @ read).split(8)
        return (gate + other.recurrent @ gamma).sigmoid() * alpha

    expected = lstmn_steps(other.cell, deep.target_embedding(target[0]), [read[-1]], taken_over)[1:]
    torch.testing.assert_close(deep(source, target)[0], deep.out(torch.stack(expected)[:, :8]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"), [(RNNSeq2Seq, {}), (LuongSeq2Seq, {"n_layers": 1}), (DeepLSTMNSeq2Seq, {})]
)
def test_it_learns_to_reverse(kind, options):
    """Memorise 16 sentences of ids 0-6 that end in 7."""
    model = make(kind, 8, 24, 48, **options).train()
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(7, (16, 4), generator=generator)
    targets = torch.cat([source.flip(1), torch.full((16, 1), 7)], 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(150):
        optimizer.zero_grad()
        loss = model.loss(source, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    token, state, said = torch.full((16,), 8), model.init_state(source), []
    for _ in range(5):
        logits, state = model.step(token, state)
        said.append(token := logits.argmax(-1))
    assert (torch.stack(said, 1) == targets).float().mean() > 0.99


def test_the_readout_is_half_as_wide_as_the_states_by_default():
    assert small_model("rnn_seq2seq", hidden_size=8).out.in_features == 4
    assert small_model("rnn_seq2seq", hidden_size=1).out.in_features == 1
    assert small_model("rnn_seq2seq", readout_size=3).out.in_features == 3
